//! What each upstream offers, listed once for all replicas and kept (DESIGN §9.3).
//!
//! A list is looked for by one task for all who wait on this replica, outlives a waiter that gives up, is served while it
//! is refreshed, and is served stale for a bounded time when nobody can refresh it. That task asks the
//! [`CatalogueStore`] first, which replicas share: only the replica that gets the lease asks the upstream, the others
//! take what it puts there. When the store cannot be asked, each replica lists for itself.

mod embedded;
mod listing;
mod pin;
mod redis;
mod slot;
mod store;

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use obol_model::{ConnectionName, WorkspaceId, metric};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::pool::{CallError, ListKind, Pool, Spawn};

pub use self::embedded::EmbeddedCatalogue;
pub use self::listing::{Item, Listing, Source};
pub use self::redis::RedisCatalogue;
pub use self::store::{
    CatalogueStore, ListDigest, ListKey, MAX_SHARED, Put, Shared, StoreError, Turn, Wanted,
};

use self::slot::Slot;
use self::store::KEEP;

/// How long the replica that lists has the lease; it renews it three times in that time, so another one takes over within
/// it when the replica dies.
const LEASE: Duration = Duration::from_secs(6);
/// How often a replica looks whether the one that lists is done: this often at first, then less.
const LOOK_AGAIN: Duration = Duration::from_millis(25);
const LOOK_AGAIN_AT_MOST: Duration = Duration::from_millis(250);
/// A workspace's lists are compared with the shared ones at most this often.
const COMPARE_EVERY: Duration = Duration::from_secs(10);
/// Changes that wait for a slow subscriber of [`Catalogue::changes`] before it loses the oldest.
const CHANGE_BACKLOG: usize = 1024;

/// Bounds of a catalogue.
#[derive(Debug, Clone, Copy)]
pub struct CatalogueOptions {
    /// A listing of this age is refreshed when it is next used.
    pub ttl: Duration,
    /// Longest time for one listing.
    pub list_timeout: Duration,
    /// How long after its start a listing is waited for.
    pub patience: Duration,
    /// After a failure the upstream is not asked for this long.
    pub retry_after: Duration,
    /// The most listings that are kept.
    pub capacity: usize,
}

impl Default for CatalogueOptions {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(60),
            list_timeout: Duration::from_secs(30),
            patience: Duration::from_secs(5),
            retry_after: Duration::from_secs(1),
            capacity: 4096,
        }
    }
}

/// A list changed, or may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Whose.
    pub workspace: WorkspaceId,
    /// Of which connection.
    pub connection: ConnectionName,
    /// Which.
    pub kind: ListKind,
    /// This replica has put another list than the one from before into the store: the other replicas are to be told.
    pub to_tell: bool,
}

/// The listings that this replica knows.
pub struct Catalogue {
    pool: Arc<Pool>,
    spawn: Arc<dyn Spawn>,
    store: Arc<dyn CatalogueStore>,
    options: CatalogueOptions,
    slots: Mutex<HashMap<ListKey, Arc<Slot>>>,
    compared: Mutex<HashMap<WorkspaceId, Instant>>,
    changes: broadcast::Sender<Change>,
}

impl fmt::Debug for Catalogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Catalogue({} listings)", self.slots.lock().len())
    }
}

impl Catalogue {
    /// An empty catalogue that lists through `pool` and shares in `store`.
    pub fn new(
        pool: Arc<Pool>,
        spawn: Arc<dyn Spawn>,
        store: Arc<dyn CatalogueStore>,
        options: CatalogueOptions,
    ) -> Arc<Self> {
        let changes = broadcast::Sender::new(CHANGE_BACKLOG);
        Arc::new(Self {
            pool,
            spawn,
            store,
            options,
            slots: Mutex::default(),
            compared: Mutex::default(),
            changes,
        })
    }

    /// What `source` offers of `kind`; waits for the upstream until `deadline` when nothing is known yet.
    ///
    /// Cancel-safe: the listing goes on for others and for the next caller.
    ///
    /// # Errors
    /// When the upstream failed, or did not answer by `deadline`, and nothing recent enough is known.
    pub async fn get(
        self: &Arc<Self>,
        source: &Source,
        kind: ListKind,
        deadline: Instant,
    ) -> Result<Arc<Listing>, CallError> {
        self.wait(source, kind, deadline, None).await
    }

    /// As [`Catalogue::get`], but an upstream that hangs is only waited for by the first callers, until
    /// [`CatalogueOptions::patience`] has passed since it was asked: else each list of a client would take that long
    /// until the upstream gives up.
    ///
    /// # Errors
    /// As [`Catalogue::get`].
    pub async fn get_soon(
        self: &Arc<Self>,
        source: &Source,
        kind: ListKind,
        deadline: Instant,
    ) -> Result<Arc<Listing>, CallError> {
        self.wait(source, kind, deadline, Some(self.options.patience)).await
    }

    async fn wait(
        self: &Arc<Self>,
        source: &Source,
        kind: ListKind,
        mut deadline: Instant,
        patience: Option<Duration>,
    ) -> Result<Arc<Listing>, CallError> {
        let now = Instant::now();
        let (key, slot) = self.slot(source, kind, now);
        // Before the state is looked at, so that a load that ends in between is not missed.
        let mut steps = slot.steps();
        let look = slot.look(now, &self.options);
        if look.start {
            self.load(key, &slot, source.clone());
        }
        if let Some(listing) = look.ready {
            return Ok(listing);
        }
        if let Some(patience) = patience {
            deadline = deadline.min(look.loading_since + patience);
        }
        // In time or not, what there is then is what there is.
        drop(tokio::time::timeout_at(deadline, slot.settled(&mut steps)).await);
        slot.best()
    }

    /// The upstream announced that its list changed: the next reader waits for the new one.
    pub fn changed(&self, workspace: &WorkspaceId, connection: &ConnectionName, kind: ListKind) {
        let now = Instant::now();
        for slot in self.concerned(workspace, connection, kind) {
            slot.hear(now);
        }
        self.tell(workspace, connection, kind, false);
    }

    /// Another replica says that it has put a newer list into the store: the next reader looks. Returns whether it is one
    /// that is known here.
    pub fn doubt(&self, workspace: &WorkspaceId, connection: &ConnectionName, kind: ListKind) -> bool {
        let concerned = self.concerned(workspace, connection, kind);
        for slot in &concerned {
            slot.doubt();
        }
        if !concerned.is_empty() {
            self.tell(workspace, connection, kind, false);
        }
        !concerned.is_empty()
    }

    /// What changed, for those who have shown a list to somebody. A receiver that is too slow loses the oldest.
    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    /// Compares what is known of a workspace with what replicas share, so that a change is noticed that another replica
    /// saw and nobody told. One flight to the store, and none when that was done within the last 10 s.
    pub async fn compare(&self, workspace: &WorkspaceId) {
        let now = Instant::now();
        {
            let mut compared = self.compared.lock();
            compared.retain(|_, at| now.duration_since(*at) < COMPARE_EVERY);
            if compared.contains_key(workspace) {
                return;
            }
            compared.insert(workspace.clone(), now);
        }
        let (keys, slots): (Vec<ListKey>, Vec<Arc<Slot>>) = self
            .slots
            .lock()
            .iter()
            .filter(|(key, slot)| key.workspace == *workspace && slot.digest().is_some())
            .map(|(key, slot)| (key.clone(), slot.clone()))
            .unzip();
        let shared = match self.store.digests(&keys).await {
            Ok(shared) => shared,
            Err(e) => {
                tracing::debug!(error = %e, "lists are not compared");
                return;
            }
        };
        for ((key, slot), shared) in keys.iter().zip(slots).zip(shared) {
            if shared.is_some() && slot.digest() != shared {
                slot.doubt();
                self.tell(&key.workspace, &key.connection, key.kind, false);
            }
        }
    }

    fn tell(&self, workspace: &WorkspaceId, connection: &ConnectionName, kind: ListKind, to_tell: bool) {
        let change = Change { workspace: workspace.clone(), connection: connection.clone(), kind, to_tell };
        // Fails only when nobody listens.
        drop(self.changes.send(change));
    }

    /// One announcement stands for both lists of resources.
    fn concerned(
        &self,
        workspace: &WorkspaceId,
        connection: &ConnectionName,
        kind: ListKind,
    ) -> Vec<Arc<Slot>> {
        let same = |k: ListKind| {
            k == kind || matches!((k, kind), (ListKind::ResourceTemplates, ListKind::Resources))
        };
        self.slots
            .lock()
            .iter()
            .filter(|(key, _)| key.workspace == *workspace && key.connection == *connection && same(key.kind))
            .map(|(_, slot)| slot.clone())
            .collect()
    }

    fn slot(&self, source: &Source, kind: ListKind, now: Instant) -> (ListKey, Arc<Slot>) {
        let endpoint = &source.endpoint;
        let key = ListKey {
            workspace: endpoint.workspace.clone(),
            connection: endpoint.connection.clone(),
            // Names, rules and credential are part of the generation, so a new publication never serves an old listing.
            generation: endpoint.generation,
            version: endpoint.version,
            kind,
        };
        let mut slots = self.slots.lock();
        if let Some(slot) = slots.get(&key) {
            return (key, slot.clone());
        }
        if slots.len() >= self.options.capacity {
            // Listings of publications that nobody uses any more go first; then everything does, which only costs
            // another listing.
            slots.retain(|_, slot| now.saturating_duration_since(slot.used_at()) <= KEEP);
            if slots.len() >= self.options.capacity {
                slots.clear();
            }
        }
        let slot = Arc::new(Slot::new(now));
        slots.insert(key.clone(), slot.clone());
        (key, slot)
    }

    fn load(self: &Arc<Self>, key: ListKey, slot: &Arc<Slot>, source: Source) {
        // Dropped by an aborting drain, the task must not leave its waiters waiting.
        let guard = LoadGuard(Some(slot.clone()));
        let load = Load { catalogue: self.clone(), key, slot: slot.clone(), source };
        let task = async move {
            let outcome = load.run().await.inspect_err(|failure| {
                tracing::warn!(
                    workspace = %load.key.workspace,
                    connection = %load.key.connection,
                    list = load.key.kind.member(),
                    error = %failure,
                    "listing failed"
                );
            });
            guard.finish(outcome);
        };
        self.spawn.spawn("catalogue", task.boxed());
    }
}

/// One look for a list: in the store, at the upstream when it is this replica's turn.
struct Load {
    catalogue: Arc<Catalogue>,
    key: ListKey,
    slot: Arc<Slot>,
    source: Source,
}

impl Load {
    async fn run(&self) -> Result<(), CallError> {
        let Catalogue { store, options, .. } = self.catalogue.as_ref();
        let deadline = Instant::now() + options.list_timeout;
        let token = uuid::Uuid::new_v4().to_string();
        let mut pause = LOOK_AGAIN;
        loop {
            let asked = Instant::now();
            let errand = self.slot.errand(asked, options.ttl);
            let (shared, turn) = match store.begin(&self.key, &errand.wanted, &token, LEASE).await {
                Ok(found) => found,
                Err(e) => {
                    tracing::debug!(error = %e, "this replica lists for itself");
                    self.list(asked, deadline).await?;
                    self.slot.settle(&errand);
                    return Ok(());
                }
            };
            let adopted = shared.is_none_or(|shared| self.adopt(shared, asked, turn));
            match turn {
                Turn::Nobody if adopted => {
                    metrics::counter!(metric::MCP_CATALOGUE_LOADS, "source" => "shared").increment(1);
                    self.slot.settle(&errand);
                    return Ok(());
                }
                // What is shared cannot be read.
                Turn::Nobody => {
                    self.list(asked, deadline).await?;
                    self.slot.settle(&errand);
                    return Ok(());
                }
                Turn::Ours => {
                    self.list_for_all(asked, deadline, &token).await?;
                    self.slot.settle(&errand);
                    return Ok(());
                }
                Turn::Theirs { left } => {
                    let wake = Instant::now() + pause.min(left.max(LOOK_AGAIN));
                    if wake >= deadline {
                        return Err(CallError::Timeout);
                    }
                    tokio::time::sleep_until(wake).await;
                    pause = (pause * 2).min(LOOK_AGAIN_AT_MOST);
                }
            }
        }
    }

    /// Takes what is shared; `false` when it cannot be read.
    fn adopt(&self, shared: Shared, asked: Instant, turn: Turn) -> bool {
        let listed = asked.checked_sub(shared.age).unwrap_or(asked);
        if shared.age >= KEEP {
            return true;
        }
        let Some(items) = shared.items else {
            self.slot.confirm(listed);
            return true;
        };
        // What is not what was wanted is still better than nothing, or than something older.
        if turn != Turn::Nobody && !self.slot.would_gain(listed) {
            return true;
        }
        let items = (ListDigest::of(&items) == shared.digest)
            .then(|| serde_json::from_slice::<Vec<Box<RawValue>>>(&items).ok())
            .flatten();
        let Some(items) = items else {
            tracing::warn!(
                workspace = %self.key.workspace,
                connection = %self.key.connection,
                list = self.key.kind.member(),
                "the shared list cannot be read"
            );
            return false;
        };
        self.install(&items, shared.digest, listed);
        true
    }

    async fn list_for_all(&self, asked: Instant, deadline: Instant, token: &str) -> Result<(), CallError> {
        let store = &self.catalogue.store;
        let listed = tokio::select! {
            listed = self.list(asked, deadline) => listed,
            never = self.keep_lease(token) => match never {},
        };
        let items = match listed {
            Ok(items) => items,
            Err(failure) => {
                if let Err(e) = store.release(&self.key, token).await {
                    tracing::debug!(error = %e, "the lease on listing ends by itself");
                }
                return Err(failure);
            }
        };
        let put = if items.len() > MAX_SHARED {
            tracing::warn!(
                workspace = %self.key.workspace,
                connection = %self.key.connection,
                list = self.key.kind.member(),
                bytes = items.len(),
                "list is too large to be shared: each replica asks for itself"
            );
            store.release(&self.key, token).await.map(|()| Put::Same)
        } else {
            store.put(&self.key, token, &items).await
        };
        match put {
            Ok(Put::Changed { replaced: true }) => {
                let ListKey { workspace, connection, kind, .. } = &self.key;
                self.catalogue.tell(workspace, connection, *kind, true);
            }
            Ok(Put::Changed { replaced: false } | Put::Same) => {}
            Ok(Put::LeaseLost) => tracing::debug!("another replica listed meanwhile"),
            Err(e) => tracing::debug!(error = %e, "the list is not shared"),
        }
        Ok(())
    }

    async fn keep_lease(&self, token: &str) -> Infallible {
        loop {
            tokio::time::sleep(LEASE / 3).await;
            match self.catalogue.store.renew(&self.key, token, LEASE).await {
                Ok(true) => {}
                // The listing goes on: its callers wait for it, and whoever has the lease decides what is shared.
                Ok(false) => tracing::debug!("the lease on listing was lost"),
                Err(e) => tracing::debug!(error = %e, "the lease on listing was not renewed"),
            }
        }
    }

    /// Asks the upstream and puts what it says in place here. `asked` is before anything was asked.
    async fn list(&self, asked: Instant, deadline: Instant) -> Result<Bytes, CallError> {
        metrics::counter!(metric::MCP_CATALOGUE_LOADS, "source" => "upstream").increment(1);
        let items = self.catalogue.pool.list(&self.source.endpoint, self.key.kind, deadline).await?;
        let bytes = array(&items);
        let digest = ListDigest::of(&bytes);
        if self.slot.digest() == Some(digest) {
            self.slot.confirm(asked);
        } else {
            self.install(&items, digest, asked);
        }
        Ok(bytes)
    }

    fn install(&self, items: &[Box<RawValue>], digest: ListDigest, listed: Instant) {
        let listing = listing::build(&self.source, self.key.kind, items);
        if self.slot.install(listing, digest, listed) {
            let ListKey { workspace, connection, kind, .. } = &self.key;
            self.catalogue.tell(workspace, connection, *kind, false);
        }
    }
}

/// The items as one JSON array.
fn array(items: &[Box<RawValue>]) -> Bytes {
    let mut text = String::with_capacity(items.iter().map(|item| item.get().len() + 1).sum::<usize>() + 2);
    text.push('[');
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            text.push(',');
        }
        text.push_str(item.get());
    }
    text.push(']');
    text.into()
}

struct LoadGuard(Option<Arc<Slot>>);

impl LoadGuard {
    fn finish(mut self, outcome: Result<(), CallError>) {
        if let Some(slot) = self.0.take() {
            slot.finish(outcome);
        }
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.finish(Err(CallError::Stopping));
        }
    }
}
