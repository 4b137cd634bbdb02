use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::session::{Heritage, NO_LEVEL, Session};
use super::{CallError, Endpoint, Transport};

/// The most subscriptions that are renewed with a session.
const MAX_SUBSCRIPTIONS: usize = 1000;

/// How an opening ended; empty while it runs.
pub(super) type Opening = watch::Receiver<Option<Result<(), CallError>>>;

/// The place of one upstream session and of the ones that follow it.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) state: Mutex<State>,
    /// The most verbose level that a call asked for.
    pub(super) level: AtomicU8,
    pub(super) listeners: AtomicUsize,
    /// Events may have been missed since somebody listened without a break.
    pub(super) gap: AtomicBool,
    /// Another publication describes this connection differently.
    pub(super) superseded: AtomicBool,
    /// Its callers are gone for good: nothing is opened here any more, and what is being opened is given up. Only
    /// cancelled with `state` locked.
    pub(super) doomed: CancellationToken,
    subscriptions: Mutex<BTreeSet<String>>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) current: Option<Arc<Session>>,
    pub(super) opening: Option<Opening>,
    /// Connected, but its handshake is not finished.
    half_open: Option<Arc<dyn Transport>>,
    /// Left, but with calls in flight.
    pub(super) retired: Vec<Arc<Session>>,
    pub(super) last_used: Instant,
    /// Not renewed in the background before this.
    pub(super) retry_at: Instant,
}

impl State {
    pub(super) fn is_empty(&self) -> bool {
        self.current.is_none() && self.retired.is_empty() && self.opening.is_none()
    }

    /// Nobody takes the current session any more.
    pub(super) fn retire_current(&mut self) {
        if let Some(session) = self.current.take() {
            session.retire();
            self.retired.push(session);
        }
    }
}

impl Slot {
    pub(super) fn new(endpoint: Arc<Endpoint>) -> Self {
        let now = Instant::now();
        Self {
            endpoint,
            state: Mutex::new(State {
                current: None,
                opening: None,
                half_open: None,
                retired: Vec::new(),
                last_used: now,
                retry_at: now,
            }),
            level: AtomicU8::new(NO_LEVEL),
            listeners: AtomicUsize::new(0),
            gap: AtomicBool::new(false),
            superseded: AtomicBool::new(false),
            doomed: CancellationToken::new(),
            subscriptions: Mutex::new(BTreeSet::new()),
        }
    }

    /// Nothing is opened here any more. Returns what is to be closed.
    pub(super) fn doom(&self) -> (Vec<Arc<Session>>, Option<Arc<dyn Transport>>) {
        let mut state = self.state.lock();
        self.doomed.cancel();
        state.retire_current();
        (std::mem::take(&mut state.retired), state.half_open.take())
    }

    /// Keeps the transport within reach of [`Slot::doom`] until its handshake is finished; refused when that came first.
    pub(super) fn hold_half_open(&self, transport: &Arc<dyn Transport>) -> bool {
        let mut state = self.state.lock();
        let wanted = !self.doomed.is_cancelled();
        state.half_open = wanted.then(|| Arc::clone(transport));
        wanted
    }

    pub(super) fn release_half_open(&self) {
        self.state.lock().half_open = None;
    }

    pub(super) fn is_listened_to(&self) -> bool {
        self.listeners.load(Ordering::Acquire) > 0
    }

    pub(super) fn heritage(&self) -> Heritage {
        Heritage {
            level: self.level.load(Ordering::Acquire),
            subscriptions: self.subscriptions.lock().clone(),
        }
    }

    pub(super) fn subscribed(&self, uri: String) {
        let mut subscriptions = self.subscriptions.lock();
        if subscriptions.len() < MAX_SUBSCRIPTIONS {
            subscriptions.insert(uri);
        } else {
            tracing::warn!(connection = %self.endpoint.connection, "too many subscriptions to renew");
        }
    }

    pub(super) fn unsubscribed(&self, uri: &str) {
        self.subscriptions.lock().remove(uri);
    }

    pub(super) fn subscriptions(&self) -> Vec<String> {
        self.subscriptions.lock().iter().cloned().collect()
    }
}
