//! Reading the few members of a body that matter.

use std::fmt;
use std::ops::Range;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::outside::folded;
use super::{MAX_COMPLETION_TOKENS, MAX_OUTPUT_TOKENS, MAX_TOKENS, OutputLimit, StreamOptions};
use crate::endpoint::Endpoint;
use crate::error::LlmError;

pub(super) fn read_model(text: &str, raw: Option<&RawValue>) -> Result<(String, Range<usize>), LlmError> {
    let raw = raw.ok_or_else(|| missing("model", "name the model to use"))?;
    let model = serde_json::from_str(raw.get()).map_err(|_| wrong_type("model", "a string"))?;
    Ok((model, place(text, raw)))
}

pub(super) fn missing(param: &'static str, help: &str) -> LlmError {
    LlmError::invalid("missing_required_parameter", Some(param), format!("`{param}` is missing: {help}"))
}

pub(super) fn read_stream_options(text: &str, raw: Option<&RawValue>) -> Result<StreamOptions, LlmError> {
    let Some(raw) = raw else { return Ok(StreamOptions::Absent) };
    let at = place(text, raw);
    if raw.get() == "null" {
        return Ok(StreamOptions::Null(at));
    }
    let options: Options<'_> =
        serde_json::from_str(raw.get()).map_err(|_| wrong_type("stream_options", "an object"))?;
    if options.odd {
        return Err(odd_case("stream_options.include_usage"));
    }
    if options.twice {
        return Err(duplicate("stream_options.include_usage"));
    }
    let Some(value) = options.include_usage else {
        return Ok(StreamOptions::Without { at: at.start + 1, has_members: options.has_members });
    };
    let at = place(text, value);
    match value.get() {
        "true" => Ok(StreamOptions::With { at, value: true }),
        "false" | "null" => Ok(StreamOptions::With { at, value: false }),
        _ => Err(wrong_type("stream_options.include_usage", "a boolean")),
    }
}

/// What an endpoint calls the limit of an answer; those without one answer with no tokens.
pub(super) fn output_limit(endpoint: Endpoint) -> Option<&'static str> {
    match endpoint {
        Endpoint::ChatCompletions => Some(MAX_COMPLETION_TOKENS),
        Endpoint::Messages => Some(MAX_TOKENS),
        Endpoint::Responses => Some(MAX_OUTPUT_TOKENS),
        Endpoint::CountTokens | Endpoint::Embeddings => None,
    }
}

/// `null` is as good as nothing.
pub(super) fn read_flag(name: &'static str, raw: Option<&RawValue>) -> Result<Option<bool>, LlmError> {
    match raw.map(RawValue::get) {
        None | Some("null") => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(_) => Err(wrong_type(name, "a boolean")),
    }
}

/// `null` is as good as nothing.
pub(super) fn read_text(name: &'static str, raw: Option<&RawValue>) -> Result<Option<String>, LlmError> {
    let Some(raw) = raw else { return Ok(None) };
    serde_json::from_str(raw.get()).map_err(|_| wrong_type(name, "a string"))
}

/// A whole number from 1 on; `null` is as good as nothing.
pub(super) fn read_count(name: &'static str, raw: Option<&RawValue>) -> Result<Option<u64>, LlmError> {
    match raw.map(RawValue::get) {
        None | Some("null") => Ok(None),
        Some(text) => match text.parse() {
            Ok(count) if count > 0 => Ok(Some(count)),
            _ => Err(wrong_type(name, "a whole number from 1 on")),
        },
    }
}

pub(super) fn wrong_type(param: &'static str, expected: &str) -> LlmError {
    LlmError::invalid("invalid_type", Some(param), format!("`{param}` must be {expected}"))
}

pub(super) fn duplicate(param: &'static str) -> LlmError {
    LlmError::invalid("duplicate_parameter", Some(param), format!("`{param}` stands there twice"))
}

/// Some servers have no regard to case: they would read it, past the policies and the price of what it says.
pub(super) fn odd_case(param: &'static str) -> LlmError {
    let message =
        format!("`{param}` stands there with letters of another case; write it as it is written here");
    LlmError::invalid("invalid_value", Some(param), message)
}

/// Where in `text` a value stands that was read from it without a copy.
pub(super) fn place(text: &str, raw: &RawValue) -> Range<usize> {
    let start = raw.get().as_ptr().addr() - text.as_ptr().addr();
    start..start + raw.get().len()
}

/// A member that the gateway reads. Names are compared after unescaping, as a provider would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name {
    Model,
    Stream,
    StreamOptions,
    Messages,
    IncludeUsage,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    N,
    Input,
    PreviousResponseId,
    Store,
    Background,
    Conversation,
    Prompt,
    /// The name of a member that something here reads, but for its case.
    OddCase(&'static str),
    Other,
}

/// Members that are read for what a request names outside of itself.
const FURTHER: [&str; 10] = [
    "audio",
    "cache_control",
    "container",
    "functions",
    "inference_geo",
    "mcp_servers",
    "service_tier",
    "speed",
    "tools",
    "web_search_options",
];

impl Name {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Stream => "stream",
            Self::StreamOptions => "stream_options",
            Self::Messages => "messages",
            Self::IncludeUsage => "include_usage",
            Self::MaxTokens => MAX_TOKENS,
            Self::MaxCompletionTokens => MAX_COMPLETION_TOKENS,
            Self::MaxOutputTokens => MAX_OUTPUT_TOKENS,
            Self::N => "n",
            Self::Input => "input",
            Self::PreviousResponseId => "previous_response_id",
            Self::Store => "store",
            Self::Background => "background",
            Self::Conversation => "conversation",
            Self::Prompt => "prompt",
            Self::OddCase(name) => name,
            Self::Other => "",
        }
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = Name;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a member name")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Name, E> {
                let known = [
                    Name::Model,
                    Name::Stream,
                    Name::StreamOptions,
                    Name::Messages,
                    Name::IncludeUsage,
                    Name::MaxTokens,
                    Name::MaxCompletionTokens,
                    Name::MaxOutputTokens,
                    Name::N,
                    Name::Input,
                    Name::PreviousResponseId,
                    Name::Store,
                    Name::Background,
                    Name::Conversation,
                    Name::Prompt,
                ];
                if let Some(known) = known.into_iter().find(|k| k.name() == name) {
                    return Ok(known);
                }
                // The longest has less, and a name may be as long as the body.
                if name.len() > 64 || FURTHER.contains(&name) {
                    return Ok(Name::Other);
                }
                let folded = folded(name);
                let mut names = known.into_iter().map(Name::name).chain(FURTHER);
                Ok(names.find(|known| *known == folded).map_or(Name::Other, Name::OddCase))
            }
        }
        d.deserialize_str(NameVisitor)
    }
}

#[derive(Default)]
pub(super) struct Members<'a> {
    pub(super) model: Option<&'a RawValue>,
    pub(super) stream: Option<&'a RawValue>,
    pub(super) stream_options: Option<&'a RawValue>,
    pub(super) messages: Option<&'a RawValue>,
    pub(super) max_tokens: Option<&'a RawValue>,
    pub(super) max_completion_tokens: Option<&'a RawValue>,
    pub(super) max_output_tokens: Option<&'a RawValue>,
    pub(super) n: Option<&'a RawValue>,
    pub(super) input: Option<&'a RawValue>,
    pub(super) previous_response_id: Option<&'a RawValue>,
    pub(super) store: Option<&'a RawValue>,
    pub(super) background: Option<&'a RawValue>,
    pub(super) conversation: Option<&'a RawValue>,
    pub(super) prompt: Option<&'a RawValue>,
    pub(super) twice: Option<Name>,
    pub(super) odd_case: Option<&'static str>,
}

impl Members<'_> {
    pub(super) fn output(&self, endpoint: Endpoint, text: &str) -> Result<OutputLimit, LlmError> {
        let mut output = OutputLimit::default();
        let named = match endpoint {
            Endpoint::ChatCompletions => {
                [(MAX_TOKENS, self.max_tokens), (MAX_COMPLETION_TOKENS, self.max_completion_tokens)]
            }
            Endpoint::Messages => [(MAX_TOKENS, self.max_tokens), (MAX_TOKENS, None)],
            Endpoint::Responses => [(MAX_OUTPUT_TOKENS, self.max_output_tokens), (MAX_OUTPUT_TOKENS, None)],
            Endpoint::CountTokens | Endpoint::Embeddings => return Ok(output),
        };
        for (name, raw) in named {
            match (raw, read_count(name, raw)?) {
                (Some(raw), None) if output_limit(endpoint) == Some(name) => {
                    output.null_at = Some(place(text, raw));
                }
                // The higher one: there are providers that know only one of the two.
                (_, Some(limit)) if output.says.is_none_or(|(highest, _)| limit > highest) => {
                    output.says = Some((limit, name));
                }
                _ => {}
            }
        }
        if endpoint == Endpoint::Messages && output.says.is_none() {
            return Err(missing(MAX_TOKENS, "say how many tokens an answer may have"));
        }
        Ok(output)
    }

    /// Members of the responses dialect that name what the provider keeps under our account for all callers, and what goes
    /// on when nobody waits for it.
    pub(super) fn refuse_what_is_kept_elsewhere(&self) -> Result<(), LlmError> {
        let is_set = |raw: Option<&RawValue>| raw.is_some_and(|raw| !matches!(raw.get(), "null" | "false"));
        if is_set(self.background) {
            Err(unusable("background", "what it costs cannot be told when it is asked for"))
        } else if is_set(self.conversation) {
            Err(unusable("conversation", NOT_TOLD_APART))
        } else if is_set(self.prompt) {
            Err(unusable("prompt", NOT_TOLD_APART))
        } else {
            Ok(())
        }
    }
}

pub(super) const NOT_TOLD_APART: &str =
    "what a provider keeps is not told apart by caller here; send the content itself";

pub(super) fn unusable(param: &'static str, why: &str) -> LlmError {
    LlmError::invalid("unsupported_parameter", Some(param), format!("`{param}` cannot be used: {why}"))
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct BodyVisitor;
        impl<'de> Visitor<'de> for BodyVisitor {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Members::default();
                while let Some(name) = map.next_key::<Name>()? {
                    let member = match name {
                        Name::Model => &mut members.model,
                        Name::Stream => &mut members.stream,
                        Name::StreamOptions => &mut members.stream_options,
                        Name::Messages => &mut members.messages,
                        Name::MaxTokens => &mut members.max_tokens,
                        Name::MaxCompletionTokens => &mut members.max_completion_tokens,
                        Name::MaxOutputTokens => &mut members.max_output_tokens,
                        Name::N => &mut members.n,
                        Name::Input => &mut members.input,
                        Name::PreviousResponseId => &mut members.previous_response_id,
                        Name::Store => &mut members.store,
                        Name::Background => &mut members.background,
                        Name::Conversation => &mut members.conversation,
                        Name::Prompt => &mut members.prompt,
                        Name::IncludeUsage | Name::OddCase(_) | Name::Other => {
                            if let Name::OddCase(name) = name {
                                members.odd_case = Some(name);
                            }
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    if member.replace(map.next_value()?).is_some() {
                        members.twice = Some(name);
                    }
                }
                Ok(members)
            }
        }
        d.deserialize_map(BodyVisitor)
    }
}

#[derive(Default)]
pub(super) struct Options<'a> {
    pub(super) include_usage: Option<&'a RawValue>,
    pub(super) has_members: bool,
    pub(super) twice: bool,
    pub(super) odd: bool,
}

impl<'de> Deserialize<'de> for Options<'de> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct OptionsVisitor;
        impl<'de> Visitor<'de> for OptionsVisitor {
            type Value = Options<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Options<'de>, A::Error> {
                let mut options = Options::default();
                while let Some(name) = map.next_key::<Name>()? {
                    options.has_members = true;
                    options.odd |= name == Name::OddCase(Name::IncludeUsage.name());
                    let value: &'de RawValue = map.next_value()?;
                    if name == Name::IncludeUsage && options.include_usage.replace(value).is_some() {
                        options.twice = true;
                    }
                }
                Ok(options)
            }
        }
        d.deserialize_map(OptionsVisitor)
    }
}
