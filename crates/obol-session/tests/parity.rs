//! The same operations on both stores have the same outcomes (DESIGN §5).
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "test support: what is broken should fail where it broke"
)]

mod support;

use std::time::Duration;

use obol_model::SessionId;
use obol_session::{SessionError, SessionRecord};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::{Fixture, Who};

/// Names a session by the order of its creation, and a caller by a number.
#[derive(Debug, Clone)]
enum Op {
    Create { who: usize },
    Resume { session: usize, who: usize },
    Save { session: usize, level: u8 },
    Delete { session: usize, who: usize },
    DeleteOfKey { who: usize },
    Live,
    Pass { seconds: u64 },
}

fn callers() -> Vec<Who> {
    vec![
        Who::key("acme", "k1"),
        Who::key("acme", "k2"),
        Who::key("other", "k1"),
        Who::key("acme", "k2").sharing(),
        Who::user("acme", "i", "k1"),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let (session, who) = (0..12_usize, 0..5_usize);
    prop_oneof![
        4 => who.clone().prop_map(|who| Op::Create { who }),
        6 => (session.clone(), who.clone()).prop_map(|(session, who)| Op::Resume { session, who }),
        4 => (session.clone(), any::<u8>()).prop_map(|(session, level)| Op::Save { session, level }),
        3 => (session, who.clone()).prop_map(|(session, who)| Op::Delete { session, who }),
        1 => who.prop_map(|who| Op::DeleteOfKey { who }),
        2 => Just(Op::Live),
        // Sums of these keep away from the 600 s of a life.
        3 => prop_oneof![Just(250), Just(700)].prop_map(|seconds| Op::Pass { seconds }),
    ]
}

/// One store and the records that its client holds, some of them stale.
struct Run {
    fixture: Fixture,
    held: Vec<SessionRecord>,
}

fn outcome<T>(result: Result<T, SessionError>, show: impl FnOnce(T) -> String) -> String {
    result.map_or_else(|error| format!("{error:?}"), show)
}

fn shown(record: &SessionRecord) -> String {
    format!("{} {} {:?}", record.principal, record.rev, record.log_level)
}

impl Run {
    fn new(fixture: Fixture) -> Self {
        Self { fixture, held: Vec::new() }
    }

    async fn apply(&mut self, op: &Op) -> String {
        let (sessions, who) = (self.fixture.sessions.clone(), callers());
        match *op {
            Op::Create { who: n } => {
                let created = sessions.create(who[n].new_session()).await;
                if let Ok(record) = &created {
                    self.held.push(record.clone());
                }
                outcome(created, |record| shown(&record))
            }
            Op::Resume { session, who: n } => {
                let Some(held) = self.held.get_mut(session) else { return String::new() };
                let found = sessions.get_or_resume(&held.session_id.expose(), &who[n].caller()).await;
                if let Ok(record) = &found
                    && n % 2 == 0
                {
                    *held = record.clone();
                }
                outcome(found, |record| shown(&record))
            }
            Op::Save { session, level } => {
                let Some(held) = self.held.get_mut(session) else { return String::new() };
                let changed = SessionRecord { log_level: Some(level.to_string()), ..held.clone() };
                let saved = sessions.save(&changed).await;
                if let Ok(record) = &saved
                    && level % 2 == 0
                {
                    *held = record.clone();
                }
                outcome(saved, |record| shown(&record))
            }
            Op::Delete { session, who: n } => {
                let Some(held) = self.held.get(session) else { return String::new() };
                let deleted = sessions.delete(&held.session_id.expose(), &who[n].caller()).await;
                outcome(deleted, |()| "deleted".into())
            }
            Op::DeleteOfKey { who: n } => {
                let ended = sessions.delete_of_key(&who[n].workspace_id, &who[n].principal).await;
                outcome(ended, |n| n.to_string())
            }
            Op::Live => {
                let ids: Vec<SessionId> = self.held.iter().map(|record| record.session_id).collect();
                outcome(sessions.live(&ids).await, |live| format!("{live:?}"))
            }
            Op::Pass { seconds } => {
                self.fixture.pass(Duration::from_secs(seconds)).await;
                String::new()
            }
        }
    }
}

#[test]
fn both_stores_answer_every_sequence_alike() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let redis = std::cell::RefCell::new(runtime.block_on(Fixture::redis()));
    let mut runner = TestRunner::new(Config { cases: 150, failure_persistence: None, ..Config::default() });
    runner
        .run(&prop::collection::vec(op(), 1..60), |ops| {
            runtime.block_on(async {
                let fixture = redis.replace(Fixture::embedded());
                fixture.server().unwrap().cli(&["FLUSHALL"]).await;
                let (mut one, mut two) = (Run::new(fixture), Run::new(Fixture::embedded()));
                let mut difference = None;
                for (n, op) in ops.iter().enumerate() {
                    let (x, y) = (one.apply(op).await, two.apply(op).await);
                    if x != y {
                        difference = Some(format!("{n}: {op:?}: redis `{x}`, embedded `{y}`"));
                        break;
                    }
                }
                redis.replace(one.fixture);
                difference.map_or(Ok(()), |text| Err(TestCaseError::fail(text)))
            })
        })
        .unwrap();
}
