//! The keys behind service JWTs.

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey};
use obol_model::Secret;

use crate::pem;

/// The shortest shared secret (RFC 7518 section 3.2: as long as the hash).
const SHORTEST_SECRET: usize = 32;

/// A key that cannot sign or verify service JWTs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ServiceKeyError {
    /// A shared secret that can be guessed.
    #[error("the shared secret of service JWTs has {found} bytes, at least {SHORTEST_SECRET} are needed")]
    SecretTooShort {
        /// Its length.
        found: usize,
    },
    /// Not a private Ed25519 key.
    #[error(
        "the private key of service JWTs is no Ed25519 key in PKCS#8 PEM (`-----BEGIN PRIVATE KEY-----`)"
    )]
    NotAPrivateKey,
    /// Not a public Ed25519 key.
    #[error("a trusted key of service JWTs is no Ed25519 key in PEM (`-----BEGIN PUBLIC KEY-----`)")]
    NotAPublicKey,
    /// A public key beside a shared secret: a token would be good by either.
    #[error("a public key cannot be trusted beside a shared secret")]
    MixedAlgorithms,
}

/// Public Ed25519 keys whose tokens are accepted: those of the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedKeys(Vec<[u8; 32]>);

impl TrustedKeys {
    /// Reads all `PUBLIC KEY` blocks of a PEM text.
    ///
    /// # Errors
    /// When there is none, or one that is no such key.
    pub fn from_pem(text: &str) -> Result<Self, ServiceKeyError> {
        let blocks = pem::blocks(text, "PUBLIC KEY").filter(|blocks| !blocks.is_empty());
        let keys = blocks.and_then(|blocks| blocks.iter().map(|der| pem::ed25519_public(der)).collect());
        keys.map(Self).ok_or(ServiceKeyError::NotAPublicKey)
    }
}

/// What signs, and what tokens are verified by. One algorithm for all of them, fixed by the kind of key.
pub(crate) struct Ring {
    pub(crate) algorithm: Algorithm,
    pub(crate) signing: EncodingKey,
    /// Ours first. Never empty.
    verifying: Vec<Verifying>,
    /// Whether others have keys of their own, so that ours speaks for us alone.
    others: bool,
}

struct Verifying {
    key: DecodingKey,
    /// The public key, of a pair.
    public: Option<Public>,
    ours: bool,
}

struct Public {
    /// The RFC 7638 thumbprint.
    id: String,
    x: String,
}

impl Public {
    fn new(key: &[u8]) -> Self {
        let x = URL_SAFE_NO_PAD.encode(key);
        let members = format!(r#"{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}"#);
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, members.as_bytes());
        Self { id: URL_SAFE_NO_PAD.encode(digest), x }
    }
}

impl Verifying {
    fn ed25519(key: &[u8], ours: bool) -> Self {
        Self { key: DecodingKey::from_ed_der(key), public: Some(Public::new(key)), ours }
    }

    fn id(&self) -> Option<&str> {
        self.public.as_ref().map(|public| public.id.as_str())
    }
}

impl Ring {
    pub(crate) fn from_secret(secret: &Secret<String>) -> Result<Self, ServiceKeyError> {
        let bytes = secret.expose().as_bytes();
        let too_short = ServiceKeyError::SecretTooShort { found: bytes.len() };
        if bytes.len() < SHORTEST_SECRET {
            return Err(too_short);
        }
        let signing = EncodingKey::from_secret(bytes).map_err(|_| too_short)?;
        let key = DecodingKey::from_secret(bytes).map_err(|_| too_short)?;
        let verifying = vec![Verifying { key, public: None, ours: true }];
        Ok(Self { algorithm: Algorithm::HS256, signing, verifying, others: false })
    }

    /// The first private key of the text signs, all of them verify.
    pub(crate) fn from_ed25519_pem(private: &Secret<String>) -> Result<Self, ServiceKeyError> {
        let refused = ServiceKeyError::NotAPrivateKey;
        let blocks = pem::blocks(private.expose(), "PRIVATE KEY").ok_or(refused)?;
        let signing = EncodingKey::from_ed_der(blocks.first().ok_or(refused)?);
        let mut verifying = Vec::new();
        for der in &blocks {
            let pair = Ed25519KeyPair::from_pkcs8(der).map_err(|_| refused)?;
            verifying.push(Verifying::ed25519(pair.public_key().as_ref(), true));
        }
        Ok(Self { algorithm: Algorithm::EdDSA, signing, verifying, others: false })
    }

    pub(crate) fn trust(&mut self, keys: &TrustedKeys) -> Result<(), ServiceKeyError> {
        if self.algorithm != Algorithm::EdDSA {
            return Err(ServiceKeyError::MixedAlgorithms);
        }
        self.verifying.extend(keys.0.iter().map(|key| Verifying::ed25519(key, false)));
        self.others = true;
        Ok(())
    }

    /// The id of the key that signs; a secret has none.
    pub(crate) fn signing_id(&self) -> Option<&str> {
        self.verifying.first().and_then(Verifying::id)
    }

    /// The keys by which a token may be verified, of an issuer who is us or not: the one that it names when that is one
    /// of them, else all. Its `kid` is only a hint.
    pub(crate) fn candidates(&self, by_us: bool, kid: Option<&str>) -> Vec<&DecodingKey> {
        let may = |key: &&Verifying| by_us || !key.ours || !self.others;
        let named = self.verifying.iter().filter(may).find(|key| kid.is_some() && key.id() == kid);
        match named {
            Some(named) => vec![&named.key],
            None => self.verifying.iter().filter(may).map(|key| &key.key).collect(),
        }
    }

    /// Our public keys as a JWK set (RFC 7517, RFC 8037); `None` with a shared secret, which has no public half.
    pub(crate) fn jwks(&self) -> Option<String> {
        let ours: Vec<_> = self.verifying.iter().filter(|key| key.ours).collect();
        let publics: Option<Vec<_>> = ours.iter().map(|key| key.public.as_ref()).collect();
        let keys: Vec<_> = publics?
            .iter()
            .map(|Public { id, x }| {
                serde_json::json!({
                    "kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA", "kid": id, "x": x,
                })
            })
            .collect();
        Some(serde_json::json!({ "keys": keys }).to_string())
    }
}
