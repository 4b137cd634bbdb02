use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{MAX_DEPTH, RpcError, WireError, object};

/// The most entries of a batch (DESIGN §9.6).
const MAX_BATCH: usize = 50;

/// What one body holds.
#[derive(Debug)]
pub enum Incoming<'a> {
    /// One message.
    Single(Message<'a>),
    /// A batch of 2025-03-26: 1 to 50 entries, each judged by itself.
    Batch(Vec<Result<Message<'a>, WireError>>),
}

/// One JSON-RPC message, its parts as the text that came.
#[derive(Debug)]
pub enum Message<'a> {
    /// Wants an answer.
    Request {
        /// A string or a number, as it is spelled.
        id: &'a RawValue,
        /// The method.
        method: Cow<'a, str>,
        /// The params, when there are any.
        params: Option<&'a RawValue>,
    },
    /// Wants none.
    Notification {
        /// The method.
        method: Cow<'a, str>,
        /// The params, when there are any.
        params: Option<&'a RawValue>,
    },
    /// Answers a request; exactly one of `result` and `error` is present.
    Response {
        /// The id of the request; `null` where the other side could not tell it.
        id: &'a RawValue,
        /// The result.
        result: Option<&'a RawValue>,
        /// The error object.
        error: Option<&'a RawValue>,
    },
}

fn present<'de: 'a, 'a, D: serde::Deserializer<'de>>(d: D) -> Result<Option<&'a RawValue>, D::Error> {
    // `Option` alone would read `"id": null` as no id at all.
    <&'a RawValue>::deserialize(d).map(Some)
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    jsonrpc: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    method: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    error: Option<&'a RawValue>,
}

/// Reads a body.
///
/// # Errors
/// When it is no JSON, too deep, or no JSON-RPC 2.0 message. Entries of a batch are judged one by one.
pub fn parse(body: &[u8]) -> Result<Incoming<'_>, WireError> {
    let text = std::str::from_utf8(body).map_err(|_| WireError::Json("it is not UTF-8".to_owned()))?;
    if !depth_within(body, MAX_DEPTH) {
        return Err(WireError::TooDeep);
    }
    if !text.trim_start().starts_with('[') {
        return message(text).map(Incoming::Single);
    }
    let entries: Vec<&RawValue> = serde_json::from_str(text).map_err(|e| json(&e))?;
    if entries.is_empty() || entries.len() > MAX_BATCH {
        return Err(WireError::BatchSize { max: MAX_BATCH, found: entries.len() });
    }
    Ok(Incoming::Batch(entries.into_iter().map(|e| message(e.get())).collect()))
}

fn json(e: &serde_json::Error) -> WireError {
    WireError::Json(e.to_string())
}

fn message(text: &str) -> Result<Message<'_>, WireError> {
    if !text.trim_start().starts_with('{') {
        // Told apart so that `{]` is a parse error and `5` an invalid request (JSON-RPC 2.0, "Error object").
        serde_json::from_str::<&RawValue>(text).map_err(|e| json(&e))?;
        return Err(WireError::Envelope("it is no object"));
    }
    let e: Envelope<'_> = serde_json::from_str(text).map_err(|e| {
        let reason = e.to_string();
        match reason.strip_prefix("duplicate field `").and_then(|r| r.split_once('`')) {
            Some((key, _)) => WireError::DuplicateKey(key.to_owned()),
            None => WireError::Json(reason),
        }
    })?;
    if e.jsonrpc.map(RawValue::get) != Some("\"2.0\"") {
        return Err(WireError::Envelope("`jsonrpc` must be \"2.0\""));
    }
    if let Some(params) = e.params
        && !params.get().starts_with('{')
    {
        return Err(WireError::Envelope("`params` must be an object"));
    }
    match (e.method, e.id) {
        (Some(method), id) => {
            if e.result.is_some() || e.error.is_some() {
                return Err(WireError::Envelope("a request has no `result` or `error`"));
            }
            let method = object::string(method).ok_or(WireError::Envelope("`method` must be a string"))?;
            match id {
                None => Ok(Message::Notification { method, params: e.params }),
                Some(id) if valid_id(id) => Ok(Message::Request { id, method, params: e.params }),
                Some(_) => Err(WireError::Envelope("`id` must be a string or a number")),
            }
        }
        (None, Some(id)) if e.result.is_some() != e.error.is_some() => {
            Ok(Message::Response { id, result: e.result, error: e.error })
        }
        (None, Some(_)) => {
            Err(WireError::Envelope("it has neither a `method` nor one of `result` and `error`"))
        }
        (None, None) => Err(WireError::Envelope("it has neither a `method` nor an `id`")),
    }
}

/// basic, "Requests": the id is a string or a number and never null.
fn valid_id(id: &RawValue) -> bool {
    id.get().len() <= 1024 && id.get().starts_with(|c: char| c == '"' || c == '-' || c.is_ascii_digit())
}

/// Whether no bracket stands deeper than `max`; brackets inside strings do not count.
fn depth_within(body: &[u8], max: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for b in body {
        if in_string {
            match b {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match b {
            b'"' => in_string = true,
            b'{' | b'[' => {
                depth += 1;
                if depth > max {
                    return false;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    true
}

fn assemble(parts: &[&str]) -> Bytes {
    let mut text = String::with_capacity(parts.iter().map(|p| p.len()).sum());
    for part in parts {
        text.push_str(part);
    }
    Bytes::from(text)
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A request with a numeric id.
pub fn request(id: u64, method: &str, params: Option<&str>) -> Bytes {
    let (id, method) = (id.to_string(), quoted(method));
    match params {
        Some(p) => {
            assemble(&[r#"{"jsonrpc":"2.0","id":"#, &id, r#","method":"#, &method, r#","params":"#, p, "}"])
        }
        None => assemble(&[r#"{"jsonrpc":"2.0","id":"#, &id, r#","method":"#, &method, "}"]),
    }
}

/// A notification.
pub fn notification(method: &str, params: Option<&str>) -> Bytes {
    let method = quoted(method);
    match params {
        Some(p) => assemble(&[r#"{"jsonrpc":"2.0","method":"#, &method, r#","params":"#, p, "}"]),
        None => assemble(&[r#"{"jsonrpc":"2.0","method":"#, &method, "}"]),
    }
}

/// A successful answer to the request `id`, which keeps its spelling.
pub fn response(id: &RawValue, result: &str) -> Bytes {
    assemble(&[r#"{"jsonrpc":"2.0","id":"#, id.get(), r#","result":"#, result, "}"])
}

/// An answer that carries an error object as raw text.
pub fn raw_error_response(id: &RawValue, error: &str) -> Bytes {
    assemble(&[r#"{"jsonrpc":"2.0","id":"#, id.get(), r#","error":"#, error, "}"])
}

/// A refusal of the request `id`; `null` where the id could not be read.
pub fn error_response(id: Option<&RawValue>, error: &RpcError) -> Bytes {
    let error = serde_json::to_string(error)
        .unwrap_or_else(|_| r#"{"code":-32603,"message":"the error could not be written"}"#.to_owned());
    assemble(&[r#"{"jsonrpc":"2.0","id":"#, id.map_or("null", RawValue::get), r#","error":"#, &error, "}"])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(text: &str) -> Message<'_> {
        match parse(text.as_bytes()).unwrap() {
            Incoming::Single(m) => m,
            Incoming::Batch(_) => panic!("a batch"),
        }
    }

    #[test]
    fn the_three_kinds_are_told_apart() {
        assert!(matches!(
            single(r#"{"jsonrpc":"2.0","id":"x","method":"ping"}"#),
            Message::Request { id, params: None, .. } if id.get() == "\"x\""
        ));
        assert!(matches!(
            single(r#"{"jsonrpc":"2.0","method":"a","params":{}}"#),
            Message::Notification { .. }
        ));
        assert!(matches!(
            single(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#),
            Message::Response { error: None, .. }
        ));
    }

    #[test]
    fn what_is_no_message_is_refused_with_a_reason() {
        let cases: &[(&str, i64)] = &[
            ("", -32700),
            ("{", -32700),
            ("nonsense", -32700),
            ("5", -32600),
            (r#""text""#, -32600),
            ("[]", -32600),
            ("{}", -32600),
            (r#"{"jsonrpc":"1.0","id":1,"method":"a"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":null,"method":"a"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":true,"method":"a"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":{},"method":"a"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1,"method":5}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":[]}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1,"result":{},"error":{}}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","method":"b"}"#, -32600),
        ];
        for (text, code) in cases {
            assert_eq!(parse(text.as_bytes()).unwrap_err().rpc().code, *code, "{text}");
        }
        assert_eq!(parse(b"\xff\xfe").unwrap_err().rpc().code, -32700);
    }

    #[test]
    fn depth_is_bounded_and_strings_do_not_count() {
        let deep = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"a","params":{{"x":{}{}}}}}"#,
            "[".repeat(200_000),
            "]".repeat(200_000)
        );
        assert_eq!(parse(deep.as_bytes()).unwrap_err(), WireError::TooDeep);
        let brackets =
            format!(r#"{{"jsonrpc":"2.0","method":"a","params":{{"x":"\"{}"}}}}"#, "[".repeat(500));
        assert!(parse(brackets.as_bytes()).is_ok());
    }

    #[test]
    fn entries_of_a_batch_are_judged_one_by_one() {
        let body = br#"[{"jsonrpc":"2.0","id":1,"method":"ping"},5]"#;
        let Incoming::Batch(entries) = parse(body).unwrap() else { panic!("no batch") };
        assert!(matches!(entries.as_slice(), [Ok(Message::Request { .. }), Err(WireError::Envelope(_))]));
        let many = format!("[{}]", vec!["5"; 51].join(","));
        assert!(matches!(parse(many.as_bytes()), Err(WireError::BatchSize { found: 51, .. })));
    }
}
