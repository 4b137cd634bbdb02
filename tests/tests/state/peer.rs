//! Replicas as processes and the channel between them.

use std::time::{Duration, Instant};

use obol_auth::{ServiceTokens, party};
use obol_model::{Clock as _, Secret, SystemClock};
use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::fake_mcp::Stall;
use obol_testkit::process::{built_binary, is_running};
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::world::World;
use serde_json::json;

const PATH: &str = "/peer/v1/messages";
/// Far below the 15 s after which a stream would look for itself, with room for a debug build on busy cores.
const AT_ONCE: Duration = Duration::from_secs(6);

fn token(cluster: &Cluster, issuer: &str, audience: &str, subject: &str) -> String {
    let secret = Secret::new(cluster.service_jwt_secret().to_owned());
    let tokens = ServiceTokens::from_secret(issuer, &secret).unwrap();
    tokens.sign(audience, subject, SystemClock.now()).unwrap().expose().clone()
}

/// The id of a replica, as its first log line has it.
fn id(cluster: &Cluster, index: usize) -> String {
    let lines = cluster.replica(index).process.lines();
    let line = lines.iter().find(|line| line.contains("replica starts")).expect("the log line of the start");
    let at = line.find("r-").expect("an id");
    line[at..at + 14].to_owned()
}

async fn post(cluster: &Cluster, index: usize, token: Option<&str>, body: impl Into<reqwest::Body>) -> Reply {
    let peer = cluster.replica(index).peer.expect("a peer channel");
    let request = http().post(format!("http://{peer}{PATH}")).body(body);
    Reply::of(match token {
        Some(token) => request.bearer_auth(token),
        None => request,
    })
    .await
}

async fn leases(cluster: &Cluster) -> Vec<String> {
    let mut leases = cluster.redis().keys("replica:*").await;
    leases.sort();
    leases
}

#[tokio::test]
async fn a_session_that_is_deleted_ends_on_every_replica_at_once_and_its_id_shows_nowhere() {
    let world = World::with(3, "", |builder| builder.log("debug")).await;
    let cluster = &world.cluster;
    assert_eq!(leases(cluster).await.len(), 3);
    let client = world.connect().await;
    let other = world.connect().await;
    let at = |index| client.at(&cluster.public_url(index));
    let mut stream = at(0).listen().await;
    let mut others = other.at(&cluster.public_url(0)).listen().await;
    // A call that runs on yet another replica.
    world.mcp.stall(Stall::UntilReleased);
    let busy = at(1);
    let call = tokio::spawn(async move { busy.call("fake__echo", "{}").await });
    world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;

    let deleted = Instant::now();
    assert_eq!(at(2).delete().await.status, 204);
    while stream.next(AT_ONCE).await.is_some() {}
    assert!(deleted.elapsed() < AT_ONCE, "{:?}", deleted.elapsed());
    tokio::time::timeout(AT_ONCE, call).await.expect("the call ends").unwrap();
    world.mcp.release();

    // The neighbour's is untouched.
    world.mcp.add_tool(r#"{"name":"late","inputSchema":{"type":"object"}}"#);
    others.until("notifications/tools/list_changed", SOON).await;
    let logs = cluster.logs();
    assert!(logs.contains("session ended elsewhere"), "nobody was told");
    assert!(!logs.contains(client.session()), "the session id stands in a log");
}

/// The stdio server of a session runs on the replica that was asked first, and goes wherever its end is asked for.
#[tokio::test]
async fn a_stdio_server_ends_when_its_session_is_deleted_on_another_replica() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let demo = built_binary("obol-demo").unwrap();
    let script = format!("echo $$ > {}; exec {} mcp-stdio", pid.display(), demo.display());
    let connection = format!("  local:\n    transport: stdio\n    command: [sh, -c, '{script}']\n");
    let world = World::with(2, &connection, |builder| builder).await;
    let client = world.connect().await;
    let at = |index| client.at(&world.cluster.public_url(index));
    at(0).call("local__roll_dice", "{}").await;
    let pid: u32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    assert!(is_running(pid));
    let deleted = Instant::now();
    assert_eq!(at(1).delete().await.status, 204);
    eventually(AT_ONCE, || async { !is_running(pid) }).await;
    println!("ended {:?} after the DELETE elsewhere", deleted.elapsed());
}

#[tokio::test]
async fn the_channel_takes_nothing_from_strangers_and_is_nowhere_else() {
    let world = World::start(1).await;
    let cluster = &world.cluster;
    let me = id(cluster, 0);
    let own = || token(cluster, party::GATEWAY, party::PEER, &me);
    // Each with an id of its own: one that was here before gets the answer of then.
    let message = |number: u8, kind: &str| {
        json!({
            "v": 1, "id": format!("0191b0c4-7b6e-4c3e-8a2a-0000000000{number:02x}"), "from": "r-0123456789ab", "within_ms": 5000,
            "kind": kind, "body": {"workspace_id": "acme", "connection": "fake", "list": "tools"},
        })
        .to_string()
    };
    let used = own();
    assert_eq!(post(cluster, 0, Some(&used), message(1, "list_changed")).await.status, 200);
    for (what, token, body, status, code) in [
        ("no token", None, message(1, "list_changed"), 401, "unauthenticated"),
        ("garbage", Some("a.b.c".to_owned()), message(1, "list_changed"), 401, "unauthenticated"),
        ("a virtual key", Some(world.key.clone()), message(1, "list_changed"), 401, "unauthenticated"),
        (
            "another audience",
            Some(token(cluster, party::GATEWAY, party::CONTROL, &me)),
            message(1, "list_changed"),
            401,
            "unauthenticated",
        ),
        (
            "another issuer",
            Some(token(cluster, party::CONTROL, party::PEER, &me)),
            message(1, "list_changed"),
            401,
            "unauthenticated",
        ),
        ("a replay", Some(used.clone()), message(1, "list_changed"), 401, "unauthenticated"),
        (
            "for another replica",
            Some(token(cluster, party::GATEWAY, party::PEER, "r-0123456789ab")),
            message(1, "list_changed"),
            421,
            "wrong_replica",
        ),
        ("too large", Some(own()), " ".repeat((1 << 20) + 1), 413, "too_large"),
        ("no message", Some(own()), "garbage".to_owned(), 400, "bad_envelope"),
        ("a later kind", Some(own()), message(2, "later"), 422, "unknown_kind"),
        ("a bad body", Some(own()), message(3, "session_ended"), 422, "bad_body"),
    ] {
        let reply = post(cluster, 0, token.as_deref(), body).await;
        assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (status, Some(code)), "{what}");
        assert_eq!(reply.headers.contains_key("www-authenticate"), status == 401, "{what}");
    }
    for url in [cluster.public_url(0), cluster.admin_url(0)] {
        let request = http().post(format!("{url}{PATH}")).bearer_auth(own()).body(message(1, "list_changed"));
        assert_eq!(Reply::of(request).await.status, 404);
    }
    let peer = cluster.replica(0).peer.unwrap();
    for path in ["/mcp", "/metrics", "/healthz", "/"] {
        assert_eq!(Reply::of(http().get(format!("http://{peer}{path}"))).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn a_replica_that_died_delays_nobody_and_one_that_stops_answers_until_its_requests_have_ended() {
    let world = World::start(3).await;
    let cluster = &world.cluster;
    let (killed, draining) = (id(cluster, 1), id(cluster, 2));
    cluster.kill9(1).await;
    let client = Mcp::connect(&cluster.public_url(0), &world.key).await;
    assert_eq!(client.delete().await.status, 204);
    assert!(leases(cluster).await.contains(&format!("replica:{killed}")), "its lease runs out by itself");

    let client = Mcp::connect(&cluster.public_url(2), &world.key).await;
    world.mcp.stall(Stall::UntilReleased);
    let call = tokio::spawn(async move { client.call("fake__echo", "{}").await });
    world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
    cluster.terminate(2);
    let probe = || async { Reply::try_of(http().get(format!("{}/readyz", cluster.admin_url(2)))).await };
    eventually(SOON, || async { probe().await.is_ok_and(|reply| reply.status == 503) }).await;
    // In the request phase: clients are not let in any more, peers are.
    let public = cluster.replica(2).public;
    eventually(SOON, || async { tokio::net::TcpStream::connect(public).await.is_err() }).await;
    assert_eq!(post(cluster, 2, None, "").await.status, 401);
    assert!(leases(cluster).await.contains(&format!("replica:{draining}")));
    world.mcp.release();
    call.await.unwrap().result();
    assert!(cluster.replica(2).process.wait(SOON).await.success());
    assert!(!leases(cluster).await.contains(&format!("replica:{draining}")), "it gave its lease up");
    let index: Vec<String> = cluster.redis().query(&["ZRANGE", "replicas", "0", "-1"]).await;
    assert!(!index.contains(&draining), "{index:?}");
}

#[tokio::test]
async fn replicas_without_a_channel_hold_leases_and_say_what_is_missing() {
    let world = World::with(2, "", |builder| builder.gateway_env("OBOL_PEER_LISTEN", "")).await;
    assert_eq!(leases(&world.cluster).await.len(), 2);
    assert!(world.cluster.replica(0).peer.is_none());
    eventually(SOON, || async { world.cluster.logs().contains("set OBOL_PEER_LISTEN on every replica") })
        .await;
    assert_eq!(world.connect().await.delete().await.status, 204);
}
