use std::error::Error;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use obol_model::WorkspaceId;
use obol_model::snapshot::Documents;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// What the store holds for a workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// None of the three keys.
    Absent,
    /// One or two of them.
    Partial,
    /// One of them is larger than any document, and was not read.
    TooLarge {
        /// Which.
        document: &'static str,
    },
    /// All three, from one atomic read. Not checked yet.
    Complete(Documents),
}

/// The store could not be asked. Never means "absent".
#[derive(Debug, Clone, thiserror::Error)]
#[error(transparent)]
pub struct SourceError(Arc<dyn Error + Send + Sync>);

impl SourceError {
    /// Wraps what the store's client reported.
    pub fn new(cause: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(cause))
    }
}

/// Where publications are read from.
#[async_trait]
pub trait PublicationSource: Send + Sync + 'static {
    /// Reads the three keys of a workspace in one atomic step, within a deadline of its own. Cancel-safe: abandoning it
    /// takes nothing away from anybody.
    ///
    /// # Errors
    /// When the store cannot be asked.
    async fn read(&self, workspace: &WorkspaceId) -> Result<Stored, SourceError>;

    /// Up to `limit` workspaces that have a policy key. Cancel-safe: it only reads.
    ///
    /// # Errors
    /// When the store cannot be asked.
    async fn list(&self, limit: usize) -> Result<Vec<WorkspaceId>, SourceError>;
}

/// What an [`InvalidationFeed`] reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeedEvent {
    /// The subscription stands, for the first time or again: messages before it may have been missed.
    Subscribed,
    /// The subscription still stands: no message was missed until now. To be reported at least every 10 seconds when
    /// there is nothing else to report.
    Alive,
    /// One message of `obol:invalidate`, as it came.
    Message(Bytes),
}

/// Where invalidations come from. Hints only: what is missed is repaired by comparing with the source.
#[async_trait]
pub trait InvalidationFeed: Send + Sync + 'static {
    /// Subscribes, resubscribes whenever the subscription is lost, and reports until `shutdown`.
    async fn feed(&self, events: mpsc::Sender<FeedEvent>, shutdown: CancellationToken);
}
