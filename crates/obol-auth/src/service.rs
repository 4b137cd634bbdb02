use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Header, Validation};
use obol_model::Secret;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::replay::{Replays, Seen, TokenId};
use crate::ring::Ring;
use crate::{ServiceKeyError, ServiceTokenError, TrustedKeys, UsedTokens};

/// How long a service JWT lives, in seconds.
pub(crate) const LIFE: i64 = 60;
/// How far two clocks may be apart, in seconds.
const LEEWAY: i64 = 5;
/// The longest token that is looked at. Ours have about 400 bytes.
pub(crate) const LONGEST: usize = 4096;
/// The longest `jti` that is remembered.
const LONGEST_ID: usize = 128;
/// The most tokens remembered against replay: about 3,000 a second, in some ten megabytes.
const REMEMBERED: usize = 200_000;

/// The names of Obol's parts in `iss` and `aud`.
pub mod party {
    /// A gateway replica.
    pub const GATEWAY: &str = "obol-gateway";
    /// The control plane.
    pub const CONTROL: &str = "obol-control";
    /// A gateway replica, asked by another one.
    pub const PEER: &str = "obol-peer";
}

/// Signs and verifies the JWTs that Obol's own parts show each other (DESIGN §8.2): they live 60 seconds, are meant for
/// one audience, and are accepted once by each process, or once by all of them ([`ServiceTokens::verify_shared`]). The
/// algorithm is fixed by the key, never taken from the token.
pub struct ServiceTokens {
    issuer: String,
    ring: Ring,
    replays: Mutex<Replays>,
    used: Option<UsedTokens>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected<'a> {
    /// Whom it must be for.
    pub audience: &'a str,
    /// Who must have signed.
    pub issuer: &'a str,
}

impl Expected<'static> {
    /// Control forces a gateway to reload.
    pub const RELOAD: Self = Self { audience: party::GATEWAY, issuer: party::CONTROL };
    /// A gateway asks control.
    pub const CONTROL_API: Self = Self { audience: party::CONTROL, issuer: party::GATEWAY };
    /// A gateway asks another one.
    pub const PEER: Self = Self { audience: party::PEER, issuer: party::GATEWAY };
}

impl fmt::Debug for ServiceTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceTokens")
            .field("issuer", &self.issuer)
            .field("algorithm", &self.ring.algorithm)
            .finish_non_exhaustive()
    }
}

impl ServiceTokens {
    /// Signs and verifies by a secret that both sides share (HS256).
    ///
    /// # Errors
    /// When the secret has less than 32 bytes.
    pub fn from_secret(issuer: impl Into<String>, secret: &Secret<String>) -> Result<Self, ServiceKeyError> {
        Ok(Self::new(issuer.into(), Ring::from_secret(secret)?))
    }

    /// Signs by a private Ed25519 key in PKCS#8 PEM (EdDSA), the first one of the text. Verifies tokens of that key and
    /// of the others in the text: ones that are to come, or that were.
    ///
    /// # Errors
    /// When it is no such key, or one of them is none.
    pub fn from_ed25519_pem(
        issuer: impl Into<String>,
        private: &Secret<String>,
    ) -> Result<Self, ServiceKeyError> {
        Ok(Self::new(issuer.into(), Ring::from_ed25519_pem(private)?))
    }

    /// Verifies tokens of these keys as well. From now on our own keys speak for our own issuer only.
    ///
    /// # Errors
    /// When ours is a shared secret.
    pub fn trusting(mut self, keys: &TrustedKeys) -> Result<Self, ServiceKeyError> {
        self.ring.trust(keys)?;
        Ok(self)
    }

    /// Shares the knowledge of used tokens with other processes, for [`ServiceTokens::verify_shared`].
    #[must_use]
    pub fn sharing(mut self, used: UsedTokens) -> Self {
        self.used = Some(used);
        self
    }

    fn new(issuer: String, ring: Ring) -> Self {
        Self { issuer, ring, replays: Mutex::new(Replays::new(REMEMBERED)), used: None }
    }

    /// Our public keys, the one that signs first, as a JWK set for those who verify our tokens; `None` with a shared
    /// secret.
    pub fn jwks(&self) -> Option<String> {
        self.ring.jwks()
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
        let header =
            Header { kid: self.ring.signing_id().map(str::to_owned), ..Header::new(self.ring.algorithm) };
        jsonwebtoken::encode(&header, &claims, &self.ring.signing)
            .map(Secret::new)
            .map_err(|_| ServiceTokenError::Signing)
    }

    /// Accepts a token, once in this process.
    ///
    /// # Errors
    /// When it is not one of a trusted key, for `expected.audience`, by `expected.issuer`, alive and not used before.
    pub fn verify(
        &self,
        token: &str,
        expected: &Expected<'_>,
        now: Timestamp,
    ) -> Result<Claims, ServiceTokenError> {
        self.verify_once(token, expected, now).map(|(claims, _)| claims)
    }

    /// Accepts a token, once among all processes that share what was used ([`ServiceTokens::sharing`]): for what many
    /// processes accept from somebody who does not choose which of them it reaches. Costs one flight to Redis.
    ///
    /// Not cancel-safe: a token may be used up without an answer; the caller's next try brings another one.
    ///
    /// # Errors
    /// As [`ServiceTokens::verify`], and when the others cannot be asked.
    pub async fn verify_shared(
        &self,
        token: &str,
        expected: &Expected<'_>,
        now: Timestamp,
    ) -> Result<Claims, ServiceTokenError> {
        let (claims, id) = self.verify_once(token, expected, now)?;
        if let Some(used) = &self.used {
            let left = claims.exp.saturating_add(LEEWAY).saturating_sub(now.as_second());
            // One second more: this clock and that of Redis do not tick together.
            let life = Duration::from_secs(u64::try_from(left).unwrap_or(0) + 1);
            if !used.first_use(id, life).await? {
                return Err(ServiceTokenError::Replayed);
            }
        }
        Ok(claims)
    }

    fn verify_once(
        &self,
        token: &str,
        expected: &Expected<'_>,
        now: Timestamp,
    ) -> Result<(Claims, TokenId), ServiceTokenError> {
        if token.len() > LONGEST {
            return Err(ServiceTokenError::TooLong);
        }
        let unchecked = self.signed_claims(token, expected)?;
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
        let id = TokenId::new(&claims.iss, &claims.jti);
        match self.replays.lock().see(id, claims.exp.saturating_add(LEEWAY), now) {
            Seen::FirstTime => Ok((claims, id)),
            Seen::Before => Err(ServiceTokenError::Replayed),
            Seen::Full => Err(ServiceTokenError::Busy),
        }
    }

    fn signed_claims(&self, token: &str, expected: &Expected<'_>) -> Result<Unchecked, ServiceTokenError> {
        // The library looks at the machine's clock; claims are therefore checked here, by the caller's.
        let mut validation = Validation::new(self.ring.algorithm);
        validation.required_spec_claims.clear();
        validation.validate_exp = false;
        validation.validate_aud = false;
        let kid = jsonwebtoken::decode_header(token).ok().and_then(|header| header.kid);
        let mut last = ServiceTokenError::BadSignature;
        for key in self.ring.candidates(expected.issuer == self.issuer, kid.as_deref()) {
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
