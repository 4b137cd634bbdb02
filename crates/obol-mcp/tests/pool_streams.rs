//! Answers that a well-behaved server does not give, from a server that says exactly what it is told to.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail loudly"
)]

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use common::{ECHO, at, background, call, finish, pool, raw, tool};
use obol_mcp::pool::{Call, CallError, Event};
use obol_testkit::eventually;
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

#[derive(Debug, Clone)]
struct Seen {
    http_method: String,
    headers: HashMap<String, String>,
    body: String,
    at: Instant,
}

impl Seen {
    fn id(&self) -> String {
        serde_json::from_str::<serde_json::Value>(&self.body).unwrap()["id"].to_string()
    }
}

/// Answers `initialize` and notifications itself and the rest by `script`; every connection carries one request.
struct Scripted {
    url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

type Script = dyn Fn(&Seen) -> String + Send + Sync;

impl Scripted {
    async fn start(script: impl Fn(&Seen) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let (seen, script): (Arc<Mutex<Vec<Seen>>>, Arc<Script>) = (Arc::default(), Arc::new(script));
        let kept = Arc::clone(&seen);
        drop(background(async move {
            while let Ok((stream, _)) = listener.accept().await {
                drop(background(serve(stream, Arc::clone(&kept), Arc::clone(&script))));
            }
        }));
        Self { url, seen }
    }

    fn seen(&self, what: &str) -> Vec<Seen> {
        self.seen.lock().iter().filter(|s| s.body.contains(what) || s.http_method == what).cloned().collect()
    }
}

async fn serve(stream: TcpStream, seen: Arc<Mutex<Vec<Seen>>>, script: Arc<Script>) {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    let http_method = line.split(' ').next().unwrap().to_owned();
    let mut headers = HashMap::new();
    loop {
        line.clear();
        stream.read_line(&mut line).await.unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let mut body = vec![0; headers.get("content-length").map_or(0, |l| l.parse().unwrap())];
    stream.read_exact(&mut body).await.unwrap();
    let request = Seen { http_method, headers, body: String::from_utf8(body).unwrap(), at: Instant::now() };
    seen.lock().push(request.clone());
    let answer = if request.body.contains(r#""method":"initialize""#) {
        json(&format!(
            r#"{{"jsonrpc":"2.0","id":{},"result":{{"protocolVersion":"2025-03-26","capabilities":{{"tools":{{}}}},"serverInfo":{{"name":"s","version":"1"}}}}}}"#,
            request.id()
        ))
    } else if request.http_method == "POST"
        && !request.body.contains(r#""method":"tools/"#)
        && !request.body.contains("resources/read")
    {
        "HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned()
    } else {
        script(&request)
    };
    drop(stream.write_all(answer.as_bytes()).await);
    drop(stream.shutdown().await);
}

fn json(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// A stream that ends with its connection.
fn sse(events: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n{events}"
    )
}

fn result(id: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"ok":1.0}}}}"#)
}

#[tokio::test]
async fn a_stream_that_ends_after_an_event_id_is_resumed_when_the_server_said() {
    let id = Arc::new(Mutex::new(String::new()));
    let kept = Arc::clone(&id);
    let server = Scripted::start(move |request| match request.http_method.as_str() {
        "POST" => {
            *kept.lock() = request.id();
            sse("id: e1\nretry: 300\ndata:\n\n: comment\n\nid: e2\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{}}\n\ndata: {\"cut")
        }
        _ if request.headers["last-event-id"] == "e2" => sse("id: e3\ndata:\n\n"),
        _ => sse(&format!("id: e4\ndata: {}\n\n", result(&kept.lock()))),
    })
    .await;
    let (pool, at) = (pool(), at(&server.url));
    let (notifications, end) = finish(&mut pool.call(&at, call("tools/call", ECHO)).await.unwrap()).await;
    assert_eq!(end, Ok(Event::Result(r#"{"ok":1.0}"#.into())));
    assert_eq!(notifications.len(), 1);
    let (posts, gets) = (server.seen("tools/call"), server.seen("GET"));
    assert_eq!((posts.len(), gets.len()), (1, 2), "the call itself is not repeated");
    assert_eq!(gets[1].headers["last-event-id"], "e3");
    assert_eq!(gets[0].headers["accept"], "text/event-stream");
    assert!(gets[0].at - posts[0].at >= Duration::from_millis(300));
    assert!(gets[1].at - gets[0].at >= Duration::from_millis(300));
}

#[tokio::test]
async fn a_stream_that_cannot_be_resumed_leaves_the_outcome_unknown() {
    for (first, resumed) in [
        ("data: {}\n\n", "unused"),
        ("id: e1\nretry: 10\ndata:\n\n", "HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 0\r\n\r\n"),
        ("id: e1\nretry: 10\ndata:\n\n", "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"),
        (
            "id: e1\nretry: 10\ndata:\n\n",
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n",
        ),
    ] {
        let server = Scripted::start(move |request| match request.http_method.as_str() {
            "POST" => sse(first),
            _ => resumed.to_owned(),
        })
        .await;
        assert_eq!(tool(&pool(), &at(&server.url), ECHO).await, Err(CallError::OutcomeUnknown), "{resumed}");
        assert_eq!(server.seen("tools/call").len(), 1);
    }
}

#[tokio::test]
async fn reading_is_repeated_once_and_acting_never() {
    // Executes, for all that is known, and hangs up.
    let server = Scripted::start(|_| String::new()).await;
    let (pool, at) = (pool(), at(&server.url));
    let mut read = pool.call(&at, call("resources/read", r#"{"uri":"a:b"}"#)).await.unwrap();
    assert_eq!(finish(&mut read).await.1, Err(CallError::Interrupted));
    assert_eq!(server.seen("resources/read").len(), 2);
    assert_eq!(tool(&pool, &at, ECHO).await, Err(CallError::OutcomeUnknown));
    assert_eq!(server.seen("tools/call").len(), 1);
}

#[tokio::test]
async fn questions_in_the_stream_are_answered_and_the_call_goes_on() {
    let server = Scripted::start(|request| {
        sse(&format!(
            "event: message\ndata: {{\"jsonrpc\":\"2.0\",\"id\":0,\"method\":\"ping\"}}\n\n\
             data: {{\"jsonrpc\":\"2.0\",\"id\":\"r\",\"method\":\"roots/list\"}}\n\n\
             event: ping\ndata: {{}}\n\ndata: nonsense\n\n\
             data: {}\n\ndata: {}\n\n",
            result("424242"),
            result(&request.id())
        ))
    })
    .await;
    assert_eq!(tool(&pool(), &at(&server.url), ECHO).await.unwrap(), r#"{"ok":1.0}"#);
    eventually(common::SOON, || {
        let ping = server.seen(r#""id":0,"result":{}"#).len();
        let roots = server.seen(r#""id":"r","error":{"code":-32601"#).len();
        std::future::ready((ping, roots) == (1, 1))
    })
    .await;
}

#[tokio::test]
async fn a_batch_of_the_oldest_revision_is_taken_apart() {
    let server = Scripted::start(|request| {
        let id = request.id();
        json(&format!(
            r#" [{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{id},"progress":1}}}}, {}]"#,
            result(&id)
        ))
    })
    .await;
    let token = raw(r#""mine""#);
    let params = r#"{"name":"echo","_meta":{"progressToken":"mine"}}"#;
    let call = Call { progress_token: Some(&token), ..call("tools/call", params) };
    let (notifications, end) = finish(&mut pool().call(&at(&server.url), call).await.unwrap()).await;
    assert_eq!(end, Ok(Event::Result(r#"{"ok":1.0}"#.into())));
    assert_eq!(
        notifications,
        [
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"mine","progress":1}}"#
        ]
    );
}

#[tokio::test]
async fn answers_that_are_none_are_protocol_errors() {
    let html =
        "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\nconnection: close\r\n\r\n<html>";
    let accepted = "HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    for answer in [html.to_owned(), accepted.to_owned(), json(&result("999999")), json("nonsense"), json("")]
    {
        let shown = answer.clone();
        let server = Scripted::start(move |_| answer.clone()).await;
        let error = tool(&pool(), &at(&server.url), ECHO).await.unwrap_err();
        assert!(matches!(error, CallError::Protocol { .. }), "{shown}: {error:?}");
    }
}
