//! An open stream and a running call keep their session; the holder renews it, and a holder that dies holds nothing.
#![allow(clippy::unwrap_used, reason = "test support: what is broken should fail where it broke")]

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use obol_model::{Clock as _, ManualClock, SessionId, SystemClock, WorkspaceId};
use obol_session::{EmbeddedSessions, SessionOptions, Sessions};
use obol_testkit::eventually;
use tokio::time::sleep;

use crate::support::{Fixture, LIMIT, TTL, Who};

/// One replica on a store whose time passes together with tokio's.
struct World {
    sessions: Sessions,
    clock: Arc<ManualClock>,
    ttl: Duration,
    owner: Who,
}

impl World {
    fn new(ttl: Duration) -> Self {
        let clock = Arc::new(ManualClock::new(SystemClock.now()));
        let store = Arc::new(EmbeddedSessions::new(clock.clone()));
        let options = SessionOptions { ttl, unused_ttl: None, max_per_principal: LIMIT };
        let sessions = Sessions::new(store, clock.clone(), options);
        Self { sessions, clock, ttl, owner: Who::key("acme", "k1") }
    }

    async fn pass(&self, time: Duration) {
        let step = (self.ttl / 100).min(Duration::from_secs(1));
        let mut left = time;
        while !left.is_zero() {
            let step = step.min(left);
            self.clock.advance(step);
            sleep(step).await;
            left -= step;
        }
    }

    async fn lives(&self, id: SessionId) -> bool {
        self.sessions.live(&[id]).await.unwrap() == [true]
    }

    /// Runs `story` while held sessions are kept.
    async fn kept<T>(
        &self,
        ended: impl Fn(&WorkspaceId, SessionId) + Sync,
        story: impl Future<Output = T>,
    ) -> T {
        tokio::select! {
            () = self.sessions.keep(ended) => unreachable!("it has no end"),
            outcome = story => outcome,
        }
    }
}

fn nobody(_: &WorkspaceId, id: SessionId) {
    unreachable!("{id} has not ended");
}

const LIVES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4), Duration::from_mins(30)];

#[tokio::test(start_paused = true)]
async fn a_held_session_lives_and_its_life_begins_anew_when_it_is_let_go() {
    for ttl in LIVES {
        let world = World::new(ttl);
        let story = async {
            let record = world.sessions.create(world.owner.new_session()).await.unwrap();
            let id = record.session_id;
            let (held, also) = (world.sessions.hold(record.clone()), world.sessions.hold(record));
            world.pass(3 * ttl).await;
            drop(also);
            world.pass(2 * ttl + ttl / 5).await;
            assert!(world.lives(id).await, "{ttl:?}");
            drop(held);
            world.pass(ttl * 9 / 10).await;
            assert!(world.lives(id).await, "{ttl:?}");
            world.pass(ttl * 2 / 10).await;
            assert!(!world.lives(id).await, "{ttl:?}: nobody holds it");
        };
        world.kept(nobody, story).await;
    }
}

/// What is seen of a holder that was killed.
#[tokio::test(start_paused = true)]
async fn a_session_whose_holder_died_expires() {
    for ttl in LIVES {
        let world = World::new(ttl);
        let record = world.sessions.create(world.owner.new_session()).await.unwrap();
        let id = record.session_id;
        let _held = world.sessions.hold(record);
        world.kept(nobody, world.pass(3 * ttl)).await;
        assert!(world.lives(id).await, "{ttl:?}");
        world.pass(ttl * 11 / 10).await;
        assert!(!world.lives(id).await, "{ttl:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_held_session_that_ends_elsewhere_is_noticed_within_a_keep_alive_tick() {
    for ttl in LIVES {
        let world = World::new(ttl);
        let ended = Mutex::new(Vec::new());
        let note = |workspace: &WorkspaceId, id| ended.lock().unwrap().push((workspace.clone(), id));
        let story = async {
            let record = world.sessions.create(world.owner.new_session()).await.unwrap();
            let other = world.sessions.create(world.owner.new_session()).await.unwrap();
            let id = record.session_id;
            let (_held, _other) = (world.sessions.hold(record), world.sessions.hold(other));
            world.pass(ttl / 3).await;
            world.sessions.delete(&id.expose(), &world.owner.caller()).await.unwrap();
            world.pass(Duration::from_secs(15)).await;
            let ended = ended.lock().unwrap();
            assert!(ended.iter().all(|found| *found == (world.owner.workspace_id.clone(), id)), "{ttl:?}");
            assert!(!ended.is_empty(), "{ttl:?}");
        };
        world.kept(note, story).await;
    }
}

#[tokio::test]
async fn the_sessions_that_an_owner_holds_here_are_known() {
    let f = Fixture::embedded();
    let (one, two) = (Who::key("acme", "k1"), Who::key("acme", "k2"));
    let first = f.sessions.create(one.new_session()).await.unwrap();
    let second = f.sessions.create(two.new_session()).await.unwrap();
    assert!(f.sessions.held(one.owner()).is_empty());
    let held = f.sessions.hold(first.clone());
    let _also = (f.sessions.hold(first.clone()), f.sessions.hold(second));
    assert_eq!(f.sessions.held(one.owner()), [first.session_id]);
    drop(held);
    assert_eq!(f.sessions.held(one.owner()), [first.session_id], "somebody else holds it still");
    assert!(f.sessions.held(Who::key("other", "k1").owner()).is_empty());
}

/// A call of milliseconds costs no renewal; a long one does, once, when it ends.
#[tokio::test]
async fn a_held_session_outlives_an_outage_and_is_renewed_on_redis() {
    let f = Fixture::redis().await;
    let (server, owner) = (f.server().unwrap(), Who::key("acme", "k1"));
    let ttl = Duration::from_secs(4);
    let sessions = f.with(SessionOptions { ttl, unused_ttl: None, max_per_principal: LIMIT });
    let story = async {
        let record = sessions.create(owner.new_session()).await.unwrap();
        let key = format!("sess:{{{}}}", record.session_id.expose());
        let held = sessions.hold(record);
        // Longer than a life by Redis's clock, however it is cut up.
        server.cli(&["PERSIST", &key]).await;
        eventually(Duration::from_secs(10), || async { server.query::<i64>(&["PTTL", &key]).await > 0 })
            .await;
        server.pause();
        sleep(Duration::from_millis(1_500)).await;
        server.resume();
        server.cli(&["PERSIST", &key]).await;
        eventually(Duration::from_secs(10), || async { server.query::<i64>(&["PTTL", &key]).await > 0 })
            .await;
        server.cli(&["PEXPIRE", &key, "100000"]).await;
        sleep(ttl / 8).await;
        drop(held);
        eventually(Duration::from_secs(10), || async {
            (1..=4_000).contains(&server.query::<i64>(&["PTTL", &key]).await)
        })
        .await;
    };
    tokio::select! {
        () = sessions.keep(nobody) => unreachable!("it has no end"),
        () = story => {}
    }
    assert_eq!(f.sessions.held(owner.owner()), Vec::<SessionId>::new());
    assert!(TTL > ttl);
}
