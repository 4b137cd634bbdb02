//! Redis becomes what the store says.

use std::collections::HashMap;

use obol_model::snapshot::Documents;
use obol_model::{KeyContext, KeyHash, Revision};

use crate::keys::KeyRecord;
use crate::publisher::{PublishError, PublishedKeys, Publisher};
use crate::store::Head;

/// What had to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing.
    Unchanged,
    /// It was missing, older, damaged, or not to be there at all.
    Written,
    /// Something newer is there of which the store does not know. It is left alone.
    Foreign(Revision),
}

/// Makes the publication of a workspace what it should be; `documents` are those of a published one.
pub(crate) async fn publication(
    publisher: &dyn Publisher,
    head: &Head,
    documents: Option<&Documents>,
) -> Result<Outcome, PublishError> {
    let workspace = &head.workspace;
    if head.published != documents.is_some() {
        // Taking away what should be there would be worse than leaving it.
        let revision = head.revision;
        return Err(PublishError::Encode(format!(
            "the documents of `{workspace}` {revision} are not to be had"
        )));
    }
    let there = publisher.read(workspace).await?;
    if there.as_ref() == documents {
        return Ok(Outcome::Unchanged);
    }
    let decoded = there.as_ref().map(|docs| docs.decode(workspace));
    let damaged = match decoded {
        Some(Ok((snapshot, _))) if snapshot.revision > head.revision => {
            return Ok(Outcome::Foreign(snapshot.revision));
        }
        // Coherent, and yet not what was published as this revision.
        Some(Ok((snapshot, _))) if snapshot.revision == head.revision => there.as_ref(),
        Some(Err(why)) => {
            tracing::warn!(workspace = %workspace, reason = %why, "publication in Redis is damaged");
            there.as_ref()
        }
        Some(Ok(_)) | None => None,
    };
    let written = match documents {
        Some(documents) => publisher.repair(workspace, documents, head.revision, damaged).await,
        None => publisher.unpublish(workspace, head.revision, damaged).await,
    };
    match written {
        Ok(()) => Ok(Outcome::Written),
        Err(PublishError::NotNewer { there, .. }) => Ok(Outcome::Foreign(there)),
        Err(e) => Err(e),
    }
}

/// Tells Redis one key record.
pub(crate) async fn key(publisher: &dyn Publisher, record: &KeyRecord) -> Result<bool, PublishError> {
    if record.is_live() {
        publisher.put_key(&record.hash, &record.key, None).await
    } else {
        publisher.revoke_key(record).await
    }
}

/// How far what is known of the store can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Knowledge {
    /// It was read after `published` was, and all of it: who is not in it is unknown. Whoever makes a key tells the store
    /// first, and Redis then.
    Whole,
    /// It may be behind.
    Partial,
}

/// Makes key records what they should be; answers how many were wrong.
pub(crate) async fn keys(
    publisher: &dyn Publisher,
    records: &HashMap<KeyHash, KeyRecord>,
    published: &PublishedKeys,
    knowledge: Knowledge,
) -> Result<usize, PublishError> {
    let mut wrong = 0;
    for record in records.values().filter(|record| record.is_live()) {
        let there = published.records.get(&record.hash);
        let intact = there.and_then(|bytes| serde_json::from_slice::<KeyContext>(bytes).ok());
        if intact.as_ref() == Some(&record.key) {
            continue;
        }
        // What stands there and can be read may be newer than what is known here.
        let damaged = there.filter(|_| knowledge == Knowledge::Whole || intact.is_none());
        let wrote = publisher.put_key(&record.hash, &record.key, damaged.map(Vec::as_slice)).await?;
        wrong += usize::from(wrote);
    }
    for (hash, found) in &published.records {
        let removed = match records.get(hash) {
            Some(record) if record.is_live() => continue,
            Some(record) => publisher.revoke_key(record).await?,
            None if knowledge == Knowledge::Partial => continue,
            None => {
                let removed = publisher.remove_key(hash, found).await?;
                if removed {
                    let key = serde_json::from_slice::<KeyContext>(found).ok();
                    let id = key.as_ref().map(|key| key.key_id.as_str());
                    let workspace = key.as_ref().map(|key| key.workspace_id.as_str());
                    tracing::warn!(?hash, key_id = id, workspace, "key that nobody knows, removed");
                }
                removed
            }
        };
        wrong += usize::from(removed);
    }
    Ok(wrong)
}
