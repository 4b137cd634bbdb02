use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{SHA256, digest};

/// The largest file that is read: workspace, policy or secret.
const LARGEST: u64 = 1 << 20;

type Digest = Vec<u8>;

/// Every file that a compilation looked at, with the digest of what it saw: the content decides whether something
/// changed, since times and inodes say nothing about swapped symbolic links, renames and coarse clocks.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Sources(BTreeMap<PathBuf, Option<Digest>>);

impl Sources {
    /// Reads a whole file and remembers it, or that it could not be read.
    pub(crate) fn read(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        let bytes = read(path);
        self.0.insert(path.to_owned(), bytes.as_ref().ok().map(|b| digest(&SHA256, b).as_ref().to_vec()));
        bytes
    }

    /// Whether all files still are what they were; `false` for a compilation that never took place.
    pub(crate) fn unchanged(&self) -> bool {
        let now = |path: &Path| read(path).ok().map(|b| digest(&SHA256, &b).as_ref().to_vec());
        !self.0.is_empty() && self.0.iter().all(|(path, seen)| now(path) == *seen)
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 1 MiB"));
    }
    Ok(bytes)
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
