//! Whole-system tests and rule tests live in `tests/`; this library holds what they share: an MCP client that hides
//! nothing of the wire, a small installation with scripted upstreams, and where the real clients are installed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::missing_panics_doc,
    clippy::disallowed_methods,
    reason = "test support: a broken harness should fail loudly, where it broke"
)]

pub mod client;
pub mod front;
pub mod model_clients;
pub mod setup;
pub mod world;

use std::path::PathBuf;
use std::time::Duration;

/// Longest wait for what happens at once on an idle machine: a debug build on two busy cores has to make it too.
pub const SOON: Duration = Duration::from_secs(10);

/// What every policy test starts from.
pub const ALLOW_ALL: &str = "permit (principal, action, resource);\n";

/// The root of the checkout.
pub fn root() -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the package lies in the workspace").to_owned()
}
