use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    ConnectionName, KeyId, ModelName, NanoUsd, Principal, ProviderName, ReplicaId, RequestId, Revision,
    SignedNanoUsd, WorkspaceId,
};

/// The immutable record of one metered call, as it stands in `usage:{WS}` (DESIGN §12).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageEvent {
    /// Version of this document; see [`UsageEvent::SCHEMA`].
    pub schema_version: u32,
    /// Unique; consumers are idempotent by it.
    pub event_id: EventId,
    /// Whose money.
    pub workspace_id: WorkspaceId,
    /// Who paid: `key_id`, or `user` with `issuer` and `subject`.
    #[serde(flatten, with = "Payer")]
    pub principal: Principal,
    /// Which process measured it.
    pub replica: ReplicaId,
    /// The publication that routed and priced the call.
    pub revision: Revision,
    /// What was called.
    #[serde(flatten)]
    pub kind: UsageKind,
    /// How it ended.
    pub outcome: Outcome,
    /// When the call began.
    pub started_at: Timestamp,
    /// Milliseconds until it ended.
    pub duration_ms: u64,
    /// Tokens, in disjoint buckets; all zero for tool calls.
    pub tokens: Tokens,
    /// The tokens are our estimate: the upstream reported none, or the stream was cut.
    #[serde(default)]
    pub estimated: bool,
    /// It cost more than was set aside for it.
    #[serde(default)]
    pub overrun: bool,
    /// What was set aside for it.
    #[serde(default)]
    pub reserved: NanoUsd,
    /// What it costs by the pinned publication; in a correction, by how much more (or less) than was booked.
    ///
    /// INVARIANT: in JSON these three stand last, in this order, so that a script can write them.
    pub cost: SignedNanoUsd,
}

impl UsageEvent {
    /// The version of the document that this release writes.
    pub const SCHEMA: u32 = 2;
}

/// How a [`Principal`] stands in an event.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Principal", rename_all = "snake_case")]
enum Payer {
    #[serde(rename = "key_id")]
    Key(KeyId),
    User {
        issuer: String,
        subject: String,
    },
}

/// What a metered call called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum UsageKind {
    /// `tools/call`.
    ToolCall {
        /// The upstream.
        connection: ConnectionName,
        /// The tool's name upstream.
        tool: String,
    },
    /// `/v1/chat/completions`.
    ChatCompletion(ModelCall),
    /// `/v1/messages`.
    Message(ModelCall),
    /// `/v1/responses`.
    Response(ModelCall),
    /// `/v1/embeddings`.
    Embedding(ModelCall),
}

/// A metered call of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCall {
    /// The public name.
    pub model: ModelName,
    /// The provider that answered, when one did.
    pub provider: Option<ProviderName>,
    /// The provider's own name for the model, when one answered.
    pub upstream_model: Option<String>,
}

impl UsageKind {
    /// The stable word for stores and metrics; the same as in JSON.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::ToolCall { .. } => "tool_call",
            Self::ChatCompletion(_) => "chat_completion",
            Self::Message(_) => "message",
            Self::Response(_) => "response",
            Self::Embedding(_) => "embedding",
        }
    }

    /// The model that was called; nothing for a tool.
    pub fn model_call(&self) -> Option<&ModelCall> {
        match self {
            Self::ToolCall { .. } => None,
            Self::ChatCompletion(call)
            | Self::Message(call)
            | Self::Response(call)
            | Self::Embedding(call) => Some(call),
        }
    }

    /// As [`UsageKind::model_call`], to be changed.
    pub fn model_call_mut(&mut self) -> Option<&mut ModelCall> {
        match self {
            Self::ToolCall { .. } => None,
            Self::ChatCompletion(call)
            | Self::Message(call)
            | Self::Response(call)
            | Self::Embedding(call) => Some(call),
        }
    }
}

/// How a metered call ended (DESIGN §12.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was answered.
    Ok,
    /// It failed.
    Error,
    /// It was cut: by the client, by a deadline, by a drain.
    Partial,
    /// Nobody knows: its replica died. It is booked at what was set aside for it.
    Orphaned,
}

impl Outcome {
    /// The stable word for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::Partial => "partial",
            Self::Orphaned => "orphaned",
        }
    }
}

/// Token counts in disjoint buckets: their sum is what was processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tokens {
    /// Prompt tokens that are in no other bucket.
    pub input: u64,
    /// Prompt tokens that were read from the provider's cache.
    #[serde(default)]
    pub cached_input: u64,
    /// Prompt tokens that were written to the provider's cache.
    #[serde(default)]
    pub cache_write: u64,
    /// Prompt tokens of sound.
    #[serde(default)]
    pub audio_input: u64,
    /// Completion tokens that are in no other bucket.
    pub output: u64,
    /// Completion tokens that the model thought.
    #[serde(default)]
    pub reasoning: u64,
    /// Completion tokens of sound.
    #[serde(default)]
    pub audio_output: u64,
}

impl Tokens {
    /// All of the prompt.
    pub fn prompt(&self) -> u64 {
        let Self { input, cached_input, cache_write, audio_input, .. } = *self;
        [input, cached_input, cache_write, audio_input].into_iter().fold(0, u64::saturating_add)
    }

    /// All of the answer.
    pub fn completion(&self) -> u64 {
        let Self { output, reasoning, audio_output, .. } = *self;
        [output, reasoning, audio_output].into_iter().fold(0, u64::saturating_add)
    }
}

/// The id of a [`UsageEvent`]. Only those of requests and corrections are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EventId {
    /// The request.
    pub request: RequestId,
    /// Which event of it.
    pub part: EventPart,
}

/// Which event of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EventPart {
    /// The request itself: `ID`.
    Request,
    /// What a late settlement changes on a request that was booked as orphaned: `ID/c`.
    Correction,
    /// One attempt at a target, for information: `ID/1` is the first.
    Attempt(u32),
}

impl From<RequestId> for EventId {
    fn from(request: RequestId) -> Self {
        Self { request, part: EventPart::Request }
    }
}

impl From<EventId> for String {
    fn from(id: EventId) -> Self {
        let request = id.request.as_uuid();
        match id.part {
            EventPart::Request => request.to_string(),
            EventPart::Correction => format!("{request}/c"),
            EventPart::Attempt(n) => format!("{request}/{n}"),
        }
    }
}

/// No id of an event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no id of a usage event: a UUID, alone or with `/c` or `/1`, `/2` … behind it")]
pub struct ParseEventIdError;

impl TryFrom<String> for EventId {
    type Error = ParseEventIdError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        let (request, part) = match text.split_once('/') {
            None => (text.as_str(), EventPart::Request),
            Some((request, "c")) => (request, EventPart::Correction),
            Some((request, n)) => (request, EventPart::Attempt(n.parse().map_err(|_| ParseEventIdError)?)),
        };
        Ok(Self { request: RequestId::from_uuid(request).ok_or(ParseEventIdError)?, part })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a replica of the first release wrote it.
    const FIRST: &str = r#"{"schema_version":1,"event_id":"019b7e2f-4f0a-7000-8000-000000000001","workspace_id":"acme","key_id":"k1","replica":"r-0123456789ab","revision":{"epoch":1,"number":7},"kind":"tool_call","connection":"git","tool":"search","outcome":"ok","started_at":"2026-01-02T03:04:05Z","duration_ms":12,"tokens":{"input":0,"cached_input":0,"output":0},"cost":5,"estimated":false}"#;
    const GOLDEN: &str = r#"{"schema_version":2,"event_id":"019b7e2f-4f0a-7000-8000-000000000001/c","workspace_id":"acme","key_id":"k1","replica":"r-0123456789ab","revision":{"epoch":1,"number":7},"kind":"tool_call","connection":"git","tool":"search","outcome":"orphaned","started_at":"2026-01-02T03:04:05Z","duration_ms":12,"tokens":{"input":0,"cached_input":0,"cache_write":0,"audio_input":0,"output":0,"reasoning":0,"audio_output":0},"estimated":false,"overrun":true,"reserved":9,"cost":-4}"#;

    #[test]
    fn an_event_names_who_paid_and_those_of_the_first_release_can_be_read() {
        let first: UsageEvent = serde_json::from_str(FIRST).unwrap();
        assert_eq!(first.principal, Principal::Key("k1".parse().unwrap()));
        assert_eq!(
            (first.cost.nanos(), first.reserved, first.event_id.part),
            (5, NanoUsd::ZERO, EventPart::Request)
        );
        let event: UsageEvent = serde_json::from_str(GOLDEN).unwrap();
        assert_eq!((event.cost.nanos(), event.event_id.part), (-4, EventPart::Correction));
        assert_eq!(serde_json::to_string(&event).unwrap(), GOLDEN);
        let principal = Principal::User { issuer: "https://idp.example".into(), subject: "alice".into() };
        let event = UsageEvent { principal, ..event };
        let text = serde_json::to_string(&event).unwrap();
        assert!(text.contains(r#","user":{"issuer":"https://idp.example","subject":"alice"},"#), "{text}");
        assert!(!text.contains("key_id"), "{text}");
        assert_eq!(serde_json::from_str::<UsageEvent>(&text).unwrap(), event);
    }

    #[test]
    fn ids_of_events_are_read_back_and_others_refused() {
        let request = RequestId::new();
        for part in [EventPart::Request, EventPart::Correction, EventPart::Attempt(3)] {
            let id = EventId { request, part };
            assert_eq!(EventId::try_from(String::from(id)), Ok(id));
        }
        for bad in
            ["", "x", "/c", "019b7e2f-4f0a-7000-8000-000000000001/", "019b7e2f-4f0a-7000-8000-000000000001/x"]
        {
            assert_eq!(EventId::try_from(bad.to_owned()), Err(ParseEventIdError), "{bad}");
        }
    }
}
