//! A real master with a replica, watched by real sentinels.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use obol_redis::{Redis, RedisOptions, SubscriberEvent};
use obol_testkit::eventually;
use obol_testkit::redis_sentinel::{MASTER, RedisSentinel};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use support::{BACK, Kept, Load, PATIENCE, SECOND, client, failures, patient};

async fn port(redis: &Redis) -> Option<u16> {
    let answer = redis.query::<(String, u16)>(redis::cmd("CONFIG").arg("GET").arg("port")).await;
    answer.ok().map(|(_, port)| port)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_is_in_use_within_a_second_and_the_old_master_never_again() {
    let sentinel = RedisSentinel::start_with(3).await;
    let kept = Kept::with(patient(sentinel.url())).await;
    let old = sentinel.master().await;
    assert_eq!(port(&kept.redis).await, Some(old.port()));
    let before: u64 = kept.redis.query(redis::cmd("INCR").arg("n")).await.unwrap();
    old.wait_until_replicated().await;

    let load = {
        let redis = kept.redis.clone();
        Load::start(10, move || {
            let redis = redis.clone();
            async move { redis.query::<u64>(redis::cmd("INCR").arg("load")).await.map(drop) }
        })
    };
    old.kill();
    let new = sentinel.wait_until_promoted(old).await;
    let get = redis::cmd("GET").arg("n").to_owned();
    let after: u64 = eventually(BACK, || kept.redis.query(&get)).await;
    assert_eq!(after, before, "what was replicated is there");
    let settled = Instant::now();

    // It comes back empty and calls itself master until a sentinel tells it otherwise.
    old.restart().await;
    eventually(20 * SECOND, || async {
        assert_eq!(port(&kept.redis).await, Some(new.port()));
        old.try_query::<String>(&["INFO", "replication"]).await.is_ok_and(|info| info.contains("role:slave"))
    })
    .await;
    let outcomes = load.end(PATIENCE).await;
    let late = failures(&outcomes, settled, Instant::now());
    assert!(late.is_empty(), "{late:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_lives_on_is_left_when_another_was_promoted() {
    let sentinel = RedisSentinel::start().await;
    let kept = Kept::connect(sentinel.url()).await;
    let (events, mut received) = mpsc::channel(16);
    let stop = CancellationToken::new();
    let listening = kept.redis.subscribe("obol:test", events, stop.clone());
    let test = async {
        assert_eq!(received.recv().await, Some(SubscriberEvent::Subscribed));
        let new = sentinel.failover().await;
        // The old one takes writes for seconds to come.
        eventually(BACK, || async { port(&kept.redis).await == Some(new.port()) }).await;
        // The subscription moves as well.
        let again = async { while received.recv().await.unwrap() != SubscriberEvent::Subscribed {} };
        tokio::time::timeout(10 * SECOND, again).await.unwrap();
        let heard: u32 = new.query(&["PUBLISH", "obol:test", "x"]).await;
        assert_eq!(heard, 1);
        stop.cancel();
    };
    tokio::join!(listening, test);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_slept_through_its_replacement_is_not_used_when_it_wakes_up() {
    let sentinel = RedisSentinel::start().await;
    let kept = Kept::connect(sentinel.url()).await;
    let old = sentinel.master().await;
    // Nobody asks for anything meanwhile.
    old.pause();
    let new = sentinel.wait_until_promoted(old).await;
    old.resume();
    let incr = redis::cmd("INCR").arg("n").to_owned();
    for _ in 0..100 {
        eventually(BACK, || kept.redis.query::<u64>(&incr)).await;
    }
    // One that seemed to fail may have been executed.
    assert!(new.query::<u64>(&["GET", "n"]).await >= 100, "some went to the old master, and are lost");
}

#[tokio::test]
async fn sentinels_that_are_away_stop_nothing_that_works() {
    let sentinel = RedisSentinel::start_with(3).await;
    let kept = Kept::connect(sentinel.url()).await;
    // One that is left is enough to begin.
    sentinel.sentinels()[0].pause();
    sentinel.sentinels()[1].kill();
    client(sentinel.url()).await.ping().await.unwrap();
    sentinel.sentinels()[2].kill();
    kept.redis.ping().await.unwrap();
    sentinel.sentinels()[0].resume();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_missed_a_failover_leads_nobody_back() {
    let sentinel = RedisSentinel::start_with(3).await;
    let kept = Kept::with(patient(sentinel.url())).await;
    let [one, two, behind] = sentinel.sentinels() else { panic!("three were started") };
    let old = sentinel.master().await;
    behind.kill();
    old.kill();
    let new = sentinel.wait_until_promoted(old).await;
    eventually(BACK, || async { port(&kept.redis).await == Some(new.port()) }).await;
    // It is the only one now, and names the master of before.
    one.kill();
    two.kill();
    behind.restart().await;
    let asked_for_seconds = |clients: &str| {
        let age = |line: &str| line.split_once(" age=")?.1.split(' ').next()?.parse::<u32>().ok();
        clients.lines().any(|line| line.contains("cmd=sentinel|") && age(line) >= Some(3))
    };
    eventually(30 * SECOND, || async {
        assert_eq!(port(&kept.redis).await, Some(new.port()));
        asked_for_seconds(&behind.query::<String>(&["CLIENT", "LIST"]).await)
    })
    .await;
    let (_, named): (String, u16) = behind.query(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]).await;
    assert_eq!(named, old.port());
}

#[tokio::test]
async fn faults_of_a_url_are_told_apart_and_logins_are_used() {
    let sentinel = RedisSentinel::start().await;
    let connect = async |url: String| Redis::connect(RedisOptions::new(url.into())).await;
    let other = sentinel.url().replace(MASTER, "other");
    let error = connect(other).await.unwrap_err().to_string();
    assert!(error.contains("watch no master of this name"), "{error}");
    let direct = format!("redis://{}", sentinel.sentinels()[0].addr());
    let error = connect(direct).await.unwrap_err().to_string();
    assert!(error.contains("redis+sentinel://"), "{error}");
    let replica = format!("redis://{}", sentinel.servers()[1].addr());
    let error = connect(replica).await.unwrap_err().to_string();
    assert!(error.contains("read-only replica"), "{error}");

    sentinel.servers()[0].cli(&["ACL", "SETUSER", "obol", "on", ">one", "~*", "&*", "+@all"]).await;
    sentinel.sentinels()[0].cli(&["ACL", "SETUSER", "guest", "on", ">two", "+@all"]).await;
    sentinel.sentinels()[0].cli(&["ACL", "SETUSER", "default", "off"]).await;
    let url = sentinel.url().replace("://", "://obol:one@");
    let url = format!("{url}?sentinel_username=guest&sentinel_password=two");
    let redis = connect(url.clone()).await.unwrap();
    let who: String = redis.query(redis::cmd("ACL").arg("WHOAMI")).await.unwrap();
    assert_eq!(who, "obol");
    let error = connect(url.replace("two", "three")).await.unwrap_err().to_string();
    assert!(error.contains("refuses the user name or password") && !error.contains("three"), "{error}");
}
