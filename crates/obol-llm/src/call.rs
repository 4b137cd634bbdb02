use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use obol_model::Kind;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use crate::endpoint::{Api, Endpoint};
use crate::error::LlmError;
use crate::judge::{Judgement, is_for_the_caller, judge, judge_error};
use crate::llm::{Credential, LlmOptions};
use crate::request::LlmRequest;
use crate::route::Route;
use crate::stream::{Cut, Relay, StreamLimits, Translator};
use crate::translate::{
    AnswerError, ChatToMessagesStream, MessagesReading, MessagesToChatStream, ToChat, ToMessages, TokenLimit,
    Translated, chat_to_messages, completion_to_message, error_to_chat, error_to_messages,
    message_to_completion, messages_to_chat,
};
use crate::usage::{Estimate, Heard, Reading, Usage, warn_implausible};
use crate::view::{First, View, is_error};

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(crate) const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

/// How much of a refused answer is read, and for how long, so that its connection can be used again.
const DISCARD_BYTES: usize = 64 * 1024;
const DISCARD_TIME: Duration = Duration::from_millis(100);

/// What the messages dialect is told where neither the client nor the model sets a limit: it demands one.
const OUTPUT_OF_A_MESSAGE: NonZeroU32 = NonZeroU32::new(4096).unwrap();

/// One attempt.
pub(crate) struct Call<'a> {
    pub(crate) client: &'a reqwest::Client,
    pub(crate) options: &'a LlmOptions,
    pub(crate) request: &'a Arc<LlmRequest>,
    pub(crate) route: &'a Arc<Route>,
    /// Until when the answer has to begin.
    pub(crate) first_byte: Instant,
    /// Until when everything has to be over.
    pub(crate) deadline: Instant,
    /// The provider may have worked on the request and ask to be paid, though nothing of its answer is known: it was
    /// sent, and no refusal came back.
    pub(crate) may_have_worked: bool,
}

/// What came of an attempt.
#[derive(Debug)]
pub(crate) enum Reply {
    /// All of it: an answer, or a refusal that the caller has to see.
    Full { status: StatusCode, bytes: Bytes, usage: Option<Usage>, response_id: Option<String> },
    /// A stream that has begun.
    Stream(Box<Relay>),
}

/// What goes out.
struct Outgoing {
    /// What the provider is asked for.
    spoken: Endpoint,
    body: Bytes,
    /// Streams tell their usage only because we asked.
    hide_usage: bool,
    /// A translated stream shows its usage.
    include_usage: bool,
}

impl Call<'_> {
    pub(crate) async fn run(&mut self) -> Result<Reply, LlmError> {
        let outgoing = self.outgoing()?;
        let http = self.http_request(&outgoing)?;
        self.may_have_worked = true;
        let executed = timeout_at(self.first_byte, self.client.execute(http)).await;
        let response = match executed.map_err(|_| self.timeout())? {
            Ok(response) => response,
            Err(e) => {
                self.may_have_worked = !e.is_connect();
                return Err(self.unreachable(e));
            }
        };
        let status = response.status();
        self.may_have_worked = status.is_success();
        match judge(status, self.route.provider(), retry_after(response.headers())) {
            Judgement::Failure(failure) => {
                discard(response).await;
                Err(failure)
            }
            Judgement::Refusal => self.refusal(status, response).await,
            Judgement::Answer => {
                let encoding = response.headers().get(CONTENT_ENCODING);
                if encoding.is_some_and(|encoding| encoding != "identity") {
                    return Err(self.bad("a compressed answer, which it was asked not to"));
                }
                if self.request.is_stream() {
                    self.stream(response, &outgoing).await
                } else {
                    self.full(status, response, outgoing.spoken).await
                }
            }
        }
    }

    /// The request as the provider takes it: as it came where it speaks the caller's dialect, translated otherwise.
    fn outgoing(&self) -> Result<Outgoing, LlmError> {
        let Self { request, route, .. } = self;
        let asked = request.endpoint();
        let model = &route.target.model;
        if asked.api() == route.api() {
            let ask_for_usage = request.is_stream() && route.target.stream_usage && !request.asks_for_usage();
            let body = request.body_for(model, ask_for_usage, route.most_output());
            return Ok(Outgoing { spoken: asked, body, hide_usage: ask_for_usage, include_usage: true });
        }
        if let Some(header) = request.untranslatable_header() {
            let message = format!("the header `{header}` cannot be carried to the provider of this model");
            return Err(LlmError::invalid("unsupported_parameter", Some(header), message));
        }
        let (spoken, translated) = match asked {
            Endpoint::ChatCompletions => {
                let most = route.most_output().and_then(|most| NonZeroU32::new(u32::try_from(most).ok()?));
                let max_tokens = most.unwrap_or(OUTPUT_OF_A_MESSAGE);
                let to = ToMessages { model, max_tokens, system_turns: false };
                (Endpoint::Messages, chat_to_messages(request.body(), &to)?)
            }
            Endpoint::Messages => {
                let stream_usage = route.target.stream_usage;
                let to = ToChat { model, limit: TokenLimit::MaxCompletionTokens, stream_usage };
                (Endpoint::ChatCompletions, messages_to_chat(request.body(), &to)?)
            }
            Endpoint::Responses | Endpoint::Embeddings | Endpoint::CountTokens => {
                let message = format!("the provider of this model has no `/{}`", asked.path());
                return Err(LlmError::invalid("unsupported_endpoint", Some("model"), message));
            }
        };
        let Translated { body, include_usage, .. } = translated;
        Ok(Outgoing { spoken, body, hide_usage: false, include_usage })
    }

    /// Built from nothing: no header of a client can slip through (DESIGN §16).
    fn http_request(&self, outgoing: &Outgoing) -> Result<reqwest::Request, LlmError> {
        let Self { route, request, .. } = self;
        let url = route.url(outgoing.spoken.path().split('/')).map_err(|_| self.address_refused())?;
        let mut http = reqwest::Request::new(Method::POST, url);
        let headers = http.headers_mut();
        for (name, value) in request.headers_for(route.api()) {
            headers.append(name, value);
        }
        if let Some(Credential { name, value }) = route.credential() {
            headers.insert(name, value.clone());
        }
        headers.insert(CONTENT_TYPE, JSON);
        headers.insert(ACCEPT, if request.is_stream() { EVENT_STREAM } else { JSON });
        headers.insert(ACCEPT_ENCODING, IDENTITY);
        *http.body_mut() = Some(outgoing.body.clone().into());
        Ok(http)
    }

    async fn full(
        &mut self,
        status: StatusCode,
        response: reqwest::Response,
        spoken: Endpoint,
    ) -> Result<Reply, LlmError> {
        /// The members that matter; all else is skipped.
        #[derive(Deserialize)]
        struct Answer<'a> {
            #[serde(borrow, default)]
            usage: Option<&'a RawValue>,
            /// What the model made, by the dialect's name for it.
            #[serde(borrow, default)]
            choices: Option<&'a RawValue>,
            #[serde(borrow, default)]
            content: Option<&'a RawValue>,
            #[serde(borrow, default)]
            output: Option<&'a RawValue>,
            #[serde(borrow, default)]
            error: Option<&'a RawValue>,
            #[serde(borrow, default)]
            id: Option<&'a RawValue>,
        }
        let bytes = self.read(response).await?;
        let Ok(answer) = serde_json::from_slice::<Answer<'_>>(&bytes) else {
            return Err(self.bad("something else than a JSON object"));
        };
        if answer.error.is_some_and(is_error) {
            let has_usage = answer.usage.is_some();
            let result = self.error_inside(&bytes);
            self.may_have_worked = has_usage;
            return result;
        }
        let made = match spoken {
            Endpoint::ChatCompletions => answer.choices,
            Endpoint::Messages => answer.content,
            Endpoint::Responses => answer.output,
            Endpoint::Embeddings | Endpoint::CountTokens => None,
        };
        let estimate = || {
            let mut heard = Heard::default();
            heard.add_message(made.map_or("", RawValue::get).as_bytes());
            Estimate { input: self.request.estimated_input(), output: heard.tokens() }
        };
        let (usage, implausible) = match spoken {
            // Nobody bills for it.
            Endpoint::CountTokens => (Usage::default(), false),
            Endpoint::Messages => {
                let mut reading = MessagesReading::default();
                if let Some(usage) = answer.usage {
                    reading.read(usage);
                }
                (reading.usage(true, estimate), reading.is_implausible())
            }
            Endpoint::ChatCompletions | Endpoint::Responses | Endpoint::Embeddings => {
                let mut reading = answer.usage.map(Reading::parse).unwrap_or_default();
                if spoken == Endpoint::Embeddings {
                    reading = reading.without_completion();
                }
                (reading.usage(true, estimate), reading.is_implausible())
            }
        };
        if implausible {
            warn_implausible(self.route.provider());
        }
        let response_id =
            (spoken == Endpoint::Responses).then(|| serde_json::from_str(answer.id?.get()).ok()).flatten();
        let bytes = match (self.request.endpoint(), spoken) {
            (Endpoint::ChatCompletions, Endpoint::Messages) => {
                message_to_completion(&bytes, &self.request.labels())
            }
            (Endpoint::Messages, Endpoint::ChatCompletions) => {
                completion_to_message(&bytes, &self.request.labels())
            }
            _ => Ok(bytes),
        };
        let bytes = bytes.map_err(|AnswerError(what)| self.bad(what))?;
        Ok(Reply::Full { status, bytes, usage: Some(usage), response_id })
    }

    async fn stream(&mut self, response: reqwest::Response, outgoing: &Outgoing) -> Result<Reply, LlmError> {
        if !is_event_stream(response.headers()) {
            return Err(self.bad("something else than an event stream"));
        }
        let limits = StreamLimits {
            idle: self.options.idle_timeout,
            deadline: self.deadline,
            max_event: self.options.max_event_bytes,
        };
        let view = View::new(outgoing.spoken, outgoing.hide_usage);
        let translator = match (self.request.endpoint(), outgoing.spoken) {
            (Endpoint::ChatCompletions, Endpoint::Messages) => Some(Translator::ToChat(
                MessagesToChatStream::new(&self.request.labels(), outgoing.include_usage),
            )),
            (Endpoint::Messages, Endpoint::ChatCompletions) => {
                Some(Translator::ToMessages(Box::new(ChatToMessagesStream::new(&self.request.labels()))))
            }
            _ => None,
        };
        let mut relay =
            Relay::new(self.route.clone(), self.request.clone(), response, view, translator, limits);
        match relay.first(self.first_byte).await {
            Ok(First::Content) => Ok(Reply::Stream(Box::new(relay))),
            Ok(First::Error(data)) => self.error_inside(&data),
            Ok(First::Done) | Err(Cut::End) => Err(self.bad("a stream without an answer")),
            Err(Cut::Timeout) => Err(self.timeout()),
            Err(Cut::Broken(source)) => Err(self.unreachable(source)),
            Err(Cut::TooLarge) => Err(self.bad("an event that is too large")),
            Err(Cut::Odd(what)) => Err(self.bad(what)),
        }
    }

    /// An error object inside a `200`. Nothing of an answer came, so the provider has nothing to be paid for.
    fn error_inside(&mut self, body: &Bytes) -> Result<Reply, LlmError> {
        self.may_have_worked = false;
        match judge_error(body, self.route.provider()) {
            (status, Judgement::Refusal) => Ok(self.refused(status, body.clone())),
            (_, Judgement::Failure(failure)) => Err(failure),
            (_, Judgement::Answer) => Err(self.bad("an error with the status of a success")),
        }
    }

    async fn refusal(&self, status: StatusCode, response: reqwest::Response) -> Result<Reply, LlmError> {
        let bytes = self.read(response).await?;
        if !is_object(&bytes) && matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) {
            // A web server's page, not an API's answer: the base URL is wrong, which the caller cannot mend.
            return Err(self.bad("no API's answer; check its base URL"));
        }
        Ok(self.refused(status, bytes))
    }

    /// A refusal as the caller may see it: the provider's own words where they are about the request and hold no
    /// secret of ours (DESIGN §11.4).
    fn refused(&self, status: StatusCode, bytes: Bytes) -> Reply {
        let api = self.request.endpoint().api();
        let tells = self.route.credential().is_some_and(|credential| credential.is_in(&bytes));
        let bytes = if is_for_the_caller(status) && is_object(&bytes) && !tells {
            match (self.route.api(), api) {
                (Api::OpenAi, Api::Anthropic) => error_to_messages(Some(status), &bytes),
                (Api::Anthropic, Api::OpenAi) => error_to_chat(Some(status), &bytes),
                _ => bytes,
            }
        } else {
            let message = format!("the provider refused the request with status {}", status.as_u16());
            api.error(Kind::InvalidRequest, "upstream_refused", &message, None)
        };
        Reply::Full { status, bytes, usage: None, response_id: None }
    }

    /// All of a body, within its bound. A body that came in one piece is not copied.
    async fn read(&self, mut response: reqwest::Response) -> Result<Bytes, LlmError> {
        let max = self.options.max_answer_bytes;
        let mut whole = Bytes::new();
        let mut pieces = BytesMut::new();
        loop {
            let chunk = timeout(self.options.idle_timeout, response.chunk())
                .await
                .map_err(|_| self.timeout())?
                .map_err(|e| self.unreachable(e))?;
            let Some(chunk) = chunk else { break };
            if whole.len() + pieces.len() + chunk.len() > max {
                return Err(self.bad("an answer that is too large"));
            }
            if whole.is_empty() && pieces.is_empty() {
                whole = chunk;
            } else {
                pieces.extend_from_slice(&std::mem::take(&mut whole));
                pieces.extend_from_slice(&chunk);
            }
        }
        Ok(if pieces.is_empty() { whole } else { pieces.freeze() })
    }

    fn address_refused(&self) -> LlmError {
        LlmError::AddressRefused { provider: self.route.provider().clone() }
    }

    fn timeout(&self) -> LlmError {
        LlmError::Timeout { provider: self.route.provider().clone() }
    }

    fn bad(&self, what: &'static str) -> LlmError {
        LlmError::BadAnswer { provider: self.route.provider().clone(), what }
    }

    fn unreachable(&self, source: reqwest::Error) -> LlmError {
        let provider = self.route.provider().clone();
        if obol_dial::is_refusal(&source) {
            LlmError::AddressRefused { provider }
        } else if source.is_timeout() {
            LlmError::Timeout { provider }
        } else {
            // The URL may hold credentials.
            LlmError::Unreachable { provider, source: source.without_url() }
        }
    }
}

fn is_object(bytes: &[u8]) -> bool {
    bytes.trim_ascii_start().starts_with(b"{")
        && serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let essence = headers.get(CONTENT_TYPE).and_then(|value| value.as_bytes().split(|b| *b == b';').next());
    essence.is_some_and(|essence| essence.trim_ascii().eq_ignore_ascii_case(b"text/event-stream"))
}

/// Seconds only: the few providers that send a date send it for waits that are not passed on.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Reads a small body to its end, so that the connection can be used again.
async fn discard(mut response: reqwest::Response) {
    let read = async {
        let mut total = 0;
        while let Ok(Some(chunk)) = response.chunk().await {
            total += chunk.len();
            if total > DISCARD_BYTES {
                return;
            }
        }
    };
    if timeout(DISCARD_TIME, read).await.is_err() {
        debug!("rest of a refused answer left unread");
    }
}
