use std::fmt;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use jiff::Timestamp;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use obol_model::{Kind, Secret};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::pem;
use crate::replay::{Replays, Seen};

/// How long a service JWT lives, in seconds.
const LIFE: i64 = 60;
/// How far two clocks may be apart, in seconds.
const LEEWAY: i64 = 5;
/// The longest token that is looked at. Ours have about 300 bytes.
const LONGEST: usize = 4096;
/// The longest `jti` that is remembered.
const LONGEST_ID: usize = 128;
/// The most tokens remembered against replay: more than 150 a second.
const REMEMBERED: usize = 10_000;
/// The shortest shared secret (RFC 7518 section 3.2: as long as the hash).
const SHORTEST_SECRET: usize = 32;

/// Signs and verifies the JWTs that Obol's own parts show each other (DESIGN §8.2): they live 60 seconds, are meant for
/// one audience, and are accepted once by each process. The algorithm is fixed by the key, never taken from the token.
pub struct ServiceTokens {
    issuer: String,
    algorithm: Algorithm,
    signing: EncodingKey,
    /// Ours first. Never empty.
    verifying: Vec<DecodingKey>,
    replays: Mutex<Replays>,
}

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
    #[error("the public key of service JWTs is no Ed25519 key in PEM (`-----BEGIN PUBLIC KEY-----`)")]
    NotAPublicKey,
    /// A public key beside a shared secret: a token would be good by either.
    #[error("a public key cannot be trusted beside a shared secret")]
    MixedAlgorithms,
}

/// What a verified token says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// Who signed.
    pub iss: String,
    /// On whose behalf.
    pub sub: String,
    /// Whom it is for.
    pub aud: String,
    /// When it was signed, in seconds since 1970.
    pub iat: i64,
    /// When it ends, in seconds since 1970.
    pub exp: i64,
    /// Unique to the token.
    pub jti: String,
}

/// What a token must say to be accepted.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// Whom it must be for.
    pub audience: &'a str,
    /// Who must have signed.
    pub issuer: &'a str,
}

/// Why a token was not signed or not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceTokenError {
    /// It is no JWT, or says things of other types than it should.
    #[error("the service token is malformed")]
    Malformed,
    /// It is longer than any of ours.
    #[error("the service token is longer than {LONGEST} bytes")]
    TooLong,
    /// It names another algorithm than the key's.
    #[error("the service token is signed by another algorithm")]
    WrongAlgorithm,
    /// The signature is not of a key that is trusted.
    #[error("the signature of the service token is not valid")]
    BadSignature,
    /// A claim is not there.
    #[error("the service token has no claim `{claim}`")]
    MissingClaim {
        /// Which.
        claim: &'static str,
    },
    /// It is for somebody else.
    #[error("the service token is for another audience")]
    WrongAudience,
    /// Somebody else signed it.
    #[error("the service token is of another issuer")]
    WrongIssuer,
    /// Its time is over.
    #[error("the service token is expired")]
    Expired,
    /// Its time has not begun; look at the clocks.
    #[error("the service token is not valid yet")]
    NotYet,
    /// It lives longer than a service token may.
    #[error("the service token lives longer than {LIFE} seconds")]
    LivesTooLong,
    /// It was accepted before.
    #[error("the service token was used before")]
    Replayed,
    /// Too many tokens to be sure that this one was not used before.
    #[error("too many service tokens at once")]
    Busy,
    /// The signing failed.
    #[error("the service token could not be signed")]
    Signing,
}

impl ServiceTokenError {
    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Busy => Kind::Unavailable,
            Self::Signing => Kind::Internal,
            _ => Kind::Unauthenticated,
        }
    }
}

impl fmt::Debug for ServiceTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceTokens")
            .field("issuer", &self.issuer)
            .field("algorithm", &self.algorithm)
            .finish_non_exhaustive()
    }
}

impl ServiceTokens {
    /// Signs and verifies by a secret that both sides share (HS256).
    ///
    /// # Errors
    /// When the secret has less than 32 bytes.
    pub fn from_secret(issuer: impl Into<String>, secret: &Secret<String>) -> Result<Self, ServiceKeyError> {
        let bytes = secret.expose().as_bytes();
        let too_short = ServiceKeyError::SecretTooShort { found: bytes.len() };
        if bytes.len() < SHORTEST_SECRET {
            return Err(too_short);
        }
        let signing = EncodingKey::from_secret(bytes).map_err(|_| too_short)?;
        let verifying = DecodingKey::from_secret(bytes).map_err(|_| too_short)?;
        Ok(Self::new(issuer.into(), Algorithm::HS256, signing, verifying))
    }

    /// Signs by a private Ed25519 key in PKCS#8 PEM (EdDSA). Verifies tokens of that key, and of those that are
    /// trusted beside it.
    ///
    /// # Errors
    /// When it is no such key.
    pub fn from_ed25519_pem(
        issuer: impl Into<String>,
        private: &Secret<String>,
    ) -> Result<Self, ServiceKeyError> {
        let der = pem::block(private.expose(), "PRIVATE KEY").ok_or(ServiceKeyError::NotAPrivateKey)?;
        let pair = Ed25519KeyPair::from_pkcs8(&der).map_err(|_| ServiceKeyError::NotAPrivateKey)?;
        let verifying = DecodingKey::from_ed_der(pair.public_key().as_ref());
        Ok(Self::new(issuer.into(), Algorithm::EdDSA, EncodingKey::from_ed_der(&der), verifying))
    }

    /// Verifies tokens of this public Ed25519 key in PEM as well: that of the other side.
    ///
    /// # Errors
    /// When it is no such key, or when ours is a shared secret.
    pub fn trusting_ed25519_pem(mut self, public: &str) -> Result<Self, ServiceKeyError> {
        if self.algorithm != Algorithm::EdDSA {
            return Err(ServiceKeyError::MixedAlgorithms);
        }
        let key = pem::ed25519_public(public).ok_or(ServiceKeyError::NotAPublicKey)?;
        self.verifying.push(DecodingKey::from_ed_der(&key));
        Ok(self)
    }

    fn new(issuer: String, algorithm: Algorithm, signing: EncodingKey, verifying: DecodingKey) -> Self {
        let replays = Mutex::new(Replays::new(REMEMBERED));
        Self { issuer, algorithm, signing, verifying: vec![verifying], replays }
    }

    /// A new token of ours for an audience, good for one use within 60 seconds.
    ///
    /// # Errors
    /// When the signing fails.
    pub fn sign(
        &self,
        audience: &str,
        subject: &str,
        now: Timestamp,
    ) -> Result<Secret<String>, ServiceTokenError> {
        let iat = now.as_second();
        let claims = Claims {
            iss: self.issuer.clone(),
            sub: subject.to_owned(),
            aud: audience.to_owned(),
            iat,
            exp: iat + LIFE,
            jti: uuid::Uuid::new_v4().to_string(),
        };
        jsonwebtoken::encode(&Header::new(self.algorithm), &claims, &self.signing)
            .map(Secret::new)
            .map_err(|_| ServiceTokenError::Signing)
    }

    /// Accepts a token, once.
    ///
    /// # Errors
    /// When it is not one of a trusted key, for `expected.audience`, by `expected.issuer`, alive and not used before.
    pub fn verify(
        &self,
        token: &str,
        expected: &Expected<'_>,
        now: Timestamp,
    ) -> Result<Claims, ServiceTokenError> {
        if token.len() > LONGEST {
            return Err(ServiceTokenError::TooLong);
        }
        let unchecked = self.signed_claims(token)?;
        let (not_before, claims) = (unchecked.nbf, unchecked.complete()?);
        let now = now.as_second();
        if claims.iss != expected.issuer {
            return Err(ServiceTokenError::WrongIssuer);
        }
        if claims.aud != expected.audience {
            return Err(ServiceTokenError::WrongAudience);
        }
        check_times(&claims, not_before, now)?;
        if claims.jti.is_empty() || claims.jti.len() > LONGEST_ID {
            return Err(ServiceTokenError::Malformed);
        }
        // Two issuers may choose the same id.
        let id = format!("{}\n{}", claims.iss, claims.jti);
        match self.replays.lock().see(&id, claims.exp.saturating_add(LEEWAY), now) {
            Seen::FirstTime => Ok(claims),
            Seen::Before => Err(ServiceTokenError::Replayed),
            Seen::Full => Err(ServiceTokenError::Busy),
        }
    }

    fn signed_claims(&self, token: &str) -> Result<Unchecked, ServiceTokenError> {
        // The library looks at the machine's clock; claims are therefore checked here, by the caller's.
        let mut validation = Validation::new(self.algorithm);
        validation.required_spec_claims.clear();
        validation.validate_exp = false;
        validation.validate_aud = false;
        let mut last = ServiceTokenError::BadSignature;
        for key in &self.verifying {
            match jsonwebtoken::decode::<Unchecked>(token, key, &validation) {
                Ok(token) => return Ok(token.claims),
                Err(why) => last = refusal(why.kind()),
            }
            if last != ServiceTokenError::BadSignature {
                break;
            }
        }
        Err(last)
    }
}

fn refusal(why: &ErrorKind) -> ServiceTokenError {
    match why {
        ErrorKind::InvalidSignature => ServiceTokenError::BadSignature,
        ErrorKind::InvalidAlgorithm => ServiceTokenError::WrongAlgorithm,
        _ => ServiceTokenError::Malformed,
    }
}

fn check_times(claims: &Claims, not_before: Option<i64>, now: i64) -> Result<(), ServiceTokenError> {
    if claims.exp.saturating_add(LEEWAY) <= now {
        return Err(ServiceTokenError::Expired);
    }
    if claims.iat.max(not_before.unwrap_or(i64::MIN)) > now.saturating_add(LEEWAY) {
        return Err(ServiceTokenError::NotYet);
    }
    if claims.exp.saturating_sub(claims.iat) > LIFE {
        return Err(ServiceTokenError::LivesTooLong);
    }
    Ok(())
}

/// The claims of a token whose signature is good, before it is known which are there.
#[derive(Deserialize)]
struct Unchecked {
    iss: Option<String>,
    sub: Option<String>,
    aud: Option<String>,
    iat: Option<i64>,
    exp: Option<i64>,
    jti: Option<String>,
    /// Ours have none, but a token that says it is meant.
    nbf: Option<i64>,
}

impl Unchecked {
    fn complete(self) -> Result<Claims, ServiceTokenError> {
        let missing = |claim| move || ServiceTokenError::MissingClaim { claim };
        Ok(Claims {
            iss: self.iss.ok_or_else(missing("iss"))?,
            sub: self.sub.ok_or_else(missing("sub"))?,
            aud: self.aud.ok_or_else(missing("aud"))?,
            iat: self.iat.ok_or_else(missing("iat"))?,
            exp: self.exp.ok_or_else(missing("exp"))?,
            jti: self.jti.ok_or_else(missing("jti"))?,
        })
    }
}
