//! Metering: what a call may cost is set aside before it is made, and it becomes exactly one usage event (DESIGN §12).
//!
//! [`Meter::admit`] takes a place in a bounded queue and asks the [`Ledger`], in one flight, whether every budget and
//! every limit in scope has room: all of it is set aside, or nothing. The [`UsageGuard`] that it gives hands the call's
//! closing over synchronously, into the place that it owns, whatever ends the call: an answer, a client that left, an
//! abort, a panic. The [`Flusher`] closes calls in batches: one script moves the counters and writes the event, once,
//! however often a flight is repeated. What a process leaves open when it dies is booked by a [`Sweeper`] of another one;
//! what it could not close when it ended waits in a [`Spool`]. [`LedgerSeeds`] put back what a lost ledger knew.
//!
//! A dearer target is called after [`UsageGuard::top_up`]. What a client may send again without its being made again is told
//! in [`idempotency`].
//!
//! INVARIANT, at every admission and for any number of replicas: settled + reserved ≤ limit.
//!
//! This crate does not know prices or budgets by itself (the pinned publication tells), and spawns nothing: the composer
//! runs [`Flusher::run`] and [`Sweeper::run`].

mod embedded;
mod flusher;
pub mod idempotency;
mod kept;
mod ledger;
mod meter;
mod redis_ledger;
mod spool;
mod sweeper;
mod windows;

pub use crate::embedded::EmbeddedLedger;
pub use crate::flusher::{FlushReport, Flusher};
pub use crate::idempotency::{Idempotency, Keyed, Recorder, Repeated, StoredAnswer};
pub use crate::ledger::{
    Admission, Audited, CloseError, Closing, Counter, Denied, Ledger, LedgerError, Line, Open, Rate,
    Reservation, Standing, in_scope,
};
pub use crate::meter::{Attempt, Meter, MeterOptions, Price, Start, Terms, UsageGuard, meter};
pub use crate::redis_ledger::{LedgerSeeds, LostLedger, RedisLedger, Seeded, Spent, Whose};
pub use crate::spool::{Spool, SpoolError};
pub use crate::sweeper::{Owners, Sweeper};
