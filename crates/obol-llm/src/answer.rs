use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use obol_model::{Kind, Outcome};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::endpoint::Endpoint;
use crate::error::LlmError;
use crate::route::Route;
use crate::stream::{Relay, error_event};
use crate::usage::Usage;

/// Who pays for a call. It is told of every attempt, and goes wherever the call goes: a call that is given up drops it.
pub trait Account: Send + 'static {
    /// Before a target is called: whether it can be paid. From here on the target may cost something, until
    /// [`Account::failed`] says otherwise.
    ///
    /// # Errors
    /// The target is passed over; the error is the caller's answer when no other one can be used.
    fn afford(&mut self, route: &Arc<Route>) -> impl Future<Output = Result<(), LlmError>> + Send;

    /// The target gave no answer. `may_have_worked`: it was sent the request, and may ask to be paid.
    fn failed(&mut self, route: &Arc<Route>, failure: &LlmError, may_have_worked: bool);

    /// The target answers, be it with a refusal. The provider may keep the answer, under that id.
    fn answered(&mut self, route: &Arc<Route>, response_id: Option<&str>) -> impl Future<Output = ()> + Send;

    /// A stream has come to its end, and what it used is known; not asked of one that is given up before.
    fn ended(&mut self, response_id: Option<&str>) -> impl Future<Output = ()> + Send;

    /// What is used, once it is known.
    fn used(&mut self, usage: Usage);

    /// These bytes are on their way to the caller. Of streams only.
    fn relayed(&mut self, bytes: &Bytes);

    /// The call is over.
    fn close(self, outcome: Outcome);
}

/// A provider's answer.
pub struct Answer<A: Account> {
    /// 2xx, or the status of a refusal that the caller has to see (400, 413, 422 and their like).
    pub status: StatusCode,
    /// JSON or an event stream.
    pub content_type: HeaderValue,
    /// The target that answered; not known yet of a stream whose head could not wait.
    pub route: Option<Arc<Route>>,
    /// The rest.
    pub body: AnswerBody<A>,
}

/// The body of an [`Answer`].
pub enum AnswerBody<A: Account> {
    /// All of it.
    Full {
        /// As the provider wrote it, or translated.
        bytes: Bytes,
        /// What it used; nothing for a refusal.
        usage: Option<Usage>,
        /// Still open.
        account: A,
    },
    /// A stream that has begun.
    Stream(Box<AnswerStream<A>>),
}

impl<A: Account> fmt::Debug for AnswerBody<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full { usage, .. } => f.debug_struct("Full").field("usage", usage).finish_non_exhaustive(),
            Self::Stream(stream) => stream.fmt(f),
        }
    }
}

impl<A: Account> fmt::Debug for Answer<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("status", &self.status).finish_non_exhaustive()
    }
}

/// A stream on its way to the caller. It closes its account at its end, and drops it when it is dropped before; then the
/// upstream's stream is closed at once.
pub struct AnswerStream<A: Account>(State<A>);

type Run<A> = Pin<Box<dyn Future<Output = Result<Answer<A>, LlmError>> + Send>>;

enum State<A: Account> {
    /// The caller has its `200`, no target has answered.
    Late {
        endpoint: Endpoint,
        run: Run<A>,
        beat: Interval,
    },
    Open {
        relay: Box<Relay>,
        account: Option<A>,
    },
    Ended,
}

impl<A: Account> AnswerStream<A> {
    pub(crate) fn open(relay: Box<Relay>, account: A) -> Self {
        Self(State::Open { relay, account: Some(account) })
    }

    pub(crate) fn late(endpoint: Endpoint, run: Run<A>, every: Duration) -> Self {
        let mut beat = interval_at(Instant::now(), every);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self(State::Late { endpoint, run, beat })
    }

    /// The next whole events, as many as came together; comments while no target has answered. Nothing when the stream
    /// has ended.
    ///
    /// Cancel-safe: a future that is dropped loses no event.
    pub async fn next(&mut self) -> Option<Bytes> {
        loop {
            match &mut self.0 {
                State::Ended => return None,
                State::Late { endpoint, run, beat } => {
                    let result = tokio::select! {
                        biased;
                        result = run => result,
                        _ = beat.tick() => return Some(Bytes::from_static(b": waiting for the provider\n\n")),
                    };
                    let endpoint = *endpoint;
                    let (next, event) = arrive(endpoint, result);
                    self.0 = next;
                    if event.is_some() {
                        return event;
                    }
                }
                State::Open { relay, account } => {
                    let Some(bytes) = relay.next().await else {
                        if let Some(account) = account {
                            account.used(relay.usage());
                            account.ended(relay.response_id()).await;
                        }
                        if let Some(account) = account.take() {
                            account.close(if relay.is_complete() { Outcome::Ok } else { Outcome::Partial });
                        }
                        self.0 = State::Ended;
                        return None;
                    };
                    if let Some(account) = account {
                        account.relayed(&bytes);
                    }
                    return Some(bytes);
                }
            }
        }
    }
}

/// What a late answer becomes.
fn arrive<A: Account>(endpoint: Endpoint, result: Result<Answer<A>, LlmError>) -> (State<A>, Option<Bytes>) {
    match result.map(|answer| (answer.status, answer.body)) {
        Ok((_, AnswerBody::Stream(mut stream))) => (std::mem::replace(&mut stream.0, State::Ended), None),
        Ok((status, AnswerBody::Full { bytes, account, .. })) => {
            account.close(Outcome::Error);
            let message = refusal_message(&bytes).unwrap_or_else(|| {
                format!("the provider refused the request with status {}", status.as_u16())
            });
            let event = error_event(endpoint, Kind::InvalidRequest, "upstream_refused", &message, 0);
            (State::Ended, Some(event))
        }
        Err(e) => (State::Ended, Some(error_event(endpoint, e.kind(), e.code(), &e.to_string(), 0))),
    }
}

/// What a refusal says, which is for the caller as it stands.
fn refusal_message(body: &Bytes) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    Some(body.get("error")?.get("message")?.as_str()?.to_owned())
}

impl<A: Account> Drop for AnswerStream<A> {
    fn drop(&mut self) {
        if let State::Open { relay, account: Some(account) } = &mut self.0 {
            account.used(relay.usage());
        }
    }
}

impl<A: Account> fmt::Debug for AnswerStream<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerStream").finish_non_exhaustive()
    }
}
