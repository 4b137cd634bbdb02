//! One warm flight to Redis before the upstream is called (DESIGN §5).

use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_testkit::fake_mcp::Stall;
use obol_testkit::flights::CountingProxy;
use obol_testkit::redis::RedisServer;
use obol_tests::SOON;
use obol_tests::world::{World, with_collected};

/// Measured so often: what a replica does of itself now and then may fall into one of them.
const TIMES: usize = 5;

async fn counted() -> (RedisServer, CountingProxy, World) {
    let redis = RedisServer::start().await;
    let proxy = CountingProxy::start(redis.addr()).await;
    let world =
        World::with(1, "", |builder| builder.redis_url(&redis.url()).gateway_redis_url(&proxy.url())).await;
    (redis, proxy, world)
}

async fn settled(redis: &RedisServer, world: &World, calls: usize) {
    let events = async || {
        let waiting = redis.query(&["XRANGE", "usage:{acme}", "-", "+"]).await;
        with_collected(&world.cluster, "acme", waiting).len()
    };
    eventually(SOON, async || events().await == calls).await;
}

fn assert_one_flight(measured: &[Vec<Vec<String>>]) {
    let over = measured.iter().filter(|flights| flights.len() > 1).count();
    assert!(over <= 1, "more than one flight before the upstream was called: {measured:?}");
}

#[tokio::test]
async fn a_warm_tool_call_takes_one_flight() {
    let (redis, proxy, world) = counted().await;
    let client = world.connect().await;
    let mut measured = Vec::new();
    for number in 1..=TIMES + 3 {
        if number > 3 {
            proxy.reset();
        }
        world.mcp.stall(Stall::UntilReleased);
        let before = world.mcp.calls("echo");
        // With an idempotency key it takes no other.
        let key = if number % 2 == 0 {
            format!(r#","_meta":{{"io.obol/idempotency-key":"k-{number}"}}"#)
        } else {
            String::new()
        };
        let params = format!(r#"{{"name":"fake__echo","arguments":{{}}{key}}}"#);
        let call = client.rpc("tools/call", &params);
        let watch = async {
            world.mcp.wait_until(|counts| counts.calls("echo") > before).await;
            let flights = proxy.commands();
            world.mcp.release();
            flights
        };
        let (reply, flights) = tokio::join!(call, watch);
        reply.result();
        settled(&redis, &world, number).await;
        if number > 3 {
            measured.push(flights);
        }
    }
    assert_one_flight(&measured);
    assert!(measured.iter().any(|flights| !flights.is_empty()), "the proxy saw no session being resumed");
}

#[tokio::test]
async fn a_warm_completion_takes_at_most_one_flight() {
    let (redis, proxy, world) = counted().await;
    world.llm.reply(Says::Stall);
    let mut measured = Vec::new();
    for number in 1..=TIMES + 3 {
        if number > 3 {
            proxy.reset();
        }
        let call = world.chat(r#"{"model":"small","messages":[{"role":"user","content":"hi"}]}"#);
        let watch = async {
            world.llm.wait_for_calls(number as u64).await;
            let flights = proxy.commands();
            world.llm.release();
            flights
        };
        let (reply, flights) = tokio::join!(call, watch);
        assert_eq!(reply.status, 200, "{reply:?}");
        settled(&redis, &world, number).await;
        if number > 3 {
            measured.push(flights);
        }
    }
    assert_one_flight(&measured);
}
