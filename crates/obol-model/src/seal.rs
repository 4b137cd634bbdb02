use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

use crate::snapshot::Sealed;
use crate::{Secret, WorkspaceId};

/// The AEAD keys that protect credentials in snapshots (DESIGN §7.6): the first one seals, all of them open, so that
/// keys can be rotated without a moment in which something cannot be read.
#[derive(Debug)]
pub struct KeyRing {
    keys: Vec<(String, LessSafeKey)>,
}

/// Why a key ring or a sealed value cannot be used. Never says anything of the values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The text of the ring is not `id:base64,id:base64…`.
    #[error("entry {0} is not `id:base64(32 bytes)` with an id of letters, digits, `_` and `-`")]
    BadEntry(usize),
    /// Two keys have one id.
    #[error("the key id `{0}` stands there twice")]
    DuplicateId(String),
    /// There is no key.
    #[error("there is no key in it")]
    Empty,
    /// The value names a key that the ring does not hold.
    #[error("it was sealed with the key `{0}`, which is not in the key ring")]
    UnknownKey(String),
    /// The value is not of our form, was changed, or belongs to another workspace.
    #[error("it is damaged, or was sealed for another workspace or with another key of the same id")]
    Damaged,
    /// The operating system gave no random bytes.
    #[error("no random bytes could be had")]
    NoRandomness,
}

impl KeyRing {
    /// Reads `id:base64(32 bytes)`, several separated by commas; the first one seals.
    ///
    /// # Errors
    /// Names the first entry that is wrong, by position (never by value).
    pub fn parse(text: &str) -> Result<Self, SealError> {
        let mut keys: Vec<(String, LessSafeKey)> = Vec::new();
        for (i, entry) in text.split(',').map(str::trim).filter(|e| !e.is_empty()).enumerate() {
            let bad = SealError::BadEntry(i + 1);
            let (id, encoded) = entry.split_once(':').ok_or(bad.clone())?;
            let valid_id = !id.is_empty()
                && id.len() <= 32
                && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
            let bytes = STANDARD
                .decode(encoded)
                .or_else(|_| URL_SAFE_NO_PAD.decode(encoded))
                .map_err(|_| bad.clone())?;
            let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(|_| bad.clone())?;
            if !valid_id {
                return Err(bad);
            }
            if keys.iter().any(|(known, _)| known == id) {
                return Err(SealError::DuplicateId(id.to_owned()));
            }
            keys.push((id.to_owned(), LessSafeKey::new(key)));
        }
        if keys.is_empty() { Err(SealError::Empty) } else { Ok(Self { keys }) }
    }

    /// A ring with one fresh key that nobody else knows; what it seals ends with the process.
    ///
    /// # Errors
    /// When the operating system gives no random bytes.
    pub fn ephemeral() -> Result<Self, SealError> {
        let mut bytes = [0_u8; 32];
        getrandom::fill(&mut bytes).map_err(|_| SealError::NoRandomness)?;
        let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(|_| SealError::Empty)?;
        Ok(Self { keys: vec![("ephemeral".to_owned(), LessSafeKey::new(key))] })
    }

    /// Seals `plaintext` for `workspace`, with a random nonce.
    ///
    /// # Errors
    /// When no random bytes can be had.
    pub fn seal(&self, workspace: &WorkspaceId, plaintext: &Secret<String>) -> Result<Sealed, SealError> {
        let (id, key) = self.keys.first().ok_or(SealError::Empty)?;
        let mut nonce = [0_u8; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|_| SealError::NoRandomness)?;
        let mut text = plaintext.expose().as_bytes().to_vec();
        key.seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(workspace.as_str().as_bytes()),
            &mut text,
        )
        .map_err(|_| SealError::Damaged)?;
        let mut sealed = nonce.to_vec();
        sealed.append(&mut text);
        Ok(Sealed(format!("v1.{id}.{}", URL_SAFE_NO_PAD.encode(sealed))))
    }

    /// Opens what [`KeyRing::seal`] sealed for the same workspace.
    ///
    /// # Errors
    /// When the key is unknown, or the value was changed or belongs to another workspace.
    pub fn open(&self, workspace: &WorkspaceId, sealed: &Sealed) -> Result<Secret<String>, SealError> {
        let mut parts = sealed.0.splitn(3, '.');
        let (Some("v1"), Some(id), Some(encoded)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(SealError::Damaged);
        };
        let (_, key) = self
            .keys
            .iter()
            .find(|(known, _)| known == id)
            .ok_or_else(|| SealError::UnknownKey(id.chars().take(32).collect()))?;
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| SealError::Damaged)?;
        let (nonce, text) = bytes.split_at_checked(NONCE_LEN).ok_or(SealError::Damaged)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| SealError::Damaged)?;
        let mut text = text.to_vec();
        let plain = key
            .open_in_place(nonce, Aad::from(workspace.as_str().as_bytes()), &mut text)
            .map_err(|_| SealError::Damaged)?;
        String::from_utf8(plain.to_vec()).map(Secret::new).map_err(|_| SealError::Damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(ids: &[(&str, u8)]) -> KeyRing {
        let text: Vec<String> =
            ids.iter().map(|(id, b)| format!("{id}:{}", STANDARD.encode([*b; 32]))).collect();
        KeyRing::parse(&text.join(",")).unwrap()
    }

    #[test]
    fn what_is_sealed_opens_only_for_its_workspace_and_with_its_key() {
        let (acme, other): (WorkspaceId, WorkspaceId) = ("acme".parse().unwrap(), "other".parse().unwrap());
        let old = ring(&[("a", 1)]);
        let rotated = ring(&[("b", 2), ("a", 1)]);
        let sealed = old.seal(&acme, &Secret::new("s3cret".into())).unwrap();
        assert!(!sealed.0.contains("s3cret"));
        assert_eq!(rotated.open(&acme, &sealed).unwrap().expose(), "s3cret");
        assert_eq!(rotated.open(&other, &sealed).unwrap_err(), SealError::Damaged);
        assert_eq!(ring(&[("b", 2)]).open(&acme, &sealed).unwrap_err(), SealError::UnknownKey("a".into()));
        assert_eq!(ring(&[("a", 3)]).open(&acme, &sealed).unwrap_err(), SealError::Damaged);
        assert_ne!(old.seal(&acme, &Secret::new("s3cret".into())).unwrap(), sealed, "nonces are fresh");
    }

    #[test]
    fn a_bad_ring_is_named_by_position_only() {
        assert_eq!(KeyRing::parse("").unwrap_err(), SealError::Empty);
        assert_eq!(KeyRing::parse("a:c2hvcnQ=").unwrap_err(), SealError::BadEntry(1));
        let good = STANDARD.encode([1; 32]);
        assert_eq!(KeyRing::parse(&format!("a:{good},b")).unwrap_err(), SealError::BadEntry(2));
        assert_eq!(
            KeyRing::parse(&format!("a:{good},a:{good}")).unwrap_err(),
            SealError::DuplicateId("a".into())
        );
    }
}
