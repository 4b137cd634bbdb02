use std::collections::HashMap;

use async_trait::async_trait;
use obol_model::{KeyContext, KeyHash};
use parking_lot::RwLock;

use crate::{KeyLookup, KeyStore, KeyStoreError};

/// Key records in memory, for one process: the embedded store (DESIGN §5).
#[derive(Debug, Default)]
pub struct EmbeddedKeys(RwLock<Records>);

#[derive(Debug, Default)]
struct Records {
    keys: HashMap<KeyHash, KeyContext>,
    loaded: bool,
}

impl EmbeddedKeys {
    /// An empty store that does not claim to know all keys; see [`EmbeddedKeys::mark_loaded`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a record. Send an invalidation of the key after it.
    pub fn insert(&self, hash: KeyHash, context: KeyContext) {
        self.0.write().keys.insert(hash, context);
    }

    /// Removes a record and returns it. Send an invalidation of the key after it.
    pub fn remove(&self, hash: &KeyHash) -> Option<KeyContext> {
        self.0.write().keys.remove(hash)
    }

    /// From now on a key that is not here does not exist: the form that `keys:loaded` takes in this store.
    pub fn mark_loaded(&self) {
        self.0.write().loaded = true;
    }
}

#[async_trait]
impl KeyStore for EmbeddedKeys {
    async fn get(&self, hash: &KeyHash) -> Result<KeyLookup, KeyStoreError> {
        let records = self.0.read();
        Ok(match records.keys.get(hash) {
            Some(context) => KeyLookup::Found(context.clone()),
            None if records.loaded => KeyLookup::Absent,
            None => KeyLookup::NotLoaded,
        })
    }
}
