//! Instances of JSON schemas, as far as tools and formats need them.

use serde_json::{Map, Value, json};

/// Deeper schemas are answered with null.
const DEPTH: usize = 16;

/// An instance: strings are the text, numbers count its words, booleans are true, arrays have one item; of an object
/// the required properties, or all when none is.
pub(super) fn instance(schema: &Value, text: &str) -> Value {
    sample(schema, schema, text, DEPTH)
}

fn sample(schema: &Value, root: &Value, text: &str, depth: usize) -> Value {
    if depth == 0 {
        return Value::Null;
    }
    let next = |schema: &Value| sample(schema, root, text, depth - 1);
    if let Some(pointer) = schema["$ref"].as_str() {
        return root.pointer(pointer.trim_start_matches('#')).map_or(Value::Null, next);
    }
    if let Some(constant) = schema.get("const") {
        return constant.clone();
    }
    for choices in ["anyOf", "oneOf", "allOf"] {
        if let Some(first) = schema[choices].get(0) {
            return next(first);
        }
    }
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    let kind = schema["type"].as_str().or_else(|| schema["type"].get(0)?.as_str());
    match kind {
        Some("object") => {
            let required = schema["required"].as_array().filter(|names| !names.is_empty());
            let wanted =
                |name: &String| required.is_none_or(|names| names.iter().any(|one| one == name.as_str()));
            let properties = schema["properties"].as_object().into_iter().flatten();
            let object: Map<String, Value> = properties
                .filter(|(name, _)| wanted(name))
                .map(|(name, schema)| (name.clone(), next(schema)))
                .collect();
            Value::Object(object)
        }
        Some("array") => schema.get("items").map_or(json!([]), |items| json!([next(items)])),
        Some("integer" | "number") => json!(super::ask::words(text)),
        Some("boolean") => json!(true),
        Some("null") => Value::Null,
        _ => json!(text),
    }
}

/// Why a strict schema is refused, if it is: every object names all of its properties and allows no others.
pub(super) fn not_strict(schema: &Value) -> Option<&'static str> {
    if schema["type"] == "object" {
        if schema["additionalProperties"] != false {
            return Some("'additionalProperties' is required to be supplied and to be false.");
        }
        let properties = schema["properties"].as_object();
        let required = schema["required"].as_array();
        let all = properties
            .into_iter()
            .flatten()
            .all(|(name, _)| required.is_some_and(|names| names.iter().any(|one| one == name.as_str())));
        if !all {
            return Some(
                "'required' is required to be supplied and to be an array including every key in properties.",
            );
        }
    }
    match schema {
        Value::Object(object) => object.values().find_map(not_strict),
        Value::Array(items) => items.iter().find_map(not_strict),
        _ => None,
    }
}
