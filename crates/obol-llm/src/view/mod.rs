mod chat;
mod messages;
mod responses;

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::endpoint::Endpoint;
use crate::sse;
use crate::translate::MessagesReading;
use crate::usage::{Estimate, Heard, Reading, Usage};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""usage""#));

/// The first event of a stream that is more than a preamble.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum First {
    /// A part of an answer.
    Content,
    /// An error; the data of its event.
    Error(Bytes),
    /// The end: there is no answer.
    Done,
}

/// What is known of a provider's stream from the events that passed.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) seen: Seen,
    grammar: Grammar,
}

/// What is known in any dialect.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) first: Option<First>,
    /// The last event passed.
    pub(crate) done: bool,
    /// It is known why the answer ended.
    pub(crate) finished: bool,
    /// The data of an error event. It ends the answer, whatever follows.
    pub(crate) error: Option<Bytes>,
    /// The id of a stored answer.
    pub(crate) response_id: Option<String>,
    /// Events that passed.
    pub(crate) events: u64,
    heard: Heard,
}

impl Seen {
    /// An error that comes after the end changes nothing.
    fn fail(&mut self, data: &[u8]) {
        if !self.done {
            let data = Bytes::copy_from_slice(data);
            self.first.get_or_insert_with(|| First::Error(data.clone()));
            self.error = Some(data);
        }
    }
}

#[derive(Debug)]
enum Grammar {
    /// The usage chunk is ours where the client did not ask for it.
    Chat {
        hide_usage: bool,
        reading: Reading,
    },
    Messages(MessagesReading),
    Responses(Reading),
}

impl View {
    /// `spoken` is what the provider speaks; `hide_usage` that the usage chunk of a chat is not for the client.
    pub(crate) fn new(spoken: Endpoint, hide_usage: bool) -> Self {
        let grammar = match spoken {
            Endpoint::Messages | Endpoint::CountTokens => Grammar::Messages(MessagesReading::default()),
            Endpoint::Responses => Grammar::Responses(Reading::default()),
            Endpoint::ChatCompletions | Endpoint::Embeddings => {
                Grammar::Chat { hide_usage, reading: Reading::default() }
            }
        };
        Self { seen: Seen::default(), grammar }
    }

    /// Takes note of an event. Whether it is to be relayed.
    ///
    /// Error events are not: providers put addresses, accounts and parts of keys into them (DESIGN §11.4).
    pub(crate) fn look(&mut self, event: &[u8]) -> bool {
        let Self { seen, grammar } = self;
        if seen.error.is_some() {
            return false;
        }
        let Some(data) = sse::data(event) else { return true };
        seen.events += 1;
        match grammar {
            Grammar::Chat { hide_usage, reading } => chat::look(seen, reading, *hide_usage, event, &data),
            Grammar::Messages(reading) => messages::look(seen, reading, event, &data),
            Grammar::Responses(reading) => responses::look(seen, reading, event, &data),
        }
    }

    /// Whether a count of tokens was reported that cannot be.
    pub(crate) fn is_implausible(&self) -> bool {
        match &self.grammar {
            Grammar::Chat { reading, .. } | Grammar::Responses(reading) => reading.is_implausible(),
            Grammar::Messages(reading) => reading.is_implausible(),
        }
    }

    /// Whether the usage of a finished answer is still to come, in an event of its own.
    pub(crate) fn awaits_usage(&self) -> bool {
        let Grammar::Chat { reading, .. } = &self.grammar else { return false };
        self.is_complete() && !self.seen.done && *reading == Reading::default()
    }

    /// Whether the answer came to its end.
    pub(crate) fn is_complete(&self) -> bool {
        (self.seen.done || self.seen.finished) && self.seen.error.is_none()
    }

    /// `input` estimates the prompt.
    pub(crate) fn usage(&self, input: impl FnOnce() -> u64) -> Usage {
        let complete = self.is_complete();
        let estimate = || Estimate { input: input(), output: self.seen.heard.tokens() };
        match &self.grammar {
            Grammar::Chat { reading, .. } | Grammar::Responses(reading) => reading.usage(complete, estimate),
            Grammar::Messages(reading) => reading.usage(complete, estimate),
        }
    }
}

/// Whether the value of an `error` member is an error: SDKs take none of these for one.
pub(crate) fn is_error(value: &RawValue) -> bool {
    !matches!(value.get(), "null" | "false" | "0" | "\"\"" | "{}" | "[]")
}

/// Whether a value of a member holds nothing of an answer.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.iter().all(is_nothing),
        Value::Object(members) => members.values().all(is_nothing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::chat::is_preamble;

    fn event(json: &str) -> Vec<u8> {
        format!("data: {json}\n\n").into_bytes()
    }

    #[test]
    fn only_the_usage_chunk_that_nobody_asked_for_is_hidden() {
        let usage = r#""usage":{"prompt_tokens":3,"completion_tokens":4}"#;
        let extra = event(&format!(r#"{{"choices":[],{usage}}}"#));
        let with_choices =
            event(&format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"stop"}}],{usage}}}"#));
        assert!(!View::new(Endpoint::ChatCompletions, true).look(&extra));
        assert!(View::new(Endpoint::ChatCompletions, false).look(&extra));
        assert!(View::new(Endpoint::ChatCompletions, true).look(&with_choices));
        assert!(View::new(Endpoint::ChatCompletions, true).look(&event(r#"{"choices":[],"usage":null}"#)));
        assert!(View::new(Endpoint::ChatCompletions, true).look(&event("no json with \"usage\": 1")));
        let mut view = View::new(Endpoint::ChatCompletions, true);
        view.look(&extra);
        view.look(&event("[DONE]"));
        let used = view.usage(|| 99);
        assert_eq!((used.tokens.input, used.tokens.output, used.estimated), (3, 4, false));
    }

    #[test]
    fn unreported_usage_is_estimated_from_what_passed() {
        let mut view = View::new(Endpoint::ChatCompletions, false);
        view.look(&event(
            r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
        ));
        view.look(&event(r#"{"choices":[{"delta":{"content":"12345678"},"logprobs":{"content":[{"token":"x"}]}},{"delta":{"content":"1"}}]}"#));
        assert!(!view.is_complete());
        view.look(&event(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#));
        assert!(view.is_complete());
        let used = view.usage(|| 5);
        assert_eq!((used.tokens.input, used.tokens.output, used.estimated), (5, 3, true));
    }

    #[test]
    fn the_first_event_after_the_preamble_decides_what_the_stream_is() {
        for (json, expected) in [
            ("[DONE]", First::Done),
            (r#"{"choices":[{"delta":{"content":"x"}}]}"#, First::Content),
            (r#"{"error":null,"choices":[{"delta":{},"finish_reason":"stop"}]}"#, First::Content),
            (r#"{"error":{"code":429}}"#, First::Error(r#"{"error":{"code":429}}"#.into())),
        ] {
            let mut view = View::new(Endpoint::ChatCompletions, false);
            assert!(view.look(b": comment\n\n"));
            assert!(view.look(&event(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#)));
            assert_eq!(view.seen.first, None);
            view.look(&event(json));
            view.look(&event(r#"{"error":"late"}"#));
            assert_eq!(view.seen.first, Some(expected), "{json}");
        }
    }

    #[test]
    fn a_preamble_says_nothing_of_an_answer() {
        for (json, expected) in [
            ("", true),
            ("{}", true),
            (r#"{"type":"ping"}"#, true),
            (r#"{"choices":[],"prompt_filter_results":[{"x":1}]}"#, true),
            (r#"{"choices":null}"#, true),
            (
                r#"{"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}],"obfuscation":"x"}"#,
                true,
            ),
            (
                r#"{"choices":[{"index":1,"delta":{"role":"assistant","content":null,"reasoning_content":"","refusal":null,"tool_calls":[]},"logprobs":{"content":[]}}]}"#,
                true,
            ),
            (r#"{"choices":[{"delta":{"content":""}},{"delta":{"content":"x"}}]}"#, false),
            (r#"{"choices":[{"delta":{"reasoning_content":"x"}}]}"#, false),
            (r#"{"choices":[{"delta":{"role":"assistant","tool_calls":[{"index":0,"id":"c"}]}}]}"#, false),
            (r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#, false),
            (r#"{"choices":[{"text":"x"}]}"#, false),
            (r#"{"choices":"x"}"#, false),
            ("[1]", false),
            ("no json", false),
        ] {
            assert_eq!(is_preamble(json.as_bytes()), expected, "{json}");
        }
    }

    #[test]
    fn error_frames_of_any_shape_are_kept_from_the_caller_and_end_the_answer() {
        for frame in [
            r#"data: {"error":{"message":"sk-leak"}}"#,
            r#"data: {"error":"sk-leak"}"#,
            r#"data: {"error":{"message":"sk-leak"},"choices":[{"delta":{"content":""},"finish_reason":"error"}]}"#,
            r#"data: {"error":{"message":"sk-leak"},"choices":"none"}"#,
            r#"data: {"error":null,"error":{"message":"sk-leak"}}"#,
            r#"data: {"choices":[{"delta":{},"error":{"message":"sk-leak"}}]}"#,
            r#"data: {"error": {"message":"sk-leak"#,
            "event: error\ndata: {\"message\":\"sk-leak\"}",
            "event: error\ndata: sk-leak",
        ] {
            let mut view = View::new(Endpoint::ChatCompletions, false);
            assert!(view.look(&event(r#"{"choices":[{"delta":{"content":"x"}}]}"#)));
            assert!(!view.look(format!("{frame}\n\n").as_bytes()), "{frame}");
            assert!(view.seen.error.is_some() && !view.is_complete(), "{frame}");
            assert!(!view.look(&event("[DONE]")) && !view.is_complete(), "{frame}");
            assert!(view.usage(|| 1).estimated);
        }
        let mut view = View::new(Endpoint::ChatCompletions, false);
        view.look(&event(r#"{"error":"x","usage":{"prompt_tokens":3,"completion_tokens":4}}"#));
        let used = view.usage(|| 99);
        assert_eq!((used.tokens.input, used.tokens.output, used.estimated), (3, 4, true));
        let mut view = View::new(Endpoint::ChatCompletions, false);
        for harmless in [
            r#"{"error":null,"choices":[{"delta":{"content":"\"error\":1"}}]}"#,
            r#"{"error":"","choices":[{"delta":{"content":"x"}}]}"#,
            r#"{"choices":[{"delta":{"content":"x","meta":{"error":"of a tool"}}}]}"#,
        ] {
            assert!(view.look(&event(harmless)), "{harmless}");
        }
        assert!(view.look(&event("[DONE]")) && !view.look(&event(r#"{"error":"sk-leak"}"#)));
        assert!(view.is_complete(), "an answer that was done stays so");
    }
}
