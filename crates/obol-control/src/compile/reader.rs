use std::collections::HashSet;
use std::path::Path;
use std::str::FromStr;

use obol_model::{KeyId, NanoUsd, WorkspaceId};

use super::prices::Catalogue;
use super::yaml::{Node, Place, Value, place, scalar_text};
use super::{CompileOptions, clear_text};
use crate::Fault;
use crate::sources::Sources;

/// The highest number that Lua and JSON count exactly.
pub(super) const EXACT: u64 = (1 << 53) - 1;

/// What a compilation carries around: the file, and everything that is wrong with it so far.
pub(super) struct Reader<'a> {
    /// As shown in faults.
    pub(super) file: String,
    /// What relative paths start from.
    pub(super) folder: &'a Path,
    pub(super) text: &'a str,
    /// Where secrets are looked up and how they are sealed; without it nobody looks at them.
    pub(super) secrets: Option<&'a CompileOptions<'a>>,
    pub(super) sources: &'a mut Sources,
    /// Unknown until it was read; then the secrets cannot be sealed, and there is a fault.
    pub(super) workspace: Option<WorkspaceId>,
    /// What targets cost that do not say so themselves; `None` when the file names no catalogue.
    pub(super) catalogue: Option<Catalogue>,
    pub(super) faults: Vec<Fault>,
    pub(super) warnings: Vec<Fault>,
    /// See [`Compiled::keys`](crate::Compiled::keys).
    pub(super) keys: Vec<(KeyId, Fault)>,
}

/// A mapping with a fixed set of fields.
pub(super) struct Fields<'n> {
    pub(super) place: Place,
    entries: Vec<(&'n str, Place, &'n Node)>,
}

impl<'n> Fields<'n> {
    pub(super) fn get(&self, name: &str) -> Option<&'n Node> {
        self.entries
            .iter()
            .find(|(known, _, node)| *known == name && !matches!(node.value, Value::Null))
            .map(|e| e.2)
    }

    /// Where the field's name stands.
    pub(super) fn place_of(&self, name: &str) -> Option<Place> {
        self.entries.iter().find(|(known, ..)| *known == name).map(|e| e.1)
    }
}

impl<'a> Reader<'a> {
    /// Of a file in which nothing was read yet.
    pub(super) fn new(file: String, folder: &'a Path, text: &'a str, sources: &'a mut Sources) -> Self {
        Self {
            file,
            folder,
            text,
            secrets: None,
            sources,
            workspace: None,
            catalogue: None,
            faults: Vec::new(),
            warnings: Vec::new(),
            keys: Vec::new(),
        }
    }
}

impl Reader<'_> {
    pub(super) fn fault(
        &mut self,
        (line, column): Place,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        // The one place through which everything goes that quotes what somebody wrote.
        let message = clear_text::redacted(message.into());
        let help = Some(help.into()).filter(|h| !h.is_empty()).map(clear_text::redacted);
        self.faults.push(Fault { file: self.file.clone(), line, column, message, help });
    }

    pub(super) fn warn(&mut self, (line, column): Place, message: &str, help: &str) {
        let (message, help) = (message.to_owned(), Some(help.to_owned()));
        self.warnings.push(Fault { file: self.file.clone(), line, column, message, help });
    }

    fn wrong_type(&mut self, node: &Node, what: &str, expected: &str) {
        let help = match node.value {
            Value::Number | Value::Bool(_) if expected == "text" => {
                format!("write it in quotes: `\"{}\"`", scalar_text(self.text, node))
            }
            _ => String::new(),
        };
        self.fault(place(node), format!("{what} must be {expected}, this is {}", node.value.kind()), help);
    }

    /// A mapping with free keys; nothing is an empty one. Repeated keys are faults.
    pub(super) fn entries<'n>(&mut self, node: &'n Node, what: &str) -> Vec<(&'n str, Place, &'n Node)> {
        let entries = match &node.value {
            Value::Map(entries) => entries,
            Value::Null => return Vec::new(),
            _ => {
                self.wrong_type(node, what, "a mapping");
                return Vec::new();
            }
        };
        let mut seen = HashSet::new();
        let mut unique = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            if seen.insert(key.value.as_str()) {
                unique.push((key.value.as_str(), place(key), value));
            } else {
                self.fault(
                    place(key),
                    format!("`{}` stands there twice", key.value),
                    "remove one of the two",
                );
            }
        }
        unique
    }

    /// A mapping with the fields `known`; others are faults.
    pub(super) fn fields<'n>(&mut self, node: &'n Node, what: &str, known: &[&str]) -> Fields<'n> {
        let entries = self.entries(node, what);
        for (name, at, _) in &entries {
            if !known.contains(name) {
                let help = if *name == "headers" && known.contains(&"auth") {
                    "the one header of your own is `auth: { header: { name: x-api-key, value: { secret: \"env:NAME\" } } }`"
                        .to_owned()
                } else {
                    suggestion(name, known)
                };
                self.fault(*at, format!("{what} has no field `{}`", short(name)), help);
            }
        }
        Fields { place: place(node), entries }
    }

    pub(super) fn list<'n>(&mut self, node: &'n Node, what: &str) -> &'n [Node] {
        match &node.value {
            Value::List(items) => items,
            Value::Null => &[],
            _ => {
                self.wrong_type(node, what, "a list");
                &[]
            }
        }
    }

    pub(super) fn string<'n>(&mut self, node: &'n Node, what: &str) -> Option<&'n str> {
        if let Value::Text(text) = &node.value {
            return Some(text);
        }
        self.wrong_type(node, what, "text");
        None
    }

    /// Text, or the text of a number or of `true` and `false`.
    pub(super) fn scalar(&mut self, node: &Node, what: &str) -> Option<String> {
        match &node.value {
            Value::Number | Value::Bool(_) => Some(scalar_text(self.text, node).to_owned()),
            _ => self.string(node, what).map(str::to_owned),
        }
    }

    pub(super) fn boolean(&mut self, fields: &Fields<'_>, name: &str) -> Option<bool> {
        let node = fields.get(name)?;
        if let Value::Bool(value) = node.value {
            return Some(value);
        }
        self.wrong_type(node, &format!("`{name}`"), "true or false");
        None
    }

    /// A whole number from 1 to `most`.
    pub(super) fn count(&mut self, fields: &Fields<'_>, name: &str, most: u64) -> Option<u64> {
        let node = fields.get(name)?;
        let value = matches!(node.value, Value::Number)
            .then(|| scalar_text(self.text, node).parse().ok())
            .flatten()
            .filter(|n| (1..=most).contains(n));
        if value.is_none() {
            self.fault(place(node), format!("`{name}` must be a whole number from 1 to {most}"), "");
        }
        value
    }

    /// USD, read exactly from the text.
    pub(super) fn price(&mut self, fields: &Fields<'_>, name: &str) -> Option<NanoUsd> {
        let node = fields.get(name)?;
        let text = self.scalar(node, &format!("`{name}`"))?;
        match text.parse() {
            Ok(price) => Some(price),
            Err(e) => {
                self.fault(place(node), format!("{e}"), "write USD, such as `0.15`");
                None
            }
        }
    }

    /// The most that may be spent, in USD.
    pub(super) fn limit(&mut self, fields: &Fields<'_>, name: &str) -> Option<NanoUsd> {
        let node = fields.get(name)?;
        let text = self.scalar(node, &format!("`{name}`"))?;
        match NanoUsd::parse_limit(&text) {
            Ok(limit) => Some(limit),
            Err(e) => {
                self.fault(
                    place(node),
                    e.to_string(),
                    "write USD, such as `500`; more cannot be counted exactly",
                );
                None
            }
        }
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(
        &mut self,
        fields: &Fields<'_>,
        name: &str,
        words: &[(&str, T)],
    ) -> Option<T> {
        let node = fields.get(name)?;
        let text = self.string(node, &format!("`{name}`"))?;
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        if found.is_none() {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.fault(
                place(node),
                format!("`{name}` cannot be `{}`", short(text)),
                suggestion(text, &known),
            );
        }
        found
    }

    /// A name with a grammar.
    pub(super) fn id<T: FromStr<Err: std::fmt::Display>>(&mut self, text: &str, at: Place) -> Option<T> {
        text.parse().map_err(|e: T::Err| self.fault(at, e.to_string(), "")).ok()
    }
}

/// A hostile input must not become a page of output.
pub(super) fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

/// The nearest known word, or all of them.
pub(super) fn suggestion(input: &str, known: &[&str]) -> String {
    match nearest(input, known.iter().copied()) {
        Some(word) => format!("did you mean `{word}`?"),
        None if known.is_empty() => String::new(),
        None => {
            format!("known here: {}", known.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(", "))
        }
    }
}

/// The known word that was probably meant.
pub(super) fn nearest<'w>(input: &str, known: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
    let input = short(input);
    let nearest = known.into_iter().map(|word| (distance(&input, word), word)).min();
    nearest.filter(|(d, word)| *d <= (word.len() / 3).max(1)).map(|(_, word)| word)
}

/// Levenshtein.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        let mut next = vec![left];
        for (y, above) in b.iter().zip(row.iter().skip(1)) {
            left = (diagonal + usize::from(x != *y)).min(left + 1).min(above + 1);
            diagonal = *above;
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_named() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(suggestion("conections", &["workspace", "connections"]), "did you mean `connections`?");
        assert_eq!(suggestion("zzz", &["workspace", "frozen"]), "known here: `workspace`, `frozen`");
    }
}
