use std::fmt;

use serde::{Deserialize, Serialize};

/// One process of the gateway, new at each start: a restarted replica is another replica, so that what the old one
/// held is never taken for the new one's.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReplicaId(String);

impl ReplicaId {
    /// A new id.
    pub fn generate() -> Self {
        Self(format!("r-{}", uuid::Uuid::new_v4().as_simple().to_string().get(..12).unwrap_or_default()))
    }

    /// The text of the id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
