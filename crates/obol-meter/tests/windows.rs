//! Where two windows meet, on two replicas whose clocks disagree (C075).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use jiff::Timestamp;
use obol_meter::{Denied, MeterOptions};
use obol_model::{BudgetScope, Clock as _, ManualClock, Outcome, SystemClock, Window};
use support::ledgers::{Fixture, Process, budget, lines, terms};
use support::tool;

const LIMIT: u64 = 100;
/// What Redis would say.
static NOW: AtomicI64 = AtomicI64::new(0);

fn now() -> Timestamp {
    Timestamp::from_millisecond(NOW.load(Ordering::SeqCst)).unwrap()
}

/// Everything that is there, with the moment at which it ends.
async fn everything(fixture: &Fixture) -> BTreeMap<String, (String, i64)> {
    let mut found = BTreeMap::new();
    for key in fixture.server().keys("*").await {
        let content = match fixture.server().query::<String>(&["TYPE", &key]).await.as_str() {
            "hash" => format!("{:?}", fixture.server().cli(&["HGETALL", &key]).await),
            "zset" => format!("{:?}", fixture.server().cli(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]).await),
            "stream" => format!("{:?}", fixture.server().cli(&["XRANGE", &key, "-", "+"]).await),
            "set" => format!("{:?}", fixture.server().cli(&["SMEMBERS", &key]).await),
            other => panic!("{key} is a {other}"),
        };
        found.insert(key.clone(), (content, fixture.server().query(&["PEXPIRETIME", &key]).await));
    }
    found
}

/// Redis's clock alone says when a window ends: callers that are refused until then, as often as they like and whatever their
/// clocks say, change nothing, and the next window is empty for all of them at once.
#[tokio::test]
async fn a_window_ends_for_all_replicas_at_once_and_what_is_refused_writes_nothing() {
    let fixture = Fixture::redis_with(|ledger| ledger.with_clock(now)).await;
    let midnight = SystemClock.now().as_millisecond().div_euclid(86_400_000) * 86_400_000;
    NOW.store(midnight - 500, Ordering::SeqCst);
    // Three seconds ahead of Redis, and three behind.
    let replicas: Vec<Process> = [3_000, -3_000]
        .map(|skew| {
            let clock = ManualClock::new(Timestamp::from_millisecond(midnight - 500 + skew).unwrap());
            Process::at(fixture.ledger.clone(), MeterOptions::default(), Arc::new(clock))
        })
        .into();
    let day = || lines(&[budget(BudgetScope::Workspace, Window::Day, LIMIT)], &[], "k1");
    let admit = async |at: usize, worst: u64| replicas[at].admit_as(tool(worst), terms(day(), worst)).await;
    let slow = admit(0, 60).await.unwrap();
    let other = admit(1, 40).await.unwrap();
    let before = everything(&fixture).await;
    for moment in [-500, -100, -1] {
        NOW.store(midnight + moment, Ordering::SeqCst);
        for denied in join_all((0..50).map(|n| admit(n % 2, 1))).await {
            let Err(Denied::Budget { left, reset, .. }) = denied else { panic!("{:?}", denied.is_ok()) };
            assert_eq!((left.nanos(), reset), (0, Some(Duration::from_millis(moment.unsigned_abs()))));
        }
    }
    assert_eq!(everything(&fixture).await, before, "neither a counter nor its life was touched");

    NOW.store(midnight, Ordering::SeqCst);
    let mut next = Vec::new();
    for at in [0, 1] {
        next.push(admit(at, LIMIT / 2).await.unwrap());
    }
    for at in [0, 1] {
        assert!(admit(at, 1).await.is_err(), "both fill the same window");
    }
    slow.finish(Outcome::Ok);
    other.finish(Outcome::Ok);
    for guard in next {
        guard.cancel();
    }
    let mut replicas = replicas;
    for replica in &mut replicas {
        replica.end().await;
    }
    let spent: Vec<(i64, i64)> = replicas[0].audit().await.into_iter().map(|(_, s, r)| (s, r)).collect();
    assert_eq!(spent, [(100, 0), (0, 0)], "what began yesterday is yesterday's");
}
