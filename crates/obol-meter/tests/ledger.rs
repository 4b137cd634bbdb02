//! The ledger, in Redis and in memory: what is set aside, spent, given back and booked, exactly once.
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
use obol_meter::{Denied, LedgerError, MeterOptions, Price, Rate, Start, Terms};
use obol_model::{
    BudgetScope, Clock, EventPart, KeyBudget, Limits, ManualClock, NanoUsd, Outcome, Principal, RequestId,
    SystemClock, Window,
};
use obol_testkit::eventually;
use support::ledgers::{Fixture, Process, budget, lines, terms, total};
use support::tool;
use tokio_util::sync::CancellationToken;

fn priced(price: u64) -> Start {
    tool(price)
}

#[tokio::test]
async fn a_budget_admits_what_fits_and_gives_back_what_was_not_spent() {
    for fixture in Fixture::both().await {
        let mut process = fixture.process();
        let mut admitted = Vec::new();
        for _ in 0..3 {
            admitted.push(process.admit_as(priced(100), terms(total(1000), 300)).await.unwrap());
        }
        let denied = process.admit(terms(total(1000), 300)).await.unwrap_err();
        let expected = Denied::Budget {
            name: "Workspace Total".into(),
            left: NanoUsd::new(100),
            held: NanoUsd::new(900),
            amount: NanoUsd::new(300),
            reset: None,
        };
        assert_eq!(denied, expected);
        assert_eq!(denied.reset(), Some(Duration::from_secs(1)), "others may not spend all of it");
        assert_eq!(process.audit().await, [("workspace:total".into(), 0, 900)]);
        for guard in admitted {
            guard.finish(Outcome::Ok);
        }
        process.end().await;
        assert_eq!(process.audit().await, [("workspace:total".into(), 300, 0)]);
        let events = fixture.events().await;
        assert_eq!(events.iter().map(|e| e.cost.nanos()).collect::<Vec<_>>(), [100, 100, 100]);
        assert!(events.iter().all(|e| e.reserved == NanoUsd::new(300) && !e.overrun));

        // What costs more than was set aside is booked in full, and says so.
        let mut process = fixture.process();
        process.admit_as(priced(250), terms(total(1000), 200)).await.unwrap().finish(Outcome::Ok);
        process.end().await;
        assert_eq!(process.audit().await, [("workspace:total".into(), 550, 0)]);
        assert!(fixture.events().await.last().unwrap().overrun);
        let never = process.admit(terms(total(1000), 1001)).await.unwrap_err();
        assert!(matches!(never, Denied::NeverFits { .. }), "{never}");
    }
}

#[tokio::test]
async fn all_budgets_have_room_or_nothing_is_set_aside() {
    for fixture in Fixture::both().await {
        let process = fixture.process();
        let budgets = [
            budget(BudgetScope::Workspace, Window::Total, 1000),
            budget(BudgetScope::Model("fast".parse().unwrap()), Window::Month, 1000),
            budget(BudgetScope::Model("other".parse().unwrap()), Window::Month, 1),
            budget(BudgetScope::Key, Window::Day, 100),
            budget(BudgetScope::Key, Window::Total, 10_000),
        ];
        // The key's own takes the place of the one for each key.
        let own = [KeyBudget { window: Window::Day, limit: NanoUsd::new(500) }];
        let scope = lines(&budgets, &own, "k1");
        assert_eq!(scope.len(), 4);
        let held = process.admit(terms(scope.clone(), 300)).await.unwrap();
        let denied = process.admit(terms(scope, 300)).await.unwrap_err();
        let Denied::Budget { name, left, reset, .. } = denied else { panic!("{denied}") };
        assert_eq!((name.as_str(), left.nanos()), ("key day", 200));
        assert!(reset.is_some_and(|reset| reset <= Duration::from_hours(24)), "{reset:?}");
        let audited = process.audit().await;
        assert_eq!(audited.len(), 4);
        assert!(
            audited.iter().all(|(_, settled, reserved)| (*settled, *reserved) == (0, 300)),
            "{audited:?}"
        );
        // Another key has its own counters, and the same workspace.
        let other = lines(&budgets, &[], "k2");
        assert!(matches!(
            process.admit(terms(other.clone(), 101)).await.unwrap_err(),
            Denied::NeverFits { .. }
        ));
        process.admit(terms(other, 100)).await.unwrap();
        drop(held);
    }
}

#[tokio::test]
async fn requests_tokens_and_calls_at_once_are_limited() {
    for fixture in Fixture::both().await {
        let process = fixture.process();
        let limited = |limits, tokens| Terms { limits, tokens, ..Terms::default() };
        let at_once = Limits { concurrency: Some(2), ..Limits::default() };
        let one = process.admit(limited(at_once, 0)).await.unwrap();
        let _two = process.admit(limited(at_once, 0)).await.unwrap();
        assert_eq!(process.admit(limited(at_once, 0)).await.unwrap_err(), Denied::Concurrency);
        drop(one);
        let requests = Limits { requests_per_minute: Some(4), ..Limits::default() };
        // Two or three of this minute are used, if it is still the same one.
        let mut last = None;
        for _ in 0..5 {
            last = process.admit(limited(requests, 0)).await.err();
        }
        let Some(Denied::Rate { what: Rate::Requests, left: 0, reset }) = last else { panic!("{last:?}") };
        assert!(reset <= Duration::from_mins(1));
        let tokens = Limits { tokens_per_minute: Some(100), ..Limits::default() };
        let start = |who: &str| Start { principal: Principal::Key(who.parse().unwrap()), ..tool(0) };
        process.admit_as(start("k2"), limited(tokens, 100)).await.unwrap();
        let denied = process.admit_as(start("k3"), limited(tokens, 101)).await.unwrap_err();
        assert_eq!(denied, Denied::TooManyTokens { limit: 100, tokens: 101 });
    }
}

#[tokio::test]
async fn a_call_of_a_dead_replica_is_booked_and_corrected_once() {
    for fixture in Fixture::both().await {
        // Old enough at once.
        let options = MeterOptions { call_life: Duration::ZERO, ..MeterOptions::default() };
        let mut dying = Process::living(fixture.ledger.clone(), options);
        let late = dying.admit_as(priced(40), terms(total(1000), 300)).await.unwrap();
        let never = dying.admit_as(priced(40), terms(total(1000), 200)).await.unwrap();
        let others = [fixture.process(), fixture.process()];
        let swept = join_all(others.iter().map(|process| process.sweep(false))).await;
        assert_eq!(swept.iter().sum::<usize>(), 2, "overdue, whoever owns it: {swept:?}");
        assert_eq!(others[0].audit().await, [("workspace:total".into(), 500, 0)]);
        let events = fixture.events().await;
        assert!(events.iter().all(|e| e.outcome == Outcome::Orphaned), "{events:?}");
        // It was not dead after all.
        late.finish(Outcome::Ok);
        drop(never);
        dying.end().await;
        assert_eq!(dying.audit().await, [("workspace:total".into(), 80, 0)]);
        let events = fixture.events().await;
        let corrections: Vec<i64> = events
            .iter()
            .filter(|e| e.event_id.part == EventPart::Correction)
            .map(|e| e.cost.nanos())
            .collect();
        assert_eq!(corrections, [-260, -160]);
        assert_eq!(events.iter().map(|e| e.cost.nanos()).sum::<i64>(), 80, "the ledger and the events agree");
        assert_eq!(others[0].sweep(true).await, 0);
    }
}

#[tokio::test]
async fn a_young_reservation_waits_for_the_lease_of_its_owner() {
    for fixture in Fixture::both().await {
        let process = fixture.process();
        let _held = process.admit(terms(total(1000), 300)).await.unwrap();
        assert_eq!(process.sweep(true).await, 0);
        assert_eq!(process.audit().await, [("workspace:total".into(), 0, 300)]);
    }
}

/// 64 callers on four processes want what only ten can have: ten get it, in each of the rounds.
#[tokio::test]
async fn nothing_is_overspent_by_many_at_once() {
    for fixture in Fixture::both().await {
        for round in 0..20_u64 {
            let budgets = [
                budget(BudgetScope::Workspace, Window::Total, (round + 1) * 10 * 7),
                budget(BudgetScope::Key, Window::Day, 10 * 7),
            ];
            let scope = lines(&budgets, &[], &format!("new-{round}"));
            let mut processes: Vec<Process> = (0..4).map(|_| fixture.process()).collect();
            let calls = (0..64).map(|n| processes[n % 4].admit_as(priced(7), terms(scope.clone(), 7)));
            let (admitted, denied): (Vec<_>, Vec<_>) =
                join_all(calls).await.into_iter().partition(Result::is_ok);
            assert_eq!((admitted.len(), denied.len()), (10, 54), "round {round}");
            for guard in admitted {
                guard.unwrap().finish(Outcome::Ok);
            }
            for process in &mut processes {
                process.end().await;
            }
            let audited = processes[0].audit().await;
            assert!(audited.contains(&(
                "workspace:total".into(),
                i64::try_from((round + 1) * 70).unwrap(),
                0
            )));
        }
        assert_eq!(fixture.events().await.len(), 200);
    }
}

/// The reservation of an abandoned call is given back, wherever it was abandoned.
#[tokio::test]
async fn what_was_set_aside_for_an_abandoned_admission_is_given_back() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    // The first call of a workspace takes another flight before.
    process.admit(terms(vec![], 0)).await.unwrap().cancel();
    for _ in 0..50 {
        let mut admission = Box::pin(process.admit(terms(total(1000), 10)));
        // Sent, and as a rule not answered yet.
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
    eventually(Duration::from_secs(10), || async {
        let audited = process.audit().await;
        audited.iter().any(|(_, _, reserved)| *reserved > 0)
    })
    .await;
    process.end().await;
    let audited = process.audit().await;
    assert!(audited.iter().all(|(_, settled, reserved)| (*settled, *reserved) == (0, 0)), "{audited:?}");
    assert_eq!(fixture.events().await.len(), 0, "no call was made");
    let under_way: Vec<String> = fixture.server().query(&["HKEYS", "ledger:{acme}:under-way"]).await;
    assert!(under_way.is_empty(), "{under_way:?}");
}

/// What arrives after its call was given up admits nothing.
#[tokio::test]
async fn an_admission_that_comes_too_late_is_none() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    let start = tool(5);
    let mut admission = Box::pin(process.admit_as(start.clone(), terms(total(1000), 10)));
    // Not even sent: the first call of a workspace takes another flight before.
    assert!(futures::poll!(&mut admission).is_pending());
    drop(admission);
    process.end().await;
    let late = fixture.process().admit_as(start, terms(total(1000), 10)).await.unwrap_err();
    assert_eq!(late, Denied::Ledger(LedgerError::Closed));
    assert_eq!(fixture.events().await.len(), 0);
}

/// An answer that is lost and asked for again, and a closing that is repeated, change nothing.
#[tokio::test]
async fn every_flight_can_be_repeated() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    let start = Start { price: Price::PerCall(NanoUsd::new(5)), ..tool(5) };
    let guard = process.admit_as(start.clone(), terms(total(1000), 300)).await.unwrap();
    let again = process.admit_as(start.clone(), terms(total(1000), 300)).await.unwrap();
    assert_eq!(process.audit().await, [("workspace:total".into(), 0, 300)]);
    guard.finish(Outcome::Ok);
    again.finish(Outcome::Ok);
    process.end().await;
    assert_eq!(process.audit().await, [("workspace:total".into(), 5, 0)]);
    assert_eq!(fixture.events().await.len(), 1);
    let closed = fixture.process().admit_as(start, terms(total(1000), 300)).await.unwrap_err();
    assert_eq!(closed, Denied::Ledger(LedgerError::Closed));
}

#[tokio::test]
async fn a_lost_ledger_admits_nothing_and_a_lost_reservation_is_settled_all_the_same() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    let guard = process.admit_as(priced(5), terms(total(1000), 300)).await.unwrap();
    fixture.server().cli(&["FLUSHALL"]).await;
    let lost = process.admit(terms(total(1000), 1)).await.unwrap_err();
    assert_eq!(lost, Denied::Ledger(LedgerError::Lost));
    process.admit(terms(vec![], 1)).await.unwrap().finish(Outcome::Error);
    guard.finish(Outcome::Ok);
    process.end().await;
    assert_eq!(process.audit().await, [("workspace:total".into(), 5, 0)]);
    assert_eq!(fixture.events().await.len(), 2);
}

/// Every key of the ledger but those that are for ever has an end.
#[tokio::test]
async fn what_is_written_ends() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    let budgets = Window::ALL.map(|window| budget(BudgetScope::Key, window, 1000));
    let scope = lines(&budgets, &[], "k1");
    process.admit_as(priced(5), terms(scope.clone(), 300)).await.unwrap().finish(Outcome::Ok);
    process.end().await;
    let mut for_ever = Vec::new();
    for key in fixture.server().keys("*").await {
        let ttl: i64 = fixture.server().query(&["PTTL", &key]).await;
        if ttl == -1 {
            for_ever.push(key);
        }
    }
    for_ever.sort();
    assert_eq!(
        for_ever,
        ["ledger:workspaces", "ledger:{acme}:c:key:k1:total", "ledger:{acme}:meta", "usage:{acme}"]
    );
}

static NOW: AtomicI64 = AtomicI64::new(0);

/// What Redis would say, after a test has set it.
fn now() -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(NOW.load(Ordering::SeqCst)).unwrap()
}

/// C075: a call settles in the window in which it was admitted; the next one starts at nothing without any reset, and
/// Redis's clock decides which one it is.
#[tokio::test]
async fn a_call_settles_in_the_window_of_its_admission() {
    let fixture = Fixture::redis_with(|ledger| ledger.with_clock(now)).await;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let today = clock.now().as_millisecond().div_euclid(86_400_000) * 86_400_000;
    NOW.store(today - 1, Ordering::SeqCst);
    // Ahead of Redis, as clocks of machines are.
    let clock = Arc::new(ManualClock::new(jiff::Timestamp::from_millisecond(today).unwrap()));
    let ahead = || Process::at(fixture.ledger.clone(), MeterOptions::default(), clock.clone());
    let mut process = ahead();
    let day = || lines(&[budget(BudgetScope::Workspace, Window::Day, 100)], &[], "k1");
    let held = process.admit_as(priced(60), terms(day(), 100)).await.unwrap();
    let Err(Denied::Budget { reset, left, .. }) = process.admit(terms(day(), 1)).await else { panic!() };
    assert_eq!((reset, left.nanos()), (Some(Duration::from_millis(1)), 0));
    NOW.store(today, Ordering::SeqCst);
    let other = process.admit_as(priced(10), terms(day(), 100)).await.unwrap();
    assert!(process.admit(terms(day(), 1)).await.is_err());
    held.finish(Outcome::Ok);
    other.finish(Outcome::Ok);
    process.end().await;
    let spent: Vec<(i64, i64)> = process.audit().await.into_iter().map(|(_, s, r)| (s, r)).collect();
    assert_eq!(spent, [(60, 0), (10, 0)], "yesterday's and today's");
    // A clock that is days away names no window that Redis could choose.
    NOW.store(today + 3 * 86_400_000, Ordering::SeqCst);
    let denied = ahead().admit(terms(day(), 1)).await.unwrap_err();
    assert_eq!(denied, Denied::Ledger(LedgerError::Clock));
}

/// A used-up or overspent budget holds up nothing that costs nothing.
#[tokio::test]
async fn what_is_free_is_never_refused_for_money() {
    for fixture in Fixture::both().await {
        let mut process = fixture.process();
        process.admit(terms(total(0), 0)).await.unwrap().cancel();
        process.admit_as(priced(250), terms(total(100), 100)).await.unwrap().finish(Outcome::Ok);
        process.end().await;
        let limits = Limits { tokens_per_minute: Some(10), ..Limits::default() };
        let tokens = |tokens| Terms { limits, tokens, ..terms(total(100), 0) };
        let process = fixture.process();
        let _all = process.admit(tokens(10)).await.unwrap();
        process.admit(tokens(0)).await.unwrap().cancel();
        assert!(process.admit(terms(total(100), 1)).await.is_err());
        let absurd = process.admit(Terms { tokens: 1 << 40, ..Terms::default() }).await.unwrap_err();
        assert!(matches!(absurd, Denied::TooManyTokens { .. }), "{absurd}");
    }
}

/// A script that meets something foreign has changed nothing.
#[tokio::test]
async fn keys_of_another_type_set_nothing_aside_and_settle_nothing_in_part() {
    let fixture = Fixture::redis().await;
    for key in ["ledger:{acme}:under-way", "ledger:{acme}:open"] {
        let process = fixture.process();
        fixture.server().cli(&["SET", key, "x"]).await;
        let denied = process.admit(terms(total(1000), 10)).await.unwrap_err();
        assert!(matches!(denied, Denied::Ledger(LedgerError::Unavailable(_))), "{denied}");
        assert_eq!(fixture.server().keys("ledger:{acme}:c:*").await.len(), 0, "{key}");
        fixture.server().cli(&["DEL", key]).await;
    }
}

/// A workspace whose keys hold something foreign loses nothing and stops nobody else.
#[tokio::test]
async fn a_workspace_that_cannot_be_written_holds_up_no_other() {
    let fixture = Fixture::redis().await;
    let options = MeterOptions { queue: 64, batch: 4, ..MeterOptions::default() };
    let mut process = Process::living(fixture.ledger.clone(), options);
    let of = |workspace: &str| Start { workspace_id: workspace.parse().unwrap(), ..tool(1) };
    let server = fixture.server();
    server.cli(&["SET", "usage:{broken}", "x"]).await;
    let flusher = process.flusher.take().unwrap();
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(flusher.run(shutdown.clone(), CancellationToken::new()));
    let mut taken = 0_usize;
    // Until it is refused for this workspace alone.
    eventually(Duration::from_secs(10), || async {
        match process.admit_as(of("broken"), terms(vec![], 0)).await {
            Ok(guard) => guard.finish(Outcome::Ok),
            Err(denied) => return denied == Denied::QueueFull,
        }
        false
    })
    .await;
    for _ in 0..20 {
        process.admit_as(of("acme"), terms(vec![], 0)).await.unwrap().finish(Outcome::Ok);
        taken += 1;
    }
    eventually(Duration::from_secs(10), || async {
        server.query::<usize>(&["XLEN", "usage:{acme}"]).await == taken
    })
    .await;
    server.cli(&["DEL", "usage:{broken}"]).await;
    eventually(Duration::from_secs(10), || async {
        process.admit_as(of("broken"), terms(vec![], 0)).await.is_ok()
    })
    .await;
    shutdown.cancel();
    let report = running.await.unwrap();
    assert_eq!(report.lost, 0);
    let written: usize = server.query(&["XLEN", "usage:{broken}"]).await;
    assert_eq!(u64::try_from(written + taken).unwrap(), report.written);
}

#[tokio::test]
async fn events_that_the_ledger_writes_can_be_read_back_to_the_nano() {
    let fixture = Fixture::redis().await;
    let mut process = fixture.process();
    let most = NanoUsd::MAX.nanos();
    let id = RequestId::new();
    let start = Start { request_id: id, price: Price::PerCall(NanoUsd::MAX), ..tool(0) };
    process.admit_as(start, terms(total(most), most)).await.unwrap().finish(Outcome::Ok);
    process.end().await;
    let events = fixture.events().await;
    assert_eq!((events.len(), events[0].event_id), (1, id.into()));
    assert_eq!((events[0].cost.nanos(), events[0].reserved), (i64::try_from(most).unwrap(), NanoUsd::MAX));
    assert_eq!(process.audit().await, [("workspace:total".into(), i64::try_from(most).unwrap(), 0)]);
}
