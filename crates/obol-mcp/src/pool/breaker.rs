use std::time::Duration;

use tokio::time::Instant;

/// How long failures are remembered.
const FORGET_AFTER: Duration = Duration::from_mins(10);

/// Stops hammering an upstream that cannot be reached: after some failures in a row it lets nobody through for a
/// while, then one probe at a time. An attempt that works ends it: whoever owns it drops it. Pure: takes `now`.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    failures: u32,
    last_failure: Option<Instant>,
    /// Nobody passes before this.
    closed_until: Option<Instant>,
}

impl Breaker {
    /// Lets an attempt through, or says how long to wait.
    pub(super) fn admit(&mut self, now: Instant, open_for: Duration) -> Result<(), Duration> {
        match self.closed_until {
            Some(until) if now < until => Err(until - now),
            Some(_) => {
                // This one is the probe. Should it never report, the next one passes after the same while.
                self.closed_until = Some(now + open_for);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// An attempt failed. Returns whether the breaker opened just now.
    pub(super) fn failed(&mut self, now: Instant, limit: u32, open_for: Duration) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.last_failure = Some(now);
        if self.failures < limit {
            return false;
        }
        let opened = self.closed_until.is_none();
        self.closed_until = Some(now + open_for);
        opened
    }

    /// Whether it holds nothing worth keeping: what happened long ago says nothing of the next attempt.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        self.last_failure.is_none_or(|last| now.saturating_duration_since(last) > FORGET_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: Duration = Duration::from_secs(5);

    #[test]
    fn it_opens_after_failures_in_a_row_and_probes_once() {
        let start = Instant::now();
        let mut breaker = Breaker::default();
        assert!(!breaker.failed(start, 3, OPEN));
        assert!(!breaker.failed(start, 3, OPEN));
        assert!(breaker.admit(start, OPEN).is_ok());
        assert!(breaker.failed(start, 3, OPEN));
        assert_eq!(breaker.admit(start + OPEN / 5, OPEN), Err(OPEN / 5 * 4));
        assert!(breaker.admit(start + OPEN, OPEN).is_ok(), "the probe");
        assert!(breaker.admit(start + OPEN, OPEN).is_err(), "only one probe");
        assert!(!breaker.failed(start + OPEN, 3, OPEN), "it was open already");
        assert!(breaker.admit(start + OPEN + OPEN / 2, OPEN).is_err());
        assert!(breaker.admit(start + OPEN * 2, OPEN).is_ok());
        assert!(!breaker.is_idle(start + OPEN * 2));
        assert!(breaker.is_idle(start + FORGET_AFTER * 2));
    }
}
