//! What can be told of an answer that cannot be read as a whole, so that the call that waits for it learns so.

use std::borrow::Cow;

use serde::Deserializer as _;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};

/// What the beginning of a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Glance {
    /// The answer to this call.
    Answer(u64),
    /// An answer, and not said yet to which call; or a batch, which may hold one.
    Perhaps,
    /// A request, a notification, or no message.
    Other,
}

/// Looks at the beginning of a line: at the top level only, and as far as it is JSON.
pub(crate) fn begins(line: &[u8]) -> Glance {
    let mut seen = Seen::default();
    // An error is where the line ends or stops being JSON; what was seen before that counts.
    drop(serde_json::Deserializer::from_slice(line).deserialize_any(&mut seen));
    // The id of a request is the child's own and names none of our calls.
    match seen {
        Seen { request: true, .. } => Glance::Other,
        Seen { answer: true, id: Some(id), .. } => Glance::Answer(id),
        Seen { answer: true, .. } | Seen { batch: true, .. } => Glance::Perhaps,
        Seen { .. } => Glance::Other,
    }
}

/// The id at the very end of an object, where many servers write it: `…,"id":7}`. There it can stand in no string and
/// in no inner object, whatever comes before.
pub(crate) fn ends(line: &[u8]) -> Option<u64> {
    let rest = line.trim_ascii_end().strip_suffix(b"}")?.trim_ascii_end();
    let rest = rest.strip_suffix(br#""jsonrpc":"2.0""#).map_or(rest, |rest| {
        let rest = rest.trim_ascii_end();
        rest.strip_suffix(b",").unwrap_or(rest).trim_ascii_end()
    });
    let digits = rest.iter().rev().take_while(|b| b.is_ascii_digit()).count();
    let (rest, id) = rest.split_at_checked(rest.len().checked_sub(digits)?)?;
    let rest = rest.trim_ascii_end().strip_suffix(b":")?.trim_ascii_end();
    let rest = rest.strip_suffix(br#""id""#)?.trim_ascii_end();
    matches!(rest.last(), Some(b',' | b'{')).then_some(())?;
    std::str::from_utf8(id).ok()?.parse().ok()
}

#[derive(Debug, Default)]
struct Seen {
    id: Option<u64>,
    answer: bool,
    request: bool,
    batch: bool,
}

impl<'de> Visitor<'de> for &mut Seen {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            match key.as_ref() {
                "id" => self.id = map.next_value::<serde_json::Value>()?.as_u64(),
                other => {
                    self.answer |= matches!(other, "result" | "error");
                    self.request |= matches!(other, "method" | "params");
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _seq: A) -> Result<(), A::Error> {
        self.batch = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_tells_which_call_is_answered() {
        for (line, expected) in [
            (r#"{"jsonrpc":"2.0","id":7,"result":{"content":[{"text":"aaa"#, Glance::Answer(7)),
            (r#" { "id" : 7 , "error" : {"#, Glance::Answer(7)),
            (r#"{"result":{"id":9},"id":7}"#, Glance::Answer(7)),
            (r#"{"jsonrpc":"2.0","id":7,"result":NaN}"#, Glance::Answer(7)),
            (r#"{"result":{"id":9,"text":"\"id\":8"#, Glance::Perhaps),
            (r#"{"result":[],"id":"seven","#, Glance::Perhaps),
            (r#"[{"jsonrpc":"2.0","id":7,"result":"#, Glance::Perhaps),
            // Cut in the middle of the number.
            (r#"{"jsonrpc":"2.0","id":7"#, Glance::Other),
            (
                r#"{"jsonrpc":"2.0","id":7,"method":"sampling/createMessage","params":{"result":"#,
                Glance::Other,
            ),
            (r#"{"method":"notifications/message","params":{"#, Glance::Other),
            (r#"{"params":{"#, Glance::Other),
            (r#"{"text":"#, Glance::Other),
            ("{ not json", Glance::Other),
            ("a banner", Glance::Other),
            ("", Glance::Other),
        ] {
            assert_eq!(begins(line.as_bytes()), expected, "{line}");
        }
    }

    #[test]
    fn an_end_tells_it_too_and_is_not_deceived() {
        for (line, expected) in [
            (r#"aaa"}]},"jsonrpc":"2.0","id":7}"#, Some(7)),
            ("aaa\"}]}, \"id\" : 7 }\r", Some(7)),
            (r#"aaa"}]},"id":7,"jsonrpc":"2.0"}"#, Some(7)),
            (r#"aaa"}]}}"#, None),
            (r#"aaa","id":7}}"#, None),
            (r#"aaa\"id":7}"#, None),
            (r#"aaa,\"id\":7}"}"#, None),
            (r#""uuid":7}"#, None),
            (r#","id":-7}"#, None),
            (r#","id":}"#, None),
            (r#","id":99999999999999999999}"#, None),
            ("7}", None),
            ("}", None),
            ("", None),
        ] {
            assert_eq!(ends(line.as_bytes()), expected, "{line}");
        }
    }
}
