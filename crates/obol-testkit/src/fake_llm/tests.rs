use futures::StreamExt as _;
use reqwest::Client;

use super::*;
use crate::eventually;

const SOON: Duration = Duration::from_secs(10);
const HELLO: &str = r#"{"model":"m","messages":[{"role":"system","content":"be kind"},{"role":"user","content":"hello big world"}]"#;

fn post(server: &FakeLlm, body: String) -> reqwest::RequestBuilder {
    Client::new().post(format!("{}/chat/completions", server.base_url())).body(body)
}

async fn ask(server: &FakeLlm, rest: &str) -> String {
    post(server, format!("{HELLO}{rest}}}")).send().await.unwrap().text().await.unwrap()
}

#[tokio::test]
async fn it_echoes_plainly_with_usage() {
    let server = FakeLlm::start().await;
    let answer: serde_json::Value = serde_json::from_str(&ask(&server, "").await).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "hello big world");
    assert_eq!(
        answer["usage"],
        serde_json::json!({"prompt_tokens":5,"completion_tokens":3,"total_tokens":8})
    );
    let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"in parts"}]}]}"#;
    assert!(post(&server, parts.to_owned()).send().await.unwrap().text().await.unwrap().contains("in parts"));
    let models = Client::new().get(format!("{}/models", server.base_url())).send().await.unwrap();
    assert!(models.text().await.unwrap().contains("fake-large"));
    assert_eq!((server.calls(), server.calls_of("/v1/models")), (2, 1));
    assert_eq!(server.last_body().unwrap(), parts);
}

#[tokio::test]
async fn it_streams_and_sends_usage_only_when_asked() {
    let server = FakeLlm::start().await;
    let plain = ask(&server, r#","stream":true"#).await;
    assert!(plain.ends_with("data: [DONE]\n\n") && !plain.contains("usage"));
    let events: Vec<&str> = plain.split_terminator("\n\n").collect();
    assert_eq!(events.len(), 1 + 3 + 1 + 1, "{plain}");
    let counted = ask(&server, r#","stream":true,"stream_options":{"include_usage":true}"#).await;
    assert!(counted.contains(r#""choices":[],"usage":{"prompt_tokens":5"#), "{counted}");
    assert_eq!(server.left_early(), 0);
}

#[tokio::test]
async fn raw_answers_are_exact_and_come_chunk_by_chunk() {
    let server = FakeLlm::start().await;
    server.reply(Reply::Raw(Raw::events(["data: {\"a\":1.0}\n", "\n"]).wait_for_release().then(": end\n\n")));
    let response = post(&server, HELLO.to_owned()).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut body = response.bytes_stream();
    let mut so_far = Vec::new();
    while so_far.len() < 17 {
        so_far.extend(body.next().await.unwrap().unwrap());
    }
    assert_eq!(so_far, b"data: {\"a\":1.0}\n\n");
    server.release();
    assert_eq!(body.next().await.unwrap().unwrap(), ": end\n\n");
    assert!(body.next().await.is_none());

    server.reply_once(Reply::Raw(Raw::json(" {\"b\":2} ").status(201).header("x-extra", "1")));
    let response = post(&server, String::new()).send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-extra"]),
        (201, &http::HeaderValue::from_static("1"))
    );
    assert_eq!(response.text().await.unwrap(), " {\"b\":2} ");
}

#[tokio::test]
async fn it_fails_as_told() {
    let server = FakeLlm::builder().require_bearer("secret").start().await;
    assert_eq!(post(&server, HELLO.to_owned()).send().await.unwrap().status(), 401);
    let send =
        async || post(&server, format!("{HELLO},\"stream\":true}}")).bearer_auth("secret").send().await;
    server.reply_once(Reply::status(429));
    assert_eq!(send().await.unwrap().status(), 429);
    server.reply_once(Reply::Cut);
    assert!(send().await.is_err());
    server.reply_once(Reply::CutAfter(2));
    assert!(send().await.unwrap().text().await.is_err());
    assert!(send().await.unwrap().text().await.unwrap().ends_with("[DONE]\n\n"));
    server.refuse().await;
    assert!(send().await.unwrap_err().is_connect());
    server.accept().await;
    assert_eq!(send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_and_a_stall_ends_on_release() {
    let server = FakeLlm::start().await;
    server.reply(Reply::Stall);
    let waiting = tokio::spawn(post(&server, format!("{HELLO}}}")).send());
    server.wait_for_calls(1).await;
    waiting.abort();
    eventually(SOON, || async { server.left_early() == 1 }).await;

    let waiting = tokio::spawn(post(&server, format!("{HELLO}}}")).send());
    server.wait_for_calls(2).await;
    server.release();
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);

    server.reply(Reply::Raw(Raw::events(["data: 1\n\n"]).wait_for_release()));
    drop(post(&server, String::new()).send().await.unwrap());
    eventually(SOON, || async { server.left_early() == 2 }).await;
}
