//! How the names and URIs of many servers appear as those of one (DESIGN §9.3). Pure.

use std::borrow::Cow;

use obol_model::ConnectionName;
use obol_model::snapshot::Namespace;
use serde_json::value::RawValue;

use crate::wire::{self, Object, Splice};

pub use obol_model::names::{MAX_NAME, exposed_name as exposed};

/// The URI (or URI template) under which `uri` of `connection` appears.
pub fn exposed_uri(connection: &ConnectionName, namespace: Namespace, uri: &str) -> String {
    match namespace {
        Namespace::Prefix => format!("{connection}+{uri}"),
        Namespace::None => uri.to_owned(),
    }
}

/// The connection that the prefix of an exposed URI names, and the upstream's own URI.
///
/// Connection names contain no `+`, so the first one ends the prefix.
pub fn split_uri(uri: &str) -> Option<(ConnectionName, &str)> {
    let (prefix, rest) = uri.split_once('+')?;
    Some((prefix.parse().ok()?, rest))
}

/// Rewrites the URIs inside the result of `method`: resource links and embedded resources of tool results and prompt
/// messages, and the contents of a read resource. Everything else stays as it is, to the byte.
pub fn rewrite_result<'a>(
    connection: &ConnectionName,
    namespace: Namespace,
    method: &str,
    text: &'a str,
) -> Cow<'a, str> {
    // Most results carry no resource at all; looking for the word costs far less than reading the object. The word
    // could be spelled with escapes, which no serializer does for ASCII letters.
    if namespace == Namespace::None || memchr::memmem::find(text.as_bytes(), b"\"uri\"").is_none() {
        return Cow::Borrowed(text);
    }
    let Ok(object) = Object::parse(text) else { return Cow::Borrowed(text) };
    let mut splice = Splice::new(text);
    let uri = |splice: &mut Splice<'_>, owner: &Object<'_>| {
        if let Some(raw) = owner.get("uri")
            && let Some(value) = wire::string(raw)
        {
            let exposed = exposed_uri(connection, namespace, &value);
            splice.replace(raw, serde_json::Value::from(exposed).to_string());
        }
    };
    let block = |splice: &mut Splice<'_>, raw: &RawValue| {
        let Ok(block) = Object::parse(raw.get()) else { return };
        match block.str("type").as_deref() {
            Some("resource_link") => uri(splice, &block),
            Some("resource") => {
                if let Some(resource) = block.object("resource") {
                    uri(splice, &resource);
                }
            }
            _ => {}
        }
    };
    match method {
        "tools/call" => {
            for raw in object.get("content").and_then(wire::array).unwrap_or_default() {
                block(&mut splice, raw);
            }
        }
        "prompts/get" => {
            for raw in object.get("messages").and_then(wire::array).unwrap_or_default() {
                if let Some(content) = Object::parse(raw.get()).ok().and_then(|m| m.get("content")) {
                    // One block, or (sampling's shape, used by some servers) an array of them.
                    match wire::array(content) {
                        Some(blocks) => blocks.into_iter().for_each(|b| block(&mut splice, b)),
                        None => block(&mut splice, content),
                    }
                }
            }
        }
        "resources/read" => {
            for raw in object.get("contents").and_then(wire::array).unwrap_or_default() {
                if let Ok(contents) = Object::parse(raw.get()) {
                    uri(&mut splice, &contents);
                }
            }
        }
        _ => {}
    }
    if splice.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(splice.finish()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conn(name: &str) -> ConnectionName {
        name.parse().unwrap()
    }

    #[test]
    fn names_are_joined_or_cut_with_a_hash() {
        assert_eq!(exposed(&conn("git"), Namespace::Prefix, "log"), "git__log");
        assert_eq!(exposed(&conn("git"), Namespace::None, "a.b"), "a.b");
        let dotted = exposed(&conn("git"), Namespace::Prefix, "a.b");
        assert!(dotted.starts_with("git__a_b_") && dotted.len() == 17, "{dotted}");
        let (x, y) = ("x".repeat(60) + "1", "x".repeat(60) + "2");
        let (x, y) =
            (exposed(&conn("git"), Namespace::Prefix, &x), exposed(&conn("git"), Namespace::Prefix, &y));
        assert!(x != y && x.len() == MAX_NAME && y.len() == MAX_NAME);
        assert_ne!(
            exposed(&conn("git"), Namespace::Prefix, "a.b"),
            exposed(&conn("git"), Namespace::Prefix, "a:b")
        );
    }

    #[test]
    fn a_prefixed_uri_names_its_connection() {
        assert_eq!(split_uri("docs+file:///a+b").unwrap(), (conn("docs"), "file:///a+b"));
        assert!(split_uri("file:///a").is_none());
        assert!(split_uri("A+x").is_none());
        // `git+https://` is a scheme in use, and a connection named `git` owns it: the prefix wins.
        assert_eq!(split_uri("git+https://x").unwrap().1, "https://x");
    }

    fn rewritten(method: &str, text: &str) -> String {
        rewrite_result(&conn("docs"), Namespace::Prefix, method, text).into_owned()
    }

    #[test]
    fn uris_of_results_are_rewritten_and_nothing_else() {
        assert_eq!(
            rewritten(
                "tools/call",
                r#"{"content":[ {"type":"text","text":"\"uri\" 1.0"},{"uri":"a:1","type":"resource_link","n":1.0},{"type":"resource","resource":{"uri":"a:2","text":"t"}}],"structuredContent":{"uri":"a:3"}}"#
            ),
            r#"{"content":[ {"type":"text","text":"\"uri\" 1.0"},{"uri":"docs+a:1","type":"resource_link","n":1.0},{"type":"resource","resource":{"uri":"docs+a:2","text":"t"}}],"structuredContent":{"uri":"a:3"}}"#
        );
        assert_eq!(
            rewritten("resources/read", r#"{"contents":[{"uri":"a:1","text":"x"}]}"#),
            r#"{"contents":[{"uri":"docs+a:1","text":"x"}]}"#
        );
        assert_eq!(
            rewritten(
                "prompts/get",
                r#"{"messages":[{"role":"user","content":{"type":"resource","resource":{"uri":"a:1"}}}]}"#
            ),
            r#"{"messages":[{"role":"user","content":{"type":"resource","resource":{"uri":"docs+a:1"}}}]}"#
        );
    }
}
