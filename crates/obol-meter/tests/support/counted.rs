//! A ledger that counts what fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use obol_meter::{Admission, Audited, CloseError, Closing, Denied, Ledger, LedgerError, Open, Reservation};
use obol_model::{NanoUsd, UsageEvent, WorkspaceId};

/// Counts the closings that failed.
#[derive(Debug)]
pub(crate) struct Counted {
    ledger: Arc<dyn Ledger>,
    pub(crate) failures: AtomicUsize,
}

impl Counted {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self { ledger, failures: AtomicUsize::new(0) }
    }
}

#[async_trait]
impl Ledger for Counted {
    async fn reserve(&self, reservation: &Reservation, event: &UsageEvent) -> Result<Admission, Denied> {
        self.ledger.reserve(reservation, event).await
    }

    async fn top_up(
        &self,
        of: &Reservation,
        admission: &Admission,
        amount: NanoUsd,
        tokens: u64,
    ) -> Result<(), Denied> {
        self.ledger.top_up(of, admission, amount, tokens).await
    }

    async fn close(&self, closings: &[Closing]) -> Result<(), CloseError> {
        let result = self.ledger.close(closings).await;
        self.failures.fetch_add(usize::from(result.is_err()), Ordering::SeqCst);
        result
    }

    async fn known(&self, closings: &[Closing]) -> Result<Vec<bool>, LedgerError> {
        self.ledger.known(closings).await
    }

    async fn workspaces(&self) -> Result<Vec<WorkspaceId>, LedgerError> {
        self.ledger.workspaces().await
    }

    async fn open(&self, of: &WorkspaceId, young: Duration, limit: usize) -> Result<Vec<Open>, LedgerError> {
        self.ledger.open(of, young, limit).await
    }

    async fn orphan(&self, of: &WorkspaceId, orphans: &[Open]) -> Result<usize, LedgerError> {
        self.ledger.orphan(of, orphans).await
    }

    async fn audit(&self, of: &WorkspaceId) -> Result<Vec<Audited>, LedgerError> {
        self.ledger.audit(of).await
    }
}
