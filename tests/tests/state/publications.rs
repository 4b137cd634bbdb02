//! Publications as operators and clients see them: which revision is where, what was refused, where one comes from when
//! Redis has lost it, and what becomes of those that were replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use obol_model::WorkspaceId;
use obol_testkit::eventually;
use obol_testkit::process::Proc;
use obol_testkit::redis::RedisServer;
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::world::{World, workspace};
use serde_json::Value;

use crate::published::{Publishing, documents, plant};

const OPERATOR: &str = "an-operator-credential-that-nobody-guesses";

fn acme() -> WorkspaceId {
    "acme".parse().unwrap()
}

async fn admin(url: &str, credential: Option<&str>) -> Reply {
    let request = http().get(format!("{url}/admin/publications"));
    Reply::of(match credential {
        Some(credential) => request.bearer_auth(credential),
        None => request,
    })
    .await
}

/// What one replica says of `acme`.
async fn status(world: &World, replica: usize) -> Value {
    let reply = admin(&world.cluster.admin_url(replica), Some(OPERATOR)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let [acme]: [Value; 1] = reply.json()["publications"].as_array().unwrap().clone().try_into().unwrap();
    assert_eq!(acme["workspace_id"], "acme");
    acme
}

async fn observed(replicas: usize) -> World {
    World::with(replicas, "", |builder| builder.gateway_env("OBOL_ADMIN_TOKEN", OPERATOR)).await
}

#[tokio::test]
async fn operators_see_what_each_replica_serves_and_refuses() {
    let world = observed(2).await;
    let mut publishing = Publishing::take_over(&world, world.cluster.redis()).await;
    let next = publishing.next(|_, _| ());
    publishing.publish(&next).await;
    let revision = format!("1.{}", publishing.number());
    for replica in 0..2 {
        eventually(SOON, || async { status(&world, replica).await["revision"] == revision }).await;
        let acme = status(&world, replica).await;
        assert!(acme["rejected"].is_null(), "{acme}");
        assert!(acme["validated_age_ms"].as_u64().unwrap() < 30_000, "{acme}");
        assert!(acme["loaded_at"].as_str().unwrap().starts_with("20"), "{acme}");
    }

    // What is older is refused and told, and so is what was torn; what was served stays.
    let torn = publishing.next(|_, _| ());
    let torn = obol_model::snapshot::Documents { policy: next.policy.clone(), ..torn };
    for (planted, rejected, reason) in [
        (documents(&acme(), 1, "old"), "1.1", "is older than"),
        (torn, &*format!("1.{}", publishing.number()), "is not the one that the fingerprint names"),
    ] {
        plant(world.cluster.redis(), &acme(), &planted).await;
        world.cluster.redis().cli(&["PUBLISH", "obol:invalidate", r#"{"type":"all"}"#]).await;
        for replica in 0..2 {
            eventually(SOON, || async {
                let acme = status(&world, replica).await;
                let shown = &acme["rejected"];
                let told =
                    shown["revision"] == rejected && shown["reason"].as_str().unwrap_or("").contains(reason);
                if told && acme["revision"] == revision { Ok(()) } else { Err(acme.to_string()) }
            })
            .await;
        }
    }
    world.cluster.replica(0).process.wait_for_line(SOON, |line| line.contains("went back in time")).await;
    let metrics = metrics(&world, 0).await;
    assert!(metrics.contains("obol_snapshot_regressions_total"), "{}", metrics);
    let served = format!("obol_snapshot_revision{{workspace=\"acme\"}} {}", publishing.number() - 1);
    assert!(metrics.contains(&served), "{}", metrics);
    let good = publishing.next(|_, _| ());
    plant(world.cluster.redis(), &acme(), &good).await;
    world.cluster.redis().cli(&["PUBLISH", "obol:invalidate", r#"{"type":"all"}"#]).await;
    eventually(SOON, || async { status(&world, 0).await["rejected"].is_null() }).await;
}

#[tokio::test]
async fn only_operators_look_and_only_where_the_operator_wants_it() {
    let world = observed(1).await;
    let url = world.cluster.admin_url(0);
    let missing = admin(&url, None).await;
    assert_eq!((missing.status, missing.header("www-authenticate")), (401, "Bearer realm=\"obol-admin\""));
    for wrong in
        [world.key.as_str(), &OPERATOR[1..], &format!("{OPERATOR}x"), world.cluster.service_jwt_secret(), "x"]
    {
        let reply = admin(&url, Some(wrong)).await;
        assert_eq!(reply.status, 401, "{reply:?}");
        assert!(reply.header("www-authenticate").contains("invalid_token"), "{reply:?}");
    }
    let nowhere = Reply::of(http().get(format!("{url}/admin/nowhere"))).await;
    assert_eq!(nowhere.status, 401, "what there is is told to operators alone: {nowhere:?}");
    let nowhere = Reply::of(http().get(format!("{url}/admin/nowhere")).bearer_auth(OPERATOR)).await;
    assert_eq!(nowhere.status, 404, "{nowhere:?}");
    assert_eq!(admin(&world.url(), Some(OPERATOR)).await.status, 404, "not on the clients' port");
    assert!(!world.cluster.logs().contains(OPERATOR));

    let off = World::start(1).await;
    for credential in [None, Some(OPERATOR)] {
        let reply = admin(&off.cluster.admin_url(0), credential).await;
        assert_eq!((reply.status, &reply.json()["code"]), (404, &"admin_off".into()), "{reply:?}");
    }
}

#[tokio::test]
async fn answers_name_their_revision_where_the_workspace_wants_it() {
    let world = World::start(1).await;
    let client = world.connect().await;
    let reply = client.call("fake__echo", "{}").await;
    assert!(!reply.headers.contains_key("x-obol-revision"), "{reply:?}");
    let yaml = format!("expose_revision: true\n{}", workspace("acme", &world.mcp, &world.llm, ""));
    world.cluster.write_workspace("acme", &yaml);
    eventually(SOON, || async { client.rpc("ping", "{}").await.header("x-obol-revision") == "1.2" }).await;
    let denied = client.call("fake__no_such_tool", "{}").await;
    let chat = world.chat(r#"{"model":"small","messages":[]}"#).await;
    let refused = world.chat(r#"{"model":"none","messages":[]}"#).await;
    for reply in [client.call("fake__echo", "{}").await, denied, chat, refused] {
        assert_eq!(reply.header("x-obol-revision"), "1.2", "{reply:?}");
    }
    eventually(SOON, || async {
        let events = world.usage().await;
        let named = |number: u64| events.iter().any(|event| event["revision"]["number"] == number);
        if named(1) && named(2) { Ok(()) } else { Err(format!("{events:?}")) }
    })
    .await;
}

/// A replica that starts while nothing is fit to be served says so, and takes what is good at once.
#[tokio::test]
async fn a_fresh_replica_is_not_ready_on_an_invalid_publication_and_takes_the_next_good_one() {
    let world = World::start(1).await;
    let mut publishing = Publishing::take_over(&world, world.cluster.redis()).await;
    let (torn, good) = (publishing.next(|_, _| ()), publishing.next(|_, _| ()));
    let torn = obol_model::snapshot::Documents { policy: good.policy.clone(), ..torn };
    plant(world.cluster.redis(), &acme(), &torn).await;
    let fresh: Proc = world
        .cluster
        .obol(["run"])
        .env("OBOL_LISTEN", "127.0.0.1:0")
        .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0")
        .spawn();
    let line = fresh.wait_for_line(SOON, |line| line.starts_with("listening admin ")).await;
    let ready = format!("{}/readyz", line.trim_start_matches("listening admin ").trim());
    let reply = Reply::of(http().get(&ready)).await;
    assert_eq!((reply.status, &reply.json()["reason"]), (503, &"no_snapshot".into()), "{reply:?}");
    publishing.publish(&good).await;
    eventually(SOON, || async { Reply::of(http().get(&ready)).await.status == 200 }).await;
}

/// The resident memory of a process, in bytes.
fn resident(process: &Proc) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Publications that were replaced go with the last request that uses them. Each of these weighs 40 kB and more in
/// memory, and most of them are taken before the next one comes: if they stayed, they would be 30 MB and more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_publications_under_load_leave_memory_flat() {
    const BULK: usize = 40_000;
    const ROUNDS: usize = 100;
    const WARM_UP: usize = 10;
    const MOST: u64 = 10 << 20;

    let world = World::start(1).await;
    let mut publishing = Publishing::take_over(&world, world.cluster.redis()).await;
    let url = world.url();
    let watcher = Mcp::connect(&url, &world.key).await;
    // One that stays open over all of it.
    let _stream = watcher.listen().await;
    let over = Arc::new(AtomicBool::new(false));
    let load = {
        let (client, over) = (Mcp::connect(&url, &world.key).await, over.clone());
        tokio::spawn(async move {
            let mut calls = 0;
            while !over.load(Ordering::SeqCst) {
                let reply = client.call("fake__echo", "{}").await;
                // On a machine that is busy enough Redis does not always answer in time.
                assert!(reply.status == 200 || reply.status == 503, "{reply:?}");
                calls += usize::from(reply.status == 200);
            }
            calls
        })
    };
    let process = world.cluster.replica(0);
    let mut before = 0;
    for round in 0..WARM_UP + ROUNDS {
        if round == WARM_UP {
            before = resident(&process.process);
        }
        for _ in 0..10 {
            let documents = publishing.next(|workspace, _| {
                workspace.expose_revision = true;
                let target = &mut workspace.models.values_mut().next().unwrap().targets[0];
                target.model = "x".repeat(BULK);
            });
            publishing.publish(&documents).await;
        }
        let last = format!("1.{}", publishing.number());
        eventually(SOON, || async { watcher.rpc("ping", "{}").await.header("x-obol-revision") == last })
            .await;
    }
    let after = resident(&process.process);
    over.store(true, Ordering::SeqCst);
    let calls: usize = load.await.unwrap();
    let text = metrics(&world, 0).await;
    let installed = text.lines().find(|line| line.contains(r#"reads_total{outcome="installed"}"#));
    println!("{installed:?} under {calls} calls: {} KiB before, {} KiB after", before >> 10, after >> 10);
    assert!(after < before + MOST, "{} KiB grew to {} KiB", before >> 10, after >> 10);
    assert!(calls > 100, "no load: {calls} calls");
}

async fn metrics(world: &World, replica: usize) -> String {
    let url = format!("{}/metrics", world.cluster.admin_url(replica));
    Reply::of(http().get(url)).await.text().to_owned()
}

/// Where control serves what Redis has lost: all three keys are gone, and control looks at Redis only every ten seconds.
#[tokio::test]
async fn what_redis_has_lost_comes_from_control() {
    let listen = obol_testkit::port::Port::reserve();
    let addr = listen.addr().to_string();
    let world = World::with(2, "", |builder| {
        builder
            .control_env("OBOL_CONTROL_LISTEN", &addr)
            .gateway_env("OBOL_CONTROL_URL", &format!("http://{addr}"))
            .gateway_env("OBOL_ADMIN_TOKEN", OPERATOR)
    })
    .await;
    let server: &RedisServer = world.cluster.redis();
    let client = world.connect().await;
    client.call("fake__echo", "{}").await.result();
    let before = status(&world, 0).await["revision"].clone();
    for _ in 0..3 {
        let keys = server.keys("*{acme}").await;
        for key in keys.iter().filter(|key| key.starts_with("snap:") || key.starts_with("policy:")) {
            server.cli(&["DEL", key]).await;
        }
        server.cli(&["PUBLISH", "obol:invalidate", r#"{"type":"workspace","workspace_id":"acme"}"#]).await;
        eventually(SOON, || async {
            server.query::<usize>(&["EXISTS", "snap:fingerprint:{acme}"]).await == 1
        })
        .await;
        client.call("fake__echo", "{}").await.result();
        assert_eq!(status(&world, 0).await["revision"], before);
    }
    let metrics = [metrics(&world, 0).await, metrics(&world, 1).await];
    let created = |text: &String| text.contains(r#"obol_snapshot_fallbacks_total{outcome="created"}"#);
    assert!(metrics.iter().any(created), "control put them back, not a replica: {metrics:?}");
}
