//! What is counted and logged of reads.

use std::collections::HashSet;
use std::time::Duration;

use obol_model::{Causes, Revision, WorkspaceId, metric};
use parking_lot::Mutex;

use crate::publications::Outcome;
use crate::{PRELOAD, PairError, Reloaded};

pub(crate) fn loaded(loaded: usize) {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a gauge is a float; the number is bounded by the capacity"
    )]
    metrics::gauge!(metric::SNAPSHOT_LOADED).set(loaded as f64);
}

/// The workspaces that have a gauge of their own. A series cannot be taken away again, so they are bounded for the life
/// of the process.
#[derive(Debug, Default)]
pub(crate) struct Gauges(Mutex<HashSet<WorkspaceId>>);

impl Gauges {
    /// `None`: it is not served any more.
    pub(crate) fn revision(&self, workspace: &WorkspaceId, revision: Option<Revision>) {
        let mut known = self.0.lock();
        if !known.contains(workspace) {
            if known.len() >= PRELOAD {
                return;
            }
            known.insert(workspace.clone());
        }
        drop(known);
        #[expect(clippy::cast_precision_loss, reason = "a gauge is a float; revisions are small")]
        metrics::gauge!(metric::SNAPSHOT_REVISION, "workspace" => workspace.to_string())
            .set(revision.map_or(0, |revision| revision.number) as f64);
    }
}

/// Seconds since no invalidation was missed; from the start of the process when there was no subscription yet.
pub(crate) fn silence(since: Duration) {
    metrics::gauge!(metric::INVALIDATION_SILENCE).set(since.as_secs_f64());
}

/// A publication that was not taken. `news`: for the first time.
pub(crate) fn rejected(workspace: &WorkspaceId, why: &PairError, news: bool) {
    if !matches!(why, PairError::Older { .. }) {
        return;
    }
    metrics::counter!(metric::SNAPSHOT_REGRESSIONS).increment(1);
    if news {
        tracing::error!(
            %workspace,
            error = %Causes(why),
            "the publication store went back in time, what it holds is refused"
        );
    }
}

pub(crate) fn read<T>(outcome: &Outcome<T>, before: Option<Revision>) {
    let word = match outcome {
        Ok(Some(now)) if before == Some(now.revision()) => "unchanged",
        Ok(Some(_)) => "installed",
        Ok(None) => "absent",
        Err(PairError::Unavailable(_)) => "unavailable",
        Err(_) => "invalid",
    };
    metrics::counter!(metric::SNAPSHOT_READS, "outcome" => word).increment(1);
}

/// One line for each workspace that is broken, and one for all that could not be asked about: with the store away,
/// that is every one of them.
pub(crate) fn failures(results: &Reloaded) {
    let mut unasked = 0_usize;
    for (workspace, result) in results {
        match result {
            Ok(_) => {}
            Err(PairError::Unavailable(_)) => unasked += 1,
            Err(why) => {
                tracing::warn!(%workspace, error = %Causes(why), "publication refused");
            }
        }
    }
    if unasked > 0 {
        tracing::warn!(workspaces = unasked, "publications could not be compared with the store");
    }
}
