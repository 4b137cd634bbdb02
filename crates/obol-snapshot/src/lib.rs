//! Publications on the side of the gateway (DESIGN §7): what a workspace has published, read as one coherent pair,
//! compiled once, kept for at most 30 seconds without being compared with the store, and followed by invalidations.
//!
//! A request asks [`Publications::pair`] once and uses that [`Publication`] to its end. What a publication means is
//! no business of this crate: the composer hands in a [`Compile`] that turns the documents into tables, opened
//! credentials and a policy set, and a compile that fails makes the publication invalid.
//!
//! The store behind is a [`PublicationSource`], news of it come from an [`InvalidationFeed`]; [`RedisSource`] and
//! [`EmbeddedSource`] are both. [`ControlFallback`] asks control for what Redis has nothing of. This crate never changes
//! what is published: control does.

mod embedded;
mod error;
mod fallback;
mod flight;
mod follow;
mod heard;
mod observe;
mod publications;
mod redis;
mod rejected;
mod source;
mod status;

pub use embedded::{EmbeddedSource, PublishError};
pub use error::PairError;
pub use fallback::{Control, ControlFallback};
pub use publications::{Compile, PRELOAD, Publication, Publications, Reloaded};
pub use redis::RedisSource;
pub use rejected::Rejected;
pub use source::{FeedEvent, InvalidationFeed, PublicationSource, SourceError, Stored};
pub use status::{Active, Status};
