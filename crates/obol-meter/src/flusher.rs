use std::sync::Arc;
use std::time::Duration;

use obol_model::{UsageEvent, metric};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::meter::{MeterOptions, Open};
use crate::sink::{SinkError, UsageSink};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Short enough that calls are taken again within a second of the store's return (DESIGN §14).
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Writes what the guards of one [`crate::Meter`] hand over.
#[derive(Debug)]
pub struct Flusher {
    inbox: mpsc::Receiver<UsageEvent>,
    sink: Arc<dyn UsageSink>,
    open: Arc<Open>,
    options: MeterOptions,
}

/// How a flusher ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlushReport {
    /// Events that the store acknowledged.
    pub written: u64,
    /// Events without an acknowledgement, calls that were still open included. Some of them may have been written: a
    /// flight that was given up is counted here.
    pub lost: u64,
}

impl Flusher {
    pub(crate) fn new(
        inbox: mpsc::Receiver<UsageEvent>,
        sink: Arc<dyn UsageSink>,
        open: Arc<Open>,
        options: MeterOptions,
    ) -> Self {
        Self { inbox, sink, open, options }
    }

    /// Writes events until it is told to stop.
    ///
    /// While neither token is cancelled nothing is dropped: a flight that fails is repeated, with growing pauses, and
    /// meanwhile the queue fills until [`crate::Meter::begin`] refuses calls. When `shutdown` is cancelled no new call
    /// is taken, and it returns once the open guards have closed and their events are written. When `abandon` is
    /// cancelled (the caller's deadline) it returns at once and says what was lost.
    pub async fn run(mut self, shutdown: CancellationToken, abandon: CancellationToken) -> FlushReport {
        let mut report = FlushReport::default();
        let mut batch = Vec::with_capacity(self.options.batch);
        let written = tokio::select! {
            biased;
            () = abandon.cancelled() => None,
            written = self.write(&mut batch, &shutdown, &mut report.written) => Some(written),
        };
        if written.is_none() {
            self.inbox.close();
            report.lost = count(batch.len() + self.inbox.len() + self.open.count());
        }
        metrics::gauge!(metric::USAGE_QUEUE).set(0.0);
        if report.lost > 0 {
            metrics::counter!(metric::USAGE_LOST).increment(report.lost);
            warn!(lost = report.lost, written = report.written, "usage events lost");
        }
        report
    }

    async fn write(&mut self, batch: &mut Vec<UsageEvent>, shutdown: &CancellationToken, written: &mut u64) {
        let mut failures = 0_u32;
        while self.fill(batch, shutdown).await {
            let failure = match timeout(self.options.flight_timeout, self.sink.append(batch)).await {
                Ok(Ok(())) => {
                    *written += count(batch.len());
                    batch.clear();
                    if failures > 0 {
                        info!(failures, "usage store answers again");
                        failures = 0;
                    }
                    continue;
                }
                Ok(Err(failure)) => failure,
                Err(_) => SinkError::Unavailable { reason: "no answer in time".to_owned() },
            };
            if failures == 0 {
                warn!(error = %failure, events = batch.len(), "usage events wait for the store");
            }
            if let SinkError::Refused { refused, .. } = &failure {
                let before = batch.len();
                let mut position = 0_usize..;
                batch.retain(|_| position.next().is_some_and(|at| refused.binary_search(&at).is_ok()));
                *written += count(before - batch.len());
            }
            let pause = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(failures.min(16))).min(LONGEST_PAUSE);
            failures = failures.saturating_add(1);
            sleep(pause).await;
        }
    }

    /// Waits for events and adds them to what could not be written so far. `false` when there will be none.
    async fn fill(&mut self, batch: &mut Vec<UsageEvent>, shutdown: &CancellationToken) -> bool {
        if shutdown.is_cancelled() {
            self.inbox.close();
        }
        while batch.is_empty() {
            tokio::select! {
                biased;
                () = shutdown.cancelled(), if !self.inbox.is_closed() => self.inbox.close(),
                taken = self.inbox.recv_many(batch, self.options.batch.max(1)) => {
                    if taken == 0 {
                        return false;
                    }
                    if taken < self.options.batch {
                        // Returns at once during a drain.
                        drop(timeout(self.options.linger, shutdown.cancelled()).await);
                    }
                }
            }
        }
        while batch.len() < self.options.batch {
            let Ok(event) = self.inbox.try_recv() else { break };
            batch.push(event);
        }
        #[expect(clippy::cast_precision_loss, reason = "a queue holds far fewer than 2^52 events")]
        metrics::gauge!(metric::USAGE_QUEUE).set((batch.len() + self.inbox.len()) as f64);
        true
    }
}

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
