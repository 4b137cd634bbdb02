//! What control finds in the place of what it published, and of its folder.

use obol_model::snapshot::LARGEST_DOCUMENT;

use super::*;

/// The value is made in the server, and must not leave it.
async fn make_large(bench: &Bench, key: &str, bytes: usize) {
    bench.server.cli(&["DEL", key]).await;
    bench.server.cli(&["SETRANGE", key, &(bytes - 1).to_string(), "x"]).await;
}

#[tokio::test]
async fn what_is_too_large_to_be_read_is_repaired() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    bench.workspace("beta", "one");
    let (_, record) = bench.new_key("acme", &[]).await;
    let (_, revoked) = bench.new_key("acme", &[]).await;
    let control = bench.control();
    control.sync_once().await;
    let unknown = format!("key:{}", "ab".repeat(32));
    let name = |record: &KeyRecord| format!("key:{}", record.hash.hex());
    // Larger than what can be read in time, the others just too large.
    make_large(&bench, "policy:{beta}", 500 << 20).await;
    make_large(&bench, &name(&record), KeyContext::LARGEST + 1).await;
    make_large(&bench, &unknown, KeyContext::LARGEST + 1).await;
    bench.server.cli(&["DEL", &name(&revoked)]).await;
    bench.server.cli(&["HSET", &name(&revoked), "of", "another type"]).await;
    let report = control.sync_once().await;
    assert_eq!((numbers(&report.healed), report.failed), (vec![("beta".into(), 1)], vec![]));
    assert_eq!(report.keys_changed, 3);
    assert_eq!(bench.current("beta").await, Some(1));
    let stored: String = bench.server.query(&["GET", &name(&record)]).await;
    assert_eq!(serde_json::from_str::<KeyContext>(&stored).unwrap(), record.key);
    assert!(bench.server.keys(&unknown).await.is_empty());
    for key in ["snap:workspace:{acme}", "snap:fingerprint:{acme}"] {
        make_large(&bench, key, LARGEST_DOCUMENT + 1).await;
        assert_eq!(numbers(&control.sync_once().await.healed), [("acme".into(), 1)], "{key}");
    }
    // Taking away does not fail of it either.
    make_large(&bench, "snap:fingerprint:{beta}", LARGEST_DOCUMENT + 1).await;
    bench.remote().unpublish(&ws("beta")).await.unwrap();
    assert_eq!(bench.publisher.read(&ws("beta")).await.unwrap(), None);
}

#[tokio::test]
async fn files_that_all_vanish_beside_a_broken_one_unpublish_nothing() {
    let bench = Bench::new().await;
    bench.workspace("acme", "one");
    bench.write("broken.yaml", "workspace: [");
    bench.control().sync_once().await;
    let folder = bench.folder.path().join("ws");
    fs::remove_file(folder.join("acme.yaml")).unwrap();
    // Also by a control that starts then.
    let control = bench.control();
    for _ in 0..3 {
        let report = control.sync_once().await;
        assert_eq!((report.failed.len(), report.unpublished.len()), (1, 0), "{report:?}");
    }
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "").unwrap();
    for control in [&control, &bench.control()] {
        let report = control.sync_once().await;
        assert_eq!((report.failed.len(), report.unpublished.len()), (1, 0), "{report:?}");
    }
    assert_eq!(bench.current("acme").await, Some(1));
}

/// Whoever found something damaged replaces that, and nothing that somebody wrote since.
#[tokio::test]
async fn what_was_found_damaged_gives_way_and_what_came_since_does_not() {
    let bench = Bench::new().await;
    let (acme, first, newest) = (ws("acme"), docs("acme", "a", rev(1)), docs("acme", "b", rev(10)));
    let damage = async || {
        bench.publisher.publish(&acme, &first, rev(1)).await.unwrap();
        bench.server.cli(&["SET", "snap:fingerprint:{acme}", &fingerprint_of(9)]).await;
        bench.publisher.read(&acme).await.unwrap().unwrap()
    };
    let found = damage().await;
    bench.publisher.publish(&acme, &newest, rev(10)).await.unwrap();
    let late = [
        bench.publisher.repair(&acme, &first, rev(1), Some(&found)).await,
        bench.publisher.unpublish(&acme, rev(1), Some(&found)).await,
    ];
    for refused in late {
        assert!(
            matches!(refused, Err(PublishError::NotNewer { there, .. }) if there == rev(10)),
            "{refused:?}"
        );
    }
    assert_eq!(bench.publisher.read(&acme).await.unwrap(), Some(newest));
    // While it is still there it protects nothing, whatever revision it names.
    bench.server.cli(&["FLUSHALL"]).await;
    let found = damage().await;
    bench.publisher.repair(&acme, &first, rev(1), Some(&found)).await.unwrap();
    assert_eq!(bench.publisher.read(&acme).await.unwrap(), Some(first.clone()));
    bench.server.cli(&["FLUSHALL"]).await;
    let found = damage().await;
    bench.publisher.unpublish(&acme, rev(1), Some(&found)).await.unwrap();
    assert_eq!(bench.publisher.read(&acme).await.unwrap(), None);

    let (_, record) = bench.new_key("acme", &[]).await;
    let (hash, name) = (record.hash, format!("key:{}", record.hash.hex()));
    let mut since = record.key.clone();
    (since.disabled, since.revision) = (true, 2);
    bench.server.cli(&["SET", &name, "garbage"]).await;
    assert!(bench.publisher.put_key(&hash, &since, None).await.unwrap());
    assert!(!bench.publisher.put_key(&hash, &record.key, Some(b"garbage")).await.unwrap());
    assert!(!bench.publisher.remove_key(&hash, b"garbage").await.unwrap());
    let stored: String = bench.server.query(&["GET", &name]).await;
    assert_eq!(serde_json::from_str::<KeyContext>(&stored).unwrap(), since);
    assert!(bench.publisher.put_key(&hash, &record.key, Some(stored.as_bytes())).await.unwrap());
}
