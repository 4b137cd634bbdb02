//! Control and its commands as processes that share a store.

use std::time::Duration;

use futures::future::join_all;
use obol_auth::ServiceTokens;
use obol_model::{Clock as _, Secret, SystemClock, VirtualKey};
use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::port::Port;
use obol_testkit::postgres::Postgres;
use obol_testkit::process::{Proc, Stream};
use obol_tests::client::{Reply, http};
use obol_tests::world::World;
use obol_tests::{ALLOW_ALL, SOON};
use serde_json::{Value, json};
use tokio::time::Instant;

/// Runs a command to its end; answers what it said on stdout.
async fn obol(cluster: &Cluster, args: &[&str], env: &[(&str, &str)]) -> String {
    let command = env.iter().fold(cluster.obol(args), |command, (name, value)| command.env(name, value));
    let command = command.env("OBOL_STATE_DIR", cluster.state_dir()).spawn();
    let status = command.wait(SOON * 3).await;
    command.ended().await.unwrap();
    assert!(status.success(), "{args:?}: {:?}", command.lines());
    command.lines_of(Stream::Out).join("\n")
}

fn id_of(key: &str) -> String {
    format!("k-{}", &key.parse::<VirtualKey>().unwrap().hash().hex()[..12])
}

async fn environment(cluster: &Cluster) -> Option<String> {
    let text: Option<String> = cluster.redis().query(&["GET", "snap:workspace:{acme}"]).await;
    let document: Value = serde_json::from_str(&text?).unwrap();
    Some(document["environment"].as_str().unwrap().to_owned())
}

async fn is_environment(cluster: &Cluster, wanted: &str) {
    eventually(SOON * 2, || async {
        let there = environment(cluster).await;
        if there.as_deref() == Some(wanted) { Ok(()) } else { Err(format!("wanted {wanted}: {there:?}")) }
    })
    .await;
}

fn acme(environment: &str) -> String {
    format!("workspace: acme\nenvironment: {environment}\npolicies: [acme.cedar]\n")
}

/// A second control beside the cluster's.
async fn second_control(cluster: &Cluster, env: &[(&str, &str)]) -> Proc {
    let command =
        env.iter().fold(cluster.obol(["control"]), |command, (name, value)| command.env(name, value));
    let control = command
        .env("OBOL_WORKSPACES_DIR", cluster.workspaces_dir())
        .env("OBOL_STATE_DIR", cluster.state_dir())
        .spawn();
    control.wait_for_line(SOON * 3, |line| line == "control ready").await;
    control
}

/// How long each of these took until every replica refused the key.
async fn revoked(world: &World, keys: &[String], env: &[(&str, &str)]) -> Vec<Duration> {
    let mut took = Vec::new();
    for key in keys {
        let urls = [world.cluster.public_url(0), world.cluster.public_url(1)];
        let status = async |url: &String| {
            Reply::of(http().get(format!("{url}/v1/models")).bearer_auth(key)).await.status
        };
        for url in &urls {
            eventually(SOON, || async { status(url).await == 200 }).await;
        }
        obol(&world.cluster, &["key", "revoke", &id_of(key)], env).await;
        let done = Instant::now();
        let refused = urls.iter().map(|url| eventually(SOON, || async { status(url).await == 401 }));
        join_all(refused).await;
        took.push(done.elapsed());
    }
    took.sort();
    took
}

/// C055: whoever tells the replicas, the command itself or a control that sees the store, a revoked key is refused on all
/// of them within a second of the command's end, and nothing brings it back.
#[tokio::test]
async fn a_revocation_holds_on_every_replica_within_a_second() {
    let world = World::start(2).await;
    let mut keys = Vec::new();
    for _ in 0..12 {
        keys.push(world.cluster.new_key("acme", &[]).await);
    }
    let (directly, by_control) = keys.split_at(6);
    let directly = revoked(&world, directly, &[]).await;
    let by_control = revoked(&world, by_control, &[("OBOL_REDIS_URL", "")]).await;
    println!("refused everywhere after {directly:?} by the command, {by_control:?} by control");
    // A second, and the same again for a debug build on two busy cores.
    for took in [directly, by_control] {
        assert!(took.last().unwrap() < &Duration::from_secs(2), "{took:?}");
    }
    // A Redis that was emptied gets the key of the world back, and none of the others.
    world.cluster.redis().cli(&["FLUSHALL"]).await;
    let alive = format!("key:{}", world.key.parse::<VirtualKey>().unwrap().hash().hex());
    eventually(SOON * 2, || async {
        world.cluster.redis().keys("key*").await == [alive.clone(), "keys:loaded".into()]
    })
    .await;
}

/// C102: a Redis that a backup took back in time is brought forward; an intended way back is a new revision.
#[tokio::test]
async fn a_redis_that_went_back_is_brought_forward_and_a_rollback_is_a_new_revision() {
    let cluster = Cluster::of_built_obol()
        .replicas(1)
        .workspace("acme", &acme("one"))
        .policy("acme.cedar", ALLOW_ALL)
        .start()
        .await;
    let keys = ["snap:workspace:{acme}", "policy:{acme}", "snap:fingerprint:{acme}"];
    let backup: Vec<String> = cluster.redis().query(&["MGET", keys[0], keys[1], keys[2]]).await;
    cluster.write_workspace("acme", &acme("two"));
    is_environment(&cluster, "two").await;
    let restore = [keys[0], &backup[0], keys[1], &backup[1], keys[2], &backup[2]];
    cluster.redis().cli(&[&["MSET"], &restore[..]].concat()).await;
    is_environment(&cluster, "two").await;
    cluster.control().wait_for_line(SOON, |line| line.contains("restored")).await;

    let said = obol(&cluster, &["workspace", "rollback", "acme"], &[]).await;
    assert_eq!(said, "published acme 1.3 with the content of 1.1");
    assert_eq!(environment(&cluster).await.as_deref(), Some("one"), "at once");
    // Also a control that starts later leaves it alone, until the file changes.
    cluster.restart_control().await;
    assert_eq!(environment(&cluster).await.as_deref(), Some("one"));
    let shown: Value =
        serde_json::from_str(&obol(&cluster, &["workspace", "show", "acme", "--json"], &[]).await).unwrap();
    assert_eq!((&shown["revision"], &shown["held"]), (&json!("1.3"), &json!(true)));
    let from: Vec<&str> =
        shown["revisions"].as_array().unwrap().iter().map(|r| r["from"].as_str().unwrap()).collect();
    assert_eq!(from, ["rollback:1.1", "file", "file"]);
    cluster.write_workspace("acme", &acme("three"));
    is_environment(&cluster, "three").await;

    // From CI, with an epoch of its own.
    cluster.stop_control().await;
    let file = cluster.workspaces_dir().join("acme.yaml");
    let file = file.to_str().unwrap();
    assert_eq!(obol(&cluster, &["publish", file], &[]).await, "unchanged acme 1.4");
    assert_eq!(obol(&cluster, &["publish", file, "--raise-epoch"], &[]).await, "published acme 2.1");
    obol(&cluster, &["workspace", "unpublish", "acme"], &[]).await;
    assert_eq!(environment(&cluster).await, None);
}

/// Two controls on one directory and commands beside them: one of the controls dies, and nothing is lost or goes back.
#[tokio::test]
async fn two_controls_share_a_directory_and_one_of_them_dies() {
    let cluster = Cluster::of_built_obol()
        .replicas(1)
        .workspace("acme", &acme("start"))
        .policy("acme.cedar", ALLOW_ALL)
        .start()
        .await;
    let second = second_control(&cluster, &[]).await;
    for round in ["one", "two", "three"] {
        cluster.write_workspace("acme", &acme(round));
        let ((), key) = tokio::join!(is_environment(&cluster, round), cluster.new_key("acme", &[]));
        assert!(!key.is_empty());
    }
    cluster.control().kill9().await;
    cluster.write_workspace("acme", &acme("four"));
    is_environment(&cluster, "four").await;
    assert_eq!(cluster.redis().keys("key:*").await.len(), 3);
    let shown: Value =
        serde_json::from_str(&obol(&cluster, &["workspace", "show", "acme", "--json"], &[]).await).unwrap();
    let numbers: Vec<&str> =
        shown["revisions"].as_array().unwrap().iter().map(|r| r["revision"].as_str().unwrap()).collect();
    assert_eq!(numbers, ["1.5", "1.4", "1.3", "1.2", "1.1"], "one for each edit");
    second.terminate();
    assert_eq!(second.wait(SOON).await.code(), Some(0));
}

/// All of it with Postgres, which goes away and comes back.
#[tokio::test]
async fn control_keeps_its_state_in_postgres_and_survives_its_absence() {
    let postgres = Postgres::start().await;
    let url = postgres.url();
    let env = [("OBOL_DATABASE_URL", url.as_str())];
    let cluster = Cluster::of_built_obol()
        .replicas(1)
        .env("OBOL_DATABASE_URL", &url)
        .workspace("acme", &acme("one"))
        .policy("acme.cedar", ALLOW_ALL)
        .start()
        .await;
    let second = second_control(&cluster, &env).await;
    let key = cluster.new_key("acme", &["ops"]).await;
    let listed: Value =
        serde_json::from_str(&obol(&cluster, &["key", "list", "--json"], &env).await).unwrap();
    assert_eq!((&listed[0]["key_id"], &listed[0]["tags"]), (&json!(id_of(&key)), &json!(["ops"])));
    assert_eq!(listed.as_array().unwrap().len(), 1);
    let models = async |status: u16| {
        let url = cluster.public_url(0);
        eventually(SOON, || async {
            Reply::of(http().get(format!("{url}/v1/models")).bearer_auth(&key)).await.status == status
        })
        .await;
    };
    models(200).await;
    let state: Vec<_> = std::fs::read_dir(cluster.state_dir()).unwrap().collect();
    assert!(state.is_empty(), "nothing of it is in a directory: {state:?}");

    postgres.kill();
    cluster.redis().cli(&["FLUSHALL"]).await;
    is_environment(&cluster, "one").await;
    models(200).await;
    cluster.write_workspace("acme", &acme("two"));
    let complaint = |line: &str| line.contains("what is to be published cannot be read");
    cluster.control().wait_for_line(SOON, complaint).await;
    let failed = cluster.obol(["key", "revoke", &id_of(&key)]).spawn();
    assert_eq!(failed.wait(SOON * 2).await.code(), Some(1));
    failed.ended().await.unwrap();
    assert!(failed.lines().join("\n").contains(&postgres.addr().to_string()), "{:?}", failed.lines());
    assert_eq!(environment(&cluster).await.as_deref(), Some("one"));

    postgres.restart().await;
    is_environment(&cluster, "two").await;
    obol(&cluster, &["key", "revoke", &id_of(&key), "--delete-sessions"], &env).await;
    models(401).await;
    assert_eq!(cluster.control().exit_status(), None, "it never ended");
    assert_eq!(second.exit_status(), None, "nor did this one");
    let audit = postgres.sql("SELECT action, epoch, number FROM obol_audit ORDER BY id");
    assert_eq!(audit, "publish|1|1\nnew_key||\npublish|1|2\nrevoke_key||");
}

/// Redis lost a key, and its promise to hold them all: a replica asks control instead of refusing.
#[tokio::test]
async fn a_replica_asks_control_about_a_key_that_redis_lost() {
    let port = Port::reserve();
    let world = World::with(1, "", |builder| {
        builder
            .control_env("OBOL_CONTROL_LISTEN", &port.addr().to_string())
            .gateway_env("OBOL_CONTROL_URL", &format!("http://{}", port.addr()))
    })
    .await;
    let (redis, url) = (world.cluster.redis(), format!("{}/v1/models", world.url()));
    // Control puts it back within ten seconds, which must not be what answers here.
    eventually(SOON * 2, || async {
        let key = world.cluster.new_key("acme", &[]).await;
        let record = format!("key:{}", key.parse::<VirtualKey>().unwrap().hash().hex());
        redis.cli(&["DEL", &record, "keys:loaded"]).await;
        let reply = Reply::of(http().get(&url).bearer_auth(&key)).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        redis.keys("key:*").await.iter().all(|there| *there != record)
    })
    .await;
    let stranger = format!("obol_{}", "A".repeat(43));
    redis.cli(&["DEL", "keys:loaded"]).await;
    assert_eq!(
        Reply::of(http().get(&url).bearer_auth(stranger)).await.status,
        401,
        "control knows all of them"
    );
}

/// The internal API: whoever may ask is told what the store says, to the byte; nobody else is told anything.
#[tokio::test]
async fn control_answers_replicas_and_nobody_else() {
    let cluster = Cluster::of_built_obol()
        .replicas(1)
        .control_env("OBOL_CONTROL_LISTEN", "127.0.0.1:0")
        .workspace("acme", &acme("one"))
        .policy("acme.cedar", ALLOW_ALL)
        .start()
        .await;
    let line = cluster.control().wait_for_line(SOON, |line| line.starts_with("listening control http")).await;
    let base = line.trim_start_matches("listening control ").to_owned();
    let secret = Secret::new(cluster.service_jwt_secret().to_owned());
    let sign = |issuer: &str, audience: &str| {
        let tokens = ServiceTokens::from_secret(issuer, &secret).unwrap();
        tokens.sign(audience, "test", SystemClock.now()).unwrap().expose().clone()
    };
    let good = || sign("obol-gateway", "obol-control");
    let ask = async |path: &str, token: &str| {
        Reply::of(http().get(format!("{base}/internal/v1/{path}")).bearer_auth(token)).await
    };
    let key = cluster.new_key("acme", &[]).await;
    let hash = key.parse::<VirtualKey>().unwrap().hash().hex();

    let keys = ["snap:workspace:{acme}", "policy:{acme}", "snap:fingerprint:{acme}"];
    let there: Vec<String> = cluster.redis().query(&["MGET", keys[0], keys[1], keys[2]]).await;
    let reply = ask("workspaces/acme/publication", &good()).await;
    let expected = json!({"workspace": there[0], "policy": there[1], "fingerprint": there[2]});
    assert_eq!((reply.status, reply.json()), (200, expected));
    let record: String = cluster.redis().query(&["GET", &format!("key:{hash}")]).await;
    let reply = ask(&format!("keys/{hash}"), &good()).await;
    assert_eq!((reply.status, reply.json()), (200, json!({"key": record})));

    let nobody = "ab".repeat(32);
    for (path, code) in [
        ("workspaces/nowhere/publication".to_owned(), "no_such_workspace"),
        ("workspaces/..%2f/publication".to_owned(), "no_such_workspace"),
        ("workspaces/%ff/publication".to_owned(), "no_such_workspace"),
        ("keys/%ff".to_owned(), "no_such_key"),
        (format!("keys/{nobody}"), "no_such_key"),
        ("keys/short".to_owned(), "no_such_key"),
        ("keys".to_owned(), "no_such_path"),
    ] {
        let reply = ask(&path, &good()).await;
        assert_eq!((reply.status, &reply.json()["code"]), (404, &json!(code)), "{path}");
    }
    let used = good();
    assert_eq!(ask("workspaces/acme/publication", &used).await.status, 200);
    for (what, token) in [
        ("used", used),
        ("a virtual key", key.clone()),
        ("garbage", "a.b.c".to_owned()),
        ("of control itself", sign("obol-control", "obol-control")),
        ("for a peer", sign("obol-gateway", "obol-peer")),
        ("for a reload", sign("obol-control", "obol-gateway")),
    ] {
        for path in [
            "workspaces/acme/publication".to_owned(),
            format!("keys/{hash}"),
            "workspaces/x/publication".into(),
        ] {
            let reply = ask(&path, &token).await;
            assert_eq!(reply.status, 401, "{what}: {reply:?}");
            assert!(!reply.text().contains("acme"), "{what}: {reply:?}");
        }
    }
    assert_eq!(Reply::of(http().get(format!("{base}/internal/v1/keys/{hash}"))).await.status, 401);
    assert_eq!(Reply::of(http().get(format!("{base}/healthz"))).await.status, 200);

    obol(&cluster, &["key", "revoke", &id_of(&key)], &[]).await;
    assert_eq!(ask(&format!("keys/{hash}"), &good()).await.status, 404, "at once");
    obol(&cluster, &["workspace", "unpublish", "acme"], &[]).await;
    assert_eq!(ask("workspaces/acme/publication", &good()).await.status, 404);
    // Damage is no absence.
    std::fs::write(cluster.state_dir().join("workspaces/acme/head.json"), "{").unwrap();
    let reply = ask("workspaces/acme/publication", &good()).await;
    assert_eq!((reply.status, &reply.json()["code"]), (503, &json!("state_unavailable")), "{reply:?}");
    let control = cluster.control();
    control.terminate();
    assert_eq!(control.wait(SOON * 2).await.code(), Some(0));
}
