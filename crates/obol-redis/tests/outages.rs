//! What a client does while Redis is away, silent or cut off, and when it comes back.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "test support: what is broken should fail where it broke"
)]

use std::time::Duration;

use obol_model::Kind;
use obol_redis::{Redis, RedisError, RedisOptions, SubscriberEvent};
use obol_testkit::chaos::ChaosProxy;
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const SECOND: Duration = Duration::from_secs(1);

/// Room for a busy machine on top of a deadline that is the product's promise.
const SLACK: Duration = Duration::from_millis(150);

async fn client(url: String) -> Redis {
    Redis::connect(RedisOptions::new(url.into())).await.unwrap()
}

async fn timed<T>(future: impl Future<Output = T>) -> (T, Duration) {
    let began = Instant::now();
    (future.await, began.elapsed())
}

#[tokio::test]
async fn a_killed_server_refuses_fast_and_is_used_again_when_it_is_back() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    for _ in 0..3 {
        server.kill();
        for _ in 0..20 {
            let (outcome, took) = timed(redis.ping()).await;
            assert_eq!(outcome.unwrap_err().kind(), Kind::Unavailable);
            assert!(took < Duration::from_millis(100), "{took:?}");
        }
        server.restart().await;
        let ((), took) = timed(eventually(SECOND, || redis.ping())).await;
        assert!(took < SECOND, "{took:?}");
    }
}

#[tokio::test]
async fn the_first_command_after_a_quiet_restart_succeeds() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    // Nothing is sent while the server is away: the client has to notice by itself.
    server.restart().await;
    redis.ping().await.unwrap();
}

#[tokio::test]
async fn a_silent_server_costs_each_command_its_deadline_at_most() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    server.pause();
    let all = futures::future::join_all((0..100).map(|_| timed(redis.ping()))).await;
    for (outcome, took) in all {
        assert!(matches!(outcome, Err(RedisError::Timeout { .. })), "{outcome:?}");
        assert!(took < Duration::from_millis(800) + SLACK, "{took:?}");
    }
    // Later ones too, and those that come while a new connection is awaited in vain.
    for _ in 0..5 {
        let (outcome, took) = timed(redis.ping()).await;
        assert_eq!(outcome.unwrap_err().kind(), Kind::Unavailable);
        assert!(took < Duration::from_millis(800) + SLACK, "{took:?}");
    }
    server.resume();
    let ((), took) = timed(eventually(SECOND, || redis.ping())).await;
    assert!(took < SECOND, "{took:?}");
    redis.ping().await.unwrap();
}

#[tokio::test]
async fn the_wait_for_a_connection_is_part_of_the_deadline() {
    let server = RedisServer::start().await;
    let proxy = ChaosProxy::start(server.addr()).await;
    let url = format!("redis://{}", proxy.addr());
    let options = RedisOptions {
        command_timeout: Duration::from_millis(300),
        connect_timeout: 20 * SECOND,
        ..RedisOptions::new(url.into())
    };
    let redis = Redis::connect(options).await.unwrap();
    let before = proxy.accepted();
    proxy.stall();
    // The first one waits for an answer, those that follow for a connection.
    for _ in 0..4 {
        let (outcome, took) = timed(redis.ping()).await;
        assert!(matches!(outcome, Err(RedisError::Timeout { .. })), "{outcome:?}");
        assert!(took < 5 * SECOND, "{took:?}");
    }
    assert_eq!(proxy.accepted(), before + 1, "all of them waited for the same one");
}

#[tokio::test]
async fn a_link_that_died_without_a_word_is_replaced() {
    let server = RedisServer::start().await;
    let first = ChaosProxy::start(server.addr()).await;
    let redis = client(format!("redis://{}", first.addr())).await;
    let before = first.accepted();
    first.stall();
    assert!(matches!(redis.ping().await, Err(RedisError::Timeout { .. })));
    first.restore().await;
    eventually(SECOND, || redis.ping()).await;
    assert!(first.accepted() > before, "a new connection was made");
}

#[tokio::test]
async fn a_dropped_connection_is_replaced_at_once() {
    let server = RedisServer::start().await;
    let proxy = ChaosProxy::start(server.addr()).await;
    let redis = client(format!("redis://{}", proxy.addr())).await;
    proxy.drop_connections().await;
    eventually(SECOND, || redis.ping()).await;
    proxy.cut().await;
    let (outcome, took) = timed(eventually(SECOND, || async { redis.ping().await.is_err() })).await;
    assert_eq!(outcome, ());
    assert!(took < Duration::from_millis(200), "{took:?}");
    proxy.restore().await;
    eventually(SECOND, || redis.ping()).await;
}

#[tokio::test]
async fn a_slow_command_holds_up_nobody_for_longer_than_it_runs() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    // Blocks this connection's commands on the server until the deadline, which takes the connection out of use.
    let blocked = redis::cmd("BLPOP").arg("nothing").arg(0).to_owned();
    let (outcome, _) = timed(redis.query::<redis::Value>(&blocked)).await;
    assert!(matches!(outcome, Err(RedisError::Timeout { .. })));
    let (outcome, took) = timed(redis.ping()).await;
    outcome.unwrap();
    assert!(took < Duration::from_millis(200), "{took:?}");
}

#[tokio::test]
async fn an_abandoned_command_harms_no_other() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    server.kill();
    assert!(redis.ping().await.is_err());
    server.restart().await;
    // Abandons attempts to connect at every stage that a timer can hit.
    for micros in (0..2000).step_by(50) {
        let abandoned = timeout(Duration::from_micros(micros), redis.ping()).await;
        drop(abandoned);
    }
    eventually(SECOND, || redis.ping()).await;
    let set = |n: u32| redis::cmd("INCRBY").arg("n").arg(n).to_owned();
    for n in 0..500_u32 {
        let abandoned = timeout(Duration::from_micros(u64::from(n % 50)), redis.query::<u64>(&set(1))).await;
        drop(abandoned);
        let answer: String = redis.query(redis::cmd("ECHO").arg(n)).await.unwrap();
        assert_eq!(answer, n.to_string(), "answers stay with their commands");
    }
}

struct Listener {
    events: mpsc::Receiver<SubscriberEvent>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

#[expect(clippy::disallowed_methods, reason = "the test is the composer that owns the task")]
fn listen(redis: &Redis) -> Listener {
    let (sender, events) = mpsc::channel(16);
    let shutdown = CancellationToken::new();
    let (redis, token) = (redis.clone(), shutdown.clone());
    let task = tokio::spawn(async move { redis.subscribe("obol:test", sender, token).await });
    Listener { events, shutdown, task }
}

impl Listener {
    /// The next one that is no mere sign of life.
    async fn next(&mut self, within: Duration) -> SubscriberEvent {
        let next = async {
            loop {
                match self.events.recv().await.unwrap() {
                    SubscriberEvent::Alive => {}
                    event => return event,
                }
            }
        };
        timeout(within, next).await.unwrap()
    }
}

fn message(text: &'static str) -> SubscriberEvent {
    SubscriberEvent::Message(text.into())
}

#[tokio::test]
async fn a_subscription_says_when_it_stands_and_comes_back_by_itself() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    let mut listener = listen(&redis);
    for _ in 0..2 {
        assert_eq!(listener.next(5 * SECOND).await, SubscriberEvent::Subscribed);
        server.cli(&["PUBLISH", "obol:test", "one"]).await;
        server.cli(&["PUBLISH", "obol:else", "not this"]).await;
        server.cli(&["PUBLISH", "obol:test", "two"]).await;
        assert_eq!(listener.next(SECOND).await, message("one"));
        assert_eq!(listener.next(SECOND).await, message("two"));
        server.restart().await;
    }
    assert_eq!(listener.next(5 * SECOND).await, SubscriberEvent::Subscribed);
    listener.shutdown.cancel();
    timeout(SECOND, listener.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_subscription_over_a_link_that_died_without_a_word_is_renewed_within_15_seconds() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    let proxy = ChaosProxy::start(server.addr()).await;
    let through = client(format!("redis://{}", proxy.addr())).await;
    let mut listener = listen(&through);
    assert_eq!(listener.next(5 * SECOND).await, SubscriberEvent::Subscribed);
    let accepted = proxy.accepted();
    let began = Instant::now();
    proxy.stall();
    // Noticed when it connects anew; the stalled proxy accepts and holds that as well.
    eventually(15 * SECOND, || async { proxy.accepted() > accepted }).await;
    assert!(began.elapsed() < 15 * SECOND, "{:?}", began.elapsed());
    proxy.restore().await;
    assert_eq!(listener.next(7 * SECOND).await, SubscriberEvent::Subscribed);
    redis.query::<u64>(redis::cmd("PUBLISH").arg("obol:test").arg("back")).await.unwrap();
    assert_eq!(listener.next(SECOND).await, message("back"));
}

#[tokio::test]
async fn a_subscription_whose_receiver_is_gone_ends() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    let mut listener = listen(&redis);
    assert_eq!(listener.next(5 * SECOND).await, SubscriberEvent::Subscribed);
    drop(listener.events);
    timeout(SECOND, listener.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_receiver_that_does_not_keep_up_is_told_that_it_missed_messages() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await;
    let mut listener = listen(&redis);
    assert_eq!(listener.next(5 * SECOND).await, SubscriberEvent::Subscribed);
    for _ in 0..100 {
        server.cli(&["PUBLISH", "obol:test", "more"]).await;
    }
    // Idle until the subscription was made anew.
    let lost = async || {
        let clients: String = server.query(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
        clients.trim().is_empty()
    };
    eventually(10 * SECOND, lost).await;
    let mut delivered = 0;
    while listener.next(10 * SECOND).await == message("more") {
        delivered += 1;
    }
    assert!(delivered < 100, "{delivered}");
}
