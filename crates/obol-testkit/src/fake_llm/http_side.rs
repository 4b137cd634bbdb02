//! Requests in, completions out.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::watch;

use crate::answer::{self, Answer, AnswerBody, Cut, Unfinished, bare, json, quoted};

use super::reply::Step;
use super::{KEPT_REQUESTS, Raw, Received, Reply, Shared};

/// A completion request, as far as it is read.
#[derive(Default, Deserialize)]
struct Completion<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    #[serde(borrow, default)]
    messages: Vec<Message<'a>>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Option<Cow<'a, str>>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part {
    text: Option<String>,
}

impl Message<'_> {
    fn text(&self) -> String {
        let raw = self.content.map_or("null", RawValue::get);
        if let Ok(text) = serde_json::from_str::<String>(raw) {
            return text;
        }
        let parts: Vec<Part> = serde_json::from_str(raw).unwrap_or_default();
        parts.into_iter().filter_map(|part| part.text).collect::<Vec<_>>().join(" ")
    }
}

pub(super) async fn handle(request: Request<Incoming>, shared: Arc<Shared>) -> Answer {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Err(Cut) };
    let body = body.to_bytes();
    let path = head.uri.path();
    // Before the call is counted: whoever saw the count may release at once.
    let mut released = shared.releases.subscribe();
    if shared.config.recording {
        let mut kept = shared.received.lock();
        if kept.len() == KEPT_REQUESTS {
            kept.pop_front();
        }
        let path = head.uri.path_and_query().map_or(path, |path| path.as_str()).to_owned();
        kept.push_back(Received {
            method: head.method.clone(),
            path,
            headers: head.headers.clone(),
            body: body.clone(),
        });
    }
    shared.count(path);
    if let Some(token) = &shared.config.bearer
        && head.headers.get(header::AUTHORIZATION).is_none_or(|value| *value != format!("Bearer {token}"))
    {
        let refused = r#"{"error":{"message":"Incorrect API key provided","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#;
        return Ok(json(StatusCode::UNAUTHORIZED, refused));
    }
    if head.method == Method::GET && path == "/v1/models" {
        return Ok(json(StatusCode::OK, models(&shared.config.models)));
    }
    if head.method != Method::POST {
        return Ok(bare(StatusCode::NOT_FOUND));
    }
    let once = shared.once.lock().pop_front();
    let reply = once.unwrap_or_else(|| shared.reply.lock().clone());
    match reply {
        Reply::Raw(raw) => raw_answer(&shared.left_early, raw, released),
        Reply::Cut => Err(Cut),
        Reply::Echo => Ok(echo(&shared, &body, None)),
        Reply::CutAfter(events) => Ok(echo(&shared, &body, Some(events))),
        Reply::Stall => {
            let watch = Unfinished::watch(&shared.left_early);
            released.changed().await.map_err(|_| Cut)?;
            watch.finished();
            Ok(echo(&shared, &body, None))
        }
    }
}

impl Shared {
    fn count(&self, path: &str) {
        let mut calls = self.calls.lock();
        match calls.get_mut(path) {
            Some(count) => *count += 1,
            None => drop(calls.insert(path.to_owned(), 1)),
        }
        drop(calls);
        self.changed.notify_waiters();
    }
}

fn models(names: &[String]) -> String {
    let models: Vec<String> = names
        .iter()
        .map(|name| {
            format!(r#"{{"id":{},"object":"model","created":1700000000,"owned_by":"fake"}}"#, quoted(name))
        })
        .collect();
    format!(r#"{{"object":"list","data":[{}]}}"#, models.join(","))
}

/// An answer spelled out. `left_early` counts it if its reader leaves before the end.
pub(crate) fn raw_answer(
    left_early: &Arc<AtomicU64>,
    raw: Raw,
    mut released: watch::Receiver<u64>,
) -> Answer {
    let body = if raw.whole {
        let Some(Step::Send(body)) = raw.steps.into_iter().next() else { return Err(Cut) };
        AnswerBody::full(body)
    } else {
        let watch = Unfinished::watch(left_early);
        AnswerBody::fed(Some(watch), move |client| async move {
            for step in raw.steps {
                let sent = match step {
                    Step::Send(chunk) => client.send(Ok(chunk)).await,
                    Step::Cut => client.send(Err(Cut)).await,
                    Step::Wait(time) => {
                        tokio::time::sleep(time).await;
                        Ok(())
                    }
                    Step::WaitForRelease => {
                        released.changed().await.ok();
                        Ok(())
                    }
                };
                if sent.is_err() {
                    return;
                }
            }
        })
    };
    let mut response = Response::new(body);
    *response.status_mut() = raw.status;
    *response.headers_mut() = raw.headers;
    Ok(response)
}

fn echo(shared: &Shared, body: &[u8], cut_after: Option<usize>) -> Response<AnswerBody> {
    let Ok(asked) = serde_json::from_slice::<Completion<'_>>(body) else {
        let refused = r#"{"error":{"message":"We could not parse the JSON body of your request.","type":"invalid_request_error","param":null,"code":null}}"#;
        return json(StatusCode::BAD_REQUEST, refused);
    };
    let user = asked.messages.iter().rev().find(|message| message.role.as_deref() == Some("user"));
    let text = user.map(Message::text).unwrap_or_default();
    let prompt: usize = asked.messages.iter().map(|message| words(&message.text())).sum();
    let usage = usage(prompt, words(&text));
    let number = shared.number.fetch_add(1, Ordering::SeqCst);
    let model = quoted(asked.model.as_deref().unwrap_or("fake-small"));
    let head = |object| {
        format!(r#""id":"chatcmpl-fake-{number}","object":"{object}","created":1700000000,"model":{model}"#)
    };
    if !asked.stream {
        return json(
            StatusCode::OK,
            format!(
                r#"{{{},"choices":[{{"index":0,"message":{{"role":"assistant","content":{}}},"finish_reason":"stop"}}],"usage":{usage}}}"#,
                head("chat.completion"),
                quoted(&text)
            ),
        );
    }
    let head = head("chat.completion.chunk");
    let wants_usage = asked.stream_options.is_some_and(|options| options.include_usage);
    // With usage asked for, the other chunks carry a null, as the original does.
    let tail = if wants_usage { r#","usage":null"# } else { "" };
    let mut events = Vec::new();
    let mut choice = |delta: &str, finish: &str| {
        events.push(format!(
            "data: {{{head},\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":{finish}}}]{tail}}}\n\n"
        ));
    };
    choice(r#"{"role":"assistant","content":""}"#, "null");
    for word in text.split_inclusive(' ') {
        choice(&format!(r#"{{"content":{}}}"#, quoted(word)), "null");
    }
    choice("{}", r#""stop""#);
    if wants_usage {
        events.push(format!("data: {{{head},\"choices\":[],\"usage\":{usage}}}\n\n"));
    }
    events.push("data: [DONE]\n\n".to_owned());
    stream(shared, events, cut_after)
}

fn stream(shared: &Shared, events: Vec<String>, cut_after: Option<usize>) -> Response<AnswerBody> {
    let watch = Unfinished::watch(&shared.left_early);
    let body = AnswerBody::fed(Some(watch), move |client| async move {
        for (sent, event) in events.into_iter().enumerate() {
            let event = if cut_after == Some(sent) { Err(Cut) } else { Ok(Bytes::from(event)) };
            if client.send(event).await.is_err() {
                return;
            }
        }
    });
    answer::answer(StatusCode::OK, "text/event-stream", body)
}

/// Tokens, as this server counts them.
fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

fn usage(prompt: usize, completion: usize) -> String {
    let mut text = format!(r#"{{"prompt_tokens":{prompt},"completion_tokens":{completion},"#);
    write!(text, r#""total_tokens":{}}}"#, prompt + completion).expect("writing to a string");
    text
}
