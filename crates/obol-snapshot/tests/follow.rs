//! Invalidations, reconciling and refreshing ahead (DESIGN §7.4, §7.5), on the embedded store and a paused clock.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use obol_model::{Invalidation, KeyHash};
use obol_snapshot::{
    EmbeddedSource, FeedEvent, InvalidationFeed, PairError, PublicationSource, Publications, PublishError,
    Stored,
};
use parking_lot::Mutex;
use tokio::sync::{broadcast, mpsc};
use tokio::time::advance;
use tokio_util::sync::CancellationToken;

use crate::support::{Counting, Scripted, documents, revision, serving, ws};

mod support;

/// A feed that a test speaks through.
struct Spoken(Mutex<Option<mpsc::Receiver<FeedEvent>>>);

impl Spoken {
    fn new() -> (mpsc::Sender<FeedEvent>, Arc<Self>) {
        let (say, heard) = mpsc::channel(4096);
        (say, Arc::new(Self(Mutex::new(Some(heard)))))
    }
}

#[async_trait]
impl InvalidationFeed for Spoken {
    async fn feed(&self, events: mpsc::Sender<FeedEvent>, _: CancellationToken) {
        let mut heard = self.0.lock().take().unwrap();
        while let Some(event) = heard.recv().await {
            events.send(event).await.unwrap();
        }
    }
}

fn workspace(id: &str) -> Invalidation {
    Invalidation::Workspace { workspace_id: ws(id) }
}

fn message(invalidation: &Invalidation) -> FeedEvent {
    FeedEvent::Message(serde_json::to_vec(invalidation).unwrap().into())
}

/// Runs `test` beside `Publications::run`, which has to end by its shutdown.
async fn beside<F: Future>(
    publications: &Arc<Publications<Counting>>,
    feed: Arc<dyn InvalidationFeed>,
    test: F,
) {
    let shutdown = CancellationToken::new();
    let running = Arc::clone(publications).run(feed, shutdown.clone());
    let test = async {
        test.await;
        shutdown.cancel();
    };
    tokio::join!(running, test);
}

/// Up to and including `last`.
async fn heard(listener: &mut broadcast::Receiver<Invalidation>, last: &Invalidation) -> Vec<Invalidation> {
    let mut all = Vec::new();
    loop {
        all.push(listener.recv().await.unwrap());
        if all.last() == Some(last) {
            return all;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_publication_is_visible_once_it_is_announced() {
    let source = Arc::new(EmbeddedSource::new());
    let publications =
        Publications::new(Arc::clone(&source) as Arc<dyn PublicationSource>, Counting::default());
    let mut listener = publications.subscribe();
    beside(&publications, Arc::clone(&source) as Arc<dyn InvalidationFeed>, async {
        heard(&mut listener, &Invalidation::All).await;
        source.publish(&ws("acme"), documents("acme", 1, "test")).unwrap();
        heard(&mut listener, &workspace("acme")).await;
        assert_eq!(publications.revisions(), [(ws("acme"), revision(1))]);

        source.publish(&ws("acme"), documents("acme", 2, "test")).unwrap();
        heard(&mut listener, &workspace("acme")).await;
        assert_eq!(publications.pair(&ws("acme")).await.unwrap().revision(), revision(2));

        assert!(source.unpublish(&ws("acme")));
        heard(&mut listener, &workspace("acme")).await;
        assert_eq!(publications.loaded(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn messages_are_passed_on_also_when_the_reload_fails() {
    let source = Scripted::answering(Stored::Complete(documents("acme", 1, "test")));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap();
    source.now(None);
    let mut listener = publications.subscribe();
    let (say, feed) = Spoken::new();
    beside(&publications, feed, async {
        let policy = Invalidation::Policy { workspace_id: ws("acme") };
        say.send(message(&policy)).await.unwrap();
        assert_eq!(heard(&mut listener, &policy).await, [policy]);
        assert_eq!(source.reads(), 2);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_message_about_a_key_waits_for_no_read() {
    let source = Scripted::held(Stored::Absent);
    let (publications, _) = serving(&source);
    let mut listener = publications.subscribe();
    let (say, feed) = Spoken::new();
    beside(&publications, feed, async {
        let hash: KeyHash = "ab".repeat(32).parse().unwrap();
        let key = Invalidation::key(hash);
        say.send(message(&workspace("acme"))).await.unwrap();
        say.send(message(&key)).await.unwrap();
        assert_eq!(heard(&mut listener, &key).await, [key]);
        source.gate.add_permits(1);
        assert_eq!(heard(&mut listener, &workspace("acme")).await.len(), 1);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn malformed_messages_are_discarded() {
    let source = Scripted::answering(Stored::Absent);
    let (publications, _) = serving(&source);
    let mut listener = publications.subscribe();
    let (say, feed) = Spoken::new();
    beside(&publications, feed, async {
        for bad in [
            "",
            "{",
            "[]",
            r#"{"type":"nonsense"}"#,
            r#"{"type":"workspace"}"#,
            r#"{"type":"key","hash":"x"}"#,
        ] {
            say.send(FeedEvent::Message(Bytes::from(bad))).await.unwrap();
        }
        say.send(message(&workspace("acme"))).await.unwrap();
        assert_eq!(heard(&mut listener, &workspace("acme")).await.len(), 1);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_burst_for_one_workspace_costs_few_reads() {
    let source = Scripted::held(Stored::Complete(documents("acme", 1, "test")));
    let (publications, _) = serving(&source);
    let (say, feed) = Spoken::new();
    let mut listener = publications.subscribe();
    beside(&publications, feed, async {
        for _ in 0..100 {
            say.send(message(&workspace("acme"))).await.unwrap();
        }
        let key = Invalidation::key("ab".repeat(32).parse().unwrap());
        say.send(message(&key)).await.unwrap();
        heard(&mut listener, &key).await;
        source.gate.add_permits(100);
        heard(&mut listener, &workspace("acme")).await;
        assert!(source.reads() <= 2, "{}", source.reads());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn more_messages_than_fit_become_one_for_everything() {
    let source = Scripted::held(Stored::Absent);
    let (publications, _) = serving(&source);
    let (say, feed) = Spoken::new();
    let mut listener = publications.subscribe();
    beside(&publications, feed, async {
        for n in 0..2000 {
            say.send(message(&workspace(&format!("w{n}")))).await.unwrap();
        }
        source.gate.add_permits(10_000);
        heard(&mut listener, &Invalidation::All).await;
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_was_missed_is_repaired_after_a_resubscribe_and_told() {
    let source = Scripted::answering(Stored::Complete(documents("acme", 1, "test")));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap();
    source.now(Stored::Complete(documents("acme", 2, "test")));
    let mut listener = publications.subscribe();
    let (say, feed) = Spoken::new();
    beside(&publications, feed, async {
        say.send(FeedEvent::Subscribed).await.unwrap();
        assert_eq!(heard(&mut listener, &workspace("acme")).await, [Invalidation::All, workspace("acme")]);
        assert_eq!(publications.revisions(), [(ws("acme"), revision(2))]);
    })
    .await;
}

/// A subscription may be back before the connections that read are.
#[tokio::test(start_paused = true)]
async fn what_could_not_be_read_after_a_resubscribe_is_read_again_soon() {
    let source = Scripted::answering(Stored::Complete(documents("acme", 1, "test")));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap();
    let mut listener = publications.subscribe();
    for (number, event) in [(2, FeedEvent::Subscribed), (3, message(&workspace("acme")))] {
        source.now(None);
        let (say, feed) = Spoken::new();
        beside(&publications, feed, async {
            let first = if event == FeedEvent::Subscribed { Invalidation::All } else { workspace("acme") };
            say.send(event).await.unwrap();
            heard(&mut listener, &first).await;
            tokio::time::sleep(Duration::from_secs(4)).await;
            let reads = source.reads();
            assert!(reads < 20, "{reads}");
            source.now(Stored::Complete(documents("acme", number, "test")));
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(publications.revisions(), [(ws("acme"), revision(number))]);
            heard(&mut listener, &workspace("acme")).await;
            let reads = source.reads();
            tokio::time::sleep(Duration::from_secs(3)).await;
            assert_eq!(source.reads(), reads, "once it was read there is nothing to repeat");
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_missed_is_repaired_every_30_seconds_and_told() {
    let source = Scripted::answering(Stored::Complete(documents("acme", 1, "test")));
    let (publications, _) = serving(&source);
    publications.reload(&ws("acme")).await.unwrap();
    source.now(Stored::Complete(documents("acme", 2, "test")));
    let mut listener = publications.subscribe();
    let (_say, feed) = Spoken::new();
    let begun = tokio::time::Instant::now();
    beside(&publications, feed, async {
        assert_eq!(heard(&mut listener, &workspace("acme")).await, [workspace("acme")]);
        assert_eq!(begun.elapsed().as_secs(), 30);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn until_when_nothing_was_missed_is_known() {
    let source = Scripted::answering(Stored::Absent);
    let (publications, _) = serving(&source);
    assert_eq!(publications.reconciled_at(), None);
    let mut listener = publications.subscribe();
    let (say, feed) = Spoken::new();
    let begun = tokio::time::Instant::now();
    let at = || publications.reconciled_at().map(|at| at.duration_since(begun).as_secs());
    beside(&publications, feed, async {
        say.send(FeedEvent::Subscribed).await.unwrap();
        heard(&mut listener, &Invalidation::All).await;
        assert_eq!(at(), Some(0), "those who were told know that they were told everything");
        // Silence says nothing, not even while the store can be asked.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(at(), Some(0));
        for (event, expected) in [(FeedEvent::Alive, 60), (message(&workspace("acme")), 70)] {
            say.send(event).await.unwrap();
            tokio::time::sleep(Duration::from_secs(10)).await;
            assert_eq!(at(), Some(expected));
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_embedded_feed_stands_as_long_as_the_process() {
    let source = Arc::new(EmbeddedSource::new());
    let publications =
        Publications::new(Arc::clone(&source) as Arc<dyn PublicationSource>, Counting::default());
    beside(&publications, source, async {
        tokio::time::sleep(Duration::from_mins(10)).await;
        assert!(publications.reconciled_at().unwrap().elapsed() < Duration::from_secs(10));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_workspace_in_use_never_costs_a_request_a_read() {
    let source = Scripted::answering(Stored::Complete(documents("acme", 1, "test")));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap();
    let (_say, feed) = Spoken::new();
    beside(&publications, feed, async {
        for _ in 0..300 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let before = source.reads();
            publications.pair(&ws("acme")).await.unwrap();
            assert_eq!(source.reads(), before, "a request had to read");
        }
        assert!(source.reads() <= 30, "{}", source.reads());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn preload_loads_what_is_there_and_skips_what_is_broken() {
    let source = Arc::new(EmbeddedSource::new());
    for n in 0..30 {
        let (id, environment) = (format!("w{n}"), if n == 7 { "broken" } else { "test" });
        source.publish(&ws(&id), documents(&id, 1, environment)).unwrap();
    }
    let publications =
        Publications::new(Arc::clone(&source) as Arc<dyn PublicationSource>, Counting::default());
    assert_eq!(publications.preload(1000).await.unwrap(), 29);
    assert_eq!(publications.loaded(), 29);
    assert_eq!(publications.preload(1000).await.unwrap(), 0, "what is loaded is not loaded again");

    let all = publications.reload_all().await.unwrap();
    assert_eq!(all.len(), 30);
    let failed: Vec<_> = all.iter().filter(|(_, result)| result.is_err()).collect();
    assert!(matches!(failed[..], [(id, Err(PairError::CompileFailed { .. }))] if *id == ws("w7")));
}

#[tokio::test]
async fn the_embedded_store_refuses_what_is_not_newer() {
    let source = EmbeddedSource::new();
    let acme = ws("acme");
    assert_eq!(source.publish(&acme, documents("acme", 5, "a")).unwrap(), revision(5));
    assert_eq!(source.publish(&acme, documents("acme", 5, "a")).unwrap(), revision(5), "the same again");
    for (number, environment) in [(4, "a"), (5, "b")] {
        let refused = source.publish(&acme, documents("acme", number, environment)).unwrap_err();
        assert!(matches!(refused, PublishError::NotNewer { .. }), "{refused}");
    }
    let foreign = source.publish(&acme, documents("umbrella", 6, "a")).unwrap_err();
    assert!(matches!(foreign, PublishError::Invalid(_)), "{foreign}");
    assert_eq!(source.read(&acme).await.unwrap(), Stored::Complete(documents("acme", 5, "a")));
}

#[tokio::test(start_paused = true)]
async fn time_alone_does_not_unload_what_nobody_asked_for() {
    let source = Scripted::answering(Stored::Complete(documents("acme", 1, "test")));
    let (publications, _) = serving(&source);
    publications.reload(&ws("acme")).await.unwrap();
    advance(Duration::from_mins(10)).await;
    assert_eq!(publications.loaded(), 1);
}
