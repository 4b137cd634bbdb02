//! What is set aside and what was spent (DESIGN §12.1, §12.3, §12.4).

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::{
    Budget, BudgetScope, KeyBudget, Kind, Limits, ModelName, NanoUsd, Principal, ReplicaId, RequestId,
    UsageEvent, Window, WorkspaceId,
};

use crate::idempotency::{Fate, Keyed, Repeated};

/// A budget that a call draws on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// What refusals call it.
    pub name: String,
    /// Whose counter it is.
    pub counter: Counter,
    /// In which time.
    pub window: Window,
    /// The most that may be spent.
    pub limit: NanoUsd,
}

/// Whose spending a counter counts. Its text is part of the counter's key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Counter(String);

impl Counter {
    fn of(scope: &BudgetScope, principal: &Principal) -> Self {
        Self(match scope {
            BudgetScope::Workspace => "workspace".to_owned(),
            BudgetScope::Key => principal.to_string(),
            BudgetScope::Model(model) => format!("model:{model}"),
        })
    }

    /// As [`Counter::as_str`] shows it.
    pub(crate) fn from_text(text: String) -> Self {
        Self(text)
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The budgets that a call draws on: those of the workspace, of its model, and of its key. A key's own budget takes the
/// place of the one that every key has for the same window.
pub fn in_scope(
    budgets: &[Budget],
    own: &[KeyBudget],
    principal: &Principal,
    model: Option<&ModelName>,
) -> Vec<Line> {
    let applies = |budget: &&Budget| match &budget.scope {
        BudgetScope::Workspace => true,
        BudgetScope::Model(of) => Some(of) == model,
        BudgetScope::Key => own.iter().all(|own| own.window != budget.window),
    };
    let shared = budgets.iter().filter(applies).map(|budget| Line {
        name: budget.name.clone(),
        counter: Counter::of(&budget.scope, principal),
        window: budget.window,
        limit: budget.limit,
    });
    let own = own.iter().map(|own| Line {
        name: format!("key {}", own.window.as_str()),
        counter: Counter::of(&BudgetScope::Key, principal),
        window: own.window,
        limit: own.limit,
    });
    shared.chain(own).collect()
}

/// What a call needs to be admitted.
#[derive(Debug, Clone)]
pub struct Reservation {
    /// Whose money.
    pub workspace_id: WorkspaceId,
    /// Which call. Asking again for the same one changes nothing.
    pub request_id: RequestId,
    /// The process that makes the call.
    pub owner: ReplicaId,
    /// Who pays, and is limited.
    pub principal: Principal,
    /// The budgets that it draws on.
    pub lines: Vec<Line>,
    /// How fast its principal may call.
    pub limits: Limits,
    /// The most that it can cost.
    pub amount: NanoUsd,
    /// The most tokens that it can take.
    pub tokens: u64,
    /// When the replica asked, by its own clock, which names the windows; Redis's clock chooses among them.
    pub asked_at: Timestamp,
    /// How long after its admission it is overdue, whoever owns it.
    pub life: Duration,
    /// Under which it is not made again.
    pub idempotency: Option<Keyed>,
}

/// An admitted reservation: which windows were chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// For each line, previous (0), current (1) or next (2) by the replica's clock; before them the minute's.
    pub(crate) windows: Vec<u8>,
    /// Where the caller stands.
    pub standing: Standing,
}

/// What is left of the rates; `None` where there is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Standing {
    /// Requests left in this minute.
    pub requests_left: Option<u64>,
    /// Tokens left in this minute.
    pub tokens_left: Option<u64>,
    /// Until the next minute.
    pub reset: Duration,
}

/// Why a call is not admitted. Nothing was set aside.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// A budget has not enough left.
    #[error("the budget `{name}` has {left} left")]
    Budget {
        /// Which.
        name: String,
        /// What is left of it, less than the call may cost.
        left: NanoUsd,
        /// What of it is set aside for calls under way, and may come back.
        held: NanoUsd,
        /// The most that the call can cost.
        amount: NanoUsd,
        /// Until its next window; `None` when it has none.
        reset: Option<Duration>,
    },
    /// The call may cost more than a budget has in all, so that waiting does not help.
    #[error("the call may cost {amount}, more than the whole budget `{name}` of {limit}")]
    NeverFits {
        /// Which.
        name: String,
        /// All of it.
        limit: NanoUsd,
        /// The most that the call can cost.
        amount: NanoUsd,
    },
    /// The call may take more tokens than are allowed in a minute.
    #[error("the call may take {tokens} tokens, more than the {limit} that are allowed in a minute")]
    TooManyTokens {
        /// In a minute.
        limit: u64,
        /// The most that the call can take.
        tokens: u64,
    },
    /// Too many calls or tokens in this minute.
    #[error("the limit of {} in a minute is reached", .what.as_str())]
    Rate {
        /// Of what.
        what: Rate,
        /// What is left of it.
        left: u64,
        /// Until the next minute.
        reset: Duration,
    },
    /// Too many calls at once.
    #[error("too many calls at once")]
    Concurrency,
    /// As many calls as the queue holds are open or wait for the flusher.
    #[error("the usage queue is full")]
    QueueFull,
    /// As many events of the workspace as there may be wait to be collected.
    #[error("too many usage events wait to be collected")]
    StreamFull,
    /// The flusher drains and takes nothing new.
    #[error("the usage queue is closed")]
    Stopping,
    /// It was sent before under the same idempotency key.
    #[error(transparent)]
    Repeated(#[from] Repeated),
    /// The ledger could not say yes.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// What a rate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// Calls that begin.
    Requests,
    /// Tokens, those set aside included.
    Tokens,
}

impl Rate {
    /// The stable word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
        }
    }
}

impl Denied {
    /// The kind of the refusal.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Budget { .. } | Self::Rate { .. } | Self::Concurrency => Kind::RateLimited,
            Self::NeverFits { .. } | Self::TooManyTokens { .. } => Kind::InvalidRequest,
            Self::Repeated(Repeated::OtherRequest) => Kind::Unprocessable,
            Self::Repeated(_) => Kind::Conflict,
            Self::QueueFull | Self::StreamFull | Self::Ledger(_) => Kind::Unavailable,
            Self::Stopping => Kind::Stopping,
        }
    }

    /// A stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Budget { .. } => "budget_exceeded",
            Self::NeverFits { .. } => "exceeds_budget",
            Self::TooManyTokens { .. } => "exceeds_token_limit",
            Self::Rate { .. } => "rate_limit_exceeded",
            Self::Concurrency => "too_many_concurrent_requests",
            Self::QueueFull | Self::Stopping => "meter_unavailable",
            Self::Repeated(Repeated::Answered(_)) => "idempotency_answered",
            Self::Repeated(Repeated::InFlight) => "idempotency_in_flight",
            Self::Repeated(Repeated::OtherRequest) => "idempotency_key_reused",
            Self::Repeated(Repeated::OutcomeUnknown) => "idempotency_outcome_unknown",
            Self::Repeated(Repeated::NotReplayable) => "idempotency_not_replayable",
            Self::StreamFull => "usage_stream_full",
            Self::Ledger(_) => "ledger_unavailable",
        }
    }

    /// When asking again may help.
    pub fn reset(&self) -> Option<Duration> {
        match self {
            // What others do not spend is there again as soon as they end.
            Self::Budget { left, held, amount, .. } if *left + *held >= *amount => {
                Some(Duration::from_secs(1))
            }
            Self::Budget { reset, .. } => *reset,
            Self::Rate { reset, .. } => Some(*reset),
            Self::Concurrency
            | Self::QueueFull
            | Self::StreamFull
            | Self::Stopping
            | Self::Repeated(Repeated::InFlight)
            | Self::Ledger(_) => Some(Duration::from_secs(1)),
            Self::NeverFits { .. } | Self::TooManyTokens { .. } | Self::Repeated(_) => None,
        }
    }
}

/// Why the ledger cannot say. It is never a yes (DESIGN §6.2).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// It did not answer. What was asked for may have happened.
    #[error("the ledger cannot be reached: {0}")]
    Unavailable(String),
    /// Its counters were lost, and nobody has put them back yet (DESIGN §12.6).
    #[error("the ledger of the workspace was lost and is not seeded yet")]
    Lost,
    /// The clocks of this process and of the ledger are more than a window apart.
    #[error("the clocks of this replica and of Redis are too far apart")]
    Clock,
    /// The call was closed before it was admitted.
    #[error("the call was closed before it was admitted")]
    Closed,
}

/// How a call is closed.
#[derive(Debug, Clone)]
pub struct Closing {
    pub(crate) reservation: Reservation,
    /// `None` when nobody knows whether it was admitted; then the call was never made.
    pub(crate) settled: Option<Settled>,
}

impl Closing {
    /// Whether others may be refused until this is closed.
    pub(crate) fn is_awaited(&self) -> bool {
        let Reservation { lines, limits, idempotency, .. } = &self.reservation;
        !lines.is_empty()
            || limits.concurrency.is_some()
            || limits.tokens_per_minute.is_some()
            || idempotency.is_some()
    }
}

/// What a call came to.
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    pub(crate) admission: Admission,
    pub(crate) event: UsageEvent,
    /// One each, when there was more than one.
    pub(crate) attempts: Vec<UsageEvent>,
    /// What is known of it under its idempotency key, if it has one.
    pub(crate) fate: Option<Fate>,
}

/// What the ledger did not close.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloseError {
    /// It did not answer. Each closing may or may not have taken effect; doing it again does no harm.
    #[error("the ledger cannot be reached: {reason}")]
    Unavailable {
        /// For the log.
        reason: String,
    },
    /// It closed the others and refused these.
    #[error("the ledger refused {} closings: {reason}", refused.len())]
    Refused {
        /// Positions in the batch, ascending.
        refused: Vec<usize>,
        /// What it said of the first one, for the log.
        reason: String,
    },
}

/// A reservation that is open, as a sweep finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// Which process made the call.
    pub owner: ReplicaId,
    /// Which call.
    pub request_id: RequestId,
    /// Whether its time is over.
    pub overdue: bool,
}

/// What a workspace's counters say, and what they should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audited {
    /// The key of the counter.
    pub counter: String,
    /// What was spent.
    pub settled: i64,
    /// What is set aside. Enforced is the sum of both.
    pub reserved: i64,
    /// What the open reservations say that is set aside.
    pub open: i64,
}

/// Reservations, counters and usage events of workspaces.
///
/// Implementations are atomic per call: budgets, limits, reservation and event of one call change together.
#[async_trait]
pub trait Ledger: Debug + Send + Sync + 'static {
    /// Sets aside what a call may cost, or says why not. `event` is what is written when nobody settles it.
    ///
    /// Not cancel-safe: one that was abandoned may have taken effect, and has to be closed.
    ///
    /// # Errors
    /// Why the call must not be made.
    async fn reserve(&self, reservation: &Reservation, event: &UsageEvent) -> Result<Admission, Denied>;

    /// Raises what is set aside for an open call to at least `amount` and `tokens`, in all of its budgets, in the windows of
    /// its admission, or says why not and changes nothing.
    ///
    /// Not cancel-safe: one that was abandoned may have taken effect. The closing gives back whatever it was.
    ///
    /// # Errors
    /// Why it is as it was.
    async fn top_up(
        &self,
        reservation: &Reservation,
        admission: &Admission,
        amount: NanoUsd,
        tokens: u64,
    ) -> Result<(), Denied>;

    /// Closes calls: moves the counters and writes the events, each exactly once, however often it is asked.
    ///
    /// # Errors
    /// What was not closed, or cannot be known to be.
    async fn close(&self, closings: &[Closing]) -> Result<(), CloseError>;

    /// Which of these calls it still knows: those that are open, and for a while those that were closed. What it does not
    /// know it may have closed longer ago.
    ///
    /// # Errors
    /// When the ledger could not be asked.
    async fn known(&self, closings: &[Closing]) -> Result<Vec<bool>, LedgerError>;

    /// Workspaces that may have open reservations.
    ///
    /// # Errors
    /// When the ledger could not be asked.
    async fn workspaces(&self) -> Result<Vec<WorkspaceId>, LedgerError>;

    /// Open reservations of a workspace, at most `limit`, the first to be overdue first. One that was admitted within the
    /// last `young` is left out unless it is overdue: the lease of its owner may be about to appear.
    ///
    /// # Errors
    /// When the ledger could not be asked.
    async fn open(
        &self,
        workspace_id: &WorkspaceId,
        young: Duration,
        limit: usize,
    ) -> Result<Vec<Open>, LedgerError>;

    /// Books reservations that nobody settles, at what was set aside; answers how many there were.
    ///
    /// # Errors
    /// When the ledger could not be asked.
    async fn orphan(&self, workspace_id: &WorkspaceId, orphans: &[Open]) -> Result<usize, LedgerError>;

    /// All counters of a workspace beside its open reservations. Not a snapshot: calls go on meanwhile.
    ///
    /// # Errors
    /// When the ledger could not be asked.
    async fn audit(&self, workspace_id: &WorkspaceId) -> Result<Vec<Audited>, LedgerError>;
}
