use obol_model::Kind;

use crate::service::{LIFE, LONGEST};

/// Why a token was not signed or not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceTokenError {
    /// It is no JWT, or says things of other types than it should.
    #[error("the service token is malformed")]
    Malformed,
    /// It is longer than any of ours.
    #[error("the service token is longer than {LONGEST} bytes")]
    TooLong,
    /// It names another algorithm than the key's.
    #[error("the service token is signed by another algorithm")]
    WrongAlgorithm,
    /// The signature is not of a key that is trusted.
    #[error("the signature of the service token is not valid")]
    BadSignature,
    /// A claim is not there.
    #[error("the service token has no claim `{claim}`")]
    MissingClaim {
        /// Which.
        claim: &'static str,
    },
    /// It is for somebody else.
    #[error("the service token is for another audience")]
    WrongAudience,
    /// Somebody else signed it.
    #[error("the service token is of another issuer")]
    WrongIssuer,
    /// Its time is over.
    #[error("the service token is expired")]
    Expired,
    /// Its time has not begun; look at the clocks.
    #[error("the service token is not valid yet")]
    NotYet,
    /// It lives longer than a service token may.
    #[error("the service token lives longer than {LIFE} seconds")]
    LivesTooLong,
    /// It was accepted before.
    #[error("the service token was used before")]
    Replayed,
    /// It could not be asked whether another process accepted it before.
    #[error("it cannot be told whether the service token was used before: {reason}")]
    CannotTellReplay {
        /// What the store's client reported.
        reason: String,
    },
    /// Too many tokens to be sure that this one was not used before.
    #[error("too many service tokens at once")]
    Busy,
    /// The signing failed.
    #[error("the service token could not be signed")]
    Signing,
}

impl ServiceTokenError {
    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Busy | Self::CannotTellReplay { .. } => Kind::Unavailable,
            Self::Signing => Kind::Internal,
            _ => Kind::Unauthenticated,
        }
    }
}
