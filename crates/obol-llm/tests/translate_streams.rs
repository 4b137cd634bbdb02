//! Streams between the dialects, event by event.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

use std::collections::BTreeMap;

use jiff::Timestamp;
use obol_llm::translate::{AnswerError, ChatToMessagesStream, Labels, MessagesToChatStream};
use proptest::prelude::*;
use serde_json::{Value, json};

const LABELS: Labels<'static> =
    Labels { id: "id-of-ours", model: "model-of-ours", created: Timestamp::UNIX_EPOCH };

/// An event of the messages dialect.
fn named(data: &str) -> String {
    let value: Value = serde_json::from_str(data).unwrap();
    format!("event: {}\ndata: {data}\n\n", value["type"].as_str().unwrap())
}

fn chunk(choice: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"gpt-5\",\"choices\":[{choice}]}}\n\n"
    )
}

fn delta(delta: &str) -> String {
    chunk(&format!(r#"{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":null}}"#))
}

fn finish(reason: &str) -> String {
    chunk(&format!(r#"{{"index":0,"delta":{{}},"finish_reason":"{reason}"}}"#))
}

const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":60}}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Every event's translation, and what the end adds.
fn to_chat(events: &[String], include_usage: bool) -> Result<(Vec<String>, String, bool), AnswerError> {
    let mut stream = MessagesToChatStream::new(&LABELS, include_usage);
    let mut out = Vec::new();
    for event in events {
        out.push(text_of(&stream.event(event.as_bytes())?));
    }
    Ok((out, text_of(&stream.end()), stream.is_complete()))
}

fn to_messages(events: &[String]) -> Result<(Vec<String>, String, bool), AnswerError> {
    let mut stream = ChatToMessagesStream::new(&LABELS);
    let mut out = Vec::new();
    for event in events {
        out.push(text_of(&stream.event(event.as_bytes())?));
    }
    Ok((out, text_of(&stream.end()), stream.is_complete()))
}

/// The documents of a stream; `[DONE]` is a string.
fn documents(stream: &str) -> Vec<Value> {
    let data = stream.split("\n\n").filter_map(|event| {
        let data = event.lines().find_map(|line| line.strip_prefix("data: "))?;
        Some(serde_json::from_str(data).unwrap_or_else(|_| json!("[DONE]")))
    });
    data.collect()
}

/// A stream as Anthropic documents it, with a text and two calls.
fn anthropic() -> Vec<String> {
    [
        r#"{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"model":"claude-sonnet-4-5","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":20,"cache_creation_input_tokens":5,"cache_read_input_tokens":75,"output_tokens":2}}}"#,
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"EqQB"}}"#,
        r#"{"type":"content_block_stop","index":0}"#,
        r#"{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}"#,
        r#"{"type": "ping"}"#,
        r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Caf\u00e9"}}"#,
        r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"!"}}"#,
        r#"{"type":"content_block_stop","index":1}"#,
        r#"{"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"toolu_1","name":"f","input":{}}}"#,
        r#"{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":""}}"#,
        r#"{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"a\":"}}"#,
        r#"{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":" 1.0}"}}"#,
        r#"{"type":"content_block_stop","index":2}"#,
        r#"{"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"toolu_2","name":"g","input":{}}}"#,
        r#"{"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":""}}"#,
        r#"{"type":"content_block_stop","index":3}"#,
        r#"{"type":"of_tomorrow","x":1}"#,
        r#"{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":15}}"#,
        r#"{"type":"message_stop"}"#,
    ]
    .map(named)
    .to_vec()
}

#[test]
fn a_stream_of_messages_becomes_chunks_one_by_one() {
    let (events, end, complete) = to_chat(&anthropic(), true).unwrap();
    let head = r#"data: {"id":"msg_1","object":"chat.completion.chunk","created":0,"model":"claude-sonnet-4-5","choices":["#;
    let chunk = |delta: &str, finish: &str| {
        format!(
            "{head}{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}],\"usage\":null}}\n\n"
        )
    };
    let usage = r#"],"usage":{"prompt_tokens":100,"completion_tokens":15,"total_tokens":115,"prompt_tokens_details":{"cached_tokens":75},"completion_tokens_details":{"reasoning_tokens":0}}}"#;
    let mut expected = vec![String::new(); events.len()];
    expected[0] = chunk(r#"{"role":"assistant","content":""}"#, "null");
    expected[6] = ": ping\n\n".to_owned();
    expected[7] = chunk(r#"{"content":"Caf\u00e9"}"#, "null");
    expected[8] = chunk(r#"{"content":"!"}"#, "null");
    expected[10] = chunk(
        r#"{"tool_calls":[{"index":0,"id":"toolu_1","type":"function","function":{"name":"f","arguments":""}}]}"#,
        "null",
    );
    expected[12] = chunk(r#"{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":"}}]}"#, "null");
    expected[13] = chunk(r#"{"tool_calls":[{"index":0,"function":{"arguments":" 1.0}"}}]}"#, "null");
    expected[15] = chunk(
        r#"{"tool_calls":[{"index":1,"id":"toolu_2","type":"function","function":{"name":"g","arguments":""}}]}"#,
        "null",
    );
    expected[17] = chunk(r#"{"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]}"#, "null");
    expected[19] = chunk("{}", r#""tool_calls""#);
    expected[20] = format!("{head}{usage}\n\n{DONE}");
    assert_eq!(events, expected);
    assert_eq!((end.as_str(), complete), ("", true));

    let (events, ..) = to_chat(&anthropic(), false).unwrap();
    assert_eq!(events[20], DONE);
    assert!(!events.concat().contains("usage"));
}

#[test]
fn a_stream_of_messages_may_end_after_any_event() {
    let all = anthropic();
    for cut in 0..=all.len() {
        let (events, end, complete) = to_chat(&all[..cut], true).unwrap();
        let text = events.concat();
        assert_eq!(complete, cut >= 20, "after {cut}");
        assert_eq!(text.contains(r#""finish_reason":"tool_calls""#), cut >= 20);
        assert_eq!(text.contains("[DONE]"), cut == 21);
        // Whole but for its last event: it is finished here. Cut before: nothing is invented.
        assert_eq!(end.ends_with(DONE), cut == 20, "after {cut}: {end}");
        assert_eq!(end.is_empty(), cut != 20);
    }
}

#[test]
fn an_error_in_mid_stream_is_the_last_event_in_either_dialect() {
    let error = "event: error\ndata: {\"type\": \"error\", \"error\": {\"type\": \"overloaded_error\", \"message\": \"Overloaded\"}}\n\n".to_owned();
    let all = anthropic();
    for cut in 0..all.len() {
        let events = [&all[..cut], std::slice::from_ref(&error), &all[cut..]].concat();
        let (events, end, complete) = to_chat(&events, true).unwrap();
        assert_eq!(
            events[cut],
            "data: {\"error\":{\"message\":\"Overloaded\",\"type\":\"server_error\",\"param\":null,\"code\":\"overloaded_error\"}}\n\n"
        );
        assert!(events[cut + 1..].iter().all(String::is_empty) && end.is_empty() && !complete);
        assert!(!events.concat().contains("[DONE]"));
    }
    let all = openai();
    for (error, expected) in [
        (
            r#"data: {"error":{"message":"Slow down","type":"requests","code":"rate_limit_exceeded"}}"#,
            r#""rate_limit_error","message":"Slow down","code":"rate_limit_exceeded""#,
        ),
        (
            r#"data: {"error":{"message":"Slow down","code":429},"choices":[{"delta":{},"finish_reason":"error"}]}"#,
            r#""rate_limit_error","message":"Slow down""#,
        ),
        (
            r#"data: {"choices":[{"delta":{"content":""},"error":{"message":"x","code":502}}]}"#,
            r#""api_error","message":"x""#,
        ),
        ("event: error\ndata: gone", r#""api_error","message":"the provider reported an error""#),
    ] {
        for cut in 0..all.len() {
            let events = [&all[..cut], &[format!("{error}\n\n")], &all[cut..]].concat();
            let (events, end, complete) = to_messages(&events).unwrap();
            assert_eq!(
                events[cut],
                format!("event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":{expected}}}}}\n\n")
            );
            assert!(events[cut + 1..].iter().all(String::is_empty) && end.is_empty() && !complete);
            assert!(
                !events.concat().contains("message_stop") && !events.concat().contains("stop_reason\":\"")
            );
        }
    }
}

/// A stream as OpenAI documents it, with a text and two calls.
fn openai() -> Vec<String> {
    vec![
        ": comment\n\n".to_owned(),
        delta(r#"{"role":"assistant","content":"","refusal":null}"#),
        delta(r#"{"content":"Caf\u00e9"}"#),
        delta(r#"{"content":"!"}"#),
        delta(
            r#"{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}]}"#,
        ),
        delta(r#"{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":\"}"}}]}"#),
        delta(r#"{"tool_calls":[{"index":0,"function":{"arguments":"\\\"\"}"}}]}"#),
        delta(
            r#"{"tool_calls":[{"index":1,"id":"call_2","type":"function","function":{"name":"g","arguments":""}}]}"#,
        ),
        delta(r#"{"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]}"#),
        finish("tool_calls"),
        USAGE.to_owned(),
        DONE.to_owned(),
    ]
}

#[test]
fn a_stream_of_chunks_becomes_events_one_by_one() {
    let (events, end, complete) = to_messages(&openai()).unwrap();
    let expected: Vec<String> = [
        vec![],
        vec![r#"{"type":"message_start","message":{"id":"chatcmpl-1","type":"message","role":"assistant","model":"gpt-5","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":0,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}"#],
        vec![
            r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Caf\u00e9"}}"#,
        ],
        vec![r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"!"}}"#],
        vec![
            r#"{"type":"content_block_stop","index":0}"#,
            r#"{"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"call_1","name":"f","input":{}}}"#,
        ],
        vec![r#"{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{\"a\":\"}"}}"#],
        vec![r#"{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"\\\"\"}"}}"#],
        vec![
            r#"{"type":"content_block_stop","index":1}"#,
            r#"{"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"call_2","name":"g","input":{}}}"#,
        ],
        vec![r#"{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{}"}}"#],
        vec![r#"{"type":"content_block_stop","index":2}"#],
        vec![],
        vec![
            r#"{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":40,"cache_creation_input_tokens":0,"cache_read_input_tokens":60,"output_tokens":7}}"#,
            r#"{"type":"message_stop"}"#,
        ],
    ]
    .into_iter()
    .map(|events| events.into_iter().map(named).collect())
    .collect();
    assert_eq!(events[1..], expected[1..]);
    assert_eq!(events[0], ": alive\n\n");
    assert_eq!((end.as_str(), complete), ("", true));
}

#[test]
fn a_stream_of_chunks_may_end_after_any_event() {
    let all = openai();
    for cut in 0..=all.len() {
        let (events, end, complete) = to_messages(&all[..cut]).unwrap();
        assert_eq!(complete, cut >= 10, "after {cut}");
        assert_eq!(events.concat().contains("message_stop"), cut == 12);
        assert_eq!(end.contains(r#""stop_reason":"tool_use""#), (10..12).contains(&cut), "after {cut}");
        assert_eq!(end.is_empty(), !(10..12).contains(&cut));
    }
    let mut stream = ChatToMessagesStream::new(&LABELS);
    stream.event(delta(r#"{"content":"x"}"#).as_bytes()).unwrap();
    assert!(stream.event(DONE.as_bytes()).is_err(), "no stop reason is invented");
    assert!(stream.event(finish("stop").as_bytes()).unwrap().is_empty() && stream.end().is_empty());
}

/// The blocks that a client of the messages dialect puts together, which wants them one after the other.
fn blocks(stream: &str) -> Vec<Value> {
    let (mut blocks, mut open) = (Vec::new(), None);
    for event in documents(stream) {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, &event["index"]), (None, &json!(blocks.len())), "{stream}");
                open = Some(blocks.len());
                let mut block = event["content_block"].clone();
                if block["type"] == "tool_use" {
                    block["input"] = json!("");
                }
                blocks.push(block);
            }
            "content_block_delta" => {
                let at = open.unwrap();
                assert_eq!(event["index"], json!(at));
                let (name, more) = match event["delta"]["type"].as_str().unwrap() {
                    "text_delta" => ("text", &event["delta"]["text"]),
                    _ => ("input", &event["delta"]["partial_json"]),
                };
                let joined = format!("{}{}", blocks[at][name].as_str().unwrap(), more.as_str().unwrap());
                blocks[at][name] = joined.into();
            }
            "content_block_stop" => assert_eq!(open.take().map(|at| json!(at)), Some(event["index"].clone())),
            _ => {}
        }
    }
    assert_eq!(open, None);
    blocks
}

#[test]
fn interleaved_calls_are_told_one_after_the_other() {
    let events = [
        delta(
            r#"{"role":"assistant","tool_calls":[{"index":0,"id":"a","type":"function","function":{"arguments":"{\"x"}},{"index":1,"id":"b"}]}"#,
        ),
        delta(r#"{"tool_calls":[{"index":1,"function":{"name":"g","arguments":"{\"y\":"}}]}"#),
        delta(r#"{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"\":"}}]}"#),
        delta(r#"{"tool_calls":[{"index":1,"function":{"arguments":"[2]}"}}]}"#),
        delta(r#"{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}"#),
        delta(r#"{"content":"and"}"#),
        delta(r#"{"content":" done"}"#),
        finish("tool_calls"),
        DONE.to_owned(),
    ];
    let (out, ..) = to_messages(&events).unwrap();
    // The first is told as it comes, as soon as its name is known; the second when the first is whole.
    assert!(!out[1].contains("content_block") && out[2].contains(r#"{\"x\":"#) && out[3].is_empty());
    assert!(out[4].contains(r#""partial_json":"{\"y\":[2]}""#), "{}", out[4]);
    assert_eq!(
        blocks(&out.concat()),
        [
            json!({"type": "tool_use", "id": "a", "name": "f", "input": "{\"x\":1}"}),
            json!({"type": "tool_use", "id": "b", "name": "g", "input": "{\"y\":[2]}"}),
            json!({"type": "text", "text": "and done"}),
        ]
    );
}

#[test]
fn a_refusal_is_said_and_is_the_reason() {
    let events = [delta(r#"{"refusal":"I can't"}"#), finish("stop"), DONE.to_owned()];
    let (out, ..) = to_messages(&events).unwrap();
    assert_eq!(blocks(&out.concat()), [json!({"type": "text", "text": "I can't"})]);
    assert!(out[2].contains(r#""stop_reason":"refusal""#));
}

#[test]
fn what_cannot_be_translated_fails_the_stream() {
    let call = |call: &str| delta(&format!(r#"{{"tool_calls":[{call}]}}"#));
    for events in [
        vec!["data: {\n\n".to_owned()],
        vec![chunk(r#"{"index":1,"delta":{"content":"x"}}"#)],
        vec![delta(r#"{"function_call":{"name":"f"}}"#)],
        vec![delta(r#"{"content":["x"]}"#)],
        vec![finish("stop"), delta(r#"{"content":"late"}"#)],
        vec![call(r#"{"index":0,"function":{"name":"f","arguments":"{}"}}"#), finish("tool_calls")],
        vec![
            call(r#"{"index":0,"id":"a","function":{"name":"f","arguments":"{}"}}"#),
            call(r#"{"index":1,"id":"b","function":{"name":"f","arguments":"{}"}}"#),
            call(r#"{"index":0,"function":{"arguments":"{}"}}"#),
        ],
    ] {
        assert!(to_messages(&events).is_err(), "{events:?}");
    }
    for events in [
        vec!["data: {\n\n".to_owned()],
        vec![named(r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"x"}}"#)],
        vec![named(
            r#"{"type":"content_block_start","index":0,"content_block":{"type":"server_tool_use","id":"s","name":"web_search","input":{}}}"#,
        )],
        vec![named(
            r#"{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"s","input":{}}}"#,
        )],
        vec![named(r#"{"type":"message_stop"}"#)],
    ] {
        assert!(to_chat(&events, false).is_err(), "{events:?}");
    }
}

#[test]
fn arguments_that_come_with_the_beginning_of_a_call_are_sent_once() {
    let start = r#"{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"f","input":{"a": 1}}}"#;
    let more = r#"{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{\"b\":2}"}}"#;
    let stop = r#"{"type":"content_block_stop","index":0}"#;
    for (events, expected) in [(vec![start, stop], r#"{"a": 1}"#), (vec![start, more, stop], r#"{"b":2}"#)] {
        let events: Vec<_> = events.into_iter().map(named).collect();
        let (out, ..) = to_chat(&events, false).unwrap();
        let (_, calls) = said(&out.concat());
        assert_eq!(calls[&0].1, expected);
    }
}

#[test]
fn line_ends_between_tokens_do_not_end_an_event() {
    let event = "data: {\"type\":\"content_block_start\",\"index\":0,\ndata: \"content_block\":{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"f\",\"input\":{\ndata: }}}\n\n";
    let (out, ..) = to_chat(&[event.to_owned()], false).unwrap();
    assert_eq!(documents(&out[0]).len(), 2);
}

/// The text and the calls (name and arguments) that a client of the chat dialect puts together.
fn said(stream: &str) -> (String, BTreeMap<u64, (String, String)>) {
    let (mut text, mut calls) = (String::new(), BTreeMap::<u64, (String, String)>::new());
    for chunk in documents(stream) {
        let delta = &chunk["choices"][0]["delta"];
        text += delta["content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let known = calls.entry(call["index"].as_u64().unwrap()).or_default();
            known.0 += call["function"]["name"].as_str().unwrap_or_default();
            known.1 += call["function"]["arguments"].as_str().unwrap_or_default();
        }
    }
    (text, calls)
}

proptest! {
    #[test]
    fn calls_in_any_order_survive_the_way_there_and_back(
        texts in prop::collection::vec("[a-zé😀\"\\\\]{1,6}", 0..3),
        arguments in prop::collection::vec(r#"\{("[a-z\{\}]{1,3}":\[?"\\"?[a-z]?"?)?"#, 1..4),
        cuts in prop::collection::vec((0_usize..4, 1_usize..4), 0..24),
    ) {
        // Whole documents: what the generator left open is made good.
        let arguments: Vec<String> = arguments
            .iter()
            .enumerate()
            .map(|(n, odd)| json!({"odd": odd, "n": n, "list": [n, {"x": odd}]}).to_string())
            .collect();
        let mut events: Vec<String> = texts.iter().map(|text| delta(&json!({"content": text}).to_string())).collect();
        for n in 0..arguments.len() {
            events.push(delta(&json!({"tool_calls": [{"index": n, "id": format!("c{n}"), "function": {"name": format!("f{n}")}}]}).to_string()));
        }
        let mut left: Vec<Vec<char>> = arguments.iter().map(|text| text.chars().collect()).collect();
        let rest: Vec<_> = (0..left.len()).map(|n| (n, usize::MAX)).collect();
        for (n, length) in cuts.into_iter().chain(rest) {
            let Some(chars) = left.get_mut(n) else { continue };
            let fragment: String = chars.drain(..length.min(chars.len())).collect();
            if !fragment.is_empty() {
                events.push(delta(&json!({"tool_calls": [{"index": n, "function": {"arguments": fragment}}]}).to_string()));
            }
        }
        events.extend([finish("tool_calls"), USAGE.to_owned(), DONE.to_owned()]);
        let (there, _, complete) = to_messages(&events).unwrap();
        prop_assert!(complete);
        let there = there.concat();
        blocks(&there);
        let there: Vec<String> = there.split_inclusive("\n\n").map(str::to_owned).collect();
        let (back, _, complete) = to_chat(&there, true).unwrap();
        prop_assert!(complete);
        prop_assert_eq!(said(&back.concat()), said(&events.concat()));
        prop_assert!(back.concat().contains(r#""prompt_tokens":100,"completion_tokens":7"#));
    }
}
