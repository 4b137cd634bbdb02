use std::collections::VecDeque;
use std::fmt::Debug;

use async_trait::async_trait;
use obol_model::{Kind, UsageEvent};
use parking_lot::Mutex;

/// Where usage events go.
#[async_trait]
pub trait UsageSink: Debug + Send + Sync + 'static {
    /// Appends events, each to what its workspace has, in order.
    ///
    /// Not cancel-safe in one respect: a future that is dropped may have appended all, some or none.
    ///
    /// # Errors
    /// What was not appended, or could not be known to be.
    async fn append(&self, events: &[UsageEvent]) -> Result<(), SinkError>;
}

/// Why events were not appended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The store did not answer. Each event may or may not have been appended.
    #[error("the usage store cannot be reached: {reason}")]
    Unavailable {
        /// For the log.
        reason: String,
    },
    /// The store appended the others and refused these.
    #[error("the usage store refused {} events: {reason}", refused.len())]
    Refused {
        /// Positions in the batch, ascending.
        refused: Vec<usize>,
        /// What the store said of the first one, for the log.
        reason: String,
    },
}

impl SinkError {
    /// The kind of the failure.
    pub fn kind(&self) -> Kind {
        Kind::Unavailable
    }
}

/// Keeps the newest events of a single process in memory.
#[derive(Debug)]
pub struct EmbeddedSink {
    capacity: usize,
    ring: Mutex<VecDeque<UsageEvent>>,
}

impl EmbeddedSink {
    /// Keeps the newest `capacity` events of all workspaces together; older ones are forgotten.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ring: Mutex::default() }
    }

    /// What is kept, oldest first.
    pub fn events(&self) -> Vec<UsageEvent> {
        self.ring.lock().iter().cloned().collect()
    }
}

#[async_trait]
impl UsageSink for EmbeddedSink {
    async fn append(&self, events: &[UsageEvent]) -> Result<(), SinkError> {
        let mut ring = self.ring.lock();
        ring.extend(events.iter().cloned());
        let excess = ring.len().saturating_sub(self.capacity);
        ring.drain(..excess);
        Ok(())
    }
}
