//! What a request pays for its publication when it is warm: `cargo bench -p obol-snapshot`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::print_stdout, reason = "a benchmark")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use obol_snapshot::{EmbeddedSource, PublicationSource, Publications};

use crate::support::{Counting, documents, ws};

#[path = "../tests/support/mod.rs"]
mod support;

const ROUNDS: usize = 7;
const CALLS: u32 = 2_000_000;

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut nanos: Vec<f64> = (0..ROUNDS).map(|_| runtime.block_on(round())).collect();
    nanos.sort_by(f64::total_cmp);
    println!("pair, from memory, 1,000 workspaces: {:.1} ns (median of {ROUNDS})", nanos[ROUNDS / 2]);
}

async fn round() -> f64 {
    let source = Arc::new(EmbeddedSource::new());
    for n in 0..1000 {
        let id = format!("w{n}");
        source.publish(&ws(&id), documents(&id, 1, "test")).unwrap();
    }
    let publications =
        Publications::new(Arc::clone(&source) as Arc<dyn PublicationSource>, Counting::default());
    assert_eq!(publications.preload(1000).await.unwrap(), 1000);
    let id = ws("w500");
    let begun = Instant::now();
    for _ in 0..CALLS {
        black_box(publications.pair(black_box(&id)).await.unwrap());
    }
    begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}
