//! Who asks for what: keys, routes, models, and what goes wrong on the way.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::answer::{self, Answer, AnswerBody, Cut, Unfinished};
use crate::fake_llm::{Received, raw_answer};

use super::openai::Object;
use super::refusal::{Checked, Refusal};
use super::{Charged, Endpoint, KEPT_REQUESTS, Shared, Trouble, chat, embeddings, messages, responses};

/// When everything was made.
pub(super) const CREATED: u64 = 1_790_000_000;

/// An answer before it is bytes.
pub(super) enum Out {
    Json(Value),
    Events(Vec<String>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Dialect {
    OpenAi,
    Anthropic,
}

/// A version of Anthropic's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    /// 2023-06-01
    Old,
    /// 2026-10-21: no sampling parameters, no citations in what users say.
    New,
}

impl Version {
    fn of(head: &Parts) -> Checked<Self> {
        let version = head.headers.get("anthropic-version").map(|value| value.to_str().unwrap_or_default());
        match version {
            Some("2023-06-01") => Ok(Self::Old),
            Some("2026-10-21") => Ok(Self::New),
            Some(other) => {
                Err(Refusal::bad(format!("anthropic-version: \"{other}\" is not a valid version")))
            }
            None => Err(Refusal::bad("anthropic-version: header is required")),
        }
    }
}

pub(super) async fn handle(request: Request<Incoming>, shared: Arc<Shared>) -> Answer {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Err(Cut) };
    let body = body.to_bytes();
    // Before the call is counted: whoever saw the count may release at once.
    let released = shared.releases.subscribe();
    shared.record(&head, &body);
    let path = head.uri.path();
    let anthropic = path.starts_with("/v1/messages") || head.headers.contains_key("anthropic-version");
    let dialect = if anthropic { Dialect::Anthropic } else { Dialect::OpenAi };
    let request_id = match dialect {
        Dialect::OpenAi => shared.ids.response("req_"),
        Dialect::Anthropic => shared.ids.anthropic("req_"),
    };

    let mut trouble = None;
    let checked = shared.check_key(&head, dialect).and_then(|()| {
        if head.method == Method::POST {
            trouble = shared.troubles.lock().pop_front();
        }
        match trouble {
            Some(Trouble::Status(status)) => Err(Refusal::new(status, format!("scripted {status}"))),
            Some(Trouble::Raw(_) | Trouble::Cut) => Ok(Out::Json(Value::Null)),
            _ => shared.serve(&head, &body, dialect),
        }
    });
    match trouble {
        Some(Trouble::Cut) => return Err(Cut),
        Some(Trouble::Raw(raw)) => return raw_answer(&shared.left_early, raw, released),
        _ => {}
    }
    let mut response = match checked {
        Ok(Out::Json(value)) => answer::json(StatusCode::OK, value.to_string()),
        Ok(Out::Events(events)) => {
            let watch = Unfinished::watch(&shared.left_early);
            let body = AnswerBody::fed(Some(watch), move |client| async move {
                let (cut, hold) = match trouble {
                    Some(Trouble::CutAfter(events)) => (Some(events), None),
                    Some(Trouble::HoldAfter(events)) => (None, Some(events)),
                    _ => (None, None),
                };
                let mut released = released;
                for (sent, event) in events.into_iter().enumerate() {
                    if hold == Some(sent) {
                        released.changed().await.ok();
                    }
                    let event = if cut == Some(sent) { Err(Cut) } else { Ok(Bytes::from(event)) };
                    if client.send(event).await.is_err() {
                        return;
                    }
                }
            });
            answer::answer(StatusCode::OK, "text/event-stream; charset=utf-8", body)
        }
        Err(refusal) => {
            let error = match dialect {
                Dialect::OpenAi => refusal.openai(),
                Dialect::Anthropic => refusal.anthropic(&request_id),
            };
            answer::json(refusal.status, error.to_string())
        }
    };
    stamp(&mut response, dialect, &request_id);
    Ok(response)
}

/// The headers that the real ones send, account and limits included.
fn stamp(response: &mut Response<AnswerBody>, dialect: Dialect, request_id: &str) {
    let id = HeaderValue::try_from(request_id).expect("ids are letters");
    let fixed: &[(&str, &str)] = match dialect {
        Dialect::OpenAi => &[
            ("openai-organization", "org-of-the-account"),
            ("openai-version", "2020-10-01"),
            ("openai-processing-ms", "7"),
            ("x-ratelimit-limit-requests", "10000"),
            ("x-ratelimit-remaining-requests", "9999"),
            ("x-ratelimit-reset-requests", "6ms"),
        ],
        Dialect::Anthropic => &[
            ("anthropic-organization-id", "org-of-the-account"),
            ("anthropic-ratelimit-requests-limit", "10000"),
            ("anthropic-ratelimit-requests-remaining", "9999"),
            ("anthropic-ratelimit-requests-reset", "2026-09-21T13:33:20Z"),
        ],
    };
    let headers = response.headers_mut();
    headers.insert(if dialect == Dialect::OpenAi { "x-request-id" } else { "request-id" }, id);
    for (name, value) in fixed {
        headers.insert(*name, HeaderValue::from_static(value));
    }
}

impl Shared {
    pub(super) fn charge(&self, endpoint: Endpoint, model: &str, charged: Charged) {
        self.charged.lock().entry((endpoint, model.to_owned())).or_default().add(charged);
    }

    fn record(&self, head: &Parts, body: &Bytes) {
        let mut kept = self.received.lock();
        if kept.len() == KEPT_REQUESTS {
            kept.pop_front();
        }
        let path = head.uri.path_and_query().map_or(head.uri.path(), |path| path.as_str()).to_owned();
        kept.push_back(Received {
            method: head.method.clone(),
            path,
            headers: head.headers.clone(),
            body: body.clone(),
        });
        drop(kept);
        if head.method == Method::POST {
            self.calls.fetch_add(1, Ordering::SeqCst);
        }
        self.changed.notify_waiters();
    }

    fn check_key(&self, head: &Parts, dialect: Dialect) -> Checked<()> {
        let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let fits = |key: &str| self.config.key.as_ref().is_none_or(|known| known == key);
        match dialect {
            Dialect::OpenAi => {
                let bearer =
                    header(header::AUTHORIZATION.as_str()).and_then(|value| value.strip_prefix("Bearer "));
                match bearer {
                    Some(key) if fits(key) => Ok(()),
                    Some(_) => Err(Refusal::new(401, "Incorrect API key provided.").code("invalid_api_key")),
                    None => Err(Refusal::new(401, "You didn't provide an API key.")),
                }
            }
            Dialect::Anthropic => {
                // SDKs since October 2026 send a bearer, those before a header of their own, which wins.
                let bearer =
                    header(header::AUTHORIZATION.as_str()).and_then(|value| value.strip_prefix("Bearer "));
                match header("x-api-key").or(bearer) {
                    Some(key) if fits(key) => Ok(()),
                    Some(_) => Err(Refusal::new(401, "invalid x-api-key")),
                    None => Err(Refusal::new(401, "x-api-key header is required")),
                }
            }
        }
    }

    fn serve(&self, head: &Parts, body: &Bytes, dialect: Dialect) -> Checked<Out> {
        let path: Vec<&str> = head.uri.path().trim_start_matches('/').split('/').collect();
        let query = head.uri.query().unwrap_or_default();
        match (dialect, head.method.as_str(), &path[..]) {
            (_, "GET", ["v1", "models"]) => Ok(self.models(dialect)),
            (_, "GET", ["v1", "models", id]) => self.model(dialect, id),
            (Dialect::Anthropic, "POST", ["v1", "messages"]) => {
                messages::answer(self, Version::of(head)?, &object(body)?)
            }
            (Dialect::Anthropic, "POST", ["v1", "messages", "count_tokens"]) => {
                messages::count_tokens(self, Version::of(head)?, &object(body)?)
            }
            (Dialect::Anthropic, ..) => Err(Refusal::new(404, "Not Found")),
            (_, "POST", ["v1", "chat", "completions"]) => chat::answer(self, &object(body)?),
            (_, "POST", ["v1", "embeddings"]) => embeddings::answer(self, &object(body)?),
            (_, "POST", ["v1", "responses"]) => responses::answer(self, &object(body)?),
            (_, "GET", ["v1", "responses", id]) => responses::get(self, id),
            (_, "DELETE", ["v1", "responses", id]) => responses::delete(self, id),
            (_, "POST", ["v1", "responses", id, "cancel"]) => responses::cancel(self, id),
            (_, "GET", ["v1", "responses", id, "input_items"]) => responses::input_items(self, id, query),
            (_, method, _) => Err(Refusal::new(404, format!("Invalid URL ({method} {})", head.uri.path()))),
        }
    }

    fn models_of(&self, dialect: Dialect) -> Vec<Value> {
        match dialect {
            Dialect::OpenAi => {
                let names = self.config.openai.iter().chain(&self.config.embedding);
                let model =
                    |name| json!({"id": name, "object": "model", "created": CREATED, "owned_by": "system"});
                names.map(model).collect()
            }
            Dialect::Anthropic => {
                let model = |name: &String| {
                    json!({
                        "type": "model", "id": name, "display_name": name, "created_at": "2026-09-21T13:33:20Z",
                        "lifecycle": "active", "max_input_tokens": 200_000, "max_tokens": 64_000
                    })
                };
                self.config.anthropic.iter().map(model).collect()
            }
        }
    }

    fn models(&self, dialect: Dialect) -> Out {
        let data = self.models_of(dialect);
        Out::Json(match dialect {
            Dialect::OpenAi => json!({"object": "list", "data": data}),
            Dialect::Anthropic => {
                let id_of = |model: Option<&Value>| model.map_or(Value::Null, |model| model["id"].clone());
                let (first, last) = (id_of(data.first()), id_of(data.last()));
                json!({"data": data, "has_more": false, "first_id": first, "last_id": last})
            }
        })
    }

    fn model(&self, dialect: Dialect, id: &str) -> Checked<Out> {
        let found = self.models_of(dialect).into_iter().find(|model| model["id"] == id);
        found.map(Out::Json).ok_or_else(|| match dialect {
            Dialect::OpenAi => Refusal::new(404, format!("The model '{id}' does not exist"))
                .param("model")
                .code("model_not_found"),
            Dialect::Anthropic => Refusal::new(404, format!("model: {id}")),
        })
    }
}

fn object(body: &Bytes) -> Checked<Object> {
    serde_json::from_slice(body)
        .map_err(|_| Refusal::bad("We could not parse the JSON body of your request."))
}
