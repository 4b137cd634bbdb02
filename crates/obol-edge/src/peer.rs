//! What replicas tell each other, and the route that takes it (DESIGN §5). Served on the peer listener alone.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use http::{HeaderValue, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use obol_mcp::catalogue::Change;
use obol_mcp::pool::ListKind;
use obol_model::{ConnectionName, ReplicaId, SessionId, WorkspaceId};
use obol_peer::{Ack, Answer, Handler, Inbox, Message, Refused};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::mcp::Mcp;

/// How long the body of a message may take.
const BODY_WITHIN: Duration = Duration::from_secs(10);

const SESSION_ENDED: &str = "session_ended";
const LIST_CHANGED: &str = "list_changed";

/// A session was deleted: whatever a replica holds of it ends now. The one place where the whole id leaves a replica, over
/// a channel that knows its other end.
#[derive(Serialize, Deserialize)]
struct SessionEnded {
    workspace_id: WorkspaceId,
    session_id: SessionId,
}

/// A list that replicas share was replaced by another one.
#[derive(Serialize, Deserialize)]
struct ListChanged {
    workspace_id: WorkspaceId,
    connection: ConnectionName,
    /// The member of a list's result, such as `tools`.
    list: String,
}

pub(crate) fn session_ended(workspace: &WorkspaceId, id: SessionId) -> serde_json::Result<Message> {
    Message::new(SESSION_ENDED, &SessionEnded { workspace_id: workspace.clone(), session_id: id })
}

pub(crate) fn list_changed(change: &Change) -> serde_json::Result<Message> {
    let body = ListChanged {
        workspace_id: change.workspace.clone(),
        connection: change.connection.clone(),
        list: change.kind.member().to_owned(),
    };
    Message::new(LIST_CHANGED, &body)
}

/// Does what other replicas say.
pub(crate) struct PeerHandler(pub(crate) Arc<Mcp>);

#[async_trait]
impl Handler for PeerHandler {
    async fn handle(&self, from: &ReplicaId, kind: &str, body: &RawValue) -> Result<Ack, Refused> {
        match kind {
            SESSION_ENDED => {
                let SessionEnded { workspace_id, session_id } = read(body)?;
                tracing::debug!(peer = %from, session_last4 = session_id.last4(), "session ended elsewhere");
                self.0.end_session(&workspace_id, session_id);
                Ok(Ack::Done)
            }
            LIST_CHANGED => {
                let ListChanged { workspace_id, connection, list } = read(body)?;
                let kind = ListKind::ALL.into_iter().find(|kind| kind.member() == list);
                let known =
                    self.0.list_changed_elsewhere(&workspace_id, &connection, kind.ok_or(Refused::BadBody)?);
                Ok(if known { Ack::Done } else { Ack::NothingToDo })
            }
            _ => Err(Refused::UnknownKind),
        }
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a RawValue) -> Result<T, Refused> {
    // The parser's own words could repeat a session id.
    serde_json::from_str(body.get()).map_err(|_| Refused::BadBody)
}

/// The routes of `OBOL_PEER_LISTEN`.
pub(crate) fn routes(inbox: Arc<Inbox>) -> Router {
    Router::new()
        .route(obol_peer::PATH, post(receive))
        .with_state(inbox)
        .fallback(async || StatusCode::NOT_FOUND)
}

async fn receive(State(inbox): State<Arc<Inbox>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let mut values = head.headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().and_then(|value| value.to_str().ok()).filter(|_| values.next().is_none());
    let answer = match inbox.admit(value) {
        Ok(admitted) => match whole(body, inbox.max_body()).await {
            Ok(body) => inbox.deliver(admitted, &body).await,
            Err(too_large) => inbox.unreadable(too_large),
        },
        Err(answer) => answer,
    };
    respond(answer)
}

/// The body; the error says whether it is too large, else it did not come.
async fn whole(body: Body, limit: usize) -> Result<Bytes, bool> {
    match tokio::time::timeout(BODY_WITHIN, Limited::new(body, limit).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) => Err(e.is::<LengthLimitError>()),
        Err(_) => Err(false),
    }
}

fn respond(answer: Answer) -> Response {
    let challenge = answer.status == StatusCode::UNAUTHORIZED;
    let mut response = (answer.status, answer.body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if challenge {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"obol-peer\""));
    }
    response
}
