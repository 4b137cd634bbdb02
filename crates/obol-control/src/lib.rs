//! The control plane: compiles workspace files, publishes them, keeps keys (DESIGN §7.6, §7.7).
//!
//! * [`compile_file`] turns one YAML file into the two documents of a publication, or reports every fault of it with
//!   file, line, column and a way out.
//! * [`Control`] watches files, publishes what changed and heals a store that lost data. An invalid edit changes
//!   nothing: the old publication stays.
//! * [`KeyFiles`] keeps the hashes of virtual keys in a directory until they live in a database.
//!
//! # When is content the same?
//!
//! A restart of control must not make a new revision of what is already published, but sealing uses a fresh nonce each
//! time, so the documents' bytes differ. Two documents count as the same when they are equal apart from the revision,
//! where two *sealed* values are equal if the key ring opens both to the same text and they were sealed with the same
//! key. This needs no state beside the store and no digest of a secret anywhere; and after a rotation of the key ring
//! it re-seals everything by itself, so that the old key can go.
//!
//! # Which revision comes next?
//!
//! One more than the highest of what the store says, what this process published, and what the state directory
//! remembers (`publications.json`): a store that lost its data must not make numbers start over while replicas still
//! hold higher ones.
//!
//! This crate does not answer the snapshot API yet and knows no database. It never reads the environment: variables
//! come through a function that the composer hands in.

mod compile;
mod content;
mod control;
mod fault;
mod files;
mod heal;
mod keys;
mod memory;
mod publisher;
mod redis_publisher;
mod report;
mod scan;
mod sources;
mod state;

pub use compile::{CompileOptions, Compiled, compile_file};
pub use control::{Control, ControlOptions};
pub use fault::Fault;
pub use files::read_bounded;
pub use keys::{KeyError, KeyFiles, KeyRecord};
pub use publisher::{PublishError, Publisher};
pub use redis_publisher::RedisPublisher;
pub use report::SyncReport;
pub use scan::Env;
