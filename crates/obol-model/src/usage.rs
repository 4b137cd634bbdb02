use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    ConnectionName, KeyId, ModelName, NanoUsd, Principal, ProviderName, ReplicaId, RequestId, Revision,
    WorkspaceId,
};

/// The immutable record of one metered call, as it stands in `usage:{WS}` (DESIGN §12).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageEvent {
    /// Version of this document; see [`UsageEvent::SCHEMA`].
    pub schema_version: u32,
    /// Unique per metered call; consumers are idempotent by it.
    pub event_id: RequestId,
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
    /// What it costs by the pinned publication.
    pub cost: NanoUsd,
    /// The tokens are our estimate: the upstream reported none, or the stream was cut.
    #[serde(default)]
    pub estimated: bool,
}

impl UsageEvent {
    /// The version of the document that this release writes.
    pub const SCHEMA: u32 = 1;
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
    ChatCompletion {
        /// The public name.
        model: ModelName,
        /// The provider that answered, when one did.
        provider: Option<ProviderName>,
        /// The provider's own name for the model, when one answered.
        upstream_model: Option<String>,
    },
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
}

impl Outcome {
    /// The stable word for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::Partial => "partial",
        }
    }
}

/// Token counts in disjoint buckets: their sum is what was processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tokens {
    /// Prompt tokens that were not read from a cache.
    pub input: u64,
    /// Prompt tokens that were read from the provider's cache.
    #[serde(default)]
    pub cached_input: u64,
    /// Completion tokens, reasoning included (as the OpenAI dialect counts them).
    pub output: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_names_who_paid_and_those_of_the_first_release_can_be_read() {
        let golden = r#"{"schema_version":1,"event_id":"019b7e2f-4f0a-7000-8000-000000000001","workspace_id":"acme","key_id":"k1","replica":"r-0123456789ab","revision":{"epoch":1,"number":7},"kind":"tool_call","connection":"git","tool":"search","outcome":"ok","started_at":"2026-01-02T03:04:05Z","duration_ms":12,"tokens":{"input":0,"cached_input":0,"output":0},"cost":5,"estimated":false}"#;
        let event: UsageEvent = serde_json::from_str(golden).unwrap();
        assert_eq!(event.principal, Principal::Key("k1".parse().unwrap()));
        assert_eq!(serde_json::to_string(&event).unwrap(), golden);
        let principal = Principal::User { issuer: "https://idp.example".into(), subject: "alice".into() };
        let event = UsageEvent { principal, ..event };
        let text = serde_json::to_string(&event).unwrap();
        assert!(text.contains(r#","user":{"issuer":"https://idp.example","subject":"alice"},"#), "{text}");
        assert!(!text.contains("key_id"), "{text}");
        assert_eq!(serde_json::from_str::<UsageEvent>(&text).unwrap(), event);
    }
}
