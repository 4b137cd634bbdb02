//! `obol control` as a process, against a real Redis.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail loudly, as tests do"
)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::port::Port;
use obol_testkit::process::{Proc, Spec, Stream};
use obol_testkit::redis::RedisServer;

const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const DEADLINE: Duration = Duration::from_secs(20);

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(place.workspaces()).unwrap();
        fs::write(place.workspaces().join("allow.cedar"), "permit(principal, action, resource);").unwrap();
        place
    }

    fn workspaces(&self) -> std::path::PathBuf {
        self.dir.path().join("workspaces")
    }

    fn state(&self) -> std::path::PathBuf {
        self.dir.path().join("state")
    }

    fn write(&self, name: &str, environment: &str) {
        let text = format!("workspace: {name}\nenvironment: {environment}\npolicies: [allow.cedar]\n");
        fs::write(self.workspaces().join(format!("{name}.yaml")), text).unwrap();
    }

    fn control(&self, redis_url: &str) -> Spec {
        obol()
            .arg("control")
            .env("OBOL_REDIS_URL", redis_url)
            .env("OBOL_CREDENTIAL_KEY", KEY)
            .env("OBOL_WORKSPACES_DIR", self.workspaces())
            .env("OBOL_STATE_DIR", self.state())
    }

    async fn new_key(&self, workspace: &str) -> String {
        let key =
            obol().args(["key", "new", "--workspace", workspace]).env("OBOL_STATE_DIR", self.state()).spawn();
        assert!(key.wait(DEADLINE).await.success());
        key.lines_of(Stream::Out).remove(0)
    }
}

fn obol() -> Spec {
    Proc::command(Path::new(env!("CARGO_BIN_EXE_obol")))
}

async fn environment_of(redis: &RedisServer, workspace: &str) -> Option<String> {
    let text: Option<String> = redis.query(&["GET", &format!("snap:workspace:{{{workspace}}}")]).await;
    let document: serde_json::Value = serde_json::from_str(&text?).unwrap();
    Some(document["environment"].as_str().unwrap().to_owned())
}

async fn errors_of(control: &Proc) -> String {
    control.ended().await.unwrap();
    control.lines_of(Stream::Err).join("\n")
}

#[tokio::test]
async fn control_publishes_watches_and_ends_on_a_signal() {
    let (redis, place) = (RedisServer::start().await, Place::new());
    place.write("acme", "staging");
    let early = place.new_key("acme").await;
    let control = place.control(&redis.url()).spawn();
    control.wait_for_line(DEADLINE, |line| line == "control ready").await;
    assert_eq!(control.lines_of(Stream::Out), ["control ready"]);
    assert_eq!(environment_of(&redis, "acme").await.as_deref(), Some("staging"), "ready means published");
    let hash = early.parse::<obol_model::VirtualKey>().unwrap().hash();
    assert_eq!(redis.keys("key:*").await, [format!("key:{}", hash.hex())]);

    place.write("acme", "production");
    let late = place.new_key("acme").await;
    let hash = late.parse::<obol_model::VirtualKey>().unwrap().hash();
    let record = format!("key:{}", hash.hex());
    eventually(DEADLINE, || async {
        environment_of(&redis, "acme").await.as_deref() == Some("production")
            && redis.keys(&record).await.len() == 1
    })
    .await;

    fs::write(place.workspaces().join("acme.yaml"), "workspace: acme\nenvironment: [broken]\n").unwrap();
    let refusal = control.wait_for_line(DEADLINE, |line| line.contains("workspace file refused")).await;
    assert!(refusal.contains("acme.yaml:2:"), "{refusal}");
    assert_eq!(environment_of(&redis, "acme").await.as_deref(), Some("production"), "the old state stays");

    control.terminate();
    assert_eq!(control.wait(DEADLINE).await.code(), Some(0));
    let log = control.lines().join("\n");
    for secret in [&early[5..], &late[5..], "AAECAwQF"] {
        assert!(!log.contains(secret), "{log}");
    }
}

#[tokio::test]
async fn once_publishes_what_is_valid_and_fails_when_something_is_not() {
    let (redis, place) = (RedisServer::start().await, Place::new());
    place.write("acme", "staging");
    let control = place.control(&redis.url()).arg("--once").spawn();
    assert_eq!(control.wait(DEADLINE).await.code(), Some(0));
    let published = control.lines_of(Stream::Out);
    assert!(published.len() == 1 && published[0].starts_with("published acme "), "{published:?}");

    place.write("beta", "staging");
    fs::write(place.workspaces().join("broken.yaml"), "workspace: broken\nfrozen: maybe\n").unwrap();
    let control = place.control(&redis.url()).arg("--once").spawn();
    assert_eq!(control.wait(DEADLINE).await.code(), Some(1));
    assert!(control.lines_of(Stream::Out)[0].starts_with("published beta "));
    assert!(errors_of(&control).await.contains("broken.yaml:2:"));
    assert!(environment_of(&redis, "beta").await.is_some());
}

#[tokio::test]
async fn money_is_published_with_prices_from_a_catalogue_beside_the_workspace() {
    let (redis, place) = (RedisServer::start().await, Place::new());
    let write = |name: &str, text: &str| fs::write(place.workspaces().join(name), text).unwrap();
    let yaml = "workspace: acme\npolicies: [allow.cedar]\nprices: prices.yaml\n\
                providers: { p: { kind: openai, base_url: 'https://x.example/v1' } }\n\
                models: { fast: { targets: [{ provider: p, model: mini }] } }\n\
                limits: { concurrency: 16 }\n";
    write("acme.yaml", yaml);
    write("prices.yaml", "kinds: { openai: { mini: { input: 1, output: 4 } } }\n");
    let control = place.control(&redis.url()).arg("--once").spawn();
    assert_eq!(control.wait(DEADLINE).await.code(), Some(0), "{}", errors_of(&control).await);
    let text: Option<String> = redis.query(&["GET", "snap:workspace:{acme}"]).await;
    let document: serde_json::Value = serde_json::from_str(&text.unwrap()).unwrap();
    assert_eq!(document["models"]["fast"]["targets"][0]["price"]["output"], 4_000_000_000_u64);
    assert_eq!(document["limits"]["concurrency"], 16);

    let new = |budget: Option<&str>| {
        let args = ["key", "new", "--workspace", "acme"].into_iter().chain(budget);
        obol().args(args.collect::<Vec<_>>()).env("OBOL_STATE_DIR", place.state()).spawn()
    };
    for (budget, warned) in [(Some("--budget=day=5"), true), (None, false)] {
        let key = new(budget);
        assert_eq!(key.wait(DEADLINE).await.code(), Some(0));
        let said = errors_of(&key).await;
        assert_eq!(
            said.contains("may cost at most, so that no budget can be held to: fast."),
            warned,
            "{said}"
        );
    }
}

/// The two commands that need Redis.
fn both(place: &Place, redis_url: &str) -> [Spec; 2] {
    let run = obol()
        .arg("run")
        .env("OBOL_REDIS_URL", redis_url)
        .env("OBOL_CREDENTIAL_KEY", KEY)
        .env("OBOL_LISTEN", "127.0.0.1:0")
        .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0");
    [place.control(redis_url), run]
}

#[tokio::test]
async fn a_redis_that_is_not_there_is_a_clear_refusal_without_its_password() {
    let (place, port) = (Place::new(), Port::reserve());
    for command in both(&place, &format!("redis://me:hunter2@{}", port.addr())) {
        let process = command.spawn();
        assert_eq!(process.wait(DEADLINE).await.code(), Some(1));
        let error = errors_of(&process).await;
        let expected = format!("error: cannot connect to Redis at `{}`: nothing listens there", port.addr());
        assert!(error.contains(&expected), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
        assert!(process.lines_of(Stream::Out).is_empty());
    }
}

#[tokio::test]
async fn a_redis_that_is_silent_is_a_clear_refusal_in_time() {
    let (redis, place) = (RedisServer::start().await, Place::new());
    redis.pause();
    for command in both(&place, &redis.url()) {
        let process = command.spawn();
        assert_eq!(process.wait(DEADLINE).await.code(), Some(1));
        let error = errors_of(&process).await;
        assert!(
            error.contains("error: cannot connect to Redis") && error.contains("it does not answer"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_directory_that_cannot_be_read_is_refused_before_anything_is_published() {
    let (redis, place) = (RedisServer::start().await, Place::new());
    let control = place.control(&redis.url()).args(["--workspaces", "/nonexistent"]).spawn();
    assert_eq!(control.wait(DEADLINE).await.code(), Some(1));
    let error = errors_of(&control).await;
    assert!(error.contains("cannot use the workspaces directory `/nonexistent`"), "{error}");
    assert!(redis.keys("*").await.is_empty());
}
