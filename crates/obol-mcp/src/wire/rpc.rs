use serde::Serialize;
use serde_json::value::RawValue;

/// A JSON-RPC error object.
#[derive(Debug, Clone, Serialize)]
pub struct RpcError {
    /// Codes of JSON-RPC and MCP where they fit; Obol's own lie outside −32768…−32000 (DESIGN §9.6).
    pub code: i64,
    /// One sentence for the caller.
    pub message: String,
    /// Details for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Box<RawValue>>,
}

impl RpcError {
    /// No JSON.
    pub const PARSE_ERROR: i64 = -32700;
    /// No JSON-RPC request, or one that breaks a rule of the transport.
    pub const INVALID_REQUEST: i64 = -32600;
    /// A method that is unknown here.
    pub const METHOD_NOT_FOUND: i64 = -32601;
    /// Params that do not fit, an unknown tool or prompt.
    pub const INVALID_PARAMS: i64 = -32602;
    /// A resource that does not exist (legacy era only).
    pub const RESOURCE_NOT_FOUND: i64 = -32002;

    /// An error without data.
    pub fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), data: None }
    }

    /// The same error with `data`; data that cannot be written as JSON is left out.
    #[must_use]
    pub fn with_data(mut self, data: &impl Serialize) -> Self {
        self.data = serde_json::value::to_raw_value(data).ok();
        self
    }
}
