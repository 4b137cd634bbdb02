//! What each upstream offers, listed once and kept (DESIGN §9.3).
//!
//! A listing is fetched by one task for all who wait, outlives a waiter that gives up, is served while it is refreshed,
//! and is served stale for a bounded time when its upstream fails.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use obol_model::snapshot::{Namespace, ToolRule};
use obol_model::{ConnectionName, WorkspaceId, metric};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::names;
use crate::pool::{CallError, Endpoint, ListKind, Pool, Spawn};
use crate::shape;
use crate::wire::{Object, ProtocolVersion, Splice};

/// One connection as a caller may list it.
#[derive(Debug, Clone)]
pub struct Source {
    /// Where it is.
    pub endpoint: Arc<Endpoint>,
    /// How its names appear.
    pub namespace: Namespace,
    /// What the workspace decides about single tools.
    pub rules: Arc<BTreeMap<String, ToolRule>>,
}

/// One tool, resource, resource template or prompt.
#[derive(Debug, Clone)]
pub struct Item {
    /// What the upstream calls it: a name, a URI or a URI template.
    pub name: String,
    /// What clients call it.
    pub exposed: String,
    /// Its definition as clients see it: the upstream's text with the name or URI rewritten.
    pub text: String,
    /// For policies: whether a tool may destroy something (the workspace's word, else the upstream's hint).
    pub destructive: bool,
    /// For policies: whether a tool only reads.
    pub read_only: bool,
}

/// All items of one kind that one connection offers, sorted by what clients call them.
#[derive(Debug, Default)]
pub struct Listing {
    items: Vec<Item>,
    by_exposed: HashMap<String, usize>,
    by_name: HashMap<String, usize>,
}

impl Listing {
    /// The items in order.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The item that clients call `exposed`.
    pub fn exposed(&self, exposed: &str) -> Option<&Item> {
        self.by_exposed.get(exposed).and_then(|i| self.items.get(*i))
    }

    /// The item that the upstream calls `name`.
    pub fn named(&self, name: &str) -> Option<&Item> {
        self.by_name.get(name).and_then(|i| self.items.get(*i))
    }
}

/// Bounds of a catalogue.
#[derive(Debug, Clone, Copy)]
pub struct CatalogueOptions {
    /// A listing of this age is refreshed when it is next used.
    pub ttl: Duration,
    /// A listing is served at most this long after its upstream last answered.
    pub max_stale: Duration,
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
            max_stale: Duration::from_secs(300),
            list_timeout: Duration::from_secs(30),
            patience: Duration::from_secs(5),
            retry_after: Duration::from_secs(1),
            capacity: 4096,
        }
    }
}

/// The listings that this replica knows.
pub struct Catalogue {
    pool: Arc<Pool>,
    spawn: Arc<dyn Spawn>,
    options: CatalogueOptions,
    slots: Mutex<HashMap<Key, Arc<Slot>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    workspace: WorkspaceId,
    connection: ConnectionName,
    /// Names, rules and credential are part of the generation, so a new publication never serves an old listing.
    generation: u64,
    version: ProtocolVersion,
    kind: ListKind,
}

/// One listing.
///
/// The state has a lock of its own that is never held while another one is taken or while something is awaited; those who
/// wait for a load watch the count of finished ones.
struct Slot {
    state: Mutex<State>,
    loads: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    listing: Option<Arc<Listing>>,
    loaded_at: Instant,
    /// The upstream announced a change after `loaded_at`.
    dirty: bool,
    loading: bool,
    /// A change was announced while a load was under way, so its result may already be old.
    overtaken: bool,
    /// When the load that is under way began.
    loading_since: Instant,
    failure: Option<(CallError, Instant)>,
    used_at: Instant,
}

impl Catalogue {
    /// An empty catalogue that lists through `pool`.
    pub fn new(pool: Arc<Pool>, spawn: Arc<dyn Spawn>, options: CatalogueOptions) -> Arc<Self> {
        Arc::new(Self { pool, spawn, options, slots: Mutex::default() })
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
        let slot = self.slot(source, kind, now);
        // Before the state is looked at, so that a load that ends in between is not missed.
        let mut loads = slot.loads.subscribe();
        let (known, start) = {
            let mut state = slot.state.lock();
            let known = state.known(now, self.options.max_stale);
            let start = state.is_due(now, &self.options);
            if start {
                (state.loading, state.loading_since) = (true, now);
            }
            if let Some(patience) = patience {
                deadline = deadline.min(state.loading_since + patience);
            }
            match known {
                // Old by age: served while it is refreshed. Old by announcement: the caller waits for the new one.
                Some(listing) if !state.dirty => (Ok(listing), start),
                known => (Err(known), start),
            }
        };
        if start {
            self.load(&slot, source.clone(), kind);
        }
        let known = match known {
            Ok(listing) => return Ok(listing),
            Err(known) => known,
        };
        let waited = tokio::time::timeout_at(deadline, slot.finished(&mut loads)).await.is_ok();
        let state = slot.state.lock();
        match (&state.listing, &state.failure) {
            (Some(listing), None) if waited => Ok(listing.clone()),
            (_, failure) => known.ok_or_else(|| match failure {
                Some((failure, _)) => failure.clone(),
                None => CallError::Timeout,
            }),
        }
    }

    /// The upstream announced that its list changed: the next reader waits for the new one.
    pub fn changed(&self, workspace: &WorkspaceId, connection: &ConnectionName, kind: ListKind) {
        // One announcement stands for both lists of resources.
        let same = |k: ListKind| {
            k == kind || matches!((k, kind), (ListKind::ResourceTemplates, ListKind::Resources))
        };
        let concerned: Vec<Arc<Slot>> = self
            .slots
            .lock()
            .iter()
            .filter(|(key, _)| key.workspace == *workspace && key.connection == *connection && same(key.kind))
            .map(|(_, slot)| slot.clone())
            .collect();
        for slot in concerned {
            let mut state = slot.state.lock();
            state.dirty = true;
            state.overtaken = state.loading;
        }
    }

    fn slot(&self, source: &Source, kind: ListKind, now: Instant) -> Arc<Slot> {
        let mut slots = self.slots.lock();
        let key = Key::of(source, kind);
        if let Some(slot) = slots.get(&key) {
            return slot.clone();
        }
        if slots.len() >= self.options.capacity {
            // Listings of publications that nobody uses any more go first; then everything does, which only costs
            // another listing.
            slots.retain(|_, slot| now.duration_since(slot.state.lock().used_at) <= self.options.max_stale);
            if slots.len() >= self.options.capacity {
                slots.clear();
            }
        }
        let state = State {
            listing: None,
            loaded_at: now,
            dirty: false,
            loading: false,
            overtaken: false,
            loading_since: now,
            failure: None,
            used_at: now,
        };
        let slot = Arc::new(Slot { state: Mutex::new(state), loads: watch::Sender::new(0) });
        slots.insert(key, slot.clone());
        slot
    }

    fn load(self: &Arc<Self>, slot: &Arc<Slot>, source: Source, kind: ListKind) {
        let this = self.clone();
        // Dropped by an aborting drain, the task must not leave its waiters waiting.
        let finish = LoadGuard(Some(slot.clone()));
        let task = async move {
            let deadline = Instant::now() + this.options.list_timeout;
            let listed = this.pool.list(&source.endpoint, kind, deadline).await;
            let listed = listed.map(|raw| Arc::new(build(&source, kind, &raw))).inspect_err(|failure| {
                tracing::warn!(
                    workspace = %source.endpoint.workspace,
                    connection = %source.endpoint.connection,
                    list = kind.member(),
                    error = %failure,
                    "listing failed"
                );
            });
            finish.finish(listed);
        };
        self.spawn.spawn("catalogue", task.boxed());
    }
}

impl State {
    fn known(&mut self, now: Instant, max_stale: Duration) -> Option<Arc<Listing>> {
        self.used_at = now;
        self.listing.clone().filter(|_| now.duration_since(self.loaded_at) < max_stale)
    }

    fn is_due(&self, now: Instant, options: &CatalogueOptions) -> bool {
        let fresh = now.duration_since(self.loaded_at) < options.ttl && !self.dirty;
        let failed_lately =
            self.failure.as_ref().is_some_and(|(_, at)| now.duration_since(*at) < options.retry_after);
        !self.loading && !failed_lately && (self.listing.is_none() || !fresh)
    }
}

impl Slot {
    /// Returns once no load is under way. Cancel-safe.
    async fn finished(&self, loads: &mut watch::Receiver<u64>) {
        while self.state.lock().loading {
            if loads.changed().await.is_err() {
                return;
            }
        }
    }

    fn finish(&self, listed: Result<Arc<Listing>, CallError>) {
        {
            let mut state = self.state.lock();
            match listed {
                Ok(listing) => {
                    state.listing = Some(listing);
                    state.loaded_at = Instant::now();
                    state.dirty = state.overtaken;
                    state.failure = None;
                }
                Err(failure) => state.failure = Some((failure, Instant::now())),
            }
            (state.overtaken, state.loading) = (false, false);
        }
        self.loads.send_modify(|count| *count += 1);
    }
}

struct LoadGuard(Option<Arc<Slot>>);

impl LoadGuard {
    fn finish(mut self, listed: Result<Arc<Listing>, CallError>) {
        if let Some(slot) = self.0.take() {
            slot.finish(listed);
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

impl Key {
    fn of(source: &Source, kind: ListKind) -> Self {
        let endpoint = &source.endpoint;
        Self {
            workspace: endpoint.workspace.clone(),
            connection: endpoint.connection.clone(),
            generation: endpoint.generation,
            version: endpoint.version,
            kind,
        }
    }
}

impl fmt::Debug for Catalogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Catalogue({} listings)", self.slots.lock().len())
    }
}

fn build(source: &Source, kind: ListKind, raw: &[Box<RawValue>]) -> Listing {
    let connection = &source.endpoint.connection;
    let mut items: Vec<Item> = Vec::with_capacity(raw.len());
    for definition in raw {
        match shape::check(kind, definition) {
            Ok(()) => items.extend(item(source, kind, definition.get())),
            Err(member) => {
                metrics::counter!(metric::MCP_QUARANTINED).increment(1);
                tracing::warn!(%connection, list = kind.member(), member, "item left out of the list");
            }
        }
    }
    items.sort_by(|a, b| a.exposed.cmp(&b.exposed));
    // A collision hides both: whichever won, somebody would call the wrong one.
    let mut seen: HashMap<String, usize> = HashMap::new();
    for item in &items {
        *seen.entry(item.exposed.clone()).or_default() += 1;
    }
    items.retain(|item| {
        let unique = seen.get(&item.exposed) == Some(&1);
        if !unique {
            metrics::counter!(metric::MCP_QUARANTINED).increment(1);
            tracing::warn!(%connection, list = kind.member(), name = item.exposed, "name stands twice, both are hidden");
        }
        unique
    });
    let index =
        |of: fn(&Item) -> &String| items.iter().enumerate().map(|(i, item)| (of(item).clone(), i)).collect();
    let (by_exposed, by_name) = (index(|i| &i.exposed), index(|i| &i.name));
    Listing { items, by_exposed, by_name }
}

/// The item that `text` defines, whose shape was checked; `None` when the workspace hides it.
fn item(source: &Source, kind: ListKind, text: &str) -> Option<Item> {
    let object = Object::parse(text).ok()?;
    let (connection, namespace) = (&source.endpoint.connection, source.namespace);
    let member = match kind {
        ListKind::Tools | ListKind::Prompts => "name",
        ListKind::Resources => "uri",
        ListKind::ResourceTemplates => "uriTemplate",
    };
    let raw = object.get(member)?;
    let name = object.str(member)?.into_owned();
    let mut exposed = match kind {
        ListKind::Tools | ListKind::Prompts => names::exposed(connection, namespace, &name),
        ListKind::Resources | ListKind::ResourceTemplates => names::exposed_uri(connection, namespace, &name),
    };
    let (mut destructive, mut read_only) = (false, false);
    if kind == ListKind::Tools {
        let hint = |key| object.object("annotations").and_then(|a| a.bool(key));
        read_only = hint("readOnlyHint").unwrap_or(false);
        // server/tools: `destructiveHint` is true unless said otherwise, and means something only without `readOnlyHint`.
        // For policies a tool is destructive only when somebody says so: the default would make every tool of a server
        // without annotations destructive.
        destructive = hint("destructiveHint").unwrap_or(false) && !read_only;
        if let Some(rule) = source.rules.get(&name) {
            if rule.hidden {
                return None;
            }
            if let Some(alias) = &rule.alias {
                exposed.clone_from(alias);
            }
            destructive = rule.destructive.unwrap_or(destructive);
            read_only = rule.read_only.unwrap_or(read_only);
        }
    }
    let text = if exposed == name {
        text.to_owned()
    } else {
        let mut splice = Splice::new(text);
        splice.replace(raw, serde_json::Value::from(exposed.as_str()).to_string());
        splice.finish()
    };
    Some(Item { name, exposed, text, destructive, read_only })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::EndpointKind;

    fn source(rules: &[(&str, ToolRule)]) -> Source {
        Source {
            endpoint: Arc::new(Endpoint {
                workspace: "acme".parse().unwrap(),
                connection: "git".parse().unwrap(),
                version: ProtocolVersion::LATEST,
                kind: EndpointKind::Stdio { command: vec![], env: vec![] },
                isolation: None,
                generation: 1,
            }),
            namespace: Namespace::Prefix,
            rules: Arc::new(rules.iter().map(|(n, r)| ((*n).to_owned(), r.clone())).collect()),
        }
    }

    fn listing(source: &Source, kind: ListKind, items: &[&str]) -> Listing {
        let raw: Vec<Box<RawValue>> =
            items.iter().map(|t| RawValue::from_string((*t).to_owned()).unwrap()).collect();
        build(source, kind, &raw)
    }

    #[test]
    fn tools_are_renamed_sorted_and_otherwise_untouched() {
        let listing = listing(
            &source(&[]),
            ListKind::Tools,
            &[
                r#"{"x":1.0,"name":"log","inputSchema":{"type":"object"}}"#,
                r#"{"name":"add","inputSchema":{"type":"object"},"annotations":{"destructiveHint":true}}"#,
            ],
        );
        let names: Vec<&str> = listing.items().iter().map(|i| i.exposed.as_str()).collect();
        assert_eq!(names, ["git__add", "git__log"]);
        assert!(listing.named("add").unwrap().destructive);
        assert_eq!(
            listing.exposed("git__log").unwrap().text,
            r#"{"x":1.0,"name":"git__log","inputSchema":{"type":"object"}}"#
        );
    }

    #[test]
    fn rules_of_the_workspace_win_over_hints() {
        let rules = [
            ("drop", ToolRule { hidden: true, ..ToolRule::default() }),
            ("add", ToolRule { alias: Some("plus".into()), destructive: Some(false), ..ToolRule::default() }),
        ];
        let listing = listing(
            &source(&rules),
            ListKind::Tools,
            &[
                r#"{"name":"drop","inputSchema":{"type":"object"}}"#,
                r#"{"name":"add","inputSchema":{"type":"object"},"annotations":{"destructiveHint":true}}"#,
            ],
        );
        assert_eq!(listing.items().len(), 1);
        let add = listing.exposed("plus").unwrap();
        assert_eq!((add.name.as_str(), add.destructive), ("add", false));
    }

    #[test]
    fn what_would_break_a_clients_whole_list_is_left_out() {
        let listing = listing(
            &source(&[]),
            ListKind::Tools,
            &[
                r#"{"name":"ok","inputSchema":{"type":"object"}}"#,
                r#"{"name":"no schema"}"#,
                r#"{"name":5,"inputSchema":{"type":"object"}}"#,
                r#"{"name":"bad schema","inputSchema":{"type":"string"}}"#,
                r#"{"name":"bad output","inputSchema":{"type":"object"},"outputSchema":{"type":"array"}}"#,
                r#"{"name":"twice","inputSchema":{"type":"object"}}"#,
                r#"{"name":"twice","inputSchema":{"type":"object"}}"#,
                "5",
            ],
        );
        assert_eq!(listing.items().iter().map(|i| i.exposed.as_str()).collect::<Vec<_>>(), ["git__ok"]);
    }

    #[test]
    fn uris_and_templates_are_prefixed() {
        let resources = listing(
            &source(&[]),
            ListKind::Resources,
            &[r#"{"uri":"file:///a","name":"a"}"#, r#"{"uri":"x:1"}"#],
        );
        assert_eq!(resources.items().len(), 1);
        assert_eq!(resources.items()[0].text, r#"{"uri":"git+file:///a","name":"a"}"#);
        let templates =
            listing(&source(&[]), ListKind::ResourceTemplates, &[r#"{"uriTemplate":"f:{p}","name":"f"}"#]);
        assert_eq!(templates.items()[0].exposed, "git+f:{p}");
    }

    #[derive(Debug)]
    struct Refuses;

    #[async_trait::async_trait]
    impl crate::pool::Connect for Refuses {
        async fn connect(
            &self,
            _: &Endpoint,
        ) -> Result<Arc<dyn crate::pool::Transport>, crate::pool::TransportError> {
            tokio::task::yield_now().await;
            Err(crate::pool::TransportError::Unsent("it is a test"))
        }
    }

    struct OnRuntime;

    impl Spawn for OnRuntime {
        #[expect(clippy::disallowed_methods, reason = "the runtime of the test ends its tasks")]
        fn spawn(&self, _: &'static str, future: futures::future::BoxFuture<'static, ()>) {
            drop(tokio::spawn(future));
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn readers_and_announcements_of_a_failing_upstream_never_block_each_other() {
        let options =
            crate::pool::PoolOptions { breaker_failures: u32::MAX, ..crate::pool::PoolOptions::default() };
        let pool = Pool::new(Arc::new(Refuses), Arc::new(OnRuntime), options);
        let options = CatalogueOptions { retry_after: Duration::ZERO, ..CatalogueOptions::default() };
        let catalogue = Catalogue::new(pool, Arc::new(OnRuntime), options);
        let source = source(&[]);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let (catalogue, source) = (catalogue.clone(), source.clone());
            tasks.spawn(async move {
                for _ in 0..200 {
                    let deadline = Instant::now() + Duration::from_secs(5);
                    assert!(catalogue.get_soon(&source, ListKind::Tools, deadline).await.is_err());
                    catalogue.changed(
                        &source.endpoint.workspace,
                        &source.endpoint.connection,
                        ListKind::Tools,
                    );
                }
            });
        }
        let all = async { while tasks.join_next().await.is_some_and(|done| done.is_ok()) {} };
        tokio::time::timeout(Duration::from_secs(30), all).await.unwrap();
        assert!(tasks.is_empty(), "a task failed");
    }
}
