use obol_model::{Revision, WorkspaceId};

use crate::Fault;

/// What one pass did.
#[derive(Debug, Default)]
pub struct SyncReport {
    /// New revisions.
    pub published: Vec<(WorkspaceId, Revision)>,
    /// Publications that the store had lost or damaged.
    pub healed: Vec<(WorkspaceId, Revision)>,
    /// Workspaces whose file is gone.
    pub unpublished: Vec<WorkspaceId>,
    /// Why files were refused; their workspaces stay as they were. Reported once per content.
    pub refused: Vec<Fault>,
    /// What is valid but probably not meant. Reported once per content.
    pub warnings: Vec<Fault>,
    /// Keys that were written or removed.
    pub keys_changed: usize,
    /// Workspaces whose ledger waits for usage to be collected; until then nobody with a budget is admitted.
    pub unseeded: Vec<WorkspaceId>,
    /// What could not be done, in words. It is tried again.
    pub failed: Vec<String>,
    /// Whether the store is to blame; then there is no use in asking it four times a second.
    pub(crate) store_failed: bool,
}

impl SyncReport {
    /// Logs what the pass did. What is in `known`, the failures of the pass before, is not repeated.
    pub fn log(&self, known: &[String]) {
        for (workspace, revision) in &self.published {
            tracing::info!(workspace = %workspace, revision = %revision, "workspace published");
        }
        for (workspace, revision) in &self.healed {
            tracing::warn!(workspace = %workspace, revision = %revision, "publication was lost or damaged, restored");
        }
        for workspace in &self.unpublished {
            tracing::info!(workspace = %workspace, "workspace unpublished");
        }
        for fault in &self.refused {
            tracing::error!(
                place = fault.place(),
                reason = fault.message,
                help = fault.help,
                "workspace file refused, the old state stays"
            );
        }
        for fault in &self.warnings {
            tracing::warn!(
                place = fault.place(),
                reason = fault.message,
                help = fault.help,
                "workspace file is doubtful"
            );
        }
        if self.keys_changed > 0 {
            tracing::info!(keys = self.keys_changed, "keys published");
        }
        for failure in self.failed.iter().filter(|failure| !known.contains(failure)) {
            tracing::warn!(reason = failure, "control could not finish, it tries again");
        }
    }

    /// Notes that the store could not do something.
    pub(crate) fn store(&mut self, failure: String) {
        self.failed.push(failure);
        self.store_failed = true;
    }
}
