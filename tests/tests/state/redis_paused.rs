//! Redis goes silent under load and comes back (DESIGN §14): every request is answered `503` within a second, whatever
//! session it names, and nothing is forgotten.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use obol_testkit::chaos::ChaosProxy;
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::world::World;
use reqwest::Method;
use tokio::time::{Instant, sleep};

const CLIENTS: usize = 6;
/// The promise is a second, on a machine that has the time; a hang would be the client's sixty seconds.
const WITHIN: Duration = Duration::from_millis(2_500);
const NEVER: &str = "mcs_01900000-0000-7000-8000-000000000000";
const INITIALIZE: &str =
    r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#;

/// One request of the load.
#[derive(Debug)]
struct Sample {
    began: Instant,
    took: Duration,
    real: bool,
    status: u16,
}

#[derive(Default)]
struct Load {
    stop: AtomicBool,
    samples: Mutex<Vec<Sample>>,
}

impl Load {
    /// Calls without end, with a session that exists and with one that never did.
    async fn run(&self, client: &Mcp, made_up: &Mcp) {
        while !self.stop.load(Ordering::Relaxed) {
            for (real, client) in [(true, client), (false, made_up)] {
                let began = Instant::now();
                let reply = client.call("fake__echo", "{}").await;
                let sample = Sample { began, took: began.elapsed(), real, status: reply.status };
                if sample.status == 503 {
                    assert!(reply.header("retry-after").parse::<u64>().is_ok(), "{reply:?}");
                    // Clients would start again, and lose theirs.
                    assert!(!reply.text().contains("session_not_found"), "{reply:?}");
                }
                self.samples.lock().unwrap().push(sample);
            }
            // Steady: a load that keeps both cores busy would measure itself.
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn print(&self, what: &str, began: Instant, ended: Instant) {
        let samples = self.samples.lock().unwrap();
        let mut took: Vec<_> =
            samples.iter().filter(|s| s.began >= began && s.began < ended).map(|s| s.took).collect();
        took.sort_unstable();
        let at = |share: usize| took.get((took.len() * share / 100).min(took.len().saturating_sub(1)));
        println!(
            "{what}: {} requests, p50 {:?}, p99 {:?}, longest {:?}",
            took.len(),
            at(50),
            at(99),
            took.last()
        );
    }
}

/// What everything else says while Redis is silent. `spare` is a session that may end.
async fn assert_unavailable(world: &World, client: &Mcp, spare: &Mcp) {
    let stranger = format!("obol_{}", "A".repeat(43));
    let get = async |url: String| Reply::of(http().get(url)).await;
    let timed = async |what: &str, answer: std::pin::Pin<Box<dyn Future<Output = Reply> + '_>>| {
        let began = Instant::now();
        let reply = answer.await;
        println!("  {what}: {} after {:?}", reply.status, began.elapsed());
        assert!(began.elapsed() < WITHIN, "{what} took {:?}", began.elapsed());
        reply
    };
    let nobody = Mcp::new(&world.url(), &world.key);
    let made_up = Mcp::new(&world.url(), &world.key).with_session(Some(NEVER));
    let models = http().get(format!("{}/v1/models", world.url())).bearer_auth(stranger);
    let (opened, listened, listened_made_up, ended, ended_made_up, chat, unknown_key) = tokio::join!(
        timed("initialize", Box::pin(nobody.rpc("initialize", INITIALIZE))),
        timed("GET", Box::pin(Reply::of(client.request(Method::GET)))),
        timed("GET, made up", Box::pin(Reply::of(made_up.request(Method::GET)))),
        timed("DELETE", Box::pin(spare.delete())),
        timed("DELETE, made up", Box::pin(made_up.delete())),
        timed("chat", Box::pin(world.chat(r#"{"model":"small","messages":[]}"#))),
        timed("unknown key", Box::pin(Reply::of(models))),
    );
    for reply in [opened, listened, listened_made_up, ended, ended_made_up, unknown_key, chat] {
        assert_eq!(reply.status, 503, "{reply:?}");
    }
    for replica in 0..world.cluster.size() {
        let admin = world.cluster.admin_url(replica);
        assert_eq!(get(format!("{admin}/healthz")).await.status, 200);
        let ready = get(format!("{admin}/readyz")).await;
        assert_eq!((ready.status, ready.json()["reason"].clone()), (503, "redis".into()));
    }
}

/// Under load: silence, then its end.
async fn silence(world: &World, begin: impl AsyncFn(), end: impl AsyncFn()) {
    let clients = join_all((0..CLIENTS).map(|_| world.connect())).await;
    let spare = world.connect().await;
    let made_up = Mcp::new(&world.url(), &world.key).with_session(Some(NEVER));
    for client in &clients {
        eventually(SOON, || async { client.call("fake__echo", "{}").await.status == 200 }).await;
    }
    let load = Load::default();
    let story = async {
        let started = Instant::now();
        eventually(SOON, || async { load.samples.lock().unwrap().len() > 10 * CLIENTS }).await;
        begin().await;
        let silent = Instant::now();
        assert_unavailable(world, &clients[0], &spare).await;
        // Every client has met it with both of its sessions.
        eventually(SOON, || async {
            let samples = load.samples.lock().unwrap();
            let met = |real| samples.iter().filter(|s| s.began >= silent && s.real == real).count();
            met(true) >= 2 * CLIENTS && met(false) >= 2 * CLIENTS
        })
        .await;
        let ended = Instant::now();
        end().await;
        let success = |s: &Sample| s.began + s.took > ended && s.status == 200;
        eventually(SOON, || async { load.samples.lock().unwrap().iter().any(success) }).await;
        let first = {
            let samples = load.samples.lock().unwrap();
            samples.iter().filter(|s| success(s)).map(|s| s.began + s.took - ended).min()
        };
        world.cluster.wait_ready().await;
        eventually(SOON, || async {
            let samples = load.samples.lock().unwrap();
            let after: Vec<_> = samples.iter().filter(|s| s.began > ended).collect();
            let settled = after.iter().rev().take(4 * CLIENTS);
            after.len() > 4 * CLIENTS
                && settled.into_iter().all(|s| s.status == if s.real { 200 } else { 404 })
        })
        .await;
        load.stop.store(true, Ordering::Relaxed);
        (started, silent, ended, first)
    };
    let (_, (started, silent, ended, first)) =
        tokio::join!(join_all(clients.iter().map(|client| load.run(client, &made_up))), story);

    load.print("before", started, silent);
    load.print("silent", silent, ended);
    load.print("after", ended, Instant::now());
    println!("first success {first:?} after Redis was back");
    assert!(first.is_some_and(|first| first < Duration::from_secs(3)), "{first:?}");
    for sample in load.samples.lock().unwrap().iter() {
        assert!(sample.took < WITHIN, "{sample:?}");
        assert!(!(sample.real && sample.status == 404), "a session was forgotten: {sample:?}");
        if sample.began >= silent && sample.began + sample.took <= ended {
            assert_eq!(sample.status, 503, "{sample:?}");
        }
    }
    for client in &clients {
        client.call("fake__echo", "{}").await.result();
    }
}

#[tokio::test]
async fn a_stopped_redis_is_503_within_a_second_and_everything_lives_on_when_it_runs_again() {
    let world = World::start(3).await;
    let redis = world.cluster.redis();
    silence(&world, async || redis.pause(), async || redis.resume()).await;
    // Every call that was executed has its event, and nothing else has one that says so. What a silent Redis took after
    // all may stand there twice: consumers know it by the event's id.
    eventually(SOON, || async {
        let mut events = world.usage().await;
        events.retain(|event| event["kind"] == "tool_call" && event["outcome"] == "ok");
        let distinct: HashSet<String> = events.iter().map(|event| event["event_id"].to_string()).collect();
        let executed = usize::try_from(world.mcp.counts().all_calls()).unwrap();
        if distinct.len() == executed { Ok(()) } else { Err(format!("{} of {executed}", distinct.len())) }
    })
    .await;
}

#[tokio::test]
async fn a_redis_whose_packets_are_dropped_is_503_within_a_second_and_everything_lives_on_when_they_are_not()
{
    let redis = RedisServer::start().await;
    let proxy = ChaosProxy::start(redis.addr()).await;
    let url = format!("redis://{}", proxy.addr());
    let world = World::with(3, "", |builder| builder.redis_url(&redis.url()).gateway_redis_url(&url)).await;
    silence(&world, async || proxy.stall(), async || proxy.restore().await).await;
}
