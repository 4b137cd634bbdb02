//! Requests: messages to chat completions.

use serde::Serialize;
use serde_json::value::RawValue;

use super::object::{
    Object, Path, Refused, boolean, is_string, items, literal, number, refused, text, whole,
};
use super::wire::{
    ChatCall, ChatContent, ChatFunction, ChatMessage, ImageAt, ImageUrl, Part, Quoted, is_false, to_bytes,
};
use super::{Dialect, RequestError, Translated};

const TARGET: Dialect = Dialect::Chat;

/// Members of the body that are refused, and what is said of them.
const REFUSED: &[Refused] = &[
    refused("container", &[], "it has no containers"),
    refused("context_management", &[], "it does not edit a context"),
    refused("inference_geo", &[], "it has no such setting"),
    refused("mcp_servers", &["[]"], "it calls no MCP servers by itself"),
    refused("output_format", &[], "its formats are others"),
    refused("service_tier", &[r#""auto""#], "its tiers are others"),
    refused("thinking", &[r#"{"type":"disabled"}"#], "thoughts cannot be carried back"),
    refused("top_k", &[], "it has no such setting"),
];

/// Members of `output_config` that are refused.
const OF_OUTPUT: &[Refused] = &[refused("effort", &[], "its efforts are others")];
/// Members of blocks and tools that are refused unless they say nothing.
const OF_BLOCKS: &[Refused] = &[
    refused("caller", &[r#"{"type":"direct"}"#], "only the model calls tools"),
    refused("citations", &["[]"], "it has no citations"),
];
const OF_TOOLS: &[Refused] = &[
    refused("allowed_callers", &[r#"["direct"]"#], "only the model calls tools"),
    refused("defer_loading", &["false"], "it loads all tools"),
    refused("input_examples", &["[]"], "it takes no examples; put them into the description"),
];

/// How a chat provider is told the limit of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenLimit {
    /// `max_completion_tokens`: what OpenAI's newer models demand.
    #[default]
    MaxCompletionTokens,
    /// `max_tokens`: what many compatible providers know only.
    MaxTokens,
}

/// How a request of the messages dialect becomes a chat request.
#[derive(Debug, Clone, Copy)]
pub struct ToChat<'a> {
    /// The model's name at its provider.
    pub model: &'a str,
    /// How the provider is told the limit.
    pub limit: TokenLimit,
    /// The provider takes `stream_options.include_usage`. Streams of the messages dialect always tell their usage.
    pub stream_usage: bool,
}

#[derive(Serialize)]
struct Request<'a> {
    model: &'a str,
    messages: Vec<ChatMessage<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<Choice<'a>>,
    /// Written when it is not the default, true.
    #[serde(skip_serializing_if = "Option::is_none")]
    parallel_tool_calls: Option<bool>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stop: Vec<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<ResponseFormat<'a>>,
    #[serde(skip_serializing_if = "is_false")]
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
struct ResponseFormat<'a> {
    r#type: &'static str,
    json_schema: NamedSchema<'a>,
}

#[derive(Serialize)]
struct NamedSchema<'a> {
    name: &'static str,
    schema: &'a RawValue,
    strict: bool,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
struct Tool<'a> {
    r#type: &'static str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a RawValue>,
    parameters: &'a RawValue,
    #[serde(skip_serializing_if = "is_false")]
    strict: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Choice<'a> {
    Word(&'static str),
    Tool { r#type: &'static str, function: Named<'a> },
}

#[derive(Serialize)]
struct Named<'a> {
    name: &'a RawValue,
}

/// Puts a request of the messages dialect into the chat dialect.
///
/// # Errors
/// When the body is no such request, or asks for something that the chat dialect cannot say.
pub fn messages_to_chat(body: &[u8], to: &ToChat<'_>) -> Result<Translated, RequestError> {
    let root = Path::Body;
    let mut request = Object::of_body(body)?;
    request.word("model", root)?;
    // Steers a cache and changes no answer.
    request.take("cache_control");
    let max_tokens = Some(whole(request.need("max_tokens", root)?, root.member("max_tokens"))?);
    let (max_completion_tokens, max_tokens) = match to.limit {
        TokenLimit::MaxCompletionTokens => (max_tokens, None),
        TokenLimit::MaxTokens => (None, max_tokens),
    };
    let mut messages = Vec::new();
    if let Some(system) = request.take("system") {
        messages.extend(
            said(texts(system, root.member("system"))?).map(|content| ChatMessage::System { content }),
        );
    }
    conversation(request.need("messages", root)?, root.member("messages"), &mut messages)?;
    let tools = tools(request.take("tools"), root.member("tools"))?;
    let (tool_choice, parallel_tool_calls) =
        choice(request.take("tool_choice"), root.member("tool_choice"), !tools.is_empty())?;
    let stream = request.take("stream").map(|raw| boolean(raw, root.member("stream"))).transpose()?;
    let stream = stream.unwrap_or(false);
    let translated = Request {
        model: to.model,
        messages,
        max_completion_tokens,
        max_tokens,
        tools,
        tool_choice,
        parallel_tool_calls,
        stop: stop(request.take("stop_sequences"), root.member("stop_sequences"))?,
        temperature: request
            .take("temperature")
            .map(|raw| number(raw, root.member("temperature")))
            .transpose()?,
        top_p: request.take("top_p").map(|raw| number(raw, root.member("top_p"))).transpose()?,
        user: user(request.take("metadata"), root.member("metadata"))?,
        response_format: format(request.take("output_config"), root.member("output_config"))?,
        stream,
        stream_options: (stream && to.stream_usage).then_some(StreamOptions { include_usage: true }),
    };
    request.end(root, TARGET, REFUSED)?;
    Ok(Translated { body: to_bytes(&translated), stream, include_usage: stream })
}

fn stop<'a>(raw: Option<&'a RawValue>, path: Path<'_>) -> Result<Vec<&'a RawValue>, RequestError> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    let stops = items(raw, path)?;
    for (index, stop) in stops.iter().enumerate() {
        literal(stop, path.item(index))?;
    }
    Ok(stops)
}

/// The one format that both dialects have.
fn format<'a>(raw: Option<&'a RawValue>, path: Path<'_>) -> Result<Option<ResponseFormat<'a>>, RequestError> {
    let Some(raw) = raw else { return Ok(None) };
    let mut config = Object::of(raw, path)?;
    let format = config.take("format");
    config.end(path, TARGET, OF_OUTPUT)?;
    let here = path.member("format");
    let Some(raw) = format else { return Ok(None) };
    let mut format = Object::of(raw, here)?;
    let kind = text(format.need("type", here)?, here.member("type"))?;
    if kind != "json_schema" {
        return Err(here.refused(TARGET, format!("it has no format `{kind}` with a schema")));
    }
    let schema = format.need("schema", here)?;
    format.end(here, TARGET, &[])?;
    // The chat dialect wants a name; nobody reads it. Both are strict.
    let json_schema = NamedSchema { name: "answer", schema, strict: true };
    Ok(Some(ResponseFormat { r#type: "json_schema", json_schema }))
}

fn user<'a>(raw: Option<&'a RawValue>, path: Path<'_>) -> Result<Option<&'a RawValue>, RequestError> {
    let Some(raw) = raw else { return Ok(None) };
    let mut metadata = Object::of(raw, path)?;
    let user = metadata.take("user_id");
    metadata.end(path, TARGET, &[])?;
    user.map(|raw| literal(raw, path.member("user_id"))).transpose()
}

fn tools<'a>(raw: Option<&'a RawValue>, path: Path<'_>) -> Result<Vec<Tool<'a>>, RequestError> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    let tools = items(raw, path)?.into_iter().enumerate();
    tools.map(|(index, raw)| tool(raw, path.item(index))).collect()
}

fn tool<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Tool<'a>, RequestError> {
    let mut tool = Object::of(raw, path)?;
    if let Some(raw) = tool.take("type") {
        let path = path.member("type");
        let kind = text(raw, path)?;
        if kind != "custom" {
            return Err(path.refused(TARGET, format!("`{kind}` is a tool of Anthropic's servers")));
        }
    }
    let name = literal(tool.need("name", path)?, path.member("name"))?;
    let description = tool.take("description");
    let description = description.map(|raw| literal(raw, path.member("description"))).transpose()?;
    let parameters = tool.need("input_schema", path)?;
    let strict = tool.take("strict").map(|raw| boolean(raw, path.member("strict"))).transpose()?;
    tool.take("cache_control");
    // How soon fragments of arguments are sent. Chat providers send them as they come.
    tool.take("eager_input_streaming");
    tool.end(path, TARGET, OF_TOOLS)?;
    let function = Function { name, description, parameters, strict: strict.unwrap_or(false) };
    Ok(Tool { r#type: "function", function })
}

fn choice<'a>(
    raw: Option<&'a RawValue>,
    path: Path<'_>,
    has_tools: bool,
) -> Result<(Option<Choice<'a>>, Option<bool>), RequestError> {
    let Some(raw) = raw else { return Ok((None, None)) };
    let mut choice = Object::of(raw, path)?;
    let kind = choice.word("type", path)?;
    let word = match kind.as_ref() {
        // What happens anyway.
        "auto" => None,
        // The dialect refuses a choice where there are no tools.
        "none" => has_tools.then_some(Choice::Word("none")),
        "any" => Some(Choice::Word("required")),
        "tool" => {
            let name = literal(choice.need("name", path)?, path.member("name"))?;
            Some(Choice::Tool { r#type: "function", function: Named { name } })
        }
        other => {
            return Err(path.member("type").refused(TARGET, format!("`{other}` is none of its choices")));
        }
    };
    let one_by_one = choice.take("disable_parallel_tool_use");
    let one_by_one =
        one_by_one.map(|raw| boolean(raw, path.member("disable_parallel_tool_use"))).transpose()?;
    choice.end(path, TARGET, &[])?;
    let parallel = (has_tools && kind != "none" && one_by_one == Some(true)).then_some(false);
    Ok((word, parallel))
}

fn conversation<'a>(
    raw: &'a RawValue,
    path: Path<'_>,
    messages: &mut Vec<ChatMessage<'a>>,
) -> Result<(), RequestError> {
    for (index, raw) in items(raw, path)?.into_iter().enumerate() {
        let path = path.item(index);
        let mut message = Object::of(raw, path)?;
        let role = message.word("role", path)?;
        let content = message.need("content", path)?;
        message.end(path, TARGET, &[])?;
        let here = path.member("content");
        match role.as_ref() {
            "user" => user_turn(content, here, messages)?,
            "assistant" => assistant_turn(content, here, messages)?,
            "system" => {
                let content = said(texts(content, here)?);
                messages.extend(content.map(|content| ChatMessage::System { content }));
            }
            other => {
                return Err(path.member("role").refused(TARGET, format!("`{other}` is none of its roles")));
            }
        }
    }
    Ok(())
}

/// Content of some parts; nothing for none, which the dialect refuses.
fn said(parts: Vec<Part<'_>>) -> Option<ChatContent<'_>> {
    (!parts.is_empty()).then_some(ChatContent::Parts(parts))
}

fn user_turn<'a>(
    raw: &'a RawValue,
    path: Path<'_>,
    messages: &mut Vec<ChatMessage<'a>>,
) -> Result<(), RequestError> {
    let mut parts = Vec::new();
    blocks(raw, path, |kind, block, path| {
        match kind {
            "text" => parts.push(text_part(block, path)?),
            "image" => parts.push(image(block, path)?),
            // Before the texts of its turn, wherever it stands: the dialect wants results right after their calls.
            "tool_result" => messages.push(result(block, path)?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    messages.extend(said(parts).map(|content| ChatMessage::User { content }));
    Ok(())
}

fn assistant_turn<'a>(
    raw: &'a RawValue,
    path: Path<'_>,
    messages: &mut Vec<ChatMessage<'a>>,
) -> Result<(), RequestError> {
    let (mut parts, mut tool_calls) = (Vec::new(), Vec::new());
    blocks(raw, path, |kind, block, path| {
        match kind {
            "text" => parts.push(text_part(block, path)?),
            "tool_use" => tool_calls.push(call(block, path)?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let content = said(parts);
    if content.is_some() || !tool_calls.is_empty() {
        messages.push(ChatMessage::Assistant { content, tool_calls });
    }
    Ok(())
}

/// Calls `each` with the type of every block; it says whether it knows that type. A string is one text block.
fn blocks<'a>(
    raw: &'a RawValue,
    path: Path<'_>,
    mut each: impl FnMut(&str, &mut Object<'a>, Path<'_>) -> Result<bool, RequestError>,
) -> Result<(), RequestError> {
    if is_string(raw) {
        each("text", &mut Object::single("text", raw), path)?;
        return Ok(());
    }
    let items = items(raw, path).map_err(|_| path.wrong("a string or an array of blocks"))?;
    for (index, raw) in items.into_iter().enumerate() {
        let path = path.item(index);
        let mut block = Object::of(raw, path)?;
        // Steers a cache and changes no answer.
        block.take("cache_control");
        let kind = block.word("type", path)?;
        if !each(&kind, &mut block, path)? {
            let why = match kind.as_ref() {
                "thinking" | "redacted_thinking" => "thoughts of another model cannot be continued".into(),
                _ => format!("a block of type `{kind}` has no place there"),
            };
            return Err(path.member("type").refused(TARGET, why));
        }
        block.end(path, TARGET, OF_BLOCKS)?;
    }
    Ok(())
}

fn texts<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Vec<Part<'a>>, RequestError> {
    let mut parts = Vec::new();
    blocks(raw, path, |kind, block, path| {
        if kind == "text" {
            parts.push(text_part(block, path)?);
        }
        Ok(kind == "text")
    })?;
    Ok(parts)
}

fn text_part<'a>(block: &mut Object<'a>, path: Path<'_>) -> Result<Part<'a>, RequestError> {
    Ok(Part::Text { text: literal(block.need("text", path)?, path.member("text"))? })
}

fn image<'a>(block: &mut Object<'a>, path: Path<'_>) -> Result<Part<'a>, RequestError> {
    let here = path.member("source");
    let mut source = Object::of(block.need("source", path)?, here)?;
    let url = match source.word("type", here)?.as_ref() {
        "url" => ImageAt::Url(literal(source.need("url", here)?, here.member("url"))?),
        "base64" => {
            let media_type = source.word("media_type", here)?;
            ImageAt::Data { media_type, data: source.word("data", here)? }
        }
        other => {
            let why = format!("a source of type `{other}` is known to Anthropic only");
            return Err(here.member("type").refused(TARGET, why));
        }
    };
    source.end(here, TARGET, &[])?;
    Ok(Part::ImageUrl { image_url: ImageUrl { url } })
}

/// A failed call is told in words: without them the model would take the message of an error for a result.
fn result<'a>(block: &mut Object<'a>, path: Path<'_>) -> Result<ChatMessage<'a>, RequestError> {
    let id = block.need("tool_use_id", path)?;
    let tool_call_id = literal(id, path.member("tool_use_id"))?;
    let failed = block.take("is_error").map(|raw| boolean(raw, path.member("is_error"))).transpose()?;
    let here = path.member("content");
    let content = match (block.take("content"), failed.unwrap_or(false)) {
        (None, false) => ChatContent::Said(String::new()),
        (None, true) => ChatContent::Said("Error".to_owned()),
        (Some(raw), true) if is_string(raw) => ChatContent::Said(format!("Error: {}", text(raw, here)?)),
        (Some(raw), failed) => {
            let mut parts = texts(raw, here)?;
            if failed {
                parts.insert(0, Part::Said { text: "Error: " });
            }
            said(parts).unwrap_or(ChatContent::Said(String::new()))
        }
    };
    Ok(ChatMessage::Tool { tool_call_id, content })
}

fn call<'a>(block: &mut Object<'a>, path: Path<'_>) -> Result<ChatCall<'a>, RequestError> {
    let id = literal(block.need("id", path)?, path.member("id"))?;
    let name = literal(block.need("name", path)?, path.member("name"))?;
    let input = block.need("input", path)?;
    if !input.get().starts_with('{') {
        return Err(path.member("input").wrong("an object"));
    }
    Ok(ChatCall { id, r#type: "function", function: ChatFunction { name, arguments: Quoted(input) } })
}
