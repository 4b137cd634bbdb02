//! A replica is killed with calls in flight: each of them is one event, and the ledger agrees (DESIGN §12.4, C068).

use std::collections::HashSet;
use std::time::Duration;

use futures::future::join_all;
use futures::stream::{self, StreamExt as _};
use obol_testkit::eventually;
use obol_testkit::fake_llm::{Raw, Reply as Says};
use obol_testkit::fake_mcp::Stall;
use obol_tests::SOON;
use obol_tests::client::{Events, Mcp, Reply, http, message};
use obol_tests::world::World;
use tokio::time::Instant;

use super::{counters, total};

const WIDE: &str = "budgets:
  - { scope: workspace, window: month, limit_usd: 1000 }
";
/// The lease of a dead replica ends after 15 s; another one looks every 5 s.
const SWEPT: Duration = Duration::from_secs(45);
const EACH: usize = 10;

#[tokio::test]
async fn calls_of_a_killed_replica_are_booked_once_each_and_the_ledger_agrees() {
    let world = World::with(2, WIDE, |builder| builder).await;
    let cluster = &world.cluster;
    world.chat(r#"{"model":"small","messages":[]}"#).await;
    let client = world.connect().await;
    client.call("fake__echo", "{}").await.result();
    eventually(SOON, || async { world.usage().await.len() == 2 }).await;

    let url = cluster.public_url(0);
    world.llm.reply(Says::Stall);
    world.mcp.stall(Stall::UntilReleased);
    let doomed: Mcp = client.at(&url);
    let complete = |more: &'static str| {
        let body = format!(r#"{{"model":"small","messages":[]{more}}}"#);
        let request = http().post(format!("{url}/v1/chat/completions")).bearer_auth(&world.key).body(body);
        Reply::try_of(request)
    };
    let calls = async {
        tokio::join!(
            join_all((0..EACH).map(|n| {
                let call = message(&n.to_string(), "tools/call", r#"{"name":"fake__echo","arguments":{}}"#);
                Reply::try_of(doomed.post(call).header("idempotency-key", n))
            })),
            join_all((0..EACH).map(|_| complete(""))),
            join_all((0..EACH).map(|_| complete(r#","stream":true"#))),
        )
    };
    let kill = async {
        world.llm.wait_for_calls(1 + 2 * EACH as u64).await;
        world.mcp.wait_until(|counts| counts.calls("echo") == 1 + EACH as u64).await;
        let open: usize = cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
        assert_eq!(open, 3 * EACH);
        cluster.kill9(0).await;
        Instant::now()
    };
    let ((tools, plain, streams), killed) = tokio::join!(calls, kill);
    assert!(tools.iter().all(Result::is_err) && plain.iter().chain(&streams).all(Result::is_err));

    eventually(SWEPT, || async {
        let open: usize = cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
        open == 0
    })
    .await;
    println!("booked {:?} after the kill", killed.elapsed());
    let events = world.usage().await;
    let ids: HashSet<String> = events.iter().map(|event| event["event_id"].to_string()).collect();
    assert_eq!((events.len(), ids.len()), (2 + 3 * EACH, 2 + 3 * EACH), "one each, none twice");
    let orphaned = events.iter().filter(|event| event["outcome"] == "orphaned");
    assert_eq!(orphaned.clone().count(), 3 * EACH);
    assert!(orphaned.clone().all(|event| event["cost"] == event["reserved"]));
    for (counter, spent) in counters(cluster).await {
        assert_eq!(spent, (total(&events), 0), "{counter}");
    }
    let under_way: Vec<String> = cluster.redis().query(&["HKEYS", "ledger:{acme}:under-way"]).await;
    assert!(under_way.is_empty(), "{under_way:?}");
    // The others go on; what was in flight is not made again under its key.
    world.llm.release();
    world.mcp.release();
    let alive = client.at(&cluster.public_url(1));
    alive.call("fake__echo", "{}").await.result();
    let before = world.mcp.calls("echo");
    for key in 0..EACH {
        let call = message("1", "tools/call", r#"{"name":"fake__echo","arguments":{}}"#);
        let again = Reply::of(alive.post(call).header("idempotency-key", key)).await;
        assert_eq!(again.error()["data"]["code"], "idempotency_outcome_unknown");
    }
    assert_eq!(world.mcp.calls("echo"), before);
}

/// C073: clients leave at every point of a stream; each call is one event, nothing stays set aside, and the provider is
/// left at once.
#[tokio::test]
async fn streams_that_clients_leave_are_settled_once_each() {
    const STREAMS: usize = 500;
    const AT_ONCE: usize = 50;
    const EVENTS: usize = 20;
    let world = World::with(2, WIDE, |builder| builder).await;
    let chunk = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"some words\"},\"finish_reason\":null}]}\n\n";
    let raw =
        (0..EVENTS).fold(Raw::events::<&str>([]), |raw, _| raw.then(chunk).wait(Duration::from_millis(1)));
    world.llm.reply(Says::Raw(raw.wait_for_release()));
    let client = http();
    let leave = async |n: usize| {
        let request = client
            .post(format!("{}/v1/chat/completions", world.cluster.public_url(n % 2)))
            .bearer_auth(&world.key)
            .body(r#"{"model":"small","stream":true,"messages":[{"role":"user","content":"hi"}]}"#);
        let read = n % (EVENTS + 1);
        if read == 0 {
            // Somewhere on the way.
            let patience = Duration::from_micros((n * 37 % 5_000) as u64);
            drop(tokio::time::timeout(patience, request.send()).await);
            return;
        }
        let response = request.send().await.unwrap();
        let status = response.status();
        assert!(status == 200, "call {n}: {status} {:?}", response.text().await);
        let mut events = Events::of(response);
        let mut last = None;
        for nth in 0..read {
            let event = events.next(SOON).await;
            assert!(event.is_some(), "call {n} ended with {last:?} after {nth} events");
            last = event;
        }
    };
    stream::iter(0..STREAMS).for_each_concurrent(AT_ONCE, leave).await;
    let left = Instant::now();
    eventually(SOON, || async { world.llm.left_early() == world.llm.calls() }).await;
    println!("the provider was left {:?} after the last client had gone", left.elapsed());
    eventually(SOON, || async {
        let open: usize = world.cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
        open == 0
    })
    .await;
    let events = world.usage().await;
    let ids: HashSet<String> = events.iter().map(|event| event["event_id"].to_string()).collect();
    assert_eq!(ids.len(), events.len(), "none twice");
    let called = usize::try_from(world.llm.calls()).unwrap();
    assert!((called..=STREAMS).contains(&events.len()), "{} events of {called} calls", events.len());
    assert!(called >= STREAMS - STREAMS / EVENTS, "{called}");
    for (counter, spent) in counters(&world.cluster).await {
        assert_eq!(spent, (total(&events), 0), "{counter}");
    }
    // As much as was relayed is due, by estimate.
    assert!(events.iter().all(|event| event["outcome"] == "partial"), "{events:?}");
    assert!(events.iter().filter(|event| event["estimated"] == true).count() >= called);
}
