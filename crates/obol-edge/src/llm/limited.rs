use http::{HeaderMap, HeaderValue};
use obol_meter::{Denied, Rate, Standing};
use obol_model::{Limits, NanoUsd};

use crate::front::Admitted;
use crate::toll;

/// The headers by which SDKs know how much they may still ask for.
#[derive(Debug)]
pub(super) struct Limited {
    limits: Limits,
    standing: Standing,
}

impl Limited {
    pub(super) fn of(admitted: &Admitted, standing: Standing) -> Self {
        let limits = toll::terms(admitted, None, NanoUsd::ZERO, 0).limits;
        Self { limits, standing }
    }

    /// The same for a caller that asked for too much.
    pub(super) fn refused(admitted: &Admitted, denied: &Denied) -> Option<Self> {
        let Denied::Rate { what, left, reset } = *denied else { return None };
        let (requests_left, tokens_left) = match what {
            Rate::Requests => (Some(left), None),
            Rate::Tokens => (None, Some(left)),
        };
        Some(Self::of(admitted, Standing { requests_left, tokens_left, reset }))
    }

    pub(super) fn put(&self, headers: &mut HeaderMap) {
        let Self { limits, standing } = self;
        let reset = format!("{}s", toll::seconds(standing.reset));
        for (names, limit, left) in [
            (REQUESTS, limits.requests_per_minute, standing.requests_left),
            (TOKENS, limits.tokens_per_minute, standing.tokens_left),
        ] {
            let (Some(limit), Some(left)) = (limit, left) else { continue };
            let [limit_name, left_name, reset_name] = names;
            headers.insert(limit_name, HeaderValue::from(limit));
            headers.insert(left_name, HeaderValue::from(left));
            if let Ok(value) = HeaderValue::from_str(&reset) {
                headers.insert(reset_name, value);
            }
        }
    }
}

const REQUESTS: [&str; 3] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const TOKENS: [&str; 3] =
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];
