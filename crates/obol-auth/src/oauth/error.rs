use std::fmt;

use obol_model::Kind;

/// Why an access token opens nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It is good for nothing here.
    #[error("the access token is not valid: {0}")]
    Invalid(TokenFault),
    /// It is good, but was not granted what is required.
    #[error("the access token lacks a required scope")]
    InsufficientScope,
    /// It is good, but its claims lead to no workspace.
    #[error("the claims of the access token name no workspace")]
    NoWorkspace,
    /// It is good, but its claims cannot be judged by policies.
    #[error("the claim of the access token that holds the tags cannot be used")]
    Tags,
    /// It is not known whether it is good: its key is not known, and the issuer cannot be asked.
    #[error("the keys of the issuer could not be fetched")]
    Unavailable,
}

impl TokenError {
    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Invalid(_) => Kind::Unauthenticated,
            Self::InsufficientScope | Self::NoWorkspace | Self::Tags => Kind::Forbidden,
            Self::Unavailable => Kind::Unavailable,
        }
    }

    /// The stable word for logs and metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Invalid(fault) => fault.as_str(),
            Self::InsufficientScope => "insufficient_scope",
            Self::NoWorkspace => "no_workspace",
            Self::Tags => "tags",
            Self::Unavailable => "unavailable",
        }
    }
}

impl From<TokenFault> for TokenError {
    fn from(fault: TokenFault) -> Self {
        Self::Invalid(fault)
    }
}

/// What is wrong with an access token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenFault {
    /// Longer than any token that is of use.
    TooLong,
    /// No signed JWT, or claims of other types than they have.
    Malformed,
    /// The header names an algorithm that is not accepted, or another one than the key's.
    Algorithm,
    /// The header demands an extension (`crit`, `b64`).
    Extension,
    /// A JWT that is no access token.
    Type,
    /// No key id, or one that no issuer would choose.
    KeyId,
    /// Of another issuer.
    Issuer,
    /// Signed by a key that the issuer does not publish.
    UnknownKey,
    /// The signature is not the key's.
    Signature,
    /// For somebody else.
    Audience,
    /// No subject, or one that is too long or cannot be written.
    Subject,
    /// It would never end.
    NoExpiry,
    /// Its time is over.
    Expired,
    /// Its time has not begun.
    NotYet,
}

impl TokenFault {
    /// The stable word for logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::Malformed => "malformed",
            Self::Algorithm => "algorithm",
            Self::Extension => "extension",
            Self::Type => "type",
            Self::KeyId => "key_id",
            Self::Issuer => "issuer",
            Self::UnknownKey => "unknown_key",
            Self::Signature => "signature",
            Self::Audience => "audience",
            Self::Subject => "subject",
            Self::NoExpiry => "no_expiry",
            Self::Expired => "expired",
            Self::NotYet => "not_yet",
        }
    }
}

impl fmt::Display for TokenFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLong => "it is too long",
            Self::Malformed => "it is no signed JWT",
            Self::Algorithm => "its algorithm is not accepted",
            Self::Extension => "its header demands an extension",
            Self::Type => "its type is not that of an access token",
            Self::KeyId => "its header names no usable key id",
            Self::Issuer => "its issuer is not configured",
            Self::UnknownKey => "its key is not one of the issuer's",
            Self::Signature => "its signature is not valid",
            Self::Audience => "it is for another audience",
            Self::Subject => "it has no usable subject",
            Self::NoExpiry => "it has no expiry",
            Self::Expired => "it is expired",
            Self::NotYet => "it is not valid yet",
        })
    }
}
