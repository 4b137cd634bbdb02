use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::WireError;

/// The members of a JSON object in their order, each value as the text that came. Duplicate keys are refused: policy
/// and upstream must see the same request (DESIGN §9.1).
#[derive(Debug)]
pub struct Object<'a> {
    members: Vec<(Cow<'a, str>, &'a RawValue)>,
}

impl<'a> Object<'a> {
    /// Reads the members of the object that `text` holds.
    ///
    /// # Errors
    /// When `text` is no JSON object, or has a key twice.
    pub fn parse(text: &'a str) -> Result<Self, WireError> {
        let object: Self = serde_json::from_str(text).map_err(|e| WireError::Json(e.to_string()))?;
        for (i, (key, _)) in object.members.iter().enumerate() {
            if object.members.iter().skip(i + 1).any(|(other, _)| other == key) {
                return Err(WireError::DuplicateKey(key.chars().take(80).collect()));
            }
        }
        Ok(object)
    }

    /// The text of the member `key`.
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        self.members.iter().find(|(k, _)| k == key).map(|(_, v)| *v)
    }

    /// The member `key` when it is a string.
    pub fn str(&self, key: &str) -> Option<Cow<'a, str>> {
        self.get(key).and_then(string)
    }

    /// The member `key` when it is `true` or `false`.
    pub fn bool(&self, key: &str) -> Option<bool> {
        self.get(key).and_then(|v| v.get().parse().ok())
    }

    /// The member `key` when it is an object.
    pub fn object(&self, key: &str) -> Option<Object<'a>> {
        self.get(key).and_then(|v| Object::parse(v.get()).ok())
    }

    /// Whether there is no member.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The members in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.members.iter().map(|(k, v)| (k.as_ref(), *v))
    }
}

/// The text of a JSON string, borrowed when it has no escapes.
pub fn string(value: &RawValue) -> Option<Cow<'_, str>> {
    serde_json::from_str::<Text<'_>>(value.get()).ok().map(|t| t.0)
}

/// The elements of a JSON array, each as the text that came.
pub fn array(value: &RawValue) -> Option<Vec<&RawValue>> {
    serde_json::from_str(value.get()).ok()
}

/// `Cow<str>` that borrows where it can; serde's own impl for `Cow` always owns.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, v: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(v)))
            }
            fn visit_str<E>(self, v: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(v.to_owned())))
            }
        }
        d.deserialize_str(V)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Object<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::with_capacity(8);
                while let Some((key, value)) = map.next_entry::<Text<'de>, &'de RawValue>()? {
                    members.push((key.0, value));
                }
                Ok(Object { members })
            }
        }
        d.deserialize_map(V)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_spelling() {
        let object = Object::parse(r#"{ "a" : 1.0, "b":12345678901234567890123, "c" : "\u00e9" }"#).unwrap();
        assert_eq!(object.get("a").unwrap().get(), "1.0");
        assert_eq!(object.get("b").unwrap().get(), "12345678901234567890123");
        assert_eq!(object.get("c").unwrap().get(), r#""\u00e9""#);
        assert_eq!(object.str("c").unwrap(), "é");
    }

    #[test]
    fn a_key_that_stands_twice_is_refused_however_it_is_spelled() {
        assert!(matches!(Object::parse(r#"{"name":1,"name":2}"#), Err(WireError::DuplicateKey(_))));
        assert!(matches!(Object::parse(r#"{"name":1,"n\u0061me":2}"#), Err(WireError::DuplicateKey(_))));
    }
}
