//! Just enough PEM (RFC 7468) for Ed25519 keys.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// What stands before the 32 bytes of an Ed25519 key in a `SubjectPublicKeyInfo` (RFC 8410 section 4).
const ED25519_SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// The contents of the blocks of that label; `None` when one of them is broken off or no base64. Blocks of other labels
/// and text between blocks are passed over.
pub(crate) fn blocks(text: &str, label: &str) -> Option<Vec<Vec<u8>>> {
    let (begin, end) = (format!("-----BEGIN {label}-----"), format!("-----END {label}-----"));
    let mut blocks = Vec::new();
    let mut left = text;
    while let Some((_, rest)) = left.split_once(&begin) {
        let (body, rest) = rest.split_once(&end)?;
        let body: String = body.split_ascii_whitespace().collect();
        blocks.push(STANDARD.decode(body).ok()?);
        left = rest;
    }
    Some(blocks)
}

/// The raw public key of a `PUBLIC KEY` block, when it is an Ed25519 one.
pub(crate) fn ed25519_public(der: &[u8]) -> Option<[u8; 32]> {
    der.strip_prefix(&ED25519_SPKI)?.try_into().ok()
}
