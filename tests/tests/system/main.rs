//! Real clients against real servers through three replicas behind a balancer without stickiness.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

mod conformance;
mod sdks;
