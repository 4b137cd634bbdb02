//! A Redis that comes back empty: budgets count again what collected usage says, to the nano-USD, and nobody spends before
//! (DESIGN §12.6).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use obol_control::{
    Control, ControlOptions, ControlStore, Effect, FileStore, FileUsage, KeyRecord, NewKey, Operator,
    PostgresStore, PostgresUsage, Publisher, RedisPublisher, SyncReport, UsageBy, UsageCollector, UsageQuery,
    UsageStore,
};
use obol_meter::{
    Denied, Ledger as _, LedgerError, Line, Meter, MeterOptions, Price, RedisLedger, Start, Terms,
    UsageGuard, in_scope, meter,
};
use obol_model::{
    KeyBudget, KeyRing, ModelCall, NanoUsd, Outcome, PerMillion, Principal, ReplicaId, RequestId, Revision,
    Secret, SystemClock, TokenPrice, Tokens, UsageKind, Window, WorkspaceId,
};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::postgres::Postgres;
use obol_testkit::redis::RedisServer;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

const FILE: &str = r#"workspace: acme
environment: test
policies: [all.cedar]
providers:
  p: { kind: openai, base_url: "https://x.example/v1", auth: { bearer: { secret: "env:TOKEN" } } }
models:
  small: { max_output: 100, targets: [ { provider: p, model: gpt, price: { input: 1, output: 2 } } ] }
budgets:
  - { scope: workspace, window: month, limit_usd: 0.001 }
  - { scope: workspace, window: total, limit_usd: 0.002 }
  - { scope: model, model: small, window: day, limit_usd: 0.0009 }
  - { scope: key, window: day, limit_usd: 0.0006 }
"#;

struct Bench {
    server: RedisServer,
    redis: Redis,
    folder: TempDir,
    _postgres: Option<Postgres>,
    store: Arc<dyn ControlStore>,
    usage: Arc<dyn UsageStore>,
    key: KeyRecord,
}

fn ws() -> WorkspaceId {
    "acme".parse().unwrap()
}

fn ring() -> KeyRing {
    KeyRing::parse(&format!("k1:{}=", "A".repeat(43))).unwrap()
}

impl Bench {
    async fn new(with_postgres: bool) -> Self {
        let server = RedisServer::start().await;
        let redis = Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("ws")).unwrap();
        fs::write(folder.path().join("ws/acme.yaml"), FILE).unwrap();
        fs::write(folder.path().join("ws/all.cedar"), "permit(principal, action, resource);\n").unwrap();
        let postgres = if with_postgres { Some(Postgres::start().await) } else { None };
        let (store, usage): (Arc<dyn ControlStore>, Arc<dyn UsageStore>) = if let Some(postgres) = &postgres {
            let url = Secret::new(postgres.url());
            (Arc::new(PostgresStore::new(&url).unwrap()), Arc::new(PostgresUsage::new(&url).unwrap()))
        } else {
            let state = folder.path().join("state");
            (Arc::new(FileStore::new(&state)), Arc::new(FileUsage::new(&state)))
        };
        store.prepare().await.unwrap();
        let operator = Operator::new(store.clone(), None, Arc::new(SystemClock), "user:test".into());
        let budgets = vec![KeyBudget { window: Window::Total, limit: NanoUsd::new(700_000) }];
        let new = NewKey { budgets, ..NewKey::named(ws(), "ci") };
        let (_, key, _) = operator.new_key(new).await.unwrap();
        Self { server, redis, folder, _postgres: postgres, store, usage, key }
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(RedisPublisher::new(self.redis.clone()))
    }

    fn control(&self) -> Control {
        let options = ControlOptions {
            source: self.folder.path().join("ws"),
            key_ring: Arc::new(ring()),
            env: Arc::new(|name| (name == "TOKEN").then(|| "s3cret".to_owned())),
        };
        let control = Control::new(options, self.store.clone(), self.publisher(), Arc::new(SystemClock));
        control.with_usage(self.usage.clone())
    }

    async fn collect(&self) {
        let consumer = RequestId::new().to_string();
        let mut collector =
            UsageCollector::new(self.redis.clone(), consumer, self.store.clone(), self.usage.clone());
        collector.collect().await.unwrap();
    }

    fn replica(&self) -> Replica {
        let ledger = Arc::new(RedisLedger::new(self.redis.clone()));
        let (meter, flusher) =
            meter(ledger, Arc::new(SystemClock), ReplicaId::generate(), MeterOptions::default());
        let stop = CancellationToken::new();
        let running = tokio::spawn(flusher.run(stop.clone(), CancellationToken::new()));
        Replica { meter, stop, running }
    }

    fn mine(&self) -> Principal {
        Principal::Key(self.key.key.key_id.clone())
    }

    async fn lines(&self, who: &Principal) -> Vec<Line> {
        let docs = self.publisher().read(&ws()).await.unwrap().unwrap();
        let (snapshot, _) = docs.decode(&ws()).unwrap();
        let own = if *who == self.mine() { &self.key.key.budgets[..] } else { &[] };
        in_scope(&snapshot.budgets, own, who, Some(&"small".parse().unwrap()))
    }

    async fn admit(&self, replica: &Replica, who: &Principal, worst: u64) -> Result<UsageGuard, Denied> {
        let call = ModelCall { model: "small".parse().unwrap(), provider: None, upstream_model: None };
        let one = PerMillion::new(NanoUsd::new(1_000_000));
        let start = Start {
            workspace_id: ws(),
            principal: who.clone(),
            revision: Revision { epoch: 1, number: 1 },
            kind: UsageKind::ChatCompletion(call),
            // A token of input is a nano-USD.
            price: Price::Tokens(TokenPrice::flat(one, one)),
            request_id: RequestId::new(),
            idempotency: None,
        };
        let terms = Terms { lines: self.lines(who).await, worst: NanoUsd::new(worst), ..Terms::default() };
        replica.meter.admit(start, terms).await.map(|(guard, _)| guard)
    }

    async fn spend(&self, replica: &Replica, who: &Principal, cost: u64) {
        let guard = self.admit(replica, who, cost + 1000).await.unwrap();
        end(guard, cost);
    }

    /// Settled, by counter; nothing is reserved.
    async fn counters(&self) -> BTreeMap<String, i64> {
        let audited = RedisLedger::new(self.redis.clone()).audit(&ws()).await.unwrap();
        assert!(audited.iter().all(|counter| (counter.reserved, counter.open) == (0, 0)), "{audited:?}");
        audited.into_iter().map(|counter| (counter.counter, counter.settled)).collect()
    }

    /// What the store says that was spent, as counters are called.
    async fn stored(&self) -> BTreeMap<String, i64> {
        let sum = async |by: &[UsageBy]| {
            let query = UsageQuery { by: by.to_vec(), ..UsageQuery::default() };
            let totals = self.usage.totals(&query).await.unwrap();
            totals.into_iter().map(|t| (t.group.concat(), t.cost.nanos())).collect::<BTreeMap<_, _>>()
        };
        let now = jiff::tz::Offset::UTC.to_datetime(jiff::Timestamp::now()).date();
        let (day, month) = (format!("day:{now}"), now.strftime("month:%Y-%m").to_string());
        let all = sum(&[]).await[""];
        let mut counters = BTreeMap::from([
            (format!("workspace:{month}"), all),
            ("workspace:total".to_owned(), all),
            (format!("model:small:{day}"), sum(&[UsageBy::Model]).await["small"]),
        ]);
        for (who, spent) in sum(&[UsageBy::Key]).await {
            if who == self.mine().to_string() {
                counters.insert(format!("{who}:total"), spent);
            }
            counters.insert(format!("{who}:{day}"), spent);
        }
        counters
    }
}

struct Replica {
    meter: Meter,
    stop: CancellationToken,
    running: tokio::task::JoinHandle<obol_meter::FlushReport>,
}

impl Replica {
    /// Everything is written.
    async fn end(self) {
        self.stop.cancel();
        assert_eq!(self.running.await.unwrap().lost, 0);
    }
}

fn end(mut guard: UsageGuard, cost: u64) {
    guard.set_tokens(Tokens { input: cost, ..Tokens::default() }, false);
    guard.finish(Outcome::Ok);
}

fn done(report: &SyncReport) {
    assert!(report.failed.is_empty() && report.unseeded.is_empty(), "{report:?}");
}

async fn an_emptied_redis(with_postgres: bool) {
    let bench = Bench::new(with_postgres).await;
    let control = bench.control();
    done(&control.sync_once().await);
    let (a, b) = (bench.replica(), bench.replica());
    let mine = bench.mine();
    let stranger = Principal::User { issuer: "https://idp.example".to_owned(), subject: "alice".to_owned() };
    for n in 0..40_u64 {
        let who = if n % 3 == 0 { &stranger } else { &mine };
        bench.spend(if n % 2 == 0 { &a } else { &b }, who, 10_000 + n * 17).await;
    }
    let (in_flight, slow) = (bench.replica(), bench.replica());
    let late = bench.admit(&in_flight, &mine, 5_000).await.unwrap();
    let later = bench.admit(&slow, &mine, 5_000).await.unwrap();
    a.end().await;
    b.end().await;
    bench.collect().await;
    let before = bench.stored().await;
    // Nobody collects this one before Redis is emptied: it is gone.
    let lost = bench.replica();
    bench.spend(&lost, &stranger, 777).await;
    lost.end().await;

    bench.server.cli(&["FLUSHALL"]).await;
    let replica = bench.replica();
    let revision = bench.store.head(&ws()).await.unwrap().unwrap().revision;
    let docs = bench.store.documents(&ws(), revision).await.unwrap().unwrap();
    bench.publisher().publish(&ws(), &docs, revision).await.unwrap();
    let denied = bench.admit(&replica, &mine, 1).await.unwrap_err();
    assert_eq!(denied, Denied::Ledger(LedgerError::Lost));
    // A call that was under way ends, and its event is not collected yet.
    end(late, 4_321);
    in_flight.end().await;
    let report = control.sync_once().await;
    assert_eq!((report.unseeded.as_slice(), report.failed.len()), (&[ws()][..], 0), "{report:?}");
    assert!(bench.admit(&replica, &mine, 1).await.is_err());
    bench.collect().await;
    // Two controls at once: one of them is first.
    let other = bench.control();
    let (one, two) = tokio::join!(control.sync_once(), other.sync_once());
    done(&one);
    done(&two);
    let stored = bench.stored().await;
    assert_eq!(stored["workspace:total"], before["workspace:total"] + 4_321);
    assert_eq!(bench.counters().await, stored);
    end(later, 1_234);
    slow.end().await;
    bench.collect().await;
    assert_eq!(bench.counters().await, bench.stored().await, "what ends after the seed is booked as ever");
    done(&control.sync_once().await);
    assert_eq!(bench.counters().await, bench.stored().await, "and is not seeded again");

    // The day's budget of the key is used up exactly.
    let day = format!("{stranger}:day");
    let spent = bench.counters().await.into_iter().find(|(name, _)| name.starts_with(&day)).unwrap().1;
    let left = 600_000 - u64::try_from(spent).unwrap();
    let denied = bench.admit(&replica, &stranger, left + 1).await.unwrap_err();
    assert!(matches!(&denied, Denied::Budget { left: l, .. } if l.nanos() == left), "{denied}");
    end(bench.admit(&replica, &stranger, left).await.unwrap(), left);
    replica.end().await;
    let replica = bench.replica();
    let denied = bench.admit(&replica, &stranger, 1).await.unwrap_err();
    assert!(matches!(&denied, Denied::Budget { left, .. } if left.nanos() == 0), "{denied}");
    replica.end().await;
}

#[tokio::test]
async fn budgets_count_again_what_the_database_says_was_spent() {
    an_emptied_redis(true).await;
}

#[tokio::test]
async fn budgets_count_again_what_files_say_was_spent() {
    an_emptied_redis(false).await;
}

/// A command must not open a lost ledger that counts less than was spent.
#[tokio::test]
async fn a_command_leaves_a_ledger_to_control_while_its_usage_is_not_collected() {
    let bench = Bench::new(false).await;
    let control = bench.control();
    done(&control.sync_once().await);
    let replica = bench.replica();
    let late = bench.admit(&replica, &bench.mine(), 5_000).await.unwrap();
    bench.spend(&replica, &bench.mine(), 9_000).await;
    bench.server.cli(&["FLUSHALL"]).await;
    end(late, 4_321);
    replica.end().await;
    let operator = Operator::new(
        bench.store.clone(),
        Some(bench.publisher()),
        Arc::new(SystemClock),
        "user:test".into(),
    );
    let operator = operator.with_usage(bench.usage.clone());
    let head = bench.store.head(&ws()).await.unwrap().unwrap();
    let (.., effect) = operator.rollback(&ws(), Some(head.revision), &ring()).await.unwrap();
    assert!(matches!(effect, Effect::Replicas), "{effect:?}");
    assert!(bench.publisher().lost_ledger(&ws()).await.unwrap().is_some());
    bench.collect().await;
    let (.., effect) = operator.rollback(&ws(), Some(head.revision), &ring()).await.unwrap();
    assert!(matches!(effect, Effect::Replicas), "{effect:?}");
    assert!(bench.publisher().lost_ledger(&ws()).await.unwrap().is_none());
    assert_eq!(bench.counters().await, bench.stored().await);
}
