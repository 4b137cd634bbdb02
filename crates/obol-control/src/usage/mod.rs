//! Usage events: from the streams of Redis into a store, and sums of them (DESIGN §12.5).

mod collector;
mod files;
mod postgres;
mod stream;
mod sums;

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::{EventPart, SignedNanoUsd, Tokens, UsageEvent, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::StoreError;

pub use self::collector::UsageCollector;
pub use self::files::FileUsage;
pub use self::postgres::PostgresUsage;
pub(crate) use self::stream::{GROUP, key as stream};

/// The most groups that sums may have.
pub(crate) const MOST_GROUPS: usize = 100_000;
/// As much of what is no event as is kept.
const LARGEST_REJECT: usize = 64 << 10;
/// Seconds since the epoch between which calls can have begun: 2020 and 2100. What lies outside is a mistake, and would
/// make partitions or files that nobody looks into.
const BEGAN: (i64, i64) = (1_577_836_800, 4_102_444_800);

/// Where usage events are kept for good: Postgres or a directory.
///
/// Every method has a deadline of its own; one that was abandoned may have taken effect.
#[async_trait]
pub trait UsageStore: fmt::Debug + Send + Sync + 'static {
    /// Writes entries of the stream of a workspace. They are durable when it returns. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] when one of them can never be written; then none was.
    async fn record(&self, workspace: &WorkspaceId, batch: &UsageBatch) -> Result<(), StoreError>;

    /// Sums of requests and corrections, in the order of their groups.
    ///
    /// # Errors
    /// When they cannot be read, or there are too many groups.
    async fn totals(&self, query: &UsageQuery) -> Result<Vec<UsageTotal>, StoreError>;
}

/// Entries of a stream.
#[derive(Debug, Clone, Default)]
pub struct UsageBatch {
    /// Those that are events.
    pub events: Vec<TakenEvent>,
    /// Those that are none.
    pub rejected: Vec<RejectedEntry>,
}

/// An event, as it stood in a stream.
#[derive(Debug, Clone)]
pub struct TakenEvent {
    /// Which entry.
    pub entry: EntryId,
    /// What it says.
    pub event: UsageEvent,
    /// The same as it was written, with what a later release may have added.
    pub json: String,
}

/// An entry of a stream that is no event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedEntry {
    /// Which entry.
    pub entry: EntryId,
    /// Why it is none.
    pub reason: String,
    /// What stood there, or the beginning of it.
    pub content: Vec<u8>,
}

impl TakenEvent {
    /// Reads an entry of the stream of a workspace.
    ///
    /// # Errors
    /// The entry with the reason why it is no event of this workspace.
    pub fn read(workspace: &WorkspaceId, entry: EntryId, json: &[u8]) -> Result<Self, RejectedEntry> {
        let rejected = |reason: String| RejectedEntry::new(entry, reason, json);
        let text = std::str::from_utf8(json).map_err(|_| rejected("it is no UTF-8 text".to_owned()))?;
        let event: UsageEvent =
            serde_json::from_str(text).map_err(|e| rejected(format!("it is no event: {e}")))?;
        if event.workspace_id != *workspace {
            return Err(rejected(format!("it is an event of `{}`", event.workspace_id)));
        }
        let (first, last) = BEGAN;
        if !(first..last).contains(&event.started_at.as_second()) {
            return Err(rejected(format!("its call began at an impossible time, {}", event.started_at)));
        }
        // Ends of lines stand outside of strings only, where JSON does not care.
        Ok(Self { entry, event, json: text.replace(['\n', '\r'], " ") })
    }

    /// Puts it aside, since a store cannot take it.
    fn rejected(&self, reason: String) -> RejectedEntry {
        RejectedEntry::new(self.entry, reason, self.json.as_bytes())
    }
}

impl RejectedEntry {
    fn new(entry: EntryId, reason: String, content: &[u8]) -> Self {
        let content = content.get(..LARGEST_REJECT).unwrap_or(content).to_vec();
        Self { entry, reason, content }
    }
}

/// The id of an entry of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EntryId {
    /// When it was written, by Redis's clock, in ms since the epoch.
    pub ms: u64,
    /// Its place among those of the same time.
    pub seq: u64,
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

impl From<EntryId> for String {
    fn from(id: EntryId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for EntryId {
    type Error = String;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl FromStr for EntryId {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('-').and_then(|(ms, seq)| Some((ms.parse().ok()?, seq.parse().ok()?)));
        parts.map(|(ms, seq)| Self { ms, seq }).ok_or_else(|| format!("`{text}` is no id of an entry"))
    }
}

/// What is to be summed.
#[derive(Debug, Clone, Default)]
pub struct UsageQuery {
    /// Only of this workspace.
    pub workspace: Option<WorkspaceId>,
    /// Only calls that began then or later.
    pub from: Option<Timestamp>,
    /// Only calls that began earlier.
    pub to: Option<Timestamp>,
    /// One sum for each of these, together.
    pub by: Vec<UsageBy>,
}

/// What sums are grouped by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageBy {
    /// The workspace.
    Workspace,
    /// Who paid, as the ledger calls it.
    Key,
    /// What was called: `tool_call`, `chat_completion`, `message`, `response` or `embedding`.
    Kind,
    /// The public name of the model.
    Model,
    /// The tool's name upstream.
    Tool,
    /// The connection of the tool.
    Connection,
    /// The provider that answered.
    Provider,
    /// How it ended.
    Outcome,
    /// The day of UTC on which the call began.
    Day,
    /// The month of UTC in which the call began.
    Month,
}

impl UsageBy {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Workspace,
        Self::Key,
        Self::Kind,
        Self::Model,
        Self::Tool,
        Self::Connection,
        Self::Provider,
        Self::Outcome,
        Self::Day,
        Self::Month,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Workspace => "workspace",
            Self::Key => "key",
            Self::Kind => "kind",
            Self::Model => "model",
            Self::Tool => "tool",
            Self::Connection => "connection",
            Self::Provider => "provider",
            Self::Outcome => "outcome",
            Self::Day => "day",
            Self::Month => "month",
        }
    }
}

/// A sum.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UsageTotal {
    /// One value for each of [`UsageQuery::by`]; empty for what an event does not have.
    pub group: Vec<String>,
    /// How many calls.
    pub requests: u64,
    /// How many of them failed.
    pub errors: u64,
    /// What they processed.
    pub tokens: Tokens,
    /// What they cost, corrections included.
    pub cost: SignedNanoUsd,
}

/// The word for which event of a request it is.
fn part(part: EventPart) -> &'static str {
    match part {
        EventPart::Request => "request",
        EventPart::Correction => "correction",
        EventPart::Attempt(_) => "attempt",
    }
}

fn too_many_groups() -> StoreError {
    StoreError::Unavailable(format!(
        "there are more than {MOST_GROUPS} groups: ask for less time or fewer groups"
    ))
}
