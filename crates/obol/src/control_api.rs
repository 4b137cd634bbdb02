//! Control's internal API: what its store answers replicas.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use obol_auth::{ServiceTokens, UsedTokens, party};
use obol_control::ControlStore;
use obol_drain::{Class, Drain};
use obol_edge::{ControlApi, ControlKnowledge, ServeOptions, serve};
use obol_model::snapshot::Documents;
use obol_model::{Clock, KeyHash, WorkspaceId};
use obol_redis::Redis;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::config::ServiceJwt;
use crate::failure::Failure;
use crate::{out, service};

/// Replicas keep few connections, and each is idle for the most part.
const CONNECTIONS: usize = 256;
/// How long one of them may take nothing.
const STALL_TIMEOUT: Duration = Duration::from_mins(1);

/// A listener that is bound, and nobody answers yet.
pub(crate) struct Bound {
    listener: TcpListener,
    tokens: Arc<ServiceTokens>,
}

/// Binds the listener, so that a taken port fails the start.
///
/// # Errors
/// When it cannot be bound.
pub(crate) async fn bind(
    listen: SocketAddr,
    key: Option<&ServiceJwt>,
    redis: &Redis,
) -> Result<Option<Bound>, Failure> {
    // The configuration has seen to it that there is a key.
    let used = UsedTokens::new(redis.clone());
    let Some(tokens) = service::tokens(key, party::CONTROL, Some(used))? else { return Ok(None) };
    let listener = TcpListener::bind(listen)
        .await
        .map_err(|e| Failure::runtime(format!("cannot listen on {listen} (OBOL_CONTROL_LISTEN): {e}")))?;
    Ok(Some(Bound { listener, tokens }))
}

/// Answers until `stop`, and prints the address.
///
/// # Errors
/// When stdout is closed.
pub(crate) fn start(
    bound: Bound,
    store: Arc<dyn ControlStore>,
    clock: Arc<dyn Clock>,
    drain: &Drain,
    stop: CancellationToken,
) -> Result<(), Failure> {
    let Bound { listener, tokens } = bound;
    let address = listener.local_addr()?;
    let router = ControlApi { knowledge: Arc::new(Knowledge(store)), tokens, clock }.router();
    let options =
        ServeOptions { class: Class::Request, max_connections: CONNECTIONS, stall_timeout: STALL_TIMEOUT };
    let tasks = drain.tasks().clone();
    let serving = serve(listener, router, tasks.clone(), options, stop);
    tasks.spawn(Class::Background, "control listener", serving);
    Ok(out::line(format_args!("listening control http://{address}"))?)
}

/// Straight from the store: an answer may be late, and never stale.
#[derive(Debug)]
struct Knowledge(Arc<dyn ControlStore>);

#[async_trait]
impl ControlKnowledge for Knowledge {
    async fn publication(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, String> {
        let head = self.0.head(workspace).await.map_err(|e| e.to_string())?;
        let Some(head) = head.filter(|head| head.published) else { return Ok(None) };
        let documents = self.0.documents(workspace, head.revision).await.map_err(|e| e.to_string())?;
        documents.map(Some).ok_or_else(|| format!("the documents of {} are missing", head.revision))
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<String>, String> {
        let record = self.0.key(hash).await.map_err(|e| e.to_string())?;
        let live = record.filter(obol_control::KeyRecord::is_live);
        live.map(|record| serde_json::to_string(&record.key).map_err(|e| e.to_string())).transpose()
    }
}
