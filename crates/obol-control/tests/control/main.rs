//! Control against a real Redis.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod between;
mod damage;
mod operators;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use obol_control::{
    Control, ControlOptions, ControlStore, Effect, FileStore, KeyChange, KeyRecord, NewKey, Operator, Origin,
    PublishError, Publisher, RedisPublisher, SyncReport,
};
use obol_model::snapshot::{Documents, PolicySnapshot, SCHEMA, WorkspaceSnapshot};
use obol_model::{
    Clock, Invalidation, KeyContext, KeyRing, Revision, Secret, SystemClock, VirtualKey, WorkspaceId,
};
use obol_redis::{Redis, RedisOptions, SubscriberEvent};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

const RING: &str = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
const ROTATED: &str =
    "b:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=,a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

struct Bench {
    server: RedisServer,
    redis: Redis,
    publisher: Arc<RedisPublisher>,
    store: Arc<FileStore>,
    clock: Arc<dyn Clock>,
    folder: TempDir,
}

impl Bench {
    async fn new() -> Self {
        let server = RedisServer::start().await;
        let redis = Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap();
        let publisher = Arc::new(RedisPublisher::new(redis.clone()));
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("ws")).unwrap();
        let store = Arc::new(FileStore::new(folder.path().join("state")));
        store.prepare().await.unwrap();
        Self { server, redis, publisher, store, clock: Arc::new(SystemClock), folder }
    }

    fn write(&self, name: &str, text: &str) {
        // As an editor does: the new content under another name, then renamed.
        let path = self.folder.path().join("ws").join(name);
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(&new, &path).unwrap();
    }

    fn workspace(&self, id: &str, environment: &str) {
        self.write(
            &format!("{id}.yaml"),
            &format!(
                "workspace: {id}\nenvironment: {environment}\npolicies: [all.cedar]\nproviders:\n  p:\n    kind: openai\n    \
                 base_url: https://x.example/v1\n    auth: {{ bearer: {{ secret: \"env:TOKEN\" }} }}\n"
            ),
        );
        self.write("all.cedar", "permit(principal, action, resource);\n");
    }

    fn control_with(&self, ring: &str) -> Control {
        let options = ControlOptions {
            source: self.folder.path().join("ws"),
            key_ring: Arc::new(KeyRing::parse(ring).unwrap()),
            env: Arc::new(|name| (name == "TOKEN").then(|| "s3cret".to_owned())),
        };
        Control::new(options, self.store.clone(), self.publisher.clone(), self.clock.clone())
    }

    fn control(&self) -> Control {
        self.control_with(RING)
    }

    /// Somebody who works on the store alone.
    fn operator(&self) -> Operator {
        Operator::new(self.store.clone(), None, self.clock.clone(), "user:test".into())
    }

    /// Somebody who tells the replicas, too.
    fn remote(&self) -> Operator {
        let publisher: Arc<dyn Publisher> = self.publisher.clone();
        Operator::new(self.store.clone(), Some(publisher), self.clock.clone(), "user:test".into())
    }

    async fn new_key(&self, workspace: &str, tags: &[&str]) -> (VirtualKey, KeyRecord) {
        let tags = tags.iter().map(ToString::to_string).collect();
        let new = NewKey { tags, ..NewKey::named(ws(workspace), "ci") };
        let (key, record, _) = self.operator().new_key(new).await.unwrap();
        (key, record)
    }

    async fn revoke(&self, record: &KeyRecord, delete_sessions: bool) {
        let change = KeyChange::Revoke { delete_sessions };
        self.operator().change_key(&record.key.key_id, change).await.unwrap();
    }

    async fn current(&self, id: &str) -> Option<u64> {
        let docs = self.publisher.read(&ws(id)).await.unwrap()?;
        docs.decode(&ws(id)).ok().map(|(w, _)| w.revision.number)
    }

    async fn environment(&self, id: &str) -> Option<String> {
        let docs = self.publisher.read(&ws(id)).await.unwrap()?;
        docs.decode(&ws(id)).ok().map(|(w, _)| w.environment)
    }

    /// Everything that is said on the channel from now on.
    async fn listen(&self) -> mpsc::Receiver<SubscriberEvent> {
        let (send, mut receive) = mpsc::channel(64);
        let redis = self.redis.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(redis_listen(redis, send));
        });
        assert!(matches!(receive.recv().await, Some(SubscriberEvent::Subscribed)));
        receive
    }
}

async fn redis_listen(redis: Redis, send: mpsc::Sender<SubscriberEvent>) {
    redis.subscribe(Invalidation::CHANNEL, send, CancellationToken::new()).await;
}

async fn next(messages: &mut mpsc::Receiver<SubscriberEvent>) -> Invalidation {
    loop {
        let event =
            tokio::time::timeout(Duration::from_secs(5), messages.recv()).await.expect("a message in time");
        if let Some(SubscriberEvent::Message(bytes)) = event {
            return serde_json::from_slice(&bytes).unwrap();
        }
    }
}

fn ws(id: &str) -> WorkspaceId {
    id.parse().unwrap()
}

fn rev(number: u64) -> Revision {
    Revision { epoch: 1, number }
}

fn numbers(list: &[(WorkspaceId, Revision)]) -> Vec<(String, u64)> {
    list.iter().map(|(w, r)| (w.to_string(), r.number)).collect()
}

fn published(report: &SyncReport) -> Vec<(String, u64)> {
    assert_eq!(report.failed, Vec::<String>::new());
    numbers(&report.published)
}

fn docs(id: &str, environment: &str, revision: Revision) -> Documents {
    let workspace: WorkspaceSnapshot = serde_json::from_value(serde_json::json!({
        "schema_version": SCHEMA, "workspace_id": id, "revision": revision, "environment": environment,
    }))
    .unwrap();
    let policy = PolicySnapshot { schema_version: SCHEMA, workspace_id: ws(id), revision, files: vec![] };
    Documents::encode(&workspace, &policy).unwrap()
}

#[tokio::test]
async fn a_publication_is_written_whole_and_announced() {
    let bench = Bench::new().await;
    let mut messages = bench.listen().await;
    let wanted = docs("acme", "a", rev(3));
    bench.publisher.publish(&ws("acme"), &wanted, rev(3)).await.unwrap();
    assert_eq!(bench.publisher.read(&ws("acme")).await.unwrap(), Some(wanted));
    assert_eq!(
        bench.server.keys("*").await,
        ["policy:{acme}", "snap:fingerprint:{acme}", "snap:workspace:{acme}"]
    );
    assert_eq!(next(&mut messages).await, Invalidation::Workspace { workspace_id: ws("acme") });
    assert!(
        bench.publisher.unpublish(&ws("acme"), rev(2), None).await.is_err(),
        "somebody published meanwhile"
    );
    bench.publisher.unpublish(&ws("acme"), rev(3), None).await.unwrap();
    assert_eq!(bench.publisher.read(&ws("acme")).await.unwrap(), None);
    assert_eq!(next(&mut messages).await, Invalidation::Workspace { workspace_id: ws("acme") });
}

#[tokio::test]
async fn a_revision_that_is_not_newer_is_refused_and_changes_nothing() {
    let bench = Bench::new().await;
    let there = Revision { epoch: 2, number: 5 };
    let wanted = docs("acme", "a", there);
    bench.publisher.publish(&ws("acme"), &wanted, there).await.unwrap();
    for old in [rev(9), Revision { epoch: 2, number: 4 }, there] {
        let refused = bench.publisher.publish(&ws("acme"), &docs("acme", "b", old), old).await;
        assert!(matches!(refused, Err(PublishError::NotNewer { there: t, .. }) if t == there), "{refused:?}");
    }
    let older = Revision { epoch: 2, number: 4 };
    assert!(bench.publisher.repair(&ws("acme"), &docs("acme", "b", older), older, None).await.is_err());
    assert_eq!(bench.publisher.read(&ws("acme")).await.unwrap(), Some(wanted.clone()));
    // The same one may be written again, and a fingerprint that nobody can read protects nothing.
    bench.publisher.repair(&ws("acme"), &wanted, there, None).await.unwrap();
    bench.server.cli(&["SET", "snap:fingerprint:{acme}", "garbage"]).await;
    bench.publisher.publish(&ws("acme"), &docs("acme", "c", rev(1)), rev(1)).await.unwrap();
}

#[tokio::test]
async fn of_many_that_publish_one_revision_exactly_one_wins() {
    let bench = Bench::new().await;
    let workspace = ws("acme");
    let contents: Vec<Documents> = (0..16).map(|i| docs("acme", &format!("e{i}"), rev(1))).collect();
    let tries = contents.iter().map(|d| bench.publisher.publish(&workspace, d, rev(1)));
    let results = futures::future::join_all(tries).await;
    assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1);
    let winner = bench.publisher.read(&workspace).await.unwrap().unwrap();
    assert!(winner.decode(&workspace).is_ok(), "never a mixture");
}

#[tokio::test]
async fn edits_are_published_and_the_same_content_is_not() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 1)]);
    assert_eq!(published(&control.sync_once().await), []);
    bench.write("acme.yaml", &format!("# a comment\n{}", read(&bench, "acme.yaml")));
    assert_eq!(published(&control.sync_once().await), [], "a comment is no content");
    bench.workspace("acme", "two");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 2)]);
    bench.write("all.cedar", "forbid(principal, action, resource);\n");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 3)], "a policy file alone");
    assert_eq!(bench.environment("acme").await.as_deref(), Some("two"));
    // A restart finds what it would publish, although every seal has a new nonce.
    assert_eq!(published(&bench.control().sync_once().await), []);
    // A rotated key ring seals everything again, so that the old key can go.
    assert_eq!(published(&bench.control_with(ROTATED).sync_once().await), [("acme".into(), 4)]);
}

/// Two controls that see an edit at different times agree on it, and neither undoes what the other has done.
#[tokio::test]
async fn controls_of_one_folder_publish_an_edit_once() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let controls = [bench.control(), bench.control()];
    let passes = async || {
        let (one, other) = tokio::join!(controls[0].sync_once(), controls[1].sync_once());
        [published(&one), published(&other)].concat()
    };
    assert_eq!(passes().await, [("acme".into(), 1)]);
    for round in 2..=20 {
        bench.workspace("acme", &format!("round-{round}"));
        assert_eq!(passes().await, [("acme".into(), round)], "whoever was slower did nothing");
        assert_eq!(passes().await, []);
    }
    let history = bench.store.history(&ws("acme")).await.unwrap();
    assert!(history.iter().map(|info| info.revision.number).eq((1..=20).rev()), "{history:?}");
}

/// Two controls whose folders differ, as in the middle of a rollout: what was said last stands, and the one that says
/// something else does not say it again and again.
#[tokio::test]
async fn controls_whose_files_differ_do_not_fight() {
    let (bench, mut other) = (Bench::new().await, Bench::new().await);
    (other.store, other.publisher) = (bench.store.clone(), bench.publisher.clone());
    bench.workspace("acme", "old");
    other.workspace("acme", "new");
    let (old, new) = (bench.control(), other.control());
    assert_eq!(published(&old.sync_once().await), [("acme".into(), 1)]);
    assert_eq!(published(&new.sync_once().await), [("acme".into(), 2)]);
    for _ in 0..3 {
        assert_eq!([published(&old.sync_once().await), published(&new.sync_once().await)], [[], []]);
    }
    assert_eq!(bench.environment("acme").await.as_deref(), Some("new"));
    let head = bench.folder.path().join("state/workspaces/acme/head.json");
    let backup = fs::read(&head).unwrap();
    bench.workspace("acme", "newer");
    assert_eq!(published(&old.sync_once().await), [("acme".into(), 3)], "an edit counts again");
    // A store that a backup took back in time is no word of another control.
    fs::write(&head, backup).unwrap();
    assert_eq!(published(&old.sync_once().await), [("acme".into(), 4)]);
    assert_eq!(bench.environment("acme").await.as_deref(), Some("newer"));
}

fn read(bench: &Bench, name: &str) -> String {
    fs::read_to_string(bench.folder.path().join("ws").join(name)).unwrap()
}

#[tokio::test]
async fn an_invalid_edit_is_reported_once_and_changes_nothing() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    control.sync_once().await;
    bench.write("acme.yaml", "workspace: acme\nenvironment: two\nfrozen: perhaps\n");
    let report = control.sync_once().await;
    let path = bench.folder.path().join("ws/acme.yaml");
    assert_eq!(
        report.refused.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [format!("{}:3:9: `frozen` must be true or false, this is text", path.display())]
    );
    assert_eq!(control.sync_once().await.refused, []);
    assert_eq!(bench.environment("acme").await.as_deref(), Some("one"));
    // A fresh control that finds only the invalid file keeps what is there, too.
    let report = bench.control().sync_once().await;
    assert_eq!((report.refused.len(), report.unpublished.len()), (1, 0));
    assert_eq!(bench.environment("acme").await.as_deref(), Some("one"));
    bench.workspace("acme", "three");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 2)]);
}

#[tokio::test]
async fn a_store_that_lost_or_damaged_something_heals() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let (key, record) = bench.new_key("acme", &[]).await;
    let control = bench.control();
    control.sync_once().await;
    let whole = bench.publisher.read(&ws("acme")).await.unwrap().unwrap();
    let key_name = format!("key:{}", key.hash().hex());
    let later = fingerprint_of(9);
    let damage: [&[&str]; 10] = [
        &["FLUSHALL"],
        &["DEL", "policy:{acme}"],
        &["SET", "snap:workspace:{acme}", "{}"],
        &["SET", "snap:fingerprint:{acme}", "{}"],
        &["DEL", "snap:fingerprint:{acme}"],
        &["APPEND", "policy:{acme}", " "],
        &["SETRANGE", "snap:workspace:{acme}", "20", "\u{1}"],
        // A fingerprint that names a later revision, which no other document has.
        &["SET", "snap:fingerprint:{acme}", &later],
        // No text at all.
        &[
            "EVAL",
            "redis.call('DEL', KEYS[1]) redis.call('LPUSH', KEYS[1], 'x')",
            "1",
            "snap:fingerprint:{acme}",
        ],
        &["EVAL", "redis.call('DEL', KEYS[1]) redis.call('SADD', KEYS[1], 'x')", "1", "policy:{acme}"],
    ];
    for command in damage {
        bench.server.cli(command).await;
        let report = control.sync_once().await;
        assert_eq!(numbers(&report.healed), [("acme".into(), 1)], "{command:?} {report:?}");
        assert_eq!(bench.publisher.read(&ws("acme")).await.unwrap().as_ref(), Some(&whole), "{command:?}");
        assert_eq!(bench.server.keys("key*").await, [key_name.clone(), "keys:loaded".into()], "{command:?}");
    }
    let good: String = bench.server.query(&["GET", &key_name]).await;
    let disabled = good.replace("\"disabled\":false", "\"disabled\":true");
    let later = good.replace("\"revision\":1", "\"revision\":7");
    let damage: [&[&str]; 7] = [
        &["DEL", &key_name],
        &["SET", &key_name, "garbage"],
        &["SET", &key_name, ""],
        &["SETRANGE", &key_name, "30", "\u{1}"],
        &["SET", &key_name, &disabled],
        &["SET", &key_name, &later],
        &["EVAL", "redis.call('DEL', KEYS[1]) redis.call('LPUSH', KEYS[1], 'x')", "1", &key_name],
    ];
    for command in damage {
        bench.server.cli(command).await;
        assert_eq!(control.sync_once().await.keys_changed, 1, "{command:?}");
        assert_eq!(bench.server.query::<String>(&["GET", &key_name]).await, good, "{command:?}");
    }
    bench.server.cli(&["DEL", "keys:loaded"]).await;
    assert_eq!(control.sync_once().await.keys_changed, 0);
    assert_eq!(
        bench.server.query::<String>(&["GET", "keys:loaded"]).await,
        bench.store.identity().await.unwrap(),
        "the marker names the store"
    );
    // An older publication, as after a failover to a replica that lagged.
    bench.workspace("acme", "two");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 2)]);
    bench.publisher.unpublish(&ws("acme"), rev(2), None).await.unwrap();
    bench.publisher.publish(&ws("acme"), &whole, rev(1)).await.unwrap();
    assert_eq!(numbers(&control.sync_once().await.healed), [("acme".into(), 2)]);
    assert_eq!(bench.environment("acme").await.as_deref(), Some("two"));
    // Revoked keys that a backup brings back.
    bench.revoke(&record, false).await;
    control.sync_once().await;
    bench.server.cli(&["FLUSHALL"]).await;
    bench.server.cli(&["SET", &key_name, &good]).await;
    control.sync_once().await;
    assert_eq!(bench.server.keys("key:*").await, Vec::<String>::new());
}

/// A fingerprint that is fine but for naming another revision than its documents.
fn fingerprint_of(number: u64) -> String {
    String::from_utf8(docs("acme", "x", rev(number)).fingerprint).unwrap()
}

#[tokio::test]
async fn keys_that_nobody_knows_are_removed_from_a_redis_that_is_ours() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let (key, record) = bench.new_key("acme", &[]).await;
    let control = bench.control();
    control.sync_once().await;
    let mut messages = bench.listen().await;
    let stranger = format!("key:{}", "ab".repeat(32));
    let stored: String = bench.server.query(&["GET", &format!("key:{}", key.hash().hex())]).await;
    for content in [&stored, "garbage"] {
        bench.server.cli(&["SET", &stranger, content]).await;
        bench.server.cli(&["SET", "key:unrelated", "x"]).await;
        assert_eq!(control.sync_once().await.keys_changed, 1);
        assert_eq!(bench.server.keys(&stranger).await, Vec::<String>::new());
        assert_eq!(bench.server.keys("key:unrelated").await.len(), 1, "no key record");
        assert_eq!(next(&mut messages).await, Invalidation::key("ab".repeat(32).parse().unwrap()));
    }
    // A key that somebody made a moment ago is in the store by the time that it is in Redis.
    let new = NewKey::named(ws("acme"), "");
    let (_, made, effect) = bench.remote().new_key(new).await.unwrap();
    assert!(matches!(effect, obol_control::Effect::Replicas));
    assert_eq!(control.sync_once().await.keys_changed, 0);
    assert_eq!(bench.server.keys(&format!("key:{}", made.hash.hex())).await.len(), 1);
    assert!(record.is_live());

    // A control with another state directory destroys nothing.
    let other = Arc::new(FileStore::new(bench.folder.path().join("other")));
    other.prepare().await.unwrap();
    let wrong = Bench { store: other, ..bench };
    let report = wrong.control().sync_once().await;
    assert!(report.failed[0].contains("2 keys of another control's store"), "{report:?}");
    assert!(report.failed[0].contains("delete `keys:loaded`"), "{report:?}");
    assert_eq!(wrong.server.keys("key:*").await.len(), 3);
    wrong.server.cli(&["DEL", "keys:loaded"]).await;
    let report = wrong.control().sync_once().await;
    assert_eq!((report.failed.len(), report.keys_changed), (0, 2), "{report:?}");
}

#[tokio::test]
async fn revisions_never_start_over() {
    let bench = Bench::new().await;
    for environment in ["one", "two", "three"] {
        bench.workspace("acme", environment);
        bench.control().sync_once().await;
    }
    assert_eq!(bench.current("acme").await, Some(3));
    bench.server.cli(&["FLUSHALL"]).await;
    assert_eq!(numbers(&bench.control().sync_once().await.healed), [("acme".into(), 3)]);
    // A store that begins anew goes on above what Redis has.
    let store = Arc::new(FileStore::new(bench.folder.path().join("anew")));
    store.prepare().await.unwrap();
    let anew = Bench { store, ..bench };
    assert_eq!(published(&anew.control().sync_once().await), [("acme".into(), 4)]);
}

#[tokio::test]
async fn a_newer_publication_of_somebody_else_is_left_alone_until_the_next_edit() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    control.sync_once().await;
    bench.publisher.publish(&ws("acme"), &docs("acme", "theirs", rev(7)), rev(7)).await.unwrap();
    assert_eq!(published(&control.sync_once().await), []);
    assert_eq!(bench.environment("acme").await.as_deref(), Some("theirs"));
    bench.workspace("acme", "two");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 8)]);
}

#[tokio::test]
async fn a_deleted_file_unpublishes_and_a_renamed_one_does_not() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    bench.workspace("beta", "one");
    let control = bench.control();
    control.sync_once().await;
    let folder = bench.folder.path().join("ws");
    fs::rename(folder.join("acme.yaml"), folder.join("renamed.yaml")).unwrap();
    let report = control.sync_once().await;
    assert_eq!((report.unpublished, report.published), (vec![], vec![]));
    // Deleted while control is away.
    drop(control);
    fs::remove_file(folder.join("renamed.yaml")).unwrap();
    let control = bench.control();
    assert_eq!(control.sync_once().await.unpublished, [ws("acme")]);
    assert_eq!(bench.publisher.read(&ws("acme")).await.unwrap(), None);
    // Its numbers go on when it comes back.
    bench.workspace("acme", "one");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 2)]);
    // An empty folder is more likely a volume that went away.
    fs::remove_file(folder.join("acme.yaml")).unwrap();
    fs::remove_file(folder.join("beta.yaml")).unwrap();
    let report = control.sync_once().await;
    assert_eq!((report.failed.len(), report.unpublished.len()), (1, 0), "{report:?}");
    assert_eq!(bench.current("beta").await, Some(1));
}

/// A control that still waits whether a file stays away does not say what it said, against another one that saw it go.
#[tokio::test]
async fn a_deleted_file_is_not_brought_back_by_a_control_that_has_yet_to_believe_it() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    bench.workspace("beta", "one");
    let (slow, quick) = (bench.control(), bench.control());
    for control in [&slow, &quick] {
        control.sync_once().await;
    }
    let shutdown = CancellationToken::new();
    let running = slow.run(shutdown.clone());
    let script = async {
        fs::remove_file(bench.folder.path().join("ws/acme.yaml")).unwrap();
        assert_eq!(quick.sync_once().await.unpublished, [ws("acme")]);
        // Takes up what came later as well, after as many looks.
        bench.workspace("beta", "two");
        eventually(Duration::from_secs(5), || async {
            bench.environment("beta").await.as_deref() == Some("two")
        })
        .await;
        shutdown.cancel();
    };
    tokio::join!(running, script);
    let history = bench.store.history(&ws("acme")).await.unwrap();
    assert_eq!(history.iter().map(|info| info.revision.number).collect::<Vec<_>>(), [1]);
    assert_eq!(bench.publisher.read(&ws("acme")).await.unwrap(), None);
}

#[tokio::test]
async fn two_files_of_one_workspace_are_refused() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    control.sync_once().await;
    bench.write("aaa.yaml", "workspace: acme\n");
    let report = control.sync_once().await;
    assert_eq!(report.refused.len(), 1);
    assert!(report.refused[0].message.contains("is defined by"), "{report:?}");
    assert_eq!(bench.environment("acme").await.as_deref(), Some("one"), "the first one stays");
}

#[tokio::test]
async fn keys_are_published_and_revoked_with_their_sessions() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    control.sync_once().await;
    assert_eq!(bench.server.keys("key*").await, ["keys:loaded"], "no key is a complete set of keys");
    let mut messages = bench.listen().await;
    let (key, record) = bench.new_key("acme", &["ops"]).await;
    assert_eq!(control.sync_once().await.keys_changed, 1);
    let name = format!("key:{}", key.hash().hex());
    let stored: String = bench.server.query(&["GET", &name]).await;
    assert_eq!(serde_json::from_str::<KeyContext>(&stored).unwrap(), record.key);
    assert!(!stored.contains(key.expose()));
    assert_eq!(next(&mut messages).await, Invalidation::key(key.hash()));
    assert_eq!(control.sync_once().await.keys_changed, 0, "nothing is announced twice");
    // Revoked while control is away.
    drop(control);
    bench.revoke(&record, true).await;
    assert_eq!(bench.control().sync_once().await.keys_changed, 1);
    assert_eq!(bench.server.keys("key:*").await, Vec::<String>::new());
    let told = Invalidation::key_with_sessions(key.hash(), ws("acme"), record.key.principal());
    assert_eq!(next(&mut messages).await, told);
    // Without its sessions, and then with them: both are told, neither twice.
    let (key, record) = bench.new_key("acme", &[]).await;
    let control = bench.control();
    control.sync_once().await;
    assert_eq!(next(&mut messages).await, Invalidation::key(key.hash()));
    for (delete_sessions, changes) in [(false, 1), (false, 0), (true, 1), (true, 0), (false, 0)] {
        bench.revoke(&record, delete_sessions).await;
        assert_eq!(control.sync_once().await.keys_changed, changes);
        assert_eq!(bench.control().sync_once().await.keys_changed, 0, "another control has nothing to add");
    }
    assert_eq!(next(&mut messages).await, Invalidation::key(key.hash()));
    let told = Invalidation::key_with_sessions(key.hash(), ws("acme"), record.key.principal());
    assert_eq!(next(&mut messages).await, told);
}

#[tokio::test]
async fn a_disabled_key_is_published_as_such_and_enabled_again() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let (key, record) = bench.new_key("acme", &[]).await;
    let control = bench.control();
    control.sync_once().await;
    for (change, disabled, revision) in [(KeyChange::Disable, true, 2), (KeyChange::Enable, false, 3)] {
        bench.operator().change_key(&record.key.key_id, change).await.unwrap();
        assert_eq!(control.sync_once().await.keys_changed, 1);
        let stored: String = bench.server.query(&["GET", &format!("key:{}", key.hash().hex())]).await;
        let stored: KeyContext = serde_json::from_str(&stored).unwrap();
        assert_eq!((stored.disabled, stored.revision), (disabled, revision));
    }
}

#[tokio::test]
async fn a_store_that_is_away_is_a_failure_and_nothing_is_forgotten() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    bench.server.kill();
    let report = control.sync_once().await;
    assert!(report.failed.iter().any(|f| f.contains("`acme` could not be published")), "{report:?}");
    bench.server.restart().await;
    // It is published by the pass that finds Redis back, though that may still fail at the keys.
    let mut all = Vec::new();
    loop {
        let report = tokio::time::timeout(Duration::from_secs(20), control.sync_once()).await.unwrap();
        all.extend(numbers(&report.published));
        if report.failed.is_empty() {
            break;
        }
    }
    assert_eq!(all, [("acme".into(), 1)]);
}

#[tokio::test]
async fn a_running_control_takes_up_edits_symlink_swaps_and_lost_data() {
    let bench = Bench::new().await;
    let folder = bench.folder.path().join("ws");
    // As a mounted ConfigMap: the file is a link into a folder that is swapped as a whole.
    let volume = |version: &str, environment: &str| {
        let target = bench.folder.path().join(version);
        fs::create_dir(&target).unwrap();
        fs::write(target.join("acme.yaml"), format!("workspace: acme\nenvironment: {environment}\n"))
            .unwrap();
        swap(&target, &folder.join("..data"));
    };
    volume("v1", "one");
    std::os::unix::fs::symlink("..data/acme.yaml", folder.join("acme.yaml")).unwrap();
    let shutdown = CancellationToken::new();
    let control = bench.control();
    let running = control.run(shutdown.clone());
    let script = async {
        let environment = async |wanted: &str| {
            eventually(Duration::from_secs(5), || async {
                bench.environment("acme").await.as_deref() == Some(wanted)
            })
            .await;
        };
        environment("one").await;
        volume("v2", "two");
        environment("two").await;
        fs::write(bench.folder.path().join("v2/acme.yaml"), "workspace: acme\nenvironment: three\n").unwrap();
        environment("three").await;
        shutdown.cancel();
    };
    tokio::join!(running, script);
    assert_eq!(bench.current("acme").await, Some(3));
}

fn swap(target: &Path, link: &Path) {
    let new = link.with_file_name("..swap");
    std::os::unix::fs::symlink(target, &new).unwrap();
    fs::rename(&new, link).unwrap();
}

#[tokio::test]
async fn a_key_that_cannot_be_read_keeps_the_set_incomplete() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let (_, record) = bench.new_key("acme", &[]).await;
    let path = bench.folder.path().join("state/keys").join(format!("{}.json", record.key.key_id));
    let good = fs::read(&path).unwrap();
    fs::write(&path, "{").unwrap();
    let control = bench.control();
    assert_eq!(control.sync_once().await.failed.len(), 1);
    assert_eq!(
        bench.server.keys("key*").await,
        Vec::<String>::new(),
        "nobody may say that a key does not exist"
    );
    fs::write(&path, good).unwrap();
    control.sync_once().await;
    assert_eq!(bench.server.keys("key*").await.len(), 2);
}
