//! What goes wrong in translation, and the error objects of both dialects.

use std::borrow::Cow;

use bytes::Bytes;
use http::StatusCode;
use obol_model::Kind;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Dialect;
use super::object::decode;
use super::wire;

/// What stands in for a message that an error does not have.
const NO_MESSAGE: &str = "the provider reported an error";

/// Why a request cannot be put into the other dialect. All of them are the caller's to mend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The body is no JSON that can be read.
    #[error("the body must be a JSON object: {why}")]
    Json {
        /// What is wrong.
        why: String,
    },
    /// A member that has to be there is not.
    #[error("`{field}` is missing")]
    Missing {
        /// Which.
        field: String,
    },
    /// A member is of the wrong type.
    #[error("`{field}` must be {expected}")]
    Type {
        /// Which.
        field: String,
        /// What it has to be.
        expected: &'static str,
    },
    /// A member stands there twice.
    #[error("`{field}` stands there twice")]
    Twice {
        /// Which.
        field: String,
    },
    /// The other dialect cannot say it.
    #[error("`{field}` cannot be carried to {}: {why}", target.name())]
    Unsupported {
        /// What.
        field: String,
        /// The dialect of the model that was asked for.
        target: Dialect,
        /// Why not, and what would be possible.
        why: Cow<'static, str>,
    },
}

impl RequestError {
    /// The kind of the failure.
    pub fn kind(&self) -> Kind {
        Kind::InvalidRequest
    }

    /// The stable word for error bodies.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Json { .. } => "invalid_json",
            Self::Missing { .. } => "missing_required_parameter",
            Self::Type { .. } => "invalid_type",
            Self::Twice { .. } => "duplicate_parameter",
            Self::Unsupported { .. } => "unsupported_parameter",
        }
    }

    /// The member that is wrong, as a path from the body.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Json { .. } => None,
            Self::Missing { field }
            | Self::Type { field, .. }
            | Self::Twice { field }
            | Self::Unsupported { field, .. } => Some(field),
        }
    }
}

/// An upstream's answer that cannot be put into the other dialect: what it sent instead of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the provider sent {0}")]
pub struct AnswerError(pub &'static str);

/// What both error objects say.
struct Parts<'a> {
    /// OpenAI's or Anthropic's word.
    r#type: Option<Cow<'a, str>>,
    message: Cow<'a, str>,
    code: Option<Cow<'a, str>>,
    /// A status that the object names.
    status: Option<u16>,
}

impl<'a> Parts<'a> {
    /// Reads an error object, or whatever stands in its place.
    fn of(error: Option<&'a RawValue>) -> Self {
        #[derive(Deserialize)]
        struct Raw<'a> {
            #[serde(borrow, default)]
            r#type: Option<&'a RawValue>,
            #[serde(borrow, default)]
            message: Option<&'a RawValue>,
            #[serde(borrow, default)]
            code: Option<&'a RawValue>,
        }
        let nothing = Self { r#type: None, message: NO_MESSAGE.into(), code: None, status: None };
        let Some(error) = error else { return nothing };
        let Ok(raw) = serde_json::from_str::<Raw<'_>>(error.get()) else {
            return Self { message: decode(error).unwrap_or(NO_MESSAGE.into()), ..nothing };
        };
        Self {
            r#type: raw.r#type.and_then(decode),
            message: raw.message.and_then(decode).unwrap_or(NO_MESSAGE.into()),
            code: raw.code.and_then(decode),
            status: raw.code.and_then(|code| code.get().parse().ok()),
        }
    }

    /// Reads the body of an error of either dialect.
    fn of_body(body: &'a [u8]) -> Self {
        #[derive(Deserialize)]
        struct Raw<'a> {
            #[serde(borrow, default)]
            error: Option<&'a RawValue>,
        }
        let raw = serde_json::from_slice::<Raw<'_>>(body).ok();
        Self::of(raw.and_then(|raw| raw.error))
    }
}

/// An error of the messages dialect, from the body of one of the chat dialect. `status` is the one that it came with;
/// inside of a stream there is none.
pub fn error_to_messages(status: Option<StatusCode>, body: &[u8]) -> Bytes {
    parts_to_messages(status, &Parts::of_body(body))
}

/// Whether the body of an error has the object that clients of both dialects read: with a message, in words.
pub fn has_error_object(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow, default)]
        error: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Error<'a> {
        #[serde(borrow, default)]
        message: Option<&'a RawValue>,
    }
    fn object<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Option<T> {
        json.trim_ascii_start().starts_with(b"{").then(|| serde_json::from_slice(json).ok()).flatten()
    }
    let error = object::<Body<'_>>(body).and_then(|body| body.error);
    let error = error.and_then(|error| object::<Error<'_>>(error.get().as_bytes()));
    error.and_then(|error| error.message).is_some_and(|message| message.get().starts_with('"'))
}

pub(super) fn raw_to_messages(error: Option<&RawValue>) -> Bytes {
    parts_to_messages(None, &Parts::of(error))
}

fn parts_to_messages(status: Option<StatusCode>, parts: &Parts<'_>) -> Bytes {
    let words = [parts.code.as_deref(), parts.r#type.as_deref()];
    let r#type = words
        .into_iter()
        .flatten()
        .find_map(messages_type)
        .or_else(|| Some(type_of_status(status.map(|status| status.as_u16()).or(parts.status)?)))
        .unwrap_or("api_error");
    messages_body(r#type, &parts.message, parts.code.as_deref())
}

/// An error of the chat dialect, from the body of one of the messages dialect. `status` is the one that it came with;
/// inside of a stream there is none.
pub fn error_to_chat(status: Option<StatusCode>, body: &[u8]) -> Bytes {
    parts_to_chat(status, &Parts::of_body(body))
}

pub(super) fn raw_to_chat(error: Option<&RawValue>) -> Bytes {
    parts_to_chat(None, &Parts::of(error))
}

fn parts_to_chat(status: Option<StatusCode>, parts: &Parts<'_>) -> Bytes {
    #[derive(Serialize)]
    struct Body<'a> {
        error: Inner<'a>,
    }
    #[derive(Serialize)]
    struct Inner<'a> {
        message: &'a str,
        r#type: &'a str,
        param: Option<&'a str>,
        code: Option<&'a str>,
    }
    let word = parts.r#type.as_deref();
    let of_status = || status.map_or("api_error", |status| type_of_status(status.as_u16()));
    // What was the type is the code now: there are more words in it than the chat dialect has types.
    let code = parts.code.as_deref().or(word);
    let r#type = chat_type(word.unwrap_or_else(of_status));
    wire::to_bytes(&Body { error: Inner { message: &parts.message, r#type, param: None, code } })
}

/// An error of ours in the messages dialect. `message` is shown to the caller as it is.
pub fn messages_error(kind: Kind, code: &str, message: &str) -> Bytes {
    let r#type = match kind {
        _ if code == "budget_exceeded" => "billing_error",
        Kind::InvalidRequest | Kind::Conflict | Kind::Unprocessable => "invalid_request_error",
        Kind::Unauthenticated => "authentication_error",
        Kind::Forbidden => "permission_error",
        Kind::NotFound => "not_found_error",
        Kind::TooLarge => "request_too_large",
        Kind::RateLimited => "rate_limit_error",
        Kind::Timeout => "timeout_error",
        // A client that sees it waits and tries again.
        Kind::Unavailable | Kind::Stopping => "overloaded_error",
        Kind::Upstream | Kind::OutcomeUnknown | Kind::Internal => "api_error",
    };
    messages_body(r#type, message, Some(code))
}

/// The event that tells of an error inside of a stream; `body` is an error object of that dialect.
pub fn error_frame(dialect: Dialect, body: &[u8]) -> Bytes {
    let name = match dialect {
        Dialect::Chat => None,
        Dialect::Messages => Some("error"),
    };
    let mut frame = Vec::with_capacity(body.len() + 24);
    wire::frame(&mut frame, name, |out| out.extend_from_slice(body));
    frame.into()
}

/// `code` is a member of ours: the documented ones cannot say which rule was broken.
fn messages_body(r#type: &str, message: &str, code: Option<&str>) -> Bytes {
    #[derive(Serialize)]
    struct Body<'a> {
        r#type: &'static str,
        error: Inner<'a>,
    }
    #[derive(Serialize)]
    struct Inner<'a> {
        r#type: &'a str,
        message: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<&'a str>,
    }
    wire::to_bytes(&Body { r#type: "error", error: Inner { r#type, message, code } })
}

/// Anthropic's type for a word that OpenAI and compatible providers use as type or code.
fn messages_type(word: &str) -> Option<&'static str> {
    Some(match word {
        "invalid_request_error" | "context_length_exceeded" => "invalid_request_error",
        "authentication_error" | "invalid_api_key" => "authentication_error",
        "permission_error" | "permission_denied" => "permission_error",
        "not_found_error" | "model_not_found" => "not_found_error",
        "rate_limit_error" | "rate_limit_exceeded" => "rate_limit_error",
        "insufficient_quota" | "billing_error" => "billing_error",
        "overloaded_error" | "overloaded" => "overloaded_error",
        "timeout_error" | "timeout" => "timeout_error",
        "server_error" | "api_error" => "api_error",
        _ => return None,
    })
}

/// OpenAI's type for one of Anthropic's; other words stay.
fn chat_type(word: &str) -> &str {
    match word {
        "not_found_error" | "request_too_large" | "conflict_error" => "invalid_request_error",
        "billing_error" => "insufficient_quota",
        "api_error" | "overloaded_error" | "timeout_error" => "server_error",
        other => other,
    }
}

/// The type that Anthropic documents for a status.
fn type_of_status(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        409 => "conflict_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_object_has_a_message_in_words() {
        for (body, expected) in [
            (r#"{"error":{"message":"x"}}"#, true),
            (r#" {"type":"error","error":{"type":"api_error","message":""}}"#, true),
            (r#"{"error":{"message":null}}"#, false),
            (r#"{"error":{}}"#, false),
            (r#"{"error":"x"}"#, false),
            (r#"{"error":["x"]}"#, false),
            (r#"{"detail":[{"msg":"x"}]}"#, false),
            (r#"{"object":"error","message":"x"}"#, false),
            (r#"[{"message":"x"}]"#, false),
            (r#"{"error":{"message":"x"}"#, false),
            ("", false),
        ] {
            assert_eq!(has_error_object(body.as_bytes()), expected, "{body}");
        }
    }
}
