//! The spellings of a URI that a policy may name.
//!
//! The upstream gets a URI as the client spelled it, and may read `%73ecret`, `a/../secret` and `secret` as one. A
//! decision that looks at one spelling alone can be walked around, so it is asked about each of them.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;
use url::Url;

/// Encodings of encodings are followed this deep; a URI that goes on from there has no last spelling.
const MAX_SPELLINGS: usize = 6;

/// `uri` and its other spellings: dot segments and the case of the host resolved, percent-encoding decoded, and so on
/// until nothing changes. `None` when there are too many.
pub fn spellings(uri: &str) -> Option<Vec<Cow<'_, str>>> {
    let mut all: Vec<Cow<'_, str>> = vec![Cow::Borrowed(uri)];
    let mut at = 0;
    while let Some(current) = all.get(at).cloned() {
        let resolved = Url::parse(&current).map(String::from).ok();
        let decoded = percent_decode_str(&current).decode_utf8_lossy().into_owned();
        for next in resolved.into_iter().chain([decoded, current.replace('\\', "/")]) {
            if !all.iter().any(|known| *known == next) {
                all.push(Cow::Owned(next));
            }
        }
        if all.len() > MAX_SPELLINGS {
            return None;
        }
        at += 1;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(uri: &str, spelling: &str) -> bool {
        spellings(uri).unwrap().iter().any(|s| s == spelling)
    }

    #[test]
    fn every_way_to_spell_a_path_leads_to_the_plain_one() {
        for uri in [
            "file:///secret/a.txt",
            "file:///%73ecret/a.txt",
            "file:///secret%2Fa.txt",
            "file:///public/../secret/a.txt",
            "file:///public/..%2fsecret/a.txt",
            "file:///public/%2e%2e/secret/a.txt",
            "file:///%2573ecret/a.txt",
            "FILE:///secret/a.txt",
            "file:///secret\\a.txt",
        ] {
            assert!(has(uri, "file:///secret/a.txt"), "{uri}: {:?}", spellings(uri));
        }
    }

    #[test]
    fn plain_uris_have_one_spelling_and_endless_ones_none() {
        for uri in ["demo://item/7", "file:///a.txt", "test://static-text"] {
            assert_eq!(spellings(uri).unwrap().len(), 1, "{uri}");
        }
        assert!(spellings(&format!("file:///%{}73", "25".repeat(20))).is_none());
    }
}
