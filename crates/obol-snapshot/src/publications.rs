use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use obol_model::snapshot::{Documents, Fingerprint, InvalidPublication, PolicySnapshot, WorkspaceSnapshot};
use obol_model::{Invalidation, Revision, WorkspaceId};
use parking_lot::RwLock;
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::flight::{Need, SingleFlight};
use crate::follow::Pending;
use crate::heard::Heard;
use crate::observe;
use crate::rejected::Rejections;
use crate::{PairError, PublicationSource, SourceError, Stored};

/// How many workspaces are preloaded at start, and after an [`Invalidation::All`] (DESIGN §7.4).
pub const PRELOAD: usize = 1000;

/// How long a pair is used without being compared with the store.
const FRESH: Duration = Duration::from_secs(30);

/// The most workspaces kept in memory. One more takes the place of the one that nobody used and that was compared
/// longest ago; asking for that one again is a read.
const CAPACITY: usize = 10_000;

/// How many invalidations a listener may lag behind before it is told that it missed some.
const LISTENER_LAG: usize = 1024;

/// How many workspaces are read at a time in the background.
pub(crate) const READS_AT_A_TIME: usize = 16;

/// What the composer makes of the documents, once per publication: policies parsed, credentials opened, tables built.
pub trait Compile: Send + Sync + 'static {
    /// What requests work with.
    type Output: Send + Sync + 'static;

    /// Compiles one coherent publication. The same documents must always give the same result: a failure is
    /// remembered with the fingerprint of what failed.
    ///
    /// # Errors
    /// The reason, for the operator's log; the publication is then invalid and not served. Must name no credential.
    fn compile(&self, workspace: &WorkspaceSnapshot, policy: &PolicySnapshot)
    -> Result<Self::Output, String>;
}

/// One coherent publication of a workspace. A request keeps the one that it began with.
#[derive(Debug)]
pub struct Publication<T> {
    /// The workspace snapshot.
    pub workspace: WorkspaceSnapshot,
    /// What [`Compile`] made of the snapshot and the policies.
    pub compiled: T,
    fingerprint: Fingerprint,
}

impl<T> Publication<T> {
    /// Which publication this is.
    pub fn revision(&self) -> Revision {
        self.workspace.revision
    }
}

/// What became of each workspace that was reloaded: the revision now served, or `None` when it is no longer published.
pub type Reloaded = Vec<(WorkspaceId, Result<Option<Revision>, PairError>)>;

pub(crate) type Outcome<T> = Result<Option<Arc<Publication<T>>>, PairError>;

pub(crate) struct Served<T> {
    pub(crate) publication: Arc<Publication<T>>,
    pub(crate) installed_at: Instant,
    /// When the read that confirmed it *began*: what the store said later is not known.
    pub(crate) validated_at: Instant,
    /// Whether a request used it since then.
    used: AtomicBool,
    /// Whether a later read failed, so that it ends with its 30 seconds.
    failed: bool,
}

impl<T> Served<T> {
    fn is_fresh(&self) -> bool {
        self.validated_at.elapsed() < FRESH
    }

    fn is_loaded(&self) -> bool {
        !self.failed || self.is_fresh()
    }
}

/// Whether a change that a read finds is told to the listeners, or the caller does so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Changes {
    Tell,
    Keep,
}

/// The publications that this process serves.
pub struct Publications<C: Compile> {
    source: Arc<dyn PublicationSource>,
    compile: C,
    pub(crate) served: RwLock<HashMap<WorkspaceId, Served<C::Output>>>,
    pub(crate) rejections: Rejections,
    gauges: observe::Gauges,
    reads: SingleFlight<Outcome<C::Output>>,
    listeners: broadcast::Sender<Invalidation>,
    pub(crate) pending: Pending,
    pub(crate) heard: Heard,
}

impl<C: Compile> fmt::Debug for Publications<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publications").field("revisions", &self.revisions()).finish_non_exhaustive()
    }
}

impl<C: Compile> Publications<C> {
    /// Nothing is read yet; see [`Publications::preload`] and [`Publications::run`].
    pub fn new(source: Arc<dyn PublicationSource>, compile: C) -> Arc<Self> {
        Arc::new(Self {
            source,
            compile,
            served: RwLock::default(),
            rejections: Rejections::default(),
            gauges: observe::Gauges::default(),
            reads: SingleFlight::new(),
            listeners: broadcast::channel(LISTENER_LAG).0,
            pending: Pending::default(),
            heard: Heard::default(),
        })
    }

    /// The publication of a workspace, for the whole of one request: from memory when it was compared with the store
    /// less than 30 seconds ago, else after one read that concurrent requests share (DESIGN §7.3). Never an older
    /// revision than one that was returned before, as long as the workspace stayed published.
    ///
    /// Cancel-safe: a request that goes away does not fail those that wait for the same read.
    ///
    /// # Errors
    /// When the workspace is not published, when what is published is not coherent or does not compile, or when the
    /// store cannot be asked. What was served before is then not extended.
    pub async fn pair(&self, workspace: &WorkspaceId) -> Result<Arc<Publication<C::Output>>, PairError> {
        if let Some(publication) = self.fresh(workspace) {
            return Ok(publication);
        }
        self.read(workspace, Need::Running, Changes::Tell).await?.ok_or(PairError::NotPublished)
    }

    fn fresh(&self, workspace: &WorkspaceId) -> Option<Arc<Publication<C::Output>>> {
        let served = self.served.read();
        let entry = served.get(workspace).filter(|entry| entry.is_fresh())?;
        // Looked at before it is written: all requests share this cache line.
        if !entry.used.load(Ordering::Relaxed) {
            entry.used.store(true, Ordering::Relaxed);
        }
        Some(Arc::clone(&entry.publication))
    }

    /// Reads up to `limit` workspaces that the store lists and that are not in memory. Invalid ones are logged and
    /// skipped. Returns how many were loaded. Cancel-safe.
    ///
    /// # Errors
    /// When the store cannot be asked which workspaces there are.
    pub async fn preload(&self, limit: usize) -> Result<usize, SourceError> {
        let results = self.reload_each(self.unloaded(limit).await?, Need::Running).await;
        Ok(results.iter().filter(|(_, result)| matches!(result, Ok(Some(_)))).count())
    }

    /// Reads a workspace again, whatever its age; it is dropped from memory when it is no longer published (`None`).
    /// Cancel-safe.
    ///
    /// # Errors
    /// As [`Publications::pair`]; what is in memory is then kept for the rest of its 30 seconds.
    pub async fn reload(&self, workspace: &WorkspaceId) -> Result<Option<Revision>, PairError> {
        self.reload_one(workspace, Need::Later, Changes::Tell).await
    }

    /// Reads every workspace in memory again, then those that the store lists beside them. Cancel-safe.
    ///
    /// # Errors
    /// When the store cannot be asked which workspaces there are; those in memory were read all the same.
    pub async fn reload_all(&self) -> Result<Reloaded, PairError> {
        let mut results = self.reload_each(self.known(), Need::Later).await;
        let unloaded = self.unloaded(PRELOAD).await.map_err(PairError::Unavailable)?;
        results.extend(self.reload_each(unloaded, Need::Running).await);
        Ok(results)
    }

    /// Invalidations, after what they are about was read again, or could not be. A change of a publication that no
    /// message announced is told as [`Invalidation::Workspace`]. [`Invalidation::All`], also sent after each
    /// (re)subscribe, comes before the reading: messages may have been missed, so drop whatever was derived. The same
    /// holds for a listener that is told that it lags.
    pub fn subscribe(&self) -> broadcast::Receiver<Invalidation> {
        self.listeners.subscribe()
    }

    /// Until when no invalidation was missed: the last moment at which the subscription is known to have stood, with
    /// everything that was missed before it made up for by [`Invalidation::All`]. `None` before the first subscription.
    ///
    /// What was derived from the store earlier than this, and what no message was about, still holds as of this moment.
    /// While the subscription stands it is at most ten seconds ago; cheap enough to ask for each request.
    pub fn reconciled_at(&self) -> Option<Instant> {
        self.heard.at()
    }

    /// How many publications are in memory and can be served, as far as is known.
    pub fn loaded(&self) -> usize {
        self.served.read().values().filter(|entry| entry.is_loaded()).count()
    }

    /// The revision served of each of them, by workspace.
    pub fn revisions(&self) -> Vec<(WorkspaceId, Revision)> {
        let mut revisions: Vec<_> = self
            .served
            .read()
            .iter()
            .filter(|(_, entry)| entry.is_loaded())
            .map(|(workspace, entry)| (workspace.clone(), entry.publication.revision()))
            .collect();
        revisions.sort();
        revisions
    }

    /// Tells the listeners. Having none is fine.
    pub(crate) fn tell(&self, news: Invalidation) {
        drop(self.listeners.send(news));
    }

    pub(crate) fn known(&self) -> Vec<WorkspaceId> {
        self.served.read().keys().cloned().collect()
    }

    /// Those that requests use and that were last confirmed at least `age` ago.
    pub(crate) fn active_and_older_than(&self, age: Duration) -> Vec<WorkspaceId> {
        let is_due =
            |entry: &Served<_>| entry.used.load(Ordering::Relaxed) && entry.validated_at.elapsed() >= age;
        self.served.read().iter().filter(|(_, entry)| is_due(entry)).map(|(ws, _)| ws.clone()).collect()
    }

    async fn unloaded(&self, limit: usize) -> Result<Vec<WorkspaceId>, SourceError> {
        let mut listed = self.source.list(limit).await?;
        let served = self.served.read();
        listed.retain(|workspace| !served.contains_key(workspace));
        Ok(listed)
    }

    /// Reads several workspaces, a few at a time, tells what changed and logs what failed.
    pub(crate) async fn reload_each(&self, workspaces: Vec<WorkspaceId>, need: Need) -> Reloaded {
        let read = |workspace: WorkspaceId| async move {
            let result = self.reload_one(&workspace, need, Changes::Tell).await;
            (workspace, result)
        };
        let results: Reloaded =
            stream::iter(workspaces).map(read).buffer_unordered(READS_AT_A_TIME).collect().await;
        observe::failures(&results);
        results
    }

    pub(crate) async fn reload_one(
        &self,
        workspace: &WorkspaceId,
        need: Need,
        changes: Changes,
    ) -> Result<Option<Revision>, PairError> {
        Ok(self.read(workspace, need, changes).await?.map(|publication| publication.revision()))
    }

    async fn read(&self, workspace: &WorkspaceId, need: Need, changes: Changes) -> Outcome<C::Output> {
        let read = async {
            let asked_at = Instant::now();
            let stored = self.source.read(workspace).await;
            let before = self.served.read().get(workspace).map(|entry| entry.publication.revision());
            let outcome = self.take(workspace, asked_at, stored);
            observe::read(&outcome, before);
            let changed = match &outcome {
                Ok(now) => {
                    before.is_some() && before != now.as_ref().map(|publication| publication.revision())
                }
                Err(_) => false,
            };
            if changed && changes == Changes::Tell {
                self.tell(Invalidation::Workspace { workspace_id: workspace.clone() });
            }
            outcome
        };
        self.reads.run(workspace, need, read).await
    }

    /// Installs, confirms or drops by what the store said. Only one read of a workspace gets here at a time.
    fn take(
        &self,
        workspace: &WorkspaceId,
        asked_at: Instant,
        stored: Result<Stored, SourceError>,
    ) -> Outcome<C::Output> {
        let mut offered = None;
        let outcome = match stored {
            Ok(Stored::Complete(documents)) => {
                self.take_documents(workspace, asked_at, &documents).map(Some).inspect_err(|_| {
                    offered = documents.claimed();
                })
            }
            Ok(Stored::Absent) => {
                self.drop_absent(workspace);
                Ok(None)
            }
            Ok(Stored::Partial) => Err(PairError::Partial),
            Ok(Stored::TooLarge { document }) => {
                Err(PairError::Invalid(InvalidPublication::TooLarge { document }))
            }
            Err(cause) => Err(PairError::Unavailable(cause)),
        };
        if let Err(why) = &outcome {
            if let Some(entry) = self.served.write().get_mut(workspace) {
                entry.failed = true;
            }
            if !matches!(why, PairError::Unavailable(_)) {
                let news = self.rejections.note(workspace, offered, why, CAPACITY);
                observe::rejected(workspace, why, news);
            }
        }
        outcome
    }

    fn take_documents(
        &self,
        workspace: &WorkspaceId,
        asked_at: Instant,
        documents: &Documents,
    ) -> Result<Arc<Publication<C::Output>>, PairError> {
        let fingerprint = documents.verify().map_err(PairError::Invalid)?;
        let current = self.served.read().get(workspace).map(|entry| Arc::clone(&entry.publication));
        if let Some(current) = current {
            if current.fingerprint == fingerprint {
                self.confirm(workspace, asked_at);
                return Ok(current);
            }
            let (served, found) = (current.revision(), fingerprint.revision);
            match found.cmp(&served) {
                std::cmp::Ordering::Less => return Err(PairError::Older { served, found }),
                std::cmp::Ordering::Equal => return Err(PairError::Conflicting { revision: found }),
                std::cmp::Ordering::Greater => {}
            }
        }
        if let Some(why) = self.rejections.of(workspace, &fingerprint) {
            return Err(why);
        }
        let publication = Arc::new(self.build(workspace, documents, fingerprint)?);
        self.install(workspace, asked_at, Arc::clone(&publication));
        tracing::info!(%workspace, revision = %publication.revision(), "publication installed");
        Ok(publication)
    }

    fn build(
        &self,
        workspace_id: &WorkspaceId,
        documents: &Documents,
        fingerprint: Fingerprint,
    ) -> Result<Publication<C::Output>, PairError> {
        let (workspace, policy) = documents.decode(workspace_id).map_err(PairError::Invalid)?;
        let revision = fingerprint.revision;
        let compiled = self
            .compile
            .compile(&workspace, &policy)
            .map_err(|reason| PairError::CompileFailed { revision, reason })?;
        Ok(Publication { workspace, compiled, fingerprint })
    }

    fn install(
        &self,
        workspace: &WorkspaceId,
        validated_at: Instant,
        publication: Arc<Publication<C::Output>>,
    ) {
        self.rejections.clear(workspace);
        let mut served = self.served.write();
        if served.len() >= CAPACITY
            && !served.contains_key(workspace)
            && let Some(victim) = make_room(&mut served)
        {
            self.gauges.revision(&victim, None);
        }
        self.gauges.revision(workspace, Some(publication.revision()));
        let entry = Served {
            publication,
            installed_at: Instant::now(),
            validated_at,
            used: AtomicBool::new(false),
            failed: false,
        };
        served.insert(workspace.clone(), entry);
        observe::loaded(served.len());
    }

    fn confirm(&self, workspace: &WorkspaceId, validated_at: Instant) {
        self.rejections.clear(workspace);
        if let Some(entry) = self.served.write().get_mut(workspace) {
            entry.validated_at = validated_at;
            entry.used = AtomicBool::new(false);
            entry.failed = false;
        }
    }

    fn drop_absent(&self, workspace: &WorkspaceId) {
        self.rejections.clear(workspace);
        let mut served = self.served.write();
        if served.remove(workspace).is_some() {
            self.gauges.revision(workspace, None);
            observe::loaded(served.len());
            tracing::info!(%workspace, "publication dropped");
        }
    }
}

fn make_room<T>(served: &mut HashMap<WorkspaceId, Served<T>>) -> Option<WorkspaceId> {
    let least_useful = |entry: &Served<T>| (entry.used.load(Ordering::Relaxed), entry.validated_at);
    let victim = served.iter().min_by_key(|(_, entry)| least_useful(entry)).map(|(ws, _)| ws.clone());
    if let Some(victim) = &victim {
        served.remove(victim);
        tracing::warn!(workspace = %victim, "publication evicted, more workspaces are in use than fit");
    }
    victim
}
