//! Embeddings.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::ask::words;
use super::http_side::Out;
use super::openai::{self, Object, given, only};
use super::refusal::{Checked, Refusal};
use super::{Charged, Endpoint, Shared};

/// Numbers of an embedding whose request does not say.
const DIMENSIONS: u64 = 16;

pub(super) fn answer(server: &Shared, body: &Object) -> Checked<Out> {
    only(body, "input model dimensions encoding_format user", "")?;
    let model = openai::model(body, &server.config.embedding)?;
    let dimensions = openai::count(body, "dimensions")?.unwrap_or(DIMENSIONS);
    let base64 = match given(body, "encoding_format").map(|format| format.as_str().unwrap_or_default()) {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => return Err(Refusal::invalid_value("encoding_format", other)),
    };
    let inputs = inputs(given(body, "input").ok_or_else(|| Refusal::missing_parameter("input"))?)?;
    let tokens: u64 = inputs.iter().map(|input| input.tokens).sum();
    let data = inputs.iter().enumerate().map(|(index, input)| {
        let vector = vector(&input.text, dimensions);
        let embedding = if base64 {
            json!(STANDARD.encode(vector.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>()))
        } else {
            json!(vector)
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    });
    let data: Vec<Value> = data.collect();
    server.charge(Endpoint::Embeddings, model, Charged { requests: 1, input: tokens, ..Charged::default() });
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Out::Json(json!({"object": "list", "data": data, "model": model, "usage": usage})))
}

struct Input {
    text: String,
    tokens: u64,
}

/// A text, texts, tokens, or lists of tokens.
fn inputs(input: &Value) -> Checked<Vec<Input>> {
    let refused = || Refusal::bad("'$.input' is invalid.").param("input");
    let one = |input: &Value| match input {
        Value::String(text) if !text.is_empty() => Ok(Input { text: text.clone(), tokens: words(text) }),
        Value::Array(tokens) if !tokens.is_empty() && tokens.iter().all(Value::is_u64) => {
            Ok(Input { text: input.to_string(), tokens: tokens.len() as u64 })
        }
        _ => Err(refused()),
    };
    match input {
        Value::Array(many) if many.is_empty() || many.len() > 2048 => Err(refused()),
        Value::Array(many) if !many[0].is_u64() => many.iter().map(one).collect(),
        single => Ok(vec![one(single)?]),
    }
}

/// Numbers that follow from the text and that both encodings carry exactly.
fn vector(text: &str, dimensions: u64) -> Vec<f32> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut step = |byte: u8| {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        (hash >> 32).to_le_bytes()[0]
    };
    for byte in text.bytes() {
        step(byte);
    }
    (0..dimensions).map(|_| f32::from(step(1)) / 256.0 - 0.5).collect()
}
