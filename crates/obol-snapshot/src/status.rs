use obol_model::{Revision, WorkspaceId};
use tokio::time::Instant;

use crate::{Compile, Publications, Rejected};

/// What a replica knows of the publication of a workspace.
#[derive(Debug, Clone)]
pub struct Status {
    /// Whose.
    pub workspace: WorkspaceId,
    /// What requests get, for 30 seconds after it was last confirmed; `None` when nothing was ever fit to be served.
    pub active: Option<Active>,
    /// What the store holds instead and was not taken, last time that it could be asked.
    pub rejected: Option<Rejected>,
}

/// A publication in memory.
#[derive(Debug, Clone, Copy)]
pub struct Active {
    /// Which.
    pub revision: Revision,
    /// Since when it is served.
    pub installed_at: Instant,
    /// When it was last compared with the store.
    pub validated_at: Instant,
}

impl<C: Compile> Publications<C> {
    /// What is known of every workspace that is served, or whose publication was rejected, by workspace.
    pub fn statuses(&self) -> Vec<Status> {
        let mut rejected = self.rejections.all();
        let mut statuses: Vec<Status> = self
            .served
            .read()
            .iter()
            .map(|(workspace, entry)| Status {
                workspace: workspace.clone(),
                active: Some(Active {
                    revision: entry.publication.revision(),
                    installed_at: entry.installed_at,
                    validated_at: entry.validated_at,
                }),
                rejected: rejected.remove(workspace),
            })
            .collect();
        let never_served =
            |(workspace, rejected)| Status { workspace, active: None, rejected: Some(rejected) };
        statuses.extend(rejected.into_iter().map(never_served));
        statuses.sort_by(|a, b| a.workspace.cmp(&b.workspace));
        statuses
    }
}
