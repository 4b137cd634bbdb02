//! Streams: chat completions to messages.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::answer::{CHOICES, MessageOut, NO_CALL, NO_STOP, NO_TEXT, OLD_CALL, label, stop_reason, string};
use super::error::raw_to_messages;
use super::object::{decode, inner, join};
use super::usage::{MessagesUsage, tokens_of_chat};
use super::wire::json_frame;
use super::{ALIVE, AnswerError, Dialect, Labels, Phase, error_frame};
use crate::sse;
use crate::usage::Reading;
use crate::view::{is_error, is_error_answer};

const ODD_CHUNK: AnswerError = AnswerError("a chunk that cannot be read");
const LATE: AnswerError = AnswerError("content after what it belongs to was complete");

/// More calls than this no answer has.
const MOST_CALLS: usize = 1024;
/// What may wait for a call before it to be complete.
const MOST_WAITING: usize = 4 << 20;

/// Turns the chunks of the chat dialect into events of the messages dialect, one by one.
///
/// Content blocks of the messages dialect follow one upon the other, while chunks may take turns between parallel
/// calls. A block is closed when another one waits and it is complete: a text at once, a call when its arguments are
/// a whole JSON object. So calls that come one after the other are never held back; fragments of interleaved ones wait
/// until those before them are complete. Sending them at once, told apart by `index` alone, would suit some clients
/// and break those that keep one block open.
pub struct ChatToMessagesStream {
    id: String,
    model: String,
    phase: Phase,
    /// What is not closed yet. The first may be open; the others wait.
    blocks: VecDeque<Block>,
    is_open: bool,
    /// The place of the next block.
    place: usize,
    /// Calls that are closed.
    closed: Vec<u64>,
    waiting: usize,
    has_calls: bool,
    refused: bool,
    reading: Reading,
    finish_reason: Option<String>,
}

struct Block {
    kind: Kind,
    /// Contents of strings that are not sent yet, as they stand between their quotes.
    unsent: String,
}

enum Kind {
    Text,
    Call { index: u64, id: Option<Box<RawValue>>, name: Option<Box<RawValue>>, scan: Scan },
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default)]
    index: Option<u64>,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    refusal: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<Vec<CallDelta<'a>>>,
    #[serde(borrow, default)]
    function_call: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct CallDelta<'a> {
    #[serde(default)]
    index: Option<u64>,
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    function: Option<FunctionDelta<'a>>,
}

#[derive(Deserialize)]
struct FunctionDelta<'a> {
    #[serde(borrow, default)]
    name: Option<&'a RawValue>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: MessageOut<'a> },
    ContentBlockStart { index: usize, content_block: BlockStart<'a> },
    ContentBlockDelta { index: usize, delta: BlockDelta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Stop<'a>, usage: MessagesUsage },
    MessageStop,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum BlockStart<'a> {
    Text { text: &'static str },
    ToolUse { id: &'a RawValue, name: &'a RawValue, input: Empty },
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum BlockDelta<'a> {
    TextDelta { text: &'a RawValue },
    InputJsonDelta { partial_json: &'a RawValue },
}

#[derive(Serialize)]
struct Stop<'a> {
    stop_reason: &'a str,
    stop_sequence: (),
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        json_frame(out, Some(self.name()), self);
    }
}

impl ChatToMessagesStream {
    /// A stream that has not begun.
    pub fn new(labels: &Labels<'_>) -> Self {
        Self {
            id: labels.id.to_owned(),
            model: labels.model.to_owned(),
            phase: Phase::Waiting,
            blocks: VecDeque::new(),
            is_open: false,
            place: 0,
            closed: Vec::new(),
            waiting: 0,
            has_calls: false,
            refused: false,
            reading: Reading::default(),
            finish_reason: None,
        }
    }

    /// The events that a whole event of the upstream becomes; none, for some. After an error frame or the end,
    /// whatever follows becomes nothing.
    ///
    /// # Errors
    /// When the event cannot be put into the messages dialect. The stream has failed then.
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

    /// What the stream's end adds, for upstreams that stop after the finish reason: nothing, unless the answer is
    /// whole.
    pub fn end(&mut self) -> Bytes {
        let mut out = Vec::new();
        if !self.phase.is_over() {
            self.close(&mut out);
        }
        out.into()
    }

    /// Whether the answer came to its end.
    pub fn is_complete(&self) -> bool {
        self.phase.is_complete()
    }

    fn translate(&mut self, event: &[u8], out: &mut Vec<u8>) -> Result<(), AnswerError> {
        let Some(data) = sse::data(event) else {
            if event.starts_with(b":") {
                out.extend_from_slice(ALIVE);
            }
            return Ok(());
        };
        if data.trim_ascii() == b"[DONE]" {
            // Without a finish reason there is no stop reason, which the dialect demands and nobody may invent.
            return if self.close(out) { Ok(()) } else { Err(NO_STOP) };
        }
        let parsed = serde_json::from_slice::<Chunk<'_>>(&data);
        let error = parsed.as_ref().ok().and_then(Chunk::error);
        let has_choices = parsed.as_ref().is_ok_and(|chunk| chunk.choices.is_some());
        if error.is_some() || sse::is_named(event, b"error") || !has_choices && is_error_answer(&data) {
            self.phase = Phase::Failed;
            out.extend_from_slice(&error_frame(Dialect::Messages, &raw_to_messages(error)));
            return Ok(());
        }
        let chunk = parsed.map_err(|_| ODD_CHUNK)?;
        if let Some(usage) = chunk.usage {
            self.reading.update(Reading::parse(usage));
        }
        let choices = chunk.choices.unwrap_or_default();
        if !choices.is_empty() {
            self.start(chunk.id, chunk.model, out);
        }
        for choice in choices {
            self.choice(choice, out)?;
        }
        Ok(())
    }

    fn start(&mut self, id: Option<&RawValue>, model: Option<&RawValue>, out: &mut Vec<u8>) {
        if self.phase != Phase::Waiting {
            return;
        }
        self.phase = Phase::Begun;
        self.id = label(id, &self.id).into_owned();
        self.model = label(model, &self.model).into_owned();
        let message = MessageOut {
            id: self.id.as_str().into(),
            r#type: "message",
            role: "assistant",
            model: self.model.as_str().into(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: (),
            // Not known yet; the numbers at the end are of the whole.
            usage: MessagesUsage::default(),
        };
        Event::MessageStart { message }.write(out);
    }

    fn choice(&mut self, choice: Choice<'_>, out: &mut Vec<u8>) -> Result<(), AnswerError> {
        if choice.index.unwrap_or(0) != 0 {
            return Err(CHOICES);
        }
        if let Some(delta) = choice.delta {
            if delta.function_call.is_some() {
                return Err(OLD_CALL);
            }
            for text in [delta.content, delta.refusal].into_iter().flatten() {
                self.text(string(Some(text), NO_TEXT)?)?;
            }
            self.refused |= delta.refusal.is_some_and(|refusal| !inner(refusal).is_empty());
            for (position, call) in (0..).zip(delta.tool_calls.unwrap_or_default()) {
                self.call(call.index.unwrap_or(position), call)?;
            }
        }
        // Some servers have an empty one in every chunk before.
        let reason = choice.finish_reason.and_then(decode).filter(|reason| !reason.is_empty());
        if let (Some(reason), None) = (reason, &self.finish_reason) {
            self.finish_reason = Some(reason.into_owned());
            self.phase = Phase::Finished;
        }
        if self.waiting > MOST_WAITING {
            return Err(AnswerError("parallel tool calls that are too large"));
        }
        self.advance(out)
    }

    fn text(&mut self, text: &RawValue) -> Result<(), AnswerError> {
        let text = inner(text);
        if text.is_empty() {
            return Ok(());
        }
        if self.finish_reason.is_some() {
            return Err(LATE);
        }
        if !matches!(self.blocks.back(), Some(Block { kind: Kind::Text, .. })) {
            self.blocks.push_back(Block { kind: Kind::Text, unsent: String::new() });
        }
        if let Some(block) = self.blocks.back_mut() {
            block.unsent.push_str(text);
            self.waiting += text.len();
        }
        Ok(())
    }

    fn call(&mut self, at: u64, delta: CallDelta<'_>) -> Result<(), AnswerError> {
        let function = delta.function.unwrap_or(FunctionDelta { name: None, arguments: None });
        let fragment = match function.arguments {
            Some(raw) => string(Some(raw), NO_TEXT)?,
            None => RawValue::NULL,
        };
        let says_more = !inner(fragment).trim().is_empty();
        if self.closed.contains(&at) || self.finish_reason.is_some() {
            return if says_more { Err(LATE) } else { Ok(()) };
        }
        let is_it = |block: &&mut Block| matches!(block.kind, Kind::Call { index, .. } if index == at);
        if !self.blocks.iter_mut().any(|mut block| is_it(&mut block)) {
            if self.closed.len() + self.blocks.len() >= MOST_CALLS {
                return Err(AnswerError("too many tool calls"));
            }
            self.has_calls = true;
            let kind = Kind::Call { index: at, id: None, name: None, scan: Scan::default() };
            self.blocks.push_back(Block { kind, unsent: String::new() });
        }
        let Some(Block { kind: Kind::Call { id, name, scan, .. }, unsent }) =
            self.blocks.iter_mut().find(is_it)
        else {
            return Ok(());
        };
        // Some providers repeat them with every fragment.
        let first = |known: &mut Option<Box<RawValue>>, said: Option<&RawValue>| {
            let said = said.filter(|said| !inner(said).is_empty());
            if known.is_none() {
                *known = said.map(ToOwned::to_owned);
            }
        };
        first(id, delta.id);
        first(name, function.name);
        unsent.push_str(inner(fragment));
        self.waiting += inner(fragment).len();
        scan.feed(decode(fragment).as_deref());
        Ok(())
    }

    /// Sends what can be sent in the order of the blocks.
    fn advance(&mut self, out: &mut Vec<u8>) -> Result<(), AnswerError> {
        let finished = self.finish_reason.is_some();
        while let Some(block) = self.blocks.front_mut() {
            let index = self.place;
            if !self.is_open {
                let content_block = match &block.kind {
                    Kind::Text => BlockStart::Text { text: "" },
                    Kind::Call { id: Some(id), name: Some(name), .. } => {
                        BlockStart::ToolUse { id, name, input: Empty {} }
                    }
                    Kind::Call { .. } if finished => return Err(NO_CALL),
                    Kind::Call { .. } => return Ok(()),
                };
                self.is_open = true;
                Event::ContentBlockStart { index, content_block }.write(out);
            }
            if !block.unsent.is_empty() {
                let part = join([block.unsent.as_str()]).ok_or(NO_TEXT)?;
                self.waiting -= block.unsent.len();
                block.unsent.clear();
                let delta = match block.kind {
                    Kind::Text => BlockDelta::TextDelta { text: &part },
                    Kind::Call { .. } => BlockDelta::InputJsonDelta { partial_json: &part },
                };
                Event::ContentBlockDelta { index, delta }.write(out);
            }
            let is_whole = match &block.kind {
                Kind::Text => true,
                Kind::Call { scan, .. } => scan.is_whole(),
            };
            if !finished && (self.blocks.len() == 1 || !is_whole) {
                return Ok(());
            }
            Event::ContentBlockStop { index }.write(out);
            if let Some(Block { kind: Kind::Call { index, .. }, .. }) = self.blocks.pop_front() {
                self.closed.push(index);
            }
            self.is_open = false;
            self.place += 1;
        }
        Ok(())
    }

    /// The end of the message. It waits for the usage, which comes after the finish reason.
    fn close(&mut self, out: &mut Vec<u8>) -> bool {
        let Some(finish_reason) = &self.finish_reason else { return false };
        let stop_reason = stop_reason(finish_reason, self.has_calls, self.refused);
        let usage = tokens_of_chat(&self.reading).into();
        Event::MessageDelta { delta: Stop { stop_reason, stop_sequence: () }, usage }.write(out);
        Event::MessageStop.write(out);
        self.phase = Phase::Done;
        true
    }
}

impl<'a> Chunk<'a> {
    fn error(&self) -> Option<&'a RawValue> {
        let of_choices = self.choices.iter().flatten().filter_map(|choice| choice.error);
        self.error.into_iter().chain(of_choices).find(|error| is_error(error))
    }
}

impl std::fmt::Debug for ChatToMessagesStream {
    /// Without what is said.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatToMessagesStream")
            .field("finish_reason", &self.finish_reason)
            .field("phase", &self.phase)
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

/// Looks for the end of a JSON object that comes in fragments.
#[derive(Default)]
struct Scan {
    depth: usize,
    at: At,
    ended: bool,
    /// A fragment could not be read, so where the object ends is not known.
    lost: bool,
}

#[derive(Clone, Copy, Default)]
enum At {
    #[default]
    Outside,
    InString,
    AfterBackslash,
}

impl Scan {
    fn feed(&mut self, fragment: Option<&str>) {
        let Some(fragment) = fragment else {
            self.lost = true;
            return;
        };
        for byte in fragment.bytes() {
            self.at = match (self.at, byte) {
                (At::Outside, b'{' | b'[') => {
                    self.depth += 1;
                    At::Outside
                }
                (At::Outside, b'}' | b']') => {
                    self.depth = self.depth.saturating_sub(1);
                    self.ended |= self.depth == 0;
                    At::Outside
                }
                (At::Outside, b'"') | (At::AfterBackslash, _) => At::InString,
                (At::InString, b'"') => At::Outside,
                (At::InString, b'\\') => At::AfterBackslash,
                (at, _) => at,
            };
        }
    }

    fn is_whole(&self) -> bool {
        self.ended && !self.lost
    }
}
