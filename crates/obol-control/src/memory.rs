use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use obol_model::{Revision, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::files::read_bounded;
use crate::keys::write_atomically;

/// Room for some ten thousand workspaces.
const LARGEST: u64 = 16 << 20;

/// What control remembers over a restart (`publications.json`): which file spoke for a workspace, so that one that was
/// deleted in between is unpublished, and how far its revisions went, so that they never start over.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    schema_version: u32,
    pub(crate) workspaces: BTreeMap<WorkspaceId, Remembered>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Remembered {
    /// `None` once the workspace was unpublished.
    #[serde(default)]
    pub(crate) file: Option<PathBuf>,
    #[serde(default)]
    pub(crate) revision: Option<Revision>,
}

impl Memory {
    const SCHEMA: u32 = 1;

    fn path(state_dir: &Path) -> PathBuf {
        state_dir.join("publications.json")
    }

    /// What was saved; nothing at the first start.
    pub(crate) fn load(state_dir: &Path) -> Result<Self, String> {
        let path = Self::path(state_dir);
        let bytes = match read_bounded(&path, LARGEST) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other.map_err(|e| format!("cannot read `{}`: {e}", path.display()))?,
        };
        let memory: Self =
            serde_json::from_slice(&bytes).map_err(|e| format!("`{}` is damaged: {e}", path.display()))?;
        if memory.schema_version > Self::SCHEMA {
            return Err(format!("`{}` was written by a newer release", path.display()));
        }
        Ok(memory)
    }

    pub(crate) fn save(&self, state_dir: &Path) -> Result<(), String> {
        let path = Self::path(state_dir);
        let memory = Self { schema_version: Self::SCHEMA, ..self.clone() };
        let bytes = serde_json::to_vec_pretty(&memory).map_err(|e| e.to_string())?;
        write_atomically(&path, &bytes, false).map_err(|e| format!("cannot write `{}`: {e}", path.display()))
    }
}
