//! Tool calls that are sent again under their idempotency key (DESIGN §12.7).

use bytes::Bytes;
use http::HeaderMap;
use obol_mcp::wire::{self, Message, Object, RpcError, Splice};
use obol_meter::{Idempotency, StoredAnswer, UsageGuard};
use obol_model::{ConnectionName, Kind};
use serde_json::value::RawValue;

use super::refuse;
use crate::idempotency::{BadKey, Key};

/// In the `_meta` of a call: what the client calls it, for those that cannot set a header.
const KEY: &str = "io.obol/idempotency-key";
/// In the `_meta` of a result that was given before.
const REPLAYED: &str = "io.obol/idempotent-replayed";

/// The idempotency key of a tool call, with what stands for the call: everything that it asks for, but not its `_meta`,
/// where each request has a progress token of its own.
///
/// # Errors
/// When it is none, or there are two.
pub(super) fn key(
    headers: Option<&HeaderMap>,
    view: Option<&ConnectionName>,
    message: &Message<'_>,
) -> Result<Option<Idempotency>, RpcError> {
    let Message::Request { method, params: Some(params), .. } = message else { return Ok(None) };
    if method != "tools/call" {
        return Ok(None);
    }
    let bad = |e: BadKey| refuse::params(e.to_string());
    let of_headers = headers.map(Key::of_headers).transpose().map_err(bad)?.flatten();
    // Looking for the key costs nothing; only who mentions it is read, with whatever escapes before it.
    if of_headers.is_none() && !params.get().contains("idempotency-key") {
        return Ok(None);
    }
    // What is no object is refused by the call itself.
    let Ok(params) = Object::parse(params.get()) else { return Ok(None) };
    let in_meta = params.object("_meta").and_then(|meta| meta.get(KEY));
    let text = in_meta.map(|key| wire::string(key).ok_or(BadKey::Shape)).transpose().map_err(bad)?;
    let of_meta = text.as_deref().map(|text| Key::new(text.as_bytes())).transpose().map_err(bad)?;
    if of_headers.is_some() && of_meta.is_some() && of_headers != of_meta {
        return Err(bad(BadKey::Different));
    }
    let Some(key) = of_headers.or(of_meta) else { return Ok(None) };
    let view = view.map_or("", ConnectionName::as_str);
    let asked = params.iter().filter(|(name, _)| *name != "_meta");
    let asked = asked.flat_map(|(name, value)| [name.as_bytes(), value.get().as_bytes()]);
    Ok(Some(key.with(["tools/call".as_bytes(), view.as_bytes()].into_iter().chain(asked))))
}

/// Keeps the answer of a call for whoever sends it again: all of it but its id, which is another one then.
pub(super) fn remember(guard: &mut UsageGuard, response: &Bytes) {
    if !guard.is_keyed() {
        return;
    }
    let member = |text, name| Some((name, Object::parse(text).ok()?.get(name)?));
    let text = str::from_utf8(response).unwrap_or_default();
    match member(text, "result").or_else(|| member(text, "error")) {
        Some((name, value)) => guard.remember(StoredAnswer {
            status: 200,
            content_type: "application/json".to_owned(),
            body: format!("{{\"{name}\":{value}}}").into(),
        }),
        None => guard.remember_unknown(),
    }
}

/// The answer of before to the request that is sent again; a result says in its `_meta` that it is not new.
pub(super) fn replay(id: &RawValue, answer: &StoredAnswer) -> Result<Bytes, RpcError> {
    let strange =
        || refuse::rpc(Kind::Internal, "idempotency_unreadable", "the stored answer cannot be read", None);
    let text = str::from_utf8(&answer.body).map_err(|_| strange())?;
    let members = Object::parse(text).map_err(|_| strange())?;
    if let Some(error) = members.get("error") {
        return Ok(wire::raw_error_response(id, error.get()));
    }
    let result = members.get("result").ok_or_else(strange)?.get();
    let object = Object::parse(result).map_err(|_| strange())?;
    let mut splice = Splice::new(result);
    match object.get("_meta").and_then(|meta| Some((meta.get(), Object::parse(meta.get()).ok()?))) {
        Some((meta_text, meta)) => splice.set_member(&meta, meta_text, REPLAYED, "true"),
        None => splice.set_member(&object, result, "_meta", &format!("{{\"{REPLAYED}\":true}}")),
    }
    Ok(wire::response(id, &splice.finish()))
}

#[cfg(test)]
mod tests {
    use obol_mcp::wire::Incoming;

    use super::*;

    fn of(params: &str) -> Result<Option<Idempotency>, RpcError> {
        let text = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#);
        let Ok(Incoming::Single(message)) = wire::parse(text.as_bytes()) else { panic!("{text}") };
        key(None, None, &message)
    }

    #[test]
    fn a_call_is_all_that_it_asks_for_but_its_meta() {
        let one = of(r#"{"name":"a","arguments":{"x":1},"_meta":{"io.obol/idempotency-key":"k"}}"#)
            .unwrap()
            .unwrap();
        let same = r#"{"_meta":{"io.obol\/idempotency-key":"\u006b","progressToken":1},"name":"a","arguments":{"x":1}}"#;
        assert_eq!(of(same).unwrap(), Some(one));
        for other in [
            r#"{"name":"b","arguments":{"x":1},"_meta":{"io.obol/idempotency-key":"k"}}"#,
            r#"{"name":"a","arguments":{"x":2},"_meta":{"io.obol/idempotency-key":"k"}}"#,
            r#"{"name":"a","arguments":{"x":1},"more":1,"_meta":{"io.obol/idempotency-key":"k"}}"#,
        ] {
            let other = of(other).unwrap().unwrap();
            assert!(other.key == one.key && other.fingerprint != one.fingerprint);
        }
        assert_eq!(of(r#"{"name":"a","arguments":{"idempotency-key":"k"}}"#).unwrap(), None);
        assert!(of(r#"{"name":"a","_meta":{"io.obol/idempotency-key":1}}"#).is_err());
    }

    #[test]
    fn an_answer_has_the_id_of_the_new_request_and_says_that_it_is_old() {
        let id: &RawValue = serde_json::from_str("7").unwrap();
        for (stored, replayed) in [
            (
                r#"{"result":{"content":[]}}"#,
                r#"{"jsonrpc":"2.0","id":7,"result":{"_meta":{"io.obol/idempotent-replayed":true},"content":[]}}"#,
            ),
            (
                r#"{"result":{"_meta":{"a":1},"content":[]}}"#,
                r#"{"jsonrpc":"2.0","id":7,"result":{"_meta":{"io.obol/idempotent-replayed":true,"a":1},"content":[]}}"#,
            ),
            (
                r#"{"error":{"code":1,"message":"no"}}"#,
                r#"{"jsonrpc":"2.0","id":7,"error":{"code":1,"message":"no"}}"#,
            ),
        ] {
            let answer = StoredAnswer { status: 200, content_type: String::new(), body: stored.into() };
            assert_eq!(replay(id, &answer).unwrap(), replayed);
        }
        let strange = StoredAnswer { status: 200, content_type: String::new(), body: "{}".into() };
        assert!(replay(id, &strange).is_err());
    }
}
