use std::sync::Arc;

use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use obol_llm::{Api, Endpoint, LlmError, LlmRequest, Route};
use obol_meter::Denied;
use obol_model::{Kind, ModelName, NanoUsd};

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
    let Some(member) = request.unbounded() else { return Ok(()) };
    let is_free = request.endpoint() == Endpoint::CountTokens
        || routes.iter().all(|route| route.target.price.is_free());
    if is_free || toll::terms(admitted, Some(model), NanoUsd::ZERO, 0).lines.is_empty() {
        return Ok(());
    }
    let message = format!(
        "`{member}` cannot be used as it is here while a budget applies: what it costs cannot be bounded before it is used"
    );
    Err(Refused::new(Kind::InvalidRequest, "unsupported_parameter", message).about(member))
}
