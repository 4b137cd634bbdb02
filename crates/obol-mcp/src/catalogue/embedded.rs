use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::store::{CatalogueStore, KEEP, ListDigest, ListKey, Put, Shared, StoreError, Turn, Wanted};

/// Lists in the memory of one process.
#[derive(Debug, Default)]
pub struct EmbeddedCatalogue {
    cells: Mutex<HashMap<ListKey, Cell>>,
}

#[derive(Debug)]
struct Cell {
    list: Option<List>,
    lease: Option<Lease>,
    expires: Instant,
}

#[derive(Debug)]
struct List {
    digest: ListDigest,
    listed: Instant,
    items: Bytes,
}

#[derive(Debug)]
struct Lease {
    token: String,
    until: Instant,
    begun: Instant,
}

impl EmbeddedCatalogue {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Cell {
    fn is_held_by(&self, token: &str) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.token == token)
    }
}

#[async_trait]
impl CatalogueStore for EmbeddedCatalogue {
    async fn begin(
        &self,
        key: &ListKey,
        wanted: &Wanted,
        token: &str,
        lease: Duration,
    ) -> Result<(Option<Shared>, Turn), StoreError> {
        let now = Instant::now();
        let mut cells = self.cells.lock();
        cells.retain(|_, cell| cell.expires > now);
        let cell = cells.entry(key.clone()).or_insert(Cell { list: None, lease: None, expires: now + KEEP });
        let fresh = |list: &List| {
            let age = now - list.listed;
            age <= wanted.ttl && wanted.heard.is_none_or(|heard| age < heard)
        };
        let turn = match (&cell.list, &cell.lease) {
            (Some(list), _) if fresh(list) => Turn::Nobody,
            (_, Some(held)) if held.token != token && held.until > now => {
                Turn::Theirs { left: held.until - now }
            }
            _ => {
                cell.lease = Some(Lease { token: token.to_owned(), until: now + lease, begun: now });
                cell.expires = now + KEEP;
                Turn::Ours
            }
        };
        let shared = cell.list.as_ref().map(|list| Shared {
            digest: list.digest,
            age: now - list.listed,
            items: (wanted.known != Some(list.digest)).then(|| list.items.clone()),
        });
        Ok((shared, turn))
    }

    async fn renew(&self, key: &ListKey, token: &str, lease: Duration) -> Result<bool, StoreError> {
        let mut cells = self.cells.lock();
        let held = cells.get_mut(key).and_then(|cell| cell.lease.as_mut()).filter(|held| held.token == token);
        Ok(held.map(|held| held.until = Instant::now() + lease).is_some())
    }

    async fn put(&self, key: &ListKey, token: &str, items: &Bytes) -> Result<Put, StoreError> {
        let mut cells = self.cells.lock();
        let Some(cell) = cells.get_mut(key).filter(|cell| cell.is_held_by(token)) else {
            return Ok(Put::LeaseLost);
        };
        let now = Instant::now();
        let (digest, before) = (ListDigest::of(items), cell.list.as_ref().map(|list| list.digest));
        let listed = cell.lease.take().map_or(now, |lease| lease.begun);
        cell.list = Some(List { digest, listed, items: items.clone() });
        cell.expires = now + KEEP;
        Ok(match before {
            Some(before) if before == digest => Put::Same,
            before => Put::Changed { replaced: before.is_some() },
        })
    }

    async fn release(&self, key: &ListKey, token: &str) -> Result<(), StoreError> {
        if let Some(cell) = self.cells.lock().get_mut(key).filter(|cell| cell.is_held_by(token)) {
            cell.lease = None;
        }
        Ok(())
    }

    async fn digests(&self, keys: &[ListKey]) -> Result<Vec<Option<ListDigest>>, StoreError> {
        let (cells, now) = (self.cells.lock(), Instant::now());
        let list = |key| cells.get(key).filter(|cell: &&Cell| cell.expires > now)?.list.as_ref();
        Ok(keys.iter().map(|key| list(key).map(|list| list.digest)).collect())
    }
}
