use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The last moment at which the subscription to invalidations is known to have stood. An atomic, since requests ask.
#[derive(Debug)]
pub(crate) struct Heard {
    /// What the milliseconds below count from.
    since: Instant,
    /// One more than the milliseconds, 0 when it never stood.
    millis: AtomicU64,
}

impl Default for Heard {
    fn default() -> Self {
        Self { since: Instant::now(), millis: AtomicU64::new(0) }
    }
}

impl Heard {
    pub(crate) fn now(&self) {
        let millis = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.millis.store(millis + 1, Ordering::Release);
    }

    pub(crate) fn at(&self) -> Option<Instant> {
        let millis = self.millis.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.since + Duration::from_millis(millis))
    }

    /// How long ago that was; since the start when it never stood.
    pub(crate) fn silence(&self) -> Duration {
        self.at().unwrap_or(self.since).elapsed()
    }
}
