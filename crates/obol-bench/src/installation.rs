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

/// What a replica says of its listener.
const PUBLIC: &str = "listening public http://";

/// What the tool is called through the gateway.
const TOOL: &str = "bench__echo";

/// From where control takes what the upstream asks of the gateway (it asks nothing, the gateway does not know).
const SECRET: &str = "BENCH_UPSTREAM_SECRET";

/// What a real workspace has: rules that decide on tags and annotations, prices for tokens and for calls, credentials.
const POLICY: &str = r#"permit (principal in Workspace::"bench", action, resource);

forbid (principal, action == Action::"mcp:callTool", resource)
when { principal.tags.contains("suspended") || (resource.destructive && !principal.tags.contains("operator")) };
"#;

/// Budgets of every scope, none of which is ever used up.
const LIMITS: &str = "budgets:
  - { scope: workspace, window: month, limit_usd: 1000000 }
  - { scope: key, window: day, limit_usd: 100000 }
  - { scope: model, model: bench, window: day, limit_usd: 100000 }
limits: { requests_per_minute: 100000000, tokens_per_minute: 1000000000000, concurrency: 10000 }
";

fn workspace(name: &str, upstream: SocketAddr, more: &str) -> String {
    format!(
        r#"workspace: {name}
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
policies: ["{name}.cedar"]
{more}"#
    )
}

/// Everything that runs; it ends with this value.
pub(crate) struct Installation {
    upstream: Role,
    proxy: Option<Role>,
    obol: Option<Obol>,
    memory: Option<Memory>,
}

struct Role {
    process: Proc,
    addr: SocketAddr,
}

struct Obol {
    cluster: Cluster,
    redis: Process,
    key: String,
    /// Of the workspace with budgets.
    budgeted: String,
}

/// `obol dev`.
struct Memory {
    process: Proc,
    addr: SocketAddr,
    key: String,
    _files: tempfile::TempDir,
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
        let memory = if targets.contains(&Target::Memory) {
            Some(Memory::start(find(obol)?, upstream.addr).await?)
        } else {
            None
        };
        let obol = if targets.iter().any(|target| matches!(target, Target::Obol | Target::Budgets)) {
            Some(Obol::start(find(obol)?, upstream.addr).await?)
        } else {
            None
        };
        Ok(Self { upstream, proxy, obol, memory })
    }

    pub(crate) fn door(&self, target: Target) -> Result<Door, Failure> {
        let plain = |role: &Role| Door { addr: role.addr, key: None, tool: "echo" };
        let door = match target {
            Target::Direct => Some(plain(&self.upstream)),
            Target::Floor => self.proxy.as_ref().map(plain),
            Target::Obol => self.obol.as_ref().map(|obol| obol.door(&obol.key)),
            Target::Budgets => self.obol.as_ref().map(|obol| obol.door(&obol.budgeted)),
            Target::Memory => self.memory.as_ref().map(|memory| Door {
                addr: memory.addr,
                key: Some(memory.key.clone()),
                tool: TOOL,
            }),
        };
        door.ok_or_else(|| Failure::new(format!("{} was not started", target.title())))
    }

    /// The process whose cost counts: whatever stands between client and upstream.
    pub(crate) fn between(&self, target: Target) -> Option<Process> {
        match target {
            Target::Direct => None,
            Target::Floor => self.proxy.as_ref().map(|role| Process::new(role.process.id())),
            Target::Obol | Target::Budgets => {
                self.obol.as_ref().map(|obol| Process::new(obol.cluster.replica(0).process.id()))
            }
            Target::Memory => self.memory.as_ref().map(|memory| Process::new(memory.process.id())),
        }
    }

    pub(crate) fn redis(&self, target: Target) -> Option<Process> {
        let shared = matches!(target, Target::Obol | Target::Budgets);
        self.obol.as_ref().filter(|_| shared).map(|obol| obol.redis)
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
            .workspace("bench", &workspace("bench", upstream, ""))
            .policy("bench.cedar", POLICY)
            .workspace("budgets", &workspace("budgets", upstream, LIMITS))
            .policy("budgets.cedar", &POLICY.replace("\"bench\"", "\"budgets\""))
            .try_start()
            .await?;
        let key = cluster.try_new_key("bench", &["load", "batch"]).await?;
        let budgeted = cluster.try_new_key("budgets", &["load", "batch"]).await?;
        let redis = Process::of_redis(cluster.redis().addr()).await?;
        Ok(Self { cluster, redis, key, budgeted })
    }

    fn door(&self, key: &str) -> Door {
        Door { addr: self.cluster.replica(0).public, key: Some(key.to_owned()), tool: TOOL }
    }
}

impl Memory {
    async fn start(binary: PathBuf, upstream: SocketAddr) -> Result<Self, Failure> {
        let failed = |why: std::io::Error| Failure::new(format!("cannot write a workspace: {why}"));
        let files = tempfile::tempdir().map_err(failed)?;
        let file = files.path().join("bench.yaml");
        std::fs::write(&file, workspace("bench", upstream, LIMITS)).map_err(failed)?;
        std::fs::write(files.path().join("bench.cedar"), POLICY).map_err(failed)?;
        let process = Proc::command(binary)
            .named("obol dev".to_owned())
            .args(["dev", "--config"])
            .arg(&file)
            .env("OBOL_LISTEN", "127.0.0.1:0")
            .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0")
            .env(SECRET, "bench-upstream-secret")
            .try_spawn()?;
        let line = process.try_wait_for_line(START, |line| line.starts_with(PUBLIC)).await?;
        let addr = line.trim_start_matches(PUBLIC).parse();
        let addr = addr.map_err(|_| Failure::new(format!("`{line}` names no address")))?;
        let said = process.try_wait_for_line(START, |line| line.trim_start().starts_with("key ")).await?;
        let key = said.split_whitespace().find(|word| word.starts_with("obol_"));
        let key = key.ok_or_else(|| Failure::new("`obol dev` names no key"))?.to_owned();
        Ok(Self { process, addr, key, _files: files })
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
