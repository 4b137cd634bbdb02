//! What chat completions and responses have in common.

use serde_json::{Map, Value};

use super::ask::{Ask, Choice};
use super::refusal::{Checked, Refusal};
use super::schema;

pub(super) type Object = Map<String, Value>;

/// Refuses fields that the API does not have. `at` is empty or where the object is.
pub(super) fn only(object: &Object, known: &str, at: &str) -> Checked<()> {
    let unknown = object.keys().find(|key| known.split_whitespace().all(|one| one != key.as_str()));
    unknown.map_or(Ok(()), |key| {
        Err(Refusal::unknown_parameter(&if at.is_empty() { key.clone() } else { format!("{at}.{key}") }))
    })
}

/// A field that is there and not null.
pub(super) fn given<'a>(object: &'a Object, name: &str) -> Option<&'a Value> {
    object.get(name).filter(|value| !value.is_null())
}

pub(super) fn flag(object: &Object, name: &str) -> Checked<bool> {
    let value = given(object, name).map(|value| value.as_bool().ok_or(value)).transpose();
    value.map(Option::unwrap_or_default).map_err(|_| Refusal::invalid_type(name, "a boolean"))
}

/// A number of at least one.
pub(super) fn count(object: &Object, name: &str) -> Checked<Option<u64>> {
    let Some(value) = given(object, name) else { return Ok(None) };
    let number = value.as_u64().filter(|&number| number > 0);
    number.map(Some).ok_or_else(|| Refusal::invalid_type(name, "a positive integer"))
}

pub(super) fn array<'a>(object: &'a Object, name: &str) -> Checked<&'a [Value]> {
    let Some(value) = given(object, name) else { return Ok(&[]) };
    value.as_array().map(Vec::as_slice).ok_or_else(|| Refusal::invalid_type(name, "an array"))
}

/// The model, which has to be one of `known`.
pub(super) fn model<'a>(body: &'a Object, known: &[String]) -> Checked<&'a str> {
    let model = given(body, "model").ok_or_else(|| Refusal::missing_parameter("model"))?;
    let model = model.as_str().ok_or_else(|| Refusal::invalid_type("model", "a string"))?;
    if known.iter().any(|one| one == model) { Ok(model) } else { Err(Refusal::unknown_model(model)) }
}

/// `stream`, and `stream_options` only together with it.
pub(super) fn stream(body: &Object, known_options: &str) -> Checked<bool> {
    let stream = flag(body, "stream")?;
    if let Some(options) = given(body, "stream_options") {
        if !stream {
            let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
            return Err(Refusal::bad(message).param("stream_options"));
        }
        let options =
            options.as_object().ok_or_else(|| Refusal::invalid_type("stream_options", "an object"))?;
        only(options, known_options, "stream_options")?;
    }
    Ok(stream)
}

/// The tools; each function lies under `wrapper`, or is the tool itself.
pub(super) fn tools(body: &Object, ask: &mut Ask, wrapper: Option<&str>) -> Checked<()> {
    for (index, tool) in array(body, "tools")?.iter().enumerate() {
        let at = format!("tools[{index}]");
        if tool["type"] != "function" {
            // Chat completions know custom tools, responses those that the provider runs.
            match (tool["type"].as_str(), wrapper) {
                (None, _) => return Err(Refusal::missing_parameter(&format!("{at}.type"))),
                (Some("custom"), Some(_)) | (Some(_), None) => ask.foreign_tool(),
                (Some(kind), Some(_)) => return Err(Refusal::invalid_value(&format!("{at}.type"), kind)),
            }
            continue;
        }
        let (function, at) = match wrapper {
            Some(wrapper) => (&tool[wrapper], format!("{at}.{wrapper}")),
            None => (tool, at),
        };
        let function = function.as_object().ok_or_else(|| Refusal::missing_parameter(&at))?;
        let known = match wrapper {
            Some(_) => "name description parameters strict",
            None => {
                "type name description parameters strict defer_loading allowed_callers async output_schema"
            }
        };
        only(function, known, &at)?;
        let name = given(function, "name").and_then(Value::as_str);
        let name = name.ok_or_else(|| Refusal::missing_parameter(&format!("{at}.name")))?;
        if !is_name(name, 64) {
            return Err(Refusal::invalid_value(&format!("{at}.name"), name));
        }
        let parameters = function.get("parameters").unwrap_or(&Value::Null);
        if function.get("strict") == Some(&Value::Bool(true))
            && let Some(why) = schema::not_strict(parameters)
        {
            let message = format!("Invalid schema for function '{name}': In context=(), {why}");
            return Err(Refusal::bad(message)
                .param(format!("{at}.parameters"))
                .code("invalid_function_parameters"));
        }
        ask.tool(name, parameters);
    }
    Ok(())
}

pub(super) fn is_name(name: &str, longest: usize) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    (1..=longest).contains(&name.len()) && name.bytes().all(allowed)
}

/// The tool choice; the chosen function's name lies under `wrapper`, or is in the choice itself.
pub(super) fn choice(body: &Object, ask: &mut Ask, wrapper: Option<&str>) -> Checked<()> {
    let Some(choice) = given(body, "tool_choice") else { return Ok(()) };
    if array(body, "tools")?.is_empty() && *choice != "none" {
        let message = "'tool_choice' is only allowed when 'tools' are specified.";
        return Err(Refusal::bad(message).param("tool_choice"));
    }
    ask.choice = match choice.as_str() {
        Some("auto") => Choice::Auto,
        Some("none") => Choice::No,
        Some("required") => Choice::Must,
        Some(other) => return Err(Refusal::invalid_value("tool_choice", other)),
        None => {
            let function = wrapper.map_or(choice, |wrapper| &choice[wrapper]);
            match (choice["type"].as_str(), function["name"].as_str()) {
                (Some("function"), Some(name)) if ask.tools.iter().any(|tool| tool.name == name) => {
                    Choice::Named(name.to_owned())
                }
                (Some("function"), Some(name)) => {
                    let message = format!("Tool choice 'function' '{name}' not found in 'tools' parameter.");
                    return Err(Refusal::bad(message).param("tool_choice"));
                }
                (Some("function"), None) => return Err(Refusal::missing_parameter("tool_choice.name")),
                // Such as allowed tools, or tools that the provider runs.
                (Some(_), _) => Choice::Auto,
                (None, _) => return Err(Refusal::invalid_type("tool_choice", "a string or an object")),
            }
        }
    };
    Ok(())
}

/// The format of the answer: `{"type":"json_schema",…}` with name and schema under `wrapper`, or beside the type.
pub(super) fn format(format: &Value, name: &str, ask: &mut Ask, wrapper: Option<&str>) -> Checked<()> {
    match format["type"].as_str() {
        Some("text") => {}
        Some("json_object") => {
            ask.format =
                Some(serde_json::json!({"type": "object", "properties": {"answer": {"type": "string"}}}));
        }
        Some("json_schema") => {
            let (described, at) = match wrapper {
                Some(wrapper) => (&format[wrapper], format!("{name}.{wrapper}")),
                None => (format, name.to_owned()),
            };
            for field in ["name", "schema"] {
                if described[field].is_null() {
                    return Err(Refusal::missing_parameter(&format!("{at}.{field}")));
                }
            }
            let schema = &described["schema"];
            if described["strict"] == true
                && let Some(why) = schema::not_strict(schema)
            {
                let named = described["name"].as_str().unwrap_or_default();
                let message = format!("Invalid schema for response_format '{named}': In context=(), {why}");
                return Err(Refusal::bad(message).param(name));
            }
            ask.format = Some(schema.clone());
        }
        Some(other) => return Err(Refusal::invalid_value(&format!("{name}.type"), other)),
        None => return Err(Refusal::missing_parameter(&format!("{name}.type"))),
    }
    Ok(())
}
