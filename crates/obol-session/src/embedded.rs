use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::snapshot::SessionBinding;
use obol_model::{Clock, Principal, SessionId, WorkspaceId};
use parking_lot::Mutex;

use crate::store::{Caller, Lookup, Owner, SessionStore, slack};
use crate::{SessionError, SessionRecord};

/// Below this many sessions the expired ones are not worth looking for.
const FIRST_PURGE: usize = 1024;

/// Sessions of a single process, which end with it. The same contract as [`crate::RedisSessions`].
pub struct EmbeddedSessions {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sessions: HashMap<SessionId, Entry>,
    places: HashMap<(WorkspaceId, Principal), HashMap<SessionId, i64>>,
    /// Expired sessions are removed when there are so many: twice those that lived after the last time, so that the
    /// work per creation is constant and the memory at most double.
    purge_at: usize,
}

/// Encoded, as in Redis: what would not survive there must not survive here. Times are milliseconds.
struct Entry {
    record: Vec<u8>,
    rev: u64,
    workspace_id: WorkspaceId,
    principal: Principal,
    expires: i64,
}

impl fmt::Debug for EmbeddedSessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedSessions").finish_non_exhaustive()
    }
}

impl EmbeddedSessions {
    /// An empty store. Sessions expire by this clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, state: Mutex::default() }
    }

    fn now(&self) -> i64 {
        self.clock.now().as_millisecond()
    }
}

fn after(now: i64, life: Duration) -> i64 {
    now.saturating_add(i64::try_from(life.as_millis()).unwrap_or(i64::MAX))
}

impl State {
    fn session(&mut self, id: SessionId, now: i64) -> Option<&mut Entry> {
        self.sessions.get_mut(&id).filter(|entry| entry.expires > now)
    }

    fn lookup(&mut self, id: SessionId, caller: &Caller<'_>, now: i64) -> Lookup<&mut Entry> {
        match self.session(id, now) {
            None => Lookup::Absent,
            Some(entry) if entry.workspace_id != *caller.workspace_id => Lookup::ForeignWorkspace,
            Some(entry)
                if entry.principal != *caller.principal && caller.binding == SessionBinding::Principal =>
            {
                Lookup::ForeignPrincipal
            }
            Some(entry) => Lookup::Found(entry),
        }
    }

    /// The place is renewed when the session would outlive it, as in Redis.
    fn renew_place(&mut self, owner: &(WorkspaceId, Principal), id: SessionId, now: i64, life: Duration) {
        if let Some(place) = self.places.get_mut(owner).and_then(|places| places.get_mut(&id))
            && after(now, life) > *place
        {
            *place = after(now, life + slack(life));
        }
    }

    fn give_back(&mut self, owner: &(WorkspaceId, Principal), id: SessionId) {
        if let Some(places) = self.places.get_mut(owner) {
            places.remove(&id);
            if places.is_empty() {
                self.places.remove(owner);
            }
        }
    }

    fn purge(&mut self, now: i64) {
        if self.sessions.len() < self.purge_at.max(FIRST_PURGE) {
            return;
        }
        self.sessions.retain(|_, entry| entry.expires > now);
        self.places.retain(|_, places| {
            places.retain(|_, until| *until > now);
            !places.is_empty()
        });
        self.purge_at = self.sessions.len() * 2;
    }
}

fn key(owner: Owner<'_>) -> (WorkspaceId, Principal) {
    (owner.workspace_id.clone(), owner.principal.clone())
}

#[async_trait]
impl SessionStore for EmbeddedSessions {
    async fn create(&self, record: &SessionRecord, limit: usize, life: Duration) -> Result<(), SessionError> {
        let (now, id) = (self.now(), record.session_id);
        let entry = Entry {
            record: record.encode()?,
            rev: record.rev,
            workspace_id: record.workspace_id.clone(),
            principal: record.principal.clone(),
            expires: after(now, life),
        };
        let mut state = self.state.lock();
        if let Some(places) = state.places.get_mut(&key(record.owner())) {
            places.retain(|_, until| *until > now);
            if places.len() >= limit && !places.contains_key(&id) {
                return Err(SessionError::TooMany { limit });
            }
        }
        if state.session(id, now).is_some() {
            return Err(SessionError::AlreadyExists);
        }
        state.purge(now);
        state.sessions.insert(id, entry);
        state.places.entry(key(record.owner())).or_default().insert(id, after(now, life + slack(life)));
        Ok(())
    }

    async fn resume(
        &self,
        id: SessionId,
        caller: &Caller<'_>,
        now: Timestamp,
        life: Duration,
    ) -> Result<Lookup<SessionRecord>, SessionError> {
        let present = self.now();
        let mut state = self.state.lock();
        let lookup = state.lookup(id, caller, present).try_map(|entry| {
            entry.expires = after(present, life);
            SessionRecord::decode(&entry.record, entry.rev, now)
        })?;
        if let Lookup::Found(record) = &lookup {
            state.renew_place(&key(record.owner()), id, present, life);
        }
        Ok(lookup)
    }

    async fn renew(
        &self,
        id: SessionId,
        owner: Owner<'_>,
        _: Timestamp,
        life: Duration,
    ) -> Result<bool, SessionError> {
        let Owner { workspace_id, principal } = owner;
        let caller = Caller { workspace_id, principal, binding: SessionBinding::Principal };
        let now = self.now();
        let mut state = self.state.lock();
        let Lookup::Found(entry) = state.lookup(id, &caller, now) else { return Ok(false) };
        entry.expires = after(now, life);
        state.renew_place(&key(owner), id, now, life);
        Ok(true)
    }

    async fn save(&self, record: &SessionRecord, read: u64, life: Duration) -> Result<(), SessionError> {
        let now = self.now();
        let bytes = record.encode()?;
        let mut state = self.state.lock();
        let entry = state
            .session(record.session_id, now)
            .filter(|entry| entry.workspace_id == record.workspace_id && entry.principal == record.principal)
            .ok_or(SessionError::NoSuchSession)?;
        if entry.rev != read {
            return Err(SessionError::Conflict);
        }
        (entry.record, entry.rev, entry.expires) = (bytes, record.rev, after(now, life));
        state.renew_place(&key(record.owner()), record.session_id, now, life);
        Ok(())
    }

    async fn delete(&self, id: SessionId, caller: &Caller<'_>) -> Result<Lookup<()>, SessionError> {
        let now = self.now();
        let mut state = self.state.lock();
        let lookup = state.lookup(id, caller, now).try_map(|_| Ok::<(), SessionError>(()))?;
        if lookup == Lookup::Found(())
            && let Some(entry) = state.sessions.remove(&id)
        {
            state.give_back(&(entry.workspace_id, entry.principal), id);
        }
        Ok(lookup)
    }

    async fn of(&self, owner: Owner<'_>) -> Result<Vec<SessionId>, SessionError> {
        let state = self.state.lock();
        Ok(state.places.get(&key(owner)).map(|places| places.keys().copied().collect()).unwrap_or_default())
    }

    async fn live(&self, ids: &[SessionId]) -> Result<Vec<bool>, SessionError> {
        let now = self.now();
        let mut state = self.state.lock();
        Ok(ids.iter().map(|id| state.session(*id, now).is_some()).collect())
    }
    async fn count(&self, _: Timestamp) -> Result<u64, SessionError> {
        let now = self.now();
        let live = self.state.lock().sessions.values().filter(|entry| entry.expires > now).count();
        Ok(u64::try_from(live).unwrap_or(u64::MAX))
    }
}
