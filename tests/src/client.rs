//! A client of the gateway that shows what is on the wire, byte for byte.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::HeaderMap;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout_at};

use crate::SOON;

/// An HTTP client that does not wait for ever: a hang is a failure of its own, not of the test's time limit.
///
/// # Panics
/// When it cannot be made.
pub fn http() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().expect("an HTTP client")
}

/// What a client of MCP accepts.
pub const ACCEPT: &str = "application/json, text/event-stream";

/// An answer.
#[derive(Debug, Clone)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

impl Reply {
    /// Sends a request and reads all of the answer.
    ///
    /// # Panics
    /// When there is no answer.
    pub async fn of(request: RequestBuilder) -> Self {
        Self::try_of(request).await.unwrap_or_else(|why| panic!("no answer: {why:?}"))
    }

    /// Sends a request and reads all of the answer.
    ///
    /// # Errors
    /// When there is no whole answer.
    pub async fn try_of(request: RequestBuilder) -> Result<Self, reqwest::Error> {
        Self::read(request.send().await?).await
    }

    /// Reads all of an answer whose head is here.
    ///
    /// # Errors
    /// When it does not come to its end.
    pub async fn read(response: reqwest::Response) -> Result<Self, reqwest::Error> {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Ok(Self { status, headers, body: response.bytes().await? })
    }

    /// A header, empty when it is not there.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("a header of text"))
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body of text")
    }

    /// The messages, each as its text: those of the events of a stream, else the body.
    pub fn messages(&self) -> Vec<String> {
        if !self.header("content-type").starts_with("text/event-stream") {
            return vec![self.text().to_owned()];
        }
        self.text().split("\n\n").filter_map(data).collect()
    }

    /// The last message, which is the answer.
    ///
    /// # Panics
    /// When it is no JSON.
    pub fn json(&self) -> Value {
        let last = self.messages().pop().unwrap_or_default();
        serde_json::from_str(&last).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The member of the last message as it is spelled.
    ///
    /// # Panics
    /// When it has no such member.
    pub fn raw(&self, member: &str) -> String {
        let last = self.messages().pop().unwrap_or_default();
        let members: std::collections::BTreeMap<String, Box<RawValue>> =
            serde_json::from_str(&last).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        members.get(member).unwrap_or_else(|| panic!("no `{member}`: {self:?}")).get().to_owned()
    }

    /// The result of a request that has to succeed.
    ///
    /// # Panics
    /// When it was refused.
    pub fn result(&self) -> Value {
        let mut message = self.json();
        assert!(self.status == 200 && message["result"].is_object(), "no result: {self:?}");
        message["result"].take()
    }

    /// The error of a request that has to be refused.
    ///
    /// # Panics
    /// When it was not.
    pub fn error(&self) -> Value {
        let mut message = self.json();
        assert!(message["error"].is_object(), "no error: {self:?}");
        message["error"].take()
    }
}

fn data(event: &str) -> Option<String> {
    let lines: Vec<&str> = event.lines().filter_map(|line| line.strip_prefix("data:")).collect();
    let lines: Vec<&str> = lines.into_iter().map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// A client of `/mcp` with a session, or not yet.
#[derive(Debug)]
pub struct Mcp {
    http: reqwest::Client,
    url: String,
    key: String,
    session: Option<String>,
    next: AtomicU64,
}

impl Mcp {
    /// A client without a session.
    pub fn new(base_url: &str, key: &str) -> Self {
        Self {
            http: http(),
            url: format!("{base_url}/mcp"),
            key: key.to_owned(),
            session: None,
            next: AtomicU64::new(1),
        }
    }

    /// Opens a session of the newest legacy revision.
    pub async fn connect(base_url: &str, key: &str) -> Self {
        Self::connect_as(base_url, key, "2025-11-25").await
    }

    /// Opens a session of a revision.
    pub async fn connect_as(base_url: &str, key: &str, version: &str) -> Self {
        let mut client = Self::new(base_url, key);
        client.initialize(version).await;
        client
    }

    async fn initialize(&mut self, version: &str) {
        let params = format!(
            r#"{{"protocolVersion":"{version}","capabilities":{{}},"clientInfo":{{"name":"test","version":"1"}}}}"#
        );
        let reply = self.rpc("initialize", &params).await;
        assert_eq!(reply.result()["protocolVersion"], version);
        self.session = Some(reply.header("mcp-session-id").to_owned());
        let noted = self.send(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).await;
        assert_eq!((noted.status, noted.body.len()), (202, 0), "{noted:?}");
    }

    /// The same session, elsewhere.
    #[must_use]
    pub fn at(&self, base_url: &str) -> Self {
        Self { session: self.session.clone(), ..Self::new(base_url, &self.key) }
    }

    /// Another session id, or none.
    #[must_use]
    pub fn with_session(self, session: Option<&str>) -> Self {
        Self { session: session.map(str::to_owned), ..self }
    }

    /// The session id.
    ///
    /// # Panics
    /// Without a session.
    pub fn session(&self) -> &str {
        self.session.as_deref().expect("a session")
    }

    /// A request with the headers that a client sends.
    pub fn request(&self, method: Method) -> RequestBuilder {
        let request = self.http.request(method, &self.url).bearer_auth(&self.key).header("accept", ACCEPT);
        match &self.session {
            Some(session) => request.header("mcp-session-id", session),
            None => request,
        }
    }

    /// A `POST` with a body that is declared as JSON.
    pub fn post(&self, body: impl Into<reqwest::Body>) -> RequestBuilder {
        self.request(Method::POST).header("content-type", "application/json").body(body)
    }

    /// Posts a body.
    pub async fn send(&self, body: impl Into<reqwest::Body>) -> Reply {
        Reply::of(self.post(body)).await
    }

    /// Sends a request with raw params.
    pub async fn rpc(&self, method: &str, params: &str) -> Reply {
        let id = self.next.fetch_add(1, Ordering::SeqCst);
        self.send(message(&id.to_string(), method, params)).await
    }

    /// The result of a request that has to succeed.
    pub async fn ok(&self, method: &str, params: &str) -> Value {
        self.rpc(method, params).await.result()
    }

    /// Calls a tool with raw arguments.
    pub async fn call(&self, tool: &str, arguments: &str) -> Reply {
        self.rpc("tools/call", &format!(r#"{{"name":"{tool}","arguments":{arguments}}}"#)).await
    }

    /// The names in a list.
    pub async fn names(&self, method: &str, member: &str, field: &str) -> Vec<String> {
        let result = self.ok(method, "{}").await;
        let items = result[member].as_array().expect("a list");
        items.iter().map(|item| item[field].as_str().expect("a name").to_owned()).collect()
    }

    /// The names of the tools.
    pub async fn tools(&self) -> Vec<String> {
        self.names("tools/list", "tools", "name").await
    }

    /// Opens the `GET` stream.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn listen(&self) -> Events {
        let response = self.request(Method::GET).send().await.expect("an answer");
        assert_eq!(response.status(), 200);
        let mut events = Events::of(response);
        // The comment that says that it is open: only what happens from now on is owed.
        events.next(SOON).await;
        events
    }

    /// Ends the session.
    pub async fn delete(&self) -> Reply {
        Reply::of(self.request(Method::DELETE)).await
    }
}

/// A request as text.
pub fn message(id: &str, method: &str, params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#)
}

/// An open stream of events.
pub struct Events {
    chunks: Pin<Box<dyn Stream<Item = reqwest::Result<Bytes>> + Send>>,
    buffer: String,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

impl Events {
    /// The events of an answer.
    pub fn of(response: reqwest::Response) -> Self {
        Self { chunks: Box::pin(response.bytes_stream()), buffer: String::new() }
    }

    /// The next event or comment as it stands on the wire; `None` when the stream ended.
    ///
    /// # Panics
    /// When nothing comes in time, or the stream breaks off.
    pub async fn next(&mut self, within: Duration) -> Option<String> {
        let end = Instant::now() + within;
        loop {
            if let Some((event, rest)) = self.buffer.split_once("\n\n") {
                let (event, rest) = (event.to_owned(), rest.to_owned());
                self.buffer = rest;
                return Some(event);
            }
            let chunk = timeout_at(end, self.chunks.next()).await;
            match chunk.unwrap_or_else(|_| panic!("no event within {within:?}, only {:?}", self.buffer)) {
                Some(chunk) => self.buffer.push_str(std::str::from_utf8(&chunk.expect("a chunk")).unwrap()),
                None => return None,
            }
        }
    }

    /// The next message.
    ///
    /// # Panics
    /// When none comes in time, or the stream ends.
    pub async fn message(&mut self, within: Duration) -> Value {
        let end = Instant::now() + within;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let event = self.next(left).await.expect("the stream goes on");
            if let Some(data) = data(&event) {
                return serde_json::from_str(&data).expect("a message");
            }
        }
    }

    /// Waits for a message of this method and returns it with those before it.
    ///
    /// # Panics
    /// When it does not come in time.
    pub async fn until(&mut self, method: &str, within: Duration) -> Vec<Value> {
        let end = Instant::now() + within;
        let mut seen = Vec::new();
        loop {
            let message = self.message(end.saturating_duration_since(Instant::now())).await;
            seen.push(message);
            if seen.last().is_some_and(|last| last["method"] == method) {
                return seen;
            }
        }
    }
}
