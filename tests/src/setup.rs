//! Where the real clients and servers are installed, and what runs there.

use std::collections::BTreeMap;
use std::time::Duration;

use obol_testkit::process::{Proc, Spec, Stream};
use serde_json::Value;

use crate::root;

/// A variable of `scripts/setup.sh env`.
///
/// # Panics
/// When it is not set. Such a test must not pass by not running.
pub fn installed(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!(
            "{name} is not set: this test runs real clients and servers. Install them with \
             `scripts/setup.sh core && scripts/setup.sh clients`, then `eval \"$(scripts/setup.sh env)\"` (`make \
             test` does all of it)"
        )
    })
}

/// A Python program of `tests/` under the interpreter that a variable names.
pub fn python(interpreter: &str, program: &str) -> Spec {
    let program = root().join("tests").join(program);
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Proc::command(installed(interpreter)).named(format!("{name} ({interpreter})")).arg(program)
}

/// A Node program of `tests/`.
pub fn node(program: &str) -> Spec {
    let path = root().join("tests").join(program);
    let npm = installed("OBOL_TEST_NPM_DIR");
    Proc::command(installed("OBOL_TEST_NODE")).named(program).env("OBOL_TEST_NPM_DIR", npm).arg(path)
}

/// The entry point of `@modelcontextprotocol/server-everything`.
pub fn everything() -> String {
    let npm = installed("OBOL_TEST_NPM_DIR");
    format!("{npm}/node_modules/@modelcontextprotocol/server-everything/dist/index.js")
}

/// Runs a client to its end and reads the JSON line that it prints.
///
/// # Panics
/// When it fails or does not end in time, with what it wrote.
pub async fn report(spec: Spec, limit: Duration) -> Value {
    finished(&spec.spawn(), limit).await
}

/// Runs a client to its end and reads the JSON lines that it prints, one for each scenario, by their names.
///
/// # Panics
/// When it fails or does not end in time, with what it wrote.
pub async fn scenarios(spec: Spec, limit: Duration) -> BTreeMap<String, Value> {
    let process = spec.spawn();
    let status = process.wait(limit).await;
    let wrote = || process.lines().join("\n");
    assert!(status.success(), "the client ended with {status}:\n{}", wrote());
    let lines = process.lines_of(Stream::Out);
    let found = lines.iter().map(|line| {
        let found: Value =
            serde_json::from_str(line).unwrap_or_else(|e| panic!("no report ({e}):\n{}", wrote()));
        (found["scenario"].as_str().unwrap_or_default().to_owned(), found)
    });
    found.collect()
}

/// Waits for a client's end and reads the JSON line that it prints.
///
/// # Panics
/// When it fails or does not end in time, with what it wrote.
pub async fn finished(process: &Proc, limit: Duration) -> Value {
    let status = process.wait(limit).await;
    let wrote = || process.lines().join("\n");
    assert!(status.success(), "the client ended with {status}:\n{}", wrote());
    let line = process.lines_of(Stream::Out).pop().unwrap_or_else(|| panic!("no report:\n{}", wrote()));
    serde_json::from_str(&line).unwrap_or_else(|e| panic!("no report ({e}):\n{}", wrote()))
}
