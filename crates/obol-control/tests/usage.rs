//! Usage events, from streams into stores: each counts once, whatever happens in between.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::items_after_statements,
    reason = "these are tests"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use obol_control::{ControlStore as _, RejectedEntry};
use obol_control::{
    EntryId, FileUsage, MemoryStore, PostgresStore, PostgresUsage, StoreError, TakenEvent, UsageBatch,
    UsageBy, UsageCollector, UsageQuery, UsageStore, UsageTotal,
};
use obol_model::{RequestId, Secret, WorkspaceId};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::postgres::Postgres;
use obol_testkit::redis::RedisServer;
use obol_testkit::redis_cluster::RedisCluster;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_secs(20);
const STREAM: &str = "usage:{acme}";
const GROUP: &str = "obol-control";

fn ws(id: &str) -> WorkspaceId {
    id.parse().unwrap()
}

fn id() -> String {
    RequestId::new().as_uuid().to_string()
}

/// A tool call.
fn tool(id: &str, at: &str, cost: i64) -> Value {
    json!({
        "schema_version": 2, "event_id": id, "workspace_id": "acme", "key_id": "k1", "replica": "r-0123456789ab",
        "revision": {"epoch": 1, "number": 7}, "kind": "tool_call", "connection": "git", "tool": "search",
        "outcome": "ok", "started_at": at, "duration_ms": 12, "tokens": {"input": 0, "output": 0},
        "reserved": 9, "cost": cost,
    })
}

/// A completion.
fn chat(id: &str, at: &str, outcome: &str, cost: i64) -> Value {
    json!({
        "schema_version": 2, "event_id": id, "workspace_id": "acme",
        "user": {"issuer": "https://idp.example", "subject": "alice"}, "replica": "r-0123456789ab",
        "revision": {"epoch": 1, "number": 7}, "kind": "chat_completion", "model": "small", "provider": "openai",
        "upstream_model": "gpt", "outcome": outcome, "started_at": at, "duration_ms": 12,
        "tokens": {"input": 10, "cached_input": 5, "output": 7, "reasoning": 2}, "estimated": true,
        "reserved": 9, "cost": cost, "of_a_later_release": [1],
    })
}

fn taken(entry: u64, event: &Value) -> TakenEvent {
    let workspace = ws(event["workspace_id"].as_str().unwrap());
    TakenEvent::read(&workspace, EntryId { ms: entry, seq: 0 }, event.to_string().as_bytes()).unwrap()
}

fn batch(events: impl IntoIterator<Item = TakenEvent>) -> UsageBatch {
    UsageBatch { events: events.into_iter().collect(), rejected: Vec::new() }
}

async fn sum(store: &dyn UsageStore) -> UsageTotal {
    store.totals(&UsageQuery::default()).await.unwrap().remove(0)
}

async fn groups(store: &dyn UsageStore, by: &[UsageBy]) -> Vec<(String, u64, i64)> {
    let query = UsageQuery { by: by.to_vec(), ..UsageQuery::default() };
    let totals = store.totals(&query).await.unwrap();
    totals.into_iter().map(|t| (t.group.join(" "), t.requests, t.cost.nanos())).collect()
}

/// A database that control has prepared.
async fn database() -> (Postgres, PostgresUsage) {
    let postgres = Postgres::start().await;
    let url = Secret::new(postgres.url());
    PostgresStore::new(&url).unwrap().prepare().await.unwrap();
    let usage = PostgresUsage::new(&url).unwrap();
    (postgres, usage)
}

/// What all stores have in common, done to a new one.
async fn contract(store: &dyn UsageStore) {
    assert_eq!(sum(store).await, UsageTotal::default());
    assert!(groups(store, &[UsageBy::Model]).await.is_empty());
    store.record(&ws("acme"), &UsageBatch::default()).await.unwrap();

    // Months, kinds, a correction of what was booked as orphaned, an attempt.
    let (one, two, orphan) = (id(), id(), id());
    let first = batch([
        taken(1, &tool(&one, "2026-11-30T23:59:59.999999999Z", 5)),
        taken(2, &chat(&two, "2026-12-01T00:00:00Z", "error", 40)),
        taken(3, &chat(&format!("{two}/1"), "2026-12-01T00:00:00Z", "error", 40)),
        taken(4, &chat(&orphan, "2026-12-31T12:00:00Z", "orphaned", 1000)),
        taken(5, &chat(&format!("{orphan}/c"), "2026-12-31T12:00:00Z", "ok", -900)),
    ]);
    let rejected = TakenEvent::read(&ws("acme"), EntryId { ms: 6, seq: 1 }, b"\xff\0").unwrap_err();
    let first = UsageBatch { rejected: vec![rejected], ..first };
    store.record(&ws("acme"), &first).await.unwrap();
    let total = sum(store).await;
    assert_eq!((total.requests, total.errors, total.cost.nanos()), (3, 1, 145));
    let tokens = total.tokens;
    assert_eq!((tokens.input, tokens.cached_input, tokens.output, tokens.reasoning), (30, 15, 21, 6));

    // Once more, whole and in parts, and with another one: as they come after a crash.
    store.record(&ws("acme"), &first).await.unwrap();
    let again = batch([
        taken(2, &chat(&two, "2026-12-01T00:00:00Z", "error", 40)),
        taken(7, &tool(&id(), "2027-01-01T00:00:00Z", 1)),
    ]);
    store.record(&ws("acme"), &again).await.unwrap();
    store.record(&ws("acme"), &again).await.unwrap();
    // As another entry: Redis has forgotten in a failover that it was read.
    store
        .record(&ws("acme"), &batch([taken(9, &tool(&one, "2026-11-30T23:59:59.999999999Z", 5))]))
        .await
        .unwrap();
    let total = sum(store).await;
    assert_eq!((total.requests, total.errors, total.cost.nanos()), (4, 1, 146));

    // Another workspace, and names that are odd.
    let mut odd = tool(&id(), "2026-12-01T00:00:00Z", 2);
    odd["workspace_id"] = "beta".into();
    odd["tool"] = format!("nul\0'\"{{}},é{}", "x".repeat(5000)).into();
    store.record(&ws("beta"), &batch([taken(1, &odd)])).await.unwrap();

    use UsageBy as By;
    assert_eq!(groups(store, &[By::Workspace]).await, [("acme".into(), 4, 146), ("beta".into(), 1, 2)]);
    let key = ("key:k1".to_owned(), 3, 8);
    assert_eq!(groups(store, &[By::Key]).await, [key, ("user:19:https://idp.example:alice".into(), 2, 140)]);
    assert_eq!(
        groups(store, &[By::Model, By::Provider]).await,
        [(" ".into(), 3, 8), ("small openai".into(), 2, 140)]
    );
    assert_eq!(
        groups(store, &[By::Kind]).await,
        [("chat_completion".into(), 2, 140), ("tool_call".into(), 3, 8)]
    );
    let outcomes = [("error", 1, 40), ("ok", 3, -892), ("orphaned", 1, 1000)];
    assert_eq!(groups(store, &[By::Outcome]).await, outcomes.map(|(o, n, c)| (o.to_owned(), n, c)));
    let days = [("2026-11-30", 1, 5), ("2026-12-01", 2, 42), ("2026-12-31", 1, 100), ("2027-01-01", 1, 1)];
    assert_eq!(groups(store, &[By::Day]).await, days.map(|(d, n, c)| (d.to_owned(), n, c)));
    let months = [("2026-11", 1, 5), ("2026-12", 3, 142), ("2027-01", 1, 1)];
    assert_eq!(groups(store, &[By::Month]).await, months.map(|(m, n, c)| (m.to_owned(), n, c)));
    let tools = groups(store, &[By::Connection, By::Tool]).await;
    let names: Vec<String> = tools.iter().map(|(name, ..)| name.chars().take(14).collect()).collect();
    assert_eq!(names, [" ", "git nul\u{fffd}'\"{},é", "git search"]);

    let within = UsageQuery {
        workspace: Some(ws("acme")),
        from: Some("2026-12-01T00:00:00Z".parse().unwrap()),
        to: Some("2027-01-01T00:00:00Z".parse().unwrap()),
        by: vec![By::Month],
    };
    let totals = store.totals(&within).await.unwrap();
    assert_eq!((totals.len(), totals[0].requests, totals[0].cost.nanos()), (1, 2, 140));
    let nobody = UsageQuery { workspace: Some(ws("nobody")), ..UsageQuery::default() };
    assert_eq!(store.totals(&nobody).await.unwrap(), [UsageTotal::default()]);
}

#[tokio::test]
async fn files_keep_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    contract(&FileUsage::new(dir.path())).await;
    let file = dir.path().join("usage/acme/2026-12.jsonl");
    for private in [file.clone(), dir.path().join("usage/acme/rejects.jsonl")] {
        assert_eq!(fs::metadata(private).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(text.lines().count(), 4, "each once: {text}");
    assert!(text.contains("of_a_later_release"), "as it was written: {text}");
}

#[tokio::test]
async fn postgres_keeps_the_contract() {
    let (postgres, usage) = database().await;
    contract(&usage).await;
    assert_eq!(postgres.sql("SELECT count(*) FROM obol_usage_2026_12"), "5");
    assert_eq!(postgres.sql("SELECT entry, encode(content, 'hex') FROM obol_usage_reject"), "6-1|ff00");
    assert_eq!(
        postgres.sql("SELECT count(*) FROM obol_usage WHERE event->'of_a_later_release' IS NOT NULL"),
        "4"
    );
}

#[tokio::test]
async fn an_event_whose_line_was_cut_off_by_a_crash_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let usage = FileUsage::new(dir.path());
    let both = batch([1, 2].map(|n| taken(n, &tool(&id(), "2026-12-01T00:00:00Z", 1))));
    usage.record(&ws("acme"), &both).await.unwrap();
    let file = dir.path().join("usage/acme/2026-12.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, &text[..text.len() - 9]).unwrap();
    assert_eq!(sum(&usage).await.requests, 1);
    FileUsage::new(dir.path()).record(&ws("acme"), &both).await.unwrap();
    assert_eq!(sum(&usage).await.requests, 2);
}

#[tokio::test]
async fn two_writers_make_a_partition_at_the_same_time() {
    let (postgres, usage) = database().await;
    let other = PostgresUsage::new(&Secret::new(postgres.url())).unwrap();
    let (acme, events) = (ws("acme"), |cost| {
        batch((1..=9).map(|month| taken(month, &tool(&id(), &format!("2026-0{month}-01T00:00:00Z"), cost))))
    });
    let (one, two) = (events(1), events(2));
    let (a, b) = tokio::join!(usage.record(&acme, &one), other.record(&acme, &two));
    a.and(b).unwrap();
    assert_eq!((sum(&usage).await.requests, sum(&usage).await.cost.nanos()), (18, 27));
}

// The consumer.

async fn collector(redis: &RedisServer, consumer: &str, store: Arc<dyn UsageStore>) -> UsageCollector {
    let options = RedisOptions::new(Secret::new(redis.url()));
    let redis = Redis::connect(options).await.unwrap();
    UsageCollector::new(redis, consumer.to_owned(), Arc::new(MemoryStore::default()), store)
}

async fn add(redis: &RedisServer, event: &str) -> String {
    redis.query::<i64>(&["SADD", "ledger:workspaces", "acme"]).await;
    redis.query(&["XADD", STREAM, "*", "event", event]).await
}

async fn add_many(redis: &RedisServer, count: usize) {
    redis.query::<i64>(&["SADD", "ledger:workspaces", "acme"]).await;
    let mut connection = redis.connection().await;
    let mut pipe = redis::Pipeline::with_capacity(count);
    for _ in 0..count {
        let event = tool(&id(), "2026-12-01T00:00:00Z", 1).to_string();
        pipe.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(event).ignore();
    }
    pipe.query_async::<()>(&mut connection).await.unwrap();
}

async fn left(redis: &RedisServer) -> u64 {
    redis.query(&["XLEN", STREAM]).await
}

async fn pending(redis: &RedisServer) -> u64 {
    let (count, ..): (u64, redis::Value, redis::Value, redis::Value) =
        redis.query(&["XPENDING", STREAM, GROUP]).await;
    count
}

/// A store whose process ends when it has written something.
#[derive(Debug)]
struct Dies {
    store: Arc<dyn UsageStore>,
    written: Notify,
}

#[async_trait]
impl UsageStore for Dies {
    async fn record(&self, workspace: &WorkspaceId, batch: &UsageBatch) -> Result<(), StoreError> {
        self.store.record(workspace, batch).await?;
        self.written.notify_one();
        std::future::pending().await
    }

    async fn totals(&self, query: &UsageQuery) -> Result<Vec<UsageTotal>, StoreError> {
        self.store.totals(query).await
    }
}

async fn dies_between_commit_and_acknowledgement(store: Arc<dyn UsageStore>) {
    let redis = RedisServer::start().await;
    add_many(&redis, 700).await;
    let dies = Arc::new(Dies { store: Arc::clone(&store), written: Notify::new() });
    let mut first = collector(&redis, "first", dies.clone()).await;
    tokio::select! {
        done = first.collect() => panic!("{done:?}"),
        () = dies.written.notified() => {}
    }
    assert_eq!((sum(&*store).await.requests, pending(&redis).await, left(&redis).await), (500, 500, 700));

    // While nobody knows that it is dead, only what it did not read is collected, and all that it holds is kept.
    let mut second = collector(&redis, "second", Arc::clone(&store)).await;
    second.collect().await.unwrap();
    assert_eq!((sum(&*store).await.requests, pending(&redis).await, left(&redis).await), (700, 500, 700));
    let mut third = collector(&redis, "third", Arc::clone(&store)).await.with_patience(Duration::ZERO);
    third.collect().await.unwrap();
    assert_eq!((sum(&*store).await.requests, pending(&redis).await, left(&redis).await), (700, 0, 0));
}

#[tokio::test]
async fn an_event_counts_once_when_control_dies_before_it_acknowledges_with_files() {
    let dir = tempfile::tempdir().unwrap();
    dies_between_commit_and_acknowledgement(Arc::new(FileUsage::new(dir.path()))).await;
    let text = fs::read_to_string(dir.path().join("usage/acme/2026-12.jsonl")).unwrap();
    assert_eq!(text.lines().count(), 700);
}

#[tokio::test]
async fn an_event_counts_once_when_control_dies_before_it_acknowledges_with_postgres() {
    let (_postgres, usage) = database().await;
    dies_between_commit_and_acknowledgement(Arc::new(usage)).await;
}

#[tokio::test]
async fn two_controls_share_the_work_and_each_event_counts_once() {
    let (postgres, usage) = database().await;
    let redis = RedisServer::start().await;
    add_many(&redis, 4000).await;
    let other = PostgresUsage::new(&Secret::new(postgres.url())).unwrap();
    let mut one = collector(&redis, "one", Arc::new(usage)).await.with_patience(Duration::ZERO);
    let mut two = collector(&redis, "two", Arc::new(other)).await.with_patience(Duration::ZERO);
    let (a, b) = tokio::join!(one.collect(), two.collect());
    a.and(b).unwrap();
    assert_eq!(postgres.sql("SELECT count(*), count(DISTINCT event_id) FROM obol_usage"), "4000|4000");
    assert_eq!((pending(&redis).await, left(&redis).await), (0, 0));
}

#[tokio::test]
async fn what_is_no_event_is_set_aside_and_holds_up_nothing() {
    let (postgres, usage) = database().await;
    let redis = RedisServer::start().await;
    let event = || tool(&id(), "2026-12-01T00:00:00Z", 1);
    let mut foreign = event();
    foreign["workspace_id"] = "beta".into();
    let ancient = tool(&id(), "1970-01-01T00:00:00Z", 1);
    for text in [event(), foreign, event(), ancient].map(|event| event.to_string()) {
        add(&redis, &text).await;
    }
    add(&redis, "{\"event_id\":").await;
    let _: String = redis.query(&["XADD", STREAM, "*", "what", "ever"]).await;
    add(&redis, &event().to_string()).await;
    // A stream that is none is no reason to forget about the others.
    let _: i64 = redis.query(&["SADD", "ledger:workspaces", "aaa"]).await;
    let _: String = redis.query(&["SET", "usage:{aaa}", "x"]).await;

    let usage = Arc::new(usage);
    collector(&redis, "one", usage.clone()).await.collect().await.unwrap();
    assert_eq!((sum(&*usage).await.requests, pending(&redis).await, left(&redis).await), (3, 0, 0));
    let reasons = postgres.sql("SELECT reason FROM obol_usage_reject ORDER BY entry");
    let reasons: Vec<&str> = reasons.lines().collect();
    assert_eq!(reasons.len(), 4, "{reasons:?}");
    assert!(reasons[0].contains("of `beta`") && reasons[1].contains("impossible time"), "{reasons:?}");
    assert!(reasons[2].contains("no event") && reasons[3].contains("no field"), "{reasons:?}");
}

/// A store that can never take a certain event.
#[derive(Debug)]
struct Picky(FileUsage);

#[async_trait]
impl UsageStore for Picky {
    async fn record(&self, workspace: &WorkspaceId, batch: &UsageBatch) -> Result<(), StoreError> {
        if batch.events.iter().any(|event| event.json.contains("poison")) {
            return Err(StoreError::Damaged("it does not like it".to_owned()));
        }
        self.0.record(workspace, batch).await
    }

    async fn totals(&self, query: &UsageQuery) -> Result<Vec<UsageTotal>, StoreError> {
        self.0.totals(query).await
    }
}

#[tokio::test]
async fn an_event_that_a_store_can_never_take_is_set_aside_alone() {
    let (dir, redis) = (tempfile::tempdir().unwrap(), RedisServer::start().await);
    add_many(&redis, 3).await;
    let mut poison = tool(&id(), "2026-12-01T00:00:00Z", 1);
    poison["tool"] = "poison".into();
    add(&redis, &poison.to_string()).await;
    add_many(&redis, 3).await;
    let store = Arc::new(Picky(FileUsage::new(dir.path())));
    collector(&redis, "one", store.clone()).await.collect().await.unwrap();
    assert_eq!((sum(&*store).await.requests, left(&redis).await), (6, 0));
    let rejects = fs::read_to_string(dir.path().join("usage/acme/rejects.jsonl")).unwrap();
    assert!(rejects.lines().count() == 1 && rejects.contains("it does not like it"), "{rejects}");
}

#[tokio::test]
async fn nothing_is_trimmed_that_any_group_still_needs() {
    let (dir, redis) = (tempfile::tempdir().unwrap(), RedisServer::start().await);
    let store: Arc<dyn UsageStore> = Arc::new(FileUsage::new(dir.path()));
    add_many(&redis, 6).await;
    let _: String = redis.query(&["XGROUP", "CREATE", STREAM, "other", "0"]).await;
    let _: redis::Value =
        redis.query(&["XREADGROUP", "GROUP", "other", "x", "COUNT", "4", "STREAMS", STREAM, ">"]).await;
    let all: Vec<(String, Vec<String>)> = redis.query(&["XRANGE", STREAM, "-", "+"]).await;
    let ids: Vec<&str> = all.iter().map(|(id, _)| id.as_str()).collect();

    let mut one = collector(&redis, "one", Arc::clone(&store)).await;
    one.collect().await.unwrap();
    assert_eq!((sum(&*store).await.requests, pending(&redis).await, left(&redis).await), (6, 0, 6));
    // The other group is done with some of it: the first that is not is kept, and what it has not read.
    for (acknowledged, kept) in [(&ids[1..2], 7), (&ids[0..1], 6), (&ids[2..4], 5)] {
        for id in acknowledged {
            let _: i64 = redis.query(&["XACK", STREAM, "other", id]).await;
        }
        add_many(&redis, 1).await;
        one.collect().await.unwrap();
        assert_eq!(left(&redis).await, kept, "{acknowledged:?}");
    }
    let first: Vec<(String, Vec<String>)> = redis.query(&["XRANGE", STREAM, "-", "+", "COUNT", "1"]).await;
    assert_eq!(first[0].0, ids[4], "the first that the other group has not read");
    let _: i64 = redis.query(&["XGROUP", "DESTROY", STREAM, "other"]).await;
    add_many(&redis, 1).await;
    one.collect().await.unwrap();
    assert_eq!((sum(&*store).await.requests, left(&redis).await), (10, 0));
}

#[tokio::test]
async fn what_was_trimmed_under_a_consumer_that_died_is_given_up() {
    let (dir, redis) = (tempfile::tempdir().unwrap(), RedisServer::start().await);
    let store: Arc<dyn UsageStore> = Arc::new(FileUsage::new(dir.path()));
    add_many(&redis, 4).await;
    let _: String = redis.query(&["XGROUP", "CREATE", STREAM, GROUP, "0"]).await;
    let _: redis::Value = redis.query(&["XREADGROUP", "GROUP", GROUP, "dead", "STREAMS", STREAM, ">"]).await;
    // As gateways do when the stream is full.
    let _: i64 = redis.query(&["XTRIM", STREAM, "MAXLEN", "1"]).await;
    let mut one = collector(&redis, "one", Arc::clone(&store)).await.with_patience(Duration::ZERO);
    one.collect().await.unwrap();
    assert_eq!((sum(&*store).await.requests, pending(&redis).await, left(&redis).await), (1, 0, 0));
}

#[tokio::test]
async fn streams_of_a_cluster_are_read_wherever_they_are() {
    let (dir, cluster) = (tempfile::tempdir().unwrap(), RedisCluster::start().await);
    let store: Arc<dyn UsageStore> = Arc::new(FileUsage::new(dir.path()));
    let workspaces = ["acme", "beta", "gamma", "delta"];
    for workspace in workspaces {
        let index = cluster.owner("ledger:workspaces").await;
        let _: i64 = index.query(&["SADD", "ledger:workspaces", workspace]).await;
        let stream = format!("usage:{{{workspace}}}");
        let mut event = tool(&id(), "2026-12-01T00:00:00Z", 1);
        event["workspace_id"] = workspace.into();
        let owner = cluster.owner(&stream).await;
        let _: String = owner.query(&["XADD", &stream, "*", "event", &event.to_string()]).await;
    }
    let redis = Redis::connect(RedisOptions::new(Secret::new(cluster.url()))).await.unwrap();
    let workspaces_of = Arc::new(MemoryStore::default());
    let mut one = UsageCollector::new(redis, "one".to_owned(), workspaces_of, Arc::clone(&store));
    one.collect().await.unwrap();
    assert_eq!(sum(&*store).await.requests, 4);
    for workspace in workspaces {
        let stream = format!("usage:{{{workspace}}}");
        assert_eq!(cluster.owner(&stream).await.query::<u64>(&["XLEN", &stream]).await, 0, "{workspace}");
    }
}

#[tokio::test]
async fn usage_waits_in_redis_while_the_database_is_away() {
    let (postgres, usage) = database().await;
    let (redis, usage) = (RedisServer::start().await, Arc::new(usage));
    let one = collector(&redis, "one", usage.clone()).await;
    let stop = CancellationToken::new();
    let story = async {
        add_many(&redis, 3).await;
        eventually(DEADLINE, async || sum(&*usage).await.requests == 3).await;
        postgres.kill();
        add_many(&redis, 3).await;
        eventually(DEADLINE, async || pending(&redis).await == 3).await;
        assert_eq!(left(&redis).await, 3);
        postgres.restart().await;
        eventually(DEADLINE, async || left(&redis).await == 0).await;
        assert_eq!(postgres.sql("SELECT count(*) FROM obol_usage"), "6");
        stop.cancel();
    };
    tokio::join!(one.run(stop.clone()), story);
}

#[tokio::test]
async fn usage_is_collected_again_when_redis_comes_back_empty() {
    let (dir, redis) = (tempfile::tempdir().unwrap(), RedisServer::start().await);
    let store = Arc::new(FileUsage::new(dir.path()));
    let one = collector(&redis, "one", store.clone()).await;
    let stop = CancellationToken::new();
    let story = async {
        add_many(&redis, 3).await;
        eventually(DEADLINE, async || left(&redis).await == 0).await;
        redis.kill();
        redis.restart().await;
        add_many(&redis, 2).await;
        eventually(DEADLINE, async || sum(&*store).await.requests == 5).await;
        eventually(DEADLINE, async || left(&redis).await == 0).await;
        // Without anybody having gone away.
        let _: String = redis.query(&["FLUSHALL"]).await;
        add_many(&redis, 2).await;
        eventually(DEADLINE, async || sum(&*store).await.requests == 7).await;
        stop.cancel();
    };
    tokio::join!(one.run(stop.clone()), story);
}

#[test]
fn ids_of_entries_are_in_the_order_of_redis() {
    let id = |text: &str| text.parse::<EntryId>();
    assert!(id("9-10").unwrap() < id("10-9").unwrap() && id("9-9").unwrap() < id("9-10").unwrap());
    assert_eq!(id("1700000000000-3").unwrap().to_string(), "1700000000000-3");
    for bad in ["", "1", "1-", "-1", "x-1", "1-1-1"] {
        assert!(id(bad).is_err(), "{bad}");
    }
    let large = TakenEvent::read(&ws("acme"), id("1-1").unwrap(), &vec![b'x'; 1 << 20]).unwrap_err();
    let RejectedEntry { content, .. } = large;
    assert_eq!(content.len(), 64 << 10);
}
