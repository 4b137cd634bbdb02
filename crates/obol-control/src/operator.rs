use std::sync::Arc;

use obol_model::{Clock, KeyId, KeyRing, Revision, VirtualKey, WorkspaceId};

use crate::CommitError;
use crate::commit::{Content, Upon, commit, reseal};
use crate::compile::Compiled;
use crate::content::same_content;
use crate::keys::{KeyChange, KeyRecord, NewKey, NoRandomness};
use crate::ledger::{self, Budgeted, Opening};
use crate::publisher::{PublishError, Publisher, is_of};
use crate::reconcile::{self, Outcome};
use crate::store::{ControlStore, Origin, Stamp, StoreError};
use crate::usage::UsageStore;

/// How often somebody else may be faster before a command gives up.
const ATTEMPTS: usize = 10;

/// What an operator does by command, beside a control that runs or without one.
///
/// Each command changes the store first, which is the truth, and then, when it knows Redis, the replicas; a control that
/// runs does the same for whoever does not.
#[derive(Debug)]
pub struct Operator {
    store: Arc<dyn ControlStore>,
    publisher: Option<Arc<dyn Publisher>>,
    /// What lost ledgers are seeded from.
    usage: Option<Arc<dyn UsageStore>>,
    clock: Arc<dyn Clock>,
    actor: String,
}

/// Who is to hear of a change.
enum Replicas<'a> {
    /// Nobody from this command.
    Elsewhere,
    /// Those of a Redis that is this store's.
    There(&'a dyn Publisher),
    /// Those of a Redis of which that is not known. Nothing may be written there.
    Away(PublishError),
}

/// Why a command failed. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OperatorError {
    /// The content did not become a revision.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The store refused, or could not be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Revisions are numbered beyond what Redis has, so it has to be asked.
    #[error("revisions cannot be published without Redis: set `OBOL_REDIS_URL`")]
    NeedsRedis,
    /// As before, and it could not.
    #[error("nothing was recorded, since revisions are numbered beyond what Redis has: {0}")]
    Unnumbered(PublishError),
    /// Redis is that of another store.
    #[error(
        "nothing was changed: Redis has what another control's store says, so this is the wrong state directory or \
         database, or the wrong Redis; if this store is to take it over, delete `keys:loaded` in Redis"
    )]
    OtherStore,
    /// Redis is that of some store, and this one cannot say whether it is that.
    #[error(
        "nothing was changed: Redis has what a control's store says, and whether it is this one is not to be told: {0}"
    )]
    Nameless(StoreError),
    /// The revision is not kept.
    #[error(
        "`{workspace}` has no revision {revision} any more, or never had; `obol workspace show {workspace}` lists them"
    )]
    NoSuchRevision {
        /// Whose.
        workspace: WorkspaceId,
        /// Which.
        revision: Revision,
    },
    /// There is nothing older.
    #[error("`{0}` has no older revision")]
    NothingOlder(WorkspaceId),
    /// No key could be made.
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
}

/// Whether the replicas know.
#[derive(Debug, Clone)]
pub enum Effect {
    /// They do.
    Replicas,
    /// A control that runs will tell them: this command was not told where Redis is.
    ByControl,
    /// They could not be told; a control that runs will do it.
    NotYet(PublishError),
}

impl Operator {
    /// An operator of this store who is called `actor` in its audit.
    pub fn new(
        store: Arc<dyn ControlStore>,
        publisher: Option<Arc<dyn Publisher>>,
        clock: Arc<dyn Clock>,
        actor: String,
    ) -> Self {
        Self { store, publisher, usage: None, clock, actor }
    }

    /// Seeds ledgers that were lost from this usage. Without it no usage is kept, and they begin with nothing.
    #[must_use]
    pub fn with_usage(self, usage: Arc<dyn UsageStore>) -> Self {
        Self { usage: Some(usage), ..self }
    }

    /// Makes the store ready, unless Redis is another one's.
    ///
    /// # Errors
    /// [`OperatorError::OtherStore`], or when the store cannot be used.
    pub async fn prepare(&self) -> Result<(), OperatorError> {
        self.replicas().await?;
        Ok(self.store.prepare().await?)
    }

    /// Publishes compiled content; answers the revision, and whether it is a new one. The same content is not published
    /// again unless the epoch is to be raised.
    ///
    /// # Errors
    /// When it did not become a revision.
    pub async fn publish(
        &self,
        mut compiled: Compiled,
        ring: &KeyRing,
        raise_epoch: bool,
    ) -> Result<(Revision, bool, Effect), OperatorError> {
        let workspace = compiled.workspace.workspace_id.clone();
        let replicas = self.replicas().await?;
        if let Some(head) = self.store.head(&workspace).await?
            && head.published
            && !raise_epoch
            && let Some(documents) = self.store.documents(&workspace, head.revision).await?
        {
            let same = compiled.encode(head.revision).map_err(CommitError::Encode)?;
            if same_content(&documents, &same, &workspace, ring) {
                return Ok((head.revision, false, self.tell(replicas, &workspace).await));
            }
        }
        let encode = &mut |revision| compiled.encode(revision);
        let revision = self.commit(&replicas, &workspace, Origin::Command, raise_epoch, encode).await?;
        Ok((revision, true, self.tell(replicas, &workspace).await))
    }

    /// Publishes the content of an older revision as a new one: of `to`, or of the one before the newest. A workspace that
    /// is not published comes back with the newest.
    ///
    /// # Errors
    /// When it did not become a revision.
    pub async fn rollback(
        &self,
        workspace: &WorkspaceId,
        to: Option<Revision>,
        ring: &KeyRing,
    ) -> Result<(Revision, Revision, Effect), OperatorError> {
        let replicas = self.replicas().await?;
        let head = self.store.head(workspace).await?;
        let head = head.ok_or_else(|| StoreError::NoSuchWorkspace(workspace.clone()))?;
        let to = match to {
            Some(to) => to,
            None if !head.published => head.revision,
            None => {
                let history = self.store.history(workspace).await?;
                let older = history.iter().map(|info| info.revision).find(|r| *r < head.revision);
                older.ok_or_else(|| OperatorError::NothingOlder(workspace.clone()))?
            }
        };
        let missing = || OperatorError::NoSuchRevision { workspace: workspace.clone(), revision: to };
        let documents = self.store.documents(workspace, to).await?.ok_or_else(missing)?;
        let encode = &mut |revision| reseal(&documents, workspace, ring, revision);
        let revision = self.commit(&replicas, workspace, Origin::Rollback { to }, false, encode).await?;
        Ok((to, revision, self.tell(replicas, workspace).await))
    }

    /// Takes a workspace away from the replicas. It comes back by a rollback, by `publish`, or when its file changes.
    ///
    /// # Errors
    /// [`StoreError::NoSuchWorkspace`], or when the store could not be asked.
    pub async fn unpublish(&self, workspace: &WorkspaceId) -> Result<Effect, OperatorError> {
        let replicas = self.replicas().await?;
        self.store.unpublish(workspace, None, Origin::Command, &self.stamp()).await?;
        Ok(self.tell(replicas, workspace).await)
    }

    /// Makes a key. This is the only moment in which its text exists: show it and forget it.
    ///
    /// # Errors
    /// When it cannot be made or stored.
    pub async fn new_key(&self, new: NewKey) -> Result<(VirtualKey, KeyRecord, Effect), OperatorError> {
        let replicas = self.replicas().await?;
        let (key, record) = KeyRecord::generate(new, self.clock.now())?;
        self.store.insert_key(record.clone(), &self.stamp()).await?;
        let effect = tell_key(replicas, &record).await;
        Ok((key, record, effect))
    }

    /// Disables, enables or revokes a key.
    ///
    /// # Errors
    /// [`StoreError::NoSuchKey`], [`StoreError::Revoked`], or when the store could not be asked.
    pub async fn change_key(
        &self,
        id: &KeyId,
        change: KeyChange,
    ) -> Result<(KeyRecord, Effect), OperatorError> {
        let replicas = self.replicas().await?;
        let record = self.store.change_key(id, change, &self.stamp()).await?;
        let effect = tell_key(replicas, &record).await;
        Ok((record, effect))
    }

    fn stamp(&self) -> Stamp {
        Stamp { actor: self.actor.clone(), at: self.clock.now() }
    }

    /// Who is to hear of a change, found out before anything is changed: whoever mistypes the store must not take over
    /// the Redis of another one. A Redis that cannot be asked is no reason not to record what control tells it later.
    async fn replicas(&self) -> Result<Replicas<'_>, OperatorError> {
        let Some(publisher) = self.publisher.as_deref() else { return Ok(Replicas::Elsewhere) };
        match publisher.loaded_by().await {
            Err(e) => Ok(Replicas::Away(e)),
            Ok(None) => Ok(Replicas::There(publisher)),
            Ok(Some(marker)) => {
                let identity = self.store.identity().await.map_err(OperatorError::Nameless)?;
                if !is_of(&marker, &identity) {
                    return Err(OperatorError::OtherStore);
                }
                Ok(Replicas::There(publisher))
            }
        }
    }

    async fn commit(
        &self,
        replicas: &Replicas<'_>,
        workspace: &WorkspaceId,
        origin: Origin,
        raise_epoch: bool,
        encode: &mut (dyn FnMut(Revision) -> Result<obol_model::snapshot::Documents, String> + Send),
    ) -> Result<Revision, OperatorError> {
        let publisher = match replicas {
            Replicas::There(publisher) => *publisher,
            Replicas::Elsewhere => return Err(OperatorError::NeedsRedis),
            Replicas::Away(why) => return Err(OperatorError::Unnumbered(why.clone())),
        };
        let content = Content { workspace, upon: Upon::Anything, origin, file: None, raise_epoch, encode };
        let committed = commit(&*self.store, publisher, content, ATTEMPTS, &self.stamp()).await;
        committed.map_err(|e| match e {
            CommitError::Publish(why) => OperatorError::Unnumbered(why),
            e => e.into(),
        })
    }

    /// What the store says by now is told, which may be newer than what this command did.
    async fn tell(&self, replicas: Replicas<'_>, workspace: &WorkspaceId) -> Effect {
        let publisher = match replicas {
            Replicas::There(publisher) => publisher,
            Replicas::Elsewhere => return Effect::ByControl,
            Replicas::Away(why) => return Effect::NotYet(why),
        };
        let told = async {
            let store = PublishError::Unreadable;
            let Some(head) = self.store.head(workspace).await.map_err(store)? else { return Ok(()) };
            let documents = if head.published {
                let documents = self.store.documents(workspace, head.revision).await.map_err(store)?;
                if let Some(lost) = publisher.lost_ledger(workspace).await? {
                    let keys = self.store.keys().await.map_err(store)?.records;
                    let budgeted = Budgeted::of(workspace, documents.as_ref(), keys.iter());
                    let usage = self.usage.as_deref();
                    let opened =
                        ledger::seed(publisher, usage, workspace, &budgeted, &mut Some(lost)).await?;
                    if opened == Opening::Waits {
                        tracing::warn!(
                            workspace = %workspace,
                            help = "let `obol control` run: it collects usage",
                            "the ledger of the workspace was lost, it is seeded when its usage is collected"
                        );
                    }
                }
                documents
            } else {
                None
            };
            match reconcile::publication(publisher, &head, documents.as_ref()).await? {
                Outcome::Unchanged | Outcome::Written => Ok(()),
                // Somebody else was faster, and has told them.
                Outcome::Foreign(there)
                    if self
                        .store
                        .head(workspace)
                        .await
                        .map_err(store)?
                        .is_some_and(|h| h.revision >= there) =>
                {
                    Ok(())
                }
                Outcome::Foreign(there) => {
                    Err(PublishError::NotNewer { workspace: workspace.clone(), there })
                }
            }
        };
        told.await.map_or_else(Effect::NotYet, |()| Effect::Replicas)
    }
}

async fn tell_key(replicas: Replicas<'_>, record: &KeyRecord) -> Effect {
    match replicas {
        Replicas::There(publisher) => match reconcile::key(publisher, record).await {
            Ok(_) => Effect::Replicas,
            Err(e) => Effect::NotYet(e),
        },
        Replicas::Elsewhere => Effect::ByControl,
        Replicas::Away(why) => Effect::NotYet(why),
    }
}
