use std::collections::HashMap;

use async_trait::async_trait;
use obol_meter::{LostLedger, Seeded, Spent};
use obol_model::snapshot::Documents;
use obol_model::{KeyContext, KeyHash, Kind, Revision, WorkspaceId};

use crate::KeyRecord;
use crate::store::StoreError;

/// Why something could not be published.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PublishError {
    /// Redis has a revision that is not older. Never overwritten (DESIGN §7.6).
    #[error("the replicas have revision {there} of `{workspace}`, which is not older")]
    NotNewer {
        /// Whose.
        workspace: WorkspaceId,
        /// What is there.
        there: Revision,
    },
    /// Redis could not be asked.
    #[error("Redis could not be asked: {0}")]
    Unavailable(String),
    /// What is to be published could not be read.
    #[error("what is to be published cannot be read: {0}")]
    Unreadable(StoreError),
    /// A record cannot be written.
    #[error("a record cannot be written: {0}")]
    Encode(String),
}

/// What releases before stores had names wrote into the marker.
const NAMELESS: &str = "1";

/// Whether a Redis with this marker, see [`Publisher::keys_loaded`], is that of the store that is called `identity`.
pub(crate) fn is_of(marker: &str, identity: &str) -> bool {
    marker == identity || marker == NAMELESS
}

/// The revision that replicas can have; `None` when what is there is absent or damaged, so that they refuse it.
pub(crate) async fn current(
    publisher: &dyn Publisher,
    workspace: &WorkspaceId,
) -> Result<Option<Revision>, PublishError> {
    let there = publisher.read(workspace).await?;
    Ok(there.and_then(|docs| docs.decode(workspace).ok()).map(|(snapshot, _)| snapshot.revision))
}

impl PublishError {
    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotNewer { .. } => Kind::Conflict,
            Self::Unavailable(_) => Kind::Unavailable,
            Self::Unreadable(why) => why.kind(),
            Self::Encode(_) => Kind::Internal,
        }
    }
}

/// The keys that replicas see.
#[derive(Debug, Default, Clone)]
pub struct PublishedKeys {
    /// The records as they stand there; empty for what is no text, or too large to be one.
    pub records: HashMap<KeyHash, Vec<u8>>,
    /// Which store all of them came from, as [`Publisher::keys_loaded`] said it.
    pub loaded: Option<String>,
    /// Whether there are more than could be looked at.
    pub truncated: bool,
}

/// Where publications and keys go: Redis, or the embedded store of a single process.
///
/// Every method has a deadline of its own. Abandoning one leaves open whether it took effect; control looks again.
#[async_trait]
pub trait Publisher: std::fmt::Debug + Send + Sync + 'static {
    /// The documents that are there; `None` when all three are absent. An absent one of a torn
    /// publication is empty.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
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
    /// since: the same revision may be there, or a publication that is damaged, whose fingerprint says who knows what.
    ///
    /// # Errors
    /// [`PublishError::NotNewer`] if a newer revision is there that is not `damaged`.
    async fn repair(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
        damaged: Option<&Documents>,
    ) -> Result<(), PublishError>;

    /// Removes the publication up to a revision, or one that is damaged, and tells the replicas, in one step.
    ///
    /// # Errors
    /// [`PublishError::NotNewer`] if a newer revision is there that is not `damaged`.
    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        up_to: Revision,
        damaged: Option<&Documents>,
    ) -> Result<(), PublishError>;

    /// The ledger of a workspace when it is not open, so that nobody with a budget may spend: a new one, or one that was
    /// lost with the replicas' store (DESIGN §12.6).
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn lost_ledger(&self, workspace: &WorkspaceId) -> Result<Option<LostLedger>, PublishError>;

    /// Whether all usage that there was when a ledger was looked at is collected.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn is_collected(&self, workspace: &WorkspaceId, lost: &LostLedger) -> Result<bool, PublishError>;

    /// Opens a ledger with what was spent before, in one step, unless it is open.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn seed_ledger(
        &self,
        workspace: &WorkspaceId,
        lost: &LostLedger,
        spent: &[Spent],
    ) -> Result<Seeded, PublishError>;

    /// Every key record that is there.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn keys(&self) -> Result<PublishedKeys, PublishError>;

    /// Which store's keys are there, as [`Publisher::keys_loaded`] said it.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn loaded_by(&self) -> Result<Option<String>, PublishError>;

    /// Writes a key record and tells the replicas, unless the same one is there, a newer one that is not `damaged`, or
    /// the key was revoked. Answers whether it wrote.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn put_key(
        &self,
        hash: &KeyHash,
        key: &KeyContext,
        damaged: Option<&[u8]>,
    ) -> Result<bool, PublishError>;

    /// Removes the record of a key that was revoked, so that no writer that has not heard of it brings it back, and tells
    /// the replicas. Answers whether that was news.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn revoke_key(&self, record: &KeyRecord) -> Result<bool, PublishError>;

    /// Removes a record of which nobody knows where it came from, if it is still `found`. Answers whether it did.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn remove_key(&self, hash: &KeyHash, found: &[u8]) -> Result<bool, PublishError>;

    /// Says that every key of this store was written, so that an absent one is unknown (DESIGN §8.1); `None` takes it
    /// back.
    ///
    /// # Errors
    /// When the replicas' store could not be asked.
    async fn keys_loaded(&self, store: Option<&str>) -> Result<(), PublishError>;
}
