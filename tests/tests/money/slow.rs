//! Clients that read slowly, or not at all: they cost neither memory nor others, and do not stay for ever (C094).

use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use obol_testkit::eventually;
use obol_testkit::fake_llm::{Raw, Reply as Says};
use obol_tests::SOON;
use obol_tests::client::{Events, Reply, http};
use obol_tests::world::World;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, interval};

use super::{counters, total};

const CLIENTS: usize = 100;
const MIB: usize = 1 << 20;
/// Of each stream.
const SIZE: usize = 50 * MIB;
const EVENT: usize = 16 << 10;
/// Of a stream that is read to its end.
const WHOLE: usize = 4 * MIB;
/// What all of them together may take: their streams are a hundred times 50 MiB.
const MOST_MEMORY: u64 = 200 << 20;
const BUDGET: &str = "budgets:\n  - { scope: workspace, window: month, limit_usd: 1000 }\n";
const STREAM: &str =
    r#"{"model":"small","stream":true,"messages":[{"role":"user","content":"one two three"}]}"#;
const PLAIN: &str = r#"{"model":"small","messages":[{"role":"user","content":"one two three"}]}"#;

/// A stream of so many bytes and a few words, which is complete.
fn long(size: usize) -> Raw {
    let event = |padding: &str, delta: &str, reason: &str| {
        let choice = format!(r#"{{"index":0,"delta":{delta},"finish_reason":{reason}}}"#);
        format!("data: {{\"id\":\"c\",\"padding\":\"{padding}\",\"choices\":[{choice}]}}\n\n")
    };
    let chunk = Bytes::from(event(&"x".repeat(EVENT), r#"{"content":"word "}"#, "null"));
    let end = event("", "{}", "\"stop\"") + "data: [DONE]\n\n";
    Raw::events(vec![chunk; size / EVENT]).then(end)
}

async fn open(world: &World) -> reqwest::Response {
    let url = format!("{}/v1/chat/completions", world.cluster.public_url(0));
    http().post(url).bearer_auth(&world.key).body(STREAM).send().await.unwrap()
}

/// A client that asks and then reads as little as it is told to. Its kernel takes little for it, too.
async fn asks(world: &World) -> TcpStream {
    let address = world.cluster.replica(0).public;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(256 << 10).unwrap();
    let mut socket = socket.connect(address).await.unwrap();
    let (key, length) = (&world.key, STREAM.len());
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n"
    );
    socket.write_all((head + STREAM).as_bytes()).await.unwrap();
    socket
}

/// A client that reads a little of a stream and then nothing more.
async fn reads_a_little(world: &World) -> TcpStream {
    let mut socket = asks(world).await;
    let mut little = vec![0; 64 << 10];
    socket.read_exact(&mut little).await.unwrap();
    assert!(little.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&little[..200]));
    socket
}

/// The resident memory of the replica, in bytes.
fn resident(world: &World) -> u64 {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", world.cluster.replica(0).process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

async fn chat(world: &World, body: &'static str) -> Reply {
    let url = format!("{}/v1/chat/completions", world.cluster.public_url(0));
    Reply::of(http().post(url).bearer_auth(&world.key).body(body)).await
}

/// Nothing is set aside any more, and the events of all requests.
async fn settled(world: &World) -> Vec<Value> {
    eventually(SOON * 2, || async {
        world.cluster.redis().query::<usize>(&["ZCARD", "ledger:{acme}:open"]).await == 0
    })
    .await;
    let mut events = world.usage().await;
    events.retain(|event| !event["event_id"].as_str().unwrap().contains('/'));
    for (counter, spent) in counters(&world.cluster).await {
        assert_eq!(spent, (total(&events), 0), "{counter}");
    }
    events
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_clients_that_do_not_read_cost_little_memory_and_nobody_else() {
    let world = World::with(1, BUDGET, |builder| builder).await;
    // What a replica takes once it has served a long stream and a short one.
    world.llm.reply_once(Says::Raw(long(WHOLE)));
    assert_eq!(chat(&world, STREAM).await.body.len() / MIB, WHOLE / MIB);
    assert_eq!(chat(&world, PLAIN).await.status, 200);
    let before = resident(&world);

    (0..CLIENTS).for_each(|_| world.llm.reply_once(Says::Raw(long(SIZE))));
    let (little, nothing) = tokio::join!(
        join_all((0..CLIENTS / 2).map(|_| reads_a_little(&world))),
        join_all((0..CLIENTS / 2).map(|_| asks(&world))),
    );
    world.llm.wait_for_calls(2 + CLIENTS as u64).await;
    let mut most = resident(&world);
    let began = Instant::now();
    let mut slowest = Duration::ZERO;
    for _ in 0..40 {
        for body in [PLAIN, STREAM] {
            let asked = Instant::now();
            let reply = chat(&world, body).await;
            slowest = slowest.max(asked.elapsed());
            assert_eq!(reply.status, 200, "{reply:?}");
            assert!(body == PLAIN || reply.text().ends_with("data: [DONE]\n\n"), "{reply:?}");
            most = most.max(resident(&world));
        }
    }
    world.llm.reply_once(Says::Raw(long(WHOLE)));
    let whole = chat(&world, STREAM).await;
    assert!(whole.body.len() >= WHOLE && whole.body.ends_with(b"data: [DONE]\n\n"));
    most = most.max(resident(&world));
    println!(
        "{} MiB before, at most {} MiB with {CLIENTS} streams that nobody reads; others: at most {slowest:?}, {:?} for all",
        before >> 20,
        most >> 20,
        began.elapsed(),
    );
    assert!(most.saturating_sub(before) < MOST_MEMORY, "{} bytes more", most - before);
    assert_eq!(world.llm.left_early(), 0, "none of them was cut");

    drop((little, nothing));
    eventually(SOON, || async { world.llm.left_early() == CLIENTS as u64 }).await;
    let events = settled(&world).await;
    let ended = |outcome: &str| events.iter().filter(|event| event["outcome"] == outcome).count();
    assert_eq!((ended("partial"), ended("ok"), events.len()), (CLIENTS, 83, CLIENTS + 83));
}

/// `OBOL_CLIENT_STALL_TIMEOUT_S`: only who takes nothing at all is cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_takes_nothing_for_long_is_cut_and_its_call_is_settled() {
    const STALLED: usize = 10;
    const LIMIT: Duration = Duration::from_secs(2);
    let with =
        |builder: obol_testkit::cluster::Builder| builder.gateway_env("OBOL_CLIENT_STALL_TIMEOUT_S", "2");
    let world = World::with(1, BUDGET, with).await;
    // A stream that is silent for longer than that.
    let word =
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word\"},\"finish_reason\":null}]}\n\n";
    let end =
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    world.llm.reply(Says::Raw(Raw::events([word]).wait_for_release().then(end)));
    let mut silent = Events::of(open(&world).await);
    assert!(silent.next(SOON).await.unwrap().contains("word"));

    (0..STALLED).for_each(|_| world.llm.reply_once(Says::Raw(long(SIZE))));
    let began = Instant::now();
    let stalled = join_all((0..STALLED).map(|_| asks(&world))).await;
    // A client that takes a little at a time, for longer than the others have.
    let slow = async {
        world.llm.wait_for_calls(1 + STALLED as u64).await;
        world.llm.reply_once(Says::Raw(long(SIZE)));
        let mut socket = asks(&world).await;
        let mut pace = interval(Duration::from_millis(50));
        let mut piece = vec![0; 16 << 10];
        while began.elapsed() < 3 * LIMIT || world.llm.left_early() < STALLED as u64 {
            pace.tick().await;
            socket.read_exact(&mut piece).await.unwrap();
        }
        socket
    };
    let cut = async {
        eventually(SOON * 2, || async { world.llm.left_early() == STALLED as u64 }).await;
        began.elapsed()
    };
    let (slow, cut) = tokio::join!(slow, cut);
    println!("cut after {cut:?}");
    assert!(cut >= LIMIT, "{cut:?}");
    assert_eq!(world.llm.left_early(), STALLED as u64, "the slow one is served");
    drop(slow);
    eventually(SOON, || async { world.llm.left_early() == 1 + STALLED as u64 }).await;
    world.llm.release();
    assert!(silent.next(SOON).await.unwrap().contains("stop"));
    assert_eq!(silent.next(SOON).await.as_deref(), Some("data: [DONE]"));
    for mut socket in stalled {
        let mut all = Vec::new();
        // A reset says as much as an end.
        drop(socket.read_to_end(&mut all).await);
        assert!(all.len() < SIZE && !all.ends_with(b"0\r\n\r\n"), "it does not look complete");
    }
    let events = settled(&world).await;
    let ended = |outcome: &str| events.iter().filter(|event| event["outcome"] == outcome).count();
    assert_eq!((ended("partial"), ended("ok"), events.len()), (STALLED + 1, 1, STALLED + 2), "{events:?}");
}
