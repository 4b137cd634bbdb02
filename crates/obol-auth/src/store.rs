use std::error::Error;
use std::sync::Arc;

use async_trait::async_trait;
use obol_model::{KeyContext, KeyHash};
use serde::Deserialize;

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
    /// It has not been given the keys (yet), and there is no control to ask.
    #[error("the key store holds no keys yet: control has not set `keys:loaded`")]
    NotLoaded,
    /// Control was asked often enough for the moment.
    #[error("the key store holds no keys yet, and control has been asked about too many of them")]
    TooManyQuestions,
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

/// Control, which knows all keys, for when the store does not (DESIGN §8.1).
#[async_trait]
pub trait ControlKeys: Send + Sync + 'static {
    /// The text of the record as it would stand in the store; `None` when control has no such key. Within a deadline of
    /// its own. Cancel-safe: it only reads.
    ///
    /// # Errors
    /// When control cannot be asked, or has no clear answer.
    async fn key(&self, hash: &KeyHash) -> Result<Option<Vec<u8>>, KeyStoreError>;
}

/// Reads the text of a record.
pub(crate) fn decode(hash: &KeyHash, bytes: &[u8]) -> Result<KeyContext, KeyStoreError> {
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
