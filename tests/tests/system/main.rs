//! Real clients against real servers through three replicas behind a balancer without stickiness, and against the
//! provider that other tests stand on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

mod balancers;
mod conformance;
mod llm_sdks;
mod llm_sdks_gateway;
mod sdks;
