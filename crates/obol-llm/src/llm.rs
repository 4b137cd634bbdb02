use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use memchr::memmem;
use obol_dial::Dialer;
use obol_model::{Outcome, Secret, metric};
use rand::RngExt as _;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::warn;

use crate::answer::{Account, Answer, AnswerBody, AnswerStream};
use crate::breaker::Breakers;
use crate::call::{Call, EVENT_STREAM, JSON, Reply};
use crate::endpoint::Endpoint;
use crate::error::{LlmError, chain};
use crate::request::LlmRequest;
use crate::route::Route;
use crate::upstream::Upstream;

/// One request tries no more targets than this.
const MOST_ATTEMPTS: usize = 8;

/// Limits of calls to providers. Each phase has its own: one limit for everything would cut long answers or let dead
/// ones hang.
#[derive(Debug, Clone)]
pub struct LlmOptions {
    /// Until an answer begins (a stream: its first content; a preamble is none). The last target of a request that is no stream may use all
    /// of `total`: its answer begins when it is complete.
    pub first_byte_timeout: Duration,
    /// How long a stream's head waits for the status of its answer. Then it is `200`, comments keep it alive as often as
    /// this, and what goes wrong is told by an error event; the right to fall back does not end (DESIGN §11.2).
    pub commit_after: Duration,
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
            commit_after: Duration::from_secs(15),
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

    /// Whether `text` shows the secret itself. In JSON it may be spelled with escapes.
    pub(crate) fn is_in(&self, text: &[u8]) -> bool {
        let value = self.value.as_bytes();
        let secret = value.strip_prefix(b"Bearer ").unwrap_or(value);
        let shows = |text: &[u8]| !secret.is_empty() && memmem::find(text, secret).is_some();
        if shows(text) {
            return true;
        }
        if memmem::find(text, b"\\").is_none() {
            return false;
        }
        // Written anew it has no escape that it does not need; names of members count as well.
        serde_json::from_slice::<serde_json::Value>(text).map_or(true, |value| {
            shows(value.to_string().replace("\\\"", "\"").replace("\\\\", "\\").as_bytes())
        })
    }

    fn of(name: HeaderName, value: &str) -> Result<Self, CredentialError> {
        let mut value = HeaderValue::from_str(value).map_err(|_| CredentialError::Value)?;
        value.set_sensitive(true);
        Ok(Self { name, value })
    }
}

/// Calls providers. Cheap to clone; clones share connections and what they know of targets.
#[derive(Debug, Clone)]
pub struct Llm {
    pub(crate) dialer: Dialer,
    options: LlmOptions,
    breakers: Arc<Breakers>,
}

impl Llm {
    /// Calls with the clients of `dialer`.
    pub fn new(dialer: Dialer, options: LlmOptions) -> Self {
        Self { dialer, options, breakers: Arc::default() }
    }

    /// Tries the targets until one begins to answer (DESIGN §11.2): in their order, or drawn by weight where they have
    /// weights. Targets that rest after failures are passed over, and so are those that the account cannot afford.
    ///
    /// The next one is tried after a failed connection, a time limit, `408`, `429`, `5xx`, a refusal of our own
    /// credential, and a `200` that holds no answer. Other refusals are the caller's answer. Embeddings of another
    /// model are other numbers: they go to targets with the model of the first one only.
    ///
    /// A stream has its head after [`LlmOptions::commit_after`] at the latest; then it goes on trying by itself.
    ///
    /// Cancel-safe in that dropping the future, or the answer, closes the upstream's connection or stream; what the
    /// provider did by then may be billed to us, and `account` knows of it and is dropped as well.
    ///
    /// # Errors
    /// Why the last target that was tried gave no answer. The account is closed then.
    pub async fn call<A: Account>(
        &self,
        request: Arc<LlmRequest>,
        routes: Vec<Arc<Route>>,
        account: A,
    ) -> Result<Answer<A>, LlmError> {
        let is_stream = request.is_stream();
        let endpoint = request.endpoint();
        let mut run = Box::pin(self.clone().run(request, routes, account));
        if !is_stream {
            return run.await;
        }
        let commit_after = self.options.commit_after;
        match timeout(commit_after, &mut run).await {
            Ok(result) => result,
            Err(_) => Ok(Answer {
                status: StatusCode::OK,
                content_type: EVENT_STREAM,
                route: None,
                body: AnswerBody::Stream(Box::new(AnswerStream::late(endpoint, run, commit_after))),
            }),
        }
    }

    fn upstream<'a>(&'a self, route: &'a Arc<Route>) -> Upstream<'a> {
        Upstream { client: self.dialer.client(route.allow_private()), options: &self.options, route }
    }

    async fn run<A: Account>(
        self,
        request: Arc<LlmRequest>,
        routes: Vec<Arc<Route>>,
        mut account: A,
    ) -> Result<Answer<A>, LlmError> {
        let deadline = Instant::now() + self.options.total;
        let mut last: Option<LlmError> = None;
        // What was never tried says less than what failed.
        let mut passed_over = LlmError::NoTarget;
        let mut may_have_cost = false;
        let routes = in_turn(&request, routes);
        for (index, route) in routes.iter().enumerate() {
            if let Err(rests) = self.breakers.allow(route) {
                passed_over = rests;
                continue;
            }
            let is_last = index + 1 == routes.len();
            let first_byte = if is_last && !request.is_stream() {
                deadline
            } else {
                deadline.min(Instant::now() + route.first_byte_timeout(self.options.first_byte_timeout))
            };
            let mut call = Call {
                breakers: &self.breakers,
                upstream: self.upstream(route),
                request: &request,
                first_byte,
                deadline,
                may_have_worked: false,
            };
            // It may not be possible to say it in this provider's dialect; others may take it.
            let outgoing = match call.outgoing() {
                Ok(outgoing) => outgoing,
                Err(untranslatable) => {
                    passed_over = untranslatable;
                    continue;
                }
            };
            if let Err(denied) = account.afford(route).await {
                passed_over = denied;
                continue;
            }
            let trial = self.breakers.calling(route);
            let result = timeout_at(deadline, call.run(outgoing))
                .await
                .unwrap_or_else(|_| Err(LlmError::Timeout { provider: route.provider().clone() }));
            let failure = match result {
                Ok(reply) => {
                    match reply {
                        Reply::Full { .. } => self.breakers.succeeded(route),
                        Reply::Stream(_) => self.breakers.begun(route),
                    }
                    trial.end();
                    return Ok(answer(reply, route, account).await);
                }
                Err(failure) => failure,
            };
            metrics::counter!(metric::LLM_ATTEMPTS, "outcome" => failure.code()).increment(1);
            warn!(
                provider = %route.provider(),
                outcome = failure.code(),
                reason = chain(&failure),
                "llm attempt failed"
            );
            may_have_cost |= call.may_have_worked;
            account.failed(route, &failure, call.may_have_worked);
            self.breakers.failed(route, &failure);
            trial.end();
            last = Some(failure);
            if Instant::now() >= deadline {
                break;
            }
        }
        account.close(if may_have_cost { Outcome::Partial } else { Outcome::Error });
        Err(last.unwrap_or(passed_over))
    }

    /// Asks a provider for something that it keeps, below its base URL. `None` when it is not there.
    ///
    /// Cancel-safe: dropping the future closes the connection.
    ///
    /// # Errors
    /// Why there is no answer. What the provider said of it is not told.
    pub async fn fetch<'a>(
        &self,
        route: &Arc<Route>,
        method: Method,
        path: impl Iterator<Item = &'a str>,
        query: Option<&str>,
    ) -> Result<Option<Bytes>, LlmError> {
        self.upstream(route).fetch(method, path, query).await
    }
}

async fn answer<A: Account>(reply: Reply, route: &Arc<Route>, mut account: A) -> Answer<A> {
    let status = match &reply {
        Reply::Full { status, .. } => *status,
        Reply::Stream(_) => StatusCode::OK,
    };
    let outcome = if status.is_success() { "ok" } else { "refused" };
    if !status.is_success() {
        // The caller is told the status; which provider gave it is for the operator.
        tracing::info!(provider = %route.provider(), model = route.target.model, %status, "provider refused the request");
    }
    metrics::counter!(metric::LLM_ATTEMPTS, "outcome" => outcome).increment(1);
    match reply {
        Reply::Full { status, bytes, usage, response_id } => {
            if let Some(usage) = usage {
                account.used(usage);
            }
            account.answered(route, response_id.as_deref()).await;
            let body = AnswerBody::Full { bytes, usage, account };
            Answer { status, content_type: JSON, route: Some(route.clone()), body }
        }
        Reply::Stream(relay) => {
            account.answered(route, relay.response_id()).await;
            let body = AnswerBody::Stream(Box::new(AnswerStream::open(relay, account)));
            Answer { status, content_type: EVENT_STREAM, route: Some(route.clone()), body }
        }
    }
}

/// The targets in the order in which they are tried.
fn in_turn(request: &LlmRequest, mut routes: Vec<Arc<Route>>) -> Vec<Arc<Route>> {
    if request.endpoint() == Endpoint::Embeddings
        && let Some(model) = routes.first().map(|first| first.target.model.clone())
    {
        routes.retain(|route| route.target.model == model);
    }
    let weight = |route: &Arc<Route>| route.target.weight.map_or(0, |weight| u64::from(weight.get()));
    let mut sum: u64 = routes.iter().map(weight).sum();
    let mut drawn = Vec::with_capacity(routes.len());
    // Those with a weight first, each drawn from what is left; then the others in their order.
    while sum > 0 {
        let mut ticket = rand::rng().random_range(0..sum);
        let position = routes.iter().position(|route| {
            let is_it = ticket < weight(route);
            ticket = ticket.saturating_sub(weight(route));
            is_it
        });
        let Some(position) = position else { break };
        let route = routes.remove(position);
        sum = sum.saturating_sub(weight(&route));
        drawn.push(route);
    }
    drawn.extend(routes);
    drawn.truncate(MOST_ATTEMPTS);
    drawn
}
