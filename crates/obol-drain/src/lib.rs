//! Shutdown as one owner of every task, with one deadline (DESIGN §13).
//!
//! [`Tasks`] is the only place of the workspace that spawns. [`Drain`] knows the phases: readiness flips, listeners
//! stop and notification streams end, request-bound work finishes, what is left is aborted before the deadline. It
//! knows neither HTTP nor Redis; the binary hands it the work of its last phase as a future.

mod detach;
mod tasks;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use detach::DetachOnDrop;
pub use tasks::{Class, Tasks};

/// Request work is aborted this long before the deadline, so that its `partial` usage events are written inside it.
const ABORT_BEFORE: Duration = Duration::from_secs(2);

/// Bounds of a drain.
#[derive(Debug, Clone, Copy)]
pub struct DrainOptions {
    /// One bound for all phases together (`OBOL_DRAIN_TIMEOUT_S`).
    pub timeout: Duration,
    /// How long everything is still served after readiness flipped (`OBOL_DRAIN_DELAY_S`), inside the timeout.
    pub delay: Duration,
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Everything finished by itself.
    Clean,
    /// The deadline (or a second signal) cut something off.
    Aborted,
}

impl Ended {
    /// The exit code of the process: 0, or 75 (`EX_TEMPFAIL`) when something was cut off.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Clean => 0,
            Self::Aborted => 75,
        }
    }
}

/// The state of the shutdown, cheap to clone and shared by all parts of the process.
#[derive(Debug, Clone)]
pub struct Drain {
    tasks: Tasks,
    draining: Arc<AtomicBool>,
    stopping: CancellationToken,
}

impl Drain {
    /// A process that serves. Must be called inside a tokio runtime, whose handle the tasks keep.
    pub fn new() -> Self {
        Self { tasks: Tasks::new(), draining: Arc::default(), stopping: CancellationToken::new() }
    }

    /// Where tasks are spawned.
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Whether readiness has flipped. Requests are still served.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Cancelled when listeners stop accepting and notification streams end.
    pub fn stopping(&self) -> &CancellationToken {
        &self.stopping
    }

    /// Runs all phases after the first signal. `finish` is the last one: it gets the deadline, settles what is left
    /// and says whether everything could be written. `second_signal` ends the drain at once.
    ///
    /// Not cancel-safe: it is the last thing that a process does.
    pub async fn run<F>(
        &self,
        options: DrainOptions,
        finish: impl FnOnce(Instant) -> F,
        second_signal: impl Future<Output = ()>,
    ) -> Ended
    where
        F: Future<Output = bool>,
    {
        let start = Instant::now();
        let deadline = start + options.timeout;
        self.draining.store(true, Ordering::Relaxed);
        tracing::info!(timeout_s = options.timeout.as_secs(), "draining");
        let phases = self.phases(start, deadline, options, finish);
        let ended = tokio::select! {
            biased;
            () = second_signal => {
                tracing::warn!("second signal, ending at once");
                Ended::Aborted
            }
            ended = tokio::time::timeout_at(deadline, phases) => ended.unwrap_or(Ended::Aborted),
        };
        self.tasks.abort_all();
        match ended {
            Ended::Clean => tracing::info!(elapsed_ms = millis(start), "drained"),
            Ended::Aborted => tracing::warn!(
                elapsed_ms = millis(start),
                timeout_s = options.timeout.as_secs(),
                left = %self.tasks.describe(),
                "drain timeout passed or a signal came, the rest is aborted"
            ),
        }
        ended
    }

    async fn phases<F>(
        &self,
        start: Instant,
        deadline: Instant,
        options: DrainOptions,
        finish: impl FnOnce(Instant) -> F,
    ) -> Ended
    where
        F: Future<Output = bool>,
    {
        tokio::time::sleep(options.delay).await;
        self.stopping.cancel();
        let cut = deadline - ABORT_BEFORE.min(options.timeout / 4);
        let finished = tokio::time::timeout_at(cut, self.tasks.wait_for_requests()).await.is_ok();
        tracing::info!(elapsed_ms = millis(start), finished, left = %self.tasks.describe(), "requests ended");
        if !finished {
            self.tasks.abort_requests();
            // Dropping a request's future hands its usage to the meter; that takes a moment, not seconds.
            self.tasks.wait_for_requests().await;
        }
        let written = finish(deadline).await;
        tracing::info!(elapsed_ms = millis(start), written, "usage settled");
        if finished && written { Ended::Clean } else { Ended::Aborted }
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self::new()
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const OPTIONS: DrainOptions = DrainOptions { timeout: Duration::from_secs(10), delay: Duration::ZERO };

    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_requests_and_ends_clean() {
        let drain = Drain::new();
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..3 {
            let done = done.clone();
            drain.tasks().spawn(Class::Request, "request", async move {
                tokio::time::sleep(Duration::from_secs(5)).await;
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        let start = Instant::now();
        let ended = drain.run(OPTIONS, |_| async { true }, pending()).await;
        assert_eq!((ended, done.load(Ordering::SeqCst)), (Ended::Clean, 3));
        assert_eq!(start.elapsed().as_secs(), 5);
    }

    struct SetOnDrop(Arc<AtomicBool>);
    impl Drop for SetOnDrop {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_outlives_the_bound_is_dropped_before_usage_is_settled() {
        let drain = Drain::new();
        let dropped = Arc::new(AtomicBool::new(false));
        let guard = SetOnDrop(dropped.clone());
        drain.tasks().spawn(Class::Request, "endless", async move {
            let _guard = guard;
            pending::<()>().await;
        });
        let start = Instant::now();
        let ended = drain
            .run(
                OPTIONS,
                |_| async move {
                    assert!(dropped.load(Ordering::SeqCst), "the guard must settle first");
                    true
                },
                pending(),
            )
            .await;
        assert_eq!(ended, Ended::Aborted);
        assert_eq!(start.elapsed().as_secs(), 8);
        assert_eq!(ended.exit_code(), 75);
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_bounds_the_last_phase_too_and_a_second_signal_ends_all() {
        let start = Instant::now();
        let ended = Drain::new().run(OPTIONS, |_| pending::<bool>(), pending()).await;
        assert_eq!((ended, start.elapsed().as_secs()), (Ended::Aborted, 10));

        let start = Instant::now();
        let second = tokio::time::sleep(Duration::from_secs(1));
        let ended = Drain::new().run(OPTIONS, |_| pending::<bool>(), second).await;
        assert_eq!((ended, start.elapsed().as_secs()), (Ended::Aborted, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn everything_is_served_during_the_delay() {
        let drain = Drain::new();
        let options = DrainOptions { delay: Duration::from_secs(3), ..OPTIONS };
        let watch = drain.clone();
        let run = drain.run(options, |_| async { true }, pending());
        tokio::pin!(run);
        assert!(tokio::time::timeout(Duration::from_secs(2), &mut run).await.is_err());
        assert!(watch.is_draining() && !watch.stopping().is_cancelled());
        assert_eq!(run.await, Ended::Clean);
        assert!(watch.stopping().is_cancelled());
    }
}
