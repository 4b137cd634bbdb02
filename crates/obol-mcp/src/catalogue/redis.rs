use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use obol_redis::{Redis, Script};

use super::store::{CatalogueStore, KEEP, ListDigest, ListKey, Put, Shared, StoreError, Turn, Wanted};

/// Lists that all replicas of one Redis share: one key for each, so that each expires by itself.
#[derive(Debug)]
pub struct RedisCatalogue {
    redis: Redis,
    begin: Script,
    renew: Script,
    put: Script,
    release: Script,
}

impl RedisCatalogue {
    /// A store in this Redis.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            begin: Script::new("catalogue_begin_v1", include_str!("scripts/catalogue_begin_v1.lua")),
            renew: Script::new("catalogue_renew_v1", include_str!("scripts/catalogue_renew_v1.lua")),
            put: Script::new("catalogue_put_v1", include_str!("scripts/catalogue_put_v1.lua")),
            release: Script::new("catalogue_release_v1", include_str!("scripts/catalogue_release_v1.lua")),
        }
    }
}

/// The braces are literal: a hash tag. The `1` is the version of what is stored.
fn name(key: &ListKey) -> String {
    let ListKey { workspace, connection, generation, version, kind } = key;
    format!("catalog:{{{workspace}}}:1:{connection}:{generation:016x}:{}:{}", version.as_str(), kind.member())
}

fn millis(duration: Duration) -> String {
    duration.as_millis().to_string()
}

#[async_trait]
impl CatalogueStore for RedisCatalogue {
    async fn begin(
        &self,
        key: &ListKey,
        wanted: &Wanted,
        token: &str,
        lease: Duration,
    ) -> Result<(Option<Shared>, Turn), StoreError> {
        let known = wanted.known.as_ref().map_or(&b""[..], ListDigest::as_bytes);
        let heard = wanted.heard.map_or_else(|| "-1".to_owned(), millis);
        let (ttl, lease, keep) = (millis(wanted.ttl), millis(lease), millis(KEEP));
        let args =
            [known, ttl.as_bytes(), heard.as_bytes(), token.as_bytes(), lease.as_bytes(), keep.as_bytes()];
        let (turn, left, digest, age, items): (u8, u64, Vec<u8>, u64, Vec<u8>) =
            self.redis.run(&self.begin, &[&name(key)], &args).await.map_err(StoreError)?;
        let turn = match turn {
            0 => Turn::Nobody,
            1 => Turn::Ours,
            _ => Turn::Theirs { left: Duration::from_millis(left) },
        };
        let shared = ListDigest::from_bytes(&digest).map(|digest| Shared {
            digest,
            age: Duration::from_millis(age),
            items: (wanted.known != Some(digest)).then(|| Bytes::from(items)),
        });
        Ok((shared, turn))
    }

    async fn renew(&self, key: &ListKey, token: &str, lease: Duration) -> Result<bool, StoreError> {
        let args = [token.as_bytes(), &millis(lease).into_bytes()];
        self.redis.run(&self.renew, &[&name(key)], &args).await.map_err(StoreError)
    }

    async fn put(&self, key: &ListKey, token: &str, items: &Bytes) -> Result<Put, StoreError> {
        let (digest, keep) = (ListDigest::of(items), millis(KEEP));
        let args = [token.as_bytes(), digest.as_bytes(), items, keep.as_bytes()];
        let put: u8 = self.redis.run(&self.put, &[&name(key)], &args).await.map_err(StoreError)?;
        Ok(match put {
            0 => Put::LeaseLost,
            1 => Put::Same,
            2 => Put::Changed { replaced: false },
            _ => Put::Changed { replaced: true },
        })
    }

    async fn release(&self, key: &ListKey, token: &str) -> Result<(), StoreError> {
        self.redis.run(&self.release, &[&name(key)], &[token.as_bytes()]).await.map_err(StoreError)
    }

    async fn digests(&self, keys: &[ListKey]) -> Result<Vec<Option<ListDigest>>, StoreError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = ::redis::Pipeline::with_capacity(keys.len());
        for key in keys {
            pipe.cmd("HGET").arg(name(key)).arg("digest");
        }
        let found: Vec<Option<Vec<u8>>> = self.redis.pipeline(&pipe).await.map_err(StoreError)?;
        Ok(found.into_iter().map(|digest| ListDigest::from_bytes(&digest?)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::ListKind;
    use crate::wire::ProtocolVersion;

    #[test]
    fn the_keys_of_a_workspace_lie_in_one_slot_and_carry_a_version() {
        let key = ListKey {
            workspace: "acme".parse().unwrap(),
            connection: "git".parse().unwrap(),
            generation: 255,
            version: ProtocolVersion::LATEST,
            kind: ListKind::ResourceTemplates,
        };
        assert_eq!(name(&key), "catalog:{acme}:1:git:00000000000000ff:2025-11-25:resourceTemplates");
    }
}
