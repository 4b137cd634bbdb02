use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    ConnectionName, KeyId, ModelName, NanoUsd, ProviderName, ReplicaId, RequestId, Revision, WorkspaceId,
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
    /// The key that paid.
    pub key_id: KeyId,
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
