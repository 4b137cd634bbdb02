//! The only opener of Redis: connections, deadlines, scripts, resubscribing pub/sub.
//!
//! * One multiplexed connection per [`Redis`], shared by all of its clones. Commands of many requests share it, and
//!   none waits for another's answer.
//! * Every command has a deadline, connecting included. A server that is known to be away refuses at once; one that
//!   is silent costs a command its deadline and loses the connection, so that a link that died without a word is
//!   replaced. A server that comes back is used by the next command, without a restart.
//! * "Could not ask" is an error ([`RedisError`]), never an empty answer.
//!
//! It will not know any key: keys, scripts and records belong to the crates that own them. Neither does it repeat a
//! command whose outcome is unknown.

mod client;
mod error;
mod link;
mod script;
mod subscriber;
mod target;

pub use client::{Redis, RedisOptions};
pub use error::RedisError;
pub use script::Script;
pub use subscriber::SubscriberEvent;
