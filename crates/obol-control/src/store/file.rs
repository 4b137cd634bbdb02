mod disk;
mod keys;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use nix::fcntl::Flock;
use obol_model::snapshot::Documents;
use obol_model::{KeyHash, KeyId, Revision, WorkspaceId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::disk::{LARGEST, is_written, list, read, unusable, write};
use self::keys::{KeyCache, read_key};
use super::{
    Action, AuditEntry, ControlStore, Head, NewRevision, Origin, RevisionInfo, Stamp, StoreError, published,
    superfluous, unpublished,
};
use crate::files::{is_temporary, lock, read_bounded};
use crate::keys::{KeyChange, KeyRecord, LoadedKeys};

/// The form of the directory that this release writes, and the highest that it reads.
const SCHEMA: u32 = 1;
/// From this size on the audit goes on in a new file; one old one is kept.
const AUDIT: u64 = 16 << 20;

/// A store in a directory, readable for its owner only, when there is no database:
///
/// * `store.json`: the form of the directory, and its name
/// * `generation`: how many changes there were
/// * `keys/ID.json`: one file per key
/// * `workspaces/ID/head.json`, and beside it one file per revision
/// * `audit.jsonl`: one line per change, written before it and taken back when it fails
///
/// Several processes may use it: whoever changes something holds `lock`; whoever reads needs nothing, since files are only
/// ever replaced whole. `head.json` comes last, so that a change that was cut off has not happened.
#[derive(Debug)]
pub struct FileStore {
    place: Arc<Place>,
}

#[derive(Debug)]
struct Place {
    dir: PathBuf,
    keys: Mutex<KeyCache>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Identity {
    schema_version: u32,
    identity: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    schema_version: u32,
    #[serde(flatten)]
    info: RevisionInfo,
    workspace: String,
    policy: String,
    fingerprint: String,
}

impl FileStore {
    /// The store in this directory, which [`ControlStore::prepare`] makes when it is not there.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { place: Arc::new(Place { dir: dir.into(), keys: Mutex::default() }) }
    }

    /// Whether there is one: a mistyped path is not to be made into an empty store by somebody who only looks.
    pub fn exists(&self) -> bool {
        self.place.dir.join("store.json").exists() || self.place.dir.join("keys").exists()
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Place) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let place = Arc::clone(&self.place);
        let done = tokio::task::spawn_blocking(move || work(&place)).await;
        done.unwrap_or_else(|e| {
            Err(StoreError::Unavailable(format!("work on the state directory failed: {e}")))
        })
    }

    /// As [`FileStore::blocking`], for changes: one at a time in all processes.
    async fn changing<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Place) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.blocking(|place| {
            let lock = place.lock()?;
            place.prepare()?;
            let done = work(place);
            drop(lock);
            done
        })
        .await
    }
}

impl Place {
    fn prepare(&self) -> Result<Identity, StoreError> {
        let path = self.dir.join("store.json");
        if let Some(identity) = read::<Identity>(&path)? {
            if identity.schema_version > SCHEMA {
                let (what, found) = (format!("`{}`", self.dir.display()), identity.schema_version);
                return Err(StoreError::Newer { what, found, known: SCHEMA });
            }
            return Ok(identity);
        }
        let mut random = [0; 16];
        aws_lc_rs::rand::fill(&mut random)
            .map_err(|_| StoreError::Unavailable("no random bytes could be had".to_owned()))?;
        let identity = random.iter().map(|b| format!("{b:02x}")).collect();
        let identity = Identity { schema_version: SCHEMA, identity };
        write(&path, &identity)?;
        Ok(identity)
    }

    /// Waits for the processes that are at it, within bounds.
    fn lock(&self) -> Result<Flock<File>, StoreError> {
        let path = self.dir.join("lock");
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.map_err(|e| unusable(&path, &e))?;
        lock(&path)
    }

    fn generation(&self) -> Result<u64, StoreError> {
        Ok(read(&self.dir.join("generation"))?.unwrap_or(0))
    }

    fn changed(&self) -> Result<(), StoreError> {
        // One that cannot be read starts over from a number that nobody has seen, in all likelihood.
        let next = self.generation().unwrap_or(1 << 32) + 1;
        write(&self.dir.join("generation"), &next)
    }

    fn workspace(&self, workspace: &WorkspaceId) -> PathBuf {
        self.dir.join("workspaces").join(workspace.as_str())
    }

    fn head(&self, workspace: &WorkspaceId) -> Result<Option<Head>, StoreError> {
        read(&self.head_path(workspace))
    }

    fn head_path(&self, workspace: &WorkspaceId) -> PathBuf {
        self.workspace(workspace).join("head.json")
    }

    fn known(&self, workspace: &WorkspaceId) -> Result<Head, StoreError> {
        self.head(workspace)?.ok_or_else(|| StoreError::NoSuchWorkspace(workspace.clone()))
    }

    fn heads(&self) -> Result<Vec<Head>, StoreError> {
        let mut names = list(&self.dir.join("workspaces"), |name| name.parse::<WorkspaceId>().ok())?;
        names.sort();
        let heads: Result<Vec<Option<Head>>, StoreError> = names.iter().map(|name| self.head(name)).collect();
        Ok(heads?.into_iter().flatten().collect())
    }

    /// Newest first.
    fn revisions(&self, workspace: &WorkspaceId) -> Result<Vec<Revision>, StoreError> {
        let mut revisions = list(&self.workspace(workspace), revision_of)?;
        revisions.sort();
        revisions.reverse();
        Ok(revisions)
    }

    fn revision(&self, workspace: &WorkspaceId, revision: Revision) -> Result<Option<Kept>, StoreError> {
        read(&self.workspace(workspace).join(file_of(revision)))
    }

    fn publish(&self, new: NewRevision, by: &Stamp) -> Result<(), StoreError> {
        let head = published(self.head(&new.workspace)?.as_ref(), &new)?;
        let entry = AuditEntry::of_revision(&new, by);
        let text = |bytes: Vec<u8>| {
            String::from_utf8(bytes).map_err(|_| StoreError::Damaged("a document is no text".to_owned()))
        };
        let info = new.info(by);
        let Documents { workspace, policy, fingerprint } = new.documents;
        let kept = Kept {
            schema_version: SCHEMA,
            info,
            workspace: text(workspace)?,
            policy: text(policy)?,
            fingerprint: text(fingerprint)?,
        };
        write(&self.workspace(&new.workspace).join(file_of(new.revision)), &kept)?;
        self.change(&entry, &self.head_path(&new.workspace), &head)?;
        for old in superfluous(&self.revisions(&new.workspace)?, &head) {
            let path = self.workspace(&new.workspace).join(file_of(old));
            fs::remove_file(&path).map_err(|e| unusable(&path, &e))?;
        }
        self.changed()
    }

    fn unpublish(
        &self,
        workspace: &WorkspaceId,
        this: Option<Revision>,
        origin: Origin,
        by: &Stamp,
    ) -> Result<(), StoreError> {
        let Some(next) = unpublished(&self.known(workspace)?, this, origin)? else { return Ok(()) };
        let entry = AuditEntry::new(Action::Unpublish, workspace, by).with_revision(next.revision);
        self.change(&entry, &self.head_path(workspace), &next)?;
        self.changed()
    }

    fn key_path(&self, id: &str) -> PathBuf {
        self.dir.join("keys").join(format!("{id}.json"))
    }

    fn change_key(&self, id: &KeyId, change: KeyChange, by: &Stamp) -> Result<KeyRecord, StoreError> {
        let path = self.key_path(id.as_str());
        let mut record = read_key(&path)?.ok_or_else(|| StoreError::NoSuchKey(id.clone()))?;
        if let Some(action) = record.change(change, by.at)? {
            self.change(&AuditEntry::of_key(action, &record, by), &path, &record)?;
            self.changed()?;
        }
        Ok(record)
    }

    /// Makes a change by writing one file.
    ///
    /// INVARIANT: no change is without an entry. Two files cannot change in one step, so the entry is written first, is
    /// durable before the change begins, and is taken back when the change fails, which needs no space; only a process
    /// that is killed in between leaves an entry of a change that did not happen.
    fn change<T: Serialize>(&self, entry: &AuditEntry, path: &Path, value: &T) -> Result<(), StoreError> {
        let length = self.log(entry)?;
        write(path, value).inspect_err(|_| {
            // What failed last may have been to make sure that it lasts.
            if !is_written(path, value) {
                self.take_back(length);
            }
        })
    }

    fn take_back(&self, length: u64) {
        let cut =
            OpenOptions::new().write(true).open(self.audit_path()).and_then(|file| file.set_len(length));
        if let Err(e) = cut {
            tracing::warn!(error = %e, "the audit has an entry of a change that failed");
        }
    }

    fn audit_path(&self) -> PathBuf {
        self.dir.join("audit.jsonl")
    }

    /// Writes an entry; answers how long the audit was before.
    fn log(&self, entry: &AuditEntry) -> Result<u64, StoreError> {
        let path = self.audit_path();
        let failed = |e: io::Error| unusable(&path, &e);
        let mut line = serde_json::to_vec(entry).map_err(|e| StoreError::Damaged(e.to_string()))?;
        line.push(b'\n');
        if fs::metadata(&path).is_ok_and(|m| m.len() > AUDIT) {
            fs::rename(&path, path.with_extension("1.jsonl")).map_err(failed)?;
        }
        let mut options = OpenOptions::new();
        let mut file =
            options.read(true).append(true).create(true).mode(0o600).open(&path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        // A line that was cut off must not take this one with it.
        let mut last = [b'\n'];
        if file.seek(SeekFrom::End(-1)).is_ok() {
            file.read_exact(&mut last).map_err(failed)?;
        }
        if last != [b'\n'] {
            line.insert(0, b'\n');
        }
        if let Err(e) = file.write_all(&line).and_then(|()| file.sync_all()) {
            self.take_back(length);
            return Err(failed(e));
        }
        Ok(length)
    }

    /// Removes what processes left that were killed in the middle of a change. Whoever calls holds the lock, so that
    /// nobody is in the middle of one.
    fn sweep(&self) -> Result<(), StoreError> {
        let workspaces = self.dir.join("workspaces");
        let mut folders = vec![self.dir.clone(), self.dir.join("keys"), workspaces.clone()];
        folders.extend(
            list(&workspaces, |name| name.parse::<WorkspaceId>().ok())?.iter().map(|id| self.workspace(id)),
        );
        for folder in folders {
            for name in list(&folder, |name| is_temporary(name).then(|| name.to_owned()))? {
                let path = folder.join(name);
                fs::remove_file(&path).map_err(|e| unusable(&path, &e))?;
            }
        }
        Ok(())
    }

    fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        let path = self.audit_path();
        let bytes = match read_bounded(&path, LARGEST) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(|e| unusable(&path, &e))?,
        };
        // A line that was cut off by a crash is the only one that can be odd.
        let lines = bytes.split(|b| *b == b'\n').rev();
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).take(limit).collect())
    }
}

#[async_trait]
impl ControlStore for FileStore {
    async fn prepare(&self) -> Result<(), StoreError> {
        self.changing(Place::sweep).await
    }

    async fn identity(&self) -> Result<String, StoreError> {
        self.blocking(|place| match read::<Identity>(&place.dir.join("store.json"))? {
            Some(identity) => Ok(identity.identity),
            None => Err(StoreError::Unavailable(format!("`{}` is no state directory", place.dir.display()))),
        })
        .await
    }

    async fn generation(&self) -> Result<u64, StoreError> {
        self.blocking(Place::generation).await
    }

    async fn heads(&self) -> Result<Vec<Head>, StoreError> {
        self.blocking(Place::heads).await
    }

    async fn head(&self, workspace: &WorkspaceId) -> Result<Option<Head>, StoreError> {
        let workspace = workspace.clone();
        self.blocking(move |place| place.head(&workspace)).await
    }

    async fn history(&self, workspace: &WorkspaceId) -> Result<Vec<RevisionInfo>, StoreError> {
        let workspace = workspace.clone();
        self.blocking(move |place| {
            let Some(head) = place.head(&workspace)? else { return Ok(Vec::new()) };
            let mut infos = Vec::new();
            // What lies above the head was cut off before it counted.
            for revision in place.revisions(&workspace)?.into_iter().filter(|r| *r <= head.revision) {
                // Superfluous ones may go in the middle of this.
                infos.extend(place.revision(&workspace, revision)?.map(|kept| kept.info));
            }
            Ok(infos)
        })
        .await
    }

    async fn documents(
        &self,
        workspace: &WorkspaceId,
        revision: Revision,
    ) -> Result<Option<Documents>, StoreError> {
        let workspace = workspace.clone();
        self.blocking(move |place| {
            if place.head(&workspace)?.is_none_or(|head| head.revision < revision) {
                return Ok(None);
            }
            Ok(place.revision(&workspace, revision)?.map(|kept| Documents {
                workspace: kept.workspace.into_bytes(),
                policy: kept.policy.into_bytes(),
                fingerprint: kept.fingerprint.into_bytes(),
            }))
        })
        .await
    }

    async fn keys(&self) -> Result<LoadedKeys, StoreError> {
        self.blocking(|place| place.keys.lock().load(&place.dir.join("keys"))).await
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<KeyRecord>, StoreError> {
        let hash = *hash;
        self.blocking(move |place| {
            let record = read_key(&place.key_path(&KeyRecord::id_of(&hash)))?;
            Ok(record.filter(|record| record.hash == hash))
        })
        .await
    }

    async fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        self.blocking(move |place| place.audit(limit)).await
    }

    async fn publish(&self, new: NewRevision, by: &Stamp) -> Result<(), StoreError> {
        let by = by.clone();
        self.changing(move |place| place.publish(new, &by)).await
    }

    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        this: Option<Revision>,
        origin: Origin,
        by: &Stamp,
    ) -> Result<(), StoreError> {
        let (workspace, by) = (workspace.clone(), by.clone());
        self.changing(move |place| place.unpublish(&workspace, this, origin, &by)).await
    }

    async fn set_file(&self, workspace: &WorkspaceId, file: PathBuf) -> Result<(), StoreError> {
        let workspace = workspace.clone();
        self.changing(move |place| {
            let head = place.known(&workspace)?;
            write(&place.head_path(&workspace), &Head { file: Some(file), ..head })?;
            place.changed()
        })
        .await
    }

    async fn insert_key(&self, record: KeyRecord, by: &Stamp) -> Result<(), StoreError> {
        let by = by.clone();
        self.changing(move |place| {
            let path = place.key_path(record.key.key_id.as_str());
            place.change(&AuditEntry::of_key(Action::NewKey, &record, &by), &path, &record)?;
            place.changed()
        })
        .await
    }

    async fn change_key(&self, id: &KeyId, change: KeyChange, by: &Stamp) -> Result<KeyRecord, StoreError> {
        let (id, by) = (id.clone(), by.clone());
        self.changing(move |place| place.change_key(&id, change, &by)).await
    }
}

fn file_of(revision: Revision) -> String {
    format!("{revision}.json")
}

fn revision_of(name: &str) -> Option<Revision> {
    let (epoch, number) = name.strip_suffix(".json")?.split_once('.')?;
    Some(Revision { epoch: epoch.parse().ok()?, number: number.parse().ok()? })
}
