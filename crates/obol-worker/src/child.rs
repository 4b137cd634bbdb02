use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use obol_model::metric;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::WorkerOptions;
use crate::stderr::Tail;

/// How long the pipes of a child that has ended may be read on: a descendant that left the group can hold them open.
const PIPE_GRACE: Duration = Duration::from_secs(1);
/// How long the kernel may take to end a killed process.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// What the owner of a child and its other tasks tell each other.
#[derive(Debug)]
pub(crate) struct Signals {
    /// Somebody wants the child to end, all within this time.
    pub(crate) close: watch::Sender<Option<Duration>>,
    /// Ends the writer, which closes stdin.
    pub(crate) stdin: CancellationToken,
    /// Stdout has ended.
    pub(crate) stdout_ended: CancellationToken,
    /// Stderr has ended.
    pub(crate) stderr_ended: CancellationToken,
    /// Ends the readers.
    pub(crate) pipes: CancellationToken,
    /// The child is reaped and its group is gone.
    pub(crate) gone: CancellationToken,
}

impl Signals {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            close: watch::Sender::new(None),
            stdin: CancellationToken::new(),
            stdout_ended: CancellationToken::new(),
            stderr_ended: CancellationToken::new(),
            pipes: CancellationToken::new(),
            gone: CancellationToken::new(),
        })
    }
}

/// The process group of a child. Whatever happens to its owner, the group is killed.
#[derive(Debug)]
struct Group(Pid);

impl Group {
    fn signal(&self, signal: Signal) {
        match killpg(self.0, signal) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(e) => tracing::warn!(error = %e, %signal, "worker group could not be signalled"),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
    }
}

/// Counts running children, also when their owner is aborted.
struct Counted;

impl Counted {
    fn new() -> Self {
        metrics::gauge!(metric::WORKERS).increment(1.0);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!(metric::WORKERS).decrement(1.0);
    }
}

/// Owns the child until it is reaped. The only one that waits for it.
pub(crate) async fn own(
    mut child: Child,
    pid: Pid,
    name: String,
    signals: Arc<Signals>,
    tail: Arc<Tail>,
    options: WorkerOptions,
) {
    let (group, counted) = (Group(pid), Counted::new());
    let mut close = signals.close.subscribe();
    let asked = tokio::select! {
        _ = child.wait() => None,
        // A server that has closed its stdout can answer nothing any more.
        () = signals.stdout_ended.cancelled() => Some(options.stdin_grace + options.term_grace),
        within = close.wait_for(Option::is_some) => within.ok().and_then(|w| *w),
    };
    let wanted = signals.close.borrow().is_some();
    signals.stdin.cancel();
    if let Some(within) = asked {
        stop(&mut child, &group, within, &options, wanted).await;
    }
    // Reaps, or reads what was reaped.
    let status = tokio::time::timeout(KILL_GRACE, child.wait()).await;
    // Descendants in the group outlive the leader. Its number cannot belong to strangers yet: it is taken as long as
    // the group has a member, and otherwise it was free only since a moment.
    drop(group);
    // What the child said last is still read: the calls that wait are told after it, and its last words are the reason of
    // a crash.
    let ended = async { tokio::join!(signals.stdout_ended.cancelled(), signals.stderr_ended.cancelled()) };
    if tokio::time::timeout(PIPE_GRACE, ended).await.is_err() {
        tracing::debug!(worker = name, "worker left its pipes open behind it");
    }
    report(&name, status.ok().and_then(Result::ok), wanted, &tail);
    signals.pipes.cancel();
    drop(counted);
    signals.gone.cancel();
}

/// Stdin is closed already: then `SIGTERM`, then `SIGKILL`, to the whole group (lifecycle, "Shutdown").
async fn stop(child: &mut Child, group: &Group, within: Duration, options: &WorkerOptions, wanted: bool) {
    let end = Instant::now() + within;
    // `SIGKILL` needs a moment of the bound as well.
    let last = end.checked_sub(within / 10).unwrap_or(end);
    let first = last.min(Instant::now() + options.stdin_grace.min(within / 3));
    if tokio::time::timeout_at(first, child.wait()).await.is_ok() {
        return;
    }
    group.signal(Signal::SIGTERM);
    let second = last.min(Instant::now() + options.term_grace);
    if tokio::time::timeout_at(second, child.wait()).await.is_ok() {
        return;
    }
    group.signal(Signal::SIGKILL);
    if wanted {
        tracing::info!("worker did not end when asked, killed");
    }
}

fn report(name: &str, status: Option<ExitStatus>, wanted: bool, tail: &Tail) {
    let Some(status) = status else {
        tracing::error!(worker = name, "worker could not be reaped");
        return;
    };
    if wanted {
        tracing::debug!(worker = name, %status, "worker ended");
    } else {
        tracing::warn!(worker = name, %status, stderr = tail.text(), "worker ended by itself");
    }
}
