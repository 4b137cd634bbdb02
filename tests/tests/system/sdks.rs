//! The official SDKs at work, a replica that dies under one of them, and what all of it leaves in the logs.

use std::collections::BTreeSet;
use std::time::Duration;

use obol_auth::ServiceTokens;
use obol_model::{Clock as _, Secret, SystemClock};
use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::fake_llm::FakeLlm;
use obol_testkit::logs::{assert_no_secret, lines_with};
use obol_testkit::port::Port;
use obol_testkit::process::{Proc, Spec};
use obol_testkit::redis_cluster::RedisCluster;
use obol_testkit::redis_kind::AnyRedis;
use obol_testkit::redis_sentinel::RedisSentinel;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::setup::{everything, finished, installed, node, python, report};
use obol_tests::world::{chat, usage};
use obol_tests::{ALLOW_ALL, SOON};

/// Credentials of upstreams, unlike anything else.
const MCP_SECRET: &str = "everything-credential-51d0c2";
const STDIO_SECRET: &str = "stdio-credential-77ab19";
const LLM_SECRET: &str = "model-credential-e3f9b4";
const QUERY_SECRET: &str = "query-credential-08c4aa";
const CLIENT: Duration = Duration::from_secs(65);

struct System {
    cluster: Cluster,
    key: String,
    _llm: FakeLlm,
    _everything: Proc,
    _port: Port,
}

async fn start(redis: Option<AnyRedis>) -> System {
    let (port, llm) = (Port::reserve(), FakeLlm::builder().require_bearer(LLM_SECRET).start().await);
    let node = installed("OBOL_TEST_NODE");
    let server = Proc::command(&node)
        .named("server-everything")
        .args([&everything(), "streamableHttp"])
        .env("PORT", port.addr().port().to_string())
        .spawn();
    eventually(Duration::from_secs(30), || async {
        tokio::net::TcpStream::connect(port.addr()).await.map(drop)
    })
    .await;
    let yaml = format!(
        r#"workspace: acme
environment: test
connections:
  everything:
    transport: streamable_http
    url: "http://{}/mcp"
    allow_private: true
    auth: {{ bearer: {{ secret: "env:EVERYTHING_SECRET" }} }}
  local:
    transport: stdio
    command: ["{node}", "{}", "stdio"]
    env: {{ LOCAL_CREDENTIAL: {{ secret: "env:LOCAL_SECRET" }} }}
  time:
    transport: stdio
    command: ["{}", "--local-timezone", "UTC"]
    mode: shared
providers:
  fake:
    kind: openai
    base_url: "{}"
    allow_private: true
    auth: {{ bearer: {{ secret: "env:LLM_SECRET" }} }}
models:
  small:
    targets: [ {{ provider: fake, model: fake-small, price: {{ input: 1, output: 2 }} }} ]
policies: ["acme.cedar"]
"#,
        port.addr(),
        everything(),
        installed("OBOL_TEST_MCP_SERVER_TIME"),
        llm.base_url()
    );
    let builder = match redis {
        Some(redis) => Cluster::of_built_obol().redis(redis),
        None => Cluster::of_built_obol(),
    };
    let cluster = builder
        .log("trace")
        .control_env("EVERYTHING_SECRET", MCP_SECRET)
        .control_env("LOCAL_SECRET", STDIO_SECRET)
        .control_env("LLM_SECRET", LLM_SECRET)
        .workspace("acme", &yaml)
        .policy("acme.cedar", ALLOW_ALL)
        .start()
        .await;
    let key = cluster.new_key("acme", &[]).await;
    System { cluster, key, _llm: llm, _everything: server, _port: port }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_clients_are_served_by_all_replicas_and_by_those_that_are_left() {
    everything_works_on(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_clients_are_served_on_a_redis_cluster() {
    everything_works_on(Some(RedisCluster::start().await.into())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_clients_are_served_behind_redis_sentinel() {
    everything_works_on(Some(RedisSentinel::start().await.into())).await;
}

async fn everything_works_on(redis: Option<AnyRedis>) {
    let system = start(redis).await;
    let (cluster, key) = (&system.cluster, &system.key);
    all_sdks_complete_their_tour(cluster, key).await;
    a_session_survives_its_replica(cluster, key).await;
    let jwt = everything_else_that_handles_secrets(cluster, key).await;

    // Ends that are not hurried write their last lines too.
    for index in [0, 2] {
        cluster.terminate(index);
        assert_eq!(cluster.replica(index).process.wait(SOON).await.code(), Some(0));
    }
    cluster.stop_control().await;
    nothing_secret_is_logged(cluster, key, &jwt);
}

async fn all_sdks_complete_their_tour(cluster: &Cluster, key: &str) {
    let url = format!("{}/mcp", cluster.base_url());
    let tour = |spec: Spec| report(spec.args(["--url", &url, "--key", key]), CLIENT);
    let openai = python("OBOL_TEST_PY1", "clients/openai_py.py");
    let openai =
        openai.args(["--url", &format!("{}/v1", cluster.base_url()), "--key", key, "--model", "small"]);
    let (py1, py2, ts1, ts2, openai) = tokio::join!(
        tour(python("OBOL_TEST_PY1", "clients/mcp_py.py")),
        tour(python("OBOL_TEST_PY2", "clients/mcp_py.py")),
        tour(node("clients/mcp_ts1.mjs")),
        tour(node("clients/mcp_ts2.mjs")),
        report(openai, CLIENT),
    );
    for (found, major) in [(&py1, "1."), (&py2, "2."), (&ts1, "1."), (&ts2, "2.")] {
        assert!(found["version"].as_str().unwrap().starts_with(major), "{found}");
        assert_eq!(found["protocol"], "2025-11-25", "{found}");
        assert!(found["calls"].as_u64() >= Some(10), "{found}");
        for what in ["resource", "prompt", "session", "ended"] {
            assert_eq!(found[what], true, "{what}: {found}");
        }
        assert_eq!(found["progress"], 4, "{found}");
    }
    assert_eq!(openai["plain"], openai["stream"], "{openai}");
    assert!(openai["plain"]["completion"].as_u64() > Some(0), "{openai}");

    // Each session of an SDK was served by all three.
    let sessions = cluster.balancer().sessions();
    assert_eq!(sessions.len(), 4, "one session per SDK");
    for replicas in sessions.values() {
        assert_eq!(*replicas, BTreeSet::from([0, 1, 2]));
    }
    // Each call was metered once, whoever served it: ten tours' calls and the unknown ones apart.
    let calls = [&py1, &py2, &ts1, &ts2].iter().map(|found| found["calls"].as_u64().unwrap()).sum::<u64>();
    let events = eventually(SOON, || async {
        Some(usage(cluster, "acme").await).filter(|events| events.len() as u64 >= calls + 3)
    })
    .await;
    let of = |kind: &str| events.iter().filter(|event| event["kind"] == kind).count() as u64;
    assert_eq!((of("tool_call"), of("chat_completion")), (calls, 3));
    let replicas: BTreeSet<&str> = events.iter().map(|event| event["replica"].as_str().unwrap()).collect();
    assert_eq!(replicas.len(), 3);
}

async fn a_session_survives_its_replica(cluster: &Cluster, key: &str) {
    let hold = python("OBOL_TEST_PY1", "clients/mcp_hold.py")
        .args(["--url", &format!("{}/mcp", cluster.base_url()), "--key", key])
        .args(["--calls", "40", "--pace-ms", "25"])
        .spawn();
    hold.wait_for_line(Duration::from_secs(40), |line| line.starts_with("10 ")).await;
    cluster.kill9(1).await;
    let found = finished(&hold, CLIENT).await;
    assert_eq!(found["initializes"], 1, "{found}");
    assert_eq!(found["same_session"], true, "{found}");
    let errors = found["errors"].as_array().unwrap();
    assert!(errors.len() <= 1, "only what was in flight may fail: {found}");
    assert_eq!(found["calls"], 40, "{found}");
}

/// Refusals, reloads and bad credentials write log lines as well. Returns a service JWT that was used.
async fn everything_else_that_handles_secrets(cluster: &Cluster, key: &str) -> String {
    let secret = Secret::new(cluster.service_jwt_secret().to_owned());
    let tokens = ServiceTokens::from_secret("obol-control", &secret).unwrap();
    let jwt = tokens.sign("obol-gateway", "control", SystemClock.now()).unwrap().expose().clone();
    let reload = || {
        let url = format!("{}/internal/reload", cluster.admin_url(0));
        Reply::of(http().post(url).bearer_auth(&jwt).body(r#"{"all":true}"#))
    };
    assert_eq!(reload().await.status, 200);
    assert_eq!(reload().await.status, 401);

    let base = cluster.base_url();
    let client = Mcp::connect(&base, key).await;
    assert_eq!(client.call("everything__echo", r#"{"message":1}"#).await.status, 200);
    client.call("nowhere__echo", "{}").await.error();
    let mut other = client.session().to_owned();
    other.replace_range(other.len() - 2.., if other.ends_with("00") { "11" } else { "00" });
    let stranger = Mcp::new(&base, key).with_session(Some(&other));
    assert_eq!(stranger.rpc("ping", "{}").await.status, 404);
    let wrong = format!("{}{}", &key[..key.len() - 4], "AAAA");
    assert_eq!(Mcp::new(&base, &wrong).rpc("ping", "{}").await.status, 401);
    let query = http().get(format!("{base}/mcp?access_token={QUERY_SECRET}&key={key}"));
    assert_eq!(Reply::of(query).await.status, 401);
    for body in [r#"{"model":"small","messages":[]}"#, r#"{"model":"no"}"#, "{"] {
        chat(&base, key, body).await;
    }
    client.delete().await;
    jwt
}

fn nothing_secret_is_logged(cluster: &Cluster, key: &str, jwt: &str) {
    let logs = cluster.logs();
    // Otherwise there would be nothing to find.
    for (what, needle) in [("sessions", "session_last4"), ("trace or debug lines", "DEBUG")] {
        assert!(!lines_with(&logs, needle).is_empty(), "the logs have no {what}");
    }

    let mut secrets = vec![
        ("virtual key", key),
        ("service JWT", jwt),
        ("credential of the MCP server", MCP_SECRET),
        ("credential of the stdio server", STDIO_SECRET),
        ("credential of the provider", LLM_SECRET),
        ("query string", QUERY_SECRET),
        ("secret of service JWTs", cluster.service_jwt_secret()),
    ];
    let sessions = cluster.balancer().sessions();
    assert!(sessions.len() >= 6, "{}", sessions.len());
    for session in sessions.keys() {
        // Without the prefix too: that would be as good.
        secrets.push(("session id", session.trim_start_matches("mcs_")));
    }
    assert_no_secret(&logs, &secrets);
    for (what, prefix, rest) in [
        ("virtual key", "obol_", 43),
        ("session id", "mcs_", 36),
        ("JWT", "eyJ", 30),
        ("Authorization value", "Bearer ", 8),
    ] {
        let found = lines_with(&logs, prefix).into_iter().find(|line| has_token(line, prefix, rest));
        assert!(found.is_none(), "something like a {what} is in the logs: {}…", &found.unwrap()[..40]);
    }
}

/// Whether `prefix` is followed by so many characters of a token.
fn has_token(line: &str, prefix: &str, rest: usize) -> bool {
    line.split(prefix).skip(1).any(|after| {
        after.bytes().take_while(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')).count()
            >= rest
    })
}
