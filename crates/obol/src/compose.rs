//! A replica from its parts: what `obol run` and `obol dev` have in common.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use nix::sys::resource::{Resource, getrlimit};
use obol_auth::oauth::AccessTokens;
use obol_auth::{ControlKeys, KeyStore, Keys, KeysOptions, KeysParts, ServiceTokens};
use obol_dial::{DialOptions, Dialer};
use obol_drain::{Class, Drain, DrainOptions, Tasks};
use obol_edge::{
    CompileWorkspace, EdgeOptions, Gateway, GatewayParts, Listeners, OriginPolicy, RedisProbe, ServeOptions,
    serve,
};
use obol_llm::{Llm, LlmOptions};
use obol_mcp::catalogue::{Catalogue, CatalogueOptions, CatalogueStore};
use obol_mcp::pool::{
    Connect, Endpoint, EndpointKind, HttpConnect, Pool, PoolOptions, Spawn, Transport, TransportError,
};
use obol_meter::{FlushReport, Ledger, MeterOptions, Owners, Spool, Sweeper, meter};
use obol_model::{Clock, KeyRing, ReplicaId, SystemClock};
use obol_peer::{Peers, Registry};
use obol_session::{Bindings, SessionOptions, SessionStore, Sessions};
use obol_snapshot::{InvalidationFeed, PRELOAD, PublicationSource, Publications};
use obol_worker::{StdioConnect, WorkerOptions};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config;
use crate::failure::Failure;
use crate::out;
use crate::peers::{Joining, join};
use crate::signals::Signals;

/// The flusher gives up this long before the deadline, so that what is lost can still be said.
const ABANDON_BEFORE: Duration = Duration::from_millis(250);
/// The same with a spool, whose file has to reach the disk; at most a quarter of the drain.
const ABANDON_BEFORE_SPOOL: Duration = Duration::from_secs(1);

/// A call that is older than everything that may keep it is booked by whoever finds it. This is for what lies between
/// its admission and the start of its upstream phase, and between its end and its closing.
const CALL_SLACK: Duration = Duration::from_mins(1);

/// Connections of operators and probes.
const ADMIN_CONNECTIONS: usize = 64;
/// Connections of other replicas: each keeps a few.
const PEER_CONNECTIONS: usize = 512;
/// How long either of them may take nothing.
const STALL_TIMEOUT: Duration = Duration::from_mins(1);

/// Where the state of a replica lives.
pub(crate) struct Stores {
    pub(crate) sessions: Arc<dyn SessionStore>,
    pub(crate) bindings: Arc<dyn Bindings>,
    pub(crate) keys: Arc<dyn KeyStore>,
    /// Who is asked for keys when the store has lost them.
    pub(crate) control: Option<Arc<dyn ControlKeys>>,
    /// The service JWTs of this process.
    pub(crate) service: Option<Arc<ServiceTokens>>,
    pub(crate) publications: Arc<dyn PublicationSource>,
    pub(crate) feed: Arc<dyn InvalidationFeed>,
    pub(crate) ledger: Arc<dyn Ledger>,
    /// Who knows which replicas live, for the sweep of what dead ones left open.
    pub(crate) owners: Arc<dyn Owners>,
    pub(crate) catalogue: Arc<dyn CatalogueStore>,
    /// The leases of all replicas; `None` for one that shares nothing.
    pub(crate) registry: Option<Registry>,
    pub(crate) probe: RedisProbe,
}

/// A replica that serves.
pub(crate) struct Replica {
    drain: Drain,
    drain_options: DrainOptions,
    signals: Signals,
    background: CancellationToken,
    pool: Ending<()>,
    flusher: Ending<FlushReport>,
    abandon: CancellationToken,
    abandon_before: Duration,
    lease: Ending<()>,
    /// Where clients reach it.
    pub(crate) public: SocketAddr,
}

/// A task that ends when it is told to and then says how.
struct Ending<T> {
    stop: CancellationToken,
    ended: oneshot::Receiver<T>,
}

impl<T: Send + 'static> Ending<T> {
    fn spawn<F>(tasks: &Tasks, name: &'static str, run: impl FnOnce(CancellationToken) -> F) -> Self
    where
        F: Future<Output = T> + Send + 'static,
    {
        let (done, ended) = oneshot::channel();
        let stop = CancellationToken::new();
        let run = run(stop.clone());
        tasks.spawn(Class::Background, name, async move {
            // Nobody waits when the drain was cut short.
            drop(done.send(run.await));
        });
        Self { stop, ended }
    }

    async fn end(self) -> Option<T> {
        self.stop.cancel();
        self.ended.await.ok()
    }
}

impl Replica {
    /// Builds everything, preloads publications, and serves. Prints the addresses.
    ///
    /// # Errors
    /// When a listener cannot be bound or a client cannot be built.
    pub(crate) async fn start(
        config: config::Gateway,
        ring: Arc<KeyRing>,
        stores: Stores,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, Failure> {
        let signals = Signals::new()?;
        let listeners = Listeners::bind(config.listen, config.admin_listen).await?;
        let metrics = recorder()?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let drain = Drain::new();
        let tasks = drain.tasks().clone();
        let background = CancellationToken::new();

        let publications = Publications::new(stores.publications, CompileWorkspace::new(ring));
        let key_options = KeysOptions { ttl: config.key_ttl, ..KeysOptions::default() };
        let keys = Keys::new(KeysParts {
            store: stores.keys,
            control: stores.control,
            reconciled_at: {
                let publications = publications.clone();
                Arc::new(move || publications.reconciled_at())
            },
            clock: clock.clone(),
            options: key_options,
        });
        let dialer = Dialer::new(DialOptions::default()).map_err(Failure::runtime)?;
        let tokens = config.oauth.map(|options| AccessTokens::new(options, clock.clone()));
        let pool = Pool::new(
            connectors(&tasks, dialer.clone(), environment),
            Arc::new(Spawner(tasks.clone())),
            PoolOptions::default(),
        );
        let catalogue = Catalogue::new(
            pool.clone(),
            Arc::new(Spawner(tasks.clone())),
            stores.catalogue,
            CatalogueOptions::default(),
        );
        let meter_options = MeterOptions {
            queue: config.usage_queue.get(),
            idempotency_life: config.idempotency_ttl,
            call_life: config.upstream_timeout + config.drain_timeout + CALL_SLACK,
            ..MeterOptions::default()
        };
        let replica = ReplicaId::generate();
        tracing::info!(%replica, version = env!("CARGO_PKG_VERSION"), "replica starts");
        let joining = Joining {
            registry: stores.registry,
            peer: config.peer,
            service: stores.service.clone(),
            dialer: dialer.clone(),
            clock: clock.clone(),
        };
        let (peers, peer_listener) = join(replica.clone(), joining).await?;
        let sweeper = Sweeper::new(stores.ledger.clone(), stores.owners);
        let spool = config.spool_dir.map(|dir| Spool::open(dir, replica.clone(), clock.clone()));
        let spool = spool.transpose().map_err(Failure::runtime)?;
        let abandon_before = match spool {
            Some(_) => ABANDON_BEFORE_SPOOL.min(config.drain_timeout / 4),
            None => ABANDON_BEFORE,
        };
        let (meter, flusher) = meter(stores.ledger, clock.clone(), replica, meter_options);
        let flusher = flusher.with_spool(spool);
        let session_options = SessionOptions {
            ttl: config.session_ttl,
            unused_ttl: config.session_unused_ttl,
            max_per_principal: config.session_max_per_principal.get(),
        };
        let llm =
            Llm::new(dialer.clone(), LlmOptions { total: config.upstream_timeout, ..LlmOptions::default() });
        let gateway = Gateway::new(GatewayParts {
            keys: keys.clone(),
            tokens: tokens.clone(),
            publications: publications.clone(),
            bindings: stores.bindings,
            sessions: Arc::new(Sessions::new(stores.sessions, clock.clone(), session_options)),
            pool: pool.clone(),
            catalogue,
            llm: Arc::new(llm),
            meter,
            peers: peers.clone(),
            drain: drain.clone(),
            clock,
            redis: ready(stores.probe, peers.clone()),
            service: stores.service,
            admin_token: config.admin_token,
            metrics: {
                let metrics = metrics.clone();
                Arc::new(move || metrics.render())
            },
            options: EdgeOptions {
                max_body: config.max_body_bytes,
                upstream_timeout: config.upstream_timeout,
                origins: OriginPolicy {
                    origins: config.allowed_origins.clone(),
                    hosts: config.allowed_hosts.clone(),
                    loopback_listener: config.listen.ip().is_loopback(),
                },
            },
        });

        let spawn = |name, future: BoxFuture<'static, ()>| tasks.spawn(Class::Background, name, future);
        spawn("keys", Box::pin(keys.run(publications.subscribe(), background.clone())));
        if let Some(tokens) = tokens {
            spawn("keys of issuers", Box::pin(tokens.run(dialer.clone(), background.clone())));
        }
        spawn("edge", Box::pin(gateway.clone().run(background.clone())));
        spawn("publications", Box::pin(publications.clone().run(stores.feed, background.clone())));
        spawn("metrics", Box::pin(upkeep(metrics, background.clone())));
        spawn("sweeper", Box::pin(sweeper.run(background.clone())));
        // Nobody waits for it here: whoever counts before it is there does.
        drop(tokio::task::spawn_blocking(obol_llm::load_vocabulary));
        match publications.preload(PRELOAD).await {
            Ok(loaded) => tracing::info!(loaded, "publications preloaded"),
            // Not fatal: readiness says so, and they are read when they are asked for.
            Err(e) => tracing::warn!(error = %e, "publications could not be preloaded"),
        }
        let abandon = CancellationToken::new();
        let flusher = Ending::spawn(&tasks, "flusher", |stop| flusher.run(stop, abandon.clone()));
        let pool = Ending::spawn(&tasks, "pool", |stop| pool.run(stop));
        if let (Some(listener), Some(router)) = (peer_listener, gateway.peer()) {
            let peer = listener.local_addr()?;
            let options = ServeOptions {
                class: Class::Background,
                max_connections: PEER_CONNECTIONS,
                stall_timeout: STALL_TIMEOUT,
            };
            // Others are answered until all requests have ended, so that what they tell still arrives (DESIGN §13).
            let serving = serve(listener, router, tasks.clone(), options, background.clone());
            tasks.spawn(Class::Background, "peer listener", serving);
            out::line(format_args!("listening peer http://{peer}"))?;
        }
        // Before clients come, so that nobody is ready whom the others do not know.
        if let Err(e) = peers.renew().await {
            tracing::debug!(error = %e, "this replica has no lease yet");
        }
        let lease = Ending::spawn(&tasks, "lease", |stop| peers.run(stop));
        let public = listen(&gateway, listeners, config.client_stall_timeout, &drain)?;
        Ok(Self {
            drain,
            drain_options: DrainOptions { timeout: config.drain_timeout, delay: config.drain_delay },
            signals,
            background,
            pool,
            flusher,
            abandon,
            abandon_before,
            lease,
            public,
        })
    }

    /// What tasks of the process are spawned with, and what ends them.
    pub(crate) fn background(&self) -> (&Tasks, &CancellationToken) {
        (self.drain.tasks(), &self.background)
    }

    /// Serves until a signal comes, then drains. Gives the exit code.
    pub(crate) async fn run(mut self) -> u8 {
        let signal = self.signals.next().await;
        tracing::info!(signal, "signal received");
        let options = self.drain_options;
        let (background, pool, flusher, abandon) = (self.background, self.pool, self.flusher, self.abandon);
        let (lease, abandon_before) = (self.lease, self.abandon_before);
        let finish = |deadline: Instant| async move {
            background.cancel();
            let give_up = deadline - abandon_before;
            let (flushed, closed) = tokio::join!(
                async {
                    let ending = flusher.end();
                    tokio::pin!(ending);
                    if let Ok(report) = tokio::time::timeout_at(give_up, &mut ending).await {
                        return report;
                    }
                    abandon.cancel();
                    ending.await
                },
                tokio::time::timeout_at(give_up, pool.end()),
            );
            let report = flushed.unwrap_or_default();
            tracing::info!(
                written = report.written,
                spooled = report.spooled,
                lost = report.lost,
                "usage written"
            );
            // Last: what this replica has not settled is settled by others once its lease is gone. Ends by itself.
            drop(tokio::time::timeout_at(deadline, lease.end()).await);
            report.lost == 0 && closed.is_ok()
        };
        let second = async {
            self.signals.next().await;
        };
        self.drain.run(options, finish, second).await.exit_code()
    }
}

fn listen(
    gateway: &Gateway,
    listeners: Listeners,
    stall_timeout: Duration,
    drain: &Drain,
) -> Result<SocketAddr, Failure> {
    let tasks = drain.tasks();
    let public = listeners.public.local_addr()?;
    let router = if listeners.admin.is_some() { gateway.public() } else { gateway.one_port() };
    let stop = drain.stopping().clone();
    let max_connections = max_connections();
    tasks.spawn(
        Class::Background,
        "public listener",
        serve(
            listeners.public,
            router,
            tasks.clone(),
            ServeOptions { class: Class::Request, max_connections, stall_timeout },
            stop,
        ),
    );
    out::line(format_args!("listening public http://{public}"))?;
    if let Some(listener) = listeners.admin {
        let admin = listener.local_addr()?;
        // Probes answer until the process ends, so nothing stops this listener.
        let never = CancellationToken::new();
        let options = ServeOptions {
            class: Class::Background,
            max_connections: ADMIN_CONNECTIONS,
            stall_timeout: STALL_TIMEOUT,
        };
        tasks.spawn(
            Class::Background,
            "admin listener",
            serve(listener, gateway.admin(), tasks.clone(), options, never),
        );
        out::line(format_args!("listening admin http://{admin}"))?;
    }
    Ok(public)
}

/// Clients get at most half of the descriptors that the process may have: their calls need others toward upstreams, and
/// probes must always find one.
fn max_connections() -> usize {
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    usize::try_from(soft / 2).unwrap_or(usize::MAX).saturating_sub(ADMIN_CONNECTIONS).max(8)
}

fn recorder() -> Result<PrometheusHandle, Failure> {
    PrometheusBuilder::new().install_recorder().map_err(Failure::runtime)
}

/// Histograms are folded now and then, so that a replica that nobody scrapes does not grow.
async fn upkeep(metrics: PrometheusHandle, shutdown: CancellationToken) {
    let mut tick = tokio::time::interval(Duration::from_secs(5));
    while shutdown.run_until_cancelled(tick.tick()).await.is_some() {
        metrics.run_upkeep();
    }
}

fn connectors(
    tasks: &Tasks,
    dialer: Dialer,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Arc<dyn Connect> {
    let http = HttpConnect::new(dialer);
    let stdio = StdioConnect::new(Arc::new(Spawner(tasks.clone())), environment, WorkerOptions::default());
    Arc::new(Connectors { http, stdio })
}

/// Chooses the transport by the kind of the endpoint.
#[derive(Debug)]
struct Connectors {
    http: HttpConnect,
    stdio: StdioConnect,
}

#[async_trait]
impl Connect for Connectors {
    async fn connect(&self, endpoint: &Endpoint) -> Result<Arc<dyn Transport>, TransportError> {
        match endpoint.kind {
            EndpointKind::Http { .. } => self.http.connect(endpoint).await,
            EndpointKind::Stdio { .. } => self.stdio.connect(endpoint).await,
        }
    }
}

/// Lets the MCP crates spawn through the drain.
struct Spawner(Tasks);

impl Spawn for Spawner {
    fn spawn(&self, name: &'static str, future: BoxFuture<'static, ()>) {
        self.0.spawn(Class::Background, name, future);
    }
}

/// Whether requests can be served: a Redis that answers and takes no writes serves no session.
fn ready(probe: RedisProbe, peers: Arc<Peers>) -> RedisProbe {
    Arc::new(move || {
        let (answers, peers) = (probe(), peers.clone());
        Box::pin(async move { answers.await && peers.holds_lease().await })
    })
}
