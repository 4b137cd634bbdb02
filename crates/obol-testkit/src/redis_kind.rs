//! A Redis of any kind that Obol can use, for tests that hold for each of them.

use std::collections::BTreeSet;

use crate::Failure;
use crate::redis::RedisServer;
use crate::redis_cluster::RedisCluster;
use crate::redis_sentinel::RedisSentinel;

/// A running Redis of one kind.
#[derive(Debug)]
pub enum AnyRedis {
    /// One server.
    Single(RedisServer),
    /// A master that sentinels watch.
    Sentinel(RedisSentinel),
    /// A Cluster.
    Cluster(RedisCluster),
}

impl From<RedisServer> for AnyRedis {
    fn from(redis: RedisServer) -> Self {
        Self::Single(redis)
    }
}

impl From<RedisSentinel> for AnyRedis {
    fn from(redis: RedisSentinel) -> Self {
        Self::Sentinel(redis)
    }
}

impl From<RedisCluster> for AnyRedis {
    fn from(redis: RedisCluster) -> Self {
        Self::Cluster(redis)
    }
}

impl AnyRedis {
    /// A single server, or what the variable `OBOL_TEST_REDIS` says: with `sentinel` or `cluster` every test that brings
    /// no Redis of its own runs on that kind.
    ///
    /// # Errors
    /// When it does not start.
    ///
    /// # Panics
    /// When the variable says anything else.
    pub async fn try_start() -> Result<Self, Failure> {
        let kind = std::env::var("OBOL_TEST_REDIS").unwrap_or_default();
        match kind.as_str() {
            "" | "single" => Ok(RedisServer::try_start(&[]).await?.into()),
            "sentinel" => Ok(RedisSentinel::start().await.into()),
            "cluster" => Ok(RedisCluster::start().await.into()),
            _ => panic!("OBOL_TEST_REDIS is `single`, `sentinel` or `cluster`"),
        }
    }

    /// What `OBOL_REDIS_URL` is to be.
    pub fn url(&self) -> String {
        match self {
            Self::Single(redis) => redis.url(),
            Self::Sentinel(redis) => redis.url(),
            Self::Cluster(redis) => redis.url(),
        }
    }

    /// Runs a command whose first argument is its key, where that key is, and reads its answer as `T`.
    ///
    /// # Panics
    /// When Redis answers with an error or with something else.
    pub async fn query<T: ::redis::FromRedisValue>(&self, args: &[&str]) -> T {
        match self {
            Self::Single(redis) => redis.query(args).await,
            Self::Sentinel(redis) => redis.master().await.query(args).await,
            Self::Cluster(redis) => redis.owner(args[1]).await.query(args).await,
        }
    }

    /// The names of the keys that match a pattern, wherever they are.
    pub async fn keys(&self, pattern: &str) -> BTreeSet<String> {
        let mut keys = BTreeSet::new();
        match self {
            Self::Single(redis) => keys.extend(redis.keys(pattern).await),
            Self::Sentinel(redis) => keys.extend(redis.master().await.keys(pattern).await),
            Self::Cluster(redis) => {
                for node in redis.nodes().iter().filter(|node| node.runs()) {
                    keys.extend(node.keys(pattern).await);
                }
            }
        }
        keys
    }
}
