//! Publications on the side of the gateway (DESIGN §7): what a workspace has published, read as one coherent pair,
//! compiled once, kept for at most 30 seconds without being compared with the store, and followed by invalidations.
//!
//! A request asks [`Publications::pair`] once and uses that [`Publication`] to its end. What a publication means is
//! no business of this crate: the composer hands in a [`Compile`] that turns the documents into tables, opened
//! credentials and a policy set, and a compile that fails makes the publication invalid.
//!
//! The store behind is a [`PublicationSource`], news of it come from an [`InvalidationFeed`]; [`RedisSource`] and
//! [`EmbeddedSource`] are both. This crate never publishes to Redis: control does.

mod embedded;
mod error;
mod flight;
mod follow;
mod observe;
mod publications;
mod redis;
mod source;

pub use embedded::{EmbeddedSource, PublishError};
pub use error::PairError;
pub use publications::{Compile, PRELOAD, Publication, Publications, Reloaded};
pub use redis::RedisSource;
pub use source::{FeedEvent, InvalidationFeed, PublicationSource, SourceError, Stored};
