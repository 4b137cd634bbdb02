//! What a tool's definition is pinned by (`catalog: pinned`).

use std::collections::BTreeMap;

use aws_lc_rs::digest::{Context, SHA256};
use serde_json::value::RawValue;

/// Definitions that are nested deeper are compared as they are spelled.
const DEEPEST: usize = 64;

/// `sha256:` and the SHA-256 of a definition, in hexadecimal. White space, the order of members and the escapes of strings
/// do not count, since servers change them without meaning to; numbers count as they are spelled.
pub(super) fn digest(definition: &str) -> String {
    let mut hash = Context::new(&SHA256);
    feed(definition, DEEPEST, &mut hash);
    hash.finish().as_ref().iter().fold(String::from("sha256:"), |mut text, byte| {
        text.push_str(&format!("{byte:02x}"));
        text
    })
}

fn feed(text: &str, deepest: usize, hash: &mut Context) {
    let text = text.trim();
    if deepest > 0
        && let Ok(members) = serde_json::from_str::<BTreeMap<String, &RawValue>>(text)
    {
        hash.update(b"{");
        for (name, value) in members {
            string(&name, hash);
            feed(value.get(), deepest - 1, hash);
        }
        hash.update(b"}");
    } else if deepest > 0
        && let Ok(entries) = serde_json::from_str::<Vec<&RawValue>>(text)
    {
        hash.update(b"[");
        for entry in entries {
            feed(entry.get(), deepest - 1, hash);
            hash.update(b",");
        }
        hash.update(b"]");
    } else if let Ok(value) = serde_json::from_str::<String>(text) {
        string(&value, hash);
    } else {
        hash.update(text.as_bytes());
    }
}

/// In quotes and with its length, so that no text can imitate another or the marks around it.
fn string(text: &str, hash: &mut Context) {
    hash.update(format!("\"{}:", text.len()).as_bytes());
    hash.update(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_the_meaning() {
        let one = r#"{"name":"a","inputSchema":{"type":"object","n":[1.0,"\u0061b",null]}}"#;
        assert_eq!(
            digest(one),
            digest("{ \"inputSchema\" : {\"n\":[ 1.0 ,\"ab\",null],\n\"type\":\"object\"}, \"name\":\"a\"}")
        );
        assert_eq!((digest(one).len(), &digest(one)[..7]), (71, "sha256:"));
        for other in [
            r#"{"name":"a","inputSchema":{"type":"object","n":[1,"ab",null]}}"#,
            r#"{"name":"a","inputSchema":{"type":"object","n":["ab",1.0,null]}}"#,
            r#"{"name":"a","inputSchema":{"type":"object","n":[1.0,["ab",null]]}}"#,
            r#"{"name":"a","inputSchema":{"type":"object","n":[1.0,"ab","null"]}}"#,
            r#"{"name":"a","inputSchema":{"type":"object"}}"#,
        ] {
            assert_ne!(digest(one), digest(other), "{other}");
        }
        let deep = format!("{}{}", "[".repeat(5_000), "]".repeat(5_000));
        assert_ne!(digest(&deep), digest("[]"));
    }
}
