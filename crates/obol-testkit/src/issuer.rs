//! An OAuth issuer: it publishes its metadata and its keys, signs whatever it is told to, right or wrong, and can turn
//! bad in the usual ways.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::encoding::{AsBigEndian as _, EcPublicKeyUncompressedBin};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256,
    RSA_PSS_SHA256, RsaKeyPair,
};
use aws_lc_rs::{hmac, rsa};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use crate::accept::Acceptor;
use crate::answer::{self, Answer, AnswerBody, Cut, bare};

/// What a key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alg {
    /// RSA with PKCS #1 padding; 2048 bits.
    Rs256,
    /// RSA with PSS padding; 2048 bits.
    Ps256,
    /// ECDSA on P-256.
    Es256,
    /// Ed25519.
    EdDsa,
}

impl Alg {
    fn name(self) -> &'static str {
        match self {
            Self::Rs256 => "RS256",
            Self::Ps256 => "PS256",
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
        }
    }
}

/// How the server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mood {
    /// As it should.
    #[default]
    Well,
    /// Never.
    Hanging,
    /// `200` with a page for people.
    Html,
    /// `500`.
    Failing,
    /// `302` to another place, which has the keys.
    Redirecting,
}

enum Pair {
    Rsa(Box<RsaKeyPair>),
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

/// A key pair of an issuer.
struct Key {
    alg: Alg,
    pair: Pair,
}

impl Key {
    fn generate(alg: Alg) -> Self {
        let pair = match alg {
            Alg::Rs256 | Alg::Ps256 => {
                Pair::Rsa(Box::new(rsa::KeyPair::generate(KeySize::Rsa2048).expect("an RSA key")))
            }
            Alg::Es256 => {
                Pair::Ec(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).expect("an EC key"))
            }
            Alg::EdDsa => Pair::Ed(Ed25519KeyPair::generate().expect("an Ed25519 key")),
        };
        Self { alg, pair }
    }

    fn jwk(&self, id: &str) -> Value {
        let b64 = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let mut jwk = match &self.pair {
            Pair::Rsa(pair) => {
                let (n, e) = rsa_components(pair.public_key().as_ref());
                json!({ "kty": "RSA", "n": b64(n), "e": b64(e) })
            }
            Pair::Ec(pair) => {
                let point: EcPublicKeyUncompressedBin = pair.public_key().as_be_bytes().expect("a point");
                let (x, y) = point.as_ref()[1..].split_at(32);
                json!({ "kty": "EC", "crv": "P-256", "x": b64(x), "y": b64(y) })
            }
            Pair::Ed(pair) => {
                json!({ "kty": "OKP", "crv": "Ed25519", "x": b64(pair.public_key().as_ref()) })
            }
        };
        jwk["kid"] = id.into();
        jwk["alg"] = self.alg.name().into();
        jwk["use"] = "sig".into();
        jwk
    }

    fn sign(&self, alg: Alg, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match &self.pair {
            Pair::Rsa(pair) => {
                let padding = if alg == Alg::Ps256 { &RSA_PSS_SHA256 } else { &RSA_PKCS1_SHA256 };
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(padding, &random, message, &mut signature).expect("a signature");
                signature
            }
            Pair::Ec(pair) => pair.sign(&random, message).expect("a signature").as_ref().to_vec(),
            Pair::Ed(pair) => pair.sign(message).as_ref().to_vec(),
        }
    }

    fn public_bytes(&self) -> Vec<u8> {
        match &self.pair {
            Pair::Rsa(pair) => pair.public_key().as_ref().to_vec(),
            Pair::Ec(pair) => pair.public_key().as_ref().to_vec(),
            Pair::Ed(pair) => pair.public_key().as_ref().to_vec(),
        }
    }
}

/// Modulus and exponent of an `RSAPublicKey` (RFC 8017 appendix A.1.1) of 2048 bits.
fn rsa_components(der: &[u8]) -> (&[u8], &[u8]) {
    // SEQUENCE, INTEGER of 257 bytes that begins with a zero, INTEGER of 3 bytes.
    assert_eq!((&der[..9], &der[265..267]), (&b"\x30\x82\x01\x0a\x02\x82\x01\x01\x00"[..], &[2, 3][..]));
    (&der[9..265], &der[267..])
}

/// A running issuer.
#[derive(Debug)]
pub struct Issuer {
    acceptor: Acceptor,
    shared: Arc<Shared>,
}

struct Shared {
    addr: Mutex<Option<SocketAddr>>,
    keys: Mutex<BTreeMap<String, Key>>,
    published: Mutex<Vec<String>>,
    mood: watch::Sender<Mood>,
    asked: AtomicU64,
    granted: Mutex<Map<String, Value>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("mood", &*self.mood.borrow()).finish_non_exhaustive()
    }
}

impl Issuer {
    /// Starts one without keys.
    pub async fn start() -> Self {
        let shared = Arc::new(Shared {
            addr: Mutex::default(),
            keys: Mutex::default(),
            published: Mutex::default(),
            mood: watch::Sender::default(),
            asked: AtomicU64::default(),
            granted: Mutex::default(),
        });
        let for_connections = shared.clone();
        let acceptor = Acceptor::start(move |stream| {
            let shared = for_connections.clone();
            answer::serve(stream, move |request| handle(request, shared.clone()))
        });
        *shared.addr.lock() = Some(acceptor.addr());
        Self { acceptor, shared }
    }

    /// Starts one that publishes this key.
    pub async fn with_key(id: &str, alg: Alg) -> Self {
        let issuer = Self::start().await;
        issuer.add_key(id, alg);
        issuer
    }

    /// What it calls itself: `iss`.
    pub fn url(&self) -> String {
        answer::origin(self.acceptor.addr())
    }

    /// Where its keys are.
    pub fn jwks_url(&self) -> String {
        format!("{}/jwks", self.url())
    }

    /// Makes a key and publishes it.
    pub fn add_key(&self, id: &str, alg: Alg) {
        self.add_hidden_key(id, alg);
        self.shared.published.lock().push(id.to_owned());
    }

    /// Makes a key that it signs with and does not publish.
    pub fn add_hidden_key(&self, id: &str, alg: Alg) {
        self.shared.keys.lock().insert(id.to_owned(), Key::generate(alg));
    }

    /// Publishes a key no more; it still signs with it when told so.
    pub fn withdraw_key(&self, id: &str) {
        self.shared.published.lock().retain(|published| published != id);
    }

    /// From now on it answers like this; what hangs goes on hanging until the mood changes.
    pub fn set_mood(&self, mood: Mood) {
        self.shared.mood.send_replace(mood);
    }

    /// What clients get in their tokens from now on, beside what they ask for: `POST /token` with the grant
    /// `client_credentials`, a `resource` and a `scope`, and whatever secret they have.
    pub fn grant(&self, claims: Value) {
        *self.shared.granted.lock() = object(claims);
    }

    /// How often it was asked for its keys.
    pub fn asked_for_keys(&self) -> u64 {
        self.shared.asked.load(Ordering::SeqCst)
    }

    /// The public key as bytes, which attackers know too.
    ///
    /// # Panics
    /// When there is no such key.
    pub fn public_key(&self, id: &str) -> Vec<u8> {
        self.shared.keys.lock()[id].public_bytes()
    }

    /// A good token of `alice` for an audience, for five minutes, to be changed and signed.
    ///
    /// # Panics
    /// When there is no such key.
    pub fn token(&self, key: &str, audience: &str, now: i64) -> Token {
        self.shared.token(key, audience, now)
    }
}

impl Shared {
    fn url(&self) -> String {
        self.addr.lock().map(answer::origin).unwrap_or_default()
    }

    fn token(self: &Arc<Self>, key: &str, audience: &str, now: i64) -> Token {
        let alg = self.keys.lock()[key].alg;
        let claims = json!({
            "iss": self.url(), "sub": "alice", "aud": audience, "iat": now, "exp": now + 300,
            "jti": URL_SAFE_NO_PAD.encode(random()),
        });
        Token {
            issuer: self.clone(),
            key: key.to_owned(),
            signature: Signature::Own(alg),
            header: object(json!({ "typ": "at+jwt", "alg": alg.name(), "kid": key })),
            claims: object(claims),
        }
    }

    /// A token for a client that asks in the body of a form.
    fn grant(self: &Arc<Self>, form: &[u8]) -> String {
        let form = String::from_utf8_lossy(form);
        let form = reqwest::Url::parse(&format!("http://form/?{form}")).expect("a form");
        let field = |name: &str| {
            form.query_pairs().find(|(field, _)| field == name).map_or(String::new(), |(_, v)| v.into_owned())
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_secs();
        let now = i64::try_from(now).expect("a time before the end");
        let key = self.published.lock().first().expect("a published key").clone();
        let mut token = self.token(&key, &field("resource"), now).claim("scope", field("scope"));
        token.claims.extend(self.granted.lock().clone());
        json!({
            "access_token": token.sign(), "token_type": "Bearer", "expires_in": 300, "scope": field("scope"),
        })
        .to_string()
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("no object: {other}"),
    }
}

fn random() -> [u8; 12] {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).expect("random bytes");
    bytes
}

/// A token in the making.
#[derive(Debug)]
pub struct Token {
    issuer: Arc<Shared>,
    key: String,
    signature: Signature,
    header: Map<String, Value>,
    claims: Map<String, Value>,
}

#[derive(Debug)]
enum Signature {
    Own(Alg),
    Hmac(Vec<u8>),
    None,
}

impl Token {
    /// Sets a claim.
    #[must_use]
    pub fn claim(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.claims.insert(name.to_owned(), value.into());
        self
    }

    /// Takes a claim away.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.claims.remove(name);
        self
    }

    /// Sets a member of the header, whatever it is signed with; `null` takes it away.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<Value>) -> Self {
        match value.into() {
            Value::Null => self.header.remove(name),
            value => self.header.insert(name.to_owned(), value),
        };
        self
    }

    /// Signs with an RSA key by another padding than its own; says so in the header.
    #[must_use]
    pub fn padded_as(mut self, alg: Alg) -> Self {
        self.signature = Signature::Own(alg);
        self.header("alg", alg.name())
    }

    /// `HS256` with this secret.
    #[must_use]
    pub fn hmac(mut self, secret: &[u8]) -> Self {
        self.signature = Signature::Hmac(secret.to_vec());
        self.header("alg", "HS256")
    }

    /// `alg: none`, and no signature.
    #[must_use]
    pub fn unsigned(mut self) -> Self {
        self.signature = Signature::None;
        self.header("alg", "none")
    }

    /// The token as it travels.
    ///
    /// # Panics
    /// When the key is gone.
    pub fn sign(self) -> String {
        let part =
            |part: &Map<String, Value>| URL_SAFE_NO_PAD.encode(serde_json::to_string(part).expect("JSON"));
        let message = format!("{}.{}", part(&self.header), part(&self.claims));
        let signature = match self.signature {
            Signature::Own(alg) => self.issuer.keys.lock()[&self.key].sign(alg, message.as_bytes()),
            Signature::Hmac(secret) => {
                let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
                hmac::sign(&key, message.as_bytes()).as_ref().to_vec()
            }
            Signature::None => Vec::new(),
        };
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

async fn handle(request: Request<Incoming>, shared: Arc<Shared>) -> Answer {
    let path = request.uri().path();
    let for_keys = path == "/jwks" || path == "/moved";
    if for_keys {
        shared.asked.fetch_add(1, Ordering::SeqCst);
    }
    let mut mood = shared.mood.subscribe();
    // Fails only when the issuer is gone, and the connection with it.
    let now = mood.wait_for(|mood| *mood != Mood::Hanging).await.map_or(Mood::Hanging, |mood| *mood);
    match now {
        Mood::Well => {}
        Mood::Redirecting if path == "/moved" => {}
        Mood::Redirecting => {
            let mut moved = bare(StatusCode::FOUND);
            moved.headers_mut().insert(header::LOCATION, HeaderValue::from_static("/moved"));
            return Ok(moved);
        }
        Mood::Html => {
            let page = AnswerBody::full("<!doctype html><title>Sign in</title>");
            return Ok(answer::answer(StatusCode::OK, "text/html", page));
        }
        Mood::Failing | Mood::Hanging => return Ok(bare(StatusCode::INTERNAL_SERVER_ERROR)),
    }
    let url = shared.url();
    if for_keys {
        let keys = shared.keys.lock();
        let published = shared.published.lock();
        let jwks: Vec<Value> = published.iter().map(|id| keys[id].jwk(id)).collect();
        return Ok(answer::json(StatusCode::OK, json!({ "keys": jwks }).to_string()));
    }
    // As an OpenID provider has it: only the second place that is looked at.
    if path == "/.well-known/openid-configuration" {
        let metadata = json!({
            "issuer": url, "jwks_uri": format!("{url}/jwks"), "token_endpoint": format!("{url}/token"),
            "authorization_endpoint": format!("{url}/authorize"), "response_types_supported": ["code"],
            "grant_types_supported": ["client_credentials"],
        });
        return Ok(answer::json(StatusCode::OK, metadata.to_string()));
    }
    if path == "/token" && request.method() == Method::POST {
        let Ok(form) = request.into_body().collect().await else { return Err(Cut) };
        return Ok(answer::json(StatusCode::OK, shared.grant(&form.to_bytes())));
    }
    Ok(bare(StatusCode::NOT_FOUND))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn get(url: String) -> (u16, String) {
        let response = reqwest::Client::builder().no_proxy().build().unwrap().get(url).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    #[tokio::test]
    async fn it_publishes_what_it_is_told_to() {
        let issuer = Issuer::start().await;
        for (id, alg) in [("a", Alg::Rs256), ("b", Alg::Es256), ("c", Alg::EdDsa)] {
            issuer.add_key(id, alg);
            assert_eq!(issuer.token(id, "x", 0).sign().split('.').count(), 3);
        }
        issuer.withdraw_key("b");
        let (_, metadata) = get(format!("{}/.well-known/openid-configuration", issuer.url())).await;
        let metadata: Value = serde_json::from_str(&metadata).unwrap();
        assert_eq!(
            (&metadata["issuer"], &metadata["jwks_uri"]),
            (&issuer.url().into(), &issuer.jwks_url().into())
        );
        let (_, keys) = get(issuer.jwks_url()).await;
        let keys: Value = serde_json::from_str(&keys).unwrap();
        let ids: Vec<&str> =
            keys["keys"].as_array().unwrap().iter().map(|k| k["kid"].as_str().unwrap()).collect();
        assert_eq!((ids, issuer.asked_for_keys()), (vec!["a", "c"], 1));

        issuer.set_mood(Mood::Failing);
        assert_eq!(get(issuer.jwks_url()).await.0, 500);
        issuer.set_mood(Mood::Html);
        assert!(get(issuer.jwks_url()).await.1.starts_with("<!doctype"));
    }
}
