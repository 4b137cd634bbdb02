//! What to start.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::net::TcpListener;

use crate::Failure;
use crate::redis_kind::AnyRedis;

use super::Cluster;

/// What to start. Made by [`Cluster::builder`].
#[derive(Debug)]
pub struct Builder {
    pub(super) obol: PathBuf,
    pub(super) replicas: usize,
    pub(super) redis: Option<AnyRedis>,
    pub(super) redis_url: Option<String>,
    pub(super) gateway_redis_url: Option<String>,
    pub(super) log: String,
    pub(super) env: BTreeMap<String, String>,
    pub(super) gateway_env: BTreeMap<String, String>,
    pub(super) control_env: BTreeMap<String, String>,
    pub(super) path_first: Vec<PathBuf>,
    pub(super) workspaces: BTreeMap<String, String>,
    pub(super) listener: Option<TcpListener>,
}

impl Builder {
    pub(super) fn new(obol: PathBuf) -> Self {
        Self {
            obol,
            replicas: 3,
            redis: None,
            redis_url: None,
            gateway_redis_url: None,
            log: "info".to_owned(),
            env: BTreeMap::new(),
            gateway_env: BTreeMap::new(),
            control_env: BTreeMap::new(),
            path_first: Vec::new(),
            workspaces: BTreeMap::new(),
            listener: None,
        }
    }

    /// How many replicas; by default three.
    #[must_use]
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
        self
    }

    /// Uses this Redis instead of starting a single server, and ends it with everything else.
    #[must_use]
    pub fn redis(mut self, redis: impl Into<AnyRedis>) -> Self {
        self.redis = Some(redis.into());
        self
    }

    /// Uses the Redis at this URL instead of starting one.
    #[must_use]
    pub fn redis_url(mut self, url: &str) -> Self {
        self.redis_url = Some(url.to_owned());
        self
    }

    /// The way to Redis for the replicas alone, such as a proxy's URL.
    #[must_use]
    pub fn gateway_redis_url(mut self, url: &str) -> Self {
        self.gateway_redis_url = Some(url.to_owned());
        self
    }

    /// `OBOL_LOG` of all processes; by default `info`.
    #[must_use]
    pub fn log(mut self, filter: &str) -> Self {
        filter.clone_into(&mut self.log);
        self
    }

    /// An environment variable for control and replicas. Wins over the kit's own.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// An environment variable for the replicas alone.
    #[must_use]
    pub fn gateway_env(mut self, name: &str, value: &str) -> Self {
        self.gateway_env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// An environment variable for control alone, such as an upstream's secret.
    #[must_use]
    pub fn control_env(mut self, name: &str, value: &str) -> Self {
        self.control_env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// A directory in front of `PATH`, where stdio servers are found.
    #[must_use]
    pub fn path_first(mut self, dir: impl Into<PathBuf>) -> Self {
        self.path_first.push(dir.into());
        self
    }

    /// A workspace file that is there when control starts.
    #[must_use]
    pub fn workspace(mut self, name: &str, yaml: &str) -> Self {
        self.workspaces.insert(format!("{name}.yaml"), yaml.to_owned());
        self
    }

    /// A policy file beside the workspace files.
    #[must_use]
    pub fn policy(mut self, file: &str, cedar: &str) -> Self {
        self.workspaces.insert(file.to_owned(), cedar.to_owned());
        self
    }

    /// Where the balancer listens; by default a port of its own.
    #[must_use]
    pub fn balancer_on(mut self, listener: TcpListener) -> Self {
        self.listener = Some(listener);
        self
    }

    /// Starts everything and waits until all replicas are ready.
    ///
    /// # Panics
    /// When a part does not start; with what it wrote last.
    pub async fn start(self) -> Cluster {
        self.try_start().await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts everything and waits until all replicas are ready.
    ///
    /// # Errors
    /// When a part does not start; with what it wrote last.
    pub async fn try_start(self) -> Result<Cluster, Failure> {
        Cluster::launch(self).await
    }
}
