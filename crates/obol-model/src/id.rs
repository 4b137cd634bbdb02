use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// An id that breaks its grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{input}` is no {what}: {rule}")]
pub struct ParseIdError {
    what: &'static str,
    rule: &'static str,
    input: String,
}

impl ParseIdError {
    pub(crate) fn new(what: &'static str, rule: &'static str, input: &str) -> Self {
        // A hostile input must not become a log line of megabytes.
        Self { what, rule, input: input.chars().take(80).collect() }
    }

    /// The grammar that the input breaks, for people.
    pub fn rule(&self) -> &'static str {
        self.rule
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $rule:literal, $valid:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// The text of the id.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;
            fn from_str(s: &str) -> Result<Self, Self::Err> {
                if $valid(s) { Ok(Self(s.into())) } else { Err(ParseIdError::new($what, $rule, s)) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = ParseIdError;
            fn try_from(s: String) -> Result<Self, Self::Error> {
                s.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0.as_ref().to_owned()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

fn slug(s: &str, max: usize) -> bool {
    s.len() <= max
        && s.starts_with(|c: char| c.is_ascii_lowercase())
        && s.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

fn slug_20(s: &str) -> bool {
    slug(s, 20)
}

fn slug_63(s: &str) -> bool {
    slug(s, 63)
}

/// URI schemes in use: a connection of that name would make `{connection}+{uri}` ambiguous to people.
fn connection(s: &str) -> bool {
    slug_20(s) && !matches!(s, "http" | "https" | "file" | "data" | "urn")
}

fn token_64(s: &str) -> bool {
    !s.is_empty() && s.len() <= 64 && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

fn model(s: &str) -> bool {
    !s.is_empty() && s.len() <= 128 && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-:/@".contains(&b))
}

text_id!(
    /// The tenant. Every other thing belongs to exactly one.
    WorkspaceId,
    "workspace id",
    "a lower-case letter, then up to 62 of `a-z`, `0-9` and `-`",
    slug_63
);
text_id!(
    /// An upstream MCP server of a workspace. The grammar has no `_`, so `{connection}__{name}` has one reading, and
    /// no scheme in use (DESIGN §9.3).
    ConnectionName,
    "connection name",
    "a lower-case letter, then up to 19 of `a-z`, `0-9` and `-`, and no URI scheme in use",
    connection
);
text_id!(
    /// A model provider of a workspace.
    ProviderName,
    "provider name",
    "a lower-case letter, then up to 62 of `a-z`, `0-9` and `-`",
    slug_63
);
text_id!(
    /// A public model name of a workspace.
    ModelName,
    "model name",
    "1 to 128 of letters, digits and `._-:/@`",
    model
);
text_id!(
    /// The public id of a virtual key; safe to log. The key itself is [`crate::VirtualKey`].
    KeyId,
    "key id",
    "1 to 64 of letters, digits and `._-`",
    token_64
);

/// Who calls, stable across token refresh (DESIGN §2): sessions, caches and workers are bound to it, never to the
/// bytes of a token.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Principal {
    /// A virtual key.
    Key(KeyId),
    /// A person or a client known to an OAuth issuer.
    User {
        /// `iss` of the token.
        issuer: String,
        /// `sub` of the token.
        subject: String,
    },
}

impl fmt::Display for Principal {
    /// One line that no two principals share: the issuer's length is spelled out, so that no choice of issuer and
    /// subject can imitate another pair.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(id) => write!(f, "key:{id}"),
            Self::User { issuer, subject } => write!(f, "user:{}:{issuer}:{subject}", issuer.len()),
        }
    }
}

/// One request, from the edge to its usage event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(uuid::Uuid);

impl RequestId {
    /// A new id.
    #[expect(clippy::new_without_default, reason = "a default would hide that each call makes another id")]
    pub fn new() -> Self {
        Self(uuid::Uuid::now_v7())
    }

    /// Reads what [`RequestId::as_uuid`] shows.
    pub fn from_uuid(text: &str) -> Option<Self> {
        uuid::Uuid::try_parse(text).ok().map(Self)
    }

    /// As records have it: a UUID with hyphens.
    pub fn as_uuid(&self) -> impl fmt::Display + '_ {
        self.0.as_hyphenated()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "req_{}", self.0.as_simple())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_names_have_one_reading() {
        for good in ["a", "github", "my-server-2", "abcdefghijklmnopqrst"] {
            assert!(good.parse::<ConnectionName>().is_ok(), "{good}");
        }
        for bad in ["", "A", "a_b", "a__b", "1a", "-a", "abcdefghijklmnopqrstu", "http", "file", "a.b", "a b"]
        {
            assert!(bad.parse::<ConnectionName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn principals_never_collide_in_text() {
        let user =
            |issuer: &str, subject: &str| Principal::User { issuer: issuer.into(), subject: subject.into() };
        assert_ne!(user("a:b", "c").to_string(), user("a", "b:c").to_string());
    }
}
