use async_trait::async_trait;
use obol_model::UsageEvent;
use obol_redis::Redis;
use redis::{Pipeline, RedisResult, Value};

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

#[async_trait]
impl UsageSink for RedisSink {
    async fn append(&self, events: &[UsageEvent]) -> Result<(), SinkError> {
        if events.is_empty() {
            return Ok(());
        }
        let mut flight = Pipeline::with_capacity(events.len());
        // Without it one stream that refuses (another type of key, say) would have all others repeated.
        flight.ignore_errors();
        for event in events {
            let json =
                serde_json::to_vec(event).map_err(|e| SinkError::Unavailable { reason: e.to_string() })?;
            flight
                .cmd("XADD")
                // DESIGN §5: the braces are literal, a cluster's hash tag.
                .arg(format!("usage:{{{}}}", event.workspace_id))
                .arg(("MAXLEN", "~"))
                .arg(self.max_len)
                .arg("*")
                .arg("event")
                .arg(json);
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
