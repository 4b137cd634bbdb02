//! What requests see of an outage while somebody looks after the connections: refusals at once, and an end of it by
//! itself.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use std::time::Duration;

use obol_redis::{Redis, RedisError, RedisOptions, Script};
use obol_testkit::chaos::ChaosProxy;
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use tokio::time::Instant;

use support::{BACK, Kept, LATEST, Load, SECOND, patient};

/// What a refusal may take on a busy machine. Waiting for a dead server would take 500 ms at least.
const AT_ONCE: Duration = Duration::from_millis(400);

fn pings(redis: &Redis, clients: usize) -> Load {
    let redis = redis.clone();
    Load::start(clients, move || {
        let redis = redis.clone();
        async move { redis.ping().await }
    })
}

async fn refused_at_once(redis: &Redis) -> Result<(), String> {
    let began = Instant::now();
    match redis.ping().await {
        Err(_) if began.elapsed() < AT_ONCE => Ok(()),
        Err(why) => Err(format!("{why} after {:?}", began.elapsed())),
        Ok(()) => Err("answered".to_owned()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_under_load_is_refused_at_once_and_costs_few_connections() {
    let server = RedisServer::start().await;
    let proxy = ChaosProxy::start(server.addr()).await;
    let kept = Kept::connect(format!("redis://{}", proxy.addr())).await;
    let load = pings(&kept.redis, 50);

    // Nothing is heard of the server any more. The first requests find out, each within its deadline.
    proxy.stall();
    let before = proxy.accepted();
    eventually(20 * SECOND, || refused_at_once(&kept.redis)).await;
    // From now on the only one that waits is the keeper.
    let (settled, mut slow) = (Instant::now(), 0);
    while settled.elapsed() < 3 * SECOND {
        slow += usize::from(refused_at_once(&kept.redis).await.is_err());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(slow <= 5, "{slow} requests waited for a server that was known to be away");
    let attempts = proxy.accepted() - before;
    assert!((1..=14).contains(&attempts), "{attempts} connections in some four seconds");

    proxy.restore().await;
    eventually(BACK, || kept.redis.ping()).await;

    // Refused connections are no different.
    proxy.cut().await;
    eventually(BACK, || refused_at_once(&kept.redis)).await;
    proxy.restore().await;
    eventually(BACK, || kept.redis.ping()).await;
    load.end(LATEST).await;
    kept.end().await;
}

#[tokio::test]
async fn nobody_waits_for_an_attempt_of_the_keeper() {
    let server = RedisServer::start().await;
    let proxy = ChaosProxy::start(server.addr()).await;
    let url = format!("redis://{}", proxy.addr());
    // An attempt takes much longer than a refusal.
    let kept =
        Kept::with(RedisOptions { connect_timeout: 3 * SECOND, command_timeout: 3 * SECOND, ..patient(url) })
            .await;
    proxy.stall();
    eventually(20 * SECOND, || refused_at_once(&kept.redis)).await;
    for _ in 0..2 {
        let before = proxy.accepted();
        eventually(20 * SECOND, || async { proxy.accepted() > before }).await;
        // It has just begun.
        let all = futures::future::join_all((0..50).map(|_| refused_at_once(&kept.redis))).await;
        assert!(all.iter().all(Result::is_ok), "{all:?}");
    }
}

#[tokio::test]
async fn a_link_that_died_without_a_word_is_noticed_without_any_request() {
    let server = RedisServer::start().await;
    let proxy = ChaosProxy::start(server.addr()).await;
    let kept = Kept::connect(format!("redis://{}", proxy.addr())).await;
    let before = proxy.accepted();
    proxy.stall();
    // A new connection was tried, failed, and is tried again.
    eventually(20 * SECOND, || async { proxy.accepted() >= before + 2 }).await;
    eventually(BACK, || refused_at_once(&kept.redis)).await;
    proxy.restore().await;
    eventually(BACK, || kept.redis.ping()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_connections_are_replaced_under_load() {
    let server = RedisServer::start().await;
    let kept = Kept::connect(server.url()).await;
    let load = pings(&kept.redis, 20);
    for _ in 0..5 {
        server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        eventually(BACK, || kept.redis.ping()).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let outcomes = load.end(LATEST).await;
    assert!(outcomes.iter().any(|outcome| outcome.failed.is_none()));
    let clients: String = server.query(&["CLIENT", "LIST"]).await;
    assert_eq!(clients.lines().count(), 2, "one connection, whatever was killed: {clients}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_server_delays_nobody_beyond_the_deadline() {
    let server = RedisServer::start().await;
    let kept = Kept::connect(server.url()).await;
    let load = pings(&kept.redis, 20);
    let began = Instant::now();
    server.cli(&["CLIENT", "PAUSE", "2500", "ALL"]).await;
    eventually(2 * SECOND, || async { kept.redis.ping().await.is_err() }).await;
    tokio::time::sleep_until(began + Duration::from_millis(2500)).await;
    eventually(BACK, || kept.redis.ping()).await;
    load.end(LATEST).await;
}

#[tokio::test]
async fn a_master_that_was_demoted_is_left_until_it_is_one_again() {
    let (server, other) = (RedisServer::start().await, RedisServer::start().await);
    let kept = Kept::connect(server.url()).await;
    server.cli(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]).await;
    let set = redis::cmd("SET").arg("a").arg("1").to_owned();
    // The first write finds out, if the server has not closed the connection by then.
    eventually(BACK, || async {
        match kept.redis.query::<()>(&set).await {
            Err(RedisError::Connect { hint, .. }) if hint.contains("read-only replica") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    eventually(BACK, || refused_at_once(&kept.redis)).await;
    server.cli(&["REPLICAOF", "NO", "ONE"]).await;
    eventually(BACK, || kept.redis.query::<()>(&set)).await;
}

#[tokio::test]
async fn a_server_that_reads_its_data_is_used_when_it_is_done() {
    let server = RedisServer::start_with(&["--enable-debug-command", "yes"]).await;
    let kept = Kept::connect(server.url()).await;
    let (mut fill, value) = (redis::pipe(), "x".repeat(400));
    for n in 0..1000 {
        fill.set(format!("k{n}"), &value).ignore();
    }
    kept.redis.pipeline::<()>(&fill).await.unwrap();
    // Some three seconds, in which it answers after every few keys.
    let slowly = ["key-load-delay", "3000", "loading-process-events-interval-bytes", "1024"];
    server.cli(&[&["CONFIG", "SET"][..], &slowly[..]].concat()).await;
    let reload = async || {
        let mut connection = server.connection().await;
        connection.set_response_timeout(60 * SECOND);
        redis::cmd("DEBUG").arg("RELOAD").exec_async(&mut connection).await.unwrap();
    };
    let told = async || {
        loop {
            let refused = kept.redis.ping().await.err().map(|why| why.to_string());
            if refused.is_some_and(|why| why.contains("reading its data")) {
                return;
            }
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    // On a busy machine it may be over before it was noticed.
    for _ in 0..5 {
        let loading = reload();
        tokio::pin!(loading);
        tokio::select! {
            () = &mut loading => continue,
            () = told() => {}
        }
        loading.await;
        break;
    }
    let get = redis::cmd("GET").arg("k999").to_owned();
    let there: String = eventually(BACK, || kept.redis.query(&get)).await;
    assert_eq!(there, value);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_are_flushed_under_load_run_once_each() {
    let server = RedisServer::start().await;
    let kept = Kept::with(patient(server.url())).await;
    let script = Script::new("add", "return redis.call('INCRBY', KEYS[1], ARGV[1])");
    let add = async |_| {
        for _ in 0..500 {
            kept.redis.run::<u64>(&script, &["n"], &[b"1"]).await.unwrap();
        }
    };
    let adding = futures::future::join_all((0..8).map(add));
    let flushing = async {
        loop {
            kept.redis.query::<()>(redis::cmd("SCRIPT").arg("FLUSH")).await.unwrap();
        }
    };
    tokio::select! {
        _ = adding => {}
        () = flushing => {}
    }
    assert_eq!(server.query::<u64>(&["GET", "n"]).await, 8 * 500);
}
