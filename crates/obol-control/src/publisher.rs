use async_trait::async_trait;
use obol_model::snapshot::Documents;
use obol_model::{KeyContext, KeyHash, Kind, Revision, WorkspaceId};

/// Why something could not be published.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PublishError {
    /// The store has a revision that is not older. Never overwritten (DESIGN §7.6).
    #[error("the store has revision {there} of `{workspace}`, which is not older")]
    NotNewer {
        /// Whose.
        workspace: WorkspaceId,
        /// What the store has.
        there: Revision,
    },
    /// The store could not be asked.
    #[error("the store could not be asked: {0}")]
    Unavailable(String),
    /// A record cannot be written.
    #[error("a record cannot be written: {0}")]
    Encode(String),
}

impl PublishError {
    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotNewer { .. } => Kind::Conflict,
            Self::Unavailable(_) => Kind::Unavailable,
            Self::Encode(_) => Kind::Internal,
        }
    }
}

/// Where publications and keys go: Redis, or the embedded store of a single process.
///
/// Every method has a deadline of its own. Abandoning one leaves open whether it took effect; control looks again.
#[async_trait]
pub trait Publisher: std::fmt::Debug + Send + Sync + 'static {
    /// The revision of the publication that is there; `None` when there is none or its fingerprint cannot be read.
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn current(&self, workspace: &WorkspaceId) -> Result<Option<Revision>, PublishError>;

    /// The documents that are there, for healing; `None` when all three are absent. An absent one of a torn
    /// publication is empty.
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn read(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, PublishError>;

    /// Sets the three keys and tells the replicas, in one step.
    ///
    /// # Errors
    /// [`PublishError::NotNewer`] unless what is there is older, absent, or has no readable fingerprint.
    async fn publish(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
    ) -> Result<(), PublishError>;

    /// As [`Publisher::publish`], for documents that were published as this revision before and were damaged or lost
    /// since: the same revision may be there.
    ///
    /// # Errors
    /// [`PublishError::NotNewer`] if a newer revision is there.
    async fn repair(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
    ) -> Result<(), PublishError>;

    /// Removes the publication and tells the replicas, in one step.
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn unpublish(&self, workspace: &WorkspaceId) -> Result<(), PublishError>;

    /// Writes a key record and tells the replicas, unless the same record is there. Answers whether it wrote.
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn put_key(&self, hash: &KeyHash, key: &KeyContext) -> Result<bool, PublishError>;

    /// Removes a key record and tells the replicas, if there is one. Answers whether there was.
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn delete_key(&self, hash: &KeyHash, delete_sessions: bool) -> Result<bool, PublishError>;

    /// Says that every key was written, so that an absent one is unknown (DESIGN §8.1).
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn keys_loaded(&self) -> Result<(), PublishError>;
}
