use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use obol_model::{Clock, Invalidation, KeyContext, KeyHash, VirtualKey};
use parking_lot::RwLock;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cache::Expiring;
use crate::{AuthError, KeyLookup, KeyStore, KeyStoreError, Refusal};

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

/// What virtual keys stand for, from a cache in front of the store.
pub struct Keys {
    store: Arc<dyn KeyStore>,
    clock: Arc<dyn Clock>,
    cache: RwLock<Cache>,
}

struct Cache {
    /// Grows with each purge, so that a read that was under way during one is not cached: what it read may be what the
    /// purge is about.
    purges: u64,
    known: Expiring<KeyHash, Arc<KeyContext>>,
    /// Keys that do not exist, so that guessing the same one again does not load the store.
    unknown: Expiring<KeyHash, ()>,
}

impl Cache {
    /// Keeps a record, unless a newer one is there: two reads of one key may end in another order than the store
    /// answered them. Returns the one that holds.
    fn keep(&mut self, hash: KeyHash, context: Arc<KeyContext>, asked_at: Instant) -> Arc<KeyContext> {
        if let Some(cached) = self.known.get(&hash, asked_at)
            && cached.revision > context.revision
        {
            return Arc::clone(cached);
        }
        self.unknown.remove(&hash);
        self.known.insert(hash, Arc::clone(&context), asked_at);
        context
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

impl Keys {
    /// Nothing is cached yet.
    pub fn new(store: Arc<dyn KeyStore>, clock: Arc<dyn Clock>, options: KeysOptions) -> Arc<Self> {
        let cache = Cache {
            purges: 0,
            known: Expiring::new(options.ttl, options.capacity),
            unknown: Expiring::new(options.negative_ttl, options.capacity),
        };
        Arc::new(Self { store, clock, cache: RwLock::new(cache) })
    }

    /// What a credential stands for. A known key costs one SHA-256 and one look into memory; one that is not cached
    /// costs one read of the store, and one that cannot be a key costs none.
    ///
    /// Cancel-safe: it only reads.
    ///
    /// # Errors
    /// When the credential is no key, an unknown, expired or disabled one, or when the store cannot say.
    pub async fn authenticate(&self, credential: &str) -> Result<Arc<KeyContext>, AuthError> {
        let key: VirtualKey = credential.parse().map_err(|_| AuthError::invalid(Refusal::Malformed))?;
        let hash = key.hash();
        let context = match self.cached(&hash) {
            Some(known) => known.map_err(AuthError::invalid)?,
            None => self.load(&hash).await?,
        };
        self.check(context)
    }

    /// Follows the invalidations until `shutdown`: a key's purges that key, and [`Invalidation::All`], sent after each
    /// (re)subscribe, empties the cache, as does having missed some. Run it once.
    pub async fn run(
        self: Arc<Self>,
        mut invalidations: broadcast::Receiver<Invalidation>,
        shutdown: CancellationToken,
    ) {
        let follow = async {
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
        };
        shutdown.run_until_cancelled(follow).await;
    }

    /// `None` when it has to be asked for.
    fn cached(&self, hash: &KeyHash) -> Option<Result<Arc<KeyContext>, Refusal>> {
        let now = Instant::now();
        let cache = self.cache.read();
        match cache.known.get(hash, now) {
            Some(context) => Some(Ok(Arc::clone(context))),
            None => cache.unknown.get(hash, now).map(|()| Err(Refusal::Unknown)),
        }
    }

    async fn load(&self, hash: &KeyHash) -> Result<Arc<KeyContext>, AuthError> {
        let purges = self.cache.read().purges;
        // Its life counts from the question: what the store said after it is not known.
        let asked_at = Instant::now();
        let lookup = self.store.get(hash).await.map_err(AuthError::Unavailable)?;
        let mut cache = self.cache.write();
        let undisturbed = cache.purges == purges;
        match lookup {
            KeyLookup::Found(context) if undisturbed => Ok(cache.keep(*hash, Arc::new(context), asked_at)),
            KeyLookup::Found(context) => Ok(Arc::new(context)),
            KeyLookup::Absent => {
                if undisturbed {
                    cache.unknown.insert(*hash, (), asked_at);
                }
                Err(AuthError::invalid(Refusal::Unknown))
            }
            KeyLookup::NotLoaded => Err(AuthError::Unavailable(KeyStoreError::NotLoaded)),
        }
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
        cache.purges += 1;
        cache.known.remove(hash);
        cache.unknown.remove(hash);
    }

    fn purge_all(&self) {
        let mut cache = self.cache.write();
        cache.purges += 1;
        cache.known.clear();
        cache.unknown.clear();
    }
}
