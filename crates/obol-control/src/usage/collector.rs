use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use obol_model::WorkspaceId;
use obol_redis::{Redis, RedisError};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::stream::{BATCH, Content, Entry, Streams, Which};
use super::{EntryId, RejectedEntry, TakenEvent, UsageBatch, UsageStore};
use crate::{ControlStore, StoreError};

/// How often all streams are looked at.
const EVERY: Duration = Duration::from_secs(1);
/// How often control's store is asked which workspaces there are.
const HEADS: Duration = Duration::from_secs(10);
/// After how long what a consumer holds is taken over by another one: longer than any batch takes.
const DEAD: Duration = Duration::from_mins(1);
/// How often that is looked for.
const CLAIM: Duration = Duration::from_secs(15);
/// The first and the longest wait after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How many batches of one workspace are read before the others have their turn.
const ROUNDS: usize = 20;
/// From this length on a stream is remarkable: the gateways refuse calls at ten times as much, unless told otherwise.
const LONG: u64 = 100_000;

/// Brings usage events from the streams of all workspaces into a store (DESIGN §12.5).
///
/// An entry is acknowledged when the store has it for good, and trimmed when it is acknowledged. Whatever ends this in
/// between leaves the entry pending, for this process's next look or, after a minute, for another control's; stores know
/// events by their ids, so that each counts once.
#[derive(Debug)]
pub struct UsageCollector {
    streams: Streams,
    workspaces: Arc<dyn ControlStore>,
    store: Arc<dyn UsageStore>,
    dead: Duration,
    heads: BTreeSet<WorkspaceId>,
    heads_at: Instant,
    places: BTreeMap<WorkspaceId, Place>,
}

/// Where the reading of a stream stands.
#[derive(Debug)]
struct Place {
    /// Stream and group are there, for all that is known.
    open: bool,
    /// Entries may be pending that this process has read.
    own: bool,
    claim_at: Instant,
    /// Where the claiming goes on.
    claim_from: Option<String>,
    /// How many entries there were when some were acknowledged.
    left: u64,
    failing: bool,
}

/// Why events stay where they are for now.
#[derive(Debug)]
pub(super) enum Delay {
    Redis(RedisError),
    Store(StoreError),
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redis(e) => e.fmt(f),
            Self::Store(e) => e.fmt(f),
        }
    }
}

impl From<RedisError> for Delay {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}

impl From<StoreError> for Delay {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl UsageCollector {
    /// Reads as `consumer`, a name that no other process has. Both stores have to be prepared.
    pub fn new(
        redis: Redis,
        consumer: String,
        workspaces: Arc<dyn ControlStore>,
        store: Arc<dyn UsageStore>,
    ) -> Self {
        Self {
            streams: Streams::new(redis, consumer),
            workspaces,
            store,
            dead: DEAD,
            heads: BTreeSet::new(),
            heads_at: Instant::now(),
            places: BTreeMap::new(),
        }
    }

    /// Takes over what other consumers have held for so long, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn with_patience(self, dead: Duration) -> Self {
        Self { dead, ..self }
    }

    /// Collects until `shutdown`. A batch that is under way then is finished: it would wait for a minute otherwise.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut wait = EVERY;
        let mut failing = false;
        while !shutdown.is_cancelled() {
            match self.pass(&shutdown).await {
                Ok(more) => {
                    if failing {
                        tracing::info!("usage events are collected again");
                    }
                    (failing, wait) = (false, if more { Duration::ZERO } else { EVERY });
                }
                Err(delay) => {
                    if !failing {
                        tracing::warn!(reason = %delay, "usage events cannot be collected, they wait in redis");
                    }
                    wait = if failing { (wait * 2).min(BACKOFF.1) } else { BACKOFF.0 };
                    failing = true;
                }
            }
            let _: Option<()> = shutdown.run_until_cancelled(sleep(wait)).await;
        }
    }

    /// Collects everything that there is.
    ///
    /// # Errors
    /// Why something had to stay where it is, for people.
    pub async fn collect(&mut self) -> Result<(), String> {
        let never = CancellationToken::new();
        while self.pass(&never).await.map_err(|delay| delay.to_string())? {}
        Ok(())
    }

    /// Looks at all workspaces; whether there is more in one of them.
    async fn pass(&mut self, shutdown: &CancellationToken) -> Result<bool, Delay> {
        let mut unfinished = false;
        for workspace in self.known().await? {
            for round in 1..=ROUNDS {
                if shutdown.is_cancelled() {
                    return Ok(false);
                }
                match self.step(&workspace).await {
                    Ok(more) => {
                        self.place(&workspace).failing = false;
                        if !more {
                            break;
                        }
                        unfinished |= round == ROUNDS;
                    }
                    Err(delay) => {
                        let place = self.place(&workspace);
                        place.open = false;
                        // One stream that became something else is not to hold up the others.
                        let Delay::Redis(RedisError::Server { .. }) = &delay else { return Err(delay) };
                        if !place.failing {
                            tracing::error!(workspace = %workspace, reason = %delay, "the stream of usage events cannot be read");
                        }
                        place.failing = true;
                        break;
                    }
                }
            }
        }
        Ok(unfinished)
    }

    /// Workspaces that may have events.
    async fn known(&mut self) -> Result<BTreeSet<WorkspaceId>, Delay> {
        if self.heads_at <= Instant::now() {
            // Without control's store those that were known before are read on.
            if let Ok(heads) = self.workspaces.heads().await {
                self.heads = heads.into_iter().map(|head| head.workspace).collect();
                self.heads_at = Instant::now() + HEADS;
            }
        }
        let mut known = self.heads.clone();
        known.extend(self.streams.workspaces().await?);
        // One that was read before may still have entries when nobody speaks of it any more.
        known.extend(self.places.keys().cloned());
        Ok(known)
    }

    fn place(&mut self, workspace: &WorkspaceId) -> &mut Place {
        self.places.entry(workspace.clone()).or_insert_with(|| Place {
            open: false,
            own: false,
            claim_at: Instant::now(),
            claim_from: None,
            left: 0,
            failing: false,
        })
    }

    /// One batch of a workspace; whether there may be more.
    async fn step(&mut self, workspace: &WorkspaceId) -> Result<bool, Delay> {
        if !self.place(workspace).open {
            if self.streams.open(workspace).await? {
                tracing::error!(workspace = %workspace, "usage events were trimmed before they were read");
            }
            self.place(workspace).open = true;
        }
        let (dead, place) = (self.dead, self.place(workspace));
        if place.own {
            let own = self.streams.read(workspace, Which::Own).await?;
            if !own.is_empty() {
                self.take(workspace, own).await?;
                return Ok(true);
            }
            self.place(workspace).own = false;
        } else if place.claim_at <= Instant::now() {
            let from = place.claim_from.clone();
            // Until they are acknowledged: whatever fails leaves them pending, for this consumer.
            place.own = true;
            let claimed = self.streams.claim(workspace, dead, from.as_deref().unwrap_or("0-0")).await?;
            lost(workspace, claimed.gone);
            if claimed.next.is_none() {
                self.streams.tidy(workspace).await?;
            }
            let place = self.place(workspace);
            if claimed.next.is_none() {
                place.claim_at = Instant::now() + CLAIM;
            }
            place.claim_from = claimed.next;
            self.take(workspace, claimed.entries).await?;
            self.place(workspace).own = false;
            return Ok(true);
        }
        self.place(workspace).own = true;
        let new = self.streams.read(workspace, Which::New).await?;
        let more = new.len() >= BATCH;
        self.take(workspace, new).await?;
        self.place(workspace).own = false;
        Ok(more)
    }

    /// Stores entries and acknowledges them, in this order.
    async fn take(&mut self, workspace: &WorkspaceId, entries: Vec<Entry>) -> Result<(), Delay> {
        if entries.is_empty() {
            return Ok(());
        }
        let ids: Vec<EntryId> = entries.iter().map(|entry| entry.id).collect();
        let mut batch = UsageBatch::default();
        let mut gone = 0;
        for Entry { id, content } in entries {
            match content {
                Content::Event(json) => match TakenEvent::read(workspace, id, &json) {
                    Ok(event) => batch.events.push(event),
                    Err(rejected) => batch.rejected.push(rejected),
                },
                Content::Strange(fields) => {
                    let reason = "it has no field `event`".to_owned();
                    batch.rejected.push(RejectedEntry::new(id, reason, &fields));
                }
                Content::Gone => gone += 1,
            }
        }
        lost(workspace, gone);
        self.record(workspace, &batch).await?;
        for RejectedEntry { entry, reason, .. } in &batch.rejected {
            tracing::error!(workspace = %workspace, entry = %entry, reason, "an entry that is no usage event was set aside");
        }
        let left = self.streams.ack(workspace, &ids).await?;
        let place = self.place(workspace);
        if left > LONG && place.left <= LONG {
            tracing::warn!(
                workspace = %workspace,
                count = left,
                help = "calls are refused at OBOL_USAGE_STREAM_MAX: look at the usage store, and for groups that do not acknowledge",
                "many usage events wait in redis"
            );
        }
        place.left = left;
        Ok(())
    }

    async fn record(&self, workspace: &WorkspaceId, batch: &UsageBatch) -> Result<(), Delay> {
        let refused = match self.store.record(workspace, batch).await {
            Err(StoreError::Damaged(reason)) => reason,
            other => return Ok(other?),
        };
        // One of them can never be written. It must not hold up the others.
        tracing::debug!(workspace = %workspace, reason = refused, "usage events are written one by one");
        self.store
            .record(workspace, &UsageBatch { rejected: batch.rejected.clone(), ..UsageBatch::default() })
            .await?;
        for event in &batch.events {
            let one = UsageBatch { events: vec![event.clone()], ..UsageBatch::default() };
            let Err(e) = self.store.record(workspace, &one).await else { continue };
            let StoreError::Damaged(reason) = e else { return Err(e.into()) };
            tracing::error!(workspace = %workspace, entry = %event.entry, reason, "a usage event was set aside");
            let rejected = vec![event.rejected(reason)];
            self.store.record(workspace, &UsageBatch { rejected, ..UsageBatch::default() }).await?;
        }
        Ok(())
    }
}

fn lost(workspace: &WorkspaceId, count: usize) {
    if count > 0 {
        tracing::error!(workspace = %workspace, count, "usage events were trimmed before they were stored");
    }
}
