use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use obol_model::{
    Clock, EventId, EventPart, Limits, NanoUsd, Outcome, Principal, ProviderName, ReplicaId, RequestId,
    Revision, SignedNanoUsd, TokenPrice, Tokens, UsageEvent, UsageKind, WorkspaceId, metric,
};
use parking_lot::RwLock;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::flusher::Flusher;
use crate::idempotency::{Fate, Idempotency, Keyed, Memory, Recorder, Room, StoredAnswer};
use crate::ledger::{Admission, Closing, Denied, Ledger, LedgerError, Line, Reservation, Settled, Standing};

/// Bounds of the meter.
#[derive(Debug, Clone)]
pub struct MeterOptions {
    /// Calls that are open or closed and not yet taken by the flusher. When it is reached, new calls are refused.
    pub queue: usize,
    /// Most closings of one flight to the ledger.
    pub batch: usize,
    /// How long the flusher waits for company after the first closing of a batch. It trades how long money stays set
    /// aside against flights to the ledger.
    pub linger: Duration,
    /// Longest time for one flight; the ledger's own deadline holds as well.
    pub flight_timeout: Duration,
    /// Longer than any call: what is set aside for longer is booked by whoever finds it.
    pub call_life: Duration,
    /// For how long a call is known by its idempotency key; longer than any call.
    pub idempotency_life: Duration,
    /// The largest body of an answer that is kept to be given again, in bytes.
    pub most_answer: usize,
    /// Bytes of answers that are recorded or wait to be kept, all together; with a ledger in memory, also of those that are
    /// kept. What is beyond is not kept.
    pub most_answers: usize,
}

impl Default for MeterOptions {
    fn default() -> Self {
        Self {
            queue: 16_384,
            batch: 512,
            linger: Duration::from_millis(10),
            flight_timeout: Duration::from_secs(5),
            call_life: Duration::from_mins(10),
            idempotency_life: Duration::from_mins(15),
            most_answer: 1024 * 1024,
            most_answers: 32 * 1024 * 1024,
        }
    }
}

/// Makes a meter and the flusher that belongs to it.
pub fn meter(
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    replica: ReplicaId,
    options: MeterOptions,
) -> (Meter, Flusher) {
    let (queue, inbox) = mpsc::channel(options.queue.max(1));
    let open = Arc::new(Open::default());
    let shared = Shared {
        ledger: ledger.clone(),
        life: options.call_life,
        idempotency_life: options.idempotency_life,
        room: Room::new(options.most_answers, options.most_answer),
        most_parked: (options.queue / 8).max(1),
        clock,
        replica,
        open: open.clone(),
    };
    let meter = Meter { queue, shared: Arc::new(shared) };
    (meter, Flusher::new(inbox, ledger, open, options))
}

/// Most tokens of one call: a million calls of a minute can be summed in Lua's numbers.
const MOST_TOKENS: u64 = 1 << 33;

/// Most attempts of one call that get events of their own.
const MOST_ATTEMPTS: usize = 16;

/// Admits metered calls, one guard each. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Meter {
    queue: mpsc::Sender<Closing>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    ledger: Arc<dyn Ledger>,
    life: Duration,
    idempotency_life: Duration,
    /// For answers that are to be given again.
    room: Room,
    /// As many calls of one workspace may wait for keys that cannot be written.
    most_parked: usize,
    clock: Arc<dyn Clock>,
    replica: ReplicaId,
    open: Arc<Open>,
}

/// Guards that are not closed yet.
#[derive(Debug, Default)]
pub(crate) struct Open {
    count: AtomicUsize,
    none_left: Notify,
    /// Calls that the ledger refuses to close, by workspace; empty as a rule.
    parked: RwLock<HashMap<WorkspaceId, usize>>,
}

impl Open {
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub(crate) fn park(&self, calls: &VecDeque<Closing>) {
        if calls.is_empty() && self.parked.read().is_empty() {
            return;
        }
        let mut parked = HashMap::new();
        for closing in calls {
            *parked.entry(closing.reservation.workspace_id.clone()).or_default() += 1;
        }
        *self.parked.write() = parked;
    }

    fn parked(&self, workspace_id: &WorkspaceId) -> usize {
        self.parked.read().get(workspace_id).copied().unwrap_or_default()
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
    /// Under which the client may send it again.
    pub idempotency: Option<Idempotency>,
}

/// What a call is held to.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    /// The budgets that it draws on; see [`crate::in_scope`].
    pub lines: Vec<Line>,
    /// How fast its principal may call.
    pub limits: Limits,
    /// The most that it can cost.
    pub worst: NanoUsd,
    /// The most tokens that it can take.
    pub tokens: u64,
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
            // Refused before anything was worked on: there was no call.
            Self::Tokens(_) if outcome == Outcome::Error && *tokens == Tokens::default() => NanoUsd::ZERO,
            Self::Tokens(price) => price.cost(tokens),
        }
    }
}

/// One attempt at a target, for information: only the call's own event is summed (DESIGN §12.3).
#[derive(Debug, Clone)]
pub struct Attempt {
    /// Whose target.
    pub provider: ProviderName,
    /// As the provider calls the model.
    pub upstream_model: String,
    /// How it ended.
    pub outcome: Outcome,
    /// When it began.
    pub started_at: Timestamp,
    /// Milliseconds until it ended.
    pub duration_ms: u64,
    /// What is known of its tokens.
    pub tokens: Tokens,
    /// The tokens are our estimate.
    pub estimated: bool,
    /// What they cost.
    pub price: TokenPrice,
}

impl Meter {
    /// Admits one call: takes its place in the queue and sets aside what it may cost, in one flight to the ledger.
    ///
    /// Cancel-safe: what may have been set aside for a call that was abandoned here is given back.
    ///
    /// # Errors
    /// Why the call must not be made.
    pub async fn admit(&self, start: Start, terms: Terms) -> Result<(UsageGuard, Standing), Denied> {
        may_ever_fit(&terms.lines, &terms.limits, terms.worst, terms.tokens)?;
        if self.shared.open.parked(&start.workspace_id) >= self.shared.most_parked {
            return Err(Denied::QueueFull);
        }
        let place = self.queue.clone().try_reserve_owned().map_err(|refused| match refused {
            TrySendError::Full(_) => Denied::QueueFull,
            TrySendError::Closed(_) => Denied::Stopping,
        })?;
        self.shared.open.add();
        let started_at = self.shared.clock.now();
        let Terms { lines, limits, worst, tokens } = terms;
        let reservation = Reservation {
            workspace_id: start.workspace_id.clone(),
            request_id: start.request_id,
            owner: self.shared.replica.clone(),
            principal: start.principal.clone(),
            lines,
            limits,
            amount: worst,
            tokens,
            asked_at: started_at,
            life: self.shared.life,
            idempotency: start
                .idempotency
                .map(|idempotency| Keyed { idempotency, life: self.shared.idempotency_life }),
        };
        let mut guard = UsageGuard {
            place: Some(place),
            shared: self.shared.clone(),
            reservation,
            admission: None,
            started_at,
            began: Instant::now(),
            start,
            tokens: Tokens::default(),
            estimated: false,
            outcome: Outcome::Orphaned,
            attempts: Vec::new(),
            memory: Memory::Untold,
        };
        let if_nobody_settles = guard.event(worst);
        match self.shared.ledger.reserve(&guard.reservation, &if_nobody_settles).await {
            Ok(admission) => {
                let standing = admission.standing;
                guard.admission = Some(admission);
                guard.outcome = Outcome::Partial;
                Ok((guard, standing))
            }
            // It may have been admitted after all; the guard gives it back.
            Err(denied @ Denied::Ledger(_)) => Err(denied),
            Err(denied) => {
                guard.forget();
                Err(denied)
            }
        }
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

/// # Errors
/// When waiting does not help.
fn may_ever_fit(lines: &[Line], limits: &Limits, amount: NanoUsd, tokens: u64) -> Result<(), Denied> {
    if let Some(line) = lines.iter().find(|line| amount > line.limit) {
        return Err(Denied::NeverFits { name: line.name.clone(), limit: line.limit, amount });
    }
    // What is beyond any model would not be counted exactly.
    let limit = limits.tokens_per_minute.unwrap_or(MOST_TOKENS).min(MOST_TOKENS);
    if tokens > limit { Err(Denied::TooManyTokens { limit, tokens }) } else { Ok(()) }
}

/// One admitted call. It becomes exactly one usage event: by [`UsageGuard::finish`], or as [`Outcome::Partial`] with
/// what is known by then when it is dropped.
pub struct UsageGuard {
    place: Option<mpsc::OwnedPermit<Closing>>,
    shared: Arc<Shared>,
    reservation: Reservation,
    /// `None` until the ledger has said yes.
    admission: Option<Admission>,
    started_at: Timestamp,
    began: Instant,
    start: Start,
    tokens: Tokens,
    estimated: bool,
    outcome: Outcome,
    attempts: Vec<Attempt>,
    memory: Memory,
}

impl UsageGuard {
    /// The id of the request, and of the event.
    pub fn request_id(&self) -> RequestId {
        self.start.request_id
    }

    /// Names the target that serves a call of a model, and its price. Without effect on a tool call.
    pub fn served_by(&mut self, by: &ProviderName, as_model: &str, price: TokenPrice) {
        if let Some(call) = self.start.kind.model_call_mut() {
            call.provider = Some(by.clone());
            call.upstream_model = Some(as_model.to_owned());
            self.start.price = Price::Tokens(price);
        }
    }

    /// Sets the tokens that are known so far; `estimated` when no upstream reported them.
    pub fn set_tokens(&mut self, tokens: Tokens, estimated: bool) {
        self.tokens = tokens;
        self.estimated = estimated;
    }

    /// Raises what is set aside to at least `worst` and `tokens`, in all budgets of the call, in the windows of its
    /// admission; without a flight when it is enough already. Before a target that may cost more than the one before.
    ///
    /// Cancel-safe: one that was abandoned may have taken effect or not, and the closing gives back whatever it was. Asking
    /// again, after that or after [`Denied::Ledger`], raises nothing twice.
    ///
    /// # Errors
    /// Why the call must not go on to that target. What was set aside before still is, and the call is still open.
    pub async fn top_up(&mut self, worst: NanoUsd, tokens: u64) -> Result<(), Denied> {
        let Reservation { lines, limits, amount, tokens: most, .. } = &self.reservation;
        let (amount, tokens) = (worst.max(*amount), tokens.max(*most));
        if (amount, tokens) == (self.reservation.amount, *most) {
            return Ok(());
        }
        may_ever_fit(lines, limits, amount, tokens)?;
        // A guard that was handed out was admitted.
        let Some(admission) = &self.admission else { return Err(LedgerError::Closed.into()) };
        self.shared.ledger.top_up(&self.reservation, admission, amount, tokens).await?;
        (self.reservation.amount, self.reservation.tokens) = (amount, tokens);
        Ok(())
    }

    /// Notes an attempt at a target. When there was more than one by the time the call is closed, an event of each is
    /// written with the call's own, which alone is summed: what its caller is charged is what [`UsageGuard::set_tokens`] says
    /// at the price of [`UsageGuard::served_by`], whatever attempts before it cost. Of one attempt the call's event says all.
    /// Those beyond the sixteenth are not kept. Without effect on a tool call.
    pub fn attempt(&mut self, attempt: Attempt) {
        if self.attempts.len() < MOST_ATTEMPTS && self.start.kind.model_call().is_some() {
            self.attempts.push(attempt);
        }
    }

    /// Whether the client may send the request again, under an idempotency key.
    pub fn is_keyed(&self) -> bool {
        self.reservation.idempotency.is_some()
    }

    /// Where the body of the answer is recorded while it is relayed; `None` for a call without an idempotency key.
    pub fn recorder(&self) -> Option<Recorder> {
        self.is_keyed().then(|| Recorder::new(self.shared.room.clone()))
    }

    /// Keeps the answer for whoever sends the request again under its idempotency key, whatever the outcome of the call;
    /// one that is larger than the bound is known not to be there. Without effect on a call without such a key.
    pub fn remember(&mut self, answer: StoredAnswer) {
        if self.is_keyed() {
            self.memory = self.shared.room.keep(answer);
        }
    }

    /// As [`UsageGuard::remember`], of what was recorded of it, to its end.
    pub fn remember_recorded(&mut self, recorder: Recorder, status: u16, content_type: &str) {
        match recorder.finish() {
            Some(body) => {
                self.remember(StoredAnswer { status, content_type: content_type.to_owned(), body });
            }
            None => self.memory = Memory::Unrecorded,
        }
    }

    /// Lets nobody send the request again under its idempotency key, for an [`Outcome::Error`] that may have been
    /// executed and costs nothing all the same. Without effect on a call without such a key.
    pub fn remember_unknown(&mut self) {
        self.memory = Memory::Unknown;
    }

    /// Gives back what was set aside for a call that is not made after all: there is no event of it.
    pub fn cancel(mut self) {
        self.admission = None;
    }

    /// As [`UsageGuard::cancel`], and waits until it is given back, if the ledger answers. Cancel-safe.
    pub async fn give_back(mut self) {
        self.admission = None;
        let void = Closing { reservation: self.reservation.clone(), settled: None };
        // The guard does it once more; one of them is too late to change anything.
        if let Err(e) = self.shared.ledger.close(&[void]).await {
            tracing::debug!(error = %e, "what was set aside is given back later");
        }
    }

    /// Closes the call. Choose [`Outcome::Error`] only for a call that was certainly not executed or was answered
    /// with an error of its protocol; one whose outcome is unknown is [`Outcome::Partial`].
    pub fn finish(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl UsageGuard {
    fn event(&self, cost: NanoUsd) -> UsageEvent {
        UsageEvent {
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
            overrun: cost > self.reservation.amount,
            reserved: self.reservation.amount,
            cost: SignedNanoUsd::from(cost),
        }
    }

    /// The events of the attempts, when there was more than one.
    fn attempts(&mut self) -> Vec<UsageEvent> {
        let attempts = std::mem::take(&mut self.attempts);
        if attempts.len() < 2 {
            return Vec::new();
        }
        let events = attempts.into_iter().zip(1..).map(|(attempt, n)| {
            let mut kind = self.start.kind.clone();
            if let Some(call) = kind.model_call_mut() {
                call.provider = Some(attempt.provider);
                call.upstream_model = Some(attempt.upstream_model);
            }
            UsageEvent {
                event_id: EventId { request: self.start.request_id, part: EventPart::Attempt(n) },
                kind,
                outcome: attempt.outcome,
                started_at: attempt.started_at,
                duration_ms: attempt.duration_ms,
                tokens: attempt.tokens,
                estimated: attempt.estimated,
                overrun: false,
                reserved: NanoUsd::ZERO,
                ..self.event(Price::Tokens(attempt.price).cost(&attempt.tokens, attempt.outcome))
            }
        });
        events.collect()
    }

    /// Nothing was set aside, and nothing is to be closed.
    fn forget(mut self) {
        self.place = None;
        self.shared.open.remove();
    }
}

impl Drop for UsageGuard {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        let settled = self.admission.take().map(|admission| {
            metrics::counter!(metric::USAGE_EVENTS, "outcome" => self.outcome.as_str()).increment(1);
            let event = self.event(self.start.price.cost(&self.tokens, self.outcome));
            let memory = std::mem::take(&mut self.memory);
            let fate = self.reservation.idempotency.map(|_| Fate::of(memory, &event));
            Settled { admission, event, attempts: self.attempts(), fate }
        });
        place.send(Closing { reservation: self.reservation.clone(), settled });
        // INVARIANT: after the closing is in the queue, so that an idle meter means a complete queue.
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
