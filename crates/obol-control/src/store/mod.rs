//! What control knows: every workspace's revisions, the keys, and who changed what.

mod file;
mod memory;
pub(crate) mod postgres;

use std::path::PathBuf;

use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::snapshot::Documents;
use obol_model::{KeyHash, KeyId, Kind, Revision, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::keys::{KeyChange, KeyRecord, LoadedKeys};

pub use self::file::FileStore;
pub use self::memory::MemoryStore;
pub use self::postgres::PostgresStore;

/// How many revisions of a workspace are kept. The newest that came from its file is kept beside them: it tells whether
/// the file changed since.
pub(crate) const HISTORY: usize = 50;

/// The highest number that Lua and JSON count exactly.
const LAST_NUMBER: u64 = (1 << 53) - 1;

/// Where control keeps what it knows (DESIGN §7.1): Postgres, a directory, or, for `obol dev`, memory.
///
/// It is the truth of which Redis is a copy, and control is the only one that writes it, though in several processes:
/// `obol control` itself and the commands of an operator. Each change is atomic, is durable when the method returns, and
/// leaves an entry in the audit. Every method has a deadline of its own; one that was abandoned may have taken effect.
#[async_trait]
pub trait ControlStore: std::fmt::Debug + Send + Sync + 'static {
    /// Makes the store ready: creates what is missing, brings an older form up to date. Doing it again does no harm.
    ///
    /// # Errors
    /// [`StoreError::Newer`] when a later release has written it.
    async fn prepare(&self) -> Result<(), StoreError>;

    /// A random name that no other store has, which tells whose keys a Redis holds.
    ///
    /// # Errors
    /// When it cannot be read.
    async fn identity(&self) -> Result<String, StoreError>;

    /// Grows with every change, so that whoever follows the store reads it only then.
    ///
    /// # Errors
    /// When it cannot be read.
    async fn generation(&self) -> Result<u64, StoreError>;

    /// Every workspace that was ever published.
    ///
    /// # Errors
    /// When it cannot be read.
    async fn heads(&self) -> Result<Vec<Head>, StoreError>;

    /// One workspace; `None` when it was never published.
    ///
    /// # Errors
    /// When it cannot be read.
    async fn head(&self, workspace: &WorkspaceId) -> Result<Option<Head>, StoreError>;

    /// The revisions of a workspace that are kept, newest first.
    ///
    /// # Errors
    /// When they cannot be read.
    async fn history(&self, workspace: &WorkspaceId) -> Result<Vec<RevisionInfo>, StoreError>;

    /// The documents of a revision; `None` when it is not kept any more or never was.
    ///
    /// # Errors
    /// When they cannot be read.
    async fn documents(
        &self,
        workspace: &WorkspaceId,
        revision: Revision,
    ) -> Result<Option<Documents>, StoreError>;

    /// All keys, revoked ones included, in the order of their ids.
    ///
    /// # Errors
    /// When none can be read; single ones that cannot are in the answer.
    async fn keys(&self) -> Result<LoadedKeys, StoreError>;

    /// One key, by its hash.
    ///
    /// # Errors
    /// When it cannot be read.
    async fn key(&self, hash: &KeyHash) -> Result<Option<KeyRecord>, StoreError>;

    /// The newest entries of the audit, newest first.
    ///
    /// # Errors
    /// When it cannot be read.
    async fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError>;

    /// Adds a revision and makes it the one that is published.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] unless it is higher than every one that was used, and the highest is still the one that
    /// it comes after.
    async fn publish(&self, new: NewRevision, by: &Stamp) -> Result<(), StoreError>;

    /// Says that a workspace is not published: whichever revision it has, or only `this` one. Its revisions stay, and its
    /// numbers go on. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`StoreError::NoSuchWorkspace`], or [`StoreError::Conflict`] when it has another revision than `this`.
    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        this: Option<Revision>,
        origin: Origin,
        by: &Stamp,
    ) -> Result<(), StoreError>;

    /// Says which file speaks for a workspace, when that is all that changed.
    ///
    /// # Errors
    /// [`StoreError::NoSuchWorkspace`].
    async fn set_file(&self, workspace: &WorkspaceId, file: PathBuf) -> Result<(), StoreError>;

    /// Adds a key.
    ///
    /// # Errors
    /// When it cannot be written.
    async fn insert_key(&self, record: KeyRecord, by: &Stamp) -> Result<(), StoreError>;

    /// Changes a key and answers what it is now. A change that changes nothing leaves no entry in the audit.
    ///
    /// # Errors
    /// [`StoreError::NoSuchKey`], or [`StoreError::Revoked`] for one that is to be enabled or disabled.
    async fn change_key(&self, id: &KeyId, change: KeyChange, by: &Stamp) -> Result<KeyRecord, StoreError>;
}

/// Why the store cannot do something.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Somebody else was faster.
    #[error("`{workspace}` has revision {there} by now")]
    Conflict {
        /// Whose.
        workspace: WorkspaceId,
        /// The highest that was used.
        there: Revision,
    },
    /// No revision can be higher.
    #[error("`{workspace}` has used the last number of its epoch; raise the epoch")]
    Exhausted {
        /// Whose.
        workspace: WorkspaceId,
    },
    /// There is no such workspace.
    #[error("no workspace `{0}` was ever published here")]
    NoSuchWorkspace(WorkspaceId),
    /// There is no such key.
    #[error("there is no key `{0}`")]
    NoSuchKey(KeyId),
    /// A revoked key stays revoked.
    #[error("the key `{0}` is revoked, which is for ever; make a new one")]
    Revoked(KeyId),
    /// It could not be asked.
    #[error("{0}")]
    Unavailable(String),
    /// What is there cannot be read as what it should be.
    #[error("{0}")]
    Damaged(String),
    /// A later release has written it.
    #[error(
        "{what} has schema {found}, this release knows up to {known}: use the release that wrote it, or a later one"
    )]
    Newer {
        /// The database or the directory.
        what: String,
        /// What is there.
        found: u32,
        /// What is known.
        known: u32,
    },
}

impl StoreError {
    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Conflict { .. } | Self::Exhausted { .. } | Self::Revoked(_) => Kind::Conflict,
            Self::NoSuchWorkspace(_) | Self::NoSuchKey(_) => Kind::NotFound,
            Self::Unavailable(_) => Kind::Unavailable,
            Self::Damaged(_) | Self::Newer { .. } => Kind::Internal,
        }
    }
}

/// Who changes something, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    /// For people: `control`, or `user:NAME` for the commands of an operator.
    pub actor: String,
    /// When.
    pub at: Timestamp,
}

/// Where content came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A file that control watches.
    File,
    /// An operator's command. It stands until the watched file, if there is one, changes.
    Command,
    /// An operator who went back to an older revision; stands as [`Origin::Command`].
    Rollback {
        /// Whose content it has.
        to: Revision,
    },
}

/// What a workspace is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Which.
    pub workspace: WorkspaceId,
    /// The highest revision that was used; the published one, when it is published.
    pub revision: Revision,
    /// Whether it is published.
    pub published: bool,
    /// Whether an operator decided this: the file counts again once it changes.
    #[serde(default)]
    pub held: bool,
    /// The file that speaks for it.
    #[serde(default)]
    pub file: Option<PathBuf>,
    /// The newest revision whose content came from the file.
    #[serde(default)]
    pub file_revision: Option<Revision>,
}

/// A revision to be published.
#[derive(Debug, Clone)]
pub struct NewRevision {
    /// Whose.
    pub workspace: WorkspaceId,
    /// The highest that was used when this one was decided upon.
    pub after: Option<Revision>,
    /// Which.
    pub revision: Revision,
    /// The content.
    pub documents: Documents,
    /// Where it came from.
    pub origin: Origin,
    /// The watched file that it came from; `None` leaves what is known of one as it is.
    pub file: Option<PathBuf>,
}

/// A revision that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionInfo {
    /// Which.
    pub revision: Revision,
    /// Where its content came from.
    pub origin: Origin,
    /// Who published it.
    pub actor: String,
    /// When.
    pub at: Timestamp,
}

/// One change that somebody made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// When.
    pub at: Timestamp,
    /// Who.
    pub actor: String,
    /// What.
    pub action: Action,
    /// To which workspace, or to a key of which.
    pub workspace: WorkspaceId,
    /// The revision that came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<Revision>,
    /// Which key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<KeyId>,
}

/// What can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// New content.
    Publish,
    /// Old content as a new revision.
    Rollback,
    /// A workspace taken away.
    Unpublish,
    /// A key made.
    NewKey,
    /// A key disabled.
    DisableKey,
    /// A key enabled.
    EnableKey,
    /// A key revoked.
    RevokeKey,
}

impl AuditEntry {
    fn of_revision(new: &NewRevision, by: &Stamp) -> Self {
        let action =
            if matches!(new.origin, Origin::Rollback { .. }) { Action::Rollback } else { Action::Publish };
        Self::new(action, &new.workspace, by).with_revision(new.revision)
    }

    fn of_key(action: Action, record: &KeyRecord, by: &Stamp) -> Self {
        let entry = Self::new(action, &record.key.workspace_id, by);
        Self { key_id: Some(record.key.key_id.clone()), ..entry }
    }

    fn new(action: Action, workspace: &WorkspaceId, by: &Stamp) -> Self {
        let Stamp { actor, at } = by.clone();
        Self { at, actor, action, workspace: workspace.clone(), revision: None, key_id: None }
    }

    fn with_revision(self, revision: Revision) -> Self {
        Self { revision: Some(revision), ..self }
    }
}

impl NewRevision {
    fn info(&self, by: &Stamp) -> RevisionInfo {
        RevisionInfo { revision: self.revision, origin: self.origin, actor: by.actor.clone(), at: by.at }
    }
}

// The rules that all stores share.

/// What a workspace is after a revision was published.
fn published(head: Option<&Head>, new: &NewRevision) -> Result<Head, StoreError> {
    let workspace = new.workspace.clone();
    if new.revision.number > LAST_NUMBER {
        return Err(StoreError::Exhausted { workspace });
    }
    match head.map(|head| head.revision) {
        Some(there) if new.after != Some(there) || new.revision <= there => {
            return Err(StoreError::Conflict { workspace, there });
        }
        None if new.after.is_some() => return Err(StoreError::NoSuchWorkspace(workspace)),
        Some(_) | None => {}
    }
    let from_file = new.origin == Origin::File;
    Ok(Head {
        workspace,
        revision: new.revision,
        published: true,
        held: !from_file,
        file: new.file.clone().or_else(|| head.and_then(|h| h.file.clone())),
        file_revision: if from_file { Some(new.revision) } else { head.and_then(|h| h.file_revision) },
    })
}

/// What a workspace is after it was unpublished, unless it was already. When its file is gone nothing speaks for it any
/// more; after a command the file that is still there does not bring it back.
fn unpublished(head: &Head, this: Option<Revision>, origin: Origin) -> Result<Option<Head>, StoreError> {
    if this.is_some_and(|this| this != head.revision) {
        return Err(StoreError::Conflict { workspace: head.workspace.clone(), there: head.revision });
    }
    let held = origin != Origin::File;
    let file = head.file.clone().filter(|_| held);
    let next = Head { published: false, held, file, ..head.clone() };
    Ok((next != *head).then_some(next))
}

/// The revisions that need not be kept, of those of a workspace, newest first.
fn superfluous(newest_first: &[Revision], head: &Head) -> Vec<Revision> {
    newest_first.iter().skip(HISTORY).copied().filter(|r| head.file_revision != Some(*r)).collect()
}
