use std::collections::HashMap;
use std::time::Duration;

use ::redis::{RedisResult, Value};
use obol_model::ReplicaId;
use obol_model::snapshot::SCHEMA;
use obol_redis::{Redis, RedisError, Script};
use url::Url;

/// How long a lease lasts without being renewed.
pub const LEASE: Duration = Duration::from_secs(15);
/// How often it is renewed: two renewals may fail.
pub const RENEW: Duration = Duration::from_secs(5);

/// The index of `replica:ID`, so that nobody has to scan for them.
const INDEX: &str = "replicas";

/// A replica as its lease describes it. Nothing of it changes while the replica lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Which.
    pub id: ReplicaId,
    /// Where its peer channel is; `None` when it has none.
    pub url: Option<Url>,
    /// Its release.
    pub release: String,
    /// The highest schema version of publications that it reads.
    pub snapshot_schema: u32,
}

impl Peer {
    /// This process, under its id and with the address that it advertises.
    pub fn this(id: ReplicaId, url: Option<Url>) -> Self {
        Self { id, url, release: env!("CARGO_PKG_VERSION").to_owned(), snapshot_schema: SCHEMA }
    }
}

/// The leases of all replicas of one Redis.
///
/// `replica:ID` and the index lie in different slots, so they change one after the other: the lease first. Who stands in
/// the index without a lease is not a replica; who has a lease and does not stand there yet is found by id.
#[derive(Debug)]
pub struct Registry {
    redis: Redis,
    lease: Script,
    index: Script,
    live: Script,
}

impl Registry {
    /// The registry in this Redis.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            lease: Script::new("replica_lease_v2", include_str!("scripts/replica_lease_v2.lua")),
            index: Script::new("replica_index_v2", include_str!("scripts/replica_index_v2.lua")),
            live: Script::new("replica_live_v1", include_str!("scripts/replica_live_v1.lua")),
        }
    }

    /// Takes or renews the lease of `peer` and gives the ids of all replicas that live.
    ///
    /// # Errors
    /// When Redis could not be asked.
    pub async fn renew(&self, peer: &Peer) -> Result<Vec<ReplicaId>, RedisError> {
        let (lease, schema) = (LEASE.as_millis().to_string(), peer.snapshot_schema.to_string());
        let url = peer.url.as_ref().map_or("", Url::as_str);
        let fields: [&[u8]; 7] = [
            lease.as_bytes(),
            b"url",
            url.as_bytes(),
            b"release",
            peer.release.as_bytes(),
            b"snapshot_schema",
            schema.as_bytes(),
        ];
        self.redis.run::<()>(&self.lease, &[&key(&peer.id)], &fields).await?;
        let ids: Vec<String> =
            self.redis.run(&self.index, &[INDEX], &[peer.id.as_str().as_bytes(), lease.as_bytes()]).await?;
        Ok(parsed(&ids))
    }

    /// Gives the lease up, so that others need not wait for its end.
    ///
    /// # Errors
    /// When Redis could not be asked.
    pub async fn leave(&self, id: &ReplicaId) -> Result<(), RedisError> {
        let mut pipe = ::redis::Pipeline::with_capacity(2);
        pipe.cmd("ZREM").arg(INDEX).arg(id.as_str()).ignore();
        pipe.cmd("DEL").arg(key(id)).ignore();
        self.redis.pipeline(&pipe).await
    }

    /// The ids of all replicas that live.
    ///
    /// # Errors
    /// When Redis could not be asked.
    pub async fn live(&self) -> Result<Vec<ReplicaId>, RedisError> {
        let ids: Vec<String> = self.redis.run(&self.live, &[INDEX], &[]).await?;
        Ok(parsed(&ids))
    }

    /// The leases of these replicas; those that have none are left out.
    ///
    /// # Errors
    /// When Redis could not be asked.
    pub async fn find(&self, ids: &[ReplicaId]) -> Result<Vec<Peer>, RedisError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = ::redis::Pipeline::with_capacity(ids.len());
        for id in ids {
            pipe.cmd("HGETALL").arg(key(id));
        }
        // Each answer for itself: what stands in the place of one lease must not hide the others.
        pipe.ignore_errors();
        let found: Vec<RedisResult<Value>> = self.redis.pipeline(&pipe).await?;
        let mut peers = Vec::with_capacity(ids.len());
        for (id, lease) in ids.iter().zip(found) {
            match lease {
                Ok(fields) => {
                    let fields = ::redis::from_redis_value(fields).unwrap_or_default();
                    peers.extend(peer(id, &fields));
                }
                Err(e) if e.code() == Some("WRONGTYPE") => {
                    tracing::warn!(peer = %id, "the lease of a replica is no lease, it is passed over");
                }
                // A node of a Cluster that is away says nothing of the leases on it.
                Err(e) => return Err(RedisError::of_answer(&self.redis, e)),
            }
        }
        Ok(peers)
    }
}

fn key(id: &ReplicaId) -> String {
    format!("replica:{id}")
}

/// What stands there and is no id is somebody else's.
fn parsed(ids: &[String]) -> Vec<ReplicaId> {
    ids.iter().filter_map(|id| id.parse().ok()).collect()
}

fn peer(id: &ReplicaId, fields: &HashMap<String, String>) -> Option<Peer> {
    let release = fields.get("release")?.clone();
    let url = fields.get("url").and_then(|url| url.parse().ok());
    let snapshot_schema = fields.get("snapshot_schema").and_then(|n| n.parse().ok()).unwrap_or(1);
    Some(Peer { id: id.clone(), url, release, snapshot_schema })
}
