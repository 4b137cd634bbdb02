use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::{Builder, Uuid, Variant, Version};

const PREFIX: &str = "mcs_";

/// The id of an MCP session: `mcs_` + a UUID v7 in canonical lower-case hyphenated form (DESIGN §6.1).
///
/// It is a bearer credential for as long as the session lives: `Debug` and `Display` show the last four characters
/// only. The full text is available through [`SessionId::expose`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(Uuid);

/// Not a session id. Says nothing of the input, which may be a credential with a typo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a session id")]
pub struct ParseSessionIdError;

impl SessionId {
    /// A new id for the time `now`.
    ///
    /// All 74 bits beside the time come from the operating system for each id. `Uuid::now_v7` is not used: it counts
    /// within a millisecond, which would make ids of one millisecond neighbours that their owners can guess.
    ///
    /// # Errors
    /// When the operating system gives no random bytes.
    pub fn generate(now: Timestamp) -> Result<Self, getrandom::Error> {
        let mut random = [0_u8; 10];
        getrandom::fill(&mut random)?;
        let millis = u64::try_from(now.as_millisecond()).unwrap_or(0);
        Ok(Self(Builder::from_unix_timestamp_millis(millis, &random).into_uuid()))
    }

    /// The full text. It is a credential: for the wire and the store, never for a log.
    pub fn expose(&self) -> String {
        format!("{PREFIX}{}", self.0.as_hyphenated())
    }

    /// The last four characters, for logs and admin answers.
    pub fn last4(&self) -> String {
        let text = self.0.as_simple().to_string();
        text.get(28..).unwrap_or_default().to_owned()
    }
}

impl FromStr for SessionId {
    type Err = ParseSessionIdError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let text = s.strip_prefix(PREFIX).ok_or(ParseSessionIdError)?;
        let uuid = Uuid::try_parse(text).map_err(|_| ParseSessionIdError)?;
        // `try_parse` also takes upper case, braces and missing hyphens; one id has one spelling.
        let mut buffer = Uuid::encode_buffer();
        let canonical = uuid.as_hyphenated().encode_lower(&mut buffer) == text;
        let v7 = uuid.get_version() == Some(Version::SortRand) && uuid.get_variant() == Variant::RFC4122;
        if canonical && v7 { Ok(Self(uuid)) } else { Err(ParseSessionIdError) }
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mcs_…{}", self.last4())
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The full text: records in the store name their session.
impl Serialize for SessionId {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.expose())
    }
}

impl<'de> Deserialize<'de> for SessionId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_millisecond(ms).unwrap()
    }

    #[test]
    fn text_round_trips_and_has_the_named_form() {
        let id = SessionId::generate(at(1_800_000_000_000)).unwrap();
        let text = id.expose();
        assert!(text.starts_with("mcs_"));
        assert_eq!(text.len(), 40);
        assert_eq!(text.parse::<SessionId>().unwrap(), id);
    }

    #[test]
    fn only_the_canonical_form_parses() {
        let id = SessionId::generate(at(1_800_000_000_000)).unwrap().expose();
        let bare = id.strip_prefix("mcs_").unwrap();
        let bad = [
            String::new(),
            "garbage!".into(),
            bare.into(),
            format!("MCS_{bare}"),
            format!("mcs_{}", bare.to_uppercase()),
            format!("mcs_{}", bare.replace('-', "")),
            format!("mcs_{{{bare}}}"),
            format!("mcs_urn:uuid:{bare}"),
            format!("{id} "),
            format!("mcs_{}", Uuid::new_v4()),
            // Version 7 with a variant that RFC 9562 does not use.
            "mcs_0190b0f0-0000-7000-c000-000000000000".into(),
        ];
        for text in bad {
            assert!(text.parse::<SessionId>().is_err(), "{text}");
        }
    }

    #[test]
    fn shows_only_the_last_four() {
        let id = SessionId::generate(at(1_800_000_000_000)).unwrap();
        let text = id.expose();
        assert_eq!(format!("{id:?}"), format!("mcs_…{}", &text[36..]));
        assert_eq!(format!("{id}"), format!("{id:?}"));
    }

    #[test]
    fn ids_of_one_millisecond_are_no_neighbours() {
        let ids: Vec<u128> =
            (0..256).map(|_| SessionId::generate(at(1_800_000_000_000)).unwrap().0.as_u128()).collect();
        // With a shared counter the upper random bits are equal; with fresh bits each value of them is new.
        let high: HashSet<u128> = ids.iter().map(|id| (id >> 32) & 0x3fff_ffff).collect();
        assert!(high.len() > 250, "{} of 256 differ", high.len());
        assert!(ids.iter().all(|id| id >> 80 == 1_800_000_000_000), "the time is in front");
    }
}
