//! What operators change beside the watched directory: rollbacks, unpublishing, commands beside a running control.

use super::*;

#[tokio::test]
async fn a_rollback_is_a_new_revision_and_stands_until_the_file_changes() {
    let bench = Bench::new().await;
    let control = bench.control();
    for environment in ["one", "two", "three"] {
        bench.workspace("acme", environment);
        control.sync_once().await;
    }
    let ring = KeyRing::parse(RING).unwrap();
    let (to, revision, effect) = bench.remote().rollback(&ws("acme"), Some(rev(1)), &ring).await.unwrap();
    assert!(matches!(effect, obol_control::Effect::Replicas));
    assert_eq!((to, revision), (rev(1), rev(4)));
    assert_eq!(bench.environment("acme").await.as_deref(), Some("one"), "at once");
    // The file says what it said before, also to the next control.
    assert_eq!(published(&control.sync_once().await), []);
    assert_eq!(published(&bench.control().sync_once().await), []);
    assert_eq!(bench.environment("acme").await.as_deref(), Some("one"));
    bench.server.cli(&["FLUSHALL"]).await;
    assert_eq!(numbers(&control.sync_once().await.healed), [("acme".into(), 4)]);
    bench.workspace("acme", "four");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 5)]);
    // Without a target: what was there before.
    let (to, revision, _) = bench.remote().rollback(&ws("acme"), None, &ring).await.unwrap();
    assert_eq!((to, revision), (rev(4), rev(6)));
    let kept: Vec<(u64, Origin)> = bench
        .store
        .history(&ws("acme"))
        .await
        .unwrap()
        .iter()
        .map(|i| (i.revision.number, i.origin))
        .collect();
    assert_eq!(
        kept,
        [
            (6, Origin::Rollback { to: rev(4) }),
            (5, Origin::File),
            (4, Origin::Rollback { to: rev(1) }),
            (3, Origin::File),
            (2, Origin::File),
            (1, Origin::File)
        ]
    );
    let missing = bench.remote().rollback(&ws("acme"), Some(rev(77)), &ring).await.unwrap_err().to_string();
    assert_eq!(
        missing,
        "`acme` has no revision 1.77 any more, or never had; `obol workspace show acme` lists them"
    );
    let other = KeyRing::parse("c:AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=").unwrap();
    let sealed = bench.remote().rollback(&ws("acme"), None, &other).await.unwrap_err().to_string();
    assert!(sealed.contains("`OBOL_CREDENTIAL_KEY` must still hold"), "{sealed}");
    assert_eq!(bench.current("acme").await, Some(6), "nothing changed");
}

#[tokio::test]
async fn what_was_rolled_back_is_sealed_by_the_first_key() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    bench.control().sync_once().await;
    bench.workspace("acme", "two");
    bench.control_with(ROTATED).sync_once().await;
    let ring = KeyRing::parse(ROTATED).unwrap();
    bench.remote().rollback(&ws("acme"), None, &ring).await.unwrap();
    sealed_by_the_first_key(&bench).await;
    // And what was rolled back before the ring was rotated is sealed again, though its file has not changed.
    let old = KeyRing::parse(RING).unwrap();
    let bench = Bench::new().await;
    for environment in ["one", "two"] {
        bench.workspace("acme", environment);
        bench.control().sync_once().await;
    }
    bench.remote().rollback(&ws("acme"), None, &old).await.unwrap();
    assert_eq!(published(&bench.control_with(ROTATED).sync_once().await), [("acme".into(), 4)]);
    assert_eq!(published(&bench.control_with(ROTATED).sync_once().await), []);
    sealed_by_the_first_key(&bench).await;
}

async fn sealed_by_the_first_key(bench: &Bench) {
    let docs = bench.publisher.read(&ws("acme")).await.unwrap().unwrap();
    let text = String::from_utf8(docs.workspace.clone()).unwrap();
    assert!(text.contains("\"v1.b.") && !text.contains("\"v1.a."), "{text}");
    assert_eq!(bench.environment("acme").await.as_deref(), Some("one"));
}

#[tokio::test]
async fn an_operator_unpublishes_and_the_file_does_not_bring_it_back_before_it_changes() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    control.sync_once().await;
    let older = bench.publisher.read(&ws("acme")).await.unwrap().unwrap();
    bench.operator().unpublish(&ws("acme")).await.unwrap();
    assert!(bench.current("acme").await.is_some(), "nobody told Redis yet");
    control.sync_once().await;
    assert_eq!(bench.current("acme").await, None);
    assert_eq!(published(&bench.control().sync_once().await), []);
    // A gateway that had asked before, and was late.
    bench.publisher.publish(&ws("acme"), &older, rev(1)).await.unwrap();
    control.sync_once().await;
    assert_eq!(bench.current("acme").await, None, "resurrected");
    let ring = KeyRing::parse(RING).unwrap();
    let (to, revision, _) = bench.remote().rollback(&ws("acme"), None, &ring).await.unwrap();
    assert_eq!((to, revision), (rev(1), rev(2)), "what was there comes back");
    bench.remote().unpublish(&ws("acme")).await.unwrap();
    assert_eq!(bench.current("acme").await, None, "at once");
    bench.workspace("acme", "two");
    assert_eq!(published(&control.sync_once().await), [("acme".into(), 3)]);
    let nowhere = bench.remote().unpublish(&ws("nowhere")).await.unwrap_err().to_string();
    assert_eq!(nowhere, "no workspace `nowhere` was ever published here");
}

#[tokio::test]
async fn a_command_publishes_beside_control_and_without_a_file() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    control.sync_once().await;
    let ring = KeyRing::parse(RING).unwrap();
    let outside = bench.folder.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let compile = |id: &str, environment: &str| {
        let path = outside.join(format!("{id}.yaml"));
        fs::write(&path, format!("workspace: {id}\nenvironment: {environment}\n")).unwrap();
        let env = |_: &str| None;
        let options = obol_control::CompileOptions { key_ring: Some(&ring), env: &env };
        obol_control::compile_file(&path, &options).unwrap()
    };
    let remote = bench.remote();
    let publish = async |id: &str, environment: &str, raise: bool| {
        let (revision, new, _) = remote.publish(compile(id, environment), &ring, raise).await.unwrap();
        (revision, new)
    };
    assert_eq!(publish("acme", "ci", false).await, (rev(2), true));
    assert_eq!(publish("acme", "ci", false).await, (rev(2), false), "the same again");
    assert_eq!(publish("beta", "ci", false).await, (rev(1), true));
    assert_eq!(published(&control.sync_once().await), [], "the file has nothing new to say");
    assert_eq!(bench.environment("acme").await.as_deref(), Some("ci"));
    bench.server.cli(&["FLUSHALL"]).await;
    assert_eq!(control.sync_once().await.healed.len(), 2, "also what has no file");
    let raised = Revision { epoch: 2, number: 1 };
    assert_eq!(publish("acme", "ci", true).await, (raised, true));
    bench.workspace("acme", "two");
    control.sync_once().await;
    let docs = bench.publisher.read(&ws("acme")).await.unwrap().unwrap();
    let (snapshot, _) = docs.decode(&ws("acme")).unwrap();
    assert_eq!((snapshot.revision, snapshot.environment.as_str()), (Revision { epoch: 2, number: 2 }, "two"));
    assert!(bench.operator().publish(compile("acme", "x"), &ring, false).await.is_err(), "without Redis");
}

#[tokio::test]
async fn two_controls_and_a_command_end_consistent() {
    let bench = Bench::new().await;
    bench.workspace("acme", "start");
    let (one, two) = (bench.control(), bench.control());
    one.sync_once().await;
    let ring = KeyRing::parse(RING).unwrap();
    let mut highest = 0;
    for round in 0..10 {
        bench.workspace("acme", &format!("round{round}"));
        let remote = bench.remote();
        let workspace = ws("acme");
        let (a, b, c) =
            tokio::join!(one.sync_once(), two.sync_once(), remote.rollback(&workspace, Some(rev(1)), &ring));
        assert!(a.failed.is_empty() && b.failed.is_empty() && c.is_ok(), "{a:?} {b:?} {c:?}");
        one.sync_once().await;
        two.sync_once().await;
        let head = bench.store.head(&ws("acme")).await.unwrap().unwrap();
        assert_eq!(bench.current("acme").await, Some(head.revision.number), "Redis says what the store says");
        assert!(head.revision.number > highest, "never lower");
        highest = head.revision.number;
    }
    let numbers: Vec<u64> =
        bench.store.history(&ws("acme")).await.unwrap().iter().map(|info| info.revision.number).collect();
    assert!(numbers.is_sorted_by(|a, b| a > b), "each number once: {numbers:?}");
}

async fn everything(bench: &Bench) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for key in bench.server.keys("*").await {
        let value: Vec<u8> = bench.server.query(&["DUMP", &key]).await;
        all.push((key, value));
    }
    all
}

#[tokio::test]
async fn without_redis_changes_are_recorded_and_what_it_numbers_is_not() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    let control = bench.control();
    control.sync_once().await;
    let (_, key) = bench.new_key("acme", &[]).await;
    control.sync_once().await;
    let (remote, ring) = (bench.remote(), KeyRing::parse(RING).unwrap());
    bench.server.kill();

    let away = |effect: &Effect| matches!(effect, Effect::NotYet(PublishError::Unavailable(_)));
    let disabled = remote.change_key(&key.key.key_id, KeyChange::Disable).await.unwrap();
    assert!(disabled.0.key.disabled && away(&disabled.1), "{disabled:?}");
    let (made, _, effect) = remote.new_key(NewKey::named(ws("acme"), "late")).await.unwrap();
    assert!(away(&effect), "{effect:?}");
    let rollback = remote.rollback(&ws("acme"), Some(rev(1)), &ring).await.unwrap_err();
    assert!(rollback.to_string().starts_with("nothing was recorded, since"), "{rollback}");
    assert_eq!(bench.store.head(&ws("acme")).await.unwrap().unwrap().revision, rev(1));
    let effect = remote.unpublish(&ws("acme")).await.unwrap();
    assert!(away(&effect), "{effect:?}");
    assert!(!bench.store.head(&ws("acme")).await.unwrap().unwrap().published);

    bench.server.restart().await;
    eventually(Duration::from_secs(10), || async { control.sync_once().await.failed.is_empty() }).await;
    assert_eq!(bench.publisher.read(&ws("acme")).await.unwrap(), None);
    let stored: String = bench.server.query(&["GET", &format!("key:{}", key.hash.hex())]).await;
    assert!(serde_json::from_str::<KeyContext>(&stored).unwrap().disabled);
    assert_eq!(bench.server.keys(&format!("key:{}", made.hash().hex())).await.len(), 1);
}

#[tokio::test]
async fn an_operator_of_another_store_changes_neither_redis_nor_that_store() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    bench.control().sync_once().await;
    let before = everything(&bench).await;

    let other = Arc::new(FileStore::new(bench.folder.path().join("other")));
    let publisher: Arc<dyn Publisher> = bench.publisher.clone();
    let stranger = Operator::new(other.clone(), Some(publisher), bench.clock.clone(), "user:test".into());
    // Not there yet: it stays so.
    assert!(stranger.prepare().await.is_err() && !other.exists());
    assert!(stranger.new_key(NewKey::named(ws("acme"), "ci")).await.is_err() && !other.exists());

    other.prepare().await.unwrap();
    let alone = Operator::new(other.clone(), None, bench.clock.clone(), "user:test".into());
    let (_, key, _) = alone.new_key(NewKey::named(ws("acme"), "ci")).await.unwrap();
    let ring = KeyRing::parse(RING).unwrap();
    let by = obol_control::Stamp { actor: "test".into(), at: bench.clock.now() };
    let new = obol_control::NewRevision {
        workspace: ws("acme"),
        after: None,
        revision: rev(7),
        documents: docs("acme", "other", rev(7)),
        origin: Origin::Command,
        file: None,
    };
    other.publish(new, &by).await.unwrap();
    let path = bench.folder.path().join("ws/acme.yaml");
    let env = |_: &str| Some("s3cret".to_owned());
    let options = obol_control::CompileOptions { key_ring: Some(&ring), env: &env };
    let compiled = obol_control::compile_file(&path, &options).unwrap();
    let generation = other.generation().await.unwrap();
    let refusals = [
        stranger.prepare().await.unwrap_err(),
        stranger.publish(compiled, &ring, false).await.unwrap_err(),
        stranger.rollback(&ws("acme"), Some(rev(7)), &ring).await.unwrap_err(),
        stranger.unpublish(&ws("acme")).await.unwrap_err(),
        stranger.new_key(NewKey::named(ws("acme"), "ci")).await.map(drop).unwrap_err(),
        stranger.change_key(&key.key.key_id, KeyChange::Disable).await.unwrap_err(),
    ];
    for refusal in refusals {
        assert!(refusal.to_string().contains("wrong state directory or database"), "{refusal}");
    }
    assert_eq!(other.generation().await.unwrap(), generation);
    assert_eq!(everything(&bench).await, before);

    // Nobody's any more.
    bench.server.cli(&["DEL", "keys:loaded"]).await;
    let (_, effect) = stranger.change_key(&key.key.key_id, KeyChange::Disable).await.unwrap();
    assert!(matches!(effect, Effect::Replicas), "{effect:?}");
}
