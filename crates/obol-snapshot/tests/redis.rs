//! The same on a real Redis, and the contract that both stores keep.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

use std::sync::Arc;
use std::time::Duration;

use obol_model::snapshot::{Documents, InvalidPublication, LARGEST_DOCUMENT, PublicationKeys};
use obol_model::{Invalidation, Secret};
use obol_redis::{Redis, RedisOptions};
use obol_snapshot::{
    EmbeddedSource, FeedEvent, InvalidationFeed, PairError, PublicationSource, Publications, RedisSource,
    Stored,
};
use obol_testkit::eventually;
use obol_testkit::flights::CountingProxy;
use obol_testkit::redis::RedisServer;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::support::{Counting, documents, revision, ws};

mod support;

const SOON: Duration = Duration::from_secs(10);

async fn source(server: &RedisServer) -> Arc<RedisSource> {
    let redis = Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap();
    Arc::new(RedisSource::new(redis))
}

/// What control does.
async fn publish(server: &RedisServer, id: &str, documents: &Documents) {
    let keys = PublicationKeys::of(&ws(id));
    let mut connection = server.connection().await;
    redis::cmd("MSET")
        .arg(&[(&keys.workspace, &documents.workspace)])
        .arg(&[(&keys.policy, &documents.policy)])
        .arg(&[(&keys.fingerprint, &documents.fingerprint)])
        .exec_async(&mut connection)
        .await
        .unwrap();
}

async fn announce(server: &RedisServer, message: &str) {
    server.cli(&["PUBLISH", Invalidation::CHANNEL, message]).await;
}

/// What every store does, whatever the way to publish into it.
async fn contract<S, F>(source: &S, publish: impl Fn(&'static str, Documents) -> F)
where
    S: PublicationSource + InvalidationFeed,
    F: Future<Output = ()>,
{
    assert_eq!(source.read(&ws("acme")).await.unwrap(), Stored::Absent);
    assert_eq!(source.list(10).await.unwrap(), []);

    publish("acme", documents("acme", 1, "test")).await;
    publish("umbrella", documents("umbrella", 1, "test")).await;
    assert_eq!(source.read(&ws("acme")).await.unwrap(), Stored::Complete(documents("acme", 1, "test")));
    let mut listed = source.list(10).await.unwrap();
    listed.sort();
    assert_eq!(listed, [ws("acme"), ws("umbrella")]);
    assert_eq!(source.list(1).await.unwrap().len(), 1);

    let shutdown = CancellationToken::new();
    let (events, mut heard) = mpsc::channel(16);
    let test = async {
        assert_eq!(heard.recv().await, Some(FeedEvent::Subscribed));
        publish("acme", documents("acme", 2, "test")).await;
        let Some(FeedEvent::Message(bytes)) = heard.recv().await else { panic!("no message") };
        let message: Invalidation = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(message, Invalidation::Workspace { workspace_id: ws("acme") });
        shutdown.cancel();
        assert_eq!(heard.recv().await, None);
    };
    tokio::join!(source.feed(events, shutdown.clone()), test);
}

#[tokio::test]
async fn the_embedded_store_keeps_the_contract() {
    let source = EmbeddedSource::new();
    contract(&source, async |id, documents| {
        source.publish(&ws(id), documents).unwrap();
    })
    .await;
}

#[tokio::test]
async fn redis_keeps_the_contract() {
    let server = RedisServer::start().await;
    let source = source(&server).await;
    contract(&*source, async |id, documents| {
        publish(&server, id, &documents).await;
        announce(&server, &format!(r#"{{"type":"workspace","workspace_id":"{id}"}}"#)).await;
    })
    .await;
}

#[tokio::test]
async fn one_or_two_of_the_three_keys_are_an_error_and_no_fallback() {
    let server = RedisServer::start().await;
    let keys = PublicationKeys::of(&ws("acme"));
    let publications = Publications::new(source(&server).await, Counting::default());
    for missing in [&keys.workspace, &keys.policy, &keys.fingerprint] {
        publish(&server, "acme", &documents("acme", 1, "test")).await;
        server.cli(&["DEL", missing]).await;
        assert!(matches!(publications.pair(&ws("acme")).await, Err(PairError::Partial)), "{missing}");
    }
}

/// The value is made in the server, and must not leave it.
async fn make_large(server: &RedisServer, key: &str, bytes: usize) {
    server.cli(&["DEL", key]).await;
    server.cli(&["SETRANGE", key, &(bytes - 1).to_string(), "x"]).await;
}

#[tokio::test]
async fn a_document_that_is_too_large_harms_its_workspace_alone_and_is_not_even_read() {
    let server = RedisServer::start().await;
    let proxy = CountingProxy::start(server.addr()).await;
    let redis = Redis::connect(RedisOptions::new(Secret::new(proxy.url()))).await.unwrap();
    let publications = Publications::new(Arc::new(RedisSource::new(redis)), Counting::default());
    for id in ["acme", "beta"] {
        publish(&server, id, &documents(id, 1, "test")).await;
    }
    let keys = PublicationKeys::of(&ws("beta"));
    publications.pair(&ws("acme")).await.unwrap();
    for (key, name) in
        [&keys.workspace, &keys.policy, &keys.fingerprint].into_iter().zip(PublicationKeys::DOCUMENTS)
    {
        publish(&server, "beta", &documents("beta", 1, "test")).await;
        // As large as takes longer than the deadline to be read, and as small as is too large.
        let bytes = if *key == keys.policy { 500 << 20 } else { LARGEST_DOCUMENT + 1 };
        make_large(&server, key, bytes).await;
        let refused = publications.pair(&ws("beta")).await.err();
        let expected = InvalidPublication::TooLarge { document: name };
        assert!(matches!(&refused, Some(PairError::Invalid(why)) if *why == expected), "{refused:?}");
        publications.reload(&ws("acme")).await.unwrap();
    }
    publish(&server, "beta", &documents("beta", 1, "test")).await;
    proxy.reset();
    publications.pair(&ws("beta")).await.unwrap();
    assert_eq!(proxy.commands(), [["EVALSHA"]], "one flight");
}

#[tokio::test]
async fn policy_keys_that_name_no_workspace_are_skipped() {
    let server = RedisServer::start().await;
    server.cli(&["MSET", "policy:{NOT A WORKSPACE}", "x", "policy:acme", "x"]).await;
    publish(&server, "acme", &documents("acme", 1, "test")).await;
    let publications = Publications::new(source(&server).await, Counting::default());
    assert_eq!(publications.preload(1000).await.unwrap(), 1);
}

#[tokio::test]
async fn redis_away_is_not_absent() {
    let server = RedisServer::start().await;
    let publications = Publications::new(source(&server).await, Counting::default());
    server.kill();
    assert!(matches!(publications.pair(&ws("acme")).await, Err(PairError::Unavailable(_))));
    assert!(publications.preload(1000).await.is_err());
    assert!(publications.reload_all().await.is_err());
    server.restart().await;
    eventually(SOON, async || matches!(publications.pair(&ws("acme")).await, Err(PairError::NotPublished)))
        .await;
}

#[tokio::test]
async fn a_message_and_a_missed_message_both_reach_the_replica() {
    let server = RedisServer::start().await;
    let source = source(&server).await;
    let publications =
        Publications::new(Arc::clone(&source) as Arc<dyn PublicationSource>, Counting::default());
    let mut listener = publications.subscribe();
    let shutdown = CancellationToken::new();
    let running = Arc::clone(&publications).run(source, shutdown.clone());
    let serves = async |number: u64| {
        eventually(SOON, || {
            let revisions = publications.revisions();
            let wanted = [(ws("acme"), revision(number))];
            std::future::ready(if revisions == wanted { Ok(()) } else { Err(format!("{revisions:?}")) })
        })
        .await;
    };
    let test = async {
        assert_eq!(listener.recv().await.unwrap(), Invalidation::All, "told once subscribed");
        publish(&server, "acme", &documents("acme", 1, "test")).await;
        announce(&server, r#"{"type":"policy","workspace_id":"acme"}"#).await;
        serves(1).await;
        let policy = Invalidation::Policy { workspace_id: ws("acme") };
        assert_eq!(listener.recv().await.unwrap(), policy);

        // The subscriber's connection breaks and the message is lost with it.
        server.restart().await;
        publish(&server, "acme", &documents("acme", 2, "test")).await;
        serves(2).await;
        assert_eq!(listener.recv().await.unwrap(), Invalidation::All, "told once subscribed again");

        // A server that lost its data and got an older publication back.
        publish(&server, "acme", &documents("acme", 1, "test")).await;
        announce(&server, r#"{"type":"workspace","workspace_id":"acme"}"#).await;
        loop {
            let news = listener.recv().await.unwrap();
            if news == (Invalidation::Workspace { workspace_id: ws("acme") })
                && matches!(publications.reload(&ws("acme")).await, Err(PairError::Older { .. }))
            {
                break;
            }
        }
        serves(2).await;
        shutdown.cancel();
    };
    tokio::time::timeout(SOON * 3, async { tokio::join!(running, test) }).await.unwrap();
}
