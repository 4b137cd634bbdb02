use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use obol_model::{Clock, KeyContext, KeyHash, KeyRing};
use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::heal::Outcome;
use crate::keys::{KeyCache, KeyFiles, KeyRecord, LoadedKeys};
use crate::memory::{Memory, Remembered};
use crate::scan::{Change, Env, Scanner};
use crate::state::State;
use crate::{KeyError, PublishError, Publisher, SyncReport};

/// How often the files are looked at. An edit counts at the third look, so it is published within three of these.
const LOOK: Duration = Duration::from_millis(250);
/// How often the store is compared with what it should be.
const HEAL: Duration = Duration::from_secs(10);
/// How long to wait after a failure.
const RETRY: Duration = Duration::from_secs(1);
/// Rounds until keys that are written find nothing left to write, before the marker is set.
const KEY_ROUNDS: usize = 3;

/// What control works on.
#[derive(Clone)]
pub struct ControlOptions {
    /// A folder of workspace files (`*.yaml`, `*.yml`), or one file.
    pub source: PathBuf,
    /// Where keys and the memory of publications are kept; without it control publishes no keys, and a workspace
    /// whose file was deleted while it was away stays.
    pub state_dir: Option<PathBuf>,
    /// Seals the credentials.
    pub key_ring: Arc<KeyRing>,
    /// Where `env:NAME` is looked up.
    pub env: Env,
}

impl fmt::Debug for ControlOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlOptions")
            .field("source", &self.source)
            .field("state_dir", &self.state_dir)
            .finish_non_exhaustive()
    }
}

/// Watches workspace files and keys, publishes what changed, and heals the store (DESIGN §7.6).
#[derive(Debug)]
pub struct Control {
    state_dir: Option<PathBuf>,
    key_ring: Arc<KeyRing>,
    publisher: Arc<dyn Publisher>,
    /// Locked only on threads that may block.
    files: Arc<Mutex<Files>>,
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug)]
struct Files {
    scanner: Scanner,
    keys: Option<(KeyFiles, KeyCache)>,
}

/// How thorough a pass is.
#[derive(Clone, Copy)]
struct Pass {
    /// See [`Scanner::scan`].
    settle: bool,
    /// Compare everything with the store.
    heal: bool,
}

impl Control {
    /// A control plane that has done nothing yet.
    pub fn new(options: ControlOptions, publisher: Arc<dyn Publisher>, clock: &Arc<dyn Clock>) -> Self {
        let ControlOptions { source, state_dir, key_ring, env } = options;
        let keys =
            state_dir.as_deref().map(|dir| (KeyFiles::new(dir, Arc::clone(clock)), KeyCache::default()));
        let scanner = Scanner::new(source, Arc::clone(&key_ring), env);
        let files = Arc::new(Mutex::new(Files { scanner, keys }));
        Self { state_dir, key_ring, publisher, files, state: tokio::sync::Mutex::default() }
    }

    /// One complete pass: reads the files, publishes what changed, removes what is gone, compares with the store.
    /// Cancel-safe: the next pass completes what an abandoned one began.
    pub async fn sync_once(&self) -> SyncReport {
        self.pass(Pass { settle: false, heal: true }).await
    }

    /// Watches until `shutdown`, and logs what happens.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut complaints = Vec::new();
        let mut heal_at = Instant::now();
        let mut not_before = Instant::now();
        // What a pass before this one found is not taken up in the middle of its next edit.
        let mut first = !self.state.lock().await.started;
        while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            let now = Instant::now();
            if now < not_before {
                continue;
            }
            let heal = now >= heal_at;
            let pass = self.pass(Pass { settle: !first, heal });
            let Some(report) = shutdown.run_until_cancelled(pass).await else { break };
            report.log(&complaints);
            if report.store_failed {
                // After an outage everything is compared at once: the store may have come back empty.
                not_before = Instant::now() + RETRY;
                heal_at = not_before;
            } else if heal {
                heal_at = Instant::now() + HEAL;
            }
            first = false;
            complaints = report.failed;
        }
    }

    async fn pass(&self, pass: Pass) -> SyncReport {
        let mut state = self.state.lock().await;
        let state = &mut *state;
        let mut report = SyncReport::default();
        if !state.started {
            self.remember(state, &mut report).await;
            state.started = true;
        }
        let (changes, keys) = self.look(pass.settle, &mut report).await;
        for change in changes {
            state.apply(change, &mut report);
        }
        state.release();
        self.bring_up_to_date(state, pass.heal, &mut report).await;
        if let Some(keys) = keys {
            self.publish_keys(state, &keys, pass.heal, &mut report).await;
        }
        self.save(state, &mut report).await;
        report
    }

    /// Takes up what the last process left.
    async fn remember(&self, state: &mut State, report: &mut SyncReport) {
        let Some(dir) = self.state_dir.clone() else { return };
        match blocking(move || Memory::load(&dir)).await {
            Ok(memory) => state.memory = memory,
            Err(e) => report.failed.push(e),
        }
        for (workspace, remembered) in &state.memory.workspaces {
            if let Some(file) = &remembered.file {
                state.owners.insert(workspace.clone(), file.clone());
            }
        }
        let (files, paths) = (Arc::clone(&self.files), state.owners.values().cloned().collect::<Vec<_>>());
        let expected = blocking(move || {
            let mut files = files.lock();
            for path in paths {
                files.scanner.expect(path);
            }
            Ok(())
        });
        report.failed.extend(expected.await.err());
    }

    async fn look(&self, settle: bool, report: &mut SyncReport) -> (Vec<Change>, Option<LoadedKeys>) {
        let files = Arc::clone(&self.files);
        let looked = blocking(move || {
            let mut files = files.lock();
            let changes = files.scanner.scan(settle);
            let keys = files.keys.as_mut().map(|(keys, cache)| cache.load(keys).map_err(|e| describe(&e)));
            Ok((changes, keys.transpose()))
        });
        let (changes, keys) = looked.await.unwrap_or_else(|e| (Err(e), Ok(None)));
        let changes = changes.unwrap_or_else(|e| {
            report.failed.push(e);
            Vec::new()
        });
        let keys = keys.unwrap_or_else(|e| {
            report.failed.push(e);
            None
        });
        report.failed.extend(keys.iter().flat_map(|keys| keys.faults.iter().cloned()));
        (changes, keys)
    }

    async fn bring_up_to_date(&self, state: &mut State, heal: bool, report: &mut SyncReport) {
        let publisher = &*self.publisher;
        for workspace in state.leaving.clone() {
            match publisher.unpublish(&workspace).await {
                Ok(()) => {
                    state.leaving.remove(&workspace);
                    report.unpublished.push(workspace);
                }
                Err(e) => report.store(format!("`{workspace}` could not be unpublished: {e}")),
            }
        }
        for (workspace, desired) in &mut state.desired {
            if !heal && desired.is_published() {
                continue;
            }
            match desired.settle(publisher, workspace, &self.key_ring).await {
                Ok(Outcome::Published(revision)) => report.published.push((workspace.clone(), revision)),
                Ok(Outcome::Healed(revision)) => report.healed.push((workspace.clone(), revision)),
                Ok(Outcome::Unchanged) => {}
                Ok(Outcome::Foreign(there)) => {
                    if state.foreign.insert(workspace.clone(), there) != Some(there) {
                        tracing::warn!(workspace = %workspace, revision = %there, "another control published, left alone");
                    }
                }
                Err(e) => report.store(format!("`{workspace}` could not be published: {e}")),
            }
        }
    }

    async fn publish_keys(&self, state: &mut State, keys: &LoadedKeys, heal: bool, report: &mut SyncReport) {
        let all = heal || !state.keys_written;
        for _ in 0..KEY_ROUNDS {
            match self.keys_round(state, &keys.records, all).await {
                Ok(0) => {
                    state.keys_written = true;
                    // The marker may only be set when a round found every key there: the store may lose its data in
                    // the middle of one.
                    if all
                        && keys.complete
                        && let Err(e) = self.publisher.keys_loaded().await
                    {
                        state.keys_written = false;
                        report.store(format!("keys could not be completed: {e}"));
                    }
                    return;
                }
                Ok(changed) => report.keys_changed += changed,
                Err(e) => {
                    state.keys_written = false;
                    return report.store(format!("keys could not be written: {e}"));
                }
            }
        }
    }

    /// Writes what differs from the last round, or everything; answers how much the store did not have.
    async fn keys_round(
        &self,
        state: &mut State,
        records: &[KeyRecord],
        all: bool,
    ) -> Result<usize, PublishError> {
        let mut changed = 0;
        let live: HashMap<KeyHash, &KeyContext> =
            records.iter().filter(|r| r.revoked_at.is_none()).map(|r| (r.hash, &r.key)).collect();
        for (hash, key) in &live {
            if all || state.keys.get(hash) != Some(*key) {
                changed += usize::from(self.publisher.put_key(hash, key).await?);
                state.keys.insert(*hash, (*key).clone());
            }
        }
        let revoked = records.iter().filter(|r| r.revoked_at.is_some()).map(|r| r.hash);
        let removed: Vec<KeyHash> =
            state.keys.keys().filter(|hash| !live.contains_key(*hash)).copied().collect();
        let doomed = revoked.filter(|hash| all && !removed.contains(hash));
        for hash in removed.iter().copied().chain(doomed) {
            changed += usize::from(self.publisher.delete_key(&hash, true).await?);
            state.keys.remove(&hash);
        }
        Ok(changed)
    }

    async fn save(&self, state: &mut State, report: &mut SyncReport) {
        let Some(dir) = self.state_dir.clone() else { return };
        let mut memory = state.memory.clone();
        for (workspace, remembered) in &mut memory.workspaces {
            remembered.file = state.owners.get(workspace).cloned();
        }
        for (workspace, desired) in &state.desired {
            let file = state.owners.get(workspace).cloned();
            let revision = desired.revision();
            memory.workspaces.insert(workspace.clone(), Remembered { file, revision });
        }
        // What could not be unpublished yet must be tried again by the next process.
        for workspace in &state.leaving {
            if let Some(remembered) = memory.workspaces.get_mut(workspace) {
                remembered.file = state.memory.workspaces.get(workspace).and_then(|r| r.file.clone());
            }
        }
        if memory == state.memory {
            return;
        }
        let saved = memory.clone();
        match blocking(move || saved.save(&dir)).await {
            Ok(()) => state.memory = memory,
            Err(e) => report.failed.push(e),
        }
    }
}

/// The error with its cause.
fn describe(error: &KeyError) -> String {
    let cause = std::error::Error::source(error).map(|e| format!(": {e}")).unwrap_or_default();
    format!("{error}{cause}")
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|e| Err(format!("a look at the files failed: {e}")))
}
