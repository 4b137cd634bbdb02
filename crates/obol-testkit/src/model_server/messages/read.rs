//! Reading a request for a message, with what the API refuses.

use serde_json::{Value, json};

use super::signature;
use crate::model_server::ask::{Ask, Choice};
use crate::model_server::http_side::Version;
use crate::model_server::openai::{Object, is_name};
use crate::model_server::refusal::{Checked, Refusal};

/// Refuses fields that the API does not have. `at` is empty or where the object is.
pub(super) fn only(object: &Object, known: &str, at: &str) -> Checked<()> {
    let unknown = object.keys().find(|key| known.split_whitespace().all(|one| one != key.as_str()));
    unknown.map_or(Ok(()), |key| {
        let dot = if at.is_empty() { "" } else { "." };
        Err(Refusal::bad(format!("{at}{dot}{key}: Extra inputs are not permitted")))
    })
}

fn required(at: &str) -> Refusal {
    Refusal::bad(format!("{at}: Field required"))
}

/// The request; one for a message `speaks`, one that only counts does not.
pub(super) fn request(body: &Object, version: Version, speaks: bool) -> Checked<Ask> {
    let mut ask = Ask::default();
    let max_tokens = body.get("max_tokens").and_then(Value::as_u64);
    if speaks {
        body.get("max_tokens").ok_or_else(|| required("max_tokens"))?;
        if max_tokens.is_none_or(|max| max == 0) {
            return Err(Refusal::bad("max_tokens: must be greater than or equal to 1"));
        }
    }
    ask.max_output = max_tokens;
    numbers(body)?;
    match body.get("system") {
        None | Some(Value::Null) => {}
        Some(Value::String(system)) => ask.context(system),
        Some(blocks) => {
            for (index, block) in list(blocks, "system")?.iter().enumerate() {
                ask.context(text_of(block, &format!("system.{index}"))?);
            }
        }
    }
    let messages = body.get("messages").ok_or_else(|| required("messages"))?;
    conversation(list(messages, "messages")?, version, &mut ask)?;
    tools(body, &mut ask)?;
    thinking(body, &mut ask)?;
    for stop in body.get("stop_sequences").and_then(Value::as_array).into_iter().flatten() {
        let stop = stop.as_str().filter(|stop| !stop.trim().is_empty());
        let refused = || Refusal::bad("stop_sequences: each stop sequence must contain non-whitespace");
        ask.stops.push(stop.ok_or_else(refused)?.to_owned());
    }
    if let Some(format) = body.get("output_config").and_then(|config| config.get("format")) {
        let schema = format.get("schema").filter(|_| format["type"] == "json_schema");
        ask.format = Some(schema.ok_or_else(|| required("output_config.format.schema"))?.clone());
    }
    Ok(ask)
}

fn numbers(body: &Object) -> Checked<()> {
    for name in ["temperature", "top_p"] {
        let Some(number) = body.get(name) else { continue };
        let number =
            number.as_f64().ok_or_else(|| Refusal::bad(format!("{name}: Input should be a number")))?;
        if number > 1.0 {
            return Err(Refusal::bad(format!("{name}: Input should be less than or equal to 1")));
        }
    }
    if let Some(metadata) = body.get("metadata").and_then(Value::as_object) {
        only(metadata, "user_id", "metadata")?;
    }
    Ok(())
}

fn list<'a>(value: &'a Value, at: &str) -> Checked<&'a [Value]> {
    let refused = || Refusal::bad(format!("{at}: Input should be a valid list"));
    value.as_array().map(Vec::as_slice).ok_or_else(refused)
}

fn text_of<'a>(block: &'a Value, at: &str) -> Checked<&'a str> {
    let object = block.as_object().ok_or_else(|| Refusal::bad(format!("{at}: Input should be an object")))?;
    only(object, "type text cache_control citations", &format!("{at}.text"))?;
    let text = block["text"].as_str().ok_or_else(|| required(&format!("{at}.text.text")))?;
    if text.is_empty() {
        return Err(Refusal::bad("messages: text content blocks must be non-empty"));
    }
    Ok(text)
}

/// A message, or several of the same role: the API makes one turn of them.
struct Turn<'a> {
    at: String,
    role: &'a str,
    blocks: Vec<(String, Value)>,
}

fn turns(messages: &[Value]) -> Checked<Vec<Turn<'_>>> {
    let mut turns: Vec<Turn<'_>> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let at = format!("messages.{index}");
        let object =
            message.as_object().ok_or_else(|| Refusal::bad(format!("{at}: Input should be an object")))?;
        only(object, "role content", &at)?;
        let role = match message["role"].as_str() {
            Some(role @ ("user" | "assistant" | "system")) => role,
            Some(_) => {
                let message = format!("{at}.role: Input should be 'user', 'assistant' or 'system'");
                return Err(Refusal::bad(message));
            }
            None => return Err(required(&format!("{at}.role"))),
        };
        let empty = || {
            let message =
                "all messages must have non-empty content except for the optional final assistant message";
            Refusal::bad(format!("{at}: {message}"))
        };
        let blocks = match object.get("content") {
            Some(Value::String(text)) if text.is_empty() => return Err(empty()),
            Some(Value::String(text)) => vec![json!({"type": "text", "text": text})],
            Some(Value::Array(blocks)) if blocks.is_empty() => return Err(empty()),
            Some(blocks) => list(blocks, &format!("{at}.content"))?.to_vec(),
            None => return Err(required(&format!("{at}.content"))),
        };
        let blocks =
            blocks.into_iter().enumerate().map(|(block, value)| (format!("{at}.content.{block}"), value));
        match turns.last_mut() {
            Some(last) if last.role == role => last.blocks.extend(blocks),
            _ => turns.push(Turn { blocks: blocks.collect(), at, role }),
        }
    }
    Ok(turns)
}

fn conversation(messages: &[Value], version: Version, ask: &mut Ask) -> Checked<()> {
    let turns = turns(messages)?;
    match turns.first().map(|turn| turn.role) {
        None => return Err(Refusal::bad("messages: at least one message is required")),
        Some("assistant") => return Err(Refusal::bad("messages: first message must use the \"user\" role")),
        Some(_) => {}
    }
    // Calls of the turn before, which this one has to answer first of all.
    let mut open: Vec<String> = Vec::new();
    let mut opened_at = String::new();
    for turn in &turns {
        let results = turn.blocks.iter().take_while(|(_, block)| block["type"] == "tool_result");
        let answered: Vec<&str> = results.filter_map(|(_, block)| block["tool_use_id"].as_str()).collect();
        unanswered(&opened_at, open.iter().filter(|id| !answered.contains(&id.as_str())))?;
        if turn.role != "system" {
            ask.turn();
        }
        let before = std::mem::take(&mut open);
        for (at, block) in &turn.blocks {
            match turn.role {
                "assistant" => open.extend(said(block, at, ask)?),
                "user" => {
                    let cites = block["citations"].as_array().is_some_and(|citations| !citations.is_empty());
                    if version == Version::New && cites {
                        let message = "citations are not permitted in user messages";
                        return Err(Refusal::bad(format!("{at}.text.citations: {message}")));
                    }
                    told(block, at, &before, ask)?;
                }
                _ => ask.context(text_of(block, at)?),
            }
        }
        opened_at.clone_from(&turn.at);
    }
    unanswered(&opened_at, open.iter())?;
    if turns.last().is_some_and(|turn| turn.role == "assistant") {
        let message = "This model does not support assistant message prefill. The conversation must end with a user message.";
        return Err(Refusal::bad(message));
    }
    Ok(())
}

fn unanswered<'a>(at: &str, ids: impl Iterator<Item = &'a String>) -> Checked<()> {
    let ids: Vec<&str> = ids.map(String::as_str).collect();
    if ids.is_empty() {
        return Ok(());
    }
    Err(Refusal::bad(format!(
        "{at}: `tool_use` ids were found without `tool_result` blocks immediately after: {}. Each `tool_use` block must \
         have a corresponding `tool_result` block in the next message.",
        ids.join(", ")
    )))
}

fn unexpected(at: &str, block: &Value) -> Refusal {
    let tag = block["type"].as_str().unwrap_or_default();
    Refusal::bad(format!(
        "{at}: Input tag '{tag}' found using 'type' does not match any of the expected tags"
    ))
}

/// A block of the assistant. Returns the id of a call.
fn said(block: &Value, at: &str, ask: &mut Ask) -> Checked<Option<String>> {
    let object = block.as_object().ok_or_else(|| unexpected(at, block))?;
    match block["type"].as_str() {
        Some("text") => ask.context(text_of(block, at)?),
        Some("thinking") => {
            only(object, "type thinking signature", &format!("{at}.thinking"))?;
            let thinking = block["thinking"].as_str().unwrap_or_default();
            if block["signature"] != signature(thinking) {
                return Err(Refusal::bad(format!("{at}: Invalid `signature` in `thinking` block")));
            }
        }
        Some("redacted_thinking") => only(object, "type data", &format!("{at}.redacted_thinking"))?,
        Some("tool_use") => {
            let at = format!("{at}.tool_use");
            only(object, "type id name input cache_control caller toolset_name", &at)?;
            let id = block["id"].as_str().ok_or_else(|| required(&format!("{at}.id")))?;
            if !is_name(id, usize::MAX) {
                let message = "String should match pattern '^[a-zA-Z0-9_-]+$'";
                return Err(Refusal::bad(format!("{at}.id: {message}")));
            }
            block["name"].as_str().ok_or_else(|| required(&format!("{at}.name")))?;
            if !block["input"].is_object() {
                return Err(Refusal::bad(format!("{at}.input: Input should be a valid dictionary")));
            }
            ask.past_call();
            return Ok(Some(id.to_owned()));
        }
        _ => return Err(unexpected(at, block)),
    }
    Ok(None)
}

/// A block of the user, who may answer the calls of the turn `before`.
fn told(block: &Value, at: &str, before: &[String], ask: &mut Ask) -> Checked<()> {
    let object = block.as_object().ok_or_else(|| unexpected(at, block))?;
    match block["type"].as_str() {
        Some("text") => ask.user(text_of(block, at)?, true),
        Some("image") => {
            image(block, at)?;
            ask.image();
        }
        Some("document") => ask.image(),
        Some("tool_result") => {
            let place = format!("{at}.tool_result");
            only(object, "type tool_use_id content is_error cache_control toolset_name", &place)?;
            let id =
                block["tool_use_id"].as_str().ok_or_else(|| required(&format!("{place}.tool_use_id")))?;
            if !before.iter().any(|one| one == id) {
                return Err(Refusal::bad(format!(
                    "{at}: unexpected `tool_use_id` found in `tool_result` blocks: {id}. Each `tool_result` block must \
                     have a corresponding `tool_use` block in the previous message."
                )));
            }
            match object.get("content") {
                None | Some(Value::Null) => ask.result(""),
                Some(Value::String(text)) => ask.result(text),
                Some(parts) => {
                    for (index, part) in list(parts, &format!("{place}.content"))?.iter().enumerate() {
                        let at = format!("{place}.content.{index}");
                        match part["type"].as_str() {
                            Some("text") => ask.result(text_of(part, &at)?),
                            Some("image") => {
                                image(part, &at)?;
                                ask.image();
                            }
                            Some("document" | "search_result") => ask.image(),
                            _ => return Err(unexpected(&at, part)),
                        }
                    }
                }
            }
        }
        _ => return Err(unexpected(at, block)),
    }
    Ok(())
}

fn image(block: &Value, at: &str) -> Checked<()> {
    let source = &block["source"];
    let fields: &[&str] = match source["type"].as_str() {
        Some("base64") => &["media_type", "data"],
        Some("url") => &["url"],
        Some("file") => &["file_id"],
        _ => return Err(required(&format!("{at}.image.source"))),
    };
    let missing = fields.iter().find(|field| !source[**field].is_string());
    missing.map_or(Ok(()), |field| Err(required(&format!("{at}.image.source.{field}"))))
}

fn tools(body: &Object, ask: &mut Ask) -> Checked<()> {
    let tools = match body.get("tools") {
        None | Some(Value::Null) => &[][..],
        Some(tools) => list(tools, "tools")?,
    };
    for (index, tool) in tools.iter().enumerate() {
        if tool["type"].as_str().is_some_and(|kind| kind != "custom") {
            ask.foreign_tool();
            continue;
        }
        let at = format!("tools.{index}.custom");
        let object = tool.as_object().ok_or_else(|| required(&at))?;
        let known = "type name description input_schema cache_control strict allowed_callers defer_loading \
                     eager_input_streaming input_examples";
        only(object, known, &at)?;
        let name = tool["name"].as_str().ok_or_else(|| required(&format!("{at}.name")))?;
        if !is_name(name, 128) {
            let message = "String should match pattern '^[a-zA-Z0-9_-]{1,128}$'";
            return Err(Refusal::bad(format!("{at}.name: {message}")));
        }
        if tool["input_schema"]["type"] != "object" {
            return Err(required(&format!("{at}.input_schema.type")));
        }
        ask.tool(name, &tool["input_schema"]);
    }
    let choice = &body.get("tool_choice").unwrap_or(&Value::Null);
    if !choice.is_null() && tools.is_empty() && choice["type"] != "none" {
        return Err(Refusal::bad("tool_choice: may only be specified while providing tools"));
    }
    if let Some(choice) = choice.as_object() {
        only(choice, "type name disable_parallel_tool_use", "tool_choice")?;
    }
    ask.choice = match (choice["type"].as_str(), choice["name"].as_str()) {
        (Some("auto"), _) => Choice::Auto,
        (Some("any"), _) => Choice::Must,
        (Some("none"), _) => Choice::No,
        (Some("tool"), Some(name)) if ask.tools.iter().any(|tool| tool.name == name) => {
            Choice::Named(name.to_owned())
        }
        (Some("tool"), name) => {
            let name = name.unwrap_or_default();
            return Err(Refusal::bad(format!("Tool '{name}' not found in provided tools")));
        }
        _ if choice.is_null() => Choice::Auto,
        _ => {
            return Err(Refusal::bad(
                "tool_choice: Input tag does not match any of the expected tags: 'auto', 'any', 'tool', 'none'",
            ));
        }
    };
    Ok(())
}

fn thinking(body: &Object, ask: &mut Ask) -> Checked<()> {
    let thinking = body.get("thinking").unwrap_or(&Value::Null);
    match thinking["type"].as_str() {
        None if thinking.is_null() => return Ok(()),
        Some("disabled") => return Ok(()),
        Some("adaptive" | "between_tools") => {}
        Some("enabled") => {
            let budget = thinking["budget_tokens"].as_u64();
            let budget = budget.ok_or_else(|| required("thinking.enabled.budget_tokens"))?;
            if budget < 1024 {
                let message = "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024";
                return Err(Refusal::bad(message));
            }
            if ask.max_output.is_some_and(|max| max <= budget) {
                return Err(Refusal::bad("`max_tokens` must be greater than `thinking.budget_tokens`."));
            }
        }
        _ => return Err(Refusal::bad("thinking: Input tag does not match any of the expected tags")),
    }
    if matches!(ask.choice, Choice::Must | Choice::Named(_)) {
        return Err(Refusal::bad("Thinking may not be enabled when tool_choice forces tool use."));
    }
    if body.get("temperature").is_some_and(|temperature| temperature.as_f64() != Some(1.0)) {
        return Err(Refusal::bad("`temperature` may only be set to 1 when thinking is enabled."));
    }
    ask.reasons = true;
    Ok(())
}
