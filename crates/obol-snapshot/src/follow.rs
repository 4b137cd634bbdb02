use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use obol_model::{Causes, Invalidation, WorkspaceId, metric};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::flight::Need;
use crate::observe;
use crate::publications::{Changes, READS_AT_A_TIME};
use crate::{Compile, FeedEvent, InvalidationFeed, PRELOAD, PairError, Publications};

/// How often everything in memory is compared with the store, whatever messages came (DESIGN §7.5).
const RECONCILE: Duration = Duration::from_secs(30);

/// When a workspace in use is read again ahead of its 30 seconds, and how often that is looked at. Together they leave
/// five seconds for the read.
const AHEAD: Duration = Duration::from_secs(20);
const AHEAD_TICK: Duration = Duration::from_secs(5);

/// How soon what could not be asked about is asked about again; doubled with each failure up to the longest.
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LONGEST_RETRY: Duration = Duration::from_secs(1);

/// Events on the way from the feed. The receiver never waits for the store, so this fills only in a burst.
const EVENTS: usize = 256;

/// The most messages that wait for their workspaces to be read. More are replaced by one [`Invalidation::All`].
const MOST_PENDING: usize = 1024;

/// What is still to be read because of invalidations.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    work: Mutex<Work>,
    more: Notify,
}

#[derive(Debug, Default)]
struct Work {
    /// Without duplicates, so that a burst for one workspace costs one read.
    messages: Vec<(WorkspaceId, Invalidation)>,
    everything: bool,
    overflowed: bool,
}

/// When everything is read again, since the store could not be asked: a subscription may be back before other
/// connections are.
#[derive(Debug)]
struct Retry {
    at: Option<Instant>,
    pause: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { at: None, pause: FIRST_RETRY }
    }
}

impl Retry {
    /// Waits for `work`, or until everything is to be read again.
    async fn or(&self, work: impl Future<Output = ()>) {
        match self.at {
            Some(at) => drop(timeout_at(at, work).await),
            None => work.await,
        }
    }

    fn is_due(&self) -> bool {
        self.at.is_some_and(|at| at <= Instant::now())
    }

    /// Notes whether the store could be asked, and whether that was about everything.
    fn after(&mut self, asked: bool, everything: bool) {
        if !asked {
            self.at = Some(Instant::now() + self.pause);
            self.pause = (self.pause * 2).min(LONGEST_RETRY);
        } else if everything {
            *self = Self::default();
        }
    }
}

impl Pending {
    fn push(&self, workspace: WorkspaceId, message: Invalidation) {
        let mut work = self.work.lock();
        if work.messages.len() >= MOST_PENDING {
            *work = Work { messages: Vec::new(), everything: true, overflowed: true };
        } else if !work.messages.iter().any(|(_, waiting)| *waiting == message) {
            work.messages.push((workspace, message));
        }
        drop(work);
        self.more.notify_one();
    }

    fn push_everything(&self) {
        self.work.lock().everything = true;
        self.more.notify_one();
    }

    fn take(&self) -> Work {
        std::mem::take(&mut *self.work.lock())
    }
}

impl<C: Compile> Publications<C> {
    /// Follows the invalidations, compares everything in memory with the store after each (re)subscribe and every 30
    /// seconds, and keeps workspaces in use fresh. Ends with `shutdown`. Run it once.
    pub async fn run(self: Arc<Self>, events: Arc<dyn InvalidationFeed>, shutdown: CancellationToken) {
        let (sender, receiver) = mpsc::channel(EVENTS);
        // Side by side: what the store takes long to answer delays neither the purge of a key nor a request.
        let all = async {
            tokio::join!(
                events.feed(sender, shutdown.clone()),
                self.receive(receiver),
                self.reload_pending(),
                self.reconcile_regularly(),
                self.refresh_ahead(),
            );
        };
        shutdown.run_until_cancelled(all).await;
    }

    async fn receive(&self, mut events: mpsc::Receiver<FeedEvent>) {
        while let Some(event) = events.recv().await {
            match event {
                FeedEvent::Subscribed => {
                    self.tell(Invalidation::All);
                    self.pending.push_everything();
                }
                FeedEvent::Alive => {}
                FeedEvent::Message(bytes) => {
                    if let Ok(message) = serde_json::from_slice(&bytes) {
                        self.accept(message);
                    } else {
                        count("malformed");
                        tracing::warn!(bytes = bytes.len(), "malformed invalidation discarded");
                    }
                }
            }
            // Last: whoever looks at it has then been told what the event is about.
            self.heard.now();
        }
    }

    fn accept(&self, message: Invalidation) {
        match &message {
            Invalidation::Workspace { workspace_id } => {
                count("workspace");
                self.pending.push(workspace_id.clone(), message);
            }
            Invalidation::Policy { workspace_id } => {
                count("policy");
                self.pending.push(workspace_id.clone(), message);
            }
            Invalidation::Key { .. } => {
                count("key");
                self.tell(message);
            }
            Invalidation::All => {
                count("all");
                self.tell(message);
                self.pending.push_everything();
            }
        }
    }

    async fn reload_pending(&self) {
        let mut retry = Retry::default();
        loop {
            retry.or(self.pending.more.notified()).await;
            let mut work = self.pending.take();
            work.everything |= retry.is_due();
            let mut asked = self.reload_announced(work.messages).await;
            if work.everything {
                asked &= self.reload_everything().await;
            }
            if work.overflowed {
                self.tell(Invalidation::All);
            }
            retry.after(asked, work.everything);
        }
    }

    /// Reads what the messages are about, once each, and passes the messages on, also when a read failed. Answers
    /// whether the store could be asked.
    async fn reload_announced(&self, messages: Vec<(WorkspaceId, Invalidation)>) -> bool {
        let workspaces: BTreeSet<WorkspaceId> = messages.iter().map(|(ws, _)| ws.clone()).collect();
        let read = |workspace: WorkspaceId| async move {
            let result = self.reload_one(&workspace, Need::Later, Changes::Keep).await;
            if let Err(why) = &result {
                tracing::warn!(%workspace, error = %Causes(why), "announced publication could not be taken");
            }
            !matches!(result, Err(PairError::Unavailable(_)))
        };
        let asked: Vec<bool> =
            stream::iter(workspaces).map(read).buffer_unordered(READS_AT_A_TIME).collect().await;
        for (_, message) in messages {
            self.tell(message);
        }
        asked.into_iter().all(|asked| asked)
    }

    /// Compares everything in memory with the store, and loads what is there beside it. Answers whether the store could
    /// be asked.
    async fn reload_everything(&self) -> bool {
        let results = self.reload_each(self.known(), Need::Later).await;
        let asked = !results.iter().any(|(_, result)| matches!(result, Err(PairError::Unavailable(_))));
        match self.preload(PRELOAD).await {
            Ok(loaded) => {
                tracing::debug!(loaded, "publications reconciled");
                asked
            }
            Err(why) => {
                tracing::warn!(error = %Causes(&why), "workspaces could not be listed");
                false
            }
        }
    }

    async fn reconcile_regularly(&self) {
        every(RECONCILE, || async {
            self.reload_each(self.known(), Need::Running).await;
        })
        .await;
    }

    async fn refresh_ahead(&self) {
        every(AHEAD_TICK, || async {
            observe::silence(self.heard.silence());
            self.reload_each(self.active_and_older_than(AHEAD), Need::Running).await;
        })
        .await;
    }
}

/// Does `work` after each `period`, for ever.
async fn every<Fut: Future<Output = ()>>(period: Duration, work: impl Fn() -> Fut) {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        work().await;
    }
}

fn count(kind: &'static str) {
    metrics::counter!(metric::INVALIDATIONS, "type" => kind).increment(1);
}
