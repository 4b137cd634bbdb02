//! What `obol check` says of workspaces that are wrong: `docs/faults.md` is the table of inputs and messages, and each
//! row of it is run through the real binary.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail loudly, as tests do"
)]

use std::fs;
use std::path::Path;
use std::process::Command;

const PAGE: &str = include_str!("../../../docs/faults.md");

/// One section of the page: files by name, and what is said of them.
#[derive(Debug)]
struct Row {
    title: String,
    files: Vec<(String, String)>,
    said: String,
}

/// A `###` heading, then blocks: those with a file's name after the language are files, the one of `text` is what is
/// said.
fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut lines = PAGE.lines();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix("### ") {
            rows.push(Row { title: title.to_owned(), files: Vec::new(), said: String::new() });
        } else if let (Some(info), Some(row)) = (line.strip_prefix("```"), rows.last_mut()) {
            let block: String =
                lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
            match info.split_once(' ') {
                Some((_, name)) => row.files.push((name.to_owned(), block)),
                None => row.said = block,
            }
        }
    }
    rows
}

/// What the binary says of these files, by their names alone.
fn check(row: &Row, folder: &Path) -> (Option<i32>, String) {
    fs::write(folder.join("allow.cedar"), "permit (principal, action, resource);\n").unwrap();
    for (name, text) in &row.files {
        fs::write(folder.join(name), text).unwrap();
    }
    let yaml = row.files.iter().map(|(name, _)| name).filter(|name| is(name, "yaml"));
    let output = Command::new(env!("CARGO_BIN_EXE_obol"))
        .arg("check")
        .args(yaml)
        .current_dir(folder)
        .env_clear()
        .env("TOKEN", "hunter2")
        .output()
        .expect("the binary runs");
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn is(file: &str, extension: &str) -> bool {
    Path::new(file).extension().is_some_and(|found| found == extension)
}

#[test]
fn every_fault_of_the_page_is_reported_as_it_stands_there() {
    let rows = rows();
    assert!(rows.len() >= 25, "{}", rows.len());
    let mut wrong = Vec::new();
    for row in &rows {
        let folder = tempfile::tempdir().unwrap();
        let (code, said) = check(row, folder.path());
        assert!(!said.contains("hunter2"), "{said}");
        let faulty = said.contains("error: ");
        if said != row.said || code != Some(i32::from(faulty)) {
            wrong.push(format!("### {}\nexit code {code:?}\n{said}", row.title));
        }
    }
    assert!(wrong.is_empty(), "what is said differs from docs/faults.md:\n{}", wrong.join("\n"));
}

#[test]
fn every_fault_has_its_file_line_and_column() {
    for row in rows() {
        let faults: Vec<&str> = row.said.lines().filter(|l| !l.starts_with(' ')).collect();
        assert!(!faults.is_empty(), "{}", row.title);
        for fault in faults.iter().filter(|fault| fault.starts_with("error: ")) {
            let mut parts = fault.trim_start_matches("error: ").splitn(4, ':');
            let (file, line, column) = (parts.next(), parts.next(), parts.next());
            assert!(file.is_some_and(|f| is(f, "yaml") || is(f, "cedar")), "{fault}");
            let number = |text: Option<&str>| text.is_some_and(|t| t.parse::<u32>().is_ok_and(|n| n > 0));
            assert!(number(line) && number(column), "{fault}");
        }
    }
}
