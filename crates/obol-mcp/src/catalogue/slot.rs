//! What a replica knows of one list, and who waits for it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::CatalogueOptions;
use super::listing::Listing;
use super::store::{KEEP, ListDigest, Wanted};
use crate::pool::CallError;

/// One list.
///
/// The state has a lock of its own that is never held while another one is taken or while something is awaited; those who
/// wait for a load watch the count of steps.
pub(super) struct Slot {
    state: Mutex<State>,
    steps: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    known: Option<Known>,
    /// The upstream announced a change then; a listing that began before is old.
    heard: Option<Instant>,
    /// Grows when another replica may have a newer list. Those up to `settled` are looked into.
    doubts: u64,
    settled: u64,
    loading: bool,
    /// When the load that is under way began.
    loading_since: Instant,
    failure: Option<(CallError, Instant)>,
    used_at: Instant,
}

#[derive(Debug)]
struct Known {
    listing: Arc<Listing>,
    digest: ListDigest,
    /// When the listing began.
    listed: Instant,
}

/// What a load is to find, and what it settles.
#[derive(Debug, Clone, Copy)]
pub(super) struct Errand {
    pub(super) wanted: Wanted,
    heard: Option<Instant>,
    doubts: u64,
}

/// What a reader finds.
pub(super) struct Look {
    /// What may be served at once.
    pub(super) ready: Option<Arc<Listing>>,
    /// The reader is to start a load.
    pub(super) start: bool,
    pub(super) loading_since: Instant,
}

impl Slot {
    pub(super) fn new(now: Instant) -> Self {
        let state = State {
            known: None,
            heard: None,
            doubts: 0,
            settled: 0,
            loading: false,
            loading_since: now,
            failure: None,
            used_at: now,
        };
        Self { state: Mutex::new(state), steps: watch::Sender::new(0) }
    }

    pub(super) fn used_at(&self) -> Instant {
        self.state.lock().used_at
    }

    pub(super) fn steps(&self) -> watch::Receiver<u64> {
        self.steps.subscribe()
    }

    /// Looks what is there, and takes the place of the one who loads when that is due.
    pub(super) fn look(&self, now: Instant, options: &CatalogueOptions) -> Look {
        let mut state = self.state.lock();
        state.used_at = now;
        let start = state.is_due(now, options);
        if start {
            (state.loading, state.loading_since) = (true, now);
        }
        // Old by age: served while it is refreshed. Old by announcement: the caller waits for the new one.
        let ready = state.servable(now).filter(|_| !state.is_doubted());
        Look { ready, start, loading_since: state.loading_since }
    }

    /// Returns once there is something to serve, or nobody looks for it any more. Cancel-safe.
    pub(super) async fn settled(&self, steps: &mut watch::Receiver<u64>) {
        loop {
            {
                let state = self.state.lock();
                if !state.loading || (state.servable(Instant::now()).is_some() && !state.is_doubted()) {
                    return;
                }
            }
            if steps.changed().await.is_err() {
                return;
            }
        }
    }

    /// The best there is, after waiting.
    pub(super) fn best(&self) -> Result<Arc<Listing>, CallError> {
        let state = self.state.lock();
        state.servable(Instant::now()).ok_or_else(|| match &state.failure {
            Some((failure, _)) => failure.clone(),
            None => CallError::Timeout,
        })
    }

    /// The upstream announced a change.
    pub(super) fn hear(&self, now: Instant) {
        self.state.lock().heard = Some(now);
    }

    /// Another replica may have a newer list.
    pub(super) fn doubt(&self) {
        self.state.lock().doubts += 1;
    }

    pub(super) fn digest(&self) -> Option<ListDigest> {
        self.state.lock().known.as_ref().map(|known| known.digest)
    }

    pub(super) fn errand(&self, now: Instant, ttl: Duration) -> Errand {
        let state = self.state.lock();
        let wanted = Wanted {
            known: state.known.as_ref().map(|known| known.digest),
            ttl,
            heard: state.heard.map(|heard| now.saturating_duration_since(heard)),
        };
        Errand { wanted, heard: state.heard, doubts: state.doubts }
    }

    /// The errand was done: what is known now is what was wanted then.
    pub(super) fn settle(&self, errand: &Errand) {
        let mut state = self.state.lock();
        state.settled = state.settled.max(errand.doubts);
        if state.heard == errand.heard {
            state.heard = None;
        }
    }

    /// Whether a list that was listed then, and that is not known to be what was wanted, is better than what is there.
    pub(super) fn would_gain(&self, listed: Instant) -> bool {
        let state = self.state.lock();
        state.known.as_ref().is_none_or(|known| known.listed < listed)
    }

    /// What is known was listed again, then.
    pub(super) fn confirm(&self, listed: Instant) {
        if let Some(known) = &mut self.state.lock().known {
            known.listed = known.listed.max(listed);
        }
        self.step();
    }

    /// Puts a list in place and returns whether that is a change: another one than before, or the first.
    pub(super) fn install(&self, listing: Listing, digest: ListDigest, listed: Instant) -> bool {
        let known = Known { listing: Arc::new(listing), digest, listed };
        let before = self.state.lock().known.replace(known);
        self.step();
        before.is_none_or(|before| before.digest != digest)
    }

    /// The load is over.
    pub(super) fn finish(&self, outcome: Result<(), CallError>) {
        {
            let mut state = self.state.lock();
            state.failure = outcome.err().map(|failure| (failure, Instant::now()));
            state.loading = false;
        }
        self.step();
    }

    fn step(&self) {
        self.steps.send_modify(|count| *count += 1);
    }
}

impl State {
    fn servable(&self, now: Instant) -> Option<Arc<Listing>> {
        let known = self.known.as_ref()?;
        (now.saturating_duration_since(known.listed) < KEEP).then(|| known.listing.clone())
    }

    fn is_doubted(&self) -> bool {
        self.heard.is_some() || self.doubts != self.settled
    }

    fn is_due(&self, now: Instant, options: &CatalogueOptions) -> bool {
        let fresh = |known: &Known| now.saturating_duration_since(known.listed) < options.ttl;
        let failed_lately =
            self.failure.as_ref().is_some_and(|(_, at)| now.duration_since(*at) < options.retry_after);
        !self.loading && !failed_lately && (self.is_doubted() || !self.known.as_ref().is_some_and(fresh))
    }
}
