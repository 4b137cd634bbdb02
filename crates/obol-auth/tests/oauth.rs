//! Access tokens (DESIGN §8.3) against an issuer on a real socket.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use obol_auth::oauth::{
    AccessTokens, Algorithms, ClaimRules, JwksOptions, LEEWAY, OAuthOptions, ProtectedResource, Target,
    TokenError, TokenFault, WorkspaceRule,
};
use obol_auth::{Identity, User};
use obol_dial::{DialOptions, Dialer};
use obol_model::{Clock, ManualClock};
use obol_testkit::eventually;
use obol_testkit::issuer::{Alg, Issuer, Mood, Token};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

const US: &str = "https://gw.example.com";
const NOW: i64 = 1_800_000_000;
/// For what happens at once on an idle machine.
const SOON: Duration = Duration::from_secs(20);
/// Longer than any test: what is to happen after it does not happen.
const NEVER: Duration = Duration::from_hours(1);

struct Bench {
    issuer: Issuer,
    tokens: Arc<AccessTokens>,
    clock: Arc<ManualClock>,
    _tasks: JoinSet<()>,
}

/// Keys live for as long as the test, so that only what it does has them fetched.
fn calm() -> JwksOptions {
    JwksOptions { ttl: NEVER, stale: NEVER, cool_down: NEVER, wait: SOON }
}

impl Bench {
    async fn start(jwks: JwksOptions) -> Self {
        let bench = Self::of(Issuer::with_key("ed-1", Alg::EdDsa).await, jwks);
        // Whatever a request may wait for it, the first fetch takes its time on a busy machine.
        let token = bench.token("ed-1").sign();
        eventually(SOON, || async { bench.judge(&token).await.is_ok() }).await;
        bench
    }

    fn of(issuer: Issuer, jwks: JwksOptions) -> Self {
        Self::allowing(&["RS256", "PS256", "ES256", "EdDSA"], issuer, jwks)
    }

    fn allowing(algorithms: &[&str], issuer: Issuer, jwks: JwksOptions) -> Self {
        let id = issuer.url();
        let options = OAuthOptions {
            resource: ProtectedResource::new(US, vec![id.clone()], vec!["mcp".into()]).unwrap(),
            issuers: vec![id.parse().unwrap()],
            algorithms: Algorithms::new(algorithms.iter().copied()).unwrap(),
            claims: ClaimRules {
                workspace: WorkspaceRule::Claim("workspace".into()),
                tags: Some("groups".into()),
            },
            jwks,
        };
        let clock = Arc::new(ManualClock::new(jiff::Timestamp::from_second(NOW).unwrap()));
        let tokens = AccessTokens::new(options, clock.clone());
        let dialer = Dialer::new(DialOptions::default()).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(tokens.clone().run(dialer, CancellationToken::new()));
        Self { issuer, tokens, clock, _tasks: tasks }
    }

    /// A good token of this key.
    fn token(&self, key: &str) -> Token {
        let token = self.issuer.token(key, US, self.clock.now().as_second());
        token.claim("scope", "mcp").claim("workspace", "acme")
    }

    async fn judge(&self, token: &str) -> Result<Arc<User>, TokenError> {
        self.tokens.authenticate(token, Target::Mcp).await
    }

    async fn knows(&self, key: &str) {
        self.judge(&self.token(key).sign()).await.unwrap();
    }
}

fn fault(fault: TokenFault) -> TokenError {
    TokenError::Invalid(fault)
}

#[tokio::test]
async fn a_token_becomes_a_user_of_a_workspace_with_tags() {
    let bench = Bench::start(calm()).await;
    for (key, alg) in [("rs", Alg::Rs256), ("ps", Alg::Ps256), ("es", Alg::Es256)] {
        bench.issuer.add_key(key, alg);
    }
    let claims = serde_json::json!(["dev", "ops"]);
    for key in ["ed-1", "rs", "ps", "es"] {
        let token = bench.token(key).claim("groups", claims.clone());
        let user = bench.judge(&token.header("typ", "JWT").sign()).await.unwrap();
        assert_eq!(user.workspace_id.as_str(), "acme");
        assert_eq!((&user.issuer, user.subject.as_str()), (&bench.issuer.url(), "alice"));
        assert_eq!(user.tags, ["dev", "ops"]);
    }
    let id = |user| Identity::User(user).principal();
    // Another token of the same user is the same principal; a look at it costs the issuer nothing.
    let (one, two) = (bench.token("rs").sign(), bench.token("es").claim("exp", NOW + 5).sign());
    let first = bench.judge(&one).await.unwrap();
    assert_eq!(id(first.clone()), id(bench.judge(&two).await.unwrap()));
    assert!(Arc::ptr_eq(&first, &bench.judge(&one).await.unwrap()), "it was verified twice");
    assert_eq!(bench.issuer.asked_for_keys(), 2, "the first fetch, and the one for the new keys");
}

#[tokio::test]
async fn bad_tokens_are_told_apart_and_refused() {
    let bench = Bench::start(calm()).await;
    bench.issuer.add_key("rs", Alg::Rs256);
    bench.issuer.add_hidden_key("hidden", Alg::EdDsa);
    bench.knows("rs").await;
    let good = || bench.token("rs");
    let asked = bench.issuer.asked_for_keys();
    let with_other_claims = {
        let (a, b) = (good().sign(), good().claim("sub", "mallory").sign());
        let (a, b): (Vec<&str>, Vec<&str>) = (a.split('.').collect(), b.split('.').collect());
        format!("{}.{}.{}", a[0], b[1], a[2])
    };
    let (rsa_public, good_token) = (bench.issuer.public_key("rs"), good().sign());
    let cases = [
        ("other audience", good().claim("aud", "https://other.example").sign(), TokenFault::Audience),
        ("no audience", good().without("aud").sign(), TokenFault::Audience),
        ("a path of ours", good().claim("aud", format!("{US}/other")).sign(), TokenFault::Audience),
        ("for /v1 only", good().claim("aud", format!("{US}/v1")).sign(), TokenFault::Audience),
        ("alg none", good().unsigned().sign(), TokenFault::Malformed),
        ("alg none, signed", good().header("alg", "none").sign(), TokenFault::Algorithm),
        ("HS256 by the public key", good().hmac(&rsa_public).sign(), TokenFault::Algorithm),
        ("padding of another algorithm", good().padded_as(Alg::Ps256).sign(), TokenFault::Algorithm),
        ("another key's algorithm", good().header("alg", "ES256").sign(), TokenFault::Algorithm),
        ("an algorithm that is off", good().header("alg", "RS512").sign(), TokenFault::Algorithm),
        ("expired", good().claim("exp", NOW - LEEWAY).sign(), TokenFault::Expired),
        ("not yet", good().claim("nbf", NOW + LEEWAY + 1).sign(), TokenFault::NotYet),
        ("issued later", good().claim("iat", NOW + LEEWAY + 1).sign(), TokenFault::NotYet),
        ("no expiry", good().without("exp").sign(), TokenFault::NoExpiry),
        ("huge", good().claim("pad", "x".repeat(75_000)).sign(), TokenFault::TooLong),
        ("kid with a path", good().header("kid", "../../etc/passwd").sign(), TokenFault::KeyId),
        ("kid of 10 kB", good().header("kid", "k".repeat(10_000)).sign(), TokenFault::KeyId),
        ("no kid", good().header("kid", serde_json::Value::Null).sign(), TokenFault::KeyId),
        ("kid that is no text", good().header("kid", 7).sign(), TokenFault::Malformed),
        ("crit", good().header("crit", vec!["exp"]).sign(), TokenFault::Extension),
        ("b64", good().header("b64", false).sign(), TokenFault::Extension),
        ("a logout token", good().header("typ", "logout+jwt").sign(), TokenFault::Type),
        ("other issuer", good().claim("iss", "https://evil.example").sign(), TokenFault::Issuer),
        ("issuer with a slash", good().claim("iss", bench.issuer.url() + "/").sign(), TokenFault::Issuer),
        ("no issuer", good().without("iss").sign(), TokenFault::Issuer),
        ("no subject", good().without("sub").sign(), TokenFault::Subject),
        ("claims of another token", with_other_claims, TokenFault::Signature),
        (
            "another key under its name",
            bench.token("hidden").header("kid", "ed-1").sign(),
            TokenFault::Signature,
        ),
        ("cut", good_token[..good_token.len() - 2].to_owned(), TokenFault::Signature),
        ("a part too many", format!("{good_token}.x"), TokenFault::Malformed),
        ("no JWT", "just-some-text".to_owned(), TokenFault::Malformed),
        ("nothing in it", "..".to_owned(), TokenFault::Malformed),
    ];
    for (what, token, expected) in cases {
        assert_eq!(bench.judge(&token).await.unwrap_err(), fault(expected), "{what}");
    }
    assert_eq!(
        bench.judge(&good().claim("scope", "other").sign()).await.unwrap_err(),
        TokenError::InsufficientScope
    );
    assert_eq!(bench.judge(&good().without("workspace").sign()).await.unwrap_err(), TokenError::NoWorkspace);
    assert_eq!(bench.issuer.asked_for_keys(), asked, "none of them had anything fetched");
    bench.judge(&good_token).await.unwrap();
    let listed = good().claim("aud", vec!["https://other.example", US]).sign();
    bench.judge(&listed).await.unwrap();
}

#[tokio::test]
async fn an_algorithm_that_the_operator_left_out_is_refused_whatever_keys_the_issuer_has() {
    let issuer = Issuer::with_key("ed-1", Alg::EdDsa).await;
    for (key, alg) in [("rs", Alg::Rs256), ("ps", Alg::Ps256), ("es", Alg::Es256)] {
        issuer.add_key(key, alg);
    }
    let bench = Bench::allowing(&["EdDSA"], issuer, calm());
    bench.knows("ed-1").await;
    for key in ["rs", "ps", "es"] {
        let refused = bench.judge(&bench.token(key).sign()).await;
        assert_eq!(refused.unwrap_err(), fault(TokenFault::Algorithm), "{key}");
    }
}

#[tokio::test]
async fn a_token_that_was_good_is_judged_again_at_each_use() {
    let bench = Bench::start(calm()).await;
    let token = bench.token("ed-1").claim("exp", NOW + 10).claim("aud", format!("{US}/mcp")).sign();
    bench.judge(&token).await.unwrap();
    let elsewhere = bench.tokens.authenticate(&token, Target::Llm).await;
    assert_eq!(elsewhere.unwrap_err(), fault(TokenFault::Audience));
    bench.clock.advance(Duration::from_secs(39));
    bench.judge(&token).await.unwrap();
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(bench.judge(&token).await.unwrap_err(), fault(TokenFault::Expired));
}

#[tokio::test]
async fn a_new_key_works_at_once_and_a_withdrawn_one_no_more() {
    let bench = Bench::start(calm()).await;
    let old = bench.token("ed-1").sign();
    bench.judge(&old).await.unwrap();
    bench.issuer.add_key("ed-2", Alg::EdDsa);
    bench.issuer.withdraw_key("ed-1");
    let new = bench.token("ed-2").sign();
    let all = join_all((0..50).map(|_| bench.judge(&new))).await;
    assert!(all.iter().all(Result::is_ok), "{all:?}");
    assert_eq!(bench.issuer.asked_for_keys(), 2, "one fetch for all of them");
    // Verified before, by a key that is not there any more.
    assert_eq!(bench.judge(&old).await.unwrap_err(), fault(TokenFault::UnknownKey));
}

#[tokio::test]
async fn a_withdrawn_key_is_refused_within_the_ttl() {
    let bench = Bench::start(JwksOptions { ttl: Duration::from_millis(200), ..calm() }).await;
    let token = bench.token("ed-1").sign();
    bench.judge(&token).await.unwrap();
    bench.issuer.withdraw_key("ed-1");
    eventually(SOON, || async {
        bench.judge(&token).await.is_err_and(|e| e == fault(TokenFault::UnknownKey))
    })
    .await;
}

#[tokio::test]
async fn made_up_key_ids_do_not_reach_the_issuer() {
    let bench = Bench::start(calm()).await;
    let before = bench.issuer.asked_for_keys();
    let forged: Vec<String> =
        (0..500).map(|n| bench.token("ed-1").header("kid", format!("made-up-{n}")).sign()).collect();
    let refused = join_all(forged.iter().map(|token| bench.judge(token))).await;
    for result in refused {
        assert_eq!(result.unwrap_err(), fault(TokenFault::UnknownKey));
    }
    for token in &forged {
        assert_eq!(bench.judge(token).await.unwrap_err(), fault(TokenFault::UnknownKey));
    }
    assert_eq!(bench.issuer.asked_for_keys() - before, 1, "one for 1000");
}

#[tokio::test]
async fn after_the_cool_down_an_unknown_key_is_looked_for_again() {
    let bench = Bench::start(JwksOptions { cool_down: Duration::from_millis(100), ..calm() }).await;
    let forged = bench.token("ed-1").header("kid", "made-up").sign();
    assert_eq!(bench.judge(&forged).await.unwrap_err(), fault(TokenFault::UnknownKey));
    bench.issuer.add_key("ed-2", Alg::EdDsa);
    let new = bench.token("ed-2").sign();
    eventually(SOON, || async { bench.judge(&new).await.is_ok() }).await;
}

#[tokio::test]
async fn an_issuer_that_hangs_or_lies_costs_only_unknown_keys() {
    for mood in [Mood::Hanging, Mood::Html, Mood::Failing, Mood::Redirecting] {
        let wait = Duration::from_millis(300);
        let bench = Bench::start(JwksOptions { wait, ..calm() }).await;
        bench.issuer.add_hidden_key("ed-2", Alg::EdDsa);
        bench.issuer.set_mood(mood);
        let unknown = bench.token("ed-2").sign();
        let (started, other) = (Instant::now(), bench.token("ed-1").sign());
        let (first, known) = tokio::join!(bench.judge(&unknown), bench.judge(&other));
        assert_eq!(first.unwrap_err(), TokenError::Unavailable, "{mood:?}: it could not be asked");
        known.unwrap();
        assert!(started.elapsed() < SOON, "{mood:?}");
        // While the fetch hangs, and after it failed.
        bench.knows("ed-1").await;
        assert_eq!(bench.judge(&unknown).await.unwrap_err(), TokenError::Unavailable, "{mood:?}");
        assert_eq!(bench.judge("a.b.c").await.unwrap_err(), fault(TokenFault::Malformed));
    }
}

#[tokio::test]
async fn a_request_waits_for_a_fetch_no_longer_than_it_may() {
    let wait = Duration::from_millis(300);
    let bench = Bench::start(JwksOptions { wait, ..calm() }).await;
    bench.issuer.set_mood(Mood::Hanging);
    let unknown = bench.token("ed-1").header("kid", "ed-2").sign();
    let started = Instant::now();
    assert_eq!(bench.judge(&unknown).await.unwrap_err(), TokenError::Unavailable);
    // The fetch itself is given up after five seconds.
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

#[tokio::test]
async fn known_keys_outlive_an_outage_for_a_bounded_time() {
    let options =
        JwksOptions { ttl: Duration::from_millis(100), stale: Duration::from_millis(1_500), ..calm() };
    let bench = Bench::start(JwksOptions { wait: Duration::from_millis(50), ..options }).await;
    let token = bench.token("ed-1").sign();
    bench.issuer.set_mood(Mood::Failing);
    let asked = bench.issuer.asked_for_keys();
    eventually(SOON, || async { bench.judge(&token).await.is_err_and(|e| e == TokenError::Unavailable) })
        .await;
    assert!(bench.issuer.asked_for_keys() > asked, "nobody asked");
    bench.issuer.set_mood(Mood::Well);
    eventually(SOON, || async { bench.judge(&token).await.is_ok() }).await;
}

#[tokio::test]
async fn an_issuer_that_is_away_at_the_start_is_found_when_it_is_back() {
    let issuer = Issuer::with_key("ed-1", Alg::EdDsa).await;
    issuer.set_mood(Mood::Failing);
    let bench = Bench::of(issuer, JwksOptions { cool_down: Duration::from_millis(50), ..calm() });
    let token = bench.token("ed-1").sign();
    assert_eq!(bench.judge(&token).await.unwrap_err(), TokenError::Unavailable);
    bench.issuer.set_mood(Mood::Well);
    eventually(SOON, || async { bench.judge(&token).await.is_ok() }).await;
}
