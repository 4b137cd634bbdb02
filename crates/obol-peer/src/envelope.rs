use std::fmt;

use obol_model::ReplicaId;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

/// Where messages are posted.
pub const PATH: &str = "/peer/v1/messages";

/// The version of the envelope that this release writes, and the highest that it reads.
pub(crate) const VERSION: u32 = 1;

/// What one replica tells another. Sender and receiver know what the body of a kind looks like; a receiver of another
/// release refuses a kind that it does not know, and ignores members of a body that it does not know.
#[derive(Clone)]
pub struct Message {
    kind: &'static str,
    body: Box<RawValue>,
}

/// Shows no body: it may hold a session id.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({})", self.kind)
    }
}

impl Message {
    /// A message of this kind.
    ///
    /// # Errors
    /// When the body cannot be written as JSON.
    pub fn new(kind: &'static str, body: &impl Serialize) -> serde_json::Result<Self> {
        Ok(Self { kind, body: serde_json::value::to_raw_value(body)? })
    }

    /// Its kind.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    pub(crate) fn body(&self) -> &RawValue {
        &self.body
    }
}

/// What the receiver did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ack {
    /// It acted.
    Done,
    /// It had nothing that the message is about.
    NothingToDo,
}

/// A message as it travels.
#[derive(Serialize)]
pub(crate) struct Outgoing<'a> {
    pub(crate) v: u32,
    /// The same in each try, so that none is delivered twice.
    pub(crate) id: Uuid,
    pub(crate) from: &'a ReplicaId,
    /// How much longer the sender waits.
    pub(crate) within_ms: u64,
    pub(crate) kind: &'a str,
    pub(crate) body: &'a RawValue,
}

/// A message as it arrives.
#[derive(Deserialize)]
pub(crate) struct Incoming {
    pub(crate) id: Uuid,
    pub(crate) from: ReplicaId,
    pub(crate) within_ms: u64,
    pub(crate) kind: String,
    pub(crate) body: Box<RawValue>,
}

/// Read before anything else: a later version may have another shape altogether.
#[derive(Deserialize)]
pub(crate) struct Versioned {
    pub(crate) v: u32,
}

/// The answer to a message that was taken.
#[derive(Serialize, Deserialize)]
pub(crate) struct Taken {
    pub(crate) ack: Ack,
}

/// The answer to one that was not.
#[derive(Serialize, Deserialize)]
pub(crate) struct NotTaken {
    pub(crate) error: Why,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Why {
    pub(crate) code: String,
    #[serde(default)]
    pub(crate) message: String,
}
