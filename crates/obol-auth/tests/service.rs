//! Service JWTs (DESIGN §8.2).
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use obol_auth::{
    Expected, ServiceKeyError, ServiceTokenError, ServiceTokens, TrustedKeys, UsedTokens, party,
};
use obol_model::{Kind, Secret};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::redis::RedisServer;
use serde_json::{Value, json};

/// RFC 8410 section 10.
const PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
";
const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
";
const SECRET: &str = "0123456789abcdef0123456789abcdef";
const NOW: i64 = 1_800_000_000;
const EXPECTED: Expected<'static> = Expected { audience: "gateway", issuer: "control" };

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn shared() -> ServiceTokens {
    ServiceTokens::from_secret("control", &Secret::new(SECRET.to_owned())).unwrap()
}

fn claims() -> Value {
    json!({"iss": "control", "sub": "reload", "aud": "gateway", "iat": NOW, "exp": NOW + 60, "jti": "j-1"})
}

/// `claims()` with one of them set, or removed by `null`.
fn claims_with(name: &str, value: Value) -> Value {
    let mut claims = claims();
    let object = claims.as_object_mut().unwrap();
    if value.is_null() {
        drop(object.remove(name));
    } else {
        drop(object.insert(name.into(), value));
    }
    claims
}

fn signed(claims: &Value) -> String {
    let key = EncodingKey::from_secret(SECRET.as_bytes()).unwrap();
    jsonwebtoken::encode(&Header::new(Algorithm::HS256), claims, &key).unwrap()
}

fn another_key() -> String {
    let pair = aws_lc_rs::signature::Ed25519KeyPair::generate().unwrap();
    let der = base64::engine::general_purpose::STANDARD.encode(pair.to_pkcs8v1().unwrap().as_ref());
    format!("-----BEGIN PRIVATE KEY-----\n{der}\n-----END PRIVATE KEY-----\n")
}

#[test]
fn a_token_is_accepted_by_its_audience_within_a_minute() {
    let private = Secret::new(PRIVATE.to_owned());
    for tokens in [shared(), ServiceTokens::from_ed25519_pem("control", &private).unwrap()] {
        let token = tokens.sign("gateway", "reload", at(NOW)).unwrap();
        let claims = tokens.verify(token.expose(), &EXPECTED, at(NOW + 59)).unwrap();
        assert_eq!((claims.sub.as_str(), claims.iat, claims.exp), ("reload", NOW, NOW + 60));
        assert_eq!(claims.jti.len(), 36);
        assert!(!format!("{tokens:?}").contains(&SECRET[..8]));
    }
}

fn ed25519(issuer: &str, private: &str) -> ServiceTokens {
    ServiceTokens::from_ed25519_pem(issuer, &Secret::new(private.to_owned())).unwrap()
}

fn trusted() -> TrustedKeys {
    TrustedKeys::from_pem(PUBLIC).unwrap()
}

#[test]
fn each_side_can_trust_the_public_key_of_the_other() {
    let control = ed25519("control", PRIVATE);
    let gateway = ed25519("gateway", &another_key());
    let token = control.sign("gateway", "reload", at(NOW)).unwrap();
    assert_eq!(gateway.verify(token.expose(), &EXPECTED, at(NOW)), Err(ServiceTokenError::BadSignature));
    let gateway = gateway.trusting(&trusted()).unwrap();
    gateway.verify(token.expose(), &EXPECTED, at(NOW)).unwrap();
}

/// With keys of their own, who holds a gateway's key cannot speak as control.
#[test]
fn a_key_of_ones_own_speaks_for_ones_own_issuer_only() {
    let theirs = another_key();
    let gateway = || ed25519("gateway", &theirs).trusting(&trusted()).unwrap();
    let posing = ed25519("control", &theirs).sign("gateway", "reload", at(NOW)).unwrap();
    assert_eq!(gateway().verify(posing.expose(), &EXPECTED, at(NOW)), Err(ServiceTokenError::BadSignature));
    // To other gateways it speaks.
    let peer = Expected { audience: "peer", issuer: "gateway" };
    let token = gateway().sign("peer", "gateway", at(NOW)).unwrap();
    gateway().verify(token.expose(), &peer, at(NOW)).unwrap();
}

#[test]
fn a_key_is_rotated_without_a_refusal() {
    let (old, new) = (PRIVATE.to_owned(), another_key());
    // Appended everywhere, then in front everywhere, then alone.
    let steps = [old.clone(), format!("{old}{new}"), format!("{new}{old}"), new];
    for pair in steps.windows(2) {
        for (signer, verifier) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let token = ed25519("control", &pair[signer]).sign("gateway", "reload", at(NOW)).unwrap();
            ed25519("control", &pair[verifier]).verify(token.expose(), &EXPECTED, at(NOW)).unwrap();
        }
    }
    let token = ed25519("control", &steps[3]).sign("gateway", "reload", at(NOW)).unwrap();
    let refused = ed25519("control", &steps[0]).verify(token.expose(), &EXPECTED, at(NOW));
    assert_eq!(refused, Err(ServiceTokenError::BadSignature));
}

#[test]
fn public_keys_are_published_and_named_in_tokens() {
    let other = another_key();
    let tokens = ed25519("gateway", &format!("{PRIVATE}{other}")).trusting(&trusted()).unwrap();
    let set: Value = serde_json::from_str(&tokens.jwks().unwrap()).unwrap();
    // `x` is the 32 bytes of PUBLIC; `kid` was computed apart, as RFC 7638 says.
    let first = json!({
        "kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA",
        "kid": "3YZxBJ12jO3n_mXt_q-j_Z-TFP1vt-NiI3OCf-fEnHQ",
        "x": "Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE",
    });
    assert_eq!(set["keys"][0], first);
    assert_eq!(set["keys"].as_array().unwrap().len(), 2, "ours, and not those of others");
    let token = tokens.sign("upstream", "gateway", at(NOW)).unwrap();
    let header = jsonwebtoken::decode_header(token.expose()).unwrap();
    assert_eq!(header.kid.as_deref(), first["kid"].as_str());
    // Whoever verifies with nothing but the set can.
    let key = jsonwebtoken::DecodingKey::from_ed_components(first["x"].as_str().unwrap()).unwrap();
    let mut validation = jsonwebtoken::Validation::new(Algorithm::EdDSA);
    validation.set_audience(&["upstream"]);
    validation.validate_exp = false;
    jsonwebtoken::decode::<Value>(token.expose(), &key, &validation).unwrap();
    assert_eq!(shared().jwks(), None);
    assert!(!set.to_string().contains("\"d\""), "no private part");
}

/// `kid` is a hint: it selects among the keys that are trusted anyway.
#[test]
fn a_token_cannot_name_a_key_into_trust() {
    let tokens = ed25519("control", PRIVATE);
    let der = base64::engine::general_purpose::STANDARD.decode(PRIVATE.lines().nth(1).unwrap()).unwrap();
    for (kid, good) in [("", true), ("../../etc/passwd", true), (&"k".repeat(2000), true)] {
        let header = Header { kid: Some(kid.to_owned()), ..Header::new(Algorithm::EdDSA) };
        let token = jsonwebtoken::encode(&header, &claims(), &EncodingKey::from_ed_der(&der)).unwrap();
        assert_eq!(ed25519("control", PRIVATE).verify(&token, &EXPECTED, at(NOW)).is_ok(), good, "{kid:.20}");
    }
    let kid =
        jsonwebtoken::decode_header(tokens.sign("gateway", "x", at(NOW)).unwrap().expose()).unwrap().kid;
    let other = another_key();
    let der: String = other.lines().filter(|line| !line.starts_with('-')).collect();
    let der = base64::engine::general_purpose::STANDARD.decode(der).unwrap();
    let header = Header { kid, ..Header::new(Algorithm::EdDSA) };
    let token = jsonwebtoken::encode(&header, &claims(), &EncodingKey::from_ed_der(&der)).unwrap();
    assert_eq!(tokens.verify(&token, &EXPECTED, at(NOW)), Err(ServiceTokenError::BadSignature));
}

/// The contract between the processes.
#[test]
fn each_relation_has_names_of_its_own() {
    let secret = Secret::new(SECRET.to_owned());
    let control = ServiceTokens::from_secret(party::CONTROL, &secret).unwrap();
    let gateway = ServiceTokens::from_secret(party::GATEWAY, &secret).unwrap();
    let relations = [Expected::RELOAD, Expected::CONTROL_API, Expected::PEER];
    for signed_for in relations {
        let signer = if signed_for.issuer == party::CONTROL { &control } else { &gateway };
        for expected in relations {
            let token = signer.sign(signed_for.audience, "x", at(NOW)).unwrap();
            let accepted = shared().verify(token.expose(), &expected, at(NOW)).is_ok();
            assert_eq!(accepted, expected == signed_for, "{signed_for:?} as {expected:?}");
        }
    }
    let names = [party::GATEWAY, party::CONTROL, party::PEER];
    assert_eq!(names, ["obol-gateway", "obol-control", "obol-peer"]);
}

#[tokio::test]
async fn a_shared_token_is_accepted_once_among_all_processes() {
    let server = RedisServer::start().await;
    let mut processes = Vec::new();
    for _ in 0..3 {
        let redis = Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap();
        processes.push(shared().sharing(UsedTokens::new(redis)));
    }
    let token = signed(&claims());
    let tries = processes.iter().map(|tokens| tokens.verify_shared(&token, &EXPECTED, at(NOW)));
    let outcomes = futures::future::join_all(tries).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
    assert!(outcomes.iter().flat_map(Result::as_ref).all(|claims| claims.jti == "j-1"));
    let refused = outcomes.iter().filter(|outcome| *outcome == &Err(ServiceTokenError::Replayed)).count();
    assert_eq!(refused, 2, "{outcomes:?}");
    // For as long as it could still be accepted: 60 s and the leeway.
    let [name] = server.keys("*").await.try_into().unwrap();
    assert!(name.starts_with("jwt-used:") && !name.contains("j-1"), "{name}");
    let ttl: i64 = server.query(&["TTL", &name]).await;
    assert!((60..=66).contains(&ttl), "{ttl}");

    server.kill();
    let other = signed(&claims_with("jti", json!("j-2")));
    let unknown = processes[0].verify_shared(&other, &EXPECTED, at(NOW)).await.unwrap_err();
    assert_eq!(unknown.kind(), Kind::Unavailable, "could not ask is neither a yes nor a no: {unknown}");
}

#[test]
fn a_token_is_accepted_once() {
    let tokens = shared();
    let token = signed(&claims());
    tokens.verify(&token, &EXPECTED, at(NOW)).unwrap();
    assert_eq!(tokens.verify(&token, &EXPECTED, at(NOW)), Err(ServiceTokenError::Replayed));
    // To the last second in which the leeway would still accept it.
    assert_eq!(tokens.verify(&token, &EXPECTED, at(NOW + 64)), Err(ServiceTokenError::Replayed));
    assert_eq!(tokens.verify(&token, &EXPECTED, at(NOW + 65)), Err(ServiceTokenError::Expired));
}

#[test]
fn a_refused_token_is_not_used_up() {
    let tokens = shared();
    let token = signed(&claims());
    let other = Expected { audience: "peer", ..EXPECTED };
    assert_eq!(tokens.verify(&token, &other, at(NOW)), Err(ServiceTokenError::WrongAudience));
    tokens.verify(&token, &EXPECTED, at(NOW)).unwrap();
}

#[test]
fn every_claim_is_checked() {
    use ServiceTokenError as E;
    let table: Vec<(Value, Result<(), E>)> = vec![
        (claims_with("aud", json!("peer")), Err(E::WrongAudience)),
        (claims_with("aud", json!("")), Err(E::WrongAudience)),
        (claims_with("aud", json!(["gateway", "peer"])), Err(E::Malformed)),
        (claims_with("iss", json!("gateway")), Err(E::WrongIssuer)),
        (claims_with("iss", json!(["control"])), Err(E::Malformed)),
        (claims_with("exp", json!(NOW - 5)), Err(E::Expired)),
        (claims_with("exp", json!(NOW - 4)), Ok(())),
        (claims_with("exp", json!(i64::MIN)), Err(E::Expired)),
        (claims_with("exp", json!(NOW + 61)), Err(E::LivesTooLong)),
        (claims_with("exp", json!(i64::MAX)), Err(E::LivesTooLong)),
        (claims_with("exp", json!("soon")), Err(E::Malformed)),
        (claims_with("exp", json!(1e30)), Err(E::Malformed)),
        (claims_with("iat", json!(NOW + 5)), Ok(())),
        (claims_with("iat", json!(NOW + 6)), Err(E::NotYet)),
        (claims_with("iat", json!(i64::MIN)), Err(E::LivesTooLong)),
        (claims_with("nbf", json!(NOW + 5)), Ok(())),
        (claims_with("nbf", json!(NOW + 6)), Err(E::NotYet)),
        (claims_with("nbf", json!(i64::MIN)), Ok(())),
        (claims_with("nbf", json!("now")), Err(E::Malformed)),
        (claims_with("jti", json!("")), Err(E::Malformed)),
        (claims_with("jti", json!("j".repeat(129))), Err(E::Malformed)),
        (claims_with("jti", json!(7)), Err(E::Malformed)),
        (json!({}), Err(E::MissingClaim { claim: "iss" })),
        (json!([]), Err(E::Malformed)),
        (json!("control"), Err(E::Malformed)),
    ];
    for (claims, expected) in table {
        let found = shared().verify(&signed(&claims), &EXPECTED, at(NOW)).map(drop);
        assert_eq!(found, expected, "{claims}");
    }
    for claim in ["iss", "sub", "aud", "iat", "exp", "jti"] {
        let found = shared().verify(&signed(&claims_with(claim, Value::Null)), &EXPECTED, at(NOW));
        assert_eq!(found, Err(E::MissingClaim { claim }));
    }
}

#[test]
fn the_token_does_not_choose_its_algorithm() {
    use ServiceTokenError as E;
    let part = |json: Value| URL_SAFE_NO_PAD.encode(json.to_string());
    let unsigned = |header: Value| format!("{}.{}.", part(header), part(claims()));
    let ed = || ServiceTokens::from_ed25519_pem("control", &Secret::new(PRIVATE.to_owned())).unwrap();
    // The public key, which everybody has, taken as a shared secret.
    let public_as_secret = |secret: &[u8]| {
        let key = EncodingKey::from_secret(secret).unwrap();
        jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims(), &key).unwrap()
    };
    let der = base64::engine::general_purpose::STANDARD.decode(PUBLIC.lines().nth(1).unwrap()).unwrap();
    let eddsa = ed().sign("gateway", "reload", at(NOW)).unwrap();
    let hs384 = {
        let key = EncodingKey::from_secret(SECRET.as_bytes()).unwrap();
        jsonwebtoken::encode(&Header::new(Algorithm::HS384), &claims(), &key).unwrap()
    };
    let good = signed(&claims());
    let (signed_part, _) = good.rsplit_once('.').unwrap();

    let table: Vec<(&str, ServiceTokens, String, E)> = vec![
        ("none", shared(), unsigned(json!({"alg": "none", "typ": "JWT"})), E::Malformed),
        ("None", shared(), unsigned(json!({"alg": "None"})), E::Malformed),
        ("no alg", shared(), unsigned(json!({"typ": "JWT"})), E::Malformed),
        ("unsigned", shared(), unsigned(json!({"alg": "HS256"})), E::BadSignature),
        ("signature cut off", shared(), format!("{signed_part}."), E::BadSignature),
        ("public key as secret", ed(), public_as_secret(PUBLIC.as_bytes()), E::WrongAlgorithm),
        ("raw public key as secret", ed(), public_as_secret(&der[12..]), E::WrongAlgorithm),
        ("eddsa for a secret", shared(), eddsa.expose().clone(), E::WrongAlgorithm),
        ("hs384", shared(), hs384, E::WrongAlgorithm),
        ("another secret", shared(), public_as_secret(b"another secret of thirty-two byte"), E::BadSignature),
        ("no dots", shared(), "x".into(), E::Malformed),
        ("empty", shared(), String::new(), E::Malformed),
        ("five parts", shared(), "a.b.c.d.e".into(), E::Malformed),
        ("huge", shared(), format!("{good}{}", "A".repeat(1 << 20)), E::TooLong),
    ];
    for (what, tokens, token, expected) in table {
        let found = tokens.verify(&token, &EXPECTED, at(NOW)).unwrap_err();
        assert_eq!(found, expected, "{what}");
        assert_eq!(found.kind(), Kind::Unauthenticated, "{what}");
    }
    let critical = {
        let header = json!({"alg": "HS256", "crit": ["exp"], "exp": 1});
        let message = format!("{}.{}", part(header), part(claims()));
        let key = EncodingKey::from_secret(SECRET.as_bytes()).unwrap();
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &key, Algorithm::HS256).unwrap();
        format!("{message}.{signature}")
    };
    assert_eq!(shared().verify(&critical, &EXPECTED, at(NOW)), Err(E::Malformed), "unknown critical header");
}

#[test]
fn a_changed_token_is_refused() {
    let token = signed(&claims());
    let signature_at = token.rfind('.').unwrap();
    for place in (0..signature_at).filter(|&place| token.as_bytes()[place] != b'.') {
        let mut changed = token.clone().into_bytes();
        changed[place] = if changed[place] == b'A' { b'B' } else { b'A' };
        let changed = String::from_utf8(changed).unwrap();
        assert!(shared().verify(&changed, &EXPECTED, at(NOW)).is_err(), "byte {place}");
    }
}

#[test]
fn weak_and_wrong_keys_are_refused() {
    let secret = |text: &str| ServiceTokens::from_secret("control", &Secret::new(text.to_owned())).map(drop);
    assert_eq!(secret(&SECRET[1..]), Err(ServiceKeyError::SecretTooShort { found: 31 }));
    let private =
        |text: &str| ServiceTokens::from_ed25519_pem("control", &Secret::new(text.to_owned())).map(drop);
    // Not one of them may be something else.
    let half = format!("{PRIVATE}-----BEGIN PRIVATE KEY-----\nMC4C");
    for bad in ["", "nonsense", PUBLIC, &half, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"]
    {
        assert_eq!(private(bad), Err(ServiceKeyError::NotAPrivateKey), "{bad}");
    }
    let half = format!("{PUBLIC}-----BEGIN PUBLIC KEY-----\nMCow");
    for bad in ["", PRIVATE, &half, "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"] {
        assert_eq!(TrustedKeys::from_pem(bad), Err(ServiceKeyError::NotAPublicKey), "{bad}");
    }
    assert_eq!(shared().trusting(&trusted()).map(drop), Err(ServiceKeyError::MixedAlgorithms));
}
