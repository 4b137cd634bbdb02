use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use obol_model::{
    Clock, Kind, NanoUsd, Outcome, Principal, ProviderName, ReplicaId, RequestId, Revision, TokenPrice,
    Tokens, UsageEvent, UsageKind, WorkspaceId, metric,
};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::flusher::Flusher;
use crate::sink::UsageSink;

/// Bounds of the meter.
#[derive(Debug, Clone)]
pub struct MeterOptions {
    /// Calls that are open or closed and not yet taken by the flusher. When it is reached, new calls are refused.
    pub queue: usize,
    /// Most events of one flight to the store.
    pub batch: usize,
    /// How long the flusher waits for company after the first event of a batch. It trades what a killed process
    /// forgets against flights to the store.
    pub linger: Duration,
    /// Longest time for one flight; the sink's own deadline holds as well.
    pub flight_timeout: Duration,
}

impl Default for MeterOptions {
    fn default() -> Self {
        Self {
            queue: 16_384,
            batch: 512,
            linger: Duration::from_millis(10),
            flight_timeout: Duration::from_secs(5),
        }
    }
}

/// Makes a meter and the flusher that belongs to it.
pub fn meter(
    sink: Arc<dyn UsageSink>,
    clock: Arc<dyn Clock>,
    replica: ReplicaId,
    options: MeterOptions,
) -> (Meter, Flusher) {
    let (queue, inbox) = mpsc::channel(options.queue.max(1));
    let open = Arc::new(Open::default());
    let meter = Meter { queue, shared: Arc::new(Shared { clock, replica, open: open.clone() }) };
    (meter, Flusher::new(inbox, sink, open, options))
}

/// Opens one guard per metered call. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Meter {
    queue: mpsc::Sender<UsageEvent>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Arc<dyn Clock>,
    replica: ReplicaId,
    open: Arc<Open>,
}

/// Guards that are not closed yet.
#[derive(Debug, Default)]
pub(crate) struct Open {
    count: AtomicUsize,
    none_left: Notify,
}

impl Open {
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    fn add(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    fn remove(&self) {
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.none_left.notify_waiters();
        }
    }
}

/// Why a call cannot be metered and therefore must not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MeterError {
    /// As many calls as the queue holds are open or wait for the flusher.
    #[error("the usage queue is full")]
    QueueFull,
    /// The flusher drains and takes nothing new.
    #[error("the usage queue is closed")]
    Stopping,
}

impl MeterError {
    /// The kind of the failure.
    pub fn kind(self) -> Kind {
        match self {
            Self::QueueFull => Kind::Unavailable,
            Self::Stopping => Kind::Stopping,
        }
    }
}

/// What is known of a metered call before it is made.
#[derive(Debug, Clone)]
pub struct Start {
    /// Whose money.
    pub workspace_id: WorkspaceId,
    /// Who pays.
    pub principal: Principal,
    /// The publication that routes and prices the call.
    pub revision: Revision,
    /// What is called.
    pub kind: UsageKind,
    /// What it costs.
    pub price: Price,
    /// The id of the request; the usage event has the same.
    pub request_id: RequestId,
}

/// How a call is priced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Price {
    /// A fixed price, due unless the call ended as [`Outcome::Error`]: one that was cut may have been executed.
    PerCall(NanoUsd),
    /// By tokens, whatever the outcome: what was processed is due.
    Tokens(TokenPrice),
}

impl Price {
    /// What a call costs. Each bucket is rounded up to the next nano-USD on its own.
    pub fn cost(&self, tokens: &Tokens, outcome: Outcome) -> NanoUsd {
        match self {
            Self::PerCall(_) if outcome == Outcome::Error => NanoUsd::ZERO,
            Self::PerCall(price) => *price,
            Self::Tokens(price) => price.cost(tokens),
        }
    }
}

impl Meter {
    /// Opens the guard of one call and takes its place in the queue.
    ///
    /// # Errors
    /// When there is no place; then the call must not be made.
    pub fn begin(&self, start: Start) -> Result<UsageGuard, MeterError> {
        let place = self.queue.clone().try_reserve_owned().map_err(|refused| match refused {
            TrySendError::Full(_) => MeterError::QueueFull,
            TrySendError::Closed(_) => MeterError::Stopping,
        })?;
        self.shared.open.add();
        Ok(UsageGuard {
            place: Some(place),
            shared: self.shared.clone(),
            started_at: self.shared.clock.now(),
            began: Instant::now(),
            start,
            tokens: Tokens::default(),
            estimated: false,
            outcome: Outcome::Partial,
        })
    }

    /// Guards that are open now.
    pub fn open(&self) -> usize {
        self.shared.open.count()
    }

    /// Returns once no guard is open; every event is in the queue then. Cancel-safe.
    pub async fn idle(&self) {
        loop {
            // Made before the count is read, so that a guard that closes in between is not missed.
            let none_left = self.shared.open.none_left.notified();
            if self.open() == 0 {
                return;
            }
            none_left.await;
        }
    }
}

/// One metered call. It becomes exactly one usage event: by [`UsageGuard::finish`], or as [`Outcome::Partial`] with
/// what is known by then when it is dropped.
pub struct UsageGuard {
    place: Option<mpsc::OwnedPermit<UsageEvent>>,
    shared: Arc<Shared>,
    started_at: Timestamp,
    began: Instant,
    start: Start,
    tokens: Tokens,
    estimated: bool,
    outcome: Outcome,
}

impl UsageGuard {
    /// The id of the request, and of the event.
    pub fn request_id(&self) -> RequestId {
        self.start.request_id
    }

    /// Names the target that serves a chat completion, and its price. Without effect on a tool call.
    pub fn served_by(&mut self, by: &ProviderName, as_model: &str, price: TokenPrice) {
        if let UsageKind::ChatCompletion { provider, upstream_model, .. } = &mut self.start.kind {
            *provider = Some(by.clone());
            *upstream_model = Some(as_model.to_owned());
            self.start.price = Price::Tokens(price);
        }
    }

    /// Sets the tokens that are known so far; `estimated` when no upstream reported them.
    pub fn set_tokens(&mut self, tokens: Tokens, estimated: bool) {
        self.tokens = tokens;
        self.estimated = estimated;
    }

    /// Closes the call. Choose [`Outcome::Error`] only for a call that was certainly not executed or was answered
    /// with an error of its protocol; one whose outcome is unknown is [`Outcome::Partial`].
    pub fn finish(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for UsageGuard {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        metrics::counter!(metric::USAGE_EVENTS, "outcome" => self.outcome.as_str()).increment(1);
        place.send(UsageEvent {
            schema_version: UsageEvent::SCHEMA,
            event_id: self.start.request_id.into(),
            workspace_id: self.start.workspace_id.clone(),
            principal: self.start.principal.clone(),
            replica: self.shared.replica.clone(),
            revision: self.start.revision,
            kind: self.start.kind.clone(),
            outcome: self.outcome,
            started_at: self.started_at,
            duration_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            tokens: self.tokens,
            estimated: self.estimated,
            overrun: false,
            reserved: NanoUsd::ZERO,
            cost: self.start.price.cost(&self.tokens, self.outcome).into(),
        });
        // INVARIANT: after the event is in the queue, so that an idle meter means a complete queue.
        self.shared.open.remove();
    }
}

impl fmt::Debug for UsageGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UsageGuard")
            .field("start", &self.start)
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}
