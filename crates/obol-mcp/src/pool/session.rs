use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use bytes::Bytes;
use obol_model::metric;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::sort::{Sorted, sort};
use super::{CallError, Endpoint, Outgoing, PoolOptions, Reply, Transport};
use crate::wire::{self, ProtocolVersion};

/// What a server said of itself in its `initialize` answer, as far as the gateway needs it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ServerCapabilities {
    /// It offers tools.
    pub tools: Option<ListCapability>,
    /// It offers resources.
    pub resources: Option<ResourcesCapability>,
    /// It offers prompts.
    pub prompts: Option<ListCapability>,
    /// It completes arguments.
    pub completions: Option<Present>,
    /// It sends log messages.
    pub logging: Option<Present>,
}

/// A capability that is an object; what it holds does not matter here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Present {}

/// A list of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ListCapability {
    /// It announces changes.
    pub list_changed: bool,
}

/// The resources of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ResourcesCapability {
    /// Single resources can be subscribed to.
    pub subscribe: bool,
    /// It announces changes of the list.
    pub list_changed: bool,
}

/// What is known of a server from its last `initialize`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) capabilities: ServerCapabilities,
    pub(super) instructions: Option<String>,
}

/// The rank of no log level at all.
pub(super) const NO_LEVEL: u8 = u8::MAX;

/// The verbosity of a log level: the lower, the more is logged.
pub(super) fn level_rank(level: &str) -> Option<u8> {
    const LEVELS: [&str; 8] =
        ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];
    LEVELS.iter().position(|l| *l == level).and_then(|p| u8::try_from(p).ok())
}

pub(super) fn level_name(rank: u8) -> Option<&'static str> {
    const LEVELS: [&str; 8] =
        ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];
    LEVELS.get(usize::from(rank)).copied()
}

/// One initialized upstream session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) born: Instant,
    pub(super) known: Arc<Known>,
    /// Calls that hold it.
    in_flight: AtomicUsize,
    /// Nobody takes it any more; it is closed when the last call has finished.
    retired: AtomicBool,
    /// The upstream has forgotten it.
    pub(super) lost: AtomicBool,
    /// Rank of the level that was set last.
    pub(super) level: AtomicU8,
    pub(super) setting_level: tokio::sync::Mutex<()>,
    /// Ends the reader of unsolicited messages.
    pub(super) pump: Mutex<Option<CancellationToken>>,
}

impl Session {
    pub(super) fn is_usable(&self, now: Instant, options: &PoolOptions) -> bool {
        !self.transport.is_closed()
            && (self.transport.is_durable() || now.saturating_duration_since(self.born) < options.max_age)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) == 0
    }

    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    pub(super) fn stop_pump(&self) {
        if let Some(token) = self.pump.lock().take() {
            token.cancel();
        }
    }

    /// Closes the transport. The upstream is only told when it still knows the session.
    pub(super) async fn close(&self, options: &PoolOptions) {
        self.stop_pump();
        if !self.lost.load(Ordering::Acquire) || self.transport.is_durable() {
            close(&self.transport, options).await;
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(token) = self.pump.get_mut().take() {
            token.cancel();
        }
        metrics::gauge!(metric::MCP_UPSTREAM_SESSIONS, "transport" => self.transport.name()).decrement(1.0);
    }
}

/// Closes a transport, with a bound of our own on top: one that is stuck must not keep the housekeeping.
pub(super) async fn close(transport: &Arc<dyn Transport>, options: &PoolOptions) {
    let within = options.close_timeout;
    if tokio::time::timeout(within + within / 4, transport.close(within)).await.is_err() {
        tracing::warn!(transport = transport.name(), "upstream session did not close in time");
    }
}

/// A call's hold on a session.
#[derive(Debug)]
pub(super) struct Lease {
    session: Arc<Session>,
    wake: Arc<Notify>,
}

impl Lease {
    /// Must be called under the lock of the slot whose current session this is, so that the session cannot be found
    /// idle in between.
    pub(super) fn new(session: Arc<Session>, wake: Arc<Notify>) -> Self {
        session.in_flight.fetch_add(1, Ordering::AcqRel);
        Self { session, wake }
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let last = self.session.in_flight.fetch_sub(1, Ordering::AcqRel) == 1;
        if last && self.session.retired.load(Ordering::Acquire) {
            self.wake.notify_one();
        }
    }
}

/// What a fresh session takes over from the one that it follows.
#[derive(Debug, Default)]
pub(super) struct Heritage {
    pub(super) level: u8,
    pub(super) subscriptions: BTreeSet<String>,
}

/// Ids for the requests of the handshake.
pub(super) type NextId<'a> = &'a (dyn Fn() -> u64 + Send + Sync);

/// Opens a session on a fresh transport: the handshake, then what it inherits.
pub(super) async fn open(
    transport: &Arc<dyn Transport>,
    endpoint: &Endpoint,
    options: &PoolOptions,
    next_id: NextId<'_>,
    heritage: Heritage,
) -> Result<Session, CallError> {
    let slow =
        CallError::Unavailable { reason: "it did not finish its handshake in time", retry_after: None };
    let shaken = tokio::time::timeout(options.initialize_timeout, async {
        let known = handshake(transport, endpoint, options, next_id).await?;
        let level = inherit(transport, &known, next_id, &heritage).await;
        Ok((known, level))
    });
    let (known, level) = shaken.await.unwrap_or(Err(slow))?;
    metrics::gauge!(metric::MCP_UPSTREAM_SESSIONS, "transport" => transport.name()).increment(1.0);
    Ok(Session {
        transport: Arc::clone(transport),
        born: Instant::now(),
        known: Arc::new(known),
        in_flight: AtomicUsize::new(0),
        retired: AtomicBool::new(false),
        lost: AtomicBool::new(false),
        level: AtomicU8::new(level),
        setting_level: tokio::sync::Mutex::new(()),
        pump: Mutex::new(None),
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InitializeResult {
    protocol_version: String,
    #[serde(default)]
    capabilities: ServerCapabilities,
    #[serde(default)]
    instructions: Option<String>,
}

/// `initialize` and `notifications/initialized` (lifecycle, "Initialization"). The gateway declares no client
/// capabilities: a shared session must not be asked questions that no client in particular could answer.
async fn handshake(
    transport: &Arc<dyn Transport>,
    endpoint: &Endpoint,
    options: &PoolOptions,
    next_id: NextId<'_>,
) -> Result<Known, CallError> {
    let params = format!(
        r#"{{"protocolVersion":"{}","capabilities":{{}},"clientInfo":{{"name":"obol","version":{}}}}}"#,
        endpoint.version,
        serde_json::Value::from(options.version)
    );
    let result = ask(transport, next_id(), "initialize", Some(&params)).await?;
    let answer: InitializeResult = serde_json::from_slice(&result)
        .map_err(|_| CallError::Protocol { reason: "its answer to `initialize` cannot be read" })?;
    // 2024-11-05 is what servers answer that were never updated; over these transports they speak 2025-03-26.
    if ProtocolVersion::parse(&answer.protocol_version).is_none() && answer.protocol_version != "2024-11-05" {
        return Err(CallError::Protocol { reason: "it offers no revision of MCP that the gateway speaks" });
    }
    transport.negotiated(&answer.protocol_version);
    let initialized = wire::notification("notifications/initialized", None);
    transport.send(initialized).await.map_err(|e| e.into_call_error(false))?;
    Ok(Known { capabilities: answer.capabilities, instructions: answer.instructions })
}

/// Brings log level and subscriptions of the previous session over. A refusal is no reason to have no session.
async fn inherit(transport: &Arc<dyn Transport>, known: &Known, next_id: NextId<'_>, from: &Heritage) -> u8 {
    let mut rank = NO_LEVEL;
    if known.capabilities.logging.is_some()
        && let Some(level) = level_name(from.level)
    {
        let params = format!(r#"{{"level":"{level}"}}"#);
        if let Err(e) = ask(transport, next_id(), "logging/setLevel", Some(&params)).await {
            tracing::debug!(error = %e, "upstream refused the log level");
        }
        rank = from.level;
    }
    if known.capabilities.resources.as_ref().is_some_and(|r| r.subscribe) {
        for uri in &from.subscriptions {
            let params = format!(r#"{{"uri":{}}}"#, serde_json::Value::from(uri.as_str()));
            if let Err(e) = ask(transport, next_id(), "resources/subscribe", Some(&params)).await {
                tracing::debug!(error = %e, "upstream refused to renew a subscription");
            }
        }
    }
    rank
}

/// One request whose notifications do not matter; its result as raw text.
pub(super) async fn ask(
    transport: &Arc<dyn Transport>,
    id: u64,
    method: &str,
    params: Option<&str>,
) -> Result<Bytes, CallError> {
    let outgoing =
        Outgoing { id, message: wire::request(id, method, params), initialize: method == "initialize" };
    let failed = |e: super::TransportError| e.into_call_error(false);
    match Arc::clone(transport).request(outgoing).await.map_err(failed)? {
        Reply::Whole(bytes) => match answer_in(transport, &bytes, id).await? {
            Some(result) => Ok(result),
            None => Err(CallError::Protocol { reason: "it answers something else than it was asked" }),
        },
        Reply::Stream(mut inbound) => loop {
            let Some(bytes) = inbound.next().await.map_err(failed)? else {
                return Err(CallError::Interrupted);
            };
            if let Some(result) = answer_in(transport, &bytes, id).await? {
                return Ok(result);
            }
        },
    }
}

async fn answer_in(
    transport: &Arc<dyn Transport>,
    bytes: &Bytes,
    id: u64,
) -> Result<Option<Bytes>, CallError> {
    let mut all = VecDeque::new();
    sort(bytes, id, None, &mut all)?;
    for sorted in all {
        match sorted {
            Sorted::Result(result) => return Ok(Some(result)),
            Sorted::Error(error) => return Err(CallError::Refused { code: error_code(&error) }),
            Sorted::Reply(reply) => {
                if let Err(e) = transport.send(reply).await {
                    tracing::debug!(error = %e, "upstream did not take an answer");
                }
            }
            Sorted::Notification(_) | Sorted::Shared(_) | Sorted::Nothing => {}
        }
    }
    Ok(None)
}

pub(super) fn error_code(error: &[u8]) -> i64 {
    #[derive(Deserialize)]
    struct Code {
        code: i64,
    }
    serde_json::from_slice::<Code>(error).map_or(0, |e| e.code)
}
