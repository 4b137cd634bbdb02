//! The life of upstream sessions: renewal, listening, the end.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail loudly"
)]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::{ECHO, SOON, at, call, finish, options, pool, pool_with, tool};
use futures::future::BoxFuture;
use obol_mcp::pool::{
    Call, CallError, Connect, Endpoint, Event, EventKind, Inbound, ListKind, Outgoing, Pool, PoolOptions,
    Reply, Transport, TransportError, UpstreamEvent,
};
use obol_testkit::eventually;
use obol_testkit::fake_mcp::{FakeMcp, Stall};
use tokio::sync::broadcast::Receiver;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

const CHANGED: &str = r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#;

async fn next(events: &mut Receiver<UpstreamEvent>) -> EventKind {
    tokio::time::timeout(SOON, events.recv()).await.unwrap().unwrap().kind
}

fn quick() -> PoolOptions {
    PoolOptions { max_age: Duration::from_millis(600), ..options() }
}

#[tokio::test]
async fn sessions_are_renewed_ahead_of_time_and_calls_in_flight_finish_on_the_old_one() {
    let server = FakeMcp::start().await;
    let (pool, at, shutdown) = (pool_with(quick()), at(&server.url()), CancellationToken::new());
    let run = common::background(pool.clone().run(shutdown.clone()));
    let with_level = Call { log_level: Some("debug"), ..call("tools/call", ECHO) };
    assert!(finish(&mut pool.call(&at, with_level).await.unwrap()).await.1.is_ok());
    let subscribe = call("resources/subscribe", r#"{"uri":"demo://text"}"#);
    assert!(finish(&mut pool.call(&at, subscribe).await.unwrap()).await.1.is_ok());
    server.stall(Stall::UntilReleased);
    let mut old = pool.call(&at, call("tools/call", ECHO)).await.unwrap();
    let waiting = async {
        let counts = server.wait_until(|c| c.sessions_created >= 3).await;
        // The second session had no call in flight, the first one has.
        assert!(counts.sessions_deleted <= 1);
        server.release();
    };
    let ((_, end), ()) = tokio::join!(finish(&mut old), waiting);
    assert!(matches!(end, Ok(Event::Result(_))));
    let first = server.received_of("tools/call")[0].session().unwrap().to_owned();
    eventually(SOON, || std::future::ready(!server.sessions().contains(&first))).await;
    // Level and subscription were brought over.
    let counts = server.counts();
    assert!(counts.requests_of("logging/setLevel") >= 2 && counts.requests_of("resources/subscribe") >= 2);
    shutdown.cancel();
    run.await.unwrap();
    assert!(server.sessions().is_empty(), "every session is ended at the end");
}

#[tokio::test]
async fn a_session_that_nobody_uses_is_ended_and_forgotten() {
    let server = FakeMcp::start().await;
    let options =
        PoolOptions { idle: Duration::from_millis(100), max_age: Duration::from_secs(1), ..options() };
    let (pool, at, shutdown) = (pool_with(options), at(&server.url()), CancellationToken::new());
    let run = common::background(pool.clone().run(shutdown.clone()));
    tool(&pool, &at, ECHO).await.unwrap();
    server.wait_until(|c| c.sessions_deleted == 1).await;
    eventually(SOON, || std::future::ready(format!("{pool:?}").contains("slots: 0"))).await;
    assert!(pool.capabilities(&at).is_some(), "what it can do is remembered");
    tool(&pool, &at, ECHO).await.unwrap();
    assert_eq!(server.counts().sessions_created, 2);
    shutdown.cancel();
    run.await.unwrap();
}

#[tokio::test]
async fn the_end_waits_for_calls_in_flight_and_takes_no_new_ones() {
    let server = FakeMcp::start().await;
    server.stall(Stall::UntilReleased);
    let (pool, at, shutdown) = (pool(), at(&server.url()), CancellationToken::new());
    let run = common::background(pool.clone().run(shutdown.clone()));
    let mut exchange = pool.call(&at, call("tools/call", ECHO)).await.unwrap();
    let ending = async {
        server.wait_until(|c| c.calls("echo") == 1).await;
        shutdown.cancel();
        let list = || pool.list(&at, ListKind::Tools, Instant::now() + SOON);
        eventually(SOON, || async { matches!(list().await, Err(CallError::Stopping)) }).await;
        server.release();
    };
    let ((_, end), ()) = tokio::join!(finish(&mut exchange), ending);
    assert!(end.is_ok());
    run.await.unwrap();
    assert_eq!(server.counts().sessions_deleted, 1);
}

/// Connects to a server that never answers.
#[derive(Debug, Default)]
struct Silent {
    /// Not even a connection comes about.
    unreachable: bool,
    asked: Arc<AtomicUsize>,
    closed: Arc<AtomicUsize>,
}

#[async_trait::async_trait]
impl Connect for Silent {
    async fn connect(&self, _endpoint: &Endpoint) -> Result<Arc<dyn Transport>, TransportError> {
        if self.unreachable {
            self.asked.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
        let (asked, closed) = (Arc::clone(&self.asked), Arc::clone(&self.closed));
        Ok(Arc::new(Self { unreachable: false, asked, closed }))
    }
}

#[async_trait::async_trait]
impl Transport for Silent {
    fn name(&self) -> &'static str {
        "silent"
    }

    fn request(self: Arc<Self>, _outgoing: Outgoing) -> BoxFuture<'static, Result<Reply, TransportError>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        Box::pin(std::future::pending())
    }

    async fn send(&self, _message: Bytes) -> Result<(), TransportError> {
        Ok(())
    }

    async fn unsolicited(self: Arc<Self>) -> Result<Option<Box<dyn Inbound>>, TransportError> {
        Ok(None)
    }

    fn is_durable(&self) -> bool {
        true
    }

    fn negotiated(&self, _version: &str) {}

    fn is_closed(&self) -> bool {
        false
    }

    async fn close(&self, _within: Duration) {
        self.closed.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn what_is_only_being_opened_ends_with_its_session_and_with_the_pool() {
    for (unreachable, stop) in [(false, false), (true, false), (false, true), (true, true)] {
        let silent = Silent { unreachable, ..Silent::default() };
        let (asked, closed) = (Arc::clone(&silent.asked), Arc::clone(&silent.closed));
        let pool = Pool::new(Arc::new(silent), Arc::new(common::Tokio), options());
        let at = Arc::new(Endpoint {
            isolation: Some("mcs_one".to_owned()),
            ..common::endpoint("http://127.0.0.1:9")
        });
        let shutdown = CancellationToken::new();
        let run = common::background(pool.clone().run(shutdown.clone()));
        let ending = async {
            eventually(SOON, || std::future::ready(asked.load(Ordering::SeqCst) == 1)).await;
            if stop {
                shutdown.cancel();
            } else {
                pool.close_isolated(&at.workspace, "mcs_one").await;
                // Whoever closes may rely on it, not only the opening that was given up.
                assert_eq!(closed.load(Ordering::SeqCst) > 0, !unreachable);
            }
        };
        let start = Instant::now();
        let (called, ()) = tokio::join!(tool(&pool, &at, ECHO), ending);
        let expected =
            if stop { called == Err(CallError::Stopping) } else { called.unwrap_err().is_unsent() };
        assert!(expected && start.elapsed() < Duration::from_secs(5));
        shutdown.cancel();
        run.await.unwrap();
        assert_eq!(closed.load(Ordering::SeqCst) > 0, !unreachable);
    }
}

#[tokio::test]
async fn a_session_that_ends_while_it_starts_is_no_failure_of_the_server() {
    let silent = Silent::default();
    let asked = Arc::clone(&silent.asked);
    let pool = Pool::new(Arc::new(silent), Arc::new(common::Tokio), options());
    let at = Arc::new(Endpoint {
        isolation: Some("mcs_one".to_owned()),
        ..common::endpoint("http://127.0.0.1:9")
    });
    for n in 1..=options().breaker_failures as usize + 2 {
        let ending = async {
            eventually(SOON, || std::future::ready(asked.load(Ordering::SeqCst) == n)).await;
            pool.close_isolated(&at.workspace, "mcs_one").await;
        };
        let (called, ()) = tokio::join!(tool(&pool, &at, ECHO), ending);
        let Err(CallError::Unavailable { reason, .. }) = called else { panic!("{called:?}") };
        assert_eq!(reason, "the session that it belonged to has ended");
    }
}

#[tokio::test]
async fn while_somebody_listens_one_stream_is_read_and_what_it_says_becomes_events() {
    let server = FakeMcp::start().await;
    let (pool, at) = (pool(), at(&server.url()));
    let mut events = pool.events();
    let listener = pool.listen(&at).unwrap();
    let second = pool.listen(&at).unwrap();
    server.wait_until(|c| c.streams_opened == 1).await;
    assert_eq!(server.notify(CHANGED), 1);
    assert_eq!(next(&mut events).await, EventKind::ListChanged(ListKind::Tools));
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1.0}}"#;
    server.notify(log);
    assert_eq!(next(&mut events).await, EventKind::Log { level: "info".into(), message: log.into() });
    let subscribe = call("resources/subscribe", r#"{"uri":"demo://text"}"#);
    assert!(finish(&mut pool.call(&at, subscribe).await.unwrap()).await.1.is_ok());
    server.resource_updated("demo://text");
    assert_eq!(next(&mut events).await, EventKind::ResourceUpdated { uri: "demo://text".into() });

    server.notify(r#"{"jsonrpc":"2.0","id":"q1","method":"ping"}"#);
    server.notify(r#"{"jsonrpc":"2.0","id":"q2","method":"sampling/createMessage","params":{}}"#);
    server.wait_until(|c| c.responses == 2).await;
    let bodies: Vec<_> =
        server.received().iter().map(|r| String::from_utf8_lossy(&r.body).into_owned()).collect();
    assert!(bodies.iter().any(|b| b == r#"{"jsonrpc":"2.0","id":"q1","result":{}}"#));
    assert!(bodies.iter().any(|b| b.contains(r#""id":"q2","error":{"code":-32601"#)));

    drop(second);
    assert_eq!(server.open_streams(), 1);
    drop(listener);
    eventually(SOON, || std::future::ready(server.open_streams() == 0)).await;
    assert_eq!(server.counts().streams_opened, 1);
}

#[tokio::test]
async fn a_renewal_leaves_no_gap_in_what_is_heard_and_no_second_stream() {
    let server = FakeMcp::start().await;
    let (pool, at, shutdown) = (pool_with(quick()), at(&server.url()), CancellationToken::new());
    let run = common::background(pool.clone().run(shutdown.clone()));
    let mut events = pool.events();
    let _listener = pool.listen(&at).unwrap();
    server.wait_until(|c| c.streams_opened == 1).await;
    let mut told = 0;
    eventually(SOON, || {
        let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"#;
        assert!(server.notify(&format!("{log}{told}}}}}")) > 0);
        told += 1;
        std::future::ready(server.counts().sessions_deleted >= 2)
    })
    .await;
    let mut missing: BTreeSet<_> = (0..told).map(|n| format!(r#""data":{n}}}}}"#)).collect();
    while !missing.is_empty() {
        let EventKind::Log { message, .. } = next(&mut events).await else { panic!("nothing else was said") };
        missing.retain(|m| !message.ends_with(m.as_bytes()));
    }
    eventually(SOON, || std::future::ready(server.open_streams() == 1)).await;
    shutdown.cancel();
    run.await.unwrap();
}

#[tokio::test]
async fn what_a_lost_session_may_have_hidden_is_announced() {
    let server = FakeMcp::start().await;
    let (pool, at, shutdown) = (pool(), at(&server.url()), CancellationToken::new());
    let run = common::background(pool.clone().run(shutdown.clone()));
    let _listener = pool.listen(&at).unwrap();
    server.wait_until(|c| c.streams_opened == 1).await;
    let subscribe = call("resources/subscribe", r#"{"uri":"demo://text"}"#);
    assert!(finish(&mut pool.call(&at, subscribe).await.unwrap()).await.1.is_ok());
    let mut events = pool.events();
    server.forget_sessions();
    let mut all = Vec::new();
    for _ in 0..4 {
        all.push(next(&mut events).await);
    }
    for kind in [ListKind::Tools, ListKind::Resources, ListKind::Prompts] {
        assert!(all.contains(&EventKind::ListChanged(kind)), "{all:?}");
    }
    assert!(all.contains(&EventKind::ResourceUpdated { uri: "demo://text".into() }), "{all:?}");
    assert_eq!(server.counts().requests_of("resources/subscribe"), 2);
    shutdown.cancel();
    run.await.unwrap();
}

#[tokio::test]
async fn an_upstream_without_a_stream_is_asked_once() {
    let server = FakeMcp::builder().get_stream(false).start().await;
    let (pool, at) = (pool(), at(&server.url()));
    let _listener = pool.listen(&at).unwrap();
    tool(&pool, &at, ECHO).await.unwrap();
    let gets = || server.received().iter().filter(|r| r.http_method == http::Method::GET).count();
    eventually(SOON, || std::future::ready(gets() == 1)).await;
    let _another = pool.listen(&at).unwrap();
    tool(&pool, &at, ECHO).await.unwrap();
    assert_eq!(gets(), 1);
}

#[tokio::test]
async fn a_listener_brings_an_upstream_back_that_was_away() {
    let server = FakeMcp::start().await;
    let (pool, at, shutdown) = (pool(), at(&server.url()), CancellationToken::new());
    let run = common::background(pool.clone().run(shutdown.clone()));
    server.refuse().await;
    let mut events = pool.events();
    let _listener = pool.listen(&at).unwrap();
    assert!(tool(&pool, &at, ECHO).await.is_err());
    server.accept().await;
    server.wait_until(|c| c.streams_opened == 1).await;
    server.notify(CHANGED);
    assert_eq!(next(&mut events).await, EventKind::ListChanged(ListKind::Tools));
    shutdown.cancel();
    run.await.unwrap();
}
