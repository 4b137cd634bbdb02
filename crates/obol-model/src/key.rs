use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{KeyBudget, KeyId, Limits, Principal, Secret, WorkspaceId};

const PREFIX: &str = "obol_";

/// A virtual key: `obol_` + 43 base64url characters, 32 random bytes (DESIGN §2). Only its hash is ever stored.
#[derive(Debug, Clone)]
pub struct VirtualKey(Secret<String>);

/// Not a virtual key. Says nothing of the input, which may be a credential with a typo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a virtual key")]
pub struct ParseVirtualKeyError;

impl VirtualKey {
    /// A new key.
    ///
    /// # Errors
    /// When the operating system gives no random bytes.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut random = [0_u8; 32];
        getrandom::fill(&mut random)?;
        Ok(Self(Secret::new(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(random)))))
    }

    /// The full text, to be shown once to the person that it is made for.
    pub fn expose(&self) -> &str {
        self.0.expose()
    }

    /// Whether a credential is to be a virtual key, well formed or not: no other kind begins like this.
    pub fn has_prefix(credential: &str) -> bool {
        credential.starts_with(PREFIX)
    }

    /// What is stored in place of the key.
    pub fn hash(&self) -> KeyHash {
        hash(self.expose())
    }

    /// The hash of a key that a request brings, without keeping the key.
    ///
    /// # Errors
    /// When the text is no virtual key.
    pub fn hash_of(text: &str) -> Result<KeyHash, ParseVirtualKeyError> {
        check(text)?;
        Ok(hash(text))
    }
}

fn hash(key: &str) -> KeyHash {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, key.as_bytes());
    let mut bytes = [0_u8; 32];
    bytes.copy_from_slice(digest.as_ref());
    KeyHash(bytes)
}

fn check(key: &str) -> Result<(), ParseVirtualKeyError> {
    let text = key.strip_prefix(PREFIX).ok_or(ParseVirtualKeyError)?;
    // More than 32 bytes do not fit. Decoding refuses what is not base64url, and stray bits in the last character: one
    // key has one spelling.
    match URL_SAFE_NO_PAD.decode_slice(text, &mut [0_u8; 32]) {
        Ok(32) => Ok(()),
        _ => Err(ParseVirtualKeyError),
    }
}

impl FromStr for VirtualKey {
    type Err = ParseVirtualKeyError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        check(s)?;
        Ok(Self(Secret::new(s.to_owned())))
    }
}

/// SHA-256 of a virtual key; lower-case hexadecimal as text. Shown in full only inside Redis keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// The full text, as it stands in `key:HASH`.
    pub fn hex(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(64), |mut s, b| {
            // Writing to a `String` cannot fail.
            if write!(s, "{b:02x}").is_err() {
                s.clear();
            }
            s
        })
    }
}

impl FromStr for KeyHash {
    type Err = ParseVirtualKeyError;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        if s.len() != 64 || !s.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(ParseVirtualKeyError);
        }
        let mut bytes = [0_u8; 32];
        for (slot, pair) in bytes.iter_mut().zip(s.as_bytes().chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| ParseVirtualKeyError)?;
            *slot = u8::from_str_radix(pair, 16).map_err(|_| ParseVirtualKeyError)?;
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for KeyHash {
    type Error = ParseVirtualKeyError;
    fn try_from(s: String) -> Result<Self, Self::Error> {
        s.parse()
    }
}

impl From<KeyHash> for String {
    fn from(hash: KeyHash) -> Self {
        hash.hex()
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = self.hex();
        write!(f, "{}…", hex.get(..8).unwrap_or_default())
    }
}

/// What a virtual key stands for: the record at `key:HASH` (DESIGN §8.1). Written by control only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyContext {
    /// Version of this document; see [`KeyContext::SCHEMA`].
    pub schema_version: u32,
    /// Public id, safe to log.
    pub key_id: KeyId,
    /// The tenant that the key opens.
    pub workspace_id: WorkspaceId,
    /// What its owner calls it.
    #[serde(default)]
    pub name: String,
    /// Tags that policies can name.
    #[serde(default)]
    pub tags: Vec<String>,
    /// A disabled key is known and refused (403).
    #[serde(default)]
    pub disabled: bool,
    /// When it stops being valid; `None` is never.
    #[serde(default)]
    pub expires_at: Option<Timestamp>,
    /// How much may be spent with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<KeyBudget>,
    /// How fast it may call; what it leaves open the workspace says.
    #[serde(default, skip_serializing_if = "Limits::is_open")]
    pub limits: Limits,
    /// Grows with each change of the record, so that a cache never replaces a newer copy by an older one.
    #[serde(default)]
    pub revision: u64,
}

impl KeyContext {
    /// The version of the document that this release writes, and the highest that it reads.
    pub const SCHEMA: u32 = 2;

    /// The most bytes that a record of a key has. What is larger is no record, and nobody reads it.
    pub const LARGEST: usize = 64 << 10;

    /// Who calls with this key. Two keys of one person are two principals.
    pub fn principal(&self) -> Principal {
        Principal::Key(self.key_id.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_spelling_and_a_stable_hash() {
        let key = VirtualKey::generate().unwrap();
        assert_eq!(key.expose().len(), 48);
        let again: VirtualKey = key.expose().parse().unwrap();
        assert_eq!(again.hash(), key.hash());
        assert_eq!(VirtualKey::hash_of(key.expose()).unwrap(), key.hash());
        assert_eq!(key.hash().hex().parse::<KeyHash>().unwrap(), key.hash());
        for bad in ["", "obol_", "obol_short", "sk-123", &format!("{}=", key.expose()), &key.expose()[5..]] {
            assert!(bad.parse::<VirtualKey>().is_err() && VirtualKey::hash_of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn neither_key_nor_hash_is_printed() {
        let key = VirtualKey::generate().unwrap();
        assert!(!format!("{key:?}").contains(&key.expose()[5..]));
        assert!(!format!("{:?}", key.hash()).contains(&key.hash().hex()));
    }
}
