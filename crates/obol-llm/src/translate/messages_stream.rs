//! Streams: messages to chat completions.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::answer::{BlockIn, BlockKind, NO_CALL, NO_TEXT, finish_reason, label, string};
use super::error::raw_to_chat;
use super::object::{decode, inner};
use super::usage::ChatUsage;
use super::wire::{EMPTY_OBJECT, Quoted, frame, json_frame};
use super::{ALIVE, AnswerError, Dialect, Labels, MessagesReading, Phase, error_frame};
use crate::sse;

const ODD_EVENT: AnswerError = AnswerError("an event that cannot be read");
const ODD_DELTA: AnswerError = AnswerError("a part of content that had not begun");

/// More blocks than this no answer has; each costs a little memory until the stream ends.
const MOST_BLOCKS: usize = 4096;

/// Turns the events of the messages dialect into chunks of the chat dialect, one by one and without holding anything
/// back.
pub struct MessagesToChatStream {
    id: String,
    model: String,
    created: i64,
    include_usage: bool,
    phase: Phase,
    blocks: Vec<BlockState>,
    calls: usize,
    reading: MessagesReading,
}

struct BlockState {
    index: u64,
    kind: StateKind,
}

enum StateKind {
    Text,
    Thinking,
    Call {
        /// Its place among the calls of the answer.
        place: usize,
        /// Arguments that came with the beginning; sent if no others follow.
        input: Option<Box<RawValue>>,
        has_arguments: bool,
    },
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow)]
    r#type: &'a RawValue,
    #[serde(borrow, default)]
    message: Option<Start<'a>>,
    #[serde(default)]
    index: Option<u64>,
    #[serde(borrow, default)]
    content_block: Option<BlockIn<'a>>,
    #[serde(borrow, default)]
    delta: Option<DeltaIn<'a>>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Start<'a> {
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct DeltaIn<'a> {
    #[serde(borrow, default)]
    r#type: Option<&'a RawValue>,
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
    #[serde(borrow, default)]
    partial_json: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stop_reason: Option<&'a RawValue>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: i64,
    model: &'a str,
    choices: &'a [Choice<'a>],
    #[serde(skip_serializing_if = "UsageOut::is_hidden")]
    usage: UsageOut,
}

/// What a chunk says of the usage.
#[derive(Serialize)]
#[serde(untagged)]
enum UsageOut {
    /// Nobody asked.
    Hidden,
    /// It comes in the last chunk: null.
    Later,
    Known(ChatUsage),
}

impl UsageOut {
    fn is_hidden(&self) -> bool {
        matches!(self, Self::Hidden)
    }
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u8,
    delta: Delta<'a>,
    logprobs: (),
    finish_reason: Option<&'a str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Said<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Said<'a> {
    Nothing(&'static str),
    Raw(&'a RawValue),
    Quoted(Quoted<'a>),
}

#[derive(Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a RawValue>,
    arguments: Said<'a>,
}

impl MessagesToChatStream {
    /// A stream that has not begun. `include_usage` is what the caller asked for.
    pub fn new(labels: &Labels<'_>, include_usage: bool) -> Self {
        Self {
            id: labels.id.to_owned(),
            model: labels.model.to_owned(),
            created: labels.created.as_second(),
            include_usage,
            phase: Phase::Waiting,
            blocks: Vec::new(),
            calls: 0,
            reading: MessagesReading::default(),
        }
    }

    /// The events that a whole event of the upstream becomes; often none. After an error frame or the end, whatever
    /// follows becomes nothing.
    ///
    /// # Errors
    /// When the event cannot be put into the chat dialect. The stream has failed then.
    pub fn event(&mut self, event: &[u8]) -> Result<Bytes, AnswerError> {
        if self.phase.is_over() {
            return Ok(Bytes::new());
        }
        let mut out = Vec::new();
        let result = self.translate(event, &mut out);
        if result.is_err() {
            self.phase = Phase::Failed;
        }
        result.map(|()| out.into())
    }

    /// What the stream's end adds, for upstreams that stop after the stop reason: nothing, unless the answer is whole.
    pub fn end(&mut self) -> Bytes {
        let mut out = Vec::new();
        if self.phase == Phase::Finished {
            self.close(&mut out);
        }
        out.into()
    }

    /// Whether the answer came to its end.
    pub fn is_complete(&self) -> bool {
        self.phase.is_complete()
    }

    /// What the upstream reported so far.
    pub fn reading(&self) -> &MessagesReading {
        &self.reading
    }

    fn translate(&mut self, event: &[u8], out: &mut Vec<u8>) -> Result<(), AnswerError> {
        let Some(data) = sse::data(event) else {
            if event.starts_with(b":") {
                out.extend_from_slice(ALIVE);
            }
            return Ok(());
        };
        let parsed = serde_json::from_slice::<Event<'_>>(&data);
        if sse::is_named(event, b"error") || parsed.as_ref().is_ok_and(|event| inner(event.r#type) == "error")
        {
            self.phase = Phase::Failed;
            let body = raw_to_chat(parsed.ok().and_then(|event| event.error));
            out.extend_from_slice(&error_frame(Dialect::Chat, &body));
            return Ok(());
        }
        let event = parsed.map_err(|_| ODD_EVENT)?;
        match inner(event.r#type) {
            "message_start" => self.start(event.message.as_ref(), out),
            "content_block_start" => self.begin(event.index, event.content_block, out)?,
            "content_block_delta" => self.delta(event.index, event.delta.as_ref(), out)?,
            "content_block_stop" => self.stop(event.index, out),
            "message_delta" => {
                if let Some(usage) = event.usage {
                    self.reading.read(usage);
                }
                let reason = event.delta.and_then(|delta| delta.stop_reason).and_then(decode);
                let reason = reason.filter(|reason| !reason.is_empty());
                if let (Some(reason), false) = (reason, self.phase == Phase::Finished) {
                    self.start(None, out);
                    self.phase = Phase::Finished;
                    self.chunk(out, Delta::default(), Some(finish_reason(&reason)));
                }
            }
            "message_stop" if self.phase == Phase::Finished => self.close(out),
            "message_stop" => return Err(super::answer::NO_STOP),
            "ping" => out.extend_from_slice(b": ping\n\n"),
            // New kinds of events may come at any time and are to be passed over.
            _ => {}
        }
        Ok(())
    }

    fn start(&mut self, start: Option<&Start<'_>>, out: &mut Vec<u8>) {
        if self.phase != Phase::Waiting {
            return;
        }
        self.phase = Phase::Begun;
        if let Some(start) = start {
            self.id = label(start.id, &self.id).into_owned();
            self.model = label(start.model, &self.model).into_owned();
            if let Some(usage) = start.usage {
                self.reading.read(usage);
            }
        }
        let content = Some(Said::Nothing(""));
        self.chunk(out, Delta { role: Some("assistant"), content, tool_calls: None }, None);
    }

    fn begin(
        &mut self,
        index: Option<u64>,
        block: Option<BlockIn<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<(), AnswerError> {
        let (Some(index), Some(block)) = (index, block) else { return Err(ODD_EVENT) };
        if self.blocks.len() == MOST_BLOCKS {
            return Err(AnswerError("an answer of too many parts"));
        }
        self.start(None, out);
        let kind = match block.kind()? {
            BlockKind::Text => {
                self.text(block.text, out)?;
                StateKind::Text
            }
            BlockKind::Thinking => StateKind::Thinking,
            BlockKind::ToolUse => {
                let (id, name) = (string(block.id, NO_CALL)?, string(block.name, NO_CALL)?);
                let place = self.calls;
                self.calls += 1;
                let function = FunctionDelta { name: Some(name), arguments: Said::Nothing("") };
                self.call(out, CallDelta { index: place, id: Some(id), r#type: Some("function"), function });
                let input = block.input.filter(|input| input.get() != EMPTY_OBJECT).map(ToOwned::to_owned);
                StateKind::Call { place, input, has_arguments: false }
            }
        };
        self.blocks.retain(|block| block.index != index);
        self.blocks.push(BlockState { index, kind });
        Ok(())
    }

    fn delta(
        &mut self,
        index: Option<u64>,
        delta: Option<&DeltaIn<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<(), AnswerError> {
        let (Some(index), Some(delta)) = (index, delta) else { return Err(ODD_EVENT) };
        let Some(block) = self.blocks.iter_mut().rev().find(|block| block.index == index) else {
            return Err(ODD_DELTA);
        };
        match (&mut block.kind, delta.r#type.map_or("", inner)) {
            (StateKind::Text, "text_delta") => self.text(delta.text, out),
            (StateKind::Call { place, has_arguments, .. }, "input_json_delta") => {
                let fragment = string(delta.partial_json, NO_TEXT)?;
                if inner(fragment).is_empty() {
                    return Ok(());
                }
                *has_arguments = true;
                let place = *place;
                self.arguments(place, Said::Raw(fragment), out);
                Ok(())
            }
            // Thoughts, signatures, citations.
            _ => Ok(()),
        }
    }

    /// A call without arguments gets those of its beginning: clients of the chat dialect read them as JSON, which an
    /// empty string is not.
    fn stop(&mut self, index: Option<u64>, out: &mut Vec<u8>) {
        let at = self.blocks.iter().position(|block| Some(block.index) == index);
        let Some(at) = at else { return };
        let block = self.blocks.swap_remove(at);
        if let StateKind::Call { place, input, has_arguments: false } = block.kind {
            let arguments =
                input.as_deref().map_or(Said::Nothing(EMPTY_OBJECT), |input| Said::Quoted(Quoted(input)));
            self.arguments(place, arguments, out);
        }
    }

    fn text(&self, text: Option<&RawValue>, out: &mut Vec<u8>) -> Result<(), AnswerError> {
        let text = string(text, NO_TEXT)?;
        if !inner(text).is_empty() {
            self.chunk(out, Delta { content: Some(Said::Raw(text)), ..Delta::default() }, None);
        }
        Ok(())
    }

    fn arguments(&self, place: usize, arguments: Said<'_>, out: &mut Vec<u8>) {
        let function = FunctionDelta { name: None, arguments };
        self.call(out, CallDelta { index: place, id: None, r#type: None, function });
    }

    fn call(&self, out: &mut Vec<u8>, call: CallDelta<'_>) {
        self.chunk(out, Delta { tool_calls: Some([call]), ..Delta::default() }, None);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        self.phase = Phase::Done;
        if let (true, Some(tokens)) = (self.include_usage, self.reading.tokens()) {
            self.write(out, &[], UsageOut::Known(tokens.into()));
        }
        frame(out, None, |out| out.extend_from_slice(b"[DONE]"));
    }

    fn chunk(&self, out: &mut Vec<u8>, delta: Delta<'_>, finish_reason: Option<&str>) {
        let usage = if self.include_usage { UsageOut::Later } else { UsageOut::Hidden };
        self.write(out, &[Choice { index: 0, delta, logprobs: (), finish_reason }], usage);
    }

    fn write(&self, out: &mut Vec<u8>, choices: &[Choice<'_>], usage: UsageOut) {
        let chunk = Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            choices,
            usage,
        };
        json_frame(out, None, &chunk);
    }
}

impl std::fmt::Debug for MessagesToChatStream {
    /// Without what is said.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MessagesToChatStream")
            .field("phase", &self.phase)
            .field("reading", &self.reading)
            .finish_non_exhaustive()
    }
}
