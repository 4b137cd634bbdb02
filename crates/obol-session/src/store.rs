use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::snapshot::SessionBinding;
use obol_model::{Principal, SessionId, WorkspaceId};

use crate::{SessionError, SessionRecord};

/// Who asks for a session.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'a> {
    /// The tenant.
    pub workspace_id: &'a WorkspaceId,
    /// The caller.
    pub principal: &'a Principal,
    /// Whether the workspace's principals share sessions, by the pinned publication.
    pub binding: SessionBinding,
}

/// Whose sessions are counted together. Per workspace: a key's id is unique there only, and one tenant must not use up
/// or end another's sessions.
#[derive(Debug, Clone, Copy)]
pub struct Owner<'a> {
    /// The tenant.
    pub workspace_id: &'a WorkspaceId,
    /// Who created them.
    pub principal: &'a Principal,
}

/// What a store knows about a session and a caller. Only [`Lookup::Found`] may show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup<T> {
    /// It exists and belongs to the caller.
    Found(T),
    /// It does not exist.
    Absent,
    /// It belongs to another workspace.
    ForeignWorkspace,
    /// It belongs to another principal of the workspace.
    ForeignPrincipal,
}

impl<T> Lookup<T> {
    /// Turns what was found into something else.
    ///
    /// # Errors
    /// Those of `turn`.
    pub fn try_map<U, E>(self, turn: impl FnOnce(T) -> Result<U, E>) -> Result<Lookup<U>, E> {
        Ok(match self {
            Self::Found(found) => Lookup::Found(turn(found)?),
            Self::Absent => Lookup::Absent,
            Self::ForeignWorkspace => Lookup::ForeignWorkspace,
            Self::ForeignPrincipal => Lookup::ForeignPrincipal,
        })
    }
}

/// Where sessions are kept. What a method does to a session is one atomic step of the store. `life` is the time after
/// which an unused session expires, by the store's own clock; `now` is only noted.
///
/// Each live session has a place among its owner's, by which they are counted. INVARIANT: a place outlives its session,
/// by at most a tenth of a life, so that the count is never too low; that slack is also why most uses of a session need
/// not renew its place.
///
/// # Errors
/// All methods: [`SessionError::Unavailable`] when the store could not be asked; whether it acted is then unknown.
#[async_trait]
pub trait SessionStore: Debug + Send + Sync + 'static {
    /// Creates a session, if its owner has fewer than `limit`. The place is taken first; without a session it is given
    /// back, or lapses within seconds.
    ///
    /// # Errors
    /// [`SessionError::TooMany`]; [`SessionError::AlreadyExists`], and the other session is untouched.
    async fn create(&self, record: &SessionRecord, limit: usize, life: Duration) -> Result<(), SessionError>;

    /// Reads a session and, if it belongs to the caller, renews its life and that of its place.
    async fn resume(
        &self,
        id: SessionId,
        caller: &Caller<'_>,
        now: Timestamp,
        life: Duration,
    ) -> Result<Lookup<SessionRecord>, SessionError>;

    /// Renews the life of a session and that of its place without reading it; `false` when its owner has no such session.
    async fn renew(
        &self,
        id: SessionId,
        owner: Owner<'_>,
        now: Timestamp,
        life: Duration,
    ) -> Result<bool, SessionError>;

    /// Replaces a session whose stored revision is `read`, and renews its life.
    ///
    /// # Errors
    /// [`SessionError::Conflict`] for another revision; [`SessionError::NoSuchSession`] when there is none of this
    /// workspace and principal: saving never creates.
    async fn save(&self, record: &SessionRecord, read: u64, life: Duration) -> Result<(), SessionError>;

    /// Deletes a session, if it belongs to the caller, and gives its place back.
    async fn delete(&self, id: SessionId, caller: &Caller<'_>) -> Result<Lookup<()>, SessionError>;

    /// The sessions that have a place among the owner's. Some may be gone, or not there yet.
    async fn of(&self, owner: Owner<'_>) -> Result<Vec<SessionId>, SessionError>;

    /// Whether each of these sessions exists. Renews nothing.
    async fn live(&self, ids: &[SessionId]) -> Result<Vec<bool>, SessionError>;

    /// How many sessions live, of all owners. For people: some that have just expired may be among them.
    async fn count(&self, now: Timestamp) -> Result<u64, SessionError>;
}

/// By how much a place outlives a session of this life. The scripts of Redis do the same sum.
pub(crate) fn slack(life: Duration) -> Duration {
    life / 10
}
