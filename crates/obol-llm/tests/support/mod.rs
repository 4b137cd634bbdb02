//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use obol_dial::{DialOptions, Dialer};
use obol_llm::{
    Account, Answer, AnswerBody, AnswerStream, Credential, Endpoint, Llm, LlmError, LlmOptions, LlmRequest,
    Route, Usage,
};
use obol_model::snapshot::{Auth, Model, Provider, ProviderKind, Target};
use obol_model::{Outcome, TokenPrice, Tokens};
use obol_testkit::fake_llm::FakeLlm;
use parking_lot::Mutex;
use url::Url;

/// What a publication would say of one upstream.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    pub(crate) kind: ProviderKind,
    pub(crate) base_url: Url,
    pub(crate) credential: Option<Credential>,
    pub(crate) target: Target,
    pub(crate) allow_private: bool,
    pub(crate) most_output: Option<u64>,
    pub(crate) first_byte_timeout_s: Option<u32>,
    pub(crate) idle_timeout_s: Option<u32>,
}

impl Upstream {
    pub(crate) fn of(fake: &FakeLlm, name: &str) -> Self {
        Self::at(&fake.base_url(), name)
    }

    pub(crate) fn at(base_url: &str, name: &str) -> Self {
        Self {
            kind: ProviderKind::Openai,
            base_url: base_url.parse().unwrap(),
            credential: Some(Credential::bearer(&format!("sk-{name}").into()).unwrap()),
            target: Target {
                provider: name.parse().unwrap(),
                model: format!("{name}-model"),
                price: TokenPrice::default(),
                stream_usage: true,
                weight: None,
            },
            allow_private: true,
            most_output: None,
            first_byte_timeout_s: None,
            idle_timeout_s: None,
        }
    }

    pub(crate) fn model(&self) -> Model {
        Model {
            max_output: self.most_output,
            first_byte_timeout_s: self.first_byte_timeout_s.and_then(NonZeroU32::new),
            idle_timeout_s: self.idle_timeout_s.and_then(NonZeroU32::new),
            ..Model::default()
        }
    }

    pub(crate) fn route(&self) -> Arc<Route> {
        let provider = Provider {
            kind: self.kind,
            base_url: self.base_url.clone(),
            auth: None::<Auth>,
            allow_private: self.allow_private,
        };
        let (target, credential) = (self.target.clone(), self.credential.clone());
        Arc::new(Route::new("acme", &self.model(), target, &provider, credential))
    }
}

/// An account that can pay for everything, and tells what it heard.
#[derive(Debug, Clone, Default)]
pub(crate) struct Told(pub(crate) Arc<Mutex<Heard>>);

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Heard {
    /// Which target may ask to be paid though nothing of an answer is known.
    pub(crate) due: Option<String>,
    due_before: Option<String>,
    pub(crate) failed: Vec<(String, &'static str)>,
    pub(crate) answered: Option<(String, Option<String>)>,
    pub(crate) used: Option<Usage>,
    /// The stored answer whose stream came to its end.
    pub(crate) ended: Option<String>,
    pub(crate) relayed: usize,
    pub(crate) outcome: Option<Outcome>,
    /// Targets that cannot be paid.
    pub(crate) too_dear: Vec<&'static str>,
}

impl Account for Told {
    async fn afford(&mut self, route: &Arc<Route>) -> Result<(), LlmError> {
        let mut heard = self.0.lock();
        let name = route.provider().to_string();
        if heard.too_dear.contains(&name.as_str()) {
            let (kind, message) = (obol_model::Kind::RateLimited, "too dear".to_owned());
            return Err(LlmError::Denied { kind, code: "budget_exceeded", message, retry_after: None });
        }
        heard.due_before = heard.due.replace(name);
        Ok(())
    }

    fn failed(&mut self, route: &Arc<Route>, failure: &LlmError, may_have_worked: bool) {
        let mut heard = self.0.lock();
        if !may_have_worked {
            heard.due = heard.due_before.take();
        }
        heard.failed.push((route.provider().to_string(), failure.code()));
    }

    async fn answered(&mut self, route: &Arc<Route>, response_id: Option<&str>) {
        let mut heard = self.0.lock();
        heard.due = None;
        heard.answered = Some((route.provider().to_string(), response_id.map(str::to_owned)));
    }

    async fn ended(&mut self, response_id: Option<&str>) {
        self.0.lock().ended = response_id.map(str::to_owned);
    }

    fn used(&mut self, usage: Usage) {
        self.0.lock().used = Some(usage);
    }

    fn relayed(&mut self, bytes: &Bytes) {
        self.0.lock().relayed += bytes.len();
    }

    fn close(self, outcome: Outcome) {
        let before = self.0.lock().outcome.replace(outcome);
        assert_eq!(before, None, "closed once");
    }
}

impl Told {
    pub(crate) fn heard(&self) -> Heard {
        self.0.lock().clone()
    }

    /// How the stream ended.
    pub(crate) fn end(&self) -> End {
        let heard = self.heard();
        let usage = heard.used.unwrap();
        End { tokens: usage.tokens, estimated: usage.estimated, complete: heard.outcome == Some(Outcome::Ok) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct End {
    pub(crate) tokens: Tokens,
    pub(crate) estimated: bool,
    pub(crate) complete: bool,
}

pub(crate) fn options() -> LlmOptions {
    LlmOptions {
        first_byte_timeout: Duration::from_secs(10),
        commit_after: Duration::from_secs(15),
        idle_timeout: Duration::from_secs(10),
        total: Duration::from_secs(20),
        max_answer_bytes: 100_000,
        max_event_bytes: 10_000,
    }
}

pub(crate) fn dialer() -> Dialer {
    Dialer::new(DialOptions::default()).unwrap()
}

pub(crate) fn llm() -> Llm {
    Llm::new(dialer(), options())
}

pub(crate) fn request(body: &str) -> LlmRequest {
    request_of(Endpoint::ChatCompletions, body)
}

pub(crate) fn request_of(endpoint: Endpoint, body: &str) -> LlmRequest {
    LlmRequest::parse(endpoint, Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

pub(crate) fn plain() -> LlmRequest {
    request(r#"{"model":"pub","messages":[{"role":"user","content":"one two three"}]}"#)
}

pub(crate) fn streaming() -> LlmRequest {
    request(r#"{"model":"pub","stream":true,"messages":[{"role":"user","content":"one two three"}]}"#)
}

pub(crate) async fn call(
    llm: &Llm,
    request: &LlmRequest,
    upstreams: &[&Upstream],
) -> (Result<Answer<Told>, LlmError>, Told) {
    let routes: Vec<_> = upstreams.iter().map(|upstream| upstream.route()).collect();
    let told = Told::default();
    (llm.call(Arc::new(request.clone()), routes, told.clone()).await, told)
}

pub(crate) async fn chat(
    llm: &Llm,
    request: &LlmRequest,
    upstreams: &[&Upstream],
) -> Result<Answer<Told>, LlmError> {
    call(llm, request, upstreams).await.0
}

/// The error of a call that fails, and which target may have cost something.
pub(crate) async fn fails(
    llm: &Llm,
    request: &LlmRequest,
    upstreams: &[&Upstream],
) -> (LlmError, Option<String>) {
    let (result, told) = call(llm, request, upstreams).await;
    (result.unwrap_err(), told.heard().due)
}

/// Whose answer it is.
pub(crate) fn by(answer: &Answer<Told>) -> &str {
    answer.route.as_ref().unwrap().provider().as_str()
}

pub(crate) fn full(answer: Answer<Told>) -> (u16, String, Option<Usage>) {
    let AnswerBody::Full { bytes, usage, .. } = answer.body else { panic!("a stream") };
    assert_eq!(answer.content_type, "application/json");
    (answer.status.as_u16(), String::from_utf8(bytes.to_vec()).unwrap(), usage)
}

pub(crate) fn stream(answer: Answer<Told>) -> AnswerStream<Told> {
    let AnswerBody::Stream(stream) = answer.body else { panic!("no stream") };
    assert_eq!((answer.status.as_u16(), answer.content_type.to_str().unwrap()), (200, "text/event-stream"));
    *stream
}

pub(crate) async fn rest(stream: &mut AnswerStream<Told>) -> String {
    let mut all = Vec::new();
    while let Some(run) = stream.next().await {
        all.extend_from_slice(&run);
    }
    assert_eq!(stream.next().await, None, "an ended stream stays ended");
    String::from_utf8(all).unwrap()
}
