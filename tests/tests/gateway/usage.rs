//! What is metered (DESIGN §12).

use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_tests::SOON;
use obol_tests::world::World;
use serde_json::Value;

#[tokio::test]
async fn each_call_is_one_event_with_its_cost() {
    let world = World::start(3).await;
    let client = world.connect().await;
    client.tools().await;
    client.rpc("ping", "{}").await.result();
    client.call("fake__echo", "{}").await.result();
    client.call("fake__nowhere", "{}").await.error();
    let body = |more: &str| {
        format!(r#"{{"model":"small","messages":[{{"role":"user","content":"one two three"}}]{more}}}"#)
    };
    assert_eq!(world.chat(body("")).await.status, 200);
    assert_eq!(world.chat(body(r#","stream":true"#)).await.status, 200);
    world.llm.reply(Says::status(400));
    assert_eq!(world.chat(body("")).await.status, 400);
    assert_eq!(world.chat(r#"{"model":"nowhere"}"#).await.status, 404);
    world.mcp.set_error("tools/call", r#"{"code":-32000,"message":"no"}"#);
    client.call("fake__echo", "{}").await.error();

    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| events.len() >= 5) }).await;
    let said: Vec<(&str, &str, String)> = events
        .iter()
        .map(|event| {
            let cost = event["cost"].as_str().map_or_else(|| event["cost"].to_string(), str::to_owned);
            (event["kind"].as_str().unwrap(), event["outcome"].as_str().unwrap(), cost)
        })
        .collect();
    let count = |kind, outcome, cost: &str| {
        said.iter().filter(|one| **one == (kind, outcome, cost.to_owned())).count()
    };
    // 0.001 USD a call; three words in at 1 USD and three words out at 2 USD per million.
    assert_eq!(count("tool_call", "ok", "1000000"), 1, "{said:?}");
    assert_eq!(count("chat_completion", "ok", "9000"), 2, "{said:?}");
    assert_eq!(count("chat_completion", "error", "0"), 1, "{said:?}");
    assert_eq!(
        said.iter().filter(|(kind, outcome, _)| (*kind, *outcome) == ("tool_call", "error")).count(),
        1,
        "{said:?}"
    );
    assert_eq!(events.len(), 5, "{said:?}");
    let mut ids: Vec<&Value> = events.iter().map(|event| &event["event_id"]).collect();
    ids.sort_by_key(ToString::to_string);
    ids.dedup();
    assert_eq!(ids.len(), 5);
    for event in &events {
        assert_eq!((&event["workspace_id"], &event["estimated"]), (&"acme".into(), &false.into()), "{event}");
    }
}

#[tokio::test]
async fn a_stream_that_the_client_leaves_is_metered_as_partial_and_ends_upstream() {
    let world = World::start(1).await;
    let chunk = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"some words\"},\"finish_reason\":null}]}\n\n";
    let raw = obol_testkit::fake_llm::Raw::events([chunk]).wait_for_release();
    world.llm.reply(Says::Raw(raw));
    let request = obol_tests::client::http()
        .post(format!("{}/v1/chat/completions", world.url()))
        .bearer_auth(&world.key)
        .body(r#"{"model":"small","stream":true,"messages":[{"role":"user","content":"hi"}]}"#);
    let response = request.send().await.unwrap();
    let mut events = obol_tests::client::Events::of(response);
    assert!(events.next(SOON).await.unwrap().contains("some words"));
    drop(events);
    eventually(SOON, || async { world.llm.left_early() == 1 }).await;
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| !events.is_empty()) }).await;
    assert_eq!((&events[0]["outcome"], &events[0]["estimated"]), (&"partial".into(), &true.into()));
}
