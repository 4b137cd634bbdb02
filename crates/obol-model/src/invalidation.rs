use serde::{Deserialize, Serialize};

use crate::{KeyHash, Principal, WorkspaceId};

/// A message on the channel `obol:invalidate` (DESIGN §7.5). A hint only: the truth is what the keys say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Invalidation {
    /// The workspace snapshot changed: re-read the pair.
    Workspace {
        /// Whose.
        workspace_id: WorkspaceId,
    },
    /// The policy snapshot changed: re-read the pair.
    Policy {
        /// Whose.
        workspace_id: WorkspaceId,
    },
    /// A key was made, changed or revoked: forget what is cached of it.
    Key {
        /// SHA-256 of the key.
        hash: KeyHash,
        /// Whether the sessions of the key end as well; then the two below say whose they are.
        #[serde(default)]
        delete_sessions: bool,
        /// The tenant of the key.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        workspace_id: Option<WorkspaceId>,
        /// Who called with the key.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        principal: Option<Principal>,
    },
    /// Reconcile every cached workspace, then preload.
    All,
}

impl Invalidation {
    /// The channel that carries these messages.
    pub const CHANNEL: &'static str = "obol:invalidate";

    /// A key was made, changed or revoked, and its sessions stay.
    pub fn key(hash: KeyHash) -> Self {
        Self::Key { hash, delete_sessions: false, workspace_id: None, principal: None }
    }

    /// A key was revoked, and the sessions of whoever called with it end.
    pub fn key_with_sessions(hash: KeyHash, workspace_id: WorkspaceId, principal: Principal) -> Self {
        Self::Key {
            hash,
            delete_sessions: true,
            workspace_id: Some(workspace_id),
            principal: Some(principal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_form_is_the_documented_one() {
        let ws = Invalidation::Workspace { workspace_id: "acme".parse().unwrap() };
        assert_eq!(serde_json::to_string(&ws).unwrap(), r#"{"type":"workspace","workspace_id":"acme"}"#);
        assert_eq!(serde_json::to_string(&Invalidation::All).unwrap(), r#"{"type":"all"}"#);
        let hash = "ab".repeat(32);
        let key: Invalidation =
            serde_json::from_str(&format!(r#"{{"type":"key","hash":"{hash}"}}"#)).unwrap();
        assert_eq!(key, Invalidation::key(hash.parse().unwrap()));
        assert_eq!(
            serde_json::to_string(&key).unwrap(),
            format!(r#"{{"type":"key","hash":"{hash}","delete_sessions":false}}"#)
        );
        let sessions = Invalidation::key_with_sessions(
            hash.parse().unwrap(),
            "acme".parse().unwrap(),
            Principal::Key("k-1".parse().unwrap()),
        );
        let text = serde_json::to_string(&sessions).unwrap();
        assert!(
            text.ends_with(r#""delete_sessions":true,"workspace_id":"acme","principal":{"key":"k-1"}}"#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Invalidation>(&text).unwrap(), sessions);
    }
}
