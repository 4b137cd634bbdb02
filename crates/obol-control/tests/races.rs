//! Two of control's processes at once, on a real Redis.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt as _;
use futures::future::join_all;
use futures::stream;
use obol_control::{
    Control, ControlOptions, ControlStore, KeyChange, KeyRecord, MemoryStore, NewKey, Operator, PublishError,
    Publisher, RedisPublisher,
};
use obol_model::snapshot::{Documents, PolicySnapshot, SCHEMA, WorkspaceSnapshot};
use obol_model::{Clock, KeyHash, KeyRing, Revision, Secret, SystemClock, WorkspaceId};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::redis::RedisServer;

/// Each of them on things of its own.
const RACES: usize = 10_000;
/// Each has connections of its own.
const LANES: usize = 4;
/// Races under way in one lane.
const AT_A_TIME: usize = 16;

fn rev(number: u64) -> Revision {
    Revision { epoch: 1, number }
}

fn docs(id: &WorkspaceId, revision: Revision) -> Documents {
    let workspace: WorkspaceSnapshot = serde_json::from_value(serde_json::json!({
        "schema_version": SCHEMA, "workspace_id": id, "revision": revision, "environment": "test",
    }))
    .unwrap();
    let policy = PolicySnapshot { schema_version: SCHEMA, workspace_id: id.clone(), revision, files: vec![] };
    Documents::encode(&workspace, &policy).unwrap()
}

fn key() -> KeyRecord {
    let new = NewKey::named("acme".parse().unwrap(), "ci");
    KeyRecord::generate(new, SystemClock.now()).unwrap().1
}

async fn redis(server: &RedisServer) -> Redis {
    Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap()
}

async fn publisher(server: &RedisServer) -> RedisPublisher {
    RedisPublisher::new(redis(server).await)
}

/// Three processes, each with a connection of its own.
async fn three(server: &RedisServer) -> [RedisPublisher; 3] {
    [publisher(server).await, publisher(server).await, publisher(server).await]
}

/// Which of three goes first changes from race to race; who wins is left to the connections.
async fn at_once<A, B, C>(
    race: usize,
    a: impl Future<Output = A>,
    b: impl Future<Output = B>,
    c: impl Future<Output = C>,
) -> (A, B, C) {
    let later = |turn: usize| async move {
        for _ in 0..turn {
            tokio::task::yield_now().await;
        }
    };
    let turn = |place: u32| (race / 3_usize.pow(place)) % 3;
    tokio::join!(
        async {
            later(turn(0)).await;
            a.await
        },
        async {
            later(turn(1)).await;
            b.await
        },
        async {
            later(turn(2)).await;
            c.await
        },
    )
}

/// Property: whatever two publishers and one that heals from what it knew a while ago do at once, the highest revision is
/// there in the end, whole; it is never replaced by an older one, and what is read in between is whole, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publish_against_publish_against_a_late_repair_never_goes_back() {
    let server = RedisServer::start().await;
    let refused = AtomicUsize::new(0);
    let lanes = (0..LANES).map(|lane| {
        let (server, refused) = (&server, &refused);
        async move {
            let [one, two, three] = three(server).await;
            let race = async |race: usize| {
                let id: WorkspaceId = format!("w{race}").parse().unwrap();
                let (first, second, third) = (docs(&id, rev(1)), docs(&id, rev(2)), docs(&id, rev(3)));
                if race.is_multiple_of(2) {
                    one.publish(&id, &first, rev(1)).await.unwrap();
                }
                let (a, b, c) = at_once(
                    race,
                    one.publish(&id, &second, rev(2)),
                    two.publish(&id, &third, rev(3)),
                    async {
                        let repaired = three.repair(&id, &first, rev(1), None).await;
                        (repaired, three.read(&id).await.unwrap())
                    },
                )
                .await;
                b.unwrap();
                let newer = |result: Result<(), PublishError>| match result {
                    Ok(()) => 0,
                    Err(PublishError::NotNewer { .. }) => 1,
                    Err(e) => panic!("{e}"),
                };
                let (repaired, between) = c;
                refused.fetch_add(newer(a), Ordering::Relaxed);
                newer(repaired);
                between.unwrap().decode(&id).unwrap();
                assert_eq!(two.read(&id).await.unwrap(), Some(third), "race {race}");
            };
            stream::iter((lane..RACES).step_by(LANES)).for_each_concurrent(AT_A_TIME, race).await;
        }
    });
    join_all(lanes).await;
    let refused = refused.into_inner();
    assert!((1..RACES).contains(&refused), "it never raced: {refused} of {RACES} went one way");
}

/// Property: once a key is revoked it is not there, and no writer that read the records before, be it one that found
/// its record missing or one that found it damaged, brings it back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoke_against_heals_in_flight_never_resurrects() {
    let server = RedisServer::start().await;
    let healed = AtomicUsize::new(0);
    let lanes = (0..LANES).map(|lane| {
        let (server, healed) = (&server, &healed);
        async move {
            let [one, two, three] = three(server).await;
            let look = redis(server).await;
            let race = async |race: usize| {
                let record = key();
                let hash = record.hash;
                let mut revoked = record.clone();
                revoked.revoked_at = Some(SystemClock.now());
                revoked.key.revision += 1;
                if race.is_multiple_of(2) {
                    one.put_key(&hash, &record.key, None).await.unwrap();
                }
                let found = serde_json::to_vec(&record.key).unwrap();
                let (a, (), c) = at_once(
                    race,
                    one.put_key(&hash, &record.key, None),
                    async {
                        two.revoke_key(&revoked).await.unwrap();
                        // From here on.
                        assert!(!exists(&look, &hash).await, "race {race}: there after it was revoked");
                    },
                    three.put_key(&hash, &record.key, Some(&found)),
                )
                .await;
                healed.fetch_add(usize::from(a.unwrap()) + usize::from(c.unwrap()), Ordering::Relaxed);
                assert!(!one.put_key(&hash, &record.key, Some(&found)).await.unwrap(), "race {race}");
                assert!(!exists(&look, &hash).await, "race {race}: resurrected");
            };
            stream::iter((lane..RACES).step_by(LANES)).for_each_concurrent(AT_A_TIME, race).await;
        }
    });
    join_all(lanes).await;
    assert!(healed.into_inner() > 0, "it never raced");
}

/// Whether there is a record.
async fn exists(redis: &Redis, hash: &KeyHash) -> bool {
    redis.query(redis::cmd("EXISTS").arg(format!("key:{}", hash.hex()))).await.unwrap()
}

/// Property: neither of two controls that are in the middle of a pass, which read the keys before, brings a key back that
/// an operator revokes meanwhile; and a key that is made meanwhile is not taken for a stranger.
#[tokio::test]
async fn operators_against_controls_in_the_middle_of_a_pass() {
    const ROUNDS: usize = 300;
    let server = RedisServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("acme.yaml"), "workspace: acme\n").unwrap();
    let store = Arc::new(MemoryStore::default());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let ring = Arc::new(KeyRing::ephemeral().unwrap());
    let mut controls = Vec::new();
    for _ in 0..2 {
        let options = ControlOptions {
            source: folder.path().to_owned(),
            key_ring: ring.clone(),
            env: Arc::new(|_| None),
        };
        let publisher = Arc::new(publisher(&server).await);
        controls.push(Control::new(options, store.clone(), publisher, clock.clone()));
    }
    let (one, two) = (controls.remove(0), controls.remove(0));
    let look = redis(&server).await;
    let own = Arc::new(publisher(&server).await);
    let operator = Operator::new(store.clone(), Some(own), clock, "user:test".into());
    let new = || NewKey::named("acme".parse().unwrap(), "ci");
    one.sync_once().await;
    let (_, mut before, _) = operator.new_key(new()).await.unwrap();
    for round in 0..ROUNDS {
        if round % 10 == 0 {
            server.cli(&["FLUSHALL"]).await;
        }
        let ((), made, _, _) = tokio::join!(
            async {
                let change = KeyChange::Revoke { delete_sessions: false };
                operator.change_key(&before.key.key_id, change).await.unwrap();
                assert!(!exists(&look, &before.hash).await, "round {round}: there after it was revoked");
            },
            operator.new_key(new()),
            one.sync_once(),
            two.sync_once(),
        );
        assert!(!exists(&look, &before.hash).await, "round {round}: resurrected");
        let (_, made, _) = made.unwrap();
        assert!(exists(&look, &made.hash).await, "round {round}: taken for a stranger");
        before = made;
    }
    one.sync_once().await;
    assert_eq!(server.keys("key:*").await.len(), 1);
    assert_eq!(store.keys().await.unwrap().records.len(), ROUNDS + 1);
}

/// Property: a key that is made after a pass has begun is not taken for a stranger, whatever the pass had read by then.
#[tokio::test]
async fn a_key_that_is_made_in_the_middle_of_a_pass_stays() {
    const ROUNDS: usize = 100;
    let server = RedisServer::start().await;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("acme.yaml"), "workspace: acme\n").unwrap();
    let store = Arc::new(MemoryStore::default());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let options = ControlOptions {
        source: folder.path().to_owned(),
        key_ring: Arc::new(KeyRing::ephemeral().unwrap()),
        env: Arc::new(|_| None),
    };
    let control = Control::new(options, store.clone(), Arc::new(publisher(&server).await), clock.clone());
    let (look, own) = (redis(&server).await, Arc::new(publisher(&server).await));
    let operator = Operator::new(store.clone(), Some(own), clock, "user:test".into());
    control.sync_once().await;
    for round in 0..ROUNDS {
        let new = NewKey::named("acme".parse().unwrap(), "ci");
        // The pass goes first, up to its first question to Redis, and a turn further from round to round.
        let (_, made) = tokio::join!(control.sync_once(), async {
            for _ in 0..round % 10 {
                tokio::task::yield_now().await;
            }
            operator.new_key(new).await.unwrap().1
        });
        assert!(exists(&look, &made.hash).await, "round {round}: taken for a stranger");
    }
}
