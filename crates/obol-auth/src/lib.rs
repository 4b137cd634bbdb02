//! Who is calling (DESIGN §8): virtual keys of clients, access tokens of OAuth issuers, and the service JWTs that Obol's
//! own parts show each other.
//!
//! [`credential`] finds the credential among a request's headers, [`Keys`] says what a virtual key stands for, from a
//! bounded cache in front of a [`KeyStore`], [`oauth::AccessTokens`] whom an access token speaks for, and
//! [`ServiceTokens`] signs and verifies service JWTs.
//!
//! This crate serves no HTTP, decides nothing about what a caller may do, and never writes a key: control does.
//! "There is no such key" and "could not ask" are different answers everywhere.

mod cache;
mod credential;
mod embedded;
mod error;
mod identity;
mod keys;
pub mod oauth;
mod pem;
mod redis;
mod replay;
mod ring;
mod service;
mod service_error;
mod source;
mod store;

pub use credential::credential;
pub use embedded::EmbeddedKeys;
pub use error::{AuthError, Refusal};
pub use identity::{Identity, User};
pub use keys::{Keys, KeysOptions, KeysParts, ReconciledAt};
pub use redis::RedisKeys;
pub use replay::UsedTokens;
pub use ring::{ServiceKeyError, TrustedKeys};
pub use service::{Claims, Expected, ServiceTokens, party};
pub use service_error::ServiceTokenError;
pub use store::{ControlKeys, KeyLookup, KeyStore, KeyStoreError};
