//! The vocabulary that crates and processes share: ids, secrets, the clock, error kinds, money, and the
//! documents that control publishes and replicas read.
//!
//! This crate does no I/O and knows no async. A type lives here only when two crates or two processes need it.
//! Everything that crosses a process boundary (snapshots, key records, usage events, invalidations) carries a
//! version, so that replicas of two releases can share one Redis.

mod budget;
mod clock;
mod error;
mod id;
mod invalidation;
mod key;
pub mod metric;
mod money;
pub mod names;
pub mod net;
mod peer_name;
mod price;
mod seal;
mod secret;
mod session_id;
pub mod snapshot;
mod usage;

pub use budget::{Budget, BudgetScope, KeyBudget, Limits, Window};
pub use clock::{Clock, ManualClock, SystemClock};
pub use error::{Causes, Kind, Origin};
pub use id::{
    ConnectionName, KeyId, ModelName, ParseIdError, Principal, ProviderName, RequestId, WorkspaceId,
};
pub use invalidation::Invalidation;
pub use key::{KeyContext, KeyHash, VirtualKey};
pub use money::{NanoUsd, ParseAmountError, PerMillion, SignedNanoUsd};
pub use peer_name::ReplicaId;
pub use price::{PriceTier, Rates, TokenPrice};
pub use seal::{KeyRing, SealError};
pub use secret::Secret;
pub use session_id::{ParseSessionIdError, SessionId};
pub use snapshot::Revision;
pub use usage::{EventId, EventPart, ModelCall, Outcome, ParseEventIdError, Tokens, UsageEvent, UsageKind};
