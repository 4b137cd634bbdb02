//! What the fake server remembers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use http::StatusCode;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, mpsc, watch};

use crate::answer::Cut;

use super::{Answers, Builder, Counts, Received, Stall, content};

/// Requests kept for the test to look at.
const KEPT_REQUESTS: usize = 4096;

/// Messages kept for a `GET` stream that is not read. Beyond that they are lost, as with a server that has no replay.
pub(super) const STREAM_BACKLOG: usize = 1024;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: Builder,
    pub(super) script: RwLock<Script>,
    pub(super) counts: Mutex<Counts>,
    pub(super) left_early: Arc<AtomicU64>,
    pub(super) changed: Notify,
    pub(super) received: Mutex<VecDeque<Received>>,
    pub(super) sessions: Mutex<HashMap<String, Session>>,
    pub(super) releases: watch::Sender<u64>,
}

/// What a test can change while the server runs.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) answers: Answers,
    pub(super) progress: u32,
    pub(super) logs: u32,
    pub(super) stall: Stall,
    pub(super) cut_before_answer: u32,
    pub(super) cut_mid_stream: u32,
    pub(super) reject_session: Option<StatusCode>,
    pub(super) hanging: HashSet<String>,
    pub(super) overrides: HashMap<String, Override>,
    pub(super) raw_result: Arc<str>,
    tools: Vec<String>,
    page_size: Option<usize>,
    pages: Arc<[String]>,
}

#[derive(Debug, Clone)]
pub(super) enum Override {
    Result(Arc<str>),
    Error(Arc<str>),
    Status(StatusCode, Bytes),
}

#[derive(Debug, Default)]
pub(super) struct Session {
    pub(super) counter: u64,
    pub(super) subscriptions: BTreeSet<String>,
    pub(super) streams: Vec<mpsc::Sender<Result<Bytes, Cut>>>,
}

impl Session {
    pub(super) fn open_streams(&mut self) -> usize {
        self.streams.retain(|stream| !stream.is_closed());
        self.streams.len()
    }
}

impl Script {
    pub(super) fn set_tools(&mut self, tools: Vec<String>) {
        self.pages = content::pages(&tools, self.page_size).into();
        self.tools = tools;
    }

    pub(super) fn add_tool(&mut self, raw: &str) {
        let mut tools = std::mem::take(&mut self.tools);
        tools.push(raw.to_owned());
        self.set_tools(tools);
    }

    pub(super) fn pages(&self) -> Arc<[String]> {
        self.pages.clone()
    }
}

impl Shared {
    pub(super) fn new(mut config: Builder) -> Self {
        let mut script = Script {
            answers: config.answers,
            progress: 0,
            logs: 0,
            stall: Stall::No,
            cut_before_answer: 0,
            cut_mid_stream: 0,
            reject_session: None,
            hanging: HashSet::new(),
            overrides: HashMap::new(),
            raw_result: Arc::from(content::RAW_RESULT),
            tools: Vec::new(),
            page_size: config.page_size,
            pages: Arc::from([]),
        };
        script.set_tools(std::mem::take(&mut config.tools));
        let mut sessions = HashMap::new();
        if !config.sessions {
            // Everybody shares the one without a name.
            sessions.insert(String::new(), Session::default());
        }
        Self {
            config,
            script: RwLock::new(script),
            counts: Mutex::default(),
            left_early: Arc::default(),
            changed: Notify::new(),
            received: Mutex::default(),
            sessions: Mutex::new(sessions),
            releases: watch::channel(0).0,
        }
    }

    pub(super) fn record(&self, received: Received) {
        let mut kept = self.received.lock();
        if kept.len() == KEPT_REQUESTS {
            kept.pop_front();
        }
        kept.push_back(received);
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock());
        self.changed.notify_waiters();
    }

    /// Sends a message to the newest open stream of each session that `wants` it.
    pub(super) fn notify(&self, raw: &str, wants: impl Fn(&Session) -> bool) -> usize {
        let event = event(raw);
        let mut told = 0;
        for session in self.sessions.lock().values_mut().filter(|session| wants(session)) {
            if session.open_streams() > 0
                && let Some(stream) = session.streams.last()
                && stream.try_send(Ok(event.clone())).is_ok()
            {
                told += 1;
            }
        }
        told
    }

    /// Waits until the next release. Subscribe before looking at the script, or one could be missed.
    pub(super) fn next_release(&self) -> watch::Receiver<u64> {
        self.releases.subscribe()
    }
}

/// One more of `key`, without an allocation when it was seen before.
pub(super) fn bump(counts: &mut BTreeMap<String, u64>, key: &str) {
    match counts.get_mut(key) {
        Some(count) => *count += 1,
        None => drop(counts.insert(key.to_owned(), 1)),
    }
}

/// A message as an event.
pub(super) fn event(raw: &str) -> Bytes {
    // A raw text may span lines; each needs its own field.
    if raw.contains(['\n', '\r']) {
        let lines: Vec<String> = raw.lines().map(|line| format!("data: {line}\n")).collect();
        return Bytes::from(format!("event: message\n{}\n", lines.concat()));
    }
    Bytes::from(["event: message\ndata: ", raw, "\n\n"].concat())
}
