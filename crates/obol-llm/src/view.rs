use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::json;
use crate::sse;
use crate::usage::{Estimate, Reading, Usage, text_bytes, tokens_of};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""usage""#));
static FINISH_REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""finish_reason""#));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""error""#));
static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""delta""#));

/// The first event of a stream that is more than a preamble.
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
pub(crate) struct View {
    /// The usage chunk is ours: the client did not ask for it.
    hide_usage: bool,
    pub(crate) first: Option<First>,
    /// `[DONE]` passed.
    pub(crate) done: bool,
    /// A choice is finished.
    pub(crate) finished: bool,
    /// The data of an error frame. It ends the answer, whatever follows.
    pub(crate) error: Option<Bytes>,
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
            error: None,
            reading: Reading::default(),
            text_bytes: 0,
        }
    }

    /// Takes note of an event. Whether it is to be relayed.
    ///
    /// Error frames are not: providers put addresses, accounts and parts of keys into them (DESIGN §11.4).
    pub(crate) fn look(&mut self, event: &[u8]) -> bool {
        if self.error.is_some() {
            return false;
        }
        let Some(data) = sse::data(event) else { return true };
        if data.trim_ascii() == b"[DONE]" {
            self.done = true;
            self.first.get_or_insert(First::Done);
            return true;
        }
        // Most events have nothing of interest; parsing all of them would be the larger part of a stream's cost.
        let has_error = json::may_have(&data, &ERROR);
        let chunk = if has_error || [&*USAGE, &*FINISH_REASON].iter().any(|name| json::may_have(&data, name))
        {
            serde_json::from_slice::<Chunk<'_>>(&data).ok()
        } else {
            Some(Chunk::default())
        };
        // What looks like an error but cannot be read is taken for one: it must not get past for being broken.
        if chunk.as_ref().map_or(has_error, Chunk::is_error) || sse::is_named(event, b"error") {
            if !self.done {
                let data = Bytes::copy_from_slice(&data);
                self.first.get_or_insert_with(|| First::Error(data.clone()));
                self.error = Some(data);
            }
            if let Some(usage) = chunk.and_then(|chunk| chunk.usage) {
                self.reading.update(Reading::parse(usage));
            }
            return false;
        }
        for delta in json::members(&data, &DELTA) {
            if delta.starts_with(b"{") {
                self.text_bytes += text_bytes(delta);
            }
        }
        if self.first.is_none() && !is_preamble(&data) {
            self.first = Some(First::Content);
        }
        let chunk = chunk.unwrap_or_default();
        let has_choices = chunk.choices.is_some();
        let choices = chunk.choices.unwrap_or_default();
        self.finished |= choices.iter().any(|choice| choice.finish_reason.is_some());
        let Some(usage) = chunk.usage else { return true };
        self.reading.update(Reading::parse(usage));
        !(self.hide_usage && has_choices && choices.is_empty())
    }

    /// Whether a count of tokens was reported that cannot be.
    pub(crate) fn is_implausible(&self) -> bool {
        self.reading.is_implausible()
    }

    /// Whether the answer came to its end.
    pub(crate) fn is_complete(&self) -> bool {
        (self.done || self.finished) && self.error.is_none()
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
    #[serde(borrow, default, deserialize_with = "lenient")]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

/// Choices of another type must not hide the members beside them.
fn lenient<'de, D: Deserializer<'de>>(choices: D) -> Result<Option<Vec<Choice<'de>>>, D::Error> {
    let raw = Option::<&'de RawValue>::deserialize(choices)?;
    Ok(raw.and_then(|raw| serde_json::from_str(raw.get()).ok()))
}

impl Chunk<'_> {
    fn is_error(&self) -> bool {
        let of_choices = self.choices.iter().flatten().filter_map(|choice| choice.error);
        self.error.into_iter().chain(of_choices).any(is_error)
    }
}

/// Whether the value of an `error` member is an error: SDKs take none of these for one.
pub(crate) fn is_error(value: &RawValue) -> bool {
    !matches!(value.get(), "null" | "false" | "0" | "\"\"" | "{}" | "[]")
}

/// Whether a chunk says nothing of an answer yet: no choices, or choices that tell a role at most (DESIGN §11.2).
/// Data that is no chunk is taken for content: nothing is known of it, so it is not held back.
fn is_preamble(data: &[u8]) -> bool {
    match serde_json::from_slice(data) {
        Ok(Value::Object(chunk)) => {
            chunk.get("choices").is_none_or(|choices| says_nothing("choices", choices))
        }
        Ok(_) => false,
        Err(_) => data.trim_ascii().is_empty(),
    }
}

fn says_nothing(name: &str, value: &Value) -> bool {
    match value {
        _ if matches!(name, "index" | "role" | "content_filter_results") => true,
        Value::Null => true,
        Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.iter().all(|item| says_nothing(name, item)),
        Value::Object(members) => members.iter().all(|(name, value)| says_nothing(name, value)),
    }
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
    fn the_first_event_after_the_preamble_decides_what_the_stream_is() {
        for (json, expected) in [
            ("[DONE]", First::Done),
            (r#"{"choices":[{"delta":{"content":"x"}}]}"#, First::Content),
            (r#"{"error":null,"choices":[{"delta":{},"finish_reason":"stop"}]}"#, First::Content),
            (r#"{"error":{"code":429}}"#, First::Error(r#"{"error":{"code":429}}"#.into())),
        ] {
            let mut view = View::new(false);
            assert!(view.look(b": comment\n\n"));
            assert!(view.look(&event(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#)));
            assert_eq!(view.first, None);
            view.look(&event(json));
            view.look(&event(r#"{"error":"late"}"#));
            assert_eq!(view.first, Some(expected), "{json}");
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
            let mut view = View::new(false);
            assert!(view.look(&event(r#"{"choices":[{"delta":{"content":"x"}}]}"#)));
            assert!(!view.look(format!("{frame}\n\n").as_bytes()), "{frame}");
            assert!(view.error.is_some() && !view.is_complete(), "{frame}");
            assert!(!view.look(&event("[DONE]")) && !view.is_complete(), "{frame}");
            assert!(view.usage(1).estimated);
        }
        let mut view = View::new(false);
        view.look(&event(r#"{"error":"x","usage":{"prompt_tokens":3,"completion_tokens":4}}"#));
        let used = view.usage(99);
        assert_eq!((used.tokens.input, used.tokens.output, used.estimated), (3, 4, true));
        let mut view = View::new(false);
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
