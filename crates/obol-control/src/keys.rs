use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jiff::Timestamp;
use obol_model::{Clock, KeyContext, KeyHash, KeyId, Kind, VirtualKey, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::files::read_bounded;

/// The largest key record that is read. Ours have about 400 bytes, most of it tags.
const LARGEST: u64 = 1 << 20;

/// The virtual keys of a control plane without a database: one file per key in `keys/` of the state directory, which
/// holds the hash and never the key. Readable for its owner only.
///
/// Several processes may use one directory: `obol key new` writes a file, the running control publishes it.
#[derive(Debug)]
pub struct KeyFiles {
    folder: PathBuf,
    clock: Arc<dyn Clock>,
}

/// What is kept of a virtual key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// Version of this document; see [`KeyRecord::SCHEMA`].
    pub schema_version: u32,
    /// SHA-256 of the key.
    pub hash: KeyHash,
    /// What is published.
    pub key: KeyContext,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was revoked. The record stays, so that a control that was away at the time still removes the key.
    #[serde(default)]
    pub revoked_at: Option<Timestamp>,
}

impl KeyRecord {
    /// The version of the document that this release writes, and the highest that it reads.
    pub const SCHEMA: u32 = 1;
}

/// Why keys cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The directory or a file in it cannot be used.
    #[error("cannot use `{path}`")]
    Io {
        /// Which.
        path: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A file is no key record.
    #[error("`{path}` is no key record: {reason}")]
    Malformed {
        /// Which.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// There is no such key.
    #[error("there is no key `{0}`")]
    NoSuchKey(KeyId),
    /// The operating system gave no random bytes.
    #[error("no random bytes could be had")]
    NoRandomness,
}

impl KeyError {
    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NoSuchKey(_) => Kind::NotFound,
            Self::Io { .. } => Kind::Unavailable,
            Self::Malformed { .. } | Self::NoRandomness => Kind::Internal,
        }
    }

    fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.display().to_string(), source }
    }
}

impl KeyFiles {
    /// Keys below this state directory, which is made when the first key is.
    pub fn new(state_dir: &Path, clock: Arc<dyn Clock>) -> Self {
        Self { folder: state_dir.join("keys"), clock }
    }

    /// Makes a key. This is the only moment in which its text exists here: show it and forget it.
    ///
    /// # Errors
    /// When there is no randomness or the file cannot be written.
    pub fn create(
        &self,
        workspace: WorkspaceId,
        name: String,
        tags: Vec<String>,
        expires: Option<Timestamp>,
    ) -> Result<(VirtualKey, KeyContext), KeyError> {
        let key = VirtualKey::generate().map_err(|_| KeyError::NoRandomness)?;
        let hash = key.hash();
        // 12 of 64 digits of a hash of 32 random bytes say nothing of the key.
        let id = format!("k-{}", hash.hex().get(..12).unwrap_or_default());
        let key_id: KeyId = id.parse().map_err(|_| KeyError::NoRandomness)?;
        let context = KeyContext {
            schema_version: KeyContext::SCHEMA,
            key_id: key_id.clone(),
            workspace_id: workspace,
            name,
            tags,
            disabled: false,
            expires_at: expires,
            revision: 1,
        };
        let record = KeyRecord {
            schema_version: KeyRecord::SCHEMA,
            hash,
            key: context.clone(),
            created_at: self.clock.now(),
            revoked_at: None,
        };
        self.write(&key_id, &record, true)?;
        Ok((key, context))
    }

    /// All keys, revoked ones included, in the order of their ids.
    ///
    /// # Errors
    /// When the directory cannot be read or a file in it is no key record; a directory that does not exist is empty.
    pub fn list(&self) -> Result<Vec<KeyRecord>, KeyError> {
        self.paths()?.iter().map(|path| read_record(path)).collect()
    }

    /// Marks a key as revoked; control then removes it everywhere, and its sessions. Revoking again changes nothing.
    ///
    /// # Errors
    /// [`KeyError::NoSuchKey`], or when the file cannot be read or written.
    pub fn revoke(&self, id: &KeyId) -> Result<(), KeyError> {
        let path = self.path(id);
        let mut record = match read_record(&path) {
            Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(KeyError::NoSuchKey(id.clone()));
            }
            other => other?,
        };
        if record.revoked_at.is_none() {
            record.revoked_at = Some(self.clock.now());
            record.key.revision += 1;
            self.write(id, &record, false)?;
        }
        Ok(())
    }

    fn path(&self, id: &KeyId) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }

    fn write(&self, id: &KeyId, record: &KeyRecord, new: bool) -> Result<(), KeyError> {
        let path = self.path(id);
        let bytes = serde_json::to_vec_pretty(record)
            .map_err(|e| KeyError::Malformed { path: path.display().to_string(), reason: e.to_string() })?;
        write_atomically(&path, &bytes, new).map_err(|e| KeyError::io(&path, e))
    }

    fn paths(&self) -> Result<Vec<PathBuf>, KeyError> {
        let io = |e| KeyError::io(&self.folder, e);
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(io)?,
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(io)?.path();
            let hidden = path.file_name().is_none_or(|n| n.as_encoded_bytes().starts_with(b"."));
            if !hidden && path.extension().is_some_and(|e| e == "json") {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths)
    }
}

fn read_record(path: &Path) -> Result<KeyRecord, KeyError> {
    let bytes = read_bounded(path, LARGEST).map_err(|e| KeyError::io(path, e))?;
    let malformed = |reason: String| KeyError::Malformed { path: path.display().to_string(), reason };
    let record: KeyRecord = serde_json::from_slice(&bytes).map_err(|e| malformed(e.to_string()))?;
    if record.schema_version > KeyRecord::SCHEMA {
        return Err(malformed(format!(
            "schema version {} is newer than this release",
            record.schema_version
        )));
    }
    Ok(record)
}

/// Writes a file so that every reader sees the old or the new content whole, for its owner only. `new` fails if the
/// file exists.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8], new: bool) -> io::Result<()> {
    static UNIQUE: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let unique = UNIQUE.fetch_add(1, Ordering::Relaxed);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}.{unique}", std::process::id()));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        if new { fs::hard_link(&temporary, path) } else { fs::rename(&temporary, path) }
    })();
    if new || written.is_err() {
        // After a link the name is superfluous, after a failure it is litter; neither matters more than the outcome.
        drop(fs::remove_file(&temporary));
    }
    written?;
    File::open(folder)?.sync_all()
}

/// What a look at the keys found.
#[derive(Debug, Default)]
pub(crate) struct LoadedKeys {
    pub(crate) records: Vec<KeyRecord>,
    /// What is wrong with single files.
    pub(crate) faults: Vec<String>,
    /// Whether every file gave a record. If not, an absent key may be one that could not be read, and nobody may be
    /// told that it does not exist.
    pub(crate) complete: bool,
}

/// The records as last seen. Files of this store are only ever replaced whole, so time and inode tell a change, and
/// thousands of keys need not be read four times a second.
#[derive(Debug, Default)]
pub(crate) struct KeyCache(HashMap<PathBuf, (Stamp, KeyRecord)>);

type Stamp = (u64, u64, i64, i64);

impl KeyCache {
    /// All readable records and what is wrong with the others. A file that became unreadable counts as what it was:
    /// damage must not revoke a key.
    pub(crate) fn load(&mut self, files: &KeyFiles) -> Result<LoadedKeys, KeyError> {
        let mut previous = std::mem::take(&mut self.0);
        let mut loaded = LoadedKeys { complete: true, ..LoadedKeys::default() };
        let paths = files.paths().inspect_err(|_| self.0 = std::mem::take(&mut previous))?;
        for path in paths {
            let known = previous.remove(&path);
            let stamp = fs::metadata(&path).map(|m| (m.ino(), m.size(), m.mtime(), m.mtime_nsec())).ok();
            let entry = match (known, stamp) {
                (Some(known), Some(stamp)) if known.0 == stamp => Some(known),
                (known, stamp) => match read_record(&path) {
                    Ok(record) => Some((stamp.unwrap_or_default(), record)),
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use obol_model::ManualClock;

    use super::*;

    fn files(folder: &Path) -> KeyFiles {
        KeyFiles::new(folder, Arc::new(ManualClock::new(Timestamp::UNIX_EPOCH)))
    }

    #[test]
    fn a_key_is_kept_as_its_hash_in_a_private_file() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        assert_eq!(files.list().unwrap(), []);
        let (key, context) =
            files.create("acme".parse().unwrap(), "ci".into(), vec!["ops".into()], None).unwrap();
        let path = folder.path().join("keys").join(format!("{}.json", context.key_id));
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(key.expose()) && !text.contains(&key.expose()[5..]));
        assert!(text.contains(&key.hash().hex()));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        let list = files.list().unwrap();
        assert_eq!((list.len(), list[0].hash, &list[0].key), (1, key.hash(), &context));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no litter");
    }

    #[test]
    fn a_revoked_key_stays_as_a_record() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        let (_, context) = files.create("acme".parse().unwrap(), String::new(), vec![], None).unwrap();
        files.revoke(&context.key_id).unwrap();
        files.revoke(&context.key_id).unwrap();
        let record = files.list().unwrap().remove(0);
        assert_eq!((record.revoked_at, record.key.revision), (Some(Timestamp::UNIX_EPOCH), 2));
        let missing = files.revoke(&"k-0".parse().unwrap()).unwrap_err();
        assert_eq!((missing.kind(), missing.to_string().as_str()), (Kind::NotFound, "there is no key `k-0`"));
    }

    #[test]
    fn a_damaged_file_does_not_revoke_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path());
        let mut cache = KeyCache::default();
        let (_, context) = files.create("acme".parse().unwrap(), String::new(), vec![], None).unwrap();
        assert_eq!(cache.load(&files).unwrap().records.len(), 1);
        fs::write(folder.path().join(format!("keys/{}.json", context.key_id)), "{").unwrap();
        let loaded = cache.load(&files).unwrap();
        assert_eq!((loaded.records.len(), loaded.faults.len(), loaded.complete), (1, 1, true));
        let fresh = KeyCache::default().load(&files).unwrap();
        assert_eq!((fresh.records.len(), fresh.complete), (0, false));
        assert!(matches!(files.list(), Err(KeyError::Malformed { .. })));
    }
}
