//! Whether a connection is of use: a request is under way on it, or was lately.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The requests of one connection.
#[derive(Debug)]
pub(crate) struct Activity {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    under_way: usize,
    last: Instant,
}

impl Activity {
    /// A connection that was just accepted.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State { under_way: 0, last: Instant::now() }),
            changed: Notify::new(),
        })
    }

    /// A request has come; it is under way until the guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> UnderWay {
        self.state.lock().under_way += 1;
        UnderWay(self.clone())
    }

    /// Returns once no request was under way for `bound`, counted from now at the earliest. For one waiter; cancel-safe.
    pub(crate) async fn idle_for(&self, bound: Duration) {
        let since = Instant::now();
        loop {
            let idle_at = {
                let state = self.state.lock();
                (state.under_way == 0).then(|| state.last.max(since) + bound)
            };
            match idle_at {
                None => self.changed.notified().await,
                Some(at) if at <= Instant::now() => return,
                Some(at) => tokio::time::sleep_until(at).await,
            }
        }
    }
}

/// A request that is under way, to the last byte of its answer.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<Activity>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.under_way = state.under_way.saturating_sub(1);
        state.last = Instant::now();
        drop(state);
        self.0.changed.notify_one();
    }
}

/// A body whose end, or whose being dropped, ends the request.
#[derive(Debug)]
pub(crate) struct BusyBody {
    body: Body,
    _under_way: UnderWay,
}

impl BusyBody {
    /// `body`, while which the request is under way.
    pub(crate) fn new(body: Body, under_way: UnderWay) -> Self {
        Self { body, _under_way: under_way }
    }
}

impl http_body::Body for BusyBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_only_when_nothing_was_under_way_for_the_bound() {
        let activity = Activity::new();
        let start = Instant::now();
        activity.idle_for(Duration::from_secs(60)).await;
        assert_eq!(start.elapsed().as_secs(), 60);

        let request = activity.begin();
        let idle = activity.idle_for(Duration::from_secs(60));
        tokio::pin!(idle);
        assert!(tokio::time::timeout(Duration::from_secs(500), &mut idle).await.is_err());
        drop(request);
        let ended = Instant::now();
        idle.await;
        assert_eq!(ended.elapsed().as_secs(), 60);
    }
}
