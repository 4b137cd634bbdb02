//! Requests of models that are sent again under their idempotency key, by endpoint, on two replicas (DESIGN §12.7, C079).

use bytes::Bytes;
use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::fake_llm::{FakeLlm, Raw, Reply as Says};
use obol_tests::client::{Reply, http};
use obol_tests::world::usage;
use obol_tests::{ALLOW_ALL, SOON};
use reqwest::RequestBuilder;
use serde_json::Value;

use super::{counters, total};

/// One way of asking a model.
#[derive(Debug, Clone, Copy)]
struct Ask {
    path: &'static str,
    body: &'static str,
    /// What the provider answers, of which the caller gets every byte.
    answer: &'static str,
    stream: bool,
    /// In nano-USD: ten tokens of prompt at 1000, five of answer at 2000.
    cost: i64,
}

const ASKS: [Ask; 7] = [
    Ask {
        path: "/v1/chat/completions",
        body: r#"{"model":"small","messages":[{"role":"user","content":"one"}]}"#,
        answer: r#"{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"two"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15}}"#,
        stream: false,
        cost: 20_000,
    },
    Ask {
        path: "/v1/chat/completions",
        body: r#"{"model":"small","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"one"}]}"#,
        answer: "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"two\"},\"finish_reason\":null}]}\n\n\
                 data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
                 data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":5,\"total_tokens\":15}}\n\n\
                 data: [DONE]\n\n",
        stream: true,
        cost: 20_000,
    },
    Ask {
        path: "/v1/messages",
        body: r#"{"model":"claude","max_tokens":100,"messages":[{"role":"user","content":"one"}]}"#,
        answer: r#"{"id":"m","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"two"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":10,"output_tokens":5}}"#,
        stream: false,
        cost: 20_000,
    },
    Ask {
        path: "/v1/messages",
        body: r#"{"model":"claude","max_tokens":100,"stream":true,"messages":[{"role":"user","content":"one"}]}"#,
        answer: "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"m\",\"content\":[],\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n\
                 event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n\
                 event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"two\"}}\n\n\
                 event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n\
                 event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":5}}\n\n\
                 event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        stream: true,
        cost: 20_000,
    },
    Ask {
        path: "/v1/responses",
        body: r#"{"model":"small","input":"one"}"#,
        answer: r#"{"id":"resp_1","object":"response","status":"completed","model":"m","output":[{"type":"message","role":"assistant","content":[{"type":"output_text","text":"two"}]}],"usage":{"input_tokens":10,"output_tokens":5,"total_tokens":15}}"#,
        stream: false,
        cost: 20_000,
    },
    Ask {
        path: "/v1/responses",
        body: r#"{"model":"small","stream":true,"input":"one"}"#,
        answer: "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_2\",\"status\":\"in_progress\"}}\n\n\
                 event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":1,\"delta\":\"two\"}\n\n\
                 event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":2,\"response\":{\"id\":\"resp_2\",\"status\":\"completed\",\"usage\":{\"input_tokens\":10,\"output_tokens\":5,\"total_tokens\":15}}}\n\n",
        stream: true,
        cost: 20_000,
    },
    Ask {
        path: "/v1/embeddings",
        body: r#"{"model":"small","input":"one"}"#,
        answer: r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.25]}],"model":"m","usage":{"prompt_tokens":10,"total_tokens":10}}"#,
        stream: false,
        cost: 10_000,
    },
];

impl Ask {
    fn content_type(self) -> &'static str {
        if self.stream { "text/event-stream" } else { "application/json" }
    }

    fn says(self) -> Says {
        Says::Raw(Raw::events([self.answer]).header("content-type", self.content_type()))
    }

    /// Nothing, or for a stream its first half, until it is told to go on.
    fn says_later(self) -> Says {
        let middle =
            if self.stream { self.answer.rfind("event: ").or(self.answer.rfind("data: {")) } else { None };
        let (now, later) = self.answer.split_at(middle.unwrap_or_default());
        let now = Raw::events((!now.is_empty()).then_some(now)).header("content-type", self.content_type());
        Says::Raw(now.wait_for_release().then(later))
    }

    /// The same endpoint, another request.
    fn other(self) -> String {
        self.body.replace("\"one\"", "\"another\"")
    }
}

/// Two replicas and a provider that speaks whatever is asked.
struct Two {
    cluster: Cluster,
    llm: FakeLlm,
    key: String,
}

impl Two {
    async fn start() -> Self {
        let llm = FakeLlm::start().await;
        let url = llm.base_url();
        let price = "price: { input: 1, output: 2 }";
        let yaml = format!(
            "workspace: acme\nenvironment: test\nbudgets:\n  - {{ scope: workspace, window: month, limit_usd: 1000 }}\n\
             providers:\n  o: {{ kind: openai, base_url: \"{url}\", allow_private: true }}\n  \
             a: {{ kind: anthropic, base_url: \"{url}\", allow_private: true }}\n\
             models:\n  small: {{ max_output: 1000, targets: [ {{ provider: o, model: m, {price} }} ] }}\n  \
             claude: {{ max_output: 1000, targets: [ {{ provider: a, model: m, {price} }} ] }}\n\
             policies: [acme.cedar]\n"
        );
        let cluster = Cluster::of_built_obol()
            .replicas(2)
            .workspace("acme", &yaml)
            .policy("acme.cedar", ALLOW_ALL)
            .start()
            .await;
        let key = cluster.new_key("acme", &[]).await;
        Self { cluster, llm, key }
    }

    fn request(&self, replica: usize, path: &str, body: impl Into<String>) -> RequestBuilder {
        self.request_of(&self.key, replica, path, body)
    }

    fn request_of(&self, who: &str, replica: usize, path: &str, body: impl Into<String>) -> RequestBuilder {
        let url = format!("{}{path}", self.cluster.public_url(replica));
        http().post(url).bearer_auth(who).body(body.into())
    }

    async fn ask(&self, replica: usize, key: &str, ask: Ask) -> Reply {
        Reply::of(self.request(replica, ask.path, ask.body).header("idempotency-key", key)).await
    }

    /// As [`Two::ask`], until the ledger knows how the one before ended.
    async fn again(&self, replica: usize, key: &str, ask: Ask) -> Reply {
        eventually(SOON, || async {
            let reply = self.ask(replica, key, ask).await;
            (!reply.text().contains("idempotency_in_flight")).then_some(reply)
        })
        .await
    }

    /// Everything was settled, as so many requests of this cost and others that were cut.
    async fn settled(&self, requests: usize, cost: i64) {
        let events = eventually(SOON, || async {
            let open: usize = self.cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
            (open == 0).then_some(usage(&self.cluster, "acme").await)
        })
        .await;
        let events: Vec<Value> =
            events.into_iter().filter(|event| !event["event_id"].as_str().unwrap().contains('/')).collect();
        let ok: Vec<&Value> = events.iter().filter(|event| event["outcome"] == "ok").collect();
        let paid: i64 = ok.iter().map(|event| event["cost"].as_i64().unwrap()).sum();
        assert_eq!((ok.len(), paid), (requests, cost), "one charge for each that was made: {ok:?}");
        for (counter, spent) in counters(&self.cluster).await {
            assert_eq!(spent, (total(&events), 0), "{counter}");
        }
    }
}

/// It was answered for the first time, or again; with every byte of the answer.
fn is_answer(ask: Ask, reply: &Reply, replayed: bool) {
    let mark = if replayed { "true" } else { "" };
    assert_eq!((reply.status, reply.header("idempotent-replayed")), (200, mark), "{ask:?}: {reply:?}");
    assert_eq!(reply.header("content-type"), ask.content_type(), "{ask:?}");
    assert_eq!(reply.body, Bytes::from_static(ask.answer.as_bytes()), "{ask:?}");
}

/// A refusal in the caller's dialect; `again` is what SDKs are told of trying again.
fn is_refused(ask: Ask, reply: &Reply, status: u16, code: &str, again: [&str; 2]) {
    let body = reply.json();
    assert_eq!((reply.status, body["error"]["code"].as_str()), (status, Some(code)), "{ask:?}: {reply:?}");
    assert_eq!([reply.header("retry-after"), reply.header("x-should-retry")], again, "{ask:?}: {reply:?}");
    assert_eq!(reply.header("content-type"), "application/json", "{ask:?}");
    if ask.path == "/v1/messages" {
        assert_eq!(
            (&body["type"], &body["error"]["type"]),
            (&"error".into(), &"invalid_request_error".into())
        );
    } else {
        let members: Vec<&String> = body["error"].as_object().unwrap().keys().collect();
        assert_eq!(members.len(), 4, "{ask:?}: {body}");
        assert_eq!(body["error"]["type"], "invalid_request_error", "{ask:?}: {body}");
    }
}

#[tokio::test]
async fn a_request_of_any_endpoint_that_is_sent_again_is_made_once() {
    let two = Two::start().await;
    let stranger = two.cluster.new_key("acme", &[]).await;
    let (mut made, mut cost) = (0, 0);
    for (n, ask) in ASKS.into_iter().enumerate() {
        two.llm.reply(ask.says());
        let before = two.llm.calls();
        // Two samples of one prompt are two requests.
        for replica in [0, 1] {
            is_answer(ask, &Reply::of(two.request(replica, ask.path, ask.body)).await, false);
        }
        assert_eq!(two.llm.calls() - before, 2, "{ask:?}");
        let key = format!("k-{n}");
        is_answer(ask, &two.ask(0, &key, ask).await, false);
        for replica in [1, 0, 1] {
            is_answer(ask, &two.again(replica, &key, ask).await, true);
        }
        assert_eq!(two.llm.calls() - before, 3, "{ask:?}");

        let other = two.request(1, ask.path, ask.other()).header("idempotency-key", &key);
        is_refused(ask, &Reply::of(other).await, 422, "idempotency_key_reused", ["", "false"]);
        for bad in ["", "a b", &"x".repeat(256)] {
            let reply = two.ask(0, bad, ask).await;
            is_refused(ask, &reply, 400, "invalid_idempotency_key", ["", ""]);
        }
        let twice = two.request(0, ask.path, ask.body).header("idempotency-key", "a");
        let reply = Reply::of(twice.header("idempotency-key", "b")).await;
        is_refused(ask, &reply, 400, "invalid_idempotency_key", ["", ""]);
        assert_eq!(two.llm.calls() - before, 3, "{ask:?}");
        let theirs = two.request_of(&stranger, 1, ask.path, ask.body).header("idempotency-key", &key);
        is_answer(ask, &Reply::of(theirs).await, false);
        assert_eq!(two.llm.calls() - before, 4, "{ask:?}");
        made += 4;
        cost += 4 * ask.cost;
    }
    two.settled(made, cost).await;
}

#[tokio::test]
async fn of_requests_at_once_on_two_replicas_one_is_made() {
    let two = Two::start().await;
    let mut cost = 0;
    for (n, ask) in ASKS.into_iter().enumerate() {
        two.llm.reply(ask.says_later());
        let (before, key) = (two.llm.calls(), format!("k-{n}"));
        let meanwhile = async {
            two.llm.wait_for_calls(before + 1).await;
            for replica in [0, 1] {
                let reply = two.ask(replica, &key, ask).await;
                is_refused(ask, &reply, 409, "idempotency_in_flight", ["1", ""]);
            }
            two.llm.release();
        };
        let (first, ()) = tokio::join!(two.ask(0, &key, ask), meanwhile);
        is_answer(ask, &first, false);
        is_answer(ask, &two.again(1, &key, ask).await, true);
        assert_eq!(two.llm.calls() - before, 1, "{ask:?}");
        cost += ask.cost;
    }
    two.settled(ASKS.len(), cost).await;
}

#[tokio::test]
async fn a_request_is_made_again_only_if_it_certainly_was_not() {
    let two = Two::start().await;
    let mut cost = 0;
    for (n, ask) in ASKS.into_iter().enumerate() {
        // Every provider failed, and wants nothing for it.
        let key = format!("failed-{n}");
        two.llm.reply(Says::status(503));
        assert_eq!(two.ask(0, &key, ask).await.status, 502, "{ask:?}");
        two.llm.reply(ask.says());
        is_answer(ask, &two.again(1, &key, ask).await, false);
        is_answer(ask, &two.again(0, &key, ask).await, true);
        // One that succeeds where the others fail: a target that failed five times in a row is left alone.
        is_answer(ask, &two.ask(0, &format!("well-{n}"), ask).await, false);
        cost += 2 * ask.cost;

        // The client left when the provider had begun.
        let (key, before) = (format!("left-{n}"), two.llm.calls());
        two.llm.reply(ask.says_later());
        tokio::select! {
            reply = two.ask(0, &key, ask) => panic!("{ask:?}: {reply:?}"),
            () = two.llm.wait_for_calls(before + 1) => {}
        }
        two.llm.reply(ask.says());
        let reply = two.again(1, &key, ask).await;
        is_refused(ask, &reply, 409, "idempotency_outcome_unknown", ["", "false"]);
        assert_eq!(two.llm.calls() - before, 1, "{ask:?}");
        two.llm.release();
    }
    two.settled(2 * ASKS.len(), cost).await;
}

/// More than a mebibyte of a stream, or of an answer, is relayed and not remembered.
#[tokio::test]
async fn what_is_too_large_to_be_remembered_is_not_made_again() {
    let two = Two::start().await;
    let mut cost = 0;
    for (n, ask) in ASKS.into_iter().enumerate() {
        let long =
            ask.answer.replace("two", &"two ".repeat(300_000)).replace("0.25", &"0.25,".repeat(300_000));
        let long = long.replace("0.25,]", "0.25]");
        let raw = Raw::events([long.clone()]).header("content-type", ask.content_type());
        two.llm.reply(Says::Raw(raw));
        let (key, before) = (format!("k-{n}"), two.llm.calls());
        let first = two.ask(0, &key, ask).await;
        assert!(first.status == 200 && first.body == long, "{ask:?}: {}", first.body.len());
        for replica in [1, 0] {
            let reply = two.again(replica, &key, ask).await;
            is_refused(ask, &reply, 409, "idempotency_not_replayable", ["", "false"]);
        }
        assert_eq!(two.llm.calls() - before, 1, "{ask:?}");
        cost += ask.cost;
    }
    two.settled(ASKS.len(), cost).await;
}
