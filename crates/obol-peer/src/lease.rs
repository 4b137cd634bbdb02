use obol_model::Causes;
use obol_redis::RedisError;
use tokio::time::Instant;

use crate::registry::LEASE;

/// Whether this replica has its lease, as far as it knows.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    renewed_at: Option<Instant>,
    /// It was said that it ran out.
    told: bool,
}

impl Lease {
    /// Whether it was renewed in time. A renewal that fails costs nothing as long as one of the next ones does not.
    pub(crate) fn holds(&self, now: Instant) -> bool {
        self.renewed_at.is_some_and(|at| now.saturating_duration_since(at) < LEASE)
    }

    /// Takes up how a renewal went, and says once when the lease is lost and once when it is back.
    pub(crate) fn note<T>(&mut self, outcome: &Result<T, RedisError>, now: Instant) {
        match outcome {
            Ok(_) => {
                self.renewed_at = Some(now);
                if std::mem::take(&mut self.told) {
                    tracing::info!("this replica has its lease again");
                }
            }
            Err(e) if self.holds(now) => {
                tracing::warn!(error = %Causes(e), "the lease of this replica was not renewed");
            }
            Err(e) if !self.told => {
                self.told = true;
                tracing::error!(
                    error = %Causes(e),
                    "redis does not take what this replica writes: it has no lease and is not ready"
                );
            }
            Err(e) => tracing::debug!(error = %Causes(e), "the lease of this replica was not renewed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_lease_outlives_failures_until_its_end_and_is_back_at_once() {
        let failure = || Err::<(), _>(RedisError::BadCa { reason: String::new() });
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lease = Lease::default();
        assert!(!lease.holds(start), "never taken");
        lease.note(&failure(), start);
        assert!(!lease.holds(start) && lease.told);
        lease.note(&Ok(()), start);
        assert!(!lease.told);
        for second in [5, 10] {
            lease.note(&failure(), at(second));
            assert!(lease.holds(at(second)) && !lease.told, "{second}");
        }
        assert!(lease.holds(at(14)) && !lease.holds(at(15)));
        lease.note(&failure(), at(15));
        assert!(lease.told);
        lease.note(&Ok(()), at(20));
        assert!(lease.holds(at(20)) && !lease.told);
    }
}
