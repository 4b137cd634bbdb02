//! LLM providers: one request, the targets that may serve it, an answer that is relayed byte for byte or translated, and
//! what it used (DESIGN §11).
//!
//! [`LlmRequest`] reads the few members that matter and leaves every other byte of the body alone; [`Llm::call`] tries the
//! targets until one begins to answer, and an [`Account`] is told of each; [`AnswerStream`] relays whole events and reads
//! the usage on the way. Upstream requests are built from nothing: of a client's headers only those of its dialect reach
//! this crate's requests.
//!
//! [`translate`] puts requests, answers, streams and errors of one dialect into another.
//!
//! It will not authorize (the caller passes only targets that the request may use), not price and not bill (it
//! reports tokens), and it knows no client connection: dropping an answer ends the upstream's work at once.

mod answer;
mod breaker;
mod call;
mod dialect;
mod endpoint;
mod error;
mod json;
mod judge;
mod llm;
mod request;
mod route;
mod sse;
mod stream;
pub mod translate;
mod upstream;
mod usage;
mod view;

pub use crate::answer::{Account, Answer, AnswerBody, AnswerStream};
pub use crate::dialect::{model_object, models_list};
pub use crate::endpoint::{Api, Endpoint};
pub use crate::error::LlmError;
pub use crate::llm::{Credential, CredentialError, Llm, LlmOptions};
pub use crate::request::LlmRequest;
pub use crate::route::Route;
pub use crate::usage::{Prompt, Usage, load_vocabulary};
