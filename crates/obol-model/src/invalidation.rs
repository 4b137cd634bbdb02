use serde::{Deserialize, Serialize};

use crate::{KeyHash, WorkspaceId};

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
        /// Whether the sessions of the key end as well.
        #[serde(default)]
        delete_sessions: bool,
    },
    /// Reconcile every cached workspace, then preload.
    All,
}

impl Invalidation {
    /// The channel that carries these messages.
    pub const CHANNEL: &'static str = "obol:invalidate";
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
        assert!(matches!(key, Invalidation::Key { delete_sessions: false, .. }));
    }
}
