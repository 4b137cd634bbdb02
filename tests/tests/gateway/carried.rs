//! How requests and answers are carried: headers, forms of an answer, upstream sessions that are gone.

use std::time::Duration;

use obol_testkit::fake_mcp::Stall;
use obol_tests::SOON;
use obol_tests::client::{Events, Reply, http, message};
use obol_tests::world::{LLM_SECRET, MCP_SECRET, World};
use reqwest::Method;

fn echo() -> String {
    message("1", "tools/call", r#"{"name":"fake__echo","arguments":{}}"#)
}

#[tokio::test]
async fn headers_of_the_client_stay_here_and_ours_go_out() {
    let world = World::start(1).await;
    let client = world.connect().await;
    let post =
        client.post(echo()).header("cookie", "a=b").header("x-custom", "c").header("forwarded", "for=d");
    Reply::of(post).await.result();
    let chat = http().post(format!("{}/v1/chat/completions", world.url())).header("x-api-key", &world.key);
    let chat = chat.header("cookie", "a=b").header("x-custom", "c").header("openai-organization", "org");
    let chat = Reply::of(chat.body(r#"{"model":"small","messages":[]}"#)).await;
    assert_eq!(chat.status, 200, "{chat:?}");

    let (called, asked) = (world.mcp.received_of("tools/call"), world.llm.received());
    let (mcp, llm) = (&called[0].headers, &asked[0].headers);
    for (headers, secret) in [(mcp, MCP_SECRET), (llm, LLM_SECRET)] {
        assert_eq!(headers["authorization"], format!("Bearer {secret}"));
        for name in ["cookie", "x-custom", "forwarded", "x-api-key", "openai-organization"] {
            assert!(!headers.contains_key(name), "{name}: {headers:?}");
        }
        let all = format!("{headers:?}");
        assert!(!all.contains(&world.key) && !all.contains("mcs_"), "{all}");
    }
    assert_eq!(mcp["mcp-protocol-version"], "2025-11-25");
    for secret in [MCP_SECRET, LLM_SECRET] {
        assert!(!format!("{:?}", chat.headers).contains(secret));
    }
}

#[tokio::test]
async fn an_answer_has_the_form_that_the_client_takes() {
    let world = World::start(1).await;
    let client = world.connect().await;
    let session = client.session().to_owned();
    let post = |accept: &str| {
        let request = http().request(Method::POST, format!("{}/mcp", world.url())).bearer_auth(&world.key);
        let request = request.header("mcp-session-id", &session).header("content-type", "application/json");
        Reply::of(request.header("accept", accept).body(echo()))
    };
    world.mcp.before_result(0, 2);
    for (accept, form, messages) in [
        ("application/json, text/event-stream", "text/event-stream", 3),
        ("text/event-stream", "text/event-stream", 3),
        ("application/json", "application/json", 1),
        ("*/*", "text/event-stream", 3),
    ] {
        let reply = post(accept).await;
        assert!(reply.header("content-type").starts_with(form), "{accept}: {reply:?}");
        assert_eq!(reply.messages().len(), messages, "{accept}: {reply:?}");
        reply.result();
    }
    world.mcp.before_result(0, 0);
    let quiet = post("application/json, text/event-stream").await;
    assert!(quiet.header("content-type").starts_with("application/json"), "{quiet:?}");

    for noted in [
        r#"{"jsonrpc":"2.0","method":"notifications/nobody/knows"}"#,
        r#"{"jsonrpc":"2.0","id":"x","result":{}}"#,
        r#"{"jsonrpc":"2.0","id":"x","error":{"code":1,"message":"no"}}"#,
    ] {
        let reply = client.send(noted).await;
        assert_eq!((reply.status, reply.body.len()), (202, 0), "{noted}");
    }
}

#[tokio::test]
async fn a_slow_call_becomes_a_stream_that_is_kept_alive() {
    let world = World::start(1).await;
    let client = world.connect().await;
    world.mcp.stall(Stall::UntilReleased);
    // The head comes after five seconds, without anything to say yet.
    let response = client.post(echo()).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    world.mcp.release();
    let mut events = Events::of(response);
    assert!(events.message(SOON).await["result"].is_object());
    assert_eq!(events.next(SOON).await, None);
}

#[tokio::test]
async fn an_upstream_session_that_is_gone_is_opened_again_and_the_call_made_once() {
    let world = World::start(1).await;
    let client = world.connect().await;
    client.call("fake__echo", "{}").await.result();
    for (number, status) in [(2, 404), (3, 400)] {
        world.mcp.reject_session_once(status);
        client.call("fake__echo", "{}").await.result();
        assert_eq!(world.mcp.calls("echo"), number, "after {status}");
    }
    world.mcp.forget_sessions();
    client.call("fake__echo", "{}").await.result();
    assert_eq!(world.mcp.calls("echo"), 4);
}

#[tokio::test]
async fn a_call_whose_outcome_is_unknown_is_never_repeated() {
    let world = World::start(1).await;
    let client = world.connect().await;
    client.call("fake__destroy", "{}").await.result();
    for (number, cut) in [(2, true), (3, false)] {
        if cut {
            world.mcp.cut_after_executing(1);
        } else {
            world.mcp.cut_mid_stream(1);
        }
        let reply =
            tokio::time::timeout(Duration::from_secs(20), client.call("fake__destroy", "{}")).await.unwrap();
        let error = reply.error();
        assert_eq!((reply.status, error["code"].as_i64()), (200, Some(-31_520)), "{error}");
        assert!(
            error["data"]["request_id"].is_string() && !error.to_string().contains("127.0.0.1"),
            "{error}"
        );
        assert_eq!(world.mcp.calls("destroy"), number);
    }
}

#[tokio::test]
async fn an_item_that_sdks_reject_is_left_out_and_the_list_stays() {
    let world = World::start(1).await;
    world.mcp.set_tools(&[
        r#"{"name":"good","inputSchema":{"type":"object"},"unknown":{"x":1.0}}"#,
        r#"{"name":"titled","title":5,"inputSchema":{"type":"object"}}"#,
        r#"{"name":"hinted","annotations":{"readOnlyHint":"yes"},"inputSchema":{"type":"object"}}"#,
        r#"{"name":"bare"}"#,
    ]);
    assert_eq!(world.connect().await.tools().await, ["fake__good"]);
}
