//! The audit log of real replicas: who did what, what was decided and by which policies, and nothing that is nobody's
//! business.

use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::logs::assert_no_secret;
use obol_tests::ALLOW_ALL;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::world::World;
use serde_json::Value;

const POLICIES: &str = r#"
@id("no-destruction") forbid (principal, action == Action::"mcp:callTool", resource) when { resource.destructive };
@id("inside") forbid (principal, action == Action::"mcp:callTool", resource == Tool::"fake/echo")
when { context has arguments && context.arguments.hasTag("path") && context.arguments.getTag("path") like "/etc/*" };
@id("no-secrets") forbid (principal, action == Action::"mcp:readResource", resource) when { resource.uri like "demo://item/*" };
@id("models-of-operators") forbid (principal, action == Action::"llm:invoke", resource)
unless { principal.tags.contains("operator") };
"#;

/// The records of an answer's request so far.
fn records(world: &World, reply: &Reply) -> Vec<Value> {
    let id = reply.header("x-request-id");
    audit(world).into_iter().filter(|record| record["request_id"] == id).collect()
}

/// All records so far. A line that is just being written is none yet.
fn audit(world: &World) -> Vec<Value> {
    let logs = world.cluster.logs();
    let records = logs.lines().filter(|line| line.contains(r#""obol::audit""#));
    records.filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The one record of an answer's request. The log is written before the answer, but read through a pipe.
async fn record(world: &World, reply: &Reply) -> Value {
    eventually(Duration::from_secs(10), || async { !records(world, reply).is_empty() }).await;
    let [record] = records(world, reply).try_into().expect("one record");
    record
}

#[tokio::test]
async fn every_decision_that_matters_leaves_one_record() {
    let world =
        World::with(1, "", |b| b.policy("acme.cedar", &format!("@id(\"all\") {ALLOW_ALL}{POLICIES}"))).await;
    let client = world.connect().await;
    let argument = "an-argument-that-nobody-may-log";
    let echo = format!(r#"{{"path":"/home/{argument}"}}"#);
    let etc = format!(r#"{{"path":"/etc/{argument}"}}"#);
    let read = |uri: &str| format!(r#"{{"uri":"fake+demo://{uri}"}}"#);
    let (item, text) = (read(&format!("item/{argument}")), read("text"));
    let table = [
        (
            "tools/call",
            format!(r#"{{"name":"fake__echo","arguments":{echo}}}"#),
            "allow",
            "all",
            ("tool", "echo"),
        ),
        (
            "tools/call",
            format!(r#"{{"name":"fake__echo","arguments":{etc}}}"#),
            "deny",
            "inside",
            ("tool", "echo"),
        ),
        (
            "tools/call",
            r#"{"name":"fake__destroy","arguments":{}}"#.to_owned(),
            "deny",
            "no-destruction",
            ("tool", "destroy"),
        ),
        ("resources/read", text.clone(), "allow", "all", ("uri", "demo:")),
        ("resources/read", item.clone(), "deny", "no-secrets", ("uri", "demo:")),
        ("resources/subscribe", item, "deny", "no-secrets", ("uri", "demo:")),
        (
            "prompts/get",
            format!(r#"{{"name":"fake__greet","arguments":{{"name":"{argument}"}}}}"#),
            "allow",
            "all",
            ("prompt", "greet"),
        ),
        (
            "completion/complete",
            format!(
                r#"{{"ref":{{"type":"ref/prompt","name":"fake__greet"}},"argument":{{"name":"name","value":"{argument}"}}}}"#
            ),
            "allow",
            "all",
            ("prompt", "greet"),
        ),
    ];
    let last4 = &client.session()[client.session().len() - 4..];
    for (method, params, decision, policy, (field, value)) in table {
        let reply = client.rpc(method, &params).await;
        let record = record(&world, &reply).await;
        let action = match field {
            "tool" => "mcp:callTool",
            "uri" => "mcp:readResource",
            _ => "mcp:getPrompt",
        };
        for (name, expected) in [
            ("message", "decision"),
            ("level", "INFO"),
            ("workspace", "acme"),
            ("method", method),
            ("action", action),
            ("connection", "fake"),
            (field, value),
            ("decision", decision),
            ("policies", policy),
            ("session_last4", last4),
            ("revision", "1.1"),
        ] {
            assert_eq!(record[name], expected, "{method} {name}: {record}");
        }
        let principal = record["principal"].as_str().unwrap();
        assert!(principal.starts_with("key:k-"), "{record}");
        assert!(record["timestamp"].is_string() && record.get("errors").is_none(), "{record}");
    }

    let denied = world.chat(r#"{"model":"small","messages":[]}"#).await;
    assert_eq!(denied.status, 404, "{denied:?}");
    let denied = record(&world, &denied).await;
    for (name, expected) in [
        ("action", "llm:invoke"),
        ("model", "small"),
        ("provider", "fake"),
        ("decision", "deny"),
        ("policies", "models-of-operators"),
    ] {
        assert_eq!(denied[name], expected, "{denied}");
    }

    let connected = audit(&world).into_iter().filter(|record| record["method"] == "initialize");
    let connected: Vec<Value> = connected.collect();
    assert_eq!(connected.len(), 1, "{connected:?}");
    assert_eq!(
        (&connected[0]["action"], &connected[0]["decision"]),
        (&"mcp:connect".into(), &"allow".into())
    );

    // Lists and what is unknown are no decisions of this kind.
    let before = audit(&world).len();
    client.tools().await;
    client.rpc("tools/call", r#"{"name":"fake__nowhere","arguments":{}}"#).await.error();
    client.call("fake__echo", "{}").await.result();
    eventually(Duration::from_secs(10), || async { audit(&world).len() > before }).await;
    assert_eq!(audit(&world).len(), before + 1, "{:?}", audit(&world));
    let session = client.session().to_owned();
    let secrets = [("argument", argument), ("session", session.as_str()), ("key", world.key.as_str())];
    assert_no_secret(&world.cluster.logs(), &secrets);
}

#[tokio::test]
async fn the_audit_can_be_had_alone_with_the_lists() {
    let world = World::with(1, "", |builder| {
        builder
            .policy("acme.cedar", &format!("{ALLOW_ALL}{POLICIES}"))
            .gateway_env("OBOL_LOG", "off,obol::audit=debug")
    })
    .await;
    let client = world.connect().await;
    let listed = client.rpc("tools/list", "{}").await;
    let record = record(&world, &listed).await;
    assert_eq!((&record["message"], &record["level"]), (&"list".into(), &"DEBUG".into()), "{record}");
    assert_eq!((&record["shown"], &record["hidden"]), (&4.into(), &1.into()), "{record}");
    let others = world.cluster.replica(0).process.lines();
    let others: Vec<&String> = others.iter().filter(|line| line.starts_with('{')).collect();
    assert!(others.iter().all(|line| line.contains(r#""obol::audit""#)), "{others:?}");
}

#[tokio::test]
async fn a_connection_that_is_refused_answers_as_none_and_is_on_the_record() {
    let world = World::with(1, "", |builder| {
        let policies = format!(
            "{ALLOW_ALL}@id(\"closed\") forbid (principal, action == Action::\"mcp:connect\", resource) unless {{ principal.tags.contains(\"operator\") }};"
        );
        builder.policy("acme.cedar", &policies)
    })
    .await;
    let operator = world.cluster.new_key("acme", &["operator"]).await;
    Mcp::connect(&world.url(), &operator).await.call("fake__echo", "{}").await.result();
    let view = |name: &str| http().post(format!("{}/mcp/{name}", world.url())).bearer_auth(&world.key);
    let reply = Reply::of(view("fake").header("content-type", "application/json").body("{}")).await;
    assert_eq!(reply.status, 404);
    let record = record(&world, &reply).await;
    assert_eq!((&record["decision"], &record["policies"]), (&"deny".into(), &"closed".into()), "{record}");
    assert_eq!(record["connection"], "fake");
}

/// C054: Cedar skips a policy that fails, so that a failing `forbid` would allow. Both of these validate: overflow and
/// absence are found only when they happen.
#[tokio::test]
async fn a_policy_that_fails_denies_is_counted_and_is_named_in_the_audit() {
    for (policy, reason) in [
        (
            r#"@id("broken") forbid (principal, action == Action::"mcp:callTool", resource == Tool::"fake/echo") when { 9223372036854775807 + 1 > 0 };"#,
            "an integer overflows",
        ),
        (
            r#"@id("broken") forbid (principal, action == Action::"mcp:callTool", resource == Tool::"fake/echo") when { Key::"k-gone".tags.contains("x") };"#,
            "it reads an entity that is not there",
        ),
    ] {
        let world = World::with(1, "", |b| b.policy("acme.cedar", &format!("{ALLOW_ALL}{policy}\n"))).await;
        let client = world.connect().await;
        assert!(!client.tools().await.contains(&"fake__echo".to_owned()));
        let denied = client.call("fake__echo", "{}").await;
        denied.error();
        assert_eq!(world.mcp.calls("echo"), 0);
        let record = record(&world, &denied).await;
        for (name, expected) in [("decision", "deny"), ("policies", "broken"), ("errors", reason)] {
            assert_eq!(record[name], expected, "{record}");
        }
        client.call("fake__counter", "{}").await.result();
        let metrics = Reply::of(http().get(format!("{}/metrics", world.cluster.admin_url(0)))).await;
        let counted =
            metrics.text().lines().find_map(|line| line.strip_prefix("obol_authz_evaluation_errors_total "));
        // The list and the call.
        assert!(counted.is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n >= 2)), "{}", metrics.text());
    }
}
