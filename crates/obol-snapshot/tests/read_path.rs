//! The read path of DESIGN §7.3, on a paused clock.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::missing_docs_in_private_items,
    reason = "tests"
)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use futures::{FutureExt as _, poll};
use obol_model::Kind;
use obol_model::snapshot::{
    Documents, InvalidPublication, LARGEST_DOCUMENT, PolicySnapshot, WorkspaceSnapshot,
};
use obol_snapshot::{PairError, Stored};
use tokio::time::advance;

use crate::support::{Scripted, documents, revision, serving, ws};

mod support;

type Is = fn(&PairError) -> bool;

/// A publication that is coherent but for what is done to its documents.
fn rewritten(number: u64, change: impl FnOnce(&mut WorkspaceSnapshot, &mut PolicySnapshot)) -> Stored {
    let (mut workspace, mut policy) = documents("acme", number, "test").decode(&ws("acme")).unwrap();
    change(&mut workspace, &mut policy);
    Stored::Complete(Documents::encode(&workspace, &policy).unwrap())
}

fn complete(number: u64, environment: &str) -> Stored {
    Stored::Complete(documents("acme", number, environment))
}

#[tokio::test(start_paused = true)]
async fn a_pair_is_served_from_memory_for_30_seconds_and_then_read_again() {
    let source = Scripted::answering(complete(1, "test"));
    let (publications, compile) = serving(&source);
    let first = publications.pair(&ws("acme")).await.unwrap();
    assert_eq!((first.revision(), first.compiled.as_str()), (revision(1), "// test"));
    advance(Duration::from_millis(29_999)).await;
    publications.pair(&ws("acme")).await.unwrap();
    assert_eq!(source.reads(), 1);

    advance(Duration::from_millis(1)).await;
    let again = publications.pair(&ws("acme")).await.unwrap();
    assert_eq!(source.reads(), 2);
    assert!(Arc::ptr_eq(&first, &again), "unchanged documents are not compiled again");
    assert_eq!(compile.0.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_read_extends_nothing_and_reads_fail_closed_after_30_seconds() {
    let source = Scripted::answering(complete(1, "test"));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap();
    source.now(None);

    advance(Duration::from_secs(29)).await;
    assert!(matches!(publications.reload(&ws("acme")).await, Err(PairError::Unavailable(_))));
    assert!(publications.pair(&ws("acme")).await.is_ok(), "still within its 30 seconds");
    assert_eq!(publications.loaded(), 1);

    advance(Duration::from_secs(1)).await;
    let error = publications.pair(&ws("acme")).await.unwrap_err();
    assert!(matches!(error, PairError::Unavailable(_)));
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_eq!((publications.loaded(), publications.revisions()), (0, vec![]));

    source.now(complete(1, "test"));
    assert!(publications.pair(&ws("acme")).await.is_ok());
    assert_eq!(publications.revisions(), [(ws("acme"), revision(1))]);
}

#[tokio::test(start_paused = true)]
async fn the_30_seconds_count_from_the_question_not_from_the_answer() {
    let source = Scripted::held(complete(1, "test"));
    let (publications, _) = serving(&source);
    let acme = ws("acme");
    let mut read = Box::pin(publications.pair(&acme));
    assert!(poll!(&mut read).is_pending());
    advance(Duration::from_secs(20)).await;
    source.gate.add_permits(1);
    read.await.unwrap();

    advance(Duration::from_secs(10)).await;
    source.now(None);
    source.gate.add_permits(1);
    assert!(publications.pair(&ws("acme")).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn every_incoherence_is_refused_and_leaves_what_was_served_before() {
    let good = documents("acme", 2, "test");
    let other = documents("acme", 3, "next");
    let table: Vec<(&str, Stored, Is)> = vec![
        ("partial", Stored::Partial, |e| matches!(e, PairError::Partial)),
        ("torn", Stored::Complete(Documents { policy: other.policy.clone(), ..good.clone() }), |e| {
            matches!(e, PairError::Invalid(InvalidPublication::HashMismatch { .. }))
        }),
        ("truncated", Stored::Complete(Documents { fingerprint: b"{".to_vec(), ..good.clone() }), |e| {
            matches!(e, PairError::Invalid(InvalidPublication::Malformed { .. }))
        }),
        (
            "of the future",
            Stored::Complete(Documents { fingerprint: br#"{"schema_version":99}"#.to_vec(), ..good.clone() }),
            |e| matches!(e, PairError::Invalid(InvalidPublication::UnknownSchema { found: 99, .. })),
        ),
        ("a workspace snapshot of the future", rewritten(3, |w, _| w.schema_version = 99), |e| {
            matches!(e, PairError::Invalid(InvalidPublication::UnknownSchema { found: 99, .. }))
        }),
        ("a policy snapshot of no version", rewritten(3, |_, p| p.schema_version = 0), |e| {
            matches!(e, PairError::Invalid(InvalidPublication::UnknownSchema { found: 0, .. }))
        }),
        (
            "too large",
            Stored::Complete(Documents { policy: vec![b' '; LARGEST_DOCUMENT + 1], ..good.clone() }),
            |e| matches!(e, PairError::Invalid(InvalidPublication::TooLarge { .. })),
        ),
        ("of another workspace", Stored::Complete(documents("umbrella", 3, "test")), |e| {
            matches!(e, PairError::Invalid(InvalidPublication::ForeignWorkspace { .. }))
        }),
        ("not compiling", complete(3, "broken"), |e| matches!(e, PairError::CompileFailed { .. })),
        (
            "older",
            complete(1, "old"),
            |e| matches!(e, PairError::Older { served, found } if *served == revision(2) && *found == revision(1)),
        ),
        (
            "of the same revision",
            complete(2, "swapped"),
            |e| matches!(e, PairError::Conflicting { revision: r } if *r == revision(2)),
        ),
    ];
    for (what, stored, expected) in table {
        let source = Scripted::answering(Stored::Complete(good.clone()));
        let (publications, _) = serving(&source);
        publications.pair(&ws("acme")).await.unwrap();
        source.now(stored);
        let error = publications.reload(&ws("acme")).await.unwrap_err();
        assert!(expected(&error), "{what}: {error:?}");
        assert_eq!(error.kind(), Kind::Unavailable, "{what}");
        assert_eq!(publications.pair(&ws("acme")).await.unwrap().revision(), revision(2), "{what}");
        advance(Duration::from_secs(30)).await;
        assert!(publications.pair(&ws("acme")).await.is_err(), "{what}");

        source.now(complete(4, "good again"));
        assert_eq!(publications.pair(&ws("acme")).await.unwrap().revision(), revision(4), "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_served_and_what_was_rejected_can_be_looked_at() {
    let source = Scripted::answering(complete(2, "test"));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap();
    advance(Duration::from_secs(10)).await;
    publications.reload(&ws("acme")).await.unwrap();
    advance(Duration::from_secs(1)).await;
    source.now(complete(1, "old"));
    for _ in 0..2 {
        publications.reload(&ws("acme")).await.unwrap_err();
        advance(Duration::from_secs(1)).await;
    }
    let [status] = publications.statuses().try_into().unwrap();
    let (active, rejected) = (status.active.unwrap(), status.rejected.unwrap());
    assert_eq!((status.workspace, active.revision), (ws("acme"), revision(2)));
    let (installed, validated) = (active.installed_at.elapsed(), active.validated_at.elapsed());
    assert_eq!((installed.as_secs(), validated.as_secs()), (13, 3));
    assert_eq!((rejected.revision, rejected.at.elapsed().as_secs()), (Some(revision(1)), 2));
    assert!(matches!(rejected.why, PairError::Older { .. }), "{rejected:?}");

    // Could not ask is no rejection, and neither takes one back.
    source.now(None);
    publications.reload(&ws("acme")).await.unwrap_err();
    assert!(matches!(publications.statuses()[0].rejected.as_ref().unwrap().why, PairError::Older { .. }));
    source.now(complete(2, "test"));
    publications.reload(&ws("acme")).await.unwrap();
    assert!(publications.statuses()[0].rejected.is_none());
    source.now(complete(3, "broken"));
    publications.reload(&ws("umbrella")).await.unwrap_err();
    let never_served = publications.statuses().pop().unwrap();
    assert!(never_served.active.is_none() && never_served.rejected.is_some(), "{never_served:?}");
}

#[tokio::test(start_paused = true)]
async fn a_publication_that_was_torn_is_taken_once_it_is_whole() {
    let (good, next) = (documents("acme", 2, "test"), documents("acme", 3, "next"));
    let torn = Documents { policy: good.policy.clone(), ..next.clone() };
    let source = Scripted::answering(Stored::Complete(torn));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap_err();
    source.now(Stored::Complete(next));
    assert_eq!(publications.pair(&ws("acme")).await.unwrap().revision(), revision(3));
}

#[tokio::test(start_paused = true)]
async fn a_raised_epoch_forces_a_lower_number() {
    let source = Scripted::answering(complete(9, "test"));
    let (publications, _) = serving(&source);
    publications.pair(&ws("acme")).await.unwrap();
    let (mut workspace, mut policy) = documents("acme", 1, "forced").decode(&ws("acme")).unwrap();
    workspace.revision.epoch = 2;
    policy.revision.epoch = 2;
    source.now(Stored::Complete(Documents::encode(&workspace, &policy).unwrap()));
    assert_eq!(publications.reload(&ws("acme")).await.unwrap(), Some(workspace.revision));
}

#[tokio::test(start_paused = true)]
async fn an_absent_workspace_is_not_published_and_dropped_from_memory() {
    let source = Scripted::answering(Stored::Absent);
    let (publications, _) = serving(&source);
    let error = publications.pair(&ws("acme")).await.unwrap_err();
    assert!(matches!(error, PairError::NotPublished));
    assert_eq!(error.kind(), Kind::NotFound);

    source.now(complete(5, "test"));
    publications.pair(&ws("acme")).await.unwrap();
    source.now(Stored::Absent);
    assert_eq!(publications.reload(&ws("acme")).await.unwrap(), None);
    assert_eq!(publications.loaded(), 0);
    assert!(matches!(publications.pair(&ws("acme")).await, Err(PairError::NotPublished)));
}

#[tokio::test(start_paused = true)]
async fn what_does_not_compile_is_compiled_once() {
    let source = Scripted::answering(complete(1, "broken"));
    let (publications, compile) = serving(&source);
    for _ in 0..10 {
        let error = publications.pair(&ws("acme")).await.unwrap_err();
        assert!(matches!(error, PairError::CompileFailed { reason, .. } if reason == "no such tool"));
    }
    assert_eq!((source.reads(), compile.0.load(Ordering::SeqCst)), (10, 1));
}

#[tokio::test(start_paused = true)]
async fn concurrent_readers_share_one_read() {
    let source = Scripted::held(complete(1, "test"));
    let (publications, compile) = serving(&source);
    let acme = ws("acme");
    let mut all = Box::pin(join_all((0..100).map(|_| publications.pair(&acme))));
    assert!(poll!(&mut all).is_pending());
    source.gate.add_permits(1);
    let pairs = all.await;
    assert!(pairs.iter().all(|pair| Arc::ptr_eq(pair.as_ref().unwrap(), pairs[0].as_ref().unwrap())));
    assert_eq!((source.reads(), compile.0.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_shared_by_those_who_wait_for_it() {
    let source = Scripted::held(Stored::Absent);
    source.now(None);
    let (publications, _) = serving(&source);
    let acme = ws("acme");
    let mut all = Box::pin(join_all((0..100).map(|_| publications.pair(&acme))));
    assert!(poll!(&mut all).is_pending());
    source.gate.add_permits(1);
    assert!(all.await.iter().all(|pair| matches!(pair, Err(PairError::Unavailable(_)))));
    assert_eq!(source.reads(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_reader_does_not_fail_the_others() {
    let source = Scripted::held(complete(1, "test"));
    let (publications, _) = serving(&source);
    let acme = ws("acme");
    let mut cancelled = Box::pin(publications.pair(&acme));
    let mut others = Box::pin(join_all((0..10).map(|_| publications.pair(&acme))));
    assert!(poll!(&mut cancelled).is_pending());
    assert!(poll!(&mut others).is_pending());
    drop(cancelled);
    source.gate.add_permits(1);
    assert!(others.await.iter().all(Result::is_ok));
    assert_eq!(source.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_reload_does_not_settle_for_a_read_that_began_before_it() {
    let source = Scripted::held(complete(1, "test"));
    let (publications, _) = serving(&source);
    let acme = ws("acme");
    let mut before = Box::pin(publications.pair(&acme));
    assert!(poll!(&mut before).is_pending());
    source.now(complete(2, "test"));
    let mut reload = Box::pin(publications.reload(&acme));
    assert!(poll!(&mut reload).is_pending());
    source.gate.add_permits(2);
    assert_eq!(before.await.unwrap().revision(), revision(1));
    assert_eq!(reload.await.unwrap(), Some(revision(2)));
    assert_eq!(publications.pair(&acme).now_or_never().unwrap().unwrap().revision(), revision(2));
}
