use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use obol_model::metric;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::ledger::{CloseError, Closing, Ledger};
use crate::meter::{MeterOptions, Open};
use crate::spool::Spool;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Short enough that calls are taken again within a second of the store's return (DESIGN §14).
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Closes what the guards of one [`crate::Meter`] hand over.
#[derive(Debug)]
pub struct Flusher {
    inbox: mpsc::Receiver<Closing>,
    ledger: Arc<dyn Ledger>,
    open: Arc<Open>,
    options: MeterOptions,
    spool: Option<Spool>,
    /// Nothing will come any more.
    ended: bool,
}

/// How a flusher ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlushReport {
    /// Calls that the ledger closed.
    pub written: u64,
    /// Calls that it was not heard to have closed and that are in the spool: the next process closes them.
    pub spooled: u64,
    /// Calls that it was not heard to have closed and that nobody keeps, those that were still open included. What was set
    /// aside for them is booked by whoever sweeps first.
    pub lost: u64,
}

impl Flusher {
    pub(crate) fn new(
        inbox: mpsc::Receiver<Closing>,
        ledger: Arc<dyn Ledger>,
        open: Arc<Open>,
        options: MeterOptions,
    ) -> Self {
        Self { inbox, ledger, open, options, spool: None, ended: false }
    }

    /// Closes what is in this spool, and leaves there what it cannot close before it is abandoned.
    #[must_use]
    pub fn with_spool(self, spool: Option<Spool>) -> Self {
        Self { spool, ..self }
    }

    /// Closes calls until it is told to stop.
    ///
    /// While neither token is cancelled nothing is dropped: a flight that fails is repeated, with growing pauses, and
    /// meanwhile the queue fills until [`crate::Meter::admit`] refuses calls. When `shutdown` is cancelled no new call
    /// is taken, and it returns once the open guards have closed and their events are written. When `abandon` is
    /// cancelled (the caller's deadline) it leaves the rest in the spool, if there is one, returns and says what was lost.
    pub async fn run(mut self, shutdown: CancellationToken, abandon: CancellationToken) -> FlushReport {
        let mut report = FlushReport::default();
        let mut batch = Vec::with_capacity(self.options.batch);
        let mut parked = Parked::default();
        let (spool, ledger) = (self.spool.clone(), Arc::clone(&self.ledger));
        let (most, patience) = (self.options.batch, self.options.flight_timeout);
        let replay = async {
            if let Some(spool) = &spool {
                // What it has not closed by then stays for the next process.
                shutdown.run_until_cancelled(spool.replay(&*ledger, most, patience)).await;
            }
        };
        let write = async {
            tokio::select! {
                biased;
                () = abandon.cancelled() => None,
                written = self.write(&mut batch, &mut parked, &shutdown, &mut report.written) => Some(written),
            }
        };
        let (written, ()) = tokio::join!(write, replay);
        if written.is_none() {
            self.inbox.close();
            // What was sent may have taken effect.
            let mut left: Vec<(Closing, bool)> =
                batch.drain(..).chain(parked.calls).map(|closing| (closing, true)).collect();
            while let Ok(closing) = self.inbox.try_recv() {
                left.push((closing, false));
            }
            report.lost = count(self.open.count());
            self.keep(left, &mut report).await;
        }
        metrics::gauge!(metric::USAGE_QUEUE).set(0.0);
        if report.lost > 0 {
            metrics::counter!(metric::USAGE_LOST).increment(report.lost);
            warn!(lost = report.lost, written = report.written, "calls left open, a sweep will book them");
        }
        report
    }

    /// Leaves in the spool what could not be closed.
    async fn keep(&self, left: Vec<(Closing, bool)>, report: &mut FlushReport) {
        let these = count(left.len());
        let Some(spool) = self.spool.as_ref().filter(|_| these > 0) else {
            report.lost += these;
            return;
        };
        match spool.keep(left).await {
            Ok(file) => {
                report.spooled = these;
                metrics::counter!(metric::USAGE_SPOOLED).increment(these);
                warn!(spooled = these, file = %file.display(), "closed calls are left in the spool for the next start");
            }
            Err(e) => {
                report.lost += these;
                error!(error = %e, "the spool cannot be written");
            }
        }
    }

    async fn write(
        &mut self,
        batch: &mut Vec<Closing>,
        parked: &mut Parked,
        shutdown: &CancellationToken,
        written: &mut u64,
    ) {
        let mut failures = 0_u32;
        while self.fill(batch, parked, shutdown).await {
            let failure = match timeout(self.options.flight_timeout, self.ledger.close(batch)).await {
                Ok(Ok(())) => {
                    *written += count(batch.len());
                    batch.clear();
                    if failures > 0 {
                        info!(failures, "the ledger answers again");
                        failures = 0;
                    }
                    self.tell(parked);
                    continue;
                }
                Ok(Err(failure)) => failure,
                Err(_) => CloseError::Unavailable { reason: "no answer in time".to_owned() },
            };
            if let CloseError::Refused { refused, .. } = &failure {
                // Those of one workspace, most likely, whose keys hold something foreign or whose node is away. The
                // others do not wait for them.
                if parked.calls.is_empty() {
                    warn!(error = %failure, calls = refused.len(), "closed calls are set aside, they are tried again");
                }
                let before = batch.len();
                let mut position = 0_usize..;
                let taken = batch
                    .drain(..)
                    .filter(|_| position.next().is_some_and(|at| refused.binary_search(&at).is_ok()));
                parked.take(taken);
                *written += count(before.saturating_sub(refused.len()));
                self.tell(parked);
                continue;
            }
            if failures == 0 {
                warn!(error = %failure, calls = batch.len(), "closed calls wait for the ledger");
            }
            failures = failures.saturating_add(1);
            sleep(pause(failures)).await;
        }
    }

    /// Waits for calls and adds them to what could not be closed so far. `false` when there will be none.
    async fn fill(
        &mut self,
        batch: &mut Vec<Closing>,
        parked: &mut Parked,
        shutdown: &CancellationToken,
    ) -> bool {
        if shutdown.is_cancelled() {
            self.inbox.close();
        }
        while batch.is_empty() {
            let again = parked.again_at();
            tokio::select! {
                biased;
                () = shutdown.cancelled(), if !self.inbox.is_closed() => self.inbox.close(),
                () = sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {
                    parked.give(batch, self.options.batch.max(1));
                }
                taken = self.inbox.recv_many(batch, self.options.batch.max(1)), if !self.ended => {
                    self.ended = taken == 0;
                    // Somebody may be refused for what is still set aside.
                    let awaited = batch.iter().any(Closing::is_awaited);
                    if taken > 0 && taken < self.options.batch && !awaited {
                        // Returns at once during a drain.
                        drop(timeout(self.options.linger, shutdown.cancelled()).await);
                    }
                }
                else => return false,
            }
        }
        while batch.len() < self.options.batch {
            let Ok(closing) = self.inbox.try_recv() else { break };
            batch.push(closing);
        }
        self.tell(parked);
        true
    }

    /// What waits, and for which workspaces no more is taken.
    fn tell(&self, parked: &Parked) {
        #[expect(clippy::cast_precision_loss, reason = "a queue holds far fewer than 2^52 calls")]
        metrics::gauge!(metric::USAGE_QUEUE).set((parked.calls.len() + self.inbox.len()) as f64);
        self.open.park(&parked.calls);
    }
}

fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(failures.min(16))).min(LONGEST_PAUSE)
}

/// What the ledger refused, to be tried again.
#[derive(Debug, Default)]
struct Parked {
    calls: VecDeque<Closing>,
    again_at: Option<Instant>,
    failures: u32,
}

impl Parked {
    fn again_at(&self) -> Option<Instant> {
        self.again_at.filter(|_| !self.calls.is_empty())
    }

    fn take(&mut self, calls: impl Iterator<Item = Closing>) {
        self.calls.extend(calls);
        self.failures = self.failures.saturating_add(1);
        self.again_at = Some(Instant::now() + pause(self.failures));
    }

    /// The oldest of them; those that are refused again come back behind the others.
    fn give(&mut self, batch: &mut Vec<Closing>, most: usize) {
        let these = self.calls.len().min(most);
        batch.extend(self.calls.drain(..these));
        if self.calls.is_empty() {
            self.failures = 0;
        }
        self.again_at = Some(Instant::now() + pause(self.failures));
    }
}

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
