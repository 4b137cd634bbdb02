use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use obol_model::{Kind, ProviderName, Tokens};
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use crate::dialect::openai_error;
use crate::error::chain;
use crate::judge::{Judgement, judge_error};
use crate::sse::{self, Splitter};
use crate::usage::warn_implausible;
use crate::view::{First, View};

/// How long the upstream may take to end a stream after `[DONE]`. Its end is waited for so that the connection can be
/// used again.
const LINGER: Duration = Duration::from_secs(1);

/// The events of an answer, byte for byte as they came.
///
/// Nothing is read ahead: a client that reads slowly slows the upstream down. Dropping it closes the upstream's
/// stream at once.
pub struct ChatStream {
    provider: ProviderName,
    /// Gone when the upstream's stream ended.
    upstream: Option<reqwest::Response>,
    splitter: Splitter,
    view: View,
    /// What was read while the head of the answer was held back.
    held: VecDeque<Bytes>,
    held_bytes: usize,
    limits: StreamLimits,
    estimated_input: u64,
    ended: bool,
    /// That its usage is not believed was logged.
    warned: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamLimits {
    /// Between two reads.
    pub(crate) idle: Duration,
    /// Of the whole call.
    pub(crate) deadline: Instant,
    /// Of one event, and of what is held back before the first content.
    pub(crate) max_event: usize,
}

/// What a stream used, as far as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamEnd {
    /// In disjoint buckets.
    pub tokens: Tokens,
    /// They are our estimate: the upstream reported none, or the stream was cut.
    pub estimated: bool,
    /// The answer came to its end: a `finish_reason` or `[DONE]` passed, and no error.
    pub complete: bool,
}

/// Why no more can be read.
#[derive(Debug)]
pub(crate) enum Cut {
    Timeout,
    Broken(reqwest::Error),
    TooLarge,
    /// The upstream ended the stream, for better or worse.
    End,
}

impl ChatStream {
    pub(crate) fn new(
        provider: ProviderName,
        upstream: reqwest::Response,
        hide_usage: bool,
        estimated_input: u64,
        limits: StreamLimits,
    ) -> Self {
        Self {
            provider,
            upstream: Some(upstream),
            splitter: Splitter::new(limits.max_event),
            view: View::new(hide_usage),
            held: VecDeque::new(),
            held_bytes: 0,
            limits,
            estimated_input,
            ended: false,
            warned: false,
        }
    }

    /// Reads until the first event that is more than a preamble, and holds back what came before and with it.
    pub(crate) async fn first(&mut self, until: Instant) -> Result<First, Cut> {
        loop {
            let pumped = self.pump(Some(until)).await;
            if let Ok(Some(run)) = &pumped {
                self.held_bytes += run.len();
                self.held.push_back(run.clone());
            }
            // Also when nothing could be read after it: what the event says goes before how the stream ended.
            if let Some(first) = &self.view.first {
                return Ok(first.clone());
            }
            pumped?.ok_or(Cut::End)?;
            if self.held_bytes > self.limits.max_event {
                return Err(Cut::TooLarge);
            }
        }
    }

    /// The next whole events, as many as came together. Nothing when the stream has ended.
    ///
    /// An upstream that breaks off, falls silent or reports an error in the middle ends as one error event of ours,
    /// without an invented `finish_reason` and without `[DONE]`; one that ends after its `finish_reason` is complete
    /// and gets its `[DONE]`.
    ///
    /// Cancel-safe: a future that is dropped loses no event.
    pub async fn next(&mut self) -> Option<Bytes> {
        if let Some(run) = self.held.pop_front() {
            return Some(run);
        }
        if self.ended {
            return None;
        }
        match self.pump(None).await {
            Ok(Some(run)) => Some(run),
            Ok(None) => self.close(&Cut::End),
            Err(cut) => self.close(&cut),
        }
    }

    /// What the stream used, as far as it came. Cheap; may be asked at any time.
    pub fn end(&self) -> StreamEnd {
        let usage = self.view.usage(self.estimated_input);
        StreamEnd { tokens: usage.tokens, estimated: usage.estimated, complete: self.view.is_complete() }
    }

    async fn pump(&mut self, until: Option<Instant>) -> Result<Option<Bytes>, Cut> {
        loop {
            let view = &mut self.view;
            if let Some(run) = self.splitter.take(|event| view.look(event)).map_err(|_| Cut::TooLarge)? {
                return Ok(Some(run));
            }
            if self.view.error.is_some() {
                self.upstream = None;
            }
            if self.view.is_implausible() && !self.warned {
                self.warned = true;
                warn_implausible(&self.provider);
            }
            let Some(upstream) = &mut self.upstream else { return Ok(None) };
            let patience = if self.view.done { LINGER } else { self.limits.idle };
            let until = until.unwrap_or_else(|| self.limits.deadline.min(Instant::now() + patience));
            match timeout_at(until, upstream.chunk()).await {
                Err(_) => return Err(Cut::Timeout),
                Ok(Err(broken)) => return Err(Cut::Broken(broken.without_url())),
                Ok(Ok(Some(chunk))) => self.splitter.push(chunk),
                Ok(Ok(None)) => {
                    self.upstream = None;
                    let tail = self.tail();
                    return Ok((!tail.is_empty()).then_some(tail));
                }
            }
        }
    }

    /// What stands after the last empty line. Some servers do not end their last event, so it counts when it is whole;
    /// half an event is left out: what follows would be read as its rest.
    fn tail(&mut self) -> Bytes {
        let tail = self.splitter.rest();
        if self.view.done || tail.iter().all(|byte| matches!(byte, b'\r' | b'\n')) {
            return tail;
        }
        let whole = sse::data(&tail).is_some_and(|data| {
            data.trim_ascii() == b"[DONE]" || serde_json::from_slice::<serde::de::IgnoredAny>(&data).is_ok()
        });
        if !whole || !self.view.look(&tail) {
            return Bytes::new();
        }
        let missing: &[u8] = if tail.ends_with(b"\n") { b"\n" } else { b"\n\n" };
        let mut out = BytesMut::with_capacity(tail.len() + missing.len());
        out.put_slice(&tail);
        out.put_slice(missing);
        out.freeze()
    }

    /// The last event of ours, when one is due.
    fn close(&mut self, cut: &Cut) -> Option<Bytes> {
        self.ended = true;
        self.upstream = None;
        if self.view.done {
            return None;
        }
        if self.view.finished && self.view.error.is_none() {
            self.view.done = true;
            return Some(Bytes::from_static(b"data: [DONE]\n\n"));
        }
        let (kind, code, message) = self.failure(cut);
        let reason = if let Cut::Broken(broken) = cut { chain(broken) } else { String::new() };
        warn!(provider = %self.provider, outcome = code, reason, "llm stream cut");
        let error = openai_error(kind, code, &message, None);
        let mut frame = BytesMut::with_capacity(error.len() + 8);
        frame.put_slice(b"data: ");
        frame.put_slice(&error);
        frame.put_slice(b"\n\n");
        Some(frame.freeze())
    }

    /// Why the stream failed, in our words: a provider's own error stays out of them (DESIGN §11.4).
    fn failure(&self, cut: &Cut) -> (Kind, &'static str, Cow<'static, str>) {
        let (kind, code, message) = match (&self.view.error, cut) {
            (Some(reported), _) => match judge_error(reported, &self.provider).1 {
                Judgement::Failure(failure) => {
                    return (failure.kind(), failure.code(), failure.to_string().into());
                }
                Judgement::Refusal | Judgement::Answer => (
                    Kind::Upstream,
                    "upstream_refused",
                    "the provider refused the request when its answer had begun",
                ),
            },
            (None, Cut::Timeout) => {
                (Kind::Timeout, "upstream_timeout", "the provider fell silent before the answer was complete")
            }
            (None, Cut::TooLarge) => {
                (Kind::Upstream, "upstream_bad_answer", "the provider sent an event that is too large")
            }
            (None, Cut::Broken(_) | Cut::End) => (
                Kind::Upstream,
                "upstream_cut",
                "the provider ended the stream before the answer was complete",
            ),
        };
        (kind, code, message.into())
    }
}

impl fmt::Debug for ChatStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatStream")
            .field("provider", &self.provider)
            .field("end", &self.end())
            .finish_non_exhaustive()
    }
}
