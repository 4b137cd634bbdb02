//! `make cluster`: a whole installation on this machine, to look at and to break.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use obol_testkit::Failure;
use obol_testkit::cluster::Cluster;
use serde::Deserialize;

use crate::launch::{self, Common};
use crate::listen::{self, Signals};

/// How long the replicas may take to finish what they do when it ends. Longer than their own drain needs when idle.
const DRAIN: Duration = Duration::from_secs(35);

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// Where the balancer listens.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// How many replicas.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
    replicas: u8,
}

/// The workspace file, as far as a launcher has to read it.
#[derive(Deserialize)]
struct Workspace {
    workspace: String,
    #[serde(default)]
    policies: Vec<String>,
}

pub(crate) async fn run(options: Options) -> Result<ExitCode, Failure> {
    let mut signals = Signals::listen()?;
    options.common.check_config()?;
    let obol = options.common.obol()?;
    let listener = listen::bind(options.listen).await?;
    let upstreams = options.common.start_upstreams().await?;

    let yaml = read(&options.common.config)?;
    let workspace: Workspace = serde_saphyr::from_str(&yaml)
        .map_err(|why| Failure::new(format!("`{}`: {why}", options.common.config.display())))?;
    let (variable, secret) = launch::secret();
    let mut builder = Cluster::builder(obol)
        .replicas(usize::from(options.replicas))
        .control_env(variable, secret)
        // Where the workspace file's `obol-demo mcp-stdio` is found.
        .path_first(launch::own_dir()?)
        .workspace(&workspace.workspace, &yaml)
        .balancer_on(listener);
    for policy in &workspace.policies {
        builder = builder.policy(policy, &read(&options.common.config.with_file_name(policy))?);
    }
    say("starting Redis, control, and the replicas …");
    let cluster = tokio::select! {
        cluster = builder.try_start() => cluster?,
        _ = signals.next() => return Ok(ExitCode::SUCCESS),
    };
    let key = cluster.try_new_key(&workspace.workspace, &[]).await?;
    let operator = cluster.try_new_key(&workspace.workspace, &["operator"]).await?;
    say(&welcome(&cluster, &key, &operator));

    let control = cluster.control();
    let replicas: Vec<_> = (0..cluster.size()).map(|index| cluster.replica(index)).collect();
    let mut ended: FuturesUnordered<_> = replicas
        .iter()
        .enumerate()
        .map(|(index, replica)| async move { (index, replica.process.ended().await) })
        .collect();
    loop {
        tokio::select! {
            _ = signals.next() => break,
            Some((index, how)) = ended.next() => {
                let how = how.map_or_else(|why| why.to_string(), |status| status.to_string());
                say(&format!("replica {index} ended ({how}); the others go on"));
            }
            _ = control.ended() => return Err(Failure::new(format!("control ended:\n{}", control.lines().join("\n")))),
            why = upstreams.ended() => return Err(Failure::new(why)),
        }
    }

    say("stopping; Ctrl-C again ends it at once");
    (0..cluster.size()).for_each(|index| cluster.terminate(index));
    control.terminate();
    let drained = async {
        for replica in &replicas {
            replica.process.try_wait(DRAIN).await.ok();
        }
    };
    tokio::select! {
        () = drained => {}
        _ = signals.next() => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn read(file: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(file)
        .map_err(|why| Failure::new(format!("cannot read `{}`: {why}", file.display())))
}

fn say(text: &str) {
    writeln!(std::io::stdout(), "{text}").ok();
}

/// What to do with it, as lines that work when pasted.
fn welcome(cluster: &Cluster, key: &str, operator: &str) -> String {
    let url = cluster.base_url();
    let mut text = format!(
        r#"
Obol runs on {url}, behind a balancer without stickiness.

  key           {key}
  operator key  {operator}   (may also call destructive tools)
  files         {files}   (workspaces/ is watched: edit and see; logs/ has one file per process)

A chat completion:

  curl -s {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \
    -H 'Content-Type: application/json' \
    -d '{{"model":"fast","messages":[{{"role":"user","content":"hello from the cluster"}}]}}'; echo

A tool call (a session first; each of the two requests is served by another replica):

  SESSION=$(curl -s -o /dev/null -D - {url}/mcp -H 'Authorization: Bearer {key}' \
    -H 'Content-Type: application/json' -H 'Accept: application/json, text/event-stream' \
    -d '{{"jsonrpc":"2.0","id":1,"method":"initialize","params":{{"protocolVersion":"2025-11-25","capabilities":{{}},"clientInfo":{{"name":"curl","version":"1"}}}}}}' \
    | tr -d '\r' | awk 'tolower($1) == "mcp-session-id:" {{ print $2 }}')
  curl -s {url}/mcp -H 'Authorization: Bearer {key}' -H "Mcp-Session-Id: $SESSION" \
    -H 'Content-Type: application/json' -H 'Accept: application/json, text/event-stream' \
    -d '{{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{{"name":"tickets__search_tickets","arguments":{{"query":"invoices"}}}}}}'; echo

Every answer says which replica gave it (`x-obol-backend`). Kill one and go on with the same session:

"#,
        files = cluster.workspaces_dir().parent().unwrap_or(Path::new("/")).display(),
    );
    for index in 0..cluster.size() {
        let pid = cluster.replica(index).process.id();
        writeln!(
            text,
            "  replica {index}: kill -9 {pid}   probes and metrics on {}",
            cluster.admin_url(index)
        )
        .ok();
    }
    text.push_str("\nCtrl-C ends all of it.\n");
    text
}
