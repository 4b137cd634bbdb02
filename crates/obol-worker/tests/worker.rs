//! Real children, through the pool that uses them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail loudly"
)]

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use obol_mcp::pool::{
    Call, CallError, Connect as _, Endpoint, EndpointKind, Event, EventKind, ListKind, Pool, PoolOptions,
    Spawn,
};
use obol_mcp::wire::ProtocolVersion;
use obol_model::Secret;
use obol_testkit::eventually;
use obol_testkit::process::is_running;
use obol_worker::{StdioConnect, WorkerOptions};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::Instant;

const SOON: Duration = Duration::from_secs(20);

struct Tokio;

impl Spawn for Tokio {
    #[expect(clippy::disallowed_methods, reason = "a test has no task tracker")]
    fn spawn(&self, _name: &'static str, future: BoxFuture<'static, ()>) {
        tokio::spawn(future);
    }
}

fn options() -> WorkerOptions {
    WorkerOptions {
        max_message: 1 << 19,
        max_queued: 4,
        write_timeout: Duration::from_millis(200),
        stdin_grace: Duration::from_millis(200),
        term_grace: Duration::from_millis(200),
        ..WorkerOptions::default()
    }
}

#[expect(clippy::disallowed_methods, reason = "a test has no configuration")]
fn connect() -> Arc<StdioConnect> {
    let secret = [("OBOL_SECRET".into(), "must not be seen".into())];
    Arc::new(StdioConnect::new(Arc::new(Tokio), std::env::vars_os().chain(secret), options()))
}

fn pool() -> Arc<Pool> {
    let options = PoolOptions { close_timeout: Duration::from_secs(5), ..PoolOptions::default() };
    Pool::new(connect(), Arc::new(Tokio), options)
}

fn endpoint_with(command: &[&str], env: &[(&str, &str)]) -> Arc<Endpoint> {
    Arc::new(Endpoint {
        workspace: "acme".parse().unwrap(),
        connection: "local".parse().unwrap(),
        version: ProtocolVersion::LATEST,
        kind: EndpointKind::Stdio {
            command: command.iter().map(ToString::to_string).collect(),
            env: env.iter().map(|(k, v)| (k.to_string(), Secret::new(v.to_string()))).collect(),
        },
        isolation: Some("mcs_one".to_owned()),
        generation: 1,
    })
}

fn endpoint(env: &[(&str, &str)]) -> Arc<Endpoint> {
    endpoint_with(&["python3", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/server.py")], env)
}

fn tool<'a>(params: &'a str, token: Option<&'a RawValue>) -> Call<'a> {
    Call {
        method: "tools/call",
        params: Some(params),
        progress_token: token,
        log_level: None,
        deadline: Instant::now() + SOON,
    }
}

async fn call(pool: &Arc<Pool>, endpoint: &Arc<Endpoint>, name: &str) -> Result<String, CallError> {
    let params = format!(r#"{{"name":"{name}","arguments":{{"n":1.0}}}}"#);
    let mut exchange = pool.call(endpoint, tool(&params, None)).await?;
    loop {
        match exchange.next().await.expect("an answer")? {
            Event::Notification(_) => {}
            Event::Result(result) => {
                let result: Value = serde_json::from_slice(&result).unwrap();
                return Ok(result["content"][0]["text"].as_str().unwrap().to_owned());
            }
            Event::Error(error) => panic!("{error:?}"),
        }
    }
}

fn is_alive(pid: &str) -> bool {
    kill(Pid::from_raw(pid.parse().unwrap()), None).is_ok()
}

/// Ended, whoever has to reap it. (Grandchildren are reaped by the first process of the machine.)
async fn has_ended(pid: &str) {
    let pid = pid.parse().unwrap();
    eventually(SOON, || std::future::ready(!is_running(pid))).await;
}

#[tokio::test]
async fn calls_lists_and_instructions_work_over_one_child() {
    let (pool, at) = (pool(), endpoint(&[]));
    assert_eq!(pool.list(&at, ListKind::Tools, Instant::now() + SOON).await.unwrap().len(), 1);
    assert!(pool.list(&at, ListKind::Prompts, Instant::now() + SOON).await.unwrap().is_empty());
    assert_eq!(pool.instructions(&at).as_deref(), Some("behave"));
    assert_eq!(call(&pool, &at, "echo").await.unwrap(), r#"{"n": 1.0}"#);
    let pid = call(&pool, &at, "pid").await.unwrap();
    assert_eq!(call(&pool, &at, "pid").await.unwrap(), pid);
    assert_eq!(pool.isolations(), [("acme".parse().unwrap(), "mcs_one".to_owned())]);
    pool.close_isolated(&at.workspace, "mcs_one").await;
    assert!(!is_alive(&pid), "reaped before the close returned");
    assert!(pool.isolations().is_empty());
}

#[tokio::test]
async fn noise_floods_and_huge_lines_do_not_disturb_calls() {
    let (pool, at) = (pool(), endpoint(&[]));
    assert_eq!(call(&pool, &at, "noise").await.unwrap(), "after the noise");
    assert_eq!(call(&pool, &at, "stderr").await.unwrap(), "after the flood");
    assert_eq!(call(&pool, &at, "huge_notification").await.unwrap(), "after the huge line");
    assert_eq!(call(&pool, &at, "echo").await.unwrap(), r#"{"n": 1.0}"#);
}

#[tokio::test]
async fn an_answer_that_cannot_be_had_fails_its_call_at_once_and_disturbs_no_other() {
    let (pool, at) = (pool(), endpoint(&[]));
    let mut other = pool.call(&at, tool(r#"{"name":"hang"}"#, None)).await.unwrap();
    assert!(other.next().now_or_never().is_none(), "sent");
    for name in ["huge", "huge_id_last"] {
        assert_eq!(call(&pool, &at, name).await, Err(CallError::TooLarge), "{name}");
    }
    assert!(matches!(call(&pool, &at, "nan").await, Err(CallError::Protocol { .. })));
    assert_eq!(call(&pool, &at, "echo").await.unwrap(), r#"{"n": 1.0}"#);
    assert!(other.next().now_or_never().is_none(), "still waits");
}

#[tokio::test]
async fn a_child_that_is_still_starting_ends_with_its_session() {
    let folder = std::env::temp_dir().join(format!("obol-starting-{}", std::process::id()));
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 1000", folder.display());
    let (pool, at) = (pool(), endpoint_with(&["sh", "-c", &script], &[]));
    let ending = async {
        eventually(SOON, || std::future::ready(folder.exists())).await;
        let pid = std::fs::read_to_string(&folder).unwrap();
        pool.close_isolated(&at.workspace, "mcs_one").await;
        assert!(!is_alive(pid.trim()), "reaped before the close returned");
    };
    let start = Instant::now();
    let (called, ()) = tokio::join!(call(&pool, &at, "echo"), ending);
    assert!(matches!(called, Err(CallError::Unavailable { .. })), "{called:?}");
    assert!(start.elapsed() < Duration::from_secs(10), "long before the handshake would time out");
    std::fs::remove_file(folder).unwrap();
}

#[tokio::test]
async fn a_crash_fails_what_is_in_flight_as_unknown_and_the_next_call_gets_a_new_child() {
    let (pool, at) = (pool(), endpoint(&[]));
    let first = call(&pool, &at, "pid").await.unwrap();
    let mut pending = pool.call(&at, tool(r#"{"name":"hang"}"#, None)).await.unwrap();
    let (hung, crashed) = tokio::join!(pending.next(), call(&pool, &at, "crash"));
    assert_eq!(hung.unwrap(), Err(CallError::OutcomeUnknown));
    assert_eq!(crashed, Err(CallError::OutcomeUnknown));
    assert!(pending.next().await.is_none());
    let second = call(&pool, &at, "pid").await.unwrap();
    assert_ne!(first, second);
    eventually(SOON, || std::future::ready(!is_alive(&first))).await;
}

#[tokio::test]
async fn the_whole_group_ends_with_a_close_and_with_a_crash() {
    let (pool, at) = (pool(), endpoint(&[]));
    let grandchild = call(&pool, &at, "grandchild").await.unwrap();
    assert!(is_alive(&grandchild));
    pool.close_isolated(&at.workspace, "mcs_one").await;
    has_ended(&grandchild).await;

    let grandchild = call(&pool, &at, "grandchild").await.unwrap();
    assert_eq!(call(&pool, &at, "crash").await, Err(CallError::OutcomeUnknown));
    has_ended(&grandchild).await;
}

#[tokio::test]
async fn a_child_that_ignores_everything_is_killed_within_the_bound() {
    let connect = connect();
    let at = endpoint(&[("STUBBORN", "1")]);
    let pool = Pool::new(
        connect,
        Arc::new(Tokio),
        PoolOptions { close_timeout: Duration::from_secs(2), ..PoolOptions::default() },
    );
    let pid = call(&pool, &at, "pid").await.unwrap();
    let start = Instant::now();
    pool.close_isolated(&at.workspace, "mcs_one").await;
    assert!(start.elapsed() < Duration::from_secs(3));
    assert!(!is_alive(&pid));
}

#[tokio::test]
async fn a_child_that_stops_reading_fails_its_calls_as_unsent_and_blocks_nobody() {
    let (pool, at) = (pool(), endpoint(&[]));
    let token = serde_json::from_str::<Box<RawValue>>("\"t\"").unwrap();
    let params = r#"{"name":"stop_reading","_meta":{"progressToken":"t"}}"#;
    let mut stuck = pool.call(&at, tool(params, Some(&token))).await.unwrap();
    let Some(Ok(Event::Notification(progress))) = stuck.next().await else { panic!("no progress") };
    assert!(String::from_utf8_lossy(&progress).contains(r#""progressToken": "t""#), "{progress:?}");
    // Far more than the pipe and the queue take.
    let large = format!(r#"{{"name":"echo","arguments":"{}"}}"#, "z".repeat(100_000));
    let mut exchanges = Vec::new();
    for _ in 0..8 {
        exchanges.push(pool.call(&at, tool(&large, None)).await.unwrap());
    }
    let first = futures::future::select_all(exchanges.iter_mut().map(|e| Box::pin(e.next()))).await.0;
    assert!(matches!(first, Some(Err(CallError::Unavailable { .. }))), "the queue has a bound: {first:?}");
    let other = Arc::new(Endpoint { isolation: Some("mcs_two".to_owned()), ..(*at).clone() });
    assert_eq!(call(&pool, &other, "echo").await.unwrap(), r#"{"n": 1.0}"#);
    pool.close_isolated(&at.workspace, "mcs_one").await;
    assert_eq!(stuck.next().await.unwrap(), Err(CallError::OutcomeUnknown));
}

#[tokio::test]
async fn children_see_the_allow_list_and_what_is_configured() {
    let (pool, at) = (pool(), endpoint(&[("TOKEN", "configured")]));
    let environment: Value = serde_json::from_str(&call(&pool, &at, "environment").await.unwrap()).unwrap();
    assert_eq!(environment["TOKEN"], "configured");
    assert!(environment.get("PATH").is_some());
    assert!(environment.get("OBOL_SECRET").is_none());
    assert!(environment.get("CARGO_MANIFEST_DIR").is_none());
}

#[tokio::test]
async fn what_a_child_says_outside_of_calls_becomes_an_event_and_its_pings_are_answered() {
    let (pool, at) = (pool(), endpoint(&[]));
    let mut events = pool.events();
    let answer: Value = serde_json::from_str(&call(&pool, &at, "announce").await.unwrap()).unwrap();
    assert_eq!(answer, serde_json::json!({"jsonrpc": "2.0", "id": "q", "result": {}}));
    let event = tokio::time::timeout(SOON, events.recv()).await.unwrap().unwrap();
    assert_eq!(event.kind, EventKind::ListChanged(ListKind::Tools));
    assert_eq!(event.isolation.as_deref(), Some("mcs_one"));
}

#[tokio::test]
async fn a_cancel_reaches_the_child_and_ends_the_exchange() {
    let (pool, at) = (pool(), endpoint(&[]));
    let token = serde_json::from_str::<Box<RawValue>>("5").unwrap();
    let params = r#"{"name":"hang","_meta":{"progressToken":5}}"#;
    let mut exchange = pool.call(&at, tool(params, Some(&token))).await.unwrap();
    assert!(matches!(exchange.next().await, Some(Ok(Event::Notification(_)))));
    exchange.cancel(Some("enough")).await;
    assert_eq!(call(&pool, &at, "echo").await.unwrap(), r#"{"n": 1.0}"#);
}

#[tokio::test]
async fn a_program_that_cannot_be_started_is_unavailable_and_says_why() {
    let connect = connect();
    let error = connect.connect(&endpoint_with(&["/no/such/program"], &[])).await.unwrap_err();
    assert_eq!(error.to_string(), "not sent: its program was not found");
    let (pool, at) = (pool(), endpoint_with(&["true"], &[]));
    assert!(matches!(
        call(&pool, &at, "echo").await,
        Err(CallError::Unavailable { .. } | CallError::Interrupted)
    ));
}

#[tokio::test]
async fn many_first_calls_start_one_child() {
    let (pool, at) = (pool(), endpoint(&[]));
    let pids = futures::future::join_all((0..50).map(|_| call(&pool, &at, "pid"))).await;
    let first = pids[0].clone().unwrap();
    assert!(pids.into_iter().all(|p| p.unwrap() == first));
}
