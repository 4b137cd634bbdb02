use bytes::Bytes;
use jiff::Timestamp;
use obol_model::{Kind, ModelName};
use serde::Serialize;

use crate::endpoint::Api;

/// An error object of the OpenAI dialect. `message` is shown to the caller as it is.
pub(crate) fn openai_error(kind: Kind, code: &str, message: &str, param: Option<&str>) -> Bytes {
    #[derive(Serialize)]
    struct Body<'a> {
        error: Inner<'a>,
    }
    #[derive(Serialize)]
    struct Inner<'a> {
        message: &'a str,
        r#type: &'static str,
        param: Option<&'a str>,
        code: &'a str,
    }
    to_bytes(&Body { error: Inner { message, r#type: error_type(kind), param, code } })
}

fn error_type(kind: Kind) -> &'static str {
    match kind {
        Kind::InvalidRequest | Kind::NotFound | Kind::Conflict | Kind::Unprocessable | Kind::TooLarge => {
            "invalid_request_error"
        }
        Kind::Unauthenticated => "authentication_error",
        Kind::Forbidden => "permission_error",
        Kind::RateLimited => "rate_limit_error",
        Kind::Unavailable
        | Kind::Upstream
        | Kind::Timeout
        | Kind::OutcomeUnknown
        | Kind::Stopping
        | Kind::Internal => "server_error",
    }
}

/// The body of `GET /v1/models`, in the order given.
pub fn models_list(api: Api, names: &[&ModelName], created: Timestamp) -> Bytes {
    #[derive(Serialize)]
    struct OpenAi<'a> {
        object: &'static str,
        data: Vec<Entry<'a>>,
    }
    /// All of them are one page.
    #[derive(Serialize)]
    struct Anthropic<'a> {
        data: Vec<Entry<'a>>,
        has_more: bool,
        first_id: Option<&'a ModelName>,
        last_id: Option<&'a ModelName>,
    }
    let data = names.iter().map(|name| Entry::of(api, name, created)).collect();
    match api {
        Api::OpenAi => to_bytes(&OpenAi { object: "list", data }),
        Api::Anthropic => {
            let (first_id, last_id) = (names.first().copied(), names.last().copied());
            to_bytes(&Anthropic { data, has_more: false, first_id, last_id })
        }
    }
}

/// The body of `GET /v1/models/{id}`.
pub fn model_object(api: Api, name: &ModelName, created: Timestamp) -> Bytes {
    to_bytes(&Entry::of(api, name, created))
}

#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    OpenAi { id: &'a ModelName, object: &'static str, created: i64, owned_by: &'static str },
    Anthropic { r#type: &'static str, id: &'a ModelName, display_name: &'a ModelName, created_at: Timestamp },
}

impl<'a> Entry<'a> {
    fn of(api: Api, id: &'a ModelName, created: Timestamp) -> Self {
        match api {
            Api::OpenAi => {
                Self::OpenAi { id, object: "model", created: created.as_second(), owned_by: "obol" }
            }
            Api::Anthropic => Self::Anthropic { r#type: "model", id, display_name: id, created_at: created },
        }
    }
}

/// Structs of strings and numbers cannot fail to be written; an empty body is the harmless answer if they do.
fn to_bytes(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_shape_that_sdks_read() {
        let body = openai_error(Kind::NotFound, "model_not_found", "no model `x\"`", Some("model"));
        assert_eq!(
            body,
            r#"{"error":{"message":"no model `x\"`","type":"invalid_request_error","param":"model","code":"model_not_found"}}"#
        );
    }

    #[test]
    fn models_are_listed_as_sdks_read_them() {
        let names: Vec<ModelName> = vec!["b/x".parse().unwrap(), "a".parse().unwrap()];
        assert_eq!(
            models_list(Api::OpenAi, &names.iter().collect::<Vec<_>>(), Timestamp::from_second(7).unwrap()),
            r#"{"object":"list","data":[{"id":"b/x","object":"model","created":7,"owned_by":"obol"},{"id":"a","object":"model","created":7,"owned_by":"obol"}]}"#
        );
        assert_eq!(models_list(Api::OpenAi, &[], Timestamp::UNIX_EPOCH), r#"{"object":"list","data":[]}"#);
    }
}
