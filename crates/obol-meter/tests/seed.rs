//! A ledger that was lost is put back once, with what was spent, and nothing that is booked meanwhile counts twice.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "these are tests"
)]

mod support;

use obol_meter::{Denied, LedgerError, LedgerSeeds, Seeded, Spent, Whose};
use obol_model::{BudgetScope, Clock as _, NanoUsd, Outcome, Secret, SignedNanoUsd, SystemClock, Window};
use obol_redis::{Redis, RedisOptions};
use support::ledgers::{Fixture, budget, lines, terms, total, ws};
use support::tool;

async fn seeds(fixture: &Fixture) -> LedgerSeeds {
    LedgerSeeds::new(Redis::connect(RedisOptions::new(Secret::new(fixture.server().url()))).await.unwrap())
}

fn spent(whose: Whose, window: Window, amount: i64) -> Spent {
    Spent { whose, window, amount: SignedNanoUsd::new(amount) }
}

#[tokio::test]
async fn a_ledger_with_its_marker_is_never_seeded() {
    let fixture = Fixture::redis().await;
    let seeds = seeds(&fixture).await;
    assert!(seeds.look(&ws()).await.unwrap().is_none());
    fixture.server().cli(&["FLUSHALL"]).await;
    let (one, two) = (seeds.look(&ws()).await.unwrap().unwrap(), seeds.look(&ws()).await.unwrap().unwrap());
    let all = [spent(Whose::Workspace, Window::Total, 700)];
    assert_eq!(seeds.seed(&ws(), &one, &all).await.unwrap(), Seeded::Now);
    assert_eq!(seeds.seed(&ws(), &two, &all).await.unwrap(), Seeded::Before);
    assert_eq!(fixture.process().audit().await, [("workspace:total".into(), 700, 0)]);
    let denied = fixture.process().admit(terms(total(1000), 301)).await.unwrap_err();
    assert!(matches!(denied, Denied::Budget { left, .. } if left == NanoUsd::new(300)), "{denied}");
    // Lost again: what was looked at before is not good any more.
    let stale = one;
    fixture.server().cli(&["FLUSHALL"]).await;
    assert_eq!(seeds.seed(&ws(), &stale, &all).await.unwrap(), Seeded::Moved);
    let denied = fixture.process().admit(terms(total(1000), 1)).await.unwrap_err();
    assert_eq!(denied, Denied::Ledger(LedgerError::Lost));
}

#[tokio::test]
async fn what_is_booked_while_the_ledger_is_lost_counts_once() {
    let fixture = Fixture::redis().await;
    let seeds = seeds(&fixture).await;
    let (mut process, mut slow) = (fixture.process(), fixture.process());
    let first = process.admit_as(tool(5), terms(total(1000), 300)).await.unwrap();
    let second = slow.admit_as(tool(7), terms(total(1000), 300)).await.unwrap();
    fixture.server().cli(&["FLUSHALL"]).await;
    let before = seeds.look(&ws()).await.unwrap().unwrap();
    assert_eq!(before.up_to(), "0-0");
    first.finish(Outcome::Ok);
    process.end().await;
    // 100 were spent before, and the first is booked: sums may know it or not.
    for sum in [100, 105] {
        let all = [spent(Whose::Workspace, Window::Total, sum)];
        assert_eq!(seeds.seed(&ws(), &before, &all).await.unwrap(), Seeded::Moved, "{sum}");
    }
    let after = seeds.look(&ws()).await.unwrap().unwrap();
    assert_ne!(after.up_to(), "0-0");
    let all = [spent(Whose::Workspace, Window::Total, 105)];
    assert_eq!(seeds.seed(&ws(), &after, &all).await.unwrap(), Seeded::Now);
    assert_eq!(slow.audit().await, [("workspace:total".into(), 105, 0)]);
    second.finish(Outcome::Ok);
    slow.end().await;
    assert_eq!(
        slow.audit().await,
        [("workspace:total".into(), 112, 0)],
        "as any call whose reservation was lost"
    );
}

#[tokio::test]
async fn counters_are_those_of_the_current_windows_and_end_with_them() {
    let fixture = Fixture::redis().await;
    let seeds = seeds(&fixture).await;
    fixture.server().cli(&["FLUSHALL"]).await;
    let lost = seeds.look(&ws()).await.unwrap().unwrap();
    let now = SystemClock.now();
    assert!(lost.since(Window::Total).is_none());
    let (day, month) = (lost.since(Window::Day).unwrap(), lost.since(Window::Month).unwrap());
    assert!(month <= day && day <= now && now.duration_since(day).as_hours() < 25);
    let model = || Whose::Model("fast".parse().unwrap());
    let mut all = Vec::new();
    for (window, amount) in Window::ALL.into_iter().zip([10, 200, 3000]) {
        for (whose, more) in [(Whose::Workspace, 0), (model(), 1), (Whose::Principal("key:k1".into()), 2)] {
            all.push(spent(whose, window, amount + more));
        }
    }
    assert_eq!(seeds.seed(&ws(), &lost, &all).await.unwrap(), Seeded::Now);
    // Each is the one that a budget of that scope and window reads.
    let process = fixture.process();
    for (window, amount) in Window::ALL.into_iter().zip([10_u64, 200, 3000]) {
        let scopes = [BudgetScope::Workspace, BudgetScope::Model("fast".parse().unwrap()), BudgetScope::Key];
        for (scope, more) in scopes.into_iter().zip(0..) {
            let spent = amount + more;
            let line = lines(&[budget(scope, window, spent + 50)], &[], "k1");
            let denied = process.admit(terms(line.clone(), 51)).await.unwrap_err();
            let Denied::Budget { left, .. } = denied else { panic!("{denied}") };
            assert_eq!(left.nanos(), 50, "{window:?}");
        }
    }
    for key in fixture.server().keys("ledger:{acme}:c:*").await {
        let ttl: i64 = fixture.server().query(&["PTTL", &key]).await;
        assert_eq!(ttl == -1, key.ends_with(":total"), "{key}");
    }
    assert_eq!(fixture.server().keys("ledger:{acme}:seeding").await.len(), 0);
}
