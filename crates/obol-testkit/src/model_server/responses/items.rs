//! What goes into a response: messages, tool calls and their outputs, reasoning.

use serde_json::{Value, json};

use crate::model_server::ask::Ask;
use crate::model_server::ids::Ids;
use crate::model_server::openai::only;
use crate::model_server::refusal::{Checked, Refusal};

/// The items of a request, as they are remembered: a text is a user's message, and each has an id.
pub(super) fn of(input: Option<&Value>, ids: &Ids) -> Checked<Vec<Value>> {
    let input = input.ok_or_else(|| Refusal::missing_parameter("input"))?;
    let items = match input {
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(items) => items.clone(),
        _ => return Err(Refusal::invalid_type("input", "a string or an array")),
    };
    items.into_iter().enumerate().map(|(index, item)| remembered(item, index, ids)).collect()
}

fn remembered(mut item: Value, index: usize, ids: &Ids) -> Checked<Value> {
    let at = format!("input[{index}]");
    if !item.is_object() {
        return Err(Refusal::invalid_type(&at, "an object"));
    }
    let kind = item["type"].as_str().unwrap_or("message").to_owned();
    let prefix = match kind.as_str() {
        "message" => "msg_",
        "function_call" => "fc_",
        "function_call_output" => "fco_",
        "reasoning" => "rs_",
        other => return Err(Refusal::invalid_value(&format!("{at}.type"), other)),
    };
    if kind == "message" {
        only(item.as_object().expect("checked above"), "type id role content status phase", &at)?;
        let content = if item["role"] == "assistant" { "output_text" } else { "input_text" };
        if let Some(text) = item["content"].as_str() {
            item["content"] = json!([{"type": content, "text": text}]);
        }
    }
    item["type"] = json!(kind);
    if item["id"].is_null() {
        item["id"] = json!(ids.response(prefix));
    }
    if kind != "reasoning" {
        item["status"] = json!("completed");
    }
    Ok(item)
}

/// Which calls of tools a conversation made, and which were answered.
#[derive(Debug, Default)]
pub(super) struct ToolCalls(Vec<(String, bool)>);

impl ToolCalls {
    pub(super) fn all_answered(&self) -> Checked<()> {
        self.0.iter().find(|(_, answered)| !answered).map_or(Ok(()), |(id, _)| {
            Err(Refusal::bad(format!("No tool output found for function call {id}.")).param("input"))
        })
    }
}

pub(super) fn read(item: &Value, at: &str, ask: &mut Ask, calls: &mut ToolCalls) -> Checked<()> {
    let text =
        |name: &str| item[name].as_str().ok_or_else(|| Refusal::missing_parameter(&format!("{at}.{name}")));
    match text("type")? {
        "message" => read_message(item, text("role")?, at, ask),
        "function_call" => {
            text("name")?;
            text("arguments")?;
            ask.turn();
            ask.past_call();
            calls.0.push((text("call_id")?.to_owned(), false));
            Ok(())
        }
        "function_call_output" => {
            let id = text("call_id")?;
            let Some(call) = calls.0.iter_mut().find(|(call, _)| call == id) else {
                let message = format!("No tool call found for function call output with call_id {id}.");
                return Err(Refusal::bad(message).param("input"));
            };
            call.1 = true;
            match &item["output"] {
                Value::String(output) => ask.result(output),
                Value::Array(parts) => {
                    parts.iter().filter_map(|part| part["text"].as_str()).for_each(|text| ask.result(text));
                }
                _ => return Err(Refusal::missing_parameter(&format!("{at}.output"))),
            }
            Ok(())
        }
        // Reasoning: its tokens were paid for.
        _ => Ok(()),
    }
}

fn read_message(item: &Value, role: &str, at: &str, ask: &mut Ask) -> Checked<()> {
    if !matches!(role, "user" | "assistant" | "system" | "developer") {
        return Err(Refusal::invalid_value(&format!("{at}.role"), role));
    }
    if matches!(role, "user" | "assistant") {
        ask.turn();
    }
    let parts = item["content"]
        .as_array()
        .ok_or_else(|| Refusal::invalid_type(&format!("{at}.content"), "a string or an array"))?;
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}.content[{index}]");
        let kind = part["type"].as_str().unwrap_or_default();
        let text = part["text"].as_str().or_else(|| part["refusal"].as_str());
        match (role, kind, text) {
            ("assistant", "output_text" | "refusal", Some(text))
            | ("system" | "developer", "input_text", Some(text)) => ask.context(text),
            ("user", "input_text", Some(text)) => ask.user(text, true),
            ("user", "input_image" | "input_file" | "input_audio", _) => ask.image(),
            ("assistant", "output_text" | "refusal", None) | (_, "input_text", None) => {
                return Err(Refusal::missing_parameter(&format!("{at}.text")));
            }
            (_, other, _) => return Err(Refusal::invalid_value(&format!("{at}.type"), other)),
        }
    }
    Ok(())
}
