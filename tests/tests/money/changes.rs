//! Budgets that change under calls (C076), and that refuse nobody too early whatever is restarted (C077).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt as _};
use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_testkit::redis_kind::AnyRedis;
use obol_testkit::redis_sentinel::RedisSentinel;
use obol_tests::SOON;
use obol_tests::client::{Reply, http};
use obol_tests::world::{World, workspace};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::{counters, total, usd};

const BODY: &str = r#"{"model":"small","messages":[{"role":"user","content":"one two three"}]}"#;

/// What a workspace file says beside connections, providers and models.
fn budgets(lines: &[String]) -> String {
    let lines: String = lines.iter().map(|line| format!("  - {line}\n")).collect();
    if lines.is_empty() {
        return "expose_revision: true\n".to_owned();
    }
    format!("expose_revision: true\nbudgets:\n{lines}")
}

fn of_keys(window: &str, limit: i64) -> String {
    format!("{{ scope: key, window: {window}, limit_usd: {} }}", usd(limit))
}

async fn revision(world: &World, replica: usize) -> String {
    let request = http().get(format!("{}/v1/models", world.cluster.public_url(replica)));
    Reply::of(request.bearer_auth(&world.key)).await.header("x-obol-revision").to_owned()
}

/// Publishes other budgets and waits until every replica has them.
async fn publish(world: &World, lines: &[String]) {
    let before = revision(world, 0).await;
    world.cluster.write_workspace("acme", &workspace("acme", &world.mcp, &world.llm, &budgets(lines)));
    for replica in 0..world.cluster.size() {
        eventually(SOON, || async { revision(world, replica).await != before }).await;
    }
}

async fn chat_at(world: &World, replica: usize) -> Reply {
    let request = http().post(format!("{}/v1/chat/completions", world.cluster.public_url(replica)));
    Reply::of(request.bearer_auth(&world.key).header("content-type", "application/json").body(BODY)).await
}

/// So many more calls are admitted and stay under way, on both replicas in turn, and one more is refused.
async fn admits<'a>(
    world: &'a World,
    exactly: usize,
) -> Vec<std::pin::Pin<Box<dyn Future<Output = Reply> + 'a>>> {
    let before = world.llm.calls();
    let mut calls: FuturesUnordered<_> = (0..=exactly).map(|n| Box::pin(chat_at(world, n % 2))).collect();
    let refused = calls.next().await.unwrap();
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (429, &"budget_exceeded".into()),
        "{refused:?}"
    );
    world.llm.wait_for_calls(before + exactly as u64).await;
    assert_eq!(world.llm.calls(), before + exactly as u64);
    calls.into_iter().map(|call| call as _).collect()
}

async fn worst_case(world: &World) -> i64 {
    assert_eq!(world.chat(BODY).await.status, 200);
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| !events.is_empty()) }).await;
    events[0]["reserved"].as_i64().unwrap()
}

/// C076: a limit is lowered below what is set aside, raised, removed, and another window is added, with calls under way.
#[tokio::test]
async fn a_budget_changes_under_calls_and_binds_by_what_it_counted() {
    let world = World::with(2, &budgets(&[]), |builder| builder).await;
    let worst = worst_case(&world).await;
    let key = format!("key:{}", world.usage().await[0]["key_id"].as_str().unwrap());
    let counter = async |window: &str| -> (i64, i64) {
        let found = counters(&world.cluster).await;
        found
            .iter()
            .find(|(name, _)| name.starts_with(&format!("{key}:{window}")))
            .map_or((0, 0), |(_, spent)| *spent)
    };
    // What was spent before there was a budget does not count.
    publish(&world, &[of_keys("total", 10 * worst)]).await;
    assert_eq!(world.chat(BODY).await.status, 200);
    let spent =
        eventually(SOON, || async { Some(counter("total").await).filter(|(_, reserved)| *reserved == 0) })
            .await
            .0;
    assert!(spent > 0 && spent < worst / 10, "{spent} of {worst}");
    world.llm.reply(Says::Stall);
    let mut under_way = Vec::new();
    let before = world.llm.calls();
    let mut first: FuturesUnordered<_> = (0..4).map(|n| Box::pin(chat_at(&world, n % 2))).collect();
    let none = tokio::select! {
        reply = first.next() => reply,
        () = world.llm.wait_for_calls(before + 4) => None,
    };
    assert!(none.is_none(), "{none:?}");
    under_way.extend(first.into_iter().map(|call| call as _));
    assert_eq!(counter("total").await, (spent, 4 * worst));

    // Below what is set aside: nobody else, and nobody is cut.
    publish(&world, &[of_keys("total", 2 * worst)]).await;
    under_way.extend(admits(&world, 0).await);
    assert_eq!(counter("total").await, (spent, 4 * worst));
    publish(&world, &[of_keys("total", 6 * worst)]).await;
    under_way.extend(admits(&world, 1).await);
    assert_eq!(counter("total").await, (spent, 5 * worst));
    // Another window counts from its own beginning, not what was spent for ever.
    publish(&world, &[of_keys("day", 3 * worst), of_keys("total", 20 * worst)]).await;
    under_way.extend(admits(&world, 3).await);
    assert_eq!((counter("day").await, counter("total").await), ((0, 3 * worst), (spent, 8 * worst)));
    publish(&world, &[]).await;
    let before = world.llm.calls();
    let free = Box::pin(chat_at(&world, 1));
    let all = async { join_all(under_way).await };
    let end = async {
        world.llm.wait_for_calls(before + 1).await;
        assert_eq!(counter("total").await, (spent, 8 * worst), "without a budget nothing is counted");
        world.llm.release();
    };
    let (replies, last, ()) = tokio::join!(all, free, end);
    assert_eq!(replies.len(), 8);
    assert!(replies.iter().chain([&last]).all(|reply| reply.status == 200), "{replies:?}");
    eventually(SOON, || async { world.usage().await.len() == 11 }).await;
    eventually(SOON, || async { counter("total").await.1 == 0 && counter("day").await.1 == 0 }).await;
    let cost = (total(&world.usage().await)) / 11;
    assert_eq!(counter("total").await.0, 9 * cost, "each of its calls, those of before and after are not");
    assert_eq!(counter("day").await.0, 3 * cost);
}

/// Callers at about half of their budget, who are never refused for money.
struct Load<'a> {
    world: &'a World,
    stop: AtomicBool,
    served: AtomicUsize,
}

impl Load<'_> {
    async fn run(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let request = http().post(format!("{}/v1/chat/completions", self.world.url()));
            let request = request.bearer_auth(&self.world.key).header("content-type", "application/json");
            // A connection to a replica that was killed is no refusal.
            if let Ok(reply) = Reply::try_of(request.body(BODY)).await {
                assert!(matches!(reply.status, 200 | 502 | 503), "{reply:?}");
                self.served.fetch_add(usize::from(reply.status == 200), Ordering::Relaxed);
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn goes_on(&self) {
        let until = self.served.load(Ordering::Relaxed) + 60;
        eventually(SOON * 3, || async { self.served.load(Ordering::Relaxed) >= until }).await;
    }
}

/// Samples what is enforced until the load ends: it is never above half of the limit, and it never falls.
async fn watch(load: &Load<'_>, limit: i64) -> usize {
    let (mut settled, mut samples) = (0, 0);
    while !load.stop.load(Ordering::Relaxed) {
        let audit = load.world.cluster.obol(["usage", "audit", "acme", "--json"]).spawn();
        let ended = audit.wait(SOON * 3).await;
        // While a failover is on nobody can say.
        if let Ok(said) =
            serde_json::from_str::<Value>(&audit.lines_of(obol_testkit::process::Stream::Out).concat())
        {
            assert!(ended.success() && said["agree"] == true, "{said}");
            for counter in said["counters"].as_array().unwrap() {
                let of = |name: &str| counter[name].as_i64().unwrap();
                assert_eq!(of("enforced_nanos"), of("settled_nanos") + of("reserved_nanos"), "{counter}");
                assert!(of("enforced_nanos") <= limit / 2, "{counter} of {limit}");
                assert!(of("settled_nanos") >= settled, "{counter} after {settled}");
                settled = of("settled_nanos");
            }
            samples += 1;
        }
        sleep(Duration::from_millis(200)).await;
    }
    samples
}

/// C077: replicas are restarted and killed, scripts are flushed, connections cut: nobody is refused at half of the budget, and
/// what is enforced is what was settled and what is set aside, at every moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_refused_at_half_of_the_budget_whatever_is_restarted() {
    let world = World::with(2, &budgets(&[]), |builder| builder).await;
    // About twice as much as all of these callers together have set aside and spend.
    let limit = 24 * worst_case(&world).await;
    publish(&world, &[of_keys("total", limit)]).await;
    let load = Load { world: &world, stop: AtomicBool::new(false), served: AtomicUsize::new(0) };
    let began = Instant::now();
    let trouble = async {
        load.goes_on().await;
        world.cluster.terminate(0);
        world.cluster.restart(0).await;
        load.goes_on().await;
        world.cluster.redis().cli(&["SCRIPT", "FLUSH"]).await;
        load.goes_on().await;
        world.cluster.redis().cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        load.goes_on().await;
        world.cluster.restart_control().await;
        load.goes_on().await;
        load.stop.store(true, Ordering::Relaxed);
    };
    let callers = join_all((0..8).map(|_| load.run()));
    let ((), _, samples) = tokio::join!(trouble, callers, watch(&load, limit));
    eventually(SOON * 6, || async {
        world.cluster.redis().query::<usize>(&["ZCARD", "ledger:{acme}:open"]).await == 0
    })
    .await;
    let events = world.usage().await;
    let before = events[0]["cost"].as_i64().unwrap();
    for (counter, spent) in counters(&world.cluster).await {
        assert_eq!(spent, (total(&events) - before, 0), "{counter}");
    }
    let served = load.served.load(Ordering::Relaxed);
    println!("{served} served, {} events, {samples} samples in {:?}", events.len(), began.elapsed());
    assert!(samples >= 5 && events.len() > served, "{samples} samples");
}

/// The same over a failover. What the new master had not heard of yet is lost, which refuses nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_refused_at_half_of_the_budget_over_a_failover() {
    let redis = RedisSentinel::start_with(3).await;
    let world = World::with(2, &budgets(&[]), |builder| builder.redis(redis)).await;
    let AnyRedis::Sentinel(redis) = world.cluster.any_redis() else { unreachable!() };
    let limit = 24 * worst_case(&world).await;
    publish(&world, &[of_keys("total", limit)]).await;
    let load = Load { world: &world, stop: AtomicBool::new(false), served: AtomicUsize::new(0) };
    let trouble = async {
        load.goes_on().await;
        redis.failover().await;
        load.goes_on().await;
        load.stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(trouble, join_all((0..8).map(|_| load.run())));
    eventually(SOON * 6, || async {
        redis.master().await.query::<usize>(&["ZCARD", "ledger:{acme}:open"]).await == 0
    })
    .await;
    for (counter, (settled, reserved)) in counters(&world.cluster).await {
        assert!(reserved == 0 && settled > 0 && settled <= limit / 2, "{counter}: {settled} + {reserved}");
    }
}
