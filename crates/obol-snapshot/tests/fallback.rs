//! What Redis has lost is asked of control (DESIGN §7.3, step 3), on a real Redis.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use obol_model::snapshot::{Documents, PublicationKeys};
use obol_model::{Invalidation, Secret, WorkspaceId};
use obol_redis::{Redis, RedisOptions};
use obol_snapshot::{
    Control, ControlFallback, FeedEvent, InvalidationFeed as _, PairError, PublicationSource as _,
    Publications, RedisSource, SourceError, Stored,
};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::support::{Counting, documents, revision, ws};

mod support;

type Answer = Result<Option<Documents>, &'static str>;

const AWAY: Answer = Err("the lights are out");

/// A control that gives one answer when it is let.
struct Says {
    answer: Mutex<Answer>,
    questions: AtomicUsize,
    gate: Semaphore,
}

impl Says {
    fn with_permits(answer: Answer, permits: usize) -> Arc<Self> {
        let answer = Mutex::new(answer);
        Arc::new(Self { answer, questions: AtomicUsize::new(0), gate: Semaphore::new(permits) })
    }

    fn answering(answer: Answer) -> Arc<Self> {
        Self::with_permits(answer, 1_000_000)
    }

    fn questions(&self) -> usize {
        self.questions.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Control for Says {
    async fn publication(&self, _: &WorkspaceId) -> Result<Option<Documents>, SourceError> {
        self.questions.fetch_add(1, Ordering::SeqCst);
        let answer = self.answer.lock().clone();
        self.gate.acquire().await.unwrap().forget();
        answer.map_err(|why| SourceError::new(std::io::Error::other(why)))
    }
}

struct Replica {
    source: RedisSource,
    fallback: Arc<ControlFallback>,
    publications: Arc<Publications<Counting>>,
}

async fn replica(server: &RedisServer, control: Arc<dyn Control>) -> Replica {
    let redis = Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap();
    let source = RedisSource::new(redis);
    let fallback = Arc::new(ControlFallback::new(source.clone(), control));
    let publications = Publications::new(fallback.clone(), Counting::default());
    Replica { source, fallback, publications }
}

async fn publish(server: &RedisServer, documents: &Documents) {
    let keys = PublicationKeys::of(&ws("acme"));
    redis::cmd("MSET")
        .arg(&[(&keys.workspace, &documents.workspace)])
        .arg(&[(&keys.policy, &documents.policy)])
        .arg(&[(&keys.fingerprint, &documents.fingerprint)])
        .exec_async(&mut server.connection().await)
        .await
        .unwrap();
}

#[tokio::test]
async fn what_redis_has_nothing_of_is_asked_of_control_created_whole_and_announced() {
    let server = RedisServer::start().await;
    let control = Says::answering(Ok(Some(documents("acme", 4, "test"))));
    let replica = replica(&server, control.clone()).await;
    let (events, mut heard) = mpsc::channel(16);
    let shutdown = CancellationToken::new();
    let test = async {
        assert_eq!(heard.recv().await, Some(FeedEvent::Subscribed));
        let acme = ws("acme");
        let pairs = join_all((0..50).map(|_| replica.publications.pair(&acme))).await;
        assert!(pairs.iter().all(|pair| pair.as_ref().unwrap().revision() == revision(4)));
        assert_eq!(control.questions(), 1, "fifty readers ask once");
        let Some(FeedEvent::Message(bytes)) = heard.recv().await else { panic!("no message") };
        let message: Invalidation = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(message, Invalidation::Workspace { workspace_id: ws("acme") });
        shutdown.cancel();
    };
    tokio::join!(replica.source.feed(events, shutdown.clone()), test);
    assert_eq!(
        replica.source.read(&ws("acme")).await.unwrap(),
        Stored::Complete(documents("acme", 4, "test"))
    );
}

/// A control whose answer comes late: before it is there, somebody publishes.
struct Overtaken(Arc<RedisServer>);

#[async_trait]
impl Control for Overtaken {
    async fn publication(&self, _: &WorkspaceId) -> Result<Option<Documents>, SourceError> {
        publish(&self.0, &documents("acme", 7, "published")).await;
        Ok(Some(documents("acme", 1, "late")))
    }
}

#[tokio::test]
async fn a_late_answer_never_overwrites_and_the_winner_is_read_back() {
    let server = Arc::new(RedisServer::start().await);
    let replica = replica(&server, Arc::new(Overtaken(server.clone()))).await;
    let acme = ws("acme");
    assert_eq!(replica.publications.pair(&acme).await.unwrap().revision(), revision(7));
    let stored = replica.source.read(&acme).await.unwrap();
    assert_eq!(stored, Stored::Complete(documents("acme", 7, "published")));
    assert!(!replica.source.create(&acme, &documents("acme", 9, "newer")).await.unwrap());
    assert_eq!(replica.source.read(&acme).await.unwrap(), stored, "whatever is there wins");
}

#[tokio::test]
async fn part_of_a_publication_is_an_error_about_which_nobody_is_asked() {
    let server = RedisServer::start().await;
    let control = Says::answering(Ok(Some(documents("acme", 4, "test"))));
    let replica = replica(&server, control.clone()).await;
    let keys = PublicationKeys::of(&ws("acme"));
    let all = [&keys.workspace, &keys.policy, &keys.fingerprint];
    for missing in all {
        publish(&server, &documents("acme", 1, "test")).await;
        server.cli(&["DEL", missing]).await;
        assert!(matches!(replica.publications.pair(&ws("acme")).await, Err(PairError::Partial)), "{missing}");
    }
    for only in all {
        server.cli(&["DEL", &keys.workspace, &keys.policy, &keys.fingerprint]).await;
        server.cli(&["SET", only, "x"]).await;
        assert!(matches!(replica.publications.pair(&ws("acme")).await, Err(PairError::Partial)), "{only}");
        assert!(!replica.source.create(&ws("acme"), &documents("acme", 4, "test")).await.unwrap(), "{only}");
        assert_eq!(server.keys("*").await, [only.as_str()]);
    }
    assert_eq!(control.questions(), 0);
}

#[tokio::test]
async fn that_control_has_no_such_workspace_is_remembered_for_a_while() {
    let server = RedisServer::start().await;
    let control = Says::answering(Ok(None));
    let replica = replica(&server, control.clone()).await;
    for _ in 0..20 {
        assert!(matches!(replica.publications.pair(&ws("acme")).await, Err(PairError::NotPublished)));
    }
    assert_eq!(control.questions(), 1);
    // What is published meanwhile is there at once, and what was remembered is forgotten with it.
    publish(&server, &documents("acme", 1, "test")).await;
    assert_eq!(replica.publications.pair(&ws("acme")).await.unwrap().revision(), revision(1));
    *control.answer.lock() = Ok(Some(documents("acme", 2, "test")));
    server.cli(&["FLUSHALL"]).await;
    assert_eq!(replica.publications.reload(&ws("acme")).await.unwrap(), Some(revision(2)));
    assert_eq!(control.questions(), 2);
}

#[tokio::test]
async fn a_control_that_cannot_be_asked_is_not_absent_and_is_left_alone_for_a_second() {
    let server = RedisServer::start().await;
    let control = Says::answering(AWAY);
    let replica = replica(&server, control.clone()).await;
    for _ in 0..100 {
        let error = replica.publications.pair(&ws("acme")).await.unwrap_err();
        assert!(matches!(error, PairError::Unavailable(_)), "{error:?}");
    }
    // A hundred reads of Redis may take longer than a second on a busy machine.
    assert!(control.questions() < 50, "{}", control.questions());
    *control.answer.lock() = Ok(Some(documents("acme", 1, "test")));
    eventually(Duration::from_secs(10), async || replica.publications.pair(&ws("acme")).await.is_ok()).await;
}

#[tokio::test]
async fn a_control_that_is_silent_is_given_up() {
    let server = RedisServer::start().await;
    let control = Says::with_permits(Ok(None), 0);
    let replica = replica(&server, control.clone()).await;
    let error = replica.publications.pair(&ws("acme")).await.unwrap_err();
    assert!(matches!(error, PairError::Unavailable(_)), "{error:?}");
}

#[tokio::test]
async fn an_answer_that_is_no_publication_of_the_workspace_is_not_written() {
    let server = RedisServer::start().await;
    let (good, other) = (documents("acme", 1, "test"), documents("acme", 2, "test"));
    for (what, answer) in [
        ("of another workspace", documents("umbrella", 1, "test")),
        ("torn", Documents { policy: other.policy, ..good.clone() }),
        ("garbage", Documents { fingerprint: b"<html>".to_vec(), ..good }),
    ] {
        let control = Says::answering(Ok(Some(answer)));
        let replica = replica(&server, control.clone()).await;
        let error = replica.publications.pair(&ws("acme")).await.unwrap_err();
        assert!(matches!(error, PairError::Unavailable(_)), "{what}: {error:?}");
        assert_eq!(server.keys("*").await, Vec::<String>::new(), "{what}");
    }
}

#[tokio::test]
async fn a_publication_in_memory_outlives_an_emptied_redis_only_as_long_as_nobody_says_that_it_is_gone() {
    let server = RedisServer::start().await;
    let control = Says::answering(AWAY);
    let replica = replica(&server, control.clone()).await;
    publish(&server, &documents("acme", 3, "test")).await;
    replica.publications.pair(&ws("acme")).await.unwrap();
    server.cli(&["FLUSHALL"]).await;
    assert!(matches!(replica.publications.reload(&ws("acme")).await, Err(PairError::Unavailable(_))));
    assert_eq!(replica.publications.pair(&ws("acme")).await.unwrap().revision(), revision(3));
    // An older one that control gives is written, as control says, and not served here.
    *control.answer.lock() = Ok(Some(documents("acme", 2, "test")));
    let older =
        eventually(Duration::from_secs(10), async || match replica.publications.reload(&ws("acme")).await {
            Err(PairError::Unavailable(why)) => Err(why),
            other => Ok(other),
        })
        .await;
    assert!(matches!(older, Err(PairError::Older { .. })), "{older:?}");

    server.cli(&["FLUSHALL"]).await;
    *control.answer.lock() = Ok(None);
    assert_eq!(replica.publications.reload(&ws("acme")).await.unwrap(), None);
    assert_eq!(replica.publications.loaded(), 0);
    assert!(replica.fallback.list(10).await.unwrap().is_empty());
}
