//! Budgets are hard, for any number of replicas and callers (C067).

use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt as _};
use obol_model::VirtualKey;
use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_testkit::fake_mcp::Stall;
use obol_testkit::redis_cluster::RedisCluster;
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::world::{World, chat};
use serde_json::Value;

use super::{counters, new_key, total, usd};

const ROUNDS: usize = 50;
const CALLERS: usize = 200;
const FITS: usize = 7;

const BODY: &str = r#"{"model":"small","messages":[{"role":"user","content":"one two three"}]}"#;
/// They bind nobody by themselves; top-level members of the workspace file.
const WIDE: &str = "budgets:
  - { scope: workspace, window: month, limit_usd: 1000 }
  - { scope: model, model: small, window: day, limit_usd: 1000 }
";

/// The most that a completion of [`BODY`] can cost, as its event says.
async fn worst_case(world: &World) -> i64 {
    assert_eq!(world.chat(BODY).await.status, 200);
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| !events.is_empty()) }).await;
    events[0]["reserved"].as_i64().unwrap()
}

/// Until every replica knows a key.
async fn known(world: &World, key: &str) {
    for replica in 0..world.cluster.size() {
        let url = format!("{}/v1/models", world.cluster.public_url(replica));
        eventually(SOON, || async { Reply::of(http().get(&url).bearer_auth(key)).await.status == 200 }).await;
    }
}

/// Hundreds of callers with a key that nobody has used before, on four replicas, want what only seven can have: seven get
/// it, at every moment settled and reserved stay within the limit, and what was not spent is there for the next.
async fn seven_of_hundreds(world: &World, rounds: usize) {
    let worst = worst_case(world).await;
    let limit = worst * i64::try_from(FITS).unwrap();
    let urls: Vec<String> = (0..4).map(|replica| world.cluster.public_url(replica)).collect();
    let client = http();
    for round in 0..rounds {
        let key = new_key(&world.cluster, &["--budget", &format!("total={}", usd(limit))]).await;
        let counter = format!("key:k-{}:total", &key.parse::<VirtualKey>().unwrap().hash().hex()[..12]);
        known(world, &key).await;
        world.llm.reply(Says::Stall);
        let before = world.llm.calls();
        let call = |n: usize| {
            let request = client.post(format!("{}/v1/chat/completions", urls[n % urls.len()]));
            Reply::of(request.bearer_auth(&key).header("content-type", "application/json").body(BODY))
        };
        let mut calls: FuturesUnordered<_> = (0..CALLERS).map(call).collect();
        let mut denied = 0;
        while denied < CALLERS - FITS {
            let reply = calls.next().await.unwrap();
            assert_eq!(reply.status, 429, "round {round}: {reply:?}");
            assert_eq!(reply.json()["error"]["code"], "budget_exceeded");
            assert_eq!(reply.header("retry-after"), "1", "what others do not spend comes back");
            denied += 1;
            if denied % 50 == 0 {
                let (settled, reserved) = counters(&world.cluster).await[&counter];
                assert!(settled + reserved <= limit, "round {round}: {settled} + {reserved}");
            }
        }
        world.llm.wait_for_calls(before + FITS as u64).await;
        assert_eq!(counters(&world.cluster).await[&counter], (0, limit), "round {round}");
        world.llm.release();
        let admitted: Vec<Reply> = calls.collect().await;
        assert_eq!(admitted.len(), FITS);
        assert!(admitted.iter().all(|reply| reply.status == 200), "round {round}: {admitted:?}");
        assert_eq!(world.llm.calls(), before + FITS as u64, "round {round}: nobody else was served");
        eventually(SOON, || async { counters(&world.cluster).await[&counter].1 == 0 }).await;
    }
    let events = world.usage().await;
    assert_eq!(events.len(), 1 + rounds * FITS);
    for (counter, (settled, reserved)) in counters(&world.cluster).await {
        assert_eq!(reserved, 0, "{counter}");
        if counter.starts_with("workspace") || counter.starts_with("model") {
            assert_eq!(settled, total(&events), "{counter}");
        }
    }
}

#[tokio::test]
async fn a_budget_that_fits_seven_admits_seven_in_each_of_fifty_rounds() {
    let world = World::with(4, WIDE, |builder| builder).await;
    seven_of_hundreds(&world, ROUNDS).await;
}

#[tokio::test]
async fn a_budget_is_as_hard_on_a_cluster() {
    let redis = RedisCluster::start().await;
    let world = World::with(4, WIDE, |builder| builder.redis(redis)).await;
    seven_of_hundreds(&world, ROUNDS / 5).await;
}

/// Each kind of limit, as callers of both surfaces are told.
#[tokio::test]
async fn a_refusal_says_what_is_used_up_and_when_that_ends() {
    let limits = "budgets:
  - { scope: model, model: small, window: day, limit_usd: 0.003, name: small-daily }
limits: { requests_per_minute: 100000, concurrency: 2 }
";
    let world = World::with(2, limits, |builder| builder).await;
    // A completion may cost 0.002 USD and a little.
    world.llm.reply(Says::Stall);
    let first = world.chat(BODY);
    let second = async {
        world.llm.wait_for_calls(1).await;
        let denied = world.chat(BODY).await;
        let stranger = new_key(&world.cluster, &["--requests-per-minute", "1"]).await;
        known(&world, &stranger).await;
        // One is let in and waits for its answer; should the minute end here, another one.
        let body = r#"{"model":"small","max_tokens":1,"messages":[]}"#;
        let url = world.url();
        let mut calls: FuturesUnordered<_> = (0..3).map(|_| chat(&url, &stranger, body)).collect();
        let refused = calls.next().await.unwrap();
        world.llm.wait_for_calls(2).await;
        world.llm.reply(Says::Echo);
        world.llm.release();
        drop(calls.collect::<Vec<_>>().await);
        (denied, refused)
    };
    let (first, (denied, refused)) = tokio::join!(first, second);
    assert_eq!(first.status, 200, "{first:?}");
    assert_eq!(first.header("x-ratelimit-limit-requests"), "100000");
    assert!(first.header("x-ratelimit-remaining-requests").parse::<u64>().unwrap() >= 99_990);
    assert!(first.header("x-ratelimit-reset-requests").ends_with('s'));
    assert_eq!((denied.status, &denied.json()["error"]["code"]), (429, &"budget_exceeded".into()));
    let message = denied.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("`small-daily` has 0.0009") && message.contains("it resets in"), "{message}");
    assert!(message.contains("0.002") && message.contains("set aside for calls under way"), "{message}");
    assert_eq!((denied.header("x-should-retry"), denied.header("retry-after")), ("", "1"));
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded", "{refused:?}");
    assert!(refused.header("retry-after").parse::<u64>().unwrap() <= 60);
    let limit =
        ["limit", "remaining"].map(|what| refused.header(&format!("x-ratelimit-{what}-requests")).to_owned());
    assert_eq!(limit, ["1", "0"], "{refused:?}");

    // More than the whole budget: waiting does not help.
    let never = world.chat(r#"{"model":"small","n":2,"messages":[]}"#).await;
    assert_eq!((never.status, &never.json()["error"]["code"]), (400, &"exceeds_budget".into()), "{never:?}");
    let too_long = world.chat(r#"{"model":"small","max_tokens":1001,"messages":[]}"#).await;
    assert_eq!((too_long.status, &too_long.json()["error"]["param"]), (400, &"max_tokens".into()));

    // Tools have a price, too, and their refusals keep the session.
    let poor = new_key(&world.cluster, &["--budget", "total=0.001"]).await;
    known(&world, &poor).await;
    let client = Mcp::connect(&world.url(), &poor).await;
    client.call("fake__echo", "{}").await.result();
    eventually(SOON, || async { world.cluster.redis().keys("ledger:{acme}:under-way").await.is_empty() })
        .await;
    let reply = client.call("fake__echo", "{}").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let error = reply.json()["error"].clone();
    assert_eq!(error["data"]["code"], "budget_exceeded", "{error}");
    assert!(error["message"].as_str().unwrap().contains("`key total` has 0.000000000 USD left"), "{error}");
    assert_eq!(error["data"]["retry_after_s"], Value::Null, "it never resets: {error}");
    client.rpc("ping", "{}").await.result();

    // Two at once, and no third.
    world.mcp.stall(Stall::UntilReleased);
    let client = world.connect().await;
    let at_once = join_all((0..2).map(|_| client.call("fake__echo", "{}")));
    let third = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 3).await;
        let reply = client.call("fake__echo", "{}").await;
        world.mcp.release();
        reply
    };
    let (two, third) = tokio::join!(at_once, third);
    assert!(two.iter().all(|reply| reply.status == 200 && !reply.text().contains("error")), "{two:?}");
    assert_eq!(third.json()["error"]["data"]["code"], "too_many_concurrent_requests", "{third:?}");
}

/// What is refused before the upstream costs nothing and leaves nothing behind.
#[tokio::test]
async fn what_is_not_called_sets_nothing_aside() {
    let world = World::with(2, WIDE, |builder| builder).await;
    let client = world.connect().await;
    client.call("fake__nowhere", "{}").await.error();
    client.call("nowhere__at_all", "{}").await.error();
    let made_up =
        Mcp::new(&world.url(), &world.key).with_session(Some("mcs_01900000-0000-7000-8000-000000000000"));
    assert_eq!(made_up.call("fake__echo", "{}").await.status, 404);
    assert_eq!(world.chat(r#"{"model":"nowhere","messages":[]}"#).await.status, 404);
    eventually(SOON, || async {
        let counters = counters(&world.cluster).await;
        let open: usize = world.cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
        open == 0 && counters.values().all(|spent| *spent == (0, 0))
    })
    .await;
    let events: Vec<Value> = world.usage().await;
    assert_eq!(events.len(), 0, "{events:?}");
}
