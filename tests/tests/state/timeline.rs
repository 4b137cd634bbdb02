//! How long a policy change takes until it holds on every replica: with pub/sub, with a subscription that is dead and
//! does not know it, and after Redis was away.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use http::header::AUTHORIZATION;
use obol_model::snapshot::Documents;
use obol_testkit::cluster::Builder;
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use obol_tests::SOON;
use obol_tests::client::{Reply, http};
use obol_tests::world::World;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::published::Publishing;

const REPLICAS: usize = 3;

/// Every revision turns it over: `small` may be used, or it may not.
fn turned(publishing: &mut Publishing) -> Documents {
    publishing.next(|_, policy| {
        let permit = "permit (principal, action, resource);\n";
        policy.files[0].text = if policy.files[0].text == permit { String::new() } else { permit.to_owned() };
    })
}

/// Publishes the opposite of what holds and answers how long it took on each replica until that held.
async fn turn(world: &World, publishing: &mut Publishing, within: Duration) -> Vec<Duration> {
    let documents = turned(publishing);
    let allowed = documents.policy.windows(6).any(|part| part == b"permit");
    let published = publishing.publish(&documents).await;
    let client = http();
    let effect = |replica: usize| {
        let url = format!("{}/v1/models/small", world.cluster.public_url(replica));
        let (client, key) = (client.clone(), world.key.clone());
        async move {
            let ask = || async {
                let request = client.get(&url).header(AUTHORIZATION, format!("Bearer {key}"));
                let status = request.send().await.map(|response| response.status().as_u16());
                match status {
                    Ok(200) if allowed => Ok(()),
                    Ok(404) if !allowed => Ok(()),
                    other => Err(format!("replica {replica}, wanted {allowed}: {other:?}")),
                }
            };
            eventually(within, ask).await;
            published.elapsed()
        }
    };
    join_all((0..REPLICAS).map(effect)).await
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

pub(crate) fn report(what: &str, mut took: Vec<Duration>) -> Duration {
    took.sort();
    let (p50, p99) = (percentile(&took, 50), percentile(&took, 99));
    let worst = took[took.len() - 1];
    println!("{what}: p50 {p50:?}, p99 {p99:?}, worst {worst:?} of {} effects", took.len());
    worst
}

/// A Redis that keeps what it has over a restart, and an installation around it.
async fn installation(gateway_url: impl FnOnce(&RedisServer) -> String) -> (RedisServer, World) {
    let server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    let gateway_url = gateway_url(&server);
    let redis = |builder: Builder| builder.redis_url(&server.url()).gateway_redis_url(&gateway_url);
    let world = World::with(REPLICAS, "", redis).await;
    (server, world)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_change_holds_on_every_replica_at_once_and_soon_after_redis_is_back() {
    let (server, world) = installation(RedisServer::url).await;
    let mut publishing = Publishing::take_over(&world, &server).await;
    let mut took = Vec::new();
    for _ in 0..30 {
        took.extend(turn(&world, &mut publishing, SOON).await);
    }
    let worst = report("pub/sub works", took);
    assert!(worst < Duration::from_secs(2), "{worst:?}");

    let mut took = Vec::new();
    for _ in 0..3 {
        server.restart().await;
        // Most replicas miss the message: they hear of the change when they have subscribed again.
        took.extend(turn(&world, &mut publishing, SOON).await);
    }
    let worst = report("redis restarted", took);
    assert!(worst < Duration::from_secs(8), "{worst:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_change_holds_within_30_seconds_where_the_subscription_died_without_a_word() {
    let hole = Hole::default();
    let mut proxy = None;
    let (server, world) = installation(|server| {
        let (addr, task) = hole.clone().in_front_of(server.addr());
        proxy = Some(task);
        format!("redis://{addr}")
    })
    .await;
    let mut publishing = Publishing::take_over(&world, &server).await;
    report("through a proxy", turn(&world, &mut publishing, SOON).await);

    hole.swallow(true);
    let took = turn(&world, &mut publishing, Duration::from_secs(40)).await;
    let worst = report("subscription black-holed", took);
    // 30 s without a comparison is the end of any publication; those in use are read again before that.
    assert!(worst < Duration::from_secs(32), "{worst:?}");
    for replica in 0..REPLICAS {
        let silence = silence(&world, replica).await;
        assert!(silence >= 15.0, "replica {replica} heard something {silence} s ago");
    }

    hole.swallow(false);
    let worst = report("and restored", turn(&world, &mut publishing, Duration::from_secs(30)).await);
    assert!(worst < Duration::from_secs(15), "{worst:?}");
}

/// How long ago a replica's subscription was last known to stand, in seconds.
async fn silence(world: &World, replica: usize) -> f64 {
    let url = format!("{}/metrics", world.cluster.admin_url(replica));
    let text = Reply::of(http().get(url)).await.text().to_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("obol_invalidation_silence_seconds "));
    line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
}

/// A proxy that can swallow what goes over connections that subscribe, and nothing else, while all of them stay open.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hole(Arc<AtomicBool>);

impl Hole {
    pub(crate) fn swallow(&self, swallow: bool) {
        self.0.store(swallow, Ordering::SeqCst);
    }

    pub(crate) fn in_front_of(self, target: SocketAddr) -> (SocketAddr, AbortOnDropHandle<()>) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let addr = listener.local_addr().unwrap();
        let accepting = async move {
            let mut relays = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let hole = self.clone();
                relays.spawn(async move {
                    let Ok(server) = TcpStream::connect(target).await else { return };
                    let subscribes = AtomicBool::new(false);
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    let there = hole.pump(from_client, to_server, &subscribes);
                    let back = hole.pump(from_server, to_client, &subscribes);
                    // One side that is gone ends both.
                    tokio::select! { () = there => {}, () = back => {} }
                });
            }
        };
        (addr, AbortOnDropHandle::new(tokio::spawn(accepting)))
    }

    async fn pump(
        &self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        subscribes: &AtomicBool,
    ) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            let bytes = &buffer[..read];
            if bytes.windows(11).any(|part| part == b"SUBSCRIBE\r\n") {
                subscribes.store(true, Ordering::SeqCst);
            }
            let swallowed = self.0.load(Ordering::SeqCst) && subscribes.load(Ordering::SeqCst);
            if !swallowed && to.write_all(bytes).await.is_err() {
                return;
            }
        }
    }
}
