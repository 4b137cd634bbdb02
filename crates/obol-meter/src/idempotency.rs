//! Requests that may be sent again without being made again (DESIGN §12.7).
//!
//! A call whose [`Start`](crate::Start) carries an [`Idempotency`] is looked up in the flight that sets its money aside, and
//! what becomes of it is written in the flight that closes it. What a second request under the same key meets is
//! [`Repeated`], inside of [`Denied`](crate::Denied): nothing is set aside for it, no rate counts it and no event tells of it.
//!
//! What a call leaves behind when it is closed:
//!
//! | how it ended | what is known of it |
//! |---|---|
//! | [`remember`](crate::UsageGuard::remember) or [`remember_recorded`](crate::UsageGuard::remember_recorded) was called | its answer, within the bound; else that there is none to be repeated |
//! | [`remember_unknown`](crate::UsageGuard::remember_unknown) was called | that nobody knows what it did |
//! | [`cancel`](crate::UsageGuard::cancel), [`give_back`](crate::UsageGuard::give_back), or an [`Outcome::Error`] without tokens and cost | nothing: it may be made |
//! | another [`Outcome::Error`], [`Outcome::Partial`], a guard that was dropped, a replica that died | that nobody knows what it did |
//! | [`Outcome::Ok`] without its answer | that there is no answer to be repeated |
//!
//! [`Outcome::Error`]: obol_model::Outcome::Error
//! [`Outcome::Partial`]: obol_model::Outcome::Partial
//! [`Outcome::Ok`]: obol_model::Outcome::Ok

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use obol_model::{NanoUsd, Outcome, UsageEvent};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What a client calls a request that it may send again. It is known within a workspace and a principal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Idempotency {
    /// The SHA-256 of what the client calls it.
    pub key: [u8; 32],
    /// The SHA-256 of what was asked for: the endpoint and the body.
    pub fingerprint: [u8; 32],
}

/// An answer that is given again.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredAnswer {
    /// The HTTP status.
    pub status: u16,
    /// What the body is: of a stream `text/event-stream`.
    pub content_type: String,
    /// All of it.
    pub body: Bytes,
}

/// Bodies are not for logs.
impl fmt::Debug for StoredAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredAnswer")
            .field("status", &self.status)
            .field("content_type", &self.content_type)
            .field("bytes", &self.body.len())
            .finish()
    }
}

/// What is known of an earlier request under the same key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Repeated {
    /// It was answered, and this is the answer.
    #[error("the request was answered before")]
    Answered(StoredAnswer),
    /// It is under way.
    #[error("a request with this idempotency key is under way")]
    InFlight,
    /// It was another request.
    #[error("the idempotency key belongs to another request")]
    OtherRequest,
    /// It may have been executed, and nobody knows.
    #[error("the outcome of the request with this idempotency key is unknown")]
    OutcomeUnknown,
    /// It was executed, and its answer was not kept: too large, or a stream that nobody recorded.
    #[error("the answer of the request with this idempotency key was not kept")]
    NotReplayable,
}

/// Records the body of an answer while it is relayed; see [`crate::UsageGuard::recorder`]. It holds a copy, since chunks keep
/// alive whatever they were cut from, within the bound of one answer and that of all answers of this process; beyond
/// them it holds nothing.
#[derive(Debug)]
pub struct Recorder {
    room: Room,
    /// `None` beyond the bound.
    held: Option<(BytesMut, Option<OwnedSemaphorePermit>)>,
}

impl Recorder {
    pub(crate) fn new(room: Room) -> Self {
        Self { room, held: Some((BytesMut::new(), None)) }
    }

    /// Takes the next chunk as the client gets it.
    pub fn record(&mut self, chunk: &[u8]) {
        let Some((body, place)) = &mut self.held else { return };
        let Some(more) = self.room.take(body.len().saturating_add(chunk.len()), chunk.len()) else {
            self.held = None;
            return;
        };
        body.extend_from_slice(chunk);
        match place {
            Some(place) => place.merge(more),
            None => *place = Some(more),
        }
    }

    /// All of it, once the last chunk is there; `None` beyond the bound.
    pub(crate) fn finish(self) -> Option<Bytes> {
        self.held.map(|(body, _)| body.freeze())
    }
}

/// How many bytes of answers this process holds for their calls to be closed.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    bytes: Arc<Semaphore>,
    most_of_one: usize,
}

impl Room {
    pub(crate) fn new(bytes: usize, most_of_one: usize) -> Self {
        Self { bytes: Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS))), most_of_one }
    }

    /// Place for `more` bytes of an answer that has `size` with them.
    fn take(&self, size: usize, more: usize) -> Option<OwnedSemaphorePermit> {
        if size > self.most_of_one {
            return None;
        }
        let more = u32::try_from(more).ok()?;
        self.bytes.clone().try_acquire_many_owned(more).ok()
    }

    pub(crate) fn keep(&self, answer: StoredAnswer) -> Memory {
        let size = answer.body.len();
        match self.take(size, size) {
            Some(place) => Memory::Answer(Remembered { answer, _place: Arc::new(place) }),
            None => Memory::Unrecorded,
        }
    }
}

/// An answer until its call is closed.
#[derive(Debug, Clone)]
pub(crate) struct Remembered {
    pub(crate) answer: StoredAnswer,
    _place: Arc<OwnedSemaphorePermit>,
}

/// What a guard was told to leave behind.
#[derive(Debug, Default)]
pub(crate) enum Memory {
    #[default]
    Untold,
    Answer(Remembered),
    Unrecorded,
    Unknown,
}

/// What is known of a call under an idempotency key once it is closed.
#[derive(Debug, Clone)]
pub(crate) enum Fate {
    Forgotten,
    Answered(Remembered),
    Unknown,
    Unrecorded,
}

impl Fate {
    pub(crate) fn of(memory: Memory, event: &UsageEvent) -> Self {
        let did_nothing = event.cost == NanoUsd::ZERO.into() && event.tokens == obol_model::Tokens::default();
        match (memory, event.outcome) {
            (Memory::Answer(answer), _) => Self::Answered(answer),
            (Memory::Unrecorded, _) | (Memory::Untold, Outcome::Ok) => Self::Unrecorded,
            (Memory::Untold, Outcome::Error) if did_nothing => Self::Forgotten,
            (Memory::Untold | Memory::Unknown, _) => Self::Unknown,
        }
    }

    #[cfg(test)]
    pub(crate) fn answered(body: &'static [u8]) -> Self {
        let answer =
            StoredAnswer { status: 200, content_type: String::new(), body: Bytes::from_static(body) };
        match Room::new(body.len(), body.len()).keep(answer) {
            Memory::Answer(answer) => Self::Answered(answer),
            Memory::Untold | Memory::Unrecorded | Memory::Unknown => Self::Unrecorded,
        }
    }

    /// The word for it in the ledger.
    pub(crate) fn as_str(&self) -> &'static str {
        match self {
            Self::Forgotten => "forgotten",
            Self::Answered(_) => "answered",
            Self::Unknown => "unknown",
            Self::Unrecorded => "unrecorded",
        }
    }
}

/// An idempotency key as a reservation holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keyed {
    /// The key, and what it stands for.
    pub idempotency: Idempotency,
    /// For how long it is known, from the admission on and once more from the closing on.
    pub life: Duration,
}
