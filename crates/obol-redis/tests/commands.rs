//! Commands, scripts and scans against a real Redis.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "test support: what is broken should fail where it broke"
)]

use std::time::Duration;

use obol_model::Kind;
use obol_redis::{Redis, RedisError, RedisOptions, Script};
use obol_testkit::flights::CountingProxy;
use obol_testkit::redis::RedisServer;

async fn client(url: String) -> Result<Redis, RedisError> {
    Redis::connect(RedisOptions::new(url.into())).await
}

#[tokio::test]
async fn an_unreachable_server_is_named_with_a_remedy_and_without_the_password() {
    let server = RedisServer::start().await;
    let (addr, url) = (server.addr(), format!("redis://:hunter2@{}", server.addr()));
    server.kill();
    let error = client(url).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.contains(&addr.to_string()) && text.contains("nothing listens there"), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
    assert_eq!(error.kind(), Kind::Unavailable);
}

#[tokio::test]
async fn tls_to_a_server_without_it_is_an_error() {
    let server = RedisServer::start().await;
    let error = client(format!("rediss://{}", server.addr())).await.unwrap_err();
    assert!(matches!(error, RedisError::Connect { .. }), "{error:?}");
    assert!(error.to_string().contains(&server.addr().to_string()), "{error}");
}

#[tokio::test]
async fn the_password_is_not_in_debug() {
    let server = RedisServer::start_with(&["--requirepass", "hunter2"]).await;
    let redis = client(format!("redis://:hunter2@{}", server.addr())).await.unwrap();
    redis.ping().await.unwrap();
    assert!(!format!("{redis:?}").contains("hunter2"));
    let error = client(server.url()).await.unwrap_err().to_string();
    assert!(error.contains("refuses the user name or password"), "{error}");
}

#[tokio::test]
async fn the_text_of_a_script_is_sent_once_and_again_when_the_server_forgot_it() {
    let server = RedisServer::start().await;
    let proxy = CountingProxy::start(server.addr()).await;
    let redis = client(proxy.url()).await.unwrap();
    let script = Script::new("add", "return redis.call('INCRBY', KEYS[1], ARGV[1])");
    let add = async |n: &str| redis.run::<i64>(&script, &["n"], &[n.as_bytes()]).await;

    assert_eq!(add("1").await.unwrap(), 1);
    assert_eq!(proxy.commands(), [vec!["EVALSHA"], vec!["EVAL"]]);
    proxy.reset();
    assert_eq!(add("2").await.unwrap(), 3);
    assert_eq!(proxy.commands(), [vec!["EVALSHA"]]);
    server.cli(&["SCRIPT", "FLUSH"]).await;
    assert_eq!(add("3").await.unwrap(), 6);

    let error = add("x").await.unwrap_err();
    assert!(matches!(error, RedisError::Server { .. }), "{error:?}");
    assert_eq!(error.kind(), Kind::Unavailable);
}

#[tokio::test]
async fn commands_beside_a_script_share_its_flight_and_cannot_fail_it() {
    let server = RedisServer::start().await;
    let proxy = CountingProxy::start(server.addr()).await;
    let redis = client(proxy.url()).await.unwrap();
    let script = Script::new("get", "return redis.call('GET', KEYS[1])");
    let set = redis::cmd("SET").arg("a").arg("1").to_owned();
    let wrong = redis::cmd("LPUSH").arg("a").arg("1").to_owned();
    let beside = || vec![set.clone(), wrong.clone()];

    // The commands run once, also when the script is not known yet.
    let first: Option<String> = redis.run_beside(&script, &["a"], &[], beside()).await.unwrap();
    assert_eq!(first.as_deref(), Some("1"));
    proxy.reset();
    let warm: Option<String> = redis.run_beside(&script, &["a"], &[], beside()).await.unwrap();
    assert_eq!(warm.as_deref(), Some("1"));
    assert_eq!(proxy.commands(), [vec!["EVALSHA", "SET", "LPUSH"]]);
}

#[tokio::test]
async fn what_a_url_names_and_the_server_does_not_have_is_said() {
    let server = RedisServer::start().await;
    let addr = server.addr();
    for (url, name, said) in [
        (format!("redis://{addr}/99"), format!("{addr}/99"), "it has no database of that number"),
        // It waits for the rest of a command, or takes the greeting for one.
        (format!("rediss://{addr}"), addr.to_string(), "TLS there"),
    ] {
        let error = client(url).await.unwrap_err();
        let line = obol_model::Causes(&error).to_string();
        assert!(line.starts_with(&format!("cannot connect to Redis at `{name}`: it ")), "{line}");
        assert!(line.contains(said), "{line}");
    }
    server.kill();
    let error = client(server.url()).await.unwrap_err();
    let line = obol_model::Causes(&error).to_string().to_lowercase();
    assert_eq!(line.matches("connection refused").count(), 1, "{line}");
}

#[tokio::test]
async fn server_errors_keep_their_code() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await.unwrap();
    server.cli(&["SET", "text", "x"]).await;
    let code = |error: RedisError| match error {
        RedisError::Server { code, .. } => code,
        other => panic!("{other:?}"),
    };
    let push = redis::cmd("LPUSH").arg("text").arg("1").to_owned();
    assert_eq!(code(redis.query::<u64>(&push).await.unwrap_err()), "WRONGTYPE");
    let mut pipe = redis::pipe();
    pipe.cmd("PING").add_command(push);
    assert_eq!(code(redis.pipeline::<Vec<redis::Value>>(&pipe).await.unwrap_err()), "WRONGTYPE");
    let get = redis::cmd("GET").arg("text").to_owned();
    assert_eq!(code(redis.query::<u64>(&get).await.unwrap_err()), "UNEXPECTED");
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let set = redis::cmd("SET").arg("a").arg("1").to_owned();
    assert_eq!(code(redis.query::<()>(&set).await.unwrap_err()), "OOM");
    redis.ping().await.unwrap();
}

#[tokio::test]
async fn a_scan_finds_each_matching_key_once_up_to_the_limit() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await.unwrap();
    let mut pipe = redis::pipe();
    for n in 0..5000 {
        pipe.set(format!("policy:{{ws{n}}}"), "x").ignore().set(format!("other:{n}"), "x").ignore();
    }
    redis.pipeline::<()>(&pipe).await.unwrap();
    let found = redis.scan("policy:*", usize::MAX).await.unwrap();
    assert_eq!(found.len(), 5000);
    assert!(found.iter().all(|key| key.starts_with("policy:{ws")));
    assert_eq!(redis.scan("policy:*", 1000).await.unwrap().len(), 1000);
    assert!(redis.scan("none:*", 10).await.unwrap().is_empty());
}

#[tokio::test]
async fn an_evicting_server_is_warned_of() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let redis = client(server.url()).await.unwrap();
    let warnings = redis.server_warnings().await.unwrap();
    assert!(warnings.iter().any(|w| w.contains("allkeys-lru")), "{warnings:?}");
    server.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    assert_eq!(redis.server_warnings().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn many_commands_share_one_connection() {
    let server = RedisServer::start().await;
    let redis = client(server.url()).await.unwrap();
    let commands = (0..2000).map(|n| {
        let redis = redis.clone();
        async move { redis.query::<u64>(redis::cmd("SETBIT").arg("bits").arg(n).arg(1)).await.unwrap() }
    });
    futures::future::join_all(commands).await;
    assert_eq!(server.query::<u64>(&["BITCOUNT", "bits"]).await, 2000);
    let clients: String = server.query(&["CLIENT", "LIST"]).await;
    // The client and the test's own connection.
    assert_eq!(clients.lines().count(), 2, "{clients}");
    assert_eq!(RedisOptions::new(server.url().into()).command_timeout, Duration::from_millis(800));
}
