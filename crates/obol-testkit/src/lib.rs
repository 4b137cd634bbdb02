//! What Obol's tests stand on: a real Redis per test, links that can be cut, replicas as real processes behind a
//! balancer without stickiness, and scripted MCP and model servers on real sockets. For tests, benchmarks and the
//! local launchers only; nothing that ships depends on it, and it depends on no other crate of the workspace.
//!
//! Four rules hold everywhere here:
//!
//! * Whatever listens binds a port that the kernel chose and hands over the address. A port that has to survive a
//!   restart is held by [`port::Port`], so that nobody else can get it in between.
//! * Whatever was started ends when its handle is dropped, and no child process outlives a test process that was
//!   killed (see [`process`]).
//! * Nothing sleeps to be right: servers report what they counted, and waiting is for a condition with a deadline
//!   ([`eventually()`], `wait_until`).
//! * A broken harness fails loudly, with the reason. Where a caller has something better to do than to fail there is
//!   a `try_` form that returns a [`Failure`].
//!
//! It will not grow assertions about Obol itself: what is right belongs to the tests.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::missing_panics_doc,
    reason = "test support: a broken harness should fail loudly, where it broke"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "the bans protect the product: here each task is owned by the server that its handle ends, and Redis is \
              opened by the one crate that tests it"
)]
#![allow(
    clippy::unused_async,
    reason = "every server of the kit starts with `start().await`, whatever it does inside"
)]

pub mod balancer;
pub mod chaos;
pub mod cluster;
mod eventually;
pub mod fake_llm;
pub mod fake_mcp;
pub mod flights;
pub mod issuer;
pub mod logs;
pub mod model_server;
pub mod port;
pub mod postgres;
pub mod process;
pub mod redis;
pub mod redis_cluster;
pub mod redis_kind;
pub mod redis_sentinel;
pub mod redis_tls;

mod accept;
mod answer;
mod resp;

pub use crate::eventually::{Attempt, eventually};

use std::fmt;

/// What the harness could not do, in words. `Debug` prints the words too, so that `unwrap` on it reads well.
#[derive(Clone, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// A failure with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}
