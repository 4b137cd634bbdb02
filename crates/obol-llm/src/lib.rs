//! LLM providers behind the OpenAI-compatible surface: one request, an ordered list of targets, an answer that is
//! relayed byte for byte, and what it used (DESIGN §11).
//!
//! [`ChatRequest`] reads the few members that matter and leaves every other byte of the body alone; [`Llm::chat`]
//! tries the targets in order until one begins to answer; [`ChatStream`] relays whole events and reads the usage on
//! the way. Upstream requests are built from nothing: no header of a client reaches this crate.
//!
//! [`translate`] puts requests, answers, streams and errors of one dialect into another.
//!
//! It will not authorize (the caller passes only targets that the request may use), not price and not bill (it
//! reports tokens), and it knows no client connection: dropping an answer ends the upstream's work at once.

mod call;
mod dialect;
mod error;
mod json;
mod judge;
mod llm;
mod request;
mod sse;
mod stream;
pub mod translate;
mod usage;
mod view;

pub use crate::dialect::{models_list, openai_error};
pub use crate::error::LlmError;
pub use crate::llm::{Answer, AnswerBody, Attempt, Credential, CredentialError, Llm, LlmOptions, Sent};
pub use crate::request::ChatRequest;
pub use crate::stream::{ChatStream, StreamEnd};
pub use crate::usage::Usage;
