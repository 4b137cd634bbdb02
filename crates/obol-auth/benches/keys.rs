//! What a known key costs: `cargo bench -p obol-auth`.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::disallowed_methods, reason = "a benchmark")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use obol_auth::{EmbeddedKeys, Keys, KeysOptions, KeysParts};
use obol_model::{KeyContext, Limits, SystemClock, VirtualKey};

/// Keys in memory: as many as a busy replica has.
const KEYS: usize = 1_000;
const CALLS: usize = 200_000;
const ROUNDS: usize = 7;

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _inside = runtime.enter();
    let store = Arc::new(EmbeddedKeys::new());
    let made: Vec<VirtualKey> = (0..KEYS).map(|_| VirtualKey::generate().unwrap()).collect();
    for (number, key) in made.iter().enumerate() {
        let context = KeyContext {
            schema_version: KeyContext::SCHEMA,
            key_id: format!("k-{number}").parse().unwrap(),
            workspace_id: "acme".parse().unwrap(),
            name: String::new(),
            tags: vec!["team:web".to_owned()],
            disabled: false,
            expires_at: None,
            budgets: Vec::new(),
            limits: Limits::default(),
            revision: 1,
        };
        store.insert(key.hash(), context);
    }
    store.mark_loaded();
    let keys = Keys::new(KeysParts {
        store,
        control: None,
        reconciled_at: Arc::new(|| None),
        clock: Arc::new(SystemClock),
        options: KeysOptions::default(),
    });
    for key in &made {
        runtime.block_on(keys.authenticate(key.expose())).unwrap();
    }
    report("key lookup, hit", || {
        for key in made.iter().cycle().take(CALLS) {
            // A hit is ready at the first poll.
            black_box(keys.authenticate(key.expose()).now_or_never().unwrap().unwrap());
        }
    });
    report("  of which form and SHA-256", || {
        for key in made.iter().cycle().take(CALLS) {
            black_box(VirtualKey::hash_of(key.expose()).unwrap());
        }
    });
}

/// The best and the middle of several rounds: what the machine can do, and what it did.
fn report(what: &str, work: impl Fn()) {
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed()
        })
        .collect();
    times.sort();
    let nanos = |time: &Duration| time.as_nanos() / CALLS as u128;
    println!(
        "{what}: {} ns (median {} ns)",
        nanos(times.first().unwrap()),
        nanos(times.get(ROUNDS / 2).unwrap())
    );
}
