use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ParseIdError;

/// One process of the gateway, new at each start: a restarted replica is another replica, so that what the old one
/// held is never taken for the new one's.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
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

impl FromStr for ReplicaId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let valid = text.strip_prefix("r-").is_some_and(|rest| {
            rest.len() == 12 && rest.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        });
        let rule = "`r-` and twelve hexadecimal digits";
        if valid { Ok(Self(text.to_owned())) } else { Err(ParseIdError::new("replica id", rule, text)) }
    }
}

impl TryFrom<String> for ReplicaId {
    type Error = ParseIdError;

    fn try_from(text: String) -> Result<Self, ParseIdError> {
        text.parse()
    }
}

impl From<ReplicaId> for String {
    fn from(id: ReplicaId) -> Self {
        id.0
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
