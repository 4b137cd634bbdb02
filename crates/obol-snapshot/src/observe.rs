//! What is counted and logged of reads.

use obol_model::{Revision, WorkspaceId, metric};

use crate::publications::Outcome;
use crate::{PairError, Reloaded};

pub(crate) fn loaded(loaded: usize) {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a gauge is a float; the number is bounded by the capacity"
    )]
    metrics::gauge!(metric::SNAPSHOT_LOADED).set(loaded as f64);
}

pub(crate) fn revision(workspace: &WorkspaceId, revision: Revision) {
    #[expect(clippy::cast_precision_loss, reason = "a gauge is a float; revisions are small")]
    metrics::gauge!(metric::SNAPSHOT_REVISION, "workspace" => workspace.to_string())
        .set(revision.number as f64);
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
                tracing::warn!(%workspace, error = why as &dyn std::error::Error, "publication refused");
            }
        }
    }
    if unasked > 0 {
        tracing::warn!(workspaces = unasked, "publications could not be compared with the store");
    }
}
