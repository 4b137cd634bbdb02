//! Reading JSON without building it: an object's members one by one, every value as the bytes that it has.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::Dialect;
use super::error::RequestError;
use super::wire::EMPTY_OBJECT;
use crate::json;
use crate::request::MAX_DEPTH;

/// Objects that are read have fewer members than this in any dialect. The bound keeps the search for members that
/// stand there twice cheap.
const MOST_MEMBERS: usize = 100;

/// Where a value stands. Written out only when something is wrong with it.
#[derive(Clone, Copy)]
pub(super) enum Path<'p> {
    Body,
    Member(&'p Path<'p>, &'p str),
    Item(&'p Path<'p>, usize),
}

impl<'p> Path<'p> {
    pub(super) fn member(&'p self, name: &'p str) -> Path<'p> {
        Path::Member(self, name)
    }

    pub(super) fn item(&'p self, index: usize) -> Path<'p> {
        Path::Item(self, index)
    }

    pub(super) fn wrong(&self, expected: &'static str) -> RequestError {
        RequestError::Type { field: self.to_string(), expected }
    }

    pub(super) fn missing(&self) -> RequestError {
        RequestError::Missing { field: self.to_string() }
    }

    pub(super) fn refused(&self, target: Dialect, why: impl Into<Cow<'static, str>>) -> RequestError {
        RequestError::Unsupported { field: self.to_string(), target, why: why.into() }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Body => f.write_str("body"),
            Self::Member(Self::Body, name) => f.write_str(name),
            Self::Member(parent, name) => write!(f, "{parent}.{name}"),
            Self::Item(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

/// A member that cannot be carried, for a reason that is worth saying.
pub(super) struct Refused {
    pub(super) name: &'static str,
    /// Values, without whitespace, that mean absence.
    pub(super) defaults: &'static [&'static str],
    pub(super) why: &'static str,
}

pub(super) const fn refused(
    name: &'static str,
    defaults: &'static [&'static str],
    why: &'static str,
) -> Refused {
    Refused { name, defaults, why }
}

/// The members of an object that nobody took yet.
pub(super) struct Object<'a> {
    members: Vec<(Cow<'a, str>, &'a RawValue)>,
}

impl<'a> Object<'a> {
    /// The object that a whole body is.
    pub(super) fn of_body(body: &'a [u8]) -> Result<Self, RequestError> {
        let text =
            str::from_utf8(body).map_err(|_| RequestError::Json { why: "it is not UTF-8".to_owned() })?;
        if !json::depth_within(body, MAX_DEPTH) {
            let why = format!("it is nested deeper than {MAX_DEPTH} levels");
            return Err(RequestError::Json { why });
        }
        let raw: &RawValue =
            serde_json::from_str(text).map_err(|e| RequestError::Json { why: e.to_string() })?;
        Self::of(raw, Path::Body)
    }

    pub(super) fn of(raw: &'a RawValue, path: Path<'_>) -> Result<Self, RequestError> {
        if !raw.get().starts_with('{') {
            return Err(path.wrong("an object"));
        }
        let Members(members) =
            serde_json::from_str(raw.get()).map_err(|e| RequestError::Json { why: e.to_string() })?;
        for (index, (name, _)) in members.iter().enumerate() {
            if members.iter().take(index).any(|(other, _)| other == name) {
                // A provider might read the other one.
                return Err(RequestError::Twice { field: path.member(name).to_string() });
            }
        }
        Ok(Self { members })
    }

    /// An object of one member, for values that have a short form.
    pub(super) fn single(name: &'static str, value: &'a RawValue) -> Self {
        Self { members: vec![(Cow::Borrowed(name), value)] }
    }

    /// The value of a member; nothing for null, which means absence in both dialects.
    pub(super) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.members.iter().position(|(other, _)| other == name)?;
        let (_, value) = self.members.swap_remove(at);
        (value.get() != "null").then_some(value)
    }

    pub(super) fn need(&mut self, name: &str, path: Path<'_>) -> Result<&'a RawValue, RequestError> {
        self.take(name).ok_or_else(|| path.member(name).missing())
    }

    /// The value of `type`, or of another member that says what an object is.
    pub(super) fn word(&mut self, name: &str, path: Path<'_>) -> Result<Cow<'a, str>, RequestError> {
        text(self.need(name, path)?, path.member(name))
    }

    /// Refuses what is left, unless it says nothing.
    pub(super) fn end(self, path: Path<'_>, target: Dialect, known: &[Refused]) -> Result<(), RequestError> {
        for (name, value) in self.members {
            if value.get() == "null" {
                continue;
            }
            let here = path.member(&name);
            let Some(refused) = known.iter().find(|refused| refused.name == name) else {
                return Err(here.refused(target, "the member is not known here"));
            };
            let compact: String = value.get().split_ascii_whitespace().collect();
            if !refused.defaults.contains(&compact.as_str()) {
                return Err(here.refused(target, refused.why));
            }
        }
        Ok(())
    }
}

/// In the order of the text. Values are not looked into.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

        struct ObjectVisitor;
        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some((Name(name), value)) = map.next_entry()? {
                    if members.len() == MOST_MEMBERS {
                        return Err(A::Error::custom("an object has more members than any dialect knows"));
                    }
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }
        d.deserialize_map(ObjectVisitor)
    }
}

/// The items of an array.
pub(super) fn items<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Vec<&'a RawValue>, RequestError> {
    serde_json::from_str(raw.get()).map_err(|_| path.wrong("an array"))
}

/// A string as it stands there, with its quotes and escapes.
pub(super) fn literal<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<&'a RawValue, RequestError> {
    if is_string(raw) { Ok(raw) } else { Err(path.wrong("a string")) }
}

pub(super) fn is_string(raw: &RawValue) -> bool {
    raw.get().starts_with('"')
}

/// A string, decoded; not copied when it has no escapes.
pub(super) fn text<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<Cow<'a, str>, RequestError> {
    decode(raw).ok_or_else(|| path.wrong("a string"))
}

/// The text of a string; nothing when it is none.
pub(super) fn decode(raw: &RawValue) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    serde_json::from_str::<Text<'_>>(raw.get()).ok().map(|Text(text)| text)
}

/// What stands between the quotes of a string.
pub(super) fn inner(raw: &RawValue) -> &str {
    let text = raw.get();
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or_default()
}

pub(super) fn boolean(raw: &RawValue, path: Path<'_>) -> Result<bool, RequestError> {
    match raw.get() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(path.wrong("a boolean")),
    }
}

/// A number as it stands there.
pub(super) fn number<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<&'a RawValue, RequestError> {
    let is_number = raw.get().starts_with(|first: char| first == '-' || first.is_ascii_digit());
    if is_number { Ok(raw) } else { Err(path.wrong("a number")) }
}

/// A whole number as it stands there.
pub(super) fn whole<'a>(raw: &'a RawValue, path: Path<'_>) -> Result<&'a RawValue, RequestError> {
    raw.get().parse::<u64>().map_err(|_| path.wrong("a whole number"))?;
    Ok(raw)
}

/// A string that joins the contents of others. Works on what stands between their quotes, so that nothing is decoded.
pub(super) fn join<'a>(parts: impl IntoIterator<Item = &'a str>) -> Option<Box<RawValue>> {
    let mut joined = String::from("\"");
    joined.extend(parts);
    joined.push('"');
    RawValue::from_string(joined).ok()
}

/// The object that a call's arguments are. Some providers have an empty string where there are none.
pub(super) fn arguments_object(arguments: Cow<'_, str>) -> Option<Box<RawValue>> {
    let arguments = if arguments.trim().is_empty() { Cow::Borrowed(EMPTY_OBJECT) } else { arguments };
    if !json::depth_within(arguments.as_bytes(), MAX_DEPTH) {
        return None;
    }
    let object = RawValue::from_string(arguments.into_owned()).ok()?;
    object.get().starts_with('{').then_some(object)
}
