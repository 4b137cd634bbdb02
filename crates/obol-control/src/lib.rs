//! The control plane: compiles workspace files, publishes them, keeps keys (DESIGN §7.6, §7.7).
//!
//! * [`compile_file`] turns one YAML file into the two documents of a publication, or reports every fault of it with
//!   file, line, column and a way out.
//! * [`ControlStore`] is what control knows: revisions, keys and an audit, in Postgres or in a directory. It is the truth.
//! * [`Control`] watches files and brings what they say into the store; and it makes Redis what the store says, whatever
//!   happened to Redis. An invalid edit changes nothing: the old publication stays.
//! * [`UsageCollector`] brings usage events from Redis into a [`UsageStore`], beside what control knows.
//! * [`Operator`] is what the commands do: they change the store as well, beside a control that runs or without one.
//!
//! # When is content the same?
//!
//! A restart of control must not make a new revision of what is already published, but sealing uses a fresh nonce each
//! time, so the documents' bytes differ. Two documents count as the same when they are equal apart from the revision,
//! where two *sealed* values are equal if the key ring opens both to the same text and they were sealed with the same
//! key. This needs no digest of a secret anywhere; and after a rotation of the key ring it re-seals everything by itself,
//! so that the old key can go.
//!
//! # Which revision comes next?
//!
//! One more than the highest of what the store and Redis say: a Redis that lost its data must not make numbers start over
//! while replicas still hold higher ones, nor must a store that was restored from a backup.
//!
//! # File or operator?
//!
//! The last one who said something new. What an operator decided (a rollback, an unpublication) stands until the file says
//! something else than it did when it was last published.
//!
//! # Which files of a folder are workspaces?
//!
//! Every `.yaml` and `.yml` file but those whose name says that they hold prices ([`is_price_catalogue`]). The name decides
//! and not the content, so that a workspace file with a mistake in it is a fault and never passed over.
//!
//! It never reads the environment: variables come through a function that the composer hands in. It serves nobody.

mod commit;
mod compile;
mod content;
mod control;
mod fault;
mod files;
mod follow;
mod keys;
mod ledger;
mod operator;
mod publisher;
mod reconcile;
mod redis_publisher;
mod report;
mod scan;
mod sources;
mod state;
mod store;
mod usage;

pub use commit::CommitError;
pub use compile::{
    CompileOptions, Compiled, check_prices, compile_file, compile_policies, is_price_catalogue,
};
pub use control::{Control, ControlOptions};
pub use fault::Fault;
pub use files::read_bounded;
pub use keys::{KeyChange, KeyRecord, LoadedKeys, NewKey, NoRandomness};
pub use operator::{Effect, Operator, OperatorError};
pub use publisher::{PublishError, PublishedKeys, Publisher};
pub use redis_publisher::RedisPublisher;
pub use report::SyncReport;
pub use scan::{Env, list as workspace_files};
pub use store::{
    Action, AuditEntry, ControlStore, FileStore, Head, MemoryStore, NewRevision, Origin, PostgresStore,
    RevisionInfo, Stamp, StoreError,
};
pub use usage::{
    EntryId, FileUsage, PostgresUsage, RejectedEntry, TakenEvent, UsageBatch, UsageBy, UsageCollector,
    UsageQuery, UsageStore, UsageTotal,
};
