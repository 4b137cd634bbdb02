//! A replica is killed in the middle of whatever its calls do: what upstreams have seen is in the ledger, and what the ledger
//! has above it is orphaned (DESIGN §12.4, C068).

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;
use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_testkit::fake_mcp::Stall;
use obol_tests::SOON;
use obol_tests::client::{Reply, http, message};
use obol_tests::world::World;
use serde_json::Value;

use super::{counters, rounds, total};

const WIDE: &str = "budgets:
  - { scope: workspace, window: total, limit_usd: 1000 }
  - { scope: key, window: day, limit_usd: 1000 }
";
/// The lease of a dead replica ends after 15 s; another one looks every 5 s.
const SWEPT: Duration = Duration::from_secs(45);
const TOOLS: usize = 16;
const CHATS: usize = 17;

/// What upstreams have been asked for.
fn asked(world: &World) -> u64 {
    world.llm.calls() + world.mcp.calls("echo")
}

/// An id, as events have it.
fn id(reply: &Reply) -> String {
    reply.header("x-request-id").trim_start_matches("req_").to_owned()
}

/// `OBOL_TEST_ROUNDS=20` for a long run, half a minute each.
#[tokio::test]
async fn what_upstreams_have_seen_is_in_the_ledger_wherever_a_replica_is_killed() {
    let world = World::with(2, WIDE, |builder| builder).await;
    let client = world.connect().await;
    let mut answered = BTreeSet::new();
    for round in 0..rounds(1) {
        let url = world.cluster.public_url(0);
        let complete = |more: &str| {
            let body = format!(r#"{{"model":"small","messages":[{{"role":"user","content":"hi"}}]{more}}}"#);
            let request = http().post(format!("{url}/v1/chat/completions"));
            Reply::try_of(
                request.bearer_auth(&world.key).header("content-type", "application/json").body(body),
            )
        };
        let doomed = client.at(&url);
        let tool = |n: usize| {
            let call = message(&n.to_string(), "tools/call", r#"{"name":"fake__echo","arguments":{}}"#);
            Reply::try_of(doomed.post(call))
        };
        // Some are answered.
        world.llm.reply(Says::Echo);
        world.mcp.release();
        let (plain, stream, tools) = tokio::join!(complete(""), complete(r#","stream":true"#), tool(0));
        let replies = [plain.unwrap(), stream.unwrap(), tools.unwrap()];
        assert!(replies.iter().all(|reply| reply.status == 200), "{replies:?}");
        answered.extend(replies.iter().map(id));
        // The others have come more or less far when it is killed.
        world.llm.reply(Says::Stall);
        world.mcp.stall(Stall::UntilReleased);
        let before = asked(&world);
        let calls = async {
            tokio::join!(
                join_all((1..=TOOLS).map(tool)),
                join_all((0..CHATS).map(|_| complete(""))),
                join_all((0..CHATS).map(|_| complete(r#","stream":true"#))),
            )
        };
        let most = (TOOLS + 2 * CHATS) as u64;
        let enough = before + if round == 0 { most } else { (round as u64 * 11) % most };
        let kill = async {
            eventually(SOON, || async { asked(&world) >= enough }).await;
            world.cluster.kill9(0).await;
        };
        let ((tools, plain, streams), ()) = tokio::join!(calls, kill);
        assert!(tools.iter().chain(&plain).chain(&streams).all(Result::is_err), "round {round}");
        world.llm.release();
        world.mcp.release();
        eventually(SWEPT, || async {
            let open: usize = world.cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
            open == 0
        })
        .await;

        let events = world.usage().await;
        let (orphaned, ended): (Vec<&Value>, Vec<&Value>) =
            events.iter().partition(|event| event["outcome"] == "orphaned");
        let ids = |events: &[&Value]| -> BTreeSet<String> {
            events.iter().map(|event| event["event_id"].as_str().unwrap().replace('-', "")).collect()
        };
        assert_eq!(ids(&ended), answered, "round {round}: those that were answered, as they ended");
        assert_eq!(ids(&orphaned).len(), orphaned.len(), "round {round}: none twice");
        assert!(orphaned.iter().all(|event| event["cost"] == event["reserved"]));
        let (asked, booked) = (asked(&world), events.len() as u64);
        assert!(asked <= booked, "round {round}: {asked} asked for, {booked} booked");
        let unanswered = asked - answered.len() as u64;
        assert_eq!(
            booked - asked,
            orphaned.len() as u64 - unanswered,
            "round {round}: only orphans are above it"
        );
        println!("round {round}: {asked} asked for, {booked} booked, {} of them orphaned", orphaned.len());
        for (counter, spent) in counters(&world.cluster).await {
            assert_eq!(spent, (total(&events), 0), "round {round}: {counter}");
        }
        world.cluster.restart(0).await;
    }
}
