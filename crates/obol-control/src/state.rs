use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use obol_model::{KeyContext, KeyHash, Revision, WorkspaceId};

use crate::compile::Compiled;
use crate::heal::Desired;
use crate::memory::Memory;
use crate::scan::Change;
use crate::{Fault, SyncReport};

/// What control knows, and what it still has to do.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) started: bool,
    pub(crate) memory: Memory,
    /// Which file speaks for a workspace.
    pub(crate) owners: BTreeMap<WorkspaceId, PathBuf>,
    /// Files that name a workspace for which another one speaks.
    pub(crate) waiting: BTreeMap<PathBuf, Compiled>,
    pub(crate) desired: BTreeMap<WorkspaceId, Desired>,
    pub(crate) leaving: BTreeSet<WorkspaceId>,
    pub(crate) keys: HashMap<KeyHash, KeyContext>,
    /// Whether every key was written once.
    pub(crate) keys_written: bool,
    /// What was newer than ours when it was last complained about.
    pub(crate) foreign: BTreeMap<WorkspaceId, Revision>,
}

impl State {
    /// Takes up one change of the files.
    pub(crate) fn apply(&mut self, change: Change, report: &mut SyncReport) {
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
        let floor = self.used(&workspace);
        self.desired.insert(workspace, Desired::new(compiled, floor));
    }

    /// The highest revision that was ever used, as far as is known here.
    fn used(&self, workspace: &WorkspaceId) -> Option<Revision> {
        let remembered = self.memory.workspaces.get(workspace).and_then(|r| r.revision);
        self.desired.get(workspace).and_then(Desired::revision).max(remembered)
    }

    /// Files that waited for a workspace may have it now: a renamed file is no reason to unpublish. What nobody
    /// speaks for leaves.
    pub(crate) fn release(&mut self) {
        for (path, compiled) in std::mem::take(&mut self.waiting) {
            if self.owners.contains_key(&compiled.workspace.workspace_id) {
                self.waiting.insert(path, compiled);
            } else {
                self.adopt(path, compiled);
            }
        }
        for workspace in &self.leaving {
            let used = self.used(workspace);
            self.memory.workspaces.entry(workspace.clone()).or_default().revision = used;
        }
        self.desired.retain(|workspace, _| !self.leaving.contains(workspace));
    }
}
