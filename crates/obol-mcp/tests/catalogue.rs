//! Catalogues of several replicas over one store and one upstream.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use obol_dial::{DialOptions, Dialer};
use obol_mcp::catalogue::{
    Catalogue, CatalogueOptions, CatalogueStore, Change, EmbeddedCatalogue, Listing, RedisCatalogue, Source,
};
use obol_mcp::pool::{
    CallError, Connect, Endpoint, EndpointKind, HttpConnect, ListKind, Pool, PoolOptions, Spawn, Transport,
    TransportError,
};
use obol_mcp::wire::ProtocolVersion;
use obol_model::Secret;
use obol_model::snapshot::Namespace;
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::fake_mcp::FakeMcp;
use obol_testkit::flights::CountingProxy;
use obol_testkit::redis::RedisServer;
use tokio::time::Instant;

const SOON: Duration = Duration::from_secs(20);

struct OnRuntime;

impl Spawn for OnRuntime {
    fn spawn(&self, _: &'static str, future: BoxFuture<'static, ()>) {
        drop(tokio::spawn(future));
    }
}

fn catalogue(connect: Arc<dyn Connect>, store: Arc<dyn CatalogueStore>) -> Arc<Catalogue> {
    let options = PoolOptions { breaker_failures: u32::MAX, ..PoolOptions::default() };
    let pool = Pool::new(connect, Arc::new(OnRuntime), options);
    let options = CatalogueOptions { retry_after: Duration::ZERO, ..CatalogueOptions::default() };
    Catalogue::new(pool, Arc::new(OnRuntime), store, options)
}

fn replica(store: &Arc<dyn CatalogueStore>) -> Arc<Catalogue> {
    let dialer = Dialer::new(DialOptions::default()).unwrap();
    catalogue(Arc::new(HttpConnect::new(dialer)), store.clone())
}

fn source(url: &str) -> Source {
    let kind = EndpointKind::Http { url: url.parse().unwrap(), credential: None, allow_private: true };
    Source {
        endpoint: Arc::new(Endpoint {
            workspace: "acme".parse().unwrap(),
            connection: "git".parse().unwrap(),
            version: ProtocolVersion::LATEST,
            kind,
            isolation: None,
            generation: 1,
        }),
        namespace: Namespace::Prefix,
        rules: Arc::new(BTreeMap::new()),
        pinned: false,
    }
}

async fn list(catalogue: &Arc<Catalogue>, source: &Source) -> Result<Arc<Listing>, CallError> {
    catalogue.get(source, ListKind::Tools, Instant::now() + SOON).await
}

async fn names(catalogue: &Arc<Catalogue>, source: &Source) -> Vec<String> {
    list(catalogue, source).await.unwrap().items().iter().map(|item| item.name.clone()).collect()
}

fn changed(catalogue: &Catalogue, source: &Source) {
    catalogue.changed(&source.endpoint.workspace, &source.endpoint.connection, ListKind::Tools);
}

/// What a catalogue said so far.
fn said(changes: &mut tokio::sync::broadcast::Receiver<Change>) -> Vec<bool> {
    std::iter::from_fn(|| changes.try_recv().ok()).map(|change| change.to_tell).collect()
}

const NEW: &str = r#"{"name":"new","inputSchema":{"type":"object"}}"#;

#[tokio::test]
async fn the_upstream_is_asked_once_for_all_replicas_and_once_for_each_change() {
    let (mcp, store) =
        (FakeMcp::start().await, Arc::new(EmbeddedCatalogue::new()) as Arc<dyn CatalogueStore>);
    let (source, replicas) = (source(&mcp.url()), [replica(&store), replica(&store), replica(&store)]);
    let all = || join_all((0..30).map(|i| names(&replicas[i % 3], &source)));
    let first = all().await;
    assert!(first.iter().all(|names| *names == first[0] && names.len() == 5), "{first:?}");
    assert_eq!(mcp.counts().requests_of("tools/list"), 1);

    let mut changes: Vec<_> = replicas.iter().map(|replica| replica.changes()).collect();
    mcp.add_tool(NEW);
    for replica in &replicas {
        changed(replica, &source);
    }
    let second = all().await;
    assert!(second.iter().all(|names| names.contains(&"new".to_owned())), "{second:?}");
    assert_eq!(mcp.counts().requests_of("tools/list"), 2, "heard by three, listed once");
    let told = changes.iter_mut().map(said).filter(|said| said.contains(&true)).count();
    assert_eq!(told, 1, "the one that listed tells the others");
}

#[tokio::test]
async fn a_list_that_is_listed_again_and_is_the_same_is_no_change() {
    let (mcp, store) =
        (FakeMcp::start().await, Arc::new(EmbeddedCatalogue::new()) as Arc<dyn CatalogueStore>);
    let (source, a) = (source(&mcp.url()), replica(&store));
    assert_eq!(names(&a, &source).await.len(), 5);
    let mut changes = a.changes();
    changed(&a, &source);
    assert_eq!(said(&mut changes), [false], "the announcement itself");
    assert_eq!(names(&a, &source).await.len(), 5);
    assert_eq!(mcp.counts().requests_of("tools/list"), 2);
    assert_eq!(said(&mut changes), Vec::<bool>::new());
}

#[tokio::test]
async fn a_change_that_another_replica_noticed_is_found_when_it_is_told_and_when_lists_are_compared() {
    let (mcp, store) =
        (FakeMcp::start().await, Arc::new(EmbeddedCatalogue::new()) as Arc<dyn CatalogueStore>);
    let (source, a, b, c) = (source(&mcp.url()), replica(&store), replica(&store), replica(&store));
    for replica in [&a, &b, &c] {
        assert_eq!(names(replica, &source).await.len(), 5);
    }
    mcp.add_tool(NEW);
    changed(&a, &source);
    assert_eq!(names(&a, &source).await.len(), 6);
    // Nobody told them yet, and what they know is fresh.
    assert_eq!((names(&b, &source).await.len(), names(&c, &source).await.len()), (5, 5));

    let (mut of_b, mut of_c) = (b.changes(), c.changes());
    let Endpoint { workspace, connection, .. } = source.endpoint.as_ref();
    assert!(b.doubt(workspace, connection, ListKind::Tools));
    assert!(!b.doubt(workspace, &"other".parse().unwrap(), ListKind::Tools));
    assert_eq!(names(&b, &source).await.len(), 6);
    c.compare(workspace).await;
    assert_eq!(names(&c, &source).await.len(), 6);
    assert!(!said(&mut of_b).is_empty() && !said(&mut of_c).is_empty());
    assert_eq!(mcp.counts().requests_of("tools/list"), 2);
    b.compare(workspace).await;
    assert_eq!(said(&mut of_b), Vec::<bool>::new(), "there is nothing new");
}

#[tokio::test]
async fn an_upstream_that_fails_is_asked_by_the_next_and_what_is_known_is_served_meanwhile() {
    let (mcp, store) =
        (FakeMcp::start().await, Arc::new(EmbeddedCatalogue::new()) as Arc<dyn CatalogueStore>);
    let (source, a, b) = (source(&mcp.url()), replica(&store), replica(&store));
    mcp.refuse().await;
    assert!(list(&a, &source).await.is_err() && list(&b, &source).await.is_err());
    mcp.accept().await;
    assert_eq!((names(&b, &source).await.len(), names(&a, &source).await.len()), (5, 5));
    mcp.refuse().await;
    changed(&a, &source);
    assert_eq!(names(&a, &source).await.len(), 5);
    assert_eq!(names(&replica(&store), &source).await.len(), 5, "one that comes later has it too");
}

#[tokio::test]
async fn without_the_store_each_replica_lists_for_itself_and_nobody_waits_for_it() {
    let (mcp, redis) = (FakeMcp::start().await, RedisServer::start().await);
    let client = Redis::connect(RedisOptions::new(Secret::new(redis.url()))).await.unwrap();
    let store = Arc::new(RedisCatalogue::new(client)) as Arc<dyn CatalogueStore>;
    let (source, a, b) = (source(&mcp.url()), replica(&store), replica(&store));
    assert_eq!(names(&a, &source).await.len(), 5);
    redis.kill();
    let warm = Instant::now();
    assert_eq!(names(&a, &source).await.len(), 5);
    assert!(warm.elapsed() < Duration::from_millis(500), "served from memory");
    assert_eq!(names(&b, &source).await.len(), 5);
    assert_eq!(mcp.counts().requests_of("tools/list"), 2);
    mcp.add_tool(NEW);
    changed(&a, &source);
    assert_eq!(names(&a, &source).await.len(), 6);
    a.compare(&source.endpoint.workspace).await;
    assert_eq!(names(&a, &source).await.len(), 6);
}

#[tokio::test]
async fn one_task_looks_for_a_list_for_all_readers_of_a_replica() {
    let (mcp, redis) = (FakeMcp::start().await, RedisServer::start().await);
    let proxy = CountingProxy::start(redis.addr()).await;
    let client = Redis::connect(RedisOptions::new(Secret::new(proxy.url()))).await.unwrap();
    let store = Arc::new(RedisCatalogue::new(client)) as Arc<dyn CatalogueStore>;
    let (source, a) = (source(&mcp.url()), replica(&store));
    proxy.reset();
    let all = join_all((0..30).map(|_| names(&a, &source))).await;
    assert!(all.iter().all(|names| names.len() == 5), "{all:?}");
    // It takes the lease and puts the list, each at first without the text of the script.
    let asked = proxy.commands().concat();
    assert!((1..=4).contains(&asked.len()), "{asked:?}");
}

#[tokio::test]
async fn a_shared_list_that_is_damaged_is_not_used() {
    let (mcp, redis) = (FakeMcp::start().await, RedisServer::start().await);
    let client = Redis::connect(RedisOptions::new(Secret::new(redis.url()))).await.unwrap();
    let store = Arc::new(RedisCatalogue::new(client)) as Arc<dyn CatalogueStore>;
    let source = source(&mcp.url());
    assert_eq!(names(&replica(&store), &source).await.len(), 5);
    let keys = redis.keys("catalog:*").await;
    assert_eq!(keys.len(), 1);
    redis.cli(&["HSET", &keys[0], "items", r#"[{"name":"planted","inputSchema":{"type":"object"}}]"#]).await;
    assert_eq!(names(&replica(&store), &source).await.len(), 5);
    assert_eq!(mcp.counts().requests_of("tools/list"), 2);
}

#[tokio::test]
async fn a_hanging_listing_is_waited_for_until_the_readers_deadline() {
    let (mcp, store) =
        (FakeMcp::start().await, Arc::new(EmbeddedCatalogue::new()) as Arc<dyn CatalogueStore>);
    let (source, a, b) = (source(&mcp.url()), replica(&store), replica(&store));
    mcp.hang_on("tools/list");
    let soon = Instant::now() + Duration::from_millis(300);
    let (of_a, of_b) =
        tokio::join!(a.get(&source, ListKind::Tools, soon), b.get_soon(&source, ListKind::Tools, soon),);
    assert_eq!((of_a.unwrap_err(), of_b.unwrap_err()), (CallError::Timeout, CallError::Timeout));
    mcp.release();
    eventually(SOON, || async { list(&b, &source).await.is_ok() }).await;
    assert_eq!((names(&a, &source).await.len(), mcp.counts().requests_of("tools/list")), (5, 1));
}

#[derive(Debug)]
struct Refuses;

#[async_trait::async_trait]
impl Connect for Refuses {
    async fn connect(&self, _: &Endpoint) -> Result<Arc<dyn Transport>, TransportError> {
        tokio::task::yield_now().await;
        Err(TransportError::Unsent("it is a test"))
    }
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_listing_that_failed_is_there_for_the_next_at_once() {
    let store = Arc::new(EmbeddedCatalogue::new()) as Arc<dyn CatalogueStore>;
    let (a, b) = (catalogue(Arc::new(Refuses), store.clone()), catalogue(Arc::new(Refuses), store));
    let (source, began) = (source("http://127.0.0.1:1/"), Instant::now());
    assert!(list(&a, &source).await.is_err() && list(&b, &source).await.is_err());
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[derive(Debug, Default)]
struct Hangs(AtomicUsize);

#[async_trait::async_trait]
impl Connect for Hangs {
    async fn connect(&self, _: &Endpoint) -> Result<Arc<dyn Transport>, TransportError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_listing_that_takes_longer_than_its_lease_keeps_it() {
    let (connect, store) =
        (Arc::new(Hangs::default()), Arc::new(EmbeddedCatalogue::new()) as Arc<dyn CatalogueStore>);
    let (a, b) = (catalogue(connect.clone(), store.clone()), catalogue(connect.clone(), store));
    let source = source("http://127.0.0.1:1/");
    // A lease lasts six seconds, and an attempt to connect ten.
    let deadline = Instant::now() + Duration::from_secs(9);
    let (of_a, of_b) =
        tokio::join!(a.get(&source, ListKind::Tools, deadline), b.get(&source, ListKind::Tools, deadline));
    assert_eq!((of_a.unwrap_err(), of_b.unwrap_err()), (CallError::Timeout, CallError::Timeout));
    assert_eq!(connect.0.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_and_announcements_of_a_failing_upstream_never_block_each_other() {
    let catalogue = catalogue(Arc::new(Refuses), Arc::new(EmbeddedCatalogue::new()));
    let source = source("http://127.0.0.1:1/");
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let (catalogue, source) = (catalogue.clone(), source.clone());
        tasks.spawn(async move {
            for _ in 0..200 {
                let deadline = Instant::now() + Duration::from_secs(5);
                assert!(catalogue.get_soon(&source, ListKind::Tools, deadline).await.is_err());
                changed(&catalogue, &source);
            }
        });
    }
    let all = async { while tasks.join_next().await.is_some_and(|done| done.is_ok()) {} };
    tokio::time::timeout(Duration::from_secs(60), all).await.unwrap();
    assert!(tasks.is_empty(), "a task failed");
}
