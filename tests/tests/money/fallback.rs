//! What a target may do, who is asked next, what the caller gets, and who pays (C078, C084, C085, C086, C090).

use std::fmt::Write as _;

use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::fake_llm::FakeLlm;
use obol_tests::client::{Reply, http};
use obol_tests::world::usage;
use obol_tests::{ALLOW_ALL, SOON};
use reqwest::RequestBuilder;
use serde_json::Value;

use super::failures::{
    Cut, Dialect, Does, Failure, Rest, Then, WORDS, cuts, failures, good, silences, stalled,
};
use super::{counters, new_key, total};

/// Of the three targets in nano-USD for a token of the prompt; one of the answer costs twice as much.
const PRICES: [i64; 3] = [1_000, 10_000, 3_000];
/// What an answer of [`good`] costs: ten tokens of prompt, five of answer.
const ANSWER: i64 = 20;

/// One replica, and three providers that speak both dialects, each for itself.
struct Targets {
    cluster: Cluster,
    servers: [FakeLlm; 3],
    key: String,
    dialect: Dialect,
    /// Models so far; each has targets of its own, which nothing is known of.
    next: usize,
    /// What the events have to say.
    owed: Vec<Owed>,
}

/// What is charged for a request, and how each attempt ended.
#[derive(Debug)]
struct Owed {
    row: String,
    request_id: String,
    outcome: &'static str,
    cost: Cost,
    attempts: Vec<&'static str>,
}

impl Owed {
    /// The attempts that have events of their own: the only one of a request is the request.
    fn events(&self) -> &[&'static str] {
        if self.attempts.len() > 1 { &self.attempts } else { &[] }
    }
}

#[derive(Debug)]
enum Cost {
    Exactly(i64),
    /// The prompt, by estimate, at this price for a token.
    Prompt(i64),
    /// What was relayed, by estimate, of the first target.
    Relayed,
}

impl Targets {
    async fn start(dialect: Dialect, models: usize) -> Self {
        let servers = [FakeLlm::start().await, FakeLlm::start().await, FakeLlm::start().await];
        let cluster = Cluster::of_built_obol()
            .replicas(1)
            .control_env("FAKE_LLM_SECRET", "upstream-llm-credential-9a1c")
            .workspace("acme", &workspace(dialect, &servers, models))
            .policy("acme.cedar", ALLOW_ALL)
            .start()
            .await;
        let key = cluster.new_key("acme", &[]).await;
        Self { cluster, servers, key, dialect, next: 0, owed: Vec::new() }
    }

    /// A model that nobody has asked yet.
    fn model(&mut self, kind: &str) -> String {
        self.next += 1;
        format!("{kind}-{}", self.next)
    }

    fn request(&self, key: &str, model: &str, stream: bool) -> RequestBuilder {
        let path = self.dialect.path();
        let request = http().post(format!("{}{path}", self.cluster.public_url(0))).bearer_auth(key);
        request.body(self.dialect.body(model, stream))
    }

    async fn ask(&self, key: &str, model: &str, stream: bool) -> Reply {
        Reply::of(self.request(key, model, stream)).await
    }

    /// What the targets do, and all others answer.
    async fn set(&self, does: &[&Does], stream: bool) {
        for (n, server) in self.servers.iter().enumerate() {
            match does.get(n) {
                Some(Does::Refuse) => server.refuse().await,
                Some(Does::Say(reply)) => server.reply((*reply).clone()),
                None => server.reply(good(self.dialect, n, stream)),
            }
        }
    }

    async fn reset(&self, does: &Does) {
        if let Does::Refuse = does {
            for server in &self.servers {
                server.accept().await;
            }
        }
    }

    fn calls(&self) -> [u64; 3] {
        self.servers.each_ref().map(FakeLlm::calls)
    }

    fn owe(
        &mut self,
        row: &str,
        reply: &Reply,
        outcome: &'static str,
        cost: Cost,
        attempts: &[&'static str],
    ) {
        let request_id = event_id(reply);
        self.owed.push(Owed { row: row.to_owned(), request_id, outcome, cost, attempts: attempts.to_vec() });
    }

    /// Only the first target fails.
    async fn once(&mut self, failure: &Failure, stream: bool) {
        let row = format!("{:?} {} stream={stream}, once", self.dialect, failure.name);
        let model = self.model("three");
        self.set(&[&failure.does], stream).await;
        let before = self.calls();
        let reply = self.ask(&self.key, &model, stream).await;
        self.reset(&failure.does).await;
        let called = called(before, self.calls());
        let reached = u64::from(!matches!(failure.does, Does::Refuse));
        match failure.then {
            Then::Next { worked } => {
                assert_eq!(reply.status, 200, "{row}: {reply:?}");
                assert_eq!(called, [reached, 1, 0], "{row}");
                assert_eq!(reply.text(), self.dialect.good_text(1, stream), "{row}: nothing of the first");
                let second = format!("{}2/u{}", self.dialect.letter(), self.next);
                assert_eq!(reply.header("x-obol-target"), second, "{row}");
                let first = if worked { "partial" } else { "error" };
                self.owe(&row, &reply, "ok", Cost::Exactly(ANSWER * PRICES[1]), &[first, "ok"]);
            }
            Then::Answer { status, shown } => {
                assert_eq!((reply.status, called), (status, [1, 0, 0]), "{row}: {reply:?}");
                assert_eq!(reply.text().contains(WORDS), shown, "{row}: {reply:?}");
                self.is_error(&row, &reply);
                self.owe(&row, &reply, "error", Cost::Exactly(0), &["error"]);
            }
        }
    }

    /// All of them fail alike.
    async fn everywhere(&mut self, failure: &Failure, stream: bool) {
        let Then::Next { worked } = failure.then else { return };
        let row = format!("{:?} {} stream={stream}, everywhere", self.dialect, failure.name);
        let model = self.model("three");
        self.set(&[&failure.does; 3], stream).await;
        let before = self.calls();
        let reply = self.ask(&self.key, &model, stream).await;
        self.reset(&failure.does).await;
        let reached = u64::from(!matches!(failure.does, Does::Refuse));
        assert_eq!(called(before, self.calls()), [reached; 3], "{row}");
        self.failed(&row, failure, &reply);
        if worked {
            self.owe(&row, &reply, "partial", Cost::Prompt(PRICES[2]), &["partial"; 3]);
        } else {
            self.owe(&row, &reply, "error", Cost::Exactly(0), &["error"; 3]);
        }
    }

    /// What a caller is told when no target answers.
    fn failed(&self, row: &str, failure: &Failure, reply: &Reply) {
        let (status, code) = failure.last;
        let error = self.is_error(row, reply);
        assert_eq!((reply.status, error["code"].as_str()), (status, Some(code)), "{row}: {reply:?}");
        assert_eq!(reply.header("retry-after"), failure.retry_after, "{row}");
        assert!(!reply.text().contains(WORDS), "{row}: {reply:?}");
    }

    /// An error object of the caller's dialect, which shows nothing of where it comes from.
    fn is_error(&self, row: &str, reply: &Reply) -> Value {
        assert_eq!(reply.header("content-type"), "application/json", "{row}");
        let body = reply.json();
        if self.dialect == Dialect::Messages {
            assert_eq!(body["type"], "error", "{row}: {body}");
        }
        assert!(body["error"]["message"].is_string() && body["error"]["type"].is_string(), "{row}: {body}");
        for server in &self.servers {
            assert!(!reply.text().contains(&server.addr().port().to_string()), "{row}: {body}");
        }
        body["error"].clone()
    }

    /// Whether a target that does it again and again is left alone.
    async fn in_a_row(&mut self, failure: &Failure, stream: bool) {
        let row = format!("{:?} {} stream={stream}, in a row", self.dialect, failure.name);
        let model = self.model("one");
        self.set(&[&failure.does], stream).await;
        let before = self.calls()[0];
        let times = match failure.rest {
            Rest::Never => 7,
            Rest::AfterFive => 5,
            Rest::AsAsked => 1,
        };
        for _ in 0..times {
            let reply = self.ask(&self.key, &model, stream).await;
            match failure.then {
                Then::Next { .. } => self.failed(&row, failure, &reply),
                Then::Answer { status, .. } => assert_eq!(reply.status, status, "{row}: {reply:?}"),
            }
        }
        let reached = if let Does::Refuse = failure.does { 0 } else { times };
        assert_eq!(self.calls()[0] - before, reached, "{row}");
        if failure.rest != Rest::Never {
            let reply = self.ask(&self.key, &model, stream).await;
            let code =
                if failure.rest == Rest::AsAsked { "upstream_rate_limited" } else { "upstream_resting" };
            assert_eq!(self.is_error(&row, &reply)["code"], code, "{row}: {reply:?}");
            let wait: u64 =
                reply.header("retry-after").parse().unwrap_or_else(|_| panic!("{row}: {reply:?}"));
            assert!((1..=60).contains(&wait), "{row}: {wait}");
            assert_eq!(self.calls()[0] - before, reached, "{row}: it is left alone");
        }
        self.reset(&failure.does).await;
    }

    /// The first target breaks off after something of its answer was relayed.
    async fn cut(&mut self, cut: &Cut, model: &str) {
        let row = format!("{:?} {}", self.dialect, cut.name);
        self.set(&[&cut.does], true).await;
        let before = self.calls();
        let response = self.request(&self.key, model, true).send().await.unwrap();
        // Its head has come, so the first content has.
        self.servers[0].release();
        let reply = Reply::read(response).await.unwrap();
        assert_eq!((reply.status, called(before, self.calls())), (200, [1, 0, 0]), "{row}: {reply:?}");
        let rest = reply.text().strip_prefix(&*cut.sent).unwrap_or_else(|| panic!("{row}: {reply:?}"));
        let Some(code) = cut.code else {
            assert_eq!(rest, self.dialect.last_event(), "{row}: it was complete");
            // One of the dialects tells of the usage together with the reason.
            let told = self.dialect == Dialect::Messages;
            let cost = if told { Cost::Exactly(ANSWER * PRICES[0]) } else { Cost::Relayed };
            self.owe(&row, &reply, "ok", cost, &["ok"]);
            return;
        };
        let data = rest.strip_prefix(self.dialect.error_head()).and_then(|rest| rest.strip_suffix("\n\n"));
        let error: Value = serde_json::from_str(data.unwrap_or_else(|| panic!("{row}: {rest:?}"))).unwrap();
        assert_eq!(error["error"]["code"], code, "{row}: {error}");
        assert_eq!(error.get("type").is_some(), self.dialect == Dialect::Messages, "{row}: {error}");
        assert!(
            !rest.contains(WORDS) && !rest.contains("finish_reason") && !rest.contains("[DONE]"),
            "{rest}"
        );
        self.owe(&row, &reply, "partial", Cost::Relayed, &["partial"]);
    }

    /// What all of it came to.
    async fn settled(&self) {
        let wanted: usize = self.owed.iter().map(|owed| 1 + owed.events().len()).sum();
        let events = eventually(SOON * 3, || async {
            let open: usize = self.cluster.redis().query(&["ZCARD", "ledger:{acme}:open"]).await;
            (open == 0).then_some(usage(&self.cluster, "acme").await).filter(|all| all.len() >= wanted)
        })
        .await;
        for owed in &self.owed {
            let of = |id: &str| events.iter().find(|event| event["event_id"] == id);
            let event = of(&owed.request_id).unwrap_or_else(|| panic!("no event: {}: {owed:?}", owed.row));
            assert_eq!(event["outcome"], owed.outcome, "{owed:?}: {event}");
            let cost = event["cost"].as_i64().unwrap();
            let input = event["tokens"]["input"].as_i64().unwrap();
            match owed.cost {
                Cost::Exactly(wanted) => {
                    assert_eq!((cost, &event["estimated"]), (wanted, &false.into()), "{owed:?}: {event}");
                }
                Cost::Prompt(price) => {
                    assert!(input > 0 && cost == input * price, "{owed:?}: {event}");
                    assert_eq!(event["estimated"], true, "{owed:?}: {event}");
                }
                Cost::Relayed => assert!(cost > 0 && event["estimated"] == true, "{owed:?}: {event}"),
            }
            for (n, outcome) in owed.events().iter().enumerate() {
                let id = format!("{}/{}", owed.request_id, n + 1);
                let attempt = of(&id).unwrap_or_else(|| panic!("no attempt {}: {owed:?}", n + 1));
                assert_eq!(attempt["outcome"], *outcome, "{owed:?}: {attempt}");
                let provider = format!("{}{}", self.dialect.letter(), n + 1);
                assert_eq!(attempt["provider"], provider, "{owed:?}: {attempt}");
                if *outcome == "error" {
                    assert_eq!(attempt["cost"], 0, "{owed:?}: {attempt}");
                }
            }
            let more = format!("{}/{}", owed.request_id, owed.events().len() + 1);
            assert!(of(&more).is_none(), "{owed:?}");
        }
        let requests: Vec<Value> =
            events.into_iter().filter(|event| !event["event_id"].as_str().unwrap().contains('/')).collect();
        let all = counters(&self.cluster).await;
        let (name, spent) = all.iter().find(|(name, _)| name.starts_with("workspace")).unwrap();
        assert_eq!(*spent, (total(&requests), 0), "{name}");
        assert!(all.values().all(|(_, reserved)| *reserved == 0), "{all:?}");
    }
}

/// Of the event of a request.
fn event_id(reply: &Reply) -> String {
    let id = reply.header("x-request-id").strip_prefix("req_").unwrap();
    [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]].join("-")
}

fn called(before: [u64; 3], after: [u64; 3]) -> [u64; 3] {
    std::array::from_fn(|n| after[n] - before[n])
}

/// So many models of three targets (`three-N`) and of one (`one-N`), and those of the test of budgets: fallbacks that are all dear,
/// and one that is as cheap as the first target.
fn workspace(dialect: Dialect, servers: &[FakeLlm; 3], models: usize) -> String {
    let (letter, kind) = (dialect.letter(), dialect.provider_kind());
    let mut yaml = "workspace: acme\nenvironment: test\nbudgets:\n  - { scope: workspace, window: month, \
                    limit_usd: 1000 }\nproviders:\n"
        .to_owned();
    for (n, server) in servers.iter().enumerate() {
        let url = server.base_url();
        let name = format!("{letter}{}", n + 1);
        let auth = "auth: { header: { name: x-api-key, value: { secret: \"env:FAKE_LLM_SECRET\" } } }";
        writeln!(yaml, "  {name}: {{ kind: {kind}, base_url: \"{url}\", allow_private: true, {auth} }}")
            .unwrap();
    }
    yaml.push_str("models:\n");
    let mut model = |name: &str, upstream: &str, prices: &[i64]| {
        let limits = if name.starts_with("hasty") { HASTY } else { "" };
        writeln!(yaml, "  {name}:\n    max_output: 1000\n{limits}    targets:").unwrap();
        for (n, price) in prices.iter().enumerate() {
            let price = format!("{{ input: {}, output: {} }}", price / 1_000, price / 500);
            let target = format!("provider: {letter}{}, model: {upstream}, price: {price}", n + 1);
            writeln!(yaml, "      - {{ {target} }}").unwrap();
        }
    };
    model("dear", "dear", &[1_000, 10_000, 10_000]);
    model("cheap-again", "cheap-again", &[1_000, 10_000, 1_000]);
    for name in ["hasty", "hasty-too", "hasty-again"] {
        model(name, name, &PRICES);
    }
    for n in 1..=models {
        model(&format!("three-{n}"), &format!("u{n}"), &PRICES);
        model(&format!("one-{n}"), &format!("u{n}"), &PRICES[..1]);
    }
    yaml + "policies: [acme.cedar]\n"
}

const HASTY: &str = "    first_byte_timeout_s: 1\n    idle_timeout_s: 1\n";

/// More than the rows need.
const MODELS: usize = 400;

async fn every_failure(dialect: Dialect) {
    let mut targets = Targets::start(dialect, MODELS).await;
    for stream in [false, true] {
        for failure in failures(dialect, stream) {
            targets.once(&failure, stream).await;
            targets.everywhere(&failure, stream).await;
            targets.in_a_row(&failure, stream).await;
        }
    }
    let rows = targets.owed.len();
    for cut in cuts(dialect) {
        let model = targets.model("three");
        targets.cut(&cut, &model).await;
    }
    targets.settled().await;
    println!("{rows} rows before the first content, {} after it", targets.owed.len() - rows);
}

#[tokio::test]
async fn every_failure_of_a_target_of_chats_is_answered_and_charged_as_it_should() {
    every_failure(Dialect::Chat).await;
}

#[tokio::test]
async fn every_failure_of_a_target_of_messages_is_answered_and_charged_as_it_should() {
    every_failure(Dialect::Messages).await;
}

/// C078: what is left pays for the first target and for none that is dearer.
#[tokio::test]
async fn a_fallback_that_the_budget_cannot_pay_is_passed_over() {
    for dialect in [Dialect::Chat, Dialect::Messages] {
        let mut targets = Targets::start(dialect, 1).await;
        let poor = new_key(&targets.cluster, &["--budget", "total=0.004"]).await;
        let models = format!("{}/v1/models", targets.cluster.public_url(0));
        eventually(SOON, || async { Reply::of(http().get(&models).bearer_auth(&poor)).await.status == 200 })
            .await;
        for stream in [false, true] {
            let all = failures(dialect, stream);
            let failure = all.iter().find(|failure| failure.name == "503").unwrap();
            targets.set(&[&failure.does], stream).await;
            let before = targets.calls();
            let reply = targets.ask(&poor, "dear", stream).await;
            targets.failed("dear", failure, &reply);
            assert_eq!(called(before, targets.calls()), [1, 0, 0], "{dialect:?} {stream}");
            targets.owe("dear", &reply, "error", Cost::Exactly(0), &["error"]);

            let before = targets.calls();
            let reply = targets.ask(&poor, "cheap-again", stream).await;
            assert_eq!((reply.status, called(before, targets.calls())), (200, [1, 0, 1]), "{reply:?}");
            assert_eq!(reply.text(), dialect.good_text(2, stream));
            let event = eventually(SOON, || async {
                let all = usage(&targets.cluster, "acme").await;
                all.into_iter().find(|event| event["event_id"] == event_id(&reply))
            })
            .await;
            assert_eq!(
                (&event["cost"], &event["outcome"]),
                (&(ANSWER * 1_000).into(), &"ok".into()),
                "{event}"
            );
        }
        targets.settled().await;
    }
}

/// C088: time is up before the first content, and after it.
#[tokio::test]
async fn a_target_that_falls_silent_is_left_for_the_next_until_something_was_relayed() {
    for dialect in [Dialect::Chat, Dialect::Messages] {
        let mut targets = Targets::start(dialect, 1).await;
        for (stream, model) in [(false, "hasty"), (true, "hasty-too")] {
            for (name, silence) in silences(dialect, stream) {
                let row = format!("{dialect:?} {name} stream={stream}");
                targets.set(&[&silence], stream).await;
                let before = targets.calls();
                let reply = targets.ask(&targets.key, model, stream).await;
                assert_eq!(
                    (reply.status, called(before, targets.calls())),
                    (200, [1, 1, 0]),
                    "{row}: {reply:?}"
                );
                assert_eq!(reply.text(), dialect.good_text(1, stream), "{row}");
                targets.owe(&row, &reply, "ok", Cost::Exactly(ANSWER * PRICES[1]), &["partial", "ok"]);
            }
        }
        let (_, silence) = silences(dialect, true).remove(0);
        targets.set(&[&silence; 3], true).await;
        let reply = targets.ask(&targets.key, "hasty-again", true).await;
        let code = &targets.is_error("everywhere", &reply)["code"];
        assert_eq!((reply.status, code), (504, &"upstream_timeout".into()), "{reply:?}");
        targets.owe("everywhere", &reply, "partial", Cost::Prompt(PRICES[2]), &["partial"; 3]);
        targets.cut(&stalled(dialect), "hasty-again").await;
        targets.settled().await;
    }
}
