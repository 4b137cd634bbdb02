//! What is Redis's alone: the keyspace, flights, outages, and races between replicas.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use obol_model::{Kind, SessionId, SystemClock};
use obol_redis::{Redis, RedisOptions};
use obol_session::{RedisSessions, SessionError, SessionOptions, SessionRecord, SessionStore, Sessions};
use obol_testkit::flights::CountingProxy;
use obol_testkit::redis::RedisServer;
use tokio::time::Instant;

use crate::support::{Fixture, LIMIT, TTL, Who, connect};

/// Interleavings per race. Enough for each order of two to four commands to occur many times.
const ROUNDS: usize = 2000;

/// A replica of its own: another connection to the same Redis.
async fn replica(server: &RedisServer) -> (Sessions, Arc<RedisSessions>) {
    over(connect(server).await)
}

fn over(redis: Redis) -> (Sessions, Arc<RedisSessions>) {
    let store = Arc::new(RedisSessions::new(redis));
    let options = SessionOptions { ttl: TTL, max_per_principal: LIMIT };
    (Sessions::new(store.clone(), Arc::new(SystemClock), options), store)
}

/// Gives way a few times, so that the commands of one round set off in another order each time.
async fn stagger() {
    for _ in 0..rand::random_range(0..6) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_keyspace_is_the_documented_one() {
    let f = Fixture::redis().await;
    let server = f.server().unwrap();
    let record = f.sessions.create(Who::user("acme", "https://idp", "al:ice").new_session()).await.unwrap();
    let id = record.session_id.expose();
    let session = format!("sess:{{{id}}}");
    assert_eq!(server.keys("*").await, ["sess-of:acme:user:11:https://idp:al:ice", &session]);
    let mut fields: Vec<String> = server.query(&["HKEYS", &session]).await;
    fields.sort();
    assert_eq!(fields, ["last_seen", "principal", "record", "rev", "workspace"]);
    for key in server.keys("*").await {
        let left: i64 = server.query(&["PTTL", &key]).await;
        assert!((590_000..=600_000).contains(&left), "{key}: {left}");
    }
}

#[tokio::test]
async fn resuming_is_one_flight_and_renews_the_record_and_the_place() {
    let server = RedisServer::start().await;
    let proxy = CountingProxy::start(server.addr()).await;
    let (sessions, _) = over(Redis::connect(RedisOptions::new(proxy.url().into())).await.unwrap());
    let owner = Who::key("acme", "k1");
    let id = sessions.create(owner.new_session()).await.unwrap().session_id.expose();
    sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
    for key in server.keys("*").await {
        server.cli(&["PEXPIRE", &key, "1000"]).await;
    }
    proxy.reset();
    sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
    assert_eq!(proxy.commands(), [vec!["EVALSHA", "ZADD", "PEXPIRE"]]);
    for key in server.keys("*").await {
        let left: i64 = server.query(&["PTTL", &key]).await;
        assert!(left > 590_000, "{key}: {left}");
    }
    // Foreign and missing ids take the same way; malformed ones take none.
    proxy.reset();
    let never = SessionId::generate(jiff::Timestamp::UNIX_EPOCH).unwrap().expose();
    assert!(sessions.get_or_resume(&id, &Who::key("other", "k1").caller()).await.is_err());
    assert!(sessions.get_or_resume(&never, &owner.caller()).await.is_err());
    assert!(sessions.get_or_resume("mcs_nonsense", &owner.caller()).await.is_err());
    assert_eq!(proxy.commands(), vec![vec!["EVALSHA", "ZADD", "PEXPIRE"]; 2]);
    // A refusal leaves no trace.
    assert_eq!(server.keys("*").await.len(), 2);
}

#[tokio::test]
async fn an_outage_is_never_an_absent_session() {
    let server = RedisServer::start().await;
    let (sessions, _) = replica(&server).await;
    let owner = Who::key("acme", "k1");
    let id = sessions.create(owner.new_session()).await.unwrap().session_id.expose();
    let made_up = SessionId::generate(jiff::Timestamp::UNIX_EPOCH).unwrap().expose();
    server.pause();
    for id in [&id, &made_up] {
        let began = Instant::now();
        let error = sessions.get_or_resume(id, &owner.caller()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{error:?}");
        assert!(!format!("{error:?} {error}").contains(id.as_str()));
        assert!(began.elapsed() < Duration::from_secs(1));
    }
    let error = sessions.create(owner.new_session()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error:?}");
    server.resume();
    obol_testkit::eventually(Duration::from_secs(1), || async {
        sessions.get_or_resume(&id, &owner.caller()).await.map(drop)
    })
    .await;
    let gone = sessions.get_or_resume(&made_up, &owner.caller()).await;
    assert!(matches!(gone, Err(SessionError::NoSuchSession)));
}

#[tokio::test]
async fn a_full_redis_refuses_creation_as_unavailable_and_takes_no_place() {
    let f = Fixture::redis().await;
    let server = f.server().unwrap();
    let owner = Who::key("acme", "k1");
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]).await;
    for _ in 0..2 * LIMIT {
        let error = f.sessions.create(owner.new_session()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{error:?}");
    }
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]).await;
    f.sessions.create(owner.new_session()).await.unwrap();
}

#[tokio::test]
async fn a_record_of_a_later_release_is_corrupt_and_stays() {
    let f = Fixture::redis().await;
    let server = f.server().unwrap();
    let owner = Who::key("acme", "k1");
    let record = f.sessions.create(owner.new_session()).await.unwrap();
    let key = format!("sess:{{{}}}", record.session_id.expose());
    server.cli(&["HSET", &key, "record", r#"{"schema_version":2}"#]).await;
    let error = f.sessions.get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap_err();
    assert!(error.to_string().contains("schema version 2"), "{error}");
    assert_eq!(server.query::<u8>(&["EXISTS", &key]).await, 1);
}

#[tokio::test]
async fn resume_save_delete_and_expiry_never_resurrect() {
    let server = RedisServer::start().await;
    let ((a, _), (b, _), (c, _)) = (replica(&server).await, replica(&server).await, replica(&server).await);
    let owner = Who::key("acme", "k1");
    let caller = owner.caller();
    let redis = connect(&server).await;
    let (mut resumed, mut saved) = (0, 0);
    for round in 0..ROUNDS {
        let record = a.create(owner.new_session()).await.unwrap();
        let id = record.session_id.expose();
        let key = format!("sess:{{{id}}}");
        let end = async {
            stagger().await;
            if round % 2 == 0 {
                b.delete(&id, &caller).await.unwrap();
            } else {
                redis.query::<()>(redis::cmd("PEXPIREAT").arg(&key).arg(1)).await.unwrap();
            }
        };
        let resume = async {
            stagger().await;
            a.get_or_resume(&id, &caller).await
        };
        let save = async {
            stagger().await;
            c.save(&record).await
        };
        let again = async {
            stagger().await;
            c.get_or_resume(&id, &caller).await
        };
        let ((), first, second, third) = futures::join!(end, resume, save, again);
        resumed += usize::from(first.is_ok()) + usize::from(third.is_ok());
        saved += usize::from(second.is_ok());
        for outcome in [first, second, third] {
            assert!(matches!(outcome, Ok(_) | Err(SessionError::NoSuchSession)), "{outcome:?}");
        }
        // The next request of any replica finds nothing.
        assert!(matches!(a.get_or_resume(&id, &caller).await, Err(SessionError::NoSuchSession)));
        assert!(matches!(b.save(&record).await, Err(SessionError::NoSuchSession)));
        if round % 2 == 1 {
            // Expired sessions keep their places until those expire; here they would fill up.
            redis.query::<()>(redis::cmd("DEL").arg("sess-of:acme:key:k1")).await.unwrap();
        }
    }
    assert_eq!(server.keys("sess*").await, Vec::<String>::new(), "nothing is left");
    // Both orders occurred, or the rounds would show nothing.
    assert!((1..2 * ROUNDS).contains(&resumed) && (1..ROUNDS).contains(&saved), "{resumed} {saved}");
}

#[tokio::test]
async fn of_two_creations_of_one_id_one_wins() {
    let server = RedisServer::start().await;
    let ((a, one), (_, two)) = (replica(&server).await, replica(&server).await);
    let owner = Who::key("acme", "k1");
    let template = a.create(owner.new_session()).await.unwrap();
    let mut wins = [0, 0];
    for round in 0..ROUNDS {
        let session_id = SessionId::generate(template.created_at).unwrap();
        let record =
            |level: &str| SessionRecord { session_id, log_level: Some(level.to_owned()), ..template.clone() };
        let (first, second) = (record("one"), record("two"));
        let create_one = async {
            stagger().await;
            one.create(&first, TTL).await
        };
        let create_two = async {
            stagger().await;
            two.create(&second, TTL).await
        };
        // The order of the futures alternates: the first is polled first.
        let (x, y) = if round % 2 == 0 {
            futures::join!(create_one, create_two)
        } else {
            let (y, x) = futures::join!(create_two, create_one);
            (x, y)
        };
        assert!(x.is_ok() ^ y.is_ok(), "{x:?} {y:?}");
        let winner = if x.is_ok() { "one" } else { "two" };
        wins[usize::from(y.is_ok())] += 1;
        let found = a.get_or_resume(&session_id.expose(), &owner.caller()).await.unwrap();
        assert_eq!(found.log_level.as_deref(), Some(winner));
    }
    assert!(wins.iter().all(|&n| n > 0), "{wins:?}");
}

#[tokio::test]
async fn concurrent_saves_lose_no_update() {
    let server = RedisServer::start().await;
    let replicas = [replica(&server).await.0, replica(&server).await.0, replica(&server).await.0];
    let owner = Who::key("acme", "k1");
    let record = replicas[0].create(owner.new_session()).await.unwrap();
    let mut expected = 0;
    for round in 0..ROUNDS / 4 {
        let changes = replicas.iter().enumerate().map(|(n, sessions)| {
            let (record, caller) = (record.clone(), owner.caller());
            async move {
                stagger().await;
                sessions
                    .update(record, &caller, move |r| {
                        r.subscriptions.insert(format!("{n}/{}", round % 100));
                        // A counter kept in the record: lost as soon as one update is built on a stale one.
                        let count: u64 = r.log_level.as_deref().map_or(0, |text| text.parse().unwrap());
                        r.log_level = Some((count + 1).to_string());
                    })
                    .await
                    .unwrap()
            }
        });
        futures::future::join_all(changes).await;
        expected += replicas.len() as u64;
    }
    let found = replicas[1].get_or_resume(&record.session_id.expose(), &owner.caller()).await.unwrap();
    assert_eq!(found.log_level.unwrap(), expected.to_string());
    assert_eq!((found.rev, found.subscriptions.len()), (expected + 1, 300));
}

#[tokio::test]
async fn concurrent_creations_never_pass_the_limit() {
    let server = RedisServer::start().await;
    let replicas = [replica(&server).await.0, replica(&server).await.0, replica(&server).await.0];
    for round in 0..ROUNDS / 20 {
        let owner = Who::key("acme", &format!("k{round}"));
        let creations = (0..4 * LIMIT).map(|n| {
            let (sessions, new) = (&replicas[n % replicas.len()], owner.new_session());
            async move {
                stagger().await;
                sessions.create(new).await
            }
        });
        let outcomes = futures::future::join_all(creations).await;
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), LIMIT);
        for error in outcomes.into_iter().filter_map(Result::err) {
            assert!(matches!(error, SessionError::TooMany { .. }), "{error:?}");
        }
    }
}

#[tokio::test]
async fn a_clock_that_is_behind_does_not_cost_a_session_its_place() {
    let server = RedisServer::start().await;
    let (sessions, store) = replica(&server).await;
    let owner = Who::key("acme", "k1");
    let record = sessions.create(owner.new_session()).await.unwrap();
    let place = ["ZSCORE", "sess-of:acme:key:k1", &record.session_id.expose()];
    let before: f64 = server.query(&place).await;
    let behind = record.created_at - jiff::SignedDuration::from_secs(30);
    store.resume(record.session_id, &owner.caller(), behind, TTL).await.unwrap();
    assert!(server.query::<f64>(&place).await >= before);
}
