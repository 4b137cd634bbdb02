//! Where replicas share what one of them has listed.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use obol_model::{ConnectionName, WorkspaceId};

use crate::pool::ListKind;
use crate::wire::ProtocolVersion;

/// The largest list that is shared, in bytes: a larger one would hold Redis up, so each replica asks for itself.
pub const MAX_SHARED: usize = 4 << 20;
/// How long a list stays in the store after it was listed; as long as it may be served at all.
pub(super) const KEEP: Duration = Duration::from_mins(5);

/// Which list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ListKey {
    /// Whose.
    pub workspace: WorkspaceId,
    /// Which connection of the workspace.
    pub connection: ConnectionName,
    /// A digest of the address, the credential and everything else that the workspace says of the connection.
    pub generation: u64,
    /// The revision that was offered to the upstream.
    pub version: ProtocolVersion,
    /// Which of its lists.
    pub kind: ListKind,
}

/// SHA-256 of a list's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ListDigest([u8; 32]);

impl ListDigest {
    /// The digest of these bytes.
    pub fn of(items: &[u8]) -> Self {
        let mut bytes = [0; 32];
        for (to, from) in bytes.iter_mut().zip(digest(&SHA256, items).as_ref()) {
            *to = *from;
        }
        Self(bytes)
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Debug for ListDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start: String = self.0.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        write!(f, "ListDigest({start}…)")
    }
}

/// What a replica needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// The list that it has, which need not be sent again.
    pub known: Option<ListDigest>,
    /// A listing that began longer ago is too old.
    pub ttl: Duration,
    /// How long ago the upstream announced a change; a listing that began before is too old.
    pub heard: Option<Duration>,
}

/// A list that is shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shared {
    /// What it is.
    pub digest: ListDigest,
    /// How long ago its listing began.
    pub age: Duration,
    /// A JSON array of the items as the upstream spelled them; `None` when the replica has it already.
    pub items: Option<Bytes>,
}

/// Who lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Nobody: what is shared is what was wanted.
    Nobody,
    /// Whoever asked: it has the lease now, and is to put the list or to release it.
    Ours,
    /// Another replica, which has the lease for so long unless it renews it.
    Theirs {
        /// How long.
        left: Duration,
    },
}

/// What became of a list that was put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// It is what was shared before.
    Same,
    /// It is new, or another one than before.
    Changed {
        /// Whether there was one before.
        replaced: bool,
    },
    /// The lease was lost; what is shared was not touched.
    LeaseLost,
}

/// The store could not be asked.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the shared catalogue cannot be asked")]
pub struct StoreError(#[source] pub obol_redis::RedisError);

/// Where lists are shared. Each method is one atomic step; all times are by the store's own clock, so that no two
/// replicas' clocks are compared.
///
/// # Errors
/// All methods: [`StoreError`] when the store could not be asked.
#[async_trait]
pub trait CatalogueStore: fmt::Debug + Send + Sync + 'static {
    /// Reads a list and, when it is not what is wanted and nobody lists it, takes the lease on listing it. `token` is the
    /// holder's own.
    async fn begin(
        &self,
        key: &ListKey,
        wanted: &Wanted,
        token: &str,
        lease: Duration,
    ) -> Result<(Option<Shared>, Turn), StoreError>;

    /// Prolongs the lease; `false` when it is another's by now.
    async fn renew(&self, key: &ListKey, token: &str, lease: Duration) -> Result<bool, StoreError>;

    /// Shares a list that was listed under the lease, and ends the lease.
    async fn put(&self, key: &ListKey, token: &str, items: &Bytes) -> Result<Put, StoreError>;

    /// Ends the lease without a list.
    async fn release(&self, key: &ListKey, token: &str) -> Result<(), StoreError>;

    /// What is shared of each of these, which are of one workspace.
    async fn digests(&self, keys: &[ListKey]) -> Result<Vec<Option<ListDigest>>, StoreError>;
}
