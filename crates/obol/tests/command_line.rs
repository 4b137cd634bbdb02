//! The real binary at its command line: what it prints where, and how it exits.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail loudly, as tests do"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn obol(args: &[&str], env: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_obol"))
        .args(args)
        .env_clear()
        .envs(env.iter().copied())
        .output()
        .expect("the binary runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn help_and_version_are_results_and_no_error() {
    for args in [["--help"].as_slice(), &["--version"], &["run", "--help"], &["key", "new", "--help"]] {
        let output = obol(args, &[]);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
    }
    assert_eq!(stdout(&obol(&["--version"], &[])), concat!("obol ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn bad_usage_exits_with_2_and_says_what_is_right() {
    for (args, expected) in [
        (["runn"].as_slice(), "'run'"),
        (&["check"], "<FILE>"),
        (&["key", "new", "--workspace", "Acme", "--state", "s"], "a lower-case letter"),
        (&["key", "new", "--workspace", "acme", "--expires-in", "soon"], "`30d`"),
        (&["key", "new", "--workspace", "acme", "--budget", "week=5"], "expected `day`, `month` or `total`"),
        (&["key", "new", "--workspace", "acme", "--budget", "day"], "such as `day=5`"),
        (&["key", "new", "--workspace", "acme", "--budget", "day=9007200"], "from 0 to 9007199.254740991"),
        (&["key", "new", "--workspace", "acme", "--concurrency", "0"], "1..=9007199254740991"),
        (&["run", "--port", "80"], "--port"),
    ] {
        let output = obol(args, &[]);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn a_bad_environment_exits_with_2_and_names_everything_at_once() {
    let env = [
        ("OBOL_REDIS_URL", "hunter2"),
        ("OBOL_CREDENTIAL_KEY", "hunter2"),
        ("OBOL_DRAIN_TIMEOUT_S", "soon"),
        ("OBOL_LISTEN_ADMIN", "hunter2"),
    ];
    for command in [["run"].as_slice(), &["run", "--print-config"]] {
        let output = obol(command, &env);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("3 problems"), "{text}");
        for (name, _) in env {
            assert!(text.contains(name), "{name} in {text}");
        }
        assert!(text.contains("`soon`") && text.contains("whole seconds; 1 to 3600 (default 30)"), "{text}");
        assert!(text.contains("unknown variable `OBOL_LISTEN_ADMIN`"), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn print_config_shows_what_holds_and_no_secret() {
    let env = [
        ("OBOL_REDIS_URL", "redis://me:hunter2@redis:6379/1"),
        ("OBOL_CREDENTIAL_KEY", KEY),
        ("OBOL_SERVICE_JWT_SECRET", "hunter2hunter2hunter2hunter2hunter2"),
        ("OBOL_STATE_DIR", "/var/lib/obol"),
    ];
    let control = ["control", "--workspaces", "/etc/obol", "--print-config"];
    for args in [["run", "--print-config"].as_slice(), &["dev", "--print-config"], &control] {
        let output = obol(args, &env);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let text = stdout(&output);
        assert!(text.starts_with(&format!("# obol {}\n", args[0])), "{text}");
        assert!(!text.contains("hunter2") && !text.contains("AAECAwQF"), "{text}");
        assert_eq!(stderr(&output), "");
    }
    let text = stdout(&obol(&control, &env));
    assert!(text.contains("OBOL_REDIS_URL=redis://[secret]@redis:6379/1\n"), "{text}");
    assert!(text.contains("OBOL_WORKSPACES_DIR=/etc/obol  # --workspaces\n"), "{text}");
    assert!(text.contains("OBOL_STATE_DIR=/var/lib/obol\n"), "{text}");
}

/// Twelve workspace files with one fault each, what is said, and at which line.
const FAULTY: [(&str, &str, &str); 12] = [
    ("workspace: [", ":1:12: unclosed bracket", ""),
    ("environment: production\n", ":1:1: the file names no workspace", "add `workspace: NAME`"),
    ("workspace: Acme\n", ":1:12: `Acme` is no workspace id", "a lower-case letter"),
    (
        "workspace: acme\nproviderz: {}\n",
        ":2:1: a workspace file has no field `providerz`",
        "did you mean `providers`?",
    ),
    ("workspace: acme\nworkspace: acme\n", ":2:1: `workspace` stands there twice", "remove one of the two"),
    ("workspace: acme\nfrozen: maybe\n", ":2:9: `frozen` must be true or false", ""),
    (
        "workspace: acme\nconnections:\n  My_Server: { transport: stdio, command: [x] }\n",
        ":3:3: `My_Server` is no connection name",
        "a lower-case letter",
    ),
    (
        "workspace: acme\nconnections:\n  a: { transport: carrier-pigeon }\n",
        ":3:19: `transport` cannot be `carrier-pigeon`",
        "`streamable_http`, `stdio`",
    ),
    (
        "workspace: acme\nconnections:\n  a: { transport: streamable_http, url: not-a-url }\n",
        ":3:41: `url` is no URL",
        "`https://host.example/path`",
    ),
    (
        "workspace: acme\nproviders:\n  p:\n    kind: openai\n    base_url: https://api.example.com/v1\n    \
         auth: { bearer: hunter2 }\n",
        ":6:21: `bearer` must not be a literal credential",
        "`{ secret: \"env:NAME\" }`",
    ),
    (
        "workspace: acme\nmodels:\n  m:\n    targets: [{ provider: nobody, model: x, free: true }]\n",
        ":4:27: there is no provider `nobody`",
        "add it under `providers`",
    ),
    ("workspace: acme\npolicies: [absent.cedar]\n", ":2:12: the policy file `absent.cedar`", "no such file"),
];

#[test]
fn check_names_file_line_and_reason_of_twelve_faults() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (text, place, reason)) in FAULTY.into_iter().enumerate() {
        let file = dir.path().join(format!("w{i}.yaml"));
        fs::write(&file, text).unwrap();
        let output = obol(&["check", file.to_str().unwrap()], &[]);
        let said = stdout(&output);
        assert_eq!(output.status.code(), Some(1), "{text}\n{said}");
        assert!(said.starts_with(&format!("error: {}{place}", file.display())), "{text}\n{said}");
        assert!(said.contains(reason), "{text}\n{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
}

fn workspace(dir: &Path, file: &str, name: &str) -> String {
    fs::write(dir.join("allow.cedar"), "permit(principal, action, resource);").unwrap();
    let path = dir.join(file);
    let text = format!(
        "workspace: {name}\n\
         connections:\n  docs:\n    transport: streamable_http\n    url: https://mcp.example.com/mcp\n    \
         auth: {{ bearer: {{ secret: \"env:DOCS_TOKEN\" }} }}\n\
         policies: [allow.cedar]\n"
    );
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn check_tells_valid_files_from_others_and_reports_all() {
    let dir = tempfile::tempdir().unwrap();
    let good = workspace(dir.path(), "good.yaml", "acme");
    let twin = workspace(dir.path(), "twin.yaml", "acme");
    let env = [("DOCS_TOKEN", "hunter2")];

    let output = obol(&["check", &good], &env);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    let valid = format!("{good}: valid, workspace `acme`, 1 connection, 0 models, 1 policy file\n");
    assert_eq!(stdout(&output), valid);

    let output = obol(&["check", &good, "absent.yaml", &twin], &env);
    let said = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with(&valid), "{said}");
    assert!(said.contains("error: absent.yaml: cannot be read: no such file"), "{said}");
    assert!(
        said.contains(&format!("error: {twin}:1:12: the workspace `acme` is defined by `{good}` too")),
        "{said}"
    );

    let output = obol(&["check", &good], &[]);
    assert!(
        stdout(&output).contains("the environment variable `DOCS_TOKEN` is not set"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn a_key_is_shown_once_listed_without_itself_and_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let env = [("OBOL_STATE_DIR", state.to_str().unwrap())];

    let args = [
        "key",
        "new",
        "--workspace",
        "acme",
        "--name",
        "ci bot",
        "--tag",
        "a",
        "--tag",
        "b",
        "--expires-in",
        "30d",
    ];
    let output = obol(&args, &env);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let key = stdout(&output).trim_end().to_owned();
    assert!(key.parse::<obol_model::VirtualKey>().is_ok(), "stdout has the key and nothing else");
    let id = stderr(&output).split(' ').nth(1).unwrap().to_owned();
    assert!(
        stderr(&output).starts_with(&format!("key {id} of workspace acme, expires: 2")),
        "{}",
        stderr(&output)
    );
    assert_eq!(obol(&["key", "new", "--workspace", "other"], &env).status.code(), Some(0));

    let listed = stdout(&obol(&["key", "list", "--workspace", "acme"], &env));
    assert_eq!(listed.lines().count(), 2, "{listed}");
    let row = listed.lines().nth(1).unwrap();
    assert!(row.starts_with(&format!("{id}  acme ")) && row.contains("  active  "), "{listed}");
    assert!(row.ends_with("  ci bot  a,b") && !listed.contains(&key), "{listed}");
    assert_eq!(stdout(&obol(&["key", "list"], &env)).lines().count(), 3);

    let json: serde_json::Value =
        serde_json::from_str(&stdout(&obol(&["key", "list", "--workspace", "acme", "--json"], &env)))
            .unwrap();
    assert_eq!((&json[0]["key_id"], &json[0]["state"]), (&id.as_str().into(), &"active".into()));

    for (command, state) in [("disable", "disabled"), ("enable", "active"), ("revoke", "revoked")] {
        let changed = obol(&["key", command, &id], &env);
        assert_eq!(stdout(&changed), format!("{command}d {id}\n"), "{}", stderr(&changed));
        assert!(
            stderr(&changed).contains("within a second while `obol control` runs"),
            "{}",
            stderr(&changed)
        );
        assert!(stdout(&obol(&["key", "list"], &env)).contains(&format!("  {state}  ")));
    }
    let revived = obol(&["key", "enable", &id], &env);
    assert_eq!(
        stderr(&revived),
        format!("error: the key `{id}` is revoked, which is for ever; make a new one\n")
    );

    let unknown = obol(&["key", "revoke", "k-unknown"], &env);
    assert_eq!(unknown.status.code(), Some(1));
    assert_eq!(stderr(&unknown), "error: there is no key `k-unknown`\n");
    let pasted = obol(&["key", "revoke", &key], &env);
    assert!(stderr(&pasted).contains("this is a key, not the id of one"), "{}", stderr(&pasted));
    assert!(!stderr(&pasted).contains(&key));
    let nowhere = obol(&["key", "list"], &[]);
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(
        stderr(&nowhere).contains("OBOL_STATE_DIR: not set, and there is no `--state`"),
        "{}",
        stderr(&nowhere)
    );
}

#[test]
fn a_key_may_have_budgets_and_limits_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let env = [("OBOL_STATE_DIR", state.to_str().unwrap())];
    let new = |more: &[&str]| obol(&[&["key", "new", "--workspace", "acme"], more].concat(), &env);

    let twice = new(&["--budget", "day=5", "--budget", "day=6"]);
    assert_eq!(twice.status.code(), Some(2));
    assert_eq!(stderr(&twice), "error: `--budget day=…` is given twice: a key has one budget per window\n");
    assert!(!state.exists(), "nothing is made");

    let all = [
        ["--name", "ci"],
        ["--budget", "day=5"],
        ["--budget", "total=100.50"],
        ["--requests-per-minute", "60"],
        ["--tokens-per-minute", "9007199254740991"],
        ["--concurrency", "4"],
    ];
    assert_eq!(new(&all.concat()).status.code(), Some(0));
    let listed = stdout(&obol(&["key", "list"], &env));
    let (titles, row) = listed.split_once('\n').unwrap();
    assert!(titles.contains("  BUDGETS  ") && titles.contains("  LIMITS  "), "{listed}");
    let shown =
        "  never    day=5,total=100.5  requests=60/min,tokens=9007199254740991/min,concurrency=4  ci    -\n";
    assert!(row.ends_with(shown), "{listed}");
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&obol(&["key", "list", "--json"], &env))).unwrap();
    let budgets = r#"[{"window":"day","limit_usd":"5"},{"window":"total","limit_usd":"100.5"}]"#;
    assert_eq!(json[0]["budgets"], serde_json::from_str::<serde_json::Value>(budgets).unwrap());
    let limits = r#"{"requests_per_minute":60,"tokens_per_minute":9007199254740991,"concurrency":4}"#;
    assert_eq!(json[0]["limits"], serde_json::from_str::<serde_json::Value>(limits).unwrap());

    assert_eq!(new(&["--budget", "month=0"]).status.code(), Some(0));
    assert!(stdout(&obol(&["key", "list"], &env)).contains("  month=0 "), "nothing may be spent");
}

#[test]
fn what_is_not_there_is_named_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let mistyped = dir.path().join("sttae");
    let (state, mistyped) = (state.to_str().unwrap(), mistyped.to_str().unwrap());
    assert_eq!(obol(&["key", "new", "--workspace", "acme", "--state", state], &[]).status.code(), Some(0));
    for args in [
        ["key", "list"].as_slice(),
        &["key", "revoke", "k-1"],
        &["workspace", "list"],
        &["workspace", "show", "acme"],
        &["workspace", "unpublish", "acme"],
    ] {
        let output = obol(&[args, &["--state", mistyped]].concat(), &[]);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let said = stderr(&output);
        assert!(
            said.starts_with(&format!("error: `{mistyped}` is no state directory: pass the one of")),
            "{said}"
        );
    }
    assert!(!Path::new(mistyped).exists(), "looking makes nothing");

    let made = obol(&["key", "new", "--workspace", "acmee", "--state", state], &[]);
    assert_eq!(made.status.code(), Some(0));
    let said = stderr(&made);
    assert!(said.contains("warning: the workspace `acmee` is not published, none is, so far"), "{said}");
    let shown = obol(&["workspace", "show", "acmee", "--state", state], &[]);
    let said = stderr(&shown);
    assert_eq!(shown.status.code(), Some(1));
    assert_eq!(said, "error: no workspace `acmee` was ever published here; nor was any other\n");
    let rollback = obol(&["workspace", "rollback", "acme", "--state", state], &[]);
    assert!(
        stderr(&rollback).contains("set OBOL_CREDENTIAL_KEY to what control has"),
        "{}",
        stderr(&rollback)
    );
    let bad = obol(&["workspace", "rollback", "acme", "--to", "7", "--state", state], &[]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(stderr(&bad).contains("expected `EPOCH.NUMBER`, such as `1.7`"), "{}", stderr(&bad));

    let publish = obol(&["publish", "x.yaml", "--state", state], &[]);
    let said = stderr(&publish);
    assert_eq!(publish.status.code(), Some(2));
    assert!(said.contains("OBOL_REDIS_URL") && said.contains("OBOL_CREDENTIAL_KEY"), "{said}");
    let env = [("OBOL_REDIS_URL", "redis://127.0.0.1:1"), ("OBOL_CREDENTIAL_KEY", KEY)];
    let good = workspace(dir.path(), "good.yaml", "acme");
    let twin = workspace(dir.path(), "twin.yaml", "acme");
    let faulty = dir.path().join("faulty.yaml");
    fs::write(&faulty, "workspace: x\nfrozen: maybe\n").unwrap();
    let env_and = [env[0], env[1], ("DOCS_TOKEN", "hunter2")];
    let publish = obol(&["publish", &good, &twin, faulty.to_str().unwrap(), "--state", state], &env_and);
    let said = stderr(&publish);
    assert_eq!((publish.status.code(), stdout(&publish).as_str()), (Some(1), ""));
    assert!(said.contains("faulty.yaml:2:9: `frozen` must be true or false"), "{said}");
    assert!(said.contains("the workspace `acme` is defined by"), "{said}");
    let publish = obol(&["publish", &good, "--state", state], &env_and);
    assert_eq!((publish.status.code(), stdout(&publish).as_str()), (Some(1), ""));
    assert!(stderr(&publish).contains("cannot connect to Redis at `127.0.0.1:1`"), "{}", stderr(&publish));

    let database = obol(&["key", "list"], &[("OBOL_DATABASE_URL", "mysql://me:hunter2@db/x")]);
    let said = stderr(&database);
    assert_eq!(database.status.code(), Some(2));
    assert!(said.contains("OBOL_DATABASE_URL") && said.contains("postgres://USER:PASSWORD@HOST"), "{said}");
    let away = obol(&["key", "list"], &[("OBOL_DATABASE_URL", "postgres://me:hunter2@127.0.0.1:1/x")]);
    let more = stderr(&away);
    assert_eq!(away.status.code(), Some(1));
    assert!(more.contains("the database at `127.0.0.1:1` cannot be used"), "{more}");
    assert!(!said.contains("hunter2") && !more.contains("hunter2"), "{said}{more}");
}
