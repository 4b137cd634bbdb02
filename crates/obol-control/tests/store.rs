//! What every store promises, and what only one of them can break.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::items_after_statements,
    reason = "these are tests"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use nix::fcntl::{Flock, FlockArg};
use obol_control::{
    Action, ControlStore, FileStore, KeyChange, KeyRecord, MemoryStore, NewKey, NewRevision, Origin,
    PostgresStore, Stamp, StoreError,
};
use obol_model::snapshot::{Documents, PolicySnapshot, SCHEMA, WorkspaceSnapshot};
use obol_model::{Revision, Secret, WorkspaceId};
use obol_testkit::eventually;
use obol_testkit::postgres::Postgres;

fn ws(id: &str) -> WorkspaceId {
    id.parse().unwrap()
}

fn rev(number: u64) -> Revision {
    Revision { epoch: 1, number }
}

fn by(actor: &str) -> Stamp {
    Stamp { actor: actor.into(), at: Timestamp::from_second(1_700_000_000).unwrap() }
}

fn docs(id: &str, environment: &str, revision: Revision) -> Documents {
    let workspace: WorkspaceSnapshot = serde_json::from_value(serde_json::json!({
        "schema_version": SCHEMA, "workspace_id": id, "revision": revision, "environment": environment,
    }))
    .unwrap();
    let policy = PolicySnapshot { schema_version: SCHEMA, workspace_id: ws(id), revision, files: vec![] };
    Documents::encode(&workspace, &policy).unwrap()
}

fn new(id: &str, after: Option<Revision>, revision: Revision, origin: Origin) -> NewRevision {
    let file = (origin == Origin::File).then(|| PathBuf::from(format!("/ws/{id}.yaml")));
    NewRevision { workspace: ws(id), after, revision, documents: docs(id, "é", revision), origin, file }
}

fn key(workspace: &str) -> KeyRecord {
    let new = NewKey { tags: vec!["ops".into()], ..NewKey::named(ws(workspace), "ci") };
    KeyRecord::generate(new, by("").at).unwrap().1
}

/// What all stores have in common, done to a new one.
async fn contract(store: &dyn ControlStore) {
    store.prepare().await.unwrap();
    store.prepare().await.unwrap();
    assert!(!store.identity().await.unwrap().is_empty());
    assert_eq!(store.identity().await.unwrap(), store.identity().await.unwrap());
    let mut generation = store.generation().await.unwrap();
    let mut grew = async || {
        let before = std::mem::replace(&mut generation, store.generation().await.unwrap());
        generation > before
    };
    assert!(!grew().await);
    assert_eq!((store.heads().await.unwrap(), store.head(&ws("acme")).await.unwrap()), (vec![], None));
    assert_eq!((store.history(&ws("acme")).await.unwrap(), store.audit(9).await.unwrap()), (vec![], vec![]));

    // Revisions only grow.
    store.publish(new("acme", None, rev(3), Origin::File), &by("control")).await.unwrap();
    assert!(grew().await);
    for old in [rev(3), rev(2), Revision { epoch: 0, number: 9 }] {
        let refused = store.publish(new("acme", Some(rev(3)), old, Origin::File), &by("control")).await;
        assert!(
            matches!(&refused, Err(StoreError::Conflict { there, .. }) if *there == rev(3)),
            "{refused:?}"
        );
    }
    // And only upon what they were decided upon.
    for stale in [None, Some(rev(2)), Some(rev(4))] {
        let refused = store.publish(new("acme", stale, rev(4), Origin::File), &by("control")).await;
        assert!(
            matches!(&refused, Err(StoreError::Conflict { there, .. }) if *there == rev(3)),
            "{stale:?}: {refused:?}"
        );
        if stale.is_some() {
            let refused = store.unpublish(&ws("acme"), stale, Origin::File, &by("control")).await;
            assert!(matches!(refused, Err(StoreError::Conflict { .. })), "{stale:?}: {refused:?}");
        }
    }
    let lost = store.publish(new("lost", Some(rev(1)), rev(2), Origin::File), &by("control")).await;
    assert!(matches!(lost, Err(StoreError::NoSuchWorkspace(_))), "{lost:?}");
    let last = Revision { epoch: 1, number: 1 << 53 };
    let refused = store.publish(new("acme", Some(rev(3)), last, Origin::File), &by("control")).await;
    assert!(matches!(refused, Err(StoreError::Exhausted { .. })), "{refused:?}");
    assert!(!grew().await, "nothing changed");
    store.publish(new("acme", Some(rev(3)), rev(5), Origin::Command), &by("user:me")).await.unwrap();
    store.publish(new("beta", None, rev(1), Origin::Command), &by("user:me")).await.unwrap();
    let head = store.head(&ws("acme")).await.unwrap().unwrap();
    assert_eq!((head.revision, head.published, head.held), (rev(5), true, true));
    assert_eq!((head.file, head.file_revision), (Some("/ws/acme.yaml".into()), Some(rev(3))));
    assert_eq!(store.documents(&ws("acme"), rev(3)).await.unwrap(), Some(docs("acme", "é", rev(3))));
    assert_eq!(store.documents(&ws("acme"), rev(4)).await.unwrap(), None);
    assert_eq!(store.documents(&ws("nowhere"), rev(3)).await.unwrap(), None);
    let history = store.history(&ws("acme")).await.unwrap();
    assert_eq!(history.iter().map(|i| i.revision.number).collect::<Vec<_>>(), [5, 3]);
    assert_eq!((history[0].actor.as_str(), history[0].origin), ("user:me", Origin::Command));
    assert_eq!(history[0].at, by("").at);
    let heads = store.heads().await.unwrap();
    assert_eq!(heads.iter().map(|h| h.workspace.as_str()).collect::<Vec<_>>(), ["acme", "beta"]);

    // Not published, by a command and then since the file is gone.
    assert!(grew().await);
    store.unpublish(&ws("acme"), None, Origin::Command, &by("user:me")).await.unwrap();
    assert!(grew().await);
    store.unpublish(&ws("acme"), None, Origin::Command, &by("user:me")).await.unwrap();
    assert!(!grew().await, "it was not published before");
    let head = store.head(&ws("acme")).await.unwrap().unwrap();
    assert_eq!((head.revision, head.published, head.held), (rev(5), false, true));
    store.unpublish(&ws("acme"), Some(rev(5)), Origin::File, &by("control")).await.unwrap();
    let head = store.head(&ws("acme")).await.unwrap().unwrap();
    assert_eq!((head.published, head.held, head.file), (false, false, None));
    let nowhere = store.unpublish(&ws("nowhere"), None, Origin::File, &by("control")).await;
    assert!(matches!(nowhere, Err(StoreError::NoSuchWorkspace(_))), "{nowhere:?}");
    let nowhere = store.set_file(&ws("nowhere"), "/x".into()).await;
    assert!(matches!(nowhere, Err(StoreError::NoSuchWorkspace(_))), "{nowhere:?}");
    store.set_file(&ws("beta"), "/other/beta.yaml".into()).await.unwrap();
    assert_eq!(store.head(&ws("beta")).await.unwrap().unwrap().file, Some("/other/beta.yaml".into()));
    let rollback = Origin::Rollback { to: rev(3) };
    store.publish(new("acme", Some(rev(5)), rev(6), rollback), &by("user:me")).await.unwrap();
    assert_eq!(store.history(&ws("acme")).await.unwrap()[0].origin, rollback);

    // Keys.
    let (one, two) = (key("acme"), key("beta"));
    for record in [&one, &two] {
        store.insert_key(record.clone(), &by("user:me")).await.unwrap();
    }
    let mut expected = [one.clone(), two.clone()];
    expected.sort_by(|a, b| a.key.key_id.cmp(&b.key.key_id));
    let keys = store.keys().await.unwrap();
    assert_eq!((keys.records.as_slice(), keys.complete), (&expected[..], true));
    assert!(grew().await);
    let change = async |change| store.change_key(&one.key.key_id, change, &by("user:me")).await;
    assert!(change(KeyChange::Disable).await.unwrap().key.disabled);
    assert!(grew().await);
    assert!(change(KeyChange::Disable).await.unwrap().key.disabled);
    assert!(!grew().await);
    let revoked = change(KeyChange::Revoke { delete_sessions: true }).await.unwrap();
    assert_eq!((revoked.revoked_at, revoked.key.revision), (Some(by("").at), 3));
    assert!(matches!(change(KeyChange::Enable).await, Err(StoreError::Revoked(_))));
    let nobody = store.change_key(&"k-0".parse().unwrap(), KeyChange::Disable, &by("")).await;
    assert_eq!(nobody.unwrap_err().to_string(), "there is no key `k-0`");
    assert!(store.keys().await.unwrap().records.contains(&revoked));
    assert_eq!(store.key(&one.hash).await.unwrap(), Some(revoked));
    assert_eq!(store.key(&key("acme").hash).await.unwrap(), None);

    // Who did what, newest first.
    let audit = store.audit(100).await.unwrap();
    let actions: Vec<Action> = audit.iter().map(|entry| entry.action).collect();
    use Action::{DisableKey, NewKey, Publish, RevokeKey, Rollback, Unpublish};
    assert_eq!(
        actions,
        [RevokeKey, DisableKey, NewKey, NewKey, Rollback, Unpublish, Unpublish, Publish, Publish, Publish]
    );
    assert_eq!((audit[0].key_id.as_ref(), audit[0].revision), (Some(&one.key.key_id), None));
    assert_eq!((audit[4].revision, audit[4].actor.as_str()), (Some(rev(6)), "user:me"));
    assert_eq!((audit[9].revision, audit[9].workspace.as_str()), (Some(rev(3)), "acme"));
    assert_eq!(store.audit(2).await.unwrap(), audit[..2]);

    // History is bounded, but for the newest that came from the file.
    for number in 7..=70 {
        store
            .publish(new("acme", Some(rev(number - 1)), rev(number), Origin::Command), &by("user:me"))
            .await
            .unwrap();
    }
    let kept: Vec<u64> =
        store.history(&ws("acme")).await.unwrap().iter().map(|i| i.revision.number).collect();
    assert_eq!((kept.len(), kept[0], kept[49], kept[50]), (51, 70, 21, 3));
    assert!(store.documents(&ws("acme"), rev(3)).await.unwrap().is_some());
    assert!(store.documents(&ws("acme"), rev(20)).await.unwrap().is_none());
}

/// Everybody publishes one more than what they see, until they succeed: each number is used once, and none is lost.
async fn nobody_loses_a_revision(stores: Vec<Arc<dyn ControlStore>>, each: u64) {
    let count = stores.len() as u64;
    let publishing = stores.into_iter().map(|store| async move {
        let mut done = 0;
        while done < each {
            let after = store.head(&ws("acme")).await.unwrap().map(|head| head.revision);
            let used = after.map_or(0, |after| after.number);
            match store.publish(new("acme", after, rev(used + 1), Origin::Command), &by("user:me")).await {
                Ok(()) => done += 1,
                Err(StoreError::Conflict { there, .. }) => assert!(there.number > used),
                Err(e) => panic!("{e}"),
            }
        }
        store
    });
    let stores = futures::future::join_all(publishing).await;
    let head = stores[0].head(&ws("acme")).await.unwrap().unwrap();
    assert_eq!(head.revision.number, count * each);
    let kept = stores[0].history(&ws("acme")).await.unwrap();
    assert!(kept.iter().map(|i| i.revision.number).eq((1..=count * each).rev().take(50)), "{kept:?}");
}

#[tokio::test]
async fn memory_keeps_the_contract() {
    contract(&MemoryStore::default()).await;
}

#[tokio::test]
async fn files_keep_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::new(dir.path().join("state"));
    assert!(!store.exists());
    contract(&store).await;
    assert!(store.exists());
    // Nothing of it is for others, and nothing is left over.
    let mut folders = vec![dir.path().join("state")];
    while let Some(folder) = folders.pop() {
        assert_eq!(
            fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
            0o700,
            "{}",
            folder.display()
        );
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            assert_eq!(
                fs::metadata(&path).unwrap().permissions().mode() & 0o777,
                0o600,
                "{}",
                path.display()
            );
            assert!(!path.file_name().unwrap().to_string_lossy().starts_with('.'), "{}", path.display());
        }
    }
}

#[tokio::test]
async fn several_processes_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let store = || Arc::new(FileStore::new(dir.path())) as Arc<dyn ControlStore>;
    nobody_loses_a_revision((0..8).map(|_| store()).collect(), 25).await;
}

#[tokio::test]
async fn a_directory_that_another_process_holds_is_a_failure_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::new(dir.path());
    store.prepare().await.unwrap();
    let lock = fs::File::open(dir.path().join("lock")).unwrap();
    let lock = Flock::lock(lock, FlockArg::LockExclusive).unwrap();
    let begun = Instant::now();
    let why = store.insert_key(key("acme"), &by("")).await.unwrap_err();
    assert!(why.to_string().starts_with("another process has held `"), "{why}");
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert_eq!(store.keys().await.unwrap().records, [], "reading needs no lock");
    drop(lock);
    store.insert_key(key("acme"), &by("")).await.unwrap();
}

#[tokio::test]
async fn a_directory_of_a_later_release_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("store.json"), r#"{"schema_version":9,"identity":"x"}"#).unwrap();
    let store = FileStore::new(dir.path());
    let why = store.prepare().await.unwrap_err();
    assert!(matches!(why, StoreError::Newer { found: 9, known: 1, .. }), "{why}");
    assert!(store.insert_key(key("acme"), &by("")).await.is_err());
}

#[tokio::test]
async fn a_change_that_was_cut_off_has_not_happened() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::new(dir.path());
    store.publish(new("acme", None, rev(1), Origin::Command), &by("")).await.unwrap();
    // Killed between the revision and the head, and in the middle of a line of the audit and of a file.
    let folder = dir.path().join("workspaces/acme");
    fs::copy(folder.join("1.1.json"), folder.join("1.2.json")).unwrap();
    fs::write(folder.join(format!(".head.json.{}.0", std::process::id())), "{").unwrap();
    let audit = dir.path().join("audit.jsonl");
    fs::write(&audit, format!("{}{{\"at\":", fs::read_to_string(&audit).unwrap())).unwrap();
    assert_eq!(store.documents(&ws("acme"), rev(2)).await.unwrap(), None);
    assert_eq!(store.history(&ws("acme")).await.unwrap().len(), 1);
    assert_eq!(store.audit(9).await.unwrap().len(), 1);
    store.publish(new("acme", Some(rev(1)), rev(2), Origin::Command), &by("")).await.unwrap();
    assert_eq!(store.documents(&ws("acme"), rev(2)).await.unwrap(), Some(docs("acme", "é", rev(2))));
    assert_eq!(store.audit(9).await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_damaged_file_does_not_revoke_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::new(dir.path());
    let record = key("acme");
    store.insert_key(record.clone(), &by("")).await.unwrap();
    assert_eq!(store.keys().await.unwrap().records.len(), 1);
    fs::write(dir.path().join(format!("keys/{}.json", record.key.key_id)), "{").unwrap();
    let loaded = store.keys().await.unwrap();
    assert_eq!((loaded.records.len(), loaded.faults.len(), loaded.complete), (1, 1, true));
    let fresh = FileStore::new(dir.path()).keys().await.unwrap();
    assert_eq!((fresh.records.len(), fresh.complete), (0, false));
}

fn postgres_store(url: &str) -> PostgresStore {
    PostgresStore::new(&Secret::new(url.to_owned())).unwrap()
}

#[tokio::test]
async fn postgres_keeps_the_contract() {
    let postgres = Postgres::start().await;
    // Both migrate at once, as two controls do that start together.
    let (one, two) = (postgres_store(&postgres.url()), postgres_store(&postgres.url()));
    let (a, b) = tokio::join!(one.prepare(), two.prepare());
    a.unwrap();
    b.unwrap();
    assert_eq!(postgres.sql("SELECT version FROM obol_schema"), "1\n2");
    contract(&one).await;
    assert_eq!(two.identity().await.unwrap(), one.identity().await.unwrap());
    assert_eq!(
        postgres.sql("SELECT actor, action, workspace, epoch, number FROM obol_audit ORDER BY id LIMIT 1"),
        "control|publish|acme|1|3"
    );
    let stored = postgres.sql("SELECT record FROM obol_key");
    assert!(!stored.contains("obol_"), "{stored}");

    postgres.sql("DELETE FROM obol_revision; DELETE FROM obol_workspace");
    let store = || Arc::new(postgres_store(&postgres.url())) as Arc<dyn ControlStore>;
    nobody_loses_a_revision((0..4).map(|_| store()).collect(), 25).await;

    postgres.sql("INSERT INTO obol_schema VALUES (7)");
    let why = two.prepare().await.unwrap_err();
    assert!(matches!(why, StoreError::Newer { found: 7, known: 2, .. }), "{why}");
}

#[tokio::test]
async fn a_database_that_is_away_is_a_failure_in_time_and_is_used_again() {
    let postgres = Postgres::start().await;
    let store = postgres_store(&postgres.url());
    store.prepare().await.unwrap();
    store.insert_key(key("acme"), &by("")).await.unwrap();
    let keys = async || store.keys().await.map(|keys| keys.records.len());

    postgres.kill();
    for _ in 0..2 {
        let why = keys().await.unwrap_err().to_string();
        assert!(why.contains(&postgres.addr().to_string()), "{why}");
    }
    postgres.restart().await;
    eventually(Duration::from_secs(20), || async { keys().await.ok() == Some(1) }).await;

    postgres.pause();
    let begun = Instant::now();
    let why = keys().await.unwrap_err().to_string();
    assert!(why.contains("did not answer within"), "{why}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    postgres.resume();
    eventually(Duration::from_secs(20), || async { keys().await.ok() == Some(1) }).await;

    // A connection that the server ends costs nobody anything, when the word of it has come.
    postgres.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'obol control'",
    );
    eventually(Duration::from_secs(20), || async { keys().await.ok() == Some(1) }).await;
}

#[tokio::test]
async fn a_change_that_fails_leaves_no_entry_and_a_killed_process_no_litter() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let store = FileStore::new(&state);
    store.prepare().await.unwrap();
    let kept = key("acme");
    store.insert_key(kept.clone(), &by("user:me")).await.unwrap();
    let entries = store.audit(9).await.unwrap();
    // Something that no file can take the place of, as a full disk lets none.
    let failing = key("acme");
    let place = state.join("keys").join(format!("{}.json", failing.key.key_id));
    std::fs::create_dir_all(place.join("x")).unwrap();
    assert!(store.insert_key(failing, &by("user:me")).await.is_err());
    assert_eq!(store.audit(9).await.unwrap(), entries);
    std::fs::remove_dir_all(&place).unwrap();
    store.change_key(&kept.key.key_id, KeyChange::Disable, &by("user:me")).await.unwrap();
    assert_eq!(store.audit(9).await.unwrap().len(), 2, "the next one has its line");

    store.publish(new("acme", None, rev(1), Origin::File), &by("control")).await.unwrap();
    let id = kept.key.key_id.as_str();
    let litter = [
        format!("keys/.{id}.json.4711.0"),
        "workspaces/acme/.1.2.json.4711.12".to_owned(),
        ".generation.1.2".to_owned(),
    ];
    let others = ["keys/.note".to_owned(), "workspaces/acme/1.1.json".to_owned()];
    for name in litter.iter().chain(&others[..1]) {
        std::fs::write(state.join(name), "{").unwrap();
    }
    FileStore::new(&state).prepare().await.unwrap();
    assert!(litter.iter().all(|name| !state.join(name).exists()));
    assert!(others.iter().all(|name| state.join(name).exists()));
    assert_eq!(store.keys().await.unwrap().records.len(), 1);
}
