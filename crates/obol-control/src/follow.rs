//! The parts of a pass of control.

use std::collections::HashMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use obol_model::{KeyHash, WorkspaceId};
use tokio::time::Instant;

use crate::SyncReport;
use crate::commit::{CommitError, Content as Next, Upon, commit, reseal};
use crate::compile::Compiled;
use crate::content::same_content;
use crate::control::Control;
use crate::keys::KeyRecord;
use crate::ledger::{self, Budgeted, Opening};
use crate::publisher::{PublishError, PublishedKeys, is_of};
use crate::reconcile::{self, Knowledge, Outcome};
use crate::state::{Followed, Known, LedgerState, State};
use crate::store::{ControlStore, Head, Origin, StoreError};

/// How long after a ledger could not be opened it is looked at again.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Rounds until keys that are written find nothing left to write, before the marker is set.
const KEY_ROUNDS: usize = 3;

/// Takes up what changed in the store; `all` looks also when it says that nothing did.
pub(crate) async fn refresh(store: &dyn ControlStore, known: &mut Known, all: bool, report: &mut SyncReport) {
    let read = async {
        if known.identity.is_none() {
            known.identity = Some(store.identity().await?);
        }
        // Before the rest: what changes in between is looked at again.
        let generation = store.generation().await?;
        if known.generation == Some(generation) && !all {
            return Ok(());
        }
        for head in store.heads().await? {
            follow(store, known, head, report).await?;
        }
        let keys = store.keys().await?;
        known.keys_complete = keys.complete;
        known.keys = keys.records.into_iter().map(|record| (record.hash, record)).collect();
        known.generation = Some(generation);
        report.failed.extend(keys.faults);
        Ok::<_, StoreError>(())
    };
    let read = read.await;
    known.fresh = read.is_ok();
    if let Err(e) = read {
        report.failed.push(format!("what is to be published cannot be read: {e}"));
    }
}

async fn follow(
    store: &dyn ControlStore,
    known: &mut Known,
    head: Head,
    report: &mut SyncReport,
) -> Result<(), StoreError> {
    let same = |followed: &Followed| followed.head == head && !followed.is_lost();
    if known.heads.get(&head.workspace).is_some_and(same) {
        return Ok(());
    }
    let workspace = head.workspace.clone();
    let documents = if head.published {
        match store.documents(&workspace, head.revision).await {
            Ok(Some(documents)) => Some(documents),
            // It may have been published again in the middle of this; the generation tells then. What is damaged is a
            // fault of this workspace alone, which its file can put right by another revision.
            lost @ (Ok(None) | Err(StoreError::Damaged(_))) => {
                let why = lost.err().map_or_else(|| "they are missing".to_owned(), |e| e.to_string());
                let revision = head.revision;
                report
                    .failed
                    .push(format!("the documents of `{workspace}` {revision} cannot be read: {why}"));
                None
            }
            Err(e) => return Err(e),
        }
    } else {
        None
    };
    // What was there when this process began may be in Redis; what came since may not be.
    let news = known.generation.is_some();
    known.heads.insert(
        workspace,
        Followed { head, documents, told: false, news, ledger: LedgerState::Unknown, sealed: false },
    );
    Ok(())
}

/// Whether what a file says is to be published.
enum Want {
    Nothing,
    Publish,
    /// The store has it, and thinks that it comes from another file.
    Adopt,
}

impl Control {
    /// Brings what files say into the store.
    pub(crate) async fn publish_files(&self, state: &mut State, report: &mut SyncReport) {
        for workspace in state.files.leaving.clone() {
            let head = state.known.heads.get(&workspace).map(|followed| &followed.head);
            let (was, this) = (head.is_some_and(|head| head.published), head.map(|head| head.revision));
            match self.store.unpublish(&workspace, this, Origin::File, &self.stamp()).await {
                Ok(()) | Err(StoreError::NoSuchWorkspace(_)) => {
                    state.files.leaving.remove(&workspace);
                    if was {
                        report.unpublished.push(workspace.clone());
                    }
                    self.look_again(state, &workspace, report).await;
                }
                // Somebody has published it since.
                Err(StoreError::Conflict { .. }) => state.known.generation = None,
                Err(e) => report.failed.push(format!("`{workspace}` could not be unpublished: {e}")),
            }
        }
        let speaking: Vec<WorkspaceId> = state.files.contents.keys().cloned().collect();
        for workspace in speaking {
            match self.publish_file(state, &workspace, report).await {
                Ok(()) => {}
                // Another control, or a command: the next pass sees what of.
                Err(CommitError::Store(StoreError::Conflict { .. })) => state.known.generation = None,
                Err(CommitError::Publish(e)) => {
                    // It would be the same for the others.
                    return report.store(format!("`{workspace}` could not be published: {e}"));
                }
                Err(e) => report.failed.push(format!("`{workspace}` could not be published: {e}")),
            }
        }
        let operators = state.known.heads.values().filter(|f| !f.sealed && f.head.published && f.head.held);
        let operators: Vec<WorkspaceId> = operators.map(|f| f.head.workspace.clone()).collect();
        for workspace in operators {
            if let Err(e) = self.seal_again(state, &workspace, report).await {
                report.failed.push(format!("`{workspace}` could not be sealed again: {e}"));
            }
        }
    }

    /// After a rotation of the key ring also what no file speaks for is sealed by the first key.
    async fn seal_again(
        &self,
        state: &mut State,
        workspace: &WorkspaceId,
        report: &mut SyncReport,
    ) -> Result<(), CommitError> {
        let Some(followed) = state.known.heads.get_mut(workspace) else { return Ok(()) };
        let Some(documents) = followed.documents.clone() else { return Ok(()) };
        let sealed = reseal(&documents, workspace, &self.key_ring, followed.head.revision);
        let sealed = sealed.map_err(CommitError::Encode)?;
        followed.sealed = true;
        if same_content(&documents, &sealed, workspace, &self.key_ring) {
            return Ok(());
        }
        let upon = Upon::Seen(Some(followed.head.revision));
        let encode = &mut |revision| reseal(&documents, workspace, &self.key_ring, revision);
        let next = Next { workspace, upon, origin: Origin::Command, file: None, raise_epoch: false, encode };
        let revision = commit(&*self.store, &*self.publisher, next, 1, &self.stamp()).await?;
        report.published.push((workspace.clone(), revision));
        self.look_again(state, workspace, report).await;
        Ok(())
    }

    async fn publish_file(
        &self,
        state: &mut State,
        workspace: &WorkspaceId,
        report: &mut SyncReport,
    ) -> Result<(), CommitError> {
        let Some(content) = state.files.contents.get_mut(workspace) else { return Ok(()) };
        let followed = state.known.heads.get(workspace);
        let settled = followed.is_some_and(|followed| content.settled.as_ref() == Some(&followed.head));
        if settled || content.restless {
            return Ok(());
        }
        let upon = Upon::Seen(followed.map(|followed| followed.head.revision));
        let file = state.files.owners.get(workspace).cloned();
        let want = self.want(&mut content.compiled, followed, file.as_deref()).await?;
        let others = followed.filter(|followed| followed.is_of_others_since(content.settled.as_ref()));
        match (want, file) {
            (Want::Publish, _) if let Some(Followed { head, .. }) = others => {
                tracing::warn!(
                    workspace = %workspace,
                    revision = %head.revision,
                    help = "let all controls watch the same files; the last edit counts",
                    "another control has published something else than what the file here says"
                );
                content.settled = Some(head.clone());
                return Ok(());
            }
            (Want::Publish, file) => {
                let compiled = &mut content.compiled;
                let encode = &mut |revision| compiled.encode(revision);
                let next = Next { workspace, upon, origin: Origin::File, file, raise_epoch: false, encode };
                let revision = commit(&*self.store, &*self.publisher, next, 1, &self.stamp()).await?;
                report.published.push((workspace.clone(), revision));
            }
            (Want::Adopt, Some(file)) => self.store.set_file(workspace, file).await?,
            (Want::Adopt | Want::Nothing, _) => {
                content.settled = followed.map(|followed| followed.head.clone());
                return Ok(());
            }
        }
        self.look_again(state, workspace, report).await;
        let now = state.known.heads.get(workspace).map(|followed| followed.head.clone());
        if let Some(content) = state.files.contents.get_mut(workspace) {
            content.settled = now;
        }
        Ok(())
    }

    async fn want(
        &self,
        compiled: &mut Compiled,
        followed: Option<&Followed>,
        file: Option<&std::path::Path>,
    ) -> Result<Want, CommitError> {
        let Some(Followed { head, documents, .. }) = followed else { return Ok(Want::Publish) };
        let ring = &self.key_ring;
        let workspace = &head.workspace;
        let says = compiled.encode(head.revision).map_err(CommitError::Encode)?;
        if head.held {
            // What an operator decided stands until the file says something else than it did.
            if let Some(revision) = head.file_revision
                && let Some(said) = self.store.documents(workspace, revision).await?
            {
                // Sealed anew: a rotated key ring is no edit.
                let said = reseal(&said, workspace, ring, head.revision);
                let same = said.is_ok_and(|said| same_content(&said, &says, workspace, ring));
                return Ok(if same { Want::Nothing } else { Want::Publish });
            }
        }
        match documents {
            Some(documents) if same_content(documents, &says, workspace, ring) => {
                Ok(if head.held || head.file.as_deref() == file { Want::Nothing } else { Want::Adopt })
            }
            _ => Ok(Want::Publish),
        }
    }

    /// Takes up what this pass itself changed.
    async fn look_again(&self, state: &mut State, workspace: &WorkspaceId, report: &mut SyncReport) {
        let read = async {
            let report = &mut *report;
            match self.store.head(workspace).await? {
                Some(head) => follow(&*self.store, &mut state.known, head, report).await,
                None => Ok(()),
            }
        };
        if let Err(e) = read.await {
            state.known.generation = None;
            report.failed.push(format!("`{workspace}` cannot be read again: {e}"));
        }
    }

    /// Makes the publications in Redis what the store says.
    pub(crate) async fn tell_publications(&self, state: &mut State, all: bool, report: &mut SyncReport) {
        for (workspace, followed) in &mut state.known.heads {
            if followed.is_lost() || (followed.told && !all) {
                continue;
            }
            // Before the publication when it is new, so that who finds the one finds the other. An old ledger that was lost
            // may have to wait for its usage, which those who have no budget do not wait for.
            if followed.news
                && followed.head.published
                && let Err(e) = self.open_ledger(&state.known.keys, workspace, followed).await
            {
                followed.told = false;
                report.store(format!("the ledger of `{workspace}` could not be opened: {e}"));
                return;
            }
            let Followed { head, documents, told, news, .. } = followed;
            match reconcile::publication(&*self.publisher, head, documents.as_ref()).await {
                Ok(Outcome::Unchanged) => (*told, *news) = (true, false),
                Ok(Outcome::Written) => {
                    if !*news && head.published {
                        report.healed.push((workspace.clone(), head.revision));
                    }
                    (*told, *news) = (true, false);
                }
                Ok(Outcome::Foreign(there)) => {
                    *told = true;
                    let newer = self.store.head(workspace).await.ok().flatten();
                    let ours = newer.is_some_and(|head| head.revision >= there);
                    if !ours && state.foreign.insert(workspace.clone(), there) != Some(there) {
                        tracing::warn!(
                            workspace = %workspace,
                            revision = %there,
                            help = "edit its file, or `obol publish` it, to publish above; `--raise-epoch` when there is no room",
                            "redis has a newer publication than this control knows, left alone"
                        );
                    }
                }
                Err(e) => {
                    *told = false;
                    report.store(format!("`{workspace}` could not be published: {e}"));
                    if matches!(e, PublishError::Unavailable(_)) {
                        return;
                    }
                }
            }
        }
    }

    /// Opens the ledgers of everything that is published: new ones, and lost ones with what was spent.
    pub(crate) async fn open_ledgers(&self, state: &mut State, all: bool, report: &mut SyncReport) {
        let again = state.ledgers_again_at.is_some_and(|at| at <= Instant::now());
        if report.store_failed || !(all || again) {
            return;
        }
        state.ledgers_again_at = None;
        for (workspace, followed) in &mut state.known.heads {
            let open = matches!(followed.ledger, LedgerState::Open) && !all;
            if !followed.head.published || followed.is_lost() || open {
                continue;
            }
            match self.open_ledger(&state.known.keys, workspace, followed).await {
                Ok(true) => {}
                Ok(false) => {
                    report.unseeded.push(workspace.clone());
                    state.ledgers_again_at = Some(Instant::now() + LEDGER_RETRY);
                }
                Err(e) => {
                    state.ledgers_again_at = Some(Instant::now() + LEDGER_RETRY);
                    let failure = format!("the ledger of `{workspace}` could not be opened: {e}");
                    if matches!(e, PublishError::Unavailable(_)) {
                        return report.store(failure);
                    }
                    report.failed.push(failure);
                }
            }
        }
    }

    /// Whether the ledger of a workspace is open now.
    async fn open_ledger(
        &self,
        keys: &HashMap<KeyHash, KeyRecord>,
        workspace: &WorkspaceId,
        followed: &mut Followed,
    ) -> Result<bool, PublishError> {
        let (known, mut lost) = match std::mem::replace(&mut followed.ledger, LedgerState::Unknown) {
            LedgerState::Lost(lost) => (true, Some(lost)),
            LedgerState::Unknown | LedgerState::Open => (false, self.publisher.lost_ledger(workspace).await?),
        };
        if lost.is_none() {
            followed.ledger = LedgerState::Open;
            return Ok(true);
        }
        let budgeted = Budgeted::of(workspace, followed.documents.as_ref(), keys.values());
        let usage = self.usage.as_deref();
        let opening = ledger::seed(&*self.publisher, usage, workspace, &budgeted, &mut lost).await;
        followed.ledger = match (&opening, lost) {
            (Ok(Opening::Open | Opening::Seeded { .. }), _) => LedgerState::Open,
            (_, Some(lost)) => LedgerState::Lost(lost),
            (_, None) => LedgerState::Unknown,
        };
        match opening? {
            // A new one.
            Opening::Seeded { counters: 0 } if followed.news => {}
            Opening::Seeded { counters } => tracing::warn!(
                workspace = %workspace,
                counters,
                help = "what was not yet collected from redis when it lost its data is not counted",
                "the ledger of the workspace was lost, its budgets count what collected usage says"
            ),
            Opening::Waits => {
                if !known {
                    tracing::warn!(
                        workspace = %workspace,
                        "the ledger of the workspace was lost, it is seeded when its usage is collected"
                    );
                }
                return Ok(false);
            }
            Opening::Open => {}
        }
        Ok(true)
    }

    /// Makes the keys in Redis what the store says: all of them when `published` says what is there, else what changed.
    pub(crate) async fn tell_keys(
        &self,
        state: &mut State,
        published: Option<Result<PublishedKeys, PublishError>>,
        report: &mut SyncReport,
    ) {
        let told = match published {
            Some(Ok(published)) => self.all_keys(state, published, report).await,
            Some(Err(e)) => Err(e),
            None => self.changed_keys(state, report).await,
        };
        state.keys_told = told.is_ok();
        if let Err(e) = told {
            report.store(format!("keys could not be written: {e}"));
        }
    }

    async fn changed_keys(&self, state: &mut State, report: &mut SyncReport) -> Result<(), PublishError> {
        for (hash, record) in &state.known.keys {
            if state.told.get(hash) == Some(record) {
                continue;
            }
            report.keys_changed += usize::from(reconcile::key(&*self.publisher, record).await?);
            state.told.insert(*hash, record.clone());
        }
        Ok(())
    }

    async fn all_keys(
        &self,
        state: &mut State,
        mut published: PublishedKeys,
        report: &mut SyncReport,
    ) -> Result<(), PublishError> {
        let Known { identity, keys, keys_complete, fresh, .. } = &state.known;
        let identity = identity.as_deref().unwrap_or_default();
        let ours = |loaded: Option<&str>| loaded.is_none_or(|by| is_of(by, identity));
        let owned = ours(published.loaded.as_deref());
        let strangers = published.records.keys().filter(|hash| !keys.contains_key(*hash)).count();
        if !owned && strangers > 0 {
            report.failed.push(format!(
                "Redis holds {strangers} keys of another control's store, which are left alone: this one has the wrong \
                 state directory or database, or the wrong Redis; if the keys are to go, delete `keys:loaded` in Redis"
            ));
        }
        // Redis may have lost the tombstones with everything else.
        let again = published.loaded.is_none();
        let now = self.stamp().at;
        for record in keys.values().filter(|record| is_recently_revoked(record, now)) {
            if again || state.told.get(&record.hash) != Some(record) {
                report.keys_changed += usize::from(self.publisher.revoke_key(record).await?);
            }
        }
        let whole = *fresh && *keys_complete && owned && !published.truncated;
        let mut knowledge = if whole { Knowledge::Whole } else { Knowledge::Partial };
        for _ in 0..KEY_ROUNDS {
            let wrong = reconcile::keys(&*self.publisher, keys, &published, knowledge).await?;
            report.keys_changed += wrong;
            if wrong == 0 {
                break;
            }
            published = self.publisher.keys().await?;
            // What appeared since the store was read may be in the store by now.
            knowledge = Knowledge::Partial;
        }
        state.told.clone_from(keys);
        if *keys_complete
            && ours(published.loaded.as_deref())
            && published.loaded.as_deref() != Some(identity)
        {
            self.promise(identity, state).await?;
        }
        Ok(())
    }

    /// Says that every key is there, and takes it back if Redis lost one in that very moment: a replica must not tell
    /// anybody that a key does not exist which does.
    async fn promise(&self, identity: &str, state: &State) -> Result<(), PublishError> {
        self.publisher.keys_loaded(Some(identity)).await?;
        let there = self.publisher.keys().await?;
        let lost = state.known.keys.values().any(|r| r.is_live() && !there.records.contains_key(&r.hash));
        if lost {
            self.publisher.keys_loaded(None).await?;
            return Err(PublishError::Unavailable("it lost keys while they were written".to_owned()));
        }
        Ok(())
    }
}

/// Whether some process that has not heard of the revocation may still be at work. Older ones are told when their record is
/// found.
fn is_recently_revoked(record: &KeyRecord, now: Timestamp) -> bool {
    let age = record.revoked_at.map(|at| now.duration_since(at));
    age.is_some_and(|age| age < SignedDuration::from_hours(24))
}
