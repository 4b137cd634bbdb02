//! Races between replicas on one Redis. Each test states the property that no interleaving may break, and runs at least
//! ten thousand of them.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::{StreamExt as _, future, join, stream};
use obol_model::{SessionId, SystemClock};
use obol_redis::Redis;
use obol_session::{
    Lookup, RedisSessions, SessionError, SessionOptions, SessionRecord, SessionStore, Sessions,
};
use obol_testkit::redis::RedisServer;

use crate::support::{TTL, Who, connect};

const ROUNDS: usize = 10_000;
/// Rounds that are under way at once. They share no session, only the connections, so the commands of one round set off
/// in another order each time.
const LANES: usize = 32;

/// A replica of its own: another connection to the same Redis.
struct Replica {
    sessions: Sessions,
    store: Arc<RedisSessions>,
    redis: Redis,
}

async fn replicas<const N: usize>(server: &RedisServer, most: usize) -> [Replica; N] {
    let all = (0..N).map(|_| async {
        let redis = connect(server).await;
        let store = Arc::new(RedisSessions::new(redis.clone()));
        let options = SessionOptions { ttl: TTL, unused_ttl: None, max_per_principal: most };
        Replica { sessions: Sessions::new(store.clone(), Arc::new(SystemClock), options), store, redis }
    });
    future::join_all(all).await.try_into().unwrap_or_else(|_| unreachable!("as many as asked for"))
}

async fn race<F: Future<Output = ()>>(rounds: usize, round: impl Fn(usize) -> F) {
    stream::iter(0..rounds).for_each_concurrent(LANES, round).await;
}

/// Gives way a few times, so that what follows is not always sent in the order in which it is written here.
async fn stagger() {
    for _ in 0..rand::random_range(0..4) {
        tokio::task::yield_now().await;
    }
}

fn absent<T: std::fmt::Debug>(outcome: &Result<T, SessionError>) -> bool {
    assert!(matches!(outcome, Ok(_) | Err(SessionError::NoSuchSession)), "{outcome:?}");
    outcome.is_err()
}

/// Both outcomes of a race have to occur, or it shows nothing.
#[derive(Default)]
struct Tally(AtomicUsize);

impl Tally {
    fn add(&self, yes: bool) {
        self.0.fetch_add(usize::from(yes), Ordering::Relaxed);
    }

    fn assert_both(&self, of: usize, what: &str) {
        let yes = self.0.load(Ordering::Relaxed);
        assert!((1..of).contains(&yes), "{what}: {yes} of {of}");
    }
}

/// resume × save × renew × delete: a request that begins after the answer to the deletion finds nothing, while the
/// others are still under way and when they are over; nothing of the session or of its place is left.
#[tokio::test]
async fn nothing_brings_a_deleted_session_back() {
    let server = RedisServer::start().await;
    let [a, b, c] = replicas(&server, 2 * LANES).await;
    let owner = Who::key("acme", "k1");
    let (resumed, saved, renewed) = (Tally::default(), Tally::default(), Tally::default());
    race(ROUNDS, |_| async {
        let (caller, record) = (owner.caller(), a.sessions.create(owner.new_session()).await.unwrap());
        let id = record.session_id.expose();
        let delete = async {
            stagger().await;
            b.sessions.delete(&id, &caller).await.unwrap();
            let next = if rand::random() { &a } else { &c };
            assert!(absent(&next.sessions.get_or_resume(&id, &caller).await), "answered after its deletion");
        };
        let resume = async {
            stagger().await;
            resumed.add(!absent(&c.sessions.get_or_resume(&id, &caller).await));
        };
        let save = async {
            stagger().await;
            saved.add(!absent(&a.sessions.save(&record).await));
        };
        let renew = async {
            stagger().await;
            // For so long that its place has to be renewed as well, in a step of its own.
            let (id, now) = (record.session_id, record.created_at);
            let found = c.store.renew(id, owner.owner(), now, 2 * TTL).await.unwrap();
            renewed.add(found);
        };
        join!(delete, resume, save, renew);
        assert!(absent(&a.sessions.get_or_resume(&id, &caller).await), "resurrected");
    })
    .await;
    for (tally, what) in [(resumed, "resumed"), (saved, "saved"), (renewed, "renewed")] {
        tally.assert_both(ROUNDS, what);
    }
    assert_eq!(server.keys("sess*").await, Vec::<String>::new());
}

/// resume × save × renew × expiry: whoever acts after the end of its life finds nothing and brings nothing back.
#[tokio::test]
async fn nothing_brings_an_expired_session_back() {
    let server = RedisServer::start().await;
    let [a, b, c] = replicas(&server, usize::MAX).await;
    let owner = Who::key("acme", "k1");
    let caller = owner.caller();
    let (resumed, saved, renewed) = (Tally::default(), Tally::default(), Tally::default());
    race(ROUNDS, |round| {
        let (a, b, c, owner, caller) = (&a, &b, &c, &owner, &caller);
        let (resumed, saved, renewed) = (&resumed, &saved, &renewed);
        async move {
            let record = a.sessions.create(owner.new_session()).await.unwrap();
            let (id, now) = (record.session_id, record.created_at);
            let key = format!("sess:{{{}}}", id.expose());
            // Half of them are cut off; the other half run out, in a life so short that each use may be the last.
            let life = if round % 2 == 0 { TTL } else { Duration::from_millis(1) };
            let expire = async {
                stagger().await;
                let mut cmd = redis::cmd("PEXPIRE");
                cmd.arg(&key).arg(round % 2);
                b.redis.query::<()>(&cmd).await.unwrap();
            };
            let resume = async {
                stagger().await;
                let lookup = c.store.resume(id, caller, now, life).await.unwrap();
                resumed.add(matches!(lookup, Lookup::Found(_)));
            };
            let save = async {
                stagger().await;
                let next = SessionRecord { rev: 2, ..record.clone() };
                saved.add(!absent(&a.store.save(&next, 1, life).await));
            };
            let renew = async {
                stagger().await;
                renewed.add(c.store.renew(id, owner.owner(), now, life).await.unwrap());
            };
            join!(expire, resume, save, renew);
            while a.store.live(&[id]).await.unwrap() == [true] {
                assert_eq!(round % 2, 1, "an end that came was undone");
            }
            let lookup = b.store.resume(id, caller, now, TTL).await.unwrap();
            assert!(matches!(lookup, Lookup::Absent), "resurrected");
            assert!(absent(&c.store.save(&record, 1, TTL).await), "resurrected");
            assert!(!a.store.renew(id, owner.owner(), now, TTL).await.unwrap(), "resurrected");
        }
    })
    .await;
    for (tally, what) in [(resumed, "resumed"), (saved, "saved"), (renewed, "renewed")] {
        tally.assert_both(ROUNDS, what);
    }
    assert_eq!(server.keys("sess:*").await, Vec::<String>::new());
}

/// create × create of one id: exactly one wins, and the session is the winner's.
#[tokio::test]
async fn of_two_creations_of_one_id_one_wins() {
    let server = RedisServer::start().await;
    let [a, b] = replicas(&server, usize::MAX).await;
    let owner = Who::key("acme", "k1");
    let template = a.sessions.create(owner.new_session()).await.unwrap();
    let first_won = Tally::default();
    race(ROUNDS, |round| {
        let (a, b, owner, template, first_won) = (&a, &b, &owner, &template, &first_won);
        async move {
            let session_id = SessionId::generate(template.created_at).unwrap();
            let record = |level: &str| SessionRecord {
                session_id,
                log_level: Some(level.to_owned()),
                ..template.clone()
            };
            let create = async |replica: &Replica, level: &str| {
                stagger().await;
                replica.store.create(&record(level), usize::MAX, TTL).await
            };
            let (one, two) = join!(create(a, "one"), create(b, "two"));
            assert!(one.is_ok() ^ two.is_ok(), "{one:?} {two:?}");
            let lost = if one.is_ok() { &two } else { &one };
            assert!(matches!(lost, Err(SessionError::AlreadyExists)), "{lost:?}");
            let reader = if round % 2 == 0 { a } else { b };
            let found = reader.sessions.get_or_resume(&session_id.expose(), &owner.caller()).await.unwrap();
            assert_eq!(found.log_level.as_deref(), Some(if one.is_ok() { "one" } else { "two" }));
            first_won.add(one.is_ok());
        }
    })
    .await;
    first_won.assert_both(ROUNDS, "the first won");
    let placed: usize = server.query(&["ZCARD", "sess-of:acme:key:k1"]).await;
    assert_eq!(placed, ROUNDS + 1, "the loser gave no place of the winner back");
}

/// save × save: no update is lost. Each replica counts in the record, which is one too low as soon as one update is
/// built on a stale one.
#[tokio::test]
async fn concurrent_saves_lose_no_update() {
    const WRITERS: usize = 2;
    const EACH: usize = ROUNDS.div_ceil(LANES);
    let server = RedisServer::start().await;
    let replicas: [Replica; WRITERS] = replicas(&server, LANES).await;
    let owner = Who::key("acme", "k1");
    let conflicts = Tally::default();
    let chain = |_| async {
        let caller = owner.caller();
        let record = replicas[0].sessions.create(owner.new_session()).await.unwrap();
        let id = record.session_id.expose();
        for _ in 0..EACH {
            let read = replicas[0].sessions.get_or_resume(&id, &caller).await.unwrap();
            let updates = replicas.iter().map(|replica| async {
                stagger().await;
                let count = |record: &mut SessionRecord| {
                    let count: u64 = record.log_level.as_deref().map_or(0, |text| text.parse().unwrap());
                    record.log_level = Some((count + 1).to_string());
                };
                let base = read.rev;
                let saved = replica.sessions.update(read.clone(), &caller, count).await.unwrap();
                conflicts.add(saved.rev != base + 1);
            });
            future::join_all(updates).await;
        }
        let found = replicas[1].sessions.get_or_resume(&id, &caller).await.unwrap();
        let updates = WRITERS * EACH;
        assert_eq!(found.log_level.unwrap(), updates.to_string(), "an update was lost");
        assert_eq!(found.rev, 1 + updates as u64);
    };
    race(LANES, chain).await;
    conflicts.assert_both(WRITERS * EACH * LANES, "conflicts");
}

/// create × create × delete at the limit: never more live sessions than the limit, no place lost, none left over.
#[tokio::test]
async fn concurrent_creations_never_pass_the_limit() {
    const MOST: usize = 2;
    let server = RedisServer::start().await;
    let [a, b, c] = replicas(&server, MOST).await;
    let late = Tally::default();
    race(ROUNDS, |round| {
        let (a, b, c, late) = (&a, &b, &c, &late);
        async move {
            let owner = Who::key("acme", &format!("k{round}"));
            let oldest = a.sessions.create(owner.new_session()).await.unwrap().session_id;
            let create = async |replica: &Replica| {
                stagger().await;
                match replica.sessions.create(owner.new_session()).await {
                    Ok(record) => Some(record.session_id),
                    Err(SessionError::TooMany { limit: MOST }) => None,
                    Err(other) => panic!("{other:?}"),
                }
            };
            let delete = async {
                stagger().await;
                b.sessions.delete(&oldest.expose(), &owner.caller()).await.unwrap();
            };
            let (first, second, ()) = join!(create(a), create(c), delete);
            let created: Vec<SessionId> = [first, second].into_iter().flatten().collect();
            // One place was free all the time, and another one from some moment on.
            assert!((1..=MOST).contains(&created.len()), "{}", created.len());
            assert!(c.store.live(&created).await.unwrap().iter().all(|live| *live));
            let mut places = a.store.of(owner.owner()).await.unwrap();
            places.sort_by_key(SessionId::expose);
            let mut sorted = created.clone();
            sorted.sort_by_key(SessionId::expose);
            assert_eq!(places, sorted, "a place for each session, and none beside");
            late.add(created.len() < MOST);
        }
    })
    .await;
    late.assert_both(ROUNDS, "deleted too late for the others");
}
