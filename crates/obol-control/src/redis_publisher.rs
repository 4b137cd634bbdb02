use std::collections::HashMap;

use async_trait::async_trait;
use obol_meter::{LedgerError, LedgerSeeds, LostLedger, Seeded, Spent};
use obol_model::snapshot::{Documents, LARGEST_DOCUMENT, PublicationKeys};
use obol_model::{Invalidation, KeyContext, KeyHash, Revision, WorkspaceId};
use obol_redis::{Redis, RedisError, Script};

use crate::publisher::PublishedKeys;
use crate::usage::{GROUP, stream};
use crate::{KeyRecord, PublishError, Publisher};

/// Says from which store every key was loaded.
const LOADED: &str = "keys:loaded";
/// How many key records are read in one flight.
const FLIGHT: usize = 500;
/// The most key records that are looked at.
const MOST_KEYS: usize = 1_000_000;
/// How long a tombstone lives, in seconds: a day is longer than any process sits on records that it has read.
const TOMBSTONE: &[u8] = b"86400";

/// Publishes to Redis (DESIGN §5). Each change is one script in one slot: all of it is there, or nothing.
#[derive(Debug)]
pub struct RedisPublisher {
    redis: Redis,
    ledgers: LedgerSeeds,
    collected: Script,
    read: Script,
    publish: Script,
    unpublish: Script,
    put_key: Script,
    revoke_key: Script,
    remove_key: Script,
}

impl RedisPublisher {
    /// Publishes through this client; its command deadline bounds every method.
    pub fn new(redis: Redis) -> Self {
        Self {
            ledgers: LedgerSeeds::new(redis.clone()),
            redis,
            collected: Script::new("usage_collected_v1", include_str!("scripts/usage_collected_v1.lua")),
            read: Script::new("read_publication_v1", PublicationKeys::READ),
            publish: Script::new("publish_v3", include_str!("scripts/publish_v3.lua")),
            unpublish: Script::new("unpublish_v3", include_str!("scripts/unpublish_v3.lua")),
            put_key: Script::new("put_key_v3", include_str!("scripts/put_key_v3.lua")),
            revoke_key: Script::new("revoke_key_v1", include_str!("scripts/revoke_key_v1.lua")),
            remove_key: Script::new("remove_key_v2", include_str!("scripts/remove_key_v2.lua")),
        }
    }

    /// Runs a script on the keys of a publication that refuses when something newer is there.
    async fn change(
        &self,
        script: &Script,
        workspace: &WorkspaceId,
        args: &[&[u8]],
    ) -> Result<(), PublishError> {
        let keys = PublicationKeys::of(workspace);
        let keys = [keys.workspace.as_str(), &keys.policy, &keys.fingerprint];
        let there: Vec<String> = self.redis.run(script, &keys, args).await.map_err(unavailable)?;
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

    async fn write(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
        mode: &str,
        damaged: Option<&Documents>,
    ) -> Result<(), PublishError> {
        let (epoch, number) = (revision.epoch.to_string(), revision.number.to_string());
        let message = message(&Invalidation::Workspace { workspace_id: workspace.clone() })?;
        let most = LARGEST_DOCUMENT.to_string();
        let args: [&[u8]; 10] = [
            epoch.as_bytes(),
            number.as_bytes(),
            mode.as_bytes(),
            &docs.workspace,
            &docs.policy,
            &docs.fingerprint,
            Invalidation::CHANNEL.as_bytes(),
            &message,
            damaged.map_or(b"", |docs| &docs.fingerprint),
            most.as_bytes(),
        ];
        self.change(&self.publish, workspace, &args).await
    }
}

fn record_key(hash: &KeyHash) -> String {
    format!("key:{}", hash.hex())
}

/// In the slot of the record, whose whole name counts since it has no braces.
fn tombstone_key(hash: &KeyHash) -> String {
    format!("revoked:{{key:{}}}", hash.hex())
}

fn message(invalidation: &Invalidation) -> Result<Vec<u8>, PublishError> {
    serde_json::to_vec(invalidation).map_err(|e| PublishError::Encode(e.to_string()))
}

#[expect(clippy::needless_pass_by_value, reason = "reads better in `map_err`")]
fn unavailable(error: RedisError) -> PublishError {
    PublishError::Unavailable(error.to_string())
}

#[expect(clippy::needless_pass_by_value, reason = "reads better in `map_err`")]
fn ledger(error: LedgerError) -> PublishError {
    PublishError::Unavailable(error.to_string())
}

#[async_trait]
impl Publisher for RedisPublisher {
    async fn read(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, PublishError> {
        type Bytes = Option<Vec<u8>>;
        let keys = PublicationKeys::of(workspace);
        let keys = [keys.workspace.as_str(), &keys.policy, &keys.fingerprint];
        let most = LARGEST_DOCUMENT.to_string();
        let (large, workspace, policy, fingerprint): (usize, Bytes, Bytes, Bytes) =
            self.redis.run(&self.read, &keys, &[most.as_bytes()]).await.map_err(unavailable)?;
        if large == 0 && workspace.is_none() && policy.is_none() && fingerprint.is_none() {
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
        self.write(workspace, docs, revision, "new", None).await
    }

    async fn repair(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
        damaged: Option<&Documents>,
    ) -> Result<(), PublishError> {
        self.write(workspace, docs, revision, "repair", damaged).await
    }

    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        up_to: Revision,
        damaged: Option<&Documents>,
    ) -> Result<(), PublishError> {
        let (epoch, number) = (up_to.epoch.to_string(), up_to.number.to_string());
        let message = message(&Invalidation::Workspace { workspace_id: workspace.clone() })?;
        let most = LARGEST_DOCUMENT.to_string();
        let args: [&[u8]; 6] = [
            epoch.as_bytes(),
            number.as_bytes(),
            Invalidation::CHANNEL.as_bytes(),
            &message,
            damaged.map_or(b"", |docs| &docs.fingerprint),
            most.as_bytes(),
        ];
        self.change(&self.unpublish, workspace, &args).await
    }

    async fn loaded_by(&self) -> Result<Option<String>, PublishError> {
        let (loaded,): (Option<String>,) =
            self.redis.query(redis::cmd("MGET").arg(LOADED)).await.map_err(unavailable)?;
        Ok(loaded)
    }

    async fn lost_ledger(&self, workspace: &WorkspaceId) -> Result<Option<LostLedger>, PublishError> {
        self.ledgers.look(workspace).await.map_err(ledger)
    }

    async fn is_collected(&self, workspace: &WorkspaceId, lost: &LostLedger) -> Result<bool, PublishError> {
        let args = [GROUP.as_bytes(), lost.up_to().as_bytes()];
        self.redis.run(&self.collected, &[&stream(workspace)], &args).await.map_err(unavailable)
    }

    async fn seed_ledger(
        &self,
        workspace: &WorkspaceId,
        lost: &LostLedger,
        spent: &[Spent],
    ) -> Result<Seeded, PublishError> {
        self.ledgers.seed(workspace, lost, spent).await.map_err(ledger)
    }

    async fn keys(&self) -> Result<PublishedKeys, PublishError> {
        let loaded = self.loaded_by().await?;
        let names = self.redis.scan("key:*", MOST_KEYS).await.map_err(unavailable)?;
        let truncated = names.len() >= MOST_KEYS;
        // What is not named like a record is somebody else's business.
        let hashes: Vec<KeyHash> =
            names.iter().filter_map(|name| name.strip_prefix("key:")?.parse().ok()).collect();
        let mut records = HashMap::with_capacity(hashes.len());
        for some in hashes.chunks(FLIGHT) {
            let mut flight = redis::Pipeline::with_capacity(some.len());
            for hash in some {
                // One byte more than a record may have.
                flight.cmd("GETRANGE").arg(record_key(hash)).arg(0).arg(KeyContext::LARGEST);
            }
            // One that became something other than text says so, and the others are read all the same.
            flight.ignore_errors();
            let answers: Vec<redis::RedisResult<Vec<u8>>> =
                self.redis.pipeline(&flight).await.map_err(unavailable)?;
            for (hash, answer) in some.iter().zip(answers) {
                let record = match answer {
                    Ok(record) if record.len() > KeyContext::LARGEST => Vec::new(),
                    // It may have gone in the middle of this, as well as be empty; whoever removes it finds out.
                    Ok(record) => record,
                    Err(e) if e.code() == Some("WRONGTYPE") => Vec::new(),
                    Err(e) => return Err(PublishError::Unavailable(e.to_string())),
                };
                records.insert(*hash, record);
            }
        }
        Ok(PublishedKeys { records, loaded, truncated })
    }

    async fn put_key(
        &self,
        hash: &KeyHash,
        key: &KeyContext,
        damaged: Option<&[u8]>,
    ) -> Result<bool, PublishError> {
        let record = serde_json::to_vec(key).map_err(|e| PublishError::Encode(e.to_string()))?;
        if record.len() > KeyContext::LARGEST {
            let (id, most) = (&key.key_id, KeyContext::LARGEST);
            return Err(PublishError::Encode(format!("that of the key `{id}` has more than {most} bytes")));
        }
        let most = KeyContext::LARGEST.to_string();
        let message = message(&Invalidation::key(*hash))?;
        let revision = key.revision.to_string();
        let args: [&[u8]; 6] = [
            &record,
            revision.as_bytes(),
            Invalidation::CHANNEL.as_bytes(),
            &message,
            damaged.unwrap_or_default(),
            most.as_bytes(),
        ];
        let keys = [record_key(hash), tombstone_key(hash)];
        let keys = keys.each_ref().map(String::as_str);
        self.redis.run(&self.put_key, &keys, &args).await.map_err(unavailable)
    }

    async fn revoke_key(&self, record: &KeyRecord) -> Result<bool, PublishError> {
        let (ends, invalidation) = match record.ending_sessions() {
            Some((workspace, principal)) => {
                (&b"sessions"[..], Invalidation::key_with_sessions(record.hash, workspace, principal))
            }
            None => (&b"key"[..], Invalidation::key(record.hash)),
        };
        let message = message(&invalidation)?;
        let args: [&[u8]; 4] = [ends, TOMBSTONE, Invalidation::CHANNEL.as_bytes(), &message];
        let keys = [record_key(&record.hash), tombstone_key(&record.hash)];
        let keys = keys.each_ref().map(String::as_str);
        self.redis.run(&self.revoke_key, &keys, &args).await.map_err(unavailable)
    }

    async fn remove_key(&self, hash: &KeyHash, found: &[u8]) -> Result<bool, PublishError> {
        let message = message(&Invalidation::key(*hash))?;
        let most = KeyContext::LARGEST.to_string();
        let args: [&[u8]; 4] = [found, Invalidation::CHANNEL.as_bytes(), &message, most.as_bytes()];
        self.redis.run(&self.remove_key, &[&record_key(hash)], &args).await.map_err(unavailable)
    }

    async fn keys_loaded(&self, store: Option<&str>) -> Result<(), PublishError> {
        let command = match store {
            Some(store) => redis::cmd("SET").arg(LOADED).arg(store).to_owned(),
            None => redis::cmd("DEL").arg(LOADED).to_owned(),
        };
        self.redis.query(&command).await.map_err(unavailable)
    }
}
