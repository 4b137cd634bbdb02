//! What clients call the tools and prompts of a workspace (DESIGN §9.3): every replica makes the same names, and the
//! compiler of workspace files refuses two that would be one.

use aws_lc_rs::digest::{SHA256, digest};

use crate::ConnectionName;
use crate::snapshot::Namespace;

/// Longest exposed name: LLM APIs refuse names over 64 characters, and clients prepend prefixes of their own.
pub const MAX_NAME: usize = 50;

/// The name under which `name` of `connection` appears.
///
/// Names that LLM APIs would refuse (other characters than `[A-Za-z0-9_-]`, too long) are cut and get a hash of the
/// pair, so that two names stay two and every replica makes the same one.
pub fn exposed_name(connection: &ConnectionName, namespace: Namespace, name: &str) -> String {
    if namespace == Namespace::None {
        return name.to_owned();
    }
    let joined = format!("{connection}__{name}");
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if joined.len() <= MAX_NAME && joined.chars().all(plain) {
        return joined;
    }
    let hash = digest(&SHA256, format!("{connection}\0{name}").as_bytes());
    let suffix: String = hash.as_ref().iter().take(4).map(|b| format!("{b:02x}")).collect();
    let mut short: String =
        joined.chars().map(|c| if plain(c) { c } else { '_' }).take(MAX_NAME - suffix.len() - 1).collect();
    short.push('_');
    short.push_str(&suffix);
    short
}
