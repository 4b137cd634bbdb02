//! Routing and policy of a request are of one publication (DESIGN §7.2), however fast publications follow each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use obol_model::snapshot::{Documents, ToolRule};
use obol_testkit::eventually;
use obol_tests::SOON;
use obol_tests::client::Mcp;
use obol_tests::world::World;
use tokio::time::Instant;

use crate::published::Publishing;

/// How long publications are made in a loop.
const LONG: Duration = Duration::from_secs(8);
const CLIENTS_PER_REPLICA: usize = 2;

/// What one client saw.
#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    calls: usize,
    revisions: usize,
}

/// Each revision names itself twice: in the environment of its workspace, which belongs to the routing, and in its
/// policies, which permit nothing under another environment. So a call that is made under the routing of one revision
/// and the policies of another is denied, in either order. Every second revision has beside it another name for the
/// tool, and a policy that forbids it: that name must never work, as it does where the name is new and the policies are
/// old.
fn matched(publishing: &mut Publishing) -> Documents {
    let number = publishing.number() + 1;
    let with_trap = number.is_multiple_of(2);
    publishing.next(|workspace, policy| {
        workspace.expose_revision = true;
        workspace.environment = format!("e{number}");
        let trap = ToolRule { alias: with_trap.then(|| "trap".to_owned()), ..ToolRule::default() };
        let fake = workspace.connections.values_mut().next().unwrap();
        fake.tools.insert("add".to_owned(), trap);
        let permit = format!("permit (principal, action, resource) when {{ context.environment == \"e{number}\" }};");
        let forbid = r#"forbid (principal, action == Action::"mcp:callTool", resource) when { resource.name == "add" };"#;
        policy.files[0].text = if with_trap { format!("{permit}\n{forbid}\n") } else { format!("{permit}\n") };
    })
}

async fn hammer(client: Mcp, over: Arc<AtomicBool>, newest: Arc<AtomicU64>) -> Tally {
    let mut tally = Tally::default();
    let mut last = 0;
    while !over.load(Ordering::SeqCst) {
        for trap in [false, true] {
            let reply = client.call(if trap { "trap" } else { "fake__echo" }, r#"{"text":"x"}"#).await;
            if reply.status == 503 {
                // Nothing was decided: on a machine that is busy enough Redis does not always answer in time.
                continue;
            }
            let revision = reply.header("x-obol-revision");
            let number: u64 = revision
                .strip_prefix("1.")
                .and_then(|n| n.parse().ok())
                .unwrap_or_else(|| panic!("{reply:?}"));
            assert!(last <= number, "{last} was served before {number}");
            // Published before it is known here: what is not published is not served.
            assert!(number <= newest.load(Ordering::SeqCst) + 1, "{number} was not published");
            tally.calls += 1;
            tally.revisions += usize::from(last != number);
            last = number;
            let worked = reply.json()["result"].is_object();
            assert_eq!(worked, !trap, "under {revision}: {}", reply.text());
        }
    }
    tally
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_sees_the_routing_of_one_publication_and_the_policies_of_another() {
    let world = World::start(3).await;
    let mut publishing = Publishing::take_over(&world, world.cluster.redis()).await;
    let replicas: Vec<String> = (0..world.cluster.size()).map(|n| world.cluster.public_url(n)).collect();
    let first = matched(&mut publishing);
    publishing.publish(&first).await;
    let newest = Arc::new(AtomicU64::new(publishing.number()));
    let mut clients = Vec::new();
    for url in &replicas {
        for _ in 0..CLIENTS_PER_REPLICA {
            let client = eventually(SOON, || async {
                let reply = Mcp::new(url, &world.key).rpc("ping", "{}").await;
                (reply.header("x-obol-revision") == format!("1.{}", publishing.number())).then_some(())
            });
            client.await;
            clients.push(Mcp::connect(url, &world.key).await);
        }
    }
    let over = Arc::new(AtomicBool::new(false));
    let hammering: Vec<_> = clients
        .into_iter()
        .map(|client| tokio::spawn(hammer(client, over.clone(), newest.clone())))
        .collect();

    let end = Instant::now() + LONG;
    let begun = publishing.number();
    while Instant::now() < end && !hammering.iter().any(tokio::task::JoinHandle::is_finished) {
        let documents = matched(&mut publishing);
        publishing.publish(&documents).await;
        newest.store(publishing.number(), Ordering::SeqCst);
    }
    over.store(true, Ordering::SeqCst);
    let tallies: Vec<Tally> = join_all(hammering).await.into_iter().map(Result::unwrap).collect();
    let calls: usize = tallies.iter().map(|tally| tally.calls).sum();
    let revisions = publishing.number() - begun;
    println!(
        "{revisions} publications, {calls} calls on {} replicas, none torn: {tallies:?}",
        replicas.len()
    );
    assert!(revisions >= 50, "only {revisions} publications");
    assert!(tallies.iter().all(|tally| tally.calls >= 20 && tally.revisions >= 5), "no race: {tallies:?}");

    // However many messages there were, each replica ends with the last one.
    for url in &replicas {
        let client = Mcp::connect(url, &world.key).await;
        let last = format!("1.{}", publishing.number());
        eventually(SOON, || async { client.rpc("ping", "{}").await.header("x-obol-revision") == last }).await;
    }
}
