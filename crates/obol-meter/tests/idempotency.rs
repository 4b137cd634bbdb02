//! A request that is sent again under its idempotency key is not made again, on a ledger of each kind.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use obol_meter::{
    Denied, EmbeddedLedger, Idempotency, Ledger, MeterOptions, RedisLedger, Repeated, Start, StoredAnswer,
    Terms, UsageGuard,
};
use obol_model::{Kind, Limits, ManualClock, NanoUsd, Outcome, Principal, Secret, Tokens};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::redis_cluster::RedisCluster;
use support::ledgers::{Fixture, Process, terms, total};
use support::{chat, free, price, tool};
use tokio_util::sync::CancellationToken;

fn keyed(key: u8, request: u8) -> Start {
    Start { idempotency: Some(Idempotency { key: [key; 32], fingerprint: [request; 32] }), ..tool(5) }
}

fn answer(body: impl Into<Bytes>) -> StoredAnswer {
    StoredAnswer { status: 200, content_type: "application/json".into(), body: body.into() }
}

fn repeated(admitted: Result<UsageGuard, Denied>) -> Repeated {
    let denied = admitted.unwrap_err();
    let Denied::Repeated(repeated) = denied else { panic!("{denied}") };
    repeated
}

/// Closes everything so far and goes on in a new process.
async fn closed(fixture: &Fixture, mut process: Process) -> Process {
    process.end().await;
    fixture.process()
}

#[tokio::test]
async fn an_answered_request_is_answered_again_and_costs_nothing_more() {
    for fixture in Fixture::both().await {
        let process = fixture.process();
        let limits = Limits { requests_per_minute: Some(1), ..Limits::default() };
        let held_to = || Terms { limits, ..terms(total(100), 90) };
        let mut guard = process.admit_as(keyed(1, 1), held_to()).await.unwrap();
        // Bytes that are no text.
        guard.remember(answer(&[0xff, 0, b'"'][..]));
        guard.finish(Outcome::Ok);
        let process = closed(&fixture, process).await;
        for _ in 0..3 {
            let again = repeated(process.admit_as(keyed(1, 1), held_to()).await);
            assert_eq!(again, Repeated::Answered(answer(&[0xff, 0, b'"'][..])));
        }
        assert_eq!(process.audit().await, [("workspace:total".into(), 5, 0)]);
        assert_eq!(closed(&fixture, process).await.audit().await.len(), 1);
        assert_eq!(fixture.events().await.len(), 1, "a repeated request is no call");
    }
}

#[tokio::test]
async fn a_key_means_one_request_of_one_principal() {
    for fixture in Fixture::both().await {
        let process = fixture.process();
        let mut guard = process.admit_as(keyed(1, 1), free()).await.unwrap();
        let in_flight = process.admit_as(keyed(1, 1), free()).await.unwrap_err();
        assert_eq!(in_flight, Denied::Repeated(Repeated::InFlight));
        assert_eq!((in_flight.kind(), in_flight.code()), (Kind::Conflict, "idempotency_in_flight"));
        assert_eq!(in_flight.reset(), Some(Duration::from_secs(1)));
        let other = process.admit_as(keyed(1, 2), free()).await.unwrap_err();
        assert_eq!((other.kind(), other.code()), (Kind::Unprocessable, "idempotency_key_reused"));
        assert_eq!(other.reset(), None);
        // Neither is it known to others.
        let others = [
            keyed(2, 1),
            Start { principal: Principal::Key("k2".parse().unwrap()), ..keyed(1, 1) },
            Start { workspace_id: "other".parse().unwrap(), ..keyed(1, 1) },
            tool(5),
            tool(5),
        ];
        for start in others {
            process.admit_as(start, free()).await.unwrap().cancel();
        }
        guard.remember(answer("{}"));
        guard.finish(Outcome::Ok);
        let process = closed(&fixture, process).await;
        assert_eq!(repeated(process.admit_as(keyed(1, 2), free()).await), Repeated::OtherRequest);
    }
}

#[tokio::test]
async fn what_did_not_act_is_forgotten() {
    for fixture in Fixture::both().await {
        let mut process = fixture.process();
        let denied = process.admit_as(keyed(1, 1), Terms { tokens: 1 << 40, ..free() }).await.unwrap_err();
        assert!(matches!(denied, Denied::TooManyTokens { .. }), "{denied}");
        let held = process.admit(terms(total(10), 10)).await.unwrap();
        let denied = process.admit_as(keyed(1, 1), terms(total(10), 5)).await.unwrap_err();
        assert!(matches!(denied, Denied::Budget { .. }), "{denied}");
        held.cancel();
        // Another body than the one before, each time.
        for request in 1..4 {
            let guard = process.admit_as(keyed(1, request), free()).await.unwrap();
            match request {
                1 => guard.give_back().await,
                2 => guard.cancel(),
                _ => guard.finish(Outcome::Error),
            }
            process = closed(&fixture, process).await;
        }
        process.admit_as(keyed(1, 9), free()).await.unwrap().cancel();
    }
}

#[tokio::test]
async fn what_may_have_acted_is_never_made_again() {
    let tokens = Tokens { input: 1, ..Tokens::default() };
    for fixture in Fixture::both().await {
        let process = fixture.process();
        drop(process.admit_as(keyed(1, 1), free()).await.unwrap());
        process.admit_as(keyed(2, 1), free()).await.unwrap().finish(Outcome::Partial);
        let mut guard = process.admit_as(keyed(3, 1), free()).await.unwrap();
        guard.remember_unknown();
        guard.finish(Outcome::Error);
        let free_model = Start { idempotency: keyed(4, 1).idempotency, ..chat(price(0, 0, 0)) };
        let mut guard = process.admit_as(free_model, free()).await.unwrap();
        guard.set_tokens(tokens, true);
        guard.finish(Outcome::Error);
        process.admit_as(keyed(5, 1), free()).await.unwrap().finish(Outcome::Ok);
        let mut refused = process.admit_as(keyed(6, 1), free()).await.unwrap();
        refused.remember(StoredAnswer { status: 400, ..answer("no") });
        refused.finish(Outcome::Error);
        let process = closed(&fixture, process).await;
        for key in 1..5 {
            let denied = process.admit_as(keyed(key, 1), free()).await.unwrap_err();
            assert_eq!(denied, Denied::Repeated(Repeated::OutcomeUnknown), "{key}");
            assert_eq!((denied.kind(), denied.code()), (Kind::Conflict, "idempotency_outcome_unknown"));
            assert_eq!(denied.reset(), None, "final");
        }
        let denied = process.admit_as(keyed(5, 1), free()).await.unwrap_err();
        assert_eq!((denied.code(), denied.reset()), ("idempotency_not_replayable", None));
        let refusal = repeated(process.admit_as(keyed(6, 1), free()).await);
        assert_eq!(refusal, Repeated::Answered(StoredAnswer { status: 400, ..answer("no") }));
    }
}

#[tokio::test]
async fn the_outcome_of_a_dead_replica_is_unknown_until_it_tells() {
    for fixture in Fixture::both().await {
        let options = MeterOptions { call_life: Duration::ZERO, ..MeterOptions::default() };
        let mut dying = Process::living(fixture.ledger.clone(), options);
        let mut answered = dying.admit_as(keyed(1, 1), terms(total(100), 9)).await.unwrap();
        let failed = dying.admit_as(keyed(2, 1), free()).await.unwrap();
        let process = fixture.process();
        assert_eq!(repeated(process.admit_as(keyed(1, 1), free()).await), Repeated::InFlight);
        assert_eq!(process.sweep(false).await, 2);
        for key in [1, 2] {
            assert_eq!(repeated(process.admit_as(keyed(key, 1), free()).await), Repeated::OutcomeUnknown);
        }
        assert_eq!(repeated(process.admit_as(keyed(1, 2), free()).await), Repeated::OtherRequest);
        answered.remember(answer("late"));
        answered.finish(Outcome::Ok);
        failed.finish(Outcome::Error);
        dying.end().await;
        let again = repeated(process.admit_as(keyed(1, 1), free()).await);
        assert_eq!(again, Repeated::Answered(answer("late")));
        process.admit_as(keyed(2, 1), free()).await.unwrap().cancel();
    }
}

#[tokio::test]
async fn one_of_many_at_once_is_made() {
    for fixture in Fixture::both().await {
        let processes: Vec<Process> = (0..4).map(|_| fixture.process()).collect();
        let calls = (0..64).map(|n| processes[n % 4].admit_as(keyed(1, 1), free()));
        let (made, others): (Vec<_>, Vec<_>) = join_all(calls).await.into_iter().partition(Result::is_ok);
        assert_eq!((made.len(), others.len()), (1, 63));
        for other in others {
            assert_eq!(repeated(other), Repeated::InFlight);
        }
    }
}

#[tokio::test]
async fn answers_are_recorded_and_kept_within_bounds() {
    for fixture in Fixture::both().await {
        let options = MeterOptions { most_answer: 10, most_answers: 15, ..MeterOptions::default() };
        let mut process = Process::living(fixture.ledger.clone(), options);
        assert!(process.admit(free()).await.unwrap().recorder().is_none(), "without a key");
        let mut guards = Vec::new();
        for (key, chunks) in
            [(1, vec!["data: 1\n", "\n"]), (2, vec!["0123456789", "x"]), (3, vec!["01", "23", "45"])]
        {
            let mut guard = process.admit_as(keyed(key, 1), free()).await.unwrap();
            let mut recorder = guard.recorder().unwrap();
            for chunk in chunks {
                recorder.record(&Bytes::from_static(chunk.as_bytes()));
            }
            guard.remember_recorded(recorder, 200, "text/event-stream");
            guards.push(guard);
        }
        let mut whole = process.admit_as(keyed(4, 1), free()).await.unwrap();
        whole.remember(answer("0"));
        let mut too_large = process.admit_as(keyed(5, 1), free()).await.unwrap();
        too_large.remember(answer("01234567890"));
        guards.extend([whole, too_large]);
        for guard in guards {
            guard.finish(Outcome::Ok);
        }
        process.end().await;
        let process = fixture.process();
        let mut told = Vec::new();
        for key in 1..6 {
            told.push(match repeated(process.admit_as(keyed(key, 1), free()).await) {
                Repeated::Answered(answer) => String::from_utf8(answer.body.to_vec()).unwrap(),
                other => {
                    assert_eq!(other, Repeated::NotReplayable);
                    "-".to_owned()
                }
            });
        }
        // The second and the last are too large by themselves; the others fill all of the room.
        assert_eq!(told, ["data: 1\n\n", "-", "012345", "-", "-"]);
    }
}

/// All room is there again once the answers are with the ledger.
#[tokio::test]
async fn answers_take_room_until_their_calls_are_closed() {
    let fixture = Fixture::redis().await;
    let options = MeterOptions { most_answer: 1 << 20, most_answers: 1 << 20, ..MeterOptions::default() };
    let mut process = Process::living(fixture.ledger.clone(), options);
    let shutdown = CancellationToken::new();
    let running =
        tokio::spawn(process.flusher.take().unwrap().run(shutdown.clone(), CancellationToken::new()));
    let body = Bytes::from(vec![b'x'; 1 << 20]);
    for key in 1..6 {
        // What is beyond one flight takes another one.
        let mut guard = process.admit_as(keyed(key, 1), free()).await.unwrap();
        guard.remember(answer(body.clone()));
        guard.finish(Outcome::Ok);
        eventually(Duration::from_secs(10), || async {
            repeated(process.admit_as(keyed(key, 1), free()).await)
                == Repeated::Answered(answer(body.clone()))
        })
        .await;
    }
    shutdown.cancel();
    assert_eq!(running.await.unwrap().lost, 0);
}

#[tokio::test]
async fn large_answers_are_closed_in_several_flights() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    let body = |key: u8| Bytes::from(vec![b'a' + key; 1 << 20]);
    for key in 0..11 {
        let mut guard = process.admit_as(keyed(key, 1), terms(total(1000), 5)).await.unwrap();
        guard.remember(answer(body(key)));
        guard.finish(Outcome::Ok);
    }
    process.end().await;
    assert_eq!(process.audit().await, [("workspace:total".into(), 55, 0)]);
    let process = fixture.process();
    for key in 0..11 {
        let again = repeated(process.admit_as(keyed(key, 1), free()).await);
        assert_eq!(again, Repeated::Answered(answer(body(key))));
    }
}

#[tokio::test]
async fn a_key_is_forgotten_when_its_time_is_over() {
    let clock = Arc::new(ManualClock::new("2026-01-02T03:04:05Z".parse().unwrap()));
    let ledger: Arc<dyn Ledger> = Arc::new(EmbeddedLedger::new(clock.clone(), 100));
    let process = || Process::at(ledger.clone(), MeterOptions::default(), clock.clone());
    let mut first = process();
    let mut guard = first.admit_as(keyed(1, 1), free()).await.unwrap();
    clock.advance(Duration::from_mins(14));
    guard.remember(answer("{}"));
    guard.finish(Outcome::Ok);
    first.end().await;
    clock.advance(Duration::from_mins(14));
    let again = repeated(process().admit_as(keyed(1, 1), free()).await);
    assert_eq!(again, Repeated::Answered(answer("{}")), "counted from the answer");
    clock.advance(Duration::from_mins(2));
    process().admit_as(keyed(1, 2), free()).await.unwrap().cancel();

    let fixture = Fixture::redis().await;
    let process = fixture.process();
    let mut guard = process.admit_as(keyed(1, 1), free()).await.unwrap();
    let ttl = || async {
        let [key] = fixture.server().keys("idem:*").await.try_into().unwrap();
        fixture.server().query::<i64>(&["PTTL", &key]).await
    };
    assert!((800_000..=900_000).contains(&ttl().await));
    let [key] = fixture.server().keys("idem:*").await.try_into().unwrap();
    assert_eq!(key, format!("idem:{{acme}}:key:k1:{}", "01".repeat(32)));
    fixture.server().cli(&["PEXPIRE", &key, "500000"]).await;
    guard.remember(answer("{}"));
    guard.finish(Outcome::Ok);
    let process = closed(&fixture, process).await;
    assert!((800_000..=900_000).contains(&ttl().await));

    // A call that outlived its key leaves that of the next one alone.
    fixture.server().cli(&["DEL", &key]).await;
    let mut old = process.admit_as(keyed(1, 1), free()).await.unwrap();
    fixture.server().cli(&["DEL", &key]).await;
    let other = fixture.process();
    let _new = other.admit_as(keyed(1, 2), free()).await.unwrap();
    old.remember(answer("old"));
    old.finish(Outcome::Ok);
    let process = closed(&fixture, process).await;
    assert_eq!(repeated(process.admit_as(keyed(1, 2), free()).await), Repeated::InFlight);
}

/// What Redis lost is told to it again.
#[tokio::test]
async fn an_answer_is_known_even_if_the_key_was_lost_meanwhile() {
    let fixture = Fixture::redis().await;
    let process = fixture.process();
    let mut guard = process.admit_as(keyed(1, 1), free()).await.unwrap();
    fixture.server().cli(&["FLUSHALL"]).await;
    guard.remember(answer("{}"));
    guard.finish(Outcome::Ok);
    let process = closed(&fixture, process).await;
    assert_eq!(repeated(process.admit_as(keyed(1, 1), free()).await), Repeated::Answered(answer("{}")));
    assert_eq!(repeated(process.admit_as(keyed(1, 2), free()).await), Repeated::OtherRequest);
}

#[tokio::test]
async fn a_key_of_another_type_admits_nothing_in_part() {
    let fixture = Fixture::redis().await;
    let process = fixture.process();
    let key = format!("idem:{{acme}}:key:k1:{}", "01".repeat(32));
    fixture.server().cli(&["SET", &key, "x"]).await;
    let denied = process.admit_as(keyed(1, 1), terms(total(100), 5)).await.unwrap_err();
    assert!(matches!(denied, Denied::Ledger(_)), "{denied}");
    assert_eq!(fixture.server().keys("ledger:{acme}:c:*").await.len(), 0);
}

/// The key of an admission that was abandoned is free again, wherever it was abandoned.
#[tokio::test]
async fn an_abandoned_admission_holds_no_key() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    process.admit(free()).await.unwrap().cancel();
    for key in 0..50 {
        let mut admission = Box::pin(process.admit_as(keyed(key, 1), free()));
        let sent = async {
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            admitted = &mut admission => admitted.unwrap().cancel(),
            () = sent => {}
        }
    }
    eventually(Duration::from_secs(10), || async { !fixture.server().keys("idem:*").await.is_empty() }).await;
    process.end().await;
    assert_eq!(fixture.server().keys("idem:*").await, Vec::<String>::new());
}

/// Everything that a script touches is declared, and lies in one slot.
#[tokio::test]
async fn keys_and_top_ups_on_a_cluster() {
    let cluster = RedisCluster::start().await;
    let node = cluster.owner("ledger:{acme}:meta").await;
    node.cli(&["HSET", "ledger:{acme}:meta", "epoch", "1"]).await;
    let redis = Redis::connect(RedisOptions::new(Secret::new(cluster.url()))).await.unwrap();
    let ledger: Arc<dyn Ledger> = Arc::new(RedisLedger::new(redis));
    let options = MeterOptions { call_life: Duration::ZERO, ..MeterOptions::default() };
    let mut dying = Process::living(ledger.clone(), options);
    let process = Process::new(ledger.clone());
    let user = Principal::User { issuer: "https://idp.example/{a}".into(), subject: "{b} c".into() };
    let start = |key| Start { principal: user.clone(), ..keyed(key, 1) };
    let mut answered = dying.admit_as(start(1), terms(total(100), 5)).await.unwrap();
    let swept = dying.admit_as(start(2), terms(total(100), 5)).await.unwrap();
    let cancelled = dying.admit_as(start(3), terms(total(100), 5)).await.unwrap();
    answered.top_up(NanoUsd::new(60), 0).await.unwrap();
    answered.remember(answer("{}"));
    cancelled.give_back().await;
    process.admit_as(start(3), free()).await.unwrap().cancel();
    assert_eq!(process.sweep(false).await, 2);
    assert_eq!(repeated(process.admit_as(start(2), free()).await), Repeated::OutcomeUnknown);
    answered.finish(Outcome::Ok);
    drop(swept);
    dying.end().await;
    assert_eq!(repeated(process.admit_as(start(1), free()).await), Repeated::Answered(answer("{}")));
    assert_eq!(process.audit().await, [("workspace:total".into(), 10, 0)]);
}
