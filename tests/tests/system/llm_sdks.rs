//! The official model SDKs and the provider for tests: if they are content with it, what a gateway has to please is real.

use obol_testkit::model_server::{Charged, Endpoint, ModelServer};
use obol_tests::model_clients::{Found, Run};
use serde_json::{Value, json};

const KEY: &str = "key-of-the-account-4c1f";
const PROMPT: &str = "Say hello to the world #cached=8 #reasoning=3";

/// Usage as the clients of chat completions and responses tell of it.
fn openai_usage(input: u64, output: u64, cached: u64, reasoning: u64) -> Value {
    json!({"input": input, "output": output, "cached": cached, "reasoning": reasoning})
}

/// Usage as the clients of messages tell of it.
fn anthropic_usage(input: u64, output: u64, cached: u64) -> Value {
    json!({"input": input, "output": output, "cached": cached, "written": 0})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openai_s_sdks_are_content_with_the_provider_for_tests() {
    let server = ModelServer::builder().key(KEY).start().await;
    let origin = server.origin();
    let (model, embedding_model) = ("gpt-fake", Some("embed-fake"));
    let found = Run { origin: &origin, key: KEY, model, embedding_model, scenarios: &[] }.openai().await;

    // Four words of a system prompt, seven of the prompt, and what it asks for.
    let usage = openai_usage(4 + 7 + 8, 7 + 3, 8, 3);
    // A question of three words and a tool; then also the call and a result of three words.
    let round_trip = [openai_usage(3 + 20, 10, 0, 0), openai_usage(3 + 20 + 10 + 3, 3, 0, 0)];
    let arguments = json!({"city": "Weather in Rome", "days": 3});
    let result = "sunny, 24 degrees";
    let chat_tools = json!({
        "called": "weather", "arguments": arguments, "finish": "tool_calls", "text": result, "usage": round_trip
    });
    let forecast = json!({"city": "Weather in Rome", "days": 3, "sunny": true});
    let events = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    let expected = json!({
        "chat_plain": {"text": PROMPT, "finish": "stop", "usage": usage},
        "chat_stream": {"text": PROMPT, "finish": "stop", "usage": []},
        "chat_stream_usage": {"text": PROMPT, "finish": "stop", "usage": [usage]},
        "chat_tools": chat_tools,
        "chat_tools_stream": chat_tools,
        "chat_tools_parallel": {
            "called": ["weather", "weather"],
            "finish": "tool_calls",
            "text": "sunny rainy",
            "usage": openai_usage(4 + 20 + 2 * 10 + 2, 2, 0, 0)
        },
        "chat_length": {"text": "one two", "finish": "length", "usage": openai_usage(4, 2, 0, 0)},
        "chat_stop": {"text": "one two ", "finish": "stop", "usage": openai_usage(4, 2, 0, 0)},
        "chat_image": {"text": "What is this", "usage": openai_usage(3 + 100, 3, 0, 0)},
        "chat_stream_dies": {"text": "One two three ", "type": "server_error"},
        "chat_parsed": {"parsed": forecast, "usage": openai_usage(3, 3, 0, 0)},
        "embeddings": {"dimensions": [8, 8], "usage": 5},
        "models": {"models": ["gpt-fake", "gpt-fake-large", "embed-fake"], "retrieved": "gpt-fake"},
        "responses_plain": {"text": PROMPT, "status": "completed", "usage": usage},
        "responses_stream": {"text": PROMPT, "status": "completed", "usage": usage, "events": events},
        "responses_tools": {"called": "weather", "arguments": arguments, "text": result, "usage": round_trip},
        "responses_stored": {
            "text": "go on",
            "usage": [openai_usage(4, 4, 0, 0), openai_usage(4 + 4 + 2, 2, 0, 0)],
            "items": ["My name is Ada"],
            "gone": 404,
            "lost": [400, "previous_response_not_found"]
        },
        "responses_stream_dies": {"text": "One two three ", "code": "server_error"},
        "unknown_model": {
            "error": "NotFoundError", "status": 404, "code": "model_not_found", "type": "invalid_request_error"
        },
        "bad_key": {
            "error": "AuthenticationError", "status": 401, "code": "invalid_api_key", "type": "invalid_request_error"
        }
    });
    all(&found, &expected);

    // Both languages paid alike, and for what had no usage too: a stream that did not ask for it, the first half of a
    // round trip, what died on the way, both encodings.
    let (mut chat, mut responses) = (sum(&found, "chat_"), sum(&found, "responses_"));
    let (first_half, died) = (openai_usage(4 + 20, 2 * 10, 0, 0), openai_usage(5, 5, 0, 0));
    for usage in [&usage, &first_half, &died] {
        add(&mut chat, usage);
    }
    add(&mut responses, &died);
    assert_eq!(server.charged(Endpoint::ChatCompletions, "gpt-fake"), twice(chat));
    assert_eq!(server.charged(Endpoint::Responses, "gpt-fake"), twice(responses));
    let embeddings = Charged { requests: 2, input: 2 * 5, ..Charged::default() };
    assert_eq!(server.charged(Endpoint::Embeddings, "embed-fake"), twice(embeddings));
    assert_eq!(server.bill().len(), 3);
    // The scenarios keep what they do not clean up: two of streams, two of tools.
    assert_eq!(server.stored_responses().len(), 2 * 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anthropic_s_sdks_are_content_with_the_provider_for_tests() {
    let server = ModelServer::builder().key(KEY).start().await;
    let origin = server.origin();
    let run = Run { origin: &origin, key: KEY, model: "claude-fake", embedding_model: None, scenarios: &[] };
    let found = run.anthropic().await;

    let said = json!({"text": PROMPT, "stop": "end_turn", "usage": anthropic_usage(4 + 7, 7, 8)});
    let tools = json!({
        "called": "weather",
        "arguments": {"city": "Weather in Rome", "days": 3},
        "stop": "tool_use",
        "text": "sunny, 24 degrees",
        "usage": [anthropic_usage(3 + 20, 10, 0), anthropic_usage(3 + 20 + 10 + 3, 3, 0)]
    });
    let events = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    let expected = json!({
        "message_plain": said,
        "message_stream": said,
        "message_stream_raw": {"events": events},
        "message_tools": tools,
        "message_tools_stream": tools,
        "message_tools_parallel": {
            "called": ["weather", "weather"],
            "stop": "tool_use",
            "text": "sunny rainy",
            "usage": anthropic_usage(4 + 20 + 2 * 10 + 2, 2, 0)
        },
        "message_length": {"text": "one two", "stop": "max_tokens", "usage": anthropic_usage(4, 2, 0)},
        "message_stop": {"text": "one two ", "stop": "stop_sequence", "usage": anthropic_usage(4, 2, 0)},
        "message_image": {"text": "What is this", "stop": "end_turn", "usage": anthropic_usage(3 + 100, 3, 0)},
        "message_stream_dies": {"text": "One two three ", "type": "overloaded_error"},
        "message_thinking": {
            "thinking": "hm hm hm hm", "text": "sunny, 24 degrees", "usage": anthropic_usage(4 + 20, 10 + 4, 0)
        },
        "message_of_old": said,
        "count_tokens": {"input": 4 + 7 + 8 + 20},
        "models": {"models": ["claude-fake", "claude-fake-large"], "retrieved": "claude-fake"},
        "unknown_model": {"error": "NotFoundError", "status": 404, "type": "not_found_error"},
        "bad_key": {"error": "AuthenticationError", "status": 401, "type": "authentication_error"}
    });
    all(&found, &expected);

    let charged = server.charged(Endpoint::Messages, "claude-fake");
    assert_eq!((charged.requests, charged.reasoning), (2 * (3 + 3 * 2 + 4 + 2 + 1), 2 * 4));
    assert_eq!(server.charged(Endpoint::CountTokens, "claude-fake").requests, 2);
    assert_eq!(server.bill().len(), 2);

    // What a gateway will meet: keys as bearers since the SDKs of October 2026, as a header of their own before.
    let received = server.received();
    let of = |version: &str, header: &str| {
        let those = received.iter().filter(|one| one.header("anthropic-version") == Some(version));
        those.filter(|one| one.header(header).is_some()).count()
    };
    assert_eq!((of("2026-10-21", "authorization"), of("2026-10-21", "x-api-key")), (received.len() - 2, 0));
    assert_eq!((of("2023-06-01", "authorization"), of("2023-06-01", "x-api-key")), (0, 2));
}

/// Every scenario ran and found what it should: one by one, so that a failure shows the one that differs.
fn all(found: &Found, expected: &Value) {
    let expected = expected.as_object().unwrap();
    for (name, expected) in expected {
        assert_eq!(found.get(name), Some(expected), "{name}");
    }
    assert_eq!(found.len(), expected.len(), "{:?}", found.keys());
}

/// What the scenarios with this prefix say that they cost.
fn sum(found: &Found, prefix: &str) -> Charged {
    let mut sum = Charged::default();
    for (_, scenario) in found.iter().filter(|(name, _)| name.starts_with(prefix)) {
        let usages = match &scenario["usage"] {
            Value::Array(usages) => usages.clone(),
            one => vec![one.clone()],
        };
        for usage in usages.iter().filter(|usage| !usage.is_null()) {
            add(&mut sum, usage);
        }
    }
    sum
}

fn add(sum: &mut Charged, usage: &Value) {
    let number = |name: &str| usage[name].as_u64().unwrap();
    sum.requests += 1;
    sum.input += number("input");
    sum.output += number("output");
    sum.cached += number("cached");
    sum.reasoning += number("reasoning");
}

fn twice(one: Charged) -> Charged {
    Charged {
        requests: 2 * one.requests,
        input: 2 * one.input,
        cached: 2 * one.cached,
        cache_written: 2 * one.cache_written,
        output: 2 * one.output,
        reasoning: 2 * one.reasoning,
    }
}
