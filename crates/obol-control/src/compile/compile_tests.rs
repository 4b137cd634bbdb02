use std::fs;
use std::num::NonZeroU32;

use obol_model::snapshot::{Auth, Namespace, Sealed, Transport, WorkerMode};
use obol_model::{ConnectionName, ModelName};

use super::*;

pub(super) fn env(name: &str) -> Option<String> {
    match name {
        "TOKEN" => Some("s3cret-token".to_owned()),
        "EMPTY" => Some(String::new()),
        "NEWLINE" => Some("a\nb".to_owned()),
        _ => None,
    }
}

pub(super) fn compile(files: &[(&str, &str)], ring: Option<&KeyRing>) -> Result<Compiled, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    compile_file(&folder.path().join("acme.yaml"), &CompileOptions { key_ring: ring, env: &env }).map_err(
        |faults| {
            let text: Vec<String> = faults.iter().map(ToString::to_string).collect();
            text.join("\n").replace(&format!("{}/", folder.path().display()), "")
        },
    )
}

/// The faults of a file that has a workspace and a policy in its first two lines.
pub(super) fn faults(rest: &str) -> String {
    let yaml = format!("workspace: acme\npolicies: [a.cedar]\n{rest}");
    compile(&[("acme.yaml", &yaml), ("a.cedar", "permit(principal, action, resource);")], None)
        .err()
        .unwrap_or_default()
}

const FULL: &str = r#"
workspace: acme
environment: production
session_binding: workspace
frozen: false
connections:
  github:
    transport: streamable_http
    url: https://mcp.example.com/mcp
    auth: { bearer: { secret: "env:TOKEN" } }
    timeout_s: 20
    price_per_call: 0.001
    tools:
      delete_repo: { alias: rm-repo, hidden: true, price_per_call: 0.25, destructive: true, read_only: false }
  files:
    transport: stdio
    command: ["npx", "-y", "server", 8080]
    env: { PLAIN: yes, PORT: 0800, API_KEY: { secret: "file:key.txt" } }
    mode: per_session
  docs: { transport: streamable_http, url: "http://docs.internal:3000/mcp", namespace: none }
  local: { transport: streamable_http, url: "http://127.0.0.1:3000/mcp?x=1", allow_private: true }
providers:
  openai:
    kind: openai
    base_url: "https://api.example.com/v1"
    auth: { header: { name: X-Api-Key, value: { secret: "env:TOKEN" } } }
models:
  fast:
    max_output: 4096
    first_byte_timeout_s: 300
    idle_timeout_s: 45
    targets:
      - { provider: openai, model: gpt-x-mini, price: { input: 0.15, output: 0.60, cached_input: 0.075 }, stream_usage: false, weight: 70 }
      - { provider: openai, model: other, price: { input: 0.1, output: 10 } }
      - { provider: openai, model: gratis, free: true }
policies: ["acme.cedar"]
"#;

#[test]
fn a_full_file_compiles_to_what_it_says() {
    let ring = KeyRing::ephemeral().unwrap();
    let files =
        [("acme.yaml", FULL), ("acme.cedar", "permit(principal, action, resource);"), ("key.txt", "k3y\n")];
    let compiled = compile(&files, Some(&ring)).unwrap();
    let workspace = &compiled.workspace;
    let open = |sealed: &Sealed| ring.open(&workspace.workspace_id, sealed).unwrap().expose().clone();
    assert_eq!(compiled.warnings, []);
    assert_eq!((workspace.environment.as_str(), workspace.frozen), ("production", false));
    assert_eq!(workspace.session_binding, SessionBinding::Workspace);
    assert_eq!(compiled.policy.files[0].name, "acme.cedar");

    let connection = |name: &str| &workspace.connections[&name.parse::<ConnectionName>().unwrap()];
    let github = connection("github");
    let Transport::StreamableHttp { auth: Some(Auth::Bearer(token)), allow_private: false, .. } =
        &github.transport
    else {
        panic!("{github:?}")
    };
    assert_eq!(open(token), "s3cret-token");
    assert_eq!((github.timeout_s, github.price_per_call.nanos()), (Some(20), 1_000_000));
    let rule = &github.tools["delete_repo"];
    assert_eq!(
        (rule.alias.as_deref(), rule.hidden, rule.destructive, rule.read_only),
        (Some("rm-repo"), true, Some(true), Some(false))
    );
    assert_eq!(rule.price_per_call.unwrap().nanos(), 250_000_000);

    let Transport::Stdio { command, env, mode: WorkerMode::PerSession } = &connection("files").transport
    else {
        panic!()
    };
    assert_eq!(command, &["npx", "-y", "server", "8080"]);
    // As written: `yes` is no boolean, and a leading zero stays.
    assert_eq!(
        env.iter().map(|(k, v)| (k.as_str(), open(v))).collect::<Vec<_>>(),
        [("API_KEY", "k3y".to_owned()), ("PLAIN", "yes".to_owned()), ("PORT", "0800".to_owned()),]
    );
    assert_eq!(connection("docs").namespace, Namespace::None);

    let provider = workspace.providers.values().next().unwrap();
    let Some(Auth::Header { name, value }) = &provider.auth else { panic!() };
    assert_eq!((name.as_str(), open(value).as_str()), ("x-api-key", "s3cret-token"));
    let model = &workspace.models[&"fast".parse::<ModelName>().unwrap()];
    let prices: Vec<_> = model
        .targets
        .iter()
        .map(|t| {
            [t.price.base.input, t.price.base.cached_input, t.price.base.output]
                .map(|p| p.times(1_000_000).nanos())
        })
        .collect();
    assert_eq!(
        prices,
        [[150_000_000, 75_000_000, 600_000_000], [100_000_000, 100_000_000, 10_000_000_000], [0, 0, 0]]
    );
    assert_eq!(model.targets.iter().map(|t| t.stream_usage).collect::<Vec<_>>(), [false, true, true]);
    let timeouts = [model.first_byte_timeout_s, model.idle_timeout_s].map(|s| s.map(NonZeroU32::get));
    assert_eq!(timeouts, [Some(300), Some(45)]);
    assert_eq!(model.targets.iter().map(|t| t.weight).collect::<Vec<_>>(), [NonZeroU32::new(70), None, None]);
}

#[test]
fn the_smallest_file_compiles_and_warns_that_it_denies_everything() {
    let compiled = compile(&[("acme.yaml", "workspace: acme\n")], None).unwrap();
    assert_eq!(compiled.workspace.environment, "default");
    let warnings: Vec<_> = compiled.warnings.iter().map(|w| w.message.as_str()).collect();
    assert_eq!(warnings, ["everything is denied: the workspace has no policy"]);
    let files = [("acme.yaml", "workspace: acme\npolicies: [a.cedar]\n"), ("a.cedar", "// nothing yet\n")];
    assert_eq!(compile(&files, None).unwrap().warnings[0].line, 2);
}

#[test]
fn a_rule_on_what_the_workspace_does_not_have_is_a_warning_with_its_place() {
    let policy = "permit (principal, action, resource);\nforbid (principal, action, resource == Tool::\"gti/log\");\n\
                  forbid (principal, action, resource == Model::\"fsat\");\n";
    let workspace = "workspace: acme\nconnections:\n  git: { transport: stdio, command: [git-mcp] }\npolicies: [a.cedar]\n";
    let files = [("acme.yaml", workspace), ("a.cedar", policy)];
    let warnings: Vec<String> =
        compile(&files, None).unwrap().warnings.iter().map(ToString::to_string).collect();
    assert!(
        warnings[0].contains("a.cedar:2:") && warnings[0].contains("no connection `gti`"),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("`git`"), "{warnings:?}");
    assert!(warnings[1].contains("a.cedar:3:") && warnings[1].contains("no model `fsat`"), "{warnings:?}");
}

#[test]
fn each_fault_has_a_place_and_a_way_out() {
    const PROVIDER: &str = "providers: { p: { kind: openai, base_url: 'https://x.example/v1' } }\n";
    let model = |target: &str| format!("{PROVIDER}models:\n  m: {{ targets: [{target}] }}\n");
    let http = |rest: &str| format!("connections:\n  c: {{ transport: streamable_http, {rest} }}\n");
    let stdio = |rest: &str| format!("connections:\n  c: {{ transport: stdio, {rest} }}\n");
    let table: Vec<(String, &str)> = vec![
        ("conections: {}".into(), "acme.yaml:3:1: a workspace file has no field `conections`\n  help: did you mean `connections`?"),
        ("frozen: maybe".into(), "acme.yaml:3:9: `frozen` must be true or false, this is text"),
        ("environment: 12".into(), "acme.yaml:3:14: `environment` must be text, this is a number\n  help: write it in quotes: `\"12\"`"),
        ("environment: ''".into(), "acme.yaml:3:14: `environment` must have 1 to 64 characters\n  help: write one such as `production`, or leave it out for `default`"),
        ("connections: []".into(), "acme.yaml:3:14: `connections` must be a mapping, this is a list"),
        ("workspace: b".into(), "acme.yaml:3:1: `workspace` stands there twice\n  help: remove one of the two"),
        ("session_binding: key".into(), "acme.yaml:3:18: `session_binding` cannot be `key`\n  help: known here: `principal`, `workspace`"),
        ("budgets: 5".into(), "acme.yaml:3:10: `budgets` must be a list, this is a number"),
        ("a: [".into(), "acme.yaml:3:4: "),
        ("a: *b".into(), "acme.yaml:3:4: reference to unknown value\n  help: this is no YAML any more: look at this line and the one before"),
        // connections
        ("connections: { my_server: { transport: stdio, command: [a] } }".into(), "acme.yaml:3:16: `my_server` is no connection name: a lower-case letter, then up to 19 of `a-z`, `0-9` and `-`, and no URI scheme in use"),
        ("connections:\n  c: { url: 'https://x.example' }".into(), "acme.yaml:4:6: connection `c` has no `transport`\n  help: add `transport: streamable_http` with a `url`, or `transport: stdio` with a `command`"),
        ("connections:\n  c: { transport: http, url: 'https://x.example' }".into(), "acme.yaml:4:19: `transport` cannot be `http`\n  help: known here: `streamable_http`, `stdio`, `sse`"),
        ("connections:\n  c: { transport: sse, url: 'https://x.example' }".into(), "acme.yaml:4:19: `transport: sse` is not supported by this release yet\n  help: use `streamable_http`; most servers offer it by now"),
        (http("timeout_s: 5"), "acme.yaml:4:6: connection `c` has no `url`\n  help: add `url: https://host.example/mcp`"),
        (http("url: 'https://x.example', stateful: true"), "acme.yaml:4:72: `stateful: true` is not supported by this release yet\n  help: remove it if the server keeps nothing in its session: it is renewed every 45 seconds"),
        (http("url: 'mcp.example.com/mcp'"), "acme.yaml:4:41: `url` is no URL: relative URL without a base\n  help: write it like `https://host.example/path`"),
        (http("url: 'ftp://x.example/'"), "acme.yaml:4:41: `url` has the scheme `ftp`, not http or https\n  help: write it like `https://host.example/path`"),
        (http("url: 'https://me:pw@x.example/'"), "acme.yaml:4:41: `url` must not contain credentials\n  help: use `auth`"),
        (http("url: 'https://x.example/#a'"), "acme.yaml:4:41: `url` must not contain a fragment\n  help: remove what follows `#`"),
        (http("url: 'http://localhost:3000/'"), "acme.yaml:4:41: `localhost` is a loopback or private address\n  help: add `allow_private: true` if that is meant"),
        (http("url: 'http://[::ffff:10.0.0.1]/'"), "acme.yaml:4:41: `[::ffff:a00:1]` is a loopback or private address\n  help: add `allow_private: true` if that is meant"),
        (http("allow_private: true, url: 'http://169.254.169.254/'"), "acme.yaml:4:62: `169.254.169.254` is a link-local or metadata address, which is never dialled\n  help: name the server that is meant; no setting opens such an address"),
        (http("url: 'https://x.example/', command: [a]"), "acme.yaml:4:63: `command` does not go with `transport: streamable_http`\n  help: remove it, or use `transport: stdio`"),
        (http("url: 'https://x.example/', timeout_s: 0"), "acme.yaml:4:74: `timeout_s` must be a whole number from 1 to 86400"),
        (stdio("command: []"), "acme.yaml:4:35: `command` is empty\n  help: add `command: [\"program\", \"argument\"]`"),
        (stdio("command: npx server"), "acme.yaml:4:35: `command` must be a list, this is text"),
        (stdio("mode: shared"), "acme.yaml:4:6: connection `c` has no `command`\n  help: add `command: [\"program\", \"argument\"]`"),
        (stdio("command: [a], url: 'https://x.example/'"), "acme.yaml:4:40: `url` does not go with `transport: stdio`\n  help: remove it, or use `transport: streamable_http`"),
        (stdio("command: [a], env: { 'A=B': c }"), "acme.yaml:4:47: `A=B` is no name of a variable"),
        ("connections:\n  a: { transport: stdio, command: [a], namespace: none }\n  b: { transport: stdio, command: [a], namespace: none }".into(), "acme.yaml:5:51: only one connection can have `namespace: none`, and `a` has it\n  help: remove it from one of the two"),
        (stdio("command: [a], tools: { t: { alias: 'a b' } }"), "acme.yaml:4:61: `a b` is no alias\n  help: 1 to 50 of letters, digits, `_` and `-`: clients accept no more"),
        (stdio("command: [a], tools: { t: { alias: git__x } }"), "acme.yaml:4:61: `git__x` looks like a tool of another connection\n  help: `__` stands between a connection and its tool; use another separator"),
        (stdio("command: [a], tools: { t: { alias: x }, u: { alias: x } }"), "acme.yaml:4:78: the alias `x` is taken, in line 4\n  help: choose another one"),
        (stdio("command: [a], tools: { t: { price_per_call: -1 } }"), "acme.yaml:4:70: `-1` is no price: a decimal number from 0 to 1000000 with at most 9 digits after the point\n  help: write USD, such as `0.15`"),
        // secrets
        (http("url: 'https://x.example/', auth: { bearer: sk-12345 }"), "acme.yaml:4:79: `bearer` must not be a literal credential\n  help: put it into an environment variable or a file and name that: `{ secret: \"env:NAME\" }` or `{ secret: \"file:/run/secrets/NAME\" }`"),
        (http("url: 'https://x.example/', auth: { bearer: { secret: sk-12345 } }"), "acme.yaml:4:89: a secret must not stand in the file\n  help: put it into an environment variable or a file and name that: `{ secret: \"env:NAME\" }` or `{ secret: \"file:/run/secrets/NAME\" }`"),
        (http("url: 'https://x.example/', auth: { bearer: { secret: 'env:NOPE' } }"), "acme.yaml:4:89: the environment variable `NOPE` is not set\n  help: set it where control runs, or correct the name"),
        (http("url: 'https://x.example/', auth: { bearer: { secret: 'env:EMPTY' } }"), "acme.yaml:4:89: the secret is empty\n  help: correct the value where it is kept"),
        (http("url: 'https://x.example/', auth: { bearer: { secret: 'env:NEWLINE' } }"), "acme.yaml:4:89: the secret has characters that no HTTP header can carry\n  help: correct the value where it is kept"),
        (http("url: 'https://x.example/', auth: { bearer: { secret: 'file:nope' } }"), "acme.yaml:4:89: the secret file `nope` cannot be read: no such file\n  help: create it where control runs, or correct the path"),
        (http("url: 'https://x.example/', auth: { bearer: { secret: 'sealed:v1.x' } }"), "acme.yaml:4:89: the sealed secret cannot be used: it is damaged, or was sealed for another workspace or with another key of the same id\n  help: seal it again for this workspace with a key of `OBOL_CREDENTIAL_KEY`"),
        (http("url: 'https://x.example/', auth: {}"), "acme.yaml:4:69: `auth` needs either `bearer` or `header`\n  help: write `auth: { bearer: { secret: \"env:NAME\" } }`"),
        (http("url: 'https://x.example/', auth: { header: { name: Host, value: { secret: 'env:TOKEN' } } }"), "acme.yaml:4:87: the gateway sets the header `host` itself"),
        // providers and models
        ("providers: { p: { kind: gemini, base_url: 'https://x.example/' } }".into(), "acme.yaml:3:25: `kind` cannot be `gemini`\n  help: known here: `openai`, `anthropic`"),
        ("providers: { p: { base_url: 'https://x.example/' } }".into(), "acme.yaml:3:17: provider `p` has no `kind`\n  help: add `kind: openai` or `kind: anthropic`"),
        ("providers: { p: { kind: openai, base_url: 'https://x.example/?a=b' } }".into(), "acme.yaml:3:43: `base_url` must not contain a query\n  help: remove what follows `?`: paths are appended"),
        (format!("{PROVIDER}models:\n  m: {{ targets: [] }}"), "acme.yaml:5:6: model `m` has no targets\n  help: add `targets: [{ provider: …, model: …, price: { input: …, output: … } }]`"),
        (model("{ provider: q, model: x, free: true }"), "acme.yaml:5:30: there is no provider `q`\n  help: did you mean `p`?"),
        (model("{ provider: p, model: x }"), "acme.yaml:5:18: a target of model `m` has no price\n  help: add `price: { input: 0.15, output: 0.60 }` in USD per million tokens, or `free: true`"),
        (model("{ provider: p, model: x, price: { input: 1e3, output: 1 } }"), "acme.yaml:5:59: `1e3` is no price: a decimal number from 0 to 1000000 with at most 9 digits after the point\n  help: write USD, such as `0.15`"),
        (model("{ provider: p, model: x, price: { input: 1 } }"), "acme.yaml:5:50: `price` has no `output`\n  help: in USD per million tokens; `0` if it costs nothing"),
        (model("{ provider: p, model: x, free: true, price: { input: 1, output: 1 } }"), "acme.yaml:5:62: a target of model `m` has a price and is free\n  help: remove one of the two"),
        (model("{ provider: p, free: true }"), "acme.yaml:5:18: a target of model `m` has no `model`"),
    ];
    let mut wrong = Vec::new();
    for (yaml, expected) in table {
        let found = faults(&yaml);
        if if expected.ends_with(": ") { !found.starts_with(expected) } else { found != expected } {
            wrong.push(format!("{yaml}\n- {expected}\n+ {found}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn faults_of_the_file_itself_and_of_policies_are_placed() {
    let table: Vec<(Vec<(&str, &str)>, &str)> = vec![
        (vec![], "acme.yaml: cannot be read: no such file"),
        (
            vec![("acme.yaml", "")],
            "acme.yaml:1:1: the file names no workspace\n  help: add `workspace: NAME`",
        ),
        (
            vec![("acme.yaml", "workspace: Acme")],
            "acme.yaml:1:12: `Acme` is no workspace id: a lower-case letter, then up to 62 of `a-z`, `0-9` and `-`",
        ),
        (
            vec![("acme.yaml", "workspace: a\npolicies: [x.cedar]")],
            "acme.yaml:2:12: the policy file `x.cedar` cannot be read: no such file\n  help: paths start at the folder of the workspace file",
        ),
        (
            vec![
                ("acme.yaml", "workspace: a\npolicies: [x.cedar]"),
                ("x.cedar", "\npermit(principal, action, resource) when { principal.tagz.contains(\"a\") };"),
            ],
            "x.cedar:2:44: attribute `tagz` on entity type `Key` not found\n  help: did you mean `tags`?",
        ),
        (
            vec![
                ("acme.yaml", "workspace: a\npolicies: [x.cedar]"),
                ("x.cedar", "permit(principal, action)\n"),
            ],
            "x.cedar:1:26: unexpected end of input\n  help: expected `;` or identifier",
        ),
    ];
    for (files, expected) in table {
        let found = compile(&files, None).unwrap_err();
        if expected.ends_with(": ") {
            assert!(found.starts_with(expected), "{found}");
        } else {
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn all_faults_of_a_file_are_reported_together_and_in_order() {
    let found = faults(
        "frozen: 1\nconnections:\n  BAD: { transport: stdio }\n  c: { transport: streamable_http, url: 'x', extra: 1 }\nmodels: { m: { targets: [{}] } }\n",
    );
    let places: Vec<&str> = found
        .lines()
        .filter_map(|l| l.strip_prefix("acme.yaml:"))
        .map(|l| l.split(": ").next().unwrap())
        .collect();
    assert_eq!(places, ["3:9", "5:3", "5:8", "6:41", "6:46", "7:26", "7:26", "7:26"], "{found}");
}

#[test]
fn no_fault_quotes_a_credential() {
    for yaml in [
        "connections: { c: { transport: streamable_http, url: 'https://u:hunter2@x.example/' } }",
        "connections: { c: { transport: streamable_http, url: 'https://x y/hunter2' } }",
        "connections: { c: { transport: streamable_http, url: 'https://x.example/', auth: { bearer: hunter2 } } }",
        "connections: { c: { transport: streamable_http, url: 'https://x.example/', auth: { bearer: { secret: hunter2 } } } }",
        "connections: { c: { transport: streamable_http, url: 'https://x.example/', auth: { bearer: { secret: 'sealed:hunter2' } } } }",
        "connections: { c: { transport: streamable_http, url: 'https://x.example/', auth: { header: { name: x, value: hunter2 } } } }",
    ] {
        let found = faults(yaml);
        assert!(!found.is_empty() && !found.contains("hunter2"), "{found}");
    }
}

#[test]
fn a_hostile_file_is_refused_and_not_expanded() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for i in 1..10 {
        let aliases = vec![format!("*a{}", i - 1); 10].join(", ");
        bomb += &format!("a{i}: &a{i} [{aliases}]\n");
    }
    let found = faults(&bomb);
    assert!(found.contains("too large or too complex"), "{found}");
    assert!(!faults(&format!("a: {}", "[".repeat(5000))).is_empty());
    let big = format!("# {}\n", "x".repeat(2 << 20));
    assert_eq!(
        compile(&[("acme.yaml", &big)], None).unwrap_err(),
        "acme.yaml: cannot be read: it is larger than 1 MiB"
    );
}

#[test]
fn a_pin_has_its_form_and_belongs_to_a_pinned_catalogue() {
    let git = |catalog: &str, digest: &str| {
        format!(
            "connections: {{ git: {{ transport: stdio, command: [x]{catalog}, tools: {{ a: {{ digest: \"{digest}\" }} }} }} }}"
        )
    };
    let digest = format!("sha256:{}", "0a".repeat(32));
    assert_eq!(faults(&git(", catalog: pinned", &digest)), "");
    assert!(faults(&git("", &digest)).contains("`digest` pins nothing without `catalog: pinned`"));
    for bad in ["", "0a0a", "sha256:0a", &digest.to_uppercase(), &digest.replace("sha256", "sha512")] {
        assert!(faults(&git(", catalog: pinned", bad)).contains("is no digest of a tool"), "{bad}");
    }
    assert!(faults(&git(", catalog: frozen", &digest)).contains("frozen"));
}
