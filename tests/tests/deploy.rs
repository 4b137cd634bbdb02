//! What `deploy/` says holds together: names, kinds, sums, and what the programs themselves say of it.

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
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use obol_testkit::port::Port;
use obol_testkit::process::built_binary;
use obol_tests::front::{Replica, haproxy_config, nginx_config, place, server};
use obol_tests::root;
use serde_json::Value;

/// What the end of a process may take longer than its drain, in seconds.
const MARGIN: u64 = 10;
/// What a drain needs after the last call has ended, in seconds.
const SETTLING: u64 = 10;

fn deploy() -> PathBuf {
    root().join("deploy")
}

fn files() -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![deploy()]);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    files
}

fn documents(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|why| panic!("{}: {why}", file.display()))
}

/// What is applied to a cluster, by kind and name.
fn objects() -> BTreeMap<(String, String), Value> {
    let files = files().into_iter().filter(|file| {
        file.starts_with(deploy().join("kubernetes"))
            && file.extension().is_some_and(|end| end == "yaml")
            && !file.components().any(|part| part.as_os_str() == "workspaces")
            && !file.ends_with("kustomization.yaml")
    });
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    files
        .flat_map(|file| documents(&file))
        .map(|object| ((text(&object["kind"]), text(&object["metadata"]["name"])), object))
        .collect()
}

fn object(kind: &str, name: &str) -> Value {
    objects().remove(&(kind.to_owned(), name.to_owned())).unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// The settings of a container as Kubernetes would give them to it.
fn environment(container: &Value) -> BTreeMap<String, String> {
    let entries = container["env"].as_array().unwrap().iter();
    entries
        .map(|entry| {
            let name = entry["name"].as_str().unwrap();
            let value = entry["value"]
                .as_str()
                .map_or_else(|| secret(name), |text| text.replace("$(POD_IP)", "10.0.0.7"));
            (name.to_owned(), value)
        })
        .filter(|(name, _)| name != "POD_IP")
        .collect()
}

/// What stands in for a secret, and for what compose reads from `.env`.
fn secret(name: &str) -> String {
    match name {
        "OBOL_REDIS_URL" => "redis://:x@redis:6379".to_owned(),
        "OBOL_CREDENTIAL_KEY" => format!("k1:{}=", "A".repeat(43)),
        "OBOL_DATABASE_URL" => "postgres://obol:x@postgres/obol".to_owned(),
        _ => "x".repeat(48),
    }
}

fn compose() -> Value {
    documents(&deploy().join("compose.yaml")).remove(0)
}

/// The settings of a service of `compose.yaml`.
fn environment_of(service: &str) -> BTreeMap<String, String> {
    let compose = compose();
    let settings = compose["services"][service]["environment"].as_object().unwrap().iter();
    settings
        .map(|(name, value)| {
            let value = value.as_str().unwrap();
            (name.clone(), if value.contains("${") { secret(name) } else { value.to_owned() })
        })
        .collect()
}

fn seconds(environment: &BTreeMap<String, String>, name: &str) -> u64 {
    environment[name].parse().unwrap()
}

#[test]
fn every_setting_that_is_named_exists() {
    let page = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let known: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("## `")?.strip_suffix('`')).collect();
    let mut unknown = Vec::new();
    for file in files() {
        let text = fs::read_to_string(&file).unwrap();
        let names = text.match_indices("OBOL_").map(|(at, _)| {
            let rest = &text[at..];
            let end = rest.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
            &rest[..end.unwrap_or(rest.len())]
        });
        unknown.extend(
            names.filter(|name| !known.contains(name)).map(|name| format!("{}: {name}", file.display())),
        );
    }
    assert!(known.contains("OBOL_DRAIN_DELAY_S") && unknown.is_empty(), "{}", unknown.join("\n"));
}

#[test]
fn everything_that_an_installation_needs_is_there_and_taken_in() {
    let found = objects();
    for (kind, name) in [
        ("Deployment", "obol-gateway"),
        ("Deployment", "obol-control"),
        ("PodDisruptionBudget", "obol-gateway"),
        ("Service", "obol-gateway"),
        ("Service", "obol-gateway-operations"),
        ("Service", "obol-control"),
        ("NetworkPolicy", "obol-gateway"),
        ("NetworkPolicy", "obol-control"),
        ("PersistentVolumeClaim", "obol-control-state"),
        ("PersistentVolumeClaim", "obol-spool"),
        ("ServiceMonitor", "obol-gateway"),
        ("Secret", "obol-secrets"),
    ] {
        assert!(found.contains_key(&(kind.to_owned(), name.to_owned())), "no {kind} {name}");
    }
    for ((kind, name), object) in &found {
        assert!(object["metadata"]["namespace"].is_null(), "{kind} {name} names a namespace");
    }

    let mut taken = BTreeSet::new();
    for file in files().iter().filter(|file| file.ends_with("kustomization.yaml")) {
        let kustomization = documents(file).remove(0);
        let resources = kustomization["resources"].as_array().into_iter().flatten();
        let generated = kustomization["configMapGenerator"].as_array().into_iter().flatten();
        let generated = generated.flat_map(|map| map["files"].as_array().unwrap());
        for name in resources.chain(generated) {
            let path = file.with_file_name(name.as_str().unwrap());
            assert!(path.exists(), "{} takes in what is not there: {name}", file.display());
            taken.insert(fs::canonicalize(path).unwrap());
        }
    }
    let left: Vec<PathBuf> = files()
        .into_iter()
        .filter(|file| file.starts_with(deploy().join("kubernetes")) && !file.ends_with("kustomization.yaml"))
        .filter(|file| !taken.contains(&fs::canonicalize(file).unwrap()))
        .collect();
    assert!(left.is_empty(), "no kustomization takes in {left:?}");

    let compose = compose();
    for service in ["haproxy", "gateway-1", "gateway-2", "control", "redis", "postgres"] {
        assert!(compose["services"][service].is_object(), "compose.yaml has no {service}");
    }
    let redis = compose["services"]["redis"]["command"].to_string();
    assert!(redis.contains("noeviction") && redis.contains(r#""--appendonly","yes""#), "{redis}");
}

#[test]
fn the_time_that_a_replica_gets_to_end_is_enough() {
    let gateway = object("Deployment", "obol-gateway");
    let pod = &gateway["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let stop = &container["lifecycle"]["preStop"];
    assert!(stop.is_null() || stop["sleep"]["seconds"].is_u64(), "the image has no shell: {stop}");
    let stop = stop["sleep"]["seconds"].as_u64().unwrap_or(0);
    let in_cluster = (environment(container), stop, pod["terminationGracePeriodSeconds"].as_u64().unwrap());

    let compose = compose();
    let on_one_machine = ["gateway-1", "gateway-2"].map(|service| {
        let grace = compose["services"][service]["stop_grace_period"].as_str().unwrap();
        (environment_of(service), 0, grace.trim_end_matches('s').parse().unwrap())
    });

    let mut longest = 0;
    for (settings, stop, grace) in on_one_machine.into_iter().chain([in_cluster]) {
        let [delay, drain, upstream, known] =
            ["DRAIN_DELAY", "DRAIN_TIMEOUT", "UPSTREAM_TIMEOUT", "IDEMPOTENCY_TTL"]
                .map(|name| seconds(&settings, &format!("OBOL_{name}_S")));
        assert!(delay < drain && known > upstream + drain, "{settings:?}");
        assert!(drain >= delay + upstream + SETTLING, "a call of {upstream} s would be cut: {settings:?}");
        assert!(grace >= stop + drain + MARGIN, "{grace} s are not enough for {settings:?}");
        longest = longest.max(drain);

        // Who sends requests notices within the delay.
        let probe = &container["readinessProbe"];
        let [period, timeout, failures] =
            ["periodSeconds", "timeoutSeconds", "failureThreshold"].map(|name| probe[name].as_u64().unwrap());
        assert!(delay > (period + timeout) * failures, "{probe}");
        let nginx = fs::read_to_string(deploy().join("nginx.conf")).unwrap();
        assert!(delay > after(&nginx, "        keepalive_timeout "), "nginx keeps connections for longer");
    }
    // A balancer that is reloaded cuts nothing that a replica would finish.
    for (file, setting) in [("haproxy.cfg", "hard-stop-after "), ("nginx.conf", "worker_shutdown_timeout ")] {
        assert!(after(&fs::read_to_string(deploy().join(file)).unwrap(), setting) >= longest, "{file}");
    }
}

/// The seconds that follow these words.
fn after(text: &str, words: &str) -> u64 {
    let (_, rest) = text.split_once(words).unwrap_or_else(|| panic!("no `{words}`"));
    rest.split_once('s').unwrap().0.parse().unwrap()
}

#[test]
fn pods_are_restricted_and_rollouts_leave_nobody_out() {
    for name in ["obol-gateway", "obol-control"] {
        let deployment = object("Deployment", name);
        let pod = &deployment["spec"]["template"]["spec"];
        // Variables like OBOL_CONTROL_PORT would be misspelled settings.
        assert_eq!(
            (&pod["enableServiceLinks"], &pod["automountServiceAccountToken"]),
            (&false.into(), &false.into())
        );
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert!(pod["securityContext"]["runAsUser"].as_u64().unwrap() > 0);
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        let container = &pod["containers"][0];
        assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
        assert_eq!(container["securityContext"]["capabilities"]["drop"][0], "ALL");
        assert!(
            !container["resources"]["requests"].is_null()
                && !container["resources"]["limits"]["memory"].is_null()
        );
        assert_eq!(container["livenessProbe"]["httpGet"]["path"], "/healthz");
    }
    let gateway = object("Deployment", "obol-gateway")["spec"].take();
    assert!(gateway["replicas"].as_u64().unwrap() >= 2);
    assert_eq!(gateway["strategy"]["rollingUpdate"]["maxUnavailable"], 0);
    let probe = &gateway["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"];
    assert_eq!((&probe["path"], &probe["port"]), (&"/readyz".into(), &"operations".into()));
    let control = object("Deployment", "obol-control")["spec"].take();
    assert_eq!((&control["replicas"], &control["strategy"]["type"]), (&1.into(), &"Recreate".into()));
    assert_eq!(object("Service", "obol-gateway")["spec"]["sessionAffinity"], "None");
}

#[test]
fn the_image_is_built_with_the_toolchain_of_the_checkout() {
    let toolchain = fs::read_to_string(root().join("rust-toolchain.toml")).unwrap();
    let (_, version) = toolchain.split_once("channel = \"").unwrap();
    let (version, _) = version.split_once('"').unwrap();
    let dockerfile = fs::read_to_string(deploy().join("Dockerfile")).unwrap();
    assert!(dockerfile.contains(&format!("ARG RUST=rust:{version}-")), "rust-toolchain.toml says {version}");
}

/// A program that ends by itself.
fn run(mut command: Command) -> Output {
    command.env_remove("RUST_BACKTRACE").output().unwrap_or_else(|why| panic!("{command:?}: {why}"))
}

fn assert_ok(what: &str, output: &Output) {
    let said = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said).into_owned());
    assert!(output.status.success(), "{what}: {}", said.concat());
}

#[test]
fn obol_takes_the_settings() {
    let container =
        |name: &str| object("Deployment", name)["spec"]["template"]["spec"]["containers"][0].take();
    let postgres = |mut settings: BTreeMap<String, String>| {
        settings.remove("OBOL_STATE_DIR");
        settings.insert("OBOL_DATABASE_URL".to_owned(), secret("OBOL_DATABASE_URL"));
        settings
    };
    for (what, command, settings) in [
        ("pods of the gateway", "run", environment(&container("obol-gateway"))),
        ("the pod of control", "control", environment(&container("obol-control"))),
        ("the pod of control, with Postgres", "control", postgres(environment(&container("obol-control")))),
        ("compose.yaml, gateway-1", "run", environment_of("gateway-1")),
        ("compose.yaml, gateway-2", "run", environment_of("gateway-2")),
        ("compose.yaml, control", "control", environment_of("control")),
    ] {
        let mut obol = Command::new(built_binary("obol").unwrap());
        obol.args([command, "--print-config"]).env_clear().envs(&settings);
        let output = run(obol);
        assert_ok(what, &output);
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(!complaints.contains("OBOL_"), "{what}: {complaints}");
    }
}

#[test]
fn the_workspace_of_the_example_is_valid_and_its_secrets_are_not() {
    let credentials = object("Secret", "obol-upstream-credentials");
    let mut check = Command::new(built_binary("obol").unwrap());
    check.arg("check").arg(deploy().join("kubernetes/example/workspaces/acme.yaml"));
    for name in credentials["stringData"].as_object().unwrap().keys() {
        check.env(name, "x");
    }
    assert_ok("obol check", &run(check));

    // A placeholder that nobody replaced has to be refused.
    let secrets = object("Secret", "obol-secrets");
    let mut gateway = Command::new(built_binary("obol").unwrap());
    gateway.args(["run", "--print-config"]).env_clear();
    for (name, value) in secrets["stringData"].as_object().unwrap() {
        gateway.env(name, value.as_str().unwrap());
    }
    let refused = run(gateway);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    for name in ["OBOL_REDIS_URL", "OBOL_CREDENTIAL_KEY", "OBOL_SERVICE_JWT_SECRET", "OBOL_ADMIN_TOKEN"] {
        assert!(said.contains(name), "{name} was taken: {said}");
    }
}

#[test]
fn haproxy_and_nginx_take_their_configuration() {
    let dir = place();
    let mut haproxy = Command::new(server("haproxy"));
    haproxy.arg("-c").arg("-f").arg(deploy().join("haproxy.cfg"));
    assert_ok("haproxy.cfg as it is", &run(haproxy));

    let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let replicas: [Replica; 2] = [(at(1), at(2)), (at(3), at(4))];
    let mut haproxy = Command::new(server("haproxy"));
    // Warnings are errors, once names need not be resolved.
    haproxy.arg("-dW").arg("-c").arg("-f").arg(haproxy_config(dir.path(), at(5), replicas));
    assert_ok("haproxy.cfg with addresses", &run(haproxy));

    // It binds what it is told to, also for a look.
    let port = Port::reserve();
    let config = nginx_config(dir.path(), port.addr(), replicas);
    let mut nginx = Command::new(server("nginx"));
    nginx.args(["-t", "-e", "stderr", "-p"]).arg(dir.path()).arg("-c").arg(config);
    nginx.arg("-g").arg(format!("pid {};", dir.path().join("nginx.pid").display()));
    let output = run(nginx);
    assert_ok("nginx.conf", &output);
}
