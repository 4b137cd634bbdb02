//! What a reservation bounds, and what becomes of what it does not (DESIGN §12.1).

use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_tests::SOON;
use obol_tests::client::{Reply, http};
use obol_tests::world::World;
use serde_json::Value;

use super::counters;

const BUDGET: &str = "budgets:
  - { scope: workspace, window: month, limit_usd: 1000 }
";

async fn ask(world: &World, path: &str, body: &'static str) -> Reply {
    let request = http().post(format!("{}{path}", world.url())).bearer_auth(&world.key);
    Reply::of(request.header("content-type", "application/json").body(body)).await
}

/// A provider that bills for more than the answer was allowed to have: all of it is booked, and marked.
#[tokio::test]
async fn a_provider_that_bills_above_the_limit_is_booked_in_full_and_flagged() {
    let world = World::with(1, BUDGET, |builder| builder).await;
    world.llm.reply(Says::json(
        r#"{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":7,"completion_tokens":50000}}"#,
    ));
    // Without a limit of its own, which the model's stands in for.
    let body = r#"{"model":"small","messages":[{"role":"user","content":"hi"}]}"#;
    assert_eq!(ask(&world, "/v1/chat/completions", body).await.status, 200);
    let sent: Value = serde_json::from_slice(&world.llm.last_body().unwrap()).unwrap();
    assert_eq!(sent["max_completion_tokens"], 1000);
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| !events.is_empty()) }).await;
    let [event] = events.as_slice() else { panic!("{events:?}") };
    let cost = 7 * 1_000 + 50_000 * 2_000;
    assert_eq!((event["cost"].as_i64(), &event["overrun"]), (Some(cost), &Value::Bool(true)), "{event}");
    assert!(event["reserved"].as_i64().unwrap() < cost, "{event}");
    assert_eq!(counters(&world.cluster).await.into_values().collect::<Vec<_>>(), [(cost, 0)]);
}

/// What nobody can set enough aside for is refused where a budget applies, and never reaches the provider.
#[tokio::test]
async fn what_has_no_bound_is_refused_under_a_budget() {
    let world = World::with(1, BUDGET, |builder| builder).await;
    for (path, body) in [
        (
            "/v1/responses",
            r#"{"model":"small","input":[{"role":"user","content":[{"type":"input_file","file_url":"https://x.example/a.pdf"}]}]}"#,
        ),
        ("/v1/responses", r#"{"model":"small","input":"hi","tools":[{"type":"web_search"}]}"#),
        ("/v1/chat/completions", r#"{"model":"small","service_tier":"priority","messages":[]}"#),
        (
            "/v1/messages",
            r#"{"model":"small","max_tokens":5,"messages":[{"role":"user","content":[{"type":"document","source":{"type":"url","url":"https://x.example/a.pdf"}}]}]}"#,
        ),
    ] {
        let reply = ask(&world, path, body).await;
        assert_eq!(
            (reply.status, &reply.json()["error"]["code"]),
            (400, &"unsupported_parameter".into()),
            "{body}"
        );
        assert!(reply.json()["error"]["message"].as_str().unwrap().contains("budget"), "{reply:?}");
    }
    assert_eq!(world.llm.calls(), 0);
}
