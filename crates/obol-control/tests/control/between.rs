//! What happens in the middle of a pass.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use obol_control::{
    AuditEntry, Control, ControlOptions, ControlStore, FileStore, Head, KeyChange, KeyRecord, LoadedKeys,
    NewRevision, Origin, RevisionInfo, Stamp, StoreError,
};
use obol_model::snapshot::Documents;
use obol_model::{KeyHash, KeyId, KeyRing, Revision, WorkspaceId};
use tokio::sync::Mutex;

use super::{Bench, RING, ws};

/// Has something happen right before it is read.
struct Before {
    store: Arc<FileStore>,
    happens: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl fmt::Debug for Before {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl ControlStore for Before {
    async fn prepare(&self) -> Result<(), StoreError> {
        self.store.prepare().await
    }

    async fn identity(&self) -> Result<String, StoreError> {
        self.store.identity().await
    }

    async fn generation(&self) -> Result<u64, StoreError> {
        if let Some(happens) = self.happens.lock().await.take() {
            happens.await;
        }
        self.store.generation().await
    }

    async fn heads(&self) -> Result<Vec<Head>, StoreError> {
        self.store.heads().await
    }

    async fn head(&self, workspace: &WorkspaceId) -> Result<Option<Head>, StoreError> {
        self.store.head(workspace).await
    }

    async fn history(&self, workspace: &WorkspaceId) -> Result<Vec<RevisionInfo>, StoreError> {
        self.store.history(workspace).await
    }

    async fn documents(
        &self,
        workspace: &WorkspaceId,
        revision: Revision,
    ) -> Result<Option<Documents>, StoreError> {
        self.store.documents(workspace, revision).await
    }

    async fn keys(&self) -> Result<LoadedKeys, StoreError> {
        self.store.keys().await
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<KeyRecord>, StoreError> {
        self.store.key(hash).await
    }

    async fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        self.store.audit(limit).await
    }

    async fn publish(&self, new: NewRevision, by: &Stamp) -> Result<(), StoreError> {
        self.store.publish(new, by).await
    }

    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        this: Option<Revision>,
        origin: Origin,
        by: &Stamp,
    ) -> Result<(), StoreError> {
        self.store.unpublish(workspace, this, origin, by).await
    }

    async fn set_file(&self, workspace: &WorkspaceId, file: PathBuf) -> Result<(), StoreError> {
        self.store.set_file(workspace, file).await
    }

    async fn insert_key(&self, record: KeyRecord, by: &Stamp) -> Result<(), StoreError> {
        self.store.insert_key(record, by).await
    }

    async fn change_key(&self, id: &KeyId, change: KeyChange, by: &Stamp) -> Result<KeyRecord, StoreError> {
        self.store.change_key(id, change, by).await
    }
}

/// What another control makes of the files before this one reads the store is no older than what this one reads of them.
#[tokio::test]
async fn a_file_that_goes_before_the_store_is_read_is_not_published_again() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    bench.workspace("beta", "one");
    let store = Arc::new(Before { store: bench.store.clone(), happens: Mutex::default() });
    let options = ControlOptions {
        source: bench.folder.path().join("ws"),
        key_ring: Arc::new(KeyRing::parse(RING).unwrap()),
        env: Arc::new(|_| Some("s3cret".to_owned())),
    };
    let control = Control::new(options, store.clone(), bench.publisher.clone(), bench.clock.clone());
    control.sync_once().await;
    let (other, file) = (bench.control(), bench.folder.path().join("ws/acme.yaml"));
    other.sync_once().await;
    *store.happens.lock().await = Some(Box::pin(async move {
        fs::remove_file(file).unwrap();
        assert_eq!(other.sync_once().await.unpublished, [ws("acme")]);
    }));
    control.sync_once().await;
    assert!(store.happens.lock().await.is_none());
    let history = bench.store.history(&ws("acme")).await.unwrap();
    assert_eq!(history.iter().map(|info| info.revision.number).collect::<Vec<_>>(), [1]);
}
