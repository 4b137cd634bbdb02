use async_trait::async_trait;
use obol_model::KeyHash;
use obol_redis::Redis;

use crate::store::decode;
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
        let get = redis::cmd("GET").arg(format!("key:{}", hash.hex())).to_owned();
        flight.cmd("EXISTS").arg(LOADED).add_command(get.clone());
        let (loaded, mut record): (bool, Option<Vec<u8>>) =
            self.0.pipeline(&flight).await.map_err(KeyStoreError::unreachable)?;
        if loaded && record.is_none() {
            // The nodes of a Cluster answer in no order, so it may have been looked for before control wrote it.
            record = self.0.query(&get).await.map_err(KeyStoreError::unreachable)?;
        }
        match record {
            Some(bytes) => decode(hash, &bytes).map(KeyLookup::Found),
            None if loaded => Ok(KeyLookup::Absent),
            None => Ok(KeyLookup::NotLoaded),
        }
    }
}
