//! Changes that control publishes reach the replicas.

use std::time::Duration;

use obol_auth::ServiceTokens;
use obol_model::{Clock as _, Secret, SystemClock};
use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::process::Stream;
use obol_tests::client::{Reply, http};
use obol_tests::world::{World, workspace};
use obol_tests::{ALLOW_ALL, SOON};
use tokio::time::Instant;

/// A change takes effect within a second; the other one is for debug builds on two busy cores.
const TAKES_EFFECT: Duration = Duration::from_secs(2);

/// The ids of the keys, as `obol key list` shows them.
async fn key_ids(cluster: &Cluster) -> Vec<String> {
    let list = cluster.obol(["key", "list", "--state"]).arg(cluster.state_dir()).spawn();
    assert!(list.wait(SOON).await.success(), "{:?}", list.lines());
    let rows = list.lines_of(Stream::Out);
    rows.iter().skip(1).filter_map(|row| row.split_whitespace().next()).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_policy_and_a_workspace_edit_take_effect_within_a_second() {
    let world = World::start(2).await;
    let client = world.connect().await;
    client.call("fake__echo", "{}").await.result();
    let forbid =
        r#"forbid (principal, action == Action::"mcp:callTool", resource) when { resource.name == "echo" };"#;

    let start = Instant::now();
    world.cluster.write_policy("acme.cedar", &format!("{ALLOW_ALL}{forbid}\n"));
    let allowed = async || client.call("fake__echo", "{}").await.json()["result"].is_object();
    // On both replicas: two requests in a row.
    eventually(SOON, || async { !allowed().await && !allowed().await }).await;
    assert!(start.elapsed() < TAKES_EFFECT, "the policy took {:?}", start.elapsed());
    assert!(!client.tools().await.contains(&"fake__echo".to_owned()));

    // An invalid edit changes nothing, and is told.
    world.cluster.write_policy("acme.cedar", "permit (principal, action, nonsense);\n");
    world.cluster.control().wait_for_line(SOON, |line| line.contains("acme.cedar")).await;
    assert!(!allowed().await);

    let start = Instant::now();
    world.cluster.write_policy("acme.cedar", ALLOW_ALL);
    eventually(SOON, || async { allowed().await && allowed().await }).await;
    assert!(start.elapsed() < TAKES_EFFECT, "the policy took {:?}", start.elapsed());

    let start = Instant::now();
    let hidden = "    tools: { echo: { hidden: true } }\n";
    world.cluster.write_workspace("acme", &workspace("acme", &world.mcp, &world.llm, hidden));
    eventually(SOON, || async { !allowed().await && !allowed().await }).await;
    assert!(start.elapsed() < TAKES_EFFECT, "the workspace took {:?}", start.elapsed());

    let frozen = format!("frozen: true\n{}", workspace("acme", &world.mcp, &world.llm, ""));
    world.cluster.write_workspace("acme", &frozen);
    eventually(SOON, || async { client.rpc("ping", "{}").await.status == 403 }).await;
}

#[tokio::test]
async fn a_revoked_key_is_refused_within_a_second() {
    let world = World::start(2).await;
    let client = world.connect().await;
    client.call("fake__echo", "{}").await.result();
    let mut stream = client.listen().await;
    let [id] = key_ids(&world.cluster).await.try_into().unwrap();
    let revoke = world.cluster.obol(["key", "revoke", &id, "--state"]).arg(world.cluster.state_dir()).spawn();
    assert!(revoke.wait(SOON).await.success(), "{:?}", revoke.lines());
    let start = Instant::now();
    let status = async || client.rpc("ping", "{}").await.status;
    eventually(SOON, || async { status().await == 401 && status().await == 401 }).await;
    assert!(start.elapsed() < TAKES_EFFECT, "it took {:?}", start.elapsed());
    // The open stream too, without waiting for its next keep-alive.
    while stream.next(SOON).await.is_some() {}
    assert_eq!(world.chat(r#"{"model":"small","messages":[]}"#).await.status, 401);
}

#[tokio::test]
async fn control_forces_a_reload_with_a_token_that_is_good_once() {
    let world = World::start(1).await;
    let url = format!("{}/internal/reload", world.cluster.admin_url(0));
    let secret = Secret::new(world.cluster.service_jwt_secret().to_owned());
    let sign = |issuer: &str, audience: &str, secret: &Secret<String>| {
        let tokens = ServiceTokens::from_secret(issuer, secret).unwrap();
        tokens.sign(audience, "control", SystemClock.now()).unwrap().expose().clone()
    };
    let good = || sign("obol-control", "obol-gateway", &secret);
    let reload = async |token: &str, body: &str| {
        Reply::of(http().post(&url).bearer_auth(token).body(body.to_owned())).await
    };

    let once = good();
    let reply = reload(&once, r#"{"all":true}"#).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let reloaded = reply.json();
    assert_eq!(reloaded["reloaded"][0]["workspace_id"], "acme");
    assert!(reloaded["reloaded"][0]["revision"].is_string(), "{reloaded}");
    let one = reload(&good(), r#"{"workspace_id":"acme"}"#).await;
    assert_eq!(one.json()["reloaded"][0]["revision"], reloaded["reloaded"][0]["revision"]);
    let gone = reload(&good(), r#"{"workspace_id":"nowhere"}"#).await;
    assert_eq!((gone.status, gone.json()["reloaded"][0]["revision"].is_null()), (200, true), "{gone:?}");

    let wrong_secret = Secret::new("another-secret-of-enough-bytes-to-be-one".to_owned());
    for (what, token) in [
        ("replayed", once),
        ("garbage", "a.b.c".to_owned()),
        ("a virtual key", world.key.clone()),
        ("another issuer", sign("obol-gateway", "obol-gateway", &secret)),
        ("another audience", sign("obol-control", "obol-control", &secret)),
        ("another secret", sign("obol-control", "obol-gateway", &wrong_secret)),
    ] {
        let reply = reload(&token, r#"{"all":true}"#).await;
        assert_eq!(reply.status, 401, "{what}: {reply:?}");
        assert!(reply.header("www-authenticate").contains("invalid_token"), "{what}: {reply:?}");
    }
    assert_eq!(Reply::of(http().post(&url).body(r#"{"all":true}"#)).await.status, 401);
    for bad in
        ["", "{}", r#"{"all":false}"#, r#"{"all":true,"workspace_id":"acme"}"#, r#"{"workspace":"acme"}"#]
    {
        assert_eq!(reload(&good(), bad).await.status, 400, "{bad}");
    }
    // Not on the port that clients see.
    let public = http().post(format!("{}/internal/reload", world.url())).bearer_auth(good());
    assert_eq!(Reply::of(public.body(r#"{"all":true}"#)).await.status, 404);
}
