//! Everything that speaks to Redis, with TLS and an authority of one's own.

use obol_testkit::eventually;
use obol_testkit::redis_tls::RedisTls;
use obol_tests::SOON;
use obol_tests::world::World;

#[tokio::test]
async fn replicas_control_and_commands_reach_redis_by_tls() {
    let redis = RedisTls::start().await;
    let ca = redis.ca_file();
    let world = World::with(2, "", |builder| {
        builder
            // The kit's own questions go past TLS.
            .redis_url(&redis.server().url())
            .gateway_redis_url(&redis.url())
            .control_env("OBOL_REDIS_URL", &redis.url())
            .env("OBOL_REDIS_CA_FILE", ca.to_str().unwrap())
    })
    .await;
    let client = world.connect().await;
    for replica in 0..2 {
        let client = client.at(&world.cluster.public_url(replica));
        client.call("fake__echo", "{}").await.result();
    }
    // The subscriber's connection too: a revocation is heard.
    let (id, url) = (world.key.clone(), redis.url());
    let hash = id.parse::<obol_model::VirtualKey>().unwrap().hash().hex();
    let command = world
        .cluster
        .obol(["key", "revoke", &format!("k-{}", &hash[..12])])
        .env("OBOL_REDIS_URL", &url)
        .env("OBOL_STATE_DIR", world.cluster.state_dir())
        .spawn();
    assert!(command.wait(SOON * 3).await.success(), "{:?}", command.lines());
    command.ended().await.unwrap();
    eventually(SOON, || async { client.call("fake__echo", "{}").await.status == 401 }).await;

    // Without the authority's certificate nobody trusts it, and says so.
    let stranger =
        world.cluster.obol(["run"]).env("OBOL_REDIS_URL", &url).env("OBOL_REDIS_CA_FILE", "").spawn();
    assert_eq!(stranger.wait(SOON * 3).await.code(), Some(1), "{:?}", stranger.lines());
    stranger.ended().await.unwrap();
    let said = stranger.lines().join("\n");
    assert!(said.contains("certificate"), "{said}");
}
