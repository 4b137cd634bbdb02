use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use obol_model::{EventId, UsageEvent, WorkspaceId};
use serde::{Deserialize, Serialize};

use super::sums::{Sums, day};
use super::{EntryId, RejectedEntry, TakenEvent, UsageBatch, UsageQuery, UsageStore, UsageTotal};
use crate::StoreError;
use crate::files::{lock, read_bounded, write_atomically};

/// The longest line that is read as an event.
const LONGEST_LINE: u64 = 4 << 20;

/// Usage events in a directory, readable for its owner only, when there is no database:
///
/// * `usage/WS/YYYY-MM.jsonl`: events of the calls that began in that month of UTC, one per line, as they were written
/// * `usage/WS/rejects.jsonl`: entries of the stream that were no events
/// * `usage/WS/up-to.json`: no entry behind this one was ever written
///
/// Several processes may use it: whoever writes holds `usage/.lock`.
#[derive(Debug)]
pub struct FileUsage {
    dir: Arc<PathBuf>,
}

/// The highest entry that may have been written.
#[derive(Debug, Serialize, Deserialize)]
struct UpTo {
    entry: EntryId,
}

/// As much of an event as tells which one it is.
#[derive(Deserialize)]
struct Named {
    event_id: EventId,
}

#[derive(Serialize)]
struct RejectLine<'a> {
    entry: EntryId,
    reason: &'a str,
    content: std::borrow::Cow<'a, str>,
}

impl FileUsage {
    /// Below control's state directory.
    pub fn new(state: impl AsRef<Path>) -> Self {
        Self { dir: Arc::new(state.as_ref().join("usage")) }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let dir = Arc::clone(&self.dir);
        let done = tokio::task::spawn_blocking(move || work(&dir)).await;
        done.unwrap_or_else(|e| Err(StoreError::Unavailable(format!("work on the usage files failed: {e}"))))
    }
}

#[async_trait]
impl UsageStore for FileUsage {
    async fn record(&self, workspace: &WorkspaceId, batch: &UsageBatch) -> Result<(), StoreError> {
        let (workspace, batch) = (workspace.clone(), batch.clone());
        self.blocking(move |dir| {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| unusable(dir, &e))?;
            let lock = lock(&dir.join(".lock"))?;
            let recorded = record(&dir.join(workspace.as_str()), &batch);
            drop(lock);
            recorded
        })
        .await
    }

    async fn totals(&self, query: &UsageQuery) -> Result<Vec<UsageTotal>, StoreError> {
        let query = query.clone();
        self.blocking(move |dir| totals(dir, &query)).await
    }
}

fn unusable(path: &Path, error: &io::Error) -> StoreError {
    StoreError::Unavailable(format!("cannot use `{}`: {error}", path.display()))
}

/// The file of the month in which a call began.
fn file_of(event: &UsageEvent) -> String {
    day(event.started_at).strftime("%Y-%m.jsonl").to_string()
}

fn record(dir: &Path, batch: &UsageBatch) -> Result<(), StoreError> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| unusable(dir, &e))?;
    let entries = batch.events.iter().map(|event| event.entry);
    let Some(last) = entries.chain(batch.rejected.iter().map(|rejected| rejected.entry)).max() else {
        return Ok(());
    };
    let path = dir.join("up-to.json");
    let up_to = match read_bounded(&path, LONGEST_LINE) {
        Ok(bytes) => serde_json::from_slice::<UpTo>(&bytes).ok(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(unusable(&path, &e)),
    };
    let up_to = up_to.map(|up_to| up_to.entry);
    // INVARIANT: before the events themselves. What is above it was never written, so that only entries that come for the
    // second time have to be looked for in files that may be large.
    if up_to.is_none_or(|up_to| last > up_to) {
        let bytes =
            serde_json::to_vec(&UpTo { entry: last }).map_err(|e| StoreError::Damaged(e.to_string()))?;
        write_atomically(&path, &bytes).map_err(|e| unusable(&path, &e))?;
    }
    // A mark that cannot be read says nothing, and then everything has to be looked for.
    let doubtful = |entry: EntryId| up_to.is_none_or(|up_to| entry <= up_to);
    let mut months: BTreeMap<String, Vec<&TakenEvent>> = BTreeMap::new();
    for event in &batch.events {
        months.entry(file_of(&event.event)).or_default().push(event);
    }
    for (file, events) in months {
        let path = dir.join(file);
        let looked_for =
            events.iter().filter(|event| doubtful(event.entry)).map(|event| event.event.event_id);
        let mut there = find(&path, &looked_for.collect())?;
        let mut lines = Vec::new();
        for TakenEvent { event, json, .. } in events {
            if there.insert(event.event_id) {
                lines.extend_from_slice(json.as_bytes());
                lines.push(b'\n');
            }
        }
        append(&path, lines).map_err(|e| unusable(&path, &e))?;
    }
    let path = dir.join("rejects.jsonl");
    let mut lines = Vec::new();
    for RejectedEntry { entry, reason, content } in &batch.rejected {
        // One that comes for the second time stands there twice: it is for people.
        let line = RejectLine { entry: *entry, reason, content: String::from_utf8_lossy(content) };
        lines.extend(serde_json::to_vec(&line).map_err(|e| StoreError::Damaged(e.to_string()))?);
        lines.push(b'\n');
    }
    append(&path, lines).map_err(|e| unusable(&path, &e))
}

/// Those of these events that are in a file.
fn find(path: &Path, events: &HashSet<EventId>) -> Result<HashSet<EventId>, StoreError> {
    let mut there = HashSet::new();
    if !events.is_empty() {
        lines(path, |line| {
            let named = serde_json::from_slice::<Named>(line).ok();
            there.extend(named.map(|named| named.event_id).filter(|id| events.contains(id)));
            Ok(())
        })?;
    }
    Ok(there)
}

/// The lines of a file; none when it is not there.
fn lines(path: &Path, mut each: impl FnMut(&[u8]) -> Result<(), StoreError>) -> Result<(), StoreError> {
    let failed = |e: io::Error| unusable(path, &e);
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(failed)?,
    };
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(failed)? == 0 {
            return Ok(());
        }
        each(&line)?;
    }
}

/// Adds whole lines, durably.
fn append(path: &Path, mut bytes: Vec<u8>) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let new = !path.exists();
    let mut options = OpenOptions::new();
    let mut file = options.read(true).append(true).create(true).mode(0o600).open(path)?;
    // A line that was cut off must not take these with it.
    let mut last = [b'\n'];
    if file.seek(SeekFrom::End(-1)).is_ok() {
        file.read_exact(&mut last)?;
    }
    if last != [b'\n'] {
        bytes.insert(0, b'\n');
    }
    file.write_all(&bytes)?;
    file.sync_all()?;
    if new && let Some(folder) = path.parent() {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

fn totals(dir: &Path, query: &UsageQuery) -> Result<Vec<UsageTotal>, StoreError> {
    let mut sums = Sums::new(query);
    let workspaces: BTreeSet<String> = match &query.workspace {
        Some(workspace) => std::iter::once(workspace.to_string()).collect(),
        None => names(dir)?.filter(|name| name.parse::<WorkspaceId>().is_ok()).collect(),
    };
    let month = |at| day(at).strftime("%Y-%m").to_string();
    let (from, to) = (query.from.map(month), query.to.map(month));
    for workspace in workspaces {
        let dir = dir.join(workspace);
        let files: BTreeSet<String> = names(&dir)?.collect();
        for file in files {
            let Some(month) = file.strip_suffix(".jsonl").filter(|month| *month != "rejects") else {
                continue;
            };
            if from.as_deref().is_some_and(|from| month < from) || to.as_deref().is_some_and(|to| month > to)
            {
                continue;
            }
            // Redis may have forgotten, in a failover, that an event was written; here it counts once.
            let mut counted = HashSet::new();
            lines(&dir.join(&file), |line| match serde_json::from_slice::<UsageEvent>(line) {
                Ok(event) if counted.insert(event.event_id) => sums.add(&event),
                // Of the others one was cut off, at most, by a crash; its event was written again.
                _ => Ok(()),
            })?;
        }
    }
    Ok(sums.done())
}

/// What is in a folder; nothing when there is none.
fn names(folder: &Path) -> Result<impl Iterator<Item = String>, StoreError> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other
            .and_then(Iterator::collect::<io::Result<Vec<fs::DirEntry>>>)
            .map_err(|e| unusable(folder, &e))?,
    };
    Ok(entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()))
}
