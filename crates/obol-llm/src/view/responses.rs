//! Events of the responses dialect.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{First, Seen, is_error, is_error_event, is_error_kind, is_nothing, looks_like_error, object};
use crate::sse;
use crate::usage::Reading;

/// The members of an event that matter.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    r#type: Cow<'a, str>,
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
    #[serde(borrow, default)]
    item: Option<&'a RawValue>,
    #[serde(borrow, default)]
    part: Option<&'a RawValue>,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Response<'a> {
    #[serde(borrow, default)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

/// Takes note of an event. Whether it is to be relayed.
pub(super) fn look(seen: &mut Seen, reading: &mut Reading, event: &[u8], data: &[u8]) -> bool {
    // Some compatible servers end as the chat dialect does.
    if data.trim_ascii() == b"[DONE]" {
        seen.first.get_or_insert(First::Done);
        seen.done = true;
        return true;
    }
    let parsed = object::<Event<'_>>(data);
    let says_error = |event: &Event<'_>| {
        event.error.is_some_and(is_error)
            || event.object.is_some_and(is_error_kind)
            || matches!(&*event.r#type, "error" | "response.failed")
            // All events of the dialect say what they are.
            || event.r#type.is_empty() && is_error_event(data)
    };
    let mut has_failed =
        sse::is_named(event, b"error") || parsed.as_ref().map_or_else(|| looks_like_error(data), says_error);
    let Some(said) = parsed else {
        if has_failed {
            seen.fail(data);
        }
        // Nothing is known of it, so it is not held back.
        seen.first.get_or_insert(First::Content);
        return !has_failed;
    };
    let response = said.response.and_then(|raw| object::<Response<'_>>(raw.get().as_bytes()));
    has_failed |=
        response.is_none() && said.response.is_some_and(|raw| looks_like_error(raw.get().as_bytes()));
    if let Some(Response { id, usage, error }) = response {
        has_failed |= error.is_some_and(is_error);
        if seen.response_id.is_none() {
            seen.response_id = id.map(Cow::into_owned);
        }
        if let Some(usage) = usage {
            reading.update(Reading::parse(usage));
        }
    }
    if has_failed {
        seen.fail(said.response.map_or(data, |response| response.get().as_bytes()));
        return false;
    }
    match &*said.r#type {
        "response.completed" | "response.incomplete" => {
            seen.first.get_or_insert(First::Content);
            (seen.finished, seen.done) = (true, true);
        }
        "response.created" | "response.in_progress" | "response.queued" => {}
        "response.output_item.added" if !said.item.is_some_and(has_begun) => {}
        "response.content_part.added" | "response.reasoning_summary_part.added"
            if !said.part.is_some_and(has_begun) => {}
        _ => {
            seen.first.get_or_insert(First::Content);
            if let Some(text) = said.delta.and_then(|delta| delta.get().strip_prefix('"')?.strip_suffix('"'))
            {
                seen.heard.add(text.as_bytes());
            }
        }
    }
    true
}

/// Whether an item or a part says something at its beginning: an empty message does not, a tool's name does.
fn has_begun(item: &RawValue) -> bool {
    let Ok(serde_json::Value::Object(mut item)) = serde_json::from_str(item.get()) else { return true };
    for name in ["type", "id", "status", "role", "phase"] {
        item.remove(name);
    }
    !item.values().all(is_nothing)
}
