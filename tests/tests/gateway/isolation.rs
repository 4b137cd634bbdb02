//! One workspace sees nothing of another, and a denied tool is an unknown one.

use obol_testkit::fake_llm::FakeLlm;
use obol_testkit::fake_mcp::FakeMcp;
use obol_tests::ALLOW_ALL;
use obol_tests::client::{Mcp, Reply, http, message};
use obol_tests::world::{World, workspace};
use reqwest::Method;

/// All of an answer that a client can see, apart from the date, the request's own id and the balancer's note of who
/// answered.
fn seen(reply: &Reply) -> String {
    let mut headers = reply.headers.clone();
    for own in ["date", "x-request-id", "x-obol-backend"] {
        headers.remove(own);
    }
    format!("{} {headers:?}\n{}", reply.status, reply.text())
}

/// `beta` has the same kinds of things as `acme` under names of its own.
async fn two_workspaces() -> (World, FakeMcp, FakeLlm, String) {
    let (mcp, llm) = (FakeMcp::start().await, FakeLlm::start().await);
    let beta = workspace("beta", &mcp, &llm, "").replace("fake:", "vault:").replace("small:", "large:");
    let beta = beta.replace("provider: fake", "provider: vault");
    let world =
        World::with(2, "", |builder| builder.workspace("beta", &beta).policy("beta.cedar", ALLOW_ALL)).await;
    let key = world.cluster.new_key("beta", &[]).await;
    (world, mcp, llm, key)
}

#[tokio::test]
async fn a_key_neither_sees_nor_uses_anything_of_another_workspace() {
    let (world, theirs, their_llm, their_key) = two_workspaces().await;
    let (ours, them) = (world.connect().await, Mcp::connect(&world.url(), &their_key).await);
    assert!(them.tools().await.contains(&"vault__echo".to_owned()));
    for (method, member, field) in [
        ("tools/list", "tools", "name"),
        ("resources/list", "resources", "uri"),
        ("resources/templates/list", "resourceTemplates", "uriTemplate"),
        ("prompts/list", "prompts", "name"),
    ] {
        let names = ours.names(method, member, field).await;
        assert!(
            !names.is_empty() && names.iter().all(|name| name.starts_with("fake")),
            "{method}: {names:?}"
        );
    }

    let before = theirs.counts();
    for (method, params) in [
        ("tools/call", r#"{"name":"vault__echo","arguments":{}}"#),
        ("prompts/get", r#"{"name":"vault__greet","arguments":{"name":"x"}}"#),
        ("resources/read", r#"{"uri":"vault+demo://text"}"#),
        ("resources/subscribe", r#"{"uri":"vault+demo://text"}"#),
        (
            "completion/complete",
            r#"{"ref":{"type":"ref/prompt","name":"vault__greet"},"argument":{"name":"name","value":"a"}}"#,
        ),
    ] {
        let theirs = ours.send(message("1", method, params)).await;
        let nobodys = ours.send(message("1", method, &params.replace("vault", "nosuc"))).await;
        theirs.error();
        assert_eq!(seen(&theirs), seen(&nobodys).replace("nosuc", "vault"), "{method}");
    }
    let view = |name: &str| http().post(format!("{}/mcp/{name}", world.url())).bearer_auth(&world.key);
    let (theirs_view, nobodys) =
        (Reply::of(view("vault").body("{}")).await, Reply::of(view("nosuc").body("{}")).await);
    assert_eq!((theirs_view.status, seen(&theirs_view)), (404, seen(&nobodys)));

    let models = Reply::of(http().get(format!("{}/v1/models", world.url())).bearer_auth(&world.key)).await;
    let models: Vec<_> = models.json()["data"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(models, ["small"]);
    let body = r#"{"model":"large","messages":[]}"#;
    let (foreign, unknown) = (world.chat(body).await, world.chat(body.replace("large", "nosuc")).await);
    assert_eq!((foreign.status, seen(&foreign)), (404, seen(&unknown).replace("nosuc", "large")));
    let model = |name: &str| http().get(format!("{}/v1/models/{name}", world.url())).bearer_auth(&world.key);
    let (foreign, unknown) = (Reply::of(model("large")).await, Reply::of(model("nosuc")).await);
    assert_eq!((foreign.status, seen(&foreign)), (404, seen(&unknown).replace("nosuc", "large")));

    assert_eq!(theirs.counts().requests, before.requests);
    assert_eq!(their_llm.calls(), 0);
}

#[tokio::test]
async fn foreign_unknown_and_malformed_sessions_have_one_answer() {
    let (world, _theirs, _llm, their_key) = two_workspaces().await;
    let them = Mcp::connect(&world.url(), &their_key).await;
    // Of the same workspace, but of another principal.
    let neighbour_key = world.cluster.new_key("acme", &[]).await;
    let neighbour = Mcp::connect(&world.url(), &neighbour_key).await;
    let last = if them.session().ends_with('0') { "1" } else { "0" };
    let unknown = format!("{}{last}", &them.session()[..them.session().len() - 1]);
    let upper = them.session().to_uppercase();
    for method in [Method::POST, Method::GET, Method::DELETE] {
        let mut answers = Vec::new();
        for session in [them.session(), neighbour.session(), &unknown, "mcs_1", "", &upper, "../../etc"] {
            let ours = Mcp::new(&world.url(), &world.key).with_session(Some(session));
            let request = match method {
                Method::POST => ours.post(message("1", "tools/list", "{}")),
                _ => ours.request(method.clone()),
            };
            let reply = Reply::of(request).await;
            assert_eq!(reply.status, 404, "{method} {reply:?}");
            answers.push(seen(&reply));
        }
        answers.dedup();
        assert_eq!(answers.len(), 1, "{method}: {answers:#?}");
    }
    // Nothing happened to them.
    for session in [them, neighbour] {
        assert_eq!(session.rpc("ping", "{}").await.status, 200);
        assert_eq!(session.delete().await.status, 204);
        assert_eq!(session.rpc("ping", "{}").await.status, 404);
    }
}

#[tokio::test]
async fn a_denied_tool_is_not_listed_and_answers_as_an_unknown_one() {
    let world = World::with(1, "", |builder| {
        let deny = r#"forbid (principal, action == Action::"mcp:callTool", resource) when { resource.destructive } unless { principal.tags.contains("operator") };"#;
        builder.policy("acme.cedar", &format!("{ALLOW_ALL}{deny}\n"))
    })
    .await;
    let client = world.connect().await;
    let tools = client.tools().await;
    assert!(
        tools.contains(&"fake__echo".to_owned()) && !tools.contains(&"fake__destroy".to_owned()),
        "{tools:?}"
    );
    let call = |name: &str| message("1", "tools/call", &format!(r#"{{"name":"{name}","arguments":{{}}}}"#));
    let (denied, unknown) =
        (client.send(call("fake__destroy")).await, client.send(call("fake__nowhere")).await);
    denied.error();
    assert_eq!(seen(&denied), seen(&unknown).replace("nowhere", "destroy"));
    assert_eq!(world.mcp.calls("destroy"), 0);

    let operator = world.cluster.new_key("acme", &["operator"]).await;
    let operator = Mcp::connect(&world.url(), &operator).await;
    assert!(operator.tools().await.contains(&"fake__destroy".to_owned()));
    operator.call("fake__destroy", "{}").await.result();
    assert_eq!(world.mcp.calls("destroy"), 1);
}

#[tokio::test]
async fn a_denied_resource_is_denied_in_every_spelling() {
    let forbid = format!(
        "{ALLOW_ALL}forbid (principal, action, resource is Resource)\nwhen {{ resource.uri like \"demo://item/secret*\" }};\n"
    );
    let world = World::with(1, "", |builder| builder.policy("acme.cedar", &forbid)).await;
    let client = world.connect().await;
    client.ok("resources/read", r#"{"uri":"fake+demo://item/open"}"#).await;
    let before = world.mcp.counts();
    for uri in [
        "demo://item/secret",
        "demo://item/%73ecret",
        "demo://item/x/../secret",
        "demo://item/x%2f..%2fsecret",
    ] {
        for method in ["resources/read", "resources/subscribe"] {
            let reply = client.rpc(method, &format!(r#"{{"uri":"fake+{uri}"}}"#)).await;
            assert_eq!(reply.error()["code"], -32002, "{method} {uri}");
        }
    }
    let after = world.mcp.counts();
    assert_eq!(before.requests_of("resources/read"), after.requests_of("resources/read"));
    assert_eq!(after.requests_of("resources/subscribe"), 0);
}

/// Denied and unknown have one answer, byte for byte apart from the name that the client sent, for every primitive and
/// every method that takes one.
#[tokio::test]
async fn what_is_denied_answers_as_what_does_not_exist_for_every_primitive() {
    let mcp = FakeMcp::start().await;
    let vault =
        format!("  vault: {{ transport: streamable_http, url: \"{}\", allow_private: true }}\n", mcp.url());
    let world = World::with(1, &vault, |builder| {
        let deny = r#"
forbid (principal, action == Action::"mcp:connect", resource == Connection::"vault");
forbid (principal, action == Action::"mcp:callTool", resource == Tool::"fake/destroy");
forbid (principal, action == Action::"mcp:getPrompt", resource == Prompt::"fake/greet");
forbid (principal, action == Action::"mcp:readResource", resource) when { resource.uri like "demo://item/*" };
forbid (principal, action == Action::"llm:invoke", resource == Model::"small");
"#;
        builder.policy("acme.cedar", &format!("{ALLOW_ALL}{deny}"))
    })
    .await;
    let client = world.connect().await;
    for (method, member, field) in [
        ("tools/list", "tools", "name"),
        ("prompts/list", "prompts", "name"),
        ("resources/templates/list", "resourceTemplates", "uriTemplate"),
        ("resources/list", "resources", "uri"),
    ] {
        let names = client.names(method, member, field).await;
        let shown = |part: &str| names.iter().any(|name| name.contains(part));
        assert!(
            !shown("vault") && !shown("destroy") && !shown("greet") && !shown("item"),
            "{method}: {names:?}"
        );
    }

    // (method, params, what is denied in it, something of the same length that nobody has)
    let argument = r#""argument":{"name":"name","value":"a"}"#;
    let table = [
        ("tools/call", r#"{"name":"fake__destroy","arguments":{}}"#.to_owned(), "destroy", "nowhere"),
        ("tools/call", r#"{"name":"vault__echo","arguments":{}}"#.to_owned(), "vault", "nosuc"),
        ("prompts/get", r#"{"name":"fake__greet","arguments":{"name":"x"}}"#.to_owned(), "greet", "nosuc"),
        ("prompts/get", r#"{"name":"vault__greet","arguments":{"name":"x"}}"#.to_owned(), "vault", "nosuc"),
        ("resources/read", r#"{"uri":"fake+demo://item/7"}"#.to_owned(), "item", "none"),
        ("resources/read", r#"{"uri":"fake+demo://%69tem/7"}"#.to_owned(), "%69tem", "nothin"),
        ("resources/read", r#"{"uri":"vault+demo://text"}"#.to_owned(), "vault", "nosuc"),
        ("resources/subscribe", r#"{"uri":"vault+demo://text"}"#.to_owned(), "vault", "nosuc"),
        (
            "completion/complete",
            format!(r#"{{"ref":{{"type":"ref/prompt","name":"fake__greet"}},{argument}}}"#),
            "greet",
            "nosuc",
        ),
        (
            "completion/complete",
            format!(r#"{{"ref":{{"type":"ref/resource","uri":"fake+demo://item/{{id}}"}},{argument}}}"#),
            "item",
            "none",
        ),
        (
            "completion/complete",
            format!(r#"{{"ref":{{"type":"ref/resource","uri":"vault+demo://text"}},{argument}}}"#),
            "vault",
            "nosuc",
        ),
    ];
    for (method, params, denied, nobodys) in table {
        let answer = client.send(message("1", method, &params)).await;
        let unknown = client.send(message("1", method, &params.replace(denied, nobodys))).await;
        answer.error();
        assert_eq!(seen(&answer), seen(&unknown).replace(nobodys, denied), "{method} {params}");
    }
    // An upstream that takes a subscription to anything has everything: what is denied is refused all the same.
    let denied = client.rpc("resources/subscribe", r#"{"uri":"fake+demo://item/7"}"#).await;
    assert_eq!(denied.error()["code"], -32002);
    for body in [r#"{"model":"small","messages":[]}"#, r#"{"model":"nosuc","messages":[]}"#] {
        assert_eq!(world.chat(body).await.status, 404);
    }
    let (small, nobodys) = (
        world.chat(r#"{"model":"small","messages":[]}"#).await,
        world.chat(r#"{"model":"nosuc","messages":[]}"#).await,
    );
    assert_eq!(seen(&small), seen(&nobodys).replace("nosuc", "small"));

    // Nothing of it reached anybody.
    assert!(mcp.counts().requests.is_empty(), "{:?}", mcp.counts());
    assert_eq!((world.mcp.calls("destroy"), world.llm.calls()), (0, 0));
    let asked: Vec<String> =
        world.mcp.received().iter().filter_map(obol_testkit::fake_mcp::Received::params).collect();
    assert!(!asked.iter().any(|params| params.contains("item/") || params.contains("tem/7")), "{asked:?}");
    // What is allowed goes on.
    client.ok("resources/read", r#"{"uri":"fake+demo://text"}"#).await;
}
