use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::{Class, Tasks};

/// A future that goes on as a task of its own when the one that awaits it goes away.
///
/// A legacy MCP client that disconnects has not cancelled its call (transports, "Sending Messages to the Server"), so
/// the call runs on to its deadline and is metered. The common case, in which the client waits, costs no task.
pub struct DetachOnDrop<F: Future<Output = ()> + Send + 'static> {
    future: Option<Pin<Box<F>>>,
    tasks: Tasks,
    name: &'static str,
}

impl<F: Future<Output = ()> + Send + 'static> DetachOnDrop<F> {
    /// Awaits `future` in place, and hands it to `tasks` when dropped before its end.
    pub fn new(tasks: &Tasks, name: &'static str, future: F) -> Self {
        Self { future: Some(Box::pin(future)), tasks: tasks.clone(), name }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Future for DetachOnDrop<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(future) = self.future.as_mut() else { return Poll::Ready(()) };
        let poll = future.as_mut().poll(cx);
        if poll.is_ready() {
            self.future = None;
        }
        poll
    }
}

impl<F: Future<Output = ()> + Send + 'static> Drop for DetachOnDrop<F> {
    fn drop(&mut self) {
        // A panic inside the future must not be polled again, an aborting drain must not be kept busy.
        if let Some(future) = self.future.take()
            && !std::thread::panicking()
            && !self.tasks.is_aborted()
        {
            self.tasks.spawn(Class::Request, self.name, future);
        }
    }
}

impl<F: Future<Output = ()> + Send + 'static> fmt::Debug for DetachOnDrop<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DetachOnDrop({})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;
    use crate::Drain;

    #[tokio::test(start_paused = true)]
    async fn work_goes_on_when_its_caller_leaves() {
        let drain = Drain::new();
        let (tx, rx) = oneshot::channel();
        let work = DetachOnDrop::new(drain.tasks(), "call", async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert!(tx.send("done").is_ok());
        });
        assert!(tokio::time::timeout(Duration::from_secs(1), work).await.is_err());
        assert_eq!(drain.tasks().running(Class::Request), 1);
        assert_eq!(rx.await, Ok("done"));
    }

    #[tokio::test]
    async fn finished_work_costs_no_task() {
        let drain = Drain::new();
        DetachOnDrop::new(drain.tasks(), "call", async {}).await;
        assert_eq!(drain.tasks().running(Class::Request), 0);
    }
}
