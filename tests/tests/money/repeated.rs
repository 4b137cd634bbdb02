//! Requests that are sent again under their idempotency key, on two replicas (DESIGN §12.7, C079).

use futures::future::join_all;
use obol_testkit::eventually;
use obol_testkit::fake_mcp::Stall;
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, message};
use obol_tests::world::World;
use serde_json::Value;

use super::counters;

const BUDGET: &str = "budgets:
  - { scope: workspace, window: month, limit_usd: 1000 }
";
const ECHO: &str = r#"{"name":"fake__echo","arguments":{"text":"one"}}"#;
/// In the `_meta` of what was answered before.
const REPLAYED: &str = "io.obol/idempotent-replayed";

/// A session that is known on both replicas, and used on each.
async fn clients(world: &World) -> [Mcp; 2] {
    let client = world.connect().await;
    client.tools().await;
    [0, 1].map(|n| client.at(&world.cluster.public_url(n)))
}

/// `tools/call` under a key; each request has an id of its own.
async fn call(client: &Mcp, key: &str, id: &str, params: &str) -> Reply {
    Reply::of(client.post(message(id, "tools/call", params)).header("idempotency-key", key)).await
}

/// As [`call`], until what was answered before is with the ledger.
async fn again(client: &Mcp, key: &str, id: &str, params: &str) -> Reply {
    eventually(SOON, || async {
        let reply = call(client, key, id, params).await;
        let is_open = reply.text().contains("idempotency_in_flight");
        (!is_open).then_some(reply)
    })
    .await
}

/// The JSON-RPC code, the word, and when to come again.
fn refusal(reply: &Reply) -> (i64, String, Value) {
    let error = reply.error();
    let word = error["data"]["code"].as_str().unwrap_or_default().to_owned();
    (error["code"].as_i64().unwrap(), word, error["data"]["retry_after_s"].clone())
}

#[tokio::test]
async fn a_tool_call_that_is_sent_again_is_made_once() {
    let world = World::with(2, BUDGET, |builder| builder).await;
    let [a, b] = clients(&world).await;

    // Without a key two calls are two calls.
    for client in [&a, &b] {
        client.rpc("tools/call", ECHO).await.result();
    }
    assert_eq!(world.mcp.calls("echo"), 2);

    // Sequentially, on either replica, with another id and another progress token.
    let first = call(&a, "k-1", "1", ECHO).await;
    let result = first.result();
    assert!(result["_meta"].get(REPLAYED).is_none(), "{result}");
    let params = r#"{"name":"fake__echo","arguments":{"text":"one"},"_meta":{"progressToken":7}}"#;
    for (client, params) in [(&b, ECHO), (&a, ECHO), (&b, params)] {
        let mut replayed = again(client, "k-1", "\"other\"", params).await;
        assert_eq!(replayed.json()["id"], "other");
        assert_eq!(replayed.result()["_meta"][REPLAYED], true, "{replayed:?}");
        replayed = again(client, "k-1", "9", params).await;
        assert_eq!(replayed.result()["content"], result["content"]);
    }
    assert_eq!(world.mcp.calls("echo"), 3);

    // In the `_meta` it is the same key.
    let in_meta =
        r#"{"name":"fake__echo","arguments":{"text":"one"},"_meta":{"io.obol/idempotency-key":"k-1"}}"#;
    assert_eq!(b.rpc("tools/call", in_meta).await.result()["_meta"][REPLAYED], true);
    let escaped = in_meta.replace("io.obol/", r"io.obol\/");
    assert_eq!(b.rpc("tools/call", &escaped).await.result()["_meta"][REPLAYED], true);
    assert_eq!(call(&a, "k-1", "5", in_meta).await.result()["_meta"][REPLAYED], true);
    assert_eq!(call(&a, "k-2", "5", in_meta).await.error()["code"], -32602);
    for bad in [r#""""#, r#""a b""#, "7"] {
        let params = in_meta.replace(r#""k-1""#, bad);
        assert_eq!(a.rpc("tools/call", &params).await.error()["code"], -32602, "{bad}");
    }

    // Another request under the same key, the same under another key, and by another principal.
    let other = ECHO.replace("one", "two");
    assert_eq!(
        refusal(&call(&b, "k-1", "2", &other).await),
        (-31_422, "idempotency_key_reused".into(), Value::Null)
    );
    assert!(call(&b, "k-3", "2", ECHO).await.result()["_meta"].get(REPLAYED).is_none());
    let stranger =
        Mcp::connect(&world.cluster.public_url(1), &world.cluster.new_key("acme", &[]).await).await;
    assert!(call(&stranger, "k-1", "2", &other).await.result()["_meta"].get(REPLAYED).is_none());
    assert_eq!(world.mcp.calls("echo"), 5);

    // The upstream's own refusal is an answer.
    world.mcp.set_error("tools/call", r#"{"code":-32050,"message":"no"}"#);
    assert_eq!(call(&a, "k-4", "1", ECHO).await.error()["code"], -32050);
    world.mcp.unset("tools/call");
    assert_eq!(again(&b, "k-4", "1", ECHO).await.error()["code"], -32050);

    // One event and one price for each call that was made.
    let made = 3 + 2 + 1;
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|all| all.len() >= made) }).await;
    assert_eq!(events.len(), made, "{events:?}");
    assert_eq!(counters(&world.cluster).await.values().next(), Some(&(5_000_000, 0)));
}

#[tokio::test]
async fn of_calls_at_once_one_is_made() {
    let world = World::with(2, BUDGET, |builder| builder).await;
    let [a, b] = clients(&world).await;
    world.mcp.stall(Stall::UntilReleased);
    let ids: Vec<String> = (0..16).map(|n| n.to_string()).collect();
    let clients = [&a, &b];
    let calls = join_all(ids.iter().enumerate().map(|(n, id)| call(clients[n % 2], "k", id, ECHO)));
    let release = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
        // Those that were refused meanwhile are answered already, or will be.
        let in_flight = call(&b, "k", "\"again\"", ECHO).await;
        assert_eq!(refusal(&in_flight), (-31_409, "idempotency_in_flight".into(), Value::from(1)));
        world.mcp.release();
    };
    let (replies, ()) = tokio::join!(calls, release);
    let (made, refused): (Vec<_>, Vec<_>) =
        replies.into_iter().partition(|reply| reply.json().get("result").is_some());
    assert!(refused.iter().all(|reply| refusal(reply).1 == "idempotency_in_flight"), "{refused:?}");
    assert!(
        made.iter().filter(|reply| reply.result()["_meta"].get(REPLAYED).is_none()).count() == 1,
        "{made:?}"
    );
    assert_eq!(world.mcp.calls("echo"), 1);
}

#[tokio::test]
async fn what_was_not_made_may_be_sent_again() {
    let world = World::with(2, BUDGET, |builder| builder).await;
    let [a, b] = clients(&world).await;
    // Refused before anything was asked of the upstream: no such session, no such tool, no connection.
    let lost = world.connect().await.with_session(Some("mcs_00000000000000000000000000"));
    assert_eq!(call(&lost, "k", "1", ECHO).await.status, 404);
    assert!(
        call(&a, "k", "1", r#"{"name":"fake__nowhere","arguments":{}}"#).await.json().get("error").is_some()
    );
    world.mcp.set_status("tools/call", 429, "");
    assert_eq!(again(&a, "k", "1", ECHO).await.error()["data"]["code"], "status");
    world.mcp.unset("tools/call");
    world.mcp.refuse().await;
    world.mcp.drop_connections().await;
    let refused = again(&a, "k", "1", ECHO).await;
    assert_eq!(refused.error()["data"]["code"], "unavailable", "{refused:?}");
    world.mcp.accept().await;
    let made = eventually(SOON, || async {
        let reply = call(&b, "k", "1", ECHO).await;
        reply.json().get("result").is_some().then_some(reply)
    })
    .await;
    assert!(made.result()["_meta"].get(REPLAYED).is_none());
    assert_eq!(world.mcp.calls("echo"), 1);
}

#[tokio::test]
async fn a_call_whose_client_left_is_answered_to_who_asks_again() {
    let world = World::with(2, BUDGET, |builder| builder).await;
    let [a, b] = clients(&world).await;
    world.mcp.stall(Stall::UntilReleased);
    let leave = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
    };
    tokio::select! {
        reply = call(&a, "k", "1", ECHO) => panic!("{reply:?}"),
        () = leave => {}
    }
    assert_eq!(refusal(&call(&b, "k", "2", ECHO).await).1, "idempotency_in_flight");
    world.mcp.release();
    assert_eq!(again(&b, "k", "2", ECHO).await.result()["_meta"][REPLAYED], true);
    assert_eq!(world.mcp.calls("echo"), 1);

    // One that the client cancelled, and one that broke off, may have been executed.
    world.mcp.stall(Stall::UntilReleased);
    let cancel = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 2).await;
        let cancelled = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"3"}}"#;
        assert_eq!(a.send(cancelled).await.status, 202);
    };
    tokio::join!(call(&a, "c", "\"3\"", ECHO), cancel);
    world.mcp.release();
    world.mcp.cut_after_executing(1);
    assert_eq!(call(&a, "d", "4", ECHO).await.error()["data"]["code"], "outcome_unknown");
    world.mcp.set_status("tools/call", 503, "");
    assert_eq!(call(&a, "e", "4", ECHO).await.error()["data"]["code"], "status");
    world.mcp.unset("tools/call");
    for key in ["c", "d", "e"] {
        let unknown = refusal(&again(&b, key, "5", ECHO).await);
        assert_eq!(unknown, (-31_409, "idempotency_outcome_unknown".into(), Value::Null), "{key}");
    }
    assert_eq!(world.mcp.calls("echo"), 3);
}

/// A batch of 2025-03-26 has no key, each of its calls may have one.
#[tokio::test]
async fn calls_of_a_batch_have_keys_of_their_own() {
    let world = World::start(1).await;
    let client = Mcp::connect_as(&world.url(), &world.key, "2025-03-26").await;
    client.tools().await;
    let with_key = |id: &str, key: &str| {
        let params = ECHO.replace("}}", &format!(r#"}},"_meta":{{"io.obol/idempotency-key":"{key}"}}}}"#));
        message(id, "tools/call", &params)
    };
    let batch = format!("[{},{}]", with_key("1", "k-1"), with_key("2", "k-2"));
    let refused = Reply::of(client.post(batch.clone()).header("idempotency-key", "k")).await;
    assert_eq!(refused.status, 400);
    client.send(batch).await;
    assert_eq!(world.mcp.calls("echo"), 2);
    let replayed = eventually(SOON, || async {
        let reply = client.send(format!("[{}]", with_key("3", "k-2"))).await;
        reply.text().contains(REPLAYED).then_some(reply)
    })
    .await;
    assert_eq!(replayed.json()[0]["id"], 3);
    assert_eq!(world.mcp.calls("echo"), 2);
}
