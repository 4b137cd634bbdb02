//! The channel between replicas: a real Redis, real sockets, an inbox behind a plain HTTP route.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "these are tests, and own the tasks that they spawn"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use obol_auth::ServiceTokens;
use obol_dial::{DialOptions, Dialer};
use obol_model::{Clock as _, ReplicaId, Secret, SystemClock};
use obol_peer::{
    Ack, Answer, Channel, Handler, Inbox, InboxOptions, Message, PATH, PeerError, Peers, Refused, Registry,
};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use parking_lot::Mutex;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const SECRET: &str = "a shared secret of more than 32 bytes";
const SOON: Duration = Duration::from_secs(10);

fn tokens(issuer: &str) -> Arc<ServiceTokens> {
    Arc::new(ServiceTokens::from_secret(issuer, &Secret::new(SECRET.to_owned())).unwrap())
}

fn token(issuer: &str, audience: &str, subject: &str) -> String {
    let token = tokens(issuer).sign(audience, subject, SystemClock.now()).unwrap();
    token.expose().clone()
}

/// Counts what it is given; `slow` never ends, other kinds than its own are unknown.
#[derive(Default)]
struct Counting(Mutex<BTreeMap<String, u32>>);

impl Counting {
    fn of(&self, body: &str) -> u32 {
        self.0.lock().get(body).copied().unwrap_or(0)
    }
}

#[async_trait]
impl Handler for Counting {
    async fn handle(&self, _: &ReplicaId, kind: &str, body: &RawValue) -> Result<Ack, Refused> {
        if !matches!(kind, "note" | "slow" | "lingering" | "idle" | "bad") {
            return Err(Refused::UnknownKind);
        }
        *self.0.lock().entry(body.get().to_owned()).or_default() += 1;
        match kind {
            "slow" => std::future::pending().await,
            "lingering" => tokio::time::sleep(Duration::from_millis(100)).await,
            "idle" => return Ok(Ack::NothingToDo),
            "bad" => return Err(Refused::BadBody),
            _ => {}
        }
        Ok(Ack::Done)
    }
}

struct Replica {
    id: ReplicaId,
    peers: Arc<Peers>,
    handler: Arc<Counting>,
    inbox: Arc<Inbox>,
    url: String,
}

impl Replica {
    /// One that listens and is not registered yet.
    async fn new(redis: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let replica = Self::at(redis, &url, InboxOptions::default()).await;
        serve(listener, replica.inbox.clone());
        replica
    }

    async fn at(redis: &RedisServer, url: &str, options: InboxOptions) -> Self {
        let id = ReplicaId::generate();
        let handler = Arc::new(Counting::default());
        let inbox = Arc::new(Inbox::new(
            id.clone(),
            tokens("obol-gateway"),
            Arc::new(SystemClock),
            handler.clone(),
            Arc::new(|future| drop(tokio::spawn(future))),
            options,
        ));
        let channel = Channel {
            advertised: url.parse().unwrap(),
            tokens: tokens("obol-gateway"),
            dialer: Dialer::new(DialOptions::default()).unwrap(),
            clock: Arc::new(SystemClock),
        };
        let peers = Peers::new(id.clone(), Registry::new(connect(redis).await), Some(channel));
        Self { id, peers, handler, inbox, url: url.to_owned() }
    }

    async fn registered(redis: &RedisServer) -> Self {
        let replica = Self::new(redis).await;
        replica.peers.renew().await.unwrap();
        replica
    }

    fn knows(&self) -> Vec<ReplicaId> {
        let mut ids: Vec<ReplicaId> = self.peers.live().into_iter().map(|peer| peer.id).collect();
        ids.sort();
        ids
    }
}

async fn connect(server: &RedisServer) -> Redis {
    Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap()
}

fn serve(listener: TcpListener, inbox: Arc<Inbox>) {
    async fn receive(State(inbox): State<Arc<Inbox>>, request: Request) -> Response {
        let (head, body) = request.into_parts();
        let authorization = head.headers.get("authorization").and_then(|v| v.to_str().ok());
        let answer = match inbox.admit(authorization) {
            Err(answer) => answer,
            Ok(admitted) => match to_bytes(body, inbox.max_body()).await {
                Ok(body) => inbox.deliver(admitted, &body).await,
                Err(_) => inbox.unreadable(true),
            },
        };
        (answer.status, answer.body).into_response()
    }
    let router = Router::new().route(PATH, post(receive)).with_state(inbox);
    tokio::spawn(async move { axum::serve(listener, router).await });
}

fn note(body: &str) -> Message {
    Message::new("note", &body).unwrap()
}

/// A raw `POST`, as somebody else would send it.
async fn raw(to: &Replica, token: Option<&str>, body: impl Into<reqwest::Body>) -> (u16, String) {
    let request = reqwest::Client::builder().build().unwrap().post(format!("{}{PATH}", to.url)).body(body);
    let request = match token {
        Some(token) => request.bearer_auth(token),
        None => request,
    };
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let body: serde_json::Value = response.json().await.unwrap();
    let code = body["error"]["code"].as_str().or(body["ack"].as_str()).unwrap_or_default();
    (status, code.to_owned())
}

fn envelope(id: &str, kind: &str) -> String {
    let from = "r-0123456789ab";
    json!({"v": 1, "id": id, "from": from, "within_ms": 5000, "kind": kind, "body": "x", "later": {}})
        .to_string()
}

const ID: &str = "0191b0c4-7b6e-4c3e-8a2a-0123456789ab";

#[tokio::test]
async fn replicas_find_each_other_by_their_leases_and_no_longer() {
    let redis = RedisServer::start().await;
    let (a, b) = (Replica::registered(&redis).await, Replica::registered(&redis).await);
    a.peers.renew().await.unwrap();
    assert_eq!((a.knows(), b.knows()), (vec![b.id.clone()], vec![a.id.clone()]));

    let lease = format!("replica:{}", a.id);
    let life: i64 = redis.query(&["PTTL", &lease]).await;
    assert!((10_001..=15_000).contains(&life), "{life}");
    let seen = &b.peers.live()[0];
    assert_eq!(
        (seen.url.as_ref().unwrap().as_str(), seen.snapshot_schema),
        (format!("{}/", a.url).as_str(), obol_model::snapshot::SCHEMA)
    );
    assert_eq!(seen.release, env!("CARGO_PKG_VERSION"));

    // A replica that died: nobody renews.
    redis.cli(&["DEL", &lease]).await;
    redis.cli(&["ZADD", "replicas", "1", a.id.as_str()]).await;
    b.peers.renew().await.unwrap();
    assert_eq!(b.knows(), []);
    let index: Vec<String> = redis.query(&["ZRANGE", "replicas", "0", "-1"]).await;
    assert_eq!(index, [b.id.to_string()]);
    let gone = b.peers.send(&a.id, &note("1"), SOON).await;
    assert!(matches!(gone, Err(PeerError::Unknown { .. })), "{gone:?}");

    // One that leaves.
    let stop = tokio_util::sync::CancellationToken::new();
    stop.cancel();
    b.peers.clone().run(stop).await;
    assert_eq!(redis.keys("*").await, Vec::<String>::new());
}

#[tokio::test]
async fn whoever_let_its_lease_run_out_is_told_nothing_although_it_was_known() {
    let redis = RedisServer::start().await;
    let (a, b) = (Replica::registered(&redis).await, Replica::registered(&redis).await);
    a.peers.renew().await.unwrap();
    assert_eq!(a.knows(), vec![b.id.clone()]);
    // The index goes as well when nobody is left.
    let life: i64 = redis.query(&["PTTL", "replicas"]).await;
    assert!((10_001..=15_000).contains(&life), "{life}");
    redis.cli(&["DEL", &format!("replica:{}", b.id)]).await;
    redis.cli(&["ZADD", "replicas", "1", b.id.as_str()]).await;
    // Nobody has renewed since, so it still stands in the index.
    let told = a.peers.broadcast(&note("all"), SOON).await;
    assert!(told.is_empty(), "{told:?}");
    assert_eq!(b.handler.of("\"all\""), 0);
}

#[tokio::test]
async fn a_message_is_delivered_and_acknowledged() {
    let redis = RedisServer::start().await;
    let (a, b) = (Replica::registered(&redis).await, Replica::registered(&redis).await);
    // By id, also when it is not in memory yet.
    assert_eq!(a.knows(), []);
    assert_eq!(a.peers.send(&b.id, &note("hello"), SOON).await.unwrap(), Ack::Done);
    assert_eq!(b.handler.of("\"hello\""), 1);
    let idle = Message::new("idle", &1).unwrap();
    assert_eq!(a.peers.send(&b.id, &idle, SOON).await.unwrap(), Ack::NothingToDo);
}

#[tokio::test]
async fn a_message_that_comes_again_is_acknowledged_again_and_delivered_once() {
    let redis = RedisServer::start().await;
    let b = Replica::new(&redis).await;
    let own = || token("obol-gateway", "obol-peer", b.id.as_str());
    // At the same time and afterwards.
    let tokens: Vec<String> = (0..10).map(|_| own()).collect();
    let all = tokens.iter().map(|token| raw(&b, Some(token), envelope(ID, "lingering")));
    for answer in futures::future::join_all(all).await {
        assert_eq!(answer, (200, "done".to_owned()));
    }
    assert_eq!(raw(&b, Some(&own()), envelope(ID, "lingering")).await, (200, "done".to_owned()));
    assert_eq!(b.handler.of("\"x\""), 1);
}

#[tokio::test]
async fn whoever_may_not_send_is_refused_before_anything_is_read() {
    let redis = RedisServer::start().await;
    let b = Replica::new(&redis).await;
    let me = b.id.as_str();
    let used = token("obol-gateway", "obol-peer", me);
    assert_eq!(raw(&b, Some(&used), envelope(ID, "note")).await.0, 200);
    let refused = |code: &str, status: u16| (status, code.to_owned());
    for (what, token, expected) in [
        ("no token", None, refused("unauthenticated", 401)),
        ("garbage", Some("x.y.z".to_owned()), refused("unauthenticated", 401)),
        (
            "another audience",
            Some(token("obol-gateway", "obol-control", me)),
            refused("unauthenticated", 401),
        ),
        ("another issuer", Some(token("obol-control", "obol-peer", me)), refused("unauthenticated", 401)),
        ("a replay", Some(used), refused("unauthenticated", 401)),
        (
            "another replica's",
            Some(token("obol-gateway", "obol-peer", "r-ffffffffffff")),
            refused("wrong_replica", 421),
        ),
    ] {
        assert_eq!(raw(&b, token.as_deref(), "not read").await, expected, "{what}");
    }
    assert_eq!(b.handler.of("\"x\""), 1);
}

#[tokio::test]
async fn what_is_no_message_is_refused_with_its_reason() {
    let redis = RedisServer::start().await;
    let b = Replica::new(&redis).await;
    let large = b.inbox.max_body() + 1;
    for (body, status, code) in [
        ("{".to_owned(), 400, "bad_envelope"),
        ("[]".to_owned(), 400, "bad_envelope"),
        ("\u{0}".to_owned(), 400, "bad_envelope"),
        (json!({"v": 1, "id": "x"}).to_string(), 400, "bad_envelope"),
        (envelope("not-a-uuid", "note"), 400, "bad_envelope"),
        (envelope(ID, "note").replace("r-0123456789ab", "somebody"), 400, "bad_envelope"),
        (json!({"v": 2, "anything": true}).to_string(), 400, "unknown_version"),
        (envelope(ID, "of_a_later_release"), 422, "unknown_kind"),
        (envelope("0191b0c4-7b6e-4c3e-8a2a-0123456789ac", "bad"), 422, "bad_body"),
        (" ".repeat(large), 413, "too_large"),
    ] {
        let own = token("obol-gateway", "obol-peer", b.id.as_str());
        let shown: String = body.chars().take(80).collect();
        assert_eq!(raw(&b, Some(&own), body).await, (status, code.to_owned()), "{shown}");
    }
}

#[tokio::test]
async fn a_full_inbox_says_so() {
    let redis = RedisServer::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let b = Replica::at(&redis, &url, InboxOptions { at_once: 1, ..InboxOptions::default() }).await;
    serve(listener, b.inbox.clone());
    b.peers.renew().await.unwrap();
    let a = Replica::registered(&redis).await;
    let slow = Message::new("slow", &1).unwrap();
    let first = a.peers.send(&b.id, &slow, SOON);
    let second = async {
        eventually(SOON, || async { b.handler.of("1") == 1 }).await;
        a.peers.send(&b.id, &note("2"), SOON).await
    };
    tokio::select! {
        first = first => panic!("it never ends: {first:?}"),
        second = second => {
            assert!(matches!(&second, Err(PeerError::Refused { code, .. }) if code == "busy"), "{second:?}");
        }
    }
}

#[tokio::test]
async fn a_message_is_handled_until_its_senders_deadline_and_no_longer_than_the_inbox_allows() {
    let redis = RedisServer::start().await;
    let patient = Replica::new(&redis).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let options = InboxOptions { longest: Duration::from_millis(200), ..InboxOptions::default() };
    let strict = Replica::at(&redis, &url, options).await;
    serve(listener, strict.inbox.clone());
    for (replica, within) in [(&patient, 200_u64), (&strict, 3_600_000)] {
        let own = token("obol-gateway", "obol-peer", replica.id.as_str());
        let slow = envelope(ID, "slow").replace("5000", &within.to_string());
        let answer = tokio::time::timeout(SOON, raw(replica, Some(&own), slow)).await.unwrap();
        assert_eq!(answer, (504, "deadline".to_owned()), "{within}");
        assert_eq!(replica.handler.of("\"x\""), 1);
    }
}

#[tokio::test]
async fn a_sender_says_how_long_it_waits_and_waits_no_longer() {
    const WITHIN: Duration = Duration::from_secs(2);
    type Bodies = tokio::sync::mpsc::UnboundedSender<String>;
    async fn never(State(bodies): State<Bodies>, body: String) {
        bodies.send(body).unwrap();
        std::future::pending::<()>().await;
    }
    let redis = RedisServer::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let b = Replica::at(&redis, &url, InboxOptions::default()).await;
    b.peers.renew().await.unwrap();
    let (bodies, mut received) = tokio::sync::mpsc::unbounded_channel();
    let router = Router::new().route(PATH, post(never)).with_state(bodies);
    tokio::spawn(async move { axum::serve(listener, router).await });
    let a = Replica::registered(&redis).await;
    let sent = tokio::time::timeout(SOON, a.peers.send(&b.id, &note("1"), WITHIN)).await.unwrap();
    assert!(matches!(sent, Err(PeerError::Deadline { .. })), "{sent:?}");
    let body: serde_json::Value = serde_json::from_str(&received.try_recv().unwrap()).unwrap();
    let told = Duration::from_millis(body["within_ms"].as_u64().unwrap());
    assert!(!told.is_zero() && told <= WITHIN, "{told:?}");
}

#[tokio::test]
async fn each_way_to_fail_is_told_apart() {
    let redis = RedisServer::start().await;
    let (a, b) = (Replica::registered(&redis).await, Replica::registered(&redis).await);
    let nobody = a.peers.send(&ReplicaId::generate(), &note("1"), SOON).await;
    assert!(matches!(nobody, Err(PeerError::Unknown { .. })), "{nobody:?}");

    let unknown = a.peers.send(&b.id, &Message::new("new", &1).unwrap(), SOON).await;
    assert!(
        matches!(&unknown, Err(PeerError::Refused { code, .. }) if code == "unknown_kind"),
        "{unknown:?}"
    );

    let slow = a.peers.send(&b.id, &Message::new("slow", &2).unwrap(), Duration::from_millis(300)).await;
    assert!(matches!(slow, Err(PeerError::Deadline { .. })), "{slow:?}");

    let mute = Peers::new(ReplicaId::generate(), Registry::new(connect(&redis).await), None);
    mute.renew().await.unwrap();
    let none = a.peers.send(mute.me(), &note("1"), SOON).await;
    assert!(matches!(none, Err(PeerError::NoChannel { .. })), "{none:?}");

    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    let dead = Replica::at(&redis, &url, InboxOptions::default()).await;
    dead.peers.renew().await.unwrap();
    drop(closed);
    let refused = a.peers.send(&dead.id, &note("1"), SOON).await;
    assert!(matches!(refused, Err(PeerError::Unreachable { .. })), "{refused:?}");

    // Another replica has taken over the address of one whose lease still stands.
    let old = Replica::at(&redis, &b.url, InboxOptions::default()).await;
    old.peers.renew().await.unwrap();
    let replaced = a.peers.send(&old.id, &note("1"), SOON).await;
    assert!(matches!(replaced, Err(PeerError::Unknown { .. })), "{replaced:?}");

    a.peers.renew().await.unwrap();
    redis.kill();
    let registry = a.peers.send(&ReplicaId::generate(), &note("1"), SOON).await;
    assert!(matches!(registry, Err(PeerError::Registry(_))), "{registry:?}");
    // Who is known can be told without Redis.
    assert_eq!(a.peers.send(&b.id, &note("3"), SOON).await.unwrap_or(Ack::NothingToDo), Ack::Done);
}

#[tokio::test]
async fn all_are_told_at_once_whoever_is_dead_or_new() {
    let redis = RedisServer::start().await;
    let a = Replica::registered(&redis).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let stuck = Replica::at(&redis, &url, InboxOptions::default()).await;
    stuck.peers.renew().await.unwrap();
    let (b, c) = (Replica::registered(&redis).await, Replica::registered(&redis).await);
    assert_eq!(a.knows(), [], "they came after the last renewal");

    let told = a.peers.broadcast(&note("all"), Duration::from_secs(3)).await;
    assert_eq!(told.len(), 3);
    for (id, outcome) in told {
        if id == stuck.id {
            assert!(matches!(outcome, Err(PeerError::Deadline { .. })), "{outcome:?}");
        } else {
            assert_eq!(outcome.unwrap(), Ack::Done);
        }
    }
    assert_eq!((b.handler.of("\"all\""), c.handler.of("\"all\""), a.handler.of("\"all\"")), (1, 1, 0));

    redis.kill();
    let told = a.peers.broadcast(&note("more"), Duration::from_secs(3)).await;
    assert_eq!(told.iter().filter(|(_, outcome)| outcome.is_ok()).count(), 2, "{told:?}");
}

#[tokio::test]
async fn a_connection_that_breaks_before_the_answer_is_tried_once_more_and_nothing_is_delivered_twice() {
    let redis = RedisServer::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let b = Replica::at(&redis, &url, InboxOptions::default()).await;
    b.peers.renew().await.unwrap();
    let a = Replica::registered(&redis).await;
    let tries = Arc::new(AtomicU32::new(0));
    let (inbox, counted) = (b.inbox.clone(), tries.clone());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let answer = exchange(&inbox, &mut stream).await;
            // Delivered, and the first answer is lost.
            if counted.fetch_add(1, Ordering::SeqCst) > 0 {
                let head =
                    format!("HTTP/1.1 {}\r\ncontent-length: {}\r\n\r\n", answer.status, answer.body.len());
                stream.write_all(head.as_bytes()).await.unwrap();
                stream.write_all(answer.body.as_bytes()).await.unwrap();
            }
        }
    });
    assert_eq!(a.peers.send(&b.id, &note("once"), SOON).await.unwrap(), Ack::Done);
    assert_eq!((tries.load(Ordering::SeqCst), b.handler.of("\"once\"")), (2, 1));
}

/// One request of HTTP/1.1, read by hand and delivered.
async fn exchange(inbox: &Inbox, stream: &mut tokio::net::TcpStream) -> Answer {
    let mut bytes = Vec::new();
    loop {
        let mut chunk = [0; 4096];
        let read = stream.read(&mut chunk).await.unwrap();
        bytes.extend_from_slice(&chunk[..read]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let header = |name: &str| {
            head.lines().find_map(|line| line.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)))
        };
        let length: usize = header("content-length").unwrap().1.parse().unwrap();
        if body.len() == length {
            let admitted = inbox.admit(Some(header("authorization").unwrap().1)).unwrap();
            return inbox.deliver(admitted, body.as_bytes()).await;
        }
    }
}

#[tokio::test]
async fn what_stands_in_the_place_of_a_lease_hides_no_other_replica() {
    let redis = RedisServer::start().await;
    let (one, two) = (Replica::registered(&redis).await, Replica::registered(&redis).await);
    let odd = ReplicaId::generate();
    redis.cli(&["SET", &format!("replica:{odd}"), "x"]).await;
    redis.cli(&["ZADD", "replicas", "9999999999999", odd.as_str()]).await;
    let late = Replica::registered(&redis).await;
    let mut expected = vec![one.id.clone(), two.id.clone()];
    expected.sort();
    assert_eq!(late.knows(), expected);
    assert_eq!(late.peers.send(&one.id, &note("hello"), SOON).await.unwrap(), Ack::Done);
    let gone = late.peers.send(&odd, &note("hello"), SOON).await;
    assert!(matches!(gone, Err(PeerError::Unknown { .. })), "{gone:?}");

    // Each puts its own right, and the index.
    redis.cli(&["SET", &format!("replica:{}", one.id), "x"]).await;
    redis.cli(&["SET", "replicas", "x"]).await;
    for replica in [&one, &two, &late] {
        replica.peers.renew().await.unwrap();
    }
    one.peers.renew().await.unwrap();
    let mut expected = vec![two.id.clone(), late.id.clone()];
    expected.sort();
    assert_eq!(one.knows(), expected);
    assert_eq!(redis.query::<usize>(&["ZCARD", "replicas"]).await, 3);
}

#[tokio::test]
async fn a_redis_that_takes_no_writes_gives_no_lease_and_one_that_does_again_gives_it_at_once() {
    let redis = RedisServer::start().await;
    for refused in [
        ["CONFIG", "SET", "maxmemory", "1"].as_slice(),
        &["ACL", "SETUSER", "default", "-@scripting"],
        &["ACL", "SETUSER", "default", "-@write"],
    ] {
        let ask = async |command: &[&str]| drop(redis.cli(command).await);
        let replica = Replica::new(&redis).await;
        ask(refused).await;
        assert!(!replica.peers.holds_lease().await, "{refused:?}: never had one");
        ask(&["CONFIG", "SET", "maxmemory", "0"]).await;
        ask(&["ACL", "SETUSER", "default", "+@all"]).await;
        assert!(replica.peers.holds_lease().await, "{refused:?}");
        ask(refused).await;
        assert!(replica.peers.renew().await.is_err(), "{refused:?}");
        assert!(replica.peers.holds_lease().await, "{refused:?}: one failure is none");
        ask(&["CONFIG", "SET", "maxmemory", "0"]).await;
        ask(&["ACL", "SETUSER", "default", "+@all"]).await;
    }
}
