use std::sync::Arc;

use async_trait::async_trait;
use obol_model::snapshot::{Documents, LARGEST_DOCUMENT, PublicationKeys};
use obol_model::{Invalidation, WorkspaceId};
use obol_redis::{Redis, Script, SubscriberEvent};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{FeedEvent, InvalidationFeed, PublicationSource, SourceError, Stored};

/// What the script that reads a publication answers.
type Read = (usize, Option<Vec<u8>>, Option<Vec<u8>>, Option<Vec<u8>>);

/// Publications in Redis, and the feed of `obol:invalidate`.
#[derive(Debug, Clone)]
pub struct RedisSource {
    redis: Redis,
    read: Arc<Script>,
    create: Arc<Script>,
}

impl RedisSource {
    /// Reads through `redis`; the feed opens a connection of its own.
    pub fn new(redis: Redis) -> Self {
        let script = include_str!("scripts/create_publication_v1.lua");
        Self {
            redis,
            read: Arc::new(Script::new("read_publication_v1", PublicationKeys::READ)),
            create: Arc::new(Script::new("create_publication_v1", script)),
        }
    }

    /// Creates a publication and tells the replicas, in one step, if the workspace has none of the three keys. Answers
    /// whether it did. Abandoning it leaves nothing or a whole publication.
    ///
    /// # Errors
    /// When Redis cannot be asked; it may have done it all the same.
    pub async fn create(&self, workspace: &WorkspaceId, documents: &Documents) -> Result<bool, SourceError> {
        let keys = PublicationKeys::of(workspace);
        let message = Invalidation::Workspace { workspace_id: workspace.clone() };
        let message = serde_json::to_vec(&message).map_err(SourceError::new)?;
        let Documents { workspace, policy, fingerprint } = documents;
        let args: [&[u8]; 5] = [workspace, policy, fingerprint, Invalidation::CHANNEL.as_bytes(), &message];
        let keys = [keys.workspace.as_str(), &keys.policy, &keys.fingerprint];
        self.redis.run(&self.create, &keys, &args).await.map_err(SourceError::new)
    }
}

#[async_trait]
impl PublicationSource for RedisSource {
    async fn read(&self, workspace: &WorkspaceId) -> Result<Stored, SourceError> {
        let keys = PublicationKeys::of(workspace);
        let keys = [keys.workspace.as_str(), &keys.policy, &keys.fingerprint];
        let most = LARGEST_DOCUMENT.to_string();
        let found: Read =
            self.redis.run(&self.read, &keys, &[most.as_bytes()]).await.map_err(SourceError::new)?;
        Ok(match found {
            (0, Some(workspace), Some(policy), Some(fingerprint)) => {
                Stored::Complete(Documents { workspace, policy, fingerprint })
            }
            (0, None, None, None) => Stored::Absent,
            (0, ..) => Stored::Partial,
            (large, ..) => Stored::TooLarge {
                document: PublicationKeys::DOCUMENTS.get(large - 1).copied().unwrap_or("publication"),
            },
        })
    }

    async fn list(&self, limit: usize) -> Result<Vec<WorkspaceId>, SourceError> {
        let keys = self.redis.scan(PublicationKeys::EVERY_POLICY, limit).await.map_err(SourceError::new)?;
        let workspace = |key: &String| {
            let workspace = PublicationKeys::workspace_of_policy(key);
            if workspace.is_none() {
                tracing::warn!("policy key with an invalid workspace id skipped");
            }
            workspace
        };
        Ok(keys.iter().filter_map(workspace).collect())
    }
}

#[async_trait]
impl InvalidationFeed for RedisSource {
    async fn feed(&self, events: mpsc::Sender<FeedEvent>, shutdown: CancellationToken) {
        let (sender, mut receiver) = mpsc::channel(events.max_capacity());
        let forward = async {
            while let Some(event) = receiver.recv().await {
                let event = match event {
                    SubscriberEvent::Subscribed => FeedEvent::Subscribed,
                    SubscriberEvent::Alive => FeedEvent::Alive,
                    SubscriberEvent::Message(bytes) => FeedEvent::Message(bytes),
                };
                if events.send(event).await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(self.redis.subscribe(Invalidation::CHANNEL, sender, shutdown), forward);
    }
}
