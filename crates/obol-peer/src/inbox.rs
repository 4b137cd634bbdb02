use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use http::StatusCode;
use obol_auth::{Expected, ServiceTokenError, ServiceTokens};
use obol_model::{Clock, ReplicaId, metric};
use serde_json::value::RawValue;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::envelope::{Ack, Incoming, NotTaken, Taken, VERSION, Versioned, Why};
use crate::seen::{Seen, Sight};

/// Runs a future to its end, also when the request that began it is gone.
pub type Spawn = Arc<dyn Fn(BoxFuture<'static, ()>) + Send + Sync>;

/// What happens to messages; the edge implements it.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Acts on a message of `from`. Called once for each message, and dropped at the sender's deadline.
    ///
    /// # Errors
    /// When the message is not one that this release can act on.
    async fn handle(&self, from: &ReplicaId, kind: &str, body: &RawValue) -> Result<Ack, Refused>;
}

/// Why a handler does not act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// No kind of this release.
    UnknownKind,
    /// The body is not that of its kind.
    BadBody,
}

/// Bounds of an inbox.
#[derive(Debug, Clone, Copy)]
pub struct InboxOptions {
    /// The largest message in bytes.
    pub max_body: usize,
    /// Messages that are taken at the same time.
    pub at_once: usize,
    /// Messages that are remembered against a second delivery.
    pub remembered: usize,
    /// The longest that a sender may ask for.
    pub longest: Duration,
}

impl Default for InboxOptions {
    fn default() -> Self {
        Self { max_body: 1 << 20, at_once: 256, remembered: 10_000, longest: Duration::from_secs(30) }
    }
}

/// How long after a sender's deadline its message is remembered: longer than anything is under way in a network.
const LINGER: Duration = Duration::from_secs(5);

/// An answer to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// JSON.
    pub body: String,
}

type Outcome = Result<Ack, NoAck>;

/// Why a message that was handled has no acknowledgement.
#[derive(Debug, Clone, Copy)]
enum NoAck {
    Refused(Refused),
    Deadline,
}

/// The receiving end of the channel.
pub struct Inbox {
    me: ReplicaId,
    tokens: Arc<ServiceTokens>,
    clock: Arc<dyn Clock>,
    handler: Arc<dyn Handler>,
    spawn: Spawn,
    options: InboxOptions,
    places: Semaphore,
    seen: Seen<Outcome>,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("me", &self.me).field("options", &self.options).finish_non_exhaustive()
    }
}

/// Whoever holds this may send a message.
#[derive(Debug)]
pub struct Admitted<'a>(
    #[expect(dead_code, reason = "held while the message is read and handled")] SemaphorePermit<'a>,
);

impl Inbox {
    /// The inbox of the replica `me`.
    pub fn new(
        me: ReplicaId,
        tokens: Arc<ServiceTokens>,
        clock: Arc<dyn Clock>,
        handler: Arc<dyn Handler>,
        spawn: Spawn,
        options: InboxOptions,
    ) -> Self {
        let (places, seen) = (Semaphore::new(options.at_once), Seen::new(options.remembered));
        Self { me, tokens, clock, handler, spawn, options, places, seen }
    }

    /// The largest body that [`Inbox::deliver`] is to be given.
    pub fn max_body(&self) -> usize {
        self.options.max_body
    }

    /// Looks at the value of `Authorization`, before anything of the body is read: a service JWT for `obol-peer` by
    /// `obol-gateway` on behalf of the connection to this very replica, not used before.
    ///
    /// # Errors
    /// The answer to whoever may not send.
    pub fn admit(&self, authorization: Option<&str>) -> Result<Admitted<'_>, Answer> {
        let token = authorization.and_then(|value| value.strip_prefix("Bearer ")).ok_or_else(|| {
            refusal(
                StatusCode::UNAUTHORIZED,
                "unauthenticated",
                "send a service JWT as `Authorization: Bearer …`",
            )
        })?;
        let claims = self.tokens.verify(token, &Expected::PEER, self.clock.now()).map_err(|e| {
            tracing::warn!(error = %e, "peer token refused");
            match e {
                ServiceTokenError::Busy => busy(),
                _ => refusal(StatusCode::UNAUTHORIZED, "unauthenticated", "the service JWT is not valid"),
            }
        })?;
        // Good for one replica: what one of them is shown opens no other, and whoever comes to the address of a replica
        // that is gone learns so.
        if claims.sub != self.me.as_str() {
            return Err(refusal(
                StatusCode::MISDIRECTED_REQUEST,
                WRONG_REPLICA,
                "another replica lives here",
            ));
        }
        self.places.try_acquire().map(Admitted).map_err(|_| busy())
    }

    /// Takes a message and answers once it was handled. Cancel-safe: what was taken is handled to its end.
    pub async fn deliver(&self, admitted: Admitted<'_>, body: &[u8]) -> Answer {
        let answer = self.taken(body).await.unwrap_or_else(|answer| answer);
        drop(admitted);
        metrics::counter!(metric::PEER_RECEIVED, "status" => class(answer.status)).increment(1);
        answer
    }

    /// The answer to a body that is larger than [`Inbox::max_body`], or does not come.
    pub fn unreadable(&self, too_large: bool) -> Answer {
        if too_large {
            let message = format!("a message has at most {} bytes", self.options.max_body);
            refusal(StatusCode::PAYLOAD_TOO_LARGE, "too_large", &message)
        } else {
            refusal(StatusCode::BAD_REQUEST, "bad_envelope", "the body broke off")
        }
    }

    async fn taken(&self, body: &[u8]) -> Result<Answer, Answer> {
        let message = parse(body)?;
        let now = Instant::now();
        let within = Duration::from_millis(message.within_ms).min(self.options.longest);
        let key = (message.from.clone(), message.id);
        let mut outcome = match self.seen.see(key, now + within + LINGER, now) {
            Sight::Again(outcome) => outcome,
            Sight::Full => return Err(busy()),
            Sight::First(done, outcome) => {
                let handler = self.handler.clone();
                (self.spawn)(Box::pin(async move {
                    let handled = handler.handle(&message.from, &message.kind, &message.body);
                    let handled = tokio::time::timeout_at(now + within, handled).await;
                    let outcome = match handled {
                        Ok(Ok(ack)) => Ok(ack),
                        Ok(Err(refused)) => Err(NoAck::Refused(refused)),
                        Err(_) => Err(NoAck::Deadline),
                    };
                    // Whoever brought it may have left.
                    done.send_replace(Some(outcome));
                }));
                outcome
            }
        };
        // A task that was aborted drops its end: the process is about to be gone.
        let done = outcome.wait_for(Option::is_some).await.ok().and_then(|done| *done);
        Ok(match done {
            Some(Ok(ack)) => Answer { status: StatusCode::OK, body: json(&Taken { ack }) },
            Some(Err(NoAck::Refused(Refused::UnknownKind))) => refusal(
                StatusCode::UNPROCESSABLE_ENTITY,
                "unknown_kind",
                "this release does not know the kind",
            ),
            Some(Err(NoAck::Refused(Refused::BadBody))) => {
                refusal(StatusCode::UNPROCESSABLE_ENTITY, "bad_body", "the body is not that of its kind")
            }
            Some(Err(NoAck::Deadline)) => {
                refusal(StatusCode::GATEWAY_TIMEOUT, "deadline", "not handled in time")
            }
            None => refusal(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the replica is stopping"),
        })
    }
}

/// What tells the sender that the replica that it means is gone.
pub(crate) const WRONG_REPLICA: &str = "wrong_replica";

fn parse(body: &[u8]) -> Result<Incoming, Answer> {
    let bad = |message: &str| refusal(StatusCode::BAD_REQUEST, "bad_envelope", message);
    // The parser's own words could repeat what stands in the message.
    let versioned: Versioned = serde_json::from_slice(body).map_err(|_| bad("the body is no message"))?;
    if versioned.v > VERSION {
        let message = format!("the envelope has version {}, this release reads up to {VERSION}", versioned.v);
        return Err(refusal(StatusCode::BAD_REQUEST, "unknown_version", &message));
    }
    serde_json::from_slice(body).map_err(|_| bad("a member of the envelope is missing or of another type"))
}

fn busy() -> Answer {
    refusal(StatusCode::SERVICE_UNAVAILABLE, "busy", "too many messages at once")
}

fn refusal(status: StatusCode, code: &str, message: &str) -> Answer {
    let error = Why { code: code.to_owned(), message: message.to_owned() };
    Answer { status, body: json(&NotTaken { error }) }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn class(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200..=299 => "2xx",
        400..=499 => "4xx",
        _ => "5xx",
    }
}
