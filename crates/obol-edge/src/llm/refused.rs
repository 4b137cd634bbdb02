use std::sync::Arc;

use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use obol_llm::{Api, Endpoint, LlmError, LlmRequest, Route};
use obol_meter::Denied;
use obol_model::{Kind, ModelName, NanoUsd, TokenPrice};

use super::limited::Limited;
use crate::failure::{self, RETRY_AFTER_S, Refusal};
use crate::front::Admitted;
use crate::toll;

/// A refusal, to be told in the dialect of whoever asks (DESIGN §11.4).
#[derive(Debug)]
pub(super) struct Refused {
    kind: Kind,
    code: &'static str,
    message: String,
    param: Option<String>,
    retry_after_s: Option<u64>,
    /// Whether an SDK that tries again by itself would only waste its time.
    is_final: bool,
    challenge: Option<String>,
    limited: Option<Box<Limited>>,
}

impl Refused {
    pub(super) fn new(kind: Kind, code: &'static str, message: impl Into<String>) -> Self {
        let retry_after_s = matches!(kind, Kind::Unavailable | Kind::Stopping).then_some(RETRY_AFTER_S);
        Self {
            kind,
            code,
            message: message.into(),
            param: None,
            retry_after_s,
            is_final: false,
            challenge: None,
            limited: None,
        }
    }

    pub(super) fn about(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    /// `worst` is what the call could have cost.
    pub(super) fn denied(admitted: &Admitted, denied: &Denied, worst: NanoUsd) -> Self {
        toll::log(denied);
        let retry_after_s = toll::retry_after_s(denied);
        Self {
            retry_after_s,
            is_final: retry_after_s.is_none(),
            limited: Limited::refused(admitted, denied).map(Box::new),
            ..Self::new(denied.kind(), denied.code(), toll::message(denied, worst))
        }
    }

    pub(super) fn respond(self, api: Api) -> Response {
        let status = match (api, self.code) {
            // A budget is no rate to the SDKs of this dialect (DESIGN §11.4).
            (Api::Anthropic, "budget_exceeded") => StatusCode::PAYMENT_REQUIRED,
            _ => failure::status(self.kind),
        };
        let mut head = Response::builder().status(status);
        if let Some(seconds) = self.retry_after_s {
            head = head.header(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.is_final {
            head = head.header("x-should-retry", HeaderValue::from_static("false"));
        }
        if let Some(challenge) = self.challenge {
            head = head.header(header::WWW_AUTHENTICATE, challenge);
        }
        let body = api.error(self.kind, self.code, &self.message, self.param.as_deref());
        let mut response = failure::bytes_response(head, body);
        if let Some(limited) = self.limited {
            limited.put(response.headers_mut());
        }
        response
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self {
            retry_after_s: refusal.retry_after_s,
            challenge: refusal.challenge,
            ..Self::new(refusal.kind, refusal.code, refusal.message)
        }
    }
}

impl From<LlmError> for Refused {
    fn from(e: LlmError) -> Self {
        let retry_after_s = e.retry_after().map(toll::seconds);
        Self {
            param: e.param().map(str::to_owned),
            retry_after_s,
            is_final: e.is_final(),
            ..Self::new(e.kind(), e.code(), e.to_string())
        }
    }
}

/// Refuses what may cost more than anything that is set aside for it, where a budget is to hold. A target that costs
/// nothing may be asked for it; one that a fallback may reach counts as well.
pub(super) fn unless_bounded(
    request: &LlmRequest,
    admitted: &Admitted,
    model: &ModelName,
    routes: &[Arc<Route>],
) -> Result<(), Refused> {
    let prices = routes.iter().map(|route| &route.target.price);
    let budgets = || !toll::terms(admitted, Some(model), NanoUsd::ZERO, 0).lines.is_empty();
    unbounded(request, prices, budgets).map_or(Ok(()), |member| Err(without_bound(member)))
}

/// The member that a call may not have at these prices, if there are budgets.
fn unbounded<'a>(
    request: &LlmRequest,
    mut prices: impl Iterator<Item = &'a TokenPrice>,
    budgets: impl FnOnce() -> bool,
) -> Option<&'static str> {
    let member = request.unbounded()?;
    // To count costs nothing.
    let costs = request.endpoint() != Endpoint::CountTokens && prices.any(|price| !price.is_free());
    (costs && budgets()).then_some(member)
}

fn without_bound(member: &str) -> Refused {
    let message = format!(
        "`{member}` cannot be used as it is here while a budget applies: what it costs cannot be bounded before it is used"
    );
    Refused::new(Kind::InvalidRequest, "unsupported_parameter", message).about(member)
}

#[cfg(test)]
mod tests {
    use obol_model::PerMillion;

    use super::*;

    #[test]
    fn what_has_no_bound_is_refused_where_a_budget_is_to_hold() {
        let request = |endpoint, member: &str| {
            let body = format!(r#"{{"model":"m","max_tokens":5,{member}}}"#);
            LlmRequest::parse(endpoint, body.into()).unwrap()
        };
        let search = r#""tools":[{"type":"web_search_20250305"}]"#;
        let (free, dear) =
            (TokenPrice::default(), TokenPrice { per_call: NanoUsd::new(1), ..TokenPrice::default() });
        let cents: PerMillion = serde_json::from_str("10000000").unwrap();
        let metered = TokenPrice::flat(cents, cents);
        for (endpoint, member, prices, budgets, expected) in [
            (Endpoint::Messages, search, [&dear, &dear], true, Some("tools")),
            (Endpoint::Messages, search, [&metered, &free], true, Some("tools")),
            // A fallback may be reached.
            (Endpoint::Messages, search, [&free, &dear], true, Some("tools")),
            (Endpoint::Messages, search, [&free, &free], true, None),
            (Endpoint::Messages, search, [&dear, &dear], false, None),
            (Endpoint::CountTokens, search, [&dear, &dear], true, None),
            (Endpoint::Messages, r#""tools":[{"type":"custom"}]"#, [&dear, &dear], true, None),
        ] {
            let got = unbounded(&request(endpoint, member), prices.into_iter(), || budgets);
            assert_eq!(got, expected, "{endpoint:?} {member} {prices:?} {budgets}");
        }
        let refused = without_bound("tools");
        assert_eq!(
            (refused.kind, refused.code, refused.param.as_deref()),
            (Kind::InvalidRequest, "unsupported_parameter", Some("tools"))
        );
        assert_eq!(refused.respond(Api::OpenAi).status(), StatusCode::BAD_REQUEST);
    }
}
