//! Bad input over HTTP: each a clear answer.

use obol_tests::client::{ACCEPT, Mcp, Reply, http, message};
use obol_tests::world::World;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;

const LIMIT: usize = 64 << 10;
const PING: &str = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

async fn world() -> World {
    World::with(1, "", |builder| builder.gateway_env("OBOL_MAX_BODY_BYTES", &LIMIT.to_string())).await
}

struct Case {
    what: &'static str,
    request: RequestBuilder,
    status: u16,
    /// The code of the JSON-RPC error, or of the OpenAI error.
    code: Value,
}

fn case(what: &'static str, request: RequestBuilder, status: u16, code: impl Into<Value>) -> Case {
    Case { what, request, status, code: code.into() }
}

/// Runs all cases and reports all that differ.
async fn check(cases: Vec<Case>) {
    let mut wrong = Vec::new();
    for Case { what, request, status, code } in cases {
        let reply = Reply::of(request).await;
        let found = serde_json::from_slice::<Value>(&reply.body)
            .map_or(Value::Null, |body| body["error"]["code"].clone());
        if reply.status != status || (!code.is_null() && found != code) {
            wrong.push(format!("{what}: wanted {status} {code}, got {} {}", reply.status, reply.text()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn bad_mcp_requests_are_refused_clearly() {
    let world = world().await;
    let client = world.connect().await;
    let anonymous = Mcp::new(&world.url(), &world.key);
    let unknown = "mcs_0197f2b4-0000-7000-8000-000000000000";
    let with = |session: &str| Mcp::new(&world.url(), &world.key).with_session(Some(session));
    let post = |body: &str| client.post(body.to_owned());
    let raw = || http().post(format!("{}/mcp", world.url())).bearer_auth(&world.key);
    let deep = format!("{}1{}", r#"{"a":"#.repeat(200), "}".repeat(200));
    let big =
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"x":"{}"}}}}"#, "x".repeat(LIMIT));
    let modern = r#"{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}"#;
    check(vec![
        case("malformed JSON", post("{\"jsonrpc\":"), 400, -32700),
        case("no JSON at all", post("hello"), 400, -32700),
        case("empty body", post(""), 400, -32700),
        case("not UTF-8", client.post(vec![b'"', 0xff, b'"']), 400, -32700),
        case("trailing garbage", post(&format!("{PING} x")), 400, -32700),
        case("no message", post("5"), 400, -32600),
        case("no version", post(r#"{"id":1,"method":"ping"}"#), 400, -32600),
        case("null id", post(r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#), 400, -32600),
        case("object id", post(r#"{"jsonrpc":"2.0","id":{},"method":"ping"}"#), 400, -32600),
        case("array params", post(r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}"#), 400, -32600),
        case(
            "method twice",
            post(r#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/list"}"#),
            400,
            -32600,
        ),
        case(
            "deep nesting",
            post(&message("1", "tools/call", &format!(r#"{{"name":"fake__echo","arguments":{deep}}}"#))),
            400,
            Value::Null,
        ),
        case("too large", post(&big), 413, Value::Null),
        case("no content type", raw().header("accept", ACCEPT).body(PING), 415, Value::Null),
        case(
            "text",
            raw().header("accept", ACCEPT).header("content-type", "text/plain").body(PING),
            415,
            Value::Null,
        ),
        case(
            "accepts HTML",
            raw().header("accept", "text/html").header("content-type", "application/json").body(PING),
            406,
            Value::Null,
        ),
        case("unknown method", post(&message("1", "no/such", "{}")), 200, -32601),
        case("a modern method", post(&message("1", "subscriptions/listen", "{}")), 200, -32601),
        case("no params", post(r#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"#), 200, -32602),
        case("no tool name", post(&message("1", "tools/call", "{}")), 200, -32602),
        case("unknown tool", post(&message("1", "tools/call", r#"{"name":"no"}"#)), 200, -32602),
        case("unknown prompt", post(&message("1", "prompts/get", r#"{"name":"no"}"#)), 200, -32602),
        case("unknown resource", post(&message("1", "resources/read", r#"{"uri":"no"}"#)), 200, -32002),
        case("foreign cursor", post(&message("1", "tools/list", r#"{"cursor":"no"}"#)), 200, -32602),
        case("unknown level", post(&message("1", "logging/setLevel", r#"{"level":"loud"}"#)), 200, -32602),
        case("no session", anonymous.post(PING), 400, Value::Null),
        case("unknown session", with(unknown).post(PING), 404, Value::Null),
        case("malformed session", with("nonsense").post(PING), 404, Value::Null),
        case(
            "initialize without params",
            anonymous.post(r#"{"jsonrpc":"2.0","id":1,"method":"initialize"}"#),
            400,
            -32602,
        ),
        case("initialize without version", anonymous.post(message("1", "initialize", "{}")), 400, -32602),
        case(
            "unsupported revision",
            client.post(PING).header("mcp-protocol-version", "1999-01-01"),
            400,
            Value::Null,
        ),
        case(
            "unknown session before revision",
            with(unknown).post(PING).header("mcp-protocol-version", "1999-01-01"),
            404,
            Value::Null,
        ),
        case("GET without session", anonymous.request(Method::GET), 400, Value::Null),
        case("GET of an unknown session", with(unknown).request(Method::GET), 404, Value::Null),
        case(
            "GET that wants JSON",
            http()
                .get(format!("{}/mcp", world.url()))
                .bearer_auth(&world.key)
                .header("accept", "application/json"),
            406,
            Value::Null,
        ),
        case("DELETE without session", anonymous.request(Method::DELETE), 400, Value::Null),
        case("DELETE of an unknown session", with(unknown).request(Method::DELETE), 404, Value::Null),
        case("a batch today", post(&format!("[{PING}]")), 400, -32600),
        case(
            "unknown connection",
            http().post(format!("{}/mcp/nowhere", world.url())).bearer_auth(&world.key).body(PING),
            404,
            Value::Null,
        ),
        case("unknown path", http().get(format!("{}/nowhere", world.url())), 404, Value::Null),
        // Probes of clients that speak both eras, which then fall back to `initialize`.
        case("modern probe", anonymous.post(message("1", "server/discover", modern)), 400, -32600),
        case("modern header", anonymous.post(PING).header("mcp-protocol-version", "2026-07-28"), 400, -32600),
    ])
    .await;
    // The session is none the worse for it.
    client.call("fake__echo", "{}").await.result();
    assert_eq!(world.mcp.counts().all_calls(), 1);
}

#[tokio::test]
async fn batches_are_for_the_revision_that_has_them() {
    let world = world().await;
    let client = Mcp::connect_as(&world.url(), &world.key, "2025-03-26").await;
    let call =
        |id: &str| message(id, "tools/call", &format!(r#"{{"name":"fake__echo","arguments":{{"n":{id}}}}}"#));
    let noted = r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#;
    let init = message(
        "9",
        "initialize",
        r#"{"protocolVersion":"2025-03-26","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#,
    );
    let body = format!("[{},{},{noted},{},5,{init}]", call("1"), call("2"), message("3", "no/such", "{}"));
    let reply = client.send(body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let answers = reply.json();
    let answers = answers.as_array().unwrap();
    let of = |id: i64| {
        answers.iter().find(|answer| answer["id"] == id).unwrap_or_else(|| panic!("{id}: {answers:?}"))
    };
    for id in [1, 2] {
        assert_eq!(of(id)["result"]["content"][0]["text"], format!(r#"{{"n":{id}}}"#));
    }
    assert_eq!(of(3)["error"]["code"], -32601);
    assert_eq!(of(9)["error"]["code"], -32600);
    assert_eq!(answers.len(), 5, "{answers:?}");

    let quiet = client.send(format!("[{noted},{noted}]")).await;
    assert_eq!((quiet.status, quiet.body.len()), (202, 0));
    assert_eq!(client.send("[]").await.status, 400);
    let many = vec![PING; 51].join(",");
    assert_eq!(client.send(format!("[{many}]")).await.status, 400);
}

#[tokio::test]
async fn strangers_are_kept_out_and_told_how_to_come_in() {
    let world = world().await;
    let url = format!("{}/mcp", world.url());
    let post =
        || http().post(&url).header("accept", ACCEPT).header("content-type", "application/json").body(PING);

    let nobody = Reply::of(post()).await;
    assert_eq!((nobody.status, nobody.header("www-authenticate")), (401, r#"Bearer realm="obol""#));
    for bad in ["obol_wrong".to_owned(), format!("obol_{}", "A".repeat(43)), String::from("x")] {
        for (scheme, surface) in [("Bearer", "mcp"), ("bearer", "v1/models")] {
            let request = http()
                .get(format!("{}/{surface}", world.url()))
                .header("authorization", format!("{scheme} {bad}"));
            let reply = Reply::of(request.header("accept", ACCEPT)).await;
            assert_eq!(reply.status, 401, "{reply:?}");
            assert!(reply.header("www-authenticate").contains(r#"error="invalid_token""#), "{reply:?}");
            assert!(!reply.text().contains(&bad) || bad.len() == 1, "{reply:?}");
        }
    }
    let two = http()
        .get(format!("{}/v1/models", world.url()))
        .bearer_auth(&world.key)
        .header("x-api-key", "obol_other");
    assert_eq!(Reply::of(two).await.status, 401);
    let same = http()
        .get(format!("{}/v1/models", world.url()))
        .bearer_auth(&world.key)
        .header("x-api-key", &world.key);
    assert_eq!(Reply::of(same).await.status, 200);

    for method in [Method::PUT, Method::PATCH, Method::HEAD] {
        let reply = Reply::of(http().request(method.clone(), &url).bearer_auth(&world.key)).await;
        assert_eq!((reply.status, reply.header("allow")), (405, "GET, POST, DELETE, OPTIONS"), "{method}");
    }

    let preflight = http().request(Method::OPTIONS, &url).header("origin", "http://localhost:6274");
    let preflight = Reply::of(preflight.header("access-control-request-method", "POST")).await;
    assert_eq!(preflight.status, 204, "{preflight:?}");
    assert_eq!(preflight.header("access-control-allow-origin"), "http://localhost:6274");
    let allowed = preflight.header("access-control-allow-headers").to_lowercase();
    for header in ["authorization", "content-type", "mcp-session-id", "mcp-protocol-version", "last-event-id"]
    {
        assert!(allowed.contains(header), "{header}: {allowed}");
    }
    let page = Reply::of(post().header("origin", "http://localhost:6274")).await;
    assert_eq!((page.status, page.header("access-control-allow-origin")), (401, "http://localhost:6274"));
    assert!(page.header("access-control-expose-headers").contains("Mcp-Session-Id"), "{page:?}");

    for origin in ["https://evil.example.com", "null", "http://127.0.0.1.evil.example.com"] {
        assert_eq!(
            Reply::of(post().bearer_auth(&world.key).header("origin", origin)).await.status,
            403,
            "{origin}"
        );
    }
    assert_eq!(
        Reply::of(post().bearer_auth(&world.key).header("host", "evil.example.com")).await.status,
        403
    );

    // `/mcp/` is `/mcp`, never a redirect.
    let slash =
        http().post(format!("{url}/")).bearer_auth(&world.key).header("content-type", "application/json");
    assert_eq!(Reply::of(slash.body(PING)).await.status, 400);
}

#[tokio::test]
async fn bad_completions_are_refused_in_the_callers_dialect() {
    let world = world().await;
    let url = format!("{}/v1/chat/completions", world.url());
    let post = |body: &str| {
        http()
            .post(&url)
            .bearer_auth(&world.key)
            .header("content-type", "application/json")
            .body(body.to_owned())
    };
    let deep = format!(r#"{{"model":"small","messages":{}1{}}}"#, "[".repeat(300), "]".repeat(300));
    check(vec![
        case("malformed JSON", post(r#"{"model":"#), 400, "invalid_json"),
        case("no object", post("[]"), 400, "invalid_json"),
        case("empty body", post(""), 400, "invalid_json"),
        case("no model", post(r#"{"messages":[]}"#), 400, "missing_required_parameter"),
        case("model of another type", post(r#"{"model":5}"#), 400, "invalid_type"),
        case("model twice", post(r#"{"model":"small","model":"other"}"#), 400, "duplicate_parameter"),
        case(
            "model twice, escaped",
            post(r#"{"model":"small","mod\u0065l":"other"}"#),
            400,
            "duplicate_parameter",
        ),
        case(
            "stream twice",
            post(r#"{"model":"small","stream":true,"stream":false}"#),
            400,
            "duplicate_parameter",
        ),
        case("stream of another type", post(r#"{"model":"small","stream":"yes"}"#), 400, "invalid_type"),
        case("deep nesting", post(&deep), 400, "invalid_json"),
        case("unknown model", post(r#"{"model":"nowhere","messages":[]}"#), 404, "model_not_found"),
        case("too large", post(&format!(r#"{{"model":"{}"}}"#, "x".repeat(LIMIT))), 413, "body_too_large"),
        case(
            "unknown endpoint",
            http().post(format!("{}/v1/files", world.url())).bearer_auth(&world.key).body("{}"),
            404,
            "unknown_endpoint",
        ),
        case("no key", http().post(&url).body("{}"), 401, Value::Null),
    ])
    .await;
    assert_eq!(world.llm.calls(), 0);
    let error = Reply::of(post(r#"{"model":"nowhere"}"#)).await.error();
    assert_eq!(error["param"], "model");
    assert!(error["type"].is_string() && error["message"].as_str().unwrap().contains("`nowhere`"), "{error}");
    // What the provider says is wrong is the caller's to read; what is ours is not.
    world.llm.reply(obol_testkit::fake_llm::Reply::status(400));
    let refused = world.chat(r#"{"model":"small","messages":[]}"#).await;
    assert_eq!((refused.status, refused.error()["code"].clone()), (400, "scripted_400".into()));
    world.llm.reply(obol_testkit::fake_llm::Reply::status(401));
    let ours = world.chat(r#"{"model":"small","messages":[]}"#).await;
    assert_eq!(ours.status, 502, "{ours:?}");
    assert!(!ours.text().contains("scripted") && !ours.text().contains("127.0.0.1"), "{ours:?}");
}
