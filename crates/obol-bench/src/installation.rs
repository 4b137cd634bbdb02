//! The processes that are measured, started once for the whole run.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use obol_testkit::Failure;
use obol_testkit::cluster::Cluster;
use obol_testkit::process::Proc;

use crate::driver::Door;
use crate::measure::Target;
use crate::procfs::Process;
use crate::serve::LISTENING;

/// How long a role may take to listen.
const START: Duration = Duration::from_secs(10);

/// From where control takes what the upstream asks of the gateway (it asks nothing, the gateway does not know).
const SECRET: &str = "BENCH_UPSTREAM_SECRET";

/// What a real workspace has: rules that decide on tags and annotations, prices for tokens and for calls, credentials.
const POLICY: &str = r#"permit (principal in Workspace::"bench", action, resource);

forbid (principal, action == Action::"mcp:callTool", resource)
when { principal.tags.contains("suspended") || (resource.destructive && !principal.tags.contains("operator")) };
"#;

fn workspace(upstream: SocketAddr) -> String {
    format!(
        r#"workspace: bench
environment: production
connections:
  bench:
    transport: streamable_http
    url: "http://{upstream}/mcp"
    auth: {{ bearer: {{ secret: "env:{SECRET}" }} }}
    allow_private: true
    price_per_call: 0.0001
providers:
  bench:
    kind: openai
    base_url: "http://{upstream}/v1"
    auth: {{ bearer: {{ secret: "env:{SECRET}" }} }}
    allow_private: true
models:
  bench:
    max_output: 1024
    targets:
      - {{ provider: bench, model: bench-small, price: {{ input: 0.15, output: 0.60, cached_input: 0.075 }} }}
policies: ["bench.cedar"]
"#
    )
}

/// Everything that runs; it ends with this value.
pub(crate) struct Installation {
    upstream: Role,
    proxy: Option<Role>,
    obol: Option<Obol>,
}

struct Role {
    process: Proc,
    addr: SocketAddr,
}

struct Obol {
    cluster: Cluster,
    redis: Process,
    key: String,
}

impl Installation {
    /// Starts what `targets` need.
    pub(crate) async fn start(targets: &[Target], obol: Option<&Path>) -> Result<Self, Failure> {
        let upstream = Role::start("upstream", &[]).await?;
        let proxy = if targets.contains(&Target::Floor) {
            Some(Role::start("proxy", &["--to", &upstream.addr.to_string()]).await?)
        } else {
            None
        };
        let obol = if targets.contains(&Target::Obol) {
            Some(Obol::start(find(obol)?, upstream.addr).await?)
        } else {
            None
        };
        Ok(Self { upstream, proxy, obol })
    }

    pub(crate) fn door(&self, target: Target) -> Result<Door, Failure> {
        let plain = |role: &Role| Door { addr: role.addr, key: None, tool: "echo" };
        let door = match target {
            Target::Direct => Some(plain(&self.upstream)),
            Target::Floor => self.proxy.as_ref().map(plain),
            Target::Obol => self.obol.as_ref().map(|obol| Door {
                addr: obol.cluster.replica(0).public,
                key: Some(obol.key.clone()),
                tool: "bench__echo",
            }),
        };
        door.ok_or_else(|| Failure::new(format!("{} was not started", target.title())))
    }

    /// The process whose cost counts: whatever stands between client and upstream.
    pub(crate) fn between(&self, target: Target) -> Option<Process> {
        match target {
            Target::Direct => None,
            Target::Floor => self.proxy.as_ref().map(|role| Process::new(role.process.id())),
            Target::Obol => self.obol.as_ref().map(|obol| Process::new(obol.cluster.replica(0).process.id())),
        }
    }

    pub(crate) fn redis(&self, target: Target) -> Option<Process> {
        self.obol.as_ref().filter(|_| target == Target::Obol).map(|obol| obol.redis)
    }

    /// Where the gateway writes its log while it runs.
    pub(crate) fn logs(&self) -> Option<PathBuf> {
        self.obol.as_ref().map(|obol| obol.cluster.logs_dir())
    }
}

impl Role {
    async fn start(role: &str, args: &[&str]) -> Result<Self, Failure> {
        let me =
            std::env::current_exe().map_err(|why| Failure::new(format!("where is this program? {why}")))?;
        let process = Proc::command(me).named(format!("the {role}")).arg(role).args(args).try_spawn()?;
        let line = process.try_wait_for_line(START, |line| line.starts_with(LISTENING)).await?;
        let addr = line.trim_start_matches(LISTENING).parse();
        let addr = addr.map_err(|_| Failure::new(format!("`{line}` names no address")))?;
        Ok(Self { process, addr })
    }
}

impl Obol {
    async fn start(binary: PathBuf, upstream: SocketAddr) -> Result<Self, Failure> {
        let cluster = Cluster::builder(binary)
            .replicas(1)
            .control_env(SECRET, "bench-upstream-secret")
            .workspace("bench", &workspace(upstream))
            .policy("bench.cedar", POLICY)
            .try_start()
            .await?;
        let key = cluster.try_new_key("bench", &["load", "batch"]).await?;
        let redis = Process::of_redis(cluster.redis().addr()).await?;
        Ok(Self { cluster, redis, key })
    }
}

fn find(named: Option<&Path>) -> Result<PathBuf, Failure> {
    let obol = match named {
        Some(named) => named.to_owned(),
        None => obol_testkit::process::built_binary("obol")?,
    };
    if obol.is_file() {
        return Ok(obol);
    }
    Err(Failure::new(format!("there is no `{}`; build it or name another with `--obol`", obol.display())))
}
