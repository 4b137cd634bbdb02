//! What a request names outside of itself: what a provider keeps is refused, what has no bound is told.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

use obol_llm::Endpoint::{ChatCompletions, CountTokens, Embeddings, Messages, Responses};
use obol_llm::{Endpoint, LlmRequest};

fn parse(endpoint: Endpoint, members: &str) -> Result<LlmRequest, (&'static str, Option<String>)> {
    let limit = if endpoint == Messages { r#","max_tokens":5"# } else { "" };
    LlmRequest::parse(endpoint, format!(r#"{{"model":"m"{limit},{members}}}"#).into())
        .map_err(|e| (e.code(), e.param().map(str::to_owned)))
}

/// A message of a user with one part.
fn part(part: &str) -> String {
    format!(r#""messages":[{{"role":"user","content":[{part}]}}]"#)
}

/// An item of `input`.
fn item(item: &str) -> String {
    format!(r#""input":[{{"role":"user","content":"hi"}},{item}]"#)
}

#[test]
fn what_a_provider_keeps_is_refused_at_every_endpoint() {
    for endpoint in [ChatCompletions, Messages, CountTokens, Responses, Embeddings] {
        for (members, param) in [
            (r#""x":{"file_id":"file-1"}"#, "file_id"),
            (r#""x":[[{"file\u005fid" : "file-1"}]]"#, "file_id"),
            (r#""x":{"\u0046ile_ID":"file-1"}"#, "file_id"),
            (r#""x":{"file_id":"\u0066ile-1"}"#, "file_id"),
            (r#""x":{"file_id":null,"file_id":"f"}"#, "file_id"),
            (r#""tools":[{"container":{"type":"auto","file_ids":["file-1"]}}]"#, "file_ids"),
            (r#""tools":[{"type":"file_search","vector_store_ids":["vs_1"]}]"#, "vector_store_ids"),
            (r#""tools":[{"type":"code_interpreter","container":"cntr_1"}]"#, "container"),
            (r#""container":"container_1""#, "container"),
            (r#""container":{"id":"container_1"}"#, "container"),
            (r#""container":{"skills":[{"type":"custom","skill_id":"skill_1"}]}"#, "skill_id"),
            (r#""x":{"container_id":"cntr_1"}"#, "container_id"),
            (r#""cached_content":"cachedContents/1""#, "cached_content"),
            (r#""x":[{"type":"document","source":{"type":"file"}}]"#, "source"),
            (r#""x":{"source":{"type":"base64","type":"file"}}"#, "source"),
            // Not the block that says that its input is of a tool.
            (r#""type":"tool_use","x":{"type":"tool_use","input":{"file_id":"f"}}"#, "file_id"),
            (r#""metadata":{},"x":{"metadata":{"file_id":"f"}}"#, "file_id"),
        ] {
            let got = parse(endpoint, members).map(|_| ());
            assert_eq!(got, Err(("unsupported_parameter", Some(param.to_owned()))), "{endpoint:?} {members}");
        }
    }
    for (endpoint, members, param) in [
        (
            ChatCompletions,
            r#""messages":[{"role":"assistant","audio":{"id":"audio_1"}}]"#.to_owned(),
            "audio",
        ),
        (ChatCompletions, part(r#"{"type":"file","file":{"file_id":"file-1"}}"#), "file_id"),
        (Messages, part(r#"{"type":"image","source":{"type":"file","file_id":"f"}}"#), "file_id"),
        (Messages, part(r#"{"type":"container_upload","file_id":"f"}"#), "file_id"),
        (Messages, part(r#"{"type":"text","type":"tool_use","input":{"file_id":"f"}}"#), "file_id"),
        (Messages, part(r#"{"type":"tool_result","content":[{"source":{"type":"file"}}]}"#), "source"),
        (ChatCompletions, part(r#"{"type":"tool_use","input":{"file_id":"f"}}"#), "file_id"),
        (Responses, item(r#"{"type":"item_reference","id":"msg_1"}"#), "id"),
        (Responses, item(r#"{"type":"item\u005freference","id":"msg_1"}"#), "id"),
        (Responses, item(r#"{"id":"msg_1"}"#), "id"),
        (Responses, item(r#"{"id":"msg_1","type":null,"role":"user"}"#), "id"),
        (Responses, item(r#"{"id":"msg_1","type":"message"}"#), "id"),
        (Responses, item(r#"{"type":"image_generation_call","id":"ig_1"}"#), "id"),
        (Responses, item(r#"{"type":"image_generation_call","id":"ig_1","result":null,"size":"a"}"#), "id"),
        (Responses, item(r#"{"type":"reasoning","id":"rs_1"}"#), "id"),
        (Responses, item(r#"{"type":"reasoning","id":"rs_1","encrypted_content":null}"#), "id"),
        (Responses, item(r#"{"type":"message","type":"reasoning","id":"rs_1","content":"x"}"#), "id"),
    ] {
        let got = parse(endpoint, &members).map(|_| ());
        assert_eq!(got, Err(("unsupported_parameter", Some(param.to_owned()))), "{endpoint:?} {members}");
    }
}

#[test]
fn what_only_looks_like_something_kept_passes() {
    let schema = r#"{"type":"object","properties":{"file_id":{"type":"string"},"container":{"type":"string"}},"required":["file_id"],"dependentRequired":{"file_id":["container"]},"default":{"file_id":"x"}}"#;
    for (endpoint, members) in [
        (ChatCompletions, format!(r#""tools":[{{"type":"function","function":{{"parameters":{schema}}}}}]"#)),
        (ChatCompletions, format!(r#""functions":[{{"name":"f","parameters":{schema}}}]"#)),
        (Responses, format!(r#""tools":[{{"type":"function","parameters":{schema}}}]"#)),
        (Messages, format!(r#""tools":[{{"name":"f","input_schema":{schema}}}]"#)),
        (
            Responses,
            r#""text":{"format":{"schema":{"properties":{"file_id":{"type":"string"}}}}}"#.to_owned(),
        ),
        (Messages, part(r#"{"input":{"file_id":"f","source":{"type":"file"}},"type":"tool_use","id":"t"}"#)),
        (ChatCompletions, r#""metadata":{"file_id":"f","container":"c"}"#.to_owned()),
        (ChatCompletions, part(r#"{"type":"text","text":"\"file_id\":\"x\""}"#)),
        (
            ChatCompletions,
            r#""messages":[{"tool_calls":[{"id":"c","function":{"arguments":"{\"file_id\":\"f\"}"}}]}]"#
                .to_owned(),
        ),
        (ChatCompletions, r#""audio":{"voice":"alloy","format":"wav"}"#.to_owned()),
        (
            ChatCompletions,
            r#""x":{"file_id":null,"file_ids":[],"container":null,"container_id":""}"#.to_owned(),
        ),
        (Messages, r#""container":{"skills":[{"type":"anthropic","skill_id":"pptx"}]}"#.to_owned()),
        (Responses, r#""tools":[{"type":"code_interpreter","container":{"type":"auto"}}]"#.to_owned()),
        (Responses, item(r#"{"id":"msg_1","role":"assistant","content":[]}"#)),
        (Responses, item(r#"{"id":"msg_1","type":"message","role":"assistant","content":[]}"#)),
        (Responses, item(r#"{"type":"reasoning","id":"rs_1","encrypted_content":"x"}"#)),
        (Responses, item(r#"{"type":"reasoning","id":"rs_1","summary":[]}"#)),
        (Responses, item(r#"{"type":"image_generation_call","id":"ig_1","result":"aGk="}"#)),
        (Responses, item(r#"{"type":"function_call","id":"fc_1","call_id":"c","arguments":"{}"}"#)),
        (Embeddings, r#""input":["\"file_id\":\"x\""]"#.to_owned()),
    ] {
        assert_eq!(parse(endpoint, &members).map(|_| ()), Ok(()), "{endpoint:?} {members}");
    }
}

#[test]
fn what_has_no_bound_is_told_by_its_member() {
    let tool = |kind: &str| format!(r#""tools":[{{"type":"function"}},{{"type":"{kind}"}}]"#);
    let source =
        |of: &str, kind: &str| part(&format!(r#"{{"type":"{of}","source":{{"type":"{kind}","url":"u"}}}}"#));
    let file = |members: &str| part(&format!(r#"{{"type":"file","file":{{{members}}}}}"#));
    let long = format!("data:application/pdf;base64,{}", "A/".repeat(5_000));
    for (endpoint, members, member) in [
        (Responses, tool("web_search"), Some("tools")),
        (Responses, tool("func\\u0074ion"), None),
        (Responses, tool("custom"), None),
        (Responses, r#""tools":[{"type":"web_search","type":"function"}]"#.to_owned(), Some("tools")),
        (Messages, tool("web_search_20250305"), Some("tools")),
        (Messages, r#""tools":[{"name":"f","input_schema":{"type":"object"}}]"#.to_owned(), None),
        (ChatCompletions, r#""web_search_options":{}"#.to_owned(), Some("web_search_options")),
        (ChatCompletions, r#""web_search_options":null"#.to_owned(), None),
        (ChatCompletions, r#""service_tier":"priority""#.to_owned(), Some("service_tier")),
        (ChatCompletions, r#""service_tier":"default""#.to_owned(), None),
        (Messages, r#""service_tier":"standard_only""#.to_owned(), None),
        (Messages, r#""speed":"fast""#.to_owned(), Some("speed")),
        (Messages, r#""inference_geo":"us""#.to_owned(), Some("inference_geo")),
        (Messages, r#""mcp_servers":[{"url":"x"}]"#.to_owned(), Some("mcp_servers")),
        (Messages, r#""mcp_servers":[]"#.to_owned(), None),
        (
            Messages,
            r#""system":[{"text":"a","cache_control":{"ttl":"1h"}}]"#.to_owned(),
            Some("cache_control"),
        ),
        (
            Messages,
            r#""cache_control":{"type":"ephemeral","ttl":"\u0031h"}"#.to_owned(),
            Some("cache_control"),
        ),
        (Messages, r#""cache_control":{"type":"ephemeral","ttl":"5m"}"#.to_owned(), None),
        (Messages, source("document", "url"), Some("source")),
        (Messages, source("image", "url"), None),
        (Messages, source("document", "base64"), None),
        (Messages, part(r#"{"type":"tool_use","input":{"source":{"type":"url"},"file_url":"u"}}"#), None),
        (Responses, item(r#"{"content":[{"type":"input_file","file_url":"https://x"}]}"#), Some("file_url")),
        (Responses, item(r#"{"content":[{"type":"input_image","image_url":"https://x"}]}"#), None),
        (ChatCompletions, part(r#"{"type":"image_url","image_url":{"url":"https://x"}}"#), None),
        (ChatCompletions, part(r#"{"type":"video_url","video_url":{"url":"https://x"}}"#), Some("video_url")),
        (ChatCompletions, file(r#""url":"https://x""#), Some("file")),
        (ChatCompletions, file(r#""file_data":"https\u003a\/\/x""#), Some("file_data")),
        (
            ChatCompletions,
            file(&format!(r#""file_data":"{}https://x""#, " ".repeat(2_000))),
            Some("file_data"),
        ),
        (
            Responses,
            item(r#"{"content":[{"type":"input_file","file_url":{"url":"https://x"}}]}"#),
            Some("file_url"),
        ),
        (ChatCompletions, file(&format!(r#""file_data":"{long}""#)), None),
        (ChatCompletions, file(r#""file_data":"JVBERi0\/""#), None),
    ] {
        assert_eq!(parse(endpoint, &members).unwrap().unbounded(), member, "{endpoint:?} {members}");
    }
}

#[test]
fn a_body_as_deep_as_may_be_is_looked_through() {
    let nested =
        |levels: usize, inner: &str| format!(r#""x":{}{inner}{}"#, "[".repeat(levels), "]".repeat(levels));
    let got = parse(ChatCompletions, &nested(126, r#"{"file_id":"f"}"#)).map(|_| ());
    assert_eq!(got, Err(("unsupported_parameter", Some("file_id".to_owned()))));
    assert_eq!(parse(ChatCompletions, &nested(127, "1.5e3,-0, true ,null")).map(|_| ()), Ok(()));
}
