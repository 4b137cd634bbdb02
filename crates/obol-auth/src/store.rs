use std::error::Error;
use std::sync::Arc;

use async_trait::async_trait;
use obol_model::{KeyContext, KeyHash};

/// What the store knows of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyLookup {
    /// It is there.
    Found(KeyContext),
    /// The store holds all keys, and this is none of them.
    Absent,
    /// The key is not there, and neither is the marker `keys:loaded`: what the store does not have may still exist.
    NotLoaded,
}

/// Why the store could not say.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KeyStoreError {
    /// It could not be asked.
    #[error("the key store could not be asked")]
    Unreachable(#[source] Arc<dyn Error + Send + Sync>),
    /// It has not been given the keys (yet).
    #[error("the key store holds no keys yet: control has not set `keys:loaded`")]
    NotLoaded,
    /// The record is not one that this release can read. Says nothing of its content.
    #[error("the record of key `{hash:?}` cannot be read")]
    Unreadable {
        /// Of which key; shown shortened.
        hash: KeyHash,
    },
}

impl KeyStoreError {
    /// Wraps what the store's client reported.
    pub fn unreachable(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Unreachable(Arc::new(cause))
    }
}

/// Where key records are read from.
#[async_trait]
pub trait KeyStore: Send + Sync + 'static {
    /// Looks a key up, within a deadline of its own. Cancel-safe: it only reads.
    ///
    /// # Errors
    /// When the store cannot be asked or the record cannot be read.
    async fn get(&self, hash: &KeyHash) -> Result<KeyLookup, KeyStoreError>;
}
