//! Content becomes the next revision of a workspace.

use std::path::PathBuf;

use obol_model::snapshot::{Documents, PolicySnapshot, Sealed, WorkspaceSnapshot};
use obol_model::{KeyRing, Revision, SealError, WorkspaceId};
use serde_json::Value;

use crate::publisher::{PublishError, Publisher, current};
use crate::store::{ControlStore, NewRevision, Origin, Stamp, StoreError};

/// Why content did not become a revision.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommitError {
    /// Control's own store refused, or could not be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Redis could not be asked which revision it has.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// The documents cannot be written.
    #[error("the content cannot be published: {0}")]
    Encode(String),
}

/// What is to be published, as some revision.
pub(crate) struct Content<'a> {
    pub(crate) workspace: &'a WorkspaceId,
    pub(crate) upon: Upon,
    pub(crate) origin: Origin,
    pub(crate) file: Option<PathBuf>,
    /// Only an operator raises the epoch.
    pub(crate) raise_epoch: bool,
    pub(crate) encode: &'a mut (dyn FnMut(Revision) -> Result<Documents, String> + Send),
}

/// What content was decided upon.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Upon {
    /// Whatever there is: a command is the newest word.
    Anything,
    /// This revision, or that there is none: whoever was faster may have said something newer.
    Seen(Option<Revision>),
}

/// Puts content into the store as one more than the highest revision of which the store or Redis knows: the store may be
/// a restored backup, and Redis may have lost its data. The replicas get it by what reconciles them with the store.
/// Should somebody else be faster, it tries that many times.
pub(crate) async fn commit(
    store: &dyn ControlStore,
    publisher: &dyn Publisher,
    content: Content<'_>,
    attempts: usize,
    by: &Stamp,
) -> Result<Revision, CommitError> {
    let Content { workspace, upon, origin, file, raise_epoch, encode } = content;
    let mut attempt = 1;
    loop {
        let used = match upon {
            Upon::Anything => store.head(workspace).await?.map(|head| head.revision),
            Upon::Seen(revision) => revision,
        };
        let highest = used.max(current(publisher, workspace).await?);
        let revision = next(highest, raise_epoch);
        let documents = encode(revision).map_err(CommitError::Encode)?;
        let (workspace, file) = (workspace.clone(), file.clone());
        let new = NewRevision { workspace, after: used, revision, documents, origin, file };
        match store.publish(new, by).await {
            Ok(()) => return Ok(revision),
            Err(StoreError::Conflict { .. }) if attempt < attempts => attempt += 1,
            Err(e) => return Err(e.into()),
        }
    }
}

fn next(highest: Option<Revision>, raise_epoch: bool) -> Revision {
    let highest = highest.unwrap_or(Revision { epoch: 1, number: 0 });
    if raise_epoch {
        return Revision { epoch: highest.epoch.saturating_add(1), number: 1 };
    }
    Revision { epoch: highest.epoch.max(1), number: highest.number.saturating_add(1) }
}

/// The same content as another revision, with its secrets sealed anew by the first key of the ring: content that comes
/// back must not bring a key back that is on its way out.
pub(crate) fn reseal(
    documents: &Documents,
    workspace: &WorkspaceId,
    ring: &KeyRing,
    revision: Revision,
) -> Result<Documents, String> {
    let (snapshot, mut policy) = documents.decode(workspace).map_err(|e| e.to_string())?;
    let mut snapshot = serde_json::to_value(snapshot).map_err(|e| e.to_string())?;
    seal_again(&mut snapshot, workspace, ring).map_err(|e| {
        format!(
            "a secret in it cannot be read: {e}; `OBOL_CREDENTIAL_KEY` must still hold the key that sealed it"
        )
    })?;
    let mut snapshot: WorkspaceSnapshot = serde_json::from_value(snapshot).map_err(|e| e.to_string())?;
    snapshot.revision = revision;
    policy.revision = revision;
    Documents::encode(&snapshot, &policy as &PolicySnapshot).map_err(|e| e.to_string())
}

/// Every text of our sealed form is a secret: nothing else in a snapshot looks like one and opens.
fn seal_again(value: &mut Value, workspace: &WorkspaceId, ring: &KeyRing) -> Result<(), SealError> {
    match value {
        Value::String(text) if text.starts_with("v1.") => match ring.open(workspace, &Sealed(text.clone())) {
            Ok(secret) => *text = ring.seal(workspace, &secret)?.0,
            Err(SealError::Damaged) => {}
            Err(e) => return Err(e),
        },
        Value::Array(items) => items.iter_mut().try_for_each(|item| seal_again(item, workspace, ring))?,
        Value::Object(fields) => {
            fields.values_mut().try_for_each(|field| seal_again(field, workspace, ring))?;
        }
        _ => {}
    }
    Ok(())
}
