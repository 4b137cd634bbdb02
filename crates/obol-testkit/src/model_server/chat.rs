//! Chat completions.

use serde_json::{Value, json};

use super::ask::{Ask, End, Said, fragments, pieces};
use super::http_side::{CREATED, Out};
use super::openai::{self, Object, given, only};
use super::refusal::{Checked, Refusal};
use super::{Endpoint, Shared};

const KNOWN: &str = "messages model audio frequency_penalty function_call functions logit_bias logprobs \
    max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls prediction \
    presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format \
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools top_logprobs \
    top_p user verbosity web_search_options";

pub(super) fn answer(server: &Shared, body: &Object) -> Checked<Out> {
    only(body, KNOWN, "")?;
    let model = openai::model(body, &server.config.openai)?;
    let stream = openai::stream(body, "include_usage include_obfuscation")?;
    let ask = read(body)?;
    let said = ask.say();
    server.charge(Endpoint::ChatCompletions, model, said.usage);
    let completion = Completion {
        id: server.ids.chat("chatcmpl-"),
        model: model.to_owned(),
        call_ids: said.calls.iter().map(|_| server.ids.chat("call_")).collect(),
        answers: ask.answers.max(1),
        said,
    };
    Ok(if stream {
        let wants_usage = body.get("stream_options").is_some_and(|options| options["include_usage"] == true);
        Out::Events(completion.events(wants_usage))
    } else {
        Out::Json(completion.whole())
    })
}

fn read(body: &Object) -> Checked<Ask> {
    let mut ask = Ask::that_reasons();
    let messages = given(body, "messages").ok_or_else(|| Refusal::missing_parameter("messages"))?;
    let messages = messages.as_array().ok_or_else(|| Refusal::invalid_type("messages", "an array"))?;
    if messages.is_empty() {
        let message = "Invalid 'messages': empty array. Expected an array with minimum length 1.";
        return Err(Refusal::bad(message).param("messages").code("empty_array"));
    }
    read_messages(messages, &mut ask)?;
    openai::tools(body, &mut ask, Some("function"))?;
    openai::choice(body, &mut ask, Some("function"))?;
    if let Some(format) = given(body, "response_format") {
        openai::format(format, "response_format", &mut ask, Some("json_schema"))?;
    }
    if given(body, "max_tokens").is_some() && given(body, "max_completion_tokens").is_some() {
        let message = "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.";
        return Err(Refusal::bad(message).code("invalid_parameter_combination"));
    }
    ask.max_output = openai::count(body, "max_completion_tokens")?.or(openai::count(body, "max_tokens")?);
    ask.answers = openai::count(body, "n")?.unwrap_or(1);
    let stops = given(body, "stop").map_or(&[][..], |stop| match stop {
        Value::Array(stops) => stops,
        one => std::slice::from_ref(one),
    });
    if stops.len() > 4 {
        let message = "Invalid 'stop': array too long. Expected an array with maximum length 4.";
        return Err(Refusal::bad(message).param("stop").code("array_above_max_length"));
    }
    ask.stops = stops.iter().filter_map(|stop| stop.as_str().map(str::to_owned)).collect();
    Ok(ask)
}

fn read_messages(messages: &[Value], ask: &mut Ask) -> Checked<()> {
    let mut open: Vec<&str> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let at = format!("messages[{index}]");
        let message = message.as_object().ok_or_else(|| Refusal::invalid_type(&at, "an object"))?;
        only(
            message,
            "role content name tool_calls tool_call_id refusal audio function_call annotations",
            &at,
        )?;
        let role = given(message, "role").and_then(Value::as_str);
        let role = role.ok_or_else(|| Refusal::missing_parameter(&format!("{at}.role")))?;
        if role == "tool" {
            let id = given(message, "tool_call_id").and_then(Value::as_str);
            let id = id.ok_or_else(|| Refusal::missing_parameter(&format!("{at}.tool_call_id")))?;
            let Some(found) = open.iter().position(|one| *one == id) else {
                let message = "Invalid parameter: messages with role 'tool' must be a response to a preceeding message \
                               with 'tool_calls'.";
                return Err(Refusal::bad(message).param(format!("messages.[{index}].role")));
            };
            open.remove(found);
        } else {
            all_answered(&open)?;
        }
        match role {
            "system" | "developer" => text_of(message, &at, "text", |part| ask.context(part.text()))?,
            "user" => {
                ask.turn();
                text_of(message, &at, "text image_url input_audio file", |part| match part {
                    Part::Text(text) => ask.user(text, true),
                    Part::Other => ask.image(),
                })?;
            }
            "tool" => text_of(message, &at, "text", |part| ask.result(part.text()))?,
            "assistant" => {
                ask.turn();
                let calls = openai::array(message, "tool_calls")?;
                if given(message, "content").is_some() || calls.is_empty() {
                    text_of(message, &at, "text refusal", |part| ask.context(part.text()))?;
                }
                for (call_index, call) in calls.iter().enumerate() {
                    let at = format!("{at}.tool_calls[{call_index}]");
                    for (what, field) in [
                        (&call["id"], "id"),
                        (&call["function"]["name"], "function.name"),
                        (&call["function"]["arguments"], "function.arguments"),
                    ] {
                        if !what.is_string() {
                            return Err(Refusal::missing_parameter(&format!("{at}.{field}")));
                        }
                    }
                    open.extend(call["id"].as_str());
                    ask.past_call();
                }
            }
            other => return Err(Refusal::invalid_value(&format!("{at}.role"), other)),
        }
    }
    all_answered(&open)
}

fn all_answered(open: &[&str]) -> Checked<()> {
    if open.is_empty() {
        return Ok(());
    }
    let message = "An assistant message with 'tool_calls' must be followed by tool messages responding to each \
                   'tool_call_id'. The following tool_call_ids did not have response messages: ";
    Err(Refusal::bad(format!("{message}{}", open.join(", "))).param("messages"))
}

enum Part<'a> {
    Text(&'a str),
    Other,
}

impl<'a> Part<'a> {
    fn text(&self) -> &'a str {
        match self {
            Self::Text(text) => text,
            Self::Other => "",
        }
    }
}

/// Reads the content of a message, whose parts have to be of the `allowed` types.
fn text_of<'a>(message: &'a Object, at: &str, allowed: &str, mut read: impl FnMut(Part<'a>)) -> Checked<()> {
    let at = format!("{at}.content");
    let content =
        given(message, "content").ok_or_else(|| Refusal::invalid_type(&at, "a string or an array"))?;
    if let Some(text) = content.as_str() {
        read(Part::Text(text));
        return Ok(());
    }
    let parts = content.as_array().ok_or_else(|| Refusal::invalid_type(&at, "a string or an array"))?;
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        let kind = part["type"].as_str().ok_or_else(|| Refusal::missing_parameter(&format!("{at}.type")))?;
        if allowed.split_whitespace().all(|one| one != kind) {
            return Err(Refusal::invalid_value(&format!("{at}.type"), kind));
        }
        let known = part.as_object().into_iter().flat_map(serde_json::Map::keys);
        if let Some(unknown) = known.into_iter().find(|key| *key != "type" && *key != kind) {
            return Err(Refusal::unknown_parameter(&format!("{at}.{unknown}")));
        }
        match (kind, part[kind].as_str()) {
            ("text" | "refusal", Some(text)) => read(Part::Text(text)),
            ("text" | "refusal", None) => return Err(Refusal::missing_parameter(&format!("{at}.{kind}"))),
            _ => read(Part::Other),
        }
    }
    Ok(())
}

struct Completion {
    id: String,
    model: String,
    call_ids: Vec<String>,
    answers: u64,
    said: Said,
}

impl Completion {
    fn head(&self, object: &str) -> Value {
        json!({
            "id": self.id, "object": object, "created": CREATED, "model": self.model,
            "service_tier": "default", "system_fingerprint": "fp_fake0000"
        })
    }

    fn finish(&self) -> &'static str {
        match self.said.end {
            End::Done | End::Stop(_) => "stop",
            End::Length => "length",
            End::Calls => "tool_calls",
        }
    }

    fn usage(&self) -> Value {
        let usage = &self.said.usage;
        json!({
            "prompt_tokens": usage.input,
            "completion_tokens": usage.output,
            "total_tokens": usage.input + usage.output,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached, "cache_write_tokens": usage.cache_written, "audio_tokens": 0
            },
            "completion_tokens_details": {
                "reasoning_tokens": usage.reasoning, "audio_tokens": 0,
                "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0
            }
        })
    }

    fn whole(&self) -> Value {
        let calls = self.said.calls.iter().zip(&self.call_ids).map(|(call, id)| {
            json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
        });
        let calls: Vec<Value> = calls.collect();
        let mut message = if calls.is_empty() {
            json!({"role": "assistant", "content": self.said.text, "refusal": null})
        } else {
            json!({"role": "assistant", "content": null, "tool_calls": calls, "refusal": null})
        };
        message["annotations"] = json!([]);
        let choices: Vec<Value> = (0..self.answers)
            .map(|index| {
                json!({"index": index, "message": message, "logprobs": null, "finish_reason": self.finish()})
            })
            .collect();
        let mut whole = self.head("chat.completion");
        whole["choices"] = choices.into();
        whole["usage"] = self.usage();
        whole
    }

    fn deltas(&self) -> Vec<Value> {
        let said = &self.said;
        if said.calls.is_empty() {
            let start = json!({"role": "assistant", "content": "", "refusal": null});
            let rest = pieces(&said.text).map(|piece| json!({"content": piece}));
            return std::iter::once(start).chain(rest).collect();
        }
        let mut deltas = Vec::new();
        for (index, (call, id)) in said.calls.iter().zip(&self.call_ids).enumerate() {
            let mut start = json!({"tool_calls": [
                {"index": index, "id": id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            ]});
            if index == 0 {
                start["role"] = json!("assistant");
                start["content"] = Value::Null;
            }
            deltas.push(start);
            for arguments in fragments(&call.arguments) {
                deltas.push(json!({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}));
            }
        }
        deltas
    }

    fn events(&self, wants_usage: bool) -> Vec<String> {
        let event = |choices: Value, usage: Option<Value>| {
            let mut chunk = self.head("chat.completion.chunk");
            chunk["choices"] = choices;
            if wants_usage {
                chunk["usage"] = usage.unwrap_or_default();
            }
            format!("data: {chunk}\n\n")
        };
        let choice = |index: u64, delta: Value, finish: Option<&str>| json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": finish}]);
        let mut events = Vec::new();
        for index in 0..self.answers {
            for delta in self.deltas() {
                events.push(event(choice(index, delta, None), None));
            }
            events.push(event(choice(index, json!({}), Some(self.finish())), None));
        }
        if wants_usage {
            events.push(event(json!([]), Some(self.usage())));
        }
        events.push("data: [DONE]\n\n".to_owned());
        let error = json!({"error": {
            "message": "The server had an error while processing your request.",
            "type": "server_error", "param": null, "code": "server_error"
        }});
        self.said.die(&mut events, r#""delta":{"content":"#, |_| format!("data: {error}\n\n"));
        events
    }
}
