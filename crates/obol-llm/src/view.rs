use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::json;
use crate::sse;
use crate::usage::{Estimate, Reading, Usage, text_bytes, tokens_of};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""usage""#));
static FINISH_REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""finish_reason""#));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""error""#));
static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""delta""#));

/// The first event of a stream that carries data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum First {
    /// A part of an answer.
    Content,
    /// An error; the data of its event.
    Error(Bytes),
    /// `[DONE]`: there is no answer.
    Done,
}

/// What is known of a stream from the events that passed.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "things that were seen, each by itself; no states of one machine"
)]
pub(crate) struct View {
    /// The usage chunk is ours: the client did not ask for it.
    hide_usage: bool,
    pub(crate) first: Option<First>,
    /// `[DONE]` passed.
    pub(crate) done: bool,
    /// A choice is finished.
    pub(crate) finished: bool,
    /// An error frame passed.
    pub(crate) error: bool,
    reading: Reading,
    text_bytes: usize,
}

impl View {
    pub(crate) fn new(hide_usage: bool) -> Self {
        Self {
            hide_usage,
            first: None,
            done: false,
            finished: false,
            error: false,
            reading: Reading::default(),
            text_bytes: 0,
        }
    }

    /// Takes note of an event. Whether it is to be relayed.
    pub(crate) fn look(&mut self, event: &[u8]) -> bool {
        let Some(data) = sse::data(event) else { return true };
        if data.trim_ascii() == b"[DONE]" {
            self.done = true;
            self.first.get_or_insert(First::Done);
            return true;
        }
        for delta in json::members(&data, &DELTA) {
            if delta.starts_with(b"{") {
                self.text_bytes += text_bytes(delta);
            }
        }
        // Most events have nothing of interest; parsing all of them would be the larger part of a stream's cost.
        let chunk = if [&*USAGE, &*FINISH_REASON, &*ERROR].into_iter().any(|name| json::may_have(&data, name))
        {
            serde_json::from_slice::<Chunk<'_>>(&data).unwrap_or_default()
        } else {
            Chunk::default()
        };
        if chunk.error.is_some() {
            self.error = true;
            self.first.get_or_insert_with(|| First::Error(Bytes::copy_from_slice(&data)));
        }
        self.first.get_or_insert(First::Content);
        self.finished |= chunk.choices.iter().flatten().any(|choice| choice.finish_reason.is_some());
        let Some(usage) = chunk.usage else { return true };
        self.reading.update(Reading::parse(usage));
        !(self.hide_usage && chunk.choices.is_some_and(|choices| choices.is_empty()))
    }

    /// Whether the answer came to its end.
    pub(crate) fn is_complete(&self) -> bool {
        (self.done || self.finished) && !self.error
    }

    pub(crate) fn usage(&self, input: u64) -> Usage {
        let estimate = || Estimate { input, output: tokens_of(self.text_bytes) };
        self.reading.usage(self.is_complete(), estimate)
    }
}

/// The members of a chunk that matter; all else is skipped.
#[derive(Default, Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(json: &str) -> Vec<u8> {
        format!("data: {json}\n\n").into_bytes()
    }

    #[test]
    fn only_the_usage_chunk_that_nobody_asked_for_is_hidden() {
        let usage = r#""usage":{"prompt_tokens":3,"completion_tokens":4}"#;
        let extra = event(&format!(r#"{{"choices":[],{usage}}}"#));
        let with_choices =
            event(&format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"stop"}}],{usage}}}"#));
        assert!(!View::new(true).look(&extra));
        assert!(View::new(false).look(&extra));
        assert!(View::new(true).look(&with_choices));
        assert!(View::new(true).look(&event(r#"{"choices":[],"usage":null}"#)));
        assert!(View::new(true).look(&event("no json with \"usage\": 1")));
        let mut view = View::new(true);
        view.look(&extra);
        view.look(&event("[DONE]"));
        let used = view.usage(99);
        assert_eq!((used.tokens.input, used.tokens.output, used.estimated), (3, 4, false));
    }

    #[test]
    fn unreported_usage_is_estimated_from_what_passed() {
        let mut view = View::new(false);
        view.look(&event(
            r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
        ));
        view.look(&event(r#"{"choices":[{"delta":{"content":"12345678"},"logprobs":{"content":[{"token":"x"}]}},{"delta":{"content":"1"}}]}"#));
        assert!(!view.is_complete());
        view.look(&event(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#));
        assert!(view.is_complete());
        let used = view.usage(5);
        assert_eq!((used.tokens.input, used.tokens.output, used.estimated), (5, 3, true));
    }

    #[test]
    fn the_first_event_with_data_decides_what_the_stream_is() {
        for (json, expected) in [
            ("[DONE]", First::Done),
            (r#"{"choices":[]}"#, First::Content),
            (r#"{"error":null,"choices":[]}"#, First::Content),
            (r#"{"error":{"code":429}}"#, First::Error(r#"{"error":{"code":429}}"#.into())),
        ] {
            let mut view = View::new(false);
            view.look(b": comment\n\n");
            assert_eq!(view.first, None);
            view.look(&event(json));
            view.look(&event(r#"{"error":"late"}"#));
            assert_eq!(view.first, Some(expected), "{json}");
            assert!(view.error && !view.is_complete());
        }
    }
}
