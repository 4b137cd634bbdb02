use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The top-level arguments of a call as (name, text), for the tags of `context.arguments`.
///
/// # Errors
/// Says why the arguments have no single reading: no object, no JSON, or a key that stands there twice, at any depth.
pub(crate) fn as_text(json: &str) -> Result<Vec<(String, String)>, String> {
    let Pairs(pairs) =
        serde_json::from_str(json).map_err(|e| format!("the arguments are no JSON object: {e}"))?;
    pairs
        .into_iter()
        .map(|(name, raw)| {
            let text = raw.get();
            let value = match text.as_bytes().first() {
                Some(b'"') => serde_json::from_str::<String>(text).map_err(|e| e.to_string()),
                Some(b'{' | b'[') => serde_json::from_str::<Canonical>(text)
                    .map(|value| value.0.to_string())
                    .map_err(|e| format!("the argument `{name}` cannot be read: {e}")),
                // Numbers as they stand: a detour through a float would change large ones.
                _ => Ok(text.to_owned()),
            };
            value.map(|value| (name, value))
        })
        .collect()
}

struct Pairs<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Pairs<'de> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct PairsVisitor;
        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Pairs<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let (mut pairs, mut seen) = (Vec::new(), HashSet::new());
                while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom("a key stands there twice"));
                    }
                    pairs.push((name, value));
                }
                Ok(Pairs(pairs))
            }
        }
        d.deserialize_map(PairsVisitor)
    }
}

/// A value in which no key stands twice.
struct Canonical(serde_json::Value);

impl<'de> Deserialize<'de> for Canonical {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct CanonicalVisitor;
        impl<'de> Visitor<'de> for CanonicalVisitor {
            type Value = Canonical;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Canonical(serde_json::Value::Null))
            }

            fn visit_bool<E>(self, v: bool) -> Result<Self::Value, E> {
                Ok(Canonical(v.into()))
            }

            fn visit_i64<E>(self, v: i64) -> Result<Self::Value, E> {
                Ok(Canonical(v.into()))
            }

            fn visit_u64<E>(self, v: u64) -> Result<Self::Value, E> {
                Ok(Canonical(v.into()))
            }

            fn visit_f64<E>(self, v: f64) -> Result<Self::Value, E> {
                Ok(Canonical(v.into()))
            }

            fn visit_str<E>(self, v: &str) -> Result<Self::Value, E> {
                Ok(Canonical(v.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut items = Vec::new();
                while let Some(Canonical(item)) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Canonical(items.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut object = serde_json::Map::new();
                while let Some((name, Canonical(value))) = map.next_entry::<String, Canonical>()? {
                    if object.insert(name, value).is_some() {
                        return Err(A::Error::custom("a key stands there twice"));
                    }
                }
                Ok(Canonical(object.into()))
            }
        }
        d.deserialize_any(CanonicalVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_one_text() {
        let json = r#"{"s":"a\u002fb","n":12345678901234567890123,"f":1.0,"b":true,"z":null,"o":{"p":"\u002fetc"},"l":[1, 2]}"#;
        let pairs = as_text(json).unwrap();
        let expected = [
            ("s", "a/b"),
            ("n", "12345678901234567890123"),
            ("f", "1.0"),
            ("b", "true"),
            ("z", "null"),
            ("o", r#"{"p":"/etc"}"#),
            ("l", "[1,2]"),
        ];
        assert_eq!(pairs, expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
        assert_eq!(as_text("{}").unwrap(), []);
    }

    #[test]
    fn arguments_with_two_readings_are_refused() {
        for bad in [
            r#"{"a":1,"a":2}"#,
            r#"{"a":1,"\u0061":2}"#,
            r#"{"o":{"a":1,"a":2}}"#,
            r#"{"l":[{"a":1,"a":1}]}"#,
            "[]",
            "1",
            "{",
        ] {
            assert!(as_text(bad).is_err(), "{bad}");
        }
    }
}
