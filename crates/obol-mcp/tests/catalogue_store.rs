//! The contract of shared lists, on both stores; and what replicas do with it.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "the bodies of the tests are functions that two tests share"
)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use obol_mcp::catalogue::{
    CatalogueStore, EmbeddedCatalogue, ListDigest, ListKey, Put, RedisCatalogue, Shared, Turn, Wanted,
};
use obol_mcp::pool::ListKind;
use obol_mcp::wire::ProtocolVersion;
use obol_model::Secret;
use obol_redis::{Redis, RedisOptions};
use obol_testkit::redis::RedisServer;

const TTL: Duration = Duration::from_mins(1);
const LEASE: Duration = Duration::from_secs(20);

macro_rules! contract {
    ($($name:ident),* $(,)?) => {
        mod on_redis {
            $(#[tokio::test] async fn $name() { super::$name(super::Fixture::redis().await).await; })*
        }
        mod embedded {
            // Without sockets, so its clock can be moved.
            $(#[tokio::test(start_paused = true)] async fn $name() { super::$name(super::Fixture::embedded()).await; })*
        }
    };
}

contract! {
    one_asks_and_all_have_the_list,
    the_lease_of_one_that_died_is_taken_over_and_its_late_list_is_not_taken,
    a_lease_that_is_renewed_stays,
    a_listing_that_failed_gives_the_lease_back,
    a_listing_that_began_before_the_announcement_is_too_old,
    a_list_that_is_too_old_is_listed_again_and_can_be_had_meanwhile,
    what_did_not_change_is_not_sent_again_and_is_no_change,
    lists_are_apart_and_expire,
}

/// Of many replicas that want a list at once exactly one gets the lease, and after its put all have the list: 10,000
/// replicas in 1,250 rounds on a real Redis.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_that_come_at_once_exactly_one_lists() {
    let f = Arc::new(Fixture::redis().await);
    for round in 0..1_250_u64 {
        let mut replicas = tokio::task::JoinSet::new();
        for replica in 0..8 {
            let f = f.clone();
            replicas.spawn(async move {
                let (key, token) = (ListKey { generation: round, ..key("git") }, format!("{replica}"));
                let (shared, turn) = f.store.begin(&key, &wanted(), &token, LEASE).await.unwrap();
                if turn == Turn::Ours {
                    assert_eq!(shared, None);
                    let put = f.store.put(&key, &token, &Bytes::from(token.clone())).await.unwrap();
                    assert_eq!(put, Put::Changed { replaced: false });
                }
                turn == Turn::Ours
            });
        }
        let listed = replicas.join_all().await.into_iter().filter(|ours| *ours).count();
        assert_eq!(listed, 1, "round {round}");
        let key = ListKey { generation: round, ..key("git") };
        let (shared, turn) = f.store.begin(&key, &wanted(), "late", LEASE).await.unwrap();
        assert!(shared.is_some() && turn == Turn::Nobody, "round {round}");
    }
}

struct Fixture {
    store: Arc<dyn CatalogueStore>,
    server: Option<RedisServer>,
}

impl Fixture {
    async fn redis() -> Self {
        let server = RedisServer::start().await;
        let redis = Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap();
        Self { store: Arc::new(RedisCatalogue::new(redis)), server: Some(server) }
    }

    fn embedded() -> Self {
        Self { store: Arc::new(EmbeddedCatalogue::new()), server: None }
    }

    /// Lets time pass; on Redis by moving all that it stores of time into the past.
    async fn pass(&self, by: Duration) {
        let Some(server) = &self.server else { return tokio::time::advance(by).await };
        let by = i64::try_from(by.as_millis()).unwrap();
        for key in server.keys("catalog:*").await {
            for field in ["listed", "until", "begun"] {
                if server.query::<bool>(&["HEXISTS", &key, field]).await {
                    server.cli(&["HINCRBY", &key, field, &(-by).to_string()]).await;
                }
            }
            let left: i64 = server.query(&["PTTL", &key]).await;
            assert!(left > 0, "everything expires");
            server.cli(&["PEXPIRE", &key, &(left - by).to_string()]).await;
        }
    }

    async fn begin(&self, wanted: Wanted, token: &str) -> (Option<Shared>, Turn) {
        self.store.begin(&key("git"), &wanted, token, LEASE).await.unwrap()
    }

    async fn put(&self, token: &str, items: &'static str) -> Put {
        self.store.put(&key("git"), token, &Bytes::from_static(items.as_bytes())).await.unwrap()
    }
}

fn key(connection: &str) -> ListKey {
    ListKey {
        workspace: "acme".parse().unwrap(),
        connection: connection.parse().unwrap(),
        generation: 7,
        version: ProtocolVersion::LATEST,
        kind: ListKind::Tools,
    }
}

fn wanted() -> Wanted {
    Wanted { ttl: TTL, ..Wanted::default() }
}

fn heard(ago: Duration) -> Wanted {
    Wanted { heard: Some(ago), ..wanted() }
}

fn items(found: &(Option<Shared>, Turn)) -> &str {
    std::str::from_utf8(found.0.as_ref().unwrap().items.as_ref().unwrap()).unwrap()
}

async fn one_asks_and_all_have_the_list(f: Fixture) {
    assert_eq!(f.begin(wanted(), "a").await, (None, Turn::Ours));
    let (none, theirs) = f.begin(wanted(), "b").await;
    assert!(none.is_none() && matches!(theirs, Turn::Theirs { left } if left <= LEASE), "{theirs:?}");
    // Whoever asks again has it still.
    assert_eq!(f.begin(wanted(), "a").await.1, Turn::Ours);
    assert_eq!(f.put("a", "[1]").await, Put::Changed { replaced: false });
    for token in ["a", "b", "c"] {
        let found = f.begin(wanted(), token).await;
        assert_eq!((items(&found), found.1), ("[1]", Turn::Nobody));
        let shared = found.0.unwrap();
        assert_eq!(shared.digest, ListDigest::of(b"[1]"));
        assert!(shared.age < Duration::from_secs(5), "{:?}", shared.age);
    }
}

async fn the_lease_of_one_that_died_is_taken_over_and_its_late_list_is_not_taken(f: Fixture) {
    f.begin(wanted(), "a").await;
    f.pass(LEASE.checked_sub(Duration::from_secs(5)).unwrap()).await;
    assert!(matches!(f.begin(wanted(), "b").await.1, Turn::Theirs { .. }));
    f.pass(Duration::from_secs(6)).await;
    assert_eq!(f.begin(wanted(), "b").await.1, Turn::Ours);
    assert_eq!(f.put("a", "[\"late\"]").await, Put::LeaseLost);
    assert!(!f.store.renew(&key("git"), "a", LEASE).await.unwrap());
    f.store.release(&key("git"), "a").await.unwrap();
    assert!(matches!(f.begin(wanted(), "c").await.1, Turn::Theirs { .. }), "the lease is b's");
    assert_eq!(f.put("b", "[2]").await, Put::Changed { replaced: false });
    assert_eq!(items(&f.begin(wanted(), "c").await), "[2]");
    assert_eq!(f.put("a", "[\"late\"]").await, Put::LeaseLost);
}

async fn a_lease_that_is_renewed_stays(f: Fixture) {
    f.begin(wanted(), "a").await;
    for _ in 0..3 {
        f.pass(LEASE.checked_sub(Duration::from_secs(5)).unwrap()).await;
        assert!(f.store.renew(&key("git"), "a", LEASE).await.unwrap());
    }
    assert!(matches!(f.begin(wanted(), "b").await.1, Turn::Theirs { .. }));
}

async fn a_listing_that_failed_gives_the_lease_back(f: Fixture) {
    f.begin(wanted(), "a").await;
    f.store.release(&key("git"), "a").await.unwrap();
    assert_eq!(f.begin(wanted(), "b").await, (None, Turn::Ours));
    assert_eq!(f.put("a", "[1]").await, Put::LeaseLost);
}

async fn a_listing_that_began_before_the_announcement_is_too_old(f: Fixture) {
    f.begin(wanted(), "a").await;
    f.pass(Duration::from_secs(10)).await;
    // Announced 5 s ago, while the listing was under way.
    let found = f.begin(heard(Duration::from_secs(5)), "b").await;
    assert!(matches!(found.1, Turn::Theirs { .. }));
    f.put("a", "[1]").await;
    let found = f.begin(heard(Duration::from_secs(5)), "b").await;
    assert_eq!((items(&found), found.1), ("[1]", Turn::Ours));
    f.pass(Duration::from_secs(2)).await;
    assert_eq!(f.put("b", "[2]").await, Put::Changed { replaced: true });
    // Heard by others at the same time: what b listed is new enough for all of them.
    let found = f.begin(heard(Duration::from_secs(7)), "c").await;
    assert_eq!((items(&found), found.1), ("[2]", Turn::Nobody));
    assert_eq!(f.begin(heard(Duration::ZERO), "c").await.1, Turn::Ours);
}

async fn a_list_that_is_too_old_is_listed_again_and_can_be_had_meanwhile(f: Fixture) {
    f.begin(wanted(), "a").await;
    f.put("a", "[1]").await;
    f.pass(TTL.checked_sub(Duration::from_secs(10)).unwrap()).await;
    assert_eq!(f.begin(wanted(), "b").await.1, Turn::Nobody);
    f.pass(Duration::from_secs(11)).await;
    let found = f.begin(wanted(), "b").await;
    assert_eq!((items(&found), found.1), ("[1]", Turn::Ours));
    assert!(found.0.unwrap().age >= TTL);
    let found = f.begin(wanted(), "c").await;
    assert_eq!(items(&found), "[1]");
    assert!(matches!(found.1, Turn::Theirs { .. }));
}

async fn what_did_not_change_is_not_sent_again_and_is_no_change(f: Fixture) {
    f.begin(wanted(), "a").await;
    f.put("a", "[1]").await;
    let known = Wanted { known: Some(ListDigest::of(b"[1]")), ..wanted() };
    let (shared, turn) = f.begin(known, "b").await;
    assert_eq!((shared.unwrap().items, turn), (None, Turn::Nobody));
    let other = Wanted { known: Some(ListDigest::of(b"[0]")), ..wanted() };
    assert_eq!(items(&f.begin(other, "b").await), "[1]");
    f.pass(Duration::from_secs(1)).await;
    assert_eq!(f.begin(heard(Duration::ZERO), "b").await.1, Turn::Ours);
    assert_eq!(f.put("b", "[1]").await, Put::Same);
    assert_eq!(items(&f.begin(wanted(), "c").await), "[1]");
}

async fn lists_are_apart_and_expire(f: Fixture) {
    f.begin(wanted(), "a").await;
    f.put("a", "[1]").await;
    let others = [
        key("other"),
        ListKey { workspace: "other".parse().unwrap(), ..key("git") },
        ListKey { generation: 8, ..key("git") },
        ListKey { version: ProtocolVersion::V2025_03_26, ..key("git") },
        ListKey { kind: ListKind::Prompts, ..key("git") },
    ];
    for other in &others {
        assert_eq!(
            f.store.begin(other, &wanted(), "a", LEASE).await.unwrap(),
            (None, Turn::Ours),
            "{other:?}"
        );
    }
    let keys = [key("other"), key("git"), key("never")];
    assert_eq!(f.store.digests(&keys).await.unwrap(), [None, Some(ListDigest::of(b"[1]")), None]);
    assert_eq!(f.store.digests(&[]).await.unwrap(), []);
    // A second less than it takes: a real Redis is not stopped while the test moves its times.
    f.pass(Duration::from_secs(280)).await;
    assert!(f.begin(wanted(), "a").await.0.is_some());
    f.store.release(&key("git"), "a").await.unwrap();
    if f.server.is_none() {
        f.pass(Duration::from_secs(301)).await;
        assert_eq!(f.begin(wanted(), "a").await.0, None);
    }
}
