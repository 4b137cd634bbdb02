use serde_json::value::RawValue;

use super::Object;

/// Replaces parts of a text and leaves every other byte as it came: how the gateway changes the few things that it has
/// to change (DESIGN §9.1).
#[derive(Debug)]
pub struct Splice<'a> {
    text: &'a str,
    edits: Vec<(usize, usize, String)>,
}

impl<'a> Splice<'a> {
    /// Edits of `text`.
    pub fn new(text: &'a str) -> Self {
        Self { text, edits: Vec::new() }
    }

    /// Replaces `part`, which must be a slice of the text (a value found by [`Object::get`] in it); a foreign slice
    /// changes nothing.
    pub fn replace(&mut self, part: &RawValue, with: impl Into<String>) {
        if let Some(start) = self.offset(part.get()) {
            self.edits.push((start, start + part.get().len(), with.into()));
        }
    }

    /// Sets the member `key` of `object`, whose text (with its braces) is `object_text`, a slice of the text. A new
    /// member goes in front.
    pub fn set_member(&mut self, object: &Object<'_>, object_text: &str, key: &str, value: &str) {
        if let Some(old) = object.get(key) {
            self.replace(old, value);
            return;
        }
        let Some(brace) = object_text.find('{') else { return };
        if let Some(start) = self.offset(object_text) {
            let at = start + brace + 1;
            let key = serde_json::Value::from(key).to_string();
            let comma = if object.is_empty() { "" } else { "," };
            self.edits.push((at, at, format!("{key}:{value}{comma}")));
        }
    }

    /// Whether nothing would change.
    pub fn is_empty(&self) -> bool {
        self.edits.is_empty()
    }

    /// The text with all edits.
    pub fn finish(mut self) -> String {
        self.edits.sort_by_key(|(start, ..)| *start);
        let grown: usize = self.edits.iter().map(|(_, _, with)| with.len()).sum();
        let mut out = String::with_capacity(self.text.len() + grown);
        let mut at = 0;
        for (start, end, with) in &self.edits {
            // Overlapping edits would be a fault of the caller; the first one stands.
            if *start < at {
                continue;
            }
            out.push_str(self.text.get(at..*start).unwrap_or_default());
            out.push_str(with);
            at = *end;
        }
        out.push_str(self.text.get(at..).unwrap_or_default());
        out
    }

    fn offset(&self, part: &str) -> Option<usize> {
        let start = part.as_ptr().addr().checked_sub(self.text.as_ptr().addr())?;
        (start + part.len() <= self.text.len()).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_parts_change() {
        let text = r#"{ "name" : "a__b" , "arguments":{"n": 1.0,"big":123456789012345678901},"x":null}"#;
        let object = Object::parse(text).unwrap();
        let mut splice = Splice::new(text);
        splice.replace(object.get("name").unwrap(), r#""b""#);
        assert_eq!(
            splice.finish(),
            r#"{ "name" : "b" , "arguments":{"n": 1.0,"big":123456789012345678901},"x":null}"#
        );
    }

    #[test]
    fn members_are_set_or_put_in_front() {
        for (text, expected) in [
            (r"{}", r#"{"k":1}"#),
            (r#"{"a":2}"#, r#"{"k":1,"a":2}"#),
            (r#"{"a":2,"k":"old"}"#, r#"{"a":2,"k":1}"#),
        ] {
            let object = Object::parse(text).unwrap();
            let mut splice = Splice::new(text);
            splice.set_member(&object, text, "k", "1");
            assert_eq!(splice.finish(), expected);
        }
    }

    #[test]
    fn a_foreign_slice_changes_nothing() {
        let (text, other) = (r#"{"a":1}"#.to_owned(), r#"{"a":1}"#.to_owned());
        let object = Object::parse(&other).unwrap();
        let mut splice = Splice::new(&text);
        splice.replace(object.get("a").unwrap(), "2");
        assert_eq!(splice.finish(), text);
    }
}
