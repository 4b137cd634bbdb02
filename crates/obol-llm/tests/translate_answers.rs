//! Answers and errors between the dialects.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

use http::StatusCode;
use jiff::Timestamp;
use obol_llm::translate::{
    Dialect, Labels, completion_to_message, error_frame, error_to_chat, error_to_messages,
    message_to_completion, messages_error,
};
use obol_model::Kind;
use serde_json::{Value, json};

const LABELS: Labels<'static> =
    Labels { id: "id-of-ours", model: "model-of-ours", created: Timestamp::UNIX_EPOCH };

fn completion(message: &str) -> Value {
    serde_json::from_slice(&message_to_completion(message.as_bytes(), &LABELS).unwrap()).unwrap()
}

fn message(completion: &str) -> Value {
    serde_json::from_slice(&completion_to_message(completion.as_bytes(), &LABELS).unwrap()).unwrap()
}

#[test]
fn a_message_becomes_a_completion() {
    let body = r#"{"id":"msg_01","type":"message","role":"assistant","model":"claude-sonnet-4-5","content":[
        {"type":"thinking","thinking":"hm","signature":"sig"},
        {"type":"text","text":"I'll check \u00e9"},{"type":"text","text":" now.","citations":null},
        {"type":"tool_use","id":"toolu_1","name":"get_weather","input":{"n": 1.50, "big": 123456789012345678901}},
        {"type":"tool_use","id":"toolu_2","name":"wait","input":{}}],
        "stop_reason":"tool_use","stop_sequence":null,
        "usage":{"input_tokens":10,"cache_creation_input_tokens":20,"cache_read_input_tokens":70,"output_tokens":30,"output_tokens_details":{"thinking_tokens":12}}}"#;
    let expected = concat!(
        r#"{"id":"msg_01","object":"chat.completion","created":0,"model":"claude-sonnet-4-5","choices":[{"index":0,"#,
        r#""message":{"role":"assistant","content":"I'll check \u00e9 now.","refusal":null,"tool_calls":["#,
        r#"{"id":"toolu_1","type":"function","function":{"name":"get_weather","arguments":"{\"n\": 1.50, \"big\": 123456789012345678901}"}},"#,
        r#"{"id":"toolu_2","type":"function","function":{"name":"wait","arguments":"{}"}}]},"#,
        r#""logprobs":null,"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":100,"completion_tokens":30,"total_tokens":130,"#,
        r#""prompt_tokens_details":{"cached_tokens":70},"completion_tokens_details":{"reasoning_tokens":12}}}"#,
    );
    assert_eq!(message_to_completion(body.as_bytes(), &LABELS).unwrap(), expected);
}

#[test]
fn a_completion_becomes_a_message() {
    let body = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1741569952,"model":"gpt-5","choices":[{"index":0,
        "message":{"role":"assistant","content":"Caf\u00e9","refusal":null,"annotations":[],"tool_calls":[
          {"id":"call_1","type":"function","function":{"name":"f","arguments":"{\"n\": 1.50}"}},
          {"id":"call_2","type":"function","function":{"name":"g","arguments":""}}]},
        "logprobs":null,"finish_reason":"tool_calls"}],
        "usage":{"prompt_tokens":100,"completion_tokens":30,"total_tokens":130,"prompt_tokens_details":{"cached_tokens":70},
                 "completion_tokens_details":{"reasoning_tokens":12}},"service_tier":"default"}"#;
    let expected = concat!(
        r#"{"id":"chatcmpl-1","type":"message","role":"assistant","model":"gpt-5","content":[{"type":"text","text":"Caf\u00e9"},"#,
        r#"{"type":"tool_use","id":"call_1","name":"f","input":{"n": 1.50}},{"type":"tool_use","id":"call_2","name":"g","input":{}}],"#,
        r#""stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":30,"cache_creation_input_tokens":0,"#,
        r#""cache_read_input_tokens":70,"output_tokens":30}}"#,
    );
    assert_eq!(completion_to_message(body.as_bytes(), &LABELS).unwrap(), expected);
}

#[test]
fn stop_reasons_have_their_counterparts() {
    for (stop, expected) in [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("pause_turn", "pause_turn"),
    ] {
        let body = format!(r#"{{"content":[],"stop_reason":"{stop}"}}"#);
        let completion = completion(&body);
        assert_eq!(completion["choices"][0]["finish_reason"], expected);
        assert_eq!(completion["choices"][0]["message"]["content"], "");
        assert_eq!(
            (&completion["id"], &completion["model"]),
            (&json!("id-of-ours"), &json!("model-of-ours"))
        );
        assert!(completion.get("usage").is_none(), "nothing is invented");
    }
    for (said, finish, expected) in [
        (r#""content":"x""#, "stop", "end_turn"),
        (r#""content":"x""#, "length", "max_tokens"),
        (r#""content":null"#, "content_filter", "refusal"),
        (r#""content":null,"refusal":"I can't""#, "stop", "refusal"),
        (r#""tool_calls":[{"id":"c","function":{"name":"f","arguments":{}}}]"#, "tool_calls", "tool_use"),
        (r#""tool_calls":[{"id":"c","function":{"name":"f"}}]"#, "stop", "tool_use"),
        (r#""content":"x""#, "insufficient_system_resource", "insufficient_system_resource"),
    ] {
        let body = format!(r#"{{"choices":[{{"message":{{{said}}},"finish_reason":"{finish}"}}]}}"#);
        let message = message(&body);
        assert_eq!(message["stop_reason"], expected, "{body}");
        assert_eq!(message["usage"]["output_tokens"], 0);
    }
}

#[test]
fn a_call_that_the_limit_cut_is_left_out() {
    let body = |finish: &str| {
        format!(
            r#"{{"choices":[{{"message":{{"content":"x","tool_calls":[{{"id":"c","function":{{"name":"f","arguments":"{{\"a\":"}}}}]}},"finish_reason":"{finish}"}}]}}"#
        )
    };
    let cut = message(&body("length"));
    assert_eq!(cut["content"], json!([{"type": "text", "text": "x"}]));
    assert_eq!(cut["stop_reason"], "max_tokens");
    let error = completion_to_message(body("tool_calls").as_bytes(), &LABELS).unwrap_err();
    assert_eq!(error.to_string(), "the provider sent a tool call whose arguments are no JSON object");
}

#[test]
fn what_is_no_answer_is_a_bad_one() {
    for body in [
        "[]",
        "{}",
        r#"{"content":"x","stop_reason":"end_turn"}"#,
        r#"{"content":[{"type":"text","text":"x"}]}"#,
        r#"{"content":[{"type":"text"}],"stop_reason":"end_turn"}"#,
        r#"{"content":[{"type":"tool_use","id":"t","input":{}}],"stop_reason":"tool_use"}"#,
        r#"{"content":[{"type":"server_tool_use","id":"t","name":"web_search","input":{}}],"stop_reason":"end_turn"}"#,
        r#"{"type":"error","error":{"type":"api_error","message":"x"}}"#,
    ] {
        assert!(message_to_completion(body.as_bytes(), &LABELS).is_err(), "{body}");
    }
    for body in [
        "{}",
        r#"{"choices":[]}"#,
        r#"{"choices":[{"message":{"content":"x"}}]}"#,
        r#"{"choices":[{"message":{"content":["x"]},"finish_reason":"stop"}]}"#,
        r#"{"choices":[{"message":{"content":"a"},"finish_reason":"stop"},{"message":{"content":"b"},"finish_reason":"stop"}]}"#,
        r#"{"choices":[{"message":{"function_call":{"name":"f","arguments":"{}"}},"finish_reason":"function_call"}]}"#,
        r#"{"choices":[{"message":{"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}"#,
        r#"{"error":{"message":"x"}}"#,
    ] {
        assert!(completion_to_message(body.as_bytes(), &LABELS).is_err(), "{body}");
    }
}

#[test]
fn errors_of_the_chat_dialect_become_those_of_messages() {
    for (status, body, expected) in [
        (
            Some(400),
            r#"{"error":{"message":"too long","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}"#,
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"too long","code":"context_length_exceeded"}}"#,
        ),
        (
            Some(429),
            r#"{"error":{"message":"no money","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}"#,
            r#"{"type":"error","error":{"type":"billing_error","message":"no money","code":"insufficient_quota"}}"#,
        ),
        (
            Some(404),
            r#"{"error":{"message":"m","type":"odd","code":null}}"#,
            r#"{"type":"error","error":{"type":"not_found_error","message":"m"}}"#,
        ),
        (
            None,
            r#"{"error":{"message":"m","code":429}}"#,
            r#"{"type":"error","error":{"type":"rate_limit_error","message":"m"}}"#,
        ),
        (None, r#"{"error":"m"}"#, r#"{"type":"error","error":{"type":"api_error","message":"m"}}"#),
        (
            Some(503),
            "<html>",
            r#"{"type":"error","error":{"type":"overloaded_error","message":"the provider reported an error"}}"#,
        ),
    ] {
        let status = status.map(|status| StatusCode::from_u16(status).unwrap());
        assert_eq!(error_to_messages(status, body.as_bytes()), expected);
    }
}

#[test]
fn errors_of_the_messages_dialect_become_those_of_chat() {
    for (word, expected) in [
        ("invalid_request_error", "invalid_request_error"),
        ("authentication_error", "authentication_error"),
        ("billing_error", "insufficient_quota"),
        ("permission_error", "permission_error"),
        ("not_found_error", "invalid_request_error"),
        ("request_too_large", "invalid_request_error"),
        ("rate_limit_error", "rate_limit_error"),
        ("api_error", "server_error"),
        ("timeout_error", "server_error"),
        ("overloaded_error", "server_error"),
        ("of_tomorrow_error", "of_tomorrow_error"),
    ] {
        let body =
            format!(r#"{{"type":"error","error":{{"type":"{word}","message":"m"}},"request_id":"req_1"}}"#);
        let expected =
            format!(r#"{{"error":{{"message":"m","type":"{expected}","param":null,"code":"{word}"}}}}"#);
        assert_eq!(error_to_chat(None, body.as_bytes()), expected);
    }
    assert_eq!(
        error_to_chat(Some(StatusCode::UNAUTHORIZED), b""),
        r#"{"error":{"message":"the provider reported an error","type":"authentication_error","param":null,"code":null}}"#
    );
}

#[test]
fn errors_of_ours_are_said_in_the_messages_dialect() {
    let body = messages_error(Kind::TooLarge, "too_large", "the body is too large");
    assert_eq!(
        body,
        r#"{"type":"error","error":{"type":"request_too_large","message":"the body is too large","code":"too_large"}}"#
    );
    assert_eq!(error_frame(Dialect::Chat, b"{\n}"), "data: { }\n\n");
    assert_eq!(error_frame(Dialect::Messages, b"{}"), "event: error\ndata: {}\n\n");
}
