use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::future::join_all;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Validation};
use obol_dial::Dialer;
use obol_model::{Clock, metric};
use parking_lot::RwLock;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::claims::{self, ClaimRules, Claims};
use super::issuer::{Issuer, IssuerKeys, JwksOptions};
use super::jwks::{self, Algorithms, Key};
use super::{ProtectedResource, Target, TokenError, TokenFault};
use crate::User;
use crate::cache::Expiring;

/// Longest access token. Those with many groups have several kB; header fields of more are rare on the way.
const LONGEST: usize = 16 << 10;
/// Tokens that are remembered as good, and for how long: verifying a signature costs much more than a hash.
const REMEMBERED: usize = 10_000;
const REMEMBERED_FOR: Duration = Duration::from_mins(10);

/// What access tokens are judged by.
#[derive(Debug)]
pub struct OAuthOptions {
    /// What tokens must be for.
    pub resource: ProtectedResource,
    /// Who may issue them.
    pub issuers: Vec<Issuer>,
    /// What they may be signed with.
    pub algorithms: Algorithms,
    /// What their claims mean.
    pub claims: ClaimRules,
    /// How long keys of issuers are trusted.
    pub jwks: JwksOptions,
}

/// Verifies access tokens.
#[derive(Debug)]
pub struct AccessTokens {
    resource: ProtectedResource,
    issuers: Vec<IssuerKeys>,
    algorithms: Algorithms,
    rules: ClaimRules,
    clock: Arc<dyn Clock>,
    good: RwLock<Expiring<[u8; 32], Good>>,
}

/// A token that was verified.
#[derive(Debug, Clone)]
struct Good {
    user: Arc<User>,
    /// Which issuer, and which set of its keys it was verified by: a key may be withdrawn.
    issuer: usize,
    version: u64,
}

/// What of a JOSE header matters (RFC 7515 section 4.1).
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    typ: Option<String>,
    crit: Option<IgnoredAny>,
    b64: Option<IgnoredAny>,
}

impl AccessTokens {
    /// Nothing is known of the issuers yet: see [`AccessTokens::run`].
    pub fn new(options: OAuthOptions, clock: Arc<dyn Clock>) -> Arc<Self> {
        let jwks = options.jwks;
        Arc::new(Self {
            resource: options.resource,
            issuers: options.issuers.into_iter().map(|issuer| IssuerKeys::new(issuer, jwks)).collect(),
            algorithms: options.algorithms,
            rules: options.claims,
            clock,
            good: RwLock::new(Expiring::new(REMEMBERED_FOR, REMEMBERED)),
        })
    }

    /// What tokens are for.
    pub fn resource(&self) -> &ProtectedResource {
        &self.resource
    }

    /// Fetches the keys of the issuers now, and again and again until `shutdown`. Run it once.
    pub async fn run(self: Arc<Self>, dialer: Dialer, shutdown: CancellationToken) {
        join_all(self.issuers.iter().map(|issuer| issuer.run(&dialer, &shutdown))).await;
    }

    /// The user that a token speaks for, if it opens `target`. One that was seen before costs a hash and a look into
    /// memory; only one whose key is unknown waits for its issuer.
    ///
    /// Cancel-safe: the fetch that it may wait for goes on by itself.
    ///
    /// # Errors
    /// When the token is not good, not good enough, or cannot be judged.
    pub async fn authenticate(&self, token: &str, target: Target<'_>) -> Result<Arc<User>, TokenError> {
        let judged = self.judge(token, target).await;
        let outcome = judged.as_ref().map_or_else(TokenError::as_str, |_| "ok");
        metrics::counter!(metric::OAUTH_TOKENS, "outcome" => outcome).increment(1);
        judged
    }

    async fn judge(&self, token: &str, target: Target<'_>) -> Result<Arc<User>, TokenError> {
        if token.len() > LONGEST {
            return Err(TokenFault::TooLong.into());
        }
        let mut hash = [0; 32];
        hash.copy_from_slice(digest::digest(&digest::SHA256, token.as_bytes()).as_ref());
        let user = match self.remembered(&hash) {
            Some(user) => user,
            None => self.verify(token, hash).await?,
        };
        // At each use, however long ago it was verified.
        if claims::is_over(user.expires_at.as_second(), self.now()) {
            return Err(TokenFault::Expired.into());
        }
        if !user.audiences.iter().any(|audience| self.resource.opens(audience, target)) {
            return Err(TokenFault::Audience.into());
        }
        Ok(user)
    }

    fn now(&self) -> i64 {
        self.clock.now().as_second()
    }

    fn remembered(&self, hash: &[u8; 32]) -> Option<Arc<User>> {
        let good = self.good.read().get(hash, Instant::now())?.clone();
        let keys = self.issuers.get(good.issuer)?.current()?;
        (keys.version == good.version).then_some(good.user)
    }

    async fn verify(&self, token: &str, hash: [u8; 32]) -> Result<Arc<User>, TokenError> {
        let (header, payload) = parts(token).ok_or(TokenFault::Malformed)?;
        let (key_id, algorithm) = self.signed_by(&header)?;
        // Not believed yet: it only says whose key has to prove it.
        let issuer = payload.get("iss").and_then(|iss| iss.as_str()).ok_or(TokenFault::Issuer)?;
        let known = self.issuers.iter().position(|known| known.id() == issuer);
        let index = known.ok_or(TokenFault::Issuer)?;
        let keys = self.issuers.get(index).ok_or(TokenFault::Issuer)?;
        let (claims, version) =
            keys.with_key(&key_id, algorithm, |key| verify(token, key, algorithm)).await?;
        let user = Arc::new(claims::user(&claims, &self.resource, &self.rules, self.now())?);
        let good = Good { user: user.clone(), issuer: index, version };
        self.good.write().insert(hash, good, Instant::now());
        Ok(user)
    }

    /// What the header says of the signature, when it says nothing that is refused.
    fn signed_by(&self, header: &Header) -> Result<(String, Algorithm), TokenFault> {
        let algorithm = jwks::algorithm(&header.alg).filter(|a| self.algorithms.contains(*a));
        let algorithm = algorithm.ok_or(TokenFault::Algorithm)?;
        // RFC 7515 section 4.1.11: what is critical and not understood is refused, and nothing is understood.
        if header.crit.is_some() || header.b64.is_some() {
            return Err(TokenFault::Extension);
        }
        // RFC 9068 section 2.1, RFC 8725 section 3.11; many issuers write the general type, or none.
        let typ = header.typ.as_deref().unwrap_or("JWT").to_ascii_lowercase();
        if !matches!(typ.strip_prefix("application/").unwrap_or(&typ), "at+jwt" | "jwt") {
            return Err(TokenFault::Type);
        }
        let key_id = header.kid.as_ref().filter(|id| jwks::is_key_id(id)).ok_or(TokenFault::KeyId)?;
        Ok((key_id.clone(), algorithm))
    }
}

/// Header and payload, not verified.
fn parts(token: &str) -> Option<(Header, Claims)> {
    let mut parts = token.split('.');
    let (header, payload) = (parts.next()?, parts.next()?);
    parts.next().filter(|signature| !signature.is_empty() && parts.next().is_none())?;
    let header = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(header).ok()?).ok()?;
    let payload = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
    Some((header, payload))
}

/// The claims, when this key has signed them with this algorithm.
fn verify(token: &str, key: &Key, algorithm: Algorithm) -> Result<Claims, TokenFault> {
    // The library would look at the machine's clock and has rules of its own; claims are judged in `claims`.
    let mut validation = Validation::new(algorithm);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_aud = false;
    match jsonwebtoken::decode::<Claims>(token, &key.decoding, &validation) {
        Ok(token) => Ok(token.claims),
        Err(why) => Err(match why.kind() {
            ErrorKind::InvalidSignature => TokenFault::Signature,
            ErrorKind::InvalidAlgorithm => TokenFault::Algorithm,
            _ => TokenFault::Malformed,
        }),
    }
}
