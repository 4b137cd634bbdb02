//! Redis refuses or is silent (DESIGN §14).

use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::port::Port;
use obol_testkit::process::{Proc, built_binary};
use obol_tests::SOON;
use obol_tests::client::{Reply, http};
use obol_tests::world::World;
use tokio::time::Instant;

#[tokio::test]
async fn a_start_without_redis_fails_and_says_why() {
    let nobody = Port::reserve();
    for command in ["run", "control"] {
        let dir = tempfile::tempdir().unwrap();
        let process = Proc::command(built_binary("obol").unwrap())
            .arg(command)
            .env("OBOL_REDIS_URL", format!("redis://user:hunter2secret@{}", nobody.addr()))
            .env("OBOL_CREDENTIAL_KEY", "k:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")
            .env("OBOL_LISTEN", "127.0.0.1:0")
            .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0")
            .env("OBOL_WORKSPACES_DIR", dir.path())
            .env("OBOL_STATE_DIR", dir.path().join("state"))
            .spawn();
        let status = process.wait(SOON).await;
        let wrote = process.lines().join("\n");
        assert_eq!(status.code(), Some(1), "{command}: {wrote}");
        let last = process.lines().pop().unwrap().to_lowercase();
        assert!(last.contains("redis"), "{command}: {wrote}");
        assert!(!wrote.contains("hunter2secret"), "{command}: {wrote}");
    }
}

#[tokio::test]
async fn a_bad_environment_is_refused_with_all_its_faults() {
    let process = Proc::command(built_binary("obol").unwrap())
        .arg("run")
        .env("OBOL_REDIS_URL", "http://localhost")
        .env("OBOL_SESSION_TTL_S", "soon")
        .env("OBOL_SESION_TTL_S", "5")
        .env("OBOL_MAX_BODY_BYTES", "1")
        .spawn();
    assert_eq!(process.wait(SOON).await.code(), Some(2));
    let wrote = process.lines().join("\n");
    for name in [
        "OBOL_REDIS_URL",
        "OBOL_SESSION_TTL_S",
        "OBOL_MAX_BODY_BYTES",
        "OBOL_CREDENTIAL_KEY",
        "OBOL_SESION_TTL_S",
    ] {
        assert!(wrote.contains(name), "{name}: {wrote}");
    }
}

#[tokio::test]
async fn a_silent_redis_is_503_within_a_second_and_its_return_is_enough() {
    let world = World::start(1).await;
    let client = world.connect().await;
    client.call("fake__echo", "{}").await.result();
    let admin = world.cluster.admin_url(0);
    let get = async |path: &str| Reply::of(http().get(format!("{admin}{path}"))).await;

    world.cluster.redis().pause();
    for _ in 0..2 {
        let start = Instant::now();
        let reply = client.call("fake__echo", "{}").await;
        let after = start.elapsed();
        assert_eq!(reply.status, 503, "{reply:?}");
        assert!(reply.header("retry-after").parse::<u64>().is_ok(), "{reply:?}");
        assert!(after < Duration::from_millis(2_500), "it took {after:?}");
        // Never "no such session": clients would start again and lose theirs.
        assert!(!reply.text().contains("session_not_found"), "{reply:?}");
    }
    let start = Instant::now();
    let opened = client
        .at(&world.url())
        .with_session(None)
        .rpc(
            "initialize",
            r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#,
        )
        .await;
    assert_eq!(opened.status, 503, "{opened:?}");
    let listening = Reply::of(client.request(reqwest::Method::GET)).await;
    assert_eq!(listening.status, 503, "{listening:?}");
    let ended = client.delete().await;
    assert_eq!(ended.status, 503, "{ended:?}");
    assert!(start.elapsed() < Duration::from_millis(6_000), "it took {:?}", start.elapsed());
    // What this surface needs to know is warm: it may answer from memory, but it neither hangs nor errs.
    let start = Instant::now();
    let chat = world.chat(r#"{"model":"small","messages":[]}"#).await;
    assert!([200, 503].contains(&chat.status), "{chat:?}");
    assert!(start.elapsed() < Duration::from_millis(2_500), "it took {:?}", start.elapsed());
    let stranger =
        http().get(format!("{}/v1/models", world.url())).bearer_auth(format!("obol_{}", "A".repeat(43)));
    assert_eq!(Reply::of(stranger).await.status, 503, "could not ask is not `no such key`");
    assert_eq!(get("/healthz").await.status, 200);
    let ready = get("/readyz").await;
    assert_eq!((ready.status, ready.json()["reason"].clone()), (503, "redis".into()));
    assert_eq!(world.mcp.counts().all_calls(), 1);

    world.cluster.redis().resume();
    let start = Instant::now();
    eventually(SOON, || async { client.call("fake__echo", "{}").await.status == 200 }).await;
    eventually(SOON, || async { get("/readyz").await.status == 200 }).await;
    assert!(start.elapsed() < Duration::from_secs(3), "back after {:?}", start.elapsed());
    assert!(world.cluster.replica(0).process.exit_status().is_none());
    eventually(SOON, || async { world.usage().await.len() >= 2 }).await;
}

#[tokio::test]
async fn an_emptied_redis_is_filled_again_and_only_sessions_are_gone() {
    let world = World::start(2).await;
    let client = world.connect().await;
    client.call("fake__echo", "{}").await.result();
    world.cluster.redis().restart().await;
    // Could not ask, then gone; never a fault of the client's.
    eventually(SOON, || async {
        let reply = client.call("fake__echo", "{}").await;
        assert!([404, 503].contains(&reply.status), "{reply:?}");
        reply.status == 404
    })
    .await;
    // Control looks every ten seconds.
    let again = eventually(Duration::from_secs(25), || async {
        let params =
            r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#;
        let reply = client.at(&world.url()).with_session(None).rpc("initialize", params).await;
        if reply.status == 200 { Ok(reply) } else { Err(format!("{} {}", reply.status, reply.text())) }
    })
    .await;
    let again = client.at(&world.url()).with_session(Some(again.header("mcp-session-id")));
    eventually(SOON, || async { again.call("fake__echo", "{}").await.status == 200 }).await;
    eventually(Duration::from_secs(25), || async {
        world.cluster.redis().query::<bool>(&["EXISTS", "keys:loaded"]).await
    })
    .await;
    world.cluster.wait_ready().await;
}
