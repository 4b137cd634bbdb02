//! Upstream connections: sessions with MCP servers that are opened once, shared by calls, renewed ahead of time and
//! left without losing a call (DESIGN §9.4).
//!
//! A [`Pool`] keeps one upstream session per [`Endpoint`]. [`Pool::call`] makes an [`Exchange`], which yields the
//! notifications that belong to the call and then its answer. A [`Transport`] carries a session: [`HttpConnect`] makes
//! those for Streamable HTTP, `obol-worker` those for child processes; the pool does not know which one it speaks over.
//!
//! What it promises: a call that may have been executed is never sent twice (DESIGN §9.7); progress goes only to the
//! exchange that it belongs to; what an upstream answers is handed on as the bytes that came.
//!
//! It knows nothing of clients, names, policies or catalogues.

mod breaker;
mod endpoint;
mod error;
mod events;
mod exchange;
mod http;
mod keep;
mod list;
mod options;
mod session;
mod slot;
mod sort;
mod transport;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::future::BoxFuture;
use obol_model::{ConnectionName, WorkspaceId};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, broadcast, watch};
use tokio::time::Instant;

pub use endpoint::{Endpoint, EndpointKind, ListKind};
pub use error::{CallError, TransportError};
pub use events::{EventKind, Listener, UpstreamEvent};
pub use exchange::{Call, Event, Exchange};
pub use http::HttpConnect;
pub use options::PoolOptions;
pub use session::{ListCapability, Present, ResourcesCapability, ServerCapabilities};
pub use transport::{Connect, Inbound, Outgoing, Reply, Spawn, Transport};

use breaker::Breaker;
use endpoint::Key;
use session::{Known, Lease, Session};
use slot::{Opening, Slot, State};

/// Events that wait for a slow subscriber of [`Pool::events`] before it loses the oldest.
const EVENT_BACKLOG: usize = 1024;
/// The most servers whose last `initialize` is remembered beyond their sessions.
const MAX_KNOWN: usize = 4096;

type KnownKey = (WorkspaceId, ConnectionName, u64);

/// All upstream sessions of a replica.
pub struct Pool {
    connect: Arc<dyn Connect>,
    spawner: Arc<dyn Spawn>,
    options: PoolOptions,
    slots: RwLock<HashMap<Key, Arc<Slot>>>,
    breakers: Mutex<HashMap<(WorkspaceId, ConnectionName), Breaker>>,
    known: RwLock<HashMap<KnownKey, Arc<Known>>>,
    events: broadcast::Sender<UpstreamEvent>,
    ids: AtomicU64,
    /// Wakes the housekeeping.
    wake: Arc<Notify>,
    stopping: AtomicBool,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("slots", &self.slots.read().len()).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool without sessions. Its housekeeping is [`Pool::run`].
    pub fn new(connect: Arc<dyn Connect>, spawner: Arc<dyn Spawn>, options: PoolOptions) -> Arc<Self> {
        Arc::new(Self {
            connect,
            spawner,
            options,
            slots: RwLock::default(),
            breakers: Mutex::default(),
            known: RwLock::default(),
            events: broadcast::Sender::new(EVENT_BACKLOG),
            ids: AtomicU64::new(1),
            wake: Arc::new(Notify::new()),
            stopping: AtomicBool::new(false),
        })
    }

    /// Starts a call. Whatever fails here was not sent.
    ///
    /// Cancel-safe: nothing is sent before the first [`Exchange::next`].
    ///
    /// # Errors
    /// When there is no upstream session and none can be opened before the deadline.
    pub async fn call(
        self: &Arc<Self>,
        endpoint: &Arc<Endpoint>,
        call: Call<'_>,
    ) -> Result<Exchange, CallError> {
        Exchange::begin(Arc::clone(self), endpoint, call).await
    }

    /// What the server can do, as it said last; `None` when it was never reached.
    pub fn capabilities(&self, endpoint: &Endpoint) -> Option<ServerCapabilities> {
        self.known(endpoint).map(|k| k.capabilities.clone())
    }

    /// The server's instructions, as it gave them last.
    pub fn instructions(&self, endpoint: &Endpoint) -> Option<String> {
        self.known(endpoint).and_then(|k| k.instructions.clone())
    }

    /// For whom this replica holds upstream sessions that are not shared. Whoever is gone is to be handed to
    /// [`Pool::close_isolated`].
    pub fn isolations(&self) -> Vec<(WorkspaceId, String)> {
        let slots = self.slots.read();
        let mut all: Vec<_> =
            slots.keys().filter_map(|k| Some((k.workspace.clone(), k.isolation.clone()?))).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn known(&self, endpoint: &Endpoint) -> Option<Arc<Known>> {
        let key = (endpoint.workspace.clone(), endpoint.connection.clone(), endpoint.generation);
        self.known.read().get(&key).cloned()
    }

    fn remember(&self, endpoint: &Endpoint, known: &Arc<Known>) {
        let key = (endpoint.workspace.clone(), endpoint.connection.clone(), endpoint.generation);
        let mut all = self.known.write();
        if all.len() >= MAX_KNOWN && !all.contains_key(&key) {
            // Which one does not matter: it is asked again when it is used again.
            if let Some(victim) = all.keys().next().cloned() {
                all.remove(&victim);
            }
        }
        all.insert(key, Arc::clone(known));
    }

    fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    fn spawn(&self, name: &'static str, future: BoxFuture<'static, ()>) {
        self.spawner.spawn(name, future);
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// The place of the endpoint's session.
    fn slot(&self, endpoint: &Arc<Endpoint>) -> Result<Arc<Slot>, CallError> {
        let key = Key::of(endpoint);
        if let Some(slot) = self.slots.read().get(&key) {
            return Ok(Arc::clone(slot));
        }
        let mut slots = self.slots.write();
        if let Some(slot) = slots.get(&key) {
            return Ok(Arc::clone(slot));
        }
        if self.is_stopping() {
            return Err(CallError::Stopping);
        }
        if slots.len() >= self.options.max_sessions {
            tracing::warn!(limit = self.options.max_sessions, "too many upstream sessions");
            return Err(CallError::Full);
        }
        for (other, slot) in slots.iter() {
            if key.supersedes(other) {
                slot.superseded.store(true, Ordering::Release);
            }
        }
        let slot = Arc::new(Slot::new(Arc::clone(endpoint)));
        slots.insert(key, Arc::clone(&slot));
        Ok(slot)
    }

    /// A hold on a session of the slot: the current one, or one that is opened for everybody who waits.
    async fn take(self: &Arc<Self>, slot: &Arc<Slot>, deadline: Instant) -> Result<Lease, CallError> {
        let now = Instant::now();
        if now >= deadline {
            return Err(CallError::Unavailable { reason: "the deadline has passed", retry_after: None });
        }
        loop {
            let mut opening = {
                let mut state = slot.state.lock();
                state.last_used = Instant::now();
                if let Some(session) = &state.current
                    && session.is_usable(Instant::now(), &self.options)
                {
                    return Ok(Lease::new(Arc::clone(session), Arc::clone(&self.wake)));
                }
                self.opening(slot, &mut state)?
            };
            // The opening is a task of its own: a caller that gives up does not take it away from the others.
            let Ok(ended) = tokio::time::timeout_at(deadline, opening.wait_for(Option::is_some)).await else {
                return Err(CallError::Unavailable {
                    reason: "it was not ready before the deadline",
                    retry_after: None,
                });
            };
            match ended.as_deref() {
                Ok(Some(Ok(()))) => {}
                Ok(Some(Err(e))) => return Err(e.clone()),
                Ok(None) | Err(_) => return Err(CallError::Stopping),
            }
        }
    }

    /// The opening that runs, or a new one.
    fn opening(self: &Arc<Self>, slot: &Arc<Slot>, state: &mut State) -> Result<Opening, CallError> {
        if self.is_stopping() {
            return Err(CallError::Stopping);
        }
        if slot.doomed.is_cancelled() {
            return Err(self.given_up());
        }
        // A closed channel without a value is an opening whose task was aborted.
        if let Some(opening) = &state.opening
            && (opening.borrow().is_some() || opening.has_changed().is_ok())
        {
            return Ok(opening.clone());
        }
        let now = Instant::now();
        let at = (slot.endpoint.workspace.clone(), slot.endpoint.connection.clone());
        self.breakers.lock().entry(at).or_default().admit(now, self.options.breaker_open).map_err(
            |wait| CallError::Unavailable {
                reason: "it failed repeatedly and is left alone for a while",
                retry_after: Some(wait),
            },
        )?;
        let (done, opening) = watch::channel(None);
        state.opening = Some(opening.clone());
        let (pool, slot) = (Arc::clone(self), Arc::clone(slot));
        self.spawn(
            "mcp_upstream_open",
            Box::pin(async move {
                let result = pool.open(&slot).await;
                // Not an error: those who waited may all have left.
                done.send_replace(Some(result));
            }),
        );
        Ok(opening)
    }

    /// Opens a session and makes it the current one of the slot.
    async fn open(self: &Arc<Self>, slot: &Arc<Slot>) -> Result<(), CallError> {
        let endpoint = &slot.endpoint;
        let opened = self.open_session(slot).await;
        if let (Err(e), true) = (&opened, slot.doomed.is_cancelled()) {
            // Says nothing of the server.
            slot.state.lock().opening = None;
            return Err(e.clone());
        }
        let now = Instant::now();
        let breaker_opened = self.judge(slot, opened.is_ok());
        if let Err(e) = &opened {
            tracing::warn!(workspace = %endpoint.workspace, connection = %endpoint.connection, error = %e, breaker_opened,
                "upstream session could not be opened");
        }
        let session = match opened {
            Ok(session) => Arc::new(session),
            Err(e) => {
                let mut state = slot.state.lock();
                state.opening = None;
                state.retry_at = now + self.options.breaker_open;
                return Err(e);
            }
        };
        self.remember(endpoint, &session.known);
        let Ok(previous) = self.install(slot, &session) else {
            session.close(&self.options).await;
            return Err(self.given_up());
        };
        if session.transport.is_durable() || slot.is_listened_to() {
            self.start_pump(slot, &session, previous);
        }
        self.wake.notify_one();
        Ok(())
    }

    /// Tells the breaker of the connection how a try to reach it went. Returns whether it opened just now.
    fn judge(&self, slot: &Slot, reached: bool) -> bool {
        let at = (slot.endpoint.workspace.clone(), slot.endpoint.connection.clone());
        let mut breakers = self.breakers.lock();
        if reached {
            breakers.remove(&at);
            return false;
        }
        let breaker = breakers.entry(at).or_default();
        breaker.failed(Instant::now(), self.options.breaker_failures, self.options.breaker_open)
    }

    /// Makes a session the current one and returns a hold on its predecessor. Refused when there is nobody left to use
    /// it.
    fn install(&self, slot: &Slot, session: &Arc<Session>) -> Result<Option<Lease>, ()> {
        let mut state = slot.state.lock();
        state.opening = None;
        if slot.doomed.is_cancelled() || self.is_stopping() {
            return Err(());
        }
        let previous = state.current.clone().map(|s| Lease::new(s, Arc::clone(&self.wake)));
        state.retire_current();
        state.current = Some(Arc::clone(session));
        Ok(previous)
    }

    async fn open_session(&self, slot: &Slot) -> Result<Session, CallError> {
        let slow = CallError::Unavailable { reason: "it could not be connected in time", retry_after: None };
        let connect =
            tokio::time::timeout(self.options.connect_timeout, self.connect.connect(&slot.endpoint));
        let transport = slot
            .doomed
            .run_until_cancelled(connect)
            .await
            .ok_or_else(|| self.given_up())?
            .map_err(|_| slow)?
            .map_err(|e| e.into_call_error(false))?;
        let opened = if slot.hold_half_open(&transport) {
            let next_id = || self.next_id();
            let open = session::open(&transport, &slot.endpoint, &self.options, &next_id, slot.heritage());
            let opened = slot.doomed.run_until_cancelled(open).await;
            slot.release_half_open();
            opened.unwrap_or_else(|| Err(self.given_up()))
        } else {
            Err(self.given_up())
        };
        if opened.is_err() {
            // Those who wait for the session need not wait for its end.
            let within = self.options.close_timeout;
            self.spawn("mcp_upstream_close", Box::pin(async move { transport.close(within).await }));
        }
        opened
    }

    /// Why nothing is opened in a slot that is doomed.
    fn given_up(&self) -> CallError {
        if self.is_stopping() {
            return CallError::Stopping;
        }
        CallError::Unavailable { reason: "the session that it belonged to has ended", retry_after: None }
    }

    /// The session is of no use any more; `lost` when the upstream has forgotten it.
    fn discard(&self, slot: &Slot, session: &Arc<Session>, lost: bool) {
        if lost {
            session.lost.store(true, Ordering::Release);
        }
        slot.gap.store(true, Ordering::Release);
        let mut state = slot.state.lock();
        if state.current.as_ref().is_some_and(|s| Arc::ptr_eq(s, session)) {
            state.retire_current();
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Raises the verbosity of the session to what a caller wants. Never lowered within a session: others may be using
    /// it. A refusal does not fail the call.
    async fn set_level(&self, slot: &Slot, session: &Session, rank: u8, deadline: Instant) {
        slot.level.fetch_min(rank, Ordering::AcqRel);
        if session.level.load(Ordering::Acquire) <= rank || session.known.capabilities.logging.is_none() {
            return;
        }
        let _setting = session.setting_level.lock().await;
        if session.level.load(Ordering::Acquire) <= rank {
            return;
        }
        let params = session::level_name(rank).map(|l| format!(r#"{{"level":"{l}"}}"#));
        let ask = session::ask(&session.transport, self.next_id(), "logging/setLevel", params.as_deref());
        match tokio::time::timeout_at(deadline, ask).await {
            Ok(Ok(_)) => {}
            Ok(Err(e)) => tracing::debug!(error = %e, "upstream refused the log level"),
            Err(_) => return,
        }
        session.level.store(rank, Ordering::Release);
    }
}
