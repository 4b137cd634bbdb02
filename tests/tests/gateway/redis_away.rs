//! Redis is not there, or comes back empty (DESIGN §14).

use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::port::Port;
use obol_testkit::process::{Proc, built_binary};
use obol_tests::SOON;
use obol_tests::world::World;

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
