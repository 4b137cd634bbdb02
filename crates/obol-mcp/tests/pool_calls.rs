//! Calls to a real HTTP server through the pool.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail loudly"
)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{ECHO, SOON, at, call, endpoint, finish, options, pool, pool_with, raw, tool};
use http::HeaderValue;
use obol_mcp::pool::{Call, CallError, Endpoint, EndpointKind, Event, ListKind, PoolOptions};
use obol_mcp::wire::ProtocolVersion;
use obol_testkit::eventually;
use obol_testkit::fake_mcp::{Answers, FakeMcp, Stall};
use tokio::time::Instant;

#[tokio::test]
async fn many_first_calls_open_one_session_that_declares_nothing() {
    let server = FakeMcp::builder().instructions("be nice").start().await;
    let (pool, at) = (pool(), at(&server.url()));
    assert!(pool.capabilities(&at).is_none());
    let calls = futures::future::join_all((0..50).map(|_| tool(&pool, &at, ECHO))).await;
    assert!(calls.iter().all(Result::is_ok));
    let counts = server.counts();
    assert_eq!((counts.sessions_created, counts.notifications_of("notifications/initialized")), (1, 1));
    assert_eq!(
        server.last_params("initialize").unwrap(),
        format!(
            r#"{{"protocolVersion":"2025-11-25","capabilities":{{}},"clientInfo":{{"name":"obol","version":"{}"}}}}"#,
            env!("CARGO_PKG_VERSION")
        )
    );
    let sessions = server.sessions();
    for request in server.received_of("tools/call") {
        assert_eq!(request.session(), Some(sessions[0].as_str()));
        assert_eq!(request.header("mcp-protocol-version"), Some("2025-11-25"));
        assert_eq!(request.header("accept"), Some("application/json, text/event-stream"));
        assert!(request.header("authorization").is_none());
    }
    let capabilities = pool.capabilities(&at).unwrap();
    assert!(capabilities.tools.unwrap().list_changed);
    assert!(capabilities.resources.unwrap().subscribe);
    assert!(
        capabilities.logging.is_some()
            && capabilities.completions.is_some()
            && capabilities.prompts.is_some()
    );
    assert_eq!(pool.instructions(&at).as_deref(), Some("be nice"));
}

#[tokio::test]
async fn params_and_results_pass_byte_for_byte() {
    let server = FakeMcp::start().await;
    let (pool, at) = (pool(), at(&server.url()));
    let result = r#"{ "structuredContent":{"b":1.0,"a":123456789012345678901234567890,"e":1E400},"content":[ ],"x":"\u0041\/"}"#;
    let params = r#"{ "name":"raw","arguments" :{"z":-0.0,"a":[1e2, 18446744073709551616],"u":"\u00e9\ud83d\ude00"},"_meta":{"x":1} }"#;
    server.set_raw_result(result);
    for answers in [Answers::Json, Answers::Sse] {
        server.answer_with(answers);
        assert_eq!(tool(&pool, &at, params).await.unwrap(), result);
        assert_eq!(server.last_params("tools/call").unwrap(), params);
    }
    server.set_error("tools/call", r#"{"code":-32602, "message":"no","data":{"n":1.0}}"#);
    let (_, end) = finish(&mut pool.call(&at, call("tools/call", ECHO)).await.unwrap()).await;
    assert_eq!(end, Ok(Event::Error(r#"{"code":-32602, "message":"no","data":{"n":1.0}}"#.into())));
}

#[tokio::test]
async fn an_upstream_without_session_ids_gets_none() {
    let server = FakeMcp::builder().sessions(false).versions(&["2025-03-26"]).start().await;
    let (pool, at) = (pool(), at(&server.url()));
    tool(&pool, &at, ECHO).await.unwrap();
    let request = &server.received_of("tools/call")[0];
    assert_eq!(request.session(), None);
    assert_eq!(request.header("mcp-protocol-version"), Some("2025-03-26"));
}

#[tokio::test]
async fn a_revision_of_another_era_is_refused() {
    let server = FakeMcp::builder().versions(&["2031-01-01"]).start().await;
    let error = tool(&pool(), &at(&server.url()), ECHO).await.unwrap_err();
    assert!(matches!(error, CallError::Protocol { .. }), "{error:?}");
}

#[tokio::test]
async fn a_forgotten_session_is_replaced_and_the_call_replayed_exactly_once() {
    for status in [404, 400] {
        let server = FakeMcp::builder().unknown_session(status).start().await;
        let (pool, at) = (pool(), at(&server.url()));
        tool(&pool, &at, ECHO).await.unwrap();
        server.forget_sessions();
        tool(&pool, &at, ECHO).await.unwrap();
        let counts = server.counts();
        assert_eq!(
            (counts.calls("echo"), counts.sessions_created, counts.sessions_rejected),
            (2, 2, 1),
            "{status}"
        );
    }
}

#[tokio::test]
async fn an_upstream_that_never_knows_its_session_is_given_up_after_one_replay() {
    let server = FakeMcp::start().await;
    let (pool, at) = (pool(), at(&server.url()));
    server.set_status("tools/call", 404, "");
    let error = tool(&pool, &at, ECHO).await.unwrap_err();
    assert!(matches!(error, CallError::Protocol { .. }), "{error:?}");
    assert_eq!(server.counts().requests_of("tools/call"), 2);
    // What it says in JSON-RPC is the answer in the end.
    server.set_status(
        "tools/call",
        404,
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"gone"}}"#,
    );
    let (_, end) = finish(&mut pool.call(&at, call("tools/call", ECHO)).await.unwrap()).await;
    assert_eq!(end, Ok(Event::Error(r#"{"code":-32001,"message":"gone"}"#.into())));
}

#[tokio::test]
async fn a_call_that_may_have_been_executed_is_never_sent_twice() {
    let server = FakeMcp::start().await;
    let (pool, at) = (pool(), at(&server.url()));
    tool(&pool, &at, ECHO).await.unwrap();
    server.cut_after_executing(1);
    assert_eq!(tool(&pool, &at, r#"{"name":"destroy"}"#).await, Err(CallError::OutcomeUnknown));
    server.cut_mid_stream(1);
    assert_eq!(tool(&pool, &at, r#"{"name":"destroy"}"#).await, Err(CallError::OutcomeUnknown));
    assert_eq!(server.calls("destroy"), 2);
    tool(&pool, &at, ECHO).await.unwrap();
}

#[tokio::test]
async fn an_upstream_that_is_away_is_unavailable_then_left_alone_then_tried_again() {
    let server = FakeMcp::start().await;
    let options = PoolOptions { breaker_failures: 3, ..options() };
    let (pool, at) = (pool_with(options), at(&server.url()));
    server.refuse().await;
    for _ in 0..3 {
        let error = tool(&pool, &at, ECHO).await.unwrap_err();
        assert_eq!(error, CallError::Unavailable { reason: "the connection was refused", retry_after: None });
        assert!(error.is_unsent());
    }
    server.accept().await;
    let before = server.counts().connections;
    let error = tool(&pool, &at, ECHO).await.unwrap_err();
    assert!(matches!(error, CallError::Unavailable { retry_after: Some(_), .. }), "{error:?}");
    assert_eq!(server.counts().connections, before, "the breaker does not dial");
    eventually(SOON, || tool(&pool, &at, ECHO)).await;
}

#[tokio::test]
async fn progress_reaches_only_its_own_exchange_with_the_clients_own_token() {
    let server = FakeMcp::start().await;
    server.before_result(2, 1);
    server.stall(Stall::UntilReleased);
    let (pool, at) = (pool(), at(&server.url()));
    let mut exchanges = Vec::new();
    for token in [Some("1"), Some(r#""1""#), None] {
        let meta = token.map(|t| format!(r#","_meta":{{"progressToken":{t}}}"#)).unwrap_or_default();
        let params = format!(r#"{{"name":"echo"{meta}}}"#);
        let token = token.map(raw);
        let call = Call { progress_token: token.as_deref(), ..call("tools/call", &params) };
        exchanges.push(pool.call(&at, call).await.unwrap());
    }
    let all = futures::future::join_all(exchanges.iter_mut().map(finish));
    let (all, ()) = tokio::join!(all, async {
        server.wait_until(|c| c.calls("echo") == 3).await;
        server.release();
    });
    for ((notifications, end), token) in all.into_iter().zip([Some("1"), Some(r#""1""#), None]) {
        assert!(matches!(end, Ok(Event::Result(_))));
        let progress: Vec<_> = notifications
            .iter()
            .map(|n| std::str::from_utf8(n).unwrap())
            .filter(|n| n.contains("notifications/progress"))
            .collect();
        match token {
            Some(token) => {
                assert_eq!(progress.len(), 2);
                assert!(
                    progress.iter().all(|p| p.contains(&format!(r#""progressToken":{token},"#))),
                    "{progress:?}"
                );
            }
            None => assert!(progress.is_empty()),
        }
        assert_eq!(notifications.len() - progress.len(), 1, "the log message");
    }
    let upstream: Vec<_> = server.received_of("tools/call").iter().map(|r| r.params().unwrap()).collect();
    assert!(upstream[0] != upstream[1], "tokens are unique upstream");
}

#[tokio::test]
async fn a_deadline_ends_the_call_and_tells_the_upstream() {
    let server = FakeMcp::start().await;
    server.stall(Stall::UntilReleased);
    let (pool, at) = (pool(), at(&server.url()));
    let call = Call { deadline: Instant::now() + Duration::from_millis(300), ..call("tools/call", ECHO) };
    let (_, end) = finish(&mut pool.call(&at, call).await.unwrap()).await;
    assert_eq!(end, Err(CallError::Timeout));
    server.wait_until(|c| c.notifications_of("notifications/cancelled") == 1).await;
    let id = server.received_of("tools/call")[0].id().unwrap();
    assert_eq!(
        server.last_params("notifications/cancelled").unwrap(),
        format!(r#"{{"requestId":{id},"reason":"the deadline has passed"}}"#)
    );
}

#[tokio::test]
async fn a_cancel_is_mapped_and_a_drop_is_no_cancel() {
    let server = FakeMcp::start().await;
    server.stall(Stall::UntilReleased);
    let (pool, at) = (pool(), at(&server.url()));
    let mut dropped = pool.call(&at, call("tools/call", ECHO)).await.unwrap();
    tokio::select! {
        _ = dropped.next() => panic!("it stalls"),
        _ = server.wait_until(|c| c.calls("echo") == 1) => {}
    }
    drop(dropped);
    eventually(SOON, || std::future::ready(server.counts().left_early == 1)).await;
    let mut cancelled = pool.call(&at, call("tools/call", ECHO)).await.unwrap();
    tokio::select! {
        _ = cancelled.next() => panic!("it stalls"),
        _ = server.wait_until(|c| c.calls("echo") == 2) => {}
    }
    assert_eq!(server.counts().notifications_of("notifications/cancelled"), 0);
    cancelled.cancel(Some(r#"a "reason""#)).await;
    let id = server.received_of("tools/call")[1].id().unwrap();
    assert_eq!(
        server.last_params("notifications/cancelled").unwrap(),
        format!(r#"{{"requestId":{id},"reason":"a \"reason\""}}"#)
    );
}

#[tokio::test]
async fn lists_walk_all_pages_within_bounds_and_ask_only_for_what_is_offered() {
    let server = FakeMcp::builder().page_size(2).capabilities(r#"{"tools":{},"resources":{}}"#).start().await;
    let (pool, at) = (pool(), at(&server.url()));
    let deadline = Instant::now() + SOON;
    let tools = pool.list(&at, ListKind::Tools, deadline).await.unwrap();
    assert_eq!(tools.len(), 5);
    assert!(tools[0].get().starts_with(r#"{"name":"echo""#));
    assert_eq!(server.counts().requests_of("tools/list"), 3);
    assert_eq!(pool.list(&at, ListKind::Resources, deadline).await.unwrap().len(), 1);
    server.set_error("resources/templates/list", r#"{"code":-32601,"message":"Method not found"}"#);
    assert!(pool.list(&at, ListKind::ResourceTemplates, deadline).await.unwrap().is_empty());
    assert!(pool.list(&at, ListKind::Prompts, deadline).await.unwrap().is_empty());
    assert_eq!(server.counts().requests_of("prompts/list"), 0);

    server.set_result("tools/list", r#"{"tools":[],"nextCursor":"again"}"#);
    let endless = pool.list(&at, ListKind::Tools, deadline).await.unwrap_err();
    assert_eq!(endless, CallError::Protocol { reason: "its list has no end" });
    server.set_error("tools/list", r#"{"code":-32603,"message":"http://secret.internal"}"#);
    let refused = pool.list(&at, ListKind::Tools, deadline).await.unwrap_err();
    assert_eq!(refused.to_string(), "the server answered with the error code -32603");
}

#[tokio::test]
async fn a_list_larger_than_the_bound_is_an_error() {
    let server = FakeMcp::builder().page_size(2).start().await;
    let pool = pool_with(PoolOptions { max_list_items: 3, ..options() });
    let error = pool.list(&at(&server.url()), ListKind::Tools, Instant::now() + SOON).await.unwrap_err();
    assert_eq!(error, CallError::TooLarge);
}

#[tokio::test]
async fn http_errors_are_answers_when_they_carry_one_and_a_status_otherwise() {
    let server = FakeMcp::start().await;
    let (pool, at) = (pool(), at(&server.url()));
    for id in [r#""id":null,"#, r#""id":"server-error","#, ""] {
        let body = format!(r#"{{"jsonrpc":"2.0",{id}"error":{{"code":-32602, "message":"no"}}}}"#);
        server.set_status("tools/call", 400, &body);
        let (_, end) = finish(&mut pool.call(&at, call("tools/call", ECHO)).await.unwrap()).await;
        assert_eq!(end, Ok(Event::Error(r#"{"code":-32602, "message":"no"}"#.into())));
    }
    for (status, expected) in [
        (500, CallError::Status { status: 500 }),
        (503, CallError::Status { status: 503 }),
        (403, CallError::Status { status: 403 }),
        (502, CallError::OutcomeUnknown),
        (307, CallError::Protocol { reason: "it redirects, which the gateway does not follow" }),
    ] {
        server.set_status("tools/call", status, "<html>");
        assert_eq!(tool(&pool, &at, ECHO).await, Err(expected), "{status}");
    }
    assert_eq!(server.counts().requests_of("tools/call"), 8, "none was repeated");
}

#[tokio::test]
async fn the_credential_is_sent_and_never_shown() {
    let server = FakeMcp::builder().require_bearer("s3cret-token").start().await;
    let with = |value: &str| {
        let credential = Some((http::header::AUTHORIZATION, HeaderValue::from_str(value).unwrap()));
        let url = server.url().parse().unwrap();
        Arc::new(Endpoint {
            kind: EndpointKind::Http { url, credential, allow_private: true },
            ..endpoint(&server.url())
        })
    };
    let good = with("Bearer s3cret-token");
    assert!(!format!("{good:?}").contains("s3cret"));
    tool(&pool(), &good, ECHO).await.unwrap();
    let refused = tool(&pool(), &with("Bearer wrong"), ECHO).await.unwrap_err();
    assert_eq!(refused, CallError::Status { status: 401 });
}

#[tokio::test]
async fn private_addresses_are_not_dialled_unless_allowed() {
    let server = FakeMcp::start().await;
    let by_name = server.url().replace("127.0.0.1", "localhost");
    for url in [server.url(), by_name] {
        let kind = EndpointKind::Http { url: url.parse().unwrap(), credential: None, allow_private: false };
        let error = tool(&pool(), &Arc::new(Endpoint { kind, ..endpoint(&url) }), ECHO).await.unwrap_err();
        assert_eq!(error.to_string(), "the server cannot be reached: its address is not allowed");
    }
    assert_eq!(server.counts().connections, 0);
}

#[tokio::test]
async fn an_answer_larger_than_the_bound_is_refused() {
    let server = FakeMcp::start().await;
    let (pool, at) = (pool(), at(&server.url()));
    server.set_raw_result(&format!(r#"{{"content":"{}"}}"#, "x".repeat(2 << 20)));
    for answers in [Answers::Json, Answers::Sse] {
        server.answer_with(answers);
        assert_eq!(tool(&pool, &at, r#"{"name":"raw"}"#).await, Err(CallError::TooLarge));
    }
}

#[tokio::test]
async fn the_most_verbose_log_level_is_set_before_the_call_that_wants_it() {
    let server = FakeMcp::start().await;
    let (pool, at) = (pool(), at(&server.url()));
    for level in [None, Some("warning"), Some("error"), Some("debug"), Some("nonsense"), Some("info")] {
        let call = Call { log_level: level, ..call("tools/call", ECHO) };
        assert!(finish(&mut pool.call(&at, call).await.unwrap()).await.1.is_ok());
    }
    let set: Vec<_> = server.received_of("logging/setLevel").iter().map(|r| r.params().unwrap()).collect();
    assert_eq!(set, [r#"{"level":"warning"}"#, r#"{"level":"debug"}"#]);
}

#[tokio::test]
async fn other_versions_principals_and_generations_have_sessions_of_their_own() {
    let server = FakeMcp::start().await;
    let pool = pool_with(PoolOptions { max_sessions: 4, ..options() });
    let base = endpoint(&server.url());
    let variants = [
        base.clone(),
        Endpoint { version: ProtocolVersion::V2025_06_18, ..base.clone() },
        Endpoint { isolation: Some("key:one".into()), ..base.clone() },
        Endpoint { generation: 2, ..base.clone() },
    ];
    for endpoint in variants {
        tool(&pool, &Arc::new(endpoint), ECHO).await.unwrap();
    }
    assert_eq!(server.counts().sessions_created, 4);
    let more = Arc::new(Endpoint { isolation: Some("key:two".into()), ..base });
    assert_eq!(tool(&pool, &more, ECHO).await, Err(CallError::Full));
    assert_eq!(pool.isolations(), [("acme".parse().unwrap(), "key:one".to_owned())]);
    pool.close_isolated(&"acme".parse().unwrap(), "key:one").await;
    assert_eq!(server.counts().sessions_deleted, 1);
    tool(&pool, &more, ECHO).await.unwrap();
}

#[tokio::test]
async fn event_stream_answers_leave_their_connection_usable() {
    let server = FakeMcp::builder().answers(Answers::Sse).start().await;
    let (pool, at) = (pool(), at(&server.url()));
    for _ in 0..20 {
        tool(&pool, &at, ECHO).await.unwrap();
    }
    let connections = server.counts().connections;
    assert!(connections <= 3, "{connections} connections for 20 calls");
}

#[tokio::test]
async fn an_upstream_that_goes_away_under_a_session_is_left_alone_too() {
    let server = FakeMcp::start().await;
    let options = PoolOptions { breaker_failures: 2, breaker_open: Duration::from_mins(1), ..options() };
    let (pool, at) = (pool_with(options), at(&server.url()));
    tool(&pool, &at, ECHO).await.unwrap();
    server.refuse().await;
    for _ in 0..2 {
        let error = tool(&pool, &at, ECHO).await.unwrap_err();
        assert!(matches!(error, CallError::Unavailable { retry_after: None, .. }), "{error:?}");
    }
    let error = tool(&pool, &at, ECHO).await.unwrap_err();
    assert!(matches!(error, CallError::Unavailable { retry_after: Some(_), .. }), "{error:?}");
}
