use std::time::Duration;

use obol_model::Kind;
use obol_redis::RedisError;

/// Why an operation on a session failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// There is none, or none that the caller may know of: missing, expired, deleted, malformed, of another workspace
    /// and of another principal are one answer (DESIGN §6.4).
    #[error("no such session")]
    NoSuchSession,
    /// The id is taken.
    #[error("the session exists")]
    AlreadyExists,
    /// Somebody saved the session since it was read. Read it again.
    #[error("the session was changed by another request")]
    Conflict,
    /// The principal has as many live sessions as it may have.
    #[error("too many live sessions; the limit is {limit}")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// The record would be larger than the store takes.
    #[error("the session's record has {size} bytes; the limit is {limit}")]
    TooLarge {
        /// What it would have.
        size: usize,
        /// What it may have.
        limit: usize,
    },
    /// The store could not be asked. Says nothing about the session.
    #[error("the session store cannot be asked")]
    Unavailable(#[source] RedisError),
    /// The store did not answer in the time that a request has for it. Says nothing about the session.
    #[error("the session store did not answer within {} ms", after.as_millis())]
    Late {
        /// That time.
        after: Duration,
    },
    /// The stored record is not one that any release can read.
    #[error("the session's record cannot be read: {reason}")]
    Corrupt {
        /// What is wrong, without the record's content.
        reason: String,
    },
    /// The stored record is one of a later release, which can read it.
    #[error("the session's record has schema version {found}, this release reads up to {known}")]
    Newer {
        /// Its version.
        found: u32,
        /// What this release reads.
        known: u32,
    },
    /// The operating system gave no random bytes for an id.
    #[error("no random bytes for a session id: {reason}")]
    NoRandomness {
        /// What the operating system said.
        reason: String,
    },
}

impl SessionError {
    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NoSuchSession => Kind::NotFound,
            Self::AlreadyExists | Self::Conflict => Kind::Conflict,
            Self::TooMany { .. } => Kind::RateLimited,
            Self::TooLarge { .. } => Kind::TooLarge,
            Self::Unavailable(_) | Self::Late { .. } | Self::Newer { .. } => Kind::Unavailable,
            Self::Corrupt { .. } | Self::NoRandomness { .. } => Kind::Internal,
        }
    }

    /// Whether it may be over in a moment, as a broken connection or a failover is. A store that is full is not.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Unavailable(RedisError::Server { code, .. }) => {
                ["LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"].contains(&code.as_str())
            }
            Self::Unavailable(_) => true,
            _ => false,
        }
    }
}
