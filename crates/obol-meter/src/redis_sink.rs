use async_trait::async_trait;
use obol_model::{UsageEvent, WorkspaceId};
use obol_redis::Redis;
use redis::{Cmd, Pipeline, RedisResult, Value};

use crate::sink::{SinkError, UsageSink};

/// About as many events as the stream of a workspace keeps by default: some 400 MB of Redis memory in the worst case,
/// and more than a day without a consumer at ten calls a second.
const MAX_LEN: usize = 1_000_000;

/// Appends to the streams `usage:{WS}`, one entry per event with the event as JSON in the field `event`. A batch is
/// one flight.
///
/// The streams are bounded: beyond their length the oldest entries are trimmed, read or not, so consumers must not
/// stay away for longer than it takes to fill them.
#[derive(Debug)]
pub struct RedisSink {
    redis: Redis,
    max_len: usize,
}

impl RedisSink {
    /// Keeps about a million events per workspace.
    pub fn new(redis: Redis) -> Self {
        Self::with_max_len(redis, MAX_LEN)
    }

    /// Keeps at least `max_len` events per workspace, and not many more.
    pub fn with_max_len(redis: Redis, max_len: usize) -> Self {
        Self { redis, max_len }
    }
}

/// About the size of an event.
const EVENT_BYTES: usize = 512;

/// The key of the stream that was written last.
#[derive(Default)]
struct Stream {
    of: Option<WorkspaceId>,
    key: String,
}

impl Stream {
    fn key(&mut self, workspace: &WorkspaceId) -> &str {
        if self.of.as_ref() != Some(workspace) {
            // DESIGN §5: the braces are literal, a cluster's hash tag.
            self.key = format!("usage:{{{workspace}}}");
            self.of = Some(workspace.clone());
        }
        &self.key
    }
}

#[async_trait]
impl UsageSink for RedisSink {
    async fn append(&self, events: &[UsageEvent]) -> Result<(), SinkError> {
        if events.is_empty() {
            return Ok(());
        }
        let mut flight = Pipeline::with_capacity(events.len());
        // Without it one stream that refuses (another type of key, say) would have all others repeated.
        flight.ignore_errors();
        // Most batches are of one workspace; the buffer is used again.
        let mut stream = Stream::default();
        let mut json = Vec::with_capacity(EVENT_BYTES);
        for event in events {
            json.clear();
            serde_json::to_writer(&mut json, event)
                .map_err(|e| SinkError::Unavailable { reason: e.to_string() })?;
            let key = stream.key(&event.workspace_id);
            let mut add = Cmd::with_capacity(8, json.len() + key.len() + 64);
            add.arg("XADD")
                .arg(key)
                .arg(("MAXLEN", "~"))
                .arg(self.max_len)
                .arg("*")
                .arg("event")
                .arg(json.as_slice());
            flight.add_command(add);
        }
        let answers: Vec<RedisResult<Value>> = self
            .redis
            .pipeline(&flight)
            .await
            .map_err(|e| SinkError::Unavailable { reason: e.to_string() })?;
        let mut first = None;
        let mut refused = Vec::new();
        for (position, answer) in answers.into_iter().enumerate() {
            if let Err(e) = answer {
                refused.push(position);
                first.get_or_insert(e);
            }
        }
        match first {
            None => Ok(()),
            // The code alone: the text of an error may repeat what was sent.
            Some(e) => {
                Err(SinkError::Refused { refused, reason: e.code().unwrap_or("unknown error").to_owned() })
            }
        }
    }
}
