//! One guard becomes one event, whatever ends the call.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use obol_meter::{Denied, EmbeddedLedger, Flusher, Meter, MeterOptions, Price, Start, UsageGuard, meter};
use obol_model::{Kind, ModelCall, NanoUsd, Outcome, ReplicaId, Tokens, UsageEvent, UsageKind};
use proptest::prelude::*;
use support::{chat, clock, free, price, tool};
use tokio_util::sync::CancellationToken;

fn embedded(queue: usize) -> (Meter, Flusher, Arc<EmbeddedLedger>) {
    let ledger = Arc::new(EmbeddedLedger::new(clock(), 1000));
    let options = MeterOptions { queue, ..MeterOptions::default() };
    let (meter, flusher) = meter(ledger.clone(), clock(), ReplicaId::generate(), options);
    (meter, flusher, ledger)
}

async fn admit(meter: &Meter, start: Start) -> UsageGuard {
    meter.admit(start, free()).await.unwrap().0
}

async fn drain(flusher: Flusher, ledger: &EmbeddedLedger) -> Vec<UsageEvent> {
    let shutdown = CancellationToken::new();
    shutdown.cancel();
    let report = flusher.run(shutdown, CancellationToken::new()).await;
    assert_eq!((report.written, report.lost), (ledger.events().len() as u64, 0));
    ledger.events()
}

#[tokio::test]
async fn a_finished_call_is_one_event_with_what_was_told() {
    let (meter, flusher, ledger) = embedded(8);
    let mut guard = admit(&meter, chat(price(9, 9, 9))).await;
    let id = guard.request_id();
    guard.served_by(&"openai".parse().unwrap(), "gpt-x", price(1, 0, 2));
    guard.set_tokens(Tokens { input: 10, cached_input: 90, output: 5, ..Tokens::default() }, false);
    assert_eq!(meter.open(), 1);
    guard.finish(Outcome::Ok);
    assert_eq!(meter.open(), 0);

    let events = drain(flusher, &ledger).await;
    let [event] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(event.event_id, id.into());
    assert_eq!(event.outcome, Outcome::Ok);
    assert_eq!(event.cost.nanos(), 10 * 1000 + 5 * 2000, "at the price of the target that served");
    assert_eq!(event.started_at, clock().now());
    assert_eq!(
        event.kind,
        UsageKind::ChatCompletion(ModelCall {
            model: "fast".parse().unwrap(),
            provider: Some("openai".parse().unwrap()),
            upstream_model: Some("gpt-x".into())
        })
    );
}

#[tokio::test]
async fn a_dropped_call_is_partial_and_charged_for_what_is_known() {
    let (meter, flusher, ledger) = embedded(8);
    drop(admit(&meter, tool(77)).await);
    let mut guard = admit(&meter, chat(price(1, 1, 1))).await;
    guard.set_tokens(Tokens { input: 3, cached_input: 0, output: 4, ..Tokens::default() }, true);
    drop(guard);

    let events = drain(flusher, &ledger).await;
    let told: Vec<_> = events.iter().map(|e| (e.outcome, e.cost.nanos(), e.estimated)).collect();
    assert_eq!(told, [(Outcome::Partial, 77, false), (Outcome::Partial, 7000, true)]);
}

#[tokio::test]
async fn a_panic_and_an_abort_are_one_partial_event_each() {
    let (meter, flusher, ledger) = embedded(8);
    let guard = admit(&meter, tool(1)).await;
    let mut calls = tokio::task::JoinSet::new();
    calls.spawn(async move {
        let _guard = guard;
        panic!("in mid-call");
    });
    let guard = admit(&meter, tool(2)).await;
    let endless = calls.spawn(async move {
        let _guard = guard;
        std::future::pending::<()>().await;
    });
    endless.abort();
    while calls.join_next().await.is_some() {}

    let events = drain(flusher, &ledger).await;
    let mut costs: Vec<_> = events.iter().map(|e| (e.outcome, e.cost.nanos())).collect();
    costs.sort_by_key(|c| c.1);
    assert_eq!(costs, [(Outcome::Partial, 1), (Outcome::Partial, 2)]);
}

#[tokio::test]
async fn a_full_queue_refuses_the_call_and_an_open_guard_keeps_its_place() {
    let (meter, flusher, ledger) = embedded(2);
    let (one, two) = (admit(&meter, tool(1)).await, admit(&meter, tool(2)).await);
    let refused = meter.admit(tool(3), free()).await.unwrap_err();
    assert_eq!((refused.kind(), refused), (Kind::Unavailable, Denied::QueueFull));
    one.finish(Outcome::Ok);
    assert_eq!(
        meter.admit(tool(3), free()).await.unwrap_err(),
        Denied::QueueFull,
        "a closed call waits for the flusher"
    );
    two.finish(Outcome::Error);

    let events = drain(flusher, &ledger).await;
    assert_eq!(events.iter().map(|e| e.cost.nanos()).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(meter.admit(tool(4), free()).await.unwrap_err(), Denied::Stopping);
}

#[tokio::test]
async fn idle_waits_for_the_last_guard() {
    let (meter, _flusher, _ledger) = embedded(8);
    meter.idle().await;
    let (one, two) = (admit(&meter, tool(1)).await, admit(&meter, tool(2)).await);
    let idle = meter.idle();
    tokio::pin!(idle);
    drop(one);
    assert!(futures::poll!(&mut idle).is_pending());
    drop(two);
    idle.await;
}

#[tokio::test]
async fn a_drain_waits_for_open_guards_until_it_is_abandoned() {
    let (meter, flusher, ledger) = embedded(8);
    let guard = admit(&meter, tool(5)).await;
    let (shutdown, abandon) = (CancellationToken::new(), CancellationToken::new());
    shutdown.cancel();
    let run = flusher.run(shutdown, abandon.clone());
    tokio::pin!(run);
    assert!(tokio::time::timeout(Duration::from_millis(20), &mut run).await.is_err());
    guard.finish(Outcome::Ok);
    let report = run.await;
    assert_eq!((report.written, report.lost, ledger.events().len()), (1, 0, 1));

    let (meter, flusher, _ledger) = embedded(8);
    let _open = admit(&meter, tool(5)).await;
    abandon.cancel();
    let report = flusher.run(CancellationToken::new(), abandon).await;
    assert_eq!((report.written, report.lost), (0, 1), "an open call has nowhere to go any more");
}

#[test]
fn a_call_by_price_is_due_unless_it_failed() {
    let price = Price::PerCall(NanoUsd::new(5));
    let nothing = Tokens::default();
    assert_eq!(price.cost(&nothing, Outcome::Ok).nanos(), 5);
    assert_eq!(price.cost(&nothing, Outcome::Partial).nanos(), 5);
    assert_eq!(price.cost(&nothing, Outcome::Error).nanos(), 0);
}

proptest! {
    #[test]
    fn tokens_are_priced_per_bucket(input in 0_u64..10_000_000, cached in 0_u64..10_000_000, output in 0_u64..10_000_000) {
        let tokens = Tokens { input, cached_input: cached, output, ..Tokens::default() };
        // One USD per million is exactly 1000 nano-USD per token.
        let cost = Price::Tokens(price(3, 1, 15)).cost(&tokens, Outcome::Partial);
        prop_assert_eq!(cost.nanos(), 1000 * (3 * input + cached + 15 * output));
    }
}
