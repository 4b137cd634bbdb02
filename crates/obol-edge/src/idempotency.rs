//! `Idempotency-Key`: a request that a client sends again is answered again, and not made again (DESIGN §12.7).
//!
//! What is remembered, and when, is told in [`obol_meter::idempotency`]. An endpoint takes part in these steps:
//!
//! 1. After the body was read: `let key = idempotency::of(&headers, "/v1/chat/completions", &body)?` refuses keys that are
//!    none. The endpoint and the whole body are the fingerprint.
//! 2. Admission: `meter.admit(Start { idempotency: key, ..toll::start(…) }, terms)`. Every other request to the ledger is as
//!    it is without a key.
//! 3. `Err(Denied::Repeated(Repeated::Answered(answer)))` is answered with [`replay`]; every other [`Repeated`] is a refusal
//!    as any other, with its own code: `409` and `Retry-After: 1` while the first request is under way, `422` for another
//!    request, `409` for ever when it cannot be answered again ([`Denied::reset`](obol_meter::Denied::reset) is `None` then).
//! 4. Before [`UsageGuard::finish`](obol_meter::UsageGuard::finish): of a whole answer `guard.remember(StoredAnswer { … })`;
//!    of a stream `let recorder = guard.recorder()` (`None` without a key) when it begins, `recorder.record(&bytes)` for every
//!    chunk as the client gets it, and `guard.remember_recorded(recorder, 200, "text/event-stream")` once it was complete.
//!    What is not remembered (an error that cost nothing, which may be tried again) needs no call at all.

use aws_lc_rs::digest::{Context, SHA256};
use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use obol_meter::{Idempotency, Repeated, StoredAnswer};
use obol_model::Kind;

use crate::failure::Refusal;

/// What a client calls its request.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
/// `true` in an answer that was given before.
pub(crate) const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

const LONGEST_KEY: usize = 255;

/// What a client calls its request, as it spelled it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key<'a>(&'a [u8]);

/// Why it is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadKey {
    #[error("an idempotency key is 1 to {LONGEST_KEY} visible ASCII characters")]
    Shape,
    #[error("two `Idempotency-Key` headers: send one")]
    Twice,
    #[error("the header `Idempotency-Key` and `_meta` name different keys: send one of them")]
    Different,
}

impl<'a> Key<'a> {
    /// Of a value that may be anything.
    pub(crate) fn new(text: &'a [u8]) -> Result<Self, BadKey> {
        let fits = (1..=LONGEST_KEY).contains(&text.len()) && text.iter().all(u8::is_ascii_graphic);
        if fits { Ok(Self(text)) } else { Err(BadKey::Shape) }
    }

    /// The one of a request's headers, if it has one.
    pub(crate) fn of_headers(headers: &'a HeaderMap) -> Result<Option<Self>, BadKey> {
        let mut values = headers.get_all(&HEADER).iter();
        match (values.next(), values.next()) {
            (None, _) => Ok(None),
            (Some(value), None) => Self::new(value.as_bytes()).map(Some),
            (Some(_), Some(_)) => Err(BadKey::Twice),
        }
    }

    /// Together with what is asked for, in parts whose borders count.
    pub(crate) fn with<'b>(self, request: impl IntoIterator<Item = &'b [u8]>) -> Idempotency {
        let mut fingerprint = Context::new(&SHA256);
        for part in request {
            fingerprint.update(&part.len().to_be_bytes());
            fingerprint.update(part);
        }
        let mut key = Context::new(&SHA256);
        key.update(self.0);
        Idempotency { key: bytes(key), fingerprint: bytes(fingerprint) }
    }
}

fn bytes(digest: Context) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.iter_mut().zip(digest.finish().as_ref()).for_each(|(to, from)| *to = *from);
    bytes
}

impl From<BadKey> for Refusal {
    fn from(bad: BadKey) -> Self {
        Self::new(Kind::InvalidRequest, "invalid_idempotency_key", bad.to_string())
    }
}

/// The key of a request over HTTP, with what stands for the request.
///
/// # Errors
/// When the header is no key.
pub(crate) fn of(headers: &HeaderMap, endpoint: &str, body: &[u8]) -> Result<Option<Idempotency>, Refusal> {
    let key = Key::of_headers(headers)?;
    Ok(key.map(|key| key.with([endpoint.as_bytes(), body])))
}

/// The answer of before, as it was but for a header that says so.
pub(crate) fn replay(answer: StoredAnswer) -> Response {
    let StoredAnswer { status, content_type, body } = answer;
    let is_stream = content_type.starts_with("text/event-stream");
    let caching = if is_stream { "no-cache, no-transform" } else { "no-store" };
    let mut head = Response::builder()
        .status(status)
        .header(header::CONTENT_TYPE, content_type)
        .header(header::CACHE_CONTROL, HeaderValue::from_static(caching))
        .header(REPLAYED, HeaderValue::from_static("true"));
    if is_stream {
        head = head.header("x-accel-buffering", HeaderValue::from_static("no"));
    }
    head.body(Body::from(body)).unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

/// What a caller is told of a request that is not made again.
pub(crate) fn message(repeated: &Repeated) -> &'static str {
    match repeated {
        Repeated::Answered(_) => "the request with this idempotency key was answered before",
        Repeated::InFlight => "the request with this idempotency key is under way",
        Repeated::OtherRequest => {
            "another request was sent with this idempotency key: a key stands for one request, word for word"
        }
        Repeated::OutcomeUnknown => {
            "the request with this idempotency key may or may not have been executed; to run it once more, send another key"
        }
        Repeated::NotReplayable => {
            "the request with this idempotency key was executed, and its answer was not kept; to run it once more, send \
             another key"
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn headers(keys: &[&[u8]]) -> HeaderMap {
        keys.iter().map(|key| (HEADER, HeaderValue::from_bytes(key).unwrap())).collect()
    }

    #[test]
    fn keys_are_visible_ascii_of_bounded_length() {
        for good in [&b"a"[..], b"\"8e03978e-40d5-43dd-bc93-6894a57f9324\"", &[b'x'; 255]] {
            assert_eq!(Key::of_headers(&headers(&[good])), Ok(Some(Key(good))));
        }
        for bad in [&b""[..], b"a b", b"a\tb", "ä".as_bytes(), &[b'x'; 256]] {
            assert_eq!(Key::of_headers(&headers(&[bad])), Err(BadKey::Shape), "{bad:?}");
        }
        assert_eq!(Key::of_headers(&headers(&[b"a", b"a"])), Err(BadKey::Twice));
        assert_eq!(Key::of_headers(&headers(&[])), Ok(None));
    }

    #[test]
    fn a_fingerprint_is_of_the_endpoint_and_the_whole_body() {
        let all = headers(&[b"k"]);
        let of = |endpoint, body: &str| of(&all, endpoint, body.as_bytes()).unwrap().unwrap();
        let one = of("/v1/responses", "{}");
        assert_eq!(one, of("/v1/responses", "{}"));
        for other in [of("/v1/embeddings", "{}"), of("/v1/responses", "{} "), of("/v1/response", "s{}")] {
            assert_eq!(one.key, other.key);
            assert_ne!(one.fingerprint, other.fingerprint);
        }
    }

    #[test]
    fn an_answer_is_given_again_as_it_was() {
        let stored = |content_type: &str| StoredAnswer {
            status: 404,
            content_type: content_type.into(),
            body: Bytes::from_static(b"{}"),
        };
        let response = replay(stored("application/json"));
        assert_eq!(response.status(), 404);
        assert_eq!(response.headers()[&REPLAYED], "true");
        assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
        let response = replay(stored("text/event-stream; charset=utf-8"));
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream; charset=utf-8");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
    }
}
