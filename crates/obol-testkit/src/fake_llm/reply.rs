//! What a test can have the model server say.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

/// What the server answers to a completion (or any other `POST`).
#[derive(Debug, Clone, Default)]
pub enum Reply {
    /// Echoes the last user message, as a real server would.
    #[default]
    Echo,
    /// Exactly these bytes.
    Raw(Raw),
    /// Nothing until [`FakeLlm::release`](super::FakeLlm::release), then as [`Reply::Echo`].
    Stall,
    /// Closes the connection instead of answering.
    Cut,
    /// Streams an echo and closes the connection after this many events.
    CutAfter(usize),
}

impl Reply {
    /// An OpenAI error object with this status.
    pub fn status(status: u16) -> Self {
        let body = format!(
            r#"{{"error":{{"message":"scripted {status}","type":"scripted_error","param":null,"code":"scripted_{status}"}}}}"#
        );
        Self::Raw(Raw::json(body).status(status))
    }

    /// A whole JSON answer, byte for byte.
    pub fn json(body: impl Into<Bytes>) -> Self {
        Self::Raw(Raw::json(body))
    }

    /// A whole event stream in these chunks, byte for byte.
    pub fn events<B: Into<Bytes>>(chunks: impl IntoIterator<Item = B>) -> Self {
        Self::Raw(Raw::events(chunks))
    }
}

/// An answer spelled out.
#[derive(Debug, Clone)]
pub struct Raw {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) steps: Vec<Step>,
    /// Sent as one body with a length.
    pub(super) whole: bool,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Send(Bytes),
    Wait(Duration),
    WaitForRelease,
    Cut,
}

impl Raw {
    /// `200`, `application/json`, one body with a length.
    pub fn json(body: impl Into<Bytes>) -> Self {
        Self { whole: true, ..Self::stream("application/json", [body]) }
    }

    /// `200`, `text/event-stream`, each chunk written by itself.
    pub fn events<B: Into<Bytes>>(chunks: impl IntoIterator<Item = B>) -> Self {
        Self::stream("text/event-stream", chunks)
    }

    fn stream<B: Into<Bytes>>(content_type: &'static str, chunks: impl IntoIterator<Item = B>) -> Self {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(content_type))]);
        let steps = chunks.into_iter().map(|chunk| Step::Send(chunk.into())).collect();
        Self { status: StatusCode::OK, headers, steps, whole: false }
    }

    /// Another status.
    #[must_use]
    pub fn status(mut self, status: u16) -> Self {
        self.status = status.try_into().expect("an HTTP status");
        self
    }

    /// Sets a header, the content type included.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        let name = HeaderName::try_from(name).expect("a header name");
        self.headers.insert(name, HeaderValue::try_from(value).expect("a header value"));
        self
    }

    /// Writes one more chunk.
    #[must_use]
    pub fn then(self, chunk: impl Into<Bytes>) -> Self {
        self.step(Step::Send(chunk.into()))
    }

    /// Waits before whatever follows.
    #[must_use]
    pub fn wait(self, time: Duration) -> Self {
        self.step(Step::Wait(time))
    }

    /// Waits for [`FakeLlm::release`](super::FakeLlm::release) before whatever follows.
    #[must_use]
    pub fn wait_for_release(self) -> Self {
        self.step(Step::WaitForRelease)
    }

    /// Closes the connection in mid-answer.
    #[must_use]
    pub fn cut(self) -> Self {
        self.step(Step::Cut)
    }

    fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self.whole = false;
        self
    }
}
