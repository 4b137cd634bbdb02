//! Sessions on several replicas: how long they live, and where and when they end (DESIGN §6).

use std::collections::HashMap;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use obol_model::VirtualKey;
use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_testkit::fake_mcp::Stall;
use obol_tests::client::{ACCEPT, Events, Mcp, Reply, http, message};
use obol_tests::world::{World, workspace};
use obol_tests::{ALLOW_ALL, SOON};
use reqwest::Method;
use tokio::time::{Instant, sleep, timeout};

/// One keep-alive tick, and slack for a busy machine.
const TICK: Duration = Duration::from_secs(25);

const INITIALIZE: &str =
    r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#;

async fn initialize(base_url: &str, key: &str) -> Reply {
    Mcp::new(base_url, key).rpc("initialize", INITIALIZE).await
}

async fn exists(cluster: &Cluster, session: &str) -> bool {
    cluster.redis().query(&["EXISTS", &format!("sess:{{{session}}}")]).await
}

async fn delete_from_redis(cluster: &Cluster, key: &str) {
    assert_eq!(cluster.redis().query::<u8>(&["DEL", key]).await, 1, "{key} was there");
}

/// Waits until the first replica tells this number of sessions; it counts every ten seconds.
async fn counted(world: &World, line: &str) {
    eventually(Duration::from_secs(20), || async {
        let metrics = Reply::of(http().get(format!("{}/metrics", world.cluster.admin_url(0)))).await;
        metrics.text().lines().any(|found| found == line)
    })
    .await;
}

fn stored(key: &str) -> String {
    format!("key:{}", key.parse::<VirtualKey>().unwrap().hash().hex())
}

/// Reads until the stream ends, and returns what came before.
async fn rest(stream: &mut Events, within: Duration) -> Vec<String> {
    let end = Instant::now() + within;
    let mut events = Vec::new();
    while let Some(event) = stream.next(end.saturating_duration_since(Instant::now())).await {
        events.push(event);
    }
    events
}

/// C007: with a life of four seconds.
#[tokio::test]
async fn an_open_stream_and_a_running_call_keep_their_session_until_their_replica_dies() {
    let world = World::with(3, "", |builder| builder.env("OBOL_SESSION_TTL_S", "4")).await;
    let replica = |n| world.cluster.public_url(n);
    let (streaming, calling, orphan) = (world.connect().await, world.connect().await, world.connect().await);
    let stream = streaming.at(&replica(0)).listen().await;
    let _lost = orphan.at(&replica(2)).listen().await;
    world.mcp.stall(Stall::UntilReleased);
    let on_one = calling.at(&replica(1));
    let call = on_one.call("fake__echo", "{}");
    let meanwhile = async {
        // The time is what is tested: more than two lives.
        tokio::join!(sleep(Duration::from_secs(9)), counted(&world, "obol_sessions_held 1"));
        counted(&world, "obol_sessions_live 3").await;
        for client in [&streaming, &calling, &orphan] {
            assert!(exists(&world.cluster, client.session()).await);
        }
        world.mcp.release();
    };
    let (answered, ()) = tokio::join!(call, meanwhile);
    answered.result();
    assert_eq!(calling.at(&replica(0)).rpc("ping", "{}").await.status, 200, "after the call, elsewhere");

    drop(stream);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(streaming.at(&replica(1)).rpc("ping", "{}").await.status, 200, "after the stream, elsewhere");

    assert!(exists(&world.cluster, orphan.session()).await);
    world.cluster.kill9(2).await;
    let killed = Instant::now();
    eventually(Duration::from_secs(20), || async { !exists(&world.cluster, orphan.session()).await }).await;
    println!("the session of a killed holder expired after {:?}", killed.elapsed());
    assert_eq!(orphan.at(&replica(0)).rpc("ping", "{}").await.status, 404);
}

/// C009, C016.
#[tokio::test]
async fn a_session_deleted_on_one_replica_is_gone_and_ends_on_the_other() {
    let world = World::start(2).await;
    let (a, b) = (world.cluster.public_url(0), world.cluster.public_url(1));
    let client = world.connect().await;
    let (on_a, on_b) = (client.at(&a), client.at(&b));
    on_b.tools().await;
    let mut stream = on_a.listen().await;
    world.mcp.stall(Stall::UntilReleased);
    let call = on_a.call("fake__echo", "{}");
    let delete = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
        assert_eq!(on_b.delete().await.status, 204);
        let deleted = Instant::now();
        for next in [&on_a, &on_b] {
            for method in [Method::POST, Method::GET, Method::DELETE] {
                let request = match method {
                    Method::POST => next.post(message("1", "ping", "{}")),
                    _ => next.request(method),
                };
                assert_eq!(Reply::of(request).await.status, 404);
            }
        }
        deleted
    };
    let ((answer, answered), deleted) = tokio::join!(async { (call.await, Instant::now()) }, delete);
    assert_eq!(answer.error()["data"]["code"], "session_ended");
    assert_eq!(rest(&mut stream, TICK).await, Vec::<String>::new());
    let (call, stream) = (answered.saturating_duration_since(deleted), deleted.elapsed());
    println!(
        "after a deletion elsewhere the call was answered in {call:?}, the stream ended within {stream:?}"
    );
    assert!(call < TICK);
    // What was under way brings nothing back.
    world.mcp.release();
    assert!(!exists(&world.cluster, client.session()).await);
    assert_eq!(world.cluster.redis().keys("sess:*").await, Vec::<String>::new());
    assert_eq!(world.cluster.redis().keys("sess-of:*").await, Vec::<String>::new());
}

/// C058, and DESIGN §6.3 where no message comes: everything is found out at a keep-alive tick, before it is written.
#[tokio::test]
async fn a_stream_outlives_neither_its_key_nor_its_session_by_more_than_a_tick() {
    let world = World::with(1, "", |builder| builder.env("OBOL_KEY_TTL_S", "1")).await;
    let revoked_key = world.cluster.new_key("acme", &[]).await;
    // It would put back what is removed behind its back.
    world.cluster.stop_control().await;
    let revoked = Mcp::connect(&world.url(), &revoked_key).await;
    let (deleted, kept) = (world.connect().await, world.connect().await);
    let (mut one, mut two, mut three) = (revoked.listen().await, deleted.listen().await, kept.listen().await);
    delete_from_redis(&world.cluster, &stored(&revoked_key)).await;
    delete_from_redis(&world.cluster, &format!("sess:{{{}}}", deleted.session())).await;
    let began = Instant::now();
    let one = async {
        assert_eq!(rest(&mut one, TICK).await, Vec::<String>::new(), "a revoked key");
        began.elapsed()
    };
    let two = async {
        assert_eq!(rest(&mut two, TICK).await, Vec::<String>::new(), "a deleted session");
        began.elapsed()
    };
    let (one, two, tick) = tokio::join!(one, two, three.next(TICK));
    println!("revoked and deleted in silence, the streams ended after {one:?} and {two:?}");
    assert!(tick.unwrap().starts_with(':'), "the other one gets its comment");
    assert_eq!(kept.rpc("ping", "{}").await.status, 200);
}

/// DESIGN §9.5.
#[tokio::test]
async fn a_stream_that_cannot_be_asked_about_stays_open_and_silent() {
    let world = World::with(1, "", |builder| builder.env("OBOL_KEY_TTL_S", "1")).await;
    let client = world.connect().await;
    let mut stream = client.listen().await;
    client.ok("resources/subscribe", r#"{"uri":"fake+demo://text"}"#).await;
    eventually(SOON, || async { world.mcp.resource_updated("demo://text") > 0 }).await;
    stream.until("notifications/resources/updated", SOON).await;

    world.cluster.redis().pause();
    // Until then the key is known.
    sleep(Duration::from_millis(1_500)).await;
    world.mcp.resource_updated("demo://text");
    world.mcp.add_tool(r#"{"name":"late","inputSchema":{"type":"object"}}"#);
    let heard = timeout(Duration::from_secs(3), stream.message(TICK)).await;
    assert!(heard.is_err(), "said without knowing whether it may: {heard:?}");

    world.cluster.redis().resume();
    let resumed = Instant::now();
    let mut missing = vec!["notifications/resources/updated", "notifications/tools/list_changed"];
    while !missing.is_empty() {
        let message = stream.message(TICK).await;
        missing.retain(|method| message["method"] != *method);
    }
    println!("a silent stream had caught up {:?} after Redis was back", resumed.elapsed());
}

#[tokio::test]
async fn the_sessions_of_a_revoked_key_end_on_every_replica() {
    let world = World::start(2).await;
    let stays = world.connect().await;
    let key = world.cluster.new_key("acme", &[]).await;
    let context: String = world.cluster.redis().query(&["GET", &stored(&key)]).await;
    let context: serde_json::Value = serde_json::from_str(&context).unwrap();
    let (one, two, idle) = (
        Mcp::connect(&world.cluster.public_url(0), &key).await,
        Mcp::connect(&world.cluster.public_url(1), &key).await,
        Mcp::connect(&world.url(), &key).await,
    );
    let (mut first, mut second) = (one.listen().await, two.listen().await);
    let message = serde_json::json!({
        "type": "key", "hash": stored(&key).strip_prefix("key:"), "delete_sessions": true,
        "workspace_id": "acme", "principal": { "key": context["key_id"] },
    });
    let told: u8 = world.cluster.redis().query(&["PUBLISH", "obol:invalidate", &message.to_string()]).await;
    assert_eq!(told, 2);
    let began = Instant::now();
    tokio::join!(rest(&mut first, SOON), rest(&mut second, SOON));
    for client in [&one, &two, &idle] {
        eventually(SOON, || async { !exists(&world.cluster, client.session()).await }).await;
    }
    println!("the sessions of a key had ended on both replicas after {:?}", began.elapsed());
    for client in [&one, &two, &idle] {
        assert_eq!(client.at(&world.url()).rpc("ping", "{}").await.status, 404);
    }
    assert_eq!(stays.rpc("ping", "{}").await.status, 200);
}

/// C013.
#[tokio::test]
async fn live_sessions_are_bounded_and_unused_ones_make_room_soon() {
    let world = World::with(2, "", |builder| {
        builder.env("OBOL_SESSION_MAX_PER_PRINCIPAL", "3").env("OBOL_SESSION_UNUSED_TTL_S", "2")
    })
    .await;
    let used = world.connect().await;
    let key = world.cluster.new_key("acme", &[]).await;
    let own = Mcp::connect(&world.url(), &key).await;
    // The cap is each principal's own.
    let refused = eventually(SOON, || async {
        let reply = initialize(&world.url(), &key).await;
        (reply.status != 200).then_some(reply)
    })
    .await;
    assert_eq!(refused.status, 429, "{refused:?}");
    let error = refused.error();
    assert_eq!(error["data"]["code"], "too_many_sessions");
    assert!(error["message"].as_str().unwrap().contains("3 live sessions"), "{error}");
    assert_eq!(initialize(&world.url(), &world.key).await.status, 200);

    eventually(Duration::from_secs(15), || async { initialize(&world.url(), &key).await.status == 200 })
        .await;
    for client in [&used, &own] {
        let key = format!("sess:{{{}}}", client.session());
        let left: i64 = world.cluster.redis().query(&["PTTL", &key]).await;
        assert!(left > 1_000_000, "what was used lives on: {left}");
        assert_eq!(client.rpc("ping", "{}").await.status, 200);
    }
    assert_eq!(own.delete().await.status, 204);
}

/// DESIGN §6.4 and §6.5 with `session_binding: workspace`.
#[tokio::test]
async fn principals_of_a_workspace_can_share_sessions_but_not_streams() {
    let world = World::with(2, "", |builder| builder).await;
    let yaml = workspace("acme", &world.mcp, &world.llm, "");
    let (one, two) = (world.key.clone(), world.cluster.new_key("acme", &[]).await);
    let client = Mcp::connect(&world.url(), &one).await;
    let other = |base: &str| Mcp::new(base, &two).with_session(Some(client.session()));
    assert_eq!(other(&world.url()).rpc("ping", "{}").await.status, 404, "not shared by default");

    let shared = yaml.replace("environment: test\n", "environment: test\nsession_binding: workspace\n");
    world.cluster.write_workspace("acme", &shared);
    for n in 0..2 {
        let base = world.cluster.public_url(n);
        eventually(SOON, || async { other(&base).rpc("ping", "{}").await.status == 200 }).await;
        let stream = Reply::of(other(&base).request(Method::GET)).await;
        assert_eq!(stream.status, 403, "{stream:?}");
        assert_eq!(stream.error()["data"]["code"], "foreign_stream");
    }
    let mut own = client.listen().await;
    assert_eq!(other(&world.url()).call("fake__echo", "{}").await.status, 200);
    // Its owner's, also after somebody else has used it.
    assert_eq!(client.rpc("ping", "{}").await.status, 200);
    assert_eq!(other(&world.cluster.public_url(1)).delete().await.status, 204);
    rest(&mut own, TICK).await;
    assert_eq!(client.rpc("ping", "{}").await.status, 404);

    // Another workspace learns nothing, however its own sessions are bound.
    let (mcp, llm) = (&world.mcp, &world.llm);
    world.cluster.write_policy("beta.cedar", ALLOW_ALL);
    let beta = workspace("beta", mcp, llm, "")
        .replace("environment: test\n", "environment: test\nsession_binding: workspace\n");
    world.cluster.write_workspace("beta", &beta);
    let stranger = world.cluster.new_key("beta", &[]).await;
    eventually(SOON, || async { initialize(&world.url(), &stranger).await.status == 200 }).await;
    let client = Mcp::connect(&world.url(), &one).await;
    let never = "mcs_01900000-0000-7000-8000-000000000000";
    for method in [Method::POST, Method::GET, Method::DELETE] {
        let mut answers = Vec::new();
        for session in [client.session(), never, "garbage!"] {
            let stranger = Mcp::new(&world.url(), &stranger).with_session(Some(session));
            let request = match method {
                Method::POST => stranger.post(message("1", "tools/list", "{}")),
                _ => stranger.request(method.clone()),
            };
            let mut reply = Reply::of(request).await;
            for own in ["date", "x-request-id", "x-obol-backend"] {
                reply.headers.remove(own);
            }
            assert_eq!(reply.status, 404, "{reply:?}");
            answers.push((reply.headers, reply.body));
        }
        answers.dedup();
        assert_eq!(answers.len(), 1, "{method}: {answers:?}");
    }
    let last4 = &client.session()[client.session().len() - 4..];
    let logs = world.cluster.logs();
    let warned = logs.lines().filter(|line| line.contains("session of another workspace refused"));
    let warned: Vec<_> = warned.filter(|line| line.contains("WARN") && line.contains("beta")).collect();
    assert!(warned.len() == 3 && warned.iter().all(|line| line.contains(last4)), "{warned:?}");
    assert!(!logs.contains(client.session()));
}

/// C127: who gets an id knows nothing of the others of its millisecond.
#[tokio::test]
async fn ids_of_sessions_opened_together_have_nothing_in_common_but_the_time() {
    const SESSIONS: usize = 1000;
    let world = World::with(1, "", |builder| builder.env("OBOL_SESSION_MAX_PER_PRINCIPAL", "2000")).await;
    let base = world.cluster.public_url(0);
    let client = http();
    let open = |_| async {
        let post = client.post(format!("{base}/mcp")).bearer_auth(&world.key).header("accept", ACCEPT);
        let body = message("0", "initialize", INITIALIZE);
        let reply = Reply::of(post.header("content-type", "application/json").body(body)).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let hex = reply.header("mcp-session-id").trim_start_matches("mcs_").replace('-', "");
        u128::from_str_radix(&hex, 16).unwrap()
    };
    let ids: Vec<u128> = stream::iter(0..SESSIONS).map(open).buffer_unordered(100).collect().await;
    let random = |id: u128| ((id >> 64) & 0xfff) << 62 | (id & ((1 << 62) - 1));
    // Each of the 74 bits is set in about half of them: six standard deviations are 95.
    for bit in 0..74 {
        let set = ids.iter().filter(|&&id| random(id) >> bit & 1 == 1).count();
        assert!(set.abs_diff(SESSIONS / 2) < 120, "bit {bit} is set in {set}");
    }
    // And neighbours differ in about half of the bits, so that no counter is behind them.
    let mut by_time: HashMap<u128, Vec<u128>> = HashMap::new();
    for &id in &ids {
        by_time.entry(id >> 80).or_default().push(random(id));
    }
    let (mut pairs, mut differing) = (0_u32, 0_u32);
    for ids in by_time.values_mut() {
        ids.sort_unstable();
        for pair in ids.windows(2) {
            pairs += 1;
            // Sorted neighbours share some leading bits by chance; the lower 48 are free of that.
            differing += ((pair[0] ^ pair[1]) & ((1 << 48) - 1)).count_ones();
        }
    }
    println!(
        "{pairs} pairs of one millisecond differ in {} of 48 bits",
        f64::from(differing) / f64::from(pairs.max(1))
    );
    assert!(pairs < 30 || f64::from(differing) / f64::from(pairs) > 20.0);
}
