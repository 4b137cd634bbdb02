use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::StoreError;

/// How long a writer waits for other processes to be done with theirs.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at whether they are.
const LOOK: Duration = Duration::from_millis(5);

/// Reads a whole file that somebody else put there: only a regular one, and only up to `largest` bytes. Neither a pipe
/// that nobody writes to nor a device without end can hold up whoever reads.
///
/// # Errors
/// When it is no regular file, larger, or cannot be read.
pub fn read_bounded(path: &Path, largest: u64) -> io::Result<Vec<u8>> {
    read_with_metadata(path, largest).map(|(bytes, _)| bytes)
}

/// As [`read_bounded`], with what the file was when it was opened.
pub(crate) fn read_with_metadata(path: &Path, largest: u64) -> io::Result<(Vec<u8>, Metadata)> {
    // Before the open, which alone can have effects on a device or on whoever waits at the other end of a pipe.
    only_regular(&fs::metadata(path)?)?;
    let file = open_at_once(path)?;
    // And after it: the name may have come to mean something else in between.
    let metadata = file.metadata()?;
    only_regular(&metadata)?;
    let mut bytes = Vec::new();
    file.take(largest.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > largest {
        let bound =
            if largest >= 1 << 20 { format!("{} MiB", largest >> 20) } else { format!("{largest} bytes") };
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {bound}")));
    }
    Ok((bytes, metadata))
}

/// Opening a pipe would otherwise wait for its other end.
fn open_at_once(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)
}

fn only_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        Ok(())
    } else if metadata.is_dir() {
        Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"))
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"))
    }
}

/// Writes a file so that every reader sees the old or the new content whole, for its owner only.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static UNIQUE: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let unique = UNIQUE.fetch_add(1, Ordering::Relaxed);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}.{unique}", std::process::id()));
    let written = (|| {
        // A process of the same id may have left one when it was killed.
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // Litter; it matters less than the outcome.
        drop(fs::remove_file(&temporary));
    }
    written?;
    File::open(folder)?.sync_all()
}

/// Whether this is how [`write_atomically`] names a file that is not whole yet.
pub(crate) fn is_temporary(name: &str) -> bool {
    let number = |part: Option<&str>| part.is_some_and(|part| part.parse::<u64>().is_ok());
    let mut parts = name.rsplitn(3, '.');
    number(parts.next())
        && number(parts.next())
        && parts.next().is_some_and(|name| name.len() > 1 && name.starts_with('.'))
}

/// Holds a lock file against other processes. Waits for those that are at it, within bounds. Blocking.
///
/// # Errors
/// When it cannot be opened, or somebody has held it for [`PATIENCE`].
pub(crate) fn lock(path: &Path) -> Result<Flock<File>, StoreError> {
    let failed = |e: io::Error| StoreError::Unavailable(format!("cannot use `{}`: {e}", path.display()));
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(false).mode(0o600).open(path).map_err(failed)?;
    let end = Instant::now() + PATIENCE;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, e)) if e != Errno::EWOULDBLOCK => return Err(failed(e.into())),
            Err(_) if Instant::now() > end => {
                let path = path.display();
                let why = format!("another process has held `{path}` for {PATIENCE:?}");
                return Err(StoreError::Unavailable(why));
            }
            Err((again, _)) => file = again,
        }
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn only_regular_files_are_read_and_only_so_much() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let says = |path: &Path| read_bounded(path, 4).unwrap_err().to_string();
        fs::write(at("four"), "four").unwrap();
        fs::write(at("five!"), "five!").unwrap();
        nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink(at("four"), at("link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("zero")).unwrap();

        assert_eq!(read_bounded(&at("four"), 4).unwrap(), b"four");
        assert_eq!(read_bounded(&at("link"), 4).unwrap(), b"four");
        assert_eq!(says(&at("five!")), "it is larger than 4 bytes");
        for odd in ["fifo", "socket", "zero"] {
            assert_eq!(says(&at(odd)), "it is no regular file", "{odd}");
        }
        assert_eq!(says(folder.path()), "it is a directory");
        assert_eq!(read_bounded(&at("none"), 4).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_pipe_that_takes_the_place_of_a_file_does_not_hold_up_the_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        let opened = open_at_once(&path).unwrap();
        assert!(only_regular(&opened.metadata().unwrap()).is_err());
    }
}
