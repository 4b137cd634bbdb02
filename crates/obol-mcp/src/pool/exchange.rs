use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use obol_model::metric;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::session::Lease;
use super::slot::Slot;
use super::sort::{Sorted, replace_token, sort};
use super::{CallError, Endpoint, Inbound, Outgoing, Pool, Reply, Transport, TransportError};
use crate::wire::{self, Object};

/// Longest time for a message that nobody waits for: a cancellation, an answer to a ping.
const ASIDE: Duration = Duration::from_secs(5);
/// Longest wait for the end of a stream that has said everything.
const DRAIN: Duration = Duration::from_secs(1);

/// A request for an upstream.
#[derive(Debug)]
pub struct Call<'a> {
    /// The method.
    pub method: &'a str,
    /// The params as raw JSON text, names and URIs as the upstream knows them.
    pub params: Option<&'a str>,
    /// The client's progress token, when `params` has one. The upstream gets another one, unique there; what the
    /// exchange yields has the client's.
    pub progress_token: Option<&'a RawValue>,
    /// The log level of the client's session. When the upstream logs and its level is less verbose, it is set first.
    pub log_level: Option<&'a str>,
    /// Longest time for all of it, replays included.
    pub deadline: Instant,
}

/// What an exchange yields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A complete JSON-RPC notification that belongs to the request.
    Notification(Bytes),
    /// The result, as the text that came. The exchange is over.
    Result(Bytes),
    /// The error object, as the text that came. The exchange is over.
    Error(Bytes),
}

/// A request in flight: first the notifications that belong to it, then its answer.
///
/// Nothing is sent before the first [`Exchange::next`]. Dropping an exchange forgets it and frees everything that it
/// held, without cancelling upstream, as the legacy era demands of a client that merely went away; to cancel, call
/// [`Exchange::cancel`].
pub struct Exchange {
    pool: Arc<Pool>,
    slot: Arc<Slot>,
    state: State,
    /// Sorted messages that were not handed out yet.
    pending: VecDeque<Sorted>,
    id: u64,
    message: Bytes,
    token: Option<Box<RawValue>>,
    level: Option<u8>,
    deadline: Instant,
    /// Whether it may have effects that must not happen twice.
    acting: bool,
    subscription: Option<Subscription>,
    replayed: bool,
    retried: bool,
}

enum State {
    /// To be sent (again).
    Start,
    /// Sent; the head of the answer is not there.
    Head(Lease, BoxFuture<'static, Result<Reply, TransportError>>),
    /// Messages are coming.
    Stream(Lease, Box<dyn Inbound>),
    /// Over.
    Done,
}

enum Subscription {
    Add(String),
    Remove(String),
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Start => "start",
            State::Head(..) => "head",
            State::Stream(..) => "stream",
            State::Done => "done",
        };
        f.debug_struct("Exchange").field("id", &self.id).field("state", &state).finish_non_exhaustive()
    }
}

/// Methods without effects that could hurt when they happen twice.
fn is_acting(method: &str) -> bool {
    !matches!(
        method,
        "tools/list"
            | "resources/list"
            | "resources/templates/list"
            | "resources/read"
            | "resources/subscribe"
            | "resources/unsubscribe"
            | "prompts/list"
            | "prompts/get"
            | "completion/complete"
            | "logging/setLevel"
            | "ping"
    )
}

fn subscription(call: &Call<'_>) -> Option<Subscription> {
    let make = match call.method {
        "resources/subscribe" => Subscription::Add,
        "resources/unsubscribe" => Subscription::Remove,
        _ => return None,
    };
    Object::parse(call.params?).ok()?.str("uri").map(|uri| make(uri.into_owned()))
}

impl Exchange {
    /// Takes an upstream session, so that an upstream that cannot be reached is known before anything else.
    pub(super) async fn begin(
        pool: Arc<Pool>,
        endpoint: &Arc<Endpoint>,
        call: Call<'_>,
    ) -> Result<Self, CallError> {
        let id = pool.next_id();
        let rewritten = match (call.progress_token, call.params) {
            (Some(_), Some(params)) => replace_token(params, id),
            _ => None,
        };
        // Without a place for our own token nothing comes back that could be mapped.
        let token = rewritten.is_some().then_some(call.progress_token).flatten();
        let message = wire::request(id, call.method, rewritten.as_deref().or(call.params));
        let mut exchange = Self {
            slot: pool.slot(endpoint)?,
            pool,
            state: State::Start,
            pending: VecDeque::new(),
            id,
            message,
            token: token.map(ToOwned::to_owned),
            level: call.log_level.and_then(super::session::level_rank),
            deadline: call.deadline,
            acting: is_acting(call.method),
            subscription: subscription(&call),
            replayed: false,
            retried: false,
        };
        exchange.send().await?;
        Ok(exchange)
    }

    /// The next event; `None` when the exchange is over. After an error it is over.
    ///
    /// Cancel-safe: a dropped future loses nothing, the next call goes on.
    pub async fn next(&mut self) -> Option<Result<Event, CallError>> {
        if self.pending.is_empty() && matches!(self.state, State::Done) {
            return None;
        }
        let next = match tokio::time::timeout_at(self.deadline, self.advance()).await {
            Ok(next) => next,
            Err(_) => Err(self.time_out()),
        };
        match &next {
            Ok(Event::Notification(_)) => return Some(next),
            Ok(Event::Result(_) | Event::Error(_)) => {
                metrics::counter!(metric::MCP_UPSTREAM_CALLS, "outcome" => "answered").increment(1);
            }
            Err(e) => metrics::counter!(metric::MCP_UPSTREAM_CALLS, "outcome" => e.as_str()).increment(1),
        }
        self.pending.clear();
        // Releases the session at once, not when the caller gets around to dropping this.
        if let State::Stream(_, inbound) = std::mem::replace(&mut self.state, State::Done)
            && next.is_ok()
        {
            self.drain(inbound);
        }
        Some(next)
    }

    /// Tells the upstream that the answer is not wanted any more, and forgets the exchange.
    ///
    /// Not cancel-safe: a dropped future may not have told it.
    pub async fn cancel(mut self, reason: Option<&str>) {
        if let Some((transport, message)) = self.cancellation(reason) {
            // First the word, then the connection: some servers take the end of a stream for the end of the session.
            if !matches!(tokio::time::timeout(ASIDE, transport.send(message)).await, Ok(Ok(()))) {
                tracing::debug!("upstream did not take a cancellation");
            }
        }
        self.state = State::Done;
    }

    fn cancellation(&self, reason: Option<&str>) -> Option<(Arc<dyn Transport>, Bytes)> {
        let (State::Head(lease, _) | State::Stream(lease, _)) = &self.state else { return None };
        let reason = reason.map_or(String::new(), |r| format!(r#","reason":{}"#, serde_json::Value::from(r)));
        let params = format!(r#"{{"requestId":{}{reason}}}"#, self.id);
        let message = wire::notification("notifications/cancelled", Some(&params));
        Some((Arc::clone(&lease.session().transport), message))
    }

    /// The deadline has passed: the upstream is told, but nobody waits for that (lifecycle, "Timeouts").
    fn time_out(&mut self) -> CallError {
        match self.cancellation(Some("the deadline has passed")) {
            Some((transport, message)) => {
                self.aside(transport, message);
                CallError::Timeout
            }
            None => {
                CallError::Unavailable { reason: "it was not ready before the deadline", retry_after: None }
            }
        }
    }

    fn aside(&self, transport: Arc<dyn Transport>, message: Bytes) {
        let send = async move {
            if !matches!(tokio::time::timeout(ASIDE, transport.send(message)).await, Ok(Ok(()))) {
                tracing::debug!("upstream did not take a message");
            }
        };
        self.pool.spawn("mcp_upstream_aside", Box::pin(send));
    }

    /// The end of the stream is mostly there already; else it is waited for aside.
    fn drain(&self, mut inbound: Box<dyn Inbound>) {
        let mut drain = Box::pin(async move { inbound.drain().await });
        if drain.as_mut().now_or_never().is_none() {
            let bounded = async move { drop(tokio::time::timeout(DRAIN, drain).await) };
            self.pool.spawn("mcp_upstream_drain", Box::pin(bounded));
        }
    }

    async fn send(&mut self) -> Result<(), CallError> {
        let lease = self.pool.take(&self.slot, self.deadline).await?;
        if let Some(level) = self.level {
            self.pool.set_level(&self.slot, lease.session(), level, self.deadline).await;
        }
        let outgoing = Outgoing { id: self.id, message: self.message.clone(), initialize: false };
        let head = Arc::clone(&lease.session().transport).request(outgoing);
        self.state = State::Head(lease, head);
        Ok(())
    }

    async fn advance(&mut self) -> Result<Event, CallError> {
        loop {
            while let Some(sorted) = self.pending.pop_front() {
                if let Some(event) = self.event(sorted) {
                    return Ok(event);
                }
            }
            match &mut self.state {
                State::Start => self.send().await?,
                State::Head(_, head) => {
                    let head = head.await;
                    self.arrived(head)?;
                }
                State::Stream(_, inbound) => match inbound.next().await {
                    Ok(Some(bytes)) => {
                        // One bad message is no reason to give up an answer that is still to come.
                        if let Err(e) = sort(&bytes, self.id, self.token.as_deref(), &mut self.pending) {
                            tracing::debug!(error = %e, "upstream message skipped");
                        }
                    }
                    Ok(None) => {
                        let e = TransportError::Broken("the stream ended without the answer");
                        return Err(e.into_call_error(self.acting));
                    }
                    Err(e) => return Err(e.into_call_error(self.acting)),
                },
                State::Done => return Err(TransportError::Broken("it is over").into_call_error(self.acting)),
            }
        }
    }

    /// The head of the answer, or the reason why there is none, is there.
    fn arrived(&mut self, head: Result<Reply, TransportError>) -> Result<(), CallError> {
        let State::Head(lease, _) = std::mem::replace(&mut self.state, State::Start) else { return Ok(()) };
        match head {
            Ok(Reply::Whole(bytes)) => self.whole(&bytes),
            Ok(Reply::Stream(inbound)) => {
                self.state = State::Stream(lease, inbound);
                Ok(())
            }
            // Proven not executed (DESIGN §9.4): once more, on a fresh session, and only once.
            Err(TransportError::SessionLost { .. }) if !self.replayed => {
                tracing::info!(connection = %self.slot.endpoint.connection, "upstream forgot its session, replaying");
                self.pool.discard(&self.slot, lease.session(), true);
                self.replayed = true;
                Ok(())
            }
            Err(TransportError::SessionLost { answer: Some(answer) }) => self.whole(&answer),
            Err(e) => {
                let transport = &lease.session().transport;
                let unreached = matches!(e, TransportError::Unsent(_)) && !transport.is_durable();
                if unreached {
                    self.pool.judge(&self.slot, false);
                }
                // What cannot be dialled any more has to pass the breaker, which stands in front of new sessions.
                if unreached || transport.is_closed() {
                    self.pool.discard(&self.slot, lease.session(), false);
                }
                // An old connection that died, or a child that has ended: a fresh one may do.
                let again = match e {
                    TransportError::Broken(_) => !self.acting,
                    TransportError::Unsent(_) => transport.is_closed(),
                    _ => false,
                };
                if again && !self.retried {
                    self.retried = true;
                    return Ok(());
                }
                Err(e.into_call_error(self.acting))
            }
        }
    }

    fn whole(&mut self, bytes: &Bytes) -> Result<(), CallError> {
        self.state = State::Done;
        sort(bytes, self.id, self.token.as_deref(), &mut self.pending)?;
        if self.pending.iter().any(|s| matches!(s, Sorted::Result(_) | Sorted::Error(_))) {
            return Ok(());
        }
        Err(CallError::Protocol { reason: "it answers something else than it was asked" })
    }

    fn event(&mut self, sorted: Sorted) -> Option<Event> {
        match sorted {
            Sorted::Result(result) => {
                match self.subscription.take() {
                    Some(Subscription::Add(uri)) => self.slot.subscribed(uri),
                    Some(Subscription::Remove(uri)) => self.slot.unsubscribed(&uri),
                    None => {}
                }
                Some(Event::Result(result))
            }
            Sorted::Error(error) => Some(Event::Error(error)),
            Sorted::Notification(bytes) => Some(Event::Notification(bytes)),
            Sorted::Shared(kind) => {
                self.pool.publish(&self.slot, kind);
                None
            }
            Sorted::Reply(reply) => {
                if let State::Stream(lease, _) = &self.state {
                    self.aside(Arc::clone(&lease.session().transport), reply);
                }
                None
            }
            Sorted::Nothing => None,
        }
    }
}
