use std::collections::BTreeMap;
use std::path::PathBuf;

use async_trait::async_trait;
use obol_model::snapshot::Documents;
use obol_model::{KeyHash, KeyId, Revision, WorkspaceId};
use parking_lot::Mutex;

use super::{
    Action, AuditEntry, ControlStore, Head, NewRevision, Origin, RevisionInfo, Stamp, StoreError, published,
    superfluous, unpublished,
};
use crate::keys::{KeyChange, KeyRecord, LoadedKeys};

/// Entries of the audit that are kept.
const AUDIT: usize = 1000;

/// A store that ends with the process, for `obol dev`.
#[derive(Debug, Default)]
pub struct MemoryStore(Mutex<Content>);

#[derive(Debug, Default)]
struct Content {
    generation: u64,
    heads: BTreeMap<WorkspaceId, Head>,
    revisions: BTreeMap<WorkspaceId, BTreeMap<Revision, (RevisionInfo, Documents)>>,
    keys: BTreeMap<KeyId, KeyRecord>,
    audit: Vec<AuditEntry>,
}

impl Content {
    fn changed(&mut self, entry: Option<AuditEntry>) {
        self.generation += 1;
        self.audit.extend(entry);
        let excess = self.audit.len().saturating_sub(AUDIT);
        self.audit.drain(..excess);
    }
}

#[async_trait]
impl ControlStore for MemoryStore {
    async fn prepare(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn identity(&self) -> Result<String, StoreError> {
        // What it is compared with ends with the process, too.
        Ok("memory".to_owned())
    }

    async fn generation(&self) -> Result<u64, StoreError> {
        Ok(self.0.lock().generation)
    }

    async fn heads(&self) -> Result<Vec<Head>, StoreError> {
        Ok(self.0.lock().heads.values().cloned().collect())
    }

    async fn head(&self, workspace: &WorkspaceId) -> Result<Option<Head>, StoreError> {
        Ok(self.0.lock().heads.get(workspace).cloned())
    }

    async fn history(&self, workspace: &WorkspaceId) -> Result<Vec<RevisionInfo>, StoreError> {
        let content = self.0.lock();
        let revisions = content.revisions.get(workspace).into_iter().flatten();
        Ok(revisions.rev().map(|(_, (info, _))| info.clone()).collect())
    }

    async fn documents(
        &self,
        workspace: &WorkspaceId,
        revision: Revision,
    ) -> Result<Option<Documents>, StoreError> {
        let content = self.0.lock();
        let kept = content.revisions.get(workspace).and_then(|revisions| revisions.get(&revision));
        Ok(kept.map(|(_, documents)| documents.clone()))
    }

    async fn keys(&self) -> Result<LoadedKeys, StoreError> {
        Ok(LoadedKeys::complete(self.0.lock().keys.values().cloned().collect()))
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<KeyRecord>, StoreError> {
        Ok(self.0.lock().keys.values().find(|record| record.hash == *hash).cloned())
    }

    async fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        Ok(self.0.lock().audit.iter().rev().take(limit).cloned().collect())
    }

    async fn publish(&self, new: NewRevision, by: &Stamp) -> Result<(), StoreError> {
        let mut content = self.0.lock();
        let head = published(content.heads.get(&new.workspace), &new)?;
        let entry = AuditEntry::of_revision(&new, by);
        let revisions = content.revisions.entry(new.workspace.clone()).or_default();
        revisions.insert(new.revision, (new.info(by), new.documents));
        let newest_first: Vec<Revision> = revisions.keys().rev().copied().collect();
        for revision in superfluous(&newest_first, &head) {
            revisions.remove(&revision);
        }
        content.heads.insert(new.workspace, head);
        content.changed(Some(entry));
        Ok(())
    }

    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        this: Option<Revision>,
        origin: Origin,
        by: &Stamp,
    ) -> Result<(), StoreError> {
        let mut content = self.0.lock();
        let head = content.heads.get(workspace);
        let head = head.ok_or_else(|| StoreError::NoSuchWorkspace(workspace.clone()))?;
        if let Some(next) = unpublished(head, this, origin)? {
            let entry = AuditEntry::new(Action::Unpublish, workspace, by).with_revision(next.revision);
            content.heads.insert(workspace.clone(), next);
            content.changed(Some(entry));
        }
        Ok(())
    }

    async fn set_file(&self, workspace: &WorkspaceId, file: PathBuf) -> Result<(), StoreError> {
        let mut content = self.0.lock();
        let head = content.heads.get_mut(workspace);
        head.ok_or_else(|| StoreError::NoSuchWorkspace(workspace.clone()))?.file = Some(file);
        content.changed(None);
        Ok(())
    }

    async fn insert_key(&self, record: KeyRecord, by: &Stamp) -> Result<(), StoreError> {
        let mut content = self.0.lock();
        let entry = AuditEntry::of_key(Action::NewKey, &record, by);
        content.keys.insert(record.key.key_id.clone(), record);
        content.changed(Some(entry));
        Ok(())
    }

    async fn change_key(&self, id: &KeyId, change: KeyChange, by: &Stamp) -> Result<KeyRecord, StoreError> {
        let mut content = self.0.lock();
        let record = content.keys.get_mut(id).ok_or_else(|| StoreError::NoSuchKey(id.clone()))?;
        let changed = record.change(change, by.at)?;
        let record = record.clone();
        if let Some(action) = changed {
            let entry = AuditEntry::of_key(action, &record, by);
            content.changed(Some(entry));
        }
        Ok(record)
    }
}
