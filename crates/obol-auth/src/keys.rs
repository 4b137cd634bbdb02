use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _, Shared};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use obol_model::{Causes, Clock, Invalidation, KeyContext, KeyHash, VirtualKey};
use parking_lot::RwLock;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::cache::Expiring;
use crate::source::Source;
use crate::{AuthError, ControlKeys, KeyStore, KeyStoreError, Refusal};

/// How long a record is used without a sign that no invalidation of it was missed: with pub/sub dead, a revocation takes
/// effect within this time (DESIGN §8.1).
const UNFOLLOWED: Duration = Duration::from_secs(30);

/// Keys in use are read again in the background at this age, looked at this often, so that each is compared with the
/// store within 30 seconds whatever messages came (DESIGN §7.5), and no request waits for it.
const AHEAD: Duration = Duration::from_secs(15);
const AHEAD_TICK: Duration = Duration::from_secs(10);

/// How many keys are read at a time in the background.
const READS_AT_A_TIME: usize = 16;

/// Bounds of what [`Keys`] remembers.
#[derive(Debug, Clone, Copy)]
pub struct KeysOptions {
    /// The longest life of a cached record: `OBOL_KEY_TTL_S`.
    pub ttl: Duration,
    /// The longest life of the knowledge that a key does not exist.
    pub negative_ttl: Duration,
    /// The most records, and the most keys that do not exist, in memory. One more takes the place of the oldest.
    pub capacity: usize,
}

impl Default for KeysOptions {
    fn default() -> Self {
        Self { ttl: Duration::from_mins(1), negative_ttl: Duration::from_secs(5), capacity: 10_000 }
    }
}

/// Until when it is certain that no invalidation was missed; `None` when nobody ever listened. Asked for on requests.
pub type ReconciledAt = Arc<dyn Fn() -> Option<Instant> + Send + Sync>;

/// What [`Keys`] are made of.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "a bag of handles for one call")]
pub struct KeysParts {
    /// Where records are read from.
    pub store: Arc<dyn KeyStore>,
    /// Who is asked when the store does not hold every key; without it such questions have no answer.
    pub control: Option<Arc<dyn ControlKeys>>,
    /// How current the invalidations are that [`Keys::run`] follows.
    pub reconciled_at: ReconciledAt,
    /// Wall time, for the end of keys.
    pub clock: Arc<dyn Clock>,
    /// Bounds.
    pub options: KeysOptions,
}

/// What virtual keys stand for, from a cache in front of the store.
pub struct Keys {
    source: Arc<Source>,
    reconciled_at: ReconciledAt,
    clock: Arc<dyn Clock>,
    cache: RwLock<Cache>,
}

/// A record; `None` when there is no such key.
type Answer = Option<Arc<KeyContext>>;
type Outcome = Result<Answer, KeyStoreError>;

struct Cache {
    known: Expiring<KeyHash, Known>,
    /// Keys that do not exist, so that guessing the same one again does not load the store.
    unknown: Expiring<KeyHash, ()>,
    /// At most one read of each key that is worth keeping. A purge takes the reads away that are under way: what they
    /// bring may be what the purge is about, so those who wait for it get it, nobody keeps it, and whoever comes later
    /// reads anew.
    reads: HashMap<KeyHash, Read>,
    /// The number of the last read that began.
    begun: u64,
}

#[derive(Debug)]
struct Known {
    context: Arc<KeyContext>,
    /// When the read *began*: what the store said after it is not known.
    asked_at: Instant,
    /// Whether a request used it since.
    used: AtomicBool,
}

struct Read {
    number: u64,
    asked_at: Instant,
    /// INVARIANT: not 0, so reads are bounded by the requests in flight.
    waiting: usize,
    /// Whoever waits drives it, so that one who goes away fails nobody.
    outcome: Shared<BoxFuture<'static, Outcome>>,
}

impl Cache {
    /// Keeps what a read brought, if it is still wanted, and returns what holds.
    fn settle(&mut self, hash: KeyHash, number: u64, outcome: Outcome) -> Outcome {
        let wanted = self.reads.get(&hash).filter(|read| read.number == number).map(|read| read.asked_at);
        if wanted.is_some() {
            // Also when it failed: whoever comes now asks again.
            self.reads.remove(&hash);
        }
        let answer = self.newest(&hash, outcome?);
        match (&answer, wanted) {
            (_, None) => {}
            (Some(context), Some(asked_at)) => {
                self.unknown.remove(&hash);
                let known = Known { context: Arc::clone(context), asked_at, used: AtomicBool::new(false) };
                self.known.insert(hash, known, asked_at);
            }
            (None, Some(asked_at)) => {
                self.known.remove(&hash);
                self.unknown.insert(hash, (), asked_at);
            }
        }
        Ok(answer)
    }

    /// The record that is in memory, when the one that was found is older (a store that was failed over may go back in
    /// time) or the same.
    fn newest(&self, hash: &KeyHash, found: Answer) -> Answer {
        let found = found?;
        match self.known.get(hash, Instant::now()) {
            Some(known) if known.context.revision > found.revision || known.context == found => {
                Some(Arc::clone(&known.context))
            }
            _ => Some(found),
        }
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

impl Keys {
    /// Nothing is cached yet.
    pub fn new(parts: KeysParts) -> Arc<Self> {
        let KeysParts { store, control, reconciled_at, clock, options } = parts;
        let cache = Cache {
            known: Expiring::new(options.ttl, options.capacity),
            unknown: Expiring::new(options.negative_ttl, options.capacity),
            reads: HashMap::new(),
            begun: 0,
        };
        let source = Arc::new(Source::new(store, control));
        Arc::new(Self { source, reconciled_at, clock, cache: RwLock::new(cache) })
    }

    /// What a credential stands for. A known key costs one SHA-256 and one look into memory; one that is not cached
    /// costs one read of the store, which concurrent requests share, and one that cannot be a key costs none.
    ///
    /// Cancel-safe: it only reads.
    ///
    /// # Errors
    /// When the credential is no key, an unknown, expired or disabled one, or when the store cannot say.
    pub async fn authenticate(&self, credential: &str) -> Result<Arc<KeyContext>, AuthError> {
        let hash = VirtualKey::hash_of(credential).map_err(|_| AuthError::invalid(Refusal::Malformed))?;
        let answer = match self.cached(&hash) {
            Some(answer) => answer,
            None => self.read(&hash).await.map_err(AuthError::Unavailable)?,
        };
        self.check(answer.ok_or(AuthError::invalid(Refusal::Unknown))?)
    }

    /// Follows the invalidations until `shutdown`: a key's purges that key, and [`Invalidation::All`], sent after each
    /// (re)subscribe, empties the cache, as does having missed some. Keeps the keys in use current. Run it once.
    pub async fn run(
        self: Arc<Self>,
        invalidations: broadcast::Receiver<Invalidation>,
        shutdown: CancellationToken,
    ) {
        // Side by side: a purge waits for no read.
        let all = async { tokio::join!(self.follow(invalidations), self.reconcile_regularly()) };
        shutdown.run_until_cancelled(all).await;
    }

    async fn follow(&self, mut invalidations: broadcast::Receiver<Invalidation>) {
        loop {
            match invalidations.recv().await {
                Ok(Invalidation::Key { hash, .. }) => self.purge(&hash),
                Ok(Invalidation::All) => self.purge_all(),
                Ok(Invalidation::Workspace { .. } | Invalidation::Policy { .. }) => {}
                Err(RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "invalidations missed, key cache emptied");
                    self.purge_all();
                }
                Err(RecvError::Closed) => return self.purge_all(),
            }
        }
    }

    async fn reconcile_regularly(&self) {
        let mut ticks = tokio::time::interval(AHEAD_TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Err(why) = self.reconcile().await {
                // What is in memory ends by itself; the next round tries again.
                tracing::debug!(error = %Causes(&why), "keys could not be reconciled");
            }
        }
    }

    async fn reconcile(&self) -> Result<(), KeyStoreError> {
        let read = |hash: KeyHash| async move { self.read(&hash).await.map(drop) };
        stream::iter(self.due()).map(Ok).try_for_each_concurrent(READS_AT_A_TIME, read).await
    }

    /// The older records that are in use, to be read again. Forgets the older ones that are not.
    fn due(&self) -> Vec<KeyHash> {
        let now = Instant::now();
        let (mut used, mut unused) = (Vec::new(), Vec::new());
        for (hash, known) in self.cache.read().known.iter(now) {
            if now.duration_since(known.asked_at) >= AHEAD {
                let list = if known.used.load(Ordering::Relaxed) { &mut used } else { &mut unused };
                list.push(*hash);
            }
        }
        let mut cache = self.cache.write();
        for hash in &unused {
            cache.known.remove(hash);
        }
        used
    }

    /// `None` when it has to be asked for.
    fn cached(&self, hash: &KeyHash) -> Option<Answer> {
        let now = Instant::now();
        let cache = self.cache.read();
        let Some(known) = cache.known.get(hash, now) else {
            return cache.unknown.get(hash, now).map(|()| None);
        };
        let is_current = |since: Instant| now.duration_since(since) < UNFOLLOWED;
        if !is_current(known.asked_at) && !(self.reconciled_at)().is_some_and(is_current) {
            return None;
        }
        // Looked at before it is written: all requests with this key share the cache line.
        if !known.used.load(Ordering::Relaxed) {
            known.used.store(true, Ordering::Relaxed);
        }
        Some(Some(Arc::clone(&known.context)))
    }

    /// Reads a key, or waits for the read that is under way.
    async fn read(&self, hash: &KeyHash) -> Outcome {
        let seat = Seat::take(self, *hash);
        let outcome = seat.outcome.clone().await;
        self.cache.write().settle(*hash, seat.number, outcome)
    }

    /// What holds at each use, however long ago the record was read.
    fn check(&self, context: Arc<KeyContext>) -> Result<Arc<KeyContext>, AuthError> {
        if context.expires_at.is_some_and(|end| end <= self.clock.now()) {
            return Err(AuthError::invalid(Refusal::Expired));
        }
        if context.disabled { Err(AuthError::Disabled) } else { Ok(context) }
    }

    fn purge(&self, hash: &KeyHash) {
        let mut cache = self.cache.write();
        cache.known.remove(hash);
        cache.unknown.remove(hash);
        cache.reads.remove(hash);
    }

    fn purge_all(&self) {
        let mut cache = self.cache.write();
        cache.known.clear();
        cache.unknown.clear();
        cache.reads.clear();
    }
}

/// One who waits for a read; the last one to leave ends it.
struct Seat<'a> {
    keys: &'a Keys,
    hash: KeyHash,
    number: u64,
    outcome: Shared<BoxFuture<'static, Outcome>>,
}

impl<'a> Seat<'a> {
    fn take(keys: &'a Keys, hash: KeyHash) -> Self {
        let mut cache = keys.cache.write();
        if let Some(read) = cache.reads.get_mut(&hash) {
            read.waiting += 1;
            return Self { keys, hash, number: read.number, outcome: read.outcome.clone() };
        }
        cache.begun += 1;
        let number = cache.begun;
        let source = Arc::clone(&keys.source);
        let outcome = async move { Ok(source.read(&hash).await?.map(Arc::new)) }.boxed().shared();
        let read = Read { number, asked_at: Instant::now(), waiting: 1, outcome: outcome.clone() };
        cache.reads.insert(hash, read);
        Self { keys, hash, number, outcome }
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut cache = self.keys.cache.write();
        if let Some(read) = cache.reads.get_mut(&self.hash)
            && read.number == self.number
        {
            read.waiting -= 1;
            if read.waiting == 0 {
                cache.reads.remove(&self.hash);
            }
        }
    }
}
