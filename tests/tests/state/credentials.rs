//! The key that seals credentials is rotated while agents work (docs/operations.md, "Credentials").

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use obol_testkit::cluster::Cluster;
use obol_testkit::eventually;
use obol_tests::SOON;
use obol_tests::client::Mcp;
use obol_tests::world::World;

const RING: &str = "OBOL_CREDENTIAL_KEY";
const NEW: &str = "new:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

/// Which keys seal what is published, without the secrets themselves.
async fn sealed_by(cluster: &Cluster) -> Vec<String> {
    let document: Option<String> = cluster.redis().query(&["GET", "snap:workspace:{acme}"]).await;
    let document = document.unwrap();
    let sealed = document.split('"').filter_map(|text| text.strip_prefix("v1.")?.split('.').next());
    sealed.map(str::to_owned).collect()
}

/// One replica after another, the balancer never without one.
async fn roll(cluster: &Cluster) {
    for replica in 0..cluster.size() {
        cluster.terminate(replica);
        assert_eq!(cluster.replica(replica).process.wait(SOON * 3).await.code(), Some(0));
        cluster.restart(replica).await;
    }
}

#[tokio::test]
async fn a_credential_key_is_rotated_while_agents_work() {
    let mut world = World::start(2).await;
    let old = world.cluster.env(RING).to_owned();
    assert_eq!(sealed_by(&world.cluster).await, ["test", "test"]);
    let client = world.connect().await;
    let (stop, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
    let agent = async |client: &Mcp| {
        while !stop.load(Ordering::Relaxed) {
            // A replica that is about to end may cut a connection; what counts is what a credential does.
            let reply = client.call("fake__echo", "{}").await;
            assert!(!reply.text().contains("credential"), "{reply:?}");
            assert_ne!(reply.status, 503, "{reply:?}");
            calls.fetch_add(1, Ordering::Relaxed);
        }
    };
    let url = world.url();
    let rotation = async {
        let cluster = &mut world.cluster;
        // The new key in front on the replicas, then on control, then the old one out.
        cluster.set_env(RING, &format!("{NEW},{old}"));
        roll(cluster).await;
        cluster.restart_control().await;
        eventually(SOON, || async { sealed_by(cluster).await == ["new", "new"] }).await;
        cluster.set_env(RING, NEW);
        roll(cluster).await;
        cluster.restart_control().await;
        let done = calls.load(Ordering::Relaxed);
        eventually(SOON, || async { calls.load(Ordering::Relaxed) > done + 10 }).await;
        stop.store(true, Ordering::Relaxed);
    };
    let agent = agent(&client);
    tokio::join!(rotation, agent);
    client.call("fake__echo", "{}").await.result();
    assert_eq!(
        obol_tests::world::chat(&url, &world.key, r#"{"model":"small","messages":[]}"#).await.status,
        200
    );
}
