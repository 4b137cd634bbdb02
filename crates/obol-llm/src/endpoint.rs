use bytes::Bytes;
use obol_model::Kind;

use crate::dialect::openai_error;
use crate::translate::messages_error;

/// What a caller may ask of a model (DESIGN §11.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `POST /v1/chat/completions`.
    ChatCompletions,
    /// `POST /v1/messages`.
    Messages,
    /// `POST /v1/messages/count_tokens`.
    CountTokens,
    /// `POST /v1/responses`.
    Responses,
    /// `POST /v1/embeddings`.
    Embeddings,
}

/// Whose API an endpoint belongs to: the shape of its errors, and which providers have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI's.
    OpenAi,
    /// Anthropic's.
    Anthropic,
}

impl Endpoint {
    /// Below a provider's base URL, and below `/v1` here.
    pub fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat/completions",
            Self::Messages => "messages",
            Self::CountTokens => "messages/count_tokens",
            Self::Responses => "responses",
            Self::Embeddings => "embeddings",
        }
    }

    /// Whose it is.
    pub fn api(self) -> Api {
        match self {
            Self::ChatCompletions | Self::Responses | Self::Embeddings => Api::OpenAi,
            Self::Messages | Self::CountTokens => Api::Anthropic,
        }
    }
}

impl Api {
    /// An error object in the shape that its SDKs read. `message` is shown to the caller as it is.
    pub fn error(self, kind: Kind, code: &str, message: &str, param: Option<&str>) -> Bytes {
        match self {
            Self::OpenAi => openai_error(kind, code, message, param),
            Self::Anthropic => messages_error(kind, code, message),
        }
    }
}
