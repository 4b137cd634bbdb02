//! `obol dev` as a process: what it prints works as pasted, and edits of the workspace file take effect.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail loudly, as tests do"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::fake_llm::FakeLlm;
use obol_testkit::fake_mcp::FakeMcp;
use obol_testkit::process::{Proc, Stream};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(20);
/// DESIGN §7.5 and the command's own help promise a second; the rest is the machine's.
const EFFECT: Duration = Duration::from_secs(3);

struct Dev {
    process: Proc,
    dir: tempfile::TempDir,
}

impl Dev {
    async fn start(mcp: &FakeMcp, llm: &FakeLlm) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("allow.cedar"), "permit(principal, action, resource);").unwrap();
        fs::write(dir.path().join("dev.yaml"), workspace(mcp, llm, "fast")).unwrap();
        let process = Proc::command(Path::new(env!("CARGO_BIN_EXE_obol")))
            .args(["dev", "--config"])
            .arg(dir.path().join("dev.yaml"))
            .env("OBOL_LISTEN", "127.0.0.1:0")
            .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0")
            .spawn();
        process.wait_for_line(DEADLINE, |line| line.contains("Ctrl-C ends it")).await;
        Self { process, dir }
    }

    fn printed(&self) -> String {
        self.process.lines_of(Stream::Out).join("\n")
    }

    /// The word behind `label` in the head of what was printed.
    fn value(&self, label: &str) -> String {
        let printed = self.printed();
        let line = printed.lines().find(|l| l.trim_start().starts_with(label)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    }

    /// The commands under a heading, as a person would copy them.
    fn pasted(&self, heading: &str) -> String {
        let printed = self.printed();
        let after = printed.split(heading).nth(1).unwrap().trim_start().to_owned();
        let end = after.find("\n\n").unwrap();
        after[..end].to_owned()
    }

    async fn models(&self) -> Vec<String> {
        let client = reqwest::Client::builder().no_proxy().timeout(DEADLINE).build().unwrap();
        let url = format!("{}/models", self.value("LLM"));
        let answer = client.get(url).bearer_auth(self.value("key")).send().await.unwrap();
        let list: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect()
    }
}

fn workspace(mcp: &FakeMcp, llm: &FakeLlm, model: &str) -> String {
    format!(
        "workspace: dev\n\
         connections:\n  fake: {{ transport: streamable_http, url: \"{}\", allow_private: true }}\n\
         providers:\n  fake: {{ kind: openai, base_url: \"{}\", allow_private: true }}\n\
         models:\n  {model}: {{ targets: [{{ provider: fake, model: fake-1, free: true }}] }}\n\
         policies: [allow.cedar]\n",
        mcp.url(),
        llm.base_url()
    )
}

fn shell(script: &str) -> Output {
    Command::new("bash").args(["-euo", "pipefail", "-c", script]).output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_printed_works_as_pasted() {
    let (mcp, llm) = (FakeMcp::start().await, FakeLlm::start().await);
    let dev = Dev::start(&mcp, &llm).await;

    let call = dev.pasted("Call a tool:");
    let output = tokio::task::spawn_blocking(move || shell(&call)).await.unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert!(answer.pointer("/result/content/0").is_some(), "{answer}");
    assert_eq!(mcp.counts().all_calls(), 1);

    let chat = dev.pasted("Ask a model:");
    let output = tokio::task::spawn_blocking(move || shell(&chat)).await.unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    assert!(answer.pointer("/choices/0/message/content").is_some(), "{answer}");

    dev.process.interrupt();
    assert!(dev.process.wait(DEADLINE).await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn edits_take_effect_and_a_bad_one_leaves_everything_as_it_was() {
    let (mcp, llm) = (FakeMcp::start().await, FakeLlm::start().await);
    let dev = Dev::start(&mcp, &llm).await;
    let file = dev.dir.path().join("dev.yaml");
    assert_eq!(dev.models().await, ["fast"]);

    fs::write(&file, workspace(&mcp, &llm, "swift")).unwrap();
    eventually(EFFECT, async || dev.models().await == ["swift"]).await;

    fs::write(&file, workspace(&mcp, &llm, "slow").replace("free: true", "fee: true")).unwrap();
    dev.process.wait_for_line(DEADLINE, |line| line.contains("dev.yaml:7") && line.contains("`fee`")).await;
    assert_eq!(dev.models().await, ["swift"]);

    fs::write(&file, workspace(&mcp, &llm, "slow")).unwrap();
    eventually(EFFECT, async || dev.models().await == ["slow"]).await;
}

/// What a stdio server could do: it runs as the same user.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn others_of_the_same_user_cannot_read_its_environment() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = dir.path().join("dev.yaml");
    fs::write(&file, "workspace: dev\n").unwrap();
    // Root may read everything, so it has to become somebody else.
    let root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let obol = Path::new(env!("CARGO_BIN_EXE_obol"));
    let command = if root {
        // Somebody else may not be able to reach the build's own folder.
        let copy = dir.path().join("obol");
        fs::copy(obol, &copy).unwrap();
        Proc::command(Path::new("setpriv"))
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(copy)
    } else {
        Proc::command(obol)
    };
    let process = command
        .args(["dev", "--config"])
        .arg(&file)
        .env("OBOL_LISTEN", "127.0.0.1:0")
        .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0")
        .spawn();
    process.wait_for_line(DEADLINE, |line| line.contains("Ctrl-C ends it")).await;
    let proc = Path::new("/proc").join(process.id().to_string());
    let status = fs::read_to_string(proc.join("status")).unwrap();
    assert!(!status.contains("\nUid:\t0\t"), "{status}");
    // The kernel gives what nobody may look into to root.
    for closed in ["environ", "mem", "fd"] {
        assert_eq!(fs::metadata(proc.join(closed)).unwrap().uid(), 0, "{closed}");
    }
    process.interrupt();
    assert!(process.wait(DEADLINE).await.success());
}

#[tokio::test]
async fn an_invalid_file_is_refused_at_start_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("dev.yaml");
    fs::write(&file, "workspace: dev\nconections: {}\n").unwrap();
    let process =
        Proc::command(Path::new(env!("CARGO_BIN_EXE_obol"))).args(["dev", "--config"]).arg(&file).spawn();
    assert_eq!(process.wait(DEADLINE).await.code(), Some(1));
    let said = process.lines_of(Stream::Err).join("\n");
    assert!(said.contains("dev.yaml:2:1") && said.contains("did you mean `connections`"), "{said}");
}
