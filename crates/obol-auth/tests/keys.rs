//! The key cache (DESIGN §8.1) on a paused clock.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use futures::poll;
use jiff::Timestamp;
use obol_auth::{
    AuthError, ControlKeys, EmbeddedKeys, KeyLookup, KeyStore, KeyStoreError, Keys, KeysOptions, KeysParts,
    Refusal,
};
use obol_model::{Clock, Invalidation, KeyContext, KeyHash, Kind, Limits, ManualClock, VirtualKey};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, broadcast};
use tokio::time::{Instant, advance};
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
        drop(gate.acquire().await.map_err(KeyStoreError::unreachable)?);
        answer
    }
}

/// A control plane that has some keys, or cannot be asked.
#[derive(Default)]
struct FakeControl {
    questions: AtomicUsize,
    record: Mutex<Option<Vec<u8>>>,
    away: bool,
}

#[async_trait]
impl ControlKeys for FakeControl {
    async fn key(&self, _hash: &KeyHash) -> Result<Option<Vec<u8>>, KeyStoreError> {
        self.questions.fetch_add(1, Ordering::SeqCst);
        // As over a network: not within one poll.
        tokio::task::yield_now().await;
        if self.away {
            return Err(KeyStoreError::unreachable(std::io::Error::other("connection refused")));
        }
        Ok(self.record.lock().clone())
    }
}

struct Bench {
    store: Arc<Counted>,
    keys: Arc<Keys>,
    clock: Arc<ManualClock>,
    key: VirtualKey,
    /// Until when no invalidation was missed.
    reconciled_at: Arc<Mutex<Option<Instant>>>,
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
        let reconciled_at = Arc::new(Mutex::new(None));
        let told = Arc::clone(&reconciled_at);
        let keys = Keys::new(KeysParts {
            store: Arc::clone(&store) as Arc<dyn KeyStore>,
            control: None,
            reconciled_at: Arc::new(move || *told.lock()),
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            options,
        });
        Self { store, keys, clock, key, reconciled_at }
    }

    /// The subscription to invalidations stands.
    fn reconciled(&self) {
        *self.reconciled_at.lock() = Some(Instant::now());
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
        Invalidation::key(self.key.hash())
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
        budgets: Vec::new(),
        limits: Limits::default(),
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
    advance(TTL.checked_sub(Duration::from_millis(1)).unwrap()).await;
    bench.reconciled();
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 1);
    advance(Duration::from_millis(1)).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2);
}

/// C055: with pub/sub dead, a revocation takes effect within 30 seconds, whatever the longest life of a record is.
#[tokio::test(start_paused = true)]
async fn a_record_that_nobody_follows_is_read_again_after_thirty_seconds() {
    let bench = Bench::with(KeysOptions { ttl: TTL * 60, ..KeysOptions::default() });
    bench.authenticate().await.unwrap();
    advance(Duration::from_millis(29_999)).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 1);
    advance(Duration::from_millis(1)).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2, "nobody ever listened");

    advance(Duration::from_secs(20)).await;
    bench.reconciled();
    advance(Duration::from_millis(29_999)).await;
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2, "it is older, but no invalidation was missed until 30 seconds ago");
    bench.store.keys.remove(&bench.key.hash());
    advance(Duration::from_millis(1)).await;
    assert!(is_refused(&bench.authenticate().await, Refusal::Unknown));

    // Could not ask is not good enough.
    bench.store.keys.insert(bench.key.hash(), context(1));
    advance(Duration::from_secs(5)).await;
    bench.authenticate().await.unwrap();
    advance(Duration::from_secs(30)).await;
    bench.hold().close();
    assert!(matches!(bench.authenticate().await, Err(AuthError::Unavailable(_))));
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
    bench.reconciled();
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2);
}

/// The background work of [`Keys::run`] for so long.
async fn run_for(bench: &Bench, time: Duration) {
    let (_tell, heard) = broadcast::channel(2);
    let shutdown = CancellationToken::new();
    tokio::join!(Arc::clone(&bench.keys).run(heard, shutdown.clone()), async {
        tokio::time::sleep(time).await;
        shutdown.cancel();
    });
}

/// DESIGN §7.5: the last line behind a message that is lost although the subscription stands.
#[tokio::test(start_paused = true)]
async fn keys_in_use_are_compared_with_the_store_within_thirty_seconds() {
    let bench = Bench::with(KeysOptions { ttl: TTL * 60, ..KeysOptions::default() });
    let first = bench.authenticate().await.unwrap();
    bench.authenticate().await.unwrap();
    bench.reconciled();
    run_for(&bench, Duration::from_secs(21)).await;
    assert_eq!(bench.reads(), 2, "in the background, before it is 30 seconds old");
    let again = bench.authenticate().await.unwrap();
    assert!(Arc::ptr_eq(&first, &again), "what is derived from an unchanged record can be kept");
    assert_eq!(bench.reads(), 2);

    bench.store.keys.remove(&bench.key.hash());
    bench.reconciled();
    run_for(&bench, Duration::from_secs(21)).await;
    assert_eq!(bench.reads(), 3);
    assert!(is_refused(&bench.authenticate().await, Refusal::Unknown));
    assert_eq!(bench.reads(), 3);
}

#[tokio::test(start_paused = true)]
async fn keys_that_nobody_uses_are_forgotten_and_not_read() {
    let bench = Bench::with(KeysOptions { ttl: TTL * 60, ..KeysOptions::default() });
    bench.authenticate().await.unwrap();
    run_for(&bench, Duration::from_secs(60)).await;
    bench.reconciled();
    assert_eq!(bench.reads(), 1);
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_cold_key_costs_one_read_however_many_ask() {
    let bench = Bench::new();
    let gate = bench.hold();
    let unknown = VirtualKey::generate().unwrap();
    let mut good = Box::pin(join_all((0..100).map(|_| bench.authenticate())));
    let mut bad = Box::pin(join_all((0..100).map(|_| bench.keys.authenticate(unknown.expose()))));
    assert!(poll!(&mut good).is_pending() && poll!(&mut bad).is_pending());
    gate.add_permits(1);
    assert!(good.await.iter().all(Result::is_ok));
    assert!(bad.await.iter().all(|answer| is_refused(answer, Refusal::Unknown)));
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn whoever_leaves_does_not_fail_those_who_wait_for_the_same_read() {
    let bench = Bench::new();
    let gate = bench.hold();
    let mut first = Box::pin(bench.authenticate());
    assert!(poll!(&mut first).is_pending());
    let mut second = Box::pin(bench.authenticate());
    assert!(poll!(&mut second).is_pending());
    drop(first);
    gate.add_permits(1);
    second.await.unwrap();
    assert_eq!(bench.reads(), 1);

    // When the last one leaves, the read is over, and the next one is another.
    bench.invalidated([Invalidation::All]).await;
    let gate = bench.hold();
    let mut alone = Box::pin(bench.authenticate());
    assert!(poll!(&mut alone).is_pending());
    drop(alone);
    drop(gate);
    bench.hold().add_permits(1);
    bench.authenticate().await.unwrap();
    assert_eq!(bench.reads(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_read_that_failed_is_not_shared_with_those_who_come_after_it() {
    let bench = Bench::new();
    let gate = bench.hold();
    let mut slow = Box::pin(bench.authenticate());
    let mut other = Box::pin(bench.authenticate());
    assert!(poll!(&mut slow).is_pending() && poll!(&mut other).is_pending());
    gate.close();
    assert!(matches!(other.await, Err(AuthError::Unavailable(_))));
    bench.hold().add_permits(1);
    bench.authenticate().await.unwrap();
    assert!(matches!(slow.await, Err(AuthError::Unavailable(_))));
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
    let other = Invalidation::key("ab".repeat(32).parse().unwrap());
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
    let other = |n: u8| Invalidation::key(format!("{n:02x}").repeat(32).parse().unwrap());
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

/// C056: caches are versioned and never overwritten by an older version.
#[tokio::test(start_paused = true)]
async fn of_two_reads_the_newer_record_stays() {
    let bench = Bench::new();
    let gate = bench.hold();
    let mut old = Box::pin(bench.authenticate());
    assert!(poll!(&mut old).is_pending());
    bench.store.keys.insert(bench.key.hash(), KeyContext { disabled: true, ..context(2) });
    bench.invalidated([bench.purge()]).await;
    bench.hold().add_permits(1);
    assert!(matches!(bench.authenticate().await, Err(AuthError::Disabled)));
    gate.add_permits(1);
    assert!(matches!(old.await, Err(AuthError::Disabled)));
    assert!(matches!(bench.authenticate().await, Err(AuthError::Disabled)));
    assert_eq!(bench.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_went_back_in_time_does_not_bring_back_an_older_record() {
    let bench = Bench::new();
    bench.store.keys.insert(bench.key.hash(), KeyContext { disabled: true, ..context(2) });
    bench.authenticate().await.unwrap_err();
    // The failover to a copy that had not heard of it yet.
    bench.store.keys.insert(bench.key.hash(), context(1));
    advance(Duration::from_secs(30)).await;
    assert!(matches!(bench.authenticate().await, Err(AuthError::Disabled)));
    assert_eq!(bench.reads(), 2);
}

/// Keys in front of a store that does not claim to hold every key.
fn not_loaded(control: Option<FakeControl>) -> (Arc<EmbeddedKeys>, Arc<Keys>, Option<Arc<FakeControl>>) {
    let store = Arc::new(EmbeddedKeys::new());
    let control = control.map(Arc::new);
    let keys = Keys::new(KeysParts {
        store: Arc::clone(&store) as Arc<dyn KeyStore>,
        control: control.clone().map(|control| control as Arc<dyn ControlKeys>),
        reconciled_at: Arc::new(|| None),
        clock: Arc::new(ManualClock::new(Timestamp::UNIX_EPOCH)),
        options: KeysOptions::default(),
    });
    (store, keys, control)
}

#[tokio::test(start_paused = true)]
async fn not_knowing_is_not_absent_and_is_not_cached() {
    let (store, keys, _) = not_loaded(None);
    let key = VirtualKey::generate().unwrap();
    let error = keys.authenticate(key.expose()).await.unwrap_err();
    assert!(matches!(error, AuthError::Unavailable(KeyStoreError::NotLoaded)));
    assert_eq!(error.kind(), Kind::Unavailable);
    store.insert(key.hash(), context(1));
    keys.authenticate(key.expose()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn control_is_asked_once_when_the_store_does_not_hold_every_key() {
    let record = Mutex::new(Some(serde_json::to_vec(&context(1)).unwrap()));
    let (_, keys, control) = not_loaded(Some(FakeControl { record, ..FakeControl::default() }));
    let (control, key) = (control.unwrap(), VirtualKey::generate().unwrap());
    let answers = join_all((0..100).map(|_| keys.authenticate(key.expose()))).await;
    assert!(answers.into_iter().all(|answer| *answer.unwrap() == context(1)));
    keys.authenticate(key.expose()).await.unwrap();
    assert_eq!(control.questions.load(Ordering::SeqCst), 1);

    *control.record.lock() = None;
    let other = VirtualKey::generate().unwrap();
    assert!(is_refused(&keys.authenticate(other.expose()).await, Refusal::Unknown));
    assert!(is_refused(&keys.authenticate(other.expose()).await, Refusal::Unknown));
    assert_eq!(control.questions.load(Ordering::SeqCst), 2, "its no is remembered too");

    *control.record.lock() = Some(b"{\"schema_version\":99}".to_vec());
    let odd = VirtualKey::generate().unwrap();
    let error = keys.authenticate(odd.expose()).await.unwrap_err();
    assert!(matches!(error, AuthError::Unavailable(KeyStoreError::Unreadable { .. })));
}

#[tokio::test(start_paused = true)]
async fn control_is_not_asked_when_the_store_knows() {
    let (store, keys, control) = not_loaded(Some(FakeControl::default()));
    let (key, unknown) = (VirtualKey::generate().unwrap(), VirtualKey::generate().unwrap());
    store.insert(key.hash(), context(1));
    keys.authenticate(key.expose()).await.unwrap();
    store.mark_loaded();
    assert!(is_refused(&keys.authenticate(unknown.expose()).await, Refusal::Unknown));
    assert_eq!(control.unwrap().questions.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_control_that_cannot_be_asked_is_not_a_no() {
    let (_, keys, control) = not_loaded(Some(FakeControl { away: true, ..FakeControl::default() }));
    let key = VirtualKey::generate().unwrap();
    for _ in 0..2 {
        let error = keys.authenticate(key.expose()).await.unwrap_err();
        assert!(matches!(error, AuthError::Unavailable(KeyStoreError::Unreachable(_))));
    }
    assert_eq!(control.unwrap().questions.load(Ordering::SeqCst), 2, "nothing was learnt");
}

#[tokio::test(start_paused = true)]
async fn guessing_does_not_load_control() {
    let (_, keys, control) = not_loaded(Some(FakeControl::default()));
    let mut refused = 0;
    for _ in 0..500 {
        let guess = VirtualKey::generate().unwrap();
        match keys.authenticate(guess.expose()).await.unwrap_err() {
            AuthError::Unavailable(KeyStoreError::TooManyQuestions) => refused += 1,
            AuthError::Invalid { reason: Refusal::Unknown } => {}
            other => panic!("{other}"),
        }
    }
    assert_eq!((control.unwrap().questions.load(Ordering::SeqCst), refused), (50, 450));
}
