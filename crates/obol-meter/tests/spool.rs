//! What Redis did not take by the end of a drain waits in a directory, and is closed once by the next process.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

mod support;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use obol_meter::{FlushReport, MeterOptions, RedisLedger, Spool};
use obol_model::{Clock, EventPart, ManualClock, Outcome, ReplicaId, Secret, SystemClock};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use serde_json::Value;
use support::counted::Counted;
use support::ledgers::{Fixture, Process, terms, total};
use support::tool;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(10);
const COST: u64 = 40;
const WORST: u64 = 300;

/// A Redis that knows after a restart what it knew before.
async fn durable() -> Fixture {
    let server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    server.cli(&["HSET", "ledger:{acme}:meta", "epoch", "1"]).await;
    let options = RedisOptions {
        command_timeout: Duration::from_millis(200),
        ..RedisOptions::new(Secret::new(server.url()))
    };
    let ledger = Arc::new(RedisLedger::new(Redis::connect(options).await.unwrap()));
    Fixture { server: Some(server), ledger, events: None }
}

fn spool(dir: &TempDir, clock: Arc<dyn Clock>) -> Spool {
    Spool::open(dir.path(), ReplicaId::generate(), clock).unwrap()
}

/// Files of the spool, apart from its lock.
fn files(dir: &TempDir) -> Vec<PathBuf> {
    let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = names.filter(|path| !path.ends_with(".lock")).collect();
    files.sort();
    files
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// So many calls are admitted and end while Redis is away, and one that was never made is given up; the drain is over at
/// once, or when a flight has failed.
async fn leave(
    fixture: &Fixture,
    spool: Spool,
    calls: usize,
    options: MeterOptions,
    sent: bool,
) -> FlushReport {
    let ledger = Arc::new(Counted::new(fixture.ledger.clone()));
    let mut process = Process::living(ledger.clone(), options);
    let mut open = Vec::new();
    for _ in 0..calls {
        open.push(process.admit_as(tool(COST), terms(total(100_000), WORST)).await.unwrap());
    }
    let never = process.admit_as(tool(COST), terms(total(100_000), WORST)).await.unwrap();
    fixture.server().kill();
    for guard in open {
        guard.finish(Outcome::Ok);
    }
    never.cancel();
    let (shutdown, abandon) = (CancellationToken::new(), CancellationToken::new());
    shutdown.cancel();
    if !sent {
        abandon.cancel();
    }
    let deadline = async {
        if sent {
            eventually(SOON, || async { ledger.failures.load(Ordering::SeqCst) >= 1 }).await;
            abandon.cancel();
        }
    };
    let flusher = process.flusher.take().unwrap().with_spool(Some(spool));
    let (report, ()) = tokio::join!(flusher.run(shutdown, abandon.clone()), deadline);
    report
}

/// The next start with the directory, until nothing of it is left.
async fn replay(fixture: &Fixture, dir: &TempDir, clock: Arc<dyn Clock>) -> Process {
    replay_until(fixture, dir, clock, || files(dir).is_empty()).await
}

async fn replay_until(
    fixture: &Fixture,
    dir: &TempDir,
    clock: Arc<dyn Clock>,
    is_done: impl Fn() -> bool,
) -> Process {
    let mut process = fixture.process();
    let flusher = process.flusher.take().unwrap().with_spool(Some(spool(dir, clock)));
    let shutdown = CancellationToken::new();
    let done = async {
        eventually(SOON, || async { is_done() }).await;
        shutdown.cancel();
    };
    let (report, ()) = tokio::join!(flusher.run(shutdown.clone(), CancellationToken::new()), done);
    assert_eq!(report, FlushReport::default());
    process
}

#[tokio::test]
async fn what_a_drain_could_not_write_is_closed_by_the_next_start() {
    for sent in [false, true] {
        let (fixture, dir) = (durable().await, tempfile::tempdir().unwrap());
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let options = MeterOptions { batch: 4, ..MeterOptions::default() };
        let report = leave(&fixture, spool(&dir, clock.clone()), 9, options, sent).await;
        assert_eq!(report, FlushReport { written: 0, spooled: 10, lost: 0 });
        let [file] = files(&dir).try_into().unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let left = lines(&file);
        assert_eq!(left.iter().filter(|line| line["sent"] == true).count(), if sent { 4 } else { 0 });
        assert_eq!(left.iter().filter(|line| line["settled"].is_null()).count(), 1);

        fixture.server().restart().await;
        let process = replay(&fixture, &dir, clock.clone()).await;
        assert_eq!(process.audit().await, [("workspace:total".into(), 360, 0)]);
        let events = fixture.events().await;
        assert_eq!(events.len(), 9);
        assert!(events.iter().all(|e| e.outcome == Outcome::Ok && e.cost.nanos() == 40));
        let open: usize = fixture.server().query(&["ZCARD", "ledger:{acme}:open"]).await;
        assert_eq!(open, 0);

        // A process that was killed when it had closed them and had not removed the file.
        fs::write(&file, left.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
        let process = replay(&fixture, &dir, clock).await;
        assert_eq!(process.audit().await, [("workspace:total".into(), 360, 0)]);
        assert_eq!(fixture.events().await.len(), 9);
    }
}

#[tokio::test]
async fn what_was_booked_as_orphaned_in_between_is_corrected() {
    let (fixture, dir) = (durable().await, tempfile::tempdir().unwrap());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    // Old enough at once.
    let options = MeterOptions { call_life: Duration::ZERO, ..MeterOptions::default() };
    assert_eq!(leave(&fixture, spool(&dir, clock.clone()), 3, options, false).await.spooled, 4);
    fixture.server().restart().await;
    let other = fixture.process();
    eventually(SOON, || async { fixture.ledger.audit(&support::ledgers::ws()).await.is_ok() }).await;
    assert_eq!(other.sweep(false).await, 4);
    assert_eq!(other.audit().await, [("workspace:total".into(), 1200, 0)]);

    let process = replay(&fixture, &dir, clock).await;
    let events = fixture.events().await;
    let corrected = events.iter().filter(|e| e.event_id.part == EventPart::Correction);
    assert_eq!(corrected.map(|e| e.cost.nanos()).collect::<Vec<_>>(), [-260, -260, -260]);
    // The one that was never made had no event to be corrected by; it stays as the sweep has booked it.
    assert_eq!(process.audit().await, [("workspace:total".into(), 3 * 40 + 300, 0)]);
    assert_eq!(events.iter().map(|e| e.cost.nanos()).sum::<i64>(), 420, "the ledger and the events agree");
}

#[tokio::test]
async fn what_cannot_be_closed_is_set_aside_or_left_and_holds_up_nothing() {
    let (fixture, dir) = (durable().await, tempfile::tempdir().unwrap());
    let clock = Arc::new(ManualClock::new(SystemClock.now()));
    let report = leave(&fixture, spool(&dir, clock.clone()), 3, MeterOptions::default(), false).await;
    assert_eq!(report.spooled, 4);
    let [file] = files(&dir).try_into().unwrap();
    let text = fs::read_to_string(&file).unwrap();
    let whole: Vec<&str> = text.lines().collect();
    let cut = &whole[0][..whole[0].len() / 2];
    let newer = whole[1].replace(r#""version":1"#, r#""version":2,"more":1"#);
    fs::write(&file, format!("{}\n{cut}\n{newer}\n", whole[2])).unwrap();
    fixture.server().restart().await;
    let is_left = |text: &str| {
        let aside = dir.path().join("set-aside.jsonl");
        let left = files(&dir).into_iter().filter(|file| *file != aside);
        left.map(|file| fs::read_to_string(file).unwrap_or_default()).collect::<String>() == text
    };
    let only_newer = format!("{newer}\n");
    let process = replay_until(&fixture, &dir, clock.clone(), || is_left(&only_newer)).await;
    assert_eq!(process.audit().await, [("workspace:total".into(), 40, 900)]);
    let aside = dir.path().join("set-aside.jsonl");
    let [damaged] = lines(&aside).try_into().unwrap();
    assert_eq!(damaged["line"], cut);
    assert!(damaged["reason"].as_str().unwrap().contains("it is no closing"), "{damaged}");
    assert_eq!(fs::metadata(&aside).unwrap().permissions().mode() & 0o777, 0o600);
    let left = files(&dir).into_iter().find(|file| !file.ends_with("set-aside.jsonl")).unwrap();

    // What is left was for the release that wrote it.
    // A ledger that does not know a call has lost it, at first; later it may only have forgotten that it was closed.
    fs::remove_file(left).unwrap();
    fixture.server().cli(&["FLUSHALL"]).await;
    let sent = |line: &str| line.replace(r#""sent":false"#, r#""sent":true"#);
    fs::write(dir.path().join("usage-a.jsonl"), format!("{}\n", sent(whole[0]))).unwrap();
    let process = replay_until(&fixture, &dir, clock.clone(), || is_left("")).await;
    assert_eq!(process.audit().await, [("workspace:total".into(), 40, 0)]);
    clock.advance(Duration::from_mins(15));
    fs::write(dir.path().join("usage-b.jsonl"), format!("{}\n{}\n", sent(whole[1]), whole[2])).unwrap();
    let process = replay_until(&fixture, &dir, clock, || is_left("")).await;
    assert_eq!(process.audit().await, [("workspace:total".into(), 80, 0)], "the one that was never sent");
    let reasons: Vec<Value> = lines(&aside).into_iter().map(|line| line["reason"].clone()).collect();
    assert_eq!(reasons.len(), 2);
    assert!(reasons[1].as_str().unwrap().contains("may have booked it"), "{reasons:?}");
}

#[tokio::test]
async fn one_process_at_a_time_replays() {
    let (fixture, dir) = (durable().await, tempfile::tempdir().unwrap());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    assert_eq!(
        leave(&fixture, spool(&dir, clock.clone()), 1, MeterOptions::default(), false).await.spooled,
        2
    );
    fixture.server().restart().await;
    let lock: File =
        OpenOptions::new().write(true).create(true).truncate(false).open(dir.path().join(".lock")).unwrap();
    lock.lock().unwrap();
    let [file] = files(&dir).try_into().unwrap();
    let unlocking = async {
        // It has looked by the time that its first call is closed, in the same task and after it.
        let mut other = fixture.process();
        eventually(SOON, || async { other.admit_as(tool(1), terms(vec![], 0)).await.is_ok() }).await;
        other.end().await;
        assert_eq!(files(&dir), [file], "somebody else has the lock");
        drop(lock);
    };
    let (process, ()) = tokio::join!(replay(&fixture, &dir, clock), unlocking);
    assert_eq!(process.audit().await, [("workspace:total".into(), 40, 0)]);
}

#[test]
fn a_directory_that_cannot_be_used_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    for bad in ["missing", "file"] {
        let path = dir.path().join(bad);
        if bad == "file" {
            fs::write(&path, "x").unwrap();
        }
        let refused = Spool::open(&path, ReplicaId::generate(), clock.clone()).unwrap_err().to_string();
        assert_eq!(refused, format!("cannot use the spool directory `{}`", path.display()));
    }
    spool(&dir, clock);
    assert_eq!(files(&dir), [dir.path().join("file")], "nothing is left of the look");
}
