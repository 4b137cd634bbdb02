//! What is Redis's alone: the keyspace, flights, outages.
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
use obol_session::{RedisSessions, SessionError, SessionOptions, Sessions};
use obol_testkit::chaos::ChaosProxy;
use obol_testkit::flights::CountingProxy;
use obol_testkit::redis::RedisServer;
use tokio::time::Instant;

use crate::support::{Fixture, LIMIT, TTL, Who, connect};

/// A replica of its own: another connection to the same Redis.
async fn replica(server: &RedisServer) -> (Sessions, Arc<RedisSessions>) {
    over(connect(server).await)
}

fn over(redis: Redis) -> (Sessions, Arc<RedisSessions>) {
    let store = Arc::new(RedisSessions::new(redis));
    let options = SessionOptions { ttl: TTL, unused_ttl: None, max_per_principal: LIMIT };
    (Sessions::new(store.clone(), Arc::new(SystemClock), options), store)
}

#[tokio::test]
async fn the_keyspace_is_the_documented_one() {
    let f = Fixture::redis().await;
    let server = f.server().unwrap();
    let record = f.sessions.create(Who::user("acme", "https://idp", "al:ice").new_session()).await.unwrap();
    let id = record.session_id.expose();
    let (session, places) = (format!("sess:{{{id}}}"), "sess-of:acme:user:11:https://idp:al:ice");
    assert_eq!(server.keys("*").await, ["sess-live", places, &session]);
    let mut fields: Vec<String> = server.query(&["HKEYS", &session]).await;
    fields.sort();
    assert_eq!(fields, ["last_seen", "place", "principal", "record", "rev", "workspace"]);
    for (key, life) in [(session.as_str(), 600_000), (places, 660_000), ("sess-live", 660_000)] {
        let left: i64 = server.query(&["PTTL", key]).await;
        assert!((life - 10_000..=life).contains(&left), "{key}: {left}");
    }
    let place: u64 = server.query(&["ZSCORE", places, &id]).await;
    assert_eq!(server.query::<u64>(&["HGET", &session, "place"]).await, place);
    assert_eq!(server.query::<u64>(&["ZSCORE", "sess-live", &id]).await, place);
}

#[tokio::test]
async fn resuming_is_one_flight_and_renews_the_place_only_when_the_session_would_outlive_it() {
    let server = RedisServer::start().await;
    let proxy = CountingProxy::start(server.addr()).await;
    let (sessions, _) = over(Redis::connect(RedisOptions::new(proxy.url().into())).await.unwrap());
    let owner = Who::key("acme", "k1");
    let id = sessions.create(owner.new_session()).await.unwrap().session_id.expose();
    let (session, places) = (format!("sess:{{{id}}}"), "sess-of:acme:key:k1");
    sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
    server.cli(&["PEXPIRE", &session, "1000"]).await;
    let place: u64 = server.query(&["ZSCORE", places, &id]).await;
    proxy.reset();
    for _ in 0..3 {
        sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
    }
    assert_eq!(proxy.commands(), vec![vec!["EVALSHA"]; 3]);
    assert!(server.query::<i64>(&["PTTL", &session]).await > 590_000);
    assert_eq!(server.query::<u64>(&["ZSCORE", places, &id]).await, place);

    // As if a little more than a tenth of a life had passed.
    for (command, key) in [("HINCRBY", session.as_str()), ("ZINCRBY", places), ("ZINCRBY", "sess-live")] {
        let args = if command == "HINCRBY" { ["place", "-61000"] } else { ["-61000", &id] };
        server.cli(&[command, key, args[0], args[1]]).await;
    }
    proxy.reset();
    sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
    let renewal = vec!["ZADD", "PEXPIREAT", "ZADD", "PEXPIREAT"];
    assert_eq!(proxy.commands(), [vec!["EVALSHA"], renewal]);
    for key in [places, "sess-live"] {
        assert!(server.query::<u64>(&["ZSCORE", key, &id]).await >= place);
        assert!(server.query::<i64>(&["PTTL", key]).await > 650_000);
    }

    // Foreign and missing ids take the same way; malformed ones take none.
    proxy.reset();
    let never = SessionId::generate(jiff::Timestamp::UNIX_EPOCH).unwrap().expose();
    assert!(sessions.get_or_resume(&id, &Who::key("other", "k1").caller()).await.is_err());
    assert!(sessions.get_or_resume(&id, &Who::key("acme", "k2").caller()).await.is_err());
    assert!(sessions.get_or_resume(&never, &owner.caller()).await.is_err());
    assert!(sessions.get_or_resume("mcs_nonsense", &owner.caller()).await.is_err());
    assert_eq!(proxy.commands(), vec![vec!["EVALSHA"]; 3]);
    // A refusal leaves no trace.
    assert_eq!(server.keys("*").await.len(), 3);
}

#[tokio::test]
async fn places_of_short_and_long_lives_do_not_end_each_other() {
    let f = Fixture::redis().await;
    let server = f.server().unwrap();
    let owner = Who::key("acme", "k1");
    f.sessions.create(owner.new_session()).await.unwrap();
    let brief = SessionOptions { ttl: Duration::from_secs(1), unused_ttl: None, max_per_principal: LIMIT };
    f.with(brief).create(owner.new_session()).await.unwrap();
    for key in ["sess-of:acme:key:k1", "sess-live"] {
        assert!(server.query::<i64>(&["PTTL", key]).await > 600_000, "{key}");
        assert_eq!(server.query::<usize>(&["ZCARD", key]).await, 2);
    }
}

/// What is left when a creator dies between the two steps, or Redis was away in the second.
#[tokio::test]
async fn a_place_without_a_session_lapses_in_seconds() {
    let f = Fixture::redis().await;
    let (server, owner) = (f.server().unwrap(), Who::key("acme", "k1"));
    f.sessions.create(owner.new_session()).await.unwrap();
    for n in 1..LIMIT {
        let script = include_str!("../src/scripts/session_place_v2.lua");
        let (id, limit) = (format!("mcs_abandoned{n}"), LIMIT.to_string());
        let taken: u64 =
            server.query(&["EVAL", script, "1", "sess-of:acme:key:k1", &id, "10000", &limit]).await;
        assert!(taken > 0);
    }
    assert!(matches!(f.sessions.create(owner.new_session()).await, Err(SessionError::TooMany { .. })));
    f.pass(Duration::from_secs(11)).await;
    for _ in 1..LIMIT {
        f.sessions.create(owner.new_session()).await.unwrap();
    }
    assert!(matches!(f.sessions.create(owner.new_session()).await, Err(SessionError::TooMany { .. })));
}

/// A user of Redis that may take places and not write sessions.
#[tokio::test]
async fn a_creation_that_redis_refuses_gives_its_place_back() {
    let f = Fixture::redis().await;
    let (server, owner) = (f.server().unwrap(), Who::key("acme", "k1"));
    server.cli(&["ACL", "SETUSER", "half", "on", ">secret", "~sess-*", "+@all"]).await;
    let url = server.url().replace("redis://", "redis://half:secret@");
    let (sessions, _) = over(Redis::connect(RedisOptions::new(url.into())).await.unwrap());
    for _ in 0..2 * LIMIT {
        let error = sessions.create(owner.new_session()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{error:?}");
    }
    assert_eq!(server.keys("*").await, Vec::<String>::new());
}

#[tokio::test]
async fn a_connection_that_breaks_is_not_the_callers_problem() {
    let server = RedisServer::start().await;
    let proxy = ChaosProxy::start(server.addr()).await;
    let url = format!("redis://{}", proxy.addr());
    let (sessions, _) = over(Redis::connect(RedisOptions::new(url.into())).await.unwrap());
    let owner = Who::key("acme", "k1");
    for _ in 0..20 {
        proxy.drop_connections().await;
        let id = sessions.create(owner.new_session()).await.unwrap().session_id.expose();
        proxy.drop_connections().await;
        sessions.get_or_resume(&id, &owner.caller()).await.unwrap();
        proxy.drop_connections().await;
        sessions.delete(&id, &owner.caller()).await.unwrap();
    }
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
        assert!(began.elapsed() < Duration::from_millis(2_500));
    }
    let error = sessions.create(owner.new_session()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error:?}");
    server.resume();
    obol_testkit::eventually(Duration::from_secs(5), || async {
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

/// Replicas whose clocks are half a minute apart share the sessions and the count of a short life.
#[tokio::test]
async fn clocks_that_differ_cost_no_session_its_place() {
    let f = Fixture::redis().await;
    let (server, owner) = (f.server().unwrap(), Who::key("acme", "k1"));
    let life = Duration::from_secs(4);
    let brief = SessionOptions { ttl: life, unused_ttl: None, max_per_principal: LIMIT };
    let record = f.with(brief).create(owner.new_session()).await.unwrap();
    let (id, key) = (record.session_id, format!("sess:{{{}}}", record.session_id.expose()));
    for seconds in [-30, 30, -30] {
        let now = record.created_at + jiff::SignedDuration::from_secs(seconds);
        f.store.resume(id, &owner.caller(), now, life).await.unwrap();
        let ends: i64 = server.query(&["PEXPIRETIME", &key]).await;
        let place: i64 = server.query(&["ZSCORE", "sess-of:acme:key:k1", &id.expose()]).await;
        assert!((0..=400).contains(&(place - ends)), "{place} {ends}");
    }
}
