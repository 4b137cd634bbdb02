use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use obol_model::KeyRing;

use crate::Fault;
use crate::compile::{CompileOptions, Compiled, compile_recorded};
use crate::sources::{Sources, reason};

/// How environment variables are looked up: libraries do not read the environment themselves.
pub type Env = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Looks at the workspace files. Blocking.
pub(crate) struct Scanner {
    source: PathBuf,
    key_ring: Arc<KeyRing>,
    env: Env,
    files: BTreeMap<PathBuf, Watched>,
}

#[derive(Default)]
struct Watched {
    sources: Sources,
    /// Compiled, and not told to anybody until a second look finds the same content.
    fresh: Option<Result<Compiled, Vec<Fault>>>,
    absent: bool,
}

/// What a look at the files found.
#[derive(Debug)]
pub(crate) enum Change {
    Compiled(PathBuf, Box<Compiled>),
    Refused(PathBuf, Vec<Fault>),
    Gone(PathBuf),
}

impl fmt::Debug for Scanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scanner").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Scanner {
    pub(crate) fn new(source: PathBuf, key_ring: Arc<KeyRing>, env: Env) -> Self {
        Self { source, key_ring, env, files: BTreeMap::new() }
    }

    /// Expects a file that an earlier process published, so that its absence is noticed.
    pub(crate) fn expect(&mut self, path: PathBuf) {
        self.files.entry(path).or_default();
    }

    /// Compiles what changed. With `settle`, a change or an absence counts only when a second look finds the same: a
    /// file that is just being written may be valid in the middle, with its last policies missing, and an editor may
    /// take a file away for an instant.
    ///
    /// # Errors
    /// When the folder cannot be listed or suddenly holds no file: a volume that went away must not unpublish
    /// everything.
    pub(crate) fn scan(&mut self, settle: bool) -> Result<Vec<Change>, String> {
        let listed = list(&self.source)?;
        if listed.is_empty() && !self.files.is_empty() {
            let source = self.source.display();
            return Err(format!("`{source}` holds no workspace file any more; what is published stays"));
        }
        let mut changes = Vec::new();
        self.files.retain(|path, watched| {
            let absent = !listed.contains(path);
            let gone = absent && (watched.absent || !settle);
            watched.absent = absent;
            if gone {
                changes.push(Change::Gone(path.clone()));
            }
            !gone
        });
        for path in listed {
            let watched = self.files.entry(path.clone()).or_default();
            if !watched.sources.unchanged() {
                let mut sources = Sources::default();
                let options = CompileOptions { key_ring: Some(&self.key_ring), env: &*self.env };
                watched.fresh = Some(compile_recorded(&path, &options, &mut sources));
                watched.sources = sources;
                if settle {
                    continue;
                }
            }
            match watched.fresh.take() {
                Some(Ok(compiled)) => changes.push(Change::Compiled(path, Box::new(compiled))),
                Some(Err(faults)) => changes.push(Change::Refused(path, faults)),
                None => {}
            }
        }
        Ok(changes)
    }
}

fn list(source: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |e: std::io::Error| format!("`{}` cannot be read: {}", source.display(), reason(&e));
    if !fs::metadata(source).map_err(failed)?.is_dir() {
        return Ok(vec![source.to_owned()]);
    }
    let mut paths = Vec::new();
    for entry in fs::read_dir(source).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_none_or(|n| n.as_encoded_bytes().starts_with(b"."));
        let yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
        if yaml && !hidden && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}
