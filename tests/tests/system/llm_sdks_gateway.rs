//! The official model SDKs through two replicas: each speaks its own dialect to a provider that speaks it too, and to one
//! that does not.

use std::collections::{BTreeMap, BTreeSet};

use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::logs::assert_no_secret;
use obol_testkit::model_server::{Charged, Endpoint, ModelServer};
use obol_tests::model_clients::{Found, Run};
use obol_tests::world::usage;
use obol_tests::{ALLOW_ALL, SOON};
use serde_json::{Value, json};

/// One account for both providers; only the replicas know its key.
const ACCOUNT: &str = "key-of-the-account-4c1f";
const PROMPT: &str = "Say hello to the world #cached=8 #reasoning=3";

/// What a provider of the other dialect can be asked for.
const TRANSLATED_CHAT: [&str; 10] = [
    "chat_plain",
    "chat_stream",
    "chat_stream_usage",
    "chat_tools",
    "chat_tools_stream",
    "chat_tools_parallel",
    "chat_length",
    "chat_stop",
    "chat_image",
    "chat_parsed",
];
const TRANSLATED_MESSAGES: [&str; 10] = [
    "message_plain",
    "message_stream",
    "message_stream_raw",
    "message_tools",
    "message_tools_stream",
    "message_tools_parallel",
    "message_length",
    "message_stop",
    "message_image",
    "message_of_old",
];
/// All but those that only one dialect knows, and what dies on the way.
const NATIVE_OPENAI: [&str; 8] = [
    "embeddings",
    "models",
    "responses_plain",
    "responses_stream",
    "responses_tools",
    "responses_stored",
    "unknown_model",
    "bad_key",
];
const NATIVE_ANTHROPIC: [&str; 5] =
    ["message_thinking", "count_tokens", "models", "unknown_model", "bad_key"];

struct System {
    cluster: Cluster,
    key: String,
    server: ModelServer,
}

impl System {
    async fn start() -> Self {
        let server = ModelServer::builder().key(ACCOUNT).start().await;
        let base_url = server.base_url();
        let yaml = format!(
            r#"workspace: acme
environment: test
providers:
  openai:
    kind: openai
    base_url: "{base_url}"
    allow_private: true
    auth: {{ bearer: {{ secret: "env:ACCOUNT" }} }}
  claude:
    kind: anthropic
    base_url: "{base_url}"
    allow_private: true
    auth: {{ header: {{ name: x-api-key, value: {{ secret: "env:ACCOUNT" }} }} }}
models:
  chat-native:
    max_output: 1000
    targets: [ {{ provider: openai, model: gpt-fake, price: {{ input: 1, output: 2 }} }} ]
  claude-native:
    max_output: 4000
    targets: [ {{ provider: claude, model: claude-fake, price: {{ input: 1, output: 2 }} }} ]
  vectors:
    targets: [ {{ provider: openai, model: embed-fake, price: {{ input: 1, output: 0 }} }} ]
policies: ["acme.cedar"]
"#
        );
        let cluster = Cluster::of_built_obol()
            .replicas(2)
            .log("debug")
            .control_env("ACCOUNT", ACCOUNT)
            .workspace("acme", &yaml)
            .policy("acme.cedar", ALLOW_ALL)
            .start()
            .await;
        let key = cluster.new_key("acme", &[]).await;
        Self { cluster, key, server }
    }

    fn run<'a>(&'a self, origin: &'a str, model: &'a str, scenarios: &'a [&'a str]) -> Run<'a> {
        Run { origin, key: &self.key, model, embedding_model: Some("vectors"), scenarios }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openai_s_sdks_reach_a_provider_of_their_dialect() {
    let system = System::start().await;
    let scenarios = [&TRANSLATED_CHAT[..], &NATIVE_OPENAI].concat();
    openai_to_openai(&system.run(&system.cluster.base_url(), "chat-native", &scenarios).openai().await);
    system.checked(&["chat_completion", "embedding", "response"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anthropic_s_sdks_reach_a_provider_of_their_dialect() {
    let system = System::start().await;
    let scenarios = [&TRANSLATED_MESSAGES[..], &NATIVE_ANTHROPIC].concat();
    anthropic_to_anthropic(
        &system.run(&system.cluster.base_url(), "claude-native", &scenarios).anthropic().await,
    );
    system.checked(&["message"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openai_s_sdks_reach_a_provider_of_the_other_dialect() {
    let system = System::start().await;
    let found = system.run(&system.cluster.base_url(), "claude-native", &TRANSLATED_CHAT).openai().await;
    // A model of Anthropic's thinks only when it is told to, which chat completions do not.
    chat(&found, &openai_usage(4 + 7 + 8, 7, 8, 0));
    system.checked(&["chat_completion"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anthropic_s_sdks_reach_a_provider_of_the_other_dialect() {
    let system = System::start().await;
    let found = system.run(&system.cluster.base_url(), "chat-native", &TRANSLATED_MESSAGES).anthropic().await;
    // What a model of OpenAI's reasons is output for a caller of messages; and it does not say which stop sequence it met.
    messages(&found, &anthropic_usage(4 + 7, 7 + 3, 8), "end_turn");
    system.checked(&["message"]).await;
}

/// No SDK takes half an answer for a whole one, whoever answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_dies_on_the_way_ends_in_an_error() {
    let system = System::start().await;
    let origin = system.cluster.base_url();
    for (model, scenarios) in [
        ("chat-native", &["chat_stream_dies", "responses_stream_dies"][..]),
        ("claude-native", &["chat_stream_dies"]),
    ] {
        for (name, scenario) in system.run(&origin, model, scenarios).openai().await {
            assert_eq!(scenario["text"], "One two three ", "{name} by {model}: {scenario}");
        }
    }
    for model in ["chat-native", "claude-native"] {
        let found = system.run(&origin, model, &["message_stream_dies"]).anthropic().await;
        let scenario = &found["message_stream_dies"];
        assert_eq!(scenario["text"], "One two three ", "{model}: {scenario}");
        assert!(scenario["type"].is_string(), "{model}: {scenario}");
    }
}

fn openai_usage(input: u64, output: u64, cached: u64, reasoning: u64) -> Value {
    json!({"input": input, "output": output, "cached": cached, "reasoning": reasoning})
}

fn anthropic_usage(input: u64, output: u64, cached: u64) -> Value {
    json!({"input": input, "output": output, "cached": cached, "written": 0})
}

/// Chat completions, with the usage of the prompt, which differs by who answers.
fn chat(found: &Found, usage: &Value) {
    let round_trip = [openai_usage(3 + 20, 10, 0, 0), openai_usage(3 + 20 + 10 + 3, 3, 0, 0)];
    let tools = json!({
        "called": "weather",
        "arguments": {"city": "Weather in Rome", "days": 3},
        "finish": "tool_calls",
        "text": "sunny, 24 degrees",
        "usage": round_trip
    });
    let forecast = json!({"city": "Weather in Rome", "days": 3, "sunny": true});
    each(
        found,
        &json!({
            "chat_plain": {"text": PROMPT, "finish": "stop", "usage": usage},
            "chat_stream": {"text": PROMPT, "finish": "stop", "usage": []},
            "chat_stream_usage": {"text": PROMPT, "finish": "stop", "usage": [usage]},
            "chat_tools": tools,
            "chat_tools_stream": tools,
            "chat_tools_parallel": {
                "called": ["weather", "weather"],
                "finish": "tool_calls",
                "text": "sunny rainy",
                "usage": openai_usage(4 + 20 + 2 * 10 + 2, 2, 0, 0)
            },
            "chat_length": {"text": "one two", "finish": "length", "usage": openai_usage(4, 2, 0, 0)},
            "chat_stop": {"text": "one two ", "finish": "stop", "usage": openai_usage(4, 2, 0, 0)},
            "chat_image": {"text": "What is this", "usage": openai_usage(3 + 100, 3, 0, 0)},
            "chat_parsed": {"parsed": forecast, "usage": openai_usage(3, 3, 0, 0)}
        }),
    );
}

/// Messages, with the usage of the prompt, which differs by who answers.
fn messages(found: &Found, usage: &Value, stopped: &str) {
    let said = json!({"text": PROMPT, "stop": "end_turn", "usage": usage});
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
    each(
        found,
        &json!({
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
            "message_stop": {"text": "one two ", "stop": stopped, "usage": anthropic_usage(4, 2, 0)},
            "message_image": {"text": "What is this", "stop": "end_turn", "usage": anthropic_usage(3 + 100, 3, 0)},
            "message_of_old": said
        }),
    );
}

fn openai_to_openai(found: &Found) {
    let usage = openai_usage(4 + 7 + 8, 7 + 3, 8, 3);
    chat(found, &usage);
    let round_trip = [openai_usage(3 + 20, 10, 0, 0), openai_usage(3 + 20 + 10 + 3, 3, 0, 0)];
    each(
        found,
        &json!({
            "embeddings": {"dimensions": [8, 8], "usage": 5},
            "responses_plain": {"text": PROMPT, "status": "completed", "usage": usage},
            "responses_tools": {
                "called": "weather",
                "arguments": {"city": "Weather in Rome", "days": 3},
                "text": "sunny, 24 degrees",
                "usage": round_trip
            },
            "responses_stored": {
                "text": "go on",
                "usage": [openai_usage(4, 4, 0, 0), openai_usage(4 + 4 + 2, 2, 0, 0)],
                "items": ["My name is Ada"],
                "gone": 404,
                "lost": [404, "previous_response_not_found"]
            }
        }),
    );
    let streamed = &found["responses_stream"];
    assert_eq!((&streamed["text"], &streamed["usage"]), (&json!(PROMPT), &usage));
    assert_eq!(
        streamed["events"].as_array().and_then(|events| events.last()),
        Some(&json!("response.completed"))
    );
    lists(found, "chat-native");
    refuses(
        found,
        "unknown_model",
        &json!({"error": "NotFoundError", "status": 404, "code": "model_not_found"}),
    );
    refuses(found, "bad_key", &json!({"error": "AuthenticationError", "status": 401}));
}

fn anthropic_to_anthropic(found: &Found) {
    messages(found, &anthropic_usage(4 + 7, 7, 8), "stop_sequence");
    let thinking = json!({
        "thinking": "hm hm hm hm", "text": "sunny, 24 degrees", "usage": anthropic_usage(4 + 20, 10 + 4, 0)
    });
    each(found, &json!({"message_thinking": thinking, "count_tokens": {"input": 4 + 7 + 8 + 20}}));
    lists(found, "claude-native");
    refuses(
        found,
        "unknown_model",
        &json!({"error": "NotFoundError", "status": 404, "type": "not_found_error"}),
    );
    let stranger = json!({"error": "AuthenticationError", "status": 401, "type": "authentication_error"});
    refuses(found, "bad_key", &stranger);
}

/// Each of these was found, one by one, so that a failure shows the one that differs.
fn each(found: &Found, expected: &Value) {
    for (name, expected) in expected.as_object().unwrap() {
        assert_eq!(found.get(name), Some(expected), "{name}");
    }
}

/// Each SDK sees every model of the workspace, and no name of a provider's.
fn lists(found: &Found, model: &str) {
    let names = |list: &Value| {
        let mut names: Vec<String> = serde_json::from_value(list.clone()).unwrap();
        names.sort();
        names
    };
    assert_eq!(names(&found["models"]["models"]), ["chat-native", "claude-native", "vectors"]);
    assert_eq!(found["models"]["retrieved"], model);
}

/// A refusal has at least these fields.
fn refuses(found: &Found, name: &str, expected: &Value) {
    for (field, expected) in expected.as_object().unwrap() {
        assert_eq!(found[name].get(field), Some(expected), "{name}: {}", found[name]);
    }
}

impl System {
    /// What holds of any traffic that was answered in full: each call is one event, of one of these kinds, with the
    /// tokens that the provider charged; and no key goes where it does not belong.
    async fn checked(&self, kinds: &[&str]) {
        let mut charged: BTreeMap<String, Charged> = BTreeMap::new();
        for ((endpoint, model), one) in self.server.bill() {
            if endpoint != Endpoint::CountTokens {
                add(charged.entry(model).or_default(), one);
            }
        }
        let requests: u64 = charged.values().map(|one| one.requests).sum();
        let events = eventually(SOON, || async {
            let events = usage(&self.cluster, "acme").await;
            let ok = events.into_iter().filter(|event| event["outcome"] == "ok").collect::<Vec<Value>>();
            Some(ok).filter(|events| events.len() as u64 >= requests)
        })
        .await;
        let mut metered: BTreeMap<String, Charged> = BTreeMap::new();
        for event in &events {
            let tokens = |name: &str| event["tokens"][name].as_u64().unwrap_or_default();
            let one = Charged {
                requests: 1,
                input: tokens("input") + tokens("cached_input") + tokens("cache_write"),
                cached: tokens("cached_input"),
                cache_written: tokens("cache_write"),
                output: tokens("output") + tokens("reasoning"),
                reasoning: tokens("reasoning"),
            };
            add(metered.entry(event["upstream_model"].as_str().unwrap().to_owned()).or_default(), one);
            assert_eq!(event["estimated"], false, "{event}");
        }
        assert_eq!(metered, charged);
        let of =
            |field: &str| events.iter().map(|event| event[field].as_str().unwrap()).collect::<BTreeSet<_>>();
        assert_eq!(of("kind"), kinds.iter().copied().collect());
        assert_eq!(of("replica").len(), 2, "both replicas served");

        for received in self.server.received() {
            for (name, value) in &received.headers {
                let value = value.to_str().unwrap_or_default();
                assert!(!value.contains(&self.key), "{name} of {} carried the caller's key", received.path);
            }
        }
        assert_no_secret(
            &self.cluster.logs(),
            &[("virtual key", &self.key), ("key of the account", ACCOUNT)],
        );
    }
}

fn add(sum: &mut Charged, one: Charged) {
    sum.requests += one.requests;
    sum.input += one.input;
    sum.cached += one.cached;
    sum.cache_written += one.cache_written;
    sum.output += one.output;
    sum.reasoning += one.reasoning;
}
