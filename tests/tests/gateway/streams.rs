//! What reaches a client on its `GET` stream.

use obol_testkit::eventually;
use obol_testkit::fake_mcp::FakeMcp;
use obol_tests::SOON;
use obol_tests::world::{World, workspace};

const CHANGED: &str = "notifications/tools/list_changed";

#[tokio::test]
async fn a_changed_list_is_announced_by_upstream_or_by_publication() {
    let world = World::start(2).await;
    let client = world.connect().await;
    let mut stream = client.listen().await;
    eventually(SOON, || async { world.mcp.open_streams() > 0 }).await;
    client.tools().await;
    world.mcp.add_tool(r#"{"name":"late","description":"Came later","inputSchema":{"type":"object"}}"#);
    let seen = stream.until(CHANGED, SOON).await;
    assert_eq!(seen.len(), 1, "{seen:?}");
    eventually(SOON, || async { client.tools().await.contains(&"fake__late".to_owned()) }).await;

    let second = FakeMcp::start().await;
    let more = format!(
        "  second: {{ transport: streamable_http, url: \"{}\", allow_private: true }}\n",
        second.url()
    );
    world.cluster.write_workspace("acme", &workspace("acme", &world.mcp, &world.llm, &more));
    stream.until(CHANGED, SOON).await;
    eventually(SOON, || async { client.tools().await.contains(&"second__echo".to_owned()) }).await;

    assert_eq!(client.delete().await.status, 204);
}

#[tokio::test]
async fn a_subscribed_resource_is_announced_and_another_one_is_not() {
    let world = World::start(1).await;
    let client = world.connect().await;
    let other = world.connect().await;
    let mut stream = client.listen().await;
    client.ok("resources/subscribe", r#"{"uri":"fake+demo://text"}"#).await;
    other.ok("resources/subscribe", r#"{"uri":"fake+demo://item/1"}"#).await;
    eventually(SOON, || async {
        world.mcp.resource_updated("demo://item/1") > 0 || world.mcp.open_streams() > 0
    })
    .await;
    world.mcp.resource_updated("demo://item/1");
    eventually(SOON, || async { world.mcp.resource_updated("demo://text") > 0 }).await;
    let message = stream.message(SOON).await;
    assert_eq!(message["method"], "notifications/resources/updated");
    assert_eq!(message["params"]["uri"], "fake+demo://text");

    client.ok("resources/unsubscribe", r#"{"uri":"fake+demo://text"}"#).await;
    world.mcp.resource_updated("demo://text");
    world.mcp.add_tool(r#"{"name":"late","inputSchema":{"type":"object"}}"#);
    let seen = stream.until(CHANGED, SOON).await;
    assert!(seen.len() <= 2, "{seen:?}");
}

#[tokio::test]
async fn a_deleted_session_ends_its_stream() {
    let world = World::start(1).await;
    let client = world.connect().await;
    let mut stream = client.listen().await;
    assert_eq!(client.delete().await.status, 204);
    assert_eq!(stream.next(SOON).await, None);
}

#[tokio::test]
async fn the_newest_stream_of_a_session_takes_over() {
    let world = World::start(1).await;
    let client = world.connect().await;
    let mut older = client.listen().await;
    let _newer = client.listen().await;
    assert_eq!(older.next(SOON).await, None);
}
