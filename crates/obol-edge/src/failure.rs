//! Error kinds as HTTP statuses, and the refusals that stand outside of JSON-RPC.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use obol_model::Kind;
use serde::Serialize;

/// How long a client is asked to wait when a store cannot be asked (DESIGN §6.4).
pub(crate) const RETRY_AFTER_S: u64 = 1;

/// A refusal before anything of the request's own protocol was understood: the edge's answer to who and whether.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: Kind,
    /// A stable word for programs.
    pub(crate) code: &'static str,
    /// One sentence for people; names no address, header value or credential.
    pub(crate) message: String,
    /// Seconds after which a retry makes sense.
    pub(crate) retry_after_s: Option<u64>,
    /// The `WWW-Authenticate` challenge (RFC 6750) of a 401, or of a 403 that another token would lift.
    pub(crate) challenge: Option<String>,
}

impl Refusal {
    pub(crate) fn new(kind: Kind, code: &'static str, message: impl Into<String>) -> Self {
        let retry_after_s = matches!(kind, Kind::Unavailable | Kind::Stopping).then_some(RETRY_AFTER_S);
        Self { kind, code, message: message.into(), retry_after_s, challenge: None }
    }

    pub(crate) fn status(&self) -> StatusCode {
        status(self.kind)
    }

    /// The head of the answer, without content type and body.
    pub(crate) fn head(&self) -> http::response::Builder {
        let mut head = Response::builder().status(self.status());
        if let Some(seconds) = self.retry_after_s {
            head = head.header(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(challenge) = &self.challenge {
            head = head.header(header::WWW_AUTHENTICATE, challenge);
        }
        head
    }
}

/// The status of a kind. Toward MCP clients most refusals are HTTP 200 (DESIGN §9.6); that is decided there.
pub(crate) fn status(kind: Kind) -> StatusCode {
    match kind {
        Kind::InvalidRequest => StatusCode::BAD_REQUEST,
        Kind::Unauthenticated => StatusCode::UNAUTHORIZED,
        Kind::Forbidden => StatusCode::FORBIDDEN,
        Kind::NotFound => StatusCode::NOT_FOUND,
        Kind::Conflict => StatusCode::CONFLICT,
        Kind::Unprocessable => StatusCode::UNPROCESSABLE_ENTITY,
        Kind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Kind::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        Kind::Unavailable | Kind::Stopping => StatusCode::SERVICE_UNAVAILABLE,
        Kind::Upstream | Kind::OutcomeUnknown => StatusCode::BAD_GATEWAY,
        Kind::Timeout => StatusCode::GATEWAY_TIMEOUT,
        Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[derive(Serialize)]
struct Plain<'a> {
    code: &'a str,
    message: &'a str,
}

/// Outside of `/mcp` and `/v1` errors are small JSON objects.
impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        json(self.head(), &Plain { code: self.code, message: &self.message })
    }
}

/// An answer with a JSON body.
pub(crate) fn json(head: http::response::Builder, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => bytes_response(head, bytes),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// An answer whose JSON body is already written.
pub(crate) fn bytes_response(head: http::response::Builder, body: impl Into<Body>) -> Response {
    head.header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))
        .header(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))
        .body(body.into())
        .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}
