mod chat;
mod messages;
mod responses;

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::endpoint::Endpoint;
use crate::sse;
use crate::translate::MessagesReading;
use crate::usage::{Estimate, Heard, Reading, Usage};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""usage""#));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""error""#));

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
        choices: chat::Choices,
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
                Grammar::Chat { hide_usage, reading: Reading::default(), choices: chat::Choices::default() }
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
            Grammar::Chat { hide_usage, reading, choices } => {
                chat::look(seen, reading, choices, *hide_usage, event, &data)
            }
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
    let value = value.get();
    let inside = |open, close| value.strip_prefix(open).and_then(|rest| rest.strip_suffix(close));
    let is_empty = |inside: Option<&str>| inside.is_some_and(|inside| inside.trim_ascii().is_empty());
    !matches!(value, "null" | "false" | "0" | "\"\"")
        && !is_empty(inside('{', '}'))
        && !is_empty(inside('[', ']'))
}

/// Whether an answer, or an event of one, is an error whatever its status says: by an error object, by its kind, or by
/// a message that stands where the model's words would. What cannot be read is not.
pub(crate) fn is_error_answer(body: &[u8]) -> bool {
    tells_error(body).unwrap_or(false)
}

/// The same of an event whose other members could be read: one that has these twice must not get past.
fn is_error_event(data: &[u8]) -> bool {
    tells_error(data).unwrap_or(true)
}

/// Nothing when it cannot be read.
fn tells_error(body: &[u8]) -> Option<bool> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow, default)]
        error: Option<&'a RawValue>,
        #[serde(borrow, default)]
        object: Option<&'a RawValue>,
        #[serde(borrow, default)]
        r#type: Option<&'a RawValue>,
        #[serde(borrow, default)]
        message: Option<&'a RawValue>,
        #[serde(borrow, default)]
        detail: Option<&'a RawValue>,
        #[serde(borrow, default, deserialize_with = "lenient")]
        choices: Lenient<Vec<Choice<'a>>>,
        #[serde(borrow, default)]
        content: Option<&'a RawValue>,
        #[serde(borrow, default)]
        output: Option<&'a RawValue>,
        #[serde(borrow, default)]
        data: Option<&'a RawValue>,
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow, default)]
        error: Option<&'a RawValue>,
    }
    let answer = object::<Answer<'_>>(body)?;
    let of_choices = answer.choices.read.iter().flatten().filter_map(|choice| choice.error);
    let has_answer = answer.choices.is_there
        || [answer.content, answer.output, answer.data, answer.usage].iter().any(Option::is_some);
    let says_why = [answer.message, answer.detail].into_iter().flatten().any(is_error);
    Some(
        answer.error.into_iter().chain(of_choices).any(is_error)
            || answer.object.is_some_and(is_error_kind)
            || answer.r#type.is_some_and(is_error_kind)
            || (says_why && !has_answer),
    )
}

/// Whether the kind of an object, by its `object` or `type`, is an error.
fn is_error_kind(kind: &RawValue) -> bool {
    kind.get() == r#""error""#
}

/// Reads a JSON object. An array is none: its items would be taken for the members in their order.
fn object<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Option<T> {
    data.trim_ascii_start().starts_with(b"{").then(|| serde_json::from_slice(data).ok()).flatten()
}

/// A member that must not hide those beside it when it is of another type.
#[derive(Debug)]
struct Lenient<T> {
    /// It is not null.
    is_there: bool,
    read: Option<T>,
}

impl<T> Default for Lenient<T> {
    fn default() -> Self {
        Self { is_there: false, read: None }
    }
}

fn lenient<'de, D: Deserializer<'de>, T: Deserialize<'de>>(member: D) -> Result<Lenient<T>, D::Error> {
    let raw = Option::<&'de RawValue>::deserialize(member)?;
    Ok(Lenient { is_there: raw.is_some(), read: raw.and_then(|raw| serde_json::from_str(raw.get()).ok()) })
}

/// Whether data that cannot be read looks like an error, by a member or a value of that name. It is taken for one then:
/// it must not get past for being broken.
fn looks_like_error(data: &[u8]) -> bool {
    ERROR.find_iter(data).any(|at| {
        let after = data.get(at + ERROR.needle().len()..).unwrap_or_default().trim_ascii_start();
        after.strip_prefix(b":").is_none_or(|value| !value.trim_ascii_start().starts_with(b"null"))
    })
}

/// Whether this is why an answer ended: a word. Some servers have an empty one, or false, in every event before.
fn is_reason(value: &RawValue) -> bool {
    value.get().starts_with('"') && value.get() != "\"\""
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

    const WAYS: [Endpoint; 3] = [Endpoint::ChatCompletions, Endpoint::Messages, Endpoint::Responses];

    #[test]
    fn errors_without_an_error_object_are_errors() {
        for json in [
            r#"{"object":"error","message":"sk-leak","type":"BadRequestError","code":400}"#,
            r#"{"object": "error","message":"sk-leak","usage":{"prompt_tokens":1},"choices":[]}"#,
            r#"{"detail":"sk-leak"}"#,
            r#"{"detail":[{"loc":["body"],"msg":"sk-leak"}]}"#,
            r#"{"message":"sk-leak","choices":null,"usage":null}"#,
            r#"{"type":"error","msg":"sk-leak"}"#,
            r#"{"\u0065rror":"sk-leak"}"#,
        ] {
            for spoken in WAYS {
                let mut view = View::new(spoken, false);
                assert!(!view.look(&event(json)), "{json}");
                assert!(matches!(view.seen.first, Some(First::Error(_))) && !view.is_complete(), "{json}");
            }
            assert!(is_error_answer(json.as_bytes()), "{json}");
        }
        let mut view = View::new(Endpoint::ChatCompletions, false);
        for harmless in [
            r#"{"choices":[{"delta":{"content":"x"}}],"message":"x","detail":"y"}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":1},"message":"x"}"#,
            r#"{"object":"chat.completion.chunk","message":null,"detail":""}"#,
            r#"{"type":"ping","data":{"message":"x"}}"#,
            "{}",
        ] {
            assert!(view.look(&event(harmless)), "{harmless}");
            assert!(!is_error_answer(harmless.as_bytes()), "{harmless}");
        }
    }

    #[test]
    fn what_cannot_be_read_and_looks_like_an_error_is_one() {
        for json in [
            r#"{"type":"x","error":{"message":"sk-leak"#,
            r#"{"type":"x","error":null,"error":{"message":"sk-leak"}}"#,
            r#"{"type":"error","message":"sk-le"#,
            r#"[{"error":{"code":429,"message":"sk-leak"}}]"#,
        ] {
            for spoken in WAYS {
                let mut view = View::new(spoken, false);
                assert!(!view.look(&event(json)), "{spoken:?} {json}");
                assert!(view.seen.error.is_some(), "{spoken:?} {json}");
            }
        }
        for json in [r#"{"detail":"sk-le"#, r#"{"message": "sk-le"#, r#"{"message":"a","message":"sk-leak"}"#]
        {
            assert!(!View::new(Endpoint::ChatCompletions, false).look(&event(json)), "{json}");
        }
        for spoken in WAYS {
            assert!(View::new(spoken, false).look(&event(r#"{"error":null,"type":"x"#)));
            assert!(View::new(spoken, false).look(&event("no json")));
        }
    }

    #[test]
    fn an_answer_of_the_responses_dialect_that_holds_an_error_has_failed() {
        for json in [
            r#"{"type":"response.completed","response":{"id":"r","error":{"code":"server_error","message":"sk-leak"}}}"#,
            r#"{"type":"response.completed","response":{"error":null,"error":{"message":"sk-leak"}}}"#,
        ] {
            let mut view = View::new(Endpoint::Responses, false);
            assert!(!view.look(&event(json)) && !view.is_complete(), "{json}");
        }
        let mut view = View::new(Endpoint::Responses, false);
        assert!(view.look(&event(r#"{"type":"response.completed","error":null,"response":{"error":null}}"#)));
        assert!(view.is_complete());
    }

    #[test]
    fn nothing_in_brackets_is_no_error() {
        for (json, expected) in [
            ("{ }", false),
            ("[\t]", false),
            ("{}", false),
            ("\"\"", false),
            ("[0]", true),
            ("{\"a\":1}", true),
            ("\"{}\"", true),
            ("1", true),
        ] {
            assert_eq!(is_error(serde_json::from_str(json).unwrap()), expected, "{json}");
        }
        assert!(is_error_answer(br#"{"choices":[{"error":{"code":429},"message":{"content":""}}]}"#));
        assert!(!is_error_answer(br#"{"choices":[{"error":{ },"message":{"content":""}}],"error":[ ]}"#));
        assert!(!is_error_answer(br#"{"output":[],"error":null,"message":"x"}"#));
    }

    #[test]
    fn an_empty_reason_does_not_end_an_answer() {
        for none in [r#""""#, "false", "null", "0"] {
            let mut view = View::new(Endpoint::ChatCompletions, false);
            let chunk = |delta: &str, reason: &str| {
                event(&format!(
                    r#"{{"choices":[{{"index":0,"delta":{{{delta}}},"finish_reason":{reason}}}]}}"#
                ))
            };
            view.look(&chunk(r#""role":"assistant""#, none));
            assert_eq!(view.seen.first.is_none(), none != "0", "{none}");
            view.look(&chunk(r#""content":"x""#, none));
            assert!(!view.is_complete() && !view.awaits_usage(), "{none}");
            view.look(&chunk("", r#""stop""#));
            assert!(view.is_complete() && view.awaits_usage(), "{none}");
            let mut view = View::new(Endpoint::Messages, false);
            view.look(&event(&format!(r#"{{"type":"message_delta","delta":{{"stop_reason":{none}}}}}"#)));
            assert!(!view.is_complete(), "{none}");
        }
    }

    #[test]
    fn an_answer_of_several_choices_ends_with_the_last_of_them() {
        let says = |index: u64| {
            event(&format!(
                r#"{{"choices":[{{"index": {index},"delta":{{"content":"x"}},"finish_reason":null}}]}}"#
            ))
        };
        let ends = |index: u64| {
            event(&format!(r#"{{"choices":[{{"index":{index},"delta":{{}},"finish_reason":"stop"}}]}}"#))
        };
        for (events, complete) in [
            (vec![says(0), says(1), ends(0)], false),
            (vec![says(0), says(1), ends(1)], false),
            (vec![says(0), says(1), ends(1), ends(0)], true),
            (vec![says(0), ends(0), says(1)], false),
            (vec![says(0), ends(0), says(1), ends(1), event(r#"{"choices":[]}"#)], true),
            (vec![says(127), ends(127)], true),
            (vec![says(0), says(128), ends(128), ends(0)], false),
            (vec![says(0), says(u64::MAX), ends(0), event("[DONE]")], true),
        ] {
            let mut view = View::new(Endpoint::ChatCompletions, false);
            for event in &events {
                assert!(view.look(event));
            }
            assert_eq!(view.is_complete(), complete, "{}", String::from_utf8(events.concat()).unwrap());
        }
        // Calls of tools have an index of their own.
        let mut view = View::new(Endpoint::ChatCompletions, false);
        view.look(&event(r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":3,"id":"c"}]}}]}"#));
        view.look(&ends(0));
        assert!(view.is_complete());
    }
}
