//! Revocation against use: key caches of two replicas, following a real Redis as replicas do, while every key is revoked
//! in the middle of its use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use obol_auth::{
    AuthError, KeyLookup, KeyStore, KeyStoreError, Keys, KeysOptions, KeysParts, RedisKeys, Refusal,
};
use obol_model::snapshot::{PolicySnapshot, WorkspaceSnapshot};
use obol_model::{Invalidation, KeyContext, KeyHash, Limits, Secret, SystemClock, VirtualKey};
use obol_redis::{Redis, RedisOptions};
use obol_snapshot::{Compile, Publications, RedisSource};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use obol_tests::SOON;
use tokio_util::sync::CancellationToken;

/// Keys, each revoked once while it is used through two caches: twice as many interleavings.
const KEYS: usize = 5_000;
/// Keys at a time.
const BATCH: usize = 100;
/// Callers of each key on each replica.
const CALLERS: usize = 2;
/// A caller stops after so many refusals in a row.
const ENOUGH: usize = 2;

/// Redis, whose answers take longer to arrive for some than for others, as those of a network do.
struct Slow(RedisKeys, AtomicUsize);

#[async_trait]
impl KeyStore for Slow {
    async fn get(&self, hash: &KeyHash) -> Result<KeyLookup, KeyStoreError> {
        let answer = self.0.get(hash).await;
        let turn = self.1.fetch_add(1, Ordering::Relaxed);
        // A spread without a pattern: most arrive at once, some much later.
        for _ in 0..(turn.wrapping_mul(7919) % 31) {
            tokio::task::yield_now().await;
        }
        answer
    }
}

struct Nothing;

impl Compile for Nothing {
    type Output = ();

    fn compile(&self, _: &WorkspaceSnapshot, _: &PolicySnapshot) -> Result<(), String> {
        Ok(())
    }
}

async fn redis(server: &RedisServer) -> Redis {
    // The load of this test is no outage.
    let options = RedisOptions { command_timeout: SOON, ..RedisOptions::new(Secret::new(server.url())) };
    Redis::connect(options).await.unwrap()
}

/// The key cache of one replica, wired as a replica wires it.
async fn replica(server: &RedisServer, options: KeysOptions) -> Arc<Keys> {
    let source = Arc::new(RedisSource::new(redis(server).await));
    let publications = Publications::new(source.clone(), Nothing);
    let followed = publications.clone();
    let keys = Keys::new(KeysParts {
        store: Arc::new(Slow(RedisKeys::new(redis(server).await), AtomicUsize::default())),
        control: None,
        reconciled_at: Arc::new(move || followed.reconciled_at()),
        clock: Arc::new(SystemClock),
        options,
    });
    let never = CancellationToken::new();
    tokio::spawn(keys.clone().run(publications.subscribe(), never.clone()));
    tokio::spawn(publications.clone().run(source, never));
    eventually(SOON, || async { publications.reconciled_at().is_some() }).await;
    keys
}

fn record(number: usize, revision: u64, disabled: bool) -> Vec<u8> {
    let context = KeyContext {
        schema_version: KeyContext::SCHEMA,
        key_id: format!("k-{number}").parse().unwrap(),
        workspace_id: "acme".parse().unwrap(),
        name: String::new(),
        tags: vec![],
        disabled,
        expires_at: None,
        budgets: Vec::new(),
        limits: Limits::default(),
        revision,
    };
    serde_json::to_vec(&context).unwrap()
}

/// What control does, in one step: the record goes, or a newer one says that the key is disabled.
async fn revoke(mut link: ::redis::aio::MultiplexedConnection, number: usize, hash: KeyHash) {
    for _ in 0..(number.wrapping_mul(31) % 23) {
        tokio::task::yield_now().await;
    }
    let message = serde_json::to_string(&Invalidation::key(hash)).unwrap();
    let name = format!("key:{}", hash.hex());
    let mut change = ::redis::pipe();
    change.atomic();
    if number.is_multiple_of(2) {
        change.del(name);
    } else {
        change.set(name, record(number, 2, true));
    }
    change.publish(Invalidation::CHANNEL, message);
    let _: () = change.query_async(&mut link).await.unwrap();
}

/// Uses a key until it is refused for good. Answers how often it was good after some caller had been refused.
async fn caller(keys: &Keys, key: &VirtualKey, over: &AtomicBool) -> usize {
    let (mut refused, mut resurrected) = (0, 0);
    while refused < ENOUGH {
        let was_over = over.load(Ordering::SeqCst);
        match keys.authenticate(key.expose()).await {
            Ok(_) => {
                resurrected += usize::from(was_over);
                refused = 0;
            }
            Err(AuthError::Invalid { reason: Refusal::Unknown } | AuthError::Disabled) => {
                over.store(true, Ordering::SeqCst);
                refused += 1;
            }
            Err(other) => panic!("{other:?}"),
        }
        tokio::task::yield_now().await;
    }
    resurrected
}

/// Property: on each replica, no request that begins after one was refused because of the revocation succeeds, whatever
/// reads were under way; and the revocation takes effect by its message alone, long before any record's time is over. One
/// replica keeps nothing for longer than a millisecond, so that it reads all the time, the other keeps everything for an
/// hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_key_never_comes_back() {
    let server = RedisServer::start().await;
    server.cli(&["SET", "keys:loaded", "1"]).await;
    let moment = Duration::from_millis(1);
    let short = KeysOptions { ttl: moment, negative_ttl: moment, ..KeysOptions::default() };
    let long = KeysOptions { ttl: Duration::from_secs(3600), negative_ttl: moment, ..KeysOptions::default() };
    let replicas = [replica(&server, short).await, replica(&server, long).await];
    let link = server.connection().await;

    for batch in 0..KEYS / BATCH {
        let numbers = batch * BATCH..(batch + 1) * BATCH;
        let made: Vec<_> = numbers.map(|number| (number, VirtualKey::generate().unwrap())).collect();
        let mut write = ::redis::pipe();
        for (number, key) in &made {
            write.set(format!("key:{}", key.hash().hex()), record(*number, 1, false)).ignore();
        }
        let _: () = write.query_async(&mut link.clone()).await.unwrap();
        let races = made.into_iter().map(|(number, key)| {
            let (replicas, link) = (replicas.clone(), link.clone());
            tokio::spawn(async move {
                let over = [const { AtomicBool::new(false) }; 2];
                let callers = replicas.iter().zip(&over).flat_map(|(keys, over)| {
                    let key = &key;
                    (0..CALLERS).map(move |_| caller(keys, key, over))
                });
                let all = async { tokio::join!(join_all(callers), revoke(link, number, key.hash())) };
                let done = tokio::time::timeout(SOON, all).await;
                let (resurrected, ()) =
                    done.unwrap_or_else(|_| panic!("key {number} was not refused within {SOON:?}"));
                assert_eq!(resurrected.iter().sum::<usize>(), 0, "key {number} came back");
            })
        });
        for race in join_all(races).await {
            race.unwrap();
        }
    }
}
