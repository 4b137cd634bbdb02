use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use obol_model::{ConnectionName, WorkspaceId};
use serde_json::value::RawValue;
use tokio::sync::broadcast;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::session::{Lease, Session};
use super::slot::Slot;
use super::sort::{answer, shared};
use super::{CallError, Endpoint, ListKind, Pool, TransportError};
use crate::wire::{self, Incoming, Message, Object};

/// Between two tries to open a stream of unsolicited messages; doubled while streams do not last.
const REOPEN_AFTER: Duration = Duration::from_secs(1);
/// The most that it grows to.
const REOPEN_AT_MOST: Duration = Duration::from_mins(1);
/// How long the stream of the old session is read on when that of the new one is there.
const HAND_OVER: Duration = Duration::from_millis(250);
/// How long the old session is kept for a new stream that does not come.
const HAND_OVER_AT_MOST: Duration = Duration::from_secs(5);
/// How long a stream has to last to have been a good one.
const LASTING: Duration = Duration::from_secs(10);

/// Something that an upstream said of itself, outside of any call.
#[derive(Debug, Clone)]
pub struct UpstreamEvent {
    /// Whose upstream.
    pub workspace: WorkspaceId,
    /// Which.
    pub connection: ConnectionName,
    /// The session or principal whose own upstream session said it; `None` when that is shared.
    pub isolation: Option<String>,
    /// What.
    pub kind: EventKind,
}

/// What an upstream said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// A list changed, or may have changed while nobody could hear it.
    ListChanged(ListKind),
    /// A subscribed resource changed, or may have.
    ResourceUpdated {
        /// The URI as the upstream spells it.
        uri: String,
    },
    /// A log message.
    Log {
        /// Its level.
        level: String,
        /// The complete notification.
        message: Bytes,
    },
}

/// While it lives, the endpoint's upstream session is kept and its unsolicited messages are read.
#[derive(Debug)]
pub struct Listener {
    slot: Arc<Slot>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.slot.listeners.fetch_sub(1, Ordering::AcqRel) == 1 {
            let current = self.slot.state.lock().current.clone();
            // A durable transport is read all the time: its messages come anyway.
            if let Some(session) = current.filter(|s| !s.transport.is_durable()) {
                session.stop_pump();
            }
        }
    }
}

impl Pool {
    /// What upstreams say outside of calls, of all workspaces. A receiver that is too slow loses the oldest.
    pub fn events(&self) -> broadcast::Receiver<UpstreamEvent> {
        self.events.subscribe()
    }

    /// Keeps the upstream session of the endpoint and reads its unsolicited messages, until the guard is dropped. Does
    /// not wait for the upstream.
    ///
    /// # Errors
    /// When the pool is full or stopping.
    pub fn listen(self: &Arc<Self>, endpoint: &Arc<Endpoint>) -> Result<Listener, CallError> {
        let slot = self.slot(endpoint)?;
        slot.listeners.fetch_add(1, Ordering::AcqRel);
        let listener = Listener { slot: Arc::clone(&slot) };
        let current = {
            let mut state = slot.state.lock();
            let usable = state.current.clone().filter(|s| s.is_usable(Instant::now(), &self.options));
            if usable.is_none() {
                // A breaker that is open is no error of the listener: the housekeeping tries again.
                if let Err(e) = self.opening(&slot, &mut state) {
                    tracing::debug!(error = %e, "upstream session is opened later");
                }
            }
            usable
        };
        if let Some(session) = current {
            self.start_pump(&slot, &session, None);
        }
        Ok(listener)
    }

    pub(super) fn publish(&self, slot: &Slot, kind: EventKind) {
        let Endpoint { workspace, connection, isolation, .. } = slot.endpoint.as_ref();
        let event = UpstreamEvent {
            workspace: workspace.clone(),
            connection: connection.clone(),
            isolation: isolation.clone(),
            kind,
        };
        // Fails only when nobody listens.
        drop(self.events.send(event));
    }

    /// Reads the unsolicited messages of a session, once. `previous` is kept and read until the new stream is there and
    /// what was under way on the old one has arrived, so that a renewal has no gap.
    pub(super) fn start_pump(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        session: &Arc<Session>,
        previous: Option<Lease>,
    ) {
        let stop = CancellationToken::new();
        {
            let mut pump = session.pump.lock();
            if pump.is_some() {
                return;
            }
            *pump = Some(stop.clone());
        }
        let hears = CancellationToken::new();
        if let Some(previous) = previous {
            let hears = hears.clone();
            let hand_over = async move {
                // Servers that send the head of a stream only with its first event are not waited for.
                if tokio::time::timeout(HAND_OVER_AT_MOST, hears.cancelled()).await.is_ok() {
                    tokio::time::sleep(HAND_OVER).await;
                }
                previous.session().stop_pump();
            };
            self.spawn("mcp_upstream_hand_over", Box::pin(hand_over));
        }
        let (pool, slot) = (Arc::clone(self), Arc::clone(slot));
        // The session is not kept alive by its reader.
        let (session, transport) = (Arc::downgrade(session), Arc::clone(&session.transport));
        let read = async move {
            let pump = Pump { pool: &pool, slot: &slot, transport, hears };
            let lost = tokio::select! {
                () = stop.cancelled() => false,
                lost = pump.run() => lost,
            };
            if let Some(session) = session.upgrade().filter(|_| lost) {
                pool.discard(&slot, &session, !session.transport.is_closed());
            }
        };
        self.spawn("mcp_upstream_listen", Box::pin(read));
    }
}

struct Pump<'a> {
    pool: &'a Pool,
    slot: &'a Slot,
    transport: Arc<dyn super::Transport>,
    /// Cancelled once nothing is missed any more.
    hears: CancellationToken,
}

impl Pump<'_> {
    /// Returns whether the session is gone.
    async fn run(self) -> bool {
        let mut wait = REOPEN_AFTER;
        loop {
            let opened = Instant::now();
            match Arc::clone(&self.transport).unsolicited().await {
                Ok(Some(mut inbound)) => {
                    self.hears.cancel();
                    if self.slot.gap.swap(false, Ordering::AcqRel) {
                        self.cover_gap();
                    }
                    loop {
                        match inbound.next().await {
                            Ok(Some(bytes)) => self.message(&bytes).await,
                            Ok(None) => break,
                            Err(e) => {
                                tracing::debug!(error = %e, "upstream stream broke");
                                break;
                            }
                        }
                    }
                    self.slot.gap.store(true, Ordering::Release);
                }
                // It has no such stream; nothing is missed by not reading it.
                Ok(None) => return self.transport.is_closed(),
                Err(TransportError::SessionLost { .. }) => return true,
                Err(e) => tracing::debug!(error = %e, "upstream stream could not be opened"),
            }
            if self.transport.is_closed() {
                return true;
            }
            if opened.elapsed() > LASTING {
                wait = REOPEN_AFTER;
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(REOPEN_AT_MOST);
        }
    }

    /// What may have been said while nobody listened is made up for: clients then ask for themselves.
    fn cover_gap(&self) {
        let Some(known) = self.pool.known(&self.slot.endpoint) else { return };
        let capabilities = &known.capabilities;
        let lists = [
            (ListKind::Tools, capabilities.tools.as_ref().is_some_and(|c| c.list_changed)),
            (ListKind::Resources, capabilities.resources.as_ref().is_some_and(|c| c.list_changed)),
            (ListKind::Prompts, capabilities.prompts.as_ref().is_some_and(|c| c.list_changed)),
        ];
        for (kind, _) in lists.into_iter().filter(|(_, announces)| *announces) {
            self.pool.publish(self.slot, EventKind::ListChanged(kind));
        }
        for uri in self.slot.subscriptions() {
            self.pool.publish(self.slot, EventKind::ResourceUpdated { uri });
        }
    }

    async fn message(&self, bytes: &Bytes) {
        match wire::parse(bytes) {
            Ok(Incoming::Single(message)) => self.one(bytes, message).await,
            Ok(Incoming::Batch(_)) => {
                for entry in serde_json::from_slice::<Vec<&RawValue>>(bytes).unwrap_or_default() {
                    let bytes = bytes.slice_ref(entry.get().as_bytes());
                    if let Ok(Incoming::Single(message)) = wire::parse(&bytes) {
                        self.one(&bytes, message).await;
                    }
                }
            }
            Err(e) => tracing::debug!(error = %e, "upstream message skipped"),
        }
    }

    async fn one(&self, bytes: &Bytes, message: Message<'_>) {
        match message {
            Message::Request { id, method, .. } => {
                if let Err(e) = self.transport.send(answer(id, &method)).await {
                    tracing::debug!(error = %e, "upstream did not take an answer");
                }
            }
            Message::Notification { method, params } if method == "notifications/message" => {
                let level =
                    params.and_then(|p| Object::parse(p.get()).ok()?.str("level").map(Cow::into_owned));
                let kind = EventKind::Log { level: level.unwrap_or_default(), message: bytes.clone() };
                self.pool.publish(self.slot, kind);
            }
            Message::Notification { method, params } => {
                // The rest is progress and cancellations of calls that are over, and what the gateway does not know.
                if let Some(kind) = shared(&method, params) {
                    self.pool.publish(self.slot, kind);
                }
            }
            Message::Response { .. } => tracing::debug!("upstream answer that nobody waits for"),
        }
    }
}
