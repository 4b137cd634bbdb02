//! Errors in the words of the real APIs.

use http::StatusCode;
use serde_json::{Value, json};

/// Why a request is not served.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

pub(super) type Checked<T> = Result<T, Refusal>;

impl Refusal {
    pub(super) fn new(status: u16, message: impl Into<String>) -> Self {
        let status = status.try_into().expect("an HTTP status");
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A 400.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    pub(super) fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub(super) fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    // ---- what OpenAI refuses ----

    pub(super) fn unknown_parameter(name: &str) -> Self {
        Self::bad(format!("Unknown parameter: '{name}'.")).param(name).code("unknown_parameter")
    }

    pub(super) fn missing_parameter(name: &str) -> Self {
        Self::bad(format!("Missing required parameter: '{name}'."))
            .param(name)
            .code("missing_required_parameter")
    }

    pub(super) fn invalid_type(name: &str, expected: &str) -> Self {
        Self::bad(format!("Invalid type for '{name}': expected {expected}.")).param(name).code("invalid_type")
    }

    pub(super) fn invalid_value(name: &str, found: &str) -> Self {
        Self::bad(format!("Invalid value: '{found}'.")).param(name).code("invalid_value")
    }

    pub(super) fn unknown_model(model: &str) -> Self {
        Self::new(404, format!("The model `{model}` does not exist or you do not have access to it."))
            .code("model_not_found")
    }

    pub(super) fn openai(&self) -> Value {
        let kind = match self.status.as_u16() {
            429 => "requests",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }

    pub(super) fn anthropic(&self, request_id: &str) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            402 => "billing_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            504 => "timeout_error",
            529 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id})
    }
}
