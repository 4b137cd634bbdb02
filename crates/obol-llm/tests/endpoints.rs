//! The other dialects: native and translated, plain and streaming, and every way to end a stream.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use jiff::Timestamp;
use obol_llm::{Endpoint, Llm, LlmError, LlmOptions, LlmRequest};
use obol_model::snapshot::ProviderKind;
use obol_model::{Kind, Outcome, Tokens};
use obol_testkit::eventually;
use obol_testkit::fake_llm::{FakeLlm, Raw, Reply};
use serde_json::{Value, json};
use support::{
    Told, Upstream, by, call, chat, dialer, full, llm, options, plain, request, request_of, rest, stream,
    streaming,
};

const SOON: Duration = Duration::from_secs(10);

const MESSAGES: &str =
    r#"{"model":"pub","max_tokens":50,"messages":[{"role":"user","content":"one two three"}]}"#;
const MESSAGES_STREAM: &str =
    r#"{"model":"pub","max_tokens":50,"stream":true,"messages":[{"role":"user","content":"one two three"}]}"#;

const START: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"claude\",\"content\":[],\"stop_reason\":null,\"usage\":{\"input_tokens\":10,\"cache_read_input_tokens\":8,\"output_tokens\":1}}}\n\n";
const BLOCK: &str = "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n";
const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
const HELLO: &str = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"hello\"}}\n\n";
const BLOCK_STOP: &str = "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n";
const END: &str = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null},\"usage\":{\"output_tokens\":4}}\n\n";
const MESSAGE_STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

const CREATED: &str = "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"error\":null,\"output\":[],\"usage\":null}}\n\n";
const ITEM: &str = "event: response.output_item.added\ndata: {\"type\":\"response.output_item.added\",\"sequence_number\":1,\"output_index\":0,\"item\":{\"id\":\"m\",\"type\":\"message\",\"status\":\"in_progress\",\"role\":\"assistant\",\"content\":[]}}\n\n";
const TEXT: &str = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":2,\"item_id\":\"m\",\"delta\":\"hello\"}\n\n";
const COMPLETED: &str = "event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":3,\"response\":{\"id\":\"resp_1\",\"status\":\"completed\",\"error\":null,\"output\":[],\"usage\":{\"input_tokens\":10,\"input_tokens_details\":{\"cached_tokens\":8},\"output_tokens\":6,\"output_tokens_details\":{\"reasoning_tokens\":2},\"total_tokens\":16}}}\n\n";

fn claude(fake: &FakeLlm, name: &str) -> Upstream {
    Upstream { kind: ProviderKind::Anthropic, ..Upstream::of(fake, name) }
}

fn sent(fake: &FakeLlm) -> Value {
    serde_json::from_slice(&fake.last_body().unwrap()).unwrap()
}

#[tokio::test]
async fn messages_reach_their_own_kind_as_they_are() {
    let fake = FakeLlm::start().await;
    let body = r#"{ "id":"msg_1","type":"message","role":"assistant","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn","x":1.0,"usage":{"input_tokens":2,"cache_read_input_tokens":8,"cache_creation_input_tokens":5,"output_tokens":4} }"#;
    fake.reply(Reply::json(body));
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("anthropic-version", "2024-01-01"),
        ("anthropic-beta", "a"),
        ("anthropic-beta", "b"),
        ("openai-beta", "no"),
        ("x-api-key", "client"),
        ("cookie", "c"),
    ] {
        headers.append(name, value.parse().unwrap());
    }
    let asked = request_of(Endpoint::Messages, MESSAGES).received(&headers, Timestamp::UNIX_EPOCH);
    let (answer, told) = call(&llm(), &asked, &[&claude(&fake, "a")]).await;
    let (status, relayed, usage) = full(answer.unwrap());
    assert_eq!((status, relayed.as_str()), (200, body));
    let tokens = Tokens { input: 2, cached_input: 8, cache_write: 5, output: 4, ..Tokens::default() };
    assert_eq!(usage.unwrap().tokens, tokens);
    assert_eq!(told.heard().used.unwrap().tokens, tokens);
    assert_eq!(fake.last_body().unwrap(), MESSAGES.replace("\"pub\"", "\"a-model\""));
    let [received] = fake.received().try_into().unwrap();
    assert_eq!(received.path, "/v1/messages");
    assert_eq!(received.header("anthropic-version"), Some("2024-01-01"));
    let betas: Vec<_> = received.headers.get_all("anthropic-beta").iter().collect();
    assert_eq!(betas, ["a", "b"]);
    for name in ["openai-beta", "x-api-key", "cookie"] {
        assert_eq!(received.header(name), None, "{name}");
    }
    // Without a version of the client's the one that there is.
    chat(&llm(), &request_of(Endpoint::Messages, MESSAGES), &[&claude(&fake, "a")]).await.unwrap();
    assert_eq!(fake.received()[1].header("anthropic-version"), Some("2023-06-01"));
}

#[tokio::test]
async fn a_stream_of_messages_is_relayed_as_it_is_and_its_usage_read() {
    let fake = FakeLlm::start().await;
    let events = [START, BLOCK, PING, HELLO, BLOCK_STOP, END, MESSAGE_STOP];
    fake.reply(Reply::events(events));
    let asked = request_of(Endpoint::Messages, MESSAGES_STREAM);
    let (answer, told) = call(&llm(), &asked, &[&claude(&fake, "a")]).await;
    assert_eq!(rest(&mut stream(answer.unwrap())).await, events.concat());
    assert_eq!(fake.last_body().unwrap(), MESSAGES_STREAM.replace("\"pub\"", "\"a-model\""));
    let end = told.end();
    assert_eq!((end.estimated, end.complete), (false, true));
    assert_eq!(end.tokens, Tokens { input: 10, cached_input: 8, output: 4, ..Tokens::default() });

    // An end after the stop reason is complete; one before it is not.
    fake.reply(Reply::events([START, BLOCK, HELLO, BLOCK_STOP, END]));
    let (answer, told) = call(&llm(), &asked, &[&claude(&fake, "a")]).await;
    let relayed = rest(&mut stream(answer.unwrap())).await;
    assert_eq!(relayed, [START, BLOCK, HELLO, BLOCK_STOP, END, MESSAGE_STOP].concat());
    assert!(told.end().complete);

    let overloaded = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"sk-leak\"}}\n\n";
    for (events, code) in [
        (vec![START, BLOCK, HELLO], "upstream_cut"),
        (vec![START, BLOCK, HELLO, overloaded], "upstream_error"),
    ] {
        fake.reply(Reply::events(events));
        let (answer, told) = call(&llm(), &asked, &[&claude(&fake, "a")]).await;
        let relayed = rest(&mut stream(answer.unwrap())).await;
        let error = relayed.strip_prefix(&[START, BLOCK, HELLO].concat()).unwrap();
        let data = error.strip_prefix("event: error\ndata: ").unwrap();
        let error: Value = serde_json::from_str(data.trim_end()).unwrap();
        assert_eq!((&error["type"], &error["error"]["code"]), (&json!("error"), &json!(code)));
        assert!(!relayed.contains("sk-leak") && !relayed.contains("message_stop"));
        let end = told.end();
        assert_eq!((end.complete, end.estimated), (false, true));
        assert!(end.tokens.output >= 1 && end.tokens.input == 10);
    }
}

#[tokio::test]
async fn what_only_begins_is_no_answer_in_any_dialect() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let overloaded = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"x\"}}\n\n";
    for (events, code) in [
        (vec![START, BLOCK, PING], "upstream_bad_answer"),
        (vec![START, PING, overloaded], "upstream_error"),
        (vec![], "upstream_bad_answer"),
    ] {
        first.reply(Reply::events(events));
        second.reply(Reply::events([START, BLOCK, HELLO, BLOCK_STOP, END, MESSAGE_STOP]));
        let asked = request_of(Endpoint::Messages, MESSAGES_STREAM);
        let (a, b) = (claude(&first, "a"), claude(&second, "b"));
        assert_eq!(chat(&llm(), &asked, &[&a]).await.unwrap_err().code(), code);
        assert_eq!(by(&chat(&llm(), &asked, &[&a, &b]).await.unwrap()), "b");
    }
    let failed = CREATED
        .replace("response.created", "response.failed")
        .replace("\"error\":null", "\"error\":{\"code\":\"rate_limit_exceeded\",\"message\":\"x\"}");
    for (events, code) in [
        (vec![CREATED, ITEM], "upstream_bad_answer"),
        (vec![CREATED, &failed], "upstream_rate_limited"),
        (
            vec!["event: error\ndata: {\"type\":\"error\",\"code\":\"server_error\",\"message\":\"x\"}\n\n"],
            "upstream_error",
        ),
    ] {
        first.reply(Reply::events(events.into_iter().map(str::to_owned).collect::<Vec<_>>()));
        second.reply(Reply::events([CREATED, ITEM, TEXT, COMPLETED]));
        let asked = request_of(Endpoint::Responses, r#"{"model":"pub","stream":true,"input":"hi"}"#);
        let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
        assert_eq!(chat(&llm(), &asked, &[&a]).await.unwrap_err().code(), code);
        assert_eq!(by(&chat(&llm(), &asked, &[&a, &b]).await.unwrap()), "b");
    }
}

#[tokio::test]
async fn responses_are_relayed_with_their_id_and_their_usage() {
    let fake = FakeLlm::start().await;
    let expected = Tokens { input: 2, cached_input: 8, output: 4, reasoning: 2, ..Tokens::default() };
    let body = r#"{"id":"resp_1","object":"response","status":"completed","error":null,"output":[],"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":8},"output_tokens":6,"output_tokens_details":{"reasoning_tokens":2}}}"#;
    fake.reply(Reply::json(body));
    let asked = request_of(Endpoint::Responses, r#"{"model":"pub","input":"hi","max_output_tokens":null}"#);
    let upstream = Upstream { most_output: Some(99), ..Upstream::of(&fake, "a") };
    let (answer, told) = call(&llm(), &asked, &[&upstream]).await;
    let (_, relayed, usage) = full(answer.unwrap());
    assert_eq!((relayed.as_str(), usage.unwrap().tokens), (body, expected));
    assert_eq!(told.heard().answered, Some(("a".into(), Some("resp_1".into()))));
    assert_eq!(fake.last_body().unwrap(), r#"{"model":"a-model","input":"hi","max_output_tokens":99}"#);
    assert_eq!(fake.received()[0].path, "/v1/responses");

    let asked = request_of(Endpoint::Responses, r#"{"model":"pub","stream":true,"input":"hi"}"#);
    fake.reply(Reply::events([CREATED, ITEM, TEXT, COMPLETED]));
    let (answer, told) = call(&llm(), &asked, &[&upstream]).await;
    let expected_body = r#"{"model":"a-model","max_output_tokens":99,"stream":true,"input":"hi"}"#;
    assert_eq!(fake.last_body().unwrap(), expected_body);
    assert_eq!(told.heard().answered, Some(("a".into(), Some("resp_1".into()))));
    assert_eq!(told.heard().ended, None);
    assert_eq!(rest(&mut stream(answer.unwrap())).await, [CREATED, ITEM, TEXT, COMPLETED].concat());
    assert_eq!(told.heard().ended.as_deref(), Some("resp_1"));
    let end = told.end();
    assert_eq!((end.tokens, end.complete, end.estimated), (expected, true, false));

    fake.reply(Reply::events([CREATED, ITEM, TEXT]));
    let (answer, told) = call(&llm(), &asked, &[&upstream]).await;
    let relayed = rest(&mut stream(answer.unwrap())).await;
    let last = relayed.rsplit("data: ").next().unwrap();
    let error: Value = serde_json::from_str(last.trim_end()).unwrap();
    assert_eq!(
        error,
        json!({ "type": "error", "code": "upstream_cut", "message": "the provider ended the stream before the answer was complete", "param": null, "sequence_number": 3 })
    );
    assert!(!told.end().complete);
}

#[tokio::test]
async fn a_request_that_cannot_be_kept_apart_or_metered_is_refused() {
    let parse = |endpoint, body: &str| {
        LlmRequest::parse(endpoint, body.to_owned().into())
            .map(|_| ())
            .map_err(|e| (e.code(), e.param().map(str::to_owned)))
    };
    for (members, param) in [
        (r#""background":true"#, "background"),
        (r#""conversation":"conv_1""#, "conversation"),
        (r#""prompt":{"id":"pmpt_1"}"#, "prompt"),
        (r#""input":[{"role":"user","content":[{"type":"input_file","file_id":"file-1"}]}]"#, "file_id"),
    ] {
        let got = parse(Endpoint::Responses, &format!(r#"{{"model":"m",{members}}}"#));
        assert_eq!(got, Err(("unsupported_parameter", Some(param.to_owned()))), "{members}");
    }
    for members in [
        r#""background":false,"conversation":null,"prompt":null"#,
        r#""input":"say \"file_id\":\"x\"""#,
        r#""tools":[{"parameters":{"properties":{"file_id":{"type":"string"}}}}]"#,
    ] {
        assert_eq!(parse(Endpoint::Responses, &format!(r#"{{"model":"m",{members}}}"#)), Ok(()), "{members}");
    }
    let missing = parse(Endpoint::Messages, r#"{"model":"m","messages":[]}"#);
    assert_eq!(missing, Err(("missing_required_parameter", Some("max_tokens".to_owned()))));
    assert_eq!(parse(Endpoint::CountTokens, r#"{"model":"m","messages":[]}"#), Ok(()));
}

#[tokio::test]
async fn embeddings_go_to_no_other_model() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    first.reply(Reply::status(500));
    second.reply(Reply::json(r#"{"object":"list","data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}"#));
    let asked = request_of(Endpoint::Embeddings, r#"{"model":"pub","input":["one","two"]}"#);
    let (a, mut b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    assert_eq!(chat(&llm(), &asked, &[&a, &b]).await.unwrap_err().code(), "upstream_error");
    assert_eq!(second.calls(), 0);
    b.target.model = a.target.model.clone();
    let answer = chat(&llm(), &asked, &[&a, &b]).await.unwrap();
    assert_eq!(by(&answer), "b");
    let usage = full(answer).2.unwrap();
    assert_eq!((usage.tokens, usage.estimated), (Tokens { input: 7, ..Tokens::default() }, false));
    assert_eq!(second.received()[0].path, "/v1/embeddings");
}

#[tokio::test]
async fn chat_is_translated_for_a_provider_of_messages() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::json(r#"{"id":"msg_1","type":"message","role":"assistant","model":"claude","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn","usage":{"input_tokens":2,"cache_read_input_tokens":8,"output_tokens":4}}"#));
    let (answer, told) = call(&llm(), &plain(), &[&claude(&fake, "a")]).await;
    let (status, body, _) = full(answer.unwrap());
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200);
    assert_eq!(body["choices"][0]["message"]["content"], "hi");
    assert_eq!(body["usage"]["prompt_tokens"], 10);
    assert_eq!(
        told.heard().used.unwrap().tokens,
        Tokens { input: 2, cached_input: 8, output: 4, ..Tokens::default() }
    );
    assert_eq!(fake.received()[0].path, "/v1/messages");
    assert_eq!(
        sent(&fake),
        json!({ "model": "a-model", "max_tokens": 4096, "messages": [{ "role": "user", "content": "one two three" }] })
    );

    fake.reply(Reply::events([START, BLOCK, PING, HELLO, BLOCK_STOP, END, MESSAGE_STOP]));
    let (answer, told) = call(&llm(), &streaming(), &[&claude(&fake, "a")]).await;
    let relayed = rest(&mut stream(answer.unwrap())).await;
    assert!(relayed.contains("\"content\":\"hello\"") && relayed.ends_with("data: [DONE]\n\n"), "{relayed}");
    assert!(!relayed.contains("\"usage\":{"), "the client did not ask for it: {relayed}");
    assert_eq!(told.end().tokens, Tokens { input: 10, cached_input: 8, output: 4, ..Tokens::default() });
    assert!(told.end().complete && !told.end().estimated);

    // The provider's own words about the request, in the caller's dialect.
    fake.reply(Reply::Raw(
        Raw::json(r#"{"type":"error","error":{"type":"invalid_request_error","message":"too long"}}"#)
            .status(400),
    ));
    let (status, body, _) = full(chat(&llm(), &plain(), &[&claude(&fake, "a")]).await.unwrap());
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (status, &body["error"]["message"], &body["error"]["type"]),
        (400, &json!("too long"), &json!("invalid_request_error"))
    );
}

#[tokio::test]
async fn messages_are_translated_for_a_provider_of_chat() {
    let fake = FakeLlm::start().await;
    let asked = request_of(Endpoint::Messages, MESSAGES);
    fake.reply(Reply::json(r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":4}}"#));
    let (status, body, _) = full(chat(&llm(), &asked, &[&Upstream::of(&fake, "a")]).await.unwrap());
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (status, &body["content"][0]["text"], &body["stop_reason"]),
        (200, &json!("hi"), &json!("end_turn"))
    );
    assert_eq!(fake.received()[0].path, "/v1/chat/completions");
    assert_eq!(
        sent(&fake),
        json!({ "model": "a-model", "max_completion_tokens": 50, "messages": [{ "role": "user", "content": "one two three" }] })
    );

    let asked = request_of(Endpoint::Messages, MESSAGES_STREAM);
    fake.reply(Reply::events([
        "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
        "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello\"},\"finish_reason\":null}]}\n\n",
        "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
        "data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":4}}\n\n",
        "data: [DONE]\n\n",
    ]));
    let (answer, told) = call(&llm(), &asked, &[&Upstream::of(&fake, "a")]).await;
    let relayed = rest(&mut stream(answer.unwrap())).await;
    assert!(
        relayed.starts_with("event: message_start\n")
            && relayed.ends_with("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"),
        "{relayed}"
    );
    assert!(relayed.contains("\"output_tokens\":4") && relayed.contains("\"text\":\"hello\""), "{relayed}");
    let end = told.end();
    assert_eq!(
        (end.tokens, end.complete, end.estimated),
        (Tokens { input: 10, output: 4, ..Tokens::default() }, true, false)
    );

    // Cut in the middle: an error of this dialect, and nothing invented.
    fake.reply(Reply::events([
        "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello\"}}]}\n\n",
    ]));
    let (answer, _) = call(&llm(), &asked, &[&Upstream::of(&fake, "a")]).await;
    let relayed = rest(&mut stream(answer.unwrap())).await;
    assert!(relayed.contains("event: error\n") && !relayed.contains("message_stop"), "{relayed}");
}

/// Streams that come in one piece, and hold something that the caller's dialect has no word for.
#[tokio::test]
async fn a_stream_that_cannot_be_translated_is_no_answer_and_no_end() {
    let chunk = |choice: &str| format!("data: {{\"id\":\"c\",\"choices\":[{choice}]}}\n\n");
    let hello = chunk(r#"{"index":0,"delta":{"content":"hello"},"finish_reason":null}"#);
    let stop = chunk(r#"{"index":0,"delta":{},"finish_reason":"stop"}"#);
    let done = "data: [DONE]\n\n".to_owned();
    let nameless = chunk(
        r#"{"index":0,"delta":{"tool_calls":[{"index":0,"id":"","function":{"name":"f","arguments":"{}"}}]}}"#,
    );
    let second = chunk(r#"{"index":1,"delta":{"content":"x"}}"#);
    let odd_block = "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"server_tool_use\",\"id\":\"s\",\"name\":\"x\",\"input\":{}}}\n\n";
    let of_chat: Vec<Vec<String>> = vec![
        vec![hello.clone(), done.clone()],
        vec![stop.clone(), hello.clone(), done.clone()],
        vec![nameless, stop.clone(), done.clone()],
        vec![second, stop, done],
    ];
    let of_messages: Vec<Vec<String>> = vec![
        [START, odd_block, END, MESSAGE_STOP].map(str::to_owned).to_vec(),
        [START, BLOCK, HELLO, BLOCK_STOP, MESSAGE_STOP].map(str::to_owned).to_vec(),
    ];
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let messages = request_of(Endpoint::Messages, MESSAGES_STREAM);
    let b = Upstream::of(&second, "b");
    for (kind, asked, events) in of_chat
        .into_iter()
        .map(|events| (ProviderKind::Openai, messages.clone(), events))
        .chain(of_messages.into_iter().map(|events| (ProviderKind::Anthropic, streaming(), events)))
    {
        let a = Upstream { kind, ..Upstream::of(&first, "a") };
        first.reply(Reply::events([events.concat()]));
        let failure = chat(&llm(), &asked, &[&a]).await.unwrap_err();
        assert_eq!(failure.code(), "upstream_bad_answer", "{events:?}");
        assert_eq!(by(&chat(&llm(), &asked, &[&a, &b]).await.unwrap()), "b", "{events:?}");
        // In two pieces what came first is with the caller already: then it ends as an error.
        let (head, tail) = (events[..events.len() - 1].concat(), events[events.len() - 1].clone());
        first.reply(Reply::Raw(Raw::events([head]).wait(Duration::from_millis(20)).then(tail)));
        let (answer, told) = call(&llm(), &asked, &[&a]).await;
        if let Ok(answer) = answer {
            let relayed = rest(&mut stream(answer)).await;
            assert!(relayed.contains("upstream_bad_answer"), "{events:?}: {relayed}");
            assert!(!relayed.contains("[DONE]") && !relayed.contains("message_stop"), "{relayed}");
            assert_eq!(told.heard().outcome, Some(Outcome::Partial));
        }
    }
}

#[tokio::test]
async fn who_only_looks_does_not_keep_a_target_at_rest() {
    let fake = FakeLlm::start().await;
    let a = claude(&fake, "a");
    let llm = llm();
    fake.reply(Reply::status(500));
    for _ in 0..5 {
        drop(chat(&llm, &plain(), &[&a]).await);
    }
    assert_eq!(chat(&llm, &plain(), &[&a]).await.unwrap_err().code(), "upstream_resting");
    fake.reply(Reply::Stall);
    // The first after the rest is given up by its client: the next may try.
    let routes = vec![a.route()];
    eventually(SOON, || async {
        let call = llm.call(Arc::new(plain()), routes.clone(), Told::default());
        tokio::select! {
            result = call => { assert_eq!(result.unwrap_err().code(), "upstream_resting"); false }
            () = fake.wait_for_calls(6) => true,
        }
    })
    .await;
    // What cannot be said in the provider's dialect does not count as a try either.
    let body = r#"{"model":"pub","n":2,"messages":[{"role":"user","content":"x"}]}"#;
    let untranslatable = request(body);
    assert_eq!(chat(&llm, &untranslatable, &[&a]).await.unwrap_err().code(), "unsupported_parameter");
    fake.reply(Reply::json(r#"{"type":"message","role":"assistant","content":[],"stop_reason":"end_turn","usage":{"input_tokens":1,"output_tokens":1}}"#));
    chat(&llm, &plain(), &[&a]).await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_translated_is_refused_unless_another_target_takes_it() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let asked = request(r#"{"model":"pub","logit_bias":{"1":2},"messages":[{"role":"user","content":"x"}]}"#);
    let (a, b) = (claude(&first, "a"), Upstream::of(&second, "b"));
    let failure = chat(&llm(), &asked, &[&a]).await.unwrap_err();
    assert_eq!(
        (failure.kind(), failure.code(), failure.param()),
        (Kind::InvalidRequest, "unsupported_parameter", Some("logit_bias"))
    );
    assert_eq!(by(&chat(&llm(), &asked, &[&a, &b]).await.unwrap()), "b");
    assert_eq!(first.calls(), 0);
    // The failure of the target that could be asked is the answer, not that the other could not.
    second.reply(Reply::status(500));
    assert_eq!(chat(&llm(), &asked, &[&b, &a]).await.unwrap_err().code(), "upstream_error");

    let mut headers = HeaderMap::new();
    headers.insert("anthropic-beta", "x".parse().unwrap());
    let beta = request_of(Endpoint::Messages, MESSAGES).received(&headers, Timestamp::UNIX_EPOCH);
    let failure = chat(&llm(), &beta, &[&Upstream::of(&second, "b")]).await.unwrap_err();
    assert_eq!((failure.code(), failure.param()), ("unsupported_parameter", Some("anthropic-beta")));
    for endpoint in [Endpoint::Responses, Endpoint::Embeddings] {
        let failure =
            chat(&llm(), &request_of(endpoint, r#"{"model":"m","input":"x"}"#), &[&a]).await.unwrap_err();
        assert_eq!(failure.code(), "unsupported_endpoint");
    }
}

#[tokio::test]
async fn a_target_that_cannot_be_paid_is_passed_over() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    first.reply(Reply::status(503));
    let routes = vec![Upstream::of(&first, "a").route(), Upstream::of(&second, "b").route()];
    let told = Told::default();
    told.0.lock().too_dear.push("b");
    let failure = llm().call(Arc::new(plain()), routes.clone(), told.clone()).await.unwrap_err();
    assert_eq!(
        (failure.code(), second.calls()),
        ("upstream_error", 0),
        "what failed says more than what was not tried"
    );
    assert_eq!(told.heard().outcome, Some(Outcome::Error));
    let told = Told::default();
    told.0.lock().too_dear.extend(["a", "b"]);
    let failure = llm().call(Arc::new(plain()), routes, told).await.unwrap_err();
    assert_eq!((failure.code(), failure.is_final()), ("budget_exceeded", true));
}

#[tokio::test]
async fn a_target_that_keeps_failing_rests_and_is_tried_again() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    let llm = llm();
    first.reply(Reply::status(400));
    for _ in 0..20 {
        chat(&llm, &plain(), &[&a]).await.unwrap();
    }
    assert_eq!(first.calls(), 20, "what is the caller's fault is not the target's");
    first.reply(Reply::status(500));
    for _ in 0..5 {
        assert_eq!(chat(&llm, &plain(), &[&a]).await.unwrap_err().code(), "upstream_error");
    }
    let failure = chat(&llm, &plain(), &[&a]).await.unwrap_err();
    assert_eq!((failure.code(), failure.kind()), ("upstream_resting", Kind::Unavailable));
    assert!(failure.retry_after().is_some_and(|rest| rest <= Duration::from_secs(2)));
    assert_eq!(by(&chat(&llm, &plain(), &[&a, &b]).await.unwrap()), "b");
    assert_eq!(first.calls(), 25);
    first.reply(Reply::Echo);
    eventually(SOON, || async { chat(&llm, &plain(), &[&a]).await.is_ok() }).await;
}

#[tokio::test]
async fn streams_that_die_in_the_middle_are_failures_and_those_that_end_are_not() {
    let fake = FakeLlm::start().await;
    let upstream = Upstream::of(&fake, "a");
    let llm = llm();
    let word = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\n";
    let whole = [word, "data: [DONE]\n\n"];
    for (events, times) in [(&whole[..1], 4), (&whole[..], 1), (&whole[..1], 5)] {
        fake.reply(Reply::events(events.iter().copied()));
        for _ in 0..times {
            rest(&mut stream(chat(&llm, &streaming(), &[&upstream]).await.unwrap())).await;
        }
    }
    assert_eq!(chat(&llm, &streaming(), &[&upstream]).await.unwrap_err().code(), "upstream_resting");
    // One that a client leaves says nothing of the target.
    let fake = FakeLlm::start().await;
    let upstream = Upstream::of(&fake, "b");
    fake.reply(Reply::Raw(Raw::events([word]).wait_for_release()));
    for _ in 0..10 {
        drop(stream(chat(&llm, &streaming(), &[&upstream]).await.unwrap()));
    }
}

#[tokio::test]
async fn a_target_is_left_alone_for_as_long_as_it_asks() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    let llm = llm();
    first.reply(Reply::Raw(Raw::json("{}").status(429).header("retry-after", "30")));
    assert_eq!(by(&chat(&llm, &plain(), &[&a, &b]).await.unwrap()), "b");
    assert_eq!(by(&chat(&llm, &plain(), &[&a, &b]).await.unwrap()), "b");
    let failure = chat(&llm, &plain(), &[&a]).await.unwrap_err();
    assert!(
        matches!(failure, LlmError::RateLimited { retry_after: Some(wait), .. } if wait <= Duration::from_secs(30)),
        "{failure:?}"
    );
    assert_eq!(first.calls(), 1);
    // Another workspace's target of the same name is another target.
    let other = obol_llm::Route::new(
        "other",
        &a.model(),
        a.target.clone(),
        &obol_model::snapshot::Provider {
            kind: a.kind,
            base_url: a.base_url.clone(),
            auth: None,
            allow_private: true,
        },
        None,
    );
    drop(llm.call(Arc::new(plain()), vec![Arc::new(other)], Told::default()).await);
    assert_eq!(first.calls(), 2);
}

#[tokio::test]
async fn targets_with_weights_share_the_requests() {
    let (first, second, third) = (FakeLlm::start().await, FakeLlm::start().await, FakeLlm::start().await);
    let mut upstreams = [Upstream::of(&first, "a"), Upstream::of(&second, "b"), Upstream::of(&third, "c")];
    upstreams[1].target.weight = std::num::NonZeroU32::new(3);
    upstreams[2].target.weight = std::num::NonZeroU32::new(1);
    let llm = llm();
    for _ in 0..200 {
        chat(&llm, &plain(), &[&upstreams[0], &upstreams[1], &upstreams[2]]).await.unwrap();
    }
    // One without a weight is a fallback. The bounds are ten standard deviations wide.
    assert_eq!(first.calls(), 0);
    assert!(
        (90..=200).contains(&second.calls()) && third.calls() > 0,
        "{} {}",
        second.calls(),
        third.calls()
    );
    second.reply(Reply::status(500));
    third.reply(Reply::status(500));
    assert_eq!(by(&chat(&llm, &plain(), &[&upstreams[0], &upstreams[1], &upstreams[2]]).await.unwrap()), "a");
}

#[tokio::test]
async fn a_stream_whose_provider_is_slow_is_kept_alive_and_may_still_fall_back() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    let hasty = Llm::new(
        dialer(),
        LlmOptions {
            commit_after: Duration::from_millis(20),
            first_byte_timeout: Duration::from_secs(1),
            ..options()
        },
    );
    first.reply(Reply::Stall);
    let (answer, told) = call(&hasty, &streaming(), &[&a, &b]).await;
    let answer = answer.unwrap();
    assert!(answer.route.is_none());
    let relayed = rest(&mut stream(answer)).await;
    let comment = ": waiting for the provider\n\n";
    assert!(relayed.starts_with(&comment.repeat(2)), "{relayed}");
    assert!(
        relayed.trim_start_matches(comment).starts_with("data: {") && relayed.ends_with("data: [DONE]\n\n")
    );
    assert_eq!(told.heard().answered.unwrap().0, "b");
    assert_eq!(told.heard().outcome, Some(Outcome::Ok));

    // What fails then is told by an event.
    let (answer, told) = call(&hasty, &streaming(), &[&a]).await;
    let relayed = rest(&mut stream(answer.unwrap())).await;
    let error = relayed.trim_start_matches(comment);
    assert!(
        error.starts_with("data: {\"error\":{")
            && error.contains("upstream_timeout")
            && !error.contains("[DONE]"),
        "{error}"
    );
    assert_eq!(told.heard().outcome, Some(Outcome::Partial));

    // A client that leaves while it waits ends the work.
    let left = first.left_early();
    let (answer, told) = call(&hasty, &streaming(), &[&a]).await;
    let mut open = stream(answer.unwrap());
    assert_eq!(open.next().await.unwrap(), comment);
    drop(open);
    eventually(SOON, || async { first.left_early() == left + 1 }).await;
    assert_eq!((told.heard().outcome, told.heard().due.as_deref()), (None, Some("a")));
}

#[tokio::test]
async fn a_model_may_have_limits_of_its_own() {
    let fake = FakeLlm::start().await;
    let patient = Upstream::of(&fake, "a");
    let hasty = Upstream { first_byte_timeout_s: Some(1), ..Upstream::of(&fake, "a") };
    let restless = Upstream { idle_timeout_s: Some(1), ..Upstream::of(&fake, "a") };
    fake.reply(Reply::Stall);
    let failure = chat(&llm(), &streaming(), &[&hasty]).await.unwrap_err();
    assert_eq!(failure.code(), "upstream_timeout");
    let word = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\n";
    fake.reply(Reply::Raw(Raw::events([word]).wait(Duration::from_millis(1500)).then("data: [DONE]\n\n")));
    for (upstream, is_cut) in [(&patient, false), (&restless, true)] {
        let relayed = rest(&mut stream(chat(&llm(), &streaming(), &[upstream]).await.unwrap())).await;
        assert_eq!(relayed.contains("upstream_timeout"), is_cut, "{relayed}");
    }
}

#[tokio::test]
async fn a_client_has_the_end_of_its_answer_only_when_its_usage_is_known() {
    let fake = FakeLlm::start().await;
    let word =
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\n\n";
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1000,\"completion_tokens\":4}}\n\n";
    fake.reply(Reply::Raw(
        Raw::events([word]).wait(Duration::from_millis(50)).then(usage).wait_for_release(),
    ));
    let (answer, told) = call(&llm(), &streaming(), &[&Upstream::of(&fake, "a")]).await;
    let mut open = stream(answer.unwrap());
    assert_eq!(open.next().await.unwrap(), word);
    drop(open);
    assert_eq!(told.end().tokens.input, 1000);
    assert!(!told.end().estimated);
}
