//! Answers that are no streams, both ways.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::object::{arguments_object, decode, inner, is_string, join};
use super::usage::{ChatUsage, MessagesUsage, tokens_of_chat};
use super::wire::{Block, ChatCall, ChatFunction, Json, Quoted, to_bytes};
use super::{AnswerError, Labels, MessagesReading};
use crate::usage::Reading;

const NO_OBJECT: AnswerError = AnswerError("something else than an answer");
pub(super) const NO_STOP: AnswerError = AnswerError("an answer that does not say why it ended");
pub(super) const NO_TEXT: AnswerError = AnswerError("an answer with a text that is none");
pub(super) const NO_CALL: AnswerError = AnswerError("a tool call without an id or a name");
pub(super) const ODD_BLOCK: AnswerError = AnswerError("content that nobody asked for");
pub(super) const OLD_CALL: AnswerError = AnswerError("a function call of the old kind");
pub(super) const CHOICES: AnswerError = AnswerError("more than one choice, or none");

/// Anthropic's stop reason in the chat dialect; words without a counterpart stay.
pub(super) fn finish_reason(stop_reason: &str) -> &str {
    match stop_reason {
        "end_turn" | "stop_sequence" => "stop",
        "max_tokens" | "model_context_window_exceeded" => "length",
        "tool_use" => "tool_calls",
        "refusal" => "content_filter",
        other => other,
    }
}

/// OpenAI's finish reason in the messages dialect; words without a counterpart stay.
pub(super) fn stop_reason(finish_reason: &str, has_calls: bool, refused: bool) -> &str {
    match finish_reason {
        // A forced call ends with `stop` at OpenAI; clients of the messages dialect go by the reason.
        "stop" if has_calls => "tool_use",
        "stop" if refused => "refusal",
        "stop" => "end_turn",
        "length" => "max_tokens",
        "tool_calls" => "tool_use",
        "content_filter" => "refusal",
        other => other,
    }
}

#[derive(Serialize)]
struct Completion<'a> {
    id: Cow<'a, str>,
    object: &'static str,
    created: i64,
    model: Cow<'a, str>,
    choices: [Choice<'a>; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<ChatUsage>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u8,
    message: ChatAnswer<'a>,
    logprobs: (),
    finish_reason: &'a str,
}

#[derive(Serialize)]
struct ChatAnswer<'a> {
    role: &'static str,
    content: Option<Json<'a>>,
    refusal: (),
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatCall<'a>>,
}

/// A content block of an upstream's answer. Members that it may have besides say nothing in the chat dialect.
#[derive(Deserialize)]
pub(super) struct BlockIn<'a> {
    #[serde(borrow)]
    pub(super) r#type: &'a RawValue,
    #[serde(borrow, default)]
    pub(super) text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) name: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) input: Option<&'a RawValue>,
}

/// What kind of content a block is, as far as the chat dialect is concerned.
pub(super) enum BlockKind {
    Text,
    ToolUse,
    /// Left out.
    Thinking,
}

impl BlockIn<'_> {
    pub(super) fn kind(&self) -> Result<BlockKind, AnswerError> {
        match inner(self.r#type) {
            "text" => Ok(BlockKind::Text),
            "tool_use" => Ok(BlockKind::ToolUse),
            "thinking" | "redacted_thinking" => Ok(BlockKind::Thinking),
            _ => Err(ODD_BLOCK),
        }
    }
}

/// A string that is there.
pub(super) fn string(raw: Option<&RawValue>, error: AnswerError) -> Result<&RawValue, AnswerError> {
    raw.filter(|raw| is_string(raw)).ok_or(error)
}

/// A string that says something.
pub(super) fn label<'a>(raw: Option<&'a RawValue>, or: &'a str) -> Cow<'a, str> {
    raw.and_then(decode).filter(|text| !text.is_empty()).unwrap_or(Cow::Borrowed(or))
}

/// Puts an answer of the messages dialect into the chat dialect.
///
/// # Errors
/// When it is no answer, or has content that the chat dialect cannot say.
pub fn message_to_completion(body: &[u8], labels: &Labels<'_>) -> Result<Bytes, AnswerError> {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow, default)]
        id: Option<&'a RawValue>,
        #[serde(borrow, default)]
        model: Option<&'a RawValue>,
        #[serde(borrow)]
        content: Vec<BlockIn<'a>>,
        #[serde(borrow, default)]
        stop_reason: Option<&'a RawValue>,
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    let message: Message<'_> = serde_json::from_slice(body).map_err(|_| NO_OBJECT)?;
    let (mut texts, mut tool_calls) = (Vec::new(), Vec::new());
    for block in &message.content {
        match block.kind()? {
            BlockKind::Text => texts.push(string(block.text, NO_TEXT)?),
            BlockKind::ToolUse => {
                let (id, name) = (string(block.id, NO_CALL)?, string(block.name, NO_CALL)?);
                let arguments = Quoted(block.input.ok_or(NO_CALL)?);
                let function = ChatFunction { name, arguments };
                tool_calls.push(ChatCall { id, r#type: "function", function });
            }
            BlockKind::Thinking => {}
        }
    }
    let content = match texts.as_slice() {
        [] if !tool_calls.is_empty() => None,
        [text] => Some(Json::Borrowed(text)),
        texts => Some(Json::Owned(join(texts.iter().map(|text| inner(text))).ok_or(NO_TEXT)?)),
    };
    let stop_reason = message.stop_reason.and_then(decode).ok_or(NO_STOP)?;
    let mut reading = MessagesReading::default();
    if let Some(usage) = message.usage {
        reading.read(usage);
    }
    Ok(to_bytes(&Completion {
        id: label(message.id, labels.id),
        object: "chat.completion",
        created: labels.created.as_second(),
        model: label(message.model, labels.model),
        choices: [Choice {
            index: 0,
            message: ChatAnswer { role: "assistant", content, refusal: (), tool_calls },
            logprobs: (),
            finish_reason: finish_reason(&stop_reason),
        }],
        usage: reading.tokens().map(ChatUsage::from),
    }))
}

#[derive(Serialize)]
pub(super) struct MessageOut<'a> {
    pub(super) id: Cow<'a, str>,
    pub(super) r#type: &'static str,
    pub(super) role: &'static str,
    pub(super) model: Cow<'a, str>,
    pub(super) content: Vec<Block<'a>>,
    pub(super) stop_reason: Option<&'a str>,
    /// The chat dialect does not say which.
    pub(super) stop_sequence: (),
    /// Demanded by the dialect: zeros where the upstream says nothing.
    pub(super) usage: MessagesUsage,
}

/// Puts an answer of the chat dialect into the messages dialect.
///
/// A tool call that the limit cut in the middle of its arguments is left out: it has no `input`, and `max_tokens` says
/// that the answer is not whole.
///
/// # Errors
/// When it is no answer, or has content that the messages dialect cannot say.
pub fn completion_to_message(body: &[u8], labels: &Labels<'_>) -> Result<Bytes, AnswerError> {
    #[derive(Deserialize)]
    struct Completion<'a> {
        #[serde(borrow, default)]
        id: Option<&'a RawValue>,
        #[serde(borrow, default)]
        model: Option<&'a RawValue>,
        #[serde(borrow)]
        choices: Vec<Choice<'a>>,
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow)]
        message: Message<'a>,
        #[serde(borrow, default)]
        finish_reason: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow, default)]
        content: Option<&'a RawValue>,
        #[serde(borrow, default)]
        refusal: Option<&'a RawValue>,
        #[serde(borrow, default)]
        tool_calls: Option<Vec<CallIn<'a>>>,
        #[serde(borrow, default)]
        function_call: Option<&'a RawValue>,
    }
    let completion: Completion<'_> = serde_json::from_slice(body).map_err(|_| NO_OBJECT)?;
    let [Choice { message, finish_reason }] = completion.choices.as_slice() else { return Err(CHOICES) };
    if message.function_call.is_some() {
        return Err(OLD_CALL);
    }
    let finish_reason = finish_reason.and_then(decode).ok_or(NO_STOP)?;
    let mut content = Vec::new();
    for text in [message.content, message.refusal].into_iter().flatten() {
        let text = string(Some(text), NO_TEXT)?;
        if !inner(text).is_empty() {
            content.push(Block::Text { text });
        }
    }
    let refused = message.refusal.is_some_and(|refusal| !inner(refusal).is_empty());
    let calls = message.tool_calls.as_deref().unwrap_or_default();
    for call in calls {
        match call.block() {
            Ok(block) => content.push(block),
            Err(_) if finish_reason == "length" => {}
            Err(error) => return Err(error),
        }
    }
    let usage = completion.usage.map(Reading::parse).unwrap_or_default();
    Ok(to_bytes(&MessageOut {
        id: label(completion.id, labels.id),
        r#type: "message",
        role: "assistant",
        model: label(completion.model, labels.model),
        content,
        stop_reason: Some(stop_reason(&finish_reason, !calls.is_empty(), refused)),
        stop_sequence: (),
        usage: tokens_of_chat(&usage).into(),
    }))
}

#[derive(Deserialize)]
struct CallIn<'a> {
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    function: Option<FunctionIn<'a>>,
}

#[derive(Deserialize)]
struct FunctionIn<'a> {
    #[serde(borrow, default)]
    name: Option<&'a RawValue>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
}

impl<'a> CallIn<'a> {
    fn block(&self) -> Result<Block<'a>, AnswerError> {
        const NO_ARGUMENTS: AnswerError = AnswerError("a tool call whose arguments are no JSON object");
        let function = self.function.as_ref().ok_or(NO_CALL)?;
        let id = string(self.id, NO_CALL)?;
        let name = string(function.name, NO_CALL)?;
        let input = match function.arguments {
            // Some providers do not put them into a string.
            Some(raw) if raw.get().starts_with('{') => Json::Borrowed(raw),
            Some(raw) => {
                let arguments = decode(raw).ok_or(NO_ARGUMENTS)?;
                Json::Owned(arguments_object(arguments).ok_or(NO_ARGUMENTS)?)
            }
            None => Json::Owned(arguments_object(Cow::Borrowed("")).ok_or(NO_ARGUMENTS)?),
        };
        Ok(Block::ToolUse { id, name, input })
    }
}
