use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use obol_model::{Clock, ReplicaId, metric};
use serde::Serialize;
use tokio::time::{sleep, timeout};

use crate::kept::{Kept, Unread};
use crate::ledger::{CloseError, Closing, Ledger};
use crate::redis_ledger::{CLOSED, ORPHANED};

/// Whoever replays holds this file.
const LOCK: &str = ".lock";
/// Lines that could not be replayed, with the reason.
const SET_ASIDE: &str = "set-aside.jsonl";
const PREFIX: &str = "usage-";
const SUFFIX: &str = ".jsonl";
/// Stands in the name of a file whose lines may have been sent, before the ms since the epoch of the first time.
const SENT: &str = ".sent-";
/// Ends in names of files that are not whole yet.
const PART: &str = ".part";
/// The pauses between two passes.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// A directory for what could not be closed before the drain deadline, one file for each process, JSON lines.
///
/// The next process with the directory closes it, whichever replica it is; one at a time, under a lock.
#[derive(Debug, Clone)]
pub struct Spool {
    dir: Arc<Path>,
    replica: ReplicaId,
    clock: Arc<dyn Clock>,
}

/// Why a spool cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the spool directory `{}`", dir.display())]
pub struct SpoolError {
    dir: PathBuf,
    source: io::Error,
}

/// For clocks that disagree.
const CLOCKS: Duration = Duration::from_mins(1);

impl Spool {
    /// Looks whether files can be written there. The directory has to exist: one that is made where a volume should be
    /// would be gone with the container. Blocking.
    ///
    /// # Errors
    /// When they cannot.
    pub fn open(
        dir: impl Into<PathBuf>,
        replica: ReplicaId,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, SpoolError> {
        let dir = dir.into();
        let probe = dir.join(format!("{PREFIX}{replica}.probe"));
        let written = write(&probe, b"probe\n").and_then(|()| fs::remove_file(&probe));
        match written {
            Ok(()) => Ok(Self { dir: dir.into(), replica, clock }),
            Err(source) => Err(SpoolError { dir, source }),
        }
    }

    /// Writes closings, durably, and says where; `true` beside one says that it was sent, so that it may have taken effect.
    pub(crate) async fn keep(&self, closings: Vec<(Closing, bool)>) -> io::Result<PathBuf> {
        let path = self.dir.join(format!("{PREFIX}{}{SUFFIX}", self.replica));
        let at = self.clock.now();
        blocking(move || {
            let mut bytes = Vec::new();
            for (closing, sent) in closings {
                serde_json::to_writer(&mut bytes, &Kept::new(closing, at, sent))?;
                bytes.push(b'\n');
            }
            replace(&path, &bytes)?;
            Ok(path)
        })
        .await
    }

    /// Closes what other processes have left, and tries it again until all of it is closed. What is abandoned goes on with
    /// the next process.
    pub(crate) async fn replay(&self, ledger: &dyn Ledger, batch: usize, patience: Duration) {
        let mut pause = PAUSES.0;
        let mut complained = false;
        loop {
            match self.pass(ledger, batch.max(1), patience).await {
                Ok(()) => return,
                Err(why) if !complained => {
                    complained = true;
                    tracing::warn!(reason = %why, "usage in the spool waits, it is tried again");
                }
                Err(why) => tracing::debug!(reason = %why, "usage in the spool still waits"),
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// One look at all files; says why something is left.
    async fn pass(&self, ledger: &dyn Ledger, batch: usize, patience: Duration) -> Result<(), Delay> {
        let (dir, now) = (Arc::clone(&self.dir), self.clock.now());
        let Some((lock, files)) = blocking(move || take_up(&dir, now)).await? else {
            return Err(Delay("another process is at it".to_owned()));
        };
        let mut delay = None;
        for mut file in files {
            if let Err(why) = self.close(&mut file, ledger, batch, patience).await {
                delay.get_or_insert(why);
            }
            let dir = Arc::clone(&self.dir);
            blocking(move || file.put_back(&dir)).await?;
        }
        drop(lock);
        delay.map_or(Ok(()), Err)
    }

    /// Closes the lines of a file and takes out of it what is done.
    async fn close(
        &self,
        file: &mut Spooled,
        ledger: &dyn Ledger,
        batch: usize,
        patience: Duration,
    ) -> Result<(), Delay> {
        let mut lines = std::mem::take(&mut file.lines);
        let (mut closed, mut delay) = (0_usize, None);
        while !lines.is_empty() {
            let these = lines.len().min(batch);
            let some = lines.get(..these).unwrap_or_default();
            let sent = timeout(patience, self.send(file, some, ledger)).await;
            let (fates, refused) = match sent.unwrap_or_else(|_| Err(Delay("no answer in time".to_owned()))) {
                Ok(sent) => sent,
                Err(why) => {
                    delay = Some(why);
                    break;
                }
            };
            for ((line, kept), fate) in lines.drain(..these).zip(fates) {
                match fate {
                    Fate::Closed => closed += 1,
                    Fate::Refused => file.lines.push((line, kept)),
                    Fate::Doubtful => file.rejected.push((line, DOUBTFUL.to_owned())),
                }
            }
            delay = delay.or(refused);
        }
        file.lines.append(&mut lines);
        if closed > 0 {
            let (path, left) = (file.path.display(), file.lines.len());
            tracing::info!(file = %path, closed, left, "usage in the spool was closed");
        }
        delay.map_or(Ok(()), Err)
    }

    /// Sends some lines to the ledger; what became of each, and why some were refused.
    async fn send(
        &self,
        file: &Spooled,
        lines: &[(String, Kept)],
        ledger: &dyn Ledger,
    ) -> Result<(Vec<Fate>, Option<Delay>), Delay> {
        let closings: Vec<Closing> = lines.iter().map(|(_, kept)| kept.closing()).collect();
        let known = ledger.known(&closings).await.map_err(|e| Delay(e.to_string()))?;
        let now = self.clock.now();
        let fate = |((_, kept), known): (&(String, Kept), bool)| {
            if !known && file.is_doubtful(kept, now) { Fate::Doubtful } else { Fate::Closed }
        };
        let mut fates: Vec<Fate> = lines.iter().zip(known).map(fate).collect();
        let sent = closings.into_iter().zip(&fates).filter(|(_, fate)| matches!(fate, Fate::Closed));
        let sent: Vec<Closing> = sent.map(|(closing, _)| closing).collect();
        match ledger.close(&sent).await {
            Ok(()) => Ok((fates, None)),
            Err(CloseError::Refused { refused, reason }) => {
                let sent = fates.iter_mut().filter(|fate| matches!(fate, Fate::Closed));
                for (_, fate) in
                    sent.enumerate().filter(|(position, _)| refused.binary_search(position).is_ok())
                {
                    *fate = Fate::Refused;
                }
                Ok((fates, Some(Delay(reason))))
            }
            Err(e) => Err(Delay(e.to_string())),
        }
    }
}

const DOUBTFUL: &str = "the ledger does not know its call any more, and may have booked it";

/// What becomes of a line.
enum Fate {
    Closed,
    Refused,
    Doubtful,
}

/// Why something is left in the spool.
#[derive(Debug)]
struct Delay(String);

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<io::Error> for Delay {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// A file of the spool.
#[derive(Debug)]
struct Spooled {
    path: PathBuf,
    /// When its lines were sent for the first time; now, when that is about to happen.
    first_sent: Timestamp,
    /// Whether they were before.
    was_sent: bool,
    lines: Vec<(String, Kept)>,
    /// Of a later release, which knows what to do with them.
    newer: Vec<String>,
    /// With the reason.
    rejected: Vec<(String, String)>,
}

#[derive(Serialize)]
struct SetAside<'a> {
    file: &'a str,
    reason: &'a str,
    line: &'a str,
}

impl Spooled {
    fn read(path: PathBuf, first_sent: Timestamp, was_sent: bool) -> io::Result<Self> {
        let bytes = fs::read(&path)?;
        let (mut lines, mut newer, mut rejected) = (Vec::new(), Vec::new(), Vec::new());
        for line in bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let text = String::from_utf8_lossy(line).into_owned();
            match Kept::read(line) {
                Ok(kept) => lines.push((text, kept)),
                Err(Unread::Newer) => newer.push(text),
                Err(Unread::Damaged(reason)) => rejected.push((text, reason)),
            }
        }
        Ok(Self { path, first_sent, was_sent, lines, newer, rejected })
    }

    /// Whether a call that the ledger does not know may have been booked all the same: that it was is known for a while only.
    /// Before that is over, a ledger that does not know it was lost.
    fn is_doubtful(&self, kept: &Kept, now: Timestamp) -> bool {
        let sent = match (kept.sent, self.was_sent) {
            (true, _) => Some(kept.at),
            (false, true) => Some(self.first_sent),
            (false, false) => None,
        };
        let over = |since: Timestamp, known: Duration| {
            let known = SignedDuration::try_from(known.saturating_sub(CLOCKS)).unwrap_or_default();
            now.duration_since(since) > known
        };
        kept.books() && (sent.is_some_and(|at| over(at, CLOSED)) || over(kept.at, ORPHANED))
    }

    /// Leaves in the directory what is not done. Blocking.
    fn put_back(self, dir: &Path) -> io::Result<()> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        if !self.rejected.is_empty() {
            let mut bytes = Vec::new();
            for (line, reason) in &self.rejected {
                serde_json::to_writer(&mut bytes, &SetAside { file: &name, reason, line })?;
                bytes.push(b'\n');
                metrics::counter!(metric::USAGE_SET_ASIDE).increment(1);
                tracing::error!(file = %name, reason, "a line of the spool was set aside, its usage is not counted");
            }
            let path = dir.join(SET_ASIDE);
            let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
        }
        if !self.newer.is_empty() {
            tracing::warn!(file = %name, count = self.newer.len(), "lines of the spool are of a later release, left alone");
        }
        let left = self.lines.iter().map(|(line, _)| line).chain(&self.newer);
        let bytes: Vec<u8> = left.flat_map(|line| [line.as_bytes(), b"\n"].concat()).collect();
        if bytes.is_empty() {
            fs::remove_file(&self.path)?;
            return File::open(dir)?.sync_all();
        }
        replace(&self.path, &bytes)
    }
}

/// Takes the lock and reads all files, each with a name that says that it may be sent from now on. `None` when another
/// process has the lock. Blocking.
fn take_up(dir: &Path, now: Timestamp) -> io::Result<Option<(File, Vec<Spooled>)>> {
    let lock =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(dir.join(LOCK))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(e)) => return Err(e),
    }
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.extend(entry?.file_name().into_string().ok());
    }
    names.sort();
    let mut files = Vec::new();
    for name in names {
        let Some(stem) = name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(SUFFIX)) else {
            continue;
        };
        let sent = stem.split_once(SENT).and_then(|(_, at)| at.parse().ok());
        let sent = sent.and_then(|ms| Timestamp::from_millisecond(ms).ok());
        let mut path = dir.join(&name);
        if sent.is_none() {
            path = dir.join(format!("{PREFIX}{stem}{SENT}{}{SUFFIX}", now.as_millisecond()));
            fs::rename(dir.join(&name), &path)?;
            File::open(dir)?.sync_all()?;
        }
        files.push(Spooled::read(path, sent.unwrap_or(now), sent.is_some())?);
    }
    Ok(Some((lock, files)))
}

/// Writes a file so that it is there whole or not at all, for its owner only, durably.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension(PART.trim_start_matches('.'));
    write(&part, bytes)?;
    fs::rename(&part, path)?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)))
}
