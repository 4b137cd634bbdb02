//! Metering: a guard per call that becomes exactly one usage event, and the flusher that writes the events
//! (DESIGN §12.2, §12.3, §12.5).
//!
//! [`Meter::begin`] takes a place in a bounded queue before the call, so that a [`UsageGuard`] can hand its event over
//! synchronously whatever ends the call: an answer, a client that left, an abort, a panic. A full queue refuses the
//! call instead of forgetting it later. The [`Flusher`] moves events from the queue to a [`UsageSink`] in batches and
//! never drops one while it runs.
//!
//! A flight to the store that timed out may have been applied and is repeated: an event can stand in the stream
//! twice. Consumers are idempotent by `event_id`.
//!
//! This crate does not decide who may spend (budgets, rates), never waits for a store on a caller's path, and spawns
//! nothing: the composer runs [`Flusher::run`].

mod flusher;
mod meter;
mod redis_sink;
mod sink;

pub use crate::flusher::{FlushReport, Flusher};
pub use crate::meter::{Meter, MeterError, MeterOptions, Price, Start, UsageGuard, meter};
pub use crate::redis_sink::RedisSink;
pub use crate::sink::{EmbeddedSink, SinkError, UsageSink};
