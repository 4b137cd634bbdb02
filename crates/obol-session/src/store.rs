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

/// A place among the live sessions of a principal. Counted per workspace: a key's id is unique there only, and one
/// tenant must not use up or end another's sessions.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The tenant.
    pub workspace_id: &'a WorkspaceId,
    /// Whose.
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

/// Where sessions are kept. Each method is one atomic step of the store. `life` is the time after which an unused
/// session expires, by the store's own clock; `now` is only noted.
///
/// # Errors
/// All methods: [`SessionError::Unavailable`] when the store could not be asked; whether it acted is then unknown.
#[async_trait]
pub trait SessionStore: Debug + Send + Sync + 'static {
    /// Takes a place for a session that is about to be created; `false` when `limit` are taken.
    async fn take_place(
        &self,
        place: Place<'_>,
        id: SessionId,
        limit: usize,
        life: Duration,
    ) -> Result<bool, SessionError>;

    /// Gives the place of a session back, if it has one.
    async fn give_back(&self, place: Place<'_>, id: SessionId) -> Result<(), SessionError>;

    /// The sessions that have a place. Some may be gone.
    async fn placed(&self, place: Place<'_>) -> Result<Vec<SessionId>, SessionError>;

    /// Creates a session.
    ///
    /// # Errors
    /// [`SessionError::AlreadyExists`], and the other session is untouched.
    async fn create(&self, record: &SessionRecord, life: Duration) -> Result<(), SessionError>;

    /// Reads a session and, if it belongs to the caller, renews its life and that of its place.
    async fn resume(
        &self,
        id: SessionId,
        caller: &Caller<'_>,
        now: Timestamp,
        life: Duration,
    ) -> Result<Lookup<SessionRecord>, SessionError>;

    /// Replaces a session whose stored revision is `read`, and renews its life.
    ///
    /// # Errors
    /// [`SessionError::Conflict`] for another revision; [`SessionError::NoSuchSession`] when there is none of this
    /// workspace and principal: saving never creates.
    async fn save(&self, record: &SessionRecord, read: u64, life: Duration) -> Result<(), SessionError>;

    /// Deletes a session, if it belongs to the caller, and gives its place back.
    async fn delete(&self, id: SessionId, caller: &Caller<'_>) -> Result<Lookup<()>, SessionError>;

    /// Whether each of these sessions exists. Renews nothing.
    async fn live(&self, ids: &[SessionId]) -> Result<Vec<bool>, SessionError>;
}
