//! An OpenAI-compatible model server without a model: it answers deterministically from the last user message.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt as _;
use http::{HeaderMap, StatusCode, header};
use obol_testkit::Failure;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::listen;

/// The models, from short answers to long ones.
const MODELS: [&str; 2] = ["demo-small", "demo-large"];

/// Between two words of a stream, so that one can see it stream.
const WORD: Duration = Duration::from_millis(20);

/// What every object claims as its time of creation, so that answers are the same each time.
const CREATED: u64 = 1_700_000_000;

pub(crate) async fn run(listen: SocketAddr, secret: String) -> Result<ExitCode, Failure> {
    let server = Arc::new(Server { bearer: format!("Bearer {secret}"), answered: AtomicU64::new(0) });
    let app = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat))
        .with_state(server);
    listen::serve("model", listen, "/v1", app).await
}

struct Server {
    bearer: String,
    answered: AtomicU64,
}

/// A refusal in OpenAI's shape.
struct Refusal {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let error = json!({
            "error": {
                "message": self.message,
                "type": "invalid_request_error",
                "param": null,
                "code": self.code,
            }
        });
        (self.status, Json(error)).into_response()
    }
}

impl Server {
    fn admit(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        if headers.get(header::AUTHORIZATION).is_some_and(|value| value.as_bytes() == self.bearer.as_bytes())
        {
            return Ok(());
        }
        Err(Refusal {
            status: StatusCode::UNAUTHORIZED,
            code: "invalid_api_key",
            message: "Incorrect API key provided.".to_owned(),
        })
    }
}

#[derive(Deserialize)]
struct Request {
    model: String,
    messages: Vec<Message>,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    stream_options: StreamOptions,
    #[serde(alias = "max_completion_tokens")]
    max_tokens: Option<usize>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: Value,
}

impl Message {
    /// The content's text, be it a string or a list of parts.
    fn text(&self) -> String {
        match &self.content {
            Value::String(text) => text.clone(),
            Value::Array(parts) => {
                let texts: Vec<&str> =
                    parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)).collect();
                texts.join(" ")
            }
            _ => String::new(),
        }
    }
}

async fn models(State(server): State<Arc<Server>>, headers: HeaderMap) -> Result<Json<Value>, Refusal> {
    server.admit(&headers)?;
    let models =
        MODELS.map(|id| json!({"id": id, "object": "model", "created": CREATED, "owned_by": "obol-demo"}));
    Ok(Json(json!({"object": "list", "data": models})))
}

async fn chat(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Refusal> {
    server.admit(&headers)?;
    let request: Request = serde_json::from_slice(&body).map_err(|why| Refusal {
        status: StatusCode::BAD_REQUEST,
        code: "invalid_json",
        message: format!("We could not parse the body of your request: {why}"),
    })?;
    if !MODELS.contains(&request.model.as_str()) {
        return Err(Refusal {
            status: StatusCode::NOT_FOUND,
            code: "model_not_found",
            message: format!("The model `{}` does not exist.", request.model),
        });
    }
    let answer = Answer::to(&request, server.answered.fetch_add(1, Ordering::Relaxed));
    Ok(if request.stream {
        answer.stream(request.stream_options.include_usage)
    } else {
        Json(answer.whole()).into_response()
    })
}

/// What is answered, ready to be sent in one piece or in many.
struct Answer {
    id: String,
    model: String,
    words: Vec<String>,
    finish_reason: &'static str,
    usage: Value,
}

impl Answer {
    fn to(request: &Request, number: u64) -> Self {
        let user = request.messages.iter().rev().find(|message| message.role == "user");
        let mut words = compose(&request.model, &user.map(Message::text).unwrap_or_default());
        let mut finish_reason = "stop";
        if let Some(limit) = request.max_tokens.filter(|&limit| tokens_of(&words) > limit) {
            while words.len() > 1 && tokens_of(&words) > limit {
                words.pop();
            }
            finish_reason = "length";
        }
        let prompt_tokens: usize = request.messages.iter().map(|message| 4 + tokens(&message.text())).sum();
        let completion_tokens = tokens_of(&words);
        let usage = json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        });
        Self {
            id: format!("chatcmpl-demo-{number}"),
            model: request.model.clone(),
            words,
            finish_reason,
            usage,
        }
    }

    fn whole(&self) -> Value {
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": CREATED,
            "model": self.model,
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": self.words.concat(), "refusal": null},
                "logprobs": null,
                "finish_reason": self.finish_reason,
            }],
            "usage": self.usage,
        })
    }

    fn stream(self, include_usage: bool) -> Response {
        let chunk = |choices: Value, usage: &Value| {
            let mut chunk = json!({
                "id": self.id,
                "object": "chat.completion.chunk",
                "created": CREATED,
                "model": self.model,
                "choices": choices,
            });
            if include_usage && let Some(chunk) = chunk.as_object_mut() {
                // Null in every chunk but the last, as the original does it.
                chunk.insert("usage".to_owned(), usage.clone());
            }
            format!("data: {chunk}\n\n")
        };
        let choice = |delta: Value, finish_reason: Value| {
            chunk(json!([{"index": 0, "delta": delta, "finish_reason": finish_reason}]), &Value::Null)
        };
        let mut events = vec![choice(json!({"role": "assistant", "content": ""}), Value::Null)];
        events.extend(self.words.iter().map(|word| choice(json!({"content": word}), Value::Null)));
        events.push(choice(json!({}), json!(self.finish_reason)));
        if include_usage {
            events.push(chunk(json!([]), &self.usage));
        }
        events.push("data: [DONE]\n\n".to_owned());
        let paced = futures::stream::iter(events).then(|event| async {
            tokio::time::sleep(WORD).await;
            Ok::<_, std::convert::Infallible>(event)
        });
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(paced)).into_response()
    }
}

/// The answer in pieces that end after a space: an echo from the small model, a summary from the large one.
fn compose(model: &str, asked: &str) -> Vec<String> {
    let words: Vec<&str> = asked.split_whitespace().collect();
    let text = match (model, words.len()) {
        (_, 0) => "You said nothing.".to_owned(),
        ("demo-large", count) => {
            let start = words.iter().take(12).copied().collect::<Vec<_>>().join(" ");
            let rest = if count > 12 { " …" } else { "" };
            format!(
                "You wrote {count} words. In short: “{start}{rest}”. This is a demo: no model has thought about it."
            )
        }
        _ => format!("You said: “{}”", words.join(" ")),
    };
    text.split_inclusive(' ').map(str::to_owned).collect()
}

/// About as many tokens as a real tokenizer would count: four characters each.
fn tokens(text: &str) -> usize {
    text.chars().count().div_ceil(4)
}

fn tokens_of(words: &[String]) -> usize {
    tokens(&words.concat())
}
