//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::time::Duration;

use bytes::Bytes;
use obol_dial::{DialOptions, Dialer};
use obol_llm::{
    Answer, AnswerBody, Attempt, ChatRequest, ChatStream, Credential, Llm, LlmError, LlmOptions, Sent, Usage,
};
use obol_model::ProviderName;
use obol_model::TokenPrice;
use obol_model::snapshot::Target;
use obol_testkit::fake_llm::FakeLlm;
use url::Url;

/// What a publication would say of one upstream.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) provider: ProviderName,
    pub(crate) base_url: Url,
    pub(crate) credential: Option<Credential>,
    pub(crate) target: Target,
    pub(crate) allow_private: bool,
}

impl Upstream {
    pub(crate) fn of(fake: &FakeLlm, name: &str) -> Self {
        Self::at(&fake.base_url(), name)
    }

    pub(crate) fn at(base_url: &str, name: &str) -> Self {
        Self {
            provider: name.parse().unwrap(),
            base_url: base_url.parse().unwrap(),
            credential: Some(Credential::bearer(&format!("sk-{name}").into()).unwrap()),
            target: Target {
                provider: name.parse().unwrap(),
                model: format!("{name}-model"),
                price: TokenPrice::default(),
                stream_usage: true,
            },
            allow_private: true,
        }
    }

    pub(crate) fn attempt(&self) -> Attempt<'_> {
        Attempt {
            provider: &self.provider,
            base_url: &self.base_url,
            credential: self.credential.as_ref(),
            target: &self.target,
            allow_private: self.allow_private,
            most_output: None,
        }
    }
}

pub(crate) fn options() -> LlmOptions {
    LlmOptions {
        first_byte_timeout: Duration::from_secs(10),
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

pub(crate) fn request(body: &str) -> ChatRequest {
    ChatRequest::parse(Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

pub(crate) fn plain() -> ChatRequest {
    request(r#"{"model":"pub","messages":[{"role":"user","content":"one two three"}]}"#)
}

pub(crate) fn streaming() -> ChatRequest {
    request(r#"{"model":"pub","stream":true,"messages":[{"role":"user","content":"one two three"}]}"#)
}

pub(crate) async fn chat(
    llm: &Llm,
    request: &ChatRequest,
    upstreams: &[&Upstream],
) -> Result<Answer, LlmError> {
    let attempts: Vec<_> = upstreams.iter().map(|upstream| upstream.attempt()).collect();
    llm.chat(request, &attempts, &mut None).await
}

/// The error of a call that fails, and which attempt may have cost something.
pub(crate) async fn fails(
    llm: &Llm,
    request: &ChatRequest,
    upstreams: &[&Upstream],
) -> (LlmError, Option<Sent>) {
    let attempts: Vec<_> = upstreams.iter().map(|upstream| upstream.attempt()).collect();
    let mut sent = None;
    let failure = llm.chat(request, &attempts, &mut sent).await.unwrap_err();
    (failure, sent)
}

pub(crate) fn full(answer: Answer) -> (u16, String, Option<Usage>) {
    let AnswerBody::Full { bytes, usage } = answer.body else { panic!("a stream") };
    assert_eq!(answer.content_type, "application/json");
    (answer.status.as_u16(), String::from_utf8(bytes.to_vec()).unwrap(), usage)
}

pub(crate) fn stream(answer: Answer) -> ChatStream {
    let AnswerBody::Stream(stream) = answer.body else { panic!("no stream") };
    assert_eq!((answer.status.as_u16(), answer.content_type.to_str().unwrap()), (200, "text/event-stream"));
    *stream
}

pub(crate) async fn rest(stream: &mut ChatStream) -> String {
    let mut all = Vec::new();
    while let Some(run) = stream.next().await {
        all.extend_from_slice(&run);
    }
    assert_eq!(stream.next().await, None, "an ended stream stays ended");
    String::from_utf8(all).unwrap()
}
