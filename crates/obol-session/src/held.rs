//! Sessions that this replica works for. An open stream and a running call are activity (DESIGN §6.6) that no request
//! tells of, so whoever holds one renews its session.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use obol_model::{Principal, SessionId, WorkspaceId};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::{Owner, SessionRecord};

/// Sessions that were let go and wait for their last renewal. More are only let go: they have most of a life left.
const MOST_RELEASED: usize = 10_000;

/// A session that somebody works for. It does not expire until this is dropped, and then its life begins anew.
#[derive(Debug)]
pub struct HeldSession {
    record: SessionRecord,
    held: Arc<Held>,
}

impl Deref for HeldSession {
    type Target = SessionRecord;

    fn deref(&self) -> &SessionRecord {
        &self.record
    }
}

impl Drop for HeldSession {
    fn drop(&mut self) {
        self.held.release(self.record.session_id);
    }
}

/// The sessions that are held.
#[derive(Debug)]
pub(crate) struct Held {
    table: Mutex<Table>,
    released: Notify,
    /// A session that was renewed so lately is not renewed for being let go: a call of milliseconds costs nothing.
    fresh: Duration,
}

#[derive(Debug, Default)]
struct Table {
    open: HashMap<SessionId, Open>,
    released: Vec<Due>,
}

#[derive(Debug)]
struct Open {
    workspace_id: WorkspaceId,
    principal: Principal,
    holds: usize,
    renewed: Instant,
}

/// A session that is to be renewed.
#[derive(Debug)]
pub(crate) struct Due {
    pub(crate) session: SessionId,
    pub(crate) workspace_id: WorkspaceId,
    principal: Principal,
}

impl Due {
    pub(crate) fn owner(&self) -> Owner<'_> {
        Owner { workspace_id: &self.workspace_id, principal: &self.principal }
    }
}

impl Held {
    pub(crate) fn new(fresh: Duration) -> Arc<Self> {
        Arc::new(Self { table: Mutex::default(), released: Notify::new(), fresh })
    }

    /// Holds a session that has just been created, resumed or saved.
    pub(crate) fn hold(self: &Arc<Self>, record: SessionRecord) -> HeldSession {
        let now = Instant::now();
        let mut table = self.table.lock();
        let open = table.open.entry(record.session_id).or_insert_with(|| Open {
            workspace_id: record.workspace_id.clone(),
            principal: record.principal.clone(),
            holds: 0,
            renewed: now,
        });
        open.holds += 1;
        open.renewed = now;
        drop(table);
        HeldSession { record, held: self.clone() }
    }

    fn release(&self, session: SessionId) {
        let mut table = self.table.lock();
        let Some(open) = table.open.get_mut(&session) else { return };
        open.holds = open.holds.saturating_sub(1);
        if open.holds > 0 {
            return;
        }
        let stale = open.renewed.elapsed() > self.fresh;
        if let Some(Open { workspace_id, principal, .. }) = table.open.remove(&session)
            && stale
            && table.released.len() < MOST_RELEASED
        {
            table.released.push(Due { session, workspace_id, principal });
            drop(table);
            self.released.notify_one();
        }
    }

    /// Those that were let go and have to be renewed a last time, once there are some. Cancel-safe.
    pub(crate) async fn released(&self) -> Vec<Due> {
        loop {
            let released = std::mem::take(&mut self.table.lock().released);
            if !released.is_empty() {
                return released;
            }
            self.released.notified().await;
        }
    }

    /// Those that were not renewed for so long.
    pub(crate) fn older_than(&self, age: Duration) -> Vec<Due> {
        let table = self.table.lock();
        let due = table.open.iter().filter(|(_, open)| open.renewed.elapsed() >= age);
        due.map(|(session, open)| Due {
            session: *session,
            workspace_id: open.workspace_id.clone(),
            principal: open.principal.clone(),
        })
        .collect()
    }

    pub(crate) fn renewed(&self, session: SessionId) {
        if let Some(open) = self.table.lock().open.get_mut(&session) {
            open.renewed = Instant::now();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.lock().open.len()
    }

    pub(crate) fn of(&self, owner: Owner<'_>) -> Vec<SessionId> {
        let table = self.table.lock();
        let own = table.open.iter().filter(|(_, open)| {
            open.workspace_id == *owner.workspace_id && open.principal == *owner.principal
        });
        own.map(|(session, _)| *session).collect()
    }
}
