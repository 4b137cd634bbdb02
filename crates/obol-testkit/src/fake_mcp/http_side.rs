//! Streamable HTTP: requests in, results out, and the misbehaviour that was asked for.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::watch;

use crate::answer::{Answer, AnswerBody, Cut, Unfinished, answer, bare, json, quoted};

use super::state::{Override, STREAM_BACKLOG, Session, Shared, bump, event};
use super::{Answers, Received, Stall, content};

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// A JSON-RPC message, as far as it is read.
#[derive(Deserialize)]
pub(super) struct Envelope<'a> {
    #[serde(borrow)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(super) params: Option<&'a RawValue>,
}

pub(super) fn envelope(body: &[u8]) -> Option<Envelope<'_>> {
    serde_json::from_slice(body).ok()
}

/// The parameters of every method, as far as they are read.
#[derive(Default, Deserialize)]
struct Params<'a> {
    #[serde(borrow)]
    name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    uri: Option<Cow<'a, str>>,
    #[serde(borrow)]
    cursor: Option<Cow<'a, str>>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    argument: Option<&'a RawValue>,
    #[serde(borrow, rename = "protocolVersion")]
    protocol_version: Option<Cow<'a, str>>,
    #[serde(borrow, rename = "_meta")]
    meta: Option<Meta<'a>>,
}

#[derive(Deserialize)]
struct Meta<'a> {
    #[serde(borrow, rename = "progressToken")]
    progress_token: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Arguments {
    ms: Option<u64>,
    name: Option<String>,
    value: Option<String>,
}

impl Arguments {
    fn of(raw: Option<&RawValue>) -> Self {
        raw.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default()
    }
}

/// What became of a request: the raw member of the response, with its name.
struct Outcome {
    member: &'static str,
    raw: Cow<'static, str>,
}

fn result(raw: impl Into<Cow<'static, str>>) -> Outcome {
    Outcome { member: "result", raw: raw.into() }
}

fn error(code: i32, message: &str) -> Outcome {
    Outcome { member: "error", raw: format!(r#"{{"code":{code},"message":{}}}"#, quoted(message)).into() }
}

impl Outcome {
    fn message(&self, id: &str) -> String {
        ["{\"jsonrpc\":\"2.0\",\"id\":", id, ",\"", self.member, "\":", &self.raw, "}"].concat()
    }
}

pub(super) async fn handle(request: Request<Incoming>, shared: Arc<Shared>) -> Answer {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Err(Cut) };
    let body = body.to_bytes();
    let message = envelope(&body);
    if shared.config.recording {
        let rpc_method = message.as_ref().and_then(|message| Some(message.method.as_deref()?.to_owned()));
        shared.record(Received {
            http_method: head.method.clone(),
            headers: head.headers.clone(),
            rpc_method,
            body: body.clone(),
        });
    }
    if head.uri.path() != "/mcp" {
        return Ok(bare(StatusCode::NOT_FOUND));
    }
    if let Some(token) = &shared.config.bearer
        && head.headers.get(header::AUTHORIZATION).is_none_or(|value| *value != format!("Bearer {token}"))
    {
        return Ok(bare(StatusCode::UNAUTHORIZED));
    }
    match (&head.method, message) {
        (&Method::POST, Some(message)) => post(&head.headers, &message, shared).await,
        (&Method::POST, None) => Ok(*refusal(StatusCode::BAD_REQUEST, -32700, "Parse error")),
        (&Method::GET, _) => Ok(get(&head.headers, &shared)),
        (&Method::DELETE, _) => Ok(delete(&head.headers, &shared)),
        _ => Ok(bare(StatusCode::METHOD_NOT_ALLOWED)),
    }
}

/// An HTTP error whose body is a JSON-RPC error without an id, as the SDKs' servers send it.
fn refusal(status: StatusCode, code: i32, message: &str) -> Box<Response<AnswerBody>> {
    Box::new(json(status, error(code, message).message("null")))
}

fn accepts(headers: &HeaderMap, media_type: &str) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .any(|value| value.to_str().is_ok_and(|text| text.contains(media_type)))
}

/// Checks what the specification demands of every request after `initialize`, and names the session.
fn admit<'a>(headers: &'a HeaderMap, shared: &Shared) -> Result<&'a str, Box<Response<AnswerBody>>> {
    if let Some(version) = headers.get(VERSION)
        && !shared.config.versions.iter().any(|known| *version == *known.as_str())
    {
        return Err(refusal(StatusCode::BAD_REQUEST, -32000, "Bad Request: Unsupported protocol version"));
    }
    if !shared.config.sessions {
        return Ok("");
    }
    let Some(session) = headers.get(SESSION).and_then(|value| value.to_str().ok()) else {
        return Err(refusal(
            StatusCode::BAD_REQUEST,
            -32000,
            "Bad Request: Mcp-Session-Id header is required",
        ));
    };
    let rejected = if shared.script.read().reject_session.is_some() {
        shared.script.write().reject_session.take()
    } else {
        None
    };
    if rejected.is_some() {
        shared.sessions.lock().remove(session);
    }
    if shared.sessions.lock().contains_key(session) {
        return Ok(session);
    }
    shared.count(|counts| counts.sessions_rejected += 1);
    let status = rejected.map_or(shared.config.unknown_session, |status| status.as_u16());
    Err(match status {
        400 => refusal(StatusCode::BAD_REQUEST, -32000, "Bad Request: No valid session ID provided"),
        _ => refusal(StatusCode::NOT_FOUND, -32001, "Session not found"),
    })
}

fn get(headers: &HeaderMap, shared: &Shared) -> Response<AnswerBody> {
    if !shared.config.get_stream {
        return bare(StatusCode::METHOD_NOT_ALLOWED);
    }
    if !accepts(headers, "text/event-stream") {
        return bare(StatusCode::NOT_ACCEPTABLE);
    }
    let session = match admit(headers, shared) {
        Ok(session) => session,
        Err(refused) => return *refused,
    };
    let (stream, body) = AnswerBody::channel(STREAM_BACKLOG);
    if let Some(session) = shared.sessions.lock().get_mut(session) {
        session.streams.push(stream);
    }
    shared.count(|counts| counts.streams_opened += 1);
    answer(StatusCode::OK, "text/event-stream", body)
}

fn delete(headers: &HeaderMap, shared: &Shared) -> Response<AnswerBody> {
    match admit(headers, shared) {
        Ok("") => bare(StatusCode::METHOD_NOT_ALLOWED),
        Ok(session) => {
            shared.sessions.lock().remove(session);
            shared.count(|counts| counts.sessions_deleted += 1);
            bare(StatusCode::OK)
        }
        Err(refused) => *refused,
    }
}

async fn post(headers: &HeaderMap, message: &Envelope<'_>, shared: Arc<Shared>) -> Answer {
    if !accepts(headers, "application/json") || !accepts(headers, "text/event-stream") {
        let must = "Not Acceptable: Client must accept both application/json and text/event-stream";
        return Ok(*refusal(StatusCode::NOT_ACCEPTABLE, -32000, must));
    }
    if headers
        .get(header::CONTENT_TYPE)
        .is_none_or(|value| !value.as_bytes().starts_with(b"application/json"))
    {
        return Ok(bare(StatusCode::UNSUPPORTED_MEDIA_TYPE));
    }
    let method = message.method.as_deref();
    match (method, message.id) {
        (Some(method), Some(_)) => shared.count(|counts| bump(&mut counts.requests, method)),
        (Some(method), None) => shared.count(|counts| bump(&mut counts.notifications, method)),
        (None, _) => shared.count(|counts| counts.responses += 1),
    }
    let session = if method == Some("initialize") { Ok("") } else { admit(headers, &shared) };
    let session = match session {
        Ok(session) => session,
        Err(refused) => return Ok(*refused),
    };
    let (Some(method), Some(id)) = (method, message.id) else { return Ok(bare(StatusCode::ACCEPTED)) };
    let params: Params<'_> =
        message.params.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();

    let (hangs, overridden) = {
        let script = shared.script.read();
        let hangs = script.hanging.contains(method).then(|| shared.next_release());
        (hangs, script.overrides.get(method).cloned())
    };
    if let Some(mut released) = hangs {
        let watch = Unfinished::watch(&shared.left_early);
        released.changed().await.map_err(|_| Cut)?;
        watch.finished();
    }
    let outcome = match overridden {
        Some(Override::Status(status, body)) => return Ok(json(status, body)),
        Some(Override::Error(raw)) => Some(Outcome { member: "error", raw: raw.to_string().into() }),
        Some(Override::Result(raw)) => Some(result(raw.to_string())),
        None => None,
    };
    match (method, outcome) {
        ("tools/call", outcome) => call(&shared, session, id.get(), &params, outcome).await,
        ("initialize", None) => Ok(initialize(&shared, id.get(), &params)),
        (_, outcome) => {
            let outcome = outcome.unwrap_or_else(|| dispatch(&shared, session, method, &params));
            let answers = shared.script.read().answers;
            Ok(send(answers, &outcome.message(id.get())))
        }
    }
}

/// A message that nothing precedes.
fn send(answers: Answers, message: &str) -> Response<AnswerBody> {
    match answers {
        Answers::Json => json(StatusCode::OK, message.to_owned()),
        Answers::Sse => answer(StatusCode::OK, "text/event-stream", AnswerBody::full(event(message))),
    }
}

fn initialize(shared: &Shared, id: &str, params: &Params<'_>) -> Response<AnswerBody> {
    let config = &shared.config;
    let asked = params.protocol_version.as_deref().unwrap_or_default();
    let version = config.versions.iter().find(|known| *known == asked).or(config.versions.first());
    let instructions = config
        .instructions
        .as_deref()
        .map(|text| format!(r#","instructions":{}"#, quoted(text)))
        .unwrap_or_default();
    let outcome = result(format!(
        r#"{{"protocolVersion":{},"capabilities":{},"serverInfo":{{"name":{},"version":"1.0.0"}}{instructions}}}"#,
        quoted(version.map_or("2025-11-25", String::as_str)),
        config.capabilities,
        quoted(&config.name),
    ));
    let mut response = send(shared.script.read().answers, &outcome.message(id));
    if config.sessions {
        let mut random = [0; 12];
        getrandom::fill(&mut random).expect("random bytes");
        let session = random.iter().fold("fake-".to_owned(), |text, byte| format!("{text}{byte:02x}"));
        response.headers_mut().insert(SESSION, HeaderValue::try_from(&session).expect("a header value"));
        shared.sessions.lock().insert(session, Session::default());
        shared.count(|counts| counts.sessions_created += 1);
    }
    response
}

fn dispatch(shared: &Shared, session: &str, method: &str, params: &Params<'_>) -> Outcome {
    let uri = params.uri.as_deref().unwrap_or_default();
    match method {
        "ping" | "logging/setLevel" => result("{}"),
        "tools/list" => {
            let pages = shared.script.read().pages();
            let page =
                params.cursor.as_deref().unwrap_or("0").parse().ok().and_then(|page: usize| pages.get(page));
            page.map_or_else(|| error(-32602, "Invalid cursor"), |page| result(page.clone()))
        }
        "resources/list" => result(content::RESOURCES),
        "resources/templates/list" => result(content::TEMPLATES),
        "resources/read" => content::read(uri).map_or_else(|| error(-32002, "Resource not found"), result),
        "resources/subscribe" | "resources/unsubscribe" => {
            if let Some(session) = shared.sessions.lock().get_mut(session) {
                if method == "resources/subscribe" {
                    session.subscriptions.insert(uri.to_owned());
                } else {
                    session.subscriptions.remove(uri);
                }
            }
            result("{}")
        }
        "prompts/list" => result(content::PROMPTS),
        "prompts/get" if params.name.as_deref() == Some("greet") => {
            result(content::greeting(&Arguments::of(params.arguments).name.unwrap_or_default()))
        }
        "prompts/get" => error(-32602, "Unknown prompt"),
        "completion/complete" => {
            result(content::completion(&Arguments::of(params.argument).value.unwrap_or_default()))
        }
        _ => error(-32601, "Method not found"),
    }
}

/// What the script says about this call, taken once so that a change in mid-call does not tear it.
struct Plan {
    answers: Answers,
    notifications: Vec<String>,
    work: Duration,
    released: Option<watch::Receiver<u64>>,
    cut_before_answer: bool,
    cut_mid_stream: bool,
}

impl Plan {
    fn plain(&self) -> bool {
        self.notifications.is_empty()
            && self.work.is_zero()
            && self.released.is_none()
            && !self.cut_mid_stream
    }

    async fn wait(&mut self) {
        if !self.work.is_zero() {
            tokio::time::sleep(self.work).await;
        }
        if let Some(released) = &mut self.released {
            released.changed().await.ok();
        }
    }
}

fn plan(shared: &Shared, params: &Params<'_>, tool: &str) -> Plan {
    let mut plan = {
        let script = shared.script.read();
        let token = params.meta.as_ref().and_then(|meta| meta.progress_token);
        let progress = if token.is_some() { script.progress } else { 0 };
        let token = token.map_or("", RawValue::get);
        let steps = (1..=progress).map(|done| content::progress(token, done, progress));
        let stalled = if let Stall::For(time) = script.stall { time } else { Duration::ZERO };
        let slow = if tool == "slow" { Arguments::of(params.arguments).ms.unwrap_or(0) } else { 0 };
        Plan {
            answers: script.answers,
            notifications: steps.chain((1..=script.logs).map(content::log)).collect(),
            work: stalled + Duration::from_millis(slow),
            released: (script.stall == Stall::UntilReleased).then(|| shared.next_release()),
            cut_before_answer: script.cut_before_answer > 0,
            cut_mid_stream: script.cut_mid_stream > 0,
        }
    };
    if plan.cut_before_answer || plan.cut_mid_stream {
        // Looked at again, since another call may have taken the last one in between.
        let mut script = shared.script.write();
        plan.cut_before_answer = take_one(&mut script.cut_before_answer);
        plan.cut_mid_stream = !plan.cut_before_answer && take_one(&mut script.cut_mid_stream);
    }
    plan
}

fn take_one(left: &mut u32) -> bool {
    let any = *left > 0;
    *left = left.saturating_sub(1);
    any
}

async fn call(
    shared: &Arc<Shared>,
    session: &str,
    id: &str,
    params: &Params<'_>,
    overridden: Option<Outcome>,
) -> Answer {
    let tool = params.name.as_deref().unwrap_or_default();
    let outcome = match overridden {
        Some(outcome) => outcome,
        None => match execute(shared, session, tool, params) {
            Some(raw) => result(raw),
            None => {
                return Ok(send(Answers::Json, &error(-32602, &format!("Unknown tool: {tool}")).message(id)));
            }
        },
    };
    shared.count(|counts| bump(&mut counts.executions, tool));
    let message = outcome.message(id);
    let mut plan = plan(shared, params, tool);
    if plan.cut_before_answer {
        return Err(Cut);
    }
    if plan.plain() {
        return Ok(send(plan.answers, &message));
    }
    let watch = Unfinished::watch(&shared.left_early);
    if plan.answers == Answers::Json && plan.notifications.is_empty() && !plan.cut_mid_stream {
        plan.wait().await;
        watch.finished();
        return Ok(send(Answers::Json, &message));
    }
    let body = AnswerBody::fed(Some(watch), move |client| async move {
        let mut plan = plan;
        for notification in &plan.notifications {
            // An error is a client that left; then this task is being dropped too.
            client.send(Ok(event(notification))).await.ok();
        }
        plan.wait().await;
        let last = if plan.cut_mid_stream { Err(Cut) } else { Ok(event(&message)) };
        client.send(last).await.ok();
    });
    Ok(answer(StatusCode::OK, "text/event-stream", body))
}

/// The result of a tool that exists.
fn execute(shared: &Shared, session: &str, tool: &str, params: &Params<'_>) -> Option<String> {
    Some(match tool {
        "echo" => content::text_result(params.arguments.map_or("{}", RawValue::get)),
        "raw" => shared.script.read().raw_result.to_string(),
        "slow" => content::text_result("done"),
        "counter" => {
            let mut sessions = shared.sessions.lock();
            // The session may have been deleted since the request was admitted.
            let count = sessions.get_mut(session).map_or(0, |session| {
                session.counter += 1;
                session.counter
            });
            content::text_result(&count.to_string())
        }
        "destroy" => content::text_result("destroyed"),
        _ => return None,
    })
}
