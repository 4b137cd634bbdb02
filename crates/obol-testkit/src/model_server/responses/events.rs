//! A response as the events that lead to it.

use serde_json::{Value, json};

use super::unfinished;
use crate::model_server::ask::{fragments, pieces};

/// Every event, numbered.
pub(super) fn of(response: &Value) -> Vec<String> {
    let mut events = Events::default();
    events.push("response.created", json!({"response": unfinished(response, "in_progress")}));
    events.push("response.in_progress", json!({"response": unfinished(response, "in_progress")}));
    let output = response["output"].as_array().into_iter().flatten();
    for (index, item) in output.enumerate() {
        let mut start = item.clone();
        match item["type"].as_str() {
            Some("message") => {
                start["status"] = json!("in_progress");
                start["content"] = json!([]);
                events.item("added", index, &start);
                events.text(index, item);
            }
            Some("function_call") => {
                start["status"] = json!("in_progress");
                start["arguments"] = json!("");
                events.item("added", index, &start);
                events.arguments(index, item);
            }
            _ => events.item("added", index, &start),
        }
        events.item("done", index, item);
    }
    let end = if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
    events.push(end, json!({"response": response}));
    events.0
}

#[derive(Default)]
struct Events(Vec<String>);

impl Events {
    fn push(&mut self, kind: &str, rest: Value) {
        let mut event = json!({"type": kind, "sequence_number": self.0.len()});
        if let (Some(event), Value::Object(rest)) = (event.as_object_mut(), rest) {
            event.extend(rest);
        }
        self.0.push(format!("event: {kind}\ndata: {event}\n\n"));
    }

    fn item(&mut self, what: &str, index: usize, item: &Value) {
        self.push(&format!("response.output_item.{what}"), json!({"output_index": index, "item": item}));
    }

    fn text(&mut self, index: usize, item: &Value) {
        let (id, part) = (&item["id"], &item["content"][0]);
        let text = part["text"].as_str().unwrap_or_default();
        let mut start = part.clone();
        start["text"] = json!("");
        let at = |mut rest: Value| {
            rest["item_id"] = id.clone();
            rest["output_index"] = json!(index);
            rest["content_index"] = json!(0);
            rest
        };
        self.push("response.content_part.added", at(json!({"part": start})));
        for piece in pieces(text) {
            self.push("response.output_text.delta", at(json!({"delta": piece, "logprobs": []})));
        }
        self.push("response.output_text.done", at(json!({"text": text, "logprobs": []})));
        self.push("response.content_part.done", at(json!({"part": part})));
    }

    fn arguments(&mut self, index: usize, item: &Value) {
        let at = |mut rest: Value| {
            rest["item_id"] = item["id"].clone();
            rest["output_index"] = json!(index);
            rest
        };
        for piece in fragments(item["arguments"].as_str().unwrap_or_default()) {
            self.push("response.function_call_arguments.delta", at(json!({"delta": piece})));
        }
        let done = json!({"arguments": item["arguments"], "name": item["name"]});
        self.push("response.function_call_arguments.done", at(done));
    }
}
