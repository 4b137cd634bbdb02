use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::RedisError;

/// After so many failures in a row the next attempt waits this long, with jitter, counted from where the last one
/// began: long enough that an outage is no storm of connects, short enough that a server that is back is in use within
/// a second.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
];

/// Between the end of an attempt and the next one, however long it took.
const BREATH: Duration = Duration::from_millis(20);

/// What is lost sooner than this after it was made counts as a failure: a server that takes connections and drops them
/// must not be asked in a loop.
const STABLE: Duration = Duration::from_secs(1);

type Attempt<T> = Shared<BoxFuture<'static, Result<T, RedisError>>>;
type Make<T> = Box<dyn Fn(Lease<T>) -> BoxFuture<'static, Result<T, RedisError>> + Send + Sync>;

/// Something that is shared by all who need it and made again when it is lost: a connection, the map of a Cluster.
///
/// An attempt is one future that all who wait for it poll: whoever gives up leaves it to the others, and no task is
/// needed. While a keeper runs ([`Renewed::tend`]) attempts after a failure are the keeper's alone and everybody else
/// is refused at once; without one the next who asks makes the next attempt, as soon as it is due.
pub(crate) struct Renewed<T> {
    /// What the log calls it.
    what: &'static str,
    server: Arc<str>,
    /// The longest attempt.
    limit: Duration,
    make: Make<T>,
    state: Mutex<State<T>>,
    keepers: AtomicUsize,
    /// Counts losses.
    lost: watch::Sender<u64>,
    /// Whether the last thing that was logged is good news.
    healthy: AtomicBool,
}

struct State<T> {
    /// Grows with each attempt: a late word about an earlier one must not end the present one.
    number: u64,
    /// Attempts that failed, and values that were soon lost, in a row.
    failures: u32,
    phase: Phase<T>,
}

enum Phase<T> {
    /// Nothing is known against it: who asks makes it.
    Idle,
    Making {
        attempt: Attempt<T>,
        began: Instant,
        /// Why there was none before, when that was known.
        after: Option<RedisError>,
    },
    Made {
        value: T,
        since: Instant,
    },
    Failed {
        until: Instant,
        why: RedisError,
    },
}

/// Ends one value of a [`Renewed`], and no later one.
pub(crate) struct Lease<T> {
    of: Weak<Renewed<T>>,
    number: u64,
}

impl<T> Clone for Lease<T> {
    fn clone(&self) -> Self {
        Self { of: self.of.clone(), number: self.number }
    }
}

impl<T> Lease<T> {
    /// Takes the value out of use. Who works with it keeps it until the end of that work.
    pub(crate) fn retire(&self, reason: &'static str) {
        if let Some(of) = self.of.upgrade() {
            of.retire(self.number, reason);
        }
    }
}

enum Ask<T> {
    Have(T),
    Refused(RedisError),
    Wait(Attempt<T>, u64),
}

impl<T> Renewed<T> {
    /// Its losses, counted.
    pub(crate) fn losses(&self) -> watch::Receiver<u64> {
        self.lost.subscribe()
    }

    pub(crate) fn kept(&self) -> bool {
        self.keepers.load(Ordering::Relaxed) > 0
    }

    fn retire(&self, number: u64, reason: &'static str) {
        let now = Instant::now();
        let old = {
            let mut state = self.state.lock();
            let Phase::Made { since, .. } = &state.phase else { return };
            if state.number != number {
                return;
            }
            state.failures = if now - *since < STABLE { state.failures.saturating_add(1) } else { 0 };
            // Once is forgiven: a connection may break at any time.
            let next = if state.failures <= 1 {
                Phase::Idle
            } else {
                let why = RedisError::Lost { server: self.server.clone(), reason };
                Phase::Failed { until: now + pause(state.failures), why }
            };
            std::mem::replace(&mut state.phase, next)
        };
        drop(old);
        self.lost.send_modify(|losses| *losses = losses.wrapping_add(1));
        if self.healthy.swap(false, Ordering::Relaxed) {
            tracing::warn!(server = &*self.server, reason, "{} lost", self.what);
        }
    }
}

impl<T: Clone + Send + Sync + 'static> Renewed<T> {
    pub(crate) fn new<M>(what: &'static str, server: Arc<str>, limit: Duration, make: M) -> Arc<Self>
    where
        M: Fn(Lease<T>) -> BoxFuture<'static, Result<T, RedisError>> + Send + Sync + 'static,
    {
        Arc::new(Self {
            what,
            server,
            limit,
            make: Box::new(make),
            state: Mutex::new(State { number: 0, failures: 0, phase: Phase::Idle }),
            keepers: AtomicUsize::new(0),
            lost: watch::Sender::new(0),
            healthy: AtomicBool::new(true),
        })
    }

    /// The value, when it is there.
    pub(crate) fn now(&self) -> Option<T> {
        match &self.state.lock().phase {
            Phase::Made { value, .. } => Some(value.clone()),
            _ => None,
        }
    }

    /// The value, made first when there is none.
    ///
    /// Cancel-safe: the attempt goes on for others that wait, or when the next one asks.
    pub(crate) async fn get(self: &Arc<Self>) -> Result<T, RedisError> {
        self.wait(false).await
    }

    async fn wait(self: &Arc<Self>, keeper: bool) -> Result<T, RedisError> {
        match self.ask(keeper) {
            Ask::Have(value) => Ok(value),
            Ask::Refused(why) => Err(why),
            Ask::Wait(attempt, number) => {
                let outcome = attempt.await;
                self.settle(number, &outcome);
                outcome
            }
        }
    }

    fn ask(self: &Arc<Self>, keeper: bool) -> Ask<T> {
        let left_to_keeper = !keeper && self.kept();
        let now = Instant::now();
        let mut state = self.state.lock();
        let after = match &state.phase {
            Phase::Made { value, .. } => return Ask::Have(value.clone()),
            Phase::Failed { until, why } if left_to_keeper || now < *until => {
                return Ask::Refused(why.clone());
            }
            Phase::Making { after: Some(why), .. } if left_to_keeper => return Ask::Refused(why.clone()),
            // An older one was abandoned by all who waited for it: its own limit would fail it at once.
            Phase::Making { attempt, began, .. } if now - *began < self.limit => {
                return Ask::Wait(attempt.clone(), state.number);
            }
            Phase::Failed { why, .. } => Some(why.clone()),
            Phase::Making { after, .. } => after.clone(),
            Phase::Idle => None,
        };
        state.number += 1;
        let lease = Lease { of: Arc::downgrade(self), number: state.number };
        let attempt = self.bounded((self.make)(lease)).boxed().shared();
        state.phase = Phase::Making { attempt: attempt.clone(), began: now, after };
        Ask::Wait(attempt, state.number)
    }

    fn bounded(
        &self,
        attempt: BoxFuture<'static, Result<T, RedisError>>,
    ) -> impl Future<Output = Result<T, RedisError>> + Send + 'static {
        let (limit, server) = (self.limit, self.server.clone());
        async move { timeout(limit, attempt).await.unwrap_or_else(|_| Err(RedisError::silent(&server))) }
    }

    fn settle(&self, number: u64, outcome: &Result<T, RedisError>) {
        let now = Instant::now();
        {
            let mut state = self.state.lock();
            // Only the first of those that waited.
            let Phase::Making { began, .. } = &state.phase else { return };
            if state.number != number {
                return;
            }
            let began = *began;
            state.phase = match outcome {
                Ok(value) => Phase::Made { value: value.clone(), since: now },
                Err(why) => {
                    state.failures = state.failures.saturating_add(1);
                    let until = (began + pause(state.failures)).max(now + jittered(BREATH));
                    Phase::Failed { until, why: why.clone() }
                }
            };
        }
        let server = &*self.server;
        match outcome {
            Ok(_) if !self.healthy.swap(true, Ordering::Relaxed) => {
                tracing::info!(server, "{} restored", self.what);
            }
            Err(why) if self.healthy.swap(false, Ordering::Relaxed) => {
                tracing::warn!(server, error = %why, "{} cannot be made", self.what);
            }
            Ok(_) | Err(_) => {}
        }
    }

    /// Makes it again whenever it is lost and, while it is there, looks after it with `look` every `period`. Has no end.
    pub(crate) async fn tend(self: Arc<Self>, period: Duration, look: impl Fn(T) -> BoxFuture<'static, ()>) {
        let _keeper = Keeper::new(&self.keepers);
        let mut lost = self.losses();
        loop {
            lost.mark_unchanged();
            match self.wait(true).await {
                Ok(value) => tokio::select! {
                    _ = lost.changed() => {}
                    () = async { sleep(jittered(period)).await; look(value).await; } => {}
                },
                Err(_) => sleep_until(self.due()).await,
            }
        }
    }

    /// When the next attempt may begin.
    fn due(&self) -> Instant {
        match self.state.lock().phase {
            Phase::Failed { until, .. } => until,
            _ => Instant::now(),
        }
    }
}

/// Its life says that somebody looks after a [`Renewed`].
struct Keeper<'a>(&'a AtomicUsize);

impl<'a> Keeper<'a> {
    fn new(keepers: &'a AtomicUsize) -> Self {
        keepers.fetch_add(1, Ordering::Relaxed);
        Self(keepers)
    }
}

impl Drop for Keeper<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn pause(failures: u32) -> Duration {
    let step = usize::try_from(failures.saturating_sub(1)).unwrap_or(usize::MAX).min(PAUSES.len() - 1);
    jittered(PAUSES.get(step).copied().unwrap_or_default())
}

/// Between half of it and all of it, so that replicas that lost one server do not come back as one.
pub(crate) fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(rand::random_range(0.5..=1.0))
}
