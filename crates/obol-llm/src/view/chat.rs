//! Chunks of the chat dialect.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::{First, Seen, USAGE, is_error, is_nothing};
use crate::json;
use crate::sse;
use crate::usage::Reading;

static FINISH_REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""finish_reason""#));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""error""#));
static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(r#""delta""#));

/// Takes note of a chunk. Whether it is to be relayed.
pub(super) fn look(
    seen: &mut Seen,
    reading: &mut Reading,
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
    let has_error = json::may_have(data, &ERROR);
    let chunk = if has_error || [&*USAGE, &*FINISH_REASON].iter().any(|name| json::may_have(data, name)) {
        serde_json::from_slice::<Chunk<'_>>(data).ok()
    } else {
        Some(Chunk::default())
    };
    // What looks like an error but cannot be read is taken for one: it must not get past for being broken.
    if chunk.as_ref().map_or(has_error, Chunk::is_error) || sse::is_named(event, b"error") {
        seen.fail(data);
        if let Some(usage) = chunk.and_then(|chunk| chunk.usage) {
            reading.update(Reading::parse(usage));
        }
        return false;
    }
    for delta in json::members(data, &DELTA) {
        if delta.starts_with(b"{") {
            seen.heard.add_message(delta);
        }
    }
    if seen.first.is_none() && !is_preamble(data) {
        seen.first = Some(First::Content);
    }
    let chunk = chunk.unwrap_or_default();
    let has_choices = chunk.choices.is_some();
    let choices = chunk.choices.unwrap_or_default();
    seen.finished |= choices.iter().any(|choice| choice.finish_reason.is_some());
    let Some(usage) = chunk.usage else { return true };
    reading.update(Reading::parse(usage));
    !(hide_usage && has_choices && choices.is_empty())
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
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => is_nothing(value),
        Value::Array(items) => items.iter().all(|item| says_nothing(name, item)),
        Value::Object(members) => members.iter().all(|(name, value)| says_nothing(name, value)),
    }
}
