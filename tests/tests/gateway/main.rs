//! The gateway as processes against scripted upstreams: what the real clients of `system` do not provoke.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

mod audit;
mod calls;
mod carried;
mod drain;
mod hot_path;
mod isolation;
mod lossless;
mod publish;
mod redis_away;
mod refusals;
mod streams;
mod usage;
