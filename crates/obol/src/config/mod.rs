//! The environment, read once and validated into values that cannot be wrong (DESIGN §4).
//!
//! [`Environment`] is raw, [`Run`], [`Control`] and [`Dev`] are validated. Nothing outside this module knows the name
//! of a variable, and libraries never read the environment at all.

mod oauth;
mod operator;
mod problem;
mod read;
mod show;
pub mod table;
mod usage;
mod value;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use obol_auth::oauth::OAuthOptions;
use obol_edge::AdminToken;
use obol_model::{KeyRing, Secret};
use tracing_subscriber::filter::Targets;
use url::Url;

pub use obol_redis::RedisUrl;

pub use self::operator::{Operator, StoreAt};
pub use self::problem::{Problem, Problems, Unknown};
use self::read::Reader;
use self::show::Source;
pub use self::show::{Effective, reference};
use self::table::{ALL, Shape, Variable};
pub use self::usage::{Usage, UsageAudit};
pub use self::value::{LogFormat, ServiceJwt};

const PREFIX: &str = "OBOL_";

/// The commands that read the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Subcommand {
    /// `obol run`
    Run,
    /// `obol control`
    Control,
    /// `obol dev`
    Dev,
    /// `obol check`
    Check,
    /// `obol key`
    Key,
    /// `obol publish`
    Publish,
    /// `obol workspace`
    Workspace,
    /// `obol usage`
    Usage,
    /// `obol usage audit`
    UsageAudit,
}

impl fmt::Display for Subcommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Run => "run",
            Self::Control => "control",
            Self::Dev => "dev",
            Self::Check => "check",
            Self::Key => "key",
            Self::Publish => "publish",
            Self::Workspace => "workspace",
            Self::Usage => "usage",
            Self::UsageAudit => "usage audit",
        })
    }
}

/// The environment of the process, not yet looked at.
#[derive(Clone, Default)]
pub struct Environment {
    vars: BTreeMap<OsString, OsString>,
    options: BTreeMap<&'static str, OsString>,
}

/// Shows no value: anything can stand in an environment.
impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment").field("vars", &self.vars.len()).finish_non_exhaustive()
    }
}

impl Environment {
    /// Takes the variables of a process.
    pub fn new<K: Into<OsString>, V: Into<OsString>>(vars: impl IntoIterator<Item = (K, V)>) -> Self {
        let vars = vars.into_iter().map(|(k, v)| (k.into(), v.into())).collect();
        Self { vars, options: BTreeMap::new() }
    }

    /// Lets an option of the command line, when it was given, win over its variable.
    #[must_use]
    pub fn with_option(mut self, variable: &'static Variable, value: Option<impl Into<OsString>>) -> Self {
        if let Some(value) = value {
            self.options.insert(variable.name, value.into());
        }
        self
    }

    /// Variables that start with `OBOL_` and that no command reads, each with the name that is most like it.
    pub fn unknown(&self) -> Vec<Unknown> {
        self.vars
            .keys()
            .map(|name| name.to_string_lossy())
            .filter(|name| name.starts_with(PREFIX) && !ALL.iter().any(|v| v.name == name.as_ref()))
            .map(|name| Unknown::new(&name, nearest(&name)))
            .collect()
    }

    /// The value of a variable for the `env:NAME` secrets of workspace files. Never one of our own: a secret is sent to
    /// an upstream that the same file names, and its author need not be the operator.
    pub fn secret(&self, name: &str) -> Option<Secret<String>> {
        if name.starts_with(PREFIX) {
            return None;
        }
        self.vars
            .get(OsStr::new(name))
            .and_then(|value| value.to_str())
            .map(|value| Secret::new(value.to_owned()))
    }

    /// All of it, for the allow-listed part that children of stdio connections get to see.
    pub fn into_vars(self) -> impl Iterator<Item = (OsString, OsString)> {
        self.vars.into_iter()
    }

    fn is_set(&self, variable: &'static Variable) -> bool {
        self.get(variable).is_some()
    }

    /// The value of a variable and where it is from; the lossy text when it is not UTF-8. Empty counts as not set:
    /// compose files and Helm charts cannot help passing empty values on.
    fn get(&self, variable: &'static Variable) -> Option<(Result<String, String>, Source)> {
        let option =
            self.options.get(variable.name).map(|value| (value, variable.option.map(Source::Option)));
        let (value, source) = option
            .or_else(|| self.vars.get(OsStr::new(variable.name)).map(|value| (value, None)))
            .filter(|(value, _)| !value.is_empty())?;
        let text = value.to_str().map(str::to_owned).ok_or_else(|| value.to_string_lossy().into_owned());
        Some((text, source.unwrap_or(Source::Environment)))
    }
}

/// The known name that takes the fewest edits.
fn nearest(name: &str) -> &'static str {
    ALL.iter()
        .map(|v| v.name)
        .min_by_key(|known| strsim::damerau_levenshtein(name, known))
        .unwrap_or(table::LISTEN.name)
}

/// A validated configuration, and how to show it.
#[derive(Debug)]
pub struct Loaded<T> {
    /// What the command runs with.
    pub config: T,
    /// The same for people.
    pub effective: Effective,
}

/// What every command has.
#[derive(Debug, Clone)]
pub struct Logging {
    /// Which lines are logged.
    pub filter: Targets,
    /// How they look; `None` leaves it to the kind of stderr.
    pub format: Option<LogFormat>,
}

/// What a replica and `obol dev` have in common.
#[derive(Debug)]
pub struct Gateway {
    /// The log.
    pub logging: Logging,
    /// Threads that serve requests; `None` is one per CPU.
    pub worker_threads: Option<NonZeroUsize>,
    /// The public listener.
    pub listen: SocketAddr,
    /// The operations listener.
    pub admin_listen: SocketAddr,
    /// Idle timeout of an MCP session.
    pub session_ttl: Duration,
    /// Life of an MCP session that was never used; `None` is as long as any other.
    pub session_unused_ttl: Option<Duration>,
    /// The most live MCP sessions of one principal.
    pub session_max_per_principal: NonZeroUsize,
    /// Longest life of a key in memory.
    pub key_ttl: Duration,
    /// Bound of the whole drain.
    pub drain_timeout: Duration,
    /// The part of it in which everything is still served, though readiness says no.
    pub drain_delay: Duration,
    /// Bound of the upstream phase of one request.
    pub upstream_timeout: Duration,
    /// How long a client may take nothing of what waits for it.
    pub client_stall_timeout: Duration,
    /// For how long a request is known by its idempotency key; longer than any call.
    pub idempotency_ttl: Duration,
    /// What signs and verifies service JWTs; `None` turns everything off that needs them.
    pub service_jwt: Option<ServiceJwt>,
    /// The credential of operators; `None` turns `/admin` off.
    pub admin_token: Option<AdminToken>,
    /// What access tokens are judged by; `None` without OAuth.
    pub oauth: Option<OAuthOptions>,
    /// The channel between replicas; `None` without one.
    pub peer: Option<Peer>,
    /// Origins that may call from browsers, as browsers send them; `None` is loopback ones on a loopback listener and
    /// none elsewhere.
    pub allowed_origins: Option<Vec<String>>,
    /// Names that `Host` may have, in lower case and without ports, beside loopback ones on a loopback listener;
    /// `None` is no others there and any name elsewhere.
    pub allowed_hosts: Option<Vec<String>>,
    /// Largest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// The most usage events that wait in memory.
    pub usage_queue: NonZeroUsize,
    /// Where usage that could not be written waits for the next start; `None` keeps nothing.
    pub spool_dir: Option<PathBuf>,
}

/// The channel between replicas.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its listener.
    pub listen: SocketAddr,
    /// Where others reach it; `None` is the address of the listener, which is no wildcard then.
    pub url: Option<Url>,
}

impl Gateway {
    /// Whether one listener serves everything (DESIGN §3). Two free ports are two ports.
    pub fn one_port(&self) -> bool {
        self.listen == self.admin_listen && self.listen.port() != 0
    }
}

/// What `obol run` runs with.
#[derive(Debug)]
pub struct Run {
    /// What it has in common with `obol dev`.
    pub gateway: Gateway,
    /// The shared Redis.
    pub redis_url: RedisUrl,
    /// What its certificate is checked with, PEM; `None` is the public authorities.
    pub redis_ca: Option<Vec<u8>>,
    /// The keys that open credentials.
    pub credential_keys: KeyRing,
    /// Control's internal API, with a path that ends in `/`; `None` never asks. With it there is a service JWT key.
    pub control_url: Option<Url>,
    /// The most usage events of a workspace that wait in Redis.
    pub usage_stream_max: NonZeroUsize,
}

/// What `obol dev` runs with.
#[derive(Debug)]
pub struct Dev {
    /// What it has in common with `obol run`.
    pub gateway: Gateway,
}

/// What `obol control` runs with.
#[derive(Debug)]
pub struct Control {
    /// The log.
    pub logging: Logging,
    /// Threads; `None` is one per CPU.
    pub worker_threads: Option<NonZeroUsize>,
    /// The shared Redis.
    pub redis_url: RedisUrl,
    /// What its certificate is checked with, PEM; `None` is the public authorities.
    pub redis_ca: Option<Vec<u8>>,
    /// The keys that seal credentials.
    pub credential_keys: KeyRing,
    /// Workspace files.
    pub workspaces: PathBuf,
    /// Where control keeps what it knows.
    pub store: StoreAt,
    /// Where replicas ask; `None` answers nobody. With it there is a service JWT key.
    pub listen: Option<SocketAddr>,
    /// What signs and verifies service JWTs.
    pub service_jwt: Option<ServiceJwt>,
}

impl Loaded<Run> {
    /// Reads what `obol run` needs.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn run(env: &Environment) -> Result<Self, Problems> {
        let mut reader = Reader::new(env, Subcommand::Run);
        let gateway = gateway(&mut reader);
        let redis_url = reader.value(&table::REDIS_URL, RedisUrl::parse);
        let redis_ca = reader.optional(&table::REDIS_CA_FILE, value::certificates_file);
        let credential_keys = reader.key_ring(&table::CREDENTIAL_KEY);
        let peer = peer(&mut reader, gateway.as_ref());
        let spool_dir = reader.optional(&table::SPOOL_DIR, |text| Ok(PathBuf::from(text)));
        let gateway = gateway.map(|gateway| Gateway { peer, spool_dir, ..gateway });
        let control_url = reader.optional(&table::CONTROL_URL, value::base_url);
        let usage_stream_max = reader.count(&table::USAGE_STREAM_MAX);
        let signs = reader.is_set(&table::SERVICE_JWT_SECRET) || reader.is_set(&table::SERVICE_JWT_KEY_FILE);
        if control_url.is_some() && !signs {
            let (secret, file) = (table::SERVICE_JWT_SECRET.name, table::SERVICE_JWT_KEY_FILE.name);
            let reason = format!("set without {secret} or {file}: control answers nobody who cannot sign");
            reader.conflict(&table::CONTROL_URL, reason);
        }
        let config = (|| {
            Some(Run {
                gateway: gateway?,
                redis_url: redis_url?,
                redis_ca,
                credential_keys: credential_keys?,
                control_url,
                usage_stream_max: usage_stream_max?,
            })
        })();
        Self::finish(reader, config)
    }
}

impl Loaded<Dev> {
    /// Reads what `obol dev` needs.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn dev(env: &Environment) -> Result<Self, Problems> {
        let mut reader = Reader::new(env, Subcommand::Dev);
        let config = gateway(&mut reader).map(|gateway| Dev { gateway });
        Self::finish(reader, config)
    }
}

impl Loaded<Control> {
    /// Reads what `obol control` needs.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn control(env: &Environment) -> Result<Self, Problems> {
        let mut reader = Reader::new(env, Subcommand::Control);
        let logging = logging(&mut reader);
        let worker_threads = reader.count(&table::WORKER_THREADS);
        let redis_url = reader.value(&table::REDIS_URL, RedisUrl::parse);
        let redis_ca = reader.optional(&table::REDIS_CA_FILE, value::certificates_file);
        let credential_keys = reader.key_ring(&table::CREDENTIAL_KEY);
        let workspaces = reader.value(&table::WORKSPACES_DIR, |text| Ok(PathBuf::from(text)));
        let store = operator::store(&mut reader);
        let service_jwt = service_jwt(&mut reader);
        let listen = reader.optional(&table::CONTROL_LISTEN, value::address);
        let signs = reader.is_set(&table::SERVICE_JWT_SECRET) || reader.is_set(&table::SERVICE_JWT_KEY_FILE);
        if listen.is_some() && !signs {
            let (secret, file) = (table::SERVICE_JWT_SECRET.name, table::SERVICE_JWT_KEY_FILE.name);
            let reason = format!("set without {secret} or {file}: replicas could not be told from strangers");
            reader.conflict(&table::CONTROL_LISTEN, reason);
        }
        let config = (|| {
            Some(Control {
                logging: logging?,
                worker_threads,
                redis_url: redis_url?,
                redis_ca,
                credential_keys: credential_keys?,
                workspaces: workspaces?,
                store: store?,
                listen,
                service_jwt,
            })
        })();
        Self::finish(reader, config)
    }
}

impl Loaded<Logging> {
    /// Reads what `obol check` needs.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn check(env: &Environment) -> Result<Self, Problems> {
        let mut reader = Reader::new(env, Subcommand::Check);
        let config = logging(&mut reader);
        Self::finish(reader, config)
    }
}

impl<T> Loaded<T> {
    fn finish(reader: Reader<'_>, config: Option<T>) -> Result<Self, Problems> {
        reader.finish(config).map(|(config, effective)| Self { config, effective })
    }
}

fn logging(reader: &mut Reader<'_>) -> Option<Logging> {
    let filter = reader.value(&table::LOG, value::log_filter);
    let format = reader.optional(&table::LOG_FORMAT, value::log_format);
    Some(Logging { filter: filter?, format })
}

fn gateway(reader: &mut Reader<'_>) -> Option<Gateway> {
    let logging = logging(reader);
    let worker_threads = reader.count(&table::WORKER_THREADS);
    let listen = reader.value(&table::LISTEN, value::address);
    let admin_listen = reader.value(&table::ADMIN_LISTEN, value::address);
    let session_ttl = reader.seconds(&table::SESSION_TTL_S);
    let session_unused_ttl = reader.seconds(&table::SESSION_UNUSED_TTL_S);
    let session_max_per_principal = reader.count(&table::SESSION_MAX_PER_PRINCIPAL);
    let key_ttl = reader.seconds(&table::KEY_TTL_S);
    let drain_timeout = reader.seconds(&table::DRAIN_TIMEOUT_S);
    let drain_delay = drain_delay(reader, drain_timeout);
    let upstream_timeout = reader.seconds(&table::UPSTREAM_TIMEOUT_S);
    let client_stall_timeout = reader.seconds(&table::CLIENT_STALL_TIMEOUT_S);
    let idempotency_ttl = idempotency_ttl(reader, upstream_timeout, drain_timeout);
    let service_jwt = service_jwt(reader);
    let admin_token = reader.optional(&table::ADMIN_TOKEN, AdminToken::parse);
    let oauth = oauth::oauth(reader);
    let allowed_origins = reader.optional(&table::ALLOWED_ORIGINS, value::origins);
    let allowed_hosts = reader.optional(&table::ALLOWED_HOSTS, value::hosts);
    let max_body_bytes = reader.count(&table::MAX_BODY_BYTES).map(NonZeroUsize::get);
    let usage_queue = reader.count(&table::USAGE_QUEUE);
    Some(Gateway {
        logging: logging?,
        worker_threads,
        listen: listen?,
        admin_listen: admin_listen?,
        session_ttl: session_ttl?,
        session_unused_ttl,
        session_max_per_principal: session_max_per_principal?,
        key_ttl: key_ttl?,
        drain_timeout: drain_timeout?,
        drain_delay: drain_delay?,
        upstream_timeout: upstream_timeout?,
        client_stall_timeout: client_stall_timeout?,
        idempotency_ttl: idempotency_ttl?,
        service_jwt,
        admin_token,
        oauth,
        peer: None,
        allowed_origins,
        allowed_hosts,
        max_body_bytes: max_body_bytes?,
        usage_queue: usage_queue?,
        spool_dir: None,
    })
}

/// A drain that waits until its end would cut everything that is under way.
fn drain_delay(reader: &mut Reader<'_>, timeout: Option<Duration>) -> Option<Duration> {
    let delay = reader.seconds(&table::DRAIN_DELAY_S)?;
    let timeout = timeout?;
    if delay >= timeout {
        let (delay, longest) = (delay.as_secs(), timeout.as_secs());
        let reason = format!(
            "{delay} s is not less than {}, {longest} s: nothing that is under way could finish",
            table::DRAIN_TIMEOUT_S.name
        );
        reader.conflict(&table::DRAIN_DELAY_S, reason);
    }
    Some(delay)
}

/// No call outlives its key (DESIGN §12.7): its end would be written under a key that another call may have by then.
fn idempotency_ttl(
    reader: &mut Reader<'_>,
    upstream: Option<Duration>,
    drain: Option<Duration>,
) -> Option<Duration> {
    let ttl = reader.seconds(&table::IDEMPOTENCY_TTL_S)?;
    let longest = upstream? + drain?;
    if ttl <= longest {
        let (upstream, drain) = (table::UPSTREAM_TIMEOUT_S.name, table::DRAIN_TIMEOUT_S.name);
        let reason = format!(
            "{} s is not longer than {upstream} and {drain} together, {} s: a call would outlive its key",
            ttl.as_secs(),
            longest.as_secs()
        );
        reader.conflict(&table::IDEMPOTENCY_TTL_S, reason);
    }
    Some(ttl)
}

fn peer(reader: &mut Reader<'_>, gateway: Option<&Gateway>) -> Option<Peer> {
    let listen = reader.optional(&table::PEER_LISTEN, value::address);
    let url = reader.optional(&table::PEER_URL, value::base_url);
    if reader.is_set(&table::PEER_URL) && !reader.is_set(&table::PEER_LISTEN) {
        let reason = format!("set without {}: nobody would answer there", table::PEER_LISTEN.name);
        reader.conflict(&table::PEER_URL, reason);
    }
    let listen = listen?;
    if !reader.is_set(&table::SERVICE_JWT_SECRET) && !reader.is_set(&table::SERVICE_JWT_KEY_FILE) {
        let (secret, file) = (table::SERVICE_JWT_SECRET.name, table::SERVICE_JWT_KEY_FILE.name);
        let reason = format!("set without {secret} or {file}: replicas could not be told from strangers");
        reader.conflict(&table::PEER_LISTEN, reason);
    }
    if listen.ip().is_unspecified() && !reader.is_set(&table::PEER_URL) {
        let name = table::PEER_URL.name;
        let reason = format!(
            "`{listen}` is no address that others can dial: set {name} to where they reach this replica"
        );
        reader.conflict(&table::PEER_LISTEN, reason);
    }
    let taken = [
        (&table::LISTEN, gateway.map(|g| g.listen)),
        (&table::ADMIN_LISTEN, gateway.map(|g| g.admin_listen)),
    ];
    for (variable, _) in taken.into_iter().filter(|(_, other)| *other == Some(listen) && listen.port() != 0) {
        let reason =
            format!("`{listen}` is the address of {}: replicas need a port of their own", variable.name);
        reader.conflict(&table::PEER_LISTEN, reason);
    }
    Some(Peer { listen, url })
}

fn service_jwt(reader: &mut Reader<'_>) -> Option<ServiceJwt> {
    let Shape::SharedSecret { min } = table::SERVICE_JWT_SECRET.shape else { return None };
    let secret = reader.optional(&table::SERVICE_JWT_SECRET, |text| value::shared_secret(text, min));
    let private = reader.optional(&table::SERVICE_JWT_KEY_FILE, value::ed25519_file);
    let trusted = reader.optional(&table::SERVICE_JWT_TRUSTED_KEYS_FILE, value::ed25519_public_file);
    let (secret_name, file_name) = (table::SERVICE_JWT_SECRET.name, table::SERVICE_JWT_KEY_FILE.name);
    let has_file = reader.is_set(&table::SERVICE_JWT_KEY_FILE);
    if has_file && reader.is_set(&table::SERVICE_JWT_SECRET) {
        // The algorithm follows from the key (DESIGN §8.2), so there is one kind of key.
        let reason = format!("set together with {secret_name}: keep one of them");
        reader.conflict(&table::SERVICE_JWT_KEY_FILE, reason);
    }
    if !has_file && reader.is_set(&table::SERVICE_JWT_TRUSTED_KEYS_FILE) {
        let reason = format!("set without {file_name}: this side needs a key of its own");
        reader.conflict(&table::SERVICE_JWT_TRUSTED_KEYS_FILE, reason);
    }
    match (secret, private) {
        (Some(secret), _) => Some(ServiceJwt::Secret(secret)),
        (None, Some(private)) => Some(ServiceJwt::Ed25519 { private, trusted }),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests;
