//! YAML as a tree in which every node knows where it stands, so that all faults of a file can be reported together.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{
    DuplicateKeyPolicy, MergeKeyPolicy, MessageFormatter as _, Spanned, UserMessageFormatter,
};

/// A node and its place.
pub(crate) type Node = Spanned<Value>;

/// Line and column, from 1.
pub(crate) type Place = (u64, u64);

#[derive(Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    /// Its text is taken from the source: a float on the way would change prices.
    Number,
    Text(String),
    List(Vec<Node>),
    /// In the order of the file, repeated keys included.
    Map(Vec<(Spanned<String>, Node)>),
}

impl Value {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "true or false",
            Self::Number => "a number",
            Self::Text(_) => "text",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
        }
    }
}

pub(crate) fn place<T>(node: &Spanned<T>) -> Place {
    (node.referenced.line(), node.referenced.column())
}

/// The keys of a mapping; none of what is no mapping.
pub(crate) fn names_in(node: &Node) -> Vec<&str> {
    match &node.value {
        Value::Map(entries) => entries.iter().map(|(key, _)| key.value.as_str()).collect(),
        _ => Vec::new(),
    }
}

/// Parses one document.
pub(crate) fn parse(text: &str) -> Result<Node, (Place, String)> {
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        merge_keys: MergeKeyPolicy::Error,
        strict_booleans: true,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let error = error.without_snippet();
        let place = error.location().map_or((1, 1), |l| (l.line(), l.column()));
        (place, UserMessageFormatter.format_message(error).into_owned())
    })
}

/// The source text of a scalar.
pub(crate) fn scalar_text<'a>(source: &'a str, node: &Node) -> &'a str {
    let span = node.defined.span();
    let start = span.byte_offset().and_then(|o| usize::try_from(o).ok()).unwrap_or(usize::MAX);
    let length = span.byte_len().and_then(|l| usize::try_from(l).ok()).unwrap_or(0);
    source.get(start..start.saturating_add(length)).unwrap_or_default().trim()
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct ValueVisitor;
        impl<'de> Visitor<'de> for ValueVisitor {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("YAML")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
                Ok(Value::Bool(v))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Value, E> {
                Ok(Value::Number)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Value, E> {
                Ok(Value::Number)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
                Ok(Value::Number)
            }

            fn visit_str<E>(self, v: &str) -> Result<Value, E> {
                Ok(Value::Text(v.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Value::List(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Value::Map(entries))
            }
        }
        d.deserialize_any(ValueVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_text_and_everything_its_place() {
        let text = "a: &x 0.10\nü: { c: 12345678901234567890.5, d: *x }\n";
        let node = parse(text).unwrap();
        let Value::Map(top) = &node.value else { panic!() };
        assert_eq!(scalar_text(text, &top[0].1), "0.10");
        let Value::Map(inner) = &top[1].1.value else { panic!() };
        assert_eq!((place(&inner[0].0), place(&inner[0].1)), ((2, 6), (2, 9)));
        assert_eq!(scalar_text(text, &inner[0].1), "12345678901234567890.5");
        assert_eq!(scalar_text(text, &inner[1].1), "0.10");
    }
}
