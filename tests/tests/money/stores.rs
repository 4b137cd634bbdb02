//! Whatever is restarted, emptied or away: each call is in the database once, and budgets count what it says.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_testkit::postgres::Postgres;
use obol_testkit::redis::RedisServer;
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::world::World;
use tokio::time::sleep;

use super::{counters, rounds};

/// They bind nobody.
const WIDE: &str = "budgets:
  - { scope: workspace, window: total, limit_usd: 1000 }
  - { scope: key, window: day, limit_usd: 1000 }
  - { scope: model, model: small, window: month, limit_usd: 1000 }
";
const BODY: &str = r#"{"model":"small","messages":[{"role":"user","content":"one two three"}]}"#;
/// A replica that has failed a while tries again within half a second, a collector within thirty.
const CAUGHT_UP: Duration = Duration::from_secs(45);

/// A Redis that knows after a restart what it had answered before.
async fn durable() -> RedisServer {
    RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await
}

async fn installation() -> (Postgres, World) {
    let (postgres, redis) = (Postgres::start().await, durable().await);
    let url = postgres.url();
    let world = World::with(2, WIDE, |builder| builder.redis(redis).env("OBOL_DATABASE_URL", &url)).await;
    (postgres, world)
}

/// Callers of both surfaces, without a pause to speak of.
#[derive(Default)]
struct Load {
    stop: AtomicBool,
    count: AtomicUsize,
    answered: Mutex<BTreeSet<String>>,
}

impl Load {
    async fn run(&self, world: &World, client: Option<&Mcp>) {
        while !self.stop.load(Ordering::Relaxed) {
            let reply = match client {
                Some(client) => client.call("fake__echo", "{}").await,
                None => world.chat(BODY).await,
            };
            match reply.status {
                200 if !reply.text().contains("\"error\"") => {
                    let id = reply.header("x-request-id").trim_start_matches("req_").to_owned();
                    self.answered.lock().unwrap().insert(id);
                    self.count.fetch_add(1, Ordering::Relaxed);
                }
                200 | 502 | 503 => {}
                _ => panic!("{reply:?}"),
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Until so many more were answered.
    async fn goes_on(&self, more: usize) {
        let until = self.count.load(Ordering::Relaxed) + more;
        eventually(SOON * 2, || async { self.count.load(Ordering::Relaxed) >= until }).await;
    }
}

/// Nothing is under way, nothing waits in Redis.
async fn settled(world: &World) {
    eventually(CAUGHT_UP, || async {
        let open: usize = world.cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
        let waiting: usize = world.cluster.redis().query(&["XLEN", "usage:{acme}"]).await;
        (open, waiting) == (0, 0)
    })
    .await;
}

/// Every counter is what the database says, to the nano-USD.
async fn agree(postgres: &Postgres, world: &World) {
    let sum = |of: &str| -> i64 {
        let sum =
            format!("SELECT coalesce(sum(cost_nanos), 0) FROM obol_usage WHERE part <> 'attempt' AND {of}");
        postgres.sql(&sum).parse().unwrap()
    };
    let counters = counters(&world.cluster).await;
    assert!(counters.len() >= 3, "{counters:?}");
    for (counter, spent) in counters {
        let stored = match counter.split_once(':').unwrap() {
            ("workspace", _) => sum("true"),
            ("model", _) => sum("model = 'small'"),
            ("key", rest) => sum(&format!("key_id = '{}'", rest.split_once(':').unwrap().0)),
            _ => panic!("{counter}"),
        };
        assert_eq!(spent, (stored, 0), "{counter}");
    }
}

/// `OBOL_TEST_ROUNDS=20` for a long run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_call_is_in_the_database_once_whatever_is_restarted_under_load() {
    let (postgres, world) = installation().await;
    let load = Load::default();
    let clients = [world.connect().await, world.connect().await];
    let callers = join_all((0..4).map(|n| load.run(&world, clients.get(n))));
    let trouble = async {
        for _ in 0..rounds(1) {
            load.goes_on(50).await;
            world.cluster.control().kill9().await;
            load.goes_on(50).await;
            world.cluster.restart_control().await;
            load.goes_on(20).await;
            postgres.kill();
            load.goes_on(100).await;
            postgres.restart().await;
            load.goes_on(20).await;
            world.cluster.redis().restart().await;
            load.goes_on(50).await;
        }
        load.stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(callers, trouble);
    // What the control that was killed had read is taken over after a minute; its own next start need not wait for that.
    let events = |what: &str| postgres.sql(&format!("SELECT {what} FROM obol_usage WHERE part = 'request'"));
    eventually(CAUGHT_UP * 2, || async {
        let stored: BTreeSet<String> =
            events("replace(event_id, '-', '')").lines().map(str::to_owned).collect();
        load.answered.lock().unwrap().is_subset(&stored)
    })
    .await;
    eventually(CAUGHT_UP * 2, || async {
        world.cluster.redis().query::<usize>(&["XLEN", "usage:{acme}"]).await == 0
    })
    .await;
    settled(&world).await;
    assert_eq!(events("count(*) - count(DISTINCT event_id)"), "0");
    agree(&postgres, &world).await;
    println!("{} answered, {} in the database", load.count.load(Ordering::Relaxed), events("count(*)"));
}

/// C077: nobody is admitted before the counters are back, and then they are what was collected.
#[tokio::test]
async fn a_redis_that_comes_back_empty_counts_what_was_collected() {
    let (postgres, world) = installation().await;
    let client = world.connect().await;
    for _ in 0..10 {
        assert_eq!(world.chat(BODY).await.status, 200);
        client.call("fake__echo", "{}").await.result();
    }
    settled(&world).await;
    assert_eq!(postgres.sql("SELECT count(*) FROM obol_usage"), "20");
    agree(&postgres, &world).await;
    let before = counters(&world.cluster).await;

    world.cluster.redis().cli(&["FLUSHALL"]).await;
    let served = world.llm.calls();
    let mut refused = BTreeSet::new();
    eventually(SOON * 3, || async {
        let reply = world.chat(BODY).await;
        if reply.status == 200 {
            return Ok(());
        }
        Err(reply.status)
    })
    .await;
    let meta: usize = world.cluster.redis().query(&["EXISTS", "ledger:{acme}:meta"]).await;
    assert_eq!((meta, world.llm.calls()), (1, served + 1), "nobody was served before");
    settled(&world).await;
    let after = counters(&world.cluster).await;
    for (counter, (spent, _)) in &before {
        refused.insert(after[counter].0 > *spent);
    }
    assert_eq!(refused, BTreeSet::from([true]), "{before:?} {after:?}");
    agree(&postgres, &world).await;
    let lost = |line: &str| line.contains("the ledger of the workspace was lost");
    world.cluster.control().wait_for_line(SOON, lost).await;
}

/// A replica ends while Redis is away: what its calls cost is settled by its next start.
#[tokio::test]
async fn what_a_drain_could_not_write_is_settled_by_the_next_start() {
    const CALLS: usize = 5;
    let (dir, redis) = (tempfile::tempdir().unwrap(), durable().await);
    let world = World::with(2, WIDE, |builder| {
        let dir = dir.path().to_str().unwrap();
        builder.redis(redis).gateway_env("OBOL_SPOOL_DIR", dir).gateway_env("OBOL_DRAIN_TIMEOUT_S", "4")
    })
    .await;
    let spooled = || {
        let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().ends_with(".jsonl")).count()
    };
    world.llm.reply(Says::Stall);
    let url = format!("{}/v1/chat/completions", world.cluster.public_url(0));
    let calls = join_all((0..CALLS).map(|_| {
        Reply::of(
            http().post(&url).bearer_auth(&world.key).header("content-type", "application/json").body(BODY),
        )
    }));
    let away = async {
        world.llm.wait_for_calls(CALLS as u64).await;
        world.cluster.redis().kill();
        world.llm.release();
    };
    let (replies, ()) = tokio::join!(calls, away);
    assert!(replies.iter().all(|reply| reply.status == 200), "{replies:?}");
    world.cluster.terminate(0);
    let status = world.cluster.replica(0).process.wait(SOON).await;
    assert_eq!((status.code(), spooled()), (Some(0), 1), "nothing is lost");

    world.cluster.redis().restart().await;
    world.llm.reply(Says::Echo);
    world.cluster.restart(0).await;
    eventually(SOON, || async { spooled() == 0 }).await;
    eventually(SOON, || async { world.usage().await.len() == CALLS }).await;
    let events = world.usage().await;
    assert!(events.iter().all(|event| event["outcome"] == "ok"), "{events:?}");
    for (counter, spent) in counters(&world.cluster).await {
        assert_eq!(spent, (super::total(&events), 0), "{counter}");
    }

    // One that could not write there says so at once.
    let missing = dir.path().join("missing");
    let free = "127.0.0.1:0";
    let refused = world.cluster.obol(["run"]).env("OBOL_SPOOL_DIR", missing.to_str().unwrap());
    let refused = refused.env("OBOL_LISTEN", free).env("OBOL_ADMIN_LISTEN", free).spawn();
    assert_eq!(refused.wait(SOON).await.code(), Some(1));
    refused.ended().await.unwrap();
    let said = refused.lines().join("\n");
    assert!(said.contains("cannot use the spool directory") && said.contains("missing"), "{said}");
}
