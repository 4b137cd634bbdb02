//! Anthropic's messages.

mod read;

use serde_json::{Value, json};

use super::ask::{End, Said, fragments, pieces};
use super::http_side::{Out, Version};
use super::openai::Object;
use super::refusal::{Checked, Refusal};
use super::{Charged, Endpoint, Shared};

const KNOWN: &str = "max_tokens messages model cache_control container diagnostics inference_geo metadata \
    output_config service_tier speed stop_sequences stream system thinking tool_choice tools user_profile_id \
    workspace_id";
/// Gone with the version of October 2026.
const ONCE_KNOWN: &str = " temperature top_k top_p";
const KNOWN_OF_COUNT: &str = "messages model cache_control output_config speed system thinking tool_choice tools \
    user_profile_id workspace_id";

pub(super) fn answer(server: &Shared, version: Version, body: &Object) -> Checked<Out> {
    read::only(body, &known(KNOWN, version), "")?;
    let model = model(server, body)?;
    let ask = read::request(body, version, true)?;
    let said = ask.say();
    server.charge(Endpoint::Messages, model, said.usage);
    let message = Message {
        id: server.ids.anthropic("msg_"),
        model: model.to_owned(),
        call_ids: said.calls.iter().map(|_| server.ids.anthropic("toolu_")).collect(),
        said,
    };
    Ok(match body.get("stream") {
        Some(Value::Bool(true)) => Out::Events(message.events()),
        None | Some(Value::Bool(false) | Value::Null) => Out::Json(message.whole()),
        Some(_) => return Err(Refusal::bad("stream: Input should be a valid boolean")),
    })
}

pub(super) fn count_tokens(server: &Shared, version: Version, body: &Object) -> Checked<Out> {
    read::only(body, KNOWN_OF_COUNT, "")?;
    let model = model(server, body)?;
    let tokens = read::request(body, version, false)?.input_tokens();
    server.charge(Endpoint::CountTokens, model, Charged { requests: 1, ..Charged::default() });
    Ok(Out::Json(json!({"input_tokens": tokens})))
}

fn known(fields: &str, version: Version) -> String {
    format!("{fields}{}", if version == Version::Old { ONCE_KNOWN } else { "" })
}

fn model<'a>(server: &Shared, body: &'a Object) -> Checked<&'a str> {
    let model = body.get("model").ok_or_else(|| Refusal::bad("model: Field required"))?;
    let model = model.as_str().ok_or_else(|| Refusal::bad("model: Input should be a valid string"))?;
    if server.config.anthropic.iter().any(|one| one == model) {
        Ok(model)
    } else {
        Err(Refusal::new(404, format!("model: {model}")))
    }
}

/// What vouches for a thinking block that comes back.
pub(super) fn signature(thinking: &str) -> String {
    let hash = thinking.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("EqQBCkYIBxgCKkA{hash:016x}EgwAAAAA")
}

struct Message {
    id: String,
    model: String,
    call_ids: Vec<String>,
    said: Said,
}

impl Message {
    fn usage(&self, output: u64) -> Value {
        let mut usage = self.cumulative(output);
        let written = self.said.usage.cache_written;
        usage["cache_creation"] =
            json!({"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0});
        usage["service_tier"] = json!("standard");
        usage
    }

    /// What the end of a stream repeats.
    fn cumulative(&self, output: u64) -> Value {
        let usage = &self.said.usage;
        let mut counts = json!({
            "input_tokens": usage.input - usage.cached - usage.cache_written,
            "cache_creation_input_tokens": usage.cache_written,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": output
        });
        if usage.reasoning > 0 {
            counts["output_tokens_details"] = json!({"thinking_tokens": usage.reasoning.min(output)});
        }
        counts
    }

    fn blocks(&self) -> Vec<Value> {
        let said = &self.said;
        let mut blocks = Vec::new();
        if !said.thinking.is_empty() {
            let signature = signature(&said.thinking);
            blocks.push(json!({"type": "thinking", "thinking": said.thinking, "signature": signature}));
        }
        for (call, id) in said.calls.iter().zip(&self.call_ids) {
            let input: Value = serde_json::from_str(&call.arguments).expect("made as JSON");
            blocks.push(json!({"type": "tool_use", "id": id, "name": call.name, "input": input}));
        }
        if !said.text.is_empty() {
            blocks.push(json!({"type": "text", "text": said.text}));
        }
        blocks
    }

    fn stop(&self) -> (&'static str, Option<&str>) {
        match &self.said.end {
            End::Done => ("end_turn", None),
            End::Stop(sequence) => ("stop_sequence", Some(sequence)),
            End::Length => ("max_tokens", None),
            End::Calls => ("tool_use", None),
        }
    }

    fn whole(&self) -> Value {
        let (reason, sequence) = self.stop();
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": self.blocks(),
            "stop_reason": reason, "stop_sequence": sequence, "usage": self.usage(self.said.usage.output)
        })
    }

    fn events(&self) -> Vec<String> {
        let mut events = Vec::new();
        let mut push = |event: Value| {
            let name = event["type"].as_str().expect("every event has a type");
            events.push(format!("event: {name}\ndata: {event}\n\n"));
        };
        let mut start = self.whole();
        start["content"] = json!([]);
        start["stop_reason"] = Value::Null;
        start["stop_sequence"] = Value::Null;
        // Before it spoke: so small a number is what the real one says here too.
        start["usage"] = self.usage(1);
        push(json!({"type": "message_start", "message": start}));
        for (index, block) in self.blocks().into_iter().enumerate() {
            let (begun, deltas) = in_pieces(&block);
            push(json!({"type": "content_block_start", "index": index, "content_block": begun}));
            if index == 0 {
                push(json!({"type": "ping"}));
            }
            for delta in deltas {
                push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
            }
            push(json!({"type": "content_block_stop", "index": index}));
        }
        let (reason, sequence) = self.stop();
        push(json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self.cumulative(self.said.usage.output)
        }));
        push(json!({"type": "message_stop"}));
        let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
        self.said.die(&mut events, r#""text_delta""#, |_| format!("event: error\ndata: {error}\n\n"));
        events
    }
}

/// A block as it begins, and what is added to it.
fn in_pieces(block: &Value) -> (Value, Vec<Value>) {
    let mut begun = block.clone();
    let text = |name: &str| block[name].as_str().unwrap_or_default().to_owned();
    let deltas = match block["type"].as_str() {
        Some("thinking") => {
            begun["thinking"] = json!("");
            begun["signature"] = json!("");
            let thinking = text("thinking");
            let deltas = pieces(&thinking).map(|piece| json!({"type": "thinking_delta", "thinking": piece}));
            let signed = json!({"type": "signature_delta", "signature": block["signature"]});
            deltas.chain([signed]).collect()
        }
        Some("tool_use") => {
            begun["input"] = json!({});
            let pieces = fragments(&block["input"].to_string());
            let empty = std::iter::once(String::new());
            empty
                .chain(pieces)
                .map(|piece| json!({"type": "input_json_delta", "partial_json": piece}))
                .collect()
        }
        _ => {
            begun["text"] = json!("");
            pieces(&text("text")).map(|piece| json!({"type": "text_delta", "text": piece})).collect()
        }
    };
    (begun, deltas)
}
