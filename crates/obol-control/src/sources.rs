use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aws_lc_rs::digest::{SHA256, digest};

use crate::files::read_with_metadata;

/// The largest file that is read: workspace, policy, prices or secret.
const LARGEST: u64 = 1 << 20;

/// Every file that a compilation looked at, with what it saw; `None` for one that could not be read.
#[derive(Debug, Default, Clone)]
pub(crate) struct Sources(BTreeMap<PathBuf, Option<Seen>>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    /// The content decides whether something changed, since times and inodes say nothing about swapped symbolic links,
    /// renames and coarse clocks.
    digest: Vec<u8>,
    /// Only whether somebody is still writing: compared with itself, never with a clock, which may be another
    /// machine's.
    modified: Option<SystemTime>,
}

/// How the files compare with what a compilation saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Found {
    /// Nobody touched them.
    Same,
    /// The same content, written again: whoever does that may not be done.
    Touched,
    /// Another content, or no compilation took place yet.
    Changed,
}

impl Sources {
    /// Reads a whole file and remembers it, or that it could not be read.
    pub(crate) fn read(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        let read = read(path);
        let (bytes, seen) = match read {
            Ok((bytes, seen)) => (Ok(bytes), Some(seen)),
            Err(e) => (Err(e), None),
        };
        self.0.insert(path.to_owned(), seen);
        bytes
    }

    /// Looks at all files again, and notes when they were written.
    pub(crate) fn look(&mut self) -> Found {
        if self.0.is_empty() {
            return Found::Changed;
        }
        let mut found = Found::Same;
        for (path, seen) in &mut self.0 {
            let now = read(path).ok().map(|(_, seen)| seen);
            if now == *seen {
                continue;
            }
            if now.as_ref().map(|n| &n.digest) != seen.as_ref().map(|s| &s.digest) {
                return Found::Changed;
            }
            *seen = now;
            found = Found::Touched;
        }
        found
    }
}

fn read(path: &Path) -> io::Result<(Vec<u8>, Seen)> {
    let (bytes, metadata) = read_with_metadata(path, LARGEST)?;
    let seen = Seen { digest: digest(&SHA256, &bytes).as_ref().to_vec(), modified: metadata.modified().ok() };
    Ok((bytes, seen))
}

/// Why a file cannot be read, without the operating system's error number.
pub(crate) fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        io::ErrorKind::IsADirectory => "it is a directory".to_owned(),
        _ => error.to_string(),
    }
}
