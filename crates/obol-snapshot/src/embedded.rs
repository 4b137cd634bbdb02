use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use obol_model::snapshot::{Documents, InvalidPublication};
use obol_model::{Causes, Invalidation, Kind, Revision, WorkspaceId};
use parking_lot::Mutex;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::{FeedEvent, InvalidationFeed, PublicationSource, SourceError, Stored};

/// Messages that a feed may lag behind; it then reports a new subscription, which makes up for what it missed.
const LAG: usize = 256;

/// After this long without a message the feed says that it still stands.
const QUIET: Duration = Duration::from_secs(5);

/// Publications in memory, for one process: the embedded store (DESIGN §5). Also the feed of its invalidations.
#[derive(Debug)]
pub struct EmbeddedSource {
    publications: Mutex<HashMap<WorkspaceId, (Revision, Documents)>>,
    messages: broadcast::Sender<Bytes>,
}

/// Why a publication was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// The documents are no publication of the workspace.
    #[error("the publication is invalid")]
    Invalid(#[source] InvalidPublication),
    /// Another publication of this revision or a later one is there.
    #[error("publication {offered} is not newer than {published}, which is published")]
    NotNewer {
        /// What is there.
        published: Revision,
        /// What was offered.
        offered: Revision,
    },
}

impl PublishError {
    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Invalid(_) => Kind::InvalidRequest,
            Self::NotNewer { .. } => Kind::Conflict,
        }
    }
}

impl Default for EmbeddedSource {
    fn default() -> Self {
        Self { publications: Mutex::default(), messages: broadcast::channel(LAG).0 }
    }
}

impl EmbeddedSource {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Publishes, and invalidates what is served of the workspace. The same publication again is fine.
    ///
    /// # Errors
    /// When the documents are no publication of the workspace, or not newer than what is there.
    pub fn publish(&self, workspace: &WorkspaceId, documents: Documents) -> Result<Revision, PublishError> {
        let (snapshot, _) = documents.decode(workspace).map_err(PublishError::Invalid)?;
        let offered = snapshot.revision;
        {
            let mut publications = self.publications.lock();
            if let Some((published, there)) = publications.get(workspace)
                && offered <= *published
                && *there != documents
            {
                return Err(PublishError::NotNewer { published: *published, offered });
            }
            publications.insert(workspace.clone(), (offered, documents));
        }
        self.announce(&Invalidation::Workspace { workspace_id: workspace.clone() });
        Ok(offered)
    }

    /// Withdraws the publication of a workspace and invalidates what is served of it. Returns whether there was one.
    pub fn unpublish(&self, workspace: &WorkspaceId) -> bool {
        let was_there = self.publications.lock().remove(workspace).is_some();
        self.announce(&Invalidation::Workspace { workspace_id: workspace.clone() });
        was_there
    }

    /// Sends an invalidation, as control would on `obol:invalidate`.
    pub fn announce(&self, message: &Invalidation) {
        match serde_json::to_vec(message) {
            // Fails when nobody listens yet, who will then start by reading everything.
            Ok(bytes) => drop(self.messages.send(bytes.into())),
            Err(why) => {
                tracing::error!(error = %Causes(&why), "invalidation cannot be written");
            }
        }
    }
}

#[async_trait]
impl PublicationSource for EmbeddedSource {
    async fn read(&self, workspace: &WorkspaceId) -> Result<Stored, SourceError> {
        let publications = self.publications.lock();
        Ok(publications
            .get(workspace)
            .map_or(Stored::Absent, |(_, documents)| Stored::Complete(documents.clone())))
    }

    async fn list(&self, limit: usize) -> Result<Vec<WorkspaceId>, SourceError> {
        Ok(self.publications.lock().keys().take(limit).cloned().collect())
    }
}

#[async_trait]
impl InvalidationFeed for EmbeddedSource {
    async fn feed(&self, events: mpsc::Sender<FeedEvent>, shutdown: CancellationToken) {
        let mut messages = self.messages.subscribe();
        let forward = async {
            let mut event = FeedEvent::Subscribed;
            while events.send(event).await.is_ok() {
                event = match timeout(QUIET, messages.recv()).await {
                    Ok(Ok(message)) => FeedEvent::Message(message),
                    Ok(Err(RecvError::Lagged(_))) => FeedEvent::Subscribed,
                    Ok(Err(RecvError::Closed)) => return,
                    // Memory is always there.
                    Err(_) => FeedEvent::Alive,
                };
            }
        };
        shutdown.run_until_cancelled(forward).await;
    }
}
