use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::disk::{list, read};
use crate::StoreError;
use crate::keys::{KeyRecord, LoadedKeys};

pub(super) fn read_key(path: &Path) -> Result<Option<KeyRecord>, StoreError> {
    let record: Option<KeyRecord> = read(path)?;
    match record {
        Some(record) if record.schema_version > KeyRecord::SCHEMA => Err(StoreError::Newer {
            what: format!("`{}`", path.display()),
            found: record.schema_version,
            known: KeyRecord::SCHEMA,
        }),
        record => Ok(record),
    }
}

/// The records as last seen. Files of this store are only ever replaced whole, so time and inode tell a change, and
/// thousands of keys need not be read each time that one changed.
#[derive(Debug, Default)]
pub(super) struct KeyCache(HashMap<PathBuf, (Stat, KeyRecord)>);

type Stat = (u64, u64, i64, i64);

impl KeyCache {
    /// All readable records and what is wrong with the others. A file that became unreadable counts as what it was:
    /// damage must not revoke a key.
    pub(super) fn load(&mut self, folder: &Path) -> Result<LoadedKeys, StoreError> {
        let named = |name: &str| {
            let record = Path::new(name).extension().is_some_and(|end| end == "json");
            (record && !name.starts_with('.')).then(|| folder.join(name))
        };
        let mut paths = list(folder, named)?;
        paths.sort();
        let mut previous = std::mem::take(&mut self.0);
        let mut loaded = LoadedKeys::complete(Vec::with_capacity(paths.len()));
        for path in paths {
            let known = previous.remove(&path);
            let stat = fs::metadata(&path).map(|m| (m.ino(), m.size(), m.mtime(), m.mtime_nsec())).ok();
            let entry = match (known, stat) {
                (Some(known), Some(stat)) if known.0 == stat => Some(known),
                (known, stat) => match read_key(&path) {
                    Ok(Some(record)) => Some((stat.unwrap_or_default(), record)),
                    Ok(None) => continue,
                    Err(e) => {
                        loaded.faults.push(e.to_string());
                        known
                    }
                },
            };
            loaded.complete &= entry.is_some();
            if let Some(entry) = entry {
                loaded.records.push(entry.1.clone());
                self.0.insert(path, entry);
            }
        }
        Ok(loaded)
    }
}
