use std::fmt;
use std::future::Future;
use std::sync::Arc;

use obol_model::metric;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What a task is for; decides how a drain treats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A client's connection or a call that somebody waits for: a drain waits for it, then aborts it.
    Request,
    /// Serves the process itself (refreshers, subscribers, readers of workers): ends through its own token.
    Background,
}

impl Class {
    fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Background => "background",
        }
    }
}

/// Spawns tasks and knows which are left.
#[derive(Clone)]
pub struct Tasks {
    inner: Arc<Inner>,
}

struct Inner {
    runtime: Handle,
    requests: TaskTracker,
    background: TaskTracker,
    /// Cancelled when request work is cut; a child of `abort_all`.
    abort_requests: CancellationToken,
    /// Cancelled when the process ends. Background tasks outlive the requests, whose usage they write.
    abort_all: CancellationToken,
}

impl Tasks {
    pub(crate) fn new() -> Self {
        let abort_all = CancellationToken::new();
        Self {
            inner: Arc::new(Inner {
                runtime: Handle::current(),
                requests: TaskTracker::new(),
                background: TaskTracker::new(),
                abort_requests: abort_all.child_token(),
                abort_all,
            }),
        }
    }

    /// Runs `future` until it ends or the drain aborts it. A panic ends this task only and is reported by the panic
    /// hook.
    pub fn spawn(&self, class: Class, name: &'static str, future: impl Future<Output = ()> + Send + 'static) {
        let abort = match class {
            Class::Request => self.inner.abort_requests.clone(),
            Class::Background => self.inner.abort_all.clone(),
        };
        let gauge = TaskGauge::up(class);
        let task = async move {
            let _gauge = gauge;
            if abort.run_until_cancelled(future).await.is_none() {
                tracing::debug!(task = name, "task aborted");
            }
        };
        self.tracker(class).spawn_on(task, &self.inner.runtime);
    }

    /// How many tasks of a class run.
    pub fn running(&self, class: Class) -> usize {
        self.tracker(class).len()
    }

    /// Whether the drain has begun to cut request work.
    pub fn is_aborted(&self) -> bool {
        self.inner.abort_requests.is_cancelled()
    }

    pub(crate) fn abort_requests(&self) {
        self.inner.abort_requests.cancel();
    }

    pub(crate) fn abort_all(&self) {
        self.inner.abort_all.cancel();
    }

    pub(crate) async fn wait_for_requests(&self) {
        self.inner.requests.close();
        self.inner.requests.wait().await;
    }

    pub(crate) fn describe(&self) -> String {
        format!("{} requests, {} background tasks", self.inner.requests.len(), self.inner.background.len())
    }

    fn tracker(&self, class: Class) -> &TaskTracker {
        match class {
            Class::Request => &self.inner.requests,
            Class::Background => &self.inner.background,
        }
    }
}

impl fmt::Debug for Tasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tasks({})", self.describe())
    }
}

struct TaskGauge(Class);

impl TaskGauge {
    fn up(class: Class) -> Self {
        metrics::gauge!(metric::TASKS, "class" => class.as_str()).increment(1.0);
        Self(class)
    }
}

impl Drop for TaskGauge {
    fn drop(&mut self) {
        metrics::gauge!(metric::TASKS, "class" => self.0.as_str()).decrement(1.0);
    }
}
