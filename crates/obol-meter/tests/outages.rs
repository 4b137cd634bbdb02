//! Redis goes away while calls end: nothing that was admitted is forgotten, and nothing is written twice.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use obol_meter::{Denied, Flusher, Ledger, Meter, MeterOptions, RedisLedger, UsageGuard, meter};
use obol_model::{EventId, Kind, Outcome, ReplicaId, Secret, SystemClock, UsageEvent};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use support::counted::Counted;
use support::{free, tool};
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(10);

async fn ledger(server: &RedisServer, command_timeout: Duration) -> RedisLedger {
    let options = RedisOptions { command_timeout, ..RedisOptions::new(Secret::new(server.url())) };
    RedisLedger::new(Redis::connect(options).await.unwrap())
}

fn metered(ledger: Arc<dyn Ledger>) -> (Meter, Flusher) {
    meter(ledger, Arc::new(SystemClock), ReplicaId::generate(), MeterOptions::default())
}

async fn admit(meter: &Meter, count: usize) -> Vec<UsageGuard> {
    let mut guards = Vec::new();
    for _ in 0..count {
        guards.push(meter.admit(tool(1), free()).await.unwrap().0);
    }
    guards
}

fn finish(guards: Vec<UsageGuard>) -> HashSet<EventId> {
    let end = |guard: UsageGuard| {
        let id = guard.request_id().into();
        guard.finish(Outcome::Ok);
        id
    };
    guards.into_iter().map(end).collect()
}

/// In order; no event twice.
async fn written(server: &RedisServer) -> Vec<UsageEvent> {
    let entries: Vec<(String, Vec<(String, String)>)> =
        server.query(&["XRANGE", "usage:{acme}", "-", "+"]).await;
    let fields = entries.into_iter().flat_map(|(_, fields)| fields);
    let events: Vec<UsageEvent> = fields.map(|(_, event)| serde_json::from_str(&event).unwrap()).collect();
    assert_eq!(ids(&events).len(), events.len(), "{events:?}");
    events
}

fn ids(events: &[UsageEvent]) -> HashSet<EventId> {
    events.iter().map(|event| event.event_id).collect()
}

#[tokio::test]
async fn a_redis_that_is_killed_and_comes_back_loses_nothing_that_was_still_ours() {
    let server = RedisServer::start().await;
    let (meter, flusher) = metered(Arc::new(ledger(&server, Duration::from_millis(800)).await));
    let shutdown = CancellationToken::new();
    let run = flusher.run(shutdown.clone(), CancellationToken::new());
    let scenario = async {
        let before = finish(admit(&meter, 50).await);
        eventually(SOON, || async { ids(&written(&server).await) == before }).await;
        let open = admit(&meter, 50).await;
        server.kill();
        let while_away = finish(open);
        server.restart().await;
        // It came back empty: what was written before is gone with it, what was not written yet is there.
        eventually(SOON, || async { ids(&written(&server).await) == while_away }).await;
        shutdown.cancel();
    };
    let (report, ()) = tokio::join!(run, scenario);
    assert_eq!((report.written, report.lost), (100, 0));
}

#[tokio::test]
async fn a_silent_redis_loses_nothing_and_a_flight_that_is_repeated_writes_nothing_twice() {
    let server = RedisServer::start().await;
    let ledger = ledger(&server, Duration::from_millis(50)).await;
    let ledger = Arc::new(Counted::new(Arc::new(ledger)));
    let (meter, flusher) = metered(ledger.clone());
    let shutdown = CancellationToken::new();
    let run = flusher.run(shutdown.clone(), CancellationToken::new());
    let scenario = async {
        let open = admit(&meter, 3).await;
        server.pause();
        let expected = finish(open);
        // The first flight is given up; whether it will be applied is unknown.
        eventually(SOON, || async { ledger.failures.load(Ordering::SeqCst) >= 1 }).await;
        server.resume();
        eventually(SOON, || async { ids(&written(&server).await) == expected }).await;
        shutdown.cancel();
    };
    let (report, ()) = tokio::join!(run, scenario);
    assert_eq!((report.written, report.lost), (3, 0));
    assert_eq!(written(&server).await.len(), 3);
}

#[tokio::test]
async fn an_abandoned_drain_says_what_was_left_open() {
    let server = RedisServer::start().await;
    let ledger = ledger(&server, Duration::from_millis(800)).await;
    let ledger = Arc::new(Counted::new(Arc::new(ledger)));
    let (meter, flusher) = metered(ledger.clone());
    let open = admit(&meter, 7).await;
    server.kill();
    finish(open);
    let (shutdown, abandon) = (CancellationToken::new(), CancellationToken::new());
    shutdown.cancel();
    let deadline = async {
        eventually(SOON, || async { ledger.failures.load(Ordering::SeqCst) >= 1 }).await;
        abandon.cancel();
    };
    let (report, ()) = tokio::join!(flusher.run(shutdown, abandon.clone()), deadline);
    assert_eq!((report.written, report.lost), (0, 7));
}

#[tokio::test]
async fn a_stream_that_nobody_reads_is_bounded_and_forgets_the_oldest_first() {
    let server = RedisServer::start().await;
    let ledger = ledger(&server, Duration::from_millis(800)).await.with_max_len(200);
    let (meter, flusher) = metered(Arc::new(ledger));
    let shutdown = CancellationToken::new();
    let run = flusher.run(shutdown.clone(), CancellationToken::new());
    let scenario = async {
        let mut order = Vec::new();
        for _ in 0..1000 {
            let guard = meter.admit(tool(1), free()).await.unwrap().0;
            order.push(EventId::from(guard.request_id()));
            guard.finish(Outcome::Ok);
        }
        shutdown.cancel();
        order
    };
    let (report, order) = tokio::join!(run, scenario);
    assert_eq!((report.written, report.lost), (1000, 0));
    let kept: Vec<EventId> = written(&server).await.iter().map(|event| event.event_id).collect();
    // The bound is met to within one of the stream's nodes.
    assert!((200..400).contains(&kept.len()), "{}", kept.len());
    assert_eq!(kept, order[order.len() - kept.len()..], "the newest, in order");
}

#[tokio::test]
async fn a_stream_that_somebody_reads_forgets_nothing_and_admits_nobody_when_it_is_full() {
    const MOST: usize = 50;
    let server = RedisServer::start().await;
    let _: String = server.query(&["XGROUP", "CREATE", "usage:{acme}", "readers", "0", "MKSTREAM"]).await;
    let ledger = ledger(&server, Duration::from_millis(800)).await.with_max_len(MOST);
    let (meter, flusher) = metered(Arc::new(ledger));
    let shutdown = CancellationToken::new();
    let run = flusher.run(shutdown.clone(), CancellationToken::new());
    let waiting = async || server.query::<usize>(&["XLEN", "usage:{acme}"]).await;
    let scenario = async {
        let under_way = admit(&meter, 10).await;
        let mut all = finish(admit(&meter, MOST - 1).await);
        eventually(SOON, || async { waiting().await == MOST - 1 }).await;
        all.extend(finish(admit(&meter, 1).await));
        eventually(SOON, || async { waiting().await == MOST }).await;
        let denied = meter.admit(tool(1), free()).await.unwrap_err();
        assert_eq!(denied, Denied::StreamFull);
        assert_eq!((denied.code(), denied.kind()), ("usage_stream_full", Kind::Unavailable));
        assert_eq!(denied.reset(), Some(Duration::from_secs(1)));
        let open: usize = server.query(&["ZCARD", "ledger:{acme}:open"]).await;
        assert_eq!(open, 10, "nothing was set aside");
        // What was admitted before is written all the same.
        all.extend(finish(under_way));
        eventually(SOON, || async { waiting().await == MOST + 10 }).await;
        assert_eq!(ids(&written(&server).await), all, "nothing was forgotten");
        // Whoever reads makes room.
        let _: i64 = server.query(&["XTRIM", "usage:{acme}", "MAXLEN", "20"]).await;
        finish(admit(&meter, 1).await);
        eventually(SOON, || async { waiting().await == 21 }).await;
        finish(admit(&meter, MOST).await);
        eventually(SOON, || async { waiting().await == MOST + 21 }).await;
        assert_eq!(meter.admit(tool(1), free()).await.unwrap_err(), Denied::StreamFull);
        // Nobody reads it any more.
        let _: i64 = server.query(&["XGROUP", "DESTROY", "usage:{acme}", "readers"]).await;
        finish(admit(&meter, 1).await);
        shutdown.cancel();
    };
    let (report, ()) = tokio::join!(run, scenario);
    assert_eq!((report.written, report.lost), (10 + 50 + 1 + 50 + 1, 0));
}
