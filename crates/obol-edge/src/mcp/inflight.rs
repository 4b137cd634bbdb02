//! Which calls of which session are under way on this replica, so that they can be cancelled.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use obol_model::SessionId;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// A call that may be cancelled; leaves the table when dropped.
#[derive(Debug)]
pub(super) struct InFlightCall {
    table: InFlight,
    session: SessionId,
    serial: u64,
    pub(super) cancelled: CancellationToken,
    session_ended: Arc<AtomicBool>,
}

impl InFlightCall {
    /// Whether it was cancelled because its session ended; otherwise the client did it.
    pub(super) fn session_ended(&self) -> bool {
        self.session_ended.load(Ordering::Acquire)
    }
}

/// The calls of all sessions.
#[derive(Debug, Clone, Default)]
pub(super) struct InFlight {
    inner: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    calls: HashMap<SessionId, Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    serial: u64,
    /// The client's id as it spelled it: `1` and `"1"` are two ids.
    id: String,
    token: CancellationToken,
    session_ended: Arc<AtomicBool>,
}

impl InFlight {
    /// Enters a call of `session` under the client's own id.
    pub(super) fn enter(&self, session: SessionId, id: &str) -> InFlightCall {
        let token = CancellationToken::new();
        let mut table = self.inner.lock();
        table.next += 1;
        let serial = table.next;
        let session_ended = Arc::<AtomicBool>::default();
        let entry =
            Entry { serial, id: id.to_owned(), token: token.clone(), session_ended: session_ended.clone() };
        table.calls.entry(session).or_default().push(entry);
        InFlightCall { table: self.clone(), session, serial, cancelled: token, session_ended }
    }

    /// Cancels the call that `id` names. One that is unknown or finished is ignored, and one that is ambiguous (a
    /// client that uses one id for two calls) cancels nothing, since it could hit the wrong one (DESIGN §9.6).
    pub(super) fn cancel(&self, session: SessionId, id: &str) {
        let table = self.inner.lock();
        let mut matching = table.calls.get(&session).into_iter().flatten().filter(|e| e.id == id);
        if let (Some(entry), None) = (matching.next(), matching.next()) {
            entry.token.cancel();
        }
    }

    /// Cancels everything of a session that has ended.
    pub(super) fn cancel_all(&self, session: SessionId) {
        for entry in self.inner.lock().calls.get(&session).into_iter().flatten() {
            entry.session_ended.store(true, Ordering::Release);
            entry.token.cancel();
        }
    }
}

impl Drop for InFlightCall {
    fn drop(&mut self) {
        let mut table = self.table.inner.lock();
        if let Some(calls) = table.calls.get_mut(&self.session) {
            calls.retain(|e| e.serial != self.serial);
            if calls.is_empty() {
                table.calls.remove(&self.session);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> SessionId {
        SessionId::generate(jiff::Timestamp::UNIX_EPOCH).unwrap()
    }

    #[test]
    fn a_cancel_hits_exactly_the_call_it_names() {
        let table = InFlight::default();
        let (ours, other) = (session(), session());
        let (a, b) = (table.enter(ours, "1"), table.enter(ours, "\"1\""));
        let foreign = table.enter(other, "1");
        table.cancel(ours, "1");
        assert!(a.cancelled.is_cancelled() && !a.session_ended());
        assert!(!b.cancelled.is_cancelled() && !foreign.cancelled.is_cancelled());
        table.cancel(ours, "7");
        drop(a);
        table.cancel(ours, "1");
        assert!(!b.cancelled.is_cancelled());
    }

    #[test]
    fn an_ambiguous_cancel_hits_nothing_and_a_deleted_session_ends_all() {
        let table = InFlight::default();
        let ours = session();
        let calls = [table.enter(ours, "1"), table.enter(ours, "1")];
        table.cancel(ours, "1");
        assert!(calls.iter().all(|c| !c.cancelled.is_cancelled()));
        table.cancel_all(ours);
        assert!(calls.iter().all(|c| c.cancelled.is_cancelled() && c.session_ended()));
        drop(calls);
        assert!(table.inner.lock().calls.is_empty());
    }
}
