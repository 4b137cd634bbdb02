use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::Timestamp;
use obol_model::{ConnectionName, KeyId, Principal, SessionId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{Owner, SessionError};

/// A session as the store keeps it (DESIGN §6.2).
#[derive(Clone, Serialize, Deserialize)]
pub struct SessionRecord {
    /// Version of this document; see [`SessionRecord::SCHEMA`].
    pub schema_version: u32,
    /// Which session. A credential.
    pub session_id: SessionId,
    /// Whose tenant.
    pub workspace_id: WorkspaceId,
    /// The key that created it; `None` when a user did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<KeyId>,
    /// Who created it, and owns its streams.
    pub principal: Principal,
    /// The protocol version that was negotiated.
    pub protocol_version: String,
    /// `clientInfo` of `initialize`, as it was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_info: Option<Box<RawValue>>,
    /// `capabilities` of `initialize`, as they were sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_capabilities: Option<Box<RawValue>>,
    /// The level of `logging/setLevel`; `None` until the client sets one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_level: Option<String>,
    /// Resources that the client subscribed to, by the URI that it sees.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub subscriptions: BTreeSet<String>,
    /// What was met upstream. For people: nothing is decided by it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub upstreams: BTreeMap<ConnectionName, UpstreamNote>,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was last used.
    pub last_seen: Timestamp,
    /// How often it was saved, creation included: saving needs the value that was read.
    pub rev: u64,
}

/// What a session met at an upstream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpstreamNote {
    /// The protocol version that the upstream speaks, which names its era.
    pub protocol_version: String,
    /// `serverInfo.name`, when the upstream told one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// When it last answered.
    pub last_seen: Timestamp,
}

impl SessionRecord {
    /// The version of the document that this release writes, and the highest that it reads. Fields that an older
    /// release may drop are added without raising it.
    pub const SCHEMA: u32 = 1;

    /// Each request reads the record, so whoever fills it must not make the others' requests expensive.
    pub const MAX_BYTES: usize = 64 * 1024;

    /// Whose it is.
    pub(crate) fn owner(&self) -> Owner<'_> {
        Owner { workspace_id: &self.workspace_id, principal: &self.principal }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, SessionError> {
        let bytes = serde_json::to_vec(self).map_err(|why| unreadable(&why))?;
        if bytes.len() > Self::MAX_BYTES {
            return Err(SessionError::TooLarge { size: bytes.len(), limit: Self::MAX_BYTES });
        }
        Ok(bytes)
    }

    /// The revision and the time are those beside the record, which change without it.
    pub(crate) fn decode(bytes: &[u8], rev: u64, last_seen: Timestamp) -> Result<Self, SessionError> {
        let record: Self = match serde_json::from_slice(bytes) {
            Ok(record) => record,
            Err(why) => return Err(newer(bytes).unwrap_or_else(|| unreadable(&why))),
        };
        if record.schema_version > Self::SCHEMA {
            return Err(unknown_schema(record.schema_version));
        }
        Ok(Self { last_seen, rev, ..record })
    }
}

/// A record of a later release may have another shape altogether; its version is the better explanation.
fn newer(bytes: &[u8]) -> Option<SessionError> {
    #[derive(Deserialize)]
    struct Version {
        schema_version: u32,
    }
    let version: Version = serde_json::from_slice(bytes).ok()?;
    (version.schema_version > SessionRecord::SCHEMA).then(|| unknown_schema(version.schema_version))
}

fn unknown_schema(found: u32) -> SessionError {
    SessionError::Newer { found, known: SessionRecord::SCHEMA }
}

/// The parser's own text may quote the record, which holds a credential.
fn unreadable(why: &serde_json::Error) -> SessionError {
    let reason = format!("{:?} error at line {}, column {}", why.classify(), why.line(), why.column());
    SessionError::Corrupt { reason }
}

/// Without what the client sent, which may be long and is nobody's business in a log.
impl fmt::Debug for SessionRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRecord")
            .field("session_id", &self.session_id)
            .field("workspace_id", &self.workspace_id)
            .field("principal", &self.principal)
            .field("protocol_version", &self.protocol_version)
            .field("rev", &self.rev)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = include_str!("../tests/golden/session_v1.json");

    #[test]
    fn records_of_the_first_release_can_be_read_and_are_written_the_same() {
        let now = Timestamp::UNIX_EPOCH;
        let record = SessionRecord::decode(GOLDEN.trim().as_bytes(), 7, now).unwrap();
        assert_eq!((record.rev, record.last_seen), (7, now));
        assert_eq!(record.principal.to_string(), "user:20:https://idp.example/:alice");
        // What the client sent keeps its bytes: big integers, spaces, order.
        let info = record.client_info.as_ref().unwrap().get();
        assert_eq!(info, r#"{"name":"vscode", "build": 12345678901234567890123}"#);
        let stored = SessionRecord { last_seen: "2026-07-28T12:00:01Z".parse().unwrap(), rev: 3, ..record };
        assert_eq!(String::from_utf8(stored.encode().unwrap()).unwrap(), GOLDEN.trim());
    }

    #[test]
    fn unknown_fields_and_missing_optional_ones_are_no_error() {
        let mut value: serde_json::Map<String, serde_json::Value> = serde_json::from_str(GOLDEN).unwrap();
        for optional in ["client_info", "client_capabilities", "log_level", "subscriptions", "upstreams"] {
            value.remove(optional).unwrap();
        }
        value.insert("of_a_later_release".into(), true.into());
        let bytes = serde_json::to_vec(&value).unwrap();
        SessionRecord::decode(&bytes, 1, Timestamp::UNIX_EPOCH).unwrap();
    }

    #[test]
    fn what_cannot_be_read_is_told_without_its_content() {
        for (bytes, expected) in [
            (GOLDEN.replace(r#""schema_version":1"#, r#""schema_version":2"#), "schema version 2"),
            (r#"{"schema_version":9,"other":"shape"}"#.to_owned(), "schema version 9"),
            (GOLDEN.replace("2025-11-25", "\u{1}"), "Syntax error"),
            (GOLDEN.replace(r#"{"user""#, r#"{"secret-kind""#), "Data error"),
        ] {
            let error = SessionRecord::decode(bytes.as_bytes(), 1, Timestamp::UNIX_EPOCH).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(text.contains(expected), "{text}");
            assert!(!text.contains("secret") && !text.contains("mcs_"), "{text}");
        }
    }

    #[test]
    fn debug_shows_neither_the_id_nor_what_the_client_sent() {
        let record = SessionRecord::decode(GOLDEN.as_bytes(), 1, Timestamp::UNIX_EPOCH).unwrap();
        let text = format!("{record:?}");
        assert!(!text.contains(&record.session_id.expose()) && !text.contains("vscode"), "{text}");
    }
}
