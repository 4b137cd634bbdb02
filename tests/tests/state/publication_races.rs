//! Publish against publish against the creation of what control answered, on a real Redis: two publishers with control's
//! script, and two replicas that ask a control whose answer is older than both.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use futures::future::join_all;
use futures::{StreamExt as _, stream};
use obol_control::{PublishError, Publisher as _, RedisPublisher};
use obol_model::snapshot::{Documents, PolicySnapshot, WorkspaceSnapshot};
use obol_model::{Revision, WorkspaceId};
use obol_snapshot::{
    Compile, Control, ControlFallback, PairError, PublicationSource as _, Publications, RedisSource,
    SourceError, Stored,
};
use obol_testkit::redis::RedisServer;
use parking_lot::Mutex;

use crate::published::{documents, redis};

/// Workspaces, each raced for once by two publishers and two replicas.
const RACES: usize = 10_000;
/// Each has connections of its own and runs on whatever thread is free.
const LANES: usize = 4;
const AT_A_TIME: usize = 16;

/// How often things went which way, so that the test can tell that it raced at all.
#[derive(Debug, Default)]
struct Ways {
    /// The second revision was refused, since the third was there.
    refused: AtomicUsize,
    /// A replica served what control had answered.
    created: AtomicUsize,
    /// Control's answer came after a publication.
    late: AtomicUsize,
}

/// The text of the policies, which is that of the workspace as well unless two publications were mixed.
struct Text;

impl Compile for Text {
    type Output = String;

    fn compile(&self, _: &WorkspaceSnapshot, policy: &PolicySnapshot) -> Result<String, String> {
        Ok(policy.files[0].text.clone())
    }
}

/// What happens in one race.
#[derive(Default)]
struct Race {
    /// Whether a publisher has succeeded.
    published: AtomicBool,
    /// Whether one had when control answered each replica.
    late: [AtomicBool; 2],
}

type Races = Arc<Mutex<HashMap<WorkspaceId, Arc<Race>>>>;

/// A control that knows only the first revision, as it tells it to one replica: each is told another text, since only
/// one of them can ever be the publication.
struct Outdated {
    replica: usize,
    races: Races,
}

#[async_trait]
impl Control for Outdated {
    async fn publication(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, SourceError> {
        let race = self.races.lock()[workspace].clone();
        let answer = documents(workspace, 1, &format!("control-{}", self.replica));
        yields(spread(workspace, self.replica)).await;
        race.late[self.replica].store(race.published.load(Ordering::SeqCst), Ordering::SeqCst);
        Ok(Some(answer))
    }
}

async fn yields(turns: usize) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}

/// 0 to 11, without a pattern.
fn spread(workspace: &WorkspaceId, salt: usize) -> usize {
    let number: usize = workspace.as_str()[1..].parse().unwrap();
    number.wrapping_mul(7919).wrapping_add(salt * 104_729) / 7 % 12
}

/// The publications of one replica, which falls back to control.
fn replica(source: &RedisSource, replica: usize, races: &Races) -> Arc<Publications<Text>> {
    let control = Outdated { replica, races: races.clone() };
    Publications::new(Arc::new(ControlFallback::new(source.clone(), Arc::new(control))), Text)
}

/// The revision and the text that a replica serves after having read again, however long Redis takes to answer.
async fn read(publications: &Publications<Text>, workspace: &WorkspaceId) -> (u64, String) {
    loop {
        match publications.reload(workspace).await {
            Ok(_) => break,
            Err(PairError::Unavailable(_)) => tokio::task::yield_now().await,
            Err(why) => panic!("{workspace}: {why:?}"),
        }
    }
    let pair = publications.pair(workspace).await.unwrap();
    assert_eq!(pair.workspace.environment, pair.compiled, "{workspace}: mixed");
    (pair.revision().number, pair.compiled.clone())
}

struct Lane {
    publishers: [RedisPublisher; 2],
    source: RedisSource,
    replicas: [Arc<Publications<Text>>; 2],
    races: Races,
}

impl Lane {
    async fn publish(&self, which: usize, workspace: &WorkspaceId, number: u64, race: &Race) -> bool {
        let revision = Revision { epoch: 1, number };
        let documents = documents(workspace, number, &format!("published-{number}"));
        yields(spread(workspace, 2 + which)).await;
        match self.publishers[which].publish(workspace, &documents, revision).await {
            Ok(()) => {
                race.published.store(true, Ordering::SeqCst);
                true
            }
            Err(PublishError::NotNewer { there, .. }) => {
                assert!(there > revision, "{workspace}: {revision} refused for {there}");
                false
            }
            Err(why) => panic!("{why}"),
        }
    }

    async fn race(&self, number: usize, ways: &Ways) {
        let workspace: WorkspaceId = format!("w{number}").parse().unwrap();
        let (ws, race) = (&workspace, Arc::new(Race::default()));
        self.races.lock().insert(workspace.clone(), race.clone());
        let reads = join_all((0..2).map(|n| async move {
            yields(spread(ws, 4 + n)).await;
            read(&self.replicas[n], ws).await
        }));
        let (second, third, reads) =
            tokio::join!(self.publish(0, ws, 2, &race), self.publish(1, ws, 3, &race), reads);

        assert!(third, "{ws}: the newest was refused");
        let Stored::Complete(stored) = self.source.read(ws).await.unwrap() else { panic!("{ws}: partial") };
        let there = stored.claimed().map(|fingerprint| fingerprint.revision);
        assert!(stored == documents(ws, 3, "published-3"), "{ws}: {there:?} is there in the end");
        let mut created = Vec::new();
        for (n, seen) in reads.iter().enumerate() {
            let late = race.late[n].load(Ordering::SeqCst);
            let last = read(&self.replicas[n], ws).await;
            assert_eq!(last, (3, "published-3".to_owned()), "{ws}: not the winner after {seen:?}");
            // Its creation came too late, so it must have read back who was there.
            assert!(!late || seen.0 > 1, "{ws}: a late answer was served, {seen:?}");
            ways.late.fetch_add(late.into(), Ordering::Relaxed);
            created.extend((seen.0 == 1).then_some(&seen.1));
        }
        ways.refused.fetch_add((!second).into(), Ordering::Relaxed);
        ways.created.fetch_add((!created.is_empty()).into(), Ordering::Relaxed);
        created.dedup();
        assert!(created.len() <= 1, "{ws}: two creations, {created:?}");
    }
}

/// Whatever the order in which two publishers and the creations of two replicas reach Redis:
///
/// * the newest publication is there in the end, to the byte, and both replicas serve it;
/// * no replica ever serves a mixed pair, goes back in time, or gets an error from a Redis that is fine;
/// * a replica whose answer of control came after a publication serves that publication and not the answer;
/// * of two different answers of control at most one is ever served: the loser reads the winner back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publish_against_publish_against_create_leaves_the_newest_and_mixes_nothing() {
    let server = RedisServer::start().await;
    let ways = Arc::new(Ways::default());
    let mut lanes = Vec::new();
    for first in 0..LANES {
        let link = || redis(&server);
        let races = Races::default();
        let sources = [RedisSource::new(link().await), RedisSource::new(link().await)];
        let lane = Arc::new(Lane {
            publishers: [RedisPublisher::new(link().await), RedisPublisher::new(link().await)],
            replicas: [replica(&sources[0], 0, &races), replica(&sources[1], 1, &races)],
            source: RedisSource::new(link().await),
            races,
        });
        let ways = ways.clone();
        lanes.push(tokio::spawn(async move {
            let races = (first..RACES).step_by(LANES);
            stream::iter(races).for_each_concurrent(AT_A_TIME, |number| lane.race(number, &ways)).await;
        }));
    }
    for lane in lanes {
        lane.await.unwrap();
    }
    println!("{RACES} races: {ways:?}");
    for (what, often) in [("refused", &ways.refused), ("created", &ways.created), ("late", &ways.late)] {
        assert!(often.load(Ordering::Relaxed) > 0, "never {what}: there was no race, {ways:?}");
    }
}
