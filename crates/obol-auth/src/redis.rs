use async_trait::async_trait;
use obol_model::{KeyContext, KeyHash};
use obol_redis::Redis;
use serde::Deserialize;

use crate::{KeyLookup, KeyStore, KeyStoreError};

/// Control's promise that every key that exists is in Redis.
const LOADED: &str = "keys:loaded";

/// Key records in Redis, at `key:HASH`.
#[derive(Debug, Clone)]
pub struct RedisKeys(Redis);

impl RedisKeys {
    /// Reads through `redis`.
    pub fn new(redis: Redis) -> Self {
        Self(redis)
    }
}

#[async_trait]
impl KeyStore for RedisKeys {
    async fn get(&self, hash: &KeyHash) -> Result<KeyLookup, KeyStoreError> {
        // The marker first: control sets it after the last key, so a key that is absent after the marker was seen does
        // not exist, while the other order could look between the two.
        let mut flight = redis::pipe();
        flight.cmd("EXISTS").arg(LOADED).cmd("GET").arg(format!("key:{}", hash.hex()));
        let (loaded, record): (bool, Option<Vec<u8>>) =
            self.0.pipeline(&flight).await.map_err(KeyStoreError::unreachable)?;
        match record {
            Some(bytes) => read(hash, &bytes).map(KeyLookup::Found),
            None if loaded => Ok(KeyLookup::Absent),
            None => Ok(KeyLookup::NotLoaded),
        }
    }
}

fn read(hash: &KeyHash, bytes: &[u8]) -> Result<KeyContext, KeyStoreError> {
    #[derive(Deserialize)]
    struct Version {
        schema_version: u32,
    }
    // The version first: a record of a later release may say things that this one must not overlook.
    match serde_json::from_slice::<Version>(bytes) {
        Ok(version) if version.schema_version <= KeyContext::SCHEMA => {
            serde_json::from_slice(bytes).map_err(|_| KeyStoreError::Unreadable { hash: *hash })
        }
        _ => Err(KeyStoreError::Unreadable { hash: *hash }),
    }
}
