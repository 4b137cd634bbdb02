use bytes::Bytes;
use jiff::Timestamp;
use obol_model::{Kind, ModelName};
use serde::Serialize;

/// An error object of the OpenAI dialect. `message` is shown to the caller as it is.
pub fn openai_error(kind: Kind, code: &str, message: &str, param: Option<&str>) -> Bytes {
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
        Kind::InvalidRequest | Kind::NotFound | Kind::Conflict | Kind::TooLarge => "invalid_request_error",
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
pub fn models_list<'a>(names: impl IntoIterator<Item = &'a ModelName>, created: Timestamp) -> Bytes {
    #[derive(Serialize)]
    struct List<'a> {
        object: &'static str,
        data: Vec<Entry<'a>>,
    }
    #[derive(Serialize)]
    struct Entry<'a> {
        id: &'a str,
        object: &'static str,
        created: i64,
        owned_by: &'static str,
    }
    let created = created.as_second();
    let data = names
        .into_iter()
        .map(|name| Entry { id: name.as_str(), object: "model", created, owned_by: "obol" })
        .collect();
    to_bytes(&List { object: "list", data })
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
            models_list(&names, Timestamp::from_second(7).unwrap()),
            r#"{"object":"list","data":[{"id":"b/x","object":"model","created":7,"owned_by":"obol"},{"id":"a","object":"model","created":7,"owned_by":"obol"}]}"#
        );
        assert_eq!(models_list([], Timestamp::UNIX_EPOCH), r#"{"object":"list","data":[]}"#);
    }
}
