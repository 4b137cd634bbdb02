use std::path::Path;

use super::*;

/// A stand-in for the binary, which other crates build: it keeps the contract of the command line and nothing
/// more. Its listeners are the tests' own.
fn stand_in(dir: &Path, run: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt as _;
    let script = format!(
        r#"#!/bin/sh
        echo "$OBOL_LOG $1" >&2
        case "$1" in
            run) {run} ;;
            control) ls "$3"; echo "control ready"; exec sleep 1000 ;;
            key) redis-cli -u "$OBOL_REDIS_URL" SET "key:$$" "{{}}" >&2; echo "obol_$$ $*" ;;
        esac"#
    );
    let file = dir.join("obol");
    fs::write(&file, script).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    file
}

#[tokio::test]
async fn it_starts_makes_keys_restarts_and_keeps_every_log() {
    use http::StatusCode;

    use crate::accept::Acceptor;
    use crate::answer;

    let ok = || Acceptor::start(|stream| answer::serve(stream, async |_| Ok(answer::bare(StatusCode::OK))));
    let (public, admin) = (ok(), ok());
    let dir = tempfile::tempdir().unwrap();
    let run = format!(
        "echo listening public http://{}; echo listening admin http://{}; exec sleep 1000",
        public.addr(),
        admin.addr()
    );
    let cluster = Cluster::builder(stand_in(dir.path(), &run))
        .replicas(2)
        .log("trace")
        .workspace("acme", "workspace: acme\n")
        .policy("acme.cedar", "permit (principal, action, resource);\n")
        .start()
        .await;
    assert_eq!(cluster.replica(1).public, public.addr());
    assert_eq!(reqwest::get(cluster.base_url()).await.unwrap().status(), 200);
    assert!(cluster.control().lines().contains(&"acme.yaml".to_owned()));

    let key = cluster.new_key("acme", &["operator", "eu"]).await;
    assert!(key.contains("--workspace acme") && key.ends_with("--tag operator --tag eu"), "{key}");

    cluster.kill9(0).await;
    cluster.restart(0).await;
    cluster.terminate(1);
    cluster.replica(1).process.wait(READY).await;
    cluster.wait_ready().await;
    cluster.restart_control().await;
    assert_eq!(cluster.logs().matches("trace run").count(), 3);
    assert_eq!(cluster.logs().matches("trace control").count(), 2);
}

#[tokio::test]
async fn a_part_that_does_not_start_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let obol = stand_in(dir.path(), "echo OBOL_KEY_TTL_S must be a number >&2; exit 2");
    let why = Cluster::builder(obol).try_start().await.unwrap_err().to_string();
    for part in ["obol run (replica", "exit status: 2", "OBOL_KEY_TTL_S must be a number"] {
        assert!(why.contains(part), "{why}");
    }
}
