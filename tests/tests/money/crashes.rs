//! A replica is killed with calls in flight: each of them is one event, and the ledger agrees (DESIGN §12.4, C068).

use std::collections::HashSet;
use std::time::Duration;

use futures::future::join_all;
use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_testkit::fake_mcp::Stall;
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, http, message};
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
                Reply::try_of(doomed.post(call))
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
    // The others go on.
    world.llm.release();
    world.mcp.release();
    client.at(&cluster.public_url(1)).call("fake__echo", "{}").await.result();
}
