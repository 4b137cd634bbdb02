//! Targets that fail are left alone for a while (DESIGN §11.2).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::error::LlmError;
use crate::route::Route;

/// Failures in a row after which a target rests.
const PATIENCE: u32 = 5;
/// The first rest; each further failure doubles it.
const FIRST_REST: Duration = Duration::from_secs(2);
const LONGEST_REST: Duration = Duration::from_mins(1);
/// More targets than this are not remembered: those that do not rest are forgotten first.
const MOST_TARGETS: usize = 10_000;

/// How the targets of all workspaces are, as far as this replica knows. Each replica finds out for itself: what one of
/// them cannot reach another may.
#[derive(Debug, Default)]
pub(crate) struct Breakers(Mutex<HashMap<Arc<str>, Health>>);

#[derive(Debug, Clone, Copy)]
struct Health {
    failures: u32,
    rests_until: Option<Instant>,
    /// It rested because the provider asked for it.
    asked: bool,
}

impl Breakers {
    /// Whether the target may be called now.
    pub(crate) fn allow(&self, route: &Route) -> Result<(), LlmError> {
        let all = self.0.lock();
        let Some(health) = all.get(&*route.key) else { return Ok(()) };
        let Some(until) = health.rests_until else { return Ok(()) };
        let now = Instant::now();
        if now >= until {
            return Ok(());
        }
        let (provider, rest) = (route.provider().clone(), until - now);
        Err(if health.asked {
            LlmError::RateLimited { provider, retry_after: Some(rest) }
        } else {
            LlmError::Resting { provider, rest }
        })
    }

    /// The target is called. After a rest one call tries it; the others go on elsewhere until that one has an answer, for
    /// no longer than another rest.
    pub(crate) fn calling<'a>(&'a self, route: &'a Route) -> Trial<'a> {
        let mut all = self.0.lock();
        let health = all.get_mut(&*route.key).filter(|health| !health.asked && health.rests_until.is_some());
        let is_trial = health.is_some();
        if let Some(health) = health {
            health.rests_until = Some(Instant::now() + rest(health.failures));
        }
        Trial { breakers: self, route, is_open: is_trial }
    }

    /// A stream of the target has begun. Whether it ends well is not known yet, but others need not wait for that.
    pub(crate) fn begun(&self, route: &Route) {
        if let Some(health) = self.0.lock().get_mut(&*route.key) {
            health.rests_until = None;
        }
    }

    /// The target answered, be it with a refusal of the request itself.
    pub(crate) fn succeeded(&self, route: &Route) {
        let mut all = self.0.lock();
        if !all.is_empty() {
            all.remove(&*route.key);
        }
    }

    /// The target failed.
    pub(crate) fn failed(&self, route: &Route, failure: &LlmError) {
        let now = Instant::now();
        let mut all = self.0.lock();
        if all.len() >= MOST_TARGETS {
            all.retain(|_, health| health.rests_until.is_some_and(|until| now < until));
        }
        let health =
            all.entry(route.key.clone()).or_insert(Health { failures: 0, rests_until: None, asked: false });
        if let LlmError::RateLimited { retry_after: Some(wait), .. } = failure {
            health.rests_until = Some(now + (*wait).min(LONGEST_REST));
            health.asked = true;
            return;
        }
        health.failures = health.failures.saturating_add(1);
        if health.failures >= PATIENCE {
            health.rests_until = Some(now + rest(health.failures));
            health.asked = false;
        }
    }
}

/// The one call that tries a target after its rest. One that is given up without an answer leaves it to the next.
pub(crate) struct Trial<'a> {
    breakers: &'a Breakers,
    route: &'a Route,
    is_open: bool,
}

impl Trial<'_> {
    /// The target answered or failed, which others were told.
    pub(crate) fn end(mut self) {
        self.is_open = false;
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        if self.is_open
            && let Some(health) = self.breakers.0.lock().get_mut(&*self.route.key)
        {
            health.rests_until = Some(Instant::now());
        }
    }
}

fn rest(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(PATIENCE).min(16);
    FIRST_REST.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST_REST)
}
