//! Probes, metrics and the reload that control forces (DESIGN §3).

use std::sync::Arc;
use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use http::{HeaderValue, StatusCode, header};
use obol_auth::{Expected, ServiceTokens};
use obol_drain::Drain;
use obol_model::{Clock, Kind, WorkspaceId};
use obol_snapshot::Publications;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::compiled::CompileWorkspace;
use crate::failure::{Refusal, json};
use crate::gateway::GatewayParts;
use crate::service;

/// Bounds of the body of a reload, which has one line.
const MAX_BODY: usize = 16 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks Redis for a sign of life, within its own deadline.
pub type Redis = Arc<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

pub(crate) struct Ops {
    publications: Arc<Publications<CompileWorkspace>>,
    drain: Drain,
    redis: Redis,
    service: Option<Arc<ServiceTokens>>,
    clock: Arc<dyn Clock>,
    metrics: Arc<dyn Fn() -> String + Send + Sync>,
}

impl Ops {
    pub(crate) fn new(parts: &GatewayParts) -> Self {
        Self {
            publications: parts.publications.clone(),
            drain: parts.drain.clone(),
            redis: parts.redis.clone(),
            service: parts.service.clone(),
            clock: parts.clock.clone(),
            metrics: parts.metrics.clone(),
        }
    }
}

/// `GET /healthz`: the process lives. No I/O, so that nothing but the process itself can fail it.
pub(crate) async fn healthz() -> Response {
    json(Response::builder(), &serde_json::json!({"status": "ok"}))
}

/// `GET /readyz`: at least one publication, a Redis that answers in time, and no drain.
pub(crate) async fn readyz(State(ops): State<Arc<Ops>>) -> Response {
    let reason = if ops.drain.is_draining() {
        Some("draining")
    } else if !(ops.redis)().await {
        Some("redis")
    } else if ops.publications.loaded() == 0 {
        Some("no_snapshot")
    } else {
        None
    };
    match reason {
        None => json(Response::builder(), &serde_json::json!({"status": "ready"})),
        Some(reason) => json(
            Response::builder().status(StatusCode::SERVICE_UNAVAILABLE),
            &serde_json::json!({"status": "unready", "reason": reason}),
        ),
    }
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(ops): State<Arc<Ops>>) -> Response {
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, content_type)], (ops.metrics)()).into_response()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReloadRequest {
    #[serde(default)]
    workspace_id: Option<WorkspaceId>,
    #[serde(default)]
    all: bool,
}

#[derive(Serialize)]
struct Reloaded {
    workspace_id: WorkspaceId,
    /// `null` when the workspace is not published any more.
    revision: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// `POST /internal/reload` with a service JWT of control.
pub(crate) async fn reload(State(ops): State<Arc<Ops>>, request: Request) -> Response {
    match ops.reload(request).await {
        Ok(reloaded) => json(Response::builder(), &serde_json::json!({"reloaded": reloaded})),
        Err(refusal) => refusal.into_response(),
    }
}

impl Ops {
    async fn reload(&self, request: Request) -> Result<Vec<Reloaded>, Refusal> {
        let tokens = self.service.as_ref().ok_or_else(|| {
            let message = "reload is off: set OBOL_SERVICE_JWT_SECRET or OBOL_SERVICE_JWT_KEY_FILE";
            Refusal::new(Kind::NotFound, "reload_off", message)
        })?;
        // Nothing of the body is read for those who may not call.
        service::caller(tokens, &Expected::RELOAD, request.headers(), &*self.clock).await?;
        let body = timeout(BODY_TIMEOUT, to_bytes(request.into_body(), MAX_BODY)).await;
        let body = body.ok().and_then(Result::ok).unwrap_or_default();
        let request: ReloadRequest = serde_json::from_slice(&body).map_err(|e| {
            let message = format!("send `{{\"workspace_id\":\"…\"}}` or `{{\"all\":true}}`: {e}");
            Refusal::new(Kind::InvalidRequest, "bad_reload", message)
        })?;
        let results = match (request.workspace_id, request.all) {
            (Some(ws), false) => {
                let result = self.publications.reload(&ws).await;
                vec![(ws, result)]
            }
            (None, true) => self.publications.reload_all().await.map_err(|e| {
                tracing::warn!(error = %e, "reload of all failed");
                Refusal::new(
                    Kind::Unavailable,
                    "store_unavailable",
                    "the publications cannot be listed right now",
                )
            })?,
            _ => {
                let message = "name exactly one of `workspace_id` and `all`";
                return Err(Refusal::new(Kind::InvalidRequest, "bad_reload", message));
            }
        };
        Ok(results
            .into_iter()
            .map(|(workspace_id, result)| match result {
                Ok(revision) => {
                    Reloaded { workspace_id, revision: revision.map(|r| r.to_string()), error: None }
                }
                Err(e) => Reloaded { workspace_id, revision: None, error: Some(e.to_string()) },
            })
            .collect())
    }
}

/// Every path of the public listener that is no route.
pub(crate) async fn not_found() -> Response {
    let message =
        "there is nothing here: MCP is at /mcp, the LLM API at /v1; metrics are on OBOL_ADMIN_LISTEN";
    Refusal::new(Kind::NotFound, "no_such_path", message).into_response()
}

/// Every path of the operations listener that is no route.
pub(crate) async fn not_for_clients() -> Response {
    let message =
        "this is the operations listener (OBOL_ADMIN_LISTEN); clients use the public one (OBOL_LISTEN)";
    Refusal::new(Kind::NotFound, "no_such_path", message).into_response()
}
