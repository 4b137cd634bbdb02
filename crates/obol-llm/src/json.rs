//! Looking into JSON text without reading all of it.

use memchr::{memchr2, memmem};

/// Whether `json` may have a member `name` (given with its quotes) with another value than `null`. Never misses one;
/// a string that looks like one is a false alarm. An escaped quote cannot be mistaken for the closing one: in a
/// string it has a backslash before it.
pub(crate) fn may_have(json: &[u8], name: &memmem::Finder<'_>) -> bool {
    members(json, name).any(|value| !value.starts_with(b"null"))
}

/// What stands after `"name":`, for each place that looks like that member.
pub(crate) fn members<'a>(json: &'a [u8], name: &memmem::Finder<'_>) -> impl Iterator<Item = &'a [u8]> {
    name.find_iter(json).filter_map(|at| {
        let after = json.get(at + name.needle().len()..)?.trim_ascii_start();
        Some(after.strip_prefix(b":")?.trim_ascii_start())
    })
}

/// Whether no bracket stands deeper than `max`; brackets inside strings do not count.
pub(crate) fn depth_within(json: &[u8], max: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                if depth > max {
                    return false;
                }
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    true
}

/// Calls `each` with the name and the raw content of every string in the first object or array of `json` that is a
/// value. Strings in an array have the name of the array.
pub(crate) fn strings<'a>(json: &'a [u8], mut each: impl FnMut(&'a [u8], &'a [u8])) {
    let mut name: &[u8] = b"";
    let mut depth = 0_usize;
    let mut rest = json;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                let (text, after) = split_string(rest);
                if after.trim_ascii_start().starts_with(b":") {
                    name = text;
                } else {
                    each(name, text);
                }
                rest = after;
            }
            _ => continue,
        }
        if depth == 0 {
            return;
        }
    }
}

/// Splits after the end of the string whose opening quote is already gone: its raw content, and what follows.
fn split_string(text: &[u8]) -> (&[u8], &[u8]) {
    let mut from = 0;
    while let Some(at) = text.get(from..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        let at = from + at;
        if text.get(at) == Some(&b'"') {
            let (content, rest) = text.split_at_checked(at).unwrap_or((text, b""));
            return (content, rest.get(1..).unwrap_or_default());
        }
        from = at + 2;
    }
    (text, b"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(json: &str) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
        strings(json.as_bytes(), |name, value| found.push((text(name), text(value))));
        found
    }

    #[test]
    fn strings_are_found_with_their_names() {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            all(r#"{"a" : "x\"y", "b":["1",{"c":"\\"}], "d": 3},"e":"no"#),
            [pair("a", r#"x\"y"#), pair("b", "1"), pair("c", r"\\")]
        );
        assert_eq!(all(r#"null,"a":"b""#).len(), 0);
        assert_eq!(all(r#"{"a":"cut"#), [pair("a", "cut")]);
    }

    #[test]
    fn null_members_are_no_members() {
        let usage = memmem::Finder::new(r#""usage""#);
        for (json, expected) in [
            (r#"{"usage":null}"#, false),
            (r#"{"usage" : null}"#, false),
            (r#"{"usage":{"a":1}}"#, true),
            (r#"{"a":{"usage":null},"usage": {}}"#, true),
            (r#"{"content":"usage"}"#, false),
            (r#"{"content":"\"usage\": 1"}"#, false),
        ] {
            assert_eq!(may_have(json.as_bytes(), &usage), expected, "{json}");
        }
    }
}
