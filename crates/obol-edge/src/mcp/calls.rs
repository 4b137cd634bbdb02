//! Requests that an upstream answers: routed, authorized, metered, and otherwise passed through as they came.

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use obol_mcp::catalogue::Source;
use obol_mcp::names;
use obol_mcp::pool::{Call, CallError, Event, Exchange, ListKind};
use obol_mcp::wire::{self, Message, Object, RpcError, Splice};
use obol_meter::{Denied, Repeated, UsageGuard};
use obol_model::snapshot::SessionBinding;
use obol_model::{ConnectionName, Outcome};
use obol_session::{SessionError, SessionRecord};
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::answer::{Answer, FRAMES, Frame};
use super::inflight::InFlightCall;
use super::lists::COLD_WAIT;
use super::resolve::{Resolved, Unresolved};
use super::session::Ctx;
use super::toll::{Ahead, Toll};
use super::{Mcp, refuse, repeat, session};

/// A request on its way to one upstream.
struct Forward {
    ctx: Ctx,
    /// The client's id, as it spelled it.
    id: Box<RawValue>,
    method: &'static str,
    connection: ConnectionName,
    source: Source,
    /// As the upstream will read them.
    params: String,
    progress_token: Option<Box<RawValue>>,
    guard: Option<UsageGuard>,
    /// What the client calls the resource that it asks for.
    uri: Option<String>,
    /// Whether the session subscribes to it once the upstream has agreed.
    subscribe: bool,
}

impl Mcp {
    pub(super) async fn call_tool(
        self: &Arc<Self>,
        ctx: Ctx,
        id: &RawValue,
        params: Option<&RawValue>,
        ahead: Ahead,
    ) -> Result<Answer, RpcError> {
        let (text, params) = object(params)?;
        let (raw_name, name) = required(&params, "name")?;
        let arguments = params.get("arguments").map_or("{}", RawValue::get);
        let (found, tool) = match self.resolve_tool(&ctx, &name, arguments).await {
            Ok(found) => found,
            Err(refused) => {
                ahead.give_back().await;
                return Err(refused);
            }
        };
        let toll = Toll::of(&ctx.admitted, &found.connection, &tool);
        let guard = match self.admit(&ctx.admitted, &toll, ahead).await {
            Ok(guard) => guard,
            Err(Denied::Repeated(Repeated::Answered(answer))) => {
                return repeat::replay(id, &answer).map(Answer::Now);
            }
            Err(denied) => return Err(refuse::denied(&denied, toll.price, ctx.admitted.request_id)),
        };
        let params_text = rename(text, raw_name, &tool);
        let forward = Forward {
            progress_token: progress_token(&params),
            guard: Some(guard),
            ..Forward::new(ctx, id, "tools/call", found, params_text)
        };
        Ok(self.forward(forward))
    }

    /// The tool of this name that the caller may call with these arguments, and what the upstream calls it.
    async fn resolve_tool(
        &self,
        ctx: &Ctx,
        name: &str,
        arguments: &str,
    ) -> Result<(Resolved, String), RpcError> {
        let found = self.resolve(ctx, ListKind::Tools, name).await.map_err(|e| match e {
            Unresolved::Unknown => {
                ctx.record_refused_connection("tools/call", prefix(name));
                refuse::unknown_tool(name)
            }
            Unresolved::Unavailable(c, e) => refuse::upstream(&e, c.as_str(), ctx.admitted.request_id),
        })?;
        let allowed = found
            .item()
            .filter(|item| ctx.authorize("tools/call", ListKind::Tools, &found.connection, item, arguments))
            .ok_or_else(|| refuse::unknown_tool(name))?;
        let tool = allowed.name.clone();
        Ok((found, tool))
    }

    pub(super) async fn get_prompt(
        self: &Arc<Self>,
        ctx: Ctx,
        id: &RawValue,
        params: Option<&RawValue>,
    ) -> Result<Answer, RpcError> {
        let (text, params) = object(params)?;
        let (raw_name, name) = required(&params, "name")?;
        let arguments = params.get("arguments").map_or("{}", RawValue::get);
        let found = self.resolve_prompt(&ctx, "prompts/get", &name, arguments).await?;
        let prompt = found.item().map(|i| i.name.clone()).unwrap_or_default();
        let params_text = rename(text, raw_name, &prompt);
        let forward = Forward {
            progress_token: progress_token(&params),
            ..Forward::new(ctx, id, "prompts/get", found, params_text)
        };
        Ok(self.forward(forward))
    }

    async fn resolve_prompt(
        &self,
        ctx: &Ctx,
        method: &str,
        name: &str,
        arguments: &str,
    ) -> Result<Resolved, RpcError> {
        let found = self.resolve(ctx, ListKind::Prompts, name).await.map_err(|e| match e {
            Unresolved::Unknown => {
                ctx.record_refused_connection(method, prefix(name));
                refuse::unknown_prompt(name)
            }
            Unresolved::Unavailable(c, e) => refuse::upstream(&e, c.as_str(), ctx.admitted.request_id),
        })?;
        let allowed = found
            .item()
            .is_some_and(|item| ctx.authorize(method, ListKind::Prompts, &found.connection, item, arguments));
        if allowed { Ok(found) } else { Err(refuse::unknown_prompt(name)) }
    }

    pub(super) fn read_resource(
        self: &Arc<Self>,
        ctx: Ctx,
        id: &RawValue,
        params: Option<&RawValue>,
    ) -> Result<Answer, RpcError> {
        let forward = Self::resource(ctx, id, "resources/read", params)?;
        Ok(self.forward(forward))
    }

    pub(super) fn subscribe(
        self: &Arc<Self>,
        ctx: Ctx,
        id: &RawValue,
        params: Option<&RawValue>,
    ) -> Result<Answer, RpcError> {
        let forward = Self::resource(ctx, id, "resources/subscribe", params)?;
        Ok(self.forward(Forward { subscribe: true, ..forward }))
    }

    /// Only the session forgets the resource: the upstream session may be shared with others that still want it, and
    /// updates that nobody subscribed to are not delivered.
    pub(super) async fn unsubscribe(&self, ctx: &Ctx, params: Option<&RawValue>) -> Result<String, RpcError> {
        let (_, uri) = required(&object(params)?.1, "uri")?;
        self.change_session(ctx, |record| {
            record.subscriptions.remove(&uri);
        })
        .await?;
        Ok("{}".to_owned())
    }

    pub(super) async fn set_level(&self, ctx: &Ctx, params: Option<&RawValue>) -> Result<String, RpcError> {
        let (_, level) = required(&object(params)?.1, "level")?;
        if rank(&level).is_none() {
            let message = format!("`level` must be one of {}", LEVELS.join(", "));
            return Err(refuse::params(message));
        }
        self.change_session(ctx, |record| record.log_level = Some(level.clone())).await?;
        Ok("{}".to_owned())
    }

    pub(super) async fn complete(
        self: &Arc<Self>,
        ctx: Ctx,
        id: &RawValue,
        params: Option<&RawValue>,
    ) -> Result<Answer, RpcError> {
        let (text, params) = object(params)?;
        let reference = params.object("ref").ok_or_else(|| refuse::params("`ref` must be an object"))?;
        let mut splice = Splice::new(text);
        let (connection, source) = match reference.str("type").as_deref() {
            Some("ref/prompt") => {
                let (raw, name) = required(&reference, "name")?;
                let found = self.resolve_prompt(&ctx, "completion/complete", &name, "{}").await?;
                let prompt = found.item().map(|i| i.name.as_str()).unwrap_or_default();
                splice.replace(raw, quoted(prompt));
                (found.connection, found.source)
            }
            Some("ref/resource") => {
                let (raw, uri) = required(&reference, "uri")?;
                let (connection, source, inner) = ctx.readable("completion/complete", &uri)?;
                if !self.offers(&ctx, &connection, &source, inner).await? {
                    return Err(refuse::unknown_resource(&uri));
                }
                splice.replace(raw, quoted(inner));
                (connection, source)
            }
            _ => return Err(refuse::params("`ref.type` must be `ref/prompt` or `ref/resource`")),
        };
        let forward = Forward {
            ctx,
            id: id.to_owned(),
            method: "completion/complete",
            connection,
            source,
            params: splice.finish(),
            progress_token: progress_token(&params),
            guard: None,
            uri: None,
            subscribe: false,
        };
        Ok(self.forward(forward))
    }

    /// Whether a connection lists this resource or template. Completion is for what is listed: an upstream that completes
    /// anything would else tell a denied template from one that does not exist.
    async fn offers(
        &self,
        ctx: &Ctx,
        connection: &ConnectionName,
        source: &Source,
        uri: &str,
    ) -> Result<bool, RpcError> {
        let deadline = Instant::now() + COLD_WAIT;
        for kind in [ListKind::ResourceTemplates, ListKind::Resources] {
            let listing = self.catalogue.get(source, kind, deadline).await;
            let listing =
                listing.map_err(|e| refuse::upstream(&e, connection.as_str(), ctx.admitted.request_id))?;
            if listing.named(uri).is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn resource(
        ctx: Ctx,
        id: &RawValue,
        method: &'static str,
        params: Option<&RawValue>,
    ) -> Result<Forward, RpcError> {
        let (text, params) = object(params)?;
        let (raw, uri) = required(&params, "uri")?;
        let (connection, source, inner) = ctx.readable(method, &uri)?;
        let params_text = rename(text, raw, inner);
        Ok(Forward {
            ctx,
            id: id.to_owned(),
            method,
            connection,
            source,
            params: params_text,
            progress_token: progress_token(&params),
            guard: None,
            uri: Some(uri),
            subscribe: false,
        })
    }

    fn forward(self: &Arc<Self>, forward: Forward) -> Answer {
        let (frames, receiver) = mpsc::channel(FRAMES);
        let entry = self.inflight.enter(forward.ctx.session.session_id, forward.id.get());
        let mcp = self.clone();
        Answer::Call(async move { mcp.drive(forward, entry, frames).await }.boxed(), receiver)
    }

    async fn drive(&self, mut forward: Forward, entry: InFlightCall, frames: mpsc::Sender<Frame>) {
        let mut guard = forward.guard.take();
        let answered = tokio::select! {
            biased;
            () = entry.cancelled.cancelled() => None,
            exchange = self.begin(&forward) => Some(exchange),
        };
        let ended = match answered {
            None => None,
            Some(Err(e)) => Some(Err(e)),
            Some(Ok(exchange)) => self.exchange(&forward, exchange, &entry, &frames).await,
        };
        let (outcome, bytes) = match ended {
            // Cancelled: no answer is sent (utilities/cancellation, "Behavior Requirements").
            None if entry.session_ended() => {
                let error = session::ended(forward.ctx.admitted.request_id);
                (Outcome::Partial, Some(wire::error_response(Some(&forward.id), &error)))
            }
            None => (Outcome::Partial, None),
            Some(Ok((outcome, bytes))) => {
                if let Some(guard) = &mut guard {
                    repeat::remember(guard, &bytes);
                }
                (outcome, Some(bytes))
            }
            Some(Err(e)) => {
                if let Some(guard) = guard.as_mut().filter(|_| may_have_acted(&e)) {
                    guard.remember_unknown();
                }
                let id = forward.ctx.admitted.request_id;
                tracing::warn!(request_id = %id, connection = %forward.connection, method = forward.method, error = %e, "call failed");
                let error = refuse::upstream(&e, forward.connection.as_str(), id);
                // What may have been executed is charged (DESIGN §9.7).
                let unknown = matches!(e, CallError::OutcomeUnknown | CallError::Timeout);
                (
                    if unknown { Outcome::Partial } else { Outcome::Error },
                    Some(wire::error_response(Some(&forward.id), &error)),
                )
            }
        };
        if let Some(guard) = guard {
            guard.finish(outcome);
        }
        if let Some(bytes) = bytes {
            // Fails when the client is gone: then nobody is there to be told.
            drop(frames.send(Frame::Final(bytes)).await);
        }
    }

    async fn begin(&self, forward: &Forward) -> Result<Exchange, CallError> {
        let snapshot = forward.ctx.admitted.publication.workspace.connections.get(&forward.connection);
        let own = snapshot.and_then(|c| c.timeout_s).map(std::time::Duration::from_secs);
        let timeout = own.map_or(self.upstream_timeout, |own| own.min(self.upstream_timeout));
        let call = Call {
            method: forward.method,
            params: Some(&forward.params),
            progress_token: forward.progress_token.as_deref(),
            log_level: forward.ctx.session.log_level.as_deref(),
            deadline: Instant::now() + timeout,
        };
        self.pool.call(&forward.source.endpoint, call).await
    }

    /// Relays until the answer; `None` when the client cancelled.
    async fn exchange(
        &self,
        forward: &Forward,
        mut exchange: Exchange,
        entry: &InFlightCall,
        frames: &mpsc::Sender<Frame>,
    ) -> Option<Result<(Outcome, Bytes), CallError>> {
        loop {
            let event = tokio::select! {
                biased;
                () = entry.cancelled.cancelled() => {
                    let ended = entry.session_ended();
                    exchange.cancel(Some(if ended { "session ended" } else { "cancelled by the client" })).await;
                    return None;
                }
                event = exchange.next() => event,
            };
            match event {
                Some(Ok(Event::Notification(bytes))) => {
                    if forward.wants(&bytes) {
                        // Fails when the client is gone; the call goes on without an audience.
                        drop(frames.send(Frame::Message(bytes)).await);
                    }
                }
                Some(Ok(Event::Result(bytes))) => return Some(self.result(forward, &bytes).await),
                Some(Ok(Event::Error(bytes))) => {
                    let text = std::str::from_utf8(&bytes).ok().filter(|text| text.starts_with('{'));
                    let Some(text) = text else {
                        return Some(Err(CallError::Protocol { reason: "its error is no object" }));
                    };
                    if let Some(uri) = forward.uri.as_deref().filter(|_| is_not_found(text)) {
                        // In the words that a denied one gets, so that the two cannot be told apart (DESIGN §8.4).
                        let error = refuse::unknown_resource(uri);
                        return Some(Ok((Outcome::Error, wire::error_response(Some(&forward.id), &error))));
                    }
                    return Some(Ok((Outcome::Error, wire::raw_error_response(&forward.id, text))));
                }
                Some(Err(e)) => return Some(Err(e)),
                None => return Some(Err(CallError::Protocol { reason: "it ended without an answer" })),
            }
        }
    }

    async fn result(&self, forward: &Forward, bytes: &Bytes) -> Result<(Outcome, Bytes), CallError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|_| CallError::Protocol { reason: "its result is no text" })?;
        if let (true, Some(uri)) = (forward.subscribe, &forward.uri) {
            let saved = self.change_session(&forward.ctx, |record| {
                record.subscriptions.insert(uri.clone());
            });
            if let Err(error) = saved.await {
                return Ok((Outcome::Error, wire::error_response(Some(&forward.id), &error)));
            }
            self.streams.wake(forward.ctx.session.session_id);
        }
        let namespace = forward.source.namespace;
        let text = names::rewrite_result(&forward.connection, namespace, forward.method, text);
        Ok((Outcome::Ok, wire::response(&forward.id, &text)))
    }

    /// Changes the record of the session, on top of what others change at the same time.
    async fn change_session(
        &self,
        ctx: &Ctx,
        change: impl Fn(&mut SessionRecord) + Send,
    ) -> Result<(), RpcError> {
        let record = SessionRecord::clone(&ctx.session);
        let owner = ctx.session.principal.clone();
        let caller = obol_session::Caller {
            workspace_id: ctx.workspace(),
            principal: &owner,
            binding: SessionBinding::Principal,
        };
        match self.sessions.update(record, &caller, change).await {
            Ok(_) => Ok(()),
            Err(e) => Err(session_lost(&e, ctx)),
        }
    }
}

impl Ctx {
    /// Where an exposed URI leads, when the caller may read it now; on the record.
    fn readable<'a>(
        &self,
        method: &str,
        uri: &'a str,
    ) -> Result<(ConnectionName, Source, &'a str), RpcError> {
        let Some(found) = self.resolve_uri(uri) else {
            self.record_refused_connection(method, uri.split_once('+').map(|(connection, _)| connection));
            return Err(refuse::unknown_resource(uri));
        };
        if self.authorize_read(method, &found.0, found.2) {
            Ok(found)
        } else {
            Err(refuse::unknown_resource(uri))
        }
    }
}

/// Whether the error of an upstream says that there is no such resource (server/resources, "Error Handling").
fn is_not_found(error: &str) -> bool {
    let code =
        Object::parse(error).ok().and_then(|error| error.get("code").map(|code| code.get().to_owned()));
    code.is_some_and(|code| code == RpcError::RESOURCE_NOT_FOUND.to_string())
}

/// Whether the upstream may have executed the call all the same.
fn may_have_acted(error: &CallError) -> bool {
    match error {
        CallError::Status { status } => *status >= 500,
        // Not sent, or what was refused or broke is not the call itself.
        CallError::Unavailable { .. }
        | CallError::Full
        | CallError::Stopping
        | CallError::Interrupted
        | CallError::Refused { .. } => false,
        CallError::Timeout | CallError::OutcomeUnknown | CallError::Protocol { .. } | CallError::TooLarge => {
            true
        }
    }
}

/// What may be the connection of an exposed name.
fn prefix(name: &str) -> Option<&str> {
    name.split_once("__").map(|(connection, _)| connection)
}

fn session_lost(error: &SessionError, ctx: &Ctx) -> RpcError {
    let message = "the session could not be changed";
    refuse::rpc(error.kind(), "session_store", message, Some(ctx.admitted.request_id))
}

impl Forward {
    fn new(ctx: Ctx, id: &RawValue, method: &'static str, found: Resolved, params: String) -> Self {
        Self {
            ctx,
            id: id.to_owned(),
            method,
            connection: found.connection,
            source: found.source,
            params,
            progress_token: None,
            guard: None,
            uri: None,
            subscribe: false,
        }
    }

    /// Log messages are filtered by the level of the session, since a shared upstream logs for the most verbose one.
    fn wants(&self, notification: &Bytes) -> bool {
        let Ok(wire::Incoming::Single(Message::Notification { method, params })) = wire::parse(notification)
        else {
            return true;
        };
        method != "notifications/message" || logs(&self.ctx.session, params)
    }
}

/// The levels of RFC 5424, least severe first (server/utilities/logging).
const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];
/// What a session gets that has set no level.
const DEFAULT_LEVEL: &str = "info";

fn rank(level: &str) -> Option<usize> {
    LEVELS.iter().position(|l| *l == level)
}

/// Whether a session wants a log message with these params.
pub(super) fn logs(session: &SessionRecord, params: Option<&RawValue>) -> bool {
    let level =
        params.and_then(|p| Object::parse(p.get()).ok()?.str("level").map(std::borrow::Cow::into_owned));
    logs_level(session, level.as_deref().unwrap_or_default())
}

/// Whether a session wants log messages of `level`; unknown levels are passed on.
pub(super) fn logs_level(session: &SessionRecord, level: &str) -> bool {
    let wanted = rank(session.log_level.as_deref().unwrap_or(DEFAULT_LEVEL)).unwrap_or(0);
    rank(level).is_none_or(|level| level >= wanted)
}

fn object(params: Option<&RawValue>) -> Result<(&str, Object<'_>), RpcError> {
    let text = params.map(RawValue::get).ok_or_else(|| refuse::params("this method needs `params`"))?;
    let object = Object::parse(text).map_err(|e| refuse::params(e.to_string()))?;
    Ok((text, object))
}

fn required<'a>(object: &Object<'a>, key: &str) -> Result<(&'a RawValue, String), RpcError> {
    match (object.get(key), object.str(key)) {
        (Some(raw), Some(text)) => Ok((raw, text.into_owned())),
        _ => Err(refuse::params(format!("`{key}` must be a string"))),
    }
}

fn progress_token(params: &Object<'_>) -> Option<Box<RawValue>> {
    let token = params.object("_meta")?.get("progressToken")?;
    Some(token.to_owned())
}

fn rename(text: &str, raw: &RawValue, name: &str) -> String {
    let mut splice = Splice::new(text);
    splice.replace(raw, quoted(name));
    splice.finish()
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
