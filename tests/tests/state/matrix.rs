//! Every route of every listener with every kind of credential: status, challenge and code.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use obol_auth::{ServiceTokens, party};
use obol_model::{Clock as _, Secret, SystemClock, VirtualKey};
use obol_testkit::eventually;
use obol_testkit::port::Port;
use obol_testkit::process::Proc;
use obol_tests::client::{ACCEPT, Reply, http};
use obol_tests::world::{World, workspace};
use obol_tests::{ALLOW_ALL, SOON, root};
use reqwest::Method;
use serde_json::{Value, json};

use crate::keys::{put_key, revoke};

/// RFC 8410 section 10: control's key pair.
const CONTROL_PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
";
const CONTROL_PUBLIC: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
";
/// The gateways' key pair.
const GATEWAY_PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIHZMZvhgXoz81+OeKjCC7TMLWQCUIwx6mIy7EYyjLb6w
-----END PRIVATE KEY-----
";
const GATEWAY_PUBLIC: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAWM5pHChAukT8Lk1MIEcmcpv3yivPM8gBT+ih66dA+BY=
-----END PUBLIC KEY-----
";
const OPERATOR: &str = "an-operator-credential-for-the-matrix-4711";

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Door {
    /// Anybody; credentials are not looked at.
    Open,
    /// Whoever has a virtual key.
    Client,
    /// Control.
    Reload,
    /// Operators.
    Operator,
    /// Other replicas.
    Peer,
    /// Replicas that ask control.
    Control,
}

/// Where a route is served. What is on the public or the operations listener is also on the one port that serves both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    Public,
    Admin,
    Both,
    Peer,
    Control,
}

/// A route and what it answers to those who may use it.
struct Route {
    /// The file that registers it, in the sources of obol-edge, and what stands there as its path.
    registered: (&'static str, &'static str),
    on: On,
    method: Method,
    path: String,
    body: Option<&'static str>,
    door: Door,
    ok: u16,
    /// What the key of another workspace gets, which is as good as any until it asks for what is not its own.
    foreign: u16,
}

impl Route {
    fn body(self, body: &'static str) -> Self {
        Self { body: Some(body), ..self }
    }

    fn foreign(self, foreign: u16) -> Self {
        Self { foreign, ..self }
    }
}

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;
const CHAT: &str = r#"{"model":"small","messages":[{"role":"user","content":"hi"}]}"#;
const MESSAGES: &str = r#"{"model":"small","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}"#;
/// There is no such model for anybody.
const NOWHERE: &str = r#"{"model":"nowhere","input":"hi"}"#;
const RELOAD: &str = r#"{"workspace_id":"acme"}"#;

/// `key` is the hash of a key that control knows.
fn routes(key: &str) -> Vec<Route> {
    use On::{Admin, Both, Public};
    let route = |file, source, on, request: &str, door, ok| {
        let (method, path) = request.split_once(' ').unwrap();
        let (method, path) = (method.parse().unwrap(), path.replace("{hash}", key));
        Route { registered: (file, source), on, method, path, body: None, door, ok, foreign: ok }
    };
    let client = |source, request, ok| route("gateway.rs", source, Public, request, Door::Client, ok);
    let llm = |source, request, ok| route("llm/mod.rs", source, Public, request, Door::Client, ok);
    let open = |file, source, on, request, ok| route(file, source, on, request, Door::Open, ok);
    let operator = |source, request, ok| route("admin.rs", source, Admin, request, Door::Operator, ok);
    let control = |source, request| route("control_api.rs", source, On::Control, request, Door::Control, 200);
    let resource = "/.well-known/oauth-protected-resource";
    vec![
        client(r#""/mcp""#, "POST /mcp", 200).body(INITIALIZE),
        client(r#""/mcp""#, "GET /mcp", 400),
        client(r#""/mcp""#, "DELETE /mcp", 400),
        open("gateway.rs", r#""/mcp""#, Public, "OPTIONS /mcp", 204),
        client(r#""/mcp/""#, "POST /mcp/", 200).body(INITIALIZE),
        client(r#""/mcp/{connection}""#, "POST /mcp/fake", 200).body(INITIALIZE).foreign(404),
        client(r#""/mcp/{connection}/""#, "POST /mcp/fake/", 200).body(INITIALIZE).foreign(404),
        llm(r#""/v1/chat/completions""#, "POST /v1/chat/completions", 200).body(CHAT).foreign(404),
        llm(r#""/v1/messages""#, "POST /v1/messages", 200).body(MESSAGES).foreign(404),
        llm(r#""/v1/messages/count_tokens""#, "POST /v1/messages/count_tokens", 200).body(CHAT).foreign(404),
        llm(r#""/v1/responses""#, "POST /v1/responses", 404).body(NOWHERE),
        llm(r#""/v1/responses/{id}""#, "GET /v1/responses/resp_1", 404),
        llm(r#""/v1/responses/{id}""#, "DELETE /v1/responses/resp_1", 404),
        llm(r#""/v1/responses/{id}/input_items""#, "GET /v1/responses/resp_1/input_items", 404),
        llm(r#""/v1/embeddings""#, "POST /v1/embeddings", 404).body(NOWHERE),
        llm(r#""/v1/models""#, "GET /v1/models", 200),
        llm(r#""/v1/models/{*model}""#, "GET /v1/models/small", 200).foreign(404),
        llm(r#""/v1/{*rest}""#, "POST /v1/files", 404).body("{}"),
        open("metadata.rs", "ROOT", Public, &format!("GET {resource}"), 404),
        open("metadata.rs", r#"&format!("{ROOT}/")"#, Public, &format!("GET {resource}/"), 404),
        open("metadata.rs", r#"&format!("{ROOT}/{{*path}}")"#, Public, &format!("GET {resource}/mcp"), 404),
        open("jwks.rs", r#""/.well-known/jwks.json""#, Public, "GET /.well-known/jwks.json", 200),
        open("gateway.rs", r#""/healthz""#, Both, "GET /healthz", 200),
        open("gateway.rs", r#""/readyz""#, Both, "GET /readyz", 200),
        open("gateway.rs", r#""/metrics""#, Admin, "GET /metrics", 200),
        route("gateway.rs", r#""/internal/reload""#, Admin, "POST /internal/reload", Door::Reload, 200)
            .body(RELOAD),
        operator(r#""/admin/publications""#, "GET /admin/publications", 200),
        operator(r#""/admin""#, "GET /admin", 404),
        operator(r#""/admin/{*rest}""#, "GET /admin/nothing", 404),
        // The body is no message: that is looked at last.
        route("peer.rs", "obol_peer::PATH", On::Peer, "POST /peer/v1/messages", Door::Peer, 400).body("{}"),
        control(
            r#""/internal/v1/workspaces/{id}/publication""#,
            "GET /internal/v1/workspaces/acme/publication",
        ),
        control(r#""/internal/v1/keys/{hash}""#, "GET /internal/v1/keys/{hash}"),
        open("control_api.rs", r#""/healthz""#, On::Control, "GET /healthz", 200),
    ]
}

/// The first argument of every call of `.route(`, by file. Only obol-edge serves HTTP (see the rules of the tree).
fn registered() -> BTreeSet<(String, String)> {
    let sources = root().join("crates/obol-edge/src");
    let mut found = BTreeSet::new();
    visit(&sources, &mut |path| {
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let file = path.strip_prefix(&sources).unwrap().display().to_string();
        for other in [".nest(", ".nest_service(", ".route_service(", ".fallback_service("] {
            assert!(!code.contains(other), "{file}: `{other}…)` hides routes from this test");
        }
        found.extend(code.split(".route(").skip(1).map(|rest| (file.clone(), first_argument(rest))));
    });
    found
}

fn visit(dir: &Path, see: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            visit(&path, see);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            see(&path);
        }
    }
}

/// Up to the first comma that stands in no string and no parentheses.
fn first_argument(code: &str) -> String {
    let (mut depth, mut quoted) = (0, false);
    let end = code.find(|c| {
        match c {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => return true,
            _ => {}
        }
        false
    });
    code[..end.expect("a handler follows the path")].trim().to_owned()
}

#[test]
fn every_route_is_in_the_matrix() {
    let known: BTreeSet<(String, String)> = routes("")
        .iter()
        .map(|Route { registered: (file, source), .. }| ((*file).to_owned(), (*source).to_owned()))
        .collect();
    let registered = registered();
    let missing: Vec<_> = registered.difference(&known).collect();
    assert!(missing.is_empty(), "add these routes to the matrix of credentials: {missing:#?}");
    let gone: Vec<_> = known.difference(&registered).collect();
    assert!(gone.is_empty(), "these routes are in the matrix and nowhere else: {gone:#?}");
}

/// What a request shows, made anew for each: service JWTs are good once.
type Show = Box<dyn Fn() -> Option<String>>;

/// What a credential is to the doors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Nothing,
    Good,
    Foreign,
    Disabled,
    Frozen,
    Bad,
    /// Good for another replica's peer listener.
    OtherReplica,
    /// Good for this door alone.
    For(Door),
}

struct Credential {
    what: &'static str,
    is: Is,
    show: Show,
}

fn fixed(what: &'static str, is: Is, value: &str) -> Credential {
    let value = value.to_owned();
    Credential { what, is, show: Box::new(move || Some(value.clone())) }
}

fn made(what: &'static str, is: Is, make: impl Fn() -> String + 'static) -> Credential {
    Credential { what, is, show: Box::new(move || Some(make())) }
}

/// Service JWTs of each wrong kind, and one that opens each door. `replica` is the one whose peer listener is asked.
fn service_tokens(replica: &str, replayed: &str) -> Vec<Credential> {
    let ed25519 = |issuer: &str, pem: &str| {
        Arc::new(ServiceTokens::from_ed25519_pem(issuer, &Secret::new(pem.to_owned())).unwrap())
    };
    let sign_for = |issuer: &str, pem: &str, audience: &'static str, subject: &str| {
        let (tokens, subject) = (ed25519(issuer, pem), subject.to_owned());
        move || tokens.sign(audience, &subject, SystemClock.now()).unwrap().expose().clone()
    };
    let sign = |issuer, pem, audience| sign_for(issuer, pem, audience, "matrix");
    let now = || SystemClock.now().as_second();
    let claims = move || {
        json!({"iss": party::CONTROL, "sub": "matrix", "aud": party::GATEWAY, "iat": now(), "exp": now() + 60,
               "jti": VirtualKey::generate().unwrap().expose()[5..]})
    };
    let expired = ed25519(party::CONTROL, CONTROL_PRIVATE);
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let der = || STANDARD.decode(CONTROL_PUBLIC.lines().nth(1).unwrap()).unwrap();
    let hs256 = move |secret: &[u8]| {
        let key = EncodingKey::from_secret(secret).unwrap();
        jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims(), &key).unwrap()
    };
    vec![
        made("JWT of control for control", Is::Bad, sign(party::CONTROL, CONTROL_PRIVATE, party::CONTROL)),
        made("JWT of control for a peer", Is::Bad, sign(party::CONTROL, CONTROL_PRIVATE, party::PEER)),
        made("JWT for another replica", Is::OtherReplica, sign(party::GATEWAY, GATEWAY_PRIVATE, party::PEER)),
        made("JWT of a gateway", Is::Bad, sign(party::GATEWAY, GATEWAY_PRIVATE, party::GATEWAY)),
        made("JWT of a gateway as control", Is::Bad, sign(party::CONTROL, GATEWAY_PRIVATE, party::GATEWAY)),
        made("JWT of control as a gateway", Is::Bad, sign(party::GATEWAY, CONTROL_PRIVATE, party::GATEWAY)),
        made("expired JWT", Is::Bad, move || {
            let then = SystemClock.now() - std::time::Duration::from_secs(120);
            expired.sign(party::GATEWAY, "matrix", then).unwrap().expose().clone()
        }),
        made("JWT without a signature", Is::Bad, move || {
            format!("{}.{}.", part(json!({"alg": "none", "typ": "JWT"})), part(claims()))
        }),
        made("HS256 with the public key", Is::Bad, move || hs256(CONTROL_PUBLIC.as_bytes())),
        made("HS256 with the raw public key", Is::Bad, move || hs256(&der()[12..])),
        fixed("replayed JWT", Is::Bad, replayed),
        made("JWT for reload", Is::For(Door::Reload), sign(party::CONTROL, CONTROL_PRIVATE, party::GATEWAY)),
        made(
            "JWT for control",
            Is::For(Door::Control),
            sign(party::GATEWAY, GATEWAY_PRIVATE, party::CONTROL),
        ),
        made(
            "JWT for this replica",
            Is::For(Door::Peer),
            sign_for(party::GATEWAY, GATEWAY_PRIVATE, party::PEER, replica),
        ),
    ]
}

/// Status, challenge and code of an answer.
type Seen = (u16, String, String);

fn expected(route: &Route, is: Is) -> Seen {
    let answer = |status: u16, challenge: &str, code: &str| (status, challenge.to_owned(), code.to_owned());
    let ok = |status: u16| answer(status, "", "*");
    let realm = if route.door == Door::Operator { "obol-admin" } else { "obol" };
    let missing = answer(401, &format!("Bearer realm=\"{realm}\""), "missing_credential");
    let invalid = |code| answer(401, &format!("Bearer realm=\"{realm}\", error=\"invalid_token\""), code);
    if is == Is::For(route.door) {
        return ok(route.ok);
    }
    match (route.door, is) {
        (Door::Open, _) | (Door::Client, Is::Good) => ok(route.ok),
        // Replicas need no explanation.
        (Door::Peer, Is::OtherReplica) => answer(421, "", "wrong_replica"),
        (Door::Peer, _) => answer(401, "Bearer realm=\"obol-peer\"", "unauthenticated"),
        (_, Is::Nothing) => missing,
        (Door::Client, Is::Foreign) => ok(route.foreign),
        (Door::Client, Is::Disabled) => answer(403, "", "key_disabled"),
        (Door::Client, Is::Frozen) => answer(403, "", "workspace_frozen"),
        (Door::Reload | Door::Control, _) => invalid("invalid_service_token"),
        (Door::Client | Door::Operator, _) => invalid("invalid_credential"),
    }
}

/// One client for all: making one costs more than a request.
struct Matrix {
    http: reqwest::Client,
    requests: usize,
    wrong: Vec<String>,
}

impl Matrix {
    async fn send(&mut self, base: &str, route: &Route, show: &Show) -> Reply {
        self.requests += 1;
        let mut request = self.http.request(route.method.clone(), format!("{base}{}", route.path));
        request = request.header("accept", if route.method == Method::GET { "*/*" } else { ACCEPT });
        if let Some(body) = route.body {
            request = request.header("content-type", "application/json").body(body);
        }
        if let Some(credential) = show() {
            request = request.bearer_auth(credential);
        }
        Reply::of(request).await
    }

    /// A route that is served there answers each credential as it should.
    async fn served(&mut self, base: &str, route: &Route, credentials: &[Credential]) {
        // What is wrong with a credential is nobody's business: all refusals of one kind are the same.
        let mut refusals = BTreeSet::new();
        for Credential { what, is, show } in credentials {
            let reply = self.send(base, route, show).await;
            let (status, challenge, word) = expected(route, *is);
            let (found, shown) = (code(&reply), reply.header("www-authenticate"));
            if (reply.status, shown) != (status, &challenge) || (word != "*" && found != word) {
                self.wrong.push(format!(
                    "{} {base}{} with {what}: expected {status} [{challenge}] {word}, got {} [{shown}] {found}: {}",
                    route.method,
                    route.path,
                    reply.status,
                    reply.text()
                ));
            }
            if *is == Is::Bad && status == 401 {
                refusals.insert(reply.text().to_owned());
            }
        }
        if refusals.len() > 1 {
            self.wrong
                .push(format!("{} {base}{} tells refusals apart: {refusals:?}", route.method, route.path));
        }
    }

    /// A route that is not served there does not exist, whoever asks.
    async fn absent(&mut self, base: &str, route: &Route, credentials: &[Credential]) {
        // Whatever opens some door, and nothing.
        for Credential { what, show, .. } in credentials.iter().filter(|credential| credential.is != Is::Bad)
        {
            let reply = self.send(base, route, show).await;
            // The peer listener says nothing at all.
            if reply.status != 404 || !["no_such_path", ""].contains(&code(&reply).as_str()) {
                self.wrong
                    .push(format!("{} {base}{} with {what} is there: {reply:?}", route.method, route.path));
            }
        }
    }
}

/// The code of a refusal, whatever the surface wraps it in.
fn code(reply: &Reply) -> String {
    let body: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
    let places = [&body["code"], &body["error"]["code"], &body["error"]["data"]["code"]];
    places.iter().find_map(|code| code.as_str()).unwrap_or_default().to_owned()
}

/// A replica that serves everything on one port.
async fn one_port(world: &World, key_file: &str, trusted: &str) -> (Port, Proc) {
    let port = Port::reserve();
    let process = world
        .cluster
        .obol(["run"])
        .env("OBOL_LISTEN", port.addr().to_string())
        .env("OBOL_ADMIN_LISTEN", port.addr().to_string())
        .env("OBOL_ADMIN_TOKEN", OPERATOR)
        .env("OBOL_SERVICE_JWT_KEY_FILE", key_file)
        .env("OBOL_SERVICE_JWT_TRUSTED_KEYS_FILE", trusted)
        .spawn();
    process.wait_for_line(SOON, |line| line.starts_with("listening public")).await;
    (port, process)
}

#[tokio::test]
async fn every_route_with_every_credential() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let control_key = file("control.pem", CONTROL_PRIVATE);
    let (gateway_key, trusted) = (file("gateway.pem", GATEWAY_PRIVATE), file("trusted.pem", CONTROL_PUBLIC));
    let gateways = file("gateways.pem", GATEWAY_PUBLIC);
    let (mcp, llm) =
        (obol_testkit::fake_mcp::FakeMcp::start().await, obol_testkit::fake_llm::FakeLlm::start().await);
    let theirs = |name: &str| {
        workspace(name, &mcp, &llm, "")
            .replace("fake:", "vault:")
            .replace("small:", "large:")
            .replace("provider: fake", "provider: vault")
    };
    let world = World::with(1, "", |builder| {
        builder
            .env("OBOL_SERVICE_JWT_SECRET", "")
            .control_env("OBOL_CONTROL_LISTEN", "127.0.0.1:0")
            .control_env("OBOL_SERVICE_JWT_KEY_FILE", &control_key)
            .control_env("OBOL_SERVICE_JWT_TRUSTED_KEYS_FILE", &gateways)
            .gateway_env("OBOL_SERVICE_JWT_KEY_FILE", &gateway_key)
            .gateway_env("OBOL_SERVICE_JWT_TRUSTED_KEYS_FILE", &trusted)
            .gateway_env("OBOL_ADMIN_TOKEN", OPERATOR)
            .workspace("beta", &theirs("beta"))
            .policy("beta.cedar", ALLOW_ALL)
            .workspace("frozen", &format!("frozen: true\n{}", theirs("frozen")))
            .policy("frozen.cedar", ALLOW_ALL)
    })
    .await;
    let (port, _process) = one_port(&world, &gateway_key, &trusted).await;
    let one = format!("http://{}", port.addr());
    let (public, admin) = (world.cluster.public_url(0), world.cluster.admin_url(0));
    let peer = format!("http://{}", world.cluster.replica(0).peer.expect("a peer listener"));

    // Records that it did not write are control's to remove.
    world.cluster.stop_control().await;
    let redis = world.cluster.redis();
    let revoked = put_key(redis, "acme", |_| {}).await;
    for base in [&public, &one] {
        let models = || http().get(format!("{base}/v1/models")).bearer_auth(revoked.expose());
        assert_eq!(Reply::of(models()).await.status, 200);
    }
    revoke(redis, &revoked.hash()).await;
    for base in [&public, &one] {
        let models = || http().get(format!("{base}/v1/models")).bearer_auth(revoked.expose());
        eventually(SOON, || async { Reply::of(models()).await.status == 401 }).await;
    }
    let past = SystemClock.now() - std::time::Duration::from_secs(1);

    // Used on one replica, so that it is a replay on the other one too.
    let control =
        ServiceTokens::from_ed25519_pem(party::CONTROL, &Secret::new(CONTROL_PRIVATE.to_owned())).unwrap();
    let used = control.sign(party::GATEWAY, "matrix", SystemClock.now()).unwrap().expose().clone();
    let reload = http().post(format!("{admin}/internal/reload")).bearer_auth(&used).body(r#"{"all":true}"#);
    assert_eq!(Reply::of(reload).await.status, 200);

    let mut credentials = vec![
        Credential { what: "nothing", is: Is::Nothing, show: Box::new(|| None) },
        fixed("malformed key", Is::Bad, "obol_nonsense"),
        fixed("unknown key", Is::Bad, VirtualKey::generate().unwrap().expose()),
        fixed(
            "expired key",
            Is::Bad,
            put_key(redis, "acme", |key| key.expires_at = Some(past)).await.expose(),
        ),
        fixed("revoked key", Is::Bad, revoked.expose()),
        fixed("disabled key", Is::Disabled, put_key(redis, "acme", |key| key.disabled = true).await.expose()),
        fixed("key of another workspace", Is::Foreign, put_key(redis, "beta", |_| {}).await.expose()),
        fixed("key of a frozen workspace", Is::Frozen, put_key(redis, "frozen", |_| {}).await.expose()),
        fixed("operator", Is::For(Door::Operator), OPERATOR),
        fixed("key", Is::Good, &world.key),
    ];
    credentials.extend(service_tokens(&replica_id(&world), &used));

    let mut matrix = Matrix { http: http(), requests: 0, wrong: Vec::new() };
    let routes = routes(&world.key.parse::<VirtualKey>().unwrap().hash().hex());
    for route in routes.iter().filter(|route| route.on != On::Control) {
        let places = [(&public, On::Public), (&admin, On::Admin), (&peer, On::Peer)];
        for (base, listener) in places {
            let both = route.on == On::Both && listener != On::Peer;
            if route.on == listener || both {
                matrix.served(base, route, &credentials).await;
            } else {
                matrix.absent(base, route, &credentials).await;
            }
        }
        if route.on == On::Peer {
            matrix.absent(&one, route, &credentials).await;
        } else {
            matrix.served(&one, route, &credentials).await;
        }
    }
    // Every virtual key is a stranger to control, so that it does not matter that it removes those above.
    world.cluster.restart_control().await;
    let control = control_url(&world).await;
    for route in &routes {
        match route.on {
            On::Control | On::Both if route.path != "/readyz" => {
                matrix.served(&control, route, &credentials).await;
            }
            _ => matrix.absent(&control, route, &credentials).await,
        }
    }
    let Matrix { requests, wrong, .. } = matrix;
    println!("{requests} answers of {} routes and {} credentials", routes.len(), credentials.len());
    assert!(wrong.is_empty(), "{} of {requests} answers are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The id of the replica, as it stands in its lease.
fn replica_id(world: &World) -> String {
    let lines = world.cluster.replica(0).process.lines();
    let line = lines.iter().find(|line| line.contains("replica starts")).expect("the log line of the start");
    let at = line.find("r-").expect("an id");
    line[at..at + 14].to_owned()
}

/// Where control serves its internal API.
async fn control_url(world: &World) -> String {
    let line =
        world.cluster.control().wait_for_line(SOON, |line| line.starts_with("listening control ")).await;
    line.trim_start_matches("listening control ").trim().to_owned()
}
