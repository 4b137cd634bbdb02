//! Requests between the dialects: what is carried, and what is refused by name.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

use std::num::NonZeroU32;

use obol_llm::translate::{
    RequestError, ToChat, ToMessages, TokenLimit, Translated, chat_to_messages, messages_to_chat,
};
use obol_model::Kind;
use proptest::prelude::*;
use serde_json::{Value, json};

fn to_messages(system_turns: bool) -> ToMessages<'static> {
    ToMessages { model: "claude", max_tokens: NonZeroU32::new(4096).unwrap(), system_turns }
}

const TO_CHAT: ToChat<'static> =
    ToChat { model: "gpt", limit: TokenLimit::MaxCompletionTokens, stream_usage: true };

fn text(translated: &Translated) -> String {
    String::from_utf8(translated.body.to_vec()).unwrap()
}

fn messages(chat: &str) -> Result<String, RequestError> {
    chat_to_messages(chat.as_bytes(), &to_messages(false)).map(|t| text(&t))
}

fn chat(messages: &str) -> Result<String, RequestError> {
    messages_to_chat(messages.as_bytes(), &TO_CHAT).map(|t| text(&t))
}

/// A chat request with one user message and `more` members.
fn chat_with(more: &str) -> String {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}]{more}}}"#)
}

fn messages_with(more: &str) -> String {
    format!(r#"{{"model":"m","max_tokens":9,"messages":[{{"role":"user","content":"hi"}}]{more}}}"#)
}

#[test]
fn a_chat_request_with_everything_that_can_be_carried() {
    let body = r#"{
      "model": "pub", "user": "u-1", "stream": true, "stream_options": {"include_usage": true},
      "max_completion_tokens": 300, "temperature": 0.70, "top_p": 1.0, "stop": "END",
      "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Caf\u00e9"}]},
        {"role": "user", "content": [
          {"type": "text", "text": "What is \"this\"?"},
          {"type": "image_url", "image_url": {"url": "data:image\/png;base64,iVBO\/w=="}},
          {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "auto"}}]},
        {"role": "assistant", "content": null, "refusal": null, "tool_calls": [
          {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{\"n\": 12345678901234567890.10}"}},
          {"id": "call_2", "type": "function", "function": {"name": "wait", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a cat"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
        {"role": "user", "content": "Sure?"}
      ],
      "tools": [
        {"type": "function", "function": {"name": "look", "description": "Looks", "strict": true,
          "parameters": {"type": "object",  "properties": {"n": {"type": "number"}}}}},
        {"type": "function", "function": {"name": "wait"}}
      ],
      "tool_choice": "required", "parallel_tool_calls": false
    }"#;
    let translated = chat_to_messages(body.as_bytes(), &to_messages(false)).unwrap();
    assert!(translated.stream && translated.include_usage);
    let expected = concat!(
        r#"{"model":"claude","max_tokens":300,"system":[{"type":"text","text":"Be brief."},{"type":"text","text":"Caf\u00e9"}],"#,
        r#""messages":[{"role":"user","content":[{"type":"text","text":"What is \"this\"?"},"#,
        r#"{"type":"image","source":{"type":"base64","media_type":"image/png","data":"iVBO/w=="}},"#,
        r#"{"type":"image","source":{"type":"url","url":"https://example.com/a.png"}}]},"#,
        r#"{"role":"assistant","content":[{"type":"tool_use","id":"call_1","name":"look","input":{"n": 12345678901234567890.10}},"#,
        r#"{"type":"tool_use","id":"call_2","name":"wait","input":{}}]},"#,
        r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"call_1","content":"a cat"},"#,
        r#"{"type":"tool_result","tool_use_id":"call_2","content":[{"type":"text","text":"1"},{"type":"text","text":"2"}]},"#,
        r#"{"type":"text","text":"Sure?"}]}],"#,
        r#""tools":[{"name":"look","description":"Looks","input_schema":{"type": "object",  "properties": {"n": {"type": "number"}}},"strict":true},"#,
        r#"{"name":"wait","input_schema":{"type":"object","properties":{}}}],"#,
        r#""tool_choice":{"type":"any","disable_parallel_tool_use":true},"#,
        r#""stop_sequences":["END"],"temperature":0.70,"top_p":1.0,"metadata":{"user_id":"u-1"},"stream":true}"#,
    );
    assert_eq!(text(&translated), expected);
}

#[test]
fn a_messages_request_with_everything_that_can_be_carried() {
    let body = r#"{
      "model": "pub", "max_tokens": 1024, "stream": true, "temperature": 1.0, "top_p": 0.9, "cache_control": {"type": "ephemeral"},
      "metadata": {"user_id": "u-1"}, "stop_sequences": ["A", "\u0042"], "thinking": {"type": "disabled"}, "service_tier": "auto",
      "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Be kind."}],
      "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [
          {"type": "text", "text": "Let me see.", "citations": null},
          {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"n": 1.50}},
          {"type": "tool_use", "id": "toolu_2", "name": "wait", "input": {}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [
          {"type": "text", "text": "And this?"},
          {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO/w=="}},
          {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
          {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "cat"}]},
          {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": false, "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Now in French."}
      ],
      "tools": [{"name": "look", "description": "Looks", "input_schema": {"type": "object"}, "type": "custom", "strict": true,
                 "eager_input_streaming": true}],
      "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": true}
    }"#;
    let translated = messages_to_chat(body.as_bytes(), &TO_CHAT).unwrap();
    assert!(translated.stream && translated.include_usage);
    let expected = concat!(
        r#"{"model":"gpt","messages":[{"role":"system","content":[{"type":"text","text":"Be brief."},{"type":"text","text":"Be kind."}]},"#,
        r#"{"role":"user","content":"Hello"},"#,
        r#"{"role":"assistant","content":"Let me see.","tool_calls":["#,
        r#"{"id":"toolu_1","type":"function","function":{"name":"look","arguments":"{\"n\": 1.50}"}},"#,
        r#"{"id":"toolu_2","type":"function","function":{"name":"wait","arguments":"{}"}}]},"#,
        r#"{"role":"tool","tool_call_id":"toolu_1","content":[{"type":"text","text":"a"},{"type":"text","text":"cat"}]},"#,
        r#"{"role":"tool","tool_call_id":"toolu_2","content":""},"#,
        r#"{"role":"user","content":[{"type":"text","text":"And this?"},"#,
        r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBO/w=="}},"#,
        r#"{"type":"image_url","image_url":{"url":"https://example.com/a.png"}}]},"#,
        r#"{"role":"system","content":"Now in French."}],"max_completion_tokens":1024,"#,
        r#""tools":[{"type":"function","function":{"name":"look","description":"Looks","parameters":{"type": "object"},"strict":true}}],"#,
        r#""tool_choice":{"type":"function","function":{"name":"look"}},"parallel_tool_calls":false,"#,
        r#""stop":["A","\u0042"],"temperature":1.0,"top_p":0.9,"user":"u-1","stream":true,"stream_options":{"include_usage":true}}"#,
    );
    assert_eq!(text(&translated), expected);
}

#[test]
fn the_limit_is_told_as_the_provider_knows_it() {
    let to = ToChat { limit: TokenLimit::MaxTokens, stream_usage: false, ..TO_CHAT };
    let body = text(&messages_to_chat(messages_with(r#","stream":true"#).as_bytes(), &to).unwrap());
    assert_eq!(
        body,
        r#"{"model":"gpt","messages":[{"role":"user","content":"hi"}],"max_tokens":9,"stream":true}"#
    );
    assert!(messages(&chat_with("")).unwrap().contains(r#""max_tokens":4096"#));
    assert!(messages(&chat_with(r#","max_tokens":7"#)).unwrap().contains(r#""max_tokens":7"#));
    assert!(messages(&chat_with(r#","max_tokens":7,"max_completion_tokens":7"#)).unwrap().contains(":7"));
}

#[test]
fn a_failed_tool_says_so_in_words() {
    let result = |content: &str| {
        let body = format!(
            r#"{{"model":"m","max_tokens":1,"messages":[{{"role":"user","content":[{{"type":"tool_result","tool_use_id":"t","is_error":true{content}}}]}}]}}"#
        );
        serde_json::from_str::<Value>(&chat(&body).unwrap()).unwrap()["messages"][0]["content"].clone()
    };
    assert_eq!(result(""), "Error");
    assert_eq!(result(r#","content":"no \"such\" file""#), r#"Error: no "such" file"#);
    assert_eq!(
        result(r#","content":[{"type":"text","text":"none"}]"#),
        json!([{"type":"text","text":"Error: "},{"type":"text","text":"none"}])
    );
}

#[test]
fn an_answer_of_a_schema_is_asked_for_in_both_dialects() {
    let schema = r#"{"type": "object",  "properties": {"n": {"type": "number"}}}"#;
    let named =
        format!(r#""json_schema":{{"name":"forecast","description":"d","strict":true,"schema":{schema}}}"#);
    let body = chat_with(&format!(r#","response_format":{{"type":"json_schema",{named}}}"#));
    let translated = chat_to_messages(body.as_bytes(), &to_messages(false)).unwrap();
    let config = format!(r#""output_config":{{"format":{{"type":"json_schema","schema":{schema}}}}}"#);
    assert!(text(&translated).contains(&config), "{}", text(&translated));
    let body = messages_with(&format!(",{config}"));
    let translated = messages_to_chat(body.as_bytes(), &TO_CHAT).unwrap();
    let format = format!(
        r#""response_format":{{"type":"json_schema","json_schema":{{"name":"answer","schema":{schema},"strict":true}}}}"#
    );
    assert!(text(&translated).contains(&format), "{}", text(&translated));
}

#[test]
fn null_and_default_members_are_absent() {
    let plain = messages(&chat_with("")).unwrap();
    for more in [
        r#","n":1,"logprobs":false,"seed":null,"logit_bias":{},"store":false,"service_tier":"auto","audio":null"#,
        r#","response_format": { "type" : "text" },"modalities":["text"],"frequency_penalty":0,"presence_penalty":0.0"#,
        r#","tools":[],"tool_choice":"auto","parallel_tool_calls":true,"verbosity":"medium","functions":[],"metadata":{}"#,
        r#","tool_choice":"none","parallel_tool_calls":false,"stop":null,"stream":false,"user":null,"unheard_of":null"#,
        r#","stream_options":null,"prompt_cache_key":"k","max_tokens":null,"stop":[]"#,
    ] {
        assert_eq!(messages(&chat_with(more)).unwrap(), plain, "{more}");
    }
    let plain = chat(&messages_with("")).unwrap();
    for more in [
        r#","thinking":null,"container":null,"mcp_servers":[],"service_tier":"auto","metadata":{"user_id":null}"#,
        r#","stop_sequences":[],"tools":[],"tool_choice":{"type":"auto","disable_parallel_tool_use":true},"stream":false"#,
        r#","tool_choice":{"type":"none"},"system":null,"output_config":{},"unheard_of":null"#,
    ] {
        assert_eq!(chat(&messages_with(more)).unwrap(), plain, "{more}");
    }
}

#[test]
fn what_the_messages_dialect_cannot_say_is_refused_by_name() {
    let message = |message: &str| format!(r#"{{"model":"m","messages":[{message}]}}"#);
    let part = |part: &str| message(&format!(r#"{{"role":"user","content":[{part}]}}"#));
    let tool = |tool: &str| chat_with(&format!(r#","tools":[{tool}]"#));
    for (body, field, says) in [
        (
            chat_with(r#","response_format":{"type":"json_schema","json_schema":{"schema":{},"x":1}}"#),
            "response_format.json_schema.x",
            "not known",
        ),
        (chat_with(r#","response_format":{"type":"json_object"}"#), "response_format", "format"),
        (chat_with(r#","logprobs":true"#), "logprobs", "probabilities"),
        (chat_with(r#","n":2"#), "n", "one answer"),
        (chat_with(r#","seed":0"#), "seed", "seeds"),
        (chat_with(r#","audio":{"voice":"x"}"#), "audio", "sound"),
        (chat_with(r#","modalities":["text","audio"]"#), "modalities", "text"),
        (chat_with(r#","frequency_penalty":0.5"#), "frequency_penalty", "penalties"),
        (chat_with(r#","presence_penalty":-1"#), "presence_penalty", "penalties"),
        (chat_with(r#","logit_bias":{"1":2}"#), "logit_bias", "biases"),
        (chat_with(r#","metadata":{"a":"b"}"#), "metadata", "`user`"),
        (chat_with(r#","store":true"#), "store", "stores"),
        (chat_with(r#","reasoning_effort":"low"}"#).replace("}}", "}"), "reasoning_effort", "thinking"),
        (chat_with(r#","functions":[{"name":"f"}]"#), "functions", "`tools`"),
        (chat_with(r#","function_call":"auto""#), "function_call", "`tool_choice`"),
        (chat_with(r#","web_search_options":{}"#), "web_search_options", "search"),
        (chat_with(r#","unheard_of":0"#), "unheard_of", "not known"),
        (chat_with(r#","temperature":1.5"#), "temperature", "ends at 1"),
        (chat_with(r#","max_tokens":1,"max_completion_tokens":2"#), "max_tokens", "another limit"),
        (chat_with(r#","stream_options":{"x":1}"#), "stream_options.x", "not known"),
        (chat_with(r#","tool_choice":{"type":"allowed_tools"}"#), "tool_choice.type", "`allowed_tools`"),
        (chat_with(r#","tool_choice":"maybe""#), "tool_choice", "`maybe`"),
        (tool(r#"{"type":"custom","custom":{}}"#), "tools[0].type", "`custom`"),
        (tool(r#"{"type":"function","function":{"name":"f","x":1}}"#), "tools[0].function.x", "not known"),
        (message(r#"{"role":"function","name":"f","content":"x"}"#), "messages[0].role", "`function`"),
        (message(r#"{"role":"user","name":"bob","content":"x"}"#), "messages[0].name", "names"),
        (message(r#"{"role":"assistant","content":"x","audio":{"id":"a"}}"#), "messages[0].audio", "sound"),
        (
            message(r#"{"role":"assistant","content":"x","reasoning_content":"hm"}"#),
            "messages[0].reasoning_content",
            "thoughts",
        ),
        (
            message(r#"{"role":"user","content":"x"},{"role":"system","content":"y"}"#),
            "messages[1].role",
            "beginning",
        ),
        (part(r#"{"type":"input_audio","input_audio":{}}"#), "messages[0].content[0].type", "`input_audio`"),
        (part(r#"{"type":"file","file":{}}"#), "messages[0].content[0].type", "`file`"),
        (part(r#"{"type":"text","text":"x","y":1}"#), "messages[0].content[0].y", "not known"),
        (
            part(r#"{"type":"image_url","image_url":{"url":"https://x","detail":"high"}}"#),
            "messages[0].content[0].image_url.detail",
            "detail",
        ),
        (
            part(r#"{"type":"image_url","image_url":{"url":"http://x"}}"#),
            "messages[0].content[0].image_url.url",
            "`https:`",
        ),
        (
            part(r#"{"type":"image_url","image_url":{"url":"data:image/svg+xml,<svg/>"}}"#),
            "messages[0].content[0].image_url.url",
            "base64",
        ),
    ] {
        let error = messages(&body).unwrap_err();
        assert_eq!((error.param(), error.code()), (Some(field), "unsupported_parameter"), "{body}: {error}");
        assert!(
            error.to_string().contains(says) && error.to_string().contains("the messages API"),
            "{error}"
        );
        assert_eq!(error.kind(), Kind::InvalidRequest);
    }
}

#[test]
fn what_the_chat_dialect_cannot_say_is_refused_by_name() {
    let block = |role: &str, block: &str| {
        format!(r#"{{"model":"m","max_tokens":1,"messages":[{{"role":"{role}","content":[{block}]}}]}}"#)
    };
    let tool = |tool: &str| messages_with(&format!(r#","tools":[{tool}]"#));
    for (body, field, says) in [
        (messages_with(r#","thinking":{"type":"enabled","budget_tokens":1024}"#), "thinking", "thoughts"),
        (messages_with(r#","top_k":4"#), "top_k", "setting"),
        (messages_with(r#","container":"c""#), "container", "containers"),
        (messages_with(r#","mcp_servers":[{"url":"x"}]"#), "mcp_servers", "MCP"),
        (messages_with(r#","service_tier":"standard_only""#), "service_tier", "tiers"),
        (messages_with(r#","output_config":{"effort":"low"}"#), "output_config.effort", "efforts"),
        (messages_with(r#","output_config":{"format":{"type":"xml"}}"#), "output_config.format", "`xml`"),
        (messages_with(r#","unheard_of":0"#), "unheard_of", "not known"),
        (messages_with(r#","metadata":{"x":"y"}"#), "metadata.x", "not known"),
        (messages_with(r#","tool_choice":{"type":"maybe"}"#), "tool_choice.type", "`maybe`"),
        (messages_with(r#","system":[{"type":"image","source":{}}]"#), "system[0].type", "`image`"),
        (
            tool(r#"{"type":"web_search_20250305","name":"web_search"}"#),
            "tools[0].type",
            "Anthropic's servers",
        ),
        (
            tool(r#"{"name":"x","input_schema":{},"defer_loading":true}"#),
            "tools[0].defer_loading",
            "all tools",
        ),
        (
            block("assistant", r#"{"type":"thinking","thinking":"hm","signature":"s"}"#),
            "messages[0].content[0].type",
            "thoughts",
        ),
        (
            block("assistant", r#"{"type":"redacted_thinking","data":"x"}"#),
            "messages[0].content[0].type",
            "thoughts",
        ),
        (
            block("user", r#"{"type":"document","source":{"type":"text","data":"x"}}"#),
            "messages[0].content[0].type",
            "`document`",
        ),
        (
            block("user", r#"{"type":"image","source":{"type":"file","file_id":"f"}}"#),
            "messages[0].content[0].source.type",
            "`file`",
        ),
        (
            block(
                "user",
                r#"{"type":"tool_result","tool_use_id":"t","content":[{"type":"image","source":{}}]}"#,
            ),
            "messages[0].content[0].content[0].type",
            "`image`",
        ),
        (
            block("assistant", r#"{"type":"server_tool_use","id":"s","name":"web_search","input":{}}"#),
            "messages[0].content[0].type",
            "`server_tool_use`",
        ),
        (
            block("user", r#"{"type":"tool_use","id":"s","name":"f","input":{}}"#),
            "messages[0].content[0].type",
            "`tool_use`",
        ),
        (
            block("assistant", r#"{"type":"text","text":"x","citations":[{}]}"#),
            "messages[0].content[0].citations",
            "citations",
        ),
    ] {
        let error = chat(&body).unwrap_err();
        assert_eq!((error.param(), error.code()), (Some(field), "unsupported_parameter"), "{body}: {error}");
        assert!(
            error.to_string().contains(says) && error.to_string().contains("the chat completions API"),
            "{error}"
        );
    }
}

#[test]
fn a_malformed_request_is_refused_by_name() {
    for (body, code, field) in [
        ("[]".to_owned(), "invalid_type", Some("body")),
        ("{".to_owned(), "invalid_json", None),
        ("\u{1}".to_owned(), "invalid_json", None),
        (format!("{}{}", "[".repeat(200), "]".repeat(200)), "invalid_json", None),
        (r#"{"messages":[]}"#.to_owned(), "missing_required_parameter", Some("model")),
        (r#"{"model":"m"}"#.to_owned(), "missing_required_parameter", Some("messages")),
        (r#"{"model":1,"messages":[]}"#.to_owned(), "invalid_type", Some("model")),
        (r#"{"model":"m","messages":[]}"#.to_owned(), "invalid_type", Some("messages")),
        (r#"{"model":"m","messages":{}}"#.to_owned(), "invalid_type", Some("messages")),
        (r#"{"model":"m","messages":["x"]}"#.to_owned(), "invalid_type", Some("messages[0]")),
        (chat_with(r#","model":"n""#), "duplicate_parameter", Some("model")),
        (chat_with(r#","top\u005fp":1,"top_p":1"#), "duplicate_parameter", Some("top_p")),
        (chat_with(r#","stream":"yes""#), "invalid_type", Some("stream")),
        (chat_with(r#","max_tokens":"9""#), "invalid_type", Some("max_tokens")),
        (chat_with(r#","max_completion_tokens":1.5"#), "invalid_type", Some("max_completion_tokens")),
        (chat_with(r#","stop":[1]"#), "invalid_type", Some("stop[0]")),
        (chat_with(r#","tools":[{"type":"function"}]"#), "missing_required_parameter", Some("tools[0].function")),
        (
            r#"{"model":"m","messages":[{"role":"user"}]}"#.to_owned(),
            "missing_required_parameter",
            Some("messages[0].content"),
        ),
        (
            r#"{"model":"m","messages":[{"role":"user","content":7}]}"#.to_owned(),
            "invalid_type",
            Some("messages[0].content"),
        ),
        (
            r#"{"model":"m","messages":[{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"[1]"}}]}]}"#
                .to_owned(),
            "invalid_type",
            Some("messages[0].tool_calls[0].function.arguments"),
        ),
        (
            format!("{{{}}}", (0..200).map(|n| format!(r#""m{n}":1"#)).collect::<Vec<_>>().join(",")),
            "invalid_json",
            None,
        ),
    ] {
        let error = messages(&body).unwrap_err();
        assert_eq!((error.code(), error.param()), (code, field), "{body}: {error}");
    }
    let error = chat(r#"{"model":"m","messages":[]}"#).unwrap_err();
    assert_eq!((error.code(), error.param()), ("missing_required_parameter", Some("max_tokens")));
}

#[test]
fn system_messages_in_the_middle_stay_there_where_the_model_takes_them() {
    let body = r#"{"model":"m","messages":[{"role":"user","content":"a"},{"role":"developer","content":"b"},{"role":"user","content":"c"}]}"#;
    let translated = text(&chat_to_messages(body.as_bytes(), &to_messages(true)).unwrap());
    let expected = r#""messages":[{"role":"user","content":"a"},{"role":"system","content":"b"},{"role":"user","content":"c"}]}"#;
    assert!(translated.ends_with(expected), "{translated}");
}

#[test]
fn empty_texts_are_left_out_and_turns_of_one_speaker_are_one() {
    let body = r#"{"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","content":""},{"role":"user","content":[{"type":"text","text":""},{"type":"text","text":"b"}]},
        {"role":"assistant","content":"","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":" {} "}}]},{"role":"user","content":"x"},{"role":"tool","tool_call_id":"c","content":""}]}"#;
    let expected = concat!(
        r#"{"model":"claude","max_tokens":4096,"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},"#,
        r#"{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{}}]},"#,
        r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"c"},{"type":"text","text":"x"}]}]}"#,
    );
    assert_eq!(messages(body).unwrap(), expected);
    let said = r#"{"model":"m","messages":[{"role":"assistant","content":[{"type":"refusal","refusal":"no"}],"refusal":"never"}]}"#;
    assert!(
        messages(said).unwrap().contains(r#"[{"type":"text","text":"no"},{"type":"text","text":"never"}]"#)
    );
}

/// What a chat request means: settings without defaults, and what is said by whom in which order.
fn meaning(request: &Value) -> (Vec<(String, Value)>, Vec<Value>) {
    let mut settings = Vec::new();
    let has_tools = request["tools"].as_array().is_some_and(|tools| !tools.is_empty());
    for (name, value) in request.as_object().unwrap() {
        let (name, value) = match (name.as_str(), value) {
            ("model" | "messages" | "stream_options", _) | ("stream", Value::Bool(false)) => continue,
            ("max_tokens", value) => ("max_completion_tokens", value.clone()),
            ("stop", Value::String(one)) => ("stop", json!([one])),
            ("tool_choice", Value::String(word)) if word == "auto" || (word == "none" && !has_tools) => {
                continue;
            }
            ("parallel_tool_calls", value) if *value == json!(true) || !has_tools => continue,
            ("parallel_tool_calls", _) if request["tool_choice"] == "none" => continue,
            ("tools", Value::Array(tools)) if tools.is_empty() => continue,
            (name, value) => (name, value.clone()),
        };
        settings.push((name.to_owned(), value));
    }
    settings.sort_by(|a, b| a.0.cmp(&b.0));
    let mut said = Vec::new();
    for message in request["messages"].as_array().unwrap() {
        let role = &message["role"];
        let parts = match &message["content"] {
            Value::Array(parts) => parts.clone(),
            Value::Null => vec![],
            text => vec![json!({"type": "text", "text": text})],
        };
        let parts = parts.into_iter().filter(|part| part["text"] != "");
        if role == "tool" {
            said.push(json!([role, message["tool_call_id"], parts.collect::<Vec<_>>()]));
            continue;
        }
        said.extend(parts.map(|part| json!([role, part])));
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            said.push(json!([role, call["id"], call["function"]["name"], arguments]));
        }
    }
    (settings, said)
}

fn words() -> impl Strategy<Value = String> {
    "[a-z\"\\\\\n\té😀]{0,8}"
}

fn content() -> impl Strategy<Value = Value> {
    let part = prop_oneof![
        words().prop_map(|text| json!({"type": "text", "text": text})),
        Just(json!({"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lG/+8="}})),
        Just(json!({"type": "image_url", "image_url": {"url": "https://example.com/ä.png"}})),
    ];
    prop_oneof![words().prop_map(Value::String), prop::collection::vec(part, 1..4).prop_map(Value::Array)]
}

fn texts() -> impl Strategy<Value = Value> {
    let part = words().prop_map(|text| json!({"type": "text", "text": text}));
    prop_oneof![words().prop_map(Value::String), prop::collection::vec(part, 1..3).prop_map(Value::Array)]
}

/// One round: somebody asks, the model says something, calls tools and gets their results.
fn round() -> impl Strategy<Value = Vec<Value>> {
    let calls = prop::collection::vec(
        ("[a-z]{1,5}", r#"\{("[a-z]{1,3}": ?[1-9][0-9]{0,25}(\.[0-9]+)?)?\}"#, texts()),
        0..3,
    );
    (prop::collection::vec(content(), 1..3), texts(), calls, any::<u32>()).prop_map(
        |(asked, answer, calls, n)| {
            let mut messages: Vec<_> =
                asked.into_iter().map(|content| json!({"role": "user", "content": content})).collect();
            let ids: Vec<_> = (0..calls.len()).map(|k| format!("call_{n}_{k}")).collect();
            let called: Vec<_> = ids
            .iter()
            .zip(&calls)
            .map(|(id, (name, arguments, _))| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            })
            .collect();
            let mut said = json!({"role": "assistant", "content": answer});
            if !called.is_empty() {
                said["tool_calls"] = called.into();
            }
            messages.push(said);
            for (id, (_, _, result)) in ids.iter().zip(&calls) {
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
            }
            messages
        },
    )
}

fn settings() -> impl Strategy<Value = Value> {
    let choice = prop_oneof![
        Just(json!("auto")),
        Just(json!("none")),
        Just(json!("required")),
        Just(json!({"type": "function", "function": {"name": "f"}}))
    ];
    let tools = prop_oneof![
        Just(json!([])),
        Just(
            json!([{"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object", "x": [1, null]}}}])
        )
    ];
    let stop = prop_oneof![Just(json!("END")), Just(json!(["a", "b"]))];
    let opt = proptest::option::of::<BoxedStrategy<Value>>;
    (
        opt(choice.boxed()),
        tools,
        opt(stop.boxed()),
        opt((0_u8..=10).prop_map(|n| json!(f64::from(n) / 10.0)).boxed()),
        opt(any::<bool>().prop_map(Value::Bool).boxed()),
        opt(any::<bool>().prop_map(Value::Bool).boxed()),
        1_u32..10_000,
    )
        .prop_map(|(choice, tools, stop, temperature, parallel, stream, limit)| {
            let mut all = json!({"model": "m", "tools": tools, "max_completion_tokens": limit});
            let optional = [
                ("tool_choice", choice),
                ("stop", stop),
                ("temperature", temperature.clone()),
                ("top_p", temperature),
                ("parallel_tool_calls", parallel),
                ("stream", stream),
            ];
            for (name, value) in optional {
                if let Some(value) = value {
                    all[name] = value;
                }
            }
            all
        })
}

proptest! {
    #[test]
    fn what_both_dialects_can_say_survives_the_way_there_and_back(
        system in proptest::option::of(texts()),
        rounds in prop::collection::vec(round(), 1..4),
        mut request in settings(),
    ) {
        let system = system.map(|content| json!({"role": "system", "content": content}));
        let messages: Vec<_> = system.into_iter().chain(rounds.into_iter().flatten()).collect();
        request["messages"] = messages.into();
        let (_, said) = meaning(&request);
        // A conversation of nothing but empty texts is refused.
        prop_assume!(said.iter().any(|atom| atom[0] != "system"));
        let there = chat_to_messages(request.to_string().as_bytes(), &to_messages(false)).unwrap();
        let back = messages_to_chat(&there.body, &TO_CHAT).unwrap();
        let back: Value = serde_json::from_slice(&back.body).unwrap();
        prop_assert_eq!(meaning(&back), meaning(&request));
    }

    #[test]
    fn no_body_makes_a_translator_panic(body in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = (chat_to_messages(&body, &to_messages(true)).is_ok(), messages_to_chat(&body, &TO_CHAT).is_ok());
    }
}
