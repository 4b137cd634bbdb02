//! OAuth access tokens (DESIGN §8.3) on real replicas, with an issuer on a real socket.

use std::time::Duration;

use http::header::AUTHORIZATION;
use obol_model::{Clock as _, SystemClock};
use obol_testkit::cluster::Builder;
use obol_testkit::eventually;
use obol_testkit::issuer::{Alg, Issuer, Mood, Token};
use obol_testkit::logs::assert_no_secret;
use obol_tests::SOON;
use obol_tests::client::{ACCEPT, Mcp, Reply, http};
use obol_tests::setup::{python, report};
use obol_tests::world::{World, chat};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::Instant;

/// Keys may do everything, users what their group may.
const POLICY: &str = r#"
permit (principal is Key, action, resource);
permit (principal is User, action, resource) when { principal.tags.contains("dev") };
"#;
const WELL_KNOWN: &str = "/.well-known/oauth-protected-resource";

struct OAuth {
    world: World,
    issuer: Issuer,
    /// Configured too.
    other: Issuer,
    url: String,
}

impl OAuth {
    async fn start(replicas: usize, more: impl FnOnce(Builder) -> Builder) -> Self {
        let (issuer, other) = (Issuer::with_key("rs-1", Alg::Rs256).await, Issuer::start().await);
        other.add_key("es-1", Alg::Es256);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let issuers = format!("{}, {}={}", issuer.url(), other.url(), other.jwks_url());
        let world = World::with(replicas, "", |builder| {
            let builder = builder
                .balancer_on(listener)
                .policy("acme.cedar", POLICY)
                .gateway_env("OBOL_PUBLIC_URL", &url)
                .gateway_env("OBOL_OAUTH_ISSUERS", &issuers)
                .gateway_env("OBOL_OAUTH_SCOPES", "mcp")
                .gateway_env("OBOL_OAUTH_WORKSPACE_CLAIM", "org.workspace")
                .gateway_env("OBOL_OAUTH_TAGS_CLAIM", "groups");
            more(builder)
        })
        .await;
        let oauth = Self { world, issuer, other, url };
        oauth.knows_its_issuers().await;
        oauth
    }

    /// The first fetch takes its time on a busy machine.
    async fn knows_its_issuers(&self) {
        for token in [self.token().sign(), self.token_of(&self.other, "es-1").sign()] {
            for index in 0..self.world.cluster.size() {
                let client = Mcp::new(&self.world.cluster.public_url(index), &token);
                eventually(SOON, || async { client.send(INITIALIZE).await.status == 200 }).await;
            }
        }
    }

    /// A good token of `alice`, who is a developer.
    fn token(&self) -> Token {
        self.token_of(&self.issuer, "rs-1")
    }

    fn token_of(&self, issuer: &Issuer, key: &str) -> Token {
        let token = issuer.token(key, &format!("{}/mcp", self.url), now());
        token
            .claim("scope", "openid mcp")
            .claim("org", json!({ "workspace": "acme" }))
            .claim("groups", json!(["dev"]))
    }

    fn client(&self, token: &str, session: Option<&str>) -> Mcp {
        Mcp::new(&self.url, token).with_session(session)
    }

    async fn get(&self, path: &str) -> Reply {
        Reply::of(http().get(format!("{}{path}", self.url)).header("origin", "https://app.example")).await
    }
}

fn now() -> i64 {
    SystemClock.now().as_second()
}

/// A parameter of the challenge.
fn challenge(reply: &Reply, parameter: &str) -> Option<String> {
    let header = reply.header("www-authenticate").strip_prefix("Bearer ")?;
    let start = format!("{parameter}=\"");
    let value = header.split(", ").find_map(|part| part.strip_prefix(&start))?;
    value.strip_suffix('"').map(str::to_owned)
}

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_is_led_to_the_issuer_and_lives_through_a_token_refresh_on_all_replicas() {
    let oauth = OAuth::start(3, |builder| builder.log("trace")).await;
    metadata_is_found_from_the_challenge(&oauth).await;

    let first = oauth.token().sign();
    let alice = Mcp::connect(&oauth.url, &first).await;
    assert!(alice.tools().await.contains(&"fake__echo".to_owned()));
    let second = oauth.token().claim("exp", now() + 500).sign();
    let refreshed = oauth.client(&second, Some(alice.session()));
    for client in [&alice, &refreshed, &alice, &refreshed, &alice, &refreshed] {
        client.call("fake__echo", r#"{"message":"hello"}"#).await.result();
    }
    assert!(oauth.world.cluster.balancer().hits().iter().all(|hits| *hits > 0));

    // The session is alice's, and hers alone: by this issuer, not by a name.
    let namesake = oauth.token_of(&oauth.other, "es-1").sign();
    let bob = oauth.token().claim("sub", "bob").sign();
    for stranger in [&namesake, &bob, &oauth.world.key] {
        let reply = oauth.client(stranger, Some(alice.session())).rpc("ping", "{}").await;
        assert_eq!(reply.status, 404, "{reply:?}");
        assert_eq!(Mcp::connect(&oauth.url, stranger).await.rpc("ping", "{}").await.status, 200);
    }

    // Policies see the tags of the claims.
    let guest = oauth.token().claim("sub", "guest").claim("groups", json!(["guests"])).sign();
    let reply = oauth.client(&guest, None).send(INITIALIZE).await;
    assert_eq!((reply.status, reply.header("www-authenticate")), (403, ""), "{reply:?}");

    // A token for one connection opens its view, a token for MCP does not open the LLM surface.
    let narrow = oauth.token().claim("aud", format!("{}/mcp/fake", oauth.url)).sign();
    let view = |token: &str| {
        let request = http().post(format!("{}/mcp/fake", oauth.url)).bearer_auth(token);
        let request = request.header("accept", ACCEPT).header("content-type", "application/json");
        Reply::of(request.body(INITIALIZE))
    };
    assert_eq!((view(&narrow).await.status, view(&first).await.status), (200, 200));
    let refused = oauth.client(&narrow, None).send(INITIALIZE).await;
    assert_eq!(challenge(&refused, "error").as_deref(), Some("invalid_token"), "{refused:?}");
    let completion = r#"{"model":"small","messages":[{"role":"user","content":"hi"}]}"#;
    let refused = chat(&oauth.url, &first, completion).await;
    assert_eq!(refused.status, 401);
    assert_eq!(challenge(&refused, "resource_metadata"), Some(format!("{}{WELL_KNOWN}", oauth.url)));
    let wide = oauth.token().claim("aud", json!(["https://other.example", &oauth.url])).sign();
    assert_eq!(chat(&oauth.url, &wide, completion).await.status, 200);

    // Usage names who called.
    let user = json!({ "issuer": oauth.issuer.url(), "subject": "alice" });
    eventually(SOON, || async {
        let events = oauth.world.usage().await;
        let hers = events.iter().filter(|event| event["user"] == user && event["key_id"].is_null());
        hers.count() == 7
    })
    .await;

    assert_eq!(refreshed.delete().await.status, 204);
    assert_eq!(alice.rpc("ping", "{}").await.status, 404);
    let logs = oauth.world.cluster.logs();
    for token in [&first, &second, &namesake, &narrow, &wide] {
        let signature = token.rsplit('.').next().unwrap();
        assert_no_secret(&logs, &[("access token", token), ("signature of a token", signature)]);
    }
}

/// What a client does that knows nothing but the URL (MCP authorization, "Protected Resource Metadata Discovery
/// Requirements").
async fn metadata_is_found_from_the_challenge(oauth: &OAuth) {
    let url = &oauth.url;
    let refused = Reply::of(http().post(format!("{url}/mcp")).body("{}")).await;
    assert_eq!((refused.status, challenge(&refused, "error")), (401, None), "{refused:?}");
    assert_eq!(challenge(&refused, "scope").as_deref(), Some("mcp"));
    let found = challenge(&refused, "resource_metadata").unwrap();
    assert_eq!(found, format!("{url}{WELL_KNOWN}/mcp"));

    for (path, resource) in [
        (WELL_KNOWN.to_owned(), url.clone()),
        (format!("{WELL_KNOWN}/mcp"), format!("{url}/mcp")),
        (format!("{WELL_KNOWN}/mcp/fake"), format!("{url}/mcp/fake")),
    ] {
        let reply = oauth.get(&path).await;
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, "*"), "{reply:?}");
        let expected = json!({
            "resource": resource,
            "authorization_servers": [oauth.issuer.url(), oauth.other.url()],
            "scopes_supported": ["mcp"],
            "bearer_methods_supported": ["header"],
            "resource_name": "Obol gateway",
        });
        assert_eq!(reply.json(), expected, "{path}");
    }
    assert_eq!(oauth.get(&format!("{WELL_KNOWN}/other")).await.status, 404);
    let preflight = http().request(http::Method::OPTIONS, found).header("origin", "https://app.example");
    let preflight = preflight
        .header("access-control-request-method", "GET")
        .header("access-control-request-headers", "mcp-protocol-version");
    let reply = Reply::of(preflight).await;
    assert_eq!((reply.status, reply.header("access-control-allow-headers")), (204, "*"), "{reply:?}");
}

#[tokio::test]
async fn bad_tokens_are_refused_on_every_surface_with_the_way_to_a_good_one() {
    let oauth = OAuth::start(2, |builder| builder).await;
    let (good, url) = (|| oauth.token(), oauth.url.as_str());
    let public_key = oauth.issuer.public_key("rs-1");
    let bad = [
        ("other audience", good().claim("aud", "https://other.example/mcp").sign()),
        ("no audience", good().without("aud").sign()),
        (
            "an array without us",
            good().claim("aud", json!(["https://a.example", "https://b.example"])).sign(),
        ),
        ("alg none", good().unsigned().sign()),
        ("HS256 with the public key as secret", good().hmac(&public_key).sign()),
        ("alg that is not the key's", good().padded_as(Alg::Ps256).sign()),
        ("expired 30 s ago", good().claim("exp", now() - 30).sign()),
        ("expired 90 s ago", good().claim("exp", now() - 90).sign()),
        ("nbf in the future", good().claim("nbf", now() + 120).sign()),
        ("no exp", good().without("exp").sign()),
        ("100 kB", good().claim("pad", "x".repeat(75_000)).sign()),
        ("kid with a path", good().header("kid", "../../etc/passwd").sign()),
        ("kid of 10 kB", good().header("kid", "k".repeat(10_000)).sign()),
        ("a key of the other issuer", good().claim("iss", oauth.other.url()).header("kid", "es-1").sign()),
        ("an issuer that is not ours", good().claim("iss", "https://evil.example").sign()),
    ];
    for (what, token) in &bad {
        let mcp = format!("{url}/mcp");
        for (request, metadata) in [
            (http().post(&mcp).body(INITIALIZE).header("content-type", "application/json"), "/mcp"),
            (http().get(&mcp), "/mcp"),
            (http().delete(&mcp), "/mcp"),
            (http().get(format!("{mcp}/fake")), "/mcp/fake"),
            (http().get(format!("{url}/v1/models")), ""),
        ] {
            let reply = Reply::of(request.header("accept", ACCEPT).bearer_auth(token)).await;
            assert_eq!(reply.status, 401, "{what}: {reply:?}");
            assert_eq!(challenge(&reply, "error").as_deref(), Some("invalid_token"), "{what}");
            assert_eq!(
                challenge(&reply, "resource_metadata"),
                Some(format!("{url}{WELL_KNOWN}{metadata}")),
                "{what}"
            );
            assert_eq!(challenge(&reply, "scope").as_deref(), Some("mcp"), "{what}");
        }
    }

    let ours_second = good().claim("aud", json!(["https://other.example", format!("{url}/mcp")])).sign();
    let almost_over = good().claim("exp", now() - 1).sign();
    for token in [&ours_second, &almost_over] {
        assert_eq!(oauth.client(token, None).send(INITIALIZE).await.status, 200);
    }
    let narrow = oauth.client(&good().claim("scope", "openid").sign(), None).send(INITIALIZE).await;
    assert_eq!(narrow.status, 403, "{narrow:?}");
    assert_eq!(challenge(&narrow, "error").as_deref(), Some("insufficient_scope"));
    assert_eq!(challenge(&narrow, "scope").as_deref(), Some("mcp"));
    assert_eq!(challenge(&narrow, "resource_metadata"), Some(format!("{url}{WELL_KNOWN}/mcp")));
    let homeless = oauth.client(&good().without("org").sign(), None).send(INITIALIZE).await;
    assert_eq!((homeless.status, homeless.header("www-authenticate")), (403, ""), "{homeless:?}");
    // A header that occurs twice is nobody's.
    let twice = http().get(format!("{url}/v1/models")).bearer_auth(good().sign());
    let twice = Reply::of(twice.header(AUTHORIZATION, format!("Bearer {}", oauth.world.key))).await;
    assert_eq!(twice.status, 401);
}

#[tokio::test]
async fn keys_of_an_issuer_come_and_go_and_its_outage_is_not_ours() {
    let oauth = OAuth::start(2, |builder| builder.gateway_env("OBOL_OAUTH_JWKS_TTL_S", "1")).await;
    let status = async |token: &str| oauth.client(token, None).send(INITIALIZE).await.status;
    let old = oauth.token().sign();
    assert_eq!((status(&old).await, status(&old).await), (200, 200));

    // A new key works, on each replica.
    oauth.issuer.add_key("rs-2", Alg::Rs256);
    let new = oauth.token_of(&oauth.issuer, "rs-2").sign();
    eventually(SOON, || async { status(&new).await == 200 && status(&new).await == 200 }).await;

    // A withdrawn one is refused by both within the TTL, and stays so.
    oauth.issuer.withdraw_key("rs-1");
    eventually(SOON, || async { status(&old).await == 401 && status(&old).await == 401 }).await;
    assert_eq!((status(&old).await, status(&old).await), (401, 401));

    for mood in [Mood::Hanging, Mood::Html, Mood::Failing] {
        oauth.issuer.set_mood(mood);
        let asked = Instant::now();
        let other_token = oauth.token_of(&oauth.issuer, "rs-2").sign();
        assert_eq!((status(&other_token).await, status(&new).await), (200, 200), "{mood:?}");
        assert!(asked.elapsed() < SOON, "{mood:?}");
    }
}

#[tokio::test]
async fn a_stream_ends_with_its_token() {
    let oauth = OAuth::start(1, |builder| builder).await;
    let lasting = Mcp::connect(&oauth.url, &oauth.token().sign()).await;
    let (ends, brief) = (now() + 3, oauth.token().claim("exp", now() + 3).sign());
    let brief = Mcp::connect(&oauth.url, &brief).await;
    let (mut goes_on, mut over) = (lasting.listen().await, brief.listen().await);
    while over.next(Duration::from_secs(50)).await.is_some() {}
    let late = now() - ends;
    assert!((0..=40).contains(&late), "it ended {late} s after its token");
    // The other one was looked at in the same tick and has a comment to show for it.
    loop {
        let event = goes_on.next(Duration::from_secs(40)).await.expect("the stream of a good token goes on");
        if event.starts_with(':') {
            break;
        }
    }
}

#[tokio::test]
async fn the_official_sdks_find_their_way_to_a_token_by_themselves() {
    let oauth = OAuth::start(2, |builder| builder).await;
    oauth.issuer.grant(json!({ "sub": "robot", "org": { "workspace": "acme" }, "groups": ["dev"] }));
    let run = |interpreter: &str| {
        let client = python(interpreter, "clients/mcp_oauth_py.py");
        let client = client.args(["--url", &format!("{}/mcp", oauth.url)]);
        report(
            client.args(["--issuer", &oauth.issuer.url(), "--tool", "fake__echo"]),
            Duration::from_secs(60),
        )
    };
    let (one, two) = tokio::join!(run("OBOL_TEST_PY1"), run("OBOL_TEST_PY2"));
    for (found, major) in [(one, "1."), (two, "2.")] {
        assert!(found["version"].as_str().unwrap().starts_with(major), "{found}");
        assert!(found["tools"].as_array().unwrap().contains(&Value::from("fake__echo")), "{found}");
        assert_eq!(found["failed"], false, "{found}");
        assert_eq!(found["scope"], "mcp", "the challenge says what to ask for: {found}");
        assert!(found["unauthorized"].as_u64() >= Some(1), "{found}");
    }
}

#[tokio::test]
async fn without_an_issuer_there_is_nothing_to_find() {
    let world = World::start(1).await;
    let url = world.url();
    for path in ["", "/mcp", "/mcp/fake"] {
        assert_eq!(Reply::of(http().get(format!("{url}{WELL_KNOWN}{path}"))).await.status, 404, "{path}");
    }
    let issuer = Issuer::with_key("rs-1", Alg::EdDsa).await;
    let token = issuer.token("rs-1", &url, now()).sign();
    for request in [http().post(format!("{url}/mcp")), http().get(format!("{url}/v1/models"))] {
        let reply = Reply::of(request.bearer_auth(&token)).await;
        assert_eq!((reply.status, challenge(&reply, "resource_metadata")), (401, None), "{reply:?}");
        assert_eq!(challenge(&reply, "error").as_deref(), Some("invalid_token"));
    }
}
