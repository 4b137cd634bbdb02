//! Real child processes: their output, their signals, and their certain end.
//!
//! Every child runs in a process group whose leader is a tiny shell that does one thing: it waits for its standard
//! input to end and then kills the group. Only this process holds the other end of that pipe, so the group also ends
//! when this process is killed and no destructor runs. (The kernel's own `PR_SET_PDEATHSIG` would need `unsafe`, and
//! would not reach grandchildren.) The child joins the group as it is spawned, which leaves no moment in which it
//! could escape, and since the leader holds the group's id, that id cannot come to mean another group.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use crate::Failure;

/// Lines kept in memory per process. The log file, when there is one, has all of them.
const KEPT_LINES: usize = 20_000;

/// How many of the last lines a failure quotes.
const QUOTED_LINES: usize = 40;

/// How long after a process ended its output is still waited for: a grandchild may hold the pipe.
const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// A process group that ends with this value, and with this process.
#[derive(Debug)]
pub(crate) struct Group {
    leader: std::process::Child,
    id: Pid,
}

impl Group {
    pub(crate) fn new() -> io::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let leader = std::process::Command::new("/bin/sh")
            .args(["-c", "read -r _; kill -9 0"])
            .env_clear()
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let id = pid(leader.id());
        Ok(Self { leader, id })
    }

    /// The number to spawn members with.
    pub(crate) fn id(&self) -> i32 {
        self.id.as_raw()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Both only fail when the group is gone already.
        killpg(self.id, Signal::SIGKILL).ok();
        drop(self.leader.wait());
    }
}

pub(crate) fn pid(raw: u32) -> Pid {
    Pid::from_raw(i32::try_from(raw).expect("a process id fits"))
}

/// What to run. Made by [`Proc::command`].
#[derive(Debug, Clone)]
pub struct Spec {
    name: String,
    program: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    path_first: Vec<PathBuf>,
    log_file: Option<PathBuf>,
    inherit_output: bool,
}

impl Spec {
    /// What failures call the process; by default its file name.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable. The child sees these and `PATH`, nothing else.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.insert(name.as_ref().to_owned(), value.as_ref().to_owned());
        self
    }

    /// Sets environment variables.
    #[must_use]
    pub fn envs<K: AsRef<OsStr>, V: AsRef<OsStr>>(mut self, vars: impl IntoIterator<Item = (K, V)>) -> Self {
        for (name, value) in vars {
            self = self.env(name, value);
        }
        self
    }

    /// Puts a directory in front of `PATH`.
    #[must_use]
    pub fn path_first(mut self, dir: impl Into<PathBuf>) -> Self {
        self.path_first.push(dir.into());
        self
    }

    /// Also appends every line of both outputs to this file.
    #[must_use]
    pub fn log_to(mut self, file: impl Into<PathBuf>) -> Self {
        self.log_file = Some(file.into());
        self
    }

    /// Leaves the child on this process's own standard output and error; then no lines are captured.
    #[must_use]
    pub fn inherit_output(mut self) -> Self {
        self.inherit_output = true;
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn(self) -> Proc {
        self.try_spawn().unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts it.
    ///
    /// # Errors
    /// When the program or the log file cannot be opened.
    pub fn try_spawn(self) -> Result<Proc, Failure> {
        Proc::start(self)
    }

    fn path(&self) -> OsString {
        let inherited = self.env.get(OsStr::new("PATH")).cloned().or_else(|| std::env::var_os("PATH"));
        let inherited = inherited.unwrap_or_default();
        let dirs = self.path_first.iter().cloned().chain(std::env::split_paths(&inherited));
        std::env::join_paths(dirs).unwrap_or(inherited)
    }
}

/// Which output a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// A running child process; dropping it kills it and all of its process group.
#[derive(Debug)]
pub struct Proc {
    name: String,
    pid: Pid,
    output: Arc<Output>,
    exited: watch::Receiver<Option<ExitStatus>>,
    _tasks: JoinSet<()>,
    _group: Group,
}

impl Proc {
    /// Describes a process to start. A name without a slash is looked up on `PATH`.
    pub fn command(program: impl Into<PathBuf>) -> Spec {
        let program = program.into();
        Spec {
            name: program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned(),
            program,
            args: Vec::new(),
            env: BTreeMap::new(),
            path_first: Vec::new(),
            log_file: None,
            inherit_output: false,
        }
    }

    fn start(spec: Spec) -> Result<Self, Failure> {
        let failed = |what: &str, why: io::Error| Failure::new(format!("{}: {what}: {why}", spec.name));
        let file = match &spec.log_file {
            Some(path) => Some(
                OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(path)
                    .map_err(|why| failed(&format!("cannot open `{}`", path.display()), why))?,
            ),
            None => None,
        };
        let group = Group::new().map_err(|why| failed("cannot start a process group", why))?;
        let output_pipe = || if spec.inherit_output { Stdio::inherit() } else { Stdio::piped() };
        let mut child = tokio::process::Command::new(&spec.program)
            .args(&spec.args)
            .env_clear()
            .envs(&spec.env)
            .env("PATH", spec.path())
            .process_group(group.id())
            .stdin(Stdio::null())
            .stdout(output_pipe())
            .stderr(output_pipe())
            .spawn()
            .map_err(|why| failed(&format!("cannot start `{}`", spec.program.display()), why))?;
        let pid = pid(child.id().expect("a child that was not waited for has an id"));

        let (out, err) = (child.stdout.take(), child.stderr.take());
        let output = Arc::new(Output {
            state: Mutex::new(OutputState {
                lines: VecDeque::new(),
                file,
                open: usize::from(out.is_some()) + usize::from(err.is_some()),
            }),
            changed: Notify::new(),
        });
        let mut tasks = JoinSet::new();
        if let Some(out) = out {
            tasks.spawn(read_lines(out, Stream::Out, output.clone()));
        }
        if let Some(err) = err {
            tasks.spawn(read_lines(err, Stream::Err, output.clone()));
        }
        let (exit, exited) = watch::channel(None);
        tasks.spawn(async move {
            // Fails only for a child that someone else reaped; then there is no status to tell.
            if let Ok(status) = child.wait().await {
                exit.send_replace(Some(status));
            }
        });
        Ok(Self { name: spec.name, pid, output, exited, _tasks: tasks, _group: group })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.pid.as_raw().unsigned_abs()
    }

    /// How it ended, if it has.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        *self.exited.borrow()
    }

    /// The lines captured so far, both outputs in the order in which they were read.
    pub fn lines(&self) -> Vec<String> {
        self.output.state.lock().lines.iter().map(|(_, line)| line.clone()).collect()
    }

    /// The lines captured so far from one output.
    pub fn lines_of(&self, stream: Stream) -> Vec<String> {
        let state = self.output.state.lock();
        state.lines.iter().filter(|(from, _)| *from == stream).map(|(_, line)| line.clone()).collect()
    }

    /// The first line that matches, already captured or still to come.
    ///
    /// # Panics
    /// When the deadline passes or the process ends first, quoting what it wrote last.
    pub async fn wait_for_line(&self, deadline: Duration, matches: impl Fn(&str) -> bool) -> String {
        self.try_wait_for_line(deadline, matches).await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// The first line that matches, already captured or still to come.
    ///
    /// # Errors
    /// When the deadline passes or the process ends first; the failure quotes what it wrote last.
    pub async fn try_wait_for_line(
        &self,
        deadline: Duration,
        matches: impl Fn(&str) -> bool,
    ) -> Result<String, Failure> {
        let end = Instant::now() + deadline;
        loop {
            let changed = self.output.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let silent = {
                let state = self.output.state.lock();
                if let Some((_, line)) = state.lines.iter().find(|(_, line)| matches(line)) {
                    return Ok(line.clone());
                }
                state.open == 0
            };
            if silent {
                let status = self.exit_status().map_or_else(|| "still running".to_owned(), |s| s.to_string());
                return Err(self.failure(&format!("ended its output without the line waited for ({status})")));
            }
            if timeout_at(end, changed).await.is_err() {
                return Err(self.failure(&format!("did not write the line waited for within {deadline:?}")));
            }
        }
    }

    /// Waits for its end, and for the rest of its output.
    ///
    /// # Panics
    /// When it still runs at the deadline.
    pub async fn wait(&self, deadline: Duration) -> ExitStatus {
        self.try_wait(deadline).await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Waits for its end, and for the rest of its output.
    ///
    /// # Errors
    /// When it still runs at the deadline.
    pub async fn try_wait(&self, deadline: Duration) -> Result<ExitStatus, Failure> {
        let status = match timeout(deadline, self.ended()).await {
            Ok(status) => status?,
            Err(_) => return Err(self.failure(&format!("still runs after {deadline:?}"))),
        };
        // Not an error when it passes: whoever holds the pipe then is not this process.
        drop(timeout(OUTPUT_GRACE, self.output_ended()).await);
        Ok(status)
    }

    /// Waits for its end, however long that takes. Cancel-safe.
    ///
    /// # Errors
    /// When its status was lost to someone else's `wait`.
    pub async fn ended(&self) -> Result<ExitStatus, Failure> {
        let mut exited = self.exited.clone();
        let status = exited.wait_for(Option::is_some).await;
        status.ok().and_then(|status| *status).ok_or_else(|| self.failure("ended with an unknown status"))
    }

    async fn output_ended(&self) {
        loop {
            let changed = self.output.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.output.state.lock().open == 0 {
                return;
            }
            changed.await;
        }
    }

    /// `SIGTERM` to the process alone, as an orchestrator does.
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// `SIGINT` to the process alone.
    pub fn interrupt(&self) {
        self.signal(Signal::SIGINT);
    }

    /// `SIGKILL` to the process alone (what it started must end by its own means), and waits until it is gone: then
    /// its sockets are closed and connections to it are refused.
    pub async fn kill9(&self) -> ExitStatus {
        self.signal(Signal::SIGKILL);
        self.wait(Duration::from_secs(10)).await
    }

    /// `SIGSTOP`: it keeps its sockets open and answers nothing.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// `SIGCONT` after [`Proc::pause`].
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        if self.exit_status().is_none() {
            // Fails only when it ended in this very moment.
            kill(self.pid, signal).ok();
        }
    }

    fn failure(&self, what: &str) -> Failure {
        let lines = self.lines();
        let from = lines.len().saturating_sub(QUOTED_LINES);
        let tail = lines[from..].join("\n  ");
        Failure::new(if tail.is_empty() {
            format!("`{}` {what}; it wrote nothing", self.name)
        } else {
            format!("`{}` {what}; it wrote last:\n  {tail}", self.name)
        })
    }
}

#[derive(Debug)]
struct Output {
    state: Mutex<OutputState>,
    changed: Notify,
}

#[derive(Debug)]
struct OutputState {
    lines: VecDeque<(Stream, String)>,
    file: Option<File>,
    open: usize,
}

async fn read_lines(from: impl AsyncRead + Unpin, stream: Stream, output: Arc<Output>) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).await.is_ok_and(|read| read > 0) {
        let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
        line.clear();
        {
            let mut state = output.state.lock();
            if let Some(file) = &mut state.file {
                // A full disk must not stop the child, which waits for its pipe to be read.
                drop(writeln!(file, "{text}"));
            }
            if state.lines.len() == KEPT_LINES {
                state.lines.pop_front();
            }
            state.lines.push_back((stream, text));
        }
        output.changed.notify_waiters();
    }
    output.state.lock().open -= 1;
    output.changed.notify_waiters();
}

/// The file of this name in the directory where cargo puts the workspace's binaries, found from where the running
/// test or binary lies (`target/PROFILE/deps/…` or `target/PROFILE/…`).
///
/// # Errors
/// When it has not been built.
pub fn built_binary(name: &str) -> Result<PathBuf, Failure> {
    let me = std::env::current_exe().map_err(|why| Failure::new(format!("where am I? {why}")))?;
    let candidates = me.ancestors().skip(1).take(2).map(|dir| dir.join(name));
    candidates.into_iter().find(|file| Path::is_file(file)).ok_or_else(|| {
        Failure::new(format!(
            "`{name}` is not built beside `{}`; run `cargo build -p {name}` first",
            me.display()
        ))
    })
}

/// Whether this process runs: false once it has ended, reaped or not, since when a zombie whose parent is gone is
/// reaped is up to the machine's first process.
///
/// The state is read, not the command line: that is empty for a moment in the middle of an `exec`, too.
#[must_use]
pub fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // `PID (NAME) STATE …`, and the name may hold anything.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;
    use crate::eventually;

    const SOON: Duration = Duration::from_secs(10);

    fn sh(script: &str) -> Spec {
        Proc::command("sh").arg("-c").arg(script)
    }

    #[tokio::test]
    async fn lines_are_captured_and_logged_and_the_environment_is_only_what_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let proc =
            sh("echo out $GIVEN; echo err >&2; env | sort | cut -d= -f1 | grep -v _ | tr '\\n' ' '; exit 3")
                .env("GIVEN", "x")
                .log_to(&log)
                .spawn();
        assert_eq!(proc.wait(SOON).await.code(), Some(3));
        assert_eq!(proc.wait_for_line(SOON, |line| line.starts_with("out")).await, "out x");
        assert_eq!(proc.lines_of(Stream::Err), ["err"]);
        assert_eq!(
            proc.lines_of(Stream::Out)[1].split_whitespace().collect::<Vec<_>>(),
            ["GIVEN", "PATH", "PWD"]
        );
        assert_eq!(std::fs::read_to_string(log).unwrap().lines().count(), 3);
    }

    #[tokio::test]
    async fn a_line_that_never_comes_fails_with_what_was_written() {
        let proc = sh("echo no; echo luck >&2").spawn();
        let why = proc.try_wait_for_line(SOON, |line| line == "yes").await.unwrap_err().to_string();
        assert!(why.contains("without the line") && why.contains("no") && why.contains("luck"), "{why}");
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let why = Proc::command("/nowhere/obol").try_spawn().unwrap_err().to_string();
        assert!(why.contains("/nowhere/obol"), "{why}");
    }

    #[tokio::test]
    async fn signals_reach_the_process() {
        let proc = sh("trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.01; done").spawn();
        proc.wait_for_line(SOON, |line| line == "ready").await;
        proc.terminate();
        assert_eq!(proc.wait(SOON).await.code(), Some(7));

        let proc = sh("exec sleep 1000").spawn();
        assert_eq!(proc.kill9().await.signal(), Some(9));
    }

    #[tokio::test]
    async fn dropping_kills_the_whole_group() {
        let proc = sh("sleep 1000 & echo $!; wait").spawn();
        let grandchild: u32 = proc.wait_for_line(SOON, |_| true).await.parse().unwrap();
        let child = proc.id();
        assert!(is_running(child) && is_running(grandchild));
        drop(proc);
        eventually(SOON, || async { !is_running(child) && !is_running(grandchild) }).await;
    }

    /// Not a test of its own: the body of the process that the next test kills.
    #[tokio::test]
    async fn helper_that_is_killed() {
        let Some(file) = std::env::var_os("OBOL_TESTKIT_HELPER") else { return };
        let proc = sh("exec sleep 1000").spawn();
        std::fs::write(&file, proc.id().to_string()).unwrap();
        std::future::pending::<()>().await;
    }

    #[tokio::test]
    async fn children_end_when_the_test_process_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let helper = Proc::command(std::env::current_exe().unwrap())
            .args(["process::tests::helper_that_is_killed", "--exact"])
            .env("OBOL_TESTKIT_HELPER", &file)
            .spawn();
        let child = eventually(SOON, || async { std::fs::read_to_string(&file).ok()?.parse().ok() }).await;
        assert!(is_running(child));
        helper.kill9().await;
        eventually(SOON, || async { !is_running(child) }).await;
    }
}
