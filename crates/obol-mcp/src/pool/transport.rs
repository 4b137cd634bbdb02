use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;

use super::{Endpoint, TransportError};

/// Makes transports. HTTP and stdio have one each; the composer chooses by the kind of the endpoint.
#[async_trait]
pub trait Connect: Send + Sync + Debug {
    /// A transport for one new upstream session. Nothing of MCP was said on it yet.
    ///
    /// # Errors
    /// When the endpoint cannot be reached or must not be.
    async fn connect(&self, endpoint: &Endpoint) -> Result<Arc<dyn Transport>, TransportError>;
}

/// Runs futures that outlive the call that made them. Libraries do not spawn: whoever composes the process implements
/// this with a tracker that ends what it started.
pub trait Spawn: Send + Sync {
    /// Runs `future`; `name` is its class for metrics.
    fn spawn(&self, name: &'static str, future: BoxFuture<'static, ()>);
}

/// A request on its way up.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// The id in the message, unique within the transport. It is the progress token as well.
    pub id: u64,
    /// The complete JSON-RPC message.
    pub message: Bytes,
    /// Whether this is the `initialize` that opens the session.
    pub initialize: bool,
}

/// The answer to a request, as far as it is there.
pub enum Reply {
    /// All of it: one message (2025-03-26: or a batch).
    Whole(Bytes),
    /// Messages that belong to the request, the response among them.
    Stream(Box<dyn Inbound>),
}

impl Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole(bytes) => write!(f, "Whole({} bytes)", bytes.len()),
            Self::Stream(_) => f.write_str("Stream"),
        }
    }
}

/// Messages as they come.
#[async_trait]
pub trait Inbound: Send {
    /// The next message or batch; `None` when the other side has ended the stream. Cancel-safe.
    ///
    /// # Errors
    /// When the stream broke and cannot be resumed.
    async fn next(&mut self) -> Result<Option<Bytes>, TransportError>;

    /// Called after the answer: reads on to the end of what carries the messages, where that lets it be used again.
    async fn drain(&mut self) {}
}

/// One upstream session, whatever carries it. The pool speaks MCP over it; a transport moves messages and knows which
/// belong to which request.
#[async_trait]
pub trait Transport: Send + Sync + Debug {
    /// The stable word for metrics.
    fn name(&self) -> &'static str;

    /// Sends a request. Dropping the future or the reply forgets the request and frees what it held; it does not
    /// cancel it upstream.
    fn request(self: Arc<Self>, outgoing: Outgoing) -> BoxFuture<'static, Result<Reply, TransportError>>;

    /// Sends a notification or a response.
    ///
    /// # Errors
    /// When the other side did not take it.
    async fn send(&self, message: Bytes) -> Result<(), TransportError>;

    /// The stream of messages that belong to no request; `None` when the other side offers none.
    ///
    /// # Errors
    /// When it could not be opened.
    async fn unsolicited(self: Arc<Self>) -> Result<Option<Box<dyn Inbound>>, TransportError>;

    /// Whether the session lives as long as the transport: it is never renewed because of its age, and its unsolicited
    /// messages come without being asked for, so they must be taken at once.
    fn is_durable(&self) -> bool;

    /// Tells the revision that `initialize` agreed on.
    fn negotiated(&self, version: &str);

    /// Whether nothing can be sent any more.
    fn is_closed(&self) -> bool;

    /// Ends the session and everything that it holds. Idempotent; never takes longer than about `within`.
    async fn close(&self, within: Duration);
}
