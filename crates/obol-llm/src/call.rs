use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use obol_model::Kind;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use crate::dialect::openai_error;
use crate::error::LlmError;
use crate::judge::{Judgement, is_for_the_caller, judge, judge_error};
use crate::llm::{AnswerBody, Attempt, Credential, LlmOptions};
use crate::request::ChatRequest;
use crate::stream::{ChatStream, Cut, StreamLimits};
use crate::usage::{Estimate, Reading, text_bytes, tokens_of, warn_implausible};
use crate::view::{First, is_error};

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(crate) const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

/// How much of a refused answer is read, and for how long, so that its connection can be used again.
const DISCARD_BYTES: usize = 64 * 1024;
const DISCARD_TIME: Duration = Duration::from_millis(100);

/// One attempt.
pub(crate) struct Call<'a> {
    pub(crate) client: &'a reqwest::Client,
    pub(crate) options: &'a LlmOptions,
    pub(crate) request: &'a ChatRequest,
    pub(crate) attempt: &'a Attempt<'a>,
    /// Until when the answer has to begin.
    pub(crate) first_byte: Instant,
    /// Until when everything has to be over.
    pub(crate) deadline: Instant,
    /// About how many tokens the prompt is.
    pub(crate) estimated_input: u64,
    /// The provider may have worked on the request and ask to be paid, though nothing of its answer is known: it was
    /// sent, and no refusal came back.
    pub(crate) may_have_worked: bool,
}

impl Call<'_> {
    pub(crate) async fn run(&mut self) -> Result<(StatusCode, AnswerBody), LlmError> {
        let ask_for_usage =
            self.request.is_stream() && self.attempt.target.stream_usage && !self.request.asks_for_usage();
        let http = self.http_request(ask_for_usage)?;
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
        match judge(status, self.attempt.provider, retry_after(response.headers())) {
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
                    self.stream(response, ask_for_usage).await
                } else {
                    self.full(status, response).await
                }
            }
        }
    }

    /// Built from nothing: no header of a client can slip through (DESIGN §16).
    fn http_request(&self, ask_for_usage: bool) -> Result<reqwest::Request, LlmError> {
        let Attempt { provider, base_url, credential, target, allow_private, most_output } = self.attempt;
        if obol_dial::check(base_url, *allow_private).is_err() {
            return Err(LlmError::AddressRefused { provider: (*provider).clone() });
        }
        let mut url = (*base_url).clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().push("chat").push("completions");
        }
        let mut http = reqwest::Request::new(Method::POST, url);
        let headers = http.headers_mut();
        if let Some(Credential { name, value }) = credential {
            headers.insert(name, value.clone());
        }
        headers.insert(CONTENT_TYPE, JSON);
        headers.insert(ACCEPT, if self.request.is_stream() { EVENT_STREAM } else { JSON });
        headers.insert(ACCEPT_ENCODING, IDENTITY);
        *http.body_mut() = Some(self.request.body_for(&target.model, ask_for_usage, *most_output).into());
        Ok(http)
    }

    async fn full(
        &mut self,
        status: StatusCode,
        response: reqwest::Response,
    ) -> Result<(StatusCode, AnswerBody), LlmError> {
        /// The members that matter; all else is skipped.
        #[derive(Deserialize)]
        struct Completion<'a> {
            #[serde(borrow, default)]
            usage: Option<&'a RawValue>,
            #[serde(borrow, default)]
            choices: Option<&'a RawValue>,
            #[serde(borrow, default)]
            error: Option<&'a RawValue>,
        }
        let bytes = self.read(response).await?;
        let Ok(completion) = serde_json::from_slice::<Completion<'_>>(&bytes) else {
            return Err(self.bad("something else than a JSON object"));
        };
        if completion.error.is_some_and(is_error) {
            let has_usage = completion.usage.is_some();
            let result = self.error_inside(&bytes);
            self.may_have_worked = has_usage;
            return result;
        }
        let reading = completion.usage.map(Reading::parse).unwrap_or_default();
        if reading.is_implausible() {
            warn_implausible(self.attempt.provider);
        }
        let usage = reading.usage(true, || Estimate {
            input: self.estimated_input,
            output: tokens_of(text_bytes(completion.choices.map_or("", RawValue::get).as_bytes())),
        });
        Ok((status, AnswerBody::Full { bytes, usage: Some(usage) }))
    }

    async fn stream(
        &mut self,
        response: reqwest::Response,
        hide_usage: bool,
    ) -> Result<(StatusCode, AnswerBody), LlmError> {
        if !is_event_stream(response.headers()) {
            return Err(self.bad("something else than an event stream"));
        }
        let limits = StreamLimits {
            idle: self.options.idle_timeout,
            deadline: self.deadline,
            max_event: self.options.max_event_bytes,
        };
        let provider = self.attempt.provider.clone();
        let mut stream = ChatStream::new(provider, response, hide_usage, self.estimated_input, limits);
        match stream.first(self.first_byte).await {
            Ok(First::Content) => Ok((StatusCode::OK, AnswerBody::Stream(Box::new(stream)))),
            Ok(First::Error(data)) => self.error_inside(&data),
            Ok(First::Done) | Err(Cut::End) => Err(self.bad("a stream without an answer")),
            Err(Cut::Timeout) => Err(self.timeout()),
            Err(Cut::Broken(source)) => Err(self.unreachable(source)),
            Err(Cut::TooLarge) => Err(self.bad("an event that is too large")),
        }
    }

    /// An error object inside a `200`. Nothing of an answer came, so the provider has nothing to be paid for.
    fn error_inside(&mut self, body: &Bytes) -> Result<(StatusCode, AnswerBody), LlmError> {
        self.may_have_worked = false;
        match judge_error(body, self.attempt.provider) {
            (status, Judgement::Refusal) => Ok((status, self.refused(status, body.clone()))),
            (_, Judgement::Failure(failure)) => Err(failure),
            (_, Judgement::Answer) => Err(self.bad("an error with the status of a success")),
        }
    }

    async fn refusal(
        &self,
        status: StatusCode,
        response: reqwest::Response,
    ) -> Result<(StatusCode, AnswerBody), LlmError> {
        let bytes = self.read(response).await?;
        if !is_object(&bytes) && matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) {
            // A web server's page, not an API's answer: the base URL is wrong, which the caller cannot mend.
            return Err(self.bad("no API's answer; check its base URL"));
        }
        Ok((status, self.refused(status, bytes)))
    }

    /// A refusal as the caller may see it: the provider's own words where they are about the request and hold no
    /// secret of ours (DESIGN §11.4).
    fn refused(&self, status: StatusCode, bytes: Bytes) -> AnswerBody {
        let tells = self.attempt.credential.is_some_and(|credential| credential.is_in(&bytes));
        if is_for_the_caller(status) && is_object(&bytes) && !tells {
            return AnswerBody::Full { bytes, usage: None };
        }
        let message = format!("the provider refused the request with status {}", status.as_u16());
        let bytes = openai_error(Kind::InvalidRequest, "upstream_refused", &message, None);
        AnswerBody::Full { bytes, usage: None }
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

    fn timeout(&self) -> LlmError {
        LlmError::Timeout { provider: self.attempt.provider.clone() }
    }

    fn bad(&self, what: &'static str) -> LlmError {
        LlmError::BadAnswer { provider: self.attempt.provider.clone(), what }
    }

    fn unreachable(&self, source: reqwest::Error) -> LlmError {
        let provider = self.attempt.provider.clone();
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
