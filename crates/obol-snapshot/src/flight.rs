use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use obol_model::WorkspaceId;
use parking_lot::Mutex;

/// One read of a workspace at a time, whose outcome is shared by everybody who waited for it.
///
/// A queue for a lock rather than a shared future: a reader that is cancelled in mid-read only gives its turn to the
/// next one, and the reads of a workspace end in the order in which they began, so that a slow one can neither bring
/// back a publication that was withdrawn nor hide one that is newer.
#[derive(Debug)]
pub(crate) struct SingleFlight<T> {
    flights: Flights<T>,
}

/// INVARIANT: holds exactly the flights that somebody waits for, each with how many do, so it is bounded by the
/// requests in flight.
type Flights<T> = Mutex<HashMap<WorkspaceId, (usize, Arc<Flight<T>>)>>;

/// Which outcome a reader may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// That of the read that runs, or of a later one.
    Running,
    /// Only that of a read that begins from now on: the reader knows that something changed just now.
    Later,
}

#[derive(Debug)]
struct Flight<T> {
    /// The number of the last read that began.
    begun: AtomicU64,
    /// The number of the last read that ended. A cancelled read never ends.
    ended: AtomicU64,
    turn: tokio::sync::Mutex<Option<(u64, T)>>,
}

impl<T: Clone> SingleFlight<T> {
    pub(crate) fn new() -> Self {
        Self { flights: Mutex::new(HashMap::new()) }
    }

    /// Runs `read`, or waits for another reader's read that is recent enough. Cancel-safe.
    pub(crate) async fn run(&self, workspace: &WorkspaceId, need: Need, read: impl Future<Output = T>) -> T {
        let seat = Seat::take(self, workspace);
        let flight = &*seat.flight;
        let enough = flight.oldest_that_serves(need);

        let mut turn = flight.turn.lock().await;
        if let Some((number, outcome)) = &*turn
            && *number >= enough
        {
            return outcome.clone();
        }
        let number = flight.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let outcome = read.await;
        *turn = Some((number, outcome.clone()));
        flight.ended.store(number, Ordering::SeqCst);
        outcome
    }

    #[cfg(test)]
    fn is_idle(&self) -> bool {
        self.flights.lock().is_empty()
    }
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        Self { begun: AtomicU64::new(0), ended: AtomicU64::new(0), turn: tokio::sync::Mutex::default() }
    }
}

impl<T> Flight<T> {
    fn oldest_that_serves(&self, need: Need) -> u64 {
        let begun = self.begun.load(Ordering::SeqCst);
        let running = begun > self.ended.load(Ordering::SeqCst);
        if running && need == Need::Running { begun } else { begun + 1 }
    }
}

/// A reader's hold on its flight; the last one to leave removes the flight.
struct Seat<'a, T> {
    flights: &'a Flights<T>,
    workspace: &'a WorkspaceId,
    flight: Arc<Flight<T>>,
}

impl<'a, T> Seat<'a, T> {
    fn take(single: &'a SingleFlight<T>, workspace: &'a WorkspaceId) -> Self {
        let mut flights = single.flights.lock();
        let (seats, flight) = flights.entry(workspace.clone()).or_default();
        *seats += 1;
        Self { flights: &single.flights, workspace, flight: Arc::clone(flight) }
    }
}

impl<T> Drop for Seat<'_, T> {
    fn drop(&mut self) {
        let mut flights = self.flights.lock();
        if let Some((seats, _)) = flights.get_mut(self.workspace) {
            *seats -= 1;
            if *seats == 0 {
                flights.remove(self.workspace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt as _, StreamExt as _, future, stream};
    use tokio::sync::oneshot;

    fn acme() -> WorkspaceId {
        "acme".parse().unwrap()
    }

    #[tokio::test]
    async fn those_who_wait_share_the_read_that_runs() {
        let (single, ws) = (SingleFlight::new(), acme());
        let (go, wait) = oneshot::channel::<u32>();
        let first = single.run(&ws, Need::Running, wait.map(|n| n.unwrap()));
        let others =
            stream::iter(0..50).map(|_| single.run(&ws, Need::Running, future::pending())).buffered(50);
        let (first, others, ()) =
            tokio::join!(biased; first, others.collect::<Vec<_>>(), async { go.send(7).unwrap() });
        assert_eq!((first, others), (7, vec![7; 50]));
        assert!(single.is_idle());
    }

    #[tokio::test]
    async fn news_are_not_served_by_a_read_that_began_before_them() {
        let (single, ws) = (SingleFlight::new(), acme());
        let (go, wait) = oneshot::channel::<u32>();
        let before = single.run(&ws, Need::Running, wait.map(|n| n.unwrap()));
        let after = single.run(&ws, Need::Later, future::ready(2));
        let joined = single.run(&ws, Need::Running, future::ready(3));
        let (before, after, joined, ()) =
            tokio::join!(biased; before, after, joined, async { go.send(1).unwrap() });
        // The third came while the first ran, so either outcome would do; it takes the newest.
        assert_eq!((before, after, joined), (1, 2, 2));
    }

    #[tokio::test]
    async fn a_cancelled_reader_gives_its_turn_to_the_next() {
        let (single, ws) = (SingleFlight::new(), acme());
        let mut cancelled = Box::pin(single.run(&ws, Need::Running, future::pending::<u32>()));
        assert!(cancelled.as_mut().now_or_never().is_none());
        let mut next = Box::pin(single.run(&ws, Need::Running, future::ready(5)));
        assert!(next.as_mut().now_or_never().is_none());
        drop(cancelled);
        assert_eq!(next.await, 5);
        assert!(single.is_idle());
    }

    #[tokio::test]
    async fn an_outcome_is_never_shared_with_those_who_come_after_it() {
        let (single, ws) = (SingleFlight::new(), acme());
        let _seat = Seat::take(&single, &ws);
        assert_eq!(single.run(&ws, Need::Running, future::ready(1)).await, 1);
        assert_eq!(single.run(&ws, Need::Running, future::ready(2)).await, 2);
    }
}
