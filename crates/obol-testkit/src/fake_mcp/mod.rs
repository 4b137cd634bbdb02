//! A scripted MCP server over Streamable HTTP, as the revisions 2025-03-26 to 2025-11-25 have it.
//!
//! It answers from raw text and hands out what it received as raw text, so that a test can compare bytes; it counts
//! what it executed, so that a test can tell "once" from "twice"; and while it runs it can be told to misbehave.
//!
//! Its tools: `echo` (its arguments, as text), `raw` (whatever [`FakeMcp::set_raw_result`] said), `slow` (waits `ms`
//! milliseconds), `counter` (counts its calls per upstream session) and `destroy` (annotated as destructive). Its
//! resources: `demo://text` and the template `demo://item/{id}`. Its prompt: `greet`.

mod content;
mod http_side;
mod state;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use tokio::time::{Instant, timeout_at};

use crate::accept::Acceptor;
use crate::answer::{self, origin};

use self::http_side::envelope;
use self::state::{Override, Shared};

/// How it sends a result when nothing has to be said before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Answers {
    /// As `application/json`.
    #[default]
    Json,
    /// As an event stream of one event.
    Sse,
}

/// How long a tool call waits between its execution (and the notifications before its result) and its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stall {
    /// Not at all.
    #[default]
    No,
    /// This long.
    For(Duration),
    /// Until [`FakeMcp::release`].
    UntilReleased,
}

/// What a server is like from its start. Made by [`FakeMcp::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    pub(crate) name: String,
    pub(crate) instructions: Option<String>,
    pub(crate) capabilities: String,
    pub(crate) versions: Vec<String>,
    pub(crate) sessions: bool,
    pub(crate) unknown_session: u16,
    pub(crate) get_stream: bool,
    pub(crate) bearer: Option<String>,
    pub(crate) page_size: Option<usize>,
    pub(crate) recording: bool,
    pub(crate) answers: Answers,
    pub(crate) tools: Vec<String>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            name: "fake-mcp".to_owned(),
            instructions: None,
            capabilities: content::CAPABILITIES.to_owned(),
            versions: ["2025-11-25", "2025-06-18", "2025-03-26"].map(str::to_owned).to_vec(),
            sessions: true,
            unknown_session: 404,
            get_stream: true,
            bearer: None,
            page_size: None,
            recording: true,
            answers: Answers::default(),
            tools: content::TOOLS.map(str::to_owned).to_vec(),
        }
    }
}

impl Builder {
    /// The `serverInfo.name`; by default `fake-mcp`.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// The `instructions` of its `initialize` result; by default none.
    #[must_use]
    pub fn instructions(mut self, text: &str) -> Self {
        self.instructions = Some(text.to_owned());
        self
    }

    /// Its capabilities as raw JSON; by default all that it has.
    #[must_use]
    pub fn capabilities(mut self, raw: &str) -> Self {
        raw.clone_into(&mut self.capabilities);
        self
    }

    /// The revisions that it speaks, the preferred one first.
    #[must_use]
    pub fn versions(mut self, versions: &[&str]) -> Self {
        self.versions = versions.iter().map(|&version| version.to_owned()).collect();
        self
    }

    /// Whether it issues session ids; by default it does, and then demands them.
    #[must_use]
    pub fn sessions(mut self, issued: bool) -> Self {
        self.sessions = issued;
        self
    }

    /// The status for a session that it does not know: `404` as specified (the default), or `400` as common servers
    /// send it.
    #[must_use]
    pub fn unknown_session(mut self, status: u16) -> Self {
        self.unknown_session = status;
        self
    }

    /// Whether it offers the `GET` stream; by default it does, else it answers `405`.
    #[must_use]
    pub fn get_stream(mut self, offered: bool) -> Self {
        self.get_stream = offered;
        self
    }

    /// Answers `401` unless a request brings this bearer.
    #[must_use]
    pub fn require_bearer(mut self, token: &str) -> Self {
        self.bearer = Some(token.to_owned());
        self
    }

    /// Lists this many tools per page; by default all on one.
    #[must_use]
    pub fn page_size(mut self, tools: usize) -> Self {
        self.page_size = Some(tools);
        self
    }

    /// Whether it keeps what it received; by default it does. A benchmark turns it off.
    #[must_use]
    pub fn recording(mut self, kept: bool) -> Self {
        self.recording = kept;
        self
    }

    /// How it answers when nothing precedes the result; by default as JSON.
    #[must_use]
    pub fn answers(mut self, answers: Answers) -> Self {
        self.answers = answers;
        self
    }

    /// Its tool definitions as raw JSON, instead of the default ones. A definition may claim any name; what a call
    /// does goes by the names in the module's documentation.
    #[must_use]
    pub fn tools(mut self, raw: &[&str]) -> Self {
        self.tools = raw.iter().map(|&tool| tool.to_owned()).collect();
        self
    }

    /// Starts it on a port of its own.
    pub async fn start(self) -> FakeMcp {
        let shared = Arc::new(Shared::new(self));
        let for_connections = shared.clone();
        let acceptor = Acceptor::start(move |stream| {
            let shared = for_connections.clone();
            answer::serve(stream, move |request| http_side::handle(request, shared.clone()))
        });
        FakeMcp { acceptor, shared }
    }
}

/// The running server.
#[derive(Debug)]
pub struct FakeMcp {
    acceptor: Acceptor,
    shared: Arc<Shared>,
}

impl FakeMcp {
    /// Starts one with everything at its default.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Describes one.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Where it listens, also after [`FakeMcp::refuse`].
    pub fn addr(&self) -> SocketAddr {
        self.acceptor.addr()
    }

    /// `http://127.0.0.1:PORT/mcp`
    pub fn url(&self) -> String {
        format!("{}/mcp", origin(self.addr()))
    }

    // What it saw.

    /// What it counted so far.
    pub fn counts(&self) -> Counts {
        let mut counts = self.shared.counts.lock().clone();
        counts.left_early = self.shared.left_early.load(std::sync::atomic::Ordering::SeqCst);
        counts.connections = self.acceptor.accepted();
        counts
    }

    /// Executions of one tool so far.
    pub fn calls(&self, tool: &str) -> u64 {
        self.shared.counts.lock().calls(tool)
    }

    /// Waits until what it counted satisfies `enough`, and returns it.
    ///
    /// # Panics
    /// When that takes more than ten seconds.
    pub async fn wait_until(&self, enough: impl Fn(&Counts) -> bool) -> Counts {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let counts = self.counts();
            if enough(&counts) {
                return counts;
            }
            assert!(
                timeout_at(end, changed).await.is_ok(),
                "the fake MCP server only got this far: {counts:#?}"
            );
        }
    }

    /// The requests received, oldest first; the last few thousand.
    pub fn received(&self) -> Vec<Received> {
        self.shared.received.lock().iter().cloned().collect()
    }

    /// The messages received with this JSON-RPC method.
    pub fn received_of(&self, rpc_method: &str) -> Vec<Received> {
        let received = self.shared.received.lock();
        received.iter().filter(|one| one.rpc_method.as_deref() == Some(rpc_method)).cloned().collect()
    }

    /// The `params` of the last message with this method, byte for byte.
    pub fn last_params(&self, rpc_method: &str) -> Option<String> {
        self.received_of(rpc_method).last().and_then(Received::params)
    }

    /// Forgets the requests received; the counts go on.
    pub fn forget_received(&self) {
        self.shared.received.lock().clear();
    }

    /// Sessions that it knows now.
    pub fn sessions(&self) -> Vec<String> {
        self.shared.sessions.lock().keys().cloned().collect()
    }

    /// `GET` streams that are open now.
    pub fn open_streams(&self) -> usize {
        self.shared.sessions.lock().values_mut().map(state::Session::open_streams).sum()
    }

    // What it says.

    /// The `result` of the tool `raw`, byte for byte.
    pub fn set_raw_result(&self, raw: &str) {
        self.shared.script.write().raw_result = Arc::from(raw);
    }

    /// Answers every request of a method with this raw `result`, from now on.
    pub fn set_result(&self, rpc_method: &str, raw: &str) {
        self.set_override(rpc_method, Override::Result(Arc::from(raw)));
    }

    /// Answers every request of a method with this raw `error`, from now on.
    pub fn set_error(&self, rpc_method: &str, raw: &str) {
        self.set_override(rpc_method, Override::Error(Arc::from(raw)));
    }

    /// Answers every request of a method with this HTTP status and body, from now on.
    pub fn set_status(&self, rpc_method: &str, status: u16, body: &str) {
        let body = Bytes::copy_from_slice(body.as_bytes());
        self.set_override(rpc_method, Override::Status(status.try_into().expect("an HTTP status"), body));
    }

    /// Ends what `set_result`, `set_error` and `set_status` began for a method.
    pub fn unset(&self, rpc_method: &str) {
        self.shared.script.write().overrides.remove(rpc_method);
    }

    fn set_override(&self, rpc_method: &str, answer: Override) {
        self.shared.script.write().overrides.insert(rpc_method.to_owned(), answer);
    }

    /// Changes how it answers.
    pub fn answer_with(&self, answers: Answers) {
        self.shared.script.write().answers = answers;
    }

    /// Sends so many progress notifications (to calls that bring a token) and log messages before each tool result.
    pub fn before_result(&self, progress: u32, logs: u32) {
        let mut script = self.shared.script.write();
        (script.progress, script.logs) = (progress, logs);
    }

    /// Adds a tool by its raw definition and tells the `GET` streams.
    pub fn add_tool(&self, raw: &str) {
        self.shared.script.write().add_tool(raw);
        self.notify(content::TOOLS_CHANGED);
    }

    /// Replaces the tools by raw definitions and tells the `GET` streams.
    pub fn set_tools(&self, raw: &[&str]) {
        self.shared.script.write().set_tools(raw.iter().map(|&tool| tool.to_owned()).collect());
        self.notify(content::TOOLS_CHANGED);
    }

    /// Sends a raw message to the newest open `GET` stream of each session, and says to how many.
    pub fn notify(&self, raw: &str) -> usize {
        self.shared.notify(raw, |_| true)
    }

    /// Sends `notifications/resources/updated` to the sessions that subscribed to the URI, and says to how many.
    pub fn resource_updated(&self, uri: &str) -> usize {
        self.shared.notify(&content::resource_updated(uri), |session| session.subscriptions.contains(uri))
    }

    // How it misbehaves.

    /// Lets tool calls wait before their result.
    pub fn stall(&self, stall: Stall) {
        self.shared.script.write().stall = stall;
    }

    /// Lets requests of a method (`initialize`, `tools/list`, …) hang unanswered, until [`FakeMcp::release`].
    pub fn hang_on(&self, rpc_method: &str) {
        self.shared.script.write().hanging.insert(rpc_method.to_owned());
    }

    /// Ends every stall and every hang, for what waits and for what comes.
    pub fn release(&self) {
        let mut script = self.shared.script.write();
        script.stall = Stall::No;
        script.hanging.clear();
        self.shared.releases.send_modify(|releases| *releases += 1);
    }

    /// Closes the connection of the next `times` tool calls after executing them, without an answer.
    pub fn cut_after_executing(&self, times: u32) {
        self.shared.script.write().cut_before_answer = times;
    }

    /// Begins to answer the next `times` tool calls (with an event stream and the notifications asked for), then
    /// closes the connection instead of sending the result.
    pub fn cut_mid_stream(&self, times: u32) {
        self.shared.script.write().cut_mid_stream = times;
    }

    /// Forgets the session of the next request that brings one, and answers it with this status (404 or 400) without
    /// executing it.
    pub fn reject_session_once(&self, status: u16) {
        self.shared.script.write().reject_session = Some(status.try_into().expect("an HTTP status"));
    }

    /// Forgets all sessions, as after a restart; their `GET` streams end.
    pub fn forget_sessions(&self) {
        self.shared.sessions.lock().clear();
    }

    /// Ends the `GET` streams; their sessions stay.
    pub fn close_streams(&self) {
        self.shared.sessions.lock().values_mut().for_each(|session| session.streams.clear());
    }

    /// Closes every connection and refuses new ones.
    pub async fn refuse(&self) {
        self.acceptor.refuse().await;
    }

    /// Accepts connections again, on the same port, with its sessions.
    pub async fn accept(&self) {
        self.acceptor.listen().await;
    }

    /// Closes every connection and goes on accepting.
    pub async fn drop_connections(&self) {
        self.acceptor.close_all().await;
    }
}

/// What a [`FakeMcp`] counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Executions by tool. An execution counts when it begins.
    pub executions: BTreeMap<String, u64>,
    /// Requests by JSON-RPC method, executed or not.
    pub requests: BTreeMap<String, u64>,
    /// Notifications by JSON-RPC method.
    pub notifications: BTreeMap<String, u64>,
    /// Answers to requests of its own.
    pub responses: u64,
    /// Sessions that it issued.
    pub sessions_created: u64,
    /// Sessions that a client deleted.
    pub sessions_deleted: u64,
    /// `GET` streams that were opened.
    pub streams_opened: u64,
    /// Requests refused for their session.
    pub sessions_rejected: u64,
    /// Answers whose client closed the connection before they were complete.
    pub left_early: u64,
    /// Connections accepted.
    pub connections: u64,
}

impl Counts {
    /// Executions of one tool.
    pub fn calls(&self, tool: &str) -> u64 {
        self.executions.get(tool).copied().unwrap_or(0)
    }

    /// Executions of all tools.
    pub fn all_calls(&self) -> u64 {
        self.executions.values().sum()
    }

    /// Requests of one JSON-RPC method.
    pub fn requests_of(&self, rpc_method: &str) -> u64 {
        self.requests.get(rpc_method).copied().unwrap_or(0)
    }

    /// Notifications of one JSON-RPC method.
    pub fn notifications_of(&self, rpc_method: &str) -> u64 {
        self.notifications.get(rpc_method).copied().unwrap_or(0)
    }
}

/// One HTTP request as a [`FakeMcp`] received it.
#[derive(Debug, Clone)]
pub struct Received {
    /// The HTTP method.
    pub http_method: Method,
    /// The headers.
    pub headers: HeaderMap,
    /// The JSON-RPC method, if the body is a message that has one.
    pub rpc_method: Option<String>,
    /// The body, byte for byte.
    pub body: Bytes,
}

impl Received {
    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The `Mcp-Session-Id` that it brought.
    pub fn session(&self) -> Option<&str> {
        self.header("mcp-session-id")
    }

    /// The message's `params`, byte for byte.
    pub fn params(&self) -> Option<String> {
        envelope(&self.body).and_then(|message| message.params).map(|raw| raw.get().to_owned())
    }

    /// The message's `id`, byte for byte.
    pub fn id(&self) -> Option<String> {
        envelope(&self.body).and_then(|message| message.id).map(|raw| raw.get().to_owned())
    }
}

#[cfg(test)]
mod tests;
