//! A scripted OpenAI-compatible model server.
//!
//! By default it echoes the last user message, plainly or as a stream of words, with a usage that counts words; told
//! otherwise it answers with exact bytes, chunk by chunk, stalls, fails, or breaks off.

mod http_side;
mod reply;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

use crate::accept::Acceptor;
use crate::answer::{self, origin};

pub(crate) use self::http_side::raw_answer;
pub use self::reply::{Raw, Reply};

/// Requests kept for the test to look at.
const KEPT_REQUESTS: usize = 4096;

/// What a server is like from its start. Made by [`FakeLlm::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    models: Vec<String>,
    bearer: Option<String>,
    recording: bool,
}

impl Builder {
    /// The models that it lists; by default `fake-small` and `fake-large`. It answers for any name.
    #[must_use]
    pub fn models(mut self, models: &[&str]) -> Self {
        self.models = models.iter().map(|&model| model.to_owned()).collect();
        self
    }

    /// Answers `401` unless a request brings this bearer.
    #[must_use]
    pub fn require_bearer(mut self, token: &str) -> Self {
        self.bearer = Some(token.to_owned());
        self
    }

    /// Whether it keeps what it received; by default it does. A benchmark turns it off.
    #[must_use]
    pub fn recording(mut self, kept: bool) -> Self {
        self.recording = kept;
        self
    }

    /// Starts it on a port of its own.
    pub async fn start(self) -> FakeLlm {
        let shared = Arc::new(Shared {
            config: self,
            reply: Mutex::default(),
            once: Mutex::default(),
            calls: Mutex::default(),
            number: AtomicU64::default(),
            left_early: Arc::default(),
            changed: Notify::new(),
            received: Mutex::default(),
            releases: watch::channel(0).0,
        });
        let for_connections = shared.clone();
        let acceptor = Acceptor::start(move |stream| {
            let shared = for_connections.clone();
            answer::serve(stream, move |request| http_side::handle(request, shared.clone()))
        });
        FakeLlm { acceptor, shared }
    }
}

/// The running server.
#[derive(Debug)]
pub struct FakeLlm {
    acceptor: Acceptor,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: Builder,
    reply: Mutex<Reply>,
    once: Mutex<VecDeque<Reply>>,
    calls: Mutex<BTreeMap<String, u64>>,
    number: AtomicU64,
    left_early: Arc<AtomicU64>,
    changed: Notify,
    received: Mutex<VecDeque<Received>>,
    releases: watch::Sender<u64>,
}

/// One request as a [`FakeLlm`] received it.
#[derive(Debug, Clone)]
pub struct Received {
    /// The HTTP method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, byte for byte.
    pub body: Bytes,
}

impl Received {
    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

impl FakeLlm {
    /// Starts one with everything at its default.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Describes one.
    pub fn builder() -> Builder {
        Builder {
            models: vec!["fake-small".to_owned(), "fake-large".to_owned()],
            bearer: None,
            recording: true,
        }
    }

    /// Where it listens, also after [`FakeLlm::refuse`].
    pub fn addr(&self) -> SocketAddr {
        self.acceptor.addr()
    }

    /// `http://127.0.0.1:PORT/v1`
    pub fn base_url(&self) -> String {
        format!("{}/v1", origin(self.addr()))
    }

    /// What it answers from now on.
    pub fn reply(&self, reply: Reply) {
        *self.shared.reply.lock() = reply;
    }

    /// What it answers to the next request only; several queue up.
    pub fn reply_once(&self, reply: Reply) {
        self.shared.once.lock().push_back(reply);
    }

    /// Ends every stall and every [`Raw::wait_for_release`] that waits now.
    pub fn release(&self) {
        self.shared.releases.send_modify(|releases| *releases += 1);
    }

    /// `POST`s received, whatever was answered.
    pub fn calls(&self) -> u64 {
        self.shared
            .calls
            .lock()
            .iter()
            .filter(|(path, _)| *path != "/v1/models")
            .map(|(_, calls)| calls)
            .sum()
    }

    /// Requests received for one path, such as `/v1/chat/completions`.
    pub fn calls_of(&self, path: &str) -> u64 {
        self.shared.calls.lock().get(path).copied().unwrap_or(0)
    }

    /// Answers whose client closed the connection before they were complete.
    pub fn left_early(&self) -> u64 {
        self.shared.left_early.load(Ordering::SeqCst)
    }

    /// Connections accepted.
    pub fn connections(&self) -> u64 {
        self.acceptor.accepted()
    }

    /// Waits until it received so many `POST`s.
    ///
    /// # Panics
    /// When that takes more than ten seconds.
    pub async fn wait_for_calls(&self, calls: u64) {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let so_far = self.calls();
            if so_far >= calls {
                return;
            }
            assert!(timeout_at(end, changed).await.is_ok(), "the fake model server only got {so_far} calls");
        }
    }

    /// The requests received, oldest first; the last few thousand.
    pub fn received(&self) -> Vec<Received> {
        self.shared.received.lock().iter().cloned().collect()
    }

    /// The body of the last `POST`, byte for byte.
    pub fn last_body(&self) -> Option<Bytes> {
        let received = self.shared.received.lock();
        received.iter().rev().find(|one| one.method == Method::POST).map(|one| one.body.clone())
    }

    /// Closes every connection and refuses new ones.
    pub async fn refuse(&self) {
        self.acceptor.refuse().await;
    }

    /// Accepts connections again, on the same port.
    pub async fn accept(&self) {
        self.acceptor.listen().await;
    }
}

#[cfg(test)]
mod tests;
