use async_trait::async_trait;
use obol_model::{KeyContext, KeyHash};
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
        let key = format!("key:{}", hash.hex());
        // One byte more than a record may have: what is larger must not keep the connection busy for everybody.
        let get = redis::cmd("GETRANGE").arg(&key).arg(0).arg(KeyContext::LARGEST).to_owned();
        let exists = redis::cmd("EXISTS").arg(&key).to_owned();
        flight.cmd("EXISTS").arg(LOADED).add_command(get.clone()).add_command(exists.clone());
        let (loaded, mut record, mut there): (bool, Vec<u8>, bool) =
            self.0.pipeline(&flight).await.map_err(KeyStoreError::unreachable)?;
        if loaded && !there {
            // The nodes of a Cluster answer in no order, so it may have been looked for before control wrote it.
            let mut again = redis::pipe();
            again.add_command(get).add_command(exists);
            (record, there) = self.0.pipeline(&again).await.map_err(KeyStoreError::unreachable)?;
        }
        match there {
            // An empty one is none that can be read, and no absence.
            true if record.len() > KeyContext::LARGEST => Err(KeyStoreError::Unreadable { hash: *hash }),
            true => decode(hash, &record).map(KeyLookup::Found),
            false if loaded => Ok(KeyLookup::Absent),
            false => Ok(KeyLookup::NotLoaded),
        }
    }
}
