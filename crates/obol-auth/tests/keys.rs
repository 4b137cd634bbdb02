//! The key cache (DESIGN §8.1) on a paused clock.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::poll;
use jiff::Timestamp;
use obol_auth::{AuthError, EmbeddedKeys, KeyLookup, KeyStore, KeyStoreError, Keys, KeysOptions, Refusal};
use obol_model::{Clock, Invalidation, KeyContext, KeyHash, Kind, ManualClock, VirtualKey};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, broadcast};
use tokio::time::advance;
use tokio_util::sync::CancellationToken;

const TTL: Duration = Duration::from_mins(1);

/// The embedded store, counted, and held when a test says so.
struct Counted {
    keys: EmbeddedKeys,
    reads: AtomicUsize,
    /// Of the next read. Answers are looked up before the gate and given after it, as those of a slow network are.
    gate: Mutex<Arc<Semaphore>>,
}

#[async_trait]
impl KeyStore for Counted {
    async fn get(&self, hash: &KeyHash) -> Result<KeyLookup, KeyStoreError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let gate = Arc::clone(&self.gate.lock());
        let answer = self.keys.get(hash).await;
        drop(gate.acquire().await.unwrap());
        answer
    }
}

struct Bench {
    store: Arc<Counted>,
    keys: Arc<Keys>,
    clock: Arc<ManualClock>,
    key: VirtualKey,
}

impl Bench {
    /// One good key in a store that knows all keys.
    fn new() -> Self {
        Self::with(KeysOptions { ttl: TTL, ..KeysOptions::default() })
    }

    fn with(options: KeysOptions) -> Self {
        let store = Arc::new(Counted {
            keys: EmbeddedKeys::new(),
            reads: AtomicUsize::new(0),
            gate: Mutex::new(Arc::new(Semaphore::new(1))),
        });
        store.keys.mark_loaded();
        let key = VirtualKey::generate().unwrap();
        store.keys.insert(key.hash(), context(1));
        let clock = Arc::new(ManualClock::new(Timestamp::from_second(1_800_000_000).unwrap()));
        let keys =
            Keys::new(Arc::clone(&store) as Arc<dyn KeyStore>, Arc::clone(&clock) as Arc<dyn Clock>, options);
        Self { store, keys, clock, key }
    }

    async fn authenticate(&self) -> Result<Arc<KeyContext>, AuthError> {
        self.keys.authenticate(self.key.expose()).await
    }

    fn reads(&self) -> usize {
        self.store.reads.load(Ordering::SeqCst)
    }

    /// Holds the reads that begin from now on until the gate gets a permit.
    fn hold(&self) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        *self.store.gate.lock() = Arc::clone(&gate);
        gate
    }

    /// Lets the cache see these invalidations.
    async fn invalidated(&self, messages: impl IntoIterator<Item = Invalidation>) {
        let (tell, heard) = broadcast::channel(2);
        for message in messages {
            tell.send(message).unwrap();
        }
        let shutdown = CancellationToken::new();
        let mut following = Box::pin(Arc::clone(&self.keys).run(heard, shutdown.clone()));
        assert!(poll!(&mut following).is_pending());
        shutdown.cancel();
        following.await;
    }

    fn purge(&self) -> Invalidation {
        Invalidation::Key { hash: self.key.hash(), delete_sessions: false }
    }
}

fn context(revision: u64) -> KeyContext {
    KeyContext {
        schema_version: KeyContext::SCHEMA,
        key_id: "key-1".parse().unwrap(),
        workspace_id: "acme".parse().unwrap(),
        name: "ci".into(),
        tags: vec!["team-a".into()],
        disabled: false,
        expires_at: None,
        revision,
    }
}

fn is_refused(result: &Result<Arc<KeyContext>, AuthError>, expected: Refusal) -> bool {
    matches!(result, Err(error @ AuthError::Invalid { reason }) if *reason == expected && error.kind() == Kind::Unauthenticated)
}

#[tokio::test(start_paused = true)]
async fn a_known_key_is_read_once_in_its_time() {
    let bench = Bench::new();
    for _ in 0..100 {
        assert_eq!(*bench.authenticate().await.unwrap(), context(1));
    }
    assert_eq!(bench.reads(), 1);
    advance(TTL).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_record_counts_from_the_question() {
    let bench = Bench::new();
    let gate = bench.hold();
    let mut read = Box::pin(bench.authenticate());
    assert!(poll!(&mut read).is_pending());
    advance(TTL / 2).await;
    gate.add_permits(1);
    read.await.unwrap();
    advance(TTL / 2).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_no_key_never_reaches_the_store() {
    let bench = Bench::new();
    let long = format!("obol_{}", "A".repeat(1 << 20));
    for bad in ["", "obol_", "sk-123", "obol_short", &long, &format!("{} ", bench.key.expose())] {
        assert!(is_refused(&bench.keys.authenticate(bad).await, Refusal::Malformed), "{bad:.20}");
    }
    assert_eq!(bench.reads(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_key_is_asked_about_once_in_five_seconds() {
    let bench = Bench::new();
    bench.store.keys.remove(&bench.key.hash());
    for _ in 0..100 {
        assert!(is_refused(&bench.authenticate().await, Refusal::Unknown));
    }
    assert_eq!(bench.reads(), 1);
    bench.store.keys.insert(bench.key.hash(), context(1));
    advance(Duration::from_secs(5)).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn many_guesses_take_bounded_room() {
    let bench = Bench::with(KeysOptions { capacity: 100, ..KeysOptions::default() });
    bench.authenticate().await.unwrap();
    let mut guesses = Vec::new();
    for _ in 0..150 {
        let guess = VirtualKey::generate().unwrap();
        assert!(is_refused(&bench.keys.authenticate(guess.expose()).await, Refusal::Unknown));
        guesses.push(guess);
    }
    let before = bench.reads();
    bench.keys.authenticate(guesses[149].expose()).await.unwrap_err();
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), before, "the newest guess and the good key are cached");
    bench.keys.authenticate(guesses[0].expose()).await.unwrap_err();
    assert_eq!(bench.reads(), before + 1, "the oldest guess made room");
}

#[tokio::test(start_paused = true)]
async fn a_key_expires_while_it_is_cached() {
    let bench = Bench::new();
    let end = bench.clock.now() + Duration::from_secs(10);
    bench.store.keys.insert(bench.key.hash(), KeyContext { expires_at: Some(end), ..context(1) });
    bench.authenticate().await.unwrap();
    bench.clock.advance(Duration::from_millis(9_999));
    bench.authenticate().await.unwrap();
    bench.clock.advance(Duration::from_millis(1));
    assert!(is_refused(&bench.authenticate().await, Refusal::Expired));
    assert_eq!(bench.reads(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_disabled_key_is_known_and_forbidden() {
    let bench = Bench::new();
    bench.store.keys.insert(bench.key.hash(), KeyContext { disabled: true, ..context(1) });
    let error = bench.authenticate().await.unwrap_err();
    assert!(matches!(error, AuthError::Disabled));
    assert_eq!(error.kind(), Kind::Forbidden);
}

#[tokio::test(start_paused = true)]
async fn a_revoked_key_ends_with_its_invalidation() {
    let bench = Bench::new();
    bench.authenticate().await.unwrap();
    bench.store.keys.remove(&bench.key.hash());
    bench.authenticate().await.unwrap();
    let other = Invalidation::Key { hash: "ab".repeat(32).parse().unwrap(), delete_sessions: false };
    let workspace = Invalidation::Workspace { workspace_id: "acme".parse().unwrap() };
    bench.invalidated([other, workspace]).await;
    assert_eq!(bench.reads(), 1, "other messages purge nothing");
    bench.authenticate().await.unwrap();

    bench.invalidated([bench.purge()]).await;
    assert!(is_refused(&bench.authenticate().await, Refusal::Unknown));
}

#[tokio::test(start_paused = true)]
async fn a_new_key_works_as_soon_as_it_is_announced() {
    let bench = Bench::new();
    bench.store.keys.remove(&bench.key.hash());
    bench.authenticate().await.unwrap_err();
    bench.store.keys.insert(bench.key.hash(), context(1));
    bench.invalidated([bench.purge()]).await;
    bench.authenticate().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_resubscribe_empties_everything() {
    let bench = Bench::new();
    let unknown = VirtualKey::generate().unwrap();
    bench.authenticate().await.unwrap();
    bench.keys.authenticate(unknown.expose()).await.unwrap_err();
    bench.invalidated([Invalidation::All]).await;
    bench.authenticate().await.unwrap();
    bench.keys.authenticate(unknown.expose()).await.unwrap_err();
    assert_eq!(bench.reads(), 4);
}

#[tokio::test(start_paused = true)]
async fn having_missed_messages_empties_everything() {
    let bench = Bench::new();
    bench.authenticate().await.unwrap();
    let other = |n: u8| Invalidation::Key {
        hash: format!("{n:02x}").repeat(32).parse().unwrap(),
        delete_sessions: false,
    };
    bench.invalidated((0..10).map(other)).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_read_under_way_does_not_bring_back_what_was_purged_meanwhile() {
    for all in [false, true] {
        let bench = Bench::new();
        let gate = bench.hold();
        let mut read = Box::pin(bench.authenticate());
        assert!(poll!(&mut read).is_pending(), "the store has answered, the answer is on its way");
        bench.store.keys.remove(&bench.key.hash());
        bench.invalidated([if all { Invalidation::All } else { bench.purge() }]).await;
        gate.add_permits(1);
        read.await.unwrap();
        assert!(is_refused(&bench.authenticate().await, Refusal::Unknown));
        assert_eq!(bench.reads(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_reads_the_newer_record_stays() {
    let bench = Bench::new();
    let gate = bench.hold();
    let mut old = Box::pin(bench.authenticate());
    assert!(poll!(&mut old).is_pending());
    bench.store.keys.insert(bench.key.hash(), KeyContext { disabled: true, ..context(2) });
    bench.hold().add_permits(1);
    assert!(matches!(bench.authenticate().await, Err(AuthError::Disabled)));
    gate.add_permits(1);
    assert!(matches!(old.await, Err(AuthError::Disabled)));
    assert!(matches!(bench.authenticate().await, Err(AuthError::Disabled)));
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn not_knowing_is_not_absent_and_is_not_cached() {
    let store = Arc::new(EmbeddedKeys::new());
    let clock = Arc::new(ManualClock::new(Timestamp::UNIX_EPOCH));
    let keys = Keys::new(Arc::clone(&store) as Arc<dyn KeyStore>, clock, KeysOptions::default());
    let key = VirtualKey::generate().unwrap();
    let error = keys.authenticate(key.expose()).await.unwrap_err();
    assert!(matches!(error, AuthError::Unavailable(KeyStoreError::NotLoaded)));
    assert_eq!(error.kind(), Kind::Unavailable);
    store.insert(key.hash(), context(1));
    keys.authenticate(key.expose()).await.unwrap();
}
