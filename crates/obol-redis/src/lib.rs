//! The only opener of Redis: connections, deadlines, scripts, resubscribing pub/sub.
//!
//! * One server, a master that Sentinel watches, or a Cluster, with and without TLS: the URL says which ([`RedisUrl`]),
//!   and nobody else has to know.
//! * One multiplexed connection per server and [`Redis`], shared by all of its clones. Commands of many requests share
//!   it, and none waits for another's answer.
//! * Every command has a deadline, connecting included. A server that is known to be away refuses at once; one that
//!   is silent costs a command its deadline and loses the connection, so that a link that died without a word is
//!   replaced. Connections come back by themselves ([`Redis::keep`]), without a restart.
//! * "Could not ask" is an error ([`RedisError`]), never an empty answer.
//!
//! It will not know any key: keys, scripts and records belong to the crates that own them. Neither does it repeat a
//! command whose outcome is unknown.

mod batch;
mod client;
mod cluster;
mod error;
mod link;
mod renewed;
mod script;
mod sentinel;
mod server;
mod servers;
mod subscriber;
mod url;

pub use client::{Redis, RedisOptions};
pub use error::RedisError;
pub use script::{Script, ScriptCall};
pub use subscriber::SubscriberEvent;
pub use url::RedisUrl;
