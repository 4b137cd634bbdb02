use std::collections::HashMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey};
use serde::Deserialize;

/// Issuers publish a handful of keys; more than this is a mistake or an attack on our memory.
const MOST_KEYS: usize = 100;
/// Longest `kid`.
const LONGEST_KEY_ID: usize = 256;

/// By their names in RFC 7518 and RFC 8037. None of them is symmetric: a public key must never become a shared secret.
const KNOWN: [(&str, Algorithm); 9] = [
    ("RS256", Algorithm::RS256),
    ("RS384", Algorithm::RS384),
    ("RS512", Algorithm::RS512),
    ("PS256", Algorithm::PS256),
    ("PS384", Algorithm::PS384),
    ("PS512", Algorithm::PS512),
    ("ES256", Algorithm::ES256),
    ("ES384", Algorithm::ES384),
    ("EdDSA", Algorithm::EdDSA),
];

pub(super) fn algorithm(name: &str) -> Option<Algorithm> {
    KNOWN.iter().find(|(known, _)| *known == name).map(|(_, algorithm)| *algorithm)
}

/// The algorithms that tokens may be signed with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Algorithms(Vec<Algorithm>);

impl Algorithms {
    /// The names of all that can be chosen.
    pub fn known() -> impl Iterator<Item = &'static str> {
        KNOWN.iter().map(|(name, _)| *name)
    }

    /// The algorithms of these names.
    ///
    /// # Errors
    /// The position of the first name that is none.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, usize> {
        let found = names.into_iter().enumerate().map(|(i, name)| algorithm(name).ok_or(i));
        found.collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn contains(&self, algorithm: Algorithm) -> bool {
        self.0.contains(&algorithm)
    }
}

/// Whether this can be the `kid` of a key. Ids are only ever compared, yet what no issuer would choose need not be
/// looked for at one.
pub(super) fn is_key_id(text: &str) -> bool {
    (1..=LONGEST_KEY_ID).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:=+/@~".contains(&b))
        && !text.contains("..")
}

/// One public key of an issuer.
pub(super) struct Key {
    pub(super) decoding: DecodingKey,
    algorithms: Vec<Algorithm>,
}

/// What `kid` and `alg` of a token lead to.
pub(super) enum Found<'a> {
    Key(&'a Key),
    /// There is such a key, for other algorithms.
    OtherAlgorithm,
    Nothing,
}

/// The keys of an issuer at one time.
pub(super) struct KeySet {
    /// Another number is another content.
    pub(super) version: u64,
    /// What it was made of, to notice a change.
    jwks: Vec<Jwk>,
    by_id: HashMap<String, Vec<Key>>,
}

impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySet")
            .field("version", &self.version)
            .field("ids", &self.by_id.keys())
            .finish_non_exhaustive()
    }
}

/// Why a document is no set of keys.
#[derive(Debug, thiserror::Error)]
pub(super) enum JwksError {
    #[error("it is no JWK set")]
    NotASet,
    #[error("it has {0} keys, more than {MOST_KEYS}")]
    TooMany(usize),
}

/// The members of RFC 7517 and RFC 7518 that matter for verifying.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    key_ops: Option<Vec<String>>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

#[derive(Deserialize)]
struct Jwks {
    keys: Vec<serde_json::Value>,
}

impl KeySet {
    /// The keys of a JWK set (RFC 7517 section 5) that can verify a token. Others are passed over: a set may hold keys
    /// for encryption, and those of kinds that come later.
    pub(super) fn parse(document: &[u8]) -> Result<Self, JwksError> {
        let jwks: Jwks = serde_json::from_slice(document).map_err(|_| JwksError::NotASet)?;
        if jwks.keys.len() > MOST_KEYS {
            return Err(JwksError::TooMany(jwks.keys.len()));
        }
        let mut set = Self { version: 0, jwks: Vec::new(), by_id: HashMap::new() };
        for jwk in jwks.keys.into_iter().filter_map(|value| serde_json::from_value::<Jwk>(value).ok()) {
            if let Some((id, key)) = jwk.key() {
                set.by_id.entry(id).or_default().push(key);
                set.jwks.push(jwk);
            }
        }
        Ok(set)
    }

    pub(super) fn with_version(self, version: u64) -> Self {
        Self { version, ..self }
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.jwks == other.jwks
    }

    pub(super) fn len(&self) -> usize {
        self.jwks.len()
    }

    /// The key of this id that signs with this algorithm.
    pub(super) fn find(&self, id: &str, algorithm: Algorithm) -> Found<'_> {
        let Some(keys) = self.by_id.get(id) else { return Found::Nothing };
        keys.iter().find(|key| key.algorithms.contains(&algorithm)).map_or(Found::OtherAlgorithm, Found::Key)
    }
}

impl Jwk {
    /// The key, when it can verify and has an id.
    fn key(&self) -> Option<(String, Key)> {
        use Algorithm::{ES256, ES384, EdDSA, PS256, PS384, PS512, RS256, RS384, RS512};
        let id = self.kid.as_ref().filter(|id| is_key_id(id))?;
        let for_signatures = self.usage.as_ref().is_none_or(|usage| usage == "sig");
        let verifies = self.key_ops.as_ref().is_none_or(|ops| ops.iter().any(|op| op == "verify"));
        if !for_signatures || !verifies {
            return None;
        }
        let bytes = |member: &Option<String>| URL_SAFE_NO_PAD.decode(member.as_ref()?).ok();
        let (decoding, mut algorithms) = match (self.kty.as_str(), self.crv.as_deref()) {
            ("RSA", None) => {
                let (n, e) = (bytes(&self.n)?, bytes(&self.e)?);
                // RFC 7518 section 3.3: 2048 bits or more. Some write the sign's zero byte in front.
                let n = n.strip_prefix(&[0]).unwrap_or(&n);
                if !(256..=1024).contains(&n.len()) {
                    return None;
                }
                let all = vec![RS256, RS384, RS512, PS256, PS384, PS512];
                (DecodingKey::from_rsa_raw_components(n, &e), all)
            }
            ("EC", Some(curve)) => {
                let (size, algorithm) = match curve {
                    "P-256" => (32, ES256),
                    "P-384" => (48, ES384),
                    _ => return None,
                };
                let (x, y) = (bytes(&self.x)?, bytes(&self.y)?);
                if x.len() != size || y.len() != size {
                    return None;
                }
                let key = DecodingKey::from_ec_components(self.x.as_ref()?, self.y.as_ref()?).ok()?;
                (key, vec![algorithm])
            }
            ("OKP", Some("Ed25519")) => {
                let x = bytes(&self.x).filter(|x| x.len() == 32)?;
                (DecodingKey::from_ed_der(&x), vec![EdDSA])
            }
            _ => return None,
        };
        if let Some(only) = &self.alg {
            let only = algorithm(only)?;
            algorithms.retain(|algorithm| *algorithm == only);
        }
        (!algorithms.is_empty()).then(|| (id.clone(), Key { decoding, algorithms }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// RFC 8037, appendix A.2.
    const ED: &str = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
    /// RFC 7517, appendix A.1.
    const X: &str = "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4";
    const Y: &str = "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM";

    fn rsa(bytes: usize) -> String {
        URL_SAFE_NO_PAD.encode(vec![0xc3; bytes])
    }

    fn accepts(jwk: &serde_json::Value) -> Vec<&'static str> {
        let set = KeySet::parse(json!({ "keys": [jwk] }).to_string().as_bytes()).unwrap();
        KNOWN
            .iter()
            .filter(|(_, a)| matches!(set.find("k", *a), Found::Key(_)))
            .map(|(name, _)| *name)
            .collect()
    }

    #[test]
    fn a_key_fixes_the_algorithms_that_it_verifies() {
        let all_rsa = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"];
        for (jwk, algorithms) in [
            (json!({"kty":"OKP","crv":"Ed25519","kid":"k","x":ED}), &["EdDSA"][..]),
            (json!({"kty":"OKP","crv":"Ed25519","kid":"k","x":ED,"alg":"EdDSA","use":"sig"}), &["EdDSA"]),
            (json!({"kty":"OKP","crv":"Ed25519","kid":"k","x":ED,"alg":"HS256"}), &[]),
            (json!({"kty":"OKP","crv":"Ed25519","kid":"k","x":ED,"use":"enc"}), &[]),
            (json!({"kty":"OKP","crv":"Ed25519","kid":"k","x":ED,"key_ops":["sign"]}), &[]),
            (json!({"kty":"OKP","crv":"Ed25519","kid":"k","x":ED,"key_ops":["verify"]}), &["EdDSA"]),
            (json!({"kty":"OKP","crv":"Ed25519","kid":"k","x":&ED[..20]}), &[]),
            (json!({"kty":"OKP","crv":"X25519","kid":"k","x":ED}), &[]),
            (json!({"kty":"OKP","crv":"Ed25519","x":ED}), &[]),
            (json!({"kty":"OKP","crv":"Ed25519","kid":"../k","x":ED}), &[]),
            (json!({"kty":"EC","crv":"P-256","kid":"k","x":X,"y":Y}), &["ES256"]),
            (json!({"kty":"EC","crv":"P-384","kid":"k","x":X,"y":Y}), &[]),
            (json!({"kty":"EC","crv":"P-256","kid":"k","x":X}), &[]),
            (json!({"kty":"RSA","kid":"k","n":rsa(256),"e":"AQAB"}), &all_rsa),
            (json!({"kty":"RSA","kid":"k","n":rsa(256),"e":"AQAB","alg":"PS256"}), &["PS256"]),
            (json!({"kty":"RSA","kid":"k","n":rsa(128),"e":"AQAB"}), &[]),
            (json!({"kty":"RSA","kid":"k","n":rsa(4096),"e":"AQAB"}), &[]),
            (json!({"kty":"oct","kid":"k","k":"c2VjcmV0"}), &[]),
            (json!({"kty":7}), &[]),
            (json!("no key"), &[]),
        ] {
            assert_eq!(accepts(&jwk), algorithms, "{jwk}");
        }
    }

    #[test]
    fn one_id_may_name_keys_of_several_kinds() {
        let keys = json!({"keys": [
            {"kty":"EC","crv":"P-256","kid":"k","x":X,"y":Y},
            {"kty":"OKP","crv":"Ed25519","kid":"k","x":ED},
            {"kty":"of a later time","kid":"z"},
        ]});
        let set = KeySet::parse(keys.to_string().as_bytes()).unwrap();
        assert_eq!(set.len(), 2);
        assert!(matches!(set.find("k", Algorithm::ES256), Found::Key(_)));
        assert!(matches!(set.find("k", Algorithm::EdDSA), Found::Key(_)));
        assert!(matches!(set.find("k", Algorithm::RS256), Found::OtherAlgorithm));
        assert!(matches!(set.find("z", Algorithm::RS256), Found::Nothing));
    }

    #[test]
    fn what_is_no_set_is_told_from_an_empty_one() {
        assert_eq!(KeySet::parse(br#"{"keys":[]}"#).unwrap().len(), 0);
        for bad in ["", "{}", "<html>", "[]", r#"{"keys":{}}"#, r#"{"keys":[],"keys":[]}"#] {
            assert!(matches!(KeySet::parse(bad.as_bytes()), Err(JwksError::NotASet)), "{bad}");
        }
        let many = json!({ "keys": vec![json!({}); MOST_KEYS + 1] }).to_string();
        assert!(matches!(KeySet::parse(many.as_bytes()), Err(JwksError::TooMany(101))));
    }

    #[test]
    fn key_ids_that_no_issuer_would_choose() {
        for good in ["a", "2011-04-29", "urn:ietf:params:oauth:jwk-thumbprint:sha-256:abc=", "a/b+c=="] {
            assert!(is_key_id(good), "{good}");
        }
        for bad in ["", "../a", "a/../../b", "a b", "a\n", "é", "a\"b", &"k".repeat(257)] {
            assert!(!is_key_id(bad), "{bad}");
        }
    }
}
