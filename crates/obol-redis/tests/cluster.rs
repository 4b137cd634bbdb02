//! A real Cluster of three masters.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use std::collections::BTreeSet;

use obol_model::Kind;
use obol_redis::{Redis, RedisError, RedisOptions, Script, SubscriberEvent};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use obol_testkit::redis_cluster::RedisCluster;
use redis::{Cmd, RedisResult, Value};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use support::{BACK, Kept, Load, PATIENCE, SECOND, client, failures, patient};

fn cmd(words: &str) -> Cmd {
    let mut cmd = Cmd::new();
    for word in words.split(' ') {
        cmd.arg(word);
    }
    cmd
}

fn code(error: RedisError) -> String {
    match error {
        RedisError::Server { code, .. } => code,
        other => panic!("{other:?}"),
    }
}

/// One key per node, in the order of the nodes.
async fn keys_of_nodes(cluster: &RedisCluster) -> Vec<String> {
    let mut keys = vec![String::new(); 3];
    for n in 0..100 {
        let key = format!("key{n}");
        let owner = cluster.owner(&key).await.port();
        let node = cluster.nodes().iter().position(|node| node.port() == owner).unwrap();
        keys[node] = key;
        if keys.iter().all(|key| !key.is_empty()) {
            return keys;
        }
    }
    panic!("no key for some node: {keys:?}");
}

#[tokio::test]
async fn commands_reach_the_nodes_of_their_keys() {
    let cluster = RedisCluster::start().await;
    let redis = client(cluster.url()).await;
    let keys = keys_of_nodes(&cluster).await;

    // Answers keep their order whatever node they come from.
    let mut pipe = redis::pipe();
    for n in 0..300 {
        pipe.set(format!("n{n}"), n).ignore().cmd("ECHO").arg("here").get(format!("n{n}"));
    }
    let answers: Vec<String> = redis.pipeline(&pipe).await.unwrap();
    let expected: Vec<String> = (0..300).flat_map(|n| ["here".to_owned(), n.to_string()]).collect();
    assert_eq!(answers, expected);
    let found: BTreeSet<String> = redis.scan("n*", usize::MAX).await.unwrap().into_iter().collect();
    assert_eq!(found, (0..300).map(|n| format!("n{n}")).collect());
    assert_eq!(redis.scan("n*", 100).await.unwrap().len(), 100);
    redis.ping().await.unwrap();
    assert_eq!(redis.server_warnings().await.unwrap(), Vec::<String>::new());

    // One tag is one command; several slots in one are refused.
    redis.query::<()>(&cmd("MSET a{t} 1 b{t} 2 c{t} 3")).await.unwrap();
    let three: (u8, u8, u8) = redis.query(&cmd("MGET a{t} b{t} c{t}")).await.unwrap();
    assert_eq!(three, (1, 2, 3));
    let wide = cmd(&format!("MGET {} {}", keys[0], keys[1]));
    assert_eq!(code(redis.query::<Value>(&wide).await.unwrap_err()), "CROSSSLOT");

    // An error of one command is the error of all, or of that one.
    let mut mixed = redis::pipe();
    for key in &keys {
        mixed.cmd("SET").arg(key).arg("x");
    }
    mixed.cmd("LPUSH").arg(&keys[1]).arg("x").cmd("GET").arg(&keys[2]);
    assert_eq!(code(redis.pipeline::<Vec<Value>>(&mixed).await.unwrap_err()), "WRONGTYPE");
    let each: Vec<RedisResult<Value>> = redis.pipeline(mixed.ignore_errors()).await.unwrap();
    assert_eq!(each.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true, true, false, true]);
    let empty: Vec<Value> = redis.pipeline(&redis::pipe()).await.unwrap();
    assert!(empty.is_empty());

    // Each node learns a script by itself, and what goes beside it goes elsewhere.
    let script = Script::new("add", "return redis.call('INCRBY', KEYS[1], ARGV[1])");
    for (n, key) in keys.iter().enumerate() {
        redis.query::<()>(&cmd(&format!("SET {key} 0"))).await.unwrap();
        let beside = keys.iter().map(|key| cmd(&format!("LPUSH beside:{{{key}}} {n}"))).collect();
        assert_eq!(redis.run_beside::<u64>(&script, &[key], &[b"2"], beside).await.unwrap(), 2);
        assert_eq!(redis.run::<u64>(&script, &[key], &[b"2"]).await.unwrap(), 4);
    }
    for key in &keys {
        let length = cmd(&format!("LLEN beside:{{{key}}}"));
        eventually(5 * SECOND, || async { redis.query::<usize>(&length).await.unwrap() == 3 }).await;
    }
}

#[tokio::test]
async fn a_message_that_is_published_anywhere_is_heard() {
    let cluster = RedisCluster::start().await;
    let redis = client(cluster.url()).await;
    let (events, mut received) = mpsc::channel(16);
    let listening = redis.subscribe("obol:test", events, CancellationToken::new());
    let heard = async {
        assert_eq!(received.recv().await, Some(SubscriberEvent::Subscribed));
        let mut expected = BTreeSet::new();
        for (n, node) in cluster.nodes().iter().enumerate() {
            node.cli(&["PUBLISH", "obol:test", &n.to_string()]).await;
            expected.insert(n.to_string());
        }
        let mut got = BTreeSet::new();
        while got != expected {
            match received.recv().await.unwrap() {
                SubscriberEvent::Message(body) => drop(got.insert(String::from_utf8(body.to_vec()).unwrap())),
                other => assert_eq!(other, SubscriberEvent::Alive),
            }
        }
        drop(received);
    };
    tokio::join!(listening, heard);
}

/// While two keys of a script move one by one the server cannot run it and says so.
fn tolerated(error: RedisError) -> Result<(), RedisError> {
    assert_eq!(error.kind(), Kind::Unavailable);
    match &error {
        RedisError::Server { code, .. } if code == "TRYAGAIN" => Ok(()),
        _ => Err(error),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_move_under_load_fail_no_request() {
    let cluster = RedisCluster::start().await;
    // Looked after, and not.
    let kept = Kept::with(patient(cluster.url())).await;
    let lazy = Redis::connect(patient(cluster.url())).await.unwrap();
    let script = Script::new("incr", "redis.call('INCR', KEYS[1]) return redis.call('INCR', KEYS[2])");
    let work = async |redis: &Redis| {
        let mut done = 0_u64;
        for _ in 0..300 {
            done += 1;
            redis.run::<u64>(&script, &["a{x}", "b{x}"], &[]).await.map(drop).or_else(tolerated).unwrap();
            let mut pipe = redis::pipe();
            pipe.cmd("INCR").arg("n{x}").cmd("INCR").arg("other");
            redis.pipeline::<(u64, u64)>(&pipe).await.unwrap();
        }
        done
    };
    let moving = async {
        loop {
            for to in cluster.nodes() {
                if cluster.owner("a{x}").await.port() != to.port() {
                    cluster.move_slot("a{x}", to).await;
                }
            }
        }
    };
    let done = tokio::select! {
        done = async { tokio::join!(work(&kept.redis), work(&lazy)) } => done.0 + done.1,
        () = moving => unreachable!(),
    };
    let count: u64 = lazy.query(&cmd("GET n{x}")).await.unwrap();
    assert_eq!(count, done, "each ran once");
}

#[tokio::test]
async fn a_slot_that_moved_is_asked_for_at_its_new_owner_from_then_on() {
    let cluster = RedisCluster::start().await;
    let redis = client(cluster.url()).await;
    let from = cluster.owner("a").await;
    let to = cluster.nodes().iter().find(|node| node.port() != from.port()).unwrap();
    redis.query::<()>(&cmd("SET a 1")).await.unwrap();
    cluster.move_slot("a", to).await;
    let sent_on = async || {
        let stats: String = from.query(&["INFO", "errorstats"]).await;
        let moved = stats.lines().find_map(|line| line.strip_prefix("errorstat_MOVED:count="));
        moved.map_or(0, |count| count.trim().parse::<u64>().unwrap())
    };
    let before = sent_on().await;
    redis.query::<()>(&cmd("SET a 2")).await.unwrap();
    assert_eq!(sent_on().await, before + 1, "it was not known yet");
    eventually(BACK, || async {
        let before = sent_on().await;
        redis.query::<()>(&cmd("SET a 3")).await.unwrap();
        sent_on().await == before
    })
    .await;
}

#[tokio::test]
async fn a_key_that_is_on_its_way_is_asked_for_where_it_goes() {
    let cluster = RedisCluster::start().await;
    let redis = client(cluster.url()).await;
    let from = cluster.owner("a").await;
    let to = cluster.nodes().iter().find(|node| node.port() != from.port()).unwrap();
    cluster.begin_move("a", to).await;
    redis.query::<()>(&cmd("SET a 1")).await.unwrap();
    assert!(from.keys("*").await.is_empty());
    assert_eq!(to.keys("*").await, ["a"]);
    // Also in the middle of a pipeline, and by a script that the node does not know.
    let mut pipe = redis::pipe();
    pipe.cmd("SET").arg("b").arg("1").ignore().cmd("INCR").arg("a").cmd("GET").arg("b");
    assert_eq!(redis.pipeline::<(u8, u8)>(&pipe).await.unwrap(), (2, 1));
    let script = Script::new("get", "return redis.call('GET', KEYS[1])");
    assert_eq!(redis.run::<u8>(&script, &["a"], &[]).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_away_takes_only_its_own_slots_along() {
    let cluster = RedisCluster::start_with(&["--cluster-require-full-coverage", "no"]).await;
    let kept = Kept::connect(cluster.url()).await;
    let redis = &kept.redis;
    let keys = keys_of_nodes(&cluster).await;
    for silent in [false, true] {
        let node = &cluster.nodes()[1];
        if silent {
            node.pause();
        } else {
            node.kill();
        }
        let theirs = cmd(&format!("SET {} 1", keys[1]));
        eventually(5 * SECOND, || async {
            let began = Instant::now();
            redis.query::<()>(&theirs).await.is_err() && began.elapsed() < SECOND / 2
        })
        .await;
        let mut pipe = redis::pipe();
        for key in &keys {
            pipe.cmd("SET").arg(key).arg("1");
        }
        assert_eq!(redis.pipeline::<Vec<Value>>(&pipe).await.unwrap_err().kind(), Kind::Unavailable);
        let each: Vec<RedisResult<Value>> = redis.pipeline(pipe.ignore_errors()).await.unwrap();
        assert_eq!(each.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
        // A script beside which that node is to be asked does not wait for it.
        let script = Script::new("one", "return 1");
        let began = Instant::now();
        assert_eq!(redis.run_beside::<u8>(&script, &[&keys[0]], &[], vec![theirs.clone()]).await.unwrap(), 1);
        assert!(began.elapsed() < SECOND / 2, "{:?}", began.elapsed());
        // A part of Redis is not all of it.
        redis.ping().await.unwrap_err();

        if silent {
            node.resume();
        } else {
            node.restart().await;
        }
        cluster.wait_until_ok().await;
        eventually(BACK, || redis.query::<()>(&theirs)).await;
        eventually(BACK, || redis.ping()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_takes_over_is_in_use_within_a_second() {
    let cluster = RedisCluster::start_with_replicas().await;
    let kept = Kept::with(patient(cluster.url())).await;
    let keys = keys_of_nodes(&cluster).await;
    let set = cmd(&format!("SET {} 1", keys[0]));
    kept.redis.query::<()>(&set).await.unwrap();
    let old = &cluster.nodes()[0];
    old.wait_until_replicated().await;
    let load = {
        let (redis, get) = (kept.redis.clone(), cmd(&format!("GET {}", keys[0])));
        Load::start(10, move || {
            let (redis, get) = (redis.clone(), get.clone());
            async move { redis.query::<String>(&get).await.map(|value| assert_eq!(value, "1")) }
        })
    };
    old.kill();
    eventually(20 * SECOND, || async {
        let info = cluster.nodes()[3].try_query::<String>(&["CLUSTER", "INFO"]).await;
        let role = cluster.nodes()[3].try_query::<Vec<Value>>(&["ROLE"]).await;
        info.is_ok_and(|info| info.contains("cluster_state:ok")) && format!("{role:?}").contains("master")
    })
    .await;
    let promoted = Instant::now();
    eventually(BACK, || kept.redis.query::<()>(&set)).await;
    let settled = Instant::now();
    // And it stays so, also when the old one is back as a replica.
    old.restart().await;
    for _ in 0..50 {
        kept.redis.query::<()>(&set).await.unwrap();
        tokio::time::sleep(SECOND / 50).await;
    }
    let outcomes = load.end(PATIENCE).await;
    let late = failures(&outcomes, settled.max(promoted), Instant::now());
    assert!(late.is_empty(), "{late:?}");
}

#[tokio::test]
async fn urls_of_the_wrong_kind_are_told_apart() {
    let (cluster, single) = (RedisCluster::start().await, RedisServer::start().await);
    for (url, expected) in [
        (format!("redis://{}", cluster.nodes()[0].addr()), "redis+cluster://"),
        (format!("redis+cluster://{}", single.addr()), "no node of a Cluster"),
        (format!("redis+sentinel://{}/main", single.addr()), "no Sentinel"),
    ] {
        let error = Redis::connect(RedisOptions::new(url.into())).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
