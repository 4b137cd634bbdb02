//! Calls that overlap, are cancelled, abandoned, or meet an upstream that is away.

use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::fake_mcp::{FakeMcp, Stall};
use obol_tests::SOON;
use obol_tests::client::message;
use obol_tests::world::World;
use serde_json::Value;
use tokio::time::Instant;

fn echo(id: &str, arguments: &str) -> String {
    message(id, "tools/call", &format!(r#"{{"name":"fake__echo","arguments":{arguments}}}"#))
}

#[tokio::test]
async fn two_calls_with_one_id_in_flight_each_get_their_own_answer() {
    let world = World::start(2).await;
    let client = world.connect().await;
    world.mcp.stall(Stall::UntilReleased);
    let both = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 4).await;
        world.mcp.release();
    };
    // One after the other goes to one and the other replica: each has two of them.
    let (one, two, three, four, ()) = tokio::join!(
        client.send(echo("7", r#"{"n":1}"#)),
        client.send(echo("7", r#"{"n":2}"#)),
        client.send(echo("7", r#"{"n":3}"#)),
        client.send(echo(r#""7""#, r#"{"n":4}"#)),
        both
    );
    for (number, reply) in [one, two, three, four].into_iter().enumerate() {
        assert_eq!(reply.result()["content"][0]["text"], format!(r#"{{"n":{}}}"#, number + 1));
        assert_eq!(reply.raw("id"), if number == 3 { r#""7""# } else { "7" });
    }
    let ids: std::collections::BTreeSet<_> = world
        .mcp
        .received_of("tools/call")
        .iter()
        .map(|one| (one.session().unwrap().to_owned(), one.id().unwrap()))
        .collect();
    assert_eq!(ids.len(), 4, "ids are unique upstream");
}

#[tokio::test]
async fn a_cancel_ends_the_call_and_reaches_the_upstream() {
    let world = World::start(1).await;
    let client = world.connect().await;
    world.mcp.stall(Stall::UntilReleased);
    let cancel = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
        let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":5,"reason":"enough"}}"#;
        assert_eq!(client.send(cancel).await.status, 202);
    };
    let (reply, ()) = tokio::join!(client.send(echo("5", "{}")), cancel);
    assert_eq!((reply.status, reply.messages()), (200, vec![]), "a cancelled call has no answer");
    world.mcp.wait_until(|counts| counts.notifications_of("notifications/cancelled") == 1).await;
    let called = world.mcp.received_of("tools/call")[0].id().unwrap();
    let params = world.mcp.last_params("notifications/cancelled").unwrap();
    let params: Value = serde_json::from_str(&params).unwrap();
    assert_eq!(params["requestId"].to_string(), called, "it names the id that the upstream knows");
    world.mcp.release();
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| !events.is_empty()) }).await;
    assert_eq!(events[0]["outcome"], "partial");
}

#[tokio::test]
async fn a_client_that_goes_away_does_not_end_its_call() {
    let world = World::start(1).await;
    let client = world.connect().await;
    world.mcp.stall(Stall::UntilReleased);
    let request = client.post(echo("5", "{}"));
    let abandoned = tokio::spawn(request.send());
    world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
    abandoned.abort();
    assert!(abandoned.await.unwrap_err().is_cancelled());
    // Its connection is gone by the time that another one is answered.
    client.rpc("ping", "{}").await.result();
    world.mcp.release();
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| !events.is_empty()) }).await;
    assert_eq!(events[0]["outcome"], "ok");
    let counts = world.mcp.counts();
    assert_eq!((counts.left_early, counts.notifications_of("notifications/cancelled")), (0, 0), "{counts:?}");
}

#[tokio::test]
async fn progress_reaches_the_caller_under_its_own_token() {
    let world = World::start(1).await;
    let (one, two) = (world.connect().await, world.connect().await);
    world.mcp.before_result(2, 0);
    world.mcp.stall(Stall::UntilReleased);
    let call = |token: &str| {
        message(
            "1",
            "tools/call",
            &format!(r#"{{"name":"fake__echo","arguments":{{}},"_meta":{{"progressToken":{token}}}}}"#),
        )
    };
    let release = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 3).await;
        world.mcp.release();
    };
    let (first, second, third, ()) =
        tokio::join!(one.send(call("1")), two.send(call("1")), one.send(call(r#""1""#)), release);
    for (reply, token) in [(first, Value::from(1)), (second, Value::from(1)), (third, Value::from("1"))] {
        let messages: Vec<Value> =
            reply.messages().iter().map(|m| serde_json::from_str(m).unwrap()).collect();
        let progress: Vec<_> = messages.iter().filter(|m| m["method"] == "notifications/progress").collect();
        assert_eq!(progress.len(), 2, "{messages:?}");
        assert!(progress.iter().all(|m| m["params"]["progressToken"] == token), "{messages:?}");
        assert!(messages.last().unwrap()["result"].is_object(), "{messages:?}");
    }
    let tokens: std::collections::BTreeSet<String> = world
        .mcp
        .received_of("tools/call")
        .iter()
        .map(|one| {
            serde_json::from_str::<Value>(&one.params().unwrap()).unwrap()["_meta"]["progressToken"]
                .to_string()
        })
        .collect();
    assert_eq!(tokens.len(), 3, "tokens are unique upstream: {tokens:?}");
}

#[tokio::test]
async fn upstreams_that_are_away_make_a_list_partial_and_nothing_else() {
    let (dead, hung) = (FakeMcp::start().await, FakeMcp::start().await);
    dead.refuse().await;
    hung.hang_on("initialize");
    let connections = format!(
        "  dead: {{ transport: streamable_http, url: \"{}\", allow_private: true }}\n  hung: {{ transport: streamable_http, url: \"{}\", allow_private: true }}\n",
        dead.url(),
        hung.url()
    );
    let world = World::with(1, &connections, |builder| builder).await;
    let client = world.connect().await;
    let start = Instant::now();
    let list = async { (client.ok("tools/list", "{}").await, start.elapsed()) };
    let call = async { (client.call("fake__echo", "{}").await, start.elapsed()) };
    let ((list, listed_in), (called, called_in)) = tokio::join!(list, call);
    called.result();
    assert!(called_in < Duration::from_secs(3), "a healthy connection waited {called_in:?}");
    assert!(listed_in < Duration::from_secs(8), "the list took {listed_in:?}");
    let mut away: Vec<String> = serde_json::from_value(list["_meta"]["io.obol/unavailable"].clone()).unwrap();
    away.sort();
    assert_eq!(away, ["dead", "hung"]);
    let names: Vec<_> =
        list["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert!(
        names.contains(&"fake__echo") && names.iter().all(|name| name.starts_with("fake__")),
        "{names:?}"
    );

    // Only the first list waits.
    let start = Instant::now();
    client.tools().await;
    assert!(start.elapsed() < Duration::from_secs(2), "the next list took {:?}", start.elapsed());

    let error = client.call("dead__echo", "{}").await.error();
    let text = error.to_string();
    assert!(text.contains("dead") && !text.contains("127.0.0.1"), "{text}");

    // It comes back by itself.
    dead.accept().await;
    eventually(Duration::from_secs(30), || async { client.tools().await.contains(&"dead__echo".to_owned()) })
        .await;
}
