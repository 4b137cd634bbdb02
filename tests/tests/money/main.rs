//! Money across replicas: budgets that cannot be overspent, and calls that are accounted for whatever ends them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "these are tests"
)]

mod binding;
mod bounds;
mod budgets;
mod changes;
mod crashes;
mod failures;
mod fallback;
mod kills;
mod repeated;
mod repeated_llm;
mod slow;
mod stores;

use std::collections::BTreeMap;

use obol_testkit::cluster::Cluster;
use obol_testkit::process::Stream;
use obol_tests::SOON;
use serde_json::Value;

/// A key of `acme` with these options of `obol key new`.
async fn new_key(cluster: &Cluster, options: &[&str]) -> String {
    let command = cluster
        .obol(["key", "new", "--workspace", "acme", "--name", "test"])
        .args(options)
        .env("OBOL_STATE_DIR", cluster.state_dir())
        .spawn();
    let status = command.wait(SOON * 3).await;
    command.ended().await.unwrap();
    assert!(status.success(), "{:?}", command.lines());
    command.lines_of(Stream::Out).into_iter().rfind(|line| line.starts_with("obol_")).unwrap()
}

/// Settled and reserved of each counter of `acme`, in nano-USD.
async fn counters(cluster: &Cluster) -> BTreeMap<String, (i64, i64)> {
    let mut found = BTreeMap::new();
    for key in cluster.any_redis().keys("ledger:{acme}:c:*").await {
        let (settled, reserved): (Option<i64>, Option<i64>) =
            cluster.any_redis().query(&["HMGET", &key, "settled", "reserved"]).await;
        let name = key.strip_prefix("ledger:{acme}:c:").unwrap().to_owned();
        found.insert(name, (settled.unwrap_or_default(), reserved.unwrap_or_default()));
    }
    found
}

/// What the events of requests and their corrections say, in nano-USD.
fn total(events: &[Value]) -> i64 {
    events.iter().map(|event| event["cost"].as_i64().unwrap()).sum()
}

/// How often what takes long is done; `OBOL_TEST_ROUNDS` says so for a long run, whose tests need more time than nextest
/// gives them: `OBOL_TEST_ROUNDS=20 cargo test -p obol-tests --test money -- NAME`.
fn rounds(usual: usize) -> usize {
    std::env::var("OBOL_TEST_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}

/// As options and YAML want it.
fn usd(nanos: i64) -> String {
    format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
}
