use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use obol_model::Kind;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use crate::breaker::Breakers;
use crate::endpoint::Endpoint;
use crate::error::{LlmError, chain};
use crate::judge::{Judgement, judge_error};
use crate::request::LlmRequest;
use crate::route::Route;
use crate::sse::{self, Splitter};
use crate::translate::{AnswerError, ChatToMessagesStream, Dialect, MessagesToChatStream, error_frame};
use crate::usage::{Prompt, Usage, warn_implausible};
use crate::view::{First, View};

/// How long the upstream may take to end a stream after its last event, and for the usage of a finished answer. Its end
/// is waited for so that the connection can be used again.
const LINGER: Duration = Duration::from_secs(1);

/// One provider's stream on its way to the caller, byte for byte or translated.
///
/// Nothing is read ahead: a client that reads slowly slows the upstream down. Dropping it closes the upstream's
/// stream at once.
pub(crate) struct Relay {
    route: Arc<Route>,
    /// What the caller asked for.
    asked: Endpoint,
    /// The provider was asked for its usage, by us or by the caller.
    asked_for_usage: bool,
    prompt: Prompt,
    /// Gone when the upstream's stream ended.
    upstream: Option<reqwest::Response>,
    splitter: Splitter,
    view: View,
    translator: Option<Translator>,
    /// Something came that cannot be translated; what came before it is handed on first.
    odd: Option<&'static str>,
    /// What was read while the head of the answer, or its end, was held back.
    held: VecDeque<Bytes>,
    held_bytes: usize,
    limits: StreamLimits,
    breakers: Arc<Breakers>,
    /// Until when the usage of the finished answer has to come.
    usage_due: Option<Instant>,
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

/// Puts a provider's events into the caller's dialect.
pub(crate) enum Translator {
    ToChat(MessagesToChatStream),
    ToMessages(Box<ChatToMessagesStream>),
}

impl Translator {
    fn event(&mut self, event: &[u8]) -> Result<Bytes, AnswerError> {
        match self {
            Self::ToChat(stream) => stream.event(event),
            Self::ToMessages(stream) => stream.event(event),
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Self::ToChat(stream) => stream.is_complete(),
            Self::ToMessages(stream) => stream.is_complete(),
        }
    }

    fn end(&mut self) -> Bytes {
        match self {
            Self::ToChat(stream) => stream.end(),
            Self::ToMessages(stream) => stream.end(),
        }
    }
}

/// Why no more can be read.
#[derive(Debug)]
pub(crate) enum Cut {
    Timeout,
    Broken(reqwest::Error),
    TooLarge,
    /// It cannot be translated.
    Odd(&'static str),
    /// The upstream ended the stream, for better or worse.
    End,
}

impl Relay {
    /// `view` reads what the provider speaks; `translator` is for those that do not speak as the caller does.
    pub(crate) fn new(
        route: Arc<Route>,
        request: &LlmRequest,
        upstream: reqwest::Response,
        view: View,
        translator: Option<Translator>,
        limits: StreamLimits,
        breakers: Arc<Breakers>,
    ) -> Self {
        Self {
            asked: request.endpoint(),
            asked_for_usage: route.target.stream_usage || request.asks_for_usage(),
            prompt: request.prompt(),
            route,
            upstream: Some(upstream),
            splitter: Splitter::new(limits.max_event),
            view,
            translator,
            odd: None,
            held: VecDeque::new(),
            held_bytes: 0,
            limits,
            breakers,
            usage_due: None,
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
            // Nothing has reached the caller: another target may still answer.
            if let Some(what) = self.odd {
                return Err(Cut::Odd(what));
            }
            // Also when nothing could be read after it: what the event says goes before how the stream ended.
            if let Some(first) = &self.view.seen.first {
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
    /// without an invented reason and without a last event; one that ends after its reason is complete and gets its
    /// last event.
    ///
    /// Cancel-safe: a future that is dropped loses no event.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(until) = self.waits_until() {
                match self.pump(Some(until)).await {
                    Ok(Some(run)) => self.held.push_back(run),
                    Ok(None) | Err(Cut::End) => self.upstream = None,
                    // What comes too late is read on the way, if the client stays.
                    Err(Cut::Timeout) => {}
                    Err(cut) => {
                        let last = self.close(&cut);
                        self.held.extend(last);
                    }
                }
                continue;
            }
            if let Some(run) = self.held.pop_front() {
                return Some(run);
            }
            if self.ended {
                return None;
            }
            match self.pump(None).await {
                Ok(Some(run)) => self.held.push_back(run),
                Ok(None) => return self.close(&Cut::End),
                Err(cut) => return self.close(&cut),
            }
        }
    }

    /// Until when the end of a finished answer is held back. A client that leaves when it has its answer must not leave
    /// without paying: what tells that the answer is finished waits for the usage, which is right behind it.
    fn waits_until(&mut self) -> Option<Instant> {
        if !self.asked_for_usage
            || self.held.is_empty()
            || self.upstream.is_none()
            || !self.view.awaits_usage()
        {
            return None;
        }
        let now = Instant::now();
        let until = *self.usage_due.get_or_insert(self.limits.deadline.min(now + LINGER));
        (now < until).then_some(until)
    }

    /// What the stream used, as far as it came. Not cheap where the provider did not say.
    pub(crate) fn usage(&self) -> Usage {
        self.view.usage(|| self.prompt.tokens())
    }

    /// The answer came to its end, and no error; for the caller as well, where it is translated.
    pub(crate) fn is_complete(&self) -> bool {
        self.view.is_complete()
            && self.odd.is_none()
            && self.translator.as_ref().is_none_or(Translator::is_complete)
    }

    /// The id of an answer that the provider keeps.
    pub(crate) fn response_id(&self) -> Option<&str> {
        self.view.seen.response_id.as_deref()
    }

    async fn pump(&mut self, until: Option<Instant>) -> Result<Option<Bytes>, Cut> {
        loop {
            if let Some(run) = self.take()? {
                return Ok(Some(run));
            }
            if self.view.seen.error.is_some() {
                self.upstream = None;
            }
            if self.view.is_implausible() && !self.warned {
                self.warned = true;
                warn_implausible(self.route.provider());
            }
            let Some(upstream) = &mut self.upstream else { return Ok(None) };
            let patience = if self.view.seen.done { LINGER } else { self.limits.idle };
            let until = until.unwrap_or_else(|| self.limits.deadline.min(Instant::now() + patience));
            match timeout_at(until, upstream.chunk()).await {
                Err(_) => return Err(Cut::Timeout),
                Ok(Err(broken)) => return Err(Cut::Broken(broken.without_url())),
                Ok(Ok(Some(chunk))) => self.splitter.push(chunk),
                Ok(Ok(None)) => {
                    self.upstream = None;
                    let tail = self.tail()?;
                    return Ok((!tail.is_empty()).then_some(tail));
                }
            }
        }
    }

    /// The next run of events that are for the caller, of those that were read.
    fn take(&mut self) -> Result<Option<Bytes>, Cut> {
        if let Some(what) = self.odd {
            return Err(Cut::Odd(what));
        }
        let Self { splitter, view, translator, odd, .. } = self;
        let Some(translator) = translator else {
            return splitter.take(|event| view.look(event)).map_err(|_| Cut::TooLarge);
        };
        let mut out = BytesMut::new();
        // Nothing is kept of it as it is, so that one call sees all of the events.
        let taken = splitter.take(|event| {
            if view.look(event) && odd.is_none() {
                match translator.event(event) {
                    Ok(translated) => out.extend_from_slice(&translated),
                    Err(AnswerError(what)) => *odd = Some(what),
                }
            }
            false
        });
        match (taken, *odd) {
            _ if !out.is_empty() => Ok(Some(out.freeze())),
            (Err(_), _) => Err(Cut::TooLarge),
            (Ok(_), Some(what)) => Err(Cut::Odd(what)),
            (Ok(_), None) => Ok(None),
        }
    }

    /// What stands after the last empty line. Some servers do not end their last event, so it counts when it is whole;
    /// half an event is left out: what follows would be read as its rest.
    fn tail(&mut self) -> Result<Bytes, Cut> {
        let tail = self.splitter.rest();
        if self.view.seen.done || tail.iter().all(|byte| matches!(byte, b'\r' | b'\n')) {
            return Ok(if self.translator.is_some() { Bytes::new() } else { tail });
        }
        let whole = sse::data(&tail).is_some_and(|data| {
            data.trim_ascii() == b"[DONE]" || serde_json::from_slice::<serde::de::IgnoredAny>(&data).is_ok()
        });
        if !whole || !self.view.look(&tail) {
            return Ok(Bytes::new());
        }
        let missing: &[u8] = if tail.ends_with(b"\n") { b"\n" } else { b"\n\n" };
        let event = Bytes::from([&tail[..], missing].concat());
        match &mut self.translator {
            Some(translator) => translator.event(&event).map_err(|AnswerError(what)| {
                self.odd = Some(what);
                Cut::Odd(what)
            }),
            None => Ok(event),
        }
    }

    /// The last event of ours, when one is due.
    fn close(&mut self, cut: &Cut) -> Option<Bytes> {
        self.ended = true;
        self.upstream = None;
        let is_whole = self.is_complete();
        if is_whole {
            self.breakers.succeeded(&self.route);
        }
        let seen = &mut self.view.seen;
        if is_whole && seen.done {
            return self.translator.as_mut().map(Translator::end).filter(|end| !end.is_empty());
        }
        if is_whole {
            seen.done = true;
            let end = match &mut self.translator {
                Some(translator) => translator.end(),
                None => last_event(self.asked),
            };
            return (!end.is_empty()).then_some(end);
        }
        let (kind, code, message) = self.failure(cut);
        let reason = if let Cut::Broken(broken) = cut { chain(broken) } else { String::new() };
        warn!(provider = %self.route.provider(), outcome = code, reason, "llm stream cut");
        let what = "a stream that did not end well";
        let failure = LlmError::BadAnswer { provider: self.route.provider().clone(), what };
        self.breakers.failed(&self.route, &failure);
        Some(error_event(self.asked, kind, code, &message, self.view.seen.events))
    }

    /// Why the stream failed, in our words: a provider's own error stays out of them (DESIGN §11.4).
    fn failure(&self, cut: &Cut) -> (Kind, &'static str, Cow<'static, str>) {
        let (kind, code, message) = match (&self.view.seen.error, cut) {
            (_, Cut::Odd(what)) => {
                return (Kind::Upstream, "upstream_bad_answer", format!("the provider sent {what}").into());
            }
            (Some(reported), _) => match judge_error(reported, self.route.provider()).1 {
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

/// The event that ends a complete answer.
fn last_event(endpoint: Endpoint) -> Bytes {
    Bytes::from_static(match endpoint {
        Endpoint::ChatCompletions => b"data: [DONE]\n\n",
        Endpoint::Messages => b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        // The event that tells of the end is the last one.
        Endpoint::Responses | Endpoint::Embeddings | Endpoint::CountTokens => b"",
    })
}

/// The event that tells a caller of an error inside of a stream, after so many events.
pub(crate) fn error_event(endpoint: Endpoint, kind: Kind, code: &str, message: &str, events: u64) -> Bytes {
    /// As the responses dialect has it.
    #[derive(serde::Serialize)]
    struct Error<'a> {
        r#type: &'static str,
        code: &'a str,
        message: &'a str,
        param: Option<&'a str>,
        sequence_number: u64,
    }
    let api = endpoint.api();
    match endpoint {
        Endpoint::Responses => {
            let error = Error { r#type: "error", code, message, param: None, sequence_number: events };
            let data = serde_json::to_string(&error).unwrap_or_default();
            format!("event: error\ndata: {data}\n\n").into()
        }
        Endpoint::Messages | Endpoint::CountTokens => {
            error_frame(Dialect::Messages, &api.error(kind, code, message, None))
        }
        Endpoint::ChatCompletions | Endpoint::Embeddings => {
            error_frame(Dialect::Chat, &api.error(kind, code, message, None))
        }
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("route", &self.route.key)
            .field("complete", &self.is_complete())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use obol_model::TokenPrice;
    use obol_model::snapshot::{Model, Provider, ProviderKind, Target};
    use proptest::prelude::*;

    use super::*;
    use crate::usage::Usage;

    /// How the events of a stream are written.
    #[derive(Debug, Clone, Copy)]
    struct Writing {
        line: &'static str,
        bom: bool,
        /// Each value of an event is on as many `data` lines as JSON allows.
        many_lines: bool,
        comments: bool,
    }

    fn writings() -> impl Strategy<Value = Writing> {
        (prop_oneof![Just("\n"), Just("\r\n"), Just("\r")], any::<[bool; 3]>())
            .prop_map(|(line, [bom, many_lines, comments])| Writing { line, bom, many_lines, comments })
    }

    /// The stream of a provider that speaks `endpoint`, with the usage that it tells of.
    fn written(endpoint: Endpoint, how: Writing, words: &[String]) -> Vec<u8> {
        let quoted = |word: &String| serde_json::to_string(word).unwrap();
        let mut events: Vec<(&str, String)> = Vec::new();
        match endpoint {
            Endpoint::Messages => {
                events.push(("message_start", r#"{"type":"message_start","message":{"id":"m","model":"c","usage":{"input_tokens":10,"cache_read_input_tokens":8,"output_tokens":1}}}"#.into()));
                events.push((
                    "content_block_start",
                    r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#
                        .into(),
                ));
                events.extend(words.iter().map(|word| ("content_block_delta", format!(r#"{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":{}}}}}"#, quoted(word)))));
                events.push(("content_block_stop", r#"{"type":"content_block_stop","index":0}"#.into()));
                events.push(("message_delta", r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}"#.into()));
                events.push(("message_stop", r#"{"type":"message_stop"}"#.into()));
            }
            Endpoint::Responses => {
                events.push((
                    "response.created",
                    r#"{"type":"response.created","response":{"id":"resp_1","usage":null}}"#.into(),
                ));
                events.extend(words.iter().map(|word| {
                    (
                        "response.output_text.delta",
                        format!(r#"{{"type":"response.output_text.delta","delta":{}}}"#, quoted(word)),
                    )
                }));
                events.push(("response.completed", r#"{"type":"response.completed","response":{"id":"resp_1","usage":{"input_tokens":18,"input_tokens_details":{"cached_tokens":8},"output_tokens":15}}}"#.into()));
            }
            _ => {
                events.push(("", r#"{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#.into()));
                events.extend(words.iter().map(|word| ("", format!(r#"{{"id":"c","choices":[{{"index":0,"delta":{{"content":{}}},"finish_reason":null}}]}}"#, quoted(word)))));
                events.push((
                    "",
                    r#"{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#.into(),
                ));
                events.push(("", r#"{"id":"c","choices":[],"usage":{"prompt_tokens":18,"completion_tokens":15,"prompt_tokens_details":{"cached_tokens":8}}}"#.into()));
                events.push(("", "[DONE]".into()));
            }
        }
        let mut out = if how.bom { "\u{feff}".to_owned() } else { String::new() };
        for (name, data) in events {
            if how.comments {
                out += &format!(": alive{0}{0}", how.line);
            }
            if !name.is_empty() {
                out += &format!("event: {name}{}", how.line);
            }
            // A line may end between two members; texts have no commas that would look like it.
            let data =
                if how.many_lines { data.replace(",\"", &format!(",{}data: \"", how.line)) } else { data };
            out += &format!("data: {data}{0}{0}", how.line);
        }
        out.into_bytes()
    }

    /// What a caller of `asked` gets of those pieces from a provider that speaks `spoken`, and what is charged.
    fn relayed(
        asked: Endpoint,
        spoken: Endpoint,
        pieces: &[&[u8]],
        hide_usage: bool,
    ) -> (Vec<u8>, Usage, bool) {
        let body = match asked {
            Endpoint::Messages => r#"{"model":"pub","max_tokens":9,"stream":true,"messages":[]}"#,
            _ => r#"{"model":"pub","stream":true}"#,
        };
        let request = LlmRequest::parse(asked, Bytes::from(body)).unwrap();
        let provider = Provider {
            kind: ProviderKind::Openai,
            base_url: "http://localhost/v1".parse().unwrap(),
            auth: None,
            allow_private: true,
        };
        let target = Target {
            provider: "p".parse().unwrap(),
            model: "m".into(),
            price: TokenPrice::default(),
            stream_usage: true,
            weight: None,
        };
        let translator = match (asked, spoken) {
            (Endpoint::ChatCompletions, Endpoint::Messages) => {
                Some(Translator::ToChat(MessagesToChatStream::new(&request.labels(), true)))
            }
            (Endpoint::Messages, Endpoint::ChatCompletions) => {
                Some(Translator::ToMessages(Box::new(ChatToMessagesStream::new(&request.labels()))))
            }
            _ => None,
        };
        let mut relay = Relay {
            route: Arc::new(Route::new("w", &Model::default(), target, &provider, None)),
            asked,
            asked_for_usage: true,
            prompt: request.prompt(),
            upstream: None,
            splitter: Splitter::new(2 << 20),
            view: View::new(spoken, hide_usage),
            translator,
            odd: None,
            held: VecDeque::new(),
            held_bytes: 0,
            limits: StreamLimits {
                idle: Duration::from_secs(1),
                deadline: Instant::now() + Duration::from_secs(60),
                max_event: 2 << 20,
            },
            breakers: Arc::default(),
            usage_due: None,
            ended: false,
            warned: false,
        };
        let mut out = Vec::new();
        for piece in pieces {
            relay.splitter.push(Bytes::copy_from_slice(piece));
            while let Some(run) = relay.take().unwrap() {
                out.extend_from_slice(&run);
            }
        }
        out.extend_from_slice(&relay.tail().unwrap());
        out.extend(relay.close(&Cut::End).unwrap_or_default());
        (out, relay.usage(), relay.is_complete())
    }

    const WAYS: [(Endpoint, Endpoint); 5] = [
        (Endpoint::ChatCompletions, Endpoint::ChatCompletions),
        (Endpoint::Messages, Endpoint::Messages),
        (Endpoint::Responses, Endpoint::Responses),
        (Endpoint::ChatCompletions, Endpoint::Messages),
        (Endpoint::Messages, Endpoint::ChatCompletions),
    ];

    fn right(usage: &Usage) -> bool {
        let tokens = usage.tokens;
        !usage.estimated && (tokens.input, tokens.cached_input, tokens.completion()) == (10, 8, 15)
    }

    #[tokio::test]
    async fn a_stream_that_is_cut_at_any_byte_relays_the_same_bytes_and_the_same_usage() {
        let words = ["one".to_owned(), " \"two\"\n".to_owned(), "drei \u{1f980}".to_owned()];
        for (line, odd) in [("\n", false), ("\r\n", true), ("\r", true)] {
            for (asked, spoken) in WAYS {
                let how = Writing { line, bom: odd, many_lines: odd, comments: true };
                let text = written(spoken, how, &words);
                let (whole, usage, complete) = relayed(asked, spoken, &[&text], false);
                assert!(right(&usage) && complete, "{asked:?} of {spoken:?}: {usage:?}");
                assert!(asked != spoken || whole == text, "{asked:?}");
                for at in 0..=text.len() {
                    let (head, tail) = text.split_at(at);
                    let cut = relayed(asked, spoken, &[head, tail], false);
                    assert!(
                        cut == (whole.clone(), usage, complete),
                        "{asked:?} of {spoken:?}, {line:?} cut at {at}"
                    );
                }
            }
        }
    }

    #[tokio::test]
    async fn an_event_of_a_megabyte_passes() {
        let long = ["x".repeat(1 << 20)];
        for (asked, spoken) in WAYS {
            let how = Writing { line: "\n", bom: false, many_lines: false, comments: false };
            let text = written(spoken, how, &long);
            let pieces: Vec<&[u8]> = text.chunks(64 << 10).collect();
            let (whole, usage, _) = relayed(asked, spoken, &pieces, false);
            assert!(right(&usage), "{asked:?} of {spoken:?}");
            assert!(String::from_utf8(whole).unwrap().contains(&long[0]));
        }
    }

    proptest! {
        #[test]
        fn any_cut_of_any_writing_relays_the_same(
            way in 0..WAYS.len(),
            how in writings(),
            words in prop::collection::vec("[^,]{0,40}", 1..6),
            cuts in prop::collection::vec(0_usize..4000, 0..30),
            hide_usage in any::<bool>(),
        ) {
            let (asked, spoken) = WAYS[way];
            let hide_usage = hide_usage && asked == spoken;
            let text = written(spoken, how, &words);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(async {
                let whole = relayed(asked, spoken, &[&text], hide_usage);
                prop_assert!(right(&whole.1), "{:?}", whole.1);
                prop_assert!(relayed(asked, spoken, &pieces, hide_usage) == whole);
                Ok(())
            })?;
        }
    }
}
