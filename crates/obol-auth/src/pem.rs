//! Just enough PEM (RFC 7468) for one Ed25519 key.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// What stands before the 32 bytes of an Ed25519 key in a `SubjectPublicKeyInfo` (RFC 8410 section 4).
const ED25519_SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// The content of the first block of that label.
pub(crate) fn block(text: &str, label: &str) -> Option<Vec<u8>> {
    let (_, rest) = text.split_once(&format!("-----BEGIN {label}-----"))?;
    let (body, _) = rest.split_once(&format!("-----END {label}-----"))?;
    let body: String = body.split_ascii_whitespace().collect();
    STANDARD.decode(body).ok()
}

/// The raw public key of a `PUBLIC KEY` block, when it is an Ed25519 one.
pub(crate) fn ed25519_public(text: &str) -> Option<Vec<u8>> {
    let der = block(text, "PUBLIC KEY")?;
    let key = der.strip_prefix(&ED25519_SPKI)?;
    (key.len() == 32).then(|| key.to_vec())
}
