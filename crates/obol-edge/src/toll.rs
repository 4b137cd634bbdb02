//! What a call is held to, and how a refusal by the ledger is told (DESIGN §12.1).

use std::time::Duration;

use obol_meter::{Denied, Start, Terms, in_scope};
use obol_model::{ModelName, NanoUsd, UsageKind};

use crate::failure::RETRY_AFTER_S;
use crate::front::Admitted;
use crate::idempotency;

/// Longest wait that is told as `Retry-After`: SDKs sleep for as long as they are told (DESIGN §11.4).
pub(crate) const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// The terms of a call that may cost `worst` and take `tokens`.
pub(crate) fn terms(admitted: &Admitted, model: Option<&ModelName>, worst: NanoUsd, tokens: u64) -> Terms {
    let workspace = &admitted.publication.workspace;
    let (own, limits) = match admitted.identity.key() {
        Some(key) => (key.budgets.as_slice(), key.limits.or(workspace.limits)),
        None => (&[][..], workspace.limits),
    };
    let lines = in_scope(&workspace.budgets, own, &admitted.identity.principal(), model);
    Terms { lines, limits, worst, tokens }
}

/// What is known of a call before it is made.
pub(crate) fn start(admitted: &Admitted, kind: UsageKind, price: obol_meter::Price) -> Start {
    Start {
        request_id: admitted.request_id,
        workspace_id: admitted.identity.workspace_id().clone(),
        principal: admitted.identity.principal(),
        revision: admitted.publication.revision(),
        kind,
        price,
        idempotency: None,
    }
}

/// What a caller is told of a refusal: what is used up, what is left of it, and when that ends.
pub(crate) fn message(denied: &Denied, worst: NanoUsd) -> String {
    match denied {
        Denied::Budget { name, left, held, reset, .. } => {
            let reset = match reset {
                Some(reset) => format!("it resets in {} s", seconds(*reset)),
                None => "it does not reset".to_owned(),
            };
            let held = match held.nanos() {
                0 => String::new(),
                _ => format!(", beside {held} that is set aside for calls under way"),
            };
            format!(
                "the budget `{name}` has {left} left{held}, and this call may cost {worst}; {reset}; a lower \
                 limit on its output makes it cheaper"
            )
        }
        Denied::NeverFits { name, limit, amount } => {
            format!("this call may cost {amount}, more than the whole budget `{name}` of {limit}")
        }
        Denied::TooManyTokens { limit, tokens } => format!(
            "this call may take {tokens} tokens, more than the {limit} that are allowed in a minute; lower `max_tokens`"
        ),
        Denied::Rate { what, left, reset } => format!(
            "the limit of {} in a minute is reached, {left} are left; it resets in {} s",
            what.as_str(),
            seconds(*reset)
        ),
        Denied::Concurrency => "too many calls are under way at once".to_owned(),
        Denied::Repeated(repeated) => idempotency::message(repeated).to_owned(),
        Denied::QueueFull | Denied::StreamFull | Denied::Stopping => {
            "usage cannot be recorded right now".to_owned()
        }
        Denied::Ledger(_) => "what may be spent cannot be told right now".to_owned(),
    }
}

/// After how many seconds a retry makes sense, told only when that is soon.
pub(crate) fn retry_after_s(denied: &Denied) -> Option<u64> {
    let reset = denied.reset().filter(|reset| *reset <= LONGEST_RETRY)?;
    Some(seconds(reset).max(RETRY_AFTER_S))
}

/// For the log of the gateway: what an operator has to mend, not what a caller used up.
pub(crate) fn log(denied: &Denied) {
    match denied {
        Denied::QueueFull | Denied::StreamFull | Denied::Stopping | Denied::Ledger(_) => {
            tracing::warn!(error = %denied, "call refused, it could not be metered");
        }
        _ => tracing::debug!(reason = %denied, "call refused"),
    }
}

/// Rounded up: who comes back a moment too early is refused again.
pub(crate) fn seconds(duration: Duration) -> u64 {
    whole(duration.as_secs_f64().ceil()).max(1)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds, above zero")]
fn whole(seconds: f64) -> u64 {
    seconds as u64
}
