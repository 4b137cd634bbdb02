use obol_model::{Kind, ReplicaId};
use obol_redis::RedisError;

/// Why a message was not acknowledged.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PeerError {
    /// The replica has no lease, or another one answers at its address: it is gone, with everything that it held.
    #[error("there is no replica `{replica}` any more")]
    Unknown {
        /// Which.
        replica: ReplicaId,
    },
    /// The replica lives but has no channel: `OBOL_PEER_LISTEN` is not set there, or not here.
    #[error("no peer channel leads to the replica `{replica}`; set OBOL_PEER_LISTEN on every replica")]
    NoChannel {
        /// Which.
        replica: ReplicaId,
    },
    /// Nothing was acknowledged. Unless the connection was refused, the message may have been delivered.
    #[error("the replica `{replica}` cannot be reached: {reason}")]
    Unreachable {
        /// Which.
        replica: ReplicaId,
        /// In words, without its address.
        reason: &'static str,
    },
    /// The replica answered and did not take the message.
    #[error("the replica `{replica}` refused the message: {code}")]
    Refused {
        /// Which.
        replica: ReplicaId,
        /// The code of its answer.
        code: String,
    },
    /// The deadline passed. The message may have been delivered.
    #[error("the replica `{replica}` did not answer in time")]
    Deadline {
        /// Which.
        replica: ReplicaId,
    },
    /// Which replicas there are could not be asked.
    #[error("the registry of replicas cannot be asked")]
    Registry(#[source] RedisError),
    /// The message or its token could not be made.
    #[error("the message cannot be sent: {reason}")]
    Unsendable {
        /// In words.
        reason: &'static str,
    },
}

impl PeerError {
    /// What kind of failure it is. Only a replica that is gone is [`Kind::NotFound`].
    pub fn kind(&self) -> Kind {
        match self {
            Self::Unknown { .. } => Kind::NotFound,
            Self::Deadline { .. } => Kind::Timeout,
            Self::NoChannel { .. } | Self::Unreachable { .. } | Self::Registry(_) => Kind::Unavailable,
            Self::Refused { .. } | Self::Unsendable { .. } => Kind::Internal,
        }
    }

    /// The stable word for metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => "unknown",
            Self::NoChannel { .. } => "no_channel",
            Self::Unreachable { .. } => "unreachable",
            Self::Refused { .. } => "refused",
            Self::Deadline { .. } => "deadline",
            Self::Registry(_) => "registry",
            Self::Unsendable { .. } => "unsendable",
        }
    }
}
