use std::collections::VecDeque;

use bytes::Bytes;
use serde_json::value::RawValue;

use super::{CallError, EventKind, ListKind};
use crate::wire::{self, Incoming, Message, Object, RpcError, Splice};

/// What one message of an upstream is for.
#[derive(Debug)]
pub(super) enum Sorted {
    /// The result of the request.
    Result(Bytes),
    /// Its error object.
    Error(Bytes),
    /// A notification that belongs to the request, ready for the client.
    Notification(Bytes),
    /// Something about the server as a whole.
    Shared(EventKind),
    /// The gateway's own answer to a request of the server.
    Reply(Bytes),
    /// Nothing to do.
    Nothing,
}

/// Sorts the message or batch in `bytes`, seen by the request `id`, into `out`. `token` is the client's progress
/// token: progress of another request, and progress that nobody asked for, is dropped.
pub(super) fn sort(
    bytes: &Bytes,
    id: u64,
    token: Option<&RawValue>,
    out: &mut VecDeque<Sorted>,
) -> Result<(), CallError> {
    if bytes.iter().find(|b| !b.is_ascii_whitespace()) != Some(&b'[') {
        out.push_back(sort_one(bytes, id, token)?);
        return Ok(());
    }
    // 2025-03-26, "Batching". Each entry is taken apart by itself, so that a notification keeps its own bytes.
    let entries: Vec<&RawValue> = serde_json::from_slice(bytes).map_err(|_| NO_MESSAGE)?;
    for entry in entries {
        out.push_back(sort_one(&bytes.slice_ref(entry.get().as_bytes()), id, token)?);
    }
    Ok(())
}

const NO_MESSAGE: CallError = CallError::Protocol { reason: "it sent something that is no JSON-RPC message" };

fn sort_one(bytes: &Bytes, id: u64, token: Option<&RawValue>) -> Result<Sorted, CallError> {
    let message = match wire::parse(bytes) {
        Ok(Incoming::Single(message)) => message,
        Ok(Incoming::Batch(_)) => return Err(NO_MESSAGE),
        Err(e) => {
            tracing::debug!(error = %e, "upstream sent no JSON-RPC message");
            return Err(NO_MESSAGE);
        }
    };
    Ok(match message {
        Message::Response { id: of, result, error } => sort_response(bytes, of, id, result, error),
        Message::Request { id: of, method, .. } => Sorted::Reply(answer(of, &method)),
        Message::Notification { method, params } => match method.as_ref() {
            "notifications/progress" => restore_progress(bytes, params, id, token),
            // The server takes a question back that the gateway has refused anyway.
            "notifications/cancelled" => Sorted::Nothing,
            // Not of this call alone, though the server chose its stream.
            m => match shared(m, params) {
                Some(kind) => Sorted::Shared(kind),
                None => Sorted::Notification(bytes.clone()),
            },
        },
    })
}

fn sort_response(
    bytes: &Bytes,
    of: &RawValue,
    id: u64,
    result: Option<&RawValue>,
    error: Option<&RawValue>,
) -> Sorted {
    // An error without id is what servers send when they refuse before they have read the id.
    let ours = of.get().parse() == Ok(id) || (of.get() == "null" && error.is_some());
    match (ours, result, error) {
        (true, Some(result), _) => Sorted::Result(bytes.slice_ref(result.get().as_bytes())),
        (true, None, Some(error)) => Sorted::Error(bytes.slice_ref(error.get().as_bytes())),
        _ => Sorted::Nothing,
    }
}

/// The gateway answers pings itself and has declared nothing else that a server could ask for.
pub(super) fn answer(id: &RawValue, method: &str) -> Bytes {
    if method == "ping" {
        wire::response(id, "{}")
    } else {
        wire::error_response(Some(id), &RpcError::new(RpcError::METHOD_NOT_FOUND, "Method not found"))
    }
}

fn restore_progress(bytes: &Bytes, params: Option<&RawValue>, id: u64, token: Option<&RawValue>) -> Sorted {
    let restored = || {
        let (token, text) = (token?, std::str::from_utf8(bytes).ok()?);
        let found = Object::parse(params?.get()).ok()?.get("progressToken")?;
        if found.get().parse() != Ok(id) {
            return None;
        }
        let mut splice = Splice::new(text);
        splice.replace(found, token.get());
        Some(Bytes::from(splice.finish()))
    };
    restored().map_or(Sorted::Nothing, Sorted::Notification)
}

/// What a notification says of the server as a whole.
pub(super) fn shared(method: &str, params: Option<&RawValue>) -> Option<EventKind> {
    if method == "notifications/resources/updated" {
        let uri = Object::parse(params?.get()).ok()?.str("uri")?.into_owned();
        return Some(EventKind::ResourceUpdated { uri });
    }
    ListKind::changed_by(method).map(EventKind::ListChanged)
}

/// Puts `id` in the place of the client's progress token. Tokens are unique upstream, although clients count them from
/// one (progress, "Progress Flow").
pub(super) fn replace_token(params: &str, id: u64) -> Option<String> {
    let object = Object::parse(params).ok()?;
    let token = object.object("_meta")?.get("progressToken")?;
    let mut splice = Splice::new(params);
    splice.replace(token, id.to_string());
    Some(splice.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(text: &str, token: Option<&str>) -> Vec<Sorted> {
        let token = token.map(|t| serde_json::from_str::<Box<RawValue>>(t).unwrap());
        let mut out = VecDeque::new();
        sort(&Bytes::from(text.to_owned()), 7, token.as_deref(), &mut out).unwrap();
        out.into()
    }

    #[test]
    fn a_result_is_the_very_bytes_that_came() {
        let all = sorted(r#"{"jsonrpc":"2.0","result": {"a":1.0,"b":12345678901234567890},"id":7}"#, None);
        assert!(matches!(&all[..], [Sorted::Result(r)] if r == r#"{"a":1.0,"b":12345678901234567890}"#));
    }

    #[test]
    fn answers_to_others_are_nothing_and_an_error_without_id_is_ours() {
        assert!(matches!(sorted(r#"{"jsonrpc":"2.0","result":{},"id":8}"#, None)[..], [Sorted::Nothing]));
        assert!(matches!(sorted(r#"{"jsonrpc":"2.0","result":{},"id":"7"}"#, None)[..], [Sorted::Nothing]));
        assert!(matches!(sorted(r#"{"jsonrpc":"2.0","error":{},"id":null}"#, None)[..], [Sorted::Error(_)]));
    }

    #[test]
    fn progress_gets_the_clients_spelling_back_and_foreign_progress_is_dropped() {
        let progress = |t: &str| {
            format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progress":0.50,"progressToken":{t}}}}}"#
            )
        };
        let all = sorted(&progress("7"), Some(r#""\u0041b""#));
        assert!(matches!(&all[..], [Sorted::Notification(n)] if *n == progress(r#""\u0041b""#)));
        assert!(matches!(sorted(&progress("8"), Some("1"))[..], [Sorted::Nothing]));
        assert!(matches!(sorted(&progress("7"), None)[..], [Sorted::Nothing]));
    }

    #[test]
    fn pings_are_answered_and_other_requests_refused() {
        let all = sorted(
            r#"[{"jsonrpc":"2.0","id":"p","method":"ping"},{"jsonrpc":"2.0","id":1,"method":"roots/list"},
                {"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info"}},
                {"jsonrpc":"2.0","method":"notifications/tools/list_changed"},
                {"jsonrpc":"2.0","id":7,"result":{}}]"#,
            None,
        );
        assert!(matches!(
            &all[..],
            [
                Sorted::Reply(ping),
                Sorted::Reply(refused),
                Sorted::Notification(log),
                Sorted::Shared(EventKind::ListChanged(ListKind::Tools)),
                Sorted::Result(_),
            ] if ping == r#"{"jsonrpc":"2.0","id":"p","result":{}}"#
                && refused.windows(6).any(|w| w == b"-32601")
                && log == r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info"}}"#
        ));
    }

    #[test]
    fn the_token_is_replaced_and_nothing_else() {
        let params = r#"{"name":"x","_meta":{"a":1,"progressToken":"t"},"arguments":{"progressToken":"t"}}"#;
        assert_eq!(
            replace_token(params, 9).unwrap(),
            r#"{"name":"x","_meta":{"a":1,"progressToken":9},"arguments":{"progressToken":"t"}}"#
        );
    }
}
