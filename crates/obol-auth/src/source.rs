//! What is known of a key beyond this process.

use std::sync::Arc;
use std::time::Duration;

use obol_model::{KeyContext, KeyHash};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::store::decode;
use crate::{ControlKeys, KeyLookup, KeyStore, KeyStoreError};

/// Control is asked at most this many times at once, and then once in each of these periods: 50 a second. Keys that
/// nobody has could otherwise be made up faster than control can say so.
const BURST: u32 = 50;
const EACH: Duration = Duration::from_millis(20);

/// The store, and control for when the store does not claim to hold every key.
pub(crate) struct Source {
    store: Arc<dyn KeyStore>,
    control: Option<Arc<dyn ControlKeys>>,
    questions: Mutex<Allowance>,
}

impl Source {
    pub(crate) fn new(store: Arc<dyn KeyStore>, control: Option<Arc<dyn ControlKeys>>) -> Self {
        Self { store, control, questions: Mutex::new(Allowance::new()) }
    }

    /// `None` when there is no such key.
    pub(crate) async fn read(&self, hash: &KeyHash) -> Result<Option<KeyContext>, KeyStoreError> {
        match self.store.get(hash).await? {
            KeyLookup::Found(context) => Ok(Some(context)),
            KeyLookup::Absent => Ok(None),
            KeyLookup::NotLoaded => self.ask_control(hash).await,
        }
    }

    async fn ask_control(&self, hash: &KeyHash) -> Result<Option<KeyContext>, KeyStoreError> {
        let control = self.control.as_ref().ok_or(KeyStoreError::NotLoaded)?;
        if !self.questions.lock().take(Instant::now()) {
            return Err(KeyStoreError::TooManyQuestions);
        }
        let record = control.key(hash).await?;
        record.map(|bytes| decode(hash, &bytes)).transpose()
    }
}

/// A token bucket, as the moment at which it is full again.
struct Allowance {
    full_at: Instant,
}

impl Allowance {
    fn new() -> Self {
        Self { full_at: Instant::now() }
    }

    fn take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.max(now) + EACH;
        let fits = full_at - now <= EACH * BURST;
        if fits {
            self.full_at = full_at;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_allowed_and_then_fifty_a_second() {
        let mut allowance = Allowance::new();
        let start = Instant::now();
        let taken = |allowance: &mut Allowance, at: Duration| {
            std::iter::from_fn(|| allowance.take(start + at).then_some(())).take(1000).count()
        };
        assert_eq!(taken(&mut allowance, Duration::ZERO), 50);
        assert_eq!(taken(&mut allowance, Duration::from_millis(19)), 0);
        assert_eq!(taken(&mut allowance, Duration::from_millis(20)), 1);
        assert_eq!(taken(&mut allowance, Duration::from_millis(520)), 25);
        assert_eq!(taken(&mut allowance, Duration::from_secs(60)), 50);
    }
}
