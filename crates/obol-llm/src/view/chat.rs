//! Chunks of the chat dialect.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{
    First, Lenient, Seen, USAGE, is_error, is_error_event, is_nothing, is_reason, lenient, looks_like_error,
    object,
};
use crate::json;
use crate::sse;
use crate::usage::Reading;

static FINISH_REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""finish_reason""#));
static CHOICES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""choices""#));
static INDEX: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""index""#));
static MESSAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""message""#));
static DETAIL: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""detail""#));
static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""delta""#));

/// Which choices of an answer were seen, and which have said why they ended.
#[derive(Debug, Default)]
pub(super) struct Choices {
    seen: u128,
    finished: u128,
    /// There are more than can be kept in mind, so that only the last event tells of the end.
    too_many: bool,
}

impl Choices {
    fn see(&mut self, index: u64, finished: bool) {
        let Some(bit) = u32::try_from(index).ok().and_then(|index| 1_u128.checked_shl(index)) else {
            self.too_many = true;
            return;
        };
        self.seen |= bit;
        if finished {
            self.finished |= bit;
        }
    }

    fn are_finished(&self) -> bool {
        self.seen != 0 && self.seen == self.finished && !self.too_many
    }
}

/// Takes note of a chunk. Whether it is to be relayed.
pub(super) fn look(
    seen: &mut Seen,
    reading: &mut Reading,
    choices: &mut Choices,
    hide_usage: bool,
    event: &[u8],
    data: &[u8],
) -> bool {
    if data.trim_ascii() == b"[DONE]" {
        seen.done = true;
        seen.first.get_or_insert(First::Done);
        return true;
    }
    // Most events have nothing of interest; parsing all of them would be the larger part of a stream's cost.
    let has_error = looks_like_error(data);
    let has_choices = json::may_have(data, &CHOICES);
    // Other choices than the first: each has its own end. Parallel calls of tools look alike.
    let has_others = json::members(data, &INDEX).any(|index| !index.starts_with(b"0"));
    let is_plain = has_choices
        && !has_error
        && !has_others
        && ![&*USAGE, &*FINISH_REASON].iter().any(|name| json::may_have(data, name));
    let chunk = if is_plain { None } else { object::<Chunk<'_>>(data) };
    let is_error = match &chunk {
        None if is_plain => false,
        // It must not get past for being broken.
        None => {
            has_error || !has_choices && [&*MESSAGE, &*DETAIL].iter().any(|name| json::may_have(data, name))
        }
        Some(chunk) => chunk.is_error() || (has_error || !has_choices) && is_error_event(data),
    };
    if is_error || sse::is_named(event, b"error") {
        seen.fail(data);
        if let Some(usage) = chunk.and_then(|chunk| chunk.usage) {
            reading.update(Reading::parse(usage));
        }
        return false;
    }
    for delta in json::members(data, &DELTA) {
        if delta.starts_with(b"{") {
            seen.heard.add_message(delta);
            if is_plain {
                choices.see(0, false);
            }
        }
    }
    if seen.first.is_none() && !is_preamble(data) {
        seen.first = Some(First::Content);
    }
    let chunk = chunk.unwrap_or_default();
    for choice in chunk.choices.read.iter().flatten() {
        let index = choice.index.and_then(|index| index.get().parse().ok());
        choices.see(index.unwrap_or(0), choice.finish_reason.is_some_and(is_reason));
    }
    seen.finished = choices.are_finished();
    let Some(usage) = chunk.usage else { return true };
    reading.update(Reading::parse(usage));
    !(hide_usage && chunk.choices.read.is_some_and(|choices| choices.is_empty()))
}

/// The members of a chunk that matter; all else is skipped.
#[derive(Default, Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "lenient")]
    choices: Lenient<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    index: Option<&'a RawValue>,
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

impl Chunk<'_> {
    fn is_error(&self) -> bool {
        let of_choices = self.choices.read.iter().flatten().filter_map(|choice| choice.error);
        self.error.into_iter().chain(of_choices).any(is_error)
    }
}

/// Whether a chunk says nothing of an answer yet: no choices, or choices that tell a role at most (DESIGN §11.2).
/// Data that is no chunk is taken for content: nothing is known of it, so it is not held back.
pub(super) fn is_preamble(data: &[u8]) -> bool {
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
        Value::Bool(false) if name == "finish_reason" => true,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => is_nothing(value),
        Value::Array(items) => items.iter().all(|item| says_nothing(name, item)),
        Value::Object(members) => members.iter().all(|(name, value)| says_nothing(name, value)),
    }
}
