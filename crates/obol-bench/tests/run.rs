//! The benchmark without Obol: its own parts agree, and it notices when they do not.
#![allow(clippy::unwrap_used, reason = "a test helper should fail where it is")]

use std::fs;
use std::time::Duration;

use obol_testkit::process::{Proc, Spec};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(60);

fn bench() -> Spec {
    Proc::command(env!("CARGO_BIN_EXE_obol-bench"))
}

#[tokio::test]
async fn direct_and_floor_answer_rightly_and_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.json");
    let run = bench()
        .args([
            "--target",
            "direct,floor",
            "--clients",
            "1,8",
            "--seconds",
            "0.3",
            "--warm-up",
            "0.1",
            "--json",
        ])
        .arg(&file)
        .spawn();
    let status = run.wait(SOON).await;
    assert!(status.success(), "{}", run.lines().join("\n"));
    let report: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 12);
    for cell in cells {
        assert_eq!(cell["wrong"], 0, "{cell}");
        assert!(cell["requests"].as_u64().unwrap() > 0 && cell["of_direct"].is_number(), "{cell}");
        assert_eq!(cell["rss_mib"].is_number(), cell["target"] == "floor", "{cell}");
    }
}

#[tokio::test]
async fn an_interrupt_ends_it_at_once() {
    let run = bench().args(["--target", "direct,floor", "--clients", "4", "--seconds", "600"]).spawn();
    run.wait_for_line(SOON, |line| line.contains("4 clients")).await;
    run.interrupt();
    assert_eq!(run.wait(Duration::from_secs(10)).await.code(), Some(130));
}

#[tokio::test]
async fn a_missing_gateway_is_named() {
    let run = bench().args(["--target", "obol", "--obol", "/nowhere/obol"]).spawn();
    assert_eq!(run.wait(SOON).await.code(), Some(1));
    assert!(run.lines().iter().any(|line| line.contains("/nowhere/obol") && line.contains("--obol")));
}
