//! A whole installation on this machine: Redis, `obol control`, replicas of `obol run` as real processes, and a
//! balancer without stickiness in front of them.

mod builder;
mod parts;

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::Failure;
use crate::answer::origin;
use crate::balancer::Balancer;
use crate::process::{Proc, Spec, Stream, built_binary};
use crate::redis::RedisServer;
use crate::redis_kind::AnyRedis;

pub use self::builder::Builder;

use self::parts::{READY, Settings, ready, secrets, start_control, start_replica, write_whole};

/// How long a key that was just made may take to reach Redis. Control promises one second.
const PUBLISHED: Duration = Duration::from_secs(10);

/// A running installation; dropping it ends every process and removes its files.
#[derive(Debug)]
pub struct Cluster {
    balancer: Balancer,
    replicas: RwLock<Vec<Arc<Replica>>>,
    control: RwLock<Arc<Proc>>,
    redis: Option<AnyRedis>,
    settings: Settings,
    runs: AtomicUsize,
    making_keys: tokio::sync::Mutex<()>,
    dir: TempDir,
}

/// One replica of `obol run`.
#[derive(Debug)]
pub struct Replica {
    /// Where clients connect.
    pub public: SocketAddr,
    /// Where probes, metrics and operators connect.
    pub admin: SocketAddr,
    /// Where other replicas connect; `None` when it was told not to (`OBOL_PEER_LISTEN` set to nothing).
    pub peer: Option<SocketAddr>,
    /// The process.
    pub process: Proc,
}

impl Cluster {
    /// Describes an installation of this `obol` binary.
    pub fn builder(obol: impl Into<PathBuf>) -> Builder {
        Builder::new(obol.into())
    }

    /// Describes an installation of the `obol` that was built beside the running test.
    ///
    /// # Panics
    /// When it was not built.
    pub fn of_built_obol() -> Builder {
        Self::builder(built_binary("obol").unwrap_or_else(|why| panic!("{why}")))
    }

    async fn launch(builder: Builder) -> Result<Self, Failure> {
        let dir = tempfile::Builder::new().prefix("obol-cluster-").tempdir();
        let dir = dir.map_err(|why| Failure::new(format!("cannot make a directory: {why}")))?;
        for sub in ["workspaces", "state", "logs"] {
            fs::create_dir(dir.path().join(sub)).map_err(|why| Failure::new(format!("`{sub}`: {why}")))?;
        }
        for (file, text) in &builder.workspaces {
            write_whole(&dir.path().join("workspaces").join(file), text)?;
        }
        let redis = match (builder.redis, &builder.redis_url) {
            (Some(redis), _) => Some(redis),
            (None, Some(_)) => None,
            (None, None) => Some(AnyRedis::try_start().await?),
        };
        let redis_url = redis.as_ref().map(AnyRedis::url).or(builder.redis_url).unwrap_or_default();
        let mut env = secrets();
        env.insert("OBOL_LOG".to_owned(), builder.log);
        env.extend(builder.env);
        let settings = Settings {
            obol: builder.obol,
            gateway_redis_url: builder.gateway_redis_url.unwrap_or_else(|| redis_url.clone()),
            redis_url,
            env,
            gateway_env: builder.gateway_env,
            control_env: builder.control_env,
            path_first: builder.path_first,
        };
        let balancer = match builder.listener {
            Some(listener) => Balancer::start_on(listener, Vec::new()).await,
            None => Balancer::start(Vec::new()).await,
        };

        let runs = AtomicUsize::new(0);
        let control = start_control(&settings, dir.path(), next(&runs)).await?;
        let starts =
            (0..builder.replicas).map(|index| start_replica(&settings, dir.path(), index, next(&runs)));
        let replicas = futures::future::try_join_all(starts).await?;
        let cluster = Self {
            balancer,
            replicas: RwLock::new(replicas.into_iter().map(Arc::new).collect()),
            control: RwLock::new(Arc::new(control)),
            redis,
            settings,
            runs,
            making_keys: tokio::sync::Mutex::default(),
            dir,
        };
        cluster.balance();
        cluster.try_wait_ready().await?;
        Ok(cluster)
    }

    fn balance(&self) {
        self.balancer.set_backends(self.replicas.read().iter().map(|replica| replica.public).collect());
    }

    // Where things are.

    /// The balancer's URL, `http://127.0.0.1:PORT`.
    pub fn base_url(&self) -> String {
        self.balancer.base_url()
    }

    /// The balancer.
    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    /// How many replicas there are, dead ones included.
    pub fn size(&self) -> usize {
        self.replicas.read().len()
    }

    /// One replica, as last started.
    ///
    /// # Panics
    /// When there is no such replica.
    pub fn replica(&self, index: usize) -> Arc<Replica> {
        self.replicas.read()[index].clone()
    }

    /// One replica's public URL, past the balancer.
    pub fn public_url(&self, index: usize) -> String {
        origin(self.replica(index).public)
    }

    /// One replica's operations URL.
    pub fn admin_url(&self, index: usize) -> String {
        origin(self.replica(index).admin)
    }

    /// The control plane's process, as last started.
    pub fn control(&self) -> Arc<Proc> {
        self.control.read().clone()
    }

    /// The one Redis server that was started for it.
    ///
    /// # Panics
    /// When it was given a URL or a Redis of another kind instead.
    pub fn redis(&self) -> &RedisServer {
        match &self.redis {
            Some(AnyRedis::Single(redis)) => redis,
            _ => panic!("this cluster has no Redis of its own that is a single server"),
        }
    }

    /// The Redis that ends with it, of whatever kind.
    ///
    /// # Panics
    /// When it was given a URL instead.
    pub fn any_redis(&self) -> &AnyRedis {
        self.redis.as_ref().expect("this cluster was given a Redis URL")
    }

    /// Control's way to Redis.
    pub fn redis_url(&self) -> &str {
        &self.settings.redis_url
    }

    /// The shared secret of the service JWTs, to sign one with.
    pub fn service_jwt_secret(&self) -> &str {
        self.env("OBOL_SERVICE_JWT_SECRET")
    }

    // What tests do to it.

    /// An environment variable for what is started from now on, as a rolling change of the configuration has it.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.settings.env.insert(name.to_owned(), value.to_owned());
    }

    /// The value of an environment variable that all processes have.
    ///
    /// # Panics
    /// When they do not have it.
    pub fn env(&self, name: &str) -> &str {
        &self.settings.env[name]
    }

    /// `SIGKILL` to one replica; returns when it is gone, so that connections to it are refused.
    pub async fn kill9(&self, index: usize) -> ExitStatus {
        self.replica(index).process.kill9().await
    }

    /// `SIGTERM` to one replica; how it ends is `replica(index).process.wait(…)`.
    pub fn terminate(&self, index: usize) {
        self.replica(index).process.terminate();
    }

    /// Starts one replica again (killing it first if it runs) and waits until it is ready. It has new ports; the
    /// balancer knows.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn restart(&self, index: usize) {
        let old = self.replica(index);
        if old.process.exit_status().is_none() {
            old.process.kill9().await;
        }
        let started = start_replica(&self.settings, self.dir.path(), index, next(&self.runs)).await;
        self.replicas.write()[index] = Arc::new(started.unwrap_or_else(|why| panic!("{why}")));
        self.balance();
        self.wait_ready().await;
    }

    /// Starts one more replica and waits until all are ready; returns its index.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn add_replica(&self) -> usize {
        let index = self.size();
        let started = start_replica(&self.settings, self.dir.path(), index, next(&self.runs)).await;
        self.replicas.write().push(Arc::new(started.unwrap_or_else(|why| panic!("{why}"))));
        self.balance();
        self.wait_ready().await;
        index
    }

    /// Ends control (`SIGTERM`, then `SIGKILL` after ten seconds).
    pub async fn stop_control(&self) {
        let control = self.control();
        control.terminate();
        if control.try_wait(Duration::from_secs(10)).await.is_err() {
            control.kill9().await;
        }
    }

    /// Starts control again, killing it first if it runs, and waits until everything is published.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn restart_control(&self) {
        let old = self.control();
        if old.exit_status().is_none() {
            old.kill9().await;
        }
        let started = start_control(&self.settings, self.dir.path(), next(&self.runs)).await;
        *self.control.write() = Arc::new(started.unwrap_or_else(|why| panic!("{why}")));
    }

    /// Waits until every replica that runs answers `/readyz` with `200`.
    ///
    /// # Panics
    /// When that takes more than thirty seconds; with the last answer.
    pub async fn wait_ready(&self) {
        self.try_wait_ready().await.unwrap_or_else(|why| panic!("{why}"));
    }

    /// Waits until every replica that runs answers `/readyz` with `200`.
    ///
    /// # Errors
    /// When that takes more than thirty seconds; with the last answer.
    pub async fn try_wait_ready(&self) -> Result<(), Failure> {
        let replicas = self.replicas.read().clone();
        let running =
            replicas.iter().enumerate().filter(|(_, replica)| replica.process.exit_status().is_none());
        futures::future::try_join_all(running.map(|(index, replica)| ready(index, replica))).await.map(drop)
    }

    /// Makes a virtual key and waits until it is published.
    ///
    /// # Panics
    /// When it cannot be made or does not appear in Redis.
    pub async fn new_key(&self, workspace: &str, tags: &[&str]) -> String {
        self.try_new_key(workspace, tags).await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Makes a virtual key and waits until it is published.
    ///
    /// # Errors
    /// When it cannot be made or does not appear in Redis.
    pub async fn try_new_key(&self, workspace: &str, tags: &[&str]) -> Result<String, Failure> {
        // One at a time: which record in Redis is the new one is told by what was not there before.
        let _one = self.making_keys.lock().await;
        let before = self.published_keys().await?;
        let made = self
            .obol(["key", "new", "--workspace", workspace])
            .args(["--name", &format!("test-{}", next(&self.runs)), "--state"])
            .arg(self.dir.path().join("state"))
            .args(tags.iter().flat_map(|tag| ["--tag", tag]))
            .try_spawn()?;
        let status = made.try_wait(READY).await?;
        let key = made.lines_of(Stream::Out).into_iter().rfind(|line| line.starts_with("obol_"));
        let Some(key) = key.filter(|_| status.success()) else {
            let said = made.lines().join("\n");
            return Err(Failure::new(format!("`obol key new` ended with {status} and said:\n{said}")));
        };
        let end = Instant::now() + PUBLISHED;
        while self.published_keys().await?.is_subset(&before) {
            if Instant::now() > end {
                return Err(Failure::new(format!("the new key was not published within {PUBLISHED:?}")));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(key)
    }

    async fn published_keys(&self) -> Result<BTreeSet<String>, Failure> {
        if let Some(redis) = &self.redis {
            return Ok(redis.keys("key:*").await);
        }
        let failed = |why: ::redis::RedisError| Failure::new(format!("cannot ask Redis for keys: {why}"));
        let client = ::redis::Client::open(self.redis_url()).map_err(failed)?;
        let mut connection = client.get_multiplexed_async_connection().await.map_err(failed)?;
        ::redis::cmd("KEYS").arg("key:*").query_async(&mut connection).await.map_err(failed)
    }

    /// Runs `obol` with these arguments and the installation's environment.
    pub fn obol<A: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Spec {
        self.settings.command("obol", &self.settings.redis_url).args(args)
    }

    /// The directory of workspace files that control watches.
    pub fn workspaces_dir(&self) -> PathBuf {
        self.dir.path().join("workspaces")
    }

    /// Control's state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// Writes a workspace file, all of it at once; control takes it up within a second.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write_workspace(&self, name: &str, yaml: &str) {
        write_whole(&self.workspaces_dir().join(format!("{name}.yaml")), yaml)
            .unwrap_or_else(|why| panic!("{why}"));
    }

    /// Writes a policy file beside the workspace files, all of it at once.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write_policy(&self, file: &str, cedar: &str) {
        write_whole(&self.workspaces_dir().join(file), cedar).unwrap_or_else(|why| panic!("{why}"));
    }

    /// Removes a workspace file.
    ///
    /// # Panics
    /// When there is none.
    pub fn remove_workspace(&self, name: &str) {
        fs::remove_file(self.workspaces_dir().join(format!("{name}.yaml"))).expect("the workspace file");
    }

    /// Everything that every process wrote so far, those that ended included.
    pub fn logs(&self) -> String {
        let mut files: Vec<PathBuf> =
            fs::read_dir(self.logs_dir()).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        files.sort();
        let texts: Vec<String> = files
            .iter()
            .map(|file| String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned())
            .collect();
        texts.concat()
    }

    /// The directory with one log file per process that was started.
    pub fn logs_dir(&self) -> PathBuf {
        self.dir.path().join("logs")
    }
}

impl Drop for Cluster {
    /// Says where it went wrong: a failed test's logs are kept, since the processes' own memory of them ends here.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.dir.disable_cleanup(true);
            #[expect(clippy::print_stderr, reason = "a failing test's output is the only place to tell")]
            {
                eprintln!("the cluster's files are kept in {}", self.dir.path().display());
            }
        }
    }
}

fn next(runs: &AtomicUsize) -> usize {
    runs.fetch_add(1, Ordering::SeqCst)
}

#[cfg(test)]
mod tests;
