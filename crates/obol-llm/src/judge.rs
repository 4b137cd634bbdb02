use std::time::Duration;

use http::StatusCode;
use obol_model::ProviderName;

use crate::error::LlmError;

/// What a status means for the request.
pub(crate) enum Judgement {
    /// There may be an answer in the body.
    Answer,
    /// The caller has to see it: it would be the same everywhere, or is theirs to mend.
    Refusal,
    Failure(LlmError),
}

pub(crate) fn judge(status: StatusCode, provider: &ProviderName, retry_after: Option<Duration>) -> Judgement {
    let provider = provider.clone();
    match status.as_u16() {
        200..=299 => Judgement::Answer,
        // Our account: the caller's own key is fine, and a status that says otherwise would mislead (402 as well).
        401..=403 => Judgement::Failure(LlmError::CredentialRefused { provider }),
        408 => Judgement::Failure(LlmError::Timeout { provider }),
        429 => Judgement::Failure(LlmError::RateLimited { provider, retry_after }),
        400..=499 => Judgement::Refusal,
        500.. => Judgement::Failure(LlmError::Failed { provider, status: status.as_u16() }),
        _ => Judgement::Failure(LlmError::BadAnswer { provider, what: "a redirect" }),
    }
}

/// What an error object means that came with the status of a success: it is judged by the status that it names.
pub(crate) fn judge_error(body: &[u8], provider: &ProviderName) -> (StatusCode, Judgement) {
    let status = named_status(body).unwrap_or(StatusCode::BAD_GATEWAY);
    (status, judge(status, provider, None))
}

/// Whether the body of a refusal may be shown: it says what the caller's own request lacks. Other refusals tell of
/// our account (a model that it has not, say).
pub(crate) fn is_for_the_caller(status: StatusCode) -> bool {
    matches!(status.as_u16(), 400 | 413 | 422)
}

/// The status that an error object names, by number or by one of the usual words.
fn named_status(body: &[u8]) -> Option<StatusCode> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    // Some wrap it into an array; older servers have its members at the top.
    let body = body.get(0).unwrap_or(&body);
    let of_choice = || body.pointer("/choices/0/error");
    let error = body.get("error").filter(|error| !error.is_null()).or_else(of_choice).unwrap_or(body);
    let members = || ["code", "status", "type"].into_iter().filter_map(|name| error.get(name));
    let number = members().find_map(|member| {
        let number = member.as_u64().or_else(|| member.as_str()?.parse().ok())?;
        StatusCode::from_u16(u16::try_from(number).ok()?).ok().filter(|s| s.as_u16() >= 400)
    });
    number.or_else(|| {
        members().filter_map(serde_json::Value::as_str).find_map(|word| match word {
            "rate_limit_exceeded" | "rate_limit_error" | "insufficient_quota" | "billing_error" => {
                Some(StatusCode::TOO_MANY_REQUESTS)
            }
            "overloaded_error" | "overloaded" => Some(StatusCode::SERVICE_UNAVAILABLE),
            "timeout_error" | "timeout" => Some(StatusCode::REQUEST_TIMEOUT),
            "invalid_api_key" | "authentication_error" | "permission_error" => Some(StatusCode::UNAUTHORIZED),
            "invalid_request_error" | "context_length_exceeded" | "BadRequestError" => {
                Some(StatusCode::BAD_REQUEST)
            }
            _ => None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_their_status_in_many_ways() {
        for (body, expected) in [
            (r#"{"error":{"code":429,"type":"invalid_request_error"}}"#, Some(429)),
            (r#"{"error":{"code":"context_length_exceeded"}}"#, Some(400)),
            (r#"{"error":{"message":"x"},"code":400}"#, None),
            (r#"{"error":"x","code":400}"#, None),
            (r#"{"error":null,"code":"400"}"#, Some(400)),
            (
                r#"{"object":"error","message":"x","type":"BadRequestError","param":null,"code":400}"#,
                Some(400),
            ),
            (r#"{"object":"error","type":"BadRequestError"}"#, Some(400)),
            (r#"{"type":"error","code":"rate_limit_exceeded"}"#, Some(429)),
            (r#"[{"error":{"code":503}}]"#, Some(503)),
            (r#"{"choices":[{"error":{"code":502}}]}"#, Some(502)),
            (r#"{"object":"error","code":200}"#, None),
            (r#"{"detail":"x"}"#, None),
            ("no json", None),
        ] {
            assert_eq!(named_status(body.as_bytes()).map(|status| status.as_u16()), expected, "{body}");
        }
    }
}
