//! The launchers, with a stand-in for `obol` that shows how it was called.
#![allow(clippy::unwrap_used, reason = "a test helper should fail where it is")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::kill;
use nix::unistd::Pid;
use obol_testkit::eventually;
use obol_testkit::process::{Proc, Spec, is_running};

const DEMO: &str = env!("CARGO_BIN_EXE_obol-demo");
const SOON: Duration = Duration::from_secs(20);

fn stand_in(dir: &Path, script: &str) -> PathBuf {
    let file = dir.join("obol");
    fs::write(&file, format!("#!/bin/sh\n{script}")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    file
}

/// A launcher on ports of its own, so that tests run beside each other and beside a demo.
fn launcher(command: &str, dir: &Path, obol: &Path) -> Spec {
    fs::write(dir.join("demo.yaml"), "workspace: demo\npolicies: [\"demo.cedar\"]\n").unwrap();
    fs::write(dir.join("demo.cedar"), "permit (principal, action, resource);\n").unwrap();
    Proc::command(DEMO)
        .arg(command)
        .args(["--mcp-listen", "127.0.0.1:0", "--model-listen", "127.0.0.1:0", "--config"])
        .arg(dir.join("demo.yaml"))
        .arg("--obol")
        .arg(obol)
}

/// The processes whose parent is this one.
fn children(parent: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

async fn all_end(pids: &[u32]) {
    eventually(SOON, || async { !pids.iter().any(|pid| is_running(*pid)) }).await;
}

#[tokio::test]
async fn the_demo_runs_obol_dev_with_what_it_needs_and_passes_signals_on() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
        echo "args: $*"; echo "secret: $DEMO_MODEL_SECRET, listen: $OBOL_LISTEN"; command -v obol-demo
        trap 'echo told; exit 75' TERM INT
        echo up; while :; do sleep 0.02; done"#;
    let obol = stand_in(dir.path(), script);
    let demo = launcher("demo", dir.path(), &obol)
        .args(["--", "--print-config"])
        .env("OBOL_LISTEN", "127.0.0.1:8888")
        .spawn();
    demo.wait_for_line(SOON, |line| line == "up").await;
    let said = demo.lines().join("\n");
    let config = dir.path().join("demo.yaml");
    for expected in [
        &format!("args: dev --config {} --print-config", config.display()),
        "secret: demo-provider-secret, listen: 127.0.0.1:8888",
        DEMO,
    ] {
        assert!(said.contains(expected), "{said}");
    }
    let children = children(demo.id());
    assert!(children.len() >= 3, "two upstreams and obol");
    demo.terminate();
    assert_eq!(demo.wait(SOON).await.code(), Some(75), "obol's exit code is passed on");
    demo.wait_for_line(SOON, |line| line == "told").await;
    all_end(&children).await;
}

#[tokio::test]
async fn nothing_is_left_when_the_demo_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let obol = stand_in(dir.path(), "echo up; exec sleep 1000");
    let demo = launcher("demo", dir.path(), &obol).spawn();
    demo.wait_for_line(SOON, |line| line == "up").await;
    let children = children(demo.id());
    demo.kill9().await;
    all_end(&children).await;
}

#[tokio::test]
async fn what_is_missing_is_named_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    for command in ["demo", "cluster"] {
        let missing = launcher(command, dir.path(), &dir.path().join("nowhere")).spawn();
        assert_eq!(missing.wait(SOON).await.code(), Some(1));
        assert!(missing.lines().join("\n").contains("cargo build -p obol"), "{:?}", missing.lines());

        let lost = Proc::command(DEMO).args([command, "--config", "/nowhere/demo.yaml"]).spawn();
        assert_eq!(lost.wait(SOON).await.code(), Some(1));
        assert!(lost.lines().join("\n").contains("/nowhere/demo.yaml"), "{:?}", lost.lines());
    }
}

/// Keeps the contract of the command line: listeners (which answer everything with 200), readiness, and keys.
const CLUSTER_STAND_IN: &str = r#"
    case "$1" in
        run) exec python3 -u -c '
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
for kind in ("public", "admin"):
    print("listening", kind, "http://127.0.0.1:%d" % server.server_port)
server.serve_forever()' ;;
        control) ls "$3"; echo "$DEMO_MODEL_SECRET"; echo "control ready"; exec sleep 1000 ;;
        key) redis-cli -u "$OBOL_REDIS_URL" SET "key:$$" "{}" >&2; echo "obol_key_$$" ;;
    esac"#;

#[tokio::test]
async fn the_cluster_starts_tells_how_to_use_it_and_ends() {
    let dir = tempfile::tempdir().unwrap();
    let obol = stand_in(dir.path(), CLUSTER_STAND_IN);
    let cluster = launcher("cluster", dir.path(), &obol)
        .args(["--listen", "127.0.0.1:0", "--replicas", "2"])
        .env("HOME", dir.path())
        .spawn();
    cluster.wait_for_line(SOON, |line| line.contains("Ctrl-C ends all of it")).await;
    let said = cluster.lines();
    let url =
        said.iter().find_map(|line| line.strip_prefix("Obol runs on ")?.split_once(',').map(|(url, _)| url));
    for backend in ["0", "1"] {
        let response = reqwest::get(url.unwrap()).await.unwrap();
        assert_eq!(response.headers().get("x-obol-backend").unwrap(), backend);
    }
    assert_eq!(said.iter().filter(|line| line.contains("kill -9 ")).count(), 2, "{said:#?}");

    let replica = said.iter().find_map(|line| line.split("kill -9 ").nth(1)?.split(' ').next()).unwrap();
    let replica = Pid::from_raw(replica.parse().unwrap());
    kill(replica, nix::sys::signal::Signal::SIGKILL).unwrap();
    cluster.wait_for_line(SOON, |line| line.contains("the others go on")).await;
    assert_eq!(reqwest::get(url.unwrap()).await.unwrap().headers().get("x-obol-backend").unwrap(), "1");

    let children = children(cluster.id());
    cluster.interrupt();
    assert!(cluster.wait(SOON).await.success());
    all_end(&children).await;
}
