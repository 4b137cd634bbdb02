//! MCP Streamable HTTP as a transport (transports, "Streamable HTTP").

mod connect;
mod stream;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use obol_dial::{connect_reason, root_cause};
use reqwest::{Client, Response};
use url::Url;

pub use connect::HttpConnect;

use super::{Inbound, Outgoing, Reply, Transport, TransportError};
use crate::wire::{self, Object, RpcError};
use stream::SseStream;

const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const SSE: HeaderValue = HeaderValue::from_static("text/event-stream");
const JSON_OR_SSE: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");

/// The most of an error page that is looked at.
const MAX_ERROR_BODY: usize = 1 << 20;

/// One upstream session over HTTP. Requests are built from nothing: no header of a client can be among them.
struct HttpTransport {
    client: Client,
    url: Url,
    credential: Option<(HeaderName, HeaderValue)>,
    max_message: usize,
    /// The upstream's session id, when it gave one; it belongs to this transport alone.
    session: OnceLock<HeaderValue>,
    version: OnceLock<HeaderValue>,
    closed: AtomicBool,
}

impl fmt::Debug for HttpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpTransport").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}

impl HttpTransport {
    fn headers(&self, accept: HeaderValue) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(ACCEPT, accept);
        if let Some((name, value)) = &self.credential {
            headers.insert(name.clone(), value.clone());
        }
        if let Some(session) = self.session.get() {
            headers.insert(SESSION_ID, session.clone());
        }
        if let Some(version) = self.version.get() {
            headers.insert(PROTOCOL_VERSION, version.clone());
        }
        headers
    }

    async fn post(&self, message: Bytes) -> Result<Response, TransportError> {
        let mut headers = self.headers(JSON_OR_SSE);
        headers.insert(CONTENT_TYPE, JSON);
        let request = self.client.post(self.url.clone()).headers(headers).body(message);
        request.send().await.map_err(|e| failed(&e))
    }

    /// Opens a stream by GET; `last_event` resumes the stream that the event was on.
    async fn get(&self, last_event: Option<&HeaderValue>) -> Result<Option<Response>, TransportError> {
        let mut headers = self.headers(SSE);
        if let Some(id) = last_event {
            headers.insert(LAST_EVENT_ID, id.clone());
        }
        let response =
            self.client.get(self.url.clone()).headers(headers).send().await.map_err(|e| failed(&e))?;
        match response.status() {
            StatusCode::METHOD_NOT_ALLOWED => Ok(None),
            StatusCode::NOT_FOUND if self.session.get().is_some() => {
                Err(TransportError::SessionLost { answer: None })
            }
            status if !status.is_success() => Err(TransportError::Status(status.as_u16())),
            _ if is_type(&response, "text/event-stream") => Ok(Some(response)),
            _ => Ok(None),
        }
    }

    async fn exchange(self: Arc<Self>, outgoing: Outgoing) -> Result<Reply, TransportError> {
        let response = self.post(outgoing.message).await?;
        let status = response.status();
        if !status.is_success() {
            return self.refused(response, outgoing.id).await.map(Reply::Whole);
        }
        if outgoing.initialize
            && let Some(id) = response.headers().get(SESSION_ID)
            && self.session.set(id.clone()).is_err()
        {
            return Err(TransportError::Protocol("it was initialized twice"));
        }
        if is_type(&response, "text/event-stream") {
            return Ok(Reply::Stream(Box::new(SseStream::new(self, response))));
        }
        if status == StatusCode::ACCEPTED || status == StatusCode::NO_CONTENT {
            return Err(TransportError::Protocol("it took a request without answering it"));
        }
        if response.headers().contains_key(CONTENT_TYPE) && !is_type(&response, "application/json") {
            return Err(TransportError::Protocol("its answer is neither JSON nor an event stream"));
        }
        read(response, self.max_message).await.map(Reply::Whole)
    }

    /// An HTTP error: perhaps an answer, perhaps the end of the session, else just the status.
    async fn refused(&self, response: Response, id: u64) -> Result<Bytes, TransportError> {
        let status = response.status();
        if status.is_redirection() {
            // Never followed: the credential would go wherever the upstream says (DESIGN §16).
            return Err(TransportError::Protocol("it redirects, which the gateway does not follow"));
        }
        let body = read(response, self.max_message.min(MAX_ERROR_BODY)).await.unwrap_or_default();
        let found = error_in(&body);
        let code = found.map(|(_, code)| code);
        let says_lost = match status {
            StatusCode::NOT_FOUND => code != Some(RpcError::METHOD_NOT_FOUND),
            StatusCode::BAD_REQUEST => {
                // Codes with which SDKs refuse a session. Another code is about the call itself.
                matches!(code, None | Some(-32_000 | -32_001 | -32_600)) && blames_session(&body)
            }
            _ => false,
        };
        let answer = found.and_then(|(error, _)| {
            let id = serde_json::value::to_raw_value(&id).ok()?;
            Some(wire::raw_error_response(&id, error))
        });
        if says_lost && self.session.get().is_some() {
            return Err(TransportError::SessionLost { answer });
        }
        match answer {
            // The gateway's own credential was refused: nothing that the client could act on.
            Some(answer) if status != StatusCode::UNAUTHORIZED => Ok(answer),
            _ => Err(TransportError::Status(status.as_u16())),
        }
    }
}

/// The JSON-RPC error object in an error page, whatever its id: servers that refuse before they have read the id leave
/// it out, send `null` or put a word of their own there.
fn error_in(body: &[u8]) -> Option<(&str, i64)> {
    let object = Object::parse(std::str::from_utf8(body).ok()?).ok()?;
    let error = object.get("error").filter(|_| object.get("result").is_none())?.get();
    Some((error, Object::parse(error).ok()?.get("code")?.get().parse().ok()?))
}

/// Whether an error page says that the session is not known. Servers have no common code for that, only the word.
fn blames_session(body: &[u8]) -> bool {
    const COMPLAINTS: [&str; 8] =
        ["not found", "no valid", "invalid", "unknown", "expired", "missing", "does not exist", "terminated"];
    let text = String::from_utf8_lossy(body.get(..body.len().min(4096)).unwrap_or_default()).to_lowercase();
    text.contains("session") && COMPLAINTS.iter().any(|c| text.contains(c))
}

fn is_type(response: &Response, wanted: &str) -> bool {
    response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|v| v.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(wanted))
}

/// Reads a body within `max` bytes. One chunk, the usual case, is not copied.
async fn read(mut response: Response, max: usize) -> Result<Bytes, TransportError> {
    let length = response.headers().get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|l| l > max) {
        return Err(TransportError::TooLarge);
    }
    let Some(first) = response.chunk().await.map_err(|e| failed(&e))? else { return Ok(Bytes::new()) };
    if length == Some(first.len()) {
        return Ok(first);
    }
    let mut body = BytesMut::with_capacity(length.unwrap_or(first.len()));
    let mut next = Some(first);
    while let Some(chunk) = next {
        if body.len() + chunk.len() > max {
            return Err(TransportError::TooLarge);
        }
        body.extend_from_slice(&chunk);
        next = response.chunk().await.map_err(|e| failed(&e))?;
    }
    Ok(body.freeze())
}

/// What a failure of the client means for the request. Only a failed connect proves that nothing was sent; what hyper
/// itself could prove unsent it has already sent again.
fn failed(e: &reqwest::Error) -> TransportError {
    if e.is_connect() || e.is_builder() {
        tracing::debug!(error = root_cause(e), "upstream could not be connected");
        return TransportError::Unsent(connect_reason(e));
    }
    tracing::debug!(error = root_cause(e), "upstream connection broke");
    TransportError::Broken("the connection broke")
}

#[async_trait]
impl Transport for HttpTransport {
    fn name(&self) -> &'static str {
        "streamable_http"
    }

    fn request(self: Arc<Self>, outgoing: Outgoing) -> BoxFuture<'static, Result<Reply, TransportError>> {
        Box::pin(self.exchange(outgoing))
    }

    async fn send(&self, message: Bytes) -> Result<(), TransportError> {
        let response = self.post(message).await?;
        let status = response.status();
        if status.is_success() {
            // Servers close the connection when a body is left unread; there should be none.
            drop(read(response, MAX_ERROR_BODY).await);
            return Ok(());
        }
        if status == StatusCode::NOT_FOUND && self.session.get().is_some() {
            return Err(TransportError::SessionLost { answer: None });
        }
        Err(TransportError::Status(status.as_u16()))
    }

    async fn unsolicited(self: Arc<Self>) -> Result<Option<Box<dyn Inbound>>, TransportError> {
        let response = match self.get(None).await {
            // 405 is specified; many servers without such a stream say something else.
            Err(TransportError::Status(400 | 404 | 406 | 410 | 501)) => None,
            other => other?,
        };
        Ok(response.map(|r| Box::new(SseStream::new(self, r)) as Box<dyn Inbound>))
    }

    fn is_durable(&self) -> bool {
        false
    }

    fn negotiated(&self, version: &str) {
        if let Ok(version) = HeaderValue::from_str(version)
            && self.version.set(version).is_err()
        {
            tracing::debug!("the revision was negotiated twice");
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    async fn close(&self, within: Duration) {
        if self.closed.swap(true, Ordering::AcqRel) || self.session.get().is_none() {
            return;
        }
        let request = self.client.delete(self.url.clone()).headers(self.headers(JSON_OR_SSE)).timeout(within);
        match request.send().await {
            // 405 is how a server says that it ends sessions by itself, 404 that it has done so.
            Ok(response) => tracing::trace!(status = response.status().as_u16(), "upstream session ended"),
            Err(e) => tracing::debug!(error = root_cause(&e), "upstream session could not be ended"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_say_in_many_ways_that_a_session_is_gone() {
        for body in [
            r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: No valid session ID provided"},"id":7}"#,
            r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"Session not found"}}"#,
            "Invalid session ID",
            "Session expired",
        ] {
            assert!(blames_session(body.as_bytes()), "{body}");
        }
        for body in ["", "Bad Request", "session", r#"{"error":"invalid arguments"}"#] {
            assert!(!blames_session(body.as_bytes()), "{body}");
        }
    }

    #[test]
    fn an_error_is_found_with_and_without_id() {
        for body in [
            r#"{"jsonrpc":"2.0","error":{"code":-1,"message":""},"id":7}"#,
            r#"{"jsonrpc":"2.0","error":{"code":-1,"message":""},"id":null}"#,
            r#"{"jsonrpc":"2.0","error":{"code":-1,"message":""}}"#,
            r#"{"jsonrpc":"2.0","error":{"code":-1,"message":""},"id":"server-error"}"#,
        ] {
            assert_eq!(error_in(body.as_bytes()), Some((r#"{"code":-1,"message":""}"#, -1)), "{body}");
        }
        for body in ["", "<html>", r#"{"error":"no"}"#, r#"{"jsonrpc":"2.0","id":7,"result":{"code":-1}}"#] {
            assert_eq!(error_in(body.as_bytes()), None, "{body}");
        }
    }
}
