//! Rules that hold for the tree as it is checked out: who may depend on whom, generated pages, sizes, places.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use obol_testkit::process::built_binary;
use obol_tests::root;
use serde_json::Value;

/// Below the capabilities.
const BASE: [&str; 3] = ["obol-model", "obol-redis", "obol-dial"];
/// They see what is below them and never each other.
const CAPABILITIES: [&str; 8] = [
    "obol-auth",
    "obol-drain",
    "obol-llm",
    "obol-mcp",
    "obol-meter",
    "obol-peer",
    "obol-session",
    "obol-snapshot",
];
/// Code that no release carries.
const DEVELOPMENT: [&str; 3] = ["obol-bench", "obol-demo", "obol-tests"];

/// What a crate may depend on; `None` for a crate that nobody has placed yet. docs/ARCHITECTURE.md says why.
fn allowed(name: &str) -> Option<Vec<&'static str>> {
    let with = |more: &[&'static str]| Some([&BASE[..], more].concat());
    match name {
        "obol-model" | "obol-testkit" => Some(vec![]),
        // obol-authz decides without any I/O.
        "obol-authz" | "obol-dial" | "obol-redis" => Some(vec!["obol-model"]),
        // Implements the `Transport` of obol-mcp.
        "obol-worker" => Some(vec!["obol-model", "obol-mcp"]),
        // Its channel is authenticated by service JWTs.
        "obol-peer" => with(&["obol-auth"]),
        // A policy set that does not compile is never published.
        // It puts lost ledgers back, under the names that the meter gives its counters.
        "obol-control" => with(&["obol-authz", "obol-meter"]),
        // No handler reaches a raw Redis client, an HTTP client, the control plane or the environment.
        "obol-edge" => Some([&["obol-model", "obol-authz"][..], &CAPABILITIES].concat()),
        "obol" => {
            with(&[&CAPABILITIES[..], &["obol-authz", "obol-control", "obol-edge", "obol-worker"]].concat())
        }
        name if DEVELOPMENT.contains(&name) => Some(vec!["obol-testkit"]),
        name if CAPABILITIES.contains(&name) => with(&[]),
        _ => None,
    }
}

fn packages() -> Vec<Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

#[test]
fn crates_depend_only_downwards() {
    let packages = packages();
    let members: BTreeSet<&str> = packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
    let mut wrong = Vec::new();
    for package in &packages {
        let name = package["name"].as_str().unwrap();
        let Some(allowed) = allowed(name) else {
            wrong.push(format!("{name} has no place in the table: add it here and to docs/ARCHITECTURE.md"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = dependency["name"].as_str().unwrap();
            let in_tests = dependency["kind"] == "dev";
            let fine = allowed.contains(&on)
                || in_tests && (on == "obol-testkit" || DEVELOPMENT.contains(&name))
                // Its tests run a real stdio server through the edge.
                || in_tests && (name, on) == ("obol-edge", "obol-worker");
            if members.contains(on) && !fine {
                wrong.push(format!("{name} must not depend on {on}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn outside_crates_are_used_where_the_map_says() {
    // The crate → the only ones that may have it, tests apart.
    let owners = BTreeMap::from([
        ("axum", vec!["obol-edge", "obol-demo"]),
        ("cedar-policy", vec!["obol-authz"]),
        ("clap", vec!["obol", "obol-bench", "obol-demo"]),
        ("jsonwebtoken", vec!["obol-auth"]),
        (
            "redis",
            vec![
                "obol-auth",
                "obol-control",
                "obol-mcp",
                "obol-meter",
                "obol-peer",
                "obol-redis",
                "obol-session",
                "obol-snapshot",
                "obol-testkit",
            ],
        ),
        // `obol dev` looks at what it has just started, to print commands that work.
        (
            "reqwest",
            vec![
                "obol",
                "obol-bench",
                "obol-dial",
                "obol-llm",
                "obol-mcp",
                "obol-peer",
                "obol-testkit",
                "obol-tests",
            ],
        ),
        ("rmcp", vec!["obol-demo"]),
        ("tokio-postgres", vec!["obol-control"]),
    ]);
    let mut wrong = Vec::new();
    for package in packages() {
        for dependency in package["dependencies"].as_array().unwrap() {
            let (name, on) = (package["name"].as_str().unwrap(), dependency["name"].as_str().unwrap());
            if dependency["kind"].is_null() && owners.get(on).is_some_and(|owners| !owners.contains(&name)) {
                wrong.push(format!("{name} must not depend on {on}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_crate_has_the_lints_of_the_workspace() {
    for package in packages() {
        let manifest = fs::read_to_string(package["manifest_path"].as_str().unwrap()).unwrap();
        assert!(manifest.contains("[lints]\nworkspace = true"), "{}", package["name"]);
    }
}

#[test]
fn the_page_of_the_configuration_is_fresh() {
    let page = Command::new(built_binary("obol").unwrap()).args(["config", "docs"]).output().unwrap();
    let written = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    assert!(page.status.success() && String::from_utf8(page.stdout).unwrap() == written, "run `make docs`");
}

#[test]
fn the_workspace_file_that_is_shipped_is_valid() {
    let check = Command::new(built_binary("obol").unwrap())
        .args(["check", "config/demo.yaml"])
        .env("DEMO_MODEL_SECRET", "x")
        .current_dir(root())
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
}

/// The files that belong to the project.
fn files() -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![root()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name();
            let skipped = ["target", ".git", "node_modules", "__pycache__", ".venv", "proptest-regressions"];
            if skipped.iter().any(|one| name == *one) {
                continue;
            }
            // Links lead out of the tree.
            match entry.file_type().unwrap() {
                kind if kind.is_dir() => folders.push(entry.path()),
                kind if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files
}

fn shown(file: &Path) -> String {
    file.strip_prefix(root()).unwrap_or(file).display().to_string()
}

fn has_extension(file: &Path, extensions: &[&str]) -> bool {
    file.extension().is_some_and(|extension| extensions.iter().any(|one| extension == *one))
}

#[test]
fn no_source_file_is_too_long() {
    const MOST: usize = 700;
    let sources = files().into_iter().filter(|file| has_extension(file, &["rs", "py", "mjs", "sh", "lua"]));
    let long: Vec<String> = sources
        .map(|file| (fs::read_to_string(&file).unwrap().lines().count(), file))
        .filter(|(lines, _)| *lines > MOST)
        .map(|(lines, file)| format!("{}: {lines} lines", shown(&file)))
        .collect();
    assert!(long.is_empty(), "more than {MOST} lines:\n{}", long.join("\n"));
}

#[test]
fn no_file_names_a_place_of_one_machine() {
    // Whoever checks the tree out is somebody else, somewhere else.
    let mut places = ["/root/", "/home/", "/Users/"].map(str::to_owned).to_vec();
    places.push(format!("{}/", root().display()));
    let named: Vec<String> = files()
        .into_iter()
        .filter(|file| !file.ends_with("tests/tests/rules.rs"))
        .filter_map(|file| Some((fs::read_to_string(&file).ok()?, file)))
        .flat_map(|(text, file)| {
            let lines = text.lines().enumerate();
            let hits = lines.filter(|(_, line)| places.iter().any(|place| line.contains(place.as_str())));
            // Inside a JSON string it is an argument of some call, not a place.
            let hits = hits.filter(|(_, line)| !line.contains(r#""path":"/home/"#));
            hits.map(|(number, line)| format!("{}:{}: {}", shown(&file), number + 1, line.trim()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(named.is_empty(), "{}", named.join("\n"));
}
