//! TLS and users with few rights.
#![allow(clippy::unwrap_used, reason = "test support: what is broken should fail where it broke")]

use obol_redis::{Redis, RedisError, RedisOptions, Script, SubscriberEvent};
use obol_testkit::redis_tls::RedisTls;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

fn options(url: &str, ca: Option<Vec<u8>>) -> RedisOptions {
    RedisOptions { ca, ..RedisOptions::new(url.to_owned().into()) }
}

#[tokio::test]
async fn a_private_authority_is_trusted_when_it_is_named_and_only_then() {
    let server = RedisTls::start().await;
    let ca = std::fs::read(server.ca_file()).unwrap();
    let redis = Redis::connect(options(&server.url(), Some(ca.clone()))).await.unwrap();
    redis.query::<()>(redis::cmd("SET").arg("a").arg("1")).await.unwrap();
    assert_eq!(server.server().query::<u32>(&["GET", "a"]).await, 1);
    let by_address = format!("rediss://127.0.0.1:{}", server.port());
    Redis::connect(options(&by_address, Some(ca.clone()))).await.unwrap();

    let (events, mut received) = mpsc::channel(4);
    let listening = redis.subscribe("obol:test", events, CancellationToken::new());
    let heard = async {
        assert_eq!(received.recv().await, Some(SubscriberEvent::Subscribed));
        redis.query::<u32>(redis::cmd("PUBLISH").arg("obol:test").arg("x")).await.unwrap();
        assert_eq!(received.recv().await, Some(SubscriberEvent::Message("x".into())));
        drop(received);
    };
    tokio::join!(listening, heard);

    let stranger = RedisTls::start().await;
    let strange = std::fs::read(stranger.ca_file()).unwrap();
    for (url, ca) in [
        (server.url(), None),
        (server.url(), Some(strange)),
        (server.url().replace("localhost", "localhost.localdomain"), Some(ca.clone())),
    ] {
        let error = Redis::connect(options(&url, ca)).await.unwrap_err();
        assert!(matches!(error, RedisError::Connect { .. }), "{error:?}");
        assert!(error.to_string().contains("certificate") || url.contains("localdomain"), "{error}");
    }
    let plain = format!("redis://127.0.0.1:{}", server.port());
    let error = Redis::connect(options(&plain, None)).await.unwrap_err();
    assert!(error.to_string().contains("TLS"), "{error}");
    let error = Redis::connect(options(&server.url(), Some(b"no certificate".to_vec()))).await.unwrap_err();
    assert!(matches!(error, RedisError::BadCa { .. }), "{error:?}");
}

#[tokio::test]
async fn a_user_needs_no_right_to_administrate() {
    let server = RedisTls::start().await;
    let plain = server.server();
    plain
        .cli(&["ACL", "SETUSER", "obol", "on", ">p@ss:word/", "~*", "&*", "+@all", "-@admin", "-@dangerous"])
        .await;
    plain.cli(&["ACL", "SETUSER", "default", "off"]).await;
    let ca = std::fs::read(server.ca_file()).unwrap();
    let url = server.url().replace("rediss://", "rediss://obol:p%40ss:word%2F@");
    let redis = Redis::connect(options(&url, Some(ca.clone()))).await.unwrap();
    let script = Script::new("get", "return redis.call('SET', KEYS[1], 'x')");
    redis.run::<()>(&script, &["a"], &[]).await.unwrap();
    assert_eq!(redis.scan("*", 10).await.unwrap(), ["a"]);
    // What cannot be looked at is no reason not to start.
    redis.server_warnings().await.unwrap_err();

    let wrong = url.replace("p%40ss", "wrong");
    let error = Redis::connect(options(&wrong, Some(ca))).await.unwrap_err().to_string();
    assert!(error.contains("refuses the user name or password"), "{error}");
    assert!(!error.contains("wrong:word") && !error.contains("wrong%"), "{error}");
}
