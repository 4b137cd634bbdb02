use async_trait::async_trait;
use obol_model::snapshot::{Documents, Fingerprint};
use obol_model::{Invalidation, KeyContext, KeyHash, Revision, WorkspaceId};
use obol_redis::{Redis, RedisError, Script};

use crate::{PublishError, Publisher};

/// Publishes to Redis (DESIGN §5). Each change is one script: all of it is there, or nothing.
#[derive(Debug)]
pub struct RedisPublisher {
    redis: Redis,
    publish: Script,
    unpublish: Script,
    put_key: Script,
    delete_key: Script,
}

impl RedisPublisher {
    /// Publishes through this client; its command deadline bounds every method.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            publish: Script::new("publish_v1", include_str!("scripts/publish_v1.lua")),
            unpublish: Script::new("unpublish_v1", include_str!("scripts/unpublish_v1.lua")),
            put_key: Script::new("put_key_v1", include_str!("scripts/put_key_v1.lua")),
            delete_key: Script::new("delete_key_v1", include_str!("scripts/delete_key_v1.lua")),
        }
    }

    async fn write(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
        mode: &str,
    ) -> Result<(), PublishError> {
        let keys = keys(workspace);
        let (epoch, number) = (revision.epoch.to_string(), revision.number.to_string());
        let message = message(&Invalidation::Workspace { workspace_id: workspace.clone() })?;
        let args: [&[u8]; 8] = [
            epoch.as_bytes(),
            number.as_bytes(),
            mode.as_bytes(),
            &docs.workspace,
            &docs.policy,
            &docs.fingerprint,
            Invalidation::CHANNEL.as_bytes(),
            &message,
        ];
        let there: Vec<String> = self
            .redis
            .run(&self.publish, &keys.each_ref().map(String::as_str), &args)
            .await
            .map_err(unavailable)?;
        match there.as_slice() {
            [] => Ok(()),
            [epoch, number, ..] => {
                // What is there is not ours to trust: an absurd number reads as the largest.
                let there = Revision {
                    epoch: epoch.parse().unwrap_or(u32::MAX),
                    number: number.parse().unwrap_or(u64::MAX),
                };
                Err(PublishError::NotNewer { workspace: workspace.clone(), there })
            }
            [_] => Err(PublishError::Unavailable("the script gave half an answer".to_owned())),
        }
    }
}

fn keys(workspace: &WorkspaceId) -> [String; 3] {
    [
        format!("snap:workspace:{{{workspace}}}"),
        format!("policy:{{{workspace}}}"),
        format!("snap:fingerprint:{{{workspace}}}"),
    ]
}

fn message(invalidation: &Invalidation) -> Result<Vec<u8>, PublishError> {
    serde_json::to_vec(invalidation).map_err(|e| PublishError::Encode(e.to_string()))
}

#[expect(clippy::needless_pass_by_value, reason = "reads better in `map_err`")]
fn unavailable(error: RedisError) -> PublishError {
    PublishError::Unavailable(error.to_string())
}

#[async_trait]
impl Publisher for RedisPublisher {
    async fn current(&self, workspace: &WorkspaceId) -> Result<Option<Revision>, PublishError> {
        let [.., fingerprint] = keys(workspace);
        let bytes: Option<Vec<u8>> =
            self.redis.query(redis::cmd("GET").arg(fingerprint)).await.map_err(unavailable)?;
        Ok(bytes.and_then(|b| serde_json::from_slice::<Fingerprint>(&b).ok()).map(|f| f.revision))
    }

    async fn read(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, PublishError> {
        type Bytes = Option<Vec<u8>>;
        let (workspace, policy, fingerprint): (Bytes, Bytes, Bytes) =
            self.redis.query(redis::cmd("MGET").arg(&keys(workspace))).await.map_err(unavailable)?;
        if workspace.is_none() && policy.is_none() && fingerprint.is_none() {
            return Ok(None);
        }
        Ok(Some(Documents {
            workspace: workspace.unwrap_or_default(),
            policy: policy.unwrap_or_default(),
            fingerprint: fingerprint.unwrap_or_default(),
        }))
    }

    async fn publish(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
    ) -> Result<(), PublishError> {
        self.write(workspace, docs, revision, "new").await
    }

    async fn repair(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
    ) -> Result<(), PublishError> {
        self.write(workspace, docs, revision, "repair").await
    }

    async fn unpublish(&self, workspace: &WorkspaceId) -> Result<(), PublishError> {
        let keys = keys(workspace);
        let message = message(&Invalidation::Workspace { workspace_id: workspace.clone() })?;
        let args: [&[u8]; 2] = [Invalidation::CHANNEL.as_bytes(), &message];
        self.redis
            .run::<i64>(&self.unpublish, &keys.each_ref().map(String::as_str), &args)
            .await
            .map_err(unavailable)?;
        Ok(())
    }

    async fn put_key(&self, hash: &KeyHash, key: &KeyContext) -> Result<bool, PublishError> {
        let record = serde_json::to_vec(key).map_err(|e| PublishError::Encode(e.to_string()))?;
        let message = message(&Invalidation::Key { hash: *hash, delete_sessions: false })?;
        let args: [&[u8]; 3] = [&record, Invalidation::CHANNEL.as_bytes(), &message];
        let name = format!("key:{}", hash.hex());
        self.redis.run(&self.put_key, &[&name], &args).await.map_err(unavailable)
    }

    async fn delete_key(&self, hash: &KeyHash, delete_sessions: bool) -> Result<bool, PublishError> {
        let message = message(&Invalidation::Key { hash: *hash, delete_sessions })?;
        let args: [&[u8]; 2] = [Invalidation::CHANNEL.as_bytes(), &message];
        let name = format!("key:{}", hash.hex());
        self.redis.run(&self.delete_key, &[&name], &args).await.map_err(unavailable)
    }

    async fn keys_loaded(&self) -> Result<(), PublishError> {
        self.redis.query(redis::cmd("SET").arg("keys:loaded").arg("1")).await.map_err(unavailable)
    }
}
