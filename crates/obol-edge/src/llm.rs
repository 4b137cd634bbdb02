//! The LLM surface in the OpenAI dialect (DESIGN §11): authorize, route to the model's targets, meter, relay.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body::Frame;
use http_body_util::StreamBody;
use obol_auth::oauth::Target as Reach;
use obol_authz::{Action, Context, Decision, Era, PriceClass, Request as Question, Resource};
use obol_llm::{
    Answer, AnswerBody, Attempt, ChatRequest, ChatStream, Llm, LlmError, Sent, models_list, openai_error,
};
use obol_meter::{Denied, Meter, Price, Standing, UsageGuard};
use obol_model::snapshot::{Model, Target};
use obol_model::{Clock, Kind, Limits, ModelCall, ModelName, NanoUsd, Outcome, Tokens, UsageKind};

use crate::audit;
use crate::failure::{self, RETRY_AFTER_S, Refusal};
use crate::front::{Admitted, Front};
use crate::gateway::GatewayParts;
use crate::stamp::Stamp;
use crate::toll;

/// What the LLM endpoints work with.
pub(crate) struct LlmSurface {
    front: Front,
    llm: Arc<Llm>,
    meter: Meter,
    clock: Arc<dyn Clock>,
}

impl LlmSurface {
    pub(crate) fn new(front: Front, parts: &GatewayParts) -> Self {
        Self { front, llm: parts.llm.clone(), meter: parts.meter.clone(), clock: parts.clock.clone() }
    }
}

/// `POST /v1/chat/completions`, plain and streaming.
pub(crate) async fn chat_completions(State(surface): State<Arc<LlmSurface>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    with_request(&surface, &head.headers, async |admitted| surface.chat(admitted, body).await).await
}

/// `GET /v1/models`: the models that the caller may invoke.
pub(crate) async fn models(State(surface): State<Arc<LlmSurface>>, headers: HeaderMap) -> Response {
    with_request(&surface, &headers, async |admitted| {
        let all = &admitted.publication.workspace.models;
        let visible = all.iter().filter(|(name, model)| may_invoke(admitted, name, model, |_, _| ()));
        let visible: Vec<&ModelName> = visible.map(|(name, _)| name).collect();
        audit::listed(admitted, None, "models", visible.len(), all.len() - visible.len());
        Ok(failure::bytes_response(Response::builder(), models_list(visible, surface.clock.now())))
    })
    .await
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(
    State(surface): State<Arc<LlmSurface>>,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response {
    with_request(&surface, &headers, async |admitted| {
        // What is no text is no model either.
        let name = name.as_deref().map_or("", String::as_str);
        let (name, _) = find(admitted, name, |_, _| ())?;
        let created = surface.clock.now().as_second();
        let body =
            serde_json::json!({ "id": name, "object": "model", "created": created, "owned_by": "obol" });
        Ok(failure::json(Response::builder(), &body))
    })
    .await
}

/// Everything else below `/v1`.
pub(crate) async fn unknown(State(surface): State<Arc<LlmSurface>>, headers: HeaderMap) -> Response {
    with_request(&surface, &headers, async |_| {
        let message = "this endpoint is not served; there are /v1/chat/completions and /v1/models";
        Err(Refused::new(Kind::NotFound, "unknown_endpoint", message))
    })
    .await
}

async fn with_request<F>(surface: &LlmSurface, headers: &HeaderMap, serve: F) -> Response
where
    F: AsyncFnOnce(&Admitted) -> Result<Response, Refused>,
{
    let admitted = match surface.front.admit(headers, Reach::Llm).await {
        Ok(admitted) => admitted,
        Err(refusal) => return Refused::from(refusal).respond(),
    };
    let mut response = match serve(&admitted).await {
        Ok(response) => response,
        Err(refused) => refused.respond(),
    };
    Stamp::of(&admitted).put(&mut response);
    response
}

impl LlmSurface {
    async fn chat(&self, admitted: &Admitted, body: Body) -> Result<Response, Refused> {
        let body = self.front.body(body).await?;
        let request = ChatRequest::parse(body).map_err(Refused::from)?;
        let record = |resource: Resource<'_>, decision: &Decision| {
            audit::decided(admitted, None, "chat/completions", Action::InvokeModel, resource, decision);
        };
        let (name, model) = find(admitted, request.model(), record)?;
        let attempts = attempts(admitted, name, model);
        let most_output = request.most_output(model.max_output).map_err(Refused::from)?;
        let (mut guard, standing) =
            self.admit(admitted, name, &attempts, request.most_input(), most_output).await?;
        let limits = Limited::of(admitted, standing);
        let result = {
            let mut underway = Underway { guard: &mut guard, attempts: &attempts, sent: None };
            let result = self.llm.chat(&request, &attempts, &mut underway.sent).await;
            result.map_err(|e| (e, underway.sent.is_some()))
        };
        let answer = match result {
            Ok(answer) => answer,
            Err((e, may_have_cost)) => {
                guard.finish(if may_have_cost { Outcome::Partial } else { Outcome::Error });
                tracing::warn!(request_id = %admitted.request_id, model = %name, error = %e, "completion failed");
                return Err(e.into());
            }
        };
        let target = attempts.get(answer.target_index).map(|a| (a.provider, a.target));
        let mut head = Response::builder().status(answer.status);
        if let Some((provider, target)) = target {
            guard.served_by(provider, &target.model, target.price.clone());
            if let Ok(value) = HeaderValue::from_str(&format!("{provider}/{}", target.model)) {
                head = head.header("x-obol-target", value);
            }
        }
        let mut response = relay(head, answer, guard);
        limits.put(response.headers_mut());
        Ok(response)
    }

    /// Sets aside what the dearest of the attempts may cost.
    async fn admit(
        &self,
        admitted: &Admitted,
        name: &ModelName,
        attempts: &[Attempt<'_>],
        most_input: u64,
        most_output: Option<u64>,
    ) -> Result<(UsageGuard, Standing), Refused> {
        let output = most_output.unwrap_or_default();
        let worst = attempts.iter().map(|attempt| attempt.target.price.worst(most_input, output)).max();
        let worst = worst.unwrap_or_default();
        let price = attempts.first().map(|attempt| attempt.target.price.clone()).unwrap_or_default();
        let kind = UsageKind::ChatCompletion(ModelCall {
            model: name.clone(),
            provider: None,
            upstream_model: None,
        });
        let start = toll::start(admitted, kind, Price::Tokens(price));
        let terms = toll::terms(admitted, Some(name), worst, most_input.saturating_add(output));
        self.meter.admit(start, terms).await.map_err(|denied| Refused::denied(&denied, worst))
    }
}

/// The headers by which SDKs know how much they may still ask for.
struct Limited {
    limits: Limits,
    standing: Standing,
}

impl Limited {
    fn of(admitted: &Admitted, standing: Standing) -> Self {
        let limits = toll::terms(admitted, None, NanoUsd::ZERO, 0).limits;
        Self { limits, standing }
    }

    fn put(&self, headers: &mut HeaderMap) {
        let Self { limits, standing } = self;
        let reset = format!("{}s", toll::seconds(standing.reset));
        for (names, limit, left) in [
            (REQUESTS, limits.requests_per_minute, standing.requests_left),
            (TOKENS, limits.tokens_per_minute, standing.tokens_left),
        ] {
            let (Some(limit), Some(left)) = (limit, left) else { continue };
            let [limit_name, left_name, reset_name] = names;
            headers.insert(limit_name, HeaderValue::from(limit));
            headers.insert(left_name, HeaderValue::from(left));
            if let Ok(value) = HeaderValue::from_str(&reset) {
                headers.insert(reset_name, value);
            }
        }
    }
}

const REQUESTS: [&str; 3] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const TOKENS: [&str; 3] =
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];

/// The model that the caller calls `name`. One that does not exist and one that may not be invoked have one answer.
fn find<'a>(
    admitted: &'a Admitted,
    name: &str,
    record: impl Fn(Resource<'_>, &Decision),
) -> Result<(&'a ModelName, &'a Model), Refused> {
    admitted
        .publication
        .workspace
        .models
        .get_key_value(name)
        .filter(|(name, model)| may_invoke(admitted, name, model, record))
        .ok_or_else(|| {
            let short: String = name.chars().take(128).collect();
            let message = format!("The model `{short}` does not exist or you do not have access to it.");
            Refused { param: Some("model"), ..Refused::new(Kind::NotFound, "model_not_found", message) }
        })
}

/// Whether the caller may invoke a model: its first target decides, the others are fallbacks.
fn may_invoke(
    admitted: &Admitted,
    name: &ModelName,
    model: &Model,
    record: impl FnOnce(Resource<'_>, &Decision),
) -> bool {
    model.targets.first().is_some_and(|target| {
        let (resource, decision) = decide(admitted, name, target);
        record(resource, &decision);
        decision.allowed
    })
}

fn decide<'a>(admitted: &Admitted, name: &'a ModelName, target: &'a Target) -> (Resource<'a>, Arc<Decision>) {
    let (provider, price_class) = (&target.provider, PriceClass::of(&target.price));
    let resource = Resource::Model { name, provider, price_class };
    let question = Question {
        caller: &admitted.caller,
        action: Action::InvokeModel,
        resource,
        context: Context {
            environment: &admitted.publication.workspace.environment,
            client: None,
            era: Era::Modern,
            arguments: None,
        },
    };
    (resource, admitted.publication.compiled.policies.decide(&question))
}

/// The targets that the caller may reach, in order. A fallback that it may not is skipped (DESIGN §11.2).
fn attempts<'a>(admitted: &'a Admitted, name: &ModelName, model: &'a Model) -> Vec<Attempt<'a>> {
    let publication = &admitted.publication;
    model
        .targets
        .iter()
        .filter(|target| decide(admitted, name, target).1.allowed)
        .filter_map(|target| {
            let provider = publication.workspace.providers.get(&target.provider)?;
            Some(Attempt {
                provider: &target.provider,
                base_url: &provider.base_url,
                credential: publication.compiled.credentials.get(&target.provider),
                target,
                allow_private: provider.allow_private,
                most_output: model.max_output,
            })
        })
        .collect()
}

fn relay(head: http::response::Builder, answer: Answer, mut guard: UsageGuard) -> Response {
    let head = head.header(header::CONTENT_TYPE, answer.content_type);
    let response = match answer.body {
        AnswerBody::Full { bytes, usage } => {
            if let Some(usage) = usage {
                guard.set_tokens(usage.tokens, usage.estimated);
            }
            guard.finish(if answer.status.is_success() { Outcome::Ok } else { Outcome::Error });
            head.header(header::CACHE_CONTROL, "no-store").body(Body::from(bytes))
        }
        AnswerBody::Stream(stream) => {
            let metered = MeteredStream { stream, guard: Some(guard) };
            let events = futures::stream::unfold(metered, |mut metered| async move {
                let bytes = metered.next().await?;
                Some((Ok::<_, Infallible>(Frame::data(bytes)), metered))
            });
            // Nothing on the way may buffer, cache or compress a stream (DESIGN §11.3).
            head.header(header::CACHE_CONTROL, "no-cache, no-transform")
                .header("x-accel-buffering", "no")
                .body(Body::new(StreamBody::new(events)))
        }
    };
    response.unwrap_or_else(|_| {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    })
}

/// A call whose answer has not begun. Whatever ends it, a client that leaves included, the guard learns what a
/// provider may have worked on by then: its prompt is due, by estimate (DESIGN §12.2, §12.3).
struct Underway<'a> {
    guard: &'a mut UsageGuard,
    attempts: &'a [Attempt<'a>],
    sent: Option<Sent>,
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        let Some(sent) = self.sent else { return };
        if let Some(Attempt { provider, target, .. }) = self.attempts.get(sent.target_index) {
            self.guard.served_by(provider, &target.model, target.price.clone());
        }
        self.guard.set_tokens(Tokens { input: sent.estimated_input, ..Tokens::default() }, true);
    }
}

/// A stream that is metered however it ends. A client that leaves drops it, which closes the upstream at once.
struct MeteredStream {
    stream: Box<ChatStream>,
    guard: Option<UsageGuard>,
}

impl MeteredStream {
    async fn next(&mut self) -> Option<Bytes> {
        let next = self.stream.next().await;
        if next.is_none() {
            let outcome = if self.stream.end().complete { Outcome::Ok } else { Outcome::Partial };
            self.settle(Some(outcome));
        }
        next
    }

    fn settle(&mut self, outcome: Option<Outcome>) {
        let Some(mut guard) = self.guard.take() else { return };
        let end = self.stream.end();
        guard.set_tokens(end.tokens, end.estimated);
        if let Some(outcome) = outcome {
            guard.finish(outcome);
        }
    }
}

impl Drop for MeteredStream {
    fn drop(&mut self) {
        self.settle(None);
    }
}

/// A refusal in the OpenAI dialect (DESIGN §11.4).
struct Refused {
    kind: Kind,
    code: String,
    message: String,
    param: Option<&'static str>,
    retry_after_s: Option<u64>,
    /// Whether an SDK that tries again by itself would only waste its time (DESIGN §11.4).
    is_final: bool,
    challenge: Option<String>,
}

impl Refused {
    fn new(kind: Kind, code: &str, message: impl Into<String>) -> Self {
        let retry_after_s = matches!(kind, Kind::Unavailable | Kind::Stopping).then_some(RETRY_AFTER_S);
        Self {
            kind,
            code: code.to_owned(),
            message: message.into(),
            param: None,
            retry_after_s,
            is_final: false,
            challenge: None,
        }
    }

    fn denied(denied: &Denied, worst: NanoUsd) -> Self {
        toll::log(denied);
        let retry_after_s = toll::retry_after_s(denied);
        Self {
            retry_after_s,
            is_final: retry_after_s.is_none(),
            ..Self::new(denied.kind(), denied.code(), toll::message(denied, worst))
        }
    }

    fn respond(self) -> Response {
        let mut head = Response::builder().status(failure::status(self.kind));
        if let Some(seconds) = self.retry_after_s {
            head = head.header(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.is_final {
            head = head.header("x-should-retry", HeaderValue::from_static("false"));
        }
        if let Some(challenge) = self.challenge {
            head = head.header(header::WWW_AUTHENTICATE, challenge);
        }
        failure::bytes_response(head, openai_error(self.kind, &self.code, &self.message, self.param))
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self {
            retry_after_s: refusal.retry_after_s,
            challenge: refusal.challenge,
            ..Self::new(refusal.kind, refusal.code, refusal.message)
        }
    }
}

impl From<LlmError> for Refused {
    fn from(e: LlmError) -> Self {
        let retry_after_s = e.retry_after().map(|after| after.as_secs().max(1));
        Self { param: e.param(), retry_after_s, ..Self::new(e.kind(), e.code(), e.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use obol_meter::{EmbeddedLedger, MeterOptions, Start, Terms, meter};
    use obol_model::snapshot::Target;
    use obol_model::{
        ManualClock, NanoUsd, PerMillion, Principal, ReplicaId, RequestId, Revision, TokenPrice, UsageEvent,
    };
    use tokio_util::sync::CancellationToken;

    use super::*;

    /// The event of a call that is abandoned before its answer begins.
    async fn abandoned(sent: Option<Sent>) -> UsageEvent {
        let clock = Arc::new(ManualClock::new("2026-01-02T03:04:05Z".parse().unwrap()));
        let ledger = Arc::new(EmbeddedLedger::new(clock.clone(), 8));
        let (meter, flusher) = meter(ledger.clone(), clock, ReplicaId::generate(), MeterOptions::default());
        let usd = |n: u64| PerMillion::new(NanoUsd::new(n * 1_000_000_000));
        let targets = [("first", 1), ("second", 3)].map(|(name, price)| Target {
            provider: name.parse().unwrap(),
            model: format!("{name}-model"),
            price: TokenPrice::flat(usd(price), usd(0)),
            stream_usage: true,
        });
        let base_url = "https://example.com/v1".parse().unwrap();
        let attempts = targets.each_ref().map(|target| Attempt {
            provider: &target.provider,
            base_url: &base_url,
            credential: None,
            target,
            allow_private: false,
            most_output: None,
        });
        let start = Start {
            workspace_id: "acme".parse().unwrap(),
            principal: Principal::Key("k1".parse().unwrap()),
            revision: Revision { epoch: 1, number: 7 },
            kind: UsageKind::ChatCompletion(ModelCall {
                model: "small".parse().unwrap(),
                provider: None,
                upstream_model: None,
            }),
            price: Price::Tokens(targets[0].price.clone()),
            request_id: RequestId::new(),
        };
        let (mut guard, _) = meter.admit(start, Terms::default()).await.unwrap();
        drop(Underway { guard: &mut guard, attempts: &attempts, sent });
        drop(guard);
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        flusher.run(shutdown, CancellationToken::new()).await;
        let [event] = ledger.events().try_into().unwrap();
        event
    }

    #[tokio::test]
    async fn a_call_that_was_sent_and_abandoned_costs_its_prompt_at_the_target_it_went_to() {
        let event = abandoned(Some(Sent { target_index: 1, estimated_input: 5 })).await;
        let ModelCall { provider, upstream_model, .. } = event.kind.model_call().unwrap().clone();
        assert_eq!(provider, Some("second".parse().unwrap()));
        assert_eq!(upstream_model.as_deref(), Some("second-model"));
        assert_eq!((event.tokens.input, event.estimated, event.outcome), (5, true, Outcome::Partial));
        assert_eq!(event.cost, NanoUsd::new(5 * 3_000).into());
    }

    #[tokio::test]
    async fn a_call_that_was_not_sent_costs_nothing() {
        let event = abandoned(None).await;
        assert_eq!(
            (event.tokens, event.estimated, event.cost),
            (Tokens::default(), false, NanoUsd::ZERO.into())
        );
    }
}
