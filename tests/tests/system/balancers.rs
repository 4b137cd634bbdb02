//! Two replicas behind HAProxy and behind nginx, each with the configuration that is shipped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use obol_testkit::fake_llm::{Raw, Reply as Says};
use obol_testkit::fake_mcp::Stall;
use obol_tests::SOON;
use obol_tests::client::{Events, Mcp, Reply, http};
use obol_tests::front::{Front, Replica};
use obol_tests::world::{World, chat};

/// What is recommended: longer than either balancer needs to notice.
const DELAY_S: u64 = 10;
const WORDS: [&str; 3] = ["one", "two", "three"];
const PLAIN: &str = r#"{"model":"small","messages":[{"role":"user","content":"hi"}]}"#;

#[tokio::test]
async fn no_request_fails_when_a_replica_behind_haproxy_is_replaced() {
    let world = world().await;
    let front = Front::haproxy(replicas(&world)).await;
    streams_pass_and_nobody_notices_a_drain(&world, &front).await;
}

#[tokio::test]
async fn no_request_fails_when_a_replica_behind_nginx_is_replaced() {
    let world = world().await;
    let front = Front::nginx(replicas(&world)).await;
    streams_pass_and_nobody_notices_a_drain(&world, &front).await;
}

async fn world() -> World {
    World::with(2, "", |builder| builder.gateway_env("OBOL_DRAIN_DELAY_S", &DELAY_S.to_string())).await
}

fn replicas(world: &World) -> [Replica; 2] {
    [0, 1].map(|index| {
        let replica = world.cluster.replica(index);
        (replica.public, replica.admin)
    })
}

async fn streams_pass_and_nobody_notices_a_drain(world: &World, front: &Front) {
    let url = front.url();
    let client = Mcp::connect(&url, &world.key).await;
    for _ in 0..8 {
        client.call("fake__echo", r#"{"text":"hi"}"#).await.result();
    }
    for index in [0, 1] {
        let answered = answered_calls(world, index).await;
        assert!(answered > 0, "replica {index} got none of the session's calls");
    }

    // The server goes on when it is told to, so an event that is here was held back by nobody.
    let mut first = stream(world, &url).await;
    for word in &WORDS[1..] {
        world.llm.release();
        assert!(first.next(SOON).await.expect("the stream goes on").contains(word));
    }
    world.llm.release();
    ended(first).await;

    // One on each replica: both balancers give the next to whoever has fewer.
    let (left, right) = (stream(world, &url).await, stream(world, &url).await);
    let busy = Busy::start(world, &url);
    busy.has_done_more(20).await;
    world.cluster.terminate(0);
    busy.has_done_more(20).await;
    // The listener is closed by then, and the stream still goes on.
    tokio::time::sleep(Duration::from_secs(DELAY_S + 1)).await;
    assert_eq!(world.cluster.replica(0).process.exit_status(), None, "it has a stream to finish");
    busy.has_done_more(20).await;
    for mut events in [left, right] {
        for word in &WORDS[1..] {
            world.llm.release();
            assert!(events.next(SOON).await.expect("the stream goes on").contains(word));
        }
        world.llm.release();
        ended(events).await;
    }
    assert_eq!(world.cluster.replica(0).process.wait(SOON).await.code(), Some(0));
    busy.has_done_more(20).await;
    busy.end().await;
    client.call("fake__echo", "{}").await.result();
}

/// How many calls of MCP a replica has answered.
async fn answered_calls(world: &World, index: usize) -> u64 {
    let metrics = Reply::of(http().get(format!("{}/metrics", world.cluster.admin_url(index)))).await;
    let lines = metrics.text().lines().filter(|line| {
        line.starts_with("obol_http_requests_total")
            && line.contains(r#"surface="mcp""#)
            && line.contains("2xx")
    });
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// A streamed completion, of which the first word is here.
async fn stream(world: &World, url: &str) -> Events {
    let event = |word: &str| {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{word}\"}},\"finish_reason\":null}}]}}\n\n"
        )
    };
    let raw = Raw::events([event(WORDS[0])]).wait_for_release();
    let raw = WORDS[1..].iter().fold(raw, |raw, word| raw.then(event(word)).wait_for_release());
    world.llm.reply_once(Says::Raw(raw.then(
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
    )));
    let body = r#"{"model":"small","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
    let request = http().post(format!("{url}/v1/chat/completions")).bearer_auth(&world.key);
    let response =
        request.header("content-type", "application/json").body(body).send().await.expect("an answer");
    assert_eq!(response.status(), 200);
    let mut events = Events::of(response);
    assert!(events.next(SOON).await.expect("the first event").contains(WORDS[0]));
    events
}

async fn ended(mut events: Events) {
    let mut last = String::new();
    while let Some(event) = events.next(SOON).await {
        last = event;
    }
    assert_eq!(last, "data: [DONE]");
}

/// Clients that never pause: tool calls and completions, on connections that live and on new ones.
struct Busy {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl Busy {
    fn start(world: &World, url: &str) -> Self {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let clients = (0..4).map(|index| {
            let (url, key, stop, done) = (url.to_owned(), world.key.clone(), stop.clone(), done.clone());
            tokio::spawn(async move {
                let client = Mcp::connect(&url, &key).await;
                while !stop.load(Ordering::SeqCst) {
                    if index % 2 == 0 {
                        client.call("fake__echo", "{}").await.result();
                    } else {
                        // Each with a connection of its own.
                        let reply = chat(&url, &key, PLAIN).await;
                        assert_eq!(reply.status, 200, "{reply:?}");
                        client.at(&url).call("fake__echo", "{}").await.result();
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                }
            })
        });
        let clients = clients.collect();
        Self { stop, done, clients }
    }

    async fn has_done_more(&self, calls: usize) {
        let before = self.done.load(Ordering::SeqCst);
        obol_testkit::eventually(SOON * 3, || async {
            self.clients.iter().any(tokio::task::JoinHandle::is_finished)
                || self.done.load(Ordering::SeqCst) >= before + calls
        })
        .await;
    }

    async fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        for client in join_all(self.clients).await {
            client.expect("no request fails");
        }
    }
}

#[tokio::test]
async fn haproxy_sends_no_call_twice_when_its_replica_dies() {
    let world = World::start(2).await;
    let front = Front::haproxy(replicas(&world)).await;
    a_call_whose_replica_dies_fails_and_is_made_once(&world, &front).await;
}

#[tokio::test]
async fn nginx_sends_no_call_twice_when_its_replica_dies() {
    let world = World::start(2).await;
    let front = Front::nginx(replicas(&world)).await;
    a_call_whose_replica_dies_fails_and_is_made_once(&world, &front).await;
}

async fn a_call_whose_replica_dies_fails_and_is_made_once(world: &World, front: &Front) {
    let client = Mcp::connect(&front.url(), &world.key).await;
    world.mcp.stall(Stall::UntilReleased);
    let kill = async {
        // One on each replica.
        world.mcp.wait_until(|counts| counts.calls("echo") == 2).await;
        world.cluster.kill9(0).await;
        // Connections to it are refused now, which is tried elsewhere.
        for _ in 0..4 {
            client.rpc("ping", "{}").await.result();
        }
        world.mcp.release();
    };
    let call = || async { client.call("fake__echo", "{}").await.status };
    let (one, other, ()) = tokio::join!(call(), call(), kill);
    let mut statuses = [one, other];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 502], "the one that was cut is answered by the balancer");
    assert_eq!(world.mcp.counts().calls("echo"), 2);
}
