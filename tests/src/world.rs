//! A small installation: one workspace, one scripted MCP server, one scripted model server.

use std::path::{Path, PathBuf};

use http::header::AUTHORIZATION;
use obol_testkit::cluster::{Builder, Cluster};
use obol_testkit::fake_llm::FakeLlm;
use obol_testkit::fake_mcp::FakeMcp;
use serde_json::Value;

use crate::ALLOW_ALL;
use crate::client::{Mcp, Reply, http};

/// What the gateway presents to [`World::mcp`]: long and unlike anything else, so that it can be looked for in logs.
pub const MCP_SECRET: &str = "upstream-mcp-credential-7f3d";
/// What the gateway presents to [`World::llm`].
pub const LLM_SECRET: &str = "upstream-llm-credential-9a1c";

/// The installation.
#[derive(Debug)]
pub struct World {
    /// Replicas, control, Redis.
    pub cluster: Cluster,
    /// The connection `fake`.
    pub mcp: FakeMcp,
    /// The provider `fake`.
    pub llm: FakeLlm,
    /// A key of the workspace `acme`.
    pub key: String,
}

impl World {
    /// Starts it with so many replicas.
    pub async fn start(replicas: usize) -> Self {
        Self::with(replicas, "", |builder| builder).await
    }

    /// Starts it with further connections (YAML, two spaces deep) and further settings.
    pub async fn with(replicas: usize, connections: &str, more: impl FnOnce(Builder) -> Builder) -> Self {
        let mcp = FakeMcp::builder().require_bearer(MCP_SECRET).start().await;
        let llm = FakeLlm::builder().require_bearer(LLM_SECRET).start().await;
        let builder = Cluster::of_built_obol()
            .replicas(replicas)
            .control_env("FAKE_MCP_SECRET", MCP_SECRET)
            .control_env("FAKE_LLM_SECRET", LLM_SECRET)
            .workspace("acme", &workspace("acme", &mcp, &llm, connections))
            .policy("acme.cedar", ALLOW_ALL);
        let cluster = more(builder).start().await;
        let key = cluster.new_key("acme", &[]).await;
        Self { cluster, mcp, llm, key }
    }

    /// The balancer's URL.
    pub fn url(&self) -> String {
        self.cluster.base_url()
    }

    /// Opens an MCP session through the balancer.
    pub async fn connect(&self) -> Mcp {
        Mcp::connect(&self.url(), &self.key).await
    }

    /// A chat completion through the balancer.
    pub async fn chat(&self, body: impl Into<reqwest::Body>) -> Reply {
        chat(&self.url(), &self.key, body).await
    }

    /// The usage events of the workspace `acme` so far.
    pub async fn usage(&self) -> Vec<Value> {
        usage(&self.cluster, "acme").await
    }
}

/// A workspace file with the connection `fake`, the provider `fake` and the model `small`, and its policy file.
pub fn workspace(name: &str, mcp: &FakeMcp, llm: &FakeLlm, connections: &str) -> String {
    format!(
        r#"workspace: {name}
environment: test
connections:
  fake:
    transport: streamable_http
    url: "{}"
    allow_private: true
    auth: {{ bearer: {{ secret: "env:FAKE_MCP_SECRET" }} }}
    price_per_call: 0.001
{connections}
providers:
  fake:
    kind: openai
    base_url: "{}"
    allow_private: true
    auth: {{ bearer: {{ secret: "env:FAKE_LLM_SECRET" }} }}
models:
  small:
    max_output: 1000
    targets: [ {{ provider: fake, model: fake-small, price: {{ input: 1, output: 2 }} }} ]
policies: ["{name}.cedar"]
"#,
        mcp.url(),
        llm.base_url()
    )
}

/// A chat completion.
pub async fn chat(base_url: &str, key: &str, body: impl Into<reqwest::Body>) -> Reply {
    let request = http().post(format!("{base_url}/v1/chat/completions"));
    let request = request.header(AUTHORIZATION, format!("Bearer {key}"));
    Reply::of(request.header("content-type", "application/json").body(body)).await
}

/// The usage events of a workspace so far, oldest first: those that control has collected, and those that wait for it.
pub async fn usage(cluster: &Cluster, workspace: &str) -> Vec<Value> {
    let stream = format!("usage:{{{workspace}}}");
    let waiting = cluster.any_redis().query(&["XRANGE", &stream, "-", "+"]).await;
    with_collected(cluster, workspace, waiting)
}

/// An entry of a stream.
pub type Entry = (String, Vec<(String, String)>);

/// The usage events of a workspace so far, when this is what was just read from its stream.
pub fn with_collected(cluster: &Cluster, workspace: &str, entries: Vec<Entry>) -> Vec<Value> {
    let fields = entries.into_iter().flat_map(|(_, fields)| fields);
    let waiting = fields.map(|(_, event)| serde_json::from_str::<Value>(&event).expect("an event of JSON"));
    // After the stream: what has gone from there in between is here.
    let mut events = collected(&cluster.state_dir().join("usage").join(workspace));
    for event in waiting {
        if events.iter().all(|known| known["event_id"] != event["event_id"]) {
            events.push(event);
        }
    }
    events
}

fn collected(dir: &Path) -> Vec<Value> {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        files.filter(|file| file.extension().is_some_and(|e| e == "jsonl")).collect();
    files.retain(|file| !file.ends_with("rejects.jsonl"));
    files.sort();
    let texts = files.iter().map(|file| std::fs::read_to_string(file).expect("a file of events"));
    // The last line may be in the middle of being written; then it is in the stream as well.
    texts
        .flat_map(|text| text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect::<Vec<_>>())
        .collect()
}
