//! The contract of a sink, on both, and the flusher before a Redis that goes and comes.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use obol_meter::{EmbeddedSink, MeterOptions, RedisSink, SinkError, UsageSink, meter};
use obol_model::{EventId, Outcome, ReplicaId, UsageEvent};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use support::{clock, event, tool};
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(10);

/// A sink and a way to read it.
#[async_trait]
trait Readable: UsageSink {
    async fn read(&self, workspace: &str) -> Vec<UsageEvent>;
}

#[async_trait]
impl Readable for EmbeddedSink {
    async fn read(&self, workspace: &str) -> Vec<UsageEvent> {
        self.events().into_iter().filter(|e| e.workspace_id.as_str() == workspace).collect()
    }
}

#[derive(Debug)]
struct OnRedis {
    server: RedisServer,
    sink: RedisSink,
}

impl OnRedis {
    async fn start(max_len: usize) -> Self {
        let server = RedisServer::start().await;
        let sink = RedisSink::with_max_len(connect(&server).await, max_len);
        Self { server, sink }
    }
}

#[async_trait]
impl UsageSink for OnRedis {
    async fn append(&self, events: &[UsageEvent]) -> Result<(), SinkError> {
        self.sink.append(events).await
    }
}

#[async_trait]
impl Readable for OnRedis {
    async fn read(&self, workspace: &str) -> Vec<UsageEvent> {
        stream(&self.server, workspace).await
    }
}

async fn connect(server: &RedisServer) -> Redis {
    Redis::connect(RedisOptions::new(server.url().into())).await.unwrap()
}

async fn stream(server: &RedisServer, workspace: &str) -> Vec<UsageEvent> {
    let entries: Vec<(String, Vec<(String, String)>)> =
        server.query(&["XRANGE", &format!("usage:{{{workspace}}}"), "-", "+"]).await;
    let read = |fields: &[(String, String)]| {
        let [(name, json)] = fields else { panic!("{fields:?}") };
        assert_eq!(name, "event");
        serde_json::from_str(json).unwrap()
    };
    entries.iter().map(|(_, fields)| read(fields)).collect()
}

async fn contract(sink: &dyn Readable) {
    sink.append(&[]).await.unwrap();
    assert_eq!(sink.read("acme").await, []);

    let (a, b, c) = (event("acme", 1), event("other", 2), event("acme", 3));
    sink.append(&[a.clone(), b.clone(), c.clone()]).await.unwrap();
    let d = event("acme", 4);
    sink.append(std::slice::from_ref(&d)).await.unwrap();
    assert_eq!(sink.read("acme").await, [a, c, d], "in order, and nobody else's");
    assert_eq!(sink.read("other").await, [b]);

    // The bound of a Redis stream is met to within one of its nodes.
    for _ in 0..10 {
        let many: Vec<_> = (0..100).map(|i| event("acme", i)).collect();
        sink.append(&many).await.unwrap();
    }
    let kept = sink.read("acme").await;
    assert!((100..400).contains(&kept.len()), "{}", kept.len());
    assert_eq!(kept.last().map(|e| e.cost.nanos()), Some(99), "the oldest are forgotten first");
}

#[tokio::test]
async fn the_embedded_sink_keeps_the_contract() {
    contract(&EmbeddedSink::new(200)).await;
}

#[tokio::test]
async fn the_redis_sink_keeps_the_contract() {
    contract(&OnRedis::start(200).await).await;
}

#[tokio::test]
async fn a_stream_that_refuses_does_not_have_the_others_repeated() {
    let store = OnRedis::start(1000).await;
    store.server.cli(&["SET", "usage:{bad}", "not a stream"]).await;
    let refused = store.append(&[event("acme", 1), event("bad", 2), event("acme", 3)]).await.unwrap_err();
    assert!(matches!(&refused, SinkError::Refused { refused, .. } if refused == &[1]), "{refused:?}");

    let (meter, flusher) = meter(
        Arc::new(RedisSink::new(connect(&store.server).await)),
        clock(),
        ReplicaId::generate(),
        MeterOptions::default(),
    );
    let shutdown = CancellationToken::new();
    let run = flusher.run(shutdown.clone(), CancellationToken::new());
    let scenario = async {
        let mut bad = tool(9);
        bad.workspace_id = "bad".parse().unwrap();
        meter.begin(bad).unwrap().finish(Outcome::Ok);
        meter.begin(tool(5)).unwrap().finish(Outcome::Ok);
        eventually(SOON, || async { store.read("acme").await.len() == 3 }).await;
        store.server.cli(&["DEL", "usage:{bad}"]).await;
        eventually(SOON, || async { store.read("bad").await.len() == 1 }).await;
        shutdown.cancel();
    };
    let (report, ()) = tokio::join!(run, scenario);
    assert_eq!((report.written, report.lost), (2, 0));
    assert_eq!(store.read("acme").await.len(), 3);
}

#[tokio::test]
async fn a_redis_that_is_killed_and_comes_back_loses_nothing_that_was_still_ours() {
    let server = RedisServer::start().await;
    let sink = Arc::new(RedisSink::new(connect(&server).await));
    let (meter, flusher) = meter(sink, clock(), ReplicaId::generate(), MeterOptions::default());
    let shutdown = CancellationToken::new();
    let run = flusher.run(shutdown.clone(), CancellationToken::new());
    let call = || {
        let guard = meter.begin(tool(1)).unwrap();
        let id = guard.request_id();
        guard.finish(Outcome::Ok);
        id
    };
    let scenario = async {
        let before: HashSet<EventId> = (0..50).map(|_| call().into()).collect();
        eventually(SOON, || async { ids(&stream(&server, "acme").await) == before }).await;
        server.kill();
        let while_away: HashSet<EventId> = (0..50).map(|_| call().into()).collect();
        server.restart().await;
        let after: HashSet<EventId> = (0..50).map(|_| call().into()).collect();
        let expected: HashSet<EventId> = while_away.union(&after).copied().collect();
        eventually(SOON, || async { ids(&stream(&server, "acme").await) == expected }).await;
        shutdown.cancel();
    };
    let (report, ()) = tokio::join!(run, scenario);
    assert_eq!((report.written, report.lost), (150, 0));
}

/// Counts the flights that failed.
#[derive(Debug)]
struct Counted {
    sink: RedisSink,
    failures: AtomicUsize,
}

#[async_trait]
impl UsageSink for Counted {
    async fn append(&self, events: &[UsageEvent]) -> Result<(), SinkError> {
        let result = self.sink.append(events).await;
        self.failures.fetch_add(usize::from(result.is_err()), Ordering::SeqCst);
        result
    }
}

#[tokio::test]
async fn a_silent_redis_loses_nothing_and_repeats_are_told_by_their_id() {
    let server = RedisServer::start().await;
    let options =
        RedisOptions { command_timeout: Duration::from_millis(50), ..RedisOptions::new(server.url().into()) };
    let sink = RedisSink::new(Redis::connect(options).await.unwrap());
    let sink = Arc::new(Counted { sink, failures: AtomicUsize::new(0) });
    let (meter, flusher) = meter(sink.clone(), clock(), ReplicaId::generate(), MeterOptions::default());
    let shutdown = CancellationToken::new();
    let run = flusher.run(shutdown.clone(), CancellationToken::new());
    let scenario = async {
        server.pause();
        let guard = meter.begin(tool(1)).unwrap();
        let id = guard.request_id();
        guard.finish(Outcome::Ok);
        // The first flight is given up; whether it was applied is unknown.
        eventually(SOON, || async { sink.failures.load(Ordering::SeqCst) >= 1 }).await;
        server.resume();
        eventually(SOON, || async { ids(&stream(&server, "acme").await) == HashSet::from([id.into()]) })
            .await;
        shutdown.cancel();
    };
    let (report, ()) = tokio::join!(run, scenario);
    assert_eq!((report.written, report.lost), (1, 0));
}

#[tokio::test]
async fn an_abandoned_drain_says_what_was_lost() {
    let server = RedisServer::start().await;
    let sink = Arc::new(RedisSink::new(connect(&server).await));
    let (meter, flusher) = meter(sink, clock(), ReplicaId::generate(), MeterOptions::default());
    server.kill();
    for _ in 0..7 {
        meter.begin(tool(1)).unwrap().finish(Outcome::Ok);
    }
    let (shutdown, abandon) = (CancellationToken::new(), CancellationToken::new());
    shutdown.cancel();
    let deadline = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        abandon.cancel();
    };
    let (report, ()) = tokio::join!(flusher.run(shutdown, abandon.clone()), deadline);
    assert_eq!((report.written, report.lost), (0, 7));
}

fn ids(events: &[UsageEvent]) -> HashSet<EventId> {
    events.iter().map(|e| e.event_id).collect()
}
