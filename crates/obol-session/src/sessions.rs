use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use obol_model::snapshot::SessionBinding;
use obol_model::{Clock, KeyId, Principal, SessionId, WorkspaceId, metric};
use serde_json::value::RawValue;

use crate::store::{Caller, Lookup, Place, SessionStore};
use crate::{SessionError, SessionRecord};

/// How often a change is tried against other writers of the same session before the caller is told.
const ATTEMPTS: usize = 16;

/// Bounds of sessions.
#[derive(Debug, Clone, Copy)]
pub struct SessionOptions {
    /// How long an unused session lives.
    pub ttl: Duration,
    /// Live sessions that one principal may have in a workspace.
    pub max_per_principal: usize,
}

/// What `initialize` knows of a new session.
#[derive(Debug)]
pub struct NewSession {
    /// The tenant.
    pub workspace_id: WorkspaceId,
    /// The key that the client came with.
    pub key_id: KeyId,
    /// Who called.
    pub principal: Principal,
    /// The protocol version that was negotiated.
    pub protocol_version: String,
    /// `clientInfo`, as it was sent.
    pub client_info: Option<Box<RawValue>>,
    /// `capabilities`, as they were sent.
    pub client_capabilities: Option<Box<RawValue>>,
}

/// The sessions of all replicas.
///
/// Every method may be abandoned at any point: the store's steps are atomic, so a session is as it was or as it was to
/// be. An abandoned [`Sessions::create`] may leave a session that nobody knows and a taken place; both expire.
#[derive(Debug, Clone)]
pub struct Sessions {
    store: Arc<dyn SessionStore>,
    clock: Arc<dyn Clock>,
    options: SessionOptions,
}

impl Sessions {
    /// Sessions in this store.
    pub fn new(store: Arc<dyn SessionStore>, clock: Arc<dyn Clock>, options: SessionOptions) -> Self {
        Self { store, clock, options }
    }

    /// Creates a session.
    ///
    /// # Errors
    /// [`SessionError::TooMany`] when the principal has no place left, [`SessionError::TooLarge`] when the client sent
    /// too much about itself, [`SessionError::Unavailable`].
    pub async fn create(&self, new: NewSession) -> Result<SessionRecord, SessionError> {
        let now = self.clock.now();
        let session_id =
            SessionId::generate(now).map_err(|why| SessionError::NoRandomness { reason: why.to_string() })?;
        let record = SessionRecord {
            schema_version: SessionRecord::SCHEMA,
            session_id,
            workspace_id: new.workspace_id,
            key_id: new.key_id,
            principal: new.principal,
            protocol_version: new.protocol_version,
            client_info: new.client_info,
            client_capabilities: new.client_capabilities,
            log_level: None,
            subscriptions: BTreeSet::new(),
            upstreams: BTreeMap::new(),
            created_at: now,
            last_seen: now,
            rev: 1,
        };
        let place = Place { workspace_id: &record.workspace_id, principal: &record.principal };
        let SessionOptions { ttl, max_per_principal: limit } = self.options;
        // The place first: counting afterwards would let concurrent creations pass the limit together.
        if !self.store.take_place(place, session_id, limit, ttl).await? {
            return Err(SessionError::TooMany { limit });
        }
        if let Err(why) = self.store.create(&record, ttl).await {
            if let Err(second) = self.store.give_back(place, session_id).await {
                tracing::debug!(error = %second, "cannot give back the place of a session");
            }
            return Err(why);
        }
        count("created");
        Ok(record)
    }

    /// Finds a session for a request and renews its life, in one flight.
    ///
    /// # Errors
    /// [`SessionError::NoSuchSession`] for whatever the caller may not use; [`SessionError::Unavailable`] when the
    /// store could not be asked, whether the session exists or not; [`SessionError::Corrupt`].
    pub async fn get_or_resume(
        &self,
        id_text: &str,
        caller: &Caller<'_>,
    ) -> Result<SessionRecord, SessionError> {
        let id = parse(id_text)?;
        let lookup = self.store.resume(id, caller, self.clock.now(), self.options.ttl).await?;
        let record = allowed(lookup, id, caller)?;
        count("resumed");
        Ok(record)
    }

    /// Replaces a session, if nobody else did since `record` was read, and renews its life.
    ///
    /// # Errors
    /// [`SessionError::Conflict`] when somebody did; [`SessionError::NoSuchSession`] when it ended meanwhile;
    /// [`SessionError::TooLarge`], [`SessionError::Unavailable`].
    pub async fn save(&self, record: &SessionRecord) -> Result<SessionRecord, SessionError> {
        let saved = SessionRecord {
            schema_version: SessionRecord::SCHEMA,
            rev: record.rev.saturating_add(1),
            last_seen: self.clock.now(),
            ..record.clone()
        };
        self.store.save(&saved, record.rev, self.options.ttl).await?;
        Ok(saved)
    }

    /// Changes a session on top of what others changed meanwhile: `change` is applied to the record as it is now,
    /// several times if need be.
    ///
    /// # Errors
    /// As [`Sessions::save`]; a conflict only when others were faster many times in a row.
    pub async fn update(
        &self,
        record: SessionRecord,
        caller: &Caller<'_>,
        change: impl Fn(&mut SessionRecord) + Send,
    ) -> Result<SessionRecord, SessionError> {
        let mut current = record;
        for _ in 1..ATTEMPTS {
            change(&mut current);
            match self.save(&current).await {
                Err(SessionError::Conflict) => {
                    let id = current.session_id;
                    let lookup = self.store.resume(id, caller, self.clock.now(), self.options.ttl).await?;
                    current = allowed(lookup, id, caller)?;
                }
                outcome => return outcome,
            }
        }
        change(&mut current);
        self.save(&current).await
    }

    /// Ends a session. No request that begins after the answer finds it, on any replica.
    ///
    /// # Errors
    /// As [`Sessions::get_or_resume`]; a session that the caller may not use is not touched.
    pub async fn delete(&self, id_text: &str, caller: &Caller<'_>) -> Result<(), SessionError> {
        let id = parse(id_text)?;
        allowed(self.store.delete(id, caller).await?, id, caller)?;
        count("deleted");
        Ok(())
    }

    /// Whether each of these sessions lives, in one flight. Renews nothing.
    ///
    /// # Errors
    /// [`SessionError::Unavailable`].
    pub async fn live(&self, ids: &[SessionId]) -> Result<Vec<bool>, SessionError> {
        self.store.live(ids).await
    }

    /// Ends all sessions of a principal in a workspace and tells how many there were, as when its key is revoked.
    ///
    /// # Errors
    /// [`SessionError::Unavailable`]; some sessions may have ended then.
    pub async fn delete_of_key(
        &self,
        workspace_id: &WorkspaceId,
        principal: &Principal,
    ) -> Result<usize, SessionError> {
        let place = Place { workspace_id, principal };
        let caller = Caller { workspace_id, principal, binding: SessionBinding::Principal };
        let mut ended = 0;
        // A place without a session may be that of one that is just being created, so it is left to expire.
        for id in self.store.placed(place).await? {
            if self.store.delete(id, &caller).await? == Lookup::Found(()) {
                ended += 1;
                count("deleted");
            }
        }
        Ok(ended)
    }
}

/// A malformed id is answered like a missing one and never reaches the store.
fn parse(id_text: &str) -> Result<SessionId, SessionError> {
    id_text.parse().map_err(|_| SessionError::NoSuchSession)
}

fn allowed<T>(lookup: Lookup<T>, id: SessionId, caller: &Caller<'_>) -> Result<T, SessionError> {
    match lookup {
        Lookup::Found(found) => return Ok(found),
        Lookup::Absent => {}
        Lookup::ForeignPrincipal => {
            tracing::debug!(session_last4 = id.last4(), "session of another principal refused");
        }
        Lookup::ForeignWorkspace => tracing::warn!(
            workspace_id = %caller.workspace_id,
            session_last4 = id.last4(),
            "session of another workspace refused"
        ),
    }
    Err(SessionError::NoSuchSession)
}

fn count(event: &'static str) {
    metrics::counter!(metric::SESSION_EVENTS, "event" => event).increment(1);
}
