use std::sync::Arc;

use jiff::Timestamp;
use obol_model::{KeyContext, KeyId, Principal, WorkspaceId};

/// Who calls, by whichever credential (DESIGN §8). Cheap to clone.
#[derive(Debug, Clone)]
pub enum Identity {
    /// By a virtual key.
    Key(Arc<KeyContext>),
    /// By an access token of an OAuth issuer.
    User(Arc<User>),
}

/// The user that an access token speaks for: what is left of its claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The tenant that the claims lead to.
    pub workspace_id: WorkspaceId,
    /// Who vouches for the user: `iss`.
    pub issuer: String,
    /// Who it is to the issuer: `sub`.
    pub subject: String,
    /// Tags that policies can name.
    pub tags: Vec<String>,
    /// When the token ends, by the issuer's clock.
    pub expires_at: Timestamp,
    /// Those of its audiences that are ours.
    pub(crate) audiences: Vec<String>,
}

impl Identity {
    /// The tenant.
    pub fn workspace_id(&self) -> &WorkspaceId {
        match self {
            Self::Key(key) => &key.workspace_id,
            Self::User(user) => &user.workspace_id,
        }
    }

    /// Who it is, whatever the credential's bytes: sessions are bound to it. Two keys of one person are two principals,
    /// two tokens of one user are one.
    pub fn principal(&self) -> Principal {
        match self {
            Self::Key(key) => key.principal(),
            Self::User(user) => {
                Principal::User { issuer: user.issuer.clone(), subject: user.subject.clone() }
            }
        }
    }

    /// The key, when it is one.
    pub fn key_id(&self) -> Option<&KeyId> {
        match self {
            Self::Key(key) => Some(&key.key_id),
            Self::User(_) => None,
        }
    }

    /// The record of the key, when it is one.
    pub fn key(&self) -> Option<&KeyContext> {
        match self {
            Self::Key(key) => Some(key),
            Self::User(_) => None,
        }
    }

    /// What policies see as `principal.name`. A user's is the subject: names that users can choose are nothing to
    /// decide by.
    pub fn name(&self) -> &str {
        match self {
            Self::Key(key) => &key.name,
            Self::User(user) => &user.subject,
        }
    }

    /// What policies see as `principal.tags`.
    pub fn tags(&self) -> &[String] {
        match self {
            Self::Key(key) => &key.tags,
            Self::User(user) => &user.tags,
        }
    }

    /// When the credential ends; `None` is never.
    pub fn expires_at(&self) -> Option<Timestamp> {
        match self {
            Self::Key(key) => key.expires_at,
            Self::User(user) => Some(user.expires_at),
        }
    }
}
