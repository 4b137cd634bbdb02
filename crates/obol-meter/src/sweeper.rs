use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use obol_model::{ReplicaId, WorkspaceId, metric};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::ledger::{Ledger, LedgerError, Open};

/// How often a replica looks for reservations that nobody settles.
const EVERY: Duration = Duration::from_secs(5);
/// The lease of a replica that has just started may not be there yet.
const YOUNG: Duration = Duration::from_secs(15);
/// Most reservations of a workspace that one pass looks at.
const MOST: usize = 2_000;

/// Who knows which replicas live.
#[async_trait]
pub trait Owners: Debug + Send + Sync + 'static {
    /// Those among them whose lease is gone.
    ///
    /// # Errors
    /// In words, when nobody can say; then nobody is taken for dead.
    async fn gone(&self, owners: &HashSet<ReplicaId>) -> Result<HashSet<ReplicaId>, String>;
}

/// Books what was set aside by processes that died, or that hold it for longer than any call can last (DESIGN §12.4).
/// Every replica runs one; whichever is first does it.
#[derive(Debug)]
pub struct Sweeper {
    ledger: Arc<dyn Ledger>,
    owners: Arc<dyn Owners>,
}

impl Sweeper {
    /// A sweeper of this ledger.
    pub fn new(ledger: Arc<dyn Ledger>, owners: Arc<dyn Owners>) -> Self {
        Self { ledger, owners }
    }

    /// Sweeps every five seconds until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failing = false;
        while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            let Some(swept) = shutdown.run_until_cancelled(self.sweep()).await else { return };
            match swept {
                Ok(0) => failing = false,
                Ok(booked) => {
                    failing = false;
                    metrics::counter!(metric::USAGE_ORPHANED)
                        .increment(u64::try_from(booked).unwrap_or(u64::MAX));
                    tracing::warn!(booked, "reservations of replicas that are gone were booked");
                }
                // Once: an outage of the store is told by those who need it at once.
                Err(e) if !failing => {
                    failing = true;
                    tracing::warn!(error = %e, "reservations cannot be swept, it is tried again");
                }
                Err(_) => {}
            }
        }
    }

    /// One pass over all workspaces; answers how many reservations were booked. Cancel-safe.
    ///
    /// # Errors
    /// The first failure; the other workspaces were swept all the same.
    pub async fn sweep(&self) -> Result<usize, LedgerError> {
        let (mut booked, mut failure) = (0, None);
        for workspace in self.ledger.workspaces().await? {
            match self.workspace(&workspace).await {
                Ok(n) => booked += n,
                Err(e) => drop(failure.get_or_insert(e)),
            }
        }
        failure.map_or(Ok(booked), Err)
    }

    async fn workspace(&self, workspace: &WorkspaceId) -> Result<usize, LedgerError> {
        let open = self.ledger.open(workspace, YOUNG, MOST).await?;
        let owners: HashSet<ReplicaId> = open.iter().map(|open| open.owner.clone()).collect();
        if owners.is_empty() {
            return Ok(0);
        }
        let gone = self.owners.gone(&owners).await.map_err(LedgerError::Unavailable)?;
        let orphaned = |open: &Open| open.overdue || gone.contains(&open.owner);
        let orphans: Vec<Open> = open.into_iter().filter(orphaned).collect();
        self.ledger.orphan(workspace, &orphans).await
    }
}
