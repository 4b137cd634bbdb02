use futures::StreamExt as _;
use reqwest::Client;
use serde_json::{Value, json};

use super::*;

const MODEL: &str = "gpt-fake";
const CLAUDE: &str = "claude-fake";

struct Got {
    status: u16,
    body: String,
}

impl Got {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// What came as `data`, a closing `[DONE]` apart.
    fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

fn request(server: &ModelServer, method: &str, path: &str) -> reqwest::RequestBuilder {
    let url = format!("{}/v1/{path}", server.origin());
    let request = Client::new().request(method.parse().unwrap(), url);
    if path.starts_with("messages") {
        request.header("x-api-key", "key").header("anthropic-version", "2023-06-01")
    } else {
        request.bearer_auth("key")
    }
}

async fn send(request: reqwest::RequestBuilder) -> Got {
    let response = request.send().await.unwrap();
    Got { status: response.status().as_u16(), body: response.text().await.unwrap() }
}

async fn post(server: &ModelServer, path: &str, body: Value) -> Got {
    send(request(server, "POST", path).body(body.to_string())).await
}

async fn ok(server: &ModelServer, path: &str, body: Value) -> Value {
    let got = post(server, path, body).await;
    assert_eq!(got.status, 200, "{}", got.body);
    got.json()
}

fn weather() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
}

fn chat(text: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": text}]})
}

fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("not fields: {more}") };
    body.as_object_mut().unwrap().extend(more);
    body
}

#[tokio::test]
async fn the_bill_is_the_sum_of_what_was_answered() {
    let server = ModelServer::start().await;
    let text = "hello big world #cached=10 #cache_write=3 #reasoning=4";
    let answer = ok(&server, "chat/completions", chat(text)).await;
    assert_eq!(answer["choices"][0]["message"]["content"], text);
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(2 + 6 + 13), &json!(6 + 4)));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 10);
    let charged = Charged { requests: 1, input: 21, cached: 10, cache_written: 3, output: 10, reasoning: 4 };
    assert_eq!(server.charged(Endpoint::ChatCompletions, MODEL), charged);

    // The same in the other dialect, which tells of the cache apart.
    let message = |more: Value| {
        with(
            json!({"model": CLAUDE, "system": "be kind", "messages": [{"role": "user", "content": text}]}),
            more,
        )
    };
    let thinking = json!({"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let answer = ok(&server, "messages", message(thinking)).await;
    let usage = &answer["usage"];
    assert_eq!((&usage["input_tokens"], &usage["output_tokens"]), (&json!(8), &json!(10)));
    assert_eq!(
        (&usage["cache_read_input_tokens"], &usage["cache_creation_input_tokens"]),
        (&json!(10), &json!(3))
    );
    assert_eq!(answer["content"][0]["thinking"], "hm hm hm hm");
    assert_eq!(server.charged(Endpoint::Messages, CLAUDE), charged);
    let counted = ok(&server, "messages/count_tokens", message(json!({}))).await;
    assert_eq!(counted, json!({"input_tokens": 21}));

    post(&server, "chat/completions", json!({"model": "nope"})).await;
    let all = server.charged_in_all();
    assert_eq!((all.requests, all.input, all.output, server.calls()), (3, 42, 20, 4));
}

#[tokio::test]
async fn a_stream_of_chat_says_what_the_whole_says() {
    let server = ModelServer::start().await;
    let stream = json!({"stream": true});
    let counted = json!({"stream": true, "stream_options": {"include_usage": true}});
    let whole = ok(&server, "chat/completions", chat("hello big world")).await;

    let got = post(&server, "chat/completions", with(chat("hello big world"), stream)).await;
    assert!(got.body.ends_with("data: [DONE]\n\n") && !got.body.contains("usage"), "{}", got.body);
    let got = post(&server, "chat/completions", with(chat("hello big world"), counted.clone())).await;
    let mut events = got.events();
    let last = events.pop().unwrap();
    assert_eq!((&last["usage"], &last["choices"]), (&whole["usage"], &json!([])));
    assert!(events.iter().all(|event| event["usage"].is_null()));
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "hello big world");

    let tools =
        json!({"tools": [{"type": "function", "function": {"name": "weather", "parameters": weather()}}]});
    let asked = with(with(chat("Rome now #calls=2"), tools), counted);
    let events = post(&server, "chat/completions", asked).await.events();
    let mut arguments = [String::new(), String::new()];
    for call in
        events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten()
    {
        let index = call["index"].as_u64().unwrap();
        arguments[usize::try_from(index).unwrap()] += call["function"]["arguments"].as_str().unwrap();
    }
    assert_eq!(arguments, [r#"{"city":"Rome now #calls=2","days":3}"#; 2]);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 2 * CALL_TOKENS);
    assert_eq!(events.last().unwrap()["usage"]["prompt_tokens"], 2 + 3 + TOOL_TOKENS);
}

#[tokio::test]
async fn chat_refuses_what_the_real_one_refuses() {
    let server = ModelServer::start().await;
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}});
    let user = json!({"role": "user", "content": "hi"});
    let assistant = json!({"role": "assistant", "tool_calls": [call]});
    let result = json!({"role": "tool", "tool_call_id": "call_1", "content": "sunny"});
    let strict =
        json!({"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": weather()}});
    let of = |messages: Value| json!({"model": MODEL, "messages": messages});
    for (body, status, code, param) in [
        (json!({"model": "nope", "messages": [user]}), 404, json!("model_not_found"), Value::Null),
        (json!({"model": CLAUDE, "messages": [user]}), 404, json!("model_not_found"), Value::Null),
        (json!({"messages": [user]}), 400, json!("missing_required_parameter"), json!("model")),
        (json!({"model": MODEL}), 400, json!("missing_required_parameter"), json!("messages")),
        (of(json!([])), 400, json!("empty_array"), json!("messages")),
        (with(chat("a"), json!({"max_tokenz": 1})), 400, json!("unknown_parameter"), json!("max_tokenz")),
        (with(chat("a"), json!({"system": "b"})), 400, json!("unknown_parameter"), json!("system")),
        (
            of(json!([{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}])),
            400,
            json!("unknown_parameter"),
            json!("messages[0].content[0].cache_control"),
        ),
        (with(chat("a"), json!({"stream_options": {}})), 400, Value::Null, json!("stream_options")),
        (with(chat("a"), json!({"response_format": strict})), 400, Value::Null, json!("response_format")),
        (of(json!([user, result])), 400, Value::Null, json!("messages.[1].role")),
        (of(json!([user, assistant])), 400, Value::Null, json!("messages")),
        (of(json!([user, assistant, user])), 400, Value::Null, json!("messages")),
    ] {
        let got = post(&server, "chat/completions", body.clone()).await;
        let error = &got.json()["error"];
        assert_eq!((got.status, &error["code"], &error["param"]), (status, &code, &param), "{body}: {error}");
    }
    let told = ok(&server, "chat/completions", of(json!([user, assistant, result]))).await;
    assert_eq!(told["choices"][0]["message"]["content"], "sunny");
    assert_eq!(told["usage"]["prompt_tokens"], 1 + CALL_TOKENS + 1);
    let got = send(request(&server, "POST", "files").body("{}")).await;
    assert_eq!(got.json()["error"]["message"], "Invalid URL (POST /v1/files)");
}

#[tokio::test]
async fn messages_refuse_what_the_real_one_refuses() {
    let server = ModelServer::start().await;
    let user = json!({"role": "user", "content": "hi"});
    let call = json!({"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}});
    let assistant = json!({"role": "assistant", "content": [call]});
    let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"});
    let text = json!({"type": "text", "text": "and now"});
    let forged = json!({"type": "thinking", "thinking": "hm", "signature": "forged"});
    let of = |messages: Value| json!({"model": CLAUDE, "max_tokens": 9, "messages": messages});
    for (body, status, kind, starts) in [
        (
            json!({"model": MODEL, "max_tokens": 9, "messages": [user]}),
            404,
            "not_found_error",
            "model: gpt-fake",
        ),
        (
            json!({"model": CLAUDE, "messages": [user]}),
            400,
            "invalid_request_error",
            "max_tokens: Field required",
        ),
        (of(json!([])), 400, "invalid_request_error", "messages: at least one"),
        (with(of(json!([user])), json!({"n": 1})), 400, "invalid_request_error", "n: Extra inputs"),
        (with(of(json!([user])), json!({"temperature": 1.5})), 400, "invalid_request_error", "temperature: "),
        (of(json!([{"role": "tool", "content": "a"}])), 400, "invalid_request_error", "messages.0.role: "),
        (of(json!([user, assistant])), 400, "invalid_request_error", "messages.1: `tool_use` ids"),
        (
            of(json!([user, assistant, {"role": "user", "content": [text, result]}])),
            400,
            "invalid_request_error",
            "messages.1: `tool_use` ids",
        ),
        (
            of(json!([{"role": "user", "content": [result]}])),
            400,
            "invalid_request_error",
            "messages.0.content.0: unexpected `tool_use_id`",
        ),
        (
            of(json!([user, {"role": "assistant", "content": [forged]}, user])),
            400,
            "invalid_request_error",
            "messages.1.content.0: Invalid `signature`",
        ),
        (
            of(json!([{"role": "user", "content": ""}])),
            400,
            "invalid_request_error",
            "messages.0: all messages",
        ),
    ] {
        let got = post(&server, "messages", body.clone()).await;
        let error = &got.json()["error"];
        assert_eq!((got.status, error["type"].as_str()), (status, Some(kind)), "{body}: {error}");
        assert!(error["message"].as_str().unwrap().starts_with(starts), "{body}: {error}");
    }
    let told = of(json!([user, assistant, {"role": "user", "content": [result]}]));
    assert_eq!(ok(&server, "messages", told).await["content"][0]["text"], "sunny");

    let url = format!("{}/v1/messages", server.origin());
    let warm = with(of(json!([user])), json!({"temperature": 0.5})).to_string();
    for (key, version, status) in [
        (None, Some("2023-06-01"), 401),
        (Some(("x-api-key", "key")), None, 400),
        (Some(("x-api-key", "key")), Some("2023-06-01"), 200),
        (Some(("authorization", "Bearer key")), Some("2023-06-01"), 200),
        (Some(("authorization", "Bearer key")), Some("2026-10-21"), 400),
        (Some(("authorization", "Bearer key")), Some("1999-01-01"), 400),
    ] {
        let headers = key.into_iter().chain(version.map(|version| ("anthropic-version", version)));
        let request = Client::new().post(&url).body(warm.clone());
        let request = headers.fold(request, |request, (name, value)| request.header(name, value));
        assert_eq!(send(request).await.status, status, "{key:?} {version:?}");
    }
}

#[tokio::test]
async fn a_stream_of_a_message_says_what_the_whole_says() {
    let server = ModelServer::start().await;
    let body = json!({
        "model": CLAUDE, "max_tokens": 3000, "thinking": {"type": "adaptive"}, "stream": true,
        "messages": [{"role": "user", "content": "Rome #reasoning=2"}],
        "tools": [{"name": "weather", "input_schema": weather()}]
    });
    let events = post(&server, "messages", body).await.events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["message_start", "content_block_start", "ping"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let of = |name: &str| {
        events.iter().filter_map(|event| event["delta"][name].as_str()).collect::<Vec<_>>().concat()
    };
    assert_eq!(of("thinking"), "hm hm");
    assert_eq!(of("signature"), messages::signature("hm hm"));
    assert_eq!(of("partial_json"), r#"{"city":"Rome #reasoning=2","days":2}"#);
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert_eq!(end["usage"]["output_tokens"], CALL_TOKENS + 2);
    assert_eq!(end["usage"]["output_tokens_details"]["thinking_tokens"], 2);
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], 2 + TOOL_TOKENS);
}

#[tokio::test]
async fn answers_end_where_they_are_told_to() {
    let server = ModelServer::start().await;
    let answer = ok(&server, "chat/completions", with(chat("one two three"), json!({"max_tokens": 2}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["message"]["content"], "one two");
    let answer = ok(&server, "chat/completions", with(chat("one two three"), json!({"stop": "three"}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "one two ");
    let message = json!({"model": CLAUDE, "max_tokens": 9, "stop_sequences": ["three"],
        "messages": [{"role": "user", "content": "one two three"}]});
    let answer = ok(&server, "messages", message).await;
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!("three"))
    );
    let response = json!({"model": MODEL, "input": "#words=5", "max_output_tokens": 2});
    let answer = ok(&server, "responses", response).await;
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["output"][0]["content"][0]["text"], "word word");
}

#[tokio::test]
async fn responses_are_remembered_until_they_are_deleted() {
    let server = ModelServer::start().await;
    let first = ok(&server, "responses", json!({"model": MODEL, "input": "hello world"})).await;
    let id = first["id"].as_str().unwrap();
    let second = json!({"model": MODEL, "input": "go on", "previous_response_id": id});
    let second = ok(&server, "responses", second).await;
    assert_eq!(second["usage"]["input_tokens"], 2 + 2 + 2, "the answer so far counts too");
    assert_eq!(second["output"][0]["content"][0]["text"], "go on");

    let path = format!("responses/{id}");
    let get = |path: String| send(request(&server, "GET", &path));
    assert_eq!(get(path.clone()).await.json(), first);
    let items = get(format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "hello world");
    assert_eq!(post(&server, &format!("{path}/cancel"), json!({})).await.status, 400);
    assert_eq!(send(request(&server, "DELETE", &path)).await.json()["deleted"], true);
    for (method, path) in
        [("GET", path.clone()), ("DELETE", path.clone()), ("POST", format!("{path}/cancel"))]
    {
        let got = send(request(&server, method, &path)).await;
        let message = format!("Response with id '{id}' not found.");
        let error = json!({"message": message, "type": "invalid_request_error", "param": null, "code": null});
        assert_eq!((got.status, got.json()["error"].clone()), (404, error));
    }
    let got =
        post(&server, "responses", json!({"model": MODEL, "input": "a", "previous_response_id": id})).await;
    assert_eq!((got.status, &got.json()["error"]["code"]), (400, &json!("previous_response_not_found")));
    let unkept = ok(&server, "responses", json!({"model": MODEL, "input": "a", "store": false})).await;
    assert_eq!(get(format!("responses/{}", unkept["id"].as_str().unwrap())).await.status, 404);

    let queued = ok(&server, "responses", json!({"model": MODEL, "input": "a", "background": true})).await;
    assert_eq!(queued["status"], "queued");
    let path = format!("responses/{}", queued["id"].as_str().unwrap());
    assert_eq!(post(&server, &format!("{path}/cancel"), json!({})).await.json()["status"], "cancelled");
    assert_eq!(get(path).await.json()["status"], "cancelled");
}

#[tokio::test]
async fn a_stream_of_a_response_is_numbered_and_complete() {
    let server = ModelServer::start().await;
    let tool = json!({"type": "function", "name": "weather", "parameters": weather()});
    let body = json!({"model": MODEL, "input": "Rome #reasoning=3", "tools": [tool], "stream": true});
    let events = post(&server, "responses", body).await.events();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let response = &events.last().unwrap()["response"];
    assert_eq!(response["usage"]["output_tokens_details"]["reasoning_tokens"], 3);
    let call = &response["output"][1];

    // And on, with the result.
    let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"});
    let on =
        json!({"model": MODEL, "input": [result], "previous_response_id": response["id"], "stream": true});
    let events = post(&server, "responses", on).await.events();
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    assert_eq!(deltas.map(|event| event["delta"].as_str().unwrap()).collect::<String>(), "sunny");
    let lost = json!({"type": "function_call_output", "call_id": "call_lost", "output": "sunny"});
    let got = post(&server, "responses", json!({"model": MODEL, "input": [lost]})).await;
    assert_eq!(got.status, 400, "{}", got.body);
}

#[tokio::test]
async fn embeddings_are_the_same_in_both_encodings() {
    use base64::Engine as _;
    let server = ModelServer::start().await;
    let ask = |more: Value| {
        ok(&server, "embeddings", with(json!({"model": "embed-fake", "input": ["hello world", "a"]}), more))
    };
    let floats = ask(json!({"dimensions": 4})).await;
    let base64 = ask(json!({"dimensions": 4, "encoding_format": "base64"})).await;
    assert_eq!(floats["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
    assert_ne!(floats["data"][0]["embedding"], floats["data"][1]["embedding"]);
    let text = base64["data"][1]["embedding"].as_str().unwrap();
    let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
    let (numbers, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    let numbers: Vec<f32> = numbers.iter().copied().map(f32::from_le_bytes).collect();
    assert_eq!(json!(numbers), floats["data"][1]["embedding"]);
    let got = post(&server, "embeddings", json!({"model": MODEL, "input": "a"})).await;
    assert_eq!(got.status, 404);
}

#[tokio::test]
async fn a_stream_dies_in_its_own_dialect() {
    let server = ModelServer::start().await;
    let text = "one two three #dies_after=2";
    let of = |path, body: Value| post(&server, path, with(body, json!({"stream": true})));
    let got = of("chat/completions", chat(text)).await;
    assert!(!got.body.contains("[DONE]") && !got.body.contains("three "), "{}", got.body);
    assert_eq!(got.events().last().unwrap()["error"]["type"], "server_error");
    let message = json!({"model": CLAUDE, "max_tokens": 9, "messages": [{"role": "user", "content": text}]});
    let got = of("messages", message).await;
    assert!(!got.body.contains("message_stop") && got.body.contains("two "), "{}", got.body);
    assert_eq!(got.events().last().unwrap()["error"]["type"], "overloaded_error");
    let events = of("responses", json!({"model": MODEL, "input": text})).await.events();
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["sequence_number"]), (&json!("error"), &json!(events.len() - 1)));
}

#[tokio::test]
async fn models_are_listed_in_the_dialect_of_the_caller() {
    let server = ModelServer::builder().key("the one").openai_models(&["a"]).start().await;
    let refused = send(request(&server, "GET", "models")).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (401, &json!("invalid_api_key")));
    let url = format!("{}/models", server.base_url());
    let openai = send(Client::new().get(&url).bearer_auth("the one")).await.json();
    assert_eq!((&openai["object"], &openai["data"][1]["id"]), (&json!("list"), &json!("embed-fake")));
    let anthropic =
        Client::new().get(&url).header("x-api-key", "the one").header("anthropic-version", "2023-06-01");
    assert_eq!(send(anthropic).await.json()["first_id"], CLAUDE);
}

#[tokio::test]
async fn troubles_come_once_and_in_the_right_dialect() {
    let server = ModelServer::start().await;
    let message =
        json!({"model": CLAUDE, "max_tokens": 9, "messages": [{"role": "user", "content": "a b c"}]});
    server.trouble_once(Trouble::Status(529));
    let got = post(&server, "messages", message.clone()).await;
    assert_eq!((got.status, &got.json()["error"]["type"]), (529, &json!("overloaded_error")));
    server.trouble_once(Trouble::Status(429));
    let got = post(&server, "chat/completions", chat("a")).await;
    assert_eq!((got.status, &got.json()["error"]["type"]), (429, &json!("requests")));
    server.trouble_once(Trouble::Raw(Raw::json("{}").status(418)));
    assert_eq!(post(&server, "chat/completions", chat("a")).await.status, 418);
    server.trouble_once(Trouble::Cut);
    let cut = request(&server, "POST", "chat/completions").body(chat("a").to_string()).send().await;
    assert!(cut.is_err());
    assert_eq!(server.charged_in_all().requests, 0);

    let stream = with(message, json!({"stream": true})).to_string();
    server.trouble_once(Trouble::CutAfter(4));
    let response = request(&server, "POST", "messages").body(stream.clone()).send().await.unwrap();
    assert!(response.text().await.is_err());
    server.trouble_once(Trouble::HoldAfter(1));
    let response = request(&server, "POST", "messages").body(stream).send().await.unwrap();
    let mut body = response.bytes_stream();
    assert!(body.next().await.unwrap().unwrap().starts_with(b"event: message_start"));
    server.release();
    let mut rest = Vec::new();
    while let Some(chunk) = body.next().await {
        rest.extend(chunk.unwrap());
    }
    assert!(String::from_utf8(rest).unwrap().contains("message_stop"));
    assert_eq!((server.charged_in_all().requests, server.calls(), server.left_early()), (2, 6, 0));
}
