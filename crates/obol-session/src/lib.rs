//! MCP sessions of the legacy era: create, resume on any replica, save, delete (DESIGN §6).
//!
//! [`Sessions`] is the door; behind it a [`SessionStore`] keeps the records: [`RedisSessions`] for replicas,
//! [`EmbeddedSessions`] for a single process. The rules that hold for both:
//!
//! * A session that expired or was deleted never comes back. Only creation creates; resuming and saving act on what
//!   exists and belongs to the caller, in one step of the store.
//! * Whoever may not use a session is told what one is told about a session that never existed. "Could not ask" is
//!   another answer and never looks like it.
//! * Nothing is cached: after a deletion no replica finds the session.
//! * Whoever works for a session holds it ([`Sessions::hold`]), and what is held does not expire for want of requests.
//!   It is the holder that renews it ([`Sessions::keep`]), so a holder that dies holds nothing.
//!
//! Beside them [`Bindings`] keep whose an answer is that a provider stores for later requests.
//!
//! It will not open streams, nor know what is in a session's client information and capabilities.

mod bindings;
mod embedded;
mod error;
mod held;
mod record;
mod redis;
mod sessions;
mod store;

pub use crate::bindings::{Binding, BindingError, Bindings, EmbeddedBindings, RedisBindings};
pub use crate::embedded::EmbeddedSessions;
pub use crate::error::SessionError;
pub use crate::held::HeldSession;
pub use crate::record::{SessionRecord, UpstreamNote};
pub use crate::redis::RedisSessions;
pub use crate::sessions::{NewSession, SessionOptions, Sessions};
pub use crate::store::{Caller, Lookup, Owner, SessionStore};
