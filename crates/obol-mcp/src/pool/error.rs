use std::time::Duration;

use bytes::Bytes;
use obol_model::Kind;

/// Why a call has no answer. The texts may be shown to clients: they name no address, header or credential.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The server was not reached; the call was certainly not sent.
    #[error("the server cannot be reached: {reason}")]
    Unavailable {
        /// In words.
        reason: &'static str,
        /// When it is worth another try, where that is known.
        retry_after: Option<Duration>,
    },
    /// This replica holds as many upstream sessions as it may. Not sent.
    #[error("the gateway holds as many upstream sessions as it may")]
    Full,
    /// The deadline passed after the call was sent. The upstream was told to cancel it.
    #[error("the server did not answer in time")]
    Timeout,
    /// The transport broke after the call may have been executed; it is not repeated (DESIGN §9.7).
    #[error("the connection to the server broke: the call may or may not have been executed")]
    OutcomeUnknown,
    /// The transport broke while something was read that is safe to read again.
    #[error("the connection to the server broke before it answered")]
    Interrupted,
    /// An HTTP answer that is no JSON-RPC.
    #[error("the server answered with HTTP status {status}")]
    Status {
        /// The status code.
        status: u16,
    },
    /// A JSON-RPC error where the gateway asked on its own account.
    #[error("the server answered with the error code {code}")]
    Refused {
        /// The JSON-RPC code.
        code: i64,
    },
    /// The server does not keep to MCP.
    #[error("the server broke the protocol: {reason}")]
    Protocol {
        /// In words.
        reason: &'static str,
    },
    /// An answer, a list or a message is larger than the bound.
    #[error("the answer of the server is larger than the gateway accepts")]
    TooLarge,
    /// The replica is draining. Not sent.
    #[error("the gateway is stopping")]
    Stopping,
}

impl CallError {
    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Unavailable { .. }
            | Self::Interrupted
            | Self::Status { .. }
            | Self::Refused { .. }
            | Self::Protocol { .. }
            | Self::TooLarge => Kind::Upstream,
            Self::Full => Kind::Unavailable,
            Self::Timeout => Kind::Timeout,
            Self::OutcomeUnknown => Kind::OutcomeUnknown,
            Self::Stopping => Kind::Stopping,
        }
    }

    /// Whether the call certainly never reached the server.
    pub fn is_unsent(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Full | Self::Stopping)
    }

    /// The stable word for metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } => "unavailable",
            Self::Full => "full",
            Self::Timeout => "timeout",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Interrupted => "interrupted",
            Self::Status { .. } => "status",
            Self::Refused { .. } => "refused",
            Self::Protocol { .. } => "protocol",
            Self::TooLarge => "too_large",
            Self::Stopping => "stopping",
        }
    }
}

/// Why a transport has nothing (more) to give. The pool turns it into a [`CallError`], or repeats what is safe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// Not a byte was sent.
    #[error("not sent: {0}")]
    Unsent(&'static str),
    /// The upstream does not know the session, so it did not execute what was sent.
    #[error("the upstream session is gone")]
    SessionLost {
        /// What the upstream said, when that is a JSON-RPC message: the answer if a fresh session makes it say the
        /// same.
        answer: Option<Bytes>,
    },
    /// It broke after something was sent.
    #[error("broken: {0}")]
    Broken(&'static str),
    /// An HTTP status without a JSON-RPC body.
    #[error("HTTP status {0}")]
    Status(u16),
    /// The upstream does not keep to the transport's rules.
    #[error("protocol: {0}")]
    Protocol(&'static str),
    /// A message larger than the bound.
    #[error("too large")]
    TooLarge,
}

impl TransportError {
    /// What it means for a call; `acting` calls may have effects that must not happen twice.
    pub(super) fn into_call_error(self, acting: bool) -> CallError {
        let broken = if acting { CallError::OutcomeUnknown } else { CallError::Interrupted };
        match self {
            Self::Unsent(reason) => CallError::Unavailable { reason, retry_after: None },
            Self::SessionLost { .. } => {
                CallError::Protocol { reason: "it does not know the session that it has just opened" }
            }
            // A gateway in front of the server lost it in mid-call; what the server did, it cannot know either.
            Self::Status(502 | 504) | Self::Broken(_) => broken,
            Self::Status(status) => CallError::Status { status },
            Self::Protocol(reason) => CallError::Protocol { reason },
            Self::TooLarge => CallError::TooLarge,
        }
    }
}
