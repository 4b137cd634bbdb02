//! The MCP endpoint (DESIGN §9): who and which session, then one method at a time.

mod answer;
mod calls;
mod elsewhere;
mod inflight;
mod initialize;
mod listen;
mod lists;
mod negotiate;
mod refuse;
mod repeat;
mod resolve;
mod session;
pub(crate) mod spelling;
mod toll;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::future::join_all;
use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use obol_auth::oauth::Target;
use obol_drain::{Drain, Tasks};
use obol_mcp::catalogue::Catalogue;
use obol_mcp::pool::Pool;
use obol_mcp::wire::{self, Incoming, Message, Object, ProtocolVersion, RpcError, WireError};
use obol_meter::Meter;
use obol_model::{ConnectionName, Kind, RequestId, metric};
use obol_peer::Peers;
use obol_session::Sessions;
use serde_json::value::RawValue;

use crate::failure::Refusal;
use crate::front::{Admitted, Front};
use crate::gateway::GatewayParts;
use crate::idempotency;
use crate::mcp::toll::Ahead;
use crate::stamp::Stamp;

use answer::Answer;
use inflight::InFlight;
use listen::Streams;
use negotiate::Accept;
use session::Ctx;

const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const MODERN_META: &str = "io.modelcontextprotocol/protocolVersion";

/// What the MCP endpoint works with.
pub(crate) struct Mcp {
    front: Front,
    sessions: Arc<Sessions>,
    pool: Arc<Pool>,
    catalogue: Arc<Catalogue>,
    peers: Arc<Peers>,
    meter: Meter,
    drain: Drain,
    inflight: InFlight,
    streams: Streams,
    upstream_timeout: Duration,
}

impl Mcp {
    pub(crate) fn new(front: Front, parts: GatewayParts) -> Self {
        Self {
            front,
            sessions: parts.sessions,
            pool: parts.pool,
            catalogue: parts.catalogue,
            peers: parts.peers,
            meter: parts.meter,
            drain: parts.drain,
            inflight: InFlight::default(),
            streams: Streams::default(),
            upstream_timeout: parts.options.upstream_timeout,
        }
    }

    fn tasks(&self) -> &Tasks {
        self.drain.tasks()
    }
}

/// `/mcp`: everything that the caller may see, as one server.
pub(crate) async fn endpoint(State(mcp): State<Arc<Mcp>>, request: Request) -> Response {
    serve(mcp, None, request).await
}

/// `/mcp/{connection}`: one connection alone.
pub(crate) async fn view_endpoint(State(mcp): State<Arc<Mcp>>, request: Request) -> Response {
    // As it stands in the path: names of connections need no encoding.
    let path = request.uri().path();
    let connection = path.strip_prefix("/mcp/").unwrap_or_default().trim_end_matches('/').to_owned();
    serve(mcp, Some(connection), request).await
}

async fn serve(mcp: Arc<Mcp>, view: Option<String>, request: Request) -> Response {
    let method = request.method().clone();
    if ![Method::POST, Method::GET, Method::DELETE].contains(&method) {
        return (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "GET, POST, DELETE, OPTIONS")])
            .into_response();
    }
    let named: Option<ConnectionName> = view.as_deref().and_then(|name| name.parse().ok());
    let target = named.as_ref().map_or(Target::Mcp, Target::Connection);
    let admitted = match mcp.front.admit(request.headers(), target).await {
        Ok(admitted) => admitted,
        Err(refusal) => return refuse::http(&refusal, None),
    };
    let stamp = Stamp::of(&admitted);
    let mut response = match view.map(|v| visible_view(&admitted, &v)).transpose() {
        Err(refusal) => refuse::http(&refusal, None),
        Ok(view) => match method {
            Method::POST => mcp.post(admitted, view, request).await,
            Method::GET => mcp.get(admitted, view, request.headers()).await,
            _ => mcp.delete(&admitted, request.headers()).await,
        },
    };
    stamp.put(&mut response);
    response
}

/// A connection that does not exist and one that the caller may not connect to have one answer.
fn visible_view(admitted: &Admitted, name: &str) -> Result<ConnectionName, Refusal> {
    name.parse()
        .ok()
        .filter(|name| admitted.publication.compiled.connections.contains_key(name))
        .filter(|name| session::authorize_view(admitted, name))
        .ok_or_else(|| Refusal::new(Kind::NotFound, "no_such_connection", "there is no such connection"))
}

impl Mcp {
    async fn post(
        self: Arc<Self>,
        admitted: Admitted,
        view: Option<ConnectionName>,
        request: Request,
    ) -> Response {
        let (head, body) = request.into_parts();
        let headers = head.headers;
        if !negotiate::is_json(&headers) {
            let refusal = Refusal::new(
                Kind::InvalidRequest,
                "unsupported_media_type",
                "send `Content-Type: application/json`",
            );
            return with_status(refuse::http(&refusal, None), StatusCode::UNSUPPORTED_MEDIA_TYPE);
        }
        let accept = Accept::parse(&headers);
        if !accept.json && !accept.sse {
            let message = "send `Accept: application/json, text/event-stream`";
            let refusal = Refusal::new(Kind::InvalidRequest, "not_acceptable", message);
            return with_status(refuse::http(&refusal, None), StatusCode::NOT_ACCEPTABLE);
        }
        let body = match self.front.body(body).await {
            Ok(body) => body,
            Err(refusal) => return refuse::http(&refusal, None),
        };
        match wire::parse(&body) {
            Ok(Incoming::Single(message)) => self.single(admitted, view, &headers, accept, message).await,
            Ok(Incoming::Batch(entries)) => self.batch(admitted, view, &headers, accept, entries).await,
            Err(e) => refuse::malformed(&e.rpc(), None),
        }
    }

    async fn single(
        self: Arc<Self>,
        admitted: Admitted,
        view: Option<ConnectionName>,
        headers: &HeaderMap,
        accept: Accept,
        message: Message<'_>,
    ) -> Response {
        let id = id_of(&message);
        if is_modern(headers, &message) {
            // A client that speaks both eras falls back to `initialize` on a 4xx without a recognized modern error
            // (2026-07-28 versioning, "Backward Compatibility").
            let message = "this endpoint serves the revisions up to 2025-11-25; start with `initialize`";
            return refuse::malformed(&RpcError::new(RpcError::INVALID_REQUEST, message), id);
        }
        if let Message::Request { id, method, params } = &message
            && method == "initialize"
        {
            return self.initialize(&admitted, view.as_ref(), accept, id, *params).await;
        }
        let key = match repeat::key(Some(headers), view.as_ref(), &message) {
            Ok(key) => key,
            Err(error) => return answer::message(accept, wire::error_response(id, &error)),
        };
        // At once, so that both go to Redis in one flight; the session is judged first.
        let early = admitted.clone();
        let (ctx, ahead) =
            tokio::join!(self.resume(admitted, view, headers), self.admit_ahead(&early, &message, key));
        let ctx = match ctx {
            Ok(ctx) => ctx,
            Err(refusal) => {
                ahead.give_back().await;
                return refuse::http(&refusal, id);
            }
        };
        match self.handle(ctx, message, ahead).await {
            None => StatusCode::ACCEPTED.into_response(),
            Some(answer) => answer.respond(accept, &self).await,
        }
    }

    /// A batch of 2025-03-26: each entry by itself, the answers together.
    async fn batch(
        self: Arc<Self>,
        admitted: Admitted,
        view: Option<ConnectionName>,
        headers: &HeaderMap,
        accept: Accept,
        entries: Vec<Result<Message<'_>, WireError>>,
    ) -> Response {
        let ctx = match self.resume(admitted, view, headers).await {
            Ok(ctx) => ctx,
            Err(refusal) => return refuse::http(&refusal, None),
        };
        if ctx.version != ProtocolVersion::V2025_03_26 {
            let error = RpcError::new(
                RpcError::INVALID_REQUEST,
                "send one message at a time: this revision has no batches",
            );
            return refuse::malformed(&error, None);
        }
        if headers.contains_key(&idempotency::HEADER) {
            let message = "a batch has no `Idempotency-Key`: name one in the `_meta` of each call";
            return refuse::malformed(&RpcError::new(RpcError::INVALID_REQUEST, message), None);
        }
        let answers = join_all(entries.into_iter().map(|entry| {
            let (mcp, mut ctx) = (self.clone(), ctx.clone());
            // Each entry is metered by itself.
            ctx.admitted.request_id = RequestId::new();
            async move {
                match entry {
                    Ok(Message::Request { id, method, .. }) if method == "initialize" => {
                        // lifecycle 2025-03-26, "Initialization": never part of a batch.
                        let error = RpcError::new(
                            RpcError::INVALID_REQUEST,
                            "`initialize` cannot be part of a batch",
                        );
                        Some(wire::error_response(Some(id), &error))
                    }
                    Ok(message) => {
                        let ahead = match repeat::key(None, ctx.view.as_ref(), &message) {
                            Ok(key) => Ahead::none(key),
                            Err(error) => return Some(wire::error_response(id_of(&message), &error)),
                        };
                        match mcp.handle(ctx, message, ahead).await {
                            Some(answer) => answer.whole(&mcp).await,
                            None => None,
                        }
                    }
                    Err(e) => Some(wire::error_response(None, &e.rpc())),
                }
            }
        }))
        .await;
        let answers: Vec<Bytes> = answers.into_iter().flatten().collect();
        if answers.is_empty() {
            return StatusCode::ACCEPTED.into_response();
        }
        answer::message(accept, Bytes::from([b"[".as_slice(), &answers.join(&b","[..]), b"]"].concat()))
    }

    /// One message of a session. `None` for what has no answer.
    async fn handle(self: &Arc<Self>, ctx: Ctx, message: Message<'_>, ahead: Ahead) -> Option<Answer> {
        match message {
            Message::Request { id, method, params } => {
                let answer = self.request(ctx, id, &method, params, ahead).await;
                let outcome = match &answer {
                    Ok(_) => "ok",
                    Err(_) => "refused",
                };
                metrics::counter!(metric::MCP_REQUESTS, "method" => known(&method), "outcome" => outcome)
                    .increment(1);
                Some(answer.unwrap_or_else(|error| Answer::Now(wire::error_response(Some(id), &error))))
            }
            Message::Notification { method, params } => {
                if method == "notifications/cancelled"
                    && let Some(id) = params.and_then(|p| Object::parse(p.get()).ok()?.get("requestId"))
                {
                    self.inflight.cancel(ctx.session.session_id, id.get());
                }
                None
            }
            // Nothing was asked of the client, so there is nothing that this could answer.
            Message::Response { .. } => None,
        }
    }

    async fn request(
        self: &Arc<Self>,
        ctx: Ctx,
        id: &RawValue,
        method: &str,
        params: Option<&RawValue>,
        ahead: Ahead,
    ) -> Result<Answer, RpcError> {
        let result = match method {
            "ping" => "{}".to_owned(),
            "tools/list" | "resources/list" | "resources/templates/list" | "prompts/list" => {
                self.list(&ctx, method, params).await?
            }
            "tools/call" => return self.call_tool(ctx, id, params, ahead).await,
            "prompts/get" => return self.get_prompt(ctx, id, params).await,
            "resources/read" => return self.read_resource(ctx, id, params),
            "completion/complete" => return self.complete(ctx, id, params).await,
            "resources/subscribe" => return self.subscribe(ctx, id, params),
            "resources/unsubscribe" => self.unsubscribe(&ctx, params).await?,
            "logging/setLevel" => self.set_level(&ctx, params).await?,
            _ => {
                let known: String = method.chars().take(80).collect();
                return Err(RpcError::new(RpcError::METHOD_NOT_FOUND, format!("Method not found: {known}")));
            }
        };
        Ok(Answer::Now(wire::response(id, &result)))
    }

    /// The session that the request belongs to (DESIGN §6.4): one negative answer for every reason.
    async fn resume(
        &self,
        admitted: Admitted,
        view: Option<ConnectionName>,
        headers: &HeaderMap,
    ) -> Result<Ctx, Refusal> {
        if headers.get_all(&SESSION_ID).iter().nth(1).is_some() {
            let message = "two `Mcp-Session-Id` headers: send one";
            return Err(Refusal::new(Kind::InvalidRequest, "repeated_header", message));
        }
        let id = headers.get(&SESSION_ID).ok_or_else(|| {
            let message =
                "this request needs a session: send `initialize` first and its `Mcp-Session-Id` from then on";
            Refusal::new(Kind::InvalidRequest, "session_required", message)
        })?;
        let principal = admitted.identity.principal();
        let caller = obol_session::Caller {
            workspace_id: admitted.identity.workspace_id(),
            principal: &principal,
            binding: admitted.publication.workspace.session_binding,
        };
        // What is no text is no session id either, and has the same answer.
        let session = self
            .sessions
            .get_or_resume(id.to_str().unwrap_or_default(), &caller)
            .await
            .map_err(|e| session::refusal(&e))?;
        let stored = ProtocolVersion::negotiate(&session.protocol_version).0;
        let version = match headers.get(&PROTOCOL_VERSION) {
            None => stored,
            Some(value) => match value.to_str().unwrap_or_default() {
                "2024-11-05" => ProtocolVersion::V2025_03_26,
                text => ProtocolVersion::parse(text).ok_or_else(|| {
                    let message = format!(
                        "`MCP-Protocol-Version` names a revision that is not supported; supported are {}",
                        ProtocolVersion::ALL.map(ProtocolVersion::as_str).join(", ")
                    );
                    Refusal::new(Kind::InvalidRequest, "unsupported_protocol_version", message)
                })?,
            },
        };
        let client = session::client_name(session.client_info.as_deref());
        Ok(Ctx { admitted, session: Arc::new(self.sessions.hold(session)), version, view, client })
    }

    async fn delete(&self, admitted: &Admitted, headers: &HeaderMap) -> Response {
        let Some(id) = headers.get(&SESSION_ID) else {
            let refusal = Refusal::new(
                Kind::InvalidRequest,
                "session_required",
                "name the session in `Mcp-Session-Id`",
            );
            return refuse::http(&refusal, None);
        };
        let principal = admitted.identity.principal();
        let caller = obol_session::Caller {
            workspace_id: admitted.identity.workspace_id(),
            principal: &principal,
            binding: admitted.publication.workspace.session_binding,
        };
        let text = id.to_str().unwrap_or_default();
        match self.sessions.delete(text, &caller).await {
            Ok(()) => {
                if let Ok(id) = text.parse() {
                    self.end_session(admitted.identity.workspace_id(), id);
                    self.end_session_elsewhere(admitted.identity.workspace_id(), id).await;
                }
                StatusCode::NO_CONTENT.into_response()
            }
            Err(e) => refuse::http(&session::refusal(&e), None),
        }
    }
}

fn id_of<'a>(message: &Message<'a>) -> Option<&'a RawValue> {
    match message {
        Message::Request { id, .. } => Some(id),
        Message::Notification { .. } | Message::Response { .. } => None,
    }
}

/// DESIGN §9.2. `initialize` exists in the legacy era only, where the header means nothing yet (§9.6); what it says in
/// `_meta` counts.
fn is_modern(headers: &HeaderMap, message: &Message<'_>) -> bool {
    let initialize = matches!(message, Message::Request { method, .. } if method == "initialize");
    if !initialize && negotiate::text(headers, &PROTOCOL_VERSION).is_some_and(ProtocolVersion::is_modern) {
        return true;
    }
    let (Message::Request { params, .. } | Message::Notification { params, .. }) = message else {
        return false;
    };
    // Looking for the key costs nothing; only who mentions it is read.
    params
        .filter(|p| p.get().contains(MODERN_META))
        .and_then(|p| Object::parse(p.get()).ok()?.object("_meta")?.get(MODERN_META))
        .is_some()
}

fn with_status(mut response: Response, status: StatusCode) -> Response {
    *response.status_mut() = status;
    response
}

/// Methods as a bounded label.
fn known(method: &str) -> &'static str {
    const METHODS: [&str; 11] = [
        "ping",
        "tools/list",
        "tools/call",
        "resources/list",
        "resources/templates/list",
        "resources/read",
        "resources/subscribe",
        "resources/unsubscribe",
        "prompts/list",
        "prompts/get",
        "completion/complete",
    ];
    METHODS.into_iter().find(|m| *m == method).unwrap_or("other")
}

/// `HeaderValue` of the session id, which must not show in dumps of headers.
fn session_header(id: obol_model::SessionId) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(&id.expose()).ok()?;
    value.set_sensitive(true);
    Some(value)
}
