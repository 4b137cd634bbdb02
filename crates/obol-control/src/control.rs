use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use obol_model::{Clock, KeyRing};
use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::follow;
use crate::scan::{Env, Look, Scanner};
use crate::state::State;
use crate::store::{ControlStore, Stamp};
use crate::{Publisher, SyncReport, UsageStore};

/// How often files and store are looked at. An edit of a file counts at the third look, so it is published within three of
/// these; a change of the store counts at once.
const LOOK: Duration = Duration::from_millis(250);
/// How often Redis is compared with what it should be.
const HEAL: Duration = Duration::from_secs(10);
/// How long to wait after a failure.
const RETRY: Duration = Duration::from_secs(1);
/// Who publishes what files say.
const ACTOR: &str = "control";

/// What control works on.
#[derive(Clone)]
pub struct ControlOptions {
    /// A folder of workspace files (`*.yaml`, `*.yml`), or one file.
    pub source: PathBuf,
    /// Seals the credentials.
    pub key_ring: Arc<KeyRing>,
    /// Where `env:NAME` is looked up.
    pub env: Env,
}

impl fmt::Debug for ControlOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlOptions").field("source", &self.source).finish_non_exhaustive()
    }
}

/// Watches workspace files and the store, publishes what changed, and heals Redis (DESIGN §7.6).
#[derive(Debug)]
pub struct Control {
    pub(crate) source: PathBuf,
    pub(crate) key_ring: Arc<KeyRing>,
    pub(crate) store: Arc<dyn ControlStore>,
    pub(crate) publisher: Arc<dyn Publisher>,
    /// What lost ledgers are seeded from.
    pub(crate) usage: Option<Arc<dyn UsageStore>>,
    clock: Arc<dyn Clock>,
    /// Locked only on threads that may block.
    scanner: Arc<Mutex<Scanner>>,
    state: tokio::sync::Mutex<State>,
}

/// How thorough a pass is.
#[derive(Clone, Copy)]
struct Pass {
    /// See [`Scanner::scan`].
    settle: bool,
    /// Compare everything with Redis.
    heal: bool,
}

impl Control {
    /// A control plane that has done nothing yet. The store has to be prepared.
    pub fn new(
        options: ControlOptions,
        store: Arc<dyn ControlStore>,
        publisher: Arc<dyn Publisher>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let ControlOptions { source, key_ring, env } = options;
        let scanner = Arc::new(Mutex::new(Scanner::new(source.clone(), Arc::clone(&key_ring), env)));
        let (usage, state) = (None, tokio::sync::Mutex::default());
        Self { source, key_ring, store, publisher, usage, clock, scanner, state }
    }

    /// Seeds ledgers that were lost from this usage. Without it no usage is kept, and they begin with nothing.
    #[must_use]
    pub fn with_usage(self, usage: Arc<dyn UsageStore>) -> Self {
        Self { usage: Some(usage), ..self }
    }

    /// One complete pass: reads files and store, publishes what changed, removes what is gone, compares with Redis.
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
                // After an outage everything is compared at once: Redis may have come back empty.
                not_before = Instant::now() + RETRY;
                heal_at = not_before;
            } else if heal {
                heal_at = Instant::now() + HEAL;
            }
            let state = self.state.lock().await;
            if !state.known.fresh {
                not_before = Instant::now() + RETRY;
            }
            first = !state.started;
            complaints = report.failed;
        }
    }

    async fn pass(&self, pass: Pass) -> SyncReport {
        let mut state = self.state.lock().await;
        let state = &mut *state;
        let mut report = SyncReport::default();
        // Before the store is read: whoever makes a key tells the store first.
        let all = pass.heal || !state.keys_told;
        let published = if all { Some(self.publisher.keys().await) } else { None };
        follow::refresh(&*self.store, &mut state.known, pass.heal, &mut report).await;
        if !state.started {
            if !state.known.fresh {
                return report;
            }
            self.remember(state, &mut report).await;
            state.started = true;
        }
        // INVARIANT: files are read after the store. What another control has published of them is then no news.
        let look = self.look(pass.settle, &mut report).await;
        let looked = look.is_some();
        report.failed.extend(look.as_ref().and_then(|look| look.doubt.clone()));
        state.files.take_up(look.unwrap_or_default(), &mut report);
        // Without the store nobody knows what comes next; what is known can still be healed.
        if state.known.fresh && looked {
            self.publish_files(state, &mut report).await;
        }
        self.tell_publications(state, pass.heal, &mut report).await;
        self.tell_keys(state, published, &mut report).await;
        self.open_ledgers(state, pass.heal, &mut report).await;
        report
    }

    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { actor: ACTOR.to_owned(), at: self.clock.now() }
    }

    /// Expects the files that spoke for workspaces when the last process ended, so that it is noticed that one is gone.
    async fn remember(&self, state: &mut State, report: &mut SyncReport) {
        for (workspace, followed) in &state.known.heads {
            // Other controls may watch other folders.
            let ours = |file: &&PathBuf| **file == self.source || file.parent() == Some(&*self.source);
            if let Some(file) = followed.head.file.as_ref().filter(ours) {
                state.files.owners.insert(workspace.clone(), file.clone());
            }
        }
        let (scanner, paths) =
            (Arc::clone(&self.scanner), state.files.owners.values().cloned().collect::<Vec<_>>());
        let expected = blocking(move || {
            let mut scanner = scanner.lock();
            for path in paths {
                scanner.expect(path);
            }
            Ok(())
        });
        report.failed.extend(expected.await.err());
    }

    async fn look(&self, settle: bool, report: &mut SyncReport) -> Option<Look> {
        let scanner = Arc::clone(&self.scanner);
        let looked = blocking(move || scanner.lock().scan(settle)).await;
        looked.map_err(|e| report.failed.push(e)).ok()
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|e| Err(format!("a look at the files failed: {e}")))
}
