//! JSON-RPC messages as raw text with known edges. Pure: no I/O, no async.

mod message;
mod object;
mod rpc;
mod splice;
pub mod sse;
mod version;

pub use message::{
    Incoming, Message, error_response, notification, parse, raw_error_response, request, response,
};
pub use object::{Object, array, string};
pub use rpc::RpcError;
pub use splice::Splice;
pub use version::ProtocolVersion;

/// Deepest nesting of JSON that is accepted. Far above what MCP needs, far below what troubles a recursive parser on
/// the other side of the gateway.
pub const MAX_DEPTH: usize = 128;

/// A message that breaks JSON, JSON-RPC or the bounds of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// No JSON.
    #[error("the body is no valid JSON: {0}")]
    Json(String),
    /// JSON, but no JSON-RPC 2.0 message.
    #[error("the body is no JSON-RPC 2.0 message: {0}")]
    Envelope(&'static str),
    /// An object has one key twice, so that two readers could see two different requests.
    #[error("the key `{0}` stands twice in one object")]
    DuplicateKey(String),
    /// Nested deeper than [`MAX_DEPTH`].
    #[error("the body is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// A batch with more entries than the bound, or none.
    #[error("a batch has 1 to {max} entries, this one has {found}")]
    BatchSize {
        /// The bound.
        max: usize,
        /// What came.
        found: usize,
    },
    /// A server-sent event larger than the bound.
    #[error("an event is larger than {0} bytes")]
    EventTooLarge(usize),
}

impl WireError {
    /// The JSON-RPC error that answers such a message: `-32700` for what is no JSON, else `-32600`.
    pub fn rpc(&self) -> RpcError {
        let code =
            if matches!(self, Self::Json(_)) { RpcError::PARSE_ERROR } else { RpcError::INVALID_REQUEST };
        RpcError::new(code, self.to_string())
    }
}
