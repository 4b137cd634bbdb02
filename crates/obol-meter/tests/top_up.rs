//! Before a dearer target more is set aside, in all budgets or in none; attempts are events of their own.
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
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use obol_meter::{Attempt, Denied, LedgerError, MeterOptions, Rate, Start, Terms};
use obol_model::{
    BudgetScope, Clock as _, EventPart, Limits, NanoUsd, Outcome, RequestId, SystemClock, Tokens, UsageEvent,
    Window,
};
use support::ledgers::{Fixture, Process, budget, lines, terms, total};
use support::{chat, free, price, tool};

fn nanos(n: u64) -> NanoUsd {
    NanoUsd::new(n)
}

#[tokio::test]
async fn more_is_set_aside_in_all_budgets_or_in_none() {
    for fixture in Fixture::both().await {
        let mut process = fixture.process();
        let budgets =
            [budget(BudgetScope::Workspace, Window::Total, 1000), budget(BudgetScope::Key, Window::Day, 600)];
        let scope = lines(&budgets, &[], "k1");
        let mut guard = process.admit_as(tool(450), terms(scope.clone(), 100)).await.unwrap();
        guard.top_up(nanos(500), 0).await.unwrap();
        let reserved =
            |audited: Vec<(String, i64, i64)>| audited.into_iter().map(|(.., r)| r).collect::<Vec<_>>();
        assert_eq!(reserved(process.audit().await), [500, 500]);
        guard.top_up(nanos(300), 0).await.unwrap();
        assert_eq!(reserved(process.audit().await), [500, 500], "it is enough already");

        let other = process.admit_as(tool(1), terms(scope, 80)).await.unwrap();
        let denied = guard.top_up(nanos(530), 0).await.unwrap_err();
        let Denied::Budget { name, left, held, amount, reset } = denied else { panic!("{denied}") };
        assert_eq!((name.as_str(), left.nanos(), held.nanos(), amount.nanos()), ("Key Day", 20, 580, 530));
        assert!(reset.is_some_and(|reset| reset <= Duration::from_hours(24)), "{reset:?}");
        assert_eq!(reserved(process.audit().await), [580, 580], "nothing in the other one either");
        let never = guard.top_up(nanos(601), 0).await.unwrap_err();
        assert!(matches!(never, Denied::NeverFits { .. }), "{never}");

        // What was set aside before still is, and the call goes on.
        guard.finish(Outcome::Ok);
        other.cancel();
        process.end().await;
        let spent: Vec<_> = process.audit().await.into_iter().map(|(_, s, r)| (s, r)).collect();
        assert_eq!(spent, [(450, 0), (450, 0)]);
        let events = fixture.events().await;
        assert_eq!((events.len(), events[0].reserved, events[0].overrun), (1, nanos(500), false));
    }
}

#[tokio::test]
async fn a_call_that_was_free_can_be_topped_up_and_cancelled() {
    for fixture in Fixture::both().await {
        let mut process = fixture.process();
        let mut guard = process.admit(terms(total(1000), 0)).await.unwrap();
        guard.top_up(nanos(700), 0).await.unwrap();
        assert_eq!(process.audit().await, [("workspace:total".into(), 0, 700)]);
        guard.cancel();
        process.end().await;
        assert_eq!(process.audit().await, [("workspace:total".into(), 0, 0)]);
        assert_eq!(fixture.events().await.len(), 0);
    }
}

#[tokio::test]
async fn what_is_enough_takes_no_flight() {
    let fixture = Fixture::redis().await;
    let process = fixture.process();
    let mut guard = process.admit(Terms { tokens: 10, ..terms(total(1000), 100) }).await.unwrap();
    fixture.server().kill();
    guard.top_up(nanos(100), 10).await.unwrap();
    let denied = guard.top_up(nanos(101), 10).await.unwrap_err();
    assert!(matches!(denied, Denied::Ledger(LedgerError::Unavailable(_))), "{denied}");
}

#[tokio::test]
async fn tokens_are_held_to_the_limit_of_a_minute() {
    for fixture in Fixture::both().await {
        let process = fixture.process();
        let limits = Limits { tokens_per_minute: Some(100), ..Limits::default() };
        let limited = |tokens| Terms { limits, tokens, ..Terms::default() };
        let mut guard = process.admit(limited(30)).await.unwrap();
        guard.top_up(NanoUsd::ZERO, 60).await.unwrap();
        let denied = guard.top_up(NanoUsd::ZERO, 101).await.unwrap_err();
        assert_eq!(denied, Denied::TooManyTokens { limit: 100, tokens: 101 });
        // In the minute of its own admission, which another call may have missed.
        let mut other = process.admit(limited(40)).await.unwrap();
        match other.top_up(NanoUsd::ZERO, 90).await {
            Err(Denied::Rate { what: Rate::Tokens, left, reset }) => {
                assert!(left == 0 && reset <= Duration::from_mins(1), "{left} {reset:?}");
            }
            missed => missed.unwrap(),
        }
    }
}

/// Many on four processes want what only ten can have.
#[tokio::test]
async fn nothing_is_overspent_by_many_that_top_up_at_once() {
    for fixture in Fixture::both().await {
        let mut processes: Vec<Process> = (0..4).map(|_| fixture.process()).collect();
        let limit = 40 + 10 * 60;
        let calls = (0..40).map(|n| processes[n % 4].admit_as(tool(61), terms(total(limit), 1)));
        let mut guards: Vec<_> = join_all(calls).await.into_iter().map(Result::unwrap).collect();
        let topped = join_all(guards.iter_mut().map(|guard| guard.top_up(nanos(61), 0))).await;
        assert_eq!(topped.iter().filter(|topped| topped.is_ok()).count(), 10);
        for (guard, topped) in guards.into_iter().zip(topped) {
            guard.finish(if topped.is_ok() { Outcome::Ok } else { Outcome::Error });
        }
        for process in &mut processes {
            process.end().await;
        }
        assert_eq!(processes[0].audit().await, [("workspace:total".into(), 610, 0)]);
    }
}

/// An answer that is lost and asked for again raises nothing twice.
#[tokio::test]
async fn a_top_up_can_be_repeated() {
    for fixture in Fixture::both().await {
        let process = fixture.process();
        let start = tool(5);
        let mut guard = process.admit_as(start.clone(), terms(total(1000), 100)).await.unwrap();
        let mut again = process.admit_as(start, terms(total(1000), 100)).await.unwrap();
        guard.top_up(nanos(600), 0).await.unwrap();
        again.top_up(nanos(600), 0).await.unwrap();
        assert_eq!(process.audit().await, [("workspace:total".into(), 0, 600)]);
    }
}

#[tokio::test]
async fn an_abandoned_top_up_leaves_a_reservation_that_closes_right() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    for _ in 0..50 {
        let mut guard = process.admit_as(tool(7), terms(total(10_000_000), 10)).await.unwrap();
        let mut top_up = Box::pin(guard.top_up(nanos(500), 3));
        // Sent, and as a rule not answered yet.
        let sent = async {
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            topped = &mut top_up => topped.unwrap(),
            () = sent => {}
        }
        drop(top_up);
        // What it does not know of it does not lower.
        guard.top_up(nanos(20), 0).await.unwrap();
        guard.finish(Outcome::Ok);
    }
    process.end().await;
    assert_eq!(process.audit().await, [("workspace:total".into(), 350, 0)]);
    let reserved: Vec<u64> = fixture.events().await.iter().map(|event| event.reserved.nanos()).collect();
    assert!(reserved.iter().all(|amount| [20, 500].contains(amount)), "{reserved:?}");
    assert!(reserved.contains(&500), "what was set aside, whatever the guard heard: {reserved:?}");
}

#[tokio::test]
async fn an_orphaned_call_is_booked_at_what_was_set_aside_in_the_end() {
    for fixture in Fixture::both().await {
        let options = MeterOptions { call_life: Duration::ZERO, ..MeterOptions::default() };
        let mut dying = Process::living(fixture.ledger.clone(), options);
        let mut guard = dying.admit_as(tool(900), terms(total(1000), 100)).await.unwrap();
        guard.top_up(nanos(700), 0).await.unwrap();
        assert_eq!(fixture.process().sweep(false).await, 1);
        let denied = guard.top_up(nanos(800), 0).await.unwrap_err();
        assert_eq!(denied, Denied::Ledger(LedgerError::Closed));
        let told = |event: &UsageEvent| (event.cost.nanos(), event.reserved.nanos(), event.overrun);
        assert_eq!(fixture.events().await.iter().map(told).collect::<Vec<_>>(), [(700, 700, false)]);
        guard.finish(Outcome::Ok);
        dying.end().await;
        assert_eq!(dying.audit().await, [("workspace:total".into(), 900, 0)]);
        let events = fixture.events().await;
        assert_eq!(events.iter().map(told).collect::<Vec<_>>(), [(700, 700, false), (200, 700, true)]);
    }
}

static NOW: AtomicI64 = AtomicI64::new(0);

/// What Redis would say, after a test has set it.
fn now() -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(NOW.load(Ordering::SeqCst)).unwrap()
}

#[tokio::test]
async fn a_top_up_draws_on_the_window_of_the_admission() {
    let fixture = Fixture::redis_with(|ledger| ledger.with_clock(now)).await;
    let tomorrow = (SystemClock.now().as_millisecond().div_euclid(86_400_000) + 1) * 86_400_000;
    NOW.store(tomorrow - 1, Ordering::SeqCst);
    let clock = Arc::new(obol_model::ManualClock::new(now()));
    let mut process = Process::at(fixture.ledger.clone(), MeterOptions::default(), clock);
    let day = || lines(&[budget(BudgetScope::Workspace, Window::Day, 100)], &[], "k1");
    let mut guard = process.admit_as(tool(90), terms(day(), 10)).await.unwrap();
    NOW.store(tomorrow, Ordering::SeqCst);
    let next = process.admit_as(tool(30), terms(day(), 30)).await.unwrap();
    guard.top_up(nanos(90), 0).await.unwrap();
    assert_eq!(process.audit().await.into_iter().map(|(.., r)| r).collect::<Vec<_>>(), [90, 30]);
    guard.finish(Outcome::Ok);
    next.finish(Outcome::Ok);
    process.end().await;
    let spent: Vec<_> = process.audit().await.into_iter().map(|(_, s, r)| (s, r)).collect();
    assert_eq!(spent, [(90, 0), (30, 0)]);
}

fn attempt(provider: &str, outcome: Outcome, input: u64) -> Attempt {
    Attempt {
        provider: provider.parse().unwrap(),
        upstream_model: "gpt-x".into(),
        outcome,
        started_at: support::clock().now(),
        duration_ms: 7,
        tokens: Tokens { input, ..Tokens::default() },
        estimated: true,
        price: price(2, 2, 2),
    }
}

#[tokio::test]
async fn attempts_are_events_of_their_own_when_there_was_more_than_one() {
    for fixture in Fixture::both().await {
        let mut process = fixture.process();
        let ids: Vec<RequestId> = (0..4).map(|_| RequestId::new()).collect();
        let start = |id| Start { request_id: id, ..chat(price(1, 1, 1)) };
        for (id, attempts) in ids.iter().zip([1, 2, 20, 2]) {
            let mut guard = process.admit_as(start(*id), free()).await.unwrap();
            for n in 1..attempts {
                guard.attempt(attempt("first", Outcome::Partial, n));
            }
            guard.attempt(attempt("second", Outcome::Ok, 40));
            guard.served_by(&"second".parse().unwrap(), "gpt-x", price(1, 1, 1));
            guard.set_tokens(Tokens { input: 40, ..Tokens::default() }, false);
            if *id == ids[3] { guard.cancel() } else { guard.finish(Outcome::Ok) }
        }
        process.end().await;
        let events = fixture.events().await;
        let of = |id: &RequestId| events.iter().filter(|e| e.event_id.request == *id).collect::<Vec<_>>();
        assert_eq!(ids.iter().map(|id| of(id).len()).collect::<Vec<_>>(), [1, 3, 17, 0]);
        let [call, first, second] = of(&ids[1])[..] else { panic!("{events:?}") };
        assert_eq!(
            [call, first, second].map(|event| event.event_id.part),
            [EventPart::Request, EventPart::Attempt(1), EventPart::Attempt(2)]
        );
        let told = |event: &UsageEvent| {
            let by = event.kind.model_call().unwrap().provider.clone().unwrap();
            (by.to_string(), event.outcome, event.cost.nanos(), event.duration_ms, event.estimated)
        };
        assert_eq!(told(first), ("first".into(), Outcome::Partial, 2000, 7, true));
        assert_eq!(told(second), ("second".into(), Outcome::Ok, 80_000, 7, true));
        assert_eq!((call.cost.nanos(), call.estimated), (40_000, false), "alone is summed");
    }
}

/// Those of a tool are not told: it has no targets.
#[tokio::test]
async fn a_late_settlement_tells_the_attempts_once() {
    for fixture in Fixture::both().await {
        let options = MeterOptions { call_life: Duration::ZERO, ..MeterOptions::default() };
        let mut dying = Process::living(fixture.ledger.clone(), options);
        let mut guard = dying.admit_as(chat(price(1, 1, 1)), terms(total(1_000_000), 5000)).await.unwrap();
        let mut call_of_tool = dying.admit_as(tool(1), free()).await.unwrap();
        for outcome in [Outcome::Error, Outcome::Ok] {
            guard.attempt(attempt("first", outcome, 1));
            call_of_tool.attempt(attempt("first", outcome, 1));
        }
        assert_eq!(fixture.process().sweep(false).await, 2);
        guard.set_tokens(Tokens { input: 2, ..Tokens::default() }, false);
        guard.finish(Outcome::Ok);
        call_of_tool.finish(Outcome::Ok);
        dying.end().await;
        assert_eq!(dying.audit().await, [("workspace:total".into(), 2000, 0)]);
        let mut parts: Vec<EventPart> =
            fixture.events().await.iter().map(|event| event.event_id.part).collect();
        parts.sort();
        let (request, correction) = (EventPart::Request, EventPart::Correction);
        let [one, two] = [1, 2].map(EventPart::Attempt);
        assert_eq!(parts, [request, request, correction, correction, one, two]);
    }
}
