//! `obol explain` as the real binary: what it says, and how it exits.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail loudly, as tests do"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const WORKSPACE: &str = r#"workspace: acme
connections:
  github:
    transport: streamable_http
    url: https://mcp.example.com/mcp
    auth: { bearer: { secret: "env:NOT_SET_HERE" } }
    tools: { shy: { hidden: true } }
providers:
  openai: { kind: openai, base_url: https://api.example.com/v1 }
models:
  fast: { targets: [ { provider: openai, model: m, price: { input: 1, output: 20 } } ] }
policies: [acme.cedar]
"#;

const POLICIES: &str = r#"@id("web team")
permit (principal, action, resource) when { principal.tags.contains("team:web") };

@id("no destruction")
forbid (principal, action == Action::"mcp:callTool", resource)
when { resource.destructive } unless { principal.tags.contains("operator") };
@id("paths")
forbid (principal, action == Action::"mcp:callTool", resource)
when { context has arguments && context.arguments.hasTag("path") && context.arguments.getTag("path") like "/etc/*" };
"#;

fn obol(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_obol"))
        .args(args)
        .current_dir(folder)
        .env_clear()
        .output()
        .expect("the binary runs")
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("acme.yaml"), WORKSPACE).unwrap();
    fs::write(folder.path().join("acme.cedar"), POLICIES).unwrap();
    folder
}

/// The exit code, stdout and stderr of a question about `github/log` and the like.
fn explain(folder: &Path, who: &[&str], what: &[&str]) -> (Option<i32>, String, String) {
    let args: Vec<&str> = [["explain", "--workspace", "acme.yaml"].as_slice(), who, what].concat();
    let output = obol(folder, &args);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

const WEB: [&str; 4] = ["--key-id", "k-1", "--tag", "team:web"];
const PLAIN: [&str; 4] = ["--read-only", "true", "--destructive", "false"];

#[test]
fn it_says_what_is_decided_and_by_which_policy_in_which_line() {
    let folder = folder();
    let log = [["--tool", "github/log"].as_slice(), &PLAIN].concat();
    let etc = [log.as_slice(), &["--args", r#"{"path":"/etc/x"}"#]].concat();
    let data = [log.as_slice(), &["--args", r#"{"path":"/data"}"#]].concat();
    let shy = [["--tool", "github/shy"].as_slice(), &PLAIN].concat();
    let destructive = ["--tool", "github/delete_repo", "--destructive", "true"];
    let nobody = ["--key-id", "k-2"];
    for (who, what, code, first, others) in [
        (
            WEB.as_slice(),
            log.as_slice(),
            0,
            "allowed\n",
            ["acme.cedar:1 permit \"web team\" decides", "add `--args JSON`"],
        ),
        (&WEB, &data, 0, "allowed\n", ["with the arguments {\"path\":\"/data\"}): allow", "acme.cedar:1"]),
        (
            &WEB,
            &etc,
            1,
            "denied, forbidden by paths\n",
            ["acme.cedar:7 forbid \"paths\" decides", "in lists): allow"],
        ),
        (
            &WEB,
            &destructive,
            1,
            "denied, forbidden by no destruction\n",
            ["acme.cedar:4 forbid", "`read_only` is taken to be"],
        ),
        (&WEB, &shy, 1, "denied, the workspace file hides the tool `shy`\n", ["acme.cedar:1", "in lists"]),
        (
            &nobody,
            &log,
            1,
            "denied, the connection `github` may not be used: no policy permits it\n",
            ["permit \"web team\" does not count: its conditions do not hold", "key k-2, without tags"],
        ),
        (&WEB, &["--model", "fast"], 0, "allowed\n", ["target 1: openai, high", "Model::\"fast\""]),
        (&WEB, &["--resource", "github/file:///a"], 0, "allowed\n", ["mcp:readResource", "may it be read"]),
    ] {
        let (status, said, complaint) = explain(folder.path(), who, what);
        assert_eq!(status, Some(code), "{what:?}\n{said}{complaint}");
        assert!(said.starts_with(first), "{what:?}\n{said}");
        for other in others {
            assert!(said.contains(other), "{what:?}: {other} in\n{said}");
        }
    }
}

#[test]
fn a_question_that_makes_no_sense_exits_with_2_and_says_what_would() {
    let folder = folder();
    for (who, what, said) in [
        (WEB.as_slice(), ["--tool", "github__log"].as_slice(), "`--tool github/log`"),
        (&WEB, &["--tool", "gti/log"], "there are: `github`"),
        (&WEB, &["--model", "slow"], "there are: `fast`"),
        (&WEB, &["--tool", "github/log", "--args", "[1]"], "expected a JSON object"),
        (&["--key", "obol_x"], &["--tool", "github/log"], "add `--state DIR`"),
        (
            &["--key-id", "k-1", "--state", "nowhere"],
            &["--tool", "github/log"],
            "is no state directory of control",
        ),
        (&WEB, &[], "--tool"),
    ] {
        let (status, out, complaint) = explain(folder.path(), who, what);
        assert_eq!((status, out.as_str()), (Some(2), ""), "{what:?} {complaint}");
        assert!(complaint.contains(said), "{what:?}: {said} in\n{complaint}");
    }
}

#[test]
fn a_key_is_found_in_the_state_directory() {
    let folder = folder();
    let new = ["key", "new", "--workspace", "acme", "--tag", "team:web", "--name", "ci", "--state", "state"];
    let key = String::from_utf8(obol(folder.path(), &new).stdout).unwrap();
    let what = [["--tool", "github/log"].as_slice(), &PLAIN].concat();
    let who = ["--state", "state", "--key", key.trim()];
    let (status, said, complaint) = explain(folder.path(), &who, &what);
    assert_eq!(status, Some(0), "{said}{complaint}");
    assert!(said.contains("\"ci\", tags team:web") && !said.contains(key.trim()), "{said}");
}
