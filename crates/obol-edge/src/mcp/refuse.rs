//! Refusals in JSON-RPC (DESIGN §9.6 "Refusals").

use axum::response::Response;
use obol_mcp::pool::CallError;
use obol_mcp::wire::{self, RpcError};
use obol_meter::Denied;
use obol_model::{Kind, NanoUsd, RequestId};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::failure::{self, Refusal};
use crate::toll;

/// Our own codes are the HTTP status that fits, below −31000: outside −32768…−32000, which JSON-RPC and MCP keep.
pub(super) fn code(kind: Kind) -> i64 {
    if kind == Kind::OutcomeUnknown {
        // Distinct from any other upstream failure: a client must not repeat it blindly.
        return -31_520;
    }
    -31_000 - i64::from(failure::status(kind).as_u16())
}

#[derive(Serialize)]
struct Data<'a> {
    code: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

/// A refusal of one request, as its JSON-RPC error.
pub(super) fn rpc(kind: Kind, word: &str, message: impl Into<String>, id: Option<RequestId>) -> RpcError {
    let retry_after_s = kind.is_retryable().then_some(failure::RETRY_AFTER_S);
    RpcError::new(code(kind), message).with_data(&Data {
        code: word,
        retry_after_s,
        request_id: id.map(|id| id.to_string()),
    })
}

/// Why the ledger does not admit a call that may cost `worst`.
pub(super) fn denied(denied: &Denied, worst: NanoUsd, id: RequestId) -> RpcError {
    toll::log(denied);
    RpcError::new(code(denied.kind()), toll::message(denied, worst)).with_data(&Data {
        code: denied.code(),
        retry_after_s: denied.reset().map(toll::seconds),
        request_id: Some(id.to_string()),
    })
}

/// Why an upstream gave no answer.
pub(super) fn upstream(error: &CallError, connection: &str, id: RequestId) -> RpcError {
    let retry_after_s = match error {
        CallError::Unavailable { retry_after: Some(after), .. } => Some(after.as_secs().max(1)),
        CallError::Full | CallError::Stopping => Some(failure::RETRY_AFTER_S),
        _ => None,
    };
    RpcError::new(code(error.kind()), format!("connection `{connection}`: {error}")).with_data(&Data {
        code: error.as_str(),
        retry_after_s,
        request_id: Some(id.to_string()),
    })
}

/// An unknown tool and a denied one have one answer (DESIGN §8.4; server/tools, "Error Handling").
pub(super) fn unknown_tool(name: &str) -> RpcError {
    RpcError::new(RpcError::INVALID_PARAMS, format!("Unknown tool: {}", short(name)))
}

/// An unknown prompt and a denied one have one answer.
pub(super) fn unknown_prompt(name: &str) -> RpcError {
    RpcError::new(RpcError::INVALID_PARAMS, format!("Unknown prompt: {}", short(name)))
}

/// An unknown resource and a denied one have one answer (server/resources, "Error Handling").
pub(super) fn unknown_resource(uri: &str) -> RpcError {
    RpcError::new(RpcError::RESOURCE_NOT_FOUND, "Resource not found")
        .with_data(&serde_json::json!({ "uri": short(uri) }))
}

/// Params that do not fit their method.
pub(super) fn params(message: impl Into<String>) -> RpcError {
    RpcError::new(RpcError::INVALID_PARAMS, message)
}

fn short(text: &str) -> String {
    text.chars().take(200).collect()
}

/// A refusal that is an HTTP error, with a JSON-RPC body for clients that read it.
pub(super) fn http(refusal: &Refusal, id: Option<&RawValue>) -> Response {
    let error = RpcError::new(code(refusal.kind), refusal.message.as_str()).with_data(&Data {
        code: refusal.code,
        retry_after_s: refusal.retry_after_s,
        request_id: None,
    });
    failure::bytes_response(refusal.head(), wire::error_response(id, &error))
}

/// A malformed message: HTTP 400 with the JSON-RPC error that says what is wrong.
pub(super) fn malformed(error: &RpcError, id: Option<&RawValue>) -> Response {
    let head = Response::builder().status(http::StatusCode::BAD_REQUEST);
    failure::bytes_response(head, wire::error_response(id, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_codes_lie_outside_the_reserved_range() {
        for kind in [
            Kind::InvalidRequest,
            Kind::Unauthenticated,
            Kind::Forbidden,
            Kind::NotFound,
            Kind::Conflict,
            Kind::Unprocessable,
            Kind::TooLarge,
            Kind::RateLimited,
            Kind::Unavailable,
            Kind::Upstream,
            Kind::Timeout,
            Kind::OutcomeUnknown,
            Kind::Stopping,
            Kind::Internal,
        ] {
            assert!(!(-32_768..=-32_000).contains(&code(kind)), "{kind}");
        }
    }
}
