use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt as _;
use obol_model::WorkspaceId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::session::{self, Session};
use super::slot::{Slot, State};
use super::{Pool, Transport};

/// How often sessions are looked after. Far below the share of `max_age` that is left when a renewal starts.
const TICK: Duration = Duration::from_millis(500);
/// How long an endpoint that another publication describes differently is kept for requests that are still pinned to
/// the older one.
const SUPERSEDED_IDLE: Duration = Duration::from_secs(10);
/// Sessions that are closed at the same time.
const CLOSE_AT_ONCE: usize = 32;

impl Pool {
    /// Looks after the sessions until `shutdown`: renews those that grow old, ahead of time and off every caller's
    /// path, and closes those that nobody uses. Then no new call starts, those in flight are waited for, and all
    /// sessions are closed, both within `close_timeout`.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut tick =
            tokio::time::interval(TICK.min(self.options.max_age / 10).max(Duration::from_millis(1)));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = tick.tick() => {}
                () = self.wake.notified() => {}
            }
            self.look_after();
        }
        self.stop().await;
    }

    /// Ends the upstream sessions of a client session or principal that is gone; its calls in flight end with them, and
    /// so does what is only being opened.
    pub async fn close_isolated(&self, workspace: &WorkspaceId, isolation: &str) {
        let slots: Vec<_> = {
            let mut slots = self.slots.write();
            slots
                .extract_if(|k, _| k.workspace == *workspace && k.isolation.as_deref() == Some(isolation))
                .collect()
        };
        let closing = slots.iter().map(|(_, slot)| async {
            let (sessions, half_open) = slot.doom();
            let half_open = self.close_all_half_open(half_open.into_iter().collect());
            futures::join!(self.close_all(sessions), half_open);
        });
        futures::future::join_all(closing).await;
    }

    fn look_after(self: &Arc<Self>) {
        let now = Instant::now();
        let slots: Vec<Arc<Slot>> = self.slots.read().values().cloned().collect();
        let mut empty = false;
        for slot in &slots {
            let closing = {
                let mut state = slot.state.lock();
                self.renew_or_retire(slot, &mut state, now);
                empty |= state.is_empty();
                take_idle(&mut state)
            };
            for session in closing {
                let pool = Arc::clone(self);
                self.spawn("mcp_upstream_close", Box::pin(async move { session.close(&pool.options).await }));
            }
        }
        drop(slots);
        if empty {
            self.forget_empty(now);
        }
    }

    fn renew_or_retire(self: &Arc<Self>, slot: &Arc<Slot>, state: &mut State, now: Instant) {
        let listened = slot.is_listened_to();
        let idle_for = now.saturating_duration_since(state.last_used);
        let Some(session) = &state.current else {
            if listened && state.opening.is_none() && now >= state.retry_at {
                self.open_ahead(slot, state);
            }
            return;
        };
        let (durable, age) = (session.transport.is_durable(), now.saturating_duration_since(session.born));
        let keep = if durable { self.options.durable_idle } else { self.options.idle };
        let keep = if slot.superseded.load(Ordering::Acquire) { keep.min(SUPERSEDED_IDLE) } else { keep };
        let wanted = listened || idle_for < keep || (durable && !session.is_idle());
        if session.transport.is_closed() || (!wanted && state.opening.is_none()) {
            slot.gap.store(true, Ordering::Release);
            state.retire_current();
            return;
        }
        // A third of its life is left for the renewal to work at the first or at the third try.
        let old = !durable && age >= self.options.max_age / 3 * 2;
        if old && wanted && state.opening.is_none() && now >= state.retry_at {
            self.open_ahead(slot, state);
        }
    }

    fn open_ahead(self: &Arc<Self>, slot: &Arc<Slot>, state: &mut State) {
        if let Err(e) = self.opening(slot, state) {
            tracing::trace!(error = %e, "upstream session is opened later");
        }
    }

    fn forget_empty(&self, now: Instant) {
        let mut slots = self.slots.write();
        slots.retain(|_, slot| {
            // One owner is the map itself: whoever found the slot before holds another, and keeps it in its place.
            Arc::strong_count(slot) > 1 || !slot.state.lock().is_empty()
        });
        drop(slots);
        self.breakers.lock().retain(|_, breaker| !breaker.is_idle(now));
    }

    async fn stop(self: &Arc<Self>) {
        self.stopping.store(true, Ordering::Release);
        let deadline = Instant::now() + self.options.close_timeout;
        // Calls in flight come first; every lease that is let go wakes this up.
        let slots: Vec<Arc<Slot>> = self.slots.write().drain().map(|(_, slot)| slot).collect();
        let (open, half_open): (Vec<_>, Vec<_>) = slots.iter().map(|slot| slot.doom()).unzip();
        futures::join!(
            self.close_all_half_open(half_open.into_iter().flatten().collect()),
            self.close_after_calls(open.into_iter().flatten().collect(), deadline)
        );
    }

    async fn close_after_calls(&self, mut open: Vec<Arc<Session>>, deadline: Instant) {
        let mut idle: Vec<Arc<Session>> = open.extract_if(.., |s| s.is_idle()).collect();
        while !open.is_empty() {
            self.close_all(std::mem::take(&mut idle)).await;
            idle.extend(open.extract_if(.., |s| s.is_idle()));
            if idle.is_empty() && tokio::time::timeout_at(deadline, self.wake.notified()).await.is_err() {
                tracing::warn!(sessions = open.len(), "upstream sessions closed with calls in flight");
                idle.append(&mut open);
            }
        }
        self.close_all(idle).await;
    }

    async fn close_all_half_open(&self, transports: Vec<Arc<dyn Transport>>) {
        futures::stream::iter(transports)
            .for_each_concurrent(CLOSE_AT_ONCE, |transport| async move {
                session::close(&transport, &self.options).await;
            })
            .await;
    }

    async fn close_all(&self, sessions: Vec<Arc<Session>>) {
        futures::stream::iter(sessions)
            .for_each_concurrent(CLOSE_AT_ONCE, |session| async move { session.close(&self.options).await })
            .await;
    }
}

/// Sessions that were left and that no call holds any more.
fn take_idle(state: &mut State) -> Vec<Arc<Session>> {
    state.retired.extract_if(.., |s| s.is_idle()).collect()
}
