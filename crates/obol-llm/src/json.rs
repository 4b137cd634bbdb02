//! Looking into JSON text without reading all of it.

use memchr::{memchr, memchr2, memmem};

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

/// How many numbers there are in `json`.
pub(crate) fn numbers(json: &[u8]) -> u64 {
    let (mut count, mut in_number) = (0, false);
    let mut rest = json;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'"' {
            rest = split_string(after).1;
        }
        let is_number =
            matches!(byte, b'-' | b'0'..=b'9') || in_number && matches!(byte, b'.' | b'e' | b'E' | b'+');
        count += u64::from(is_number && !in_number);
        in_number = is_number;
    }
    count
}

/// Splits after the end of the string whose opening quote is already gone: its raw content, and what follows.
pub(crate) fn split_string(text: &[u8]) -> (&[u8], &[u8]) {
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

/// So much of the content of a JSON string at most, without a piece of a character or of an escape at its end.
pub(crate) fn beginning(text: &[u8], most: usize) -> &[u8] {
    if text.len() <= most {
        return text;
    }
    let mut end = most;
    let mut from = 0;
    while let Some(at) = text.get(from..end).and_then(|rest| memchr(b'\\', rest)) {
        let at = from + at;
        let escape = match text.get(at + 1..at + 4) {
            // The first half of a character, which the second one follows.
            Some([b'u', b'd' | b'D', b'8'..=b'9' | b'a'..=b'b' | b'A'..=b'B']) => 12,
            Some([b'u', ..]) => 6,
            _ => 2,
        };
        from = at + escape;
        if from > end {
            end = at;
        }
    }
    // Bytes of a character behind its first are 10xxxxxx.
    while text.get(end).is_some_and(|byte| byte & 0b1100_0000 == 0b1000_0000) && end > 0 {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
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
    fn numbers_are_counted_and_digits_of_strings_are_not() {
        for (json, expected) in
            [("[]", 0), ("[1, -2.5e+3,[44]]", 3), (r#"{"1":"2 \" 3","4":[true,null,5]}"#, 1), ("7", 1)]
        {
            assert_eq!(numbers(json.as_bytes()), expected, "{json}");
        }
    }

    #[test]
    fn the_beginning_of_a_text_has_whole_characters() {
        let text = r"aé\\u00e9\ud83d\ude00\n";
        for most in 0..=text.len() {
            let beginning = str::from_utf8(beginning(text.as_bytes(), most)).unwrap();
            let read: Result<String, _> = serde_json::from_str(&format!("\"{beginning}\""));
            assert!(beginning.len() <= most && read.is_ok(), "{most}: {beginning}");
        }
        assert_eq!(beginning(text.as_bytes(), text.len()), text.as_bytes());
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
