use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{any, get, post};
use http::header::HeaderName;
use obol_auth::oauth::AccessTokens;
use obol_auth::{Keys, ServiceTokens};
use obol_drain::{Class, Drain};
use obol_llm::Llm;
use obol_mcp::catalogue::Catalogue;
use obol_mcp::pool::Pool;
use obol_meter::Meter;
use obol_model::{Clock, metric};
use obol_peer::{Inbox, InboxOptions, Peers};
use obol_session::{Bindings, Sessions};
use obol_snapshot::Publications;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::admin::{Admin, AdminToken};
use crate::compiled::CompileWorkspace;
use crate::front::{Callers, Front};
use crate::jwks;
use crate::llm::LlmSurface;
use crate::mcp::Mcp;
use crate::metadata;
use crate::ops::{Ops, Redis};
use crate::origin::{self, OriginPolicy};
use crate::peer::{self, PeerHandler};

/// Bounds and settings of the edge.
#[derive(Debug, Clone)]
pub struct EdgeOptions {
    /// Largest request body on both surfaces (`OBOL_MAX_BODY_BYTES`).
    pub max_body: usize,
    /// Longest upstream phase of one request (`OBOL_UPSTREAM_TIMEOUT_S`).
    pub upstream_timeout: Duration,
    /// Which web pages may call.
    pub origins: OriginPolicy,
}

/// Everything that the edge serves from; the composer builds it.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "a bag of handles for one call")]
pub struct GatewayParts {
    /// Virtual keys.
    pub keys: Arc<Keys>,
    /// Access tokens; `None` without OAuth.
    pub tokens: Option<Arc<AccessTokens>>,
    /// Publications.
    pub publications: Arc<Publications<CompileWorkspace>>,
    /// MCP sessions.
    pub sessions: Arc<Sessions>,
    /// Answers that providers keep.
    pub bindings: Arc<dyn Bindings>,
    /// Upstream MCP sessions.
    pub pool: Arc<Pool>,
    /// What upstreams offer.
    pub catalogue: Arc<Catalogue>,
    /// LLM providers.
    pub llm: Arc<Llm>,
    /// Usage.
    pub meter: Meter,
    /// The other replicas.
    pub peers: Arc<Peers>,
    /// Shutdown.
    pub drain: Drain,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Whether Redis answers; always yes with the embedded store.
    pub redis: Redis,
    /// The service JWTs of this process; `None` turns off what needs them.
    pub service: Option<Arc<ServiceTokens>>,
    /// The operator's credential; `None` turns `/admin` off.
    pub admin_token: Option<AdminToken>,
    /// Renders the metrics in Prometheus text.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
    /// Bounds.
    pub options: EdgeOptions,
}

/// The HTTP face of a replica.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "holds nothing to look at but handles")]
pub struct Gateway {
    mcp: Arc<Mcp>,
    llm: Arc<LlmSurface>,
    ops: Arc<Ops>,
    admin: Arc<Admin>,
    tokens: Option<Arc<AccessTokens>>,
    service: Option<Arc<ServiceTokens>>,
    inbox: Option<Arc<Inbox>>,
    origins: OriginPolicy,
    drain: Drain,
}

impl Gateway {
    /// Puts the parts behind their routes.
    pub fn new(parts: GatewayParts) -> Self {
        let front = Front {
            keys: parts.keys.clone(),
            tokens: parts.tokens.clone(),
            clock: parts.clock.clone(),
            publications: parts.publications.clone(),
            max_body: parts.options.max_body,
            callers: Callers::default(),
        };
        let origins = parts.options.origins.clone();
        let tokens = parts.tokens.clone();
        let (service, drain) = (parts.service.clone(), parts.drain.clone());
        let (peers, clock, tasks) = (parts.peers.clone(), parts.clock.clone(), parts.drain.tasks().clone());
        let mut gateway = Self {
            llm: Arc::new(LlmSurface::new(front.clone(), &parts)),
            ops: Arc::new(Ops::new(&parts)),
            admin: Admin::new(&parts),
            mcp: Arc::new(Mcp::new(front, parts)),
            tokens,
            service,
            inbox: None,
            origins,
            drain,
        };
        gateway.inbox = gateway.service.clone().map(|tokens| {
            let handler = Arc::new(PeerHandler(gateway.mcp.clone()));
            let spawn: obol_peer::Spawn =
                Arc::new(move |future| tasks.spawn(Class::Background, "peer message", future));
            let options = InboxOptions::default();
            Arc::new(Inbox::new(peers.me().clone(), tokens, clock, handler, spawn, options))
        });
        gateway
    }

    /// The routes of `OBOL_LISTEN`.
    pub fn public(&self) -> Router {
        let mcp = Router::new()
            .route("/mcp", any(crate::mcp::endpoint))
            .route("/mcp/", any(crate::mcp::endpoint))
            .route("/mcp/{connection}", any(crate::mcp::view_endpoint))
            .route("/mcp/{connection}/", any(crate::mcp::view_endpoint))
            .with_state(self.mcp.clone());
        Router::new()
            .merge(mcp)
            .merge(crate::llm::routes(self.llm.clone()))
            .layer(middleware::from_fn_with_state(self.origins.clone(), origin::layer))
            .merge(self.probes())
            .merge(metadata::routes(self.tokens.clone()))
            .merge(jwks::routes(self.service.as_deref()))
            .fallback(crate::ops::not_found)
            .layer(middleware::from_fn_with_state(self.drain.clone(), observe))
    }

    /// The routes of `OBOL_ADMIN_LISTEN`.
    pub fn admin(&self) -> Router {
        self.probes().merge(self.operations()).fallback(crate::ops::not_for_clients)
    }

    /// All routes, for one port that serves everything (DESIGN §3).
    pub fn one_port(&self) -> Router {
        self.public().merge(self.operations())
    }

    /// The routes of `OBOL_PEER_LISTEN`; `None` without a key that tells replicas from strangers.
    pub fn peer(&self) -> Option<Router> {
        self.inbox.clone().map(peer::routes)
    }

    fn operations(&self) -> Router {
        Router::new()
            .route("/metrics", get(crate::ops::metrics))
            .route("/internal/reload", post(crate::ops::reload))
            .with_state(self.ops.clone())
            .merge(self.admin.clone().routes())
    }

    fn probes(&self) -> Router {
        Router::new()
            .route("/healthz", get(crate::ops::healthz))
            .route("/readyz", get(crate::ops::readyz))
            .with_state(self.ops.clone())
    }

    /// Everything that has to happen beside requests: lists that upstreams changed, and the end of workers whose session
    /// ended elsewhere. Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.mcp.background()).await;
    }
}

/// Counts requests and measures the time until the head of the answer. Once a drain has begun it tells clients of
/// HTTP/1.1 to leave, so that connections go one by one with their answers, and few are left to be closed from here
/// while a request may be on its way.
async fn observe(State(drain): State<Drain>, request: Request, next: Next) -> Response {
    let surface = match request.uri().path() {
        p if p.starts_with("/mcp") => "mcp",
        p if p.starts_with("/v1/") => "v1",
        _ => "ops",
    };
    let method = request.method().clone();
    // On HTTP/2 the header is forbidden: GOAWAY says it, when the delay is over.
    let may_say_close = request.version() < http::Version::HTTP_2;
    let start = Instant::now();
    let mut response = next.run(request).await;
    tracing::debug!(
        surface,
        %method,
        status = response.status().as_u16(),
        request_id = response.headers().get("x-request-id").and_then(|v| v.to_str().ok()),
        elapsed_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
        "request answered"
    );
    metrics::counter!(metric::HTTP_REQUESTS, "surface" => surface, "status" => status_class(&response))
        .increment(1);
    metrics::histogram!(metric::HTTP_SECONDS, "surface" => surface).record(start.elapsed().as_secs_f64());
    if surface != "ops" {
        // Intermediaries that buffer or transform would break streams and signatures alike.
        let nosniff = HeaderName::from_static("x-content-type-options");
        response.headers_mut().insert(nosniff, http::HeaderValue::from_static("nosniff"));
    }
    if may_say_close && drain.is_draining() {
        response.headers_mut().insert(http::header::CONNECTION, http::HeaderValue::from_static("close"));
    }
    response
}

fn status_class(response: &Response) -> &'static str {
    match response.status().as_u16() {
        200..=299 => "2xx",
        300..=399 => "3xx",
        401 => "401",
        403 => "403",
        404 => "404",
        429 => "429",
        400..=499 => "4xx",
        503 => "503",
        _ => "5xx",
    }
}
