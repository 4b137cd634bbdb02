//! The LLM surface in both dialects (DESIGN §11): authorize, route to the model's targets, meter, relay.

mod bill;
mod limited;
mod refused;
mod stored;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{any, get, post};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body::Frame;
use http_body_util::StreamBody;
use obol_auth::oauth::Target as Reach;
use obol_authz::{Action, Context, Decision, Era, PriceClass, Request as Question, Resource};
use obol_llm::{
    Account as _, Answer, AnswerBody, Api, Endpoint, Llm, LlmRequest, Route, model_object, models_list,
};
use obol_meter::{Denied, Idempotency, Meter, Price, Repeated, Standing, Start, StoredAnswer, UsageGuard};
use obol_model::snapshot::{Model, Target};
use obol_model::{Clock, Kind, ModelCall, ModelName, Outcome, UsageKind};
use obol_session::Bindings;

use self::bill::{Bill, Binder, Most};
use self::limited::Limited;
use self::refused::Refused;
use crate::audit;
use crate::failure;
use crate::front::{Admitted, Front};
use crate::gateway::GatewayParts;
use crate::idempotency;
use crate::stamp::Stamp;
use crate::toll;

/// What the LLM endpoints work with.
pub(crate) struct LlmSurface {
    front: Front,
    llm: Arc<Llm>,
    meter: Meter,
    bindings: Arc<dyn Bindings>,
    clock: Arc<dyn Clock>,
}

impl LlmSurface {
    pub(crate) fn new(front: Front, parts: &GatewayParts) -> Self {
        Self {
            front,
            llm: parts.llm.clone(),
            meter: parts.meter.clone(),
            bindings: parts.bindings.clone(),
            clock: parts.clock.clone(),
        }
    }
}

type Surface = State<Arc<LlmSurface>>;

/// Everything below `/v1`.
pub(crate) fn routes(surface: Arc<LlmSurface>) -> Router {
    let ask = |endpoint: Endpoint| {
        post(async move |State(surface): Surface, request: Request| surface.ask(endpoint, request).await)
    };
    Router::new()
        .route("/v1/chat/completions", ask(Endpoint::ChatCompletions))
        .route("/v1/messages", ask(Endpoint::Messages))
        .route("/v1/messages/count_tokens", ask(Endpoint::CountTokens))
        .route("/v1/responses", ask(Endpoint::Responses))
        .route("/v1/embeddings", ask(Endpoint::Embeddings))
        .route("/v1/responses/{id}", get(stored::get).delete(stored::delete))
        .route("/v1/responses/{id}/input_items", get(stored::input_items))
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/v1/{*rest}", any(unknown))
        .method_not_allowed_fallback(unknown)
        .with_state(surface)
}

/// `GET /v1/models`: the models that the caller may invoke.
async fn models(State(surface): Surface, headers: HeaderMap) -> Response {
    let api = dialect(&headers);
    surface
        .serve(api, &headers, async |admitted| {
            let all = &admitted.publication.workspace.models;
            let visible = all.iter().filter(|(name, model)| may_invoke(admitted, name, model, |_, _| ()));
            let visible: Vec<&ModelName> = visible.map(|(name, _)| name).collect();
            audit::listed(admitted, None, "models", visible.len(), all.len() - visible.len());
            let list = models_list(api, &visible, surface.clock.now());
            Ok(failure::bytes_response(Response::builder(), list))
        })
        .await
}

/// `GET /v1/models/{id}`.
async fn model(
    State(surface): Surface,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response {
    let api = dialect(&headers);
    surface
        .serve(api, &headers, async |admitted| {
            // What is no text is no model either.
            let name = name.as_deref().map_or("", String::as_str);
            let (name, _) = find(admitted, name, |_, _| ())?;
            let object = model_object(api, name, surface.clock.now());
            Ok(failure::bytes_response(Response::builder(), object))
        })
        .await
}

/// Everything else below `/v1`.
async fn unknown(State(surface): Surface, headers: HeaderMap) -> Response {
    surface
        .serve(dialect(&headers), &headers, async |_| {
            let message = "this endpoint is not served; there are /v1/chat/completions, /v1/responses, \
                           /v1/embeddings, /v1/messages, /v1/messages/count_tokens and /v1/models";
            Err(Refused::new(Kind::NotFound, "unknown_endpoint", message))
        })
        .await
}

/// The dialect of a caller that asks for what both have: only Anthropic's SDKs name a version.
fn dialect(headers: &HeaderMap) -> Api {
    if headers.contains_key("anthropic-version") { Api::Anthropic } else { Api::OpenAi }
}

impl LlmSurface {
    /// Authenticates and stamps what `serve` makes of the request.
    async fn serve<F>(&self, api: Api, headers: &HeaderMap, serve: F) -> Response
    where
        F: AsyncFnOnce(&Admitted) -> Result<Response, Refused>,
    {
        let admitted = match self.front.admit(headers, Reach::Llm).await {
            Ok(admitted) => admitted,
            Err(refusal) => return Refused::from(refusal).respond(api),
        };
        let mut response = match serve(&admitted).await {
            Ok(response) => response,
            Err(refused) => refused.respond(api),
        };
        Stamp::of(&admitted).put(&mut response);
        if api == Api::Anthropic
            && let Some(id) = response.headers().get("x-request-id").cloned()
        {
            // Where this dialect's SDKs look for it.
            response.headers_mut().insert("request-id", id);
        }
        response
    }

    async fn ask(&self, endpoint: Endpoint, request: Request) -> Response {
        let (head, body) = request.into_parts();
        let answer = async |admitted: &Admitted| self.answer(endpoint, admitted, &head, body).await;
        self.serve(endpoint.api(), &head.headers, answer).await
    }

    async fn answer(
        &self,
        endpoint: Endpoint,
        admitted: &Admitted,
        head: &Parts,
        body: Body,
    ) -> Result<Response, Refused> {
        let body = self.front.body(body).await?;
        let key = idempotency::of(&head.headers, endpoint.path(), &body)?;
        let request = Arc::new(LlmRequest::parse(endpoint, body)?.received(&head.headers, self.clock.now()));
        let record = |resource: Resource<'_>, decision: &Decision| {
            audit::decided(admitted, None, endpoint.path(), Action::InvokeModel, resource, decision);
        };
        let (name, model) = find(admitted, request.model(), record)?;
        let mut routes = allowed(admitted, name, model);
        let mut before = 0;
        if let Some(id) = request.previous_response() {
            let binding = self.binding(admitted, id).await?;
            // What it goes on from lies with one target alone.
            routes.retain(|route| binding.as_ref().is_some_and(|binding| stored::is_of(binding, route)));
            let known = binding.filter(|_| !routes.is_empty());
            before = known.ok_or_else(|| stored::no_previous(id))?.tokens;
        }
        let output = request.most_output(model.max_output)?;
        self::refused::unless_bounded(&request, admitted, name, &routes)?;
        let input = request.most_input().saturating_add(before);
        let most = Most { input, output: output.unwrap_or_default() };
        let (guard, standing) = match self.admit(&request, admitted, name, &routes, most, key).await? {
            Admission::Fresh(guard, standing) => (*guard, standing),
            Admission::Answered(answer) => return Ok(idempotency::replay(answer)),
        };
        let limits = Limited::of(admitted, standing);
        if endpoint == Endpoint::CountTokens && routes.first().is_some_and(|route| route.api() == Api::OpenAi)
        {
            // No such provider counts for others; what is counted is an estimate in this dialect anyway.
            let count = serde_json::json!({ "input_tokens": request.prompt().tokens() });
            guard.cancel();
            let mut response = failure::json(Response::builder(), &count);
            limits.put(response.headers_mut());
            return Ok(response);
        }
        let binder = request.stores_response().then(|| Binder {
            bindings: self.bindings.clone(),
            workspace: admitted.identity.workspace_id().clone(),
            principal: admitted.identity.principal(),
        });
        let bill = Bill::new(guard, &request, self.clock.clone(), most, binder);
        let answer = self.llm.call(request, routes, bill).await.inspect_err(|e| {
            tracing::warn!(request_id = %admitted.request_id, model = %name, error = %e, "no answer of a model");
        })?;
        let mut response = relay(answer);
        limits.put(response.headers_mut());
        Ok(response)
    }

    /// Sets aside what the first target may cost; a dearer one that is tried later tops that up.
    async fn admit(
        &self,
        request: &LlmRequest,
        admitted: &Admitted,
        name: &ModelName,
        routes: &[Arc<Route>],
        most: Most,
        key: Option<Idempotency>,
    ) -> Result<Admission, Refused> {
        let endpoint = request.endpoint();
        let first = routes.first();
        let worst = first.map(|route| most.cost(route)).unwrap_or_default();
        let price = first.map(|route| route.target.price.clone()).unwrap_or_default();
        let call = ModelCall { model: name.clone(), provider: None, upstream_model: None };
        let kind = match endpoint {
            Endpoint::ChatCompletions => UsageKind::ChatCompletion(call),
            Endpoint::Messages | Endpoint::CountTokens => UsageKind::Message(call),
            Endpoint::Responses => UsageKind::Response(call),
            Endpoint::Embeddings => UsageKind::Embedding(call),
        };
        let (worst, tokens) = match endpoint {
            // It costs nothing, and counts as a request.
            Endpoint::CountTokens => Default::default(),
            _ => (worst, most.tokens()),
        };
        let start = Start { idempotency: key, ..toll::start(admitted, kind, Price::Tokens(price)) };
        let terms = toll::terms(admitted, Some(name), worst, tokens);
        match self.meter.admit(start, terms).await {
            Ok((guard, standing)) => Ok(Admission::Fresh(Box::new(guard), standing)),
            Err(Denied::Repeated(Repeated::Answered(answer))) => Ok(Admission::Answered(answer)),
            Err(denied) => Err(Refused::denied(admitted, &denied, worst)),
        }
    }
}

/// What came of asking for admission.
enum Admission {
    Fresh(Box<UsageGuard>, Standing),
    /// The request was answered before, under the same idempotency key.
    Answered(StoredAnswer),
}

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
            Refused::new(Kind::NotFound, "model_not_found", message).about("model")
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
fn allowed(admitted: &Admitted, name: &ModelName, model: &Model) -> Vec<Arc<Route>> {
    let routes = admitted.publication.compiled.routes.get(name).map_or(&[][..], Vec::as_slice);
    let targets = model.targets.iter().zip(routes);
    targets
        .filter(|(target, _)| decide(admitted, name, target).1.allowed)
        .map(|(_, route)| route.clone())
        .collect()
}

fn relay(answer: Answer<Bill>) -> Response {
    let mut head =
        Response::builder().status(answer.status).header(header::CONTENT_TYPE, answer.content_type);
    if let Some(route) = answer.route
        && let Ok(value) = HeaderValue::from_str(&format!("{}/{}", route.provider(), route.target.model))
    {
        head = head.header("x-obol-target", value);
    }
    let response = match answer.body {
        AnswerBody::Full { bytes, mut account, .. } => {
            if answer.status.is_success() {
                let (status, content_type) = (answer.status.as_u16(), "application/json".to_owned());
                account.remember(StoredAnswer { status, content_type, body: bytes.clone() });
            }
            account.close(if answer.status.is_success() { Outcome::Ok } else { Outcome::Error });
            head.header(header::CACHE_CONTROL, "no-store").body(Body::from(bytes))
        }
        AnswerBody::Stream(stream) => {
            // A client that leaves drops it, which closes the upstream at once.
            let events = futures::stream::unfold(stream, |mut stream| async move {
                let bytes: Bytes = stream.next().await?;
                Some((Ok::<_, Infallible>(Frame::data(bytes)), stream))
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
