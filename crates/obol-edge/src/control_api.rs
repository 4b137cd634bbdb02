//! What control answers replicas that miss something in Redis (DESIGN §7.3, §8.1). It is read-only, and served on a listener
//! of its own (`OBOL_CONTROL_LISTEN`).

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use http::HeaderMap;
use obol_auth::{Expected, ServiceTokens};
use obol_model::snapshot::Documents;
use obol_model::{Clock, KeyHash, Kind, WorkspaceId};
use tokio::time::timeout;

use crate::failure::{Refusal, json};
use crate::{ops, service};

/// The bound of one answer. A replica waits a little longer, and a client waits for the replica.
const ANSWER: Duration = Duration::from_millis(1200);

/// What control knows. Absent and could not ask are different answers.
#[async_trait]
pub trait ControlKnowledge: fmt::Debug + Send + Sync + 'static {
    /// The documents of what is published now.
    ///
    /// # Errors
    /// Why it could not be asked, for the log.
    async fn publication(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, String>;

    /// The record of a key that is not revoked, as it stands in Redis.
    ///
    /// # Errors
    /// Why it could not be asked, for the log.
    async fn key(&self, hash: &KeyHash) -> Result<Option<String>, String>;
}

/// Control's internal API.
#[derive(Clone)]
pub struct ControlApi {
    /// What it tells.
    pub knowledge: Arc<dyn ControlKnowledge>,
    /// Who may ask.
    pub tokens: Arc<ServiceTokens>,
    /// Judges their age.
    pub clock: Arc<dyn Clock>,
}

impl fmt::Debug for ControlApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlApi").field("knowledge", &self.knowledge).finish_non_exhaustive()
    }
}

impl ControlApi {
    /// The routes.
    pub fn router(self) -> Router {
        Router::new()
            .route("/internal/v1/workspaces/{id}/publication", get(publication))
            .route("/internal/v1/keys/{hash}", get(key))
            .route("/healthz", get(ops::healthz))
            .fallback(no_such_path)
            .with_state(self)
    }

    /// Admits the caller, and asks within bounds.
    async fn ask<T>(
        &self,
        headers: &HeaderMap,
        question: impl Future<Output = Result<Option<T>, String>>,
        absent: (&'static str, &'static str),
    ) -> Result<T, Refusal> {
        let answer = async {
            service::caller(&self.tokens, &Expected::CONTROL_API, headers, &*self.clock).await?;
            question.await.map_err(|reason| {
                tracing::warn!(reason, "a replica could not be answered");
                unavailable()
            })
        };
        let answer = timeout(ANSWER, answer).await.unwrap_or_else(|_| {
            tracing::warn!(reason = "no answer in time", "a replica could not be answered");
            Err(unavailable())
        })?;
        let (code, message) = absent;
        answer.ok_or_else(|| Refusal::new(Kind::NotFound, code, message))
    }
}

fn unavailable() -> Refusal {
    Refusal::new(Kind::Unavailable, "state_unavailable", "control cannot read its state right now")
}

/// A part of a path. What is no text names nothing, as what is no id does.
type Part = Result<Path<String>, PathRejection>;

fn parsed<T: FromStr>(part: Part) -> Option<T> {
    part.ok()?.parse().ok()
}

async fn publication(State(api): State<ControlApi>, id: Part, headers: HeaderMap) -> Response {
    let found = async {
        let Some(id) = parsed::<WorkspaceId>(id) else { return Ok(None) };
        let Some(documents) = api.knowledge.publication(&id).await? else { return Ok(None) };
        let text = |bytes| String::from_utf8(bytes).map_err(|_| "a document is no text".to_owned());
        let Documents { workspace, policy, fingerprint } = documents;
        Ok(Some((text(workspace)?, text(policy)?, text(fingerprint)?)))
    };
    let absent = ("no_such_workspace", "there is no publication of such a workspace");
    match api.ask(&headers, found, absent).await {
        Ok((workspace, policy, fingerprint)) => json(
            Response::builder(),
            &serde_json::json!({"workspace": workspace, "policy": policy, "fingerprint": fingerprint}),
        ),
        Err(refusal) => refusal.into_response(),
    }
}

async fn key(State(api): State<ControlApi>, hash: Part, headers: HeaderMap) -> Response {
    let found = async {
        let Some(hash) = parsed::<KeyHash>(hash) else { return Ok(None) };
        api.knowledge.key(&hash).await
    };
    match api.ask(&headers, found, ("no_such_key", "there is no such key")).await {
        Ok(key) => json(Response::builder(), &serde_json::json!({"key": key})),
        Err(refusal) => refusal.into_response(),
    }
}

async fn no_such_path() -> Response {
    let message = "this is control's internal API, for replicas (OBOL_CONTROL_URL)";
    Refusal::new(Kind::NotFound, "no_such_path", message).into_response()
}
