//! Who is calling (DESIGN §8): virtual keys of clients, and the service JWTs that Obol's own parts show each other.
//!
//! [`credential`] finds the credential among a request's headers, [`Keys`] says what a virtual key stands for, from a
//! bounded cache in front of a [`KeyStore`], and [`ServiceTokens`] signs and verifies service JWTs.
//!
//! This crate knows no HTTP, decides nothing about what a caller may do, and never writes a key: control does.
//! "There is no such key" and "could not ask" are different answers everywhere.

mod cache;
mod credential;
mod embedded;
mod error;
mod keys;
mod pem;
mod redis;
mod replay;
mod service;
mod store;

pub use credential::credential;
pub use embedded::EmbeddedKeys;
pub use error::{AuthError, Refusal};
pub use keys::{Keys, KeysOptions};
pub use redis::RedisKeys;
pub use service::{Claims, Expected, ServiceKeyError, ServiceTokenError, ServiceTokens};
pub use store::{KeyLookup, KeyStore, KeyStoreError};
