use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, PushInfo, PushKind};
use tokio::time::Instant;

use crate::RedisError;
use crate::target::Target;

/// After a failed attempt commands are refused for this long before the next attempt: short enough that a server
/// that came back is not missed, long enough that an outage under load is no storm of connects.
const HOLD_OFF: Duration = Duration::from_millis(100);

/// Commands that wait to be written; further ones wait for a place, within their deadline.
const QUEUE: usize = 1024;

type Attempt = Shared<BoxFuture<'static, Result<MultiplexedConnection, RedisError>>>;

/// The connection that all clones of a client share, and how it comes back.
///
/// An attempt to connect is one future that all waiting commands poll: whoever gives up leaves it to the others, and
/// no task is needed. `redis::aio::ConnectionManager` is not used because it keeps a connection that has gone silent
/// and because the command that finds a server gone must fail for the next one to succeed.
pub(crate) struct Link {
    target: Target,
    connect_timeout: Duration,
    state: Mutex<State>,
    /// Whether the last thing that was logged is good news.
    healthy: AtomicBool,
}

struct State {
    /// Grows with each attempt: a late word about an earlier connection must not end the present one.
    number: u64,
    phase: Phase,
}

enum Phase {
    /// Nothing is known against the server: the next command connects.
    Idle,
    /// The last attempt failed.
    Down {
        until: Instant,
        why: RedisError,
    },
    Connecting {
        attempt: Attempt,
        began: Instant,
    },
    Up(MultiplexedConnection),
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("server", &self.target.server).finish_non_exhaustive()
    }
}

impl Link {
    pub(crate) fn new(target: Target, connect_timeout: Duration) -> Arc<Self> {
        let state = Mutex::new(State { number: 0, phase: Phase::Idle });
        Arc::new(Self { target, connect_timeout, state, healthy: AtomicBool::new(true) })
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// The connection and its number for [`Link::retire`], connecting first when there is none.
    ///
    /// Cancel-safe: the attempt goes on for others that wait, or when the next one asks.
    pub(crate) async fn connection(self: &Arc<Self>) -> Result<(MultiplexedConnection, u64), RedisError> {
        let (attempt, number) = {
            let mut state = self.state.lock();
            match &state.phase {
                Phase::Up(connection) => return Ok((connection.clone(), state.number)),
                Phase::Down { until, why } if Instant::now() < *until => return Err(why.clone()),
                // An older attempt was abandoned by all who waited for it: its own deadline would fail it at once.
                Phase::Connecting { attempt, began } if began.elapsed() < self.connect_timeout => {
                    (attempt.clone(), state.number)
                }
                Phase::Idle | Phase::Down { .. } | Phase::Connecting { .. } => {
                    let number = state.number + 1;
                    let attempt = self.attempt(number);
                    let phase = Phase::Connecting { attempt: attempt.clone(), began: Instant::now() };
                    *state = State { number, phase };
                    (attempt, number)
                }
            }
        };
        let outcome = attempt.await;
        self.settle(number, &outcome);
        Ok((outcome?, number))
    }

    fn attempt(self: &Arc<Self>, number: u64) -> Attempt {
        let link = Arc::downgrade(self);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            // Deadlines are the caller's: they also cover the wait for a connection.
            .set_response_timeout(None)
            .set_pipeline_buffer_size(QUEUE)
            .set_push_sender(move |push: PushInfo| -> Result<(), ()> {
                if push.kind == PushKind::Disconnection
                    && let Some(link) = link.upgrade()
                {
                    link.retire(number, "closed");
                }
                Ok(())
            });
        let target = self.target.clone();
        async move {
            let connected = target.client.get_multiplexed_async_connection_with_config(&config).await;
            connected.map_err(|why| RedisError::connect(&target.server, why))
        }
        .boxed()
        .shared()
    }

    fn settle(&self, number: u64, outcome: &Result<MultiplexedConnection, RedisError>) {
        {
            let mut state = self.state.lock();
            // Only the first of those that waited.
            if state.number != number || !matches!(state.phase, Phase::Connecting { .. }) {
                return;
            }
            state.phase = match outcome {
                Ok(connection) => Phase::Up(connection.clone()),
                Err(why) => Phase::Down { until: Instant::now() + HOLD_OFF, why: why.clone() },
            };
        }
        let server = &*self.target.server;
        match outcome {
            Ok(_) if !self.healthy.swap(true, Ordering::Relaxed) => {
                tracing::info!(server, "redis connection restored");
            }
            Err(why) if self.healthy.swap(false, Ordering::Relaxed) => {
                tracing::warn!(server, error = %why, "redis is away");
            }
            Ok(_) | Err(_) => {}
        }
    }

    /// Takes a connection out of use. Commands that wait for its answers keep it until their deadlines.
    pub(crate) fn retire(&self, number: u64, reason: &'static str) {
        let old = {
            let mut state = self.state.lock();
            if state.number != number || !matches!(state.phase, Phase::Up(_)) {
                return;
            }
            std::mem::replace(&mut state.phase, Phase::Idle)
        };
        drop(old);
        if self.healthy.swap(false, Ordering::Relaxed) {
            tracing::warn!(server = &*self.target.server, reason, "redis connection lost");
        }
    }
}
