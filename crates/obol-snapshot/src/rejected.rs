use std::collections::HashMap;
use std::mem::discriminant;

use obol_model::snapshot::{Fingerprint, InvalidPublication};
use obol_model::{Revision, WorkspaceId};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::PairError;

/// What the store holds for a workspace and was not taken.
#[derive(Debug, Clone)]
pub struct Rejected {
    /// Its revision, where its fingerprint can be read.
    pub revision: Option<Revision>,
    /// Why it was not taken; never [`PairError::Unavailable`].
    pub why: PairError,
    /// When that was first found.
    pub at: Instant,
    fingerprint: Option<Fingerprint>,
}

/// The last rejection of each workspace, until something is taken again.
#[derive(Debug, Default)]
pub(crate) struct Rejections(Mutex<HashMap<WorkspaceId, Rejected>>);

impl Rejections {
    /// Notes a rejection, and says whether it is news. Beyond `capacity` workspaces nothing is noted.
    pub(crate) fn note(
        &self,
        workspace: &WorkspaceId,
        fingerprint: Option<Fingerprint>,
        why: &PairError,
        capacity: usize,
    ) -> bool {
        let mut all = self.0.lock();
        let known = all.get(workspace);
        if known.is_some_and(|known| {
            known.fingerprint == fingerprint && discriminant(&known.why) == discriminant(why)
        }) {
            return false;
        }
        if known.is_some() || all.len() < capacity {
            let revision = fingerprint.as_ref().map(|f| f.revision);
            let rejected = Rejected { revision, why: why.clone(), at: Instant::now(), fingerprint };
            all.insert(workspace.clone(), rejected);
        }
        true
    }

    /// Why a publication cannot be used, when that was found before: the same one is not compiled for each request.
    pub(crate) fn of(&self, workspace: &WorkspaceId, fingerprint: &Fingerprint) -> Option<PairError> {
        let all = self.0.lock();
        let known = all.get(workspace)?;
        let for_good = match &known.why {
            // Of other bytes than those that the fingerprint names.
            PairError::Invalid(why) => {
                !matches!(why, InvalidPublication::HashMismatch { .. } | InvalidPublication::TooLarge { .. })
            }
            why => matches!(why, PairError::CompileFailed { .. }),
        };
        (for_good && known.fingerprint.as_ref() == Some(fingerprint)).then(|| known.why.clone())
    }

    pub(crate) fn clear(&self, workspace: &WorkspaceId) {
        self.0.lock().remove(workspace);
    }

    pub(crate) fn all(&self) -> HashMap<WorkspaceId, Rejected> {
        self.0.lock().clone()
    }
}
