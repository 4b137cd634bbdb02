use std::path::PathBuf;
use std::time::Duration;

/// The bounds of child processes.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The longest line of stdout; longer ones are skipped.
    pub max_message: usize,
    /// Messages that wait for the child to read its stdin.
    pub max_queued: usize,
    /// Bytes of such messages. A message that is larger than this is refused.
    pub max_queued_bytes: u32,
    /// How long a message waits for a place in that queue.
    pub write_timeout: Duration,
    /// Calls in flight on one child.
    pub max_calls: usize,
    /// How long a child has to end by itself after its stdin was closed, before it gets `SIGTERM`. The time that
    /// `close` is given bounds all of it.
    pub stdin_grace: Duration,
    /// How long it has after `SIGTERM`, before it gets `SIGKILL`.
    pub term_grace: Duration,
    /// The working directory of children; that of the gateway when unset.
    pub directory: Option<PathBuf>,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            max_message: 16 << 20,
            max_queued: 256,
            max_queued_bytes: 32 << 20,
            write_timeout: Duration::from_secs(10),
            max_calls: 1024,
            stdin_grace: Duration::from_secs(2),
            term_grace: Duration::from_secs(5),
            directory: None,
        }
    }
}
