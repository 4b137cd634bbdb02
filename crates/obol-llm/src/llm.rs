use std::time::Duration;

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue, StatusCode};
use memchr::memmem;
use obol_dial::Dialer;
use obol_model::snapshot::Target;
use obol_model::{ProviderName, Secret, metric};
use tokio::time::{Instant, timeout_at};
use tracing::warn;
use url::Url;

use crate::call::{Call, EVENT_STREAM, JSON};
use crate::error::{LlmError, chain};
use crate::request::ChatRequest;
use crate::stream::ChatStream;
use crate::usage::Usage;

/// Limits of calls to providers. Each phase has its own: one limit for everything would cut long answers or let dead
/// ones hang.
#[derive(Debug, Clone)]
pub struct LlmOptions {
    /// Until an answer begins (a stream: its first content; a preamble is none). The last target of a request that is no stream may use all
    /// of `total`: its answer begins when it is complete.
    pub first_byte_timeout: Duration,
    /// Between two reads of an answer.
    pub idle_timeout: Duration,
    /// For a call with all of its attempts, to the last byte: `OBOL_UPSTREAM_TIMEOUT_S`.
    pub total: Duration,
    /// The largest answer that is no stream.
    pub max_answer_bytes: usize,
    /// The largest event of a stream.
    pub max_event_bytes: usize,
}

impl Default for LlmOptions {
    fn default() -> Self {
        Self {
            first_byte_timeout: Duration::from_mins(2),
            idle_timeout: Duration::from_mins(2),
            total: Duration::from_mins(5),
            max_answer_bytes: 32 << 20,
            max_event_bytes: 4 << 20,
        }
    }
}

/// A header that authenticates the gateway at a provider. Cannot be printed.
#[derive(Debug, Clone)]
pub struct Credential {
    pub(crate) name: HeaderName,
    pub(crate) value: HeaderValue,
}

/// A credential that is no header. Says nothing of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CredentialError {
    /// The name is no header name.
    #[error("not a header name")]
    Name,
    /// The value has characters that no header can carry.
    #[error("the credential has characters that a header cannot carry")]
    Value,
}

impl Credential {
    /// `Authorization: Bearer …`.
    ///
    /// # Errors
    /// When the token has characters that no header can carry.
    pub fn bearer(token: &Secret<String>) -> Result<Self, CredentialError> {
        Self::of(AUTHORIZATION, &format!("Bearer {}", token.expose()))
    }

    /// A header of another name.
    ///
    /// # Errors
    /// When name or value cannot be a header's.
    pub fn header(name: &str, value: &Secret<String>) -> Result<Self, CredentialError> {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| CredentialError::Name)?;
        Self::of(name, value.expose())
    }

    /// Whether `text` shows the secret itself.
    pub(crate) fn is_in(&self, text: &[u8]) -> bool {
        let value = self.value.as_bytes();
        let secret = value.strip_prefix(b"Bearer ").unwrap_or(value);
        !secret.is_empty() && memmem::find(text, secret).is_some()
    }

    fn of(name: HeaderName, value: &str) -> Result<Self, CredentialError> {
        let mut value = HeaderValue::from_str(value).map_err(|_| CredentialError::Value)?;
        value.set_sensitive(true);
        Ok(Self { name, value })
    }
}

/// One target of a request, with what the publication says of its provider.
#[derive(Debug, Clone, Copy)]
pub struct Attempt<'a> {
    /// The provider's name in the workspace.
    pub provider: &'a ProviderName,
    /// Where it is; `/chat/completions` is appended.
    pub base_url: &'a Url,
    /// How the gateway authenticates itself.
    pub credential: Option<&'a Credential>,
    /// The target.
    pub target: &'a Target,
    /// Whether private and loopback addresses may be dialled.
    pub allow_private: bool,
    /// The most tokens of one answer, sent where the client sets no limit of its own.
    pub most_output: Option<u64>,
}

/// A request that a provider may have worked on, and ask to be paid for, though no answer is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// The attempt that it went out with.
    pub target_index: usize,
    /// About how many tokens its prompt is.
    pub estimated_input: u64,
}

/// A provider's answer.
#[derive(Debug)]
pub struct Answer {
    /// 2xx, or the status of a refusal that the caller has to see (400, 413, 422 and their like).
    pub status: StatusCode,
    /// JSON or an event stream.
    pub content_type: HeaderValue,
    /// The attempt that answered.
    pub target_index: usize,
    /// The rest.
    pub body: AnswerBody,
}

/// The body of an [`Answer`].
#[derive(Debug)]
pub enum AnswerBody {
    /// All of it.
    Full {
        /// As the provider wrote it.
        bytes: Bytes,
        /// What it used; nothing for a refusal.
        usage: Option<Usage>,
    },
    /// A stream that has begun.
    Stream(Box<ChatStream>),
}

/// Calls providers. Cheap to clone; clones share connections.
#[derive(Debug, Clone)]
pub struct Llm {
    pub(crate) dialer: Dialer,
    options: LlmOptions,
}

impl Llm {
    /// Calls with the clients of `dialer`.
    pub fn new(dialer: Dialer, options: LlmOptions) -> Self {
        Self { dialer, options }
    }

    /// Tries the targets in order until one begins to answer (DESIGN §11.2).
    ///
    /// The next one is tried after a failed connection, a time limit, `408`, `429`, `5xx`, a refusal of our own
    /// credential, and a `200` that holds no answer. Other refusals are the caller's answer.
    ///
    /// `sent` is written before each attempt and holds the last one that may have cost something: not one that found
    /// no connection or was refused. With an answer it is empty again; the answer itself says what it used.
    ///
    /// Cancel-safe in that dropping the future, or the answer, closes the upstream's connection or stream; what the
    /// provider did by then may be billed to us, and `sent` says so.
    ///
    /// # Errors
    /// Why the last target that was tried gave no answer.
    pub async fn chat(
        &self,
        request: &ChatRequest,
        attempts: &[Attempt<'_>],
        sent: &mut Option<Sent>,
    ) -> Result<Answer, LlmError> {
        *sent = None;
        let deadline = Instant::now() + self.options.total;
        let estimated_input = request.estimated_input();
        let mut last = LlmError::NoTarget;
        for (index, attempt) in attempts.iter().enumerate() {
            let is_last = index + 1 == attempts.len();
            let first_byte = if is_last && !request.is_stream() {
                deadline
            } else {
                deadline.min(Instant::now() + self.options.first_byte_timeout)
            };
            let client = self.dialer.client(attempt.allow_private);
            let mut call = Call {
                client,
                options: &self.options,
                request,
                attempt,
                first_byte,
                deadline,
                estimated_input,
                may_have_worked: false,
            };
            let before = sent.replace(Sent { target_index: index, estimated_input });
            let result = timeout_at(deadline, call.run())
                .await
                .unwrap_or_else(|_| Err(LlmError::Timeout { provider: attempt.provider.clone() }));
            match result {
                Ok((status, body)) => {
                    *sent = None;
                    let outcome = if status.is_success() { "ok" } else { "refused" };
                    if !status.is_success() {
                        // The caller is told the status; which provider gave it is for the operator.
                        tracing::info!(provider = %attempt.provider, model = attempt.target.model, %status, "provider refused the request");
                    }
                    metrics::counter!(metric::LLM_ATTEMPTS, "outcome" => outcome).increment(1);
                    let content_type = if let AnswerBody::Stream(_) = body { EVENT_STREAM } else { JSON };
                    return Ok(Answer { status, content_type, target_index: index, body });
                }
                Err(failure) => {
                    if !call.may_have_worked {
                        *sent = before;
                    }
                    metrics::counter!(metric::LLM_ATTEMPTS, "outcome" => failure.code()).increment(1);
                    warn!(
                        provider = %attempt.provider,
                        outcome = failure.code(),
                        reason = chain(&failure),
                        "llm attempt failed"
                    );
                    last = failure;
                }
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        Err(last)
    }
}
