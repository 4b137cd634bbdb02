//! Responses: made, streamed, remembered.

mod events;
mod items;

use serde_json::{Value, json};

use self::items::ToolCalls;
use super::ask::{Ask, End, Said};
use super::http_side::{CREATED, Out};
use super::openai::{self, Object, given, only};
use super::refusal::{Checked, Refusal};
use super::store::Stored;
use super::{Charged, Endpoint, Shared};

const KNOWN: &str = "access_programs background background_options context_management conversation image include \
    input instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls \
    previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning \
    safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p \
    truncation user";

pub(super) fn answer(server: &Shared, body: &Object) -> Checked<Out> {
    only(body, KNOWN, "")?;
    let model = openai::model(body, &server.config.openai)?;
    let stream = openai::stream(body, "include_obfuscation")?;
    let background = openai::flag(body, "background")?;
    let kept = body.get("store").is_none_or(|store| store != false);
    if background && !kept {
        let message = "Background responses are only supported with 'store' set to true.";
        return Err(Refusal::bad(message).param("background"));
    }
    let earlier = earlier(server, body)?;
    let input = items::of(given(body, "input"), &server.ids)?;
    let ask = read(body, &earlier, &input)?;
    let said = ask.say();
    server.charge(Endpoint::Responses, model, said.usage);

    let id = server.ids.response("resp_");
    let output = output(server, body, &said);
    let response = response(body, &id, kept, &said, &output);
    if kept {
        let conversation = [&earlier[..], &input, &output].concat();
        let in_progress = background && !stream;
        let stored = Stored {
            response: if in_progress { unfinished(&response, "queued") } else { response.clone() },
            input,
            conversation,
            completes_as: in_progress.then(|| response.clone()),
        };
        server.store.lock().keep(&id, stored);
    }
    Ok(match (stream, background) {
        (true, _) => {
            let mut events = events::of(&response);
            said.die(&mut events, r#""response.output_text.delta""#, |number| {
                let error = json!({
                    "type": "error", "sequence_number": number, "code": "server_error",
                    "message": "The server had an error while processing your request.", "param": null
                });
                format!("event: error\ndata: {error}\n\n")
            });
            Out::Events(events)
        }
        (false, true) => Out::Json(unfinished(&response, "queued")),
        (false, false) => Out::Json(response),
    })
}

/// What was said up to the previous response.
fn earlier(server: &Shared, body: &Object) -> Checked<Vec<Value>> {
    let Some(id) = given(body, "previous_response_id") else { return Ok(Vec::new()) };
    let id = id.as_str().ok_or_else(|| Refusal::invalid_type("previous_response_id", "a string"))?;
    let store = server.store.lock();
    let stored = store.get(id).ok_or_else(|| {
        Refusal::bad(format!("Previous response with id '{id}' not found."))
            .param("previous_response_id")
            .code("previous_response_not_found")
    })?;
    Ok(stored.conversation.clone())
}

fn read(body: &Object, earlier: &[Value], input: &[Value]) -> Checked<Ask> {
    let mut ask = Ask::that_reasons();
    if let Some(instructions) = given(body, "instructions") {
        ask.context(instructions.as_str().ok_or_else(|| Refusal::invalid_type("instructions", "a string"))?);
    }
    let mut calls = ToolCalls::default();
    for (index, item) in earlier.iter().chain(input).enumerate() {
        // Places are told of what this request brought.
        let index = index.checked_sub(earlier.len());
        let at = index.map_or_else(|| "previous_response_id".to_owned(), |index| format!("input[{index}]"));
        items::read(item, &at, &mut ask, &mut calls)?;
    }
    calls.all_answered()?;
    openai::tools(body, &mut ask, None)?;
    openai::choice(body, &mut ask, None)?;
    if let Some(format) = body.get("text").and_then(|text| text.get("format")) {
        openai::format(format, "text.format", &mut ask, None)?;
    }
    ask.max_output = openai::count(body, "max_output_tokens")?;
    Ok(ask)
}

fn output(server: &Shared, body: &Object, said: &Said) -> Vec<Value> {
    let ids = &server.ids;
    let mut output = Vec::new();
    if !said.thinking.is_empty() {
        let mut item = json!({"id": ids.response("rs_"), "type": "reasoning", "summary": []});
        let includes = body.get("include").and_then(Value::as_array).into_iter().flatten();
        if includes.into_iter().any(|one| one == "reasoning.encrypted_content") {
            item["encrypted_content"] = json!(format!("gAAAAA{}", ids.response("")));
        }
        output.push(item);
    }
    for call in &said.calls {
        output.push(json!({
            "id": ids.response("fc_"), "type": "function_call", "status": "completed",
            "arguments": call.arguments, "call_id": ids.chat("call_"), "name": call.name
        }));
    }
    if said.calls.is_empty() {
        let status = if said.end == End::Length { "incomplete" } else { "completed" };
        output.push(json!({
            "id": ids.response("msg_"), "type": "message", "status": status, "role": "assistant",
            "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": said.text}]
        }));
    }
    output
}

fn response(body: &Object, id: &str, kept: bool, said: &Said, output: &[Value]) -> Value {
    let or = |name: &str, default: Value| given(body, name).cloned().unwrap_or(default);
    let cut_short = said.end == End::Length;
    let mut text = or("text", json!({}));
    for (name, default) in [("format", json!({"type": "text"})), ("verbosity", json!("medium"))] {
        if text[name].is_null() {
            text[name] = default;
        }
    }
    let mut reasoning = or("reasoning", json!({}));
    for name in ["effort", "summary"] {
        if reasoning[name].is_null() {
            reasoning[name] = Value::Null;
        }
    }
    json!({
        "id": id,
        "object": "response",
        "created_at": CREATED,
        "status": if cut_short { "incomplete" } else { "completed" },
        "background": or("background", json!(false)),
        "completed_at": if cut_short { Value::Null } else { json!(CREATED + 1) },
        "error": null,
        "incomplete_details": if cut_short { json!({"reason": "max_output_tokens"}) } else { Value::Null },
        "instructions": or("instructions", Value::Null),
        "max_output_tokens": or("max_output_tokens", Value::Null),
        "max_tool_calls": or("max_tool_calls", Value::Null),
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": or("parallel_tool_calls", json!(true)),
        "previous_response_id": or("previous_response_id", Value::Null),
        "prompt_cache_key": or("prompt_cache_key", Value::Null),
        "reasoning": reasoning,
        "safety_identifier": or("safety_identifier", Value::Null),
        "service_tier": "default",
        "store": kept,
        "temperature": or("temperature", json!(1.0)),
        "text": text,
        "tool_choice": or("tool_choice", json!("auto")),
        "tools": or("tools", json!([])),
        "top_logprobs": or("top_logprobs", json!(0)),
        "top_p": or("top_p", json!(1.0)),
        "truncation": or("truncation", json!("disabled")),
        "usage": usage(&said.usage),
        "user": or("user", Value::Null),
        "metadata": or("metadata", json!({}))
    })
}

fn usage(usage: &Charged) -> Value {
    json!({
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.cache_written},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output
    })
}

/// A response as it looked before its answer began.
fn unfinished(response: &Value, status: &str) -> Value {
    let mut response = response.clone();
    response["status"] = json!(status);
    response["output"] = json!([]);
    for name in ["completed_at", "incomplete_details", "usage"] {
        response[name] = Value::Null;
    }
    response
}

// ---- what is remembered ----

fn not_found(id: &str) -> Refusal {
    Refusal::new(404, format!("Response with id '{id}' not found."))
}

pub(super) fn get(server: &Shared, id: &str) -> Checked<Out> {
    server.store.lock().look(id).map(Out::Json).ok_or_else(|| not_found(id))
}

pub(super) fn delete(server: &Shared, id: &str) -> Checked<Out> {
    if !server.store.lock().forget(id) {
        return Err(not_found(id));
    }
    Ok(Out::Json(json!({"id": id, "object": "response", "deleted": true})))
}

pub(super) fn cancel(server: &Shared, id: &str) -> Checked<Out> {
    let mut store = server.store.lock();
    if store.get(id).is_none() {
        return Err(not_found(id));
    }
    store.cancel(id).map(Out::Json).ok_or_else(|| Refusal::bad("Cannot cancel a synchronous response."))
}

/// The items of a request, the newest first unless asked otherwise. They always fit one page.
pub(super) fn input_items(server: &Shared, id: &str, query: &str) -> Checked<Out> {
    let mut data =
        server.store.lock().get(id).map(|stored| stored.input.clone()).ok_or_else(|| not_found(id))?;
    if query.split('&').all(|one| one != "order=asc") {
        data.reverse();
    }
    let id_of = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id_of(data.first()), id_of(data.last()));
    Ok(Out::Json(
        json!({"object": "list", "data": data, "first_id": first, "has_more": false, "last_id": last}),
    ))
}
