//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod counted;
pub(crate) mod ledgers;

use std::sync::Arc;

use obol_meter::{Price, Start, Terms};
use obol_model::{
    Clock, ManualClock, ModelCall, NanoUsd, PerMillion, Principal, Rates, RequestId, Revision, TokenPrice,
    UsageKind,
};

pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(ManualClock::new("2026-01-02T03:04:05Z".parse().unwrap()))
}

pub(crate) fn tool(price: u64) -> Start {
    Start {
        workspace_id: "acme".parse().unwrap(),
        principal: Principal::Key("k1".parse().unwrap()),
        revision: Revision { epoch: 1, number: 7 },
        kind: UsageKind::ToolCall { connection: "git".parse().unwrap(), tool: "search".into() },
        price: Price::PerCall(NanoUsd::new(price)),
        request_id: RequestId::new(),
        idempotency: None,
    }
}

pub(crate) fn chat(price: TokenPrice) -> Start {
    Start {
        kind: UsageKind::ChatCompletion(ModelCall {
            model: "fast".parse().unwrap(),
            provider: None,
            upstream_model: None,
        }),
        price: Price::Tokens(price),
        ..tool(0)
    }
}

/// Prices in whole USD per million tokens.
pub(crate) fn price(input: u64, cached: u64, output: u64) -> TokenPrice {
    let usd = |n: u64| PerMillion::new(NanoUsd::new(n * 1_000_000_000));
    TokenPrice {
        base: Rates { cached_input: usd(cached), ..TokenPrice::flat(usd(input), usd(output)).base },
        ..TokenPrice::default()
    }
}

/// Nothing is limited, and nothing set aside.
pub(crate) fn free() -> Terms {
    Terms::default()
}
