//! The streams `usage:{WS}` and the group that reads them.

use std::time::Duration;

use obol_model::WorkspaceId;
use obol_redis::{Redis, RedisError, Script};
use redis::Value;

use super::EntryId;

/// All controls are one group.
pub(crate) const GROUP: &str = "obol-control";
/// Workspaces that have a ledger; only a hint (DESIGN §12).
const INDEX: &str = "ledger:workspaces";
/// After how long a consumer that nothing was heard of is forgotten, in ms: a day.
const FORGOTTEN: &[u8] = b"86400000";
/// How many entries are read in one flight: with events of a few hundred bytes that is far below a command's deadline.
pub(super) const BATCH: usize = 500;

/// An entry, with what stands in its field `event`.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: EntryId,
    pub(super) content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Event(Vec<u8>),
    /// It has other fields.
    Strange(Vec<u8>),
    /// It was trimmed after it was delivered.
    Gone,
}

/// Which entries are read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Which {
    /// Those that nobody has read.
    New,
    /// Those that this consumer has read and not acknowledged.
    Own,
}

/// What was taken over from others.
#[derive(Debug)]
pub(super) struct Claimed {
    /// Where to go on; `None` when all were looked at.
    pub(super) next: Option<String>,
    pub(super) entries: Vec<Entry>,
    /// Entries that were trimmed before anybody acknowledged them.
    pub(super) gone: usize,
}

/// One consumer of all streams.
#[derive(Debug)]
pub(super) struct Streams {
    redis: Redis,
    consumer: String,
    open: Script,
    ack: Script,
    tidy: Script,
}

/// The stream of a workspace.
pub(crate) fn key(workspace: &WorkspaceId) -> String {
    format!("usage:{{{workspace}}}")
}

impl Streams {
    pub(super) fn new(redis: Redis, consumer: String) -> Self {
        Self {
            redis,
            consumer,
            open: Script::new("usage_open_v1", include_str!("../scripts/usage_open_v1.lua")),
            ack: Script::new("usage_ack_v1", include_str!("../scripts/usage_ack_v1.lua")),
            tidy: Script::new("usage_tidy_v1", include_str!("../scripts/usage_tidy_v1.lua")),
        }
    }

    pub(super) async fn workspaces(&self) -> Result<Vec<WorkspaceId>, RedisError> {
        let found: Vec<String> = self.redis.query(redis::cmd("SMEMBERS").arg(INDEX)).await?;
        Ok(found.iter().filter_map(|id| id.parse().ok()).collect())
    }

    /// Makes stream and group if they are not there; whether entries were trimmed that nobody had read.
    pub(super) async fn open(&self, workspace: &WorkspaceId) -> Result<bool, RedisError> {
        self.redis.run(&self.open, &[&key(workspace)], &[GROUP.as_bytes()]).await
    }

    pub(super) async fn read(&self, workspace: &WorkspaceId, which: Which) -> Result<Vec<Entry>, RedisError> {
        let from = match which {
            Which::New => ">",
            Which::Own => "0",
        };
        // Without BLOCK: the connection is everybody's.
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP").arg(GROUP).arg(&self.consumer).arg("COUNT").arg(BATCH);
        read.arg("STREAMS").arg(key(workspace)).arg(from);
        let streams = match self.redis.query(&read).await? {
            Value::Map(streams) => streams.into_iter().next().map(|(_, entries)| entries),
            Value::Array(streams) => streams.into_iter().next().and_then(|stream| match stream {
                Value::Array(mut both) => both.pop(),
                _ => None,
            }),
            _ => None,
        };
        Ok(streams.map(entries).unwrap_or_default())
    }

    /// Takes over what a consumer has held for longer than `idle`.
    pub(super) async fn claim(
        &self,
        workspace: &WorkspaceId,
        idle: Duration,
        from: &str,
    ) -> Result<Claimed, RedisError> {
        let mut claim = redis::cmd("XAUTOCLAIM");
        claim.arg(key(workspace)).arg(GROUP).arg(&self.consumer);
        claim.arg(u64::try_from(idle.as_millis()).unwrap_or(u64::MAX)).arg(from).arg("COUNT").arg(BATCH);
        let (next, found, gone): (String, Value, Vec<String>) = self.redis.query(&claim).await?;
        let next = (next != "0-0").then_some(next);
        Ok(Claimed { next, entries: entries(found), gone: gone.len() })
    }

    /// Acknowledges entries and trims the stream behind them; how many are left.
    pub(super) async fn ack(&self, workspace: &WorkspaceId, ids: &[EntryId]) -> Result<u64, RedisError> {
        let ids: Vec<String> = ids.iter().map(EntryId::to_string).collect();
        let args: Vec<&[u8]> =
            std::iter::once(GROUP.as_bytes()).chain(ids.iter().map(String::as_bytes)).collect();
        self.redis.run(&self.ack, &[&key(workspace)], &args).await
    }

    /// Forgets consumers that are long gone.
    pub(super) async fn tidy(&self, workspace: &WorkspaceId) -> Result<(), RedisError> {
        let _: i64 = self.redis.run(&self.tidy, &[&key(workspace)], &[GROUP.as_bytes(), FORGOTTEN]).await?;
        Ok(())
    }
}

fn entries(value: Value) -> Vec<Entry> {
    let Value::Array(values) = value else { return Vec::new() };
    values.into_iter().filter_map(entry).collect()
}

fn entry(value: Value) -> Option<Entry> {
    let Value::Array(both) = value else { return None };
    let mut both = both.into_iter();
    let id = std::str::from_utf8(&bytes(both.next()?)?).ok()?.parse().ok()?;
    let content = match both.next() {
        Some(Value::Array(fields)) => content(&fields.into_iter().filter_map(bytes).collect::<Vec<_>>()),
        _ => Content::Gone,
    };
    Some(Entry { id, content })
}

fn content(fields: &[Vec<u8>]) -> Content {
    let mut each = fields.chunks_exact(2);
    let event = each.find_map(|pair| match pair {
        [name, event] if name == b"event" => Some(event.clone()),
        _ => None,
    });
    event.map_or_else(|| Content::Strange(fields.join(&b' ')), Content::Event)
}

fn bytes(value: Value) -> Option<Vec<u8>> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.into_bytes()),
        _ => None,
    }
}
