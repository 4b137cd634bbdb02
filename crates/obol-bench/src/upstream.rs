//! The upstream: an MCP server and a model server that do as little as they can and still speak their protocols.
//!
//! MCP is revision 2025-11-25 with sessions and one tool, `echo`, answered in JSON. The model repeats the last message.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::Incoming;
use obol_testkit::Failure;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::serve::serve;
use crate::work::{CHUNKS, SESSION};

type Body = Either<Full<Bytes>, Events>;

/// What the model has to say besides its echo, so that an answer has the size of a short real one.
const USAGE: &str = r#"{"prompt_tokens":17,"completion_tokens":12,"total_tokens":29,"prompt_tokens_details":{"cached_tokens":0}}"#;

const TOOLS: &str = r#"{"tools":[{"name":"echo","description":"Answers with the text that it is given","inputSchema":{"type":"object","properties":{"text":{"type":"string"}},"required":["text"]},"annotations":{"readOnlyHint":true,"openWorldHint":false}}]}"#;

const SERVER: &str = r#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"bench","version":"1"}}"#;

pub(crate) async fn run(listen: SocketAddr) -> Result<ExitCode, Failure> {
    let sessions = Arc::new(AtomicU64::new(0));
    serve(listen, move |request| answer(sessions.clone(), request)).await
}

async fn answer(sessions: Arc<AtomicU64>, request: Request<Incoming>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return bare(StatusCode::BAD_REQUEST) };
    let body = body.to_bytes();
    match (&head.method, head.uri.path()) {
        (&Method::POST, "/mcp") => rpc(&sessions, &head.headers, &body),
        (&Method::DELETE, "/mcp") => bare(StatusCode::NO_CONTENT),
        (_, "/mcp") => {
            // There is no stream of the server's own (Streamable HTTP, "Listening for Messages from the Server").
            let mut response = bare(StatusCode::METHOD_NOT_ALLOWED);
            response.headers_mut().insert(ALLOW, http::HeaderValue::from_static("POST, DELETE"));
            response
        }
        (&Method::POST, "/v1/chat/completions") => chat(&body),
        _ => bare(StatusCode::NOT_FOUND),
    }
}

#[derive(Deserialize)]
struct Rpc<'a> {
    method: &'a str,
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct CallParams<'a> {
    name: &'a str,
    #[serde(borrow)]
    arguments: Arguments<'a>,
}

#[derive(Deserialize)]
struct Arguments<'a> {
    #[serde(borrow)]
    text: &'a RawValue,
}

fn rpc(sessions: &AtomicU64, headers: &HeaderMap, body: &[u8]) -> Response<Body> {
    let Ok(rpc) = serde_json::from_slice::<Rpc<'_>>(body) else { return bare(StatusCode::BAD_REQUEST) };
    if rpc.method == "initialize" {
        let session = sessions.fetch_add(1, Ordering::Relaxed);
        let mut response = result(rpc.id, SERVER);
        response.headers_mut().insert(SESSION, session.into());
        return response;
    }
    // Every number below the next one was given out: as good as a table, and cheaper.
    match headers.get(SESSION).map(|id| id.to_str().ok().and_then(|id| id.parse::<u64>().ok())) {
        None => return bare(StatusCode::BAD_REQUEST),
        Some(Some(id)) if id < sessions.load(Ordering::Relaxed) => {}
        Some(_) => return bare(StatusCode::NOT_FOUND),
    }
    match (rpc.method, rpc.id) {
        (_, None) => bare(StatusCode::ACCEPTED),
        ("ping", id) => result(id, "{}"),
        ("tools/list", id) => result(id, TOOLS),
        ("tools/call", id) => {
            let call =
                rpc.params.and_then(|params| serde_json::from_str::<CallParams<'_>>(params.get()).ok());
            match call {
                Some(call) if call.name == "echo" => {
                    let text = call.arguments.text.get();
                    result(id, &format!(r#"{{"content":[{{"type":"text","text":{text}}}]}}"#))
                }
                _ => error(id, -32602, "there is only `echo`"),
            }
        }
        (_, id) => error(id, -32601, "method not found"),
    }
}

fn result(id: Option<&RawValue>, result: &str) -> Response<Body> {
    let id = id.map_or("null", RawValue::get);
    json(format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#))
}

fn error(id: Option<&RawValue>, code: i32, message: &str) -> Response<Body> {
    let id = id.map_or("null", RawValue::get);
    json(format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"{message}"}}}}"#))
}

#[derive(Deserialize)]
struct Chat<'a> {
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    stream_options: StreamOptions,
    #[serde(borrow)]
    messages: Vec<ChatMessage<'a>>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct ChatMessage<'a> {
    #[serde(borrow)]
    content: &'a RawValue,
}

fn chat(body: &[u8]) -> Response<Body> {
    let Ok(chat) = serde_json::from_slice::<Chat<'_>>(body) else { return bare(StatusCode::BAD_REQUEST) };
    let said = chat.messages.last().map_or("null", |message| message.content.get());
    if chat.stream {
        let mut response = Response::new(Either::Right(Events::of(said, chat.stream_options.include_usage)));
        response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("text/event-stream"));
        return response;
    }
    json(format!(
        r#"{{"id":"chatcmpl-bench","object":"chat.completion","created":1700000000,"model":"bench-small","choices":[{{"index":0,"message":{{"role":"assistant","content":{said},"refusal":null}},"logprobs":null,"finish_reason":"stop"}}],"usage":{USAGE}}}"#
    ))
}

/// A streamed completion. Between two events it lets go of the processor once, so that each is written by itself as a
/// real model's are, and not all of them as one piece.
struct Events {
    events: VecDeque<Bytes>,
    rested: bool,
}

impl Events {
    fn of(said: &str, include_usage: bool) -> Self {
        let event = |choices: &str, usage: &str| {
            let usage = if include_usage { format!(r#","usage":{usage}"#) } else { String::new() };
            Bytes::from(format!(
                "data: {{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench-small\",\"choices\":[{choices}]{usage}}}\n\n"
            ))
        };
        let delta = |delta: &str, finish: &str| {
            event(&format!(r#"{{"index":0,"delta":{delta},"finish_reason":{finish}}}"#), "null")
        };
        let mut events = VecDeque::with_capacity(CHUNKS + 4);
        events.push_back(delta(r#"{"role":"assistant","content":""}"#, "null"));
        events.push_back(delta(&format!(r#"{{"content":{said}}}"#), "null"));
        let word = delta(r#"{"content":" and so on"}"#, "null");
        events.extend((1..CHUNKS).map(|_| word.clone()));
        events.push_back(delta("{}", r#""stop""#));
        if include_usage {
            events.push_back(event("", USAGE));
        }
        events.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        Self { events, rested: true }
    }
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !self.rested {
            self.rested = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.rested = false;
        Poll::Ready(self.events.pop_front().map(|event| Ok(Frame::data(event))))
    }

    fn is_end_stream(&self) -> bool {
        self.events.is_empty()
    }
}

fn json(text: String) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::from(text))));
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

fn bare(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::default()));
    *response.status_mut() = status;
    response
}
