//! Requests: chat completions to messages.

use std::borrow::Cow;
use std::num::NonZeroU32;

use serde::Serialize;
use serde_json::value::RawValue;

use super::object::{
    Object, Path, Refused, arguments_object, boolean, items, literal, number, refused, text, whole,
};
use super::wire::{Block, EMPTY_OBJECT, Json, Role, Source, Texts, Turn, is_false, to_bytes};
use super::{Dialect, RequestError, Translated};

const TARGET: Dialect = Dialect::Messages;

/// Members of the body that are refused, and what is said of them.
const REFUSED: &[Refused] = &[
    refused("audio", &[], "it has no sound"),
    refused("frequency_penalty", &["0", "0.0"], "it has no penalties"),
    refused("function_call", &[], "it is deprecated; use `tool_choice`"),
    refused("functions", &["[]"], "they are deprecated; use `tools`"),
    refused("logit_bias", &["{}"], "it has no biases"),
    refused("logprobs", &["false"], "it tells no probabilities"),
    refused("metadata", &["{}"], "it has no tags; `user` is carried"),
    refused("modalities", &[r#"["text"]"#], "it answers in text only"),
    refused("n", &["1"], "it gives one answer; send the request several times"),
    refused("prediction", &[], "it takes no predicted output"),
    refused("presence_penalty", &["0", "0.0"], "it has no penalties"),
    refused("prompt_cache_retention", &[r#""in_memory""#], "its caches have other lifetimes"),
    refused("reasoning_effort", &[], "its thinking is set in other terms"),
    refused("seed", &[], "it has no seeds"),
    refused("service_tier", &[r#""auto""#], "its tiers are others"),
    refused("store", &["false"], "it stores no answers"),
    refused("top_logprobs", &["0"], "it tells no probabilities"),
    refused("verbosity", &[r#""medium""#], "it has no such setting"),
    refused("web_search_options", &[], "its search is another"),
];

/// Members of messages that are refused unless they say nothing.
const OF_MESSAGES: &[Refused] = &[
    refused("annotations", &["[]"], "its citations are others"),
    refused("audio", &[], "it has no sound"),
    refused("function_call", &[], "it is deprecated; use `tool_calls`"),
    refused("name", &[], "its messages have no names; put the name into the text"),
    refused("reasoning", &[r#""""#], "thoughts of another model cannot be continued"),
    refused("reasoning_content", &[r#""""#], "thoughts of another model cannot be continued"),
];

/// How a chat request becomes one of the messages dialect.
#[derive(Debug, Clone, Copy)]
pub struct ToMessages<'a> {
    /// The model's name at its provider.
    pub model: &'a str,
    /// How long an answer may become when the request does not say: the dialect demands a number.
    pub max_tokens: NonZeroU32,
    /// The model takes system messages in the middle of a conversation. Older ones do not, and moving such a message
    /// to the beginning would change what it means; then it is refused.
    pub system_turns: bool,
}

#[derive(Serialize)]
struct Request<'a> {
    model: &'a str,
    max_tokens: Limit<'a>,
    #[serde(skip_serializing_if = "Texts::is_empty")]
    system: Texts<'a>,
    messages: Vec<Turn<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<Choice<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stop_sequences: Vec<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Metadata<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<OutputConfig<'a>>,
    #[serde(skip_serializing_if = "is_false")]
    stream: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Limit<'a> {
    Asked(&'a RawValue),
    Default(NonZeroU32),
}

#[derive(Serialize)]
struct OutputConfig<'a> {
    format: Format<'a>,
}

#[derive(Serialize)]
struct Format<'a> {
    r#type: &'static str,
    schema: &'a RawValue,
}

#[derive(Serialize)]
struct Metadata<'a> {
    user_id: &'a RawValue,
}

#[derive(Serialize)]
struct Tool<'a> {
    name: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a RawValue>,
    input_schema: Schema<'a>,
    #[serde(skip_serializing_if = "is_false")]
    strict: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Schema<'a> {
    Given(&'a RawValue),
    /// The chat dialect may leave it out for a function without parameters.
    Nothing {
        r#type: &'static str,
        properties: serde_json::Map<String, serde_json::Value>,
    },
}

#[derive(Serialize)]
struct Choice<'a> {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "is_false")]
    disable_parallel_tool_use: bool,
}

/// Puts a chat request into the messages dialect.
///
/// # Errors
/// When the body is no chat request, or asks for something that the messages dialect cannot say.
pub fn chat_to_messages(body: &[u8], to: &ToMessages<'_>) -> Result<Translated, RequestError> {
    let root = Path::Body;
    let mut request = Object::of_body(body)?;
    request.word("model", root)?;
    // Steers a cache and changes no answer.
    request.take("prompt_cache_key");
    let (system, messages) = conversation(request.need("messages", root)?, to.system_turns)?;
    let tools = tools(request.take("tools"), root.member("tools"))?;
    let tool_choice = choice(&mut request, !tools.is_empty())?;
    let translated = Request {
        model: to.model,
        max_tokens: limit(&mut request, to.max_tokens)?,
        system,
        messages,
        tools,
        tool_choice,
        stop_sequences: stop(request.take("stop"), root.member("stop"))?,
        temperature: temperature(request.take("temperature"), root.member("temperature"))?,
        top_p: request.take("top_p").map(|raw| number(raw, root.member("top_p"))).transpose()?,
        metadata: user(&mut request)?,
        output_config: format(&mut request)?,
        stream: request
            .take("stream")
            .map(|raw| boolean(raw, root.member("stream")))
            .transpose()?
            .unwrap_or(false),
    };
    let include_usage = include_usage(request.take("stream_options"), root.member("stream_options"))?;
    request.end(root, TARGET, REFUSED)?;
    let stream = translated.stream;
    Ok(Translated { body: to_bytes(&translated), stream, include_usage })
}

fn limit<'a>(request: &mut Object<'a>, default: NonZeroU32) -> Result<Limit<'a>, RequestError> {
    let (new, old) = (request.take("max_completion_tokens"), request.take("max_tokens"));
    let path = Path::Member(&Path::Body, "max_tokens");
    if let (Some(new), Some(old)) = (new, old)
        && new.get() != old.get()
    {
        return Err(path.refused(TARGET, "`max_completion_tokens` gives another limit"));
    }
    let path = if new.is_some() { Path::Member(&Path::Body, "max_completion_tokens") } else { path };
    Ok(match new.or(old) {
        Some(asked) => Limit::Asked(whole(asked, path)?),
        None => Limit::Default(default),
    })
}

/// The one format that both dialects have. Its name, its description and whether it is strict are not carried: the
/// messages dialect has no names for schemas, and is always strict.
fn format<'a>(request: &mut Object<'a>) -> Result<Option<OutputConfig<'a>>, RequestError> {
    let path = Path::Member(&Path::Body, "response_format");
    let Some(raw) = request.take("response_format") else { return Ok(None) };
    let mut format = Object::of(raw, path)?;
    match text(format.need("type", path)?, path.member("type"))?.as_ref() {
        "text" => {
            format.end(path, TARGET, &[])?;
            return Ok(None);
        }
        "json_schema" => {}
        other => return Err(path.refused(TARGET, format!("it has no format `{other}`, only `json_schema`"))),
    }
    let here = path.member("json_schema");
    let mut named = Object::of(format.need("json_schema", path)?, here)?;
    format.end(path, TARGET, &[])?;
    for label in ["name", "description", "strict"] {
        named.take(label);
    }
    let schema = named.need("schema", here)?;
    named.end(here, TARGET, &[])?;
    Ok(Some(OutputConfig { format: Format { r#type: "json_schema", schema } }))
}

/// Both members name an end user for the detection of abuse, as `user_id` does.
fn user<'a>(request: &mut Object<'a>) -> Result<Option<Metadata<'a>>, RequestError> {
    let (new, old) = (request.take("safety_identifier"), request.take("user"));
    let user = Path::Member(&Path::Body, "user");
    if let (Some(new), Some(old)) = (new, old)
        && new.get() != old.get()
    {
        return Err(user.refused(TARGET, "`safety_identifier` names another"));
    }
    let path = if new.is_some() { Path::Member(&Path::Body, "safety_identifier") } else { user };
    new.or(old).map(|raw| Ok(Metadata { user_id: literal(raw, path)? })).transpose()
}

fn temperature<'a>(raw: Option<&'a RawValue>, path: Path<'_>) -> Result<Option<&'a RawValue>, RequestError> {
    let Some(raw) = raw else { return Ok(None) };
    if number(raw, path)?.get().parse::<f64>().is_ok_and(|temperature| temperature > 1.0) {
        return Err(path.refused(TARGET, "its range ends at 1"));
    }
    Ok(Some(raw))
}

fn stop<'a>(raw: Option<&'a RawValue>, path: Path<'_>) -> Result<Vec<&'a RawValue>, RequestError> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    if raw.get().starts_with('"') {
        return Ok(vec![raw]);
    }
    let stops = items(raw, path).map_err(|_| path.wrong("a string or an array of strings"))?;
    for (index, stop) in stops.iter().enumerate() {
        literal(stop, path.item(index))?;
    }
    Ok(stops)
}

fn include_usage(raw: Option<&RawValue>, path: Path<'_>) -> Result<bool, RequestError> {
    let Some(raw) = raw else { return Ok(false) };
    let mut options = Object::of(raw, path)?;
    // Padding against eavesdroppers on the size of events. Translated events have other sizes anyway.
    options.take("include_obfuscation");
    let asked = options.take("include_usage");
    options.end(path, TARGET, &[])?;
    asked.map_or(Ok(false), |raw| boolean(raw, path.member("include_usage")))
}

fn tools<'a>(raw: Option<&'a RawValue>, path: Path<'_>) -> Result<Vec<Tool<'a>>, RequestError> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    let tools = items(raw, path)?.into_iter().enumerate();
    tools.map(|(index, raw)| tool(raw, path.item(index))).collect()
}

fn tool<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Tool<'a>, RequestError> {
    let mut tool = Object::of(raw, path)?;
    only_functions(&mut tool, path)?;
    let here = path.member("function");
    let mut function = Object::of(tool.need("function", path)?, here)?;
    tool.end(path, TARGET, &[])?;
    let name = literal(function.need("name", here)?, here.member("name"))?;
    let description = function.take("description");
    let description = description.map(|raw| literal(raw, here.member("description"))).transpose()?;
    let input_schema = match function.take("parameters") {
        Some(given) if given.get() != EMPTY_OBJECT => Schema::Given(given),
        _ => Schema::Nothing { r#type: "object", properties: serde_json::Map::new() },
    };
    let strict = function.take("strict").map(|raw| boolean(raw, here.member("strict"))).transpose()?;
    function.end(here, TARGET, &[])?;
    Ok(Tool { name, description, input_schema, strict: strict.unwrap_or(false) })
}

/// Tools and their calls are functions when they do not say otherwise.
fn only_functions(object: &mut Object<'_>, path: Path<'_>) -> Result<(), RequestError> {
    let Some(raw) = object.take("type") else { return Ok(()) };
    let path = path.member("type");
    match text(raw, path)?.as_ref() {
        "function" => Ok(()),
        other => Err(path.refused(TARGET, format!("`{other}` is none of its tools; use `function`"))),
    }
}

fn choice<'a>(request: &mut Object<'a>, has_tools: bool) -> Result<Option<Choice<'a>>, RequestError> {
    let path = Path::Member(&Path::Body, "tool_choice");
    let parallel = request.take("parallel_tool_calls");
    let parallel_at = Path::Member(&Path::Body, "parallel_tool_calls");
    let one_by_one = parallel.map(|raw| boolean(raw, parallel_at)).transpose()? == Some(false);
    let (r#type, name) = match request.take("tool_choice") {
        None => ("auto", None),
        Some(raw) if raw.get().starts_with('"') => match text(raw, path)?.as_ref() {
            "none" => ("none", None),
            "auto" => ("auto", None),
            "required" => ("any", None),
            other => return Err(path.refused(TARGET, format!("`{other}` is none of its choices"))),
        },
        Some(raw) => {
            let mut choice = Object::of(raw, path)?;
            only_functions(&mut choice, path)?;
            let here = path.member("function");
            let mut function = Object::of(choice.need("function", path)?, here)?;
            choice.end(path, TARGET, &[])?;
            let name = literal(function.need("name", here)?, here.member("name"))?;
            function.end(here, TARGET, &[])?;
            ("tool", Some(name))
        }
    };
    // Without tools there is nothing to choose, and `auto` is what happens anyway; `none` cannot call in parallel.
    let says_nothing = match r#type {
        "none" => !has_tools,
        "auto" => !has_tools || !one_by_one,
        _ => false,
    };
    let disable_parallel_tool_use = one_by_one && r#type != "none";
    Ok((!says_nothing).then_some(Choice { r#type, name, disable_parallel_tool_use }))
}

fn conversation(raw: &RawValue, system_turns: bool) -> Result<(Texts<'_>, Vec<Turn<'_>>), RequestError> {
    let path = Path::Member(&Path::Body, "messages");
    let (mut system, mut turns) = (Texts::default(), Turns::default());
    for (index, raw) in items(raw, path)?.into_iter().enumerate() {
        let path = path.item(index);
        let mut message = Object::of(raw, path)?;
        match message.word("role", path)?.as_ref() {
            "system" | "developer" => {
                let texts = texts(message.need("content", path)?, path.member("content"))?;
                if turns.is_empty() {
                    system.0.extend(texts);
                } else if system_turns {
                    turns.add(Role::System, texts.into_iter().map(|text| Block::Text { text }).collect());
                } else {
                    let why = "the model takes system messages at the beginning only";
                    return Err(path.member("role").refused(TARGET, why));
                }
            }
            "user" => {
                let content = message.need("content", path)?;
                turns.add(Role::User, user_blocks(content, path.member("content"))?);
            }
            "assistant" => turns.add(Role::Assistant, assistant_blocks(&mut message, path)?),
            "tool" => {
                let id = message.need("tool_call_id", path)?;
                let tool_use_id = literal(id, path.member("tool_call_id"))?;
                let content = Texts(texts(message.need("content", path)?, path.member("content"))?);
                turns.of(Role::User).results.push(Block::ToolResult { tool_use_id, content });
            }
            other => {
                return Err(path.member("role").refused(TARGET, format!("`{other}` is none of its roles")));
            }
        }
        message.end(path, TARGET, OF_MESSAGES)?;
    }
    if turns.is_empty() {
        return Err(path.wrong("an array with a message that is not empty and not of the system"));
    }
    Ok((system, turns.end()))
}

/// Turns of one speaker are one turn: the dialect would join them itself, and results of parallel calls have to stand
/// together.
#[derive(Default)]
struct Turns<'a> {
    done: Vec<Turn<'a>>,
    current: Option<Turn<'a>>,
}

impl<'a> Turns<'a> {
    fn add(&mut self, role: Role, blocks: Vec<Block<'a>>) {
        if !blocks.is_empty() {
            self.of(role).blocks.extend(blocks);
        }
    }

    fn of(&mut self, role: Role) -> &mut Turn<'a> {
        self.done.extend(self.current.take_if(|turn| turn.role != role));
        self.current.get_or_insert_with(|| Turn { role, results: Vec::new(), blocks: Vec::new() })
    }

    fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    fn end(mut self) -> Vec<Turn<'a>> {
        self.done.extend(self.current);
        self.done
    }
}

/// The texts of a string or of an array of text parts, without empty ones.
fn texts<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Vec<&'a RawValue>, RequestError> {
    let mut texts = Vec::new();
    parts(raw, path, |kind, part, path| {
        if kind != "text" {
            return Ok(false);
        }
        texts.push(literal(part.need("text", path)?, path.member("text"))?);
        Ok(true)
    })?;
    texts.retain(|text| text.get() != r#""""#);
    Ok(texts)
}

fn user_blocks<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Vec<Block<'a>>, RequestError> {
    let mut blocks = Vec::new();
    parts(raw, path, |kind, part, path| {
        match kind {
            "text" => {
                let text = literal(part.need("text", path)?, path.member("text"))?;
                if text.get() != r#""""# {
                    blocks.push(Block::Text { text });
                }
            }
            "image_url" => {
                let raw = part.need("image_url", path)?;
                blocks.push(Block::Image { source: image(raw, path.member("image_url"))? });
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    Ok(blocks)
}

fn assistant_blocks<'a>(message: &mut Object<'a>, path: Path<'_>) -> Result<Vec<Block<'a>>, RequestError> {
    let mut said = Vec::new();
    if let Some(content) = message.take("content") {
        parts(content, path.member("content"), |kind, part, path| {
            let name = match kind {
                "text" => "text",
                // What it said, too.
                "refusal" => "refusal",
                _ => return Ok(false),
            };
            said.push(literal(part.need(name, path)?, path.member(name))?);
            Ok(true)
        })?;
    }
    if let Some(refusal) = message.take("refusal") {
        said.push(literal(refusal, path.member("refusal"))?);
    }
    said.retain(|text| text.get() != r#""""#);
    let mut blocks: Vec<_> = said.into_iter().map(|text| Block::Text { text }).collect();
    if let Some(calls) = message.take("tool_calls") {
        let path = path.member("tool_calls");
        for (index, raw) in items(calls, path)?.into_iter().enumerate() {
            blocks.push(call(raw, path.item(index))?);
        }
    }
    Ok(blocks)
}

/// Calls `each` with the type of every part; it says whether it knows that type. A string is one part.
fn parts<'a>(
    raw: &'a RawValue,
    path: Path<'_>,
    mut each: impl FnMut(&str, &mut Object<'a>, Path<'_>) -> Result<bool, RequestError>,
) -> Result<(), RequestError> {
    if raw.get().starts_with('"') {
        each("text", &mut Object::single("text", raw), path)?;
        return Ok(());
    }
    let items = items(raw, path).map_err(|_| path.wrong("a string or an array of parts"))?;
    for (index, raw) in items.into_iter().enumerate() {
        let path = path.item(index);
        let mut part = Object::of(raw, path)?;
        let kind = part.word("type", path)?;
        if !each(&kind, &mut part, path)? {
            let why = format!("a part of type `{kind}` has no place there");
            return Err(path.member("type").refused(TARGET, why));
        }
        part.end(path, TARGET, &[])?;
    }
    Ok(())
}

fn image<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Source<'a>, RequestError> {
    const DETAIL: &[Refused] = &[refused("detail", &[r#""auto""#], "it has no levels of detail")];
    let mut image = Object::of(raw, path)?;
    let raw = image.need("url", path)?;
    image.end(path, TARGET, DETAIL)?;
    let path = path.member("url");
    let url = text(raw, path)?;
    if starts_with(&url, "https://") {
        return Ok(Source::Url { url: raw });
    }
    let data = match &url {
        Cow::Borrowed(url) => base64(url).map(|(media_type, data)| (media_type.into(), data.into())),
        Cow::Owned(url) => {
            base64(url).map(|(media_type, data)| (media_type.to_owned().into(), data.to_owned().into()))
        }
    };
    let Some((media_type, data)) = data else {
        return Err(path.refused(TARGET, "it takes `https:` URLs and `data:` URLs in base64"));
    };
    Ok(Source::Base64 { media_type, data })
}

/// Media type and data of a `data:` URL.
fn base64(url: &str) -> Option<(&str, &str)> {
    let rest = starts_with(url, "data:").then(|| url.get("data:".len()..)).flatten()?;
    rest.split_once(";base64,")
}

/// Schemes are written in any case.
fn starts_with(url: &str, scheme: &str) -> bool {
    url.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
}

fn call<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Block<'a>, RequestError> {
    let mut call = Object::of(raw, path)?;
    only_functions(&mut call, path)?;
    let id = literal(call.need("id", path)?, path.member("id"))?;
    let here = path.member("function");
    let mut function = Object::of(call.need("function", path)?, here)?;
    call.end(path, TARGET, &[])?;
    let name = literal(function.need("name", here)?, here.member("name"))?;
    let arguments = text(function.need("arguments", here)?, here.member("arguments"))?;
    function.end(here, TARGET, &[])?;
    let input = arguments_object(arguments)
        .ok_or_else(|| here.member("arguments").wrong("a JSON object in a string"))?;
    Ok(Block::ToolUse { id, name, input: Json::Owned(input) })
}
