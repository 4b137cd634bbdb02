//! `SIGTERM` to a replica (DESIGN §13).

use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::fake_mcp::Stall;
use obol_tests::SOON;
use obol_tests::client::{Mcp, Reply, http};
use obol_tests::world::World;
use tokio::io::AsyncWriteExt as _;
use tokio::time::Instant;

#[tokio::test]
async fn what_is_in_flight_finishes_and_what_is_open_ends_at_once() {
    let world = World::start(2).await;
    let client = Mcp::connect(&world.cluster.public_url(0), &world.key).await;
    let mut stream = client.listen().await;
    world.mcp.stall(Stall::UntilReleased);
    let drain = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
        world.cluster.terminate(0);
        let hint = stream.next(SOON).await.expect("a hint when to come back");
        assert!(hint.starts_with("retry: "), "{hint}");
        assert_eq!(stream.next(SOON).await, None);
        let admin = world.cluster.admin_url(0);
        let ready = Reply::of(http().get(format!("{admin}/readyz"))).await;
        assert_eq!((ready.status, ready.json()["reason"].clone()), (503, "draining".into()));
        assert_eq!(Reply::of(http().get(format!("{admin}/healthz"))).await.status, 200);
        // The session goes on elsewhere meanwhile.
        client.at(&world.url()).rpc("ping", "{}").await.result();
        world.mcp.release();
    };
    let (reply, ()) = tokio::join!(client.call("fake__echo", "{}"), drain);
    reply.result();
    let ended = world.cluster.replica(0).process.wait(SOON).await;
    assert_eq!(ended.code(), Some(0));
    assert_eq!(world.usage().await.len(), 1, "usage is written before the end");
    let moved = client.at(&world.url());
    moved.call("fake__echo", "{}").await.result();
}

#[tokio::test]
async fn a_call_that_never_ends_is_cut_at_the_deadline() {
    let world = World::with(1, "", |builder| builder.gateway_env("OBOL_DRAIN_TIMEOUT_S", "3")).await;
    let client = world.connect().await;
    world.mcp.stall(Stall::UntilReleased);
    let drain = async {
        world.mcp.wait_until(|counts| counts.calls("echo") == 1).await;
        let start = Instant::now();
        world.cluster.terminate(0);
        let ended = world.cluster.replica(0).process.wait(SOON).await;
        (ended.code(), start.elapsed())
    };
    let (_, (code, after)) =
        tokio::join!(Reply::try_of(client.post(
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"fake__echo","arguments":{}}}"#
    )), drain);
    assert_eq!(code, Some(75));
    assert!(after < Duration::from_secs(5), "the drain took {after:?}");
    let events = world.usage().await;
    assert_eq!((events.len(), &events[0]["outcome"]), (1, &"partial".into()));
}

#[tokio::test]
async fn connections_that_bring_no_request_do_not_hold_up_a_drain() {
    let world = World::start(1).await;
    let replica = world.cluster.replica(0);
    let address = replica.public;
    let mut silent = Vec::new();
    for said in [&b""[..], b"P", b"POST /mcp HTTP/1.1\r\nHost: ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(said).await.unwrap();
        silent.push(stream);
    }
    world.cluster.terminate(0);
    assert_eq!(replica.process.wait(SOON).await.code(), Some(0), "nothing had to be cut");
}

#[tokio::test]
async fn during_the_delay_everything_is_served_and_connections_are_told_to_go() {
    let world = World::with(1, "", |builder| builder.gateway_env("OBOL_DRAIN_DELAY_S", "5")).await;
    let client = world.connect().await;
    let replica = world.cluster.replica(0);
    world.cluster.terminate(0);
    let admin = world.cluster.admin_url(0);
    eventually(SOON, || async { Reply::of(http().get(format!("{admin}/readyz"))).await.status == 503 }).await;
    let reply = client.at(&world.cluster.public_url(0)).call("fake__echo", "{}").await;
    reply.result();
    assert_eq!(reply.header("connection"), "close");
    assert_eq!(replica.process.wait(SOON * 2).await.code(), Some(0));
}
