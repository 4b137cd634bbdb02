//! What every key store does, on both of them, and what only Redis can do.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use jiff::Timestamp;
use obol_auth::{EmbeddedKeys, KeyLookup, KeyStore, KeyStoreError, RedisKeys};
use obol_model::{KeyContext, KeyHash, Limits, Secret, VirtualKey};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;

/// How records get into a store.
trait Writer {
    async fn insert(&self, hash: &KeyHash, context: &KeyContext);
    async fn remove(&self, hash: &KeyHash);
    async fn mark_loaded(&self);
}

impl Writer for EmbeddedKeys {
    async fn insert(&self, hash: &KeyHash, context: &KeyContext) {
        EmbeddedKeys::insert(self, *hash, context.clone());
    }
    async fn remove(&self, hash: &KeyHash) {
        EmbeddedKeys::remove(self, hash);
    }
    async fn mark_loaded(&self) {
        EmbeddedKeys::mark_loaded(self);
    }
}

/// What control does.
impl Writer for RedisServer {
    async fn insert(&self, hash: &KeyHash, context: &KeyContext) {
        self.cli(&["SET", &format!("key:{}", hash.hex()), &serde_json::to_string(context).unwrap()]).await;
    }
    async fn remove(&self, hash: &KeyHash) {
        self.cli(&["DEL", &format!("key:{}", hash.hex())]).await;
    }
    async fn mark_loaded(&self) {
        self.cli(&["SET", "keys:loaded", "1"]).await;
    }
}

fn context() -> KeyContext {
    KeyContext {
        schema_version: KeyContext::SCHEMA,
        key_id: "key-1".parse().unwrap(),
        workspace_id: "acme".parse().unwrap(),
        name: "ci".into(),
        tags: vec!["team-a".into()],
        disabled: false,
        expires_at: Some(Timestamp::from_second(1_900_000_000).unwrap()),
        budgets: Vec::new(),
        limits: Limits::default(),
        revision: 3,
    }
}

async fn contract(store: &impl KeyStore, writer: &impl Writer) {
    let hash = VirtualKey::generate().unwrap().hash();
    assert_eq!(store.get(&hash).await.unwrap(), KeyLookup::NotLoaded);
    writer.insert(&hash, &context()).await;
    assert_eq!(store.get(&hash).await.unwrap(), KeyLookup::Found(context()), "found before all are loaded");
    let other = VirtualKey::generate().unwrap().hash();
    assert_eq!(store.get(&other).await.unwrap(), KeyLookup::NotLoaded);

    writer.mark_loaded().await;
    assert_eq!(store.get(&other).await.unwrap(), KeyLookup::Absent);
    let disabled = KeyContext { disabled: true, revision: 4, ..context() };
    writer.insert(&hash, &disabled).await;
    assert_eq!(store.get(&hash).await.unwrap(), KeyLookup::Found(disabled));
    writer.remove(&hash).await;
    assert_eq!(store.get(&hash).await.unwrap(), KeyLookup::Absent);
}

async fn redis(server: &RedisServer) -> RedisKeys {
    RedisKeys::new(Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap())
}

#[tokio::test]
async fn the_embedded_store_keeps_the_contract() {
    let store = EmbeddedKeys::new();
    contract(&store, &store).await;
}

#[tokio::test]
async fn redis_keeps_the_contract() {
    let server = RedisServer::start().await;
    contract(&redis(&server).await, &server).await;
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_no_absent_key() {
    let server = RedisServer::start().await;
    server.mark_loaded().await;
    let store = redis(&server).await;
    let hash = VirtualKey::generate().unwrap().hash();
    let key = format!("key:{}", hash.hex());
    for bad in ["", "{", "{}", r#"{"schema_version":1}"#, r#"{"schema_version":99,"all":"new"}"#] {
        server.cli(&["SET", &key, bad]).await;
        let error = store.get(&hash).await.unwrap_err();
        assert!(matches!(error, KeyStoreError::Unreadable { .. }), "{bad}: {error}");
        assert!(!format!("{error} {error:?}").contains(&hash.hex()));
    }
    // Nor is one that is too large to be read: it would take longer than the deadline, and the connection with it.
    server.cli(&["SETRANGE", &key, &(500 << 20).to_string(), "x"]).await;
    let error = store.get(&hash).await.unwrap_err();
    assert!(matches!(error, KeyStoreError::Unreadable { .. }), "{error}");
}

#[tokio::test]
async fn redis_away_is_not_absent() {
    let server = RedisServer::start().await;
    server.mark_loaded().await;
    let store = redis(&server).await;
    let hash = VirtualKey::generate().unwrap().hash();
    server.kill();
    assert!(matches!(store.get(&hash).await, Err(KeyStoreError::Unreachable(_))));
    server.restart().await;
    // It comes back empty, and does not claim that there are no keys.
    eventually(Duration::from_secs(10), async || matches!(store.get(&hash).await, Ok(KeyLookup::NotLoaded)))
        .await;
}
