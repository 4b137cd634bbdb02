use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use obol_meter::LostLedger;
use obol_model::snapshot::Documents;
use obol_model::{KeyHash, Revision, WorkspaceId};

use tokio::time::Instant;

use crate::compile::Compiled;
use crate::keys::KeyRecord;
use crate::scan::{Change, Look};
use crate::store::Head;
use crate::{Fault, SyncReport};

/// What control knows, and what it still has to do.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) started: bool,
    pub(crate) files: Spoken,
    pub(crate) known: Known,
    /// Keys as Redis was last told, by this process.
    pub(crate) told: HashMap<KeyHash, KeyRecord>,
    /// Whether every key was told once since Redis could not be asked.
    pub(crate) keys_told: bool,
    /// When ledgers that could not be opened are looked at again.
    pub(crate) ledgers_again_at: Option<Instant>,
    /// What was newer than ours when it was last complained about.
    pub(crate) foreign: BTreeMap<WorkspaceId, Revision>,
}

/// What the store said last.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) identity: Option<String>,
    pub(crate) generation: Option<u64>,
    /// Whether the store could be read in this pass.
    pub(crate) fresh: bool,
    pub(crate) heads: BTreeMap<WorkspaceId, Followed>,
    pub(crate) keys: HashMap<KeyHash, KeyRecord>,
    /// Whether each key of the store is among them.
    pub(crate) keys_complete: bool,
}

/// A workspace that was published at some time.
#[derive(Debug)]
pub(crate) struct Followed {
    pub(crate) head: Head,
    /// Those of a published one, when they can be read.
    pub(crate) documents: Option<Documents>,
    /// Whether Redis was made to say the same.
    pub(crate) told: bool,
    /// Whether it changed since this process follows it, so that Redis cannot have it yet.
    pub(crate) news: bool,
    /// Its ledger, as it was found last.
    pub(crate) ledger: LedgerState,
    /// Whether its secrets were found to be sealed by the first key of the ring.
    pub(crate) sealed: bool,
}

/// What is known of a ledger.
#[derive(Debug)]
pub(crate) enum LedgerState {
    Unknown,
    Open,
    /// It has to be opened.
    Lost(LostLedger),
}

impl Followed {
    /// Whether its documents cannot be read. What is published of it stays; a new revision puts it right.
    pub(crate) fn is_lost(&self) -> bool {
        self.head.published && self.documents.is_none()
    }

    /// Whether it is what another control published of its files, after those of this one had their say. Putting this
    /// one's above it would have the two of them do that for ever.
    pub(crate) fn is_of_others_since(&self, settled: Option<&Head>) -> bool {
        let newer = settled.is_some_and(|settled| settled.revision < self.head.revision);
        newer && self.documents.is_some() && !self.head.held
    }
}

/// Which files speak for which workspaces.
#[derive(Debug, Default)]
pub(crate) struct Spoken {
    /// Which file speaks for a workspace.
    pub(crate) owners: BTreeMap<WorkspaceId, PathBuf>,
    /// Files that name a workspace for which another one speaks.
    waiting: BTreeMap<PathBuf, Compiled>,
    /// What the files say.
    pub(crate) contents: BTreeMap<WorkspaceId, Content>,
    /// Workspaces whose file is gone.
    pub(crate) leaving: BTreeSet<WorkspaceId>,
}

/// What a file says.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) compiled: Compiled,
    /// The head with which it was found to agree, or to have nothing to say.
    pub(crate) settled: Option<Head>,
    /// Whether the file may say something else by now.
    pub(crate) restless: bool,
}

impl Spoken {
    /// Takes up a look at the files.
    pub(crate) fn take_up(&mut self, look: Look, report: &mut SyncReport) {
        for change in look.changes {
            self.apply(change, report);
        }
        self.release();
        for (workspace, content) in &mut self.contents {
            content.restless = self.owners.get(workspace).is_some_and(|path| look.restless.contains(path));
        }
    }

    /// Takes up one change of the files.
    fn apply(&mut self, change: Change, report: &mut SyncReport) {
        match change {
            Change::Gone(path) => {
                self.waiting.remove(&path);
                self.give_up(&path, None);
            }
            Change::Refused(path, faults) => {
                self.waiting.remove(&path);
                report.refused.extend(faults);
            }
            Change::Compiled(path, mut compiled) => {
                report.warnings.append(&mut compiled.warnings);
                let workspace = compiled.workspace.workspace_id.clone();
                self.give_up(&path, Some(&workspace));
                match self.owners.get(&workspace) {
                    Some(owner) if *owner != path => {
                        let file = path.display().to_string();
                        let message = format!(
                            "the workspace `{workspace}` is defined by `{}` already",
                            owner.display()
                        );
                        let help = Some("one file per workspace: remove one of the two");
                        report.refused.push(Fault::of_file(&file, message, help));
                        self.waiting.insert(path, *compiled);
                    }
                    _ => self.adopt(path, *compiled),
                }
            }
        }
    }

    /// A file no longer speaks for the workspace that it spoke for, unless that is still `but`.
    fn give_up(&mut self, path: &PathBuf, but: Option<&WorkspaceId>) {
        let spoke_for: Vec<WorkspaceId> = self
            .owners
            .iter()
            .filter(|(w, p)| *p == path && Some(*w) != but)
            .map(|(w, _)| w.clone())
            .collect();
        for workspace in spoke_for {
            self.owners.remove(&workspace);
            self.leaving.insert(workspace);
        }
    }

    fn adopt(&mut self, path: PathBuf, compiled: Compiled) {
        let workspace = compiled.workspace.workspace_id.clone();
        self.waiting.remove(&path);
        self.leaving.remove(&workspace);
        self.owners.insert(workspace.clone(), path);
        self.contents.insert(workspace, Content { compiled, settled: None, restless: false });
    }

    /// Files that waited for a workspace may have it now: a renamed file is no reason to unpublish. What nobody
    /// speaks for leaves.
    fn release(&mut self) {
        for (path, compiled) in std::mem::take(&mut self.waiting) {
            if self.owners.contains_key(&compiled.workspace.workspace_id) {
                self.waiting.insert(path, compiled);
            } else {
                self.adopt(path, compiled);
            }
        }
        self.contents.retain(|workspace, _| !self.leaving.contains(workspace));
    }
}
