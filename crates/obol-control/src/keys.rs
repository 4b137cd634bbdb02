use jiff::Timestamp;
use obol_model::{KeyBudget, KeyContext, KeyHash, KeyId, Limits, Principal, VirtualKey, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::store::{Action, StoreError};

/// What is kept of a virtual key: its hash and never the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// Version of this document; see [`KeyRecord::SCHEMA`].
    pub schema_version: u32,
    /// SHA-256 of the key.
    pub hash: KeyHash,
    /// What is published. Its revision grows with each change.
    pub key: KeyContext,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was revoked. The record stays, so that a control that was away at the time still removes the key.
    #[serde(default)]
    pub revoked_at: Option<Timestamp>,
    /// Whether the sessions of a revoked key end with it.
    #[serde(default)]
    pub delete_sessions: bool,
}

/// What a new key is made with.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// The tenant that it opens.
    pub workspace: WorkspaceId,
    /// What its owner calls it.
    pub name: String,
    /// Tags that policies can name.
    pub tags: Vec<String>,
    /// When it stops being valid; `None` is never.
    pub expires_at: Option<Timestamp>,
    /// How much may be spent with it, once per window. What has no budget here the workspace says.
    pub budgets: Vec<KeyBudget>,
    /// How fast it may call; what it leaves open the workspace says.
    pub limits: Limits,
}

impl NewKey {
    /// One that has a name and nothing else.
    pub fn named(workspace: WorkspaceId, name: &str) -> Self {
        Self {
            workspace,
            name: name.to_owned(),
            tags: Vec::new(),
            expires_at: None,
            budgets: Vec::new(),
            limits: Limits::default(),
        }
    }

    /// The schema that its documents need. What says nothing of money is written as it was before there was any, so that
    /// processes of the earlier release go on reading it; what does they must refuse, and not overlook.
    fn schema(&self) -> u32 {
        if self.budgets.is_empty() && self.limits.is_open() { 1 } else { 2 }
    }
}

/// What can become of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyChange {
    /// It is refused until it is enabled again.
    Disable,
    /// It is good again.
    Enable,
    /// It is gone for ever.
    Revoke {
        /// Its sessions as well.
        delete_sessions: bool,
    },
}

/// The operating system gave no random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no random bytes could be had")]
pub struct NoRandomness;

impl KeyRecord {
    /// The highest version of the document that this release writes and reads; version 1 has no money.
    pub const SCHEMA: u32 = 2;

    /// Makes a key. This is the only moment in which its text exists here: show it and forget it.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn generate(new: NewKey, now: Timestamp) -> Result<(VirtualKey, Self), NoRandomness> {
        let key = VirtualKey::generate().map_err(|_| NoRandomness)?;
        let hash = key.hash();
        let key_id: KeyId = Self::id_of(&hash).parse().map_err(|_| NoRandomness)?;
        let schema_version = new.schema();
        let NewKey { workspace, name, tags, expires_at, budgets, limits } = new;
        let context = KeyContext {
            schema_version,
            key_id,
            workspace_id: workspace,
            name,
            tags,
            disabled: false,
            expires_at,
            budgets,
            limits,
            revision: 1,
        };
        let record = Self {
            schema_version,
            hash,
            key: context,
            created_at: now,
            revoked_at: None,
            delete_sessions: false,
        };
        Ok((key, record))
    }

    /// What a key is called: 12 of 64 digits of a hash of 32 random bytes say nothing of the key.
    pub(crate) fn id_of(hash: &KeyHash) -> String {
        format!("k-{}", hash.hex().get(..12).unwrap_or_default())
    }

    /// Whether replicas may know it.
    pub fn is_live(&self) -> bool {
        self.revoked_at.is_none()
    }

    /// Whose sessions end with it, if they do.
    pub(crate) fn ending_sessions(&self) -> Option<(WorkspaceId, Principal)> {
        let key = &self.key;
        (!self.is_live() && self.delete_sessions).then(|| (key.workspace_id.clone(), key.principal()))
    }

    /// Changes the record; answers what that is called, or `None` when nothing changed.
    pub(crate) fn change(&mut self, change: KeyChange, now: Timestamp) -> Result<Option<Action>, StoreError> {
        let before = self.clone();
        let action = match change {
            KeyChange::Revoke { delete_sessions } => {
                self.revoked_at.get_or_insert(now);
                self.delete_sessions |= delete_sessions;
                Action::RevokeKey
            }
            _ if !self.is_live() => return Err(StoreError::Revoked(self.key.key_id.clone())),
            KeyChange::Disable => {
                self.key.disabled = true;
                Action::DisableKey
            }
            KeyChange::Enable => {
                self.key.disabled = false;
                Action::EnableKey
            }
        };
        if *self == before {
            return Ok(None);
        }
        self.key.revision += 1;
        Ok(Some(action))
    }
}

/// What a look at the keys found.
#[derive(Debug, Default, Clone)]
pub struct LoadedKeys {
    /// The records, in the order of their ids.
    pub records: Vec<KeyRecord>,
    /// What is wrong with single ones, in words.
    pub faults: Vec<String>,
    /// Whether every one could be read. If not, an absent key may be one that could not, and nobody may be told that it
    /// does not exist.
    pub complete: bool,
}

impl LoadedKeys {
    pub(crate) fn complete(records: Vec<KeyRecord>) -> Self {
        Self { records, faults: Vec::new(), complete: true }
    }
}

#[cfg(test)]
mod tests {
    use obol_model::{NanoUsd, Window};

    use super::*;

    #[test]
    fn a_key_is_kept_as_its_hash_and_its_revision_grows_with_each_change() {
        let new = NewKey::named("acme".parse().unwrap(), "ci");
        let (key, mut record) = KeyRecord::generate(new, Timestamp::UNIX_EPOCH).unwrap();
        let text = serde_json::to_string(&record).unwrap();
        assert!(!text.contains(&key.expose()[5..]) && text.contains(&key.hash().hex()));
        let now = Timestamp::UNIX_EPOCH;
        let mut change = |change| (record.change(change, now).unwrap(), record.key.revision);
        let (gently, wholly) =
            (KeyChange::Revoke { delete_sessions: false }, KeyChange::Revoke { delete_sessions: true });
        assert_eq!(change(KeyChange::Enable), (None, 1));
        assert_eq!(change(KeyChange::Disable), (Some(Action::DisableKey), 2));
        assert_eq!(change(gently), (Some(Action::RevokeKey), 3));
        assert_eq!(change(gently), (None, 3));
        assert_eq!(change(wholly), (Some(Action::RevokeKey), 4));
        assert_eq!(change(gently), (None, 4), "sessions that end do not come back");
        assert!(matches!(record.change(KeyChange::Enable, now), Err(StoreError::Revoked(_))));
        assert_eq!(record.ending_sessions().unwrap().1, record.key.principal());
    }

    #[test]
    fn only_a_key_with_money_needs_a_reader_that_knows_of_it() {
        let generate = |new| KeyRecord::generate(new, Timestamp::UNIX_EPOCH).unwrap().1;
        let plain = NewKey::named("acme".parse().unwrap(), "ci");
        let record = generate(plain.clone());
        assert_eq!((record.schema_version, record.key.schema_version), (1, 1));
        let text = serde_json::to_string(&record).unwrap();
        assert!(!text.contains("budgets") && !text.contains("limits"), "{text}");

        let budgets = vec![KeyBudget { window: Window::Day, limit: NanoUsd::ZERO }];
        let limits = Limits { concurrency: Some(1), ..Limits::default() };
        for new in [NewKey { budgets, ..plain.clone() }, NewKey { limits, ..plain }] {
            let record = generate(new);
            assert_eq!((record.schema_version, record.key.schema_version), (2, 2));
            let text = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<KeyRecord>(&text).unwrap(), record, "{text}");
        }
    }
}
