//! Shared state under races and failures: what holds on many replicas, whatever happens between them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "these are tests"
)]

mod catalogue;
mod control;
mod credentials;
mod failover;
mod key_races;
mod keys;
mod matrix;
mod oauth;
mod peer;
mod publication_races;
mod publications;
mod published;
mod redis_paused;
mod sessions;
mod timeline;
mod tls;
mod torn_read;
