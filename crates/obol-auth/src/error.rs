use std::fmt;

use obol_model::Kind;

use crate::KeyStoreError;

/// Why a request has no caller.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// It brings no credential.
    #[error("no credential was sent")]
    Missing,
    /// It brings one that is good for nothing.
    #[error("the credential is not valid: {reason}")]
    Invalid {
        /// What is wrong with it.
        reason: Refusal,
    },
    /// The key is known and switched off.
    #[error("the key is disabled")]
    Disabled,
    /// It is not known whether the key is good.
    #[error("the key store could not answer")]
    Unavailable(#[source] KeyStoreError),
}

impl AuthError {
    pub(crate) fn invalid(reason: Refusal) -> Self {
        Self::Invalid { reason }
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Missing | Self::Invalid { .. } => Kind::Unauthenticated,
            Self::Disabled => Kind::Forbidden,
            Self::Unavailable(_) => Kind::Unavailable,
        }
    }
}

/// What is wrong with a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// It has not the form of a virtual key.
    Malformed,
    /// No such key.
    Unknown,
    /// The key's time is over.
    Expired,
    /// `Authorization` names another scheme than `Bearer`.
    Scheme,
    /// The request brings two credentials that differ.
    Conflicting,
}

impl Refusal {
    /// The stable word for logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Unknown => "unknown",
            Self::Expired => "expired",
            Self::Scheme => "scheme",
            Self::Conflicting => "conflicting",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Malformed => "it has not the form of a virtual key",
            Self::Unknown => "there is no such key",
            Self::Expired => "it is expired",
            Self::Scheme => "the scheme of `Authorization` must be `Bearer`",
            Self::Conflicting => "`Authorization` and `x-api-key` differ",
        })
    }
}
