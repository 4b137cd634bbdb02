//! Replica to replica (DESIGN §5): who the others are, and one authenticated channel to each of them.
//!
//! * A replica holds a **lease** in Redis (`replica:ID`, 15 s, renewed every 5 s) that says where it is reached and which
//!   versions it reads, and stands in the index `replicas`. A replica whose lease is gone is gone.
//! * [`Peers`] **sends**: to one replica or to all, over HTTP, each message with a deadline and acknowledged. A message is
//!   repeated at most once, under the same id.
//! * [`Inbox`] **receives**: it checks the service JWT (for this very replica, once), bounds what it takes, and hands each
//!   message to the [`Handler`] exactly once however often it arrives.
//!
//! What a message says is between its sender and the handler: this crate knows kinds as text. It will not store or queue
//! messages: who cannot be reached in time is an error of the sender.

mod envelope;
mod error;
mod inbox;
mod lease;
mod peers;
mod registry;
mod seen;

pub use envelope::{Ack, Message, PATH};
pub use error::PeerError;
pub use inbox::{Answer, Handler, Inbox, InboxOptions, Refused, Spawn};
pub use peers::{Channel, Peers};
pub use registry::{LEASE, Peer, RENEW, Registry};
