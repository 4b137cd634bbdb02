//! Bindings of stored answers, on both stores.
#![allow(clippy::unwrap_used, reason = "the bodies of the tests are functions that two tests share")]

use std::sync::Arc;

use obol_model::{Kind, SystemClock, WorkspaceId};
use obol_redis::{Redis, RedisOptions};
use obol_session::{Binding, BindingError, Bindings, EmbeddedBindings, RedisBindings};
use obol_testkit::redis::RedisServer;

fn workspace(name: &str) -> WorkspaceId {
    name.parse().unwrap()
}

fn binding(tokens: u64) -> Binding {
    Binding::new("key:k1".into(), "openai".parse().unwrap(), "gpt-x".into(), tokens)
}

/// What both stores do.
async fn contract(bindings: &dyn Bindings) {
    let (acme, other) = (workspace("acme"), workspace("other"));
    assert_eq!(bindings.find(&acme, "resp_1").await.unwrap(), None);
    bindings.bind(&acme, "resp_1", &binding(7)).await.unwrap();
    assert_eq!(bindings.find(&acme, "resp_1").await.unwrap(), Some(binding(7)));
    assert_eq!(bindings.find(&other, "resp_1").await.unwrap(), None);
    bindings.bind(&acme, "resp_1", &binding(9)).await.unwrap();
    assert_eq!(bindings.find(&acme, "resp_1").await.unwrap(), Some(binding(9)));
    bindings.forget(&acme, "resp_1").await.unwrap();
    bindings.forget(&acme, "resp_1").await.unwrap();
    assert_eq!(bindings.find(&acme, "resp_1").await.unwrap(), None);
    // What is no id is nobody's, and no key.
    for odd in ["", "a b", "x}:{other", &"x".repeat(300), "é", "../x"] {
        bindings.bind(&acme, odd, &binding(1)).await.unwrap();
        assert_eq!(bindings.find(&acme, odd).await.unwrap(), None, "{odd}");
        bindings.forget(&acme, odd).await.unwrap();
    }
}

#[tokio::test]
async fn embedded() {
    contract(&EmbeddedBindings::new(Arc::new(SystemClock))).await;
}

#[tokio::test]
async fn on_redis() {
    let server = RedisServer::start().await;
    let redis = Redis::connect(RedisOptions::new(server.url().into())).await.unwrap();
    contract(&RedisBindings::new(redis.clone())).await;

    let bindings = RedisBindings::new(redis.clone());
    bindings.bind(&workspace("acme"), "resp_1", &binding(7)).await.unwrap();
    let mut ttl = redis::cmd("TTL");
    ttl.arg("bind:{acme}:response:resp_1");
    let left: i64 = redis.query(&ttl).await.unwrap();
    assert!((30 * 86_400..=31 * 86_400).contains(&left), "{left}");
    // A later release's, and one that is none.
    for text in
        [r#"{"schema_version":2,"principal":"key:k1","provider":"p","upstream_model":"m","tokens":1}"#, "x"]
    {
        let mut set = redis::cmd("SET");
        set.arg("bind:{acme}:response:resp_2").arg(text);
        redis.query::<()>(&set).await.unwrap();
        let found = bindings.find(&workspace("acme"), "resp_2").await;
        assert!(matches!(found, Err(BindingError::Corrupt(_))), "{found:?}");
    }
    drop(server);
    let gone = bindings.find(&workspace("acme"), "resp_1").await;
    assert!(matches!(gone, Err(BindingError::Unavailable(e)) if e.kind() == Kind::Unavailable));
}
