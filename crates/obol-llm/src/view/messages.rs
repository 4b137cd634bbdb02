//! Events of the messages dialect.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    First, Seen, is_error, is_error_event, is_error_kind, is_nothing, is_reason, looks_like_error, object,
};
use crate::sse;
use crate::translate::MessagesReading;

/// The members of an event that matter.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    r#type: Cow<'a, str>,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    delta: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content_block: Option<&'a RawValue>,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

/// Takes note of an event. Whether it is to be relayed.
pub(super) fn look(seen: &mut Seen, reading: &mut MessagesReading, event: &[u8], data: &[u8]) -> bool {
    let is_named_error = sse::is_named(event, b"error");
    let parsed = object::<Event<'_>>(data);
    let says_error = |event: &Event<'_>| {
        event.error.is_some_and(is_error)
            || event.object.is_some_and(is_error_kind)
            || event.r#type == "error"
            // All events of the dialect say what they are.
            || event.r#type.is_empty() && is_error_event(data)
    };
    if is_named_error || parsed.as_ref().map_or_else(|| looks_like_error(data), says_error) {
        seen.fail(data);
        return false;
    }
    let Some(said) = parsed else {
        // Nothing is known of it, so it is not held back.
        seen.first.get_or_insert(First::Content);
        return true;
    };
    let message = said.message.and_then(|message| object::<Message<'_>>(message.get().as_bytes()));
    for usage in message.and_then(|message| message.usage).into_iter().chain(said.usage) {
        reading.read(usage);
    }
    match &*said.r#type {
        "content_block_start" if said.content_block.is_some_and(has_begun) => {
            seen.first.get_or_insert(First::Content);
        }
        "content_block_delta" => {
            seen.first.get_or_insert(First::Content);
            seen.heard.add_message(said.delta.map_or("", RawValue::get).as_bytes());
        }
        "message_delta" if said.delta.is_some_and(|delta| stop_reason(delta).is_some()) => {
            seen.first.get_or_insert(First::Content);
            seen.finished = true;
        }
        "message_stop" => {
            seen.first.get_or_insert(First::Done);
            seen.done = true;
        }
        // The beginning, signs of life, and what later revisions add.
        _ => {}
    }
    true
}

/// Whether a block says something at its beginning: a text that is empty so far does not, a tool's name does.
fn has_begun(block: &RawValue) -> bool {
    let Ok(serde_json::Value::Object(mut block)) = serde_json::from_str(block.get()) else { return true };
    block.remove("type");
    block.remove("citations");
    !block.values().all(is_nothing)
}

fn stop_reason(delta: &RawValue) -> Option<&RawValue> {
    #[derive(Deserialize)]
    struct Delta<'a> {
        #[serde(borrow, default)]
        stop_reason: Option<&'a RawValue>,
    }
    object::<Delta<'_>>(delta.get().as_bytes())?.stop_reason.filter(|reason| is_reason(reason))
}
