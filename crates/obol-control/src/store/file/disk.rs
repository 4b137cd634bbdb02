use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::StoreError;
use crate::files::{read_bounded, write_atomically};

/// The largest file that is read, a revision for the most part.
pub(super) const LARGEST: u64 = 64 << 20;

pub(super) fn unusable(path: &Path, error: &io::Error) -> StoreError {
    StoreError::Unavailable(format!("cannot use `{}`: {error}", path.display()))
}

pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, StoreError> {
    let bytes = match read_bounded(path, LARGEST) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|e| unusable(path, &e))?,
    };
    let damaged = |e| StoreError::Damaged(format!("`{}` is damaged: {e}", path.display()));
    serde_json::from_slice(&bytes).map(Some).map_err(damaged)
}

pub(super) fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), StoreError> {
    let bytes = serde_json::to_vec_pretty(value).map_err(|e| StoreError::Damaged(e.to_string()))?;
    write_atomically(path, &bytes).map_err(|e| unusable(path, &e))
}

/// Whether a file says this.
pub(super) fn is_written<T: Serialize>(path: &Path, value: &T) -> bool {
    matches!((read_bounded(path, LARGEST), serde_json::to_vec_pretty(value)), (Ok(there), Ok(said)) if there == said)
}

/// What the names in a folder stand for; nothing when there is no folder.
pub(super) fn list<T>(folder: &Path, read: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, StoreError> {
    let failed = |e| unusable(folder, &e);
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        found.extend(entry.map_err(failed)?.file_name().to_str().and_then(&read));
    }
    Ok(found)
}
