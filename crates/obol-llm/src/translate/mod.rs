//! Between the two dialects that callers and providers speak: OpenAI's chat completions and Anthropic's messages.
//!
//! Pure functions and state machines, both ways: requests ([`chat_to_messages`], [`messages_to_chat`]), answers
//! ([`message_to_completion`], [`completion_to_message`]), streams ([`MessagesToChatStream`],
//! [`ChatToMessagesStream`]), errors ([`error_to_messages`], [`error_to_chat`]) and the usage of the messages dialect
//! ([`MessagesReading`]).
//!
//! **Requests.** What cannot be carried is refused with its field, and so are members that nobody here knows: a
//! setting that is dropped in silence changes the answer and nobody sees why. A member that is null or has its default
//! value means that it is absent. Texts, numbers and JSON documents keep their bytes. Three things are not carried
//! word for word:
//!
//! - `cache_control` and `prompt_cache_key` are left out. They steer where a provider caches a prompt and change no
//!   answer; the other dialect's providers cache on their own.
//! - `is_error` of a tool result has no place in the chat dialect. The result says it in words: `Error: ` before it.
//! - Texts that are empty are left out on the way to the messages dialect, which refuses them.
//!
//! Within one turn the messages dialect wants tool results first and the chat dialect has texts before tool calls;
//! results and calls keep their order among themselves.
//!
//! **Answers.** Requests that ask for thinking are refused, yet models may think unasked: what they thought, and its
//! signature, is left out of translated answers, as Anthropic's own chat endpoint does. It is billed in
//! `output_tokens` all the same. Other content that a translated request cannot have asked for makes the answer a bad
//! one ([`AnswerError`]). Stop reasons that have no counterpart are carried as they are.
//!
//! It opens no connection, keeps no secret from anybody (an upstream's error message is carried as it is; who must not
//! show it replaces it before), and does not check what a dialect's server checks itself: names, ids and ranges that
//! both dialects have.

mod answer;
mod chat_request;
mod chat_stream;
mod error;
mod messages_request;
mod messages_stream;
mod object;
mod usage;
mod wire;

use bytes::Bytes;
use jiff::Timestamp;

pub use answer::{completion_to_message, message_to_completion};
pub use chat_request::{ToMessages, chat_to_messages};
pub use chat_stream::ChatToMessagesStream;
pub use error::{
    AnswerError, RequestError, error_frame, error_to_chat, error_to_messages, has_error_object,
    messages_error,
};
pub use messages_request::{ToChat, TokenLimit, messages_to_chat};
pub use messages_stream::MessagesToChatStream;
pub use usage::MessagesReading;

/// A way to speak with a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's chat completions.
    Chat,
    /// Anthropic's messages.
    Messages,
}

impl Dialect {
    fn name(self) -> &'static str {
        match self {
            Self::Chat => "the chat completions API",
            Self::Messages => "the messages API",
        }
    }
}

/// A request in the other dialect.
#[derive(Clone)]
pub struct Translated {
    /// It.
    pub body: Bytes,
    /// The answer is to be a stream.
    pub stream: bool,
    /// The caller wants to see the usage of a stream. In the messages dialect there is no choice.
    pub include_usage: bool,
}

impl std::fmt::Debug for Translated {
    /// Without the body: prompts are nobody's business.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Translated")
            .field("bytes", &self.body.len())
            .field("stream", &self.stream)
            .field("include_usage", &self.include_usage)
            .finish_non_exhaustive()
    }
}

/// What a comment of the upstream becomes: a sign of life in both dialects. What it says is the provider's.
const ALIVE: &[u8] = b": alive\n\n";

/// How far a translated stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Waiting,
    Begun,
    /// Why the answer ended is known; its usage may follow.
    Finished,
    Done,
    /// An error came, or something that cannot be translated.
    Failed,
}

impl Phase {
    /// Whatever comes now is passed over.
    fn is_over(self) -> bool {
        self >= Self::Done
    }

    fn is_complete(self) -> bool {
        matches!(self, Self::Finished | Self::Done)
    }
}

/// What a translated answer says of itself where the upstream's does not.
#[derive(Debug, Clone, Copy)]
pub struct Labels<'a> {
    /// Its id, when the upstream names none.
    pub id: &'a str,
    /// The model, when the upstream names none.
    pub model: &'a str,
    /// When it was made. Only the chat dialect says so.
    pub created: Timestamp,
}
