//! A model provider as the real ones are: both dialects on one listener, with their refusals, ids and usage.
//!
//! Where [`FakeLlm`](crate::fake_llm::FakeLlm) says exactly what a test scripts, this one reads a request as OpenAI's
//! or Anthropic's API would: it knows its models, refuses what they refuse, calls tools, remembers responses, and keeps
//! a bill that a test can hold against another's. The official SDKs are content with it (`tests/tests/system`).
//!
//! **What it says.** The text that it is asked (the last of the conversation: a user's message, or the tool results
//! that stand there instead) comes back word for word. With tools, and a user's message last, it calls the first tool
//! (or the one that the request names) with arguments made from the tool's schema: strings are the text, numbers count
//! its words, booleans are true. With a JSON schema as format it answers an instance made the same way.
//!
//! **What it charges.** A token is a word, as whitespace separates them, of any text of the request (system prompt,
//! messages, tool results, what a previous response remembers) or of the answer. A declared tool is [`TOOL_TOKENS`], a
//! tool call [`CALL_TOKENS`] (made now, or told in the history), an image [`IMAGE_TOKENS`]. Thinking in the history is
//! free. Marks in the text that is asked change this:
//!
//! * `#cached=N`, `#cache_write=N`: N further input tokens, read from or written to the cache;
//! * `#reasoning=N`: N further output tokens of reasoning (to Anthropic callers only if they turned thinking on);
//! * `#words=N`: the answer is N words instead of the echo;
//! * `#calls=N`: N parallel tool calls instead of one;
//! * `#dies_after=N`: a stream has N words and then the dialect's error event, and ends.
//!
//! The whole answer is charged when it begins, whether or not its reader stays.

mod ask;
mod chat;
mod embeddings;
mod http_side;
mod ids;
mod messages;
mod openai;
mod refusal;
mod responses;
mod schema;
mod store;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

use crate::accept::Acceptor;
use crate::answer::{self, origin};
use crate::fake_llm::Raw;

pub use crate::fake_llm::Received;

use self::ids::Ids;
use self::store::Store;

/// Input tokens of a declared tool.
pub const TOOL_TOKENS: u64 = 20;
/// Tokens of a tool call: output when it is made, input when the history tells of it.
pub const CALL_TOKENS: u64 = 10;
/// Input tokens of an image.
pub const IMAGE_TOKENS: u64 = 100;

/// Requests kept for the test to look at.
const KEPT_REQUESTS: usize = 4096;

/// An endpoint that costs something, or could.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Endpoint {
    /// `POST /v1/chat/completions`
    ChatCompletions,
    /// `POST /v1/responses`
    Responses,
    /// `POST /v1/embeddings`
    Embeddings,
    /// `POST /v1/messages`
    Messages,
    /// `POST /v1/messages/count_tokens`: requests are counted, tokens are free.
    CountTokens,
}

/// What was charged for one model at one endpoint. Refused requests cost nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Charged {
    /// Requests answered.
    pub requests: u64,
    /// All input tokens, those of the cache included.
    pub input: u64,
    /// Of these, read from the cache.
    pub cached: u64,
    /// Of these, written to the cache.
    pub cache_written: u64,
    /// All output tokens, reasoning included.
    pub output: u64,
    /// Of these, reasoning.
    pub reasoning: u64,
}

impl Charged {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.input += other.input;
        self.cached += other.cached;
        self.cache_written += other.cache_written;
        self.output += other.output;
        self.reasoning += other.reasoning;
    }
}

/// What goes wrong with one `POST`, instead of or during its answer.
#[derive(Debug, Clone)]
pub enum Trouble {
    /// This status, with an error object in the dialect of the endpoint.
    Status(u16),
    /// Exactly these bytes.
    Raw(Raw),
    /// The connection is closed instead of an answer.
    Cut,
    /// A stream's connection is closed after this many events. The request is charged.
    CutAfter(usize),
    /// A stream stops after this many events until [`ModelServer::release`]. The request is charged.
    HoldAfter(usize),
}

/// What a server is like from its start. Made by [`ModelServer::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    key: Option<String>,
    openai: Vec<String>,
    embedding: Vec<String>,
    anthropic: Vec<String>,
}

impl Builder {
    /// The only key that it accepts. By default it accepts any, but demands one: as a bearer, or from Anthropic callers
    /// also as `x-api-key`.
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        self.key = Some(key.to_owned());
        self
    }

    /// The models of chat completions and responses, by default `gpt-fake` and `gpt-fake-large`. Others are not found,
    /// those of the other dialect included.
    #[must_use]
    pub fn openai_models(mut self, models: &[&str]) -> Self {
        self.openai = owned(models);
        self
    }

    /// The models of embeddings, by default `embed-fake`.
    #[must_use]
    pub fn embedding_models(mut self, models: &[&str]) -> Self {
        self.embedding = owned(models);
        self
    }

    /// The models of messages, by default `claude-fake` and `claude-fake-large`.
    #[must_use]
    pub fn anthropic_models(mut self, models: &[&str]) -> Self {
        self.anthropic = owned(models);
        self
    }

    /// Starts it on a port of its own.
    pub async fn start(self) -> ModelServer {
        let shared = Arc::new(Shared {
            config: self,
            ids: Ids::new(),
            store: Mutex::default(),
            troubles: Mutex::default(),
            charged: Mutex::default(),
            received: Mutex::default(),
            calls: AtomicU64::default(),
            left_early: Arc::default(),
            changed: Notify::new(),
            releases: watch::channel(0).0,
        });
        let for_connections = shared.clone();
        let acceptor = Acceptor::start(move |stream| {
            let shared = for_connections.clone();
            answer::serve(stream, move |request| http_side::handle(request, shared.clone()))
        });
        ModelServer { acceptor, shared }
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// The running server.
#[derive(Debug)]
pub struct ModelServer {
    acceptor: Acceptor,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: Builder,
    ids: Ids,
    store: Mutex<Store>,
    troubles: Mutex<VecDeque<Trouble>>,
    charged: Mutex<BTreeMap<(Endpoint, String), Charged>>,
    received: Mutex<VecDeque<Received>>,
    calls: AtomicU64,
    left_early: Arc<AtomicU64>,
    changed: Notify,
    releases: watch::Sender<u64>,
}

impl ModelServer {
    /// Starts one with everything at its default.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// Describes one.
    pub fn builder() -> Builder {
        Builder {
            key: None,
            openai: owned(&["gpt-fake", "gpt-fake-large"]),
            embedding: owned(&["embed-fake"]),
            anthropic: owned(&["claude-fake", "claude-fake-large"]),
        }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.acceptor.addr()
    }

    /// `http://127.0.0.1:PORT`: what Anthropic's SDKs take.
    pub fn origin(&self) -> String {
        origin(self.addr())
    }

    /// `http://127.0.0.1:PORT/v1`: what OpenAI's SDKs take.
    pub fn base_url(&self) -> String {
        format!("{}/v1", self.origin())
    }

    /// What goes wrong with the next `POST` that has a key; several queue up.
    pub fn trouble_once(&self, trouble: Trouble) {
        self.shared.troubles.lock().push_back(trouble);
    }

    /// Ends every hold that waits now.
    pub fn release(&self) {
        self.shared.releases.send_modify(|releases| *releases += 1);
    }

    /// The bill so far, by endpoint and model.
    pub fn bill(&self) -> BTreeMap<(Endpoint, String), Charged> {
        self.shared.charged.lock().clone()
    }

    /// What was charged for a model at an endpoint.
    pub fn charged(&self, endpoint: Endpoint, model: &str) -> Charged {
        self.shared.charged.lock().get(&(endpoint, model.to_owned())).copied().unwrap_or_default()
    }

    /// What was charged in all.
    pub fn charged_in_all(&self) -> Charged {
        let mut sum = Charged::default();
        for charged in self.shared.charged.lock().values() {
            sum.add(*charged);
        }
        sum
    }

    /// `POST`s received, whatever was answered.
    pub fn calls(&self) -> u64 {
        self.shared.calls.load(Ordering::SeqCst)
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
            assert!(timeout_at(end, changed).await.is_ok(), "the model server only got {so_far} calls");
        }
    }

    /// Streams whose reader left before they were complete.
    pub fn left_early(&self) -> u64 {
        self.shared.left_early.load(Ordering::SeqCst)
    }

    /// The requests received, oldest first; the last few thousand.
    pub fn received(&self) -> Vec<Received> {
        self.shared.received.lock().iter().cloned().collect()
    }

    /// Responses that it remembers.
    pub fn stored_responses(&self) -> Vec<String> {
        self.shared.store.lock().ids()
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
