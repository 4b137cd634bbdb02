use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use obol_model::KeyRing;

use crate::Fault;
use crate::compile::{CompileOptions, Compiled, compile_recorded, is_price_catalogue};
use crate::sources::{Found, Sources, reason};

/// How many looks in a row must find nothing new before a change counts, the one that found it not included.
const CALM_LOOKS: u8 = 2;

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
    /// Compiled, and not told to anybody before it is calm.
    fresh: Option<Result<Compiled, Vec<Fault>>>,
    /// Looks in a row that found that nobody touched what was compiled.
    calm: u8,
    /// Looks in a row that did not find the file.
    absent: u8,
    /// Whether it could be compiled as it is now.
    valid: bool,
    /// Whether it spoke for a workspace at some time, in an earlier process too.
    spoke: bool,
}

/// What a look at the files found.
#[derive(Debug)]
pub(crate) enum Change {
    Compiled(PathBuf, Box<Compiled>),
    Refused(PathBuf, Vec<Fault>),
    Gone(PathBuf),
}

/// What a look at the files found, which is what they say at this moment: all of them were read.
#[derive(Debug, Default)]
pub(crate) struct Look {
    pub(crate) changes: Vec<Change>,
    /// Files that say something else by now than what was told of them last, or may in a moment.
    pub(crate) restless: BTreeSet<PathBuf>,
    /// Why files that are absent do not count as gone, in words.
    pub(crate) doubt: Option<String>,
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
        self.files.entry(path).or_default().spoke = true;
    }

    /// Compiles what changed. With `settle`, a change or an absence counts only when two more looks find that nobody
    /// touched any of the files: one that is just being written may be valid in the middle, with its last policies
    /// missing, and an editor may take a file away for an instant. A writer that pauses for longer cannot be told from
    /// one that is done; only a rename is safe whatever happens.
    ///
    /// As long as none of the files that are there is valid, none that is absent counts as gone: a volume that went away,
    /// with or without some litter in its place, must not unpublish everything.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub(crate) fn scan(&mut self, settle: bool) -> Result<Look, String> {
        let listed = list(&self.source)?;
        for path in &listed {
            self.compile(path);
        }
        let mut look = Look::default();
        self.miss(&listed, settle, &mut look);
        for path in listed {
            let Some(watched) = self.files.get_mut(&path) else { continue };
            if settle && watched.calm < CALM_LOOKS {
                look.restless.insert(path);
                continue;
            }
            match watched.fresh.take() {
                Some(Ok(compiled)) => {
                    watched.spoke = true;
                    look.changes.push(Change::Compiled(path, Box::new(compiled)));
                }
                Some(Err(faults)) => look.changes.push(Change::Refused(path, faults)),
                None => {}
            }
        }
        Ok(look)
    }

    /// Compiles a file if it says something else than when it was compiled last.
    fn compile(&mut self, path: &Path) {
        let watched = self.files.entry(path.to_owned()).or_default();
        match watched.sources.look() {
            Found::Same => watched.calm = watched.calm.saturating_add(1),
            Found::Touched => watched.calm = 0,
            Found::Changed => {
                let mut sources = Sources::default();
                let options = CompileOptions { key_ring: Some(&self.key_ring), env: &*self.env };
                let compiled = compile_recorded(path, &options, &mut sources);
                watched.valid = compiled.is_ok();
                watched.fresh = Some(compiled);
                watched.sources = sources;
                watched.calm = 0;
            }
        }
    }

    /// Finds out which files are gone.
    fn miss(&mut self, listed: &[PathBuf], settle: bool, look: &mut Look) {
        let is_there = |path: &PathBuf| listed.contains(path);
        let missed = self.files.iter().any(|(path, watched)| watched.spoke && !is_there(path));
        let none_valid = !self.files.iter().any(|(path, watched)| watched.valid && is_there(path));
        if missed && none_valid {
            let source = self.source.display();
            look.doubt =
                Some(format!("`{source}` holds no valid workspace file any more; what is published stays"));
        }
        let doubtful = look.doubt.is_some();
        self.files.retain(|path, watched| {
            if is_there(path) {
                watched.absent = 0;
                return true;
            }
            let gone = !doubtful && (watched.absent >= CALM_LOOKS || !settle);
            watched.absent = if doubtful { 0 } else { watched.absent.saturating_add(1) };
            if gone {
                look.changes.push(Change::Gone(path.clone()));
            } else {
                look.restless.insert(path.clone());
            }
            !gone
        });
    }
}

/// The workspace files of a folder, in the order of their names, price catalogues left out; a file is itself one.
///
/// # Errors
/// When the folder cannot be read, in words.
pub fn list(source: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |e: std::io::Error| format!("`{}` cannot be read: {}", source.display(), reason(&e));
    if !fs::metadata(source).map_err(failed)?.is_dir() {
        return Ok(vec![source.to_owned()]);
    }
    let mut paths = Vec::new();
    for entry in fs::read_dir(source).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_none_or(|n| n.as_encoded_bytes().starts_with(b"."));
        let yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
        if yaml && !hidden && !is_price_catalogue(&path) && is_there(&path) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Whether there is something that is to be read. What stands there and cannot be read is a fault, and no absence: that
/// would unpublish a workspace.
fn is_there(path: &Path) -> bool {
    match fs::metadata(path) {
        Ok(metadata) => !metadata.is_dir(),
        Err(e) => e.kind() != ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use nix::sys::stat::Mode;
    use tempfile::TempDir;

    use super::*;

    const PERMIT: &str = "permit(principal, action, resource);\n";
    const FORBID: &str = "forbid(principal, action, resource);\n";

    struct Bench {
        folder: TempDir,
        scanner: Scanner,
        restless: Vec<String>,
        doubt: Option<String>,
    }

    impl Bench {
        /// Two workspaces, looked at once.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let ring = Arc::new(KeyRing::ephemeral().unwrap());
            let scanner = Scanner::new(folder.path().to_owned(), ring, Arc::new(|_| None));
            let mut bench = Self { folder, scanner, restless: Vec::new(), doubt: None };
            for name in ["acme", "beta"] {
                bench.write(
                    &format!("{name}.yaml"),
                    &format!("workspace: {name}\npolicies: [{name}.cedar]\n"),
                );
                bench.write(&format!("{name}.cedar"), PERMIT);
            }
            assert_eq!(bench.scanner.scan(false).unwrap().changes.len(), 2);
            bench
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.path(name), text).unwrap();
        }

        fn replace_by_a_pipe(&self, name: &str) {
            fs::remove_file(self.path(name)).unwrap();
            nix::unistd::mkfifo(&self.path(name), Mode::S_IRWXU).unwrap();
        }

        /// What a settled look finds, in words.
        fn look(&mut self) -> Vec<String> {
            let Look { changes, restless, doubt } = self.scanner.scan(true).unwrap();
            self.doubt = doubt;
            let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
            let words = changes.into_iter().map(|change| match change {
                Change::Compiled(path, compiled) => {
                    let text: String = compiled.policy.files.iter().map(|f| f.text.as_str()).collect();
                    format!("{}: {text}", name(&path))
                }
                Change::Refused(path, faults) => format!("{} refused: {}", name(&path), faults[0].message),
                Change::Gone(path) => format!("{} gone", name(&path)),
            });
            self.restless = restless.iter().map(|path| name(path)).collect();
            words.collect()
        }

        fn looks(&mut self) -> [Vec<String>; 3] {
            [self.look(), self.look(), self.look()]
        }
    }

    fn nothing() -> Vec<String> {
        Vec::new()
    }

    #[test]
    fn a_file_that_is_being_written_counts_when_nobody_touches_it_any_more() {
        let mut bench = Bench::new();
        bench.write("acme.cedar", &format!("{PERMIT}{PERMIT}"));
        assert_eq!(
            [bench.look(), bench.look()],
            [nothing(), nothing()],
            "half of it, unchanged for one look"
        );
        let whole = format!("{PERMIT}{PERMIT}{FORBID}");
        bench.write("acme.cedar", &whole);
        assert_eq!([bench.look(), bench.look()], [nothing(), nothing()]);
        assert_eq!(bench.restless, ["acme.yaml"]);
        assert_eq!(bench.look(), [format!("acme.yaml: {whole}")]);
        assert_eq!(bench.restless, [""; 0]);
        assert_eq!(bench.looks(), [nothing(), nothing(), nothing()]);
    }

    #[test]
    fn the_same_content_written_again_is_a_sign_that_somebody_still_writes() {
        let mut bench = Bench::new();
        bench.write("acme.cedar", FORBID);
        let touch = |bench: &Bench, second: u64| {
            let file = File::options().write(true).open(bench.path("acme.cedar")).unwrap();
            // A clock of another machine may be far ahead.
            file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(second)).unwrap();
        };
        for second in 9_000_000_000..9_000_000_005 {
            touch(&bench, second);
            assert_eq!(bench.look(), nothing());
        }
        assert_eq!([bench.look(), bench.look()], [nothing(), vec![format!("acme.yaml: {FORBID}")]]);
        touch(&bench, 1);
        assert_eq!(bench.looks(), [nothing(), nothing(), nothing()], "nothing to tell");
    }

    #[test]
    fn an_absent_file_is_gone_at_the_third_look_and_not_when_it_returns() {
        let mut bench = Bench::new();
        let text = fs::read_to_string(bench.path("acme.yaml")).unwrap();
        fs::remove_file(bench.path("acme.yaml")).unwrap();
        assert_eq!([bench.look(), bench.look()], [nothing(), nothing()]);
        assert_eq!(bench.restless, ["acme.yaml"]);
        bench.write("acme.yaml", &text);
        assert_eq!(bench.look(), nothing());
        fs::remove_file(bench.path("acme.yaml")).unwrap();
        assert_eq!(bench.looks(), [nothing(), nothing(), vec!["acme.yaml gone".to_owned()]]);
    }

    #[test]
    fn files_that_vanish_all_at_once_are_not_gone_whatever_lies_in_their_place() {
        let mut bench = Bench::new();
        let texts =
            ["acme.yaml", "beta.yaml"].map(|name| (name, fs::read_to_string(bench.path(name)).unwrap()));
        let vanish =
            |bench: &Bench| texts.iter().for_each(|(name, _)| fs::remove_file(bench.path(name)).unwrap());
        bench.write("broken.yaml", "workspace: [");
        assert_eq!(bench.looks()[2].len(), 1, "it is refused");
        vanish(&bench);
        for _ in 0..2 {
            assert_eq!(bench.looks(), [nothing(), nothing(), nothing()]);
            assert!(bench.doubt.as_ref().unwrap().contains("holds no valid workspace file any more"));
        }
        // What comes back one by one is not gone either.
        bench.write("acme.yaml", &texts[0].1);
        assert_eq!([bench.look(), bench.look()], [nothing(), nothing()]);
        assert_eq!(bench.doubt, None);
        bench.write("beta.yaml", &texts[1].1);
        assert_eq!(bench.looks(), [nothing(), nothing(), nothing()], "they say what they said");
        // Something new and broken in their place is told.
        vanish(&bench);
        bench.write("other.yaml", "workspace: Nobody\n");
        assert!(bench.looks()[2][0].starts_with("other.yaml refused"), "{:?}", bench.doubt);
        assert!(bench.doubt.is_some());
        // One that is gone beside a valid one is gone, and so is one that never was anything.
        bench.write("beta.yaml", &texts[1].1);
        fs::remove_file(bench.path("other.yaml")).unwrap();
        assert_eq!(bench.looks()[2], ["acme.yaml gone", "other.yaml gone"]);
        fs::remove_file(bench.path("beta.yaml")).unwrap();
        fs::remove_file(bench.path("broken.yaml")).unwrap();
        assert_eq!(bench.looks(), [nothing(), nothing(), nothing()]);
        assert!(bench.doubt.is_some(), "an empty folder");
    }

    #[test]
    fn a_folder_that_became_a_file_is_no_absence() {
        let mut bench = Bench::new();
        let (folder, aside) = (bench.folder.path().to_owned(), bench.folder.path().with_extension("aside"));
        fs::rename(&folder, &aside).unwrap();
        fs::write(&folder, "").unwrap();
        let [_, _, said] = bench.looks();
        assert!(said.len() == 1 && said[0].contains("refused"), "{said:?}");
        assert!(bench.doubt.is_some());
        fs::remove_file(&folder).unwrap();
        fs::rename(&aside, &folder).unwrap();
        let name = folder.file_name().unwrap().to_string_lossy();
        assert_eq!(bench.looks(), [nothing(), nothing(), vec![format!("{name} gone")]]);
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_is_a_fault_of_its_workspace_alone() {
        let mut bench = Bench::new();
        bench.replace_by_a_pipe("acme.cedar");
        bench.write("beta.cedar", FORBID);
        let refused = "the policy file `acme.cedar` cannot be read: it is no regular file";
        let expected = vec![format!("acme.yaml refused: {refused}"), format!("beta.yaml: {FORBID}")];
        assert_eq!(bench.looks(), [nothing(), nothing(), expected]);
        // The workspace file itself: no absence, which would unpublish the workspace.
        bench.replace_by_a_pipe("beta.yaml");
        let expected = vec!["beta.yaml refused: cannot be read: it is no regular file".to_owned()];
        assert_eq!(bench.looks(), [nothing(), nothing(), expected]);
        assert_eq!(bench.looks(), [nothing(), nothing(), nothing()]);
    }

    #[test]
    fn a_catalogue_of_prices_is_watched_and_no_workspace() {
        let mut bench = Bench::new();
        let yaml = "workspace: acme\npolicies: [acme.cedar]\nprices: prices.yaml\n\
                    providers: { p: { kind: openai, base_url: 'https://x.example/v1' } }\n\
                    models: { m: { targets: [{ provider: p, model: mini }] } }\n";
        bench.write("prices.yaml", "kinds: { openai: { mini: { input: 1, output: 1 } } }\n");
        assert_eq!(bench.looks(), [nothing(), nothing(), nothing()], "nobody names it");
        bench.write("acme.yaml", yaml);
        assert_eq!(bench.looks()[2], [format!("acme.yaml: {PERMIT}")]);
        bench.write("prices.yaml", "kinds: { openai: { mini: { input: 1, output: 2 } } }\n");
        assert_eq!(bench.looks()[2], [format!("acme.yaml: {PERMIT}")]);
        bench.write("prices.yaml", "kinds: { openai: { mini: { input: 1 } } }\n");
        assert_eq!(bench.looks()[2], ["acme.yaml refused: the price of `mini` has no `output`"]);
        fs::remove_file(bench.path("prices.yaml")).unwrap();
        let refused = "the price catalogue `prices.yaml` cannot be read: no such file";
        assert_eq!(bench.looks()[2], [format!("acme.yaml refused: {refused}")]);
    }
}
