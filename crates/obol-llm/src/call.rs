use std::num::NonZeroU32;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use obol_model::Kind;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout_at};

use crate::breaker::Breakers;
use crate::endpoint::{Api, Endpoint};
use crate::error::LlmError;
use crate::judge::{Judgement, is_for_the_caller, judge, judge_error};
use crate::request::LlmRequest;
use crate::stream::{Cut, Relay, StreamLimits, Translator};
use crate::translate::{
    AnswerError, ChatToMessagesStream, MessagesReading, MessagesToChatStream, ToChat, ToMessages, TokenLimit,
    Translated, chat_to_messages, completion_to_message, error_to_chat, error_to_messages, has_error_object,
    message_to_completion, messages_to_chat,
};
use crate::upstream::{self, Upstream};
use crate::usage::{Estimate, Heard, Reading, Usage, warn_implausible};
use crate::view::{First, View, is_error};

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(crate) const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
/// What the messages dialect is told where neither the client nor the model sets a limit: it demands one.
const OUTPUT_OF_A_MESSAGE: NonZeroU32 = NonZeroU32::new(4096).unwrap();

/// One attempt.
pub(crate) struct Call<'a> {
    pub(crate) upstream: Upstream<'a>,
    pub(crate) breakers: &'a Arc<Breakers>,
    pub(crate) request: &'a Arc<LlmRequest>,
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
pub(crate) struct Outgoing {
    /// What the provider is asked for.
    spoken: Endpoint,
    body: Bytes,
    /// Streams tell their usage only because we asked.
    hide_usage: bool,
    /// A translated stream shows its usage.
    include_usage: bool,
}

impl Call<'_> {
    pub(crate) async fn run(&mut self, outgoing: Outgoing) -> Result<Reply, LlmError> {
        let http = self.http_request(&outgoing)?;
        self.may_have_worked = true;
        let executed = timeout_at(self.first_byte, self.upstream.client.execute(http)).await;
        let response = match executed.map_err(|_| self.upstream.timeout())? {
            Ok(response) => response,
            Err(e) => {
                self.may_have_worked = !e.is_connect();
                return Err(self.upstream.unreachable(e));
            }
        };
        let status = response.status();
        self.may_have_worked = status.is_success();
        match judge(status, self.upstream.route.provider(), upstream::retry_after(response.headers())) {
            Judgement::Failure(failure) => {
                upstream::discard(response).await;
                Err(failure)
            }
            Judgement::Refusal => self.refusal(status, response).await,
            Judgement::Answer => {
                let encoding = response.headers().get(CONTENT_ENCODING);
                if encoding.is_some_and(|encoding| encoding != "identity") {
                    return Err(self.upstream.bad("a compressed answer, which it was asked not to"));
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
    ///
    /// # Errors
    /// When the provider's dialect cannot say it.
    pub(crate) fn outgoing(&self) -> Result<Outgoing, LlmError> {
        let Self { request, upstream: Upstream { route, .. }, .. } = self;
        let asked = request.endpoint();
        let model = &route.target.model;
        if asked.api() == route.api() {
            // Other dialects tell it unasked.
            let ask_for_usage = asked == Endpoint::ChatCompletions
                && request.is_stream()
                && route.target.stream_usage
                && !request.asks_for_usage();
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

    fn http_request(&self, outgoing: &Outgoing) -> Result<reqwest::Request, LlmError> {
        let mut http = self.upstream.request(Method::POST, outgoing.spoken.path().split('/'))?;
        let headers = http.headers_mut();
        for (name, value) in self.request.headers_for(self.upstream.route.api()) {
            headers.append(name, value);
        }
        headers.insert(CONTENT_TYPE, JSON);
        headers.insert(ACCEPT, if self.request.is_stream() { EVENT_STREAM } else { JSON });
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
            data: Option<&'a RawValue>,
            #[serde(borrow, default)]
            input_tokens: Option<&'a RawValue>,
            /// Of a response.
            #[serde(borrow, default)]
            status: Option<&'a RawValue>,
            #[serde(borrow, default)]
            error: Option<&'a RawValue>,
            #[serde(borrow, default)]
            id: Option<&'a RawValue>,
        }
        let bytes = self.upstream.read(response).await?;
        let Ok(answer) = serde_json::from_slice::<Answer<'_>>(&bytes) else {
            return Err(self.upstream.bad("something else than a JSON object"));
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
            Endpoint::Embeddings => answer.data,
            Endpoint::CountTokens => answer.input_tokens,
        };
        // What is no answer is nobody's: some servers put their errors into objects of other shapes.
        let Some(made) = made.filter(|made| is_answer(spoken, made)) else {
            return Err(self.upstream.bad("an object without an answer"));
        };
        if answer.status.is_some_and(|status| status.get() == r#""failed""#) {
            return Err(self.upstream.bad("a failed answer"));
        }
        let estimate = || {
            let mut heard = Heard::default();
            heard.add_message(made.get().as_bytes());
            Estimate { input: self.request.prompt().tokens(), output: heard.tokens() }
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
            warn_implausible(self.upstream.route.provider());
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
        let bytes = bytes.map_err(|AnswerError(what)| self.upstream.bad(what))?;
        Ok(Reply::Full { status, bytes, usage: Some(usage), response_id })
    }

    async fn stream(&mut self, response: reqwest::Response, outgoing: &Outgoing) -> Result<Reply, LlmError> {
        if !is_event_stream(response.headers()) {
            return Err(self.upstream.bad("something else than an event stream"));
        }
        let limits = StreamLimits {
            idle: self.upstream.idle_timeout(),
            deadline: self.deadline,
            max_event: self.upstream.options.max_event_bytes,
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
        let route = self.upstream.route.clone();
        let mut relay =
            Relay::new(route, self.request, response, view, translator, limits, self.breakers.clone());
        match relay.first(self.first_byte).await {
            Ok(First::Content) => Ok(Reply::Stream(Box::new(relay))),
            Ok(First::Error(data)) => self.error_inside(&data),
            Ok(First::Done) | Err(Cut::End) => Err(self.upstream.bad("a stream without an answer")),
            Err(Cut::Timeout) => Err(self.upstream.timeout()),
            Err(Cut::Broken(source)) => Err(self.upstream.unreachable(source)),
            Err(Cut::TooLarge) => Err(self.upstream.bad("an event that is too large")),
            Err(Cut::Odd(what)) => Err(self.upstream.bad(what)),
        }
    }

    /// An error object inside a `200`. Nothing of an answer came, so the provider has nothing to be paid for.
    fn error_inside(&mut self, body: &Bytes) -> Result<Reply, LlmError> {
        self.may_have_worked = false;
        match judge_error(body, self.upstream.route.provider()) {
            (status, Judgement::Refusal) => Ok(self.refused(status, body.clone())),
            (_, Judgement::Failure(failure)) => Err(failure),
            (_, Judgement::Answer) => Err(self.upstream.bad("an error with the status of a success")),
        }
    }

    async fn refusal(&self, status: StatusCode, response: reqwest::Response) -> Result<Reply, LlmError> {
        let bytes = self.upstream.read(response).await?;
        if !is_object(&bytes) && matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) {
            // A web server's page, not an API's answer: the base URL is wrong, which the caller cannot mend.
            return Err(self.upstream.bad("no API's answer; check its base URL"));
        }
        Ok(self.refused(status, bytes))
    }

    /// A refusal as the caller may see it: the provider's own words where they are about the request and hold no
    /// secret of ours (DESIGN §11.4).
    fn refused(&self, status: StatusCode, bytes: Bytes) -> Reply {
        let api = self.request.endpoint().api();
        let tells = self.upstream.route.credential().is_some_and(|credential| credential.is_in(&bytes));
        let bytes = if is_for_the_caller(status) && has_error_object(&bytes) && !tells {
            match (self.upstream.route.api(), api) {
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
}

/// Whether what the model is said to have made can be an answer of that kind.
fn is_answer(spoken: Endpoint, made: &RawValue) -> bool {
    /// One of a chat's.
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow, default)]
        error: Option<&'a RawValue>,
    }
    match spoken {
        Endpoint::ChatCompletions => {
            serde_json::from_str::<Vec<Choice<'_>>>(made.get()).is_ok_and(|choices| {
                !choices.is_empty() && !choices.iter().any(|choice| choice.error.is_some_and(is_error))
            })
        }
        Endpoint::CountTokens => made.get().parse::<u64>().is_ok(),
        Endpoint::Messages | Endpoint::Responses | Endpoint::Embeddings => made.get().starts_with('['),
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
