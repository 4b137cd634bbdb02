//! The master of Redis dies under load and a replica of it that lags behind takes over (DESIGN §14).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use obol_testkit::eventually;
use obol_testkit::redis_kind::AnyRedis;
use obol_testkit::redis_sentinel::RedisSentinel;
use obol_tests::SOON;
use obol_tests::client::Mcp;
use obol_tests::world::{World, workspace};
use tokio::time::{Instant, sleep};

const SESSIONS: usize = 6;

/// The promises are one second each; a busy machine gets more.
const BACK: Duration = Duration::from_secs(5);
const WITHIN: Duration = Duration::from_millis(2_500);

/// One request of the load.
#[derive(Debug)]
struct Sample {
    began: Instant,
    took: Duration,
    status: u16,
}

#[derive(Default)]
struct Load {
    stop: AtomicBool,
    samples: Mutex<Vec<Sample>>,
}

impl Load {
    /// Calls on one session without end. The publication that is served is never an older one.
    async fn run(&self, client: &Mcp, oldest: u64) {
        while !self.stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            let reply = client.call("fake__echo", "{}").await;
            let sample = Sample { began, took: began.elapsed(), status: reply.status };
            match reply.status {
                200 => assert!(number(reply.header("x-obol-revision")) >= oldest, "{reply:?}"),
                503 => assert!(reply.header("retry-after").parse::<u64>().is_ok(), "{reply:?}"),
                _ => panic!("{reply:?}"),
            }
            self.samples.lock().unwrap().push(sample);
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The number of a revision of the first epoch, 0 for none.
fn number(revision: &str) -> u64 {
    revision.strip_prefix("1.").and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Until promotion requests that need Redis are refused, in time; after it they work, on the sessions of before. What the
/// replica had not heard of yet, a publication, is neither lost nor replaced by an older one: control writes it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_loses_no_replicated_session_and_installs_no_older_publication() {
    let redis = RedisSentinel::start_with(3).await;
    let world = World::with(2, "", |builder| builder.redis(redis)).await;
    let AnyRedis::Sentinel(redis) = world.cluster.any_redis() else { unreachable!() };
    let clients = join_all((0..SESSIONS).map(|_| world.connect())).await;
    let (old, lagging) = (redis.master().await, &redis.servers()[1]);
    assert_ne!(old.port(), lagging.port());
    old.wait_until_replicated().await;

    // From here on the replica hears of nothing.
    lagging.pause();
    let yaml = workspace("acme", &world.mcp, &world.llm, "");
    world.cluster.write_workspace("acme", &format!("{yaml}expose_revision: true\n"));
    let mut newest = 0;
    for replica in 0..world.cluster.size() {
        let there = clients[0].at(&world.cluster.public_url(replica));
        newest = eventually(SOON, || async {
            Some(number(there.rpc("ping", "{}").await.header("x-obol-revision"))).filter(|number| *number > 1)
        })
        .await;
    }

    let load = Load::default();
    let failover = async {
        sleep(Duration::from_millis(300)).await;
        let killed = Instant::now();
        old.kill();
        lagging.resume();
        let new = redis.wait_until_promoted(old).await;
        let promoted = Instant::now();
        eventually(BACK, || async {
            join_all(clients.iter().map(|client| client.rpc("ping", "{}")))
                .await
                .iter()
                .all(|r| r.status == 200)
        })
        .await;
        let settled = Instant::now();
        println!("promoted after {:?}, normal {:?} later", promoted - killed, settled - promoted);
        sleep(Duration::from_secs(1)).await;
        load.stop.store(true, Ordering::Relaxed);
        (new, killed, settled)
    };
    let loads = join_all(clients.iter().map(|client| load.run(client, newest)));
    let ((new, killed, settled), _) = tokio::join!(failover, loads);

    let samples = load.samples.into_inner().unwrap();
    let slowest = samples.iter().max_by_key(|sample| sample.took).unwrap();
    assert!(slowest.took < WITHIN, "{slowest:?}");
    let refused = samples.iter().filter(|sample| sample.status == 503);
    let (during, later): (Vec<_>, Vec<_>) = refused.partition(|sample| sample.began < settled);
    assert!(
        during.iter().any(|sample| sample.began > killed),
        "nothing was refused while there was no master"
    );
    assert!(later.is_empty(), "{later:?}");
    println!("{} requests, {} refused, slowest {:?}", samples.len(), during.len(), slowest.took);

    // Control looks every ten seconds.
    eventually(Duration::from_secs(25), || async {
        let fingerprint: String = new.query(&["GET", "snap:fingerprint:{acme}"]).await;
        let fingerprint: serde_json::Value = serde_json::from_str(&fingerprint).unwrap();
        fingerprint["revision"]["number"].as_u64() >= Some(newest)
    })
    .await;
    // The sessions are the same ones.
    for client in &clients {
        client.call("fake__echo", "{}").await.result();
    }
}
