use std::fmt::Debug;
use std::sync::atomic::{AtomicI64, Ordering};

use jiff::Timestamp;

/// Wall time, as an argument: rules that depend on it can be tested without waiting.
///
/// Waits use `tokio::time`; this trait is only for timestamps that leave the process or are compared with some
/// that came from outside.
pub trait Clock: Debug + Send + Sync + 'static {
    /// The current time in UTC.
    fn now(&self) -> Timestamp;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the machine's clock")]
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}

/// A clock that moves only when it is told to. For tests of rules that depend on wall time.
#[derive(Debug)]
pub struct ManualClock(AtomicI64);

impl ManualClock {
    /// A clock that shows `start`.
    pub fn new(start: Timestamp) -> Self {
        Self(AtomicI64::new(start.as_millisecond()))
    }

    /// Moves the clock forward by whole milliseconds.
    pub fn advance(&self, by: std::time::Duration) {
        self.0.fetch_add(i64::try_from(by.as_millis()).unwrap_or(i64::MAX), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millisecond(self.0.load(Ordering::SeqCst)).unwrap_or(Timestamp::MAX)
    }
}
