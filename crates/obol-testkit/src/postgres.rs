//! A real Postgres, one per test.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Uid;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::Failure;
use crate::port::Port;
use crate::process::{Group, pid};

/// How long a Postgres may take to answer: `initdb` alone takes seconds on a busy machine.
const START: Duration = Duration::from_secs(60);

/// Whom Postgres runs as when the tests run as root, which it refuses to. Debian's `nobody`.
const NOBODY: u32 = 65_534;

/// Where Debian keeps the programs, one folder per version.
const DEBIAN: &str = "/usr/lib/postgresql";

/// A Postgres on a port and in a directory of its own, which trusts everybody on this machine and makes no effort to
/// survive a crash of it. It ends when this is dropped, and when the test process is killed.
#[derive(Debug)]
pub struct Postgres {
    port: Port,
    programs: PathBuf,
    child: Mutex<Option<Child>>,
    dir: TempDir,
    group: Group,
}

impl Postgres {
    /// Starts one and waits until it answers.
    ///
    /// # Panics
    /// When it is not installed or does not answer in time.
    pub async fn start() -> Self {
        Self::try_start().await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts one and waits until it answers.
    ///
    /// # Errors
    /// When it is not installed or does not answer in time.
    pub async fn try_start() -> Result<Self, Failure> {
        let failed = |why: io::Error| Failure::new(format!("cannot start Postgres: {why}"));
        let dir = tempfile::Builder::new().prefix("obol-postgres-").tempdir().map_err(failed)?;
        if Uid::effective().is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY)).map_err(failed)?;
        }
        let server = Self {
            port: Port::reserve(),
            programs: programs()?,
            child: Mutex::new(None),
            dir,
            group: Group::new().map_err(failed)?,
        };
        server.init().await?;
        server.launch().await?;
        Ok(server)
    }

    /// `postgres://obol@127.0.0.1:PORT/postgres`
    pub fn url(&self) -> String {
        format!("postgres://obol@{}/postgres", self.addr())
    }

    /// Where it listens. The address stays the same over [`Postgres::kill`] and [`Postgres::restart`].
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Runs statements and gives what they select, one row per line, columns separated by `|`.
    ///
    /// # Panics
    /// When a statement fails.
    pub fn sql(&self, statements: &str) -> String {
        let output = Command::new(self.programs.join("psql"))
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &self.url(), "-c", statements])
            .output()
            .expect("psql runs");
        assert!(output.status.success(), "{statements}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text").trim_end().to_owned()
    }

    /// Stops it in its tracks (`SIGSTOP`), with every process that serves a connection: nothing is answered.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it run on after [`Postgres::pause`].
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let Some(server) = self.child.lock().as_ref().map(|child| pid(child.id())) else { return };
        kill(server, signal).expect("the server can be signalled");
        // Each connection is served by a child of it.
        let children = std::fs::read_to_string(format!("/proc/{server}/task/{server}/children"));
        for child in children.unwrap_or_default().split_whitespace() {
            let child = child.parse().expect("a process id");
            // Fails only for one that ended by itself.
            kill(nix::unistd::Pid::from_raw(child), signal).ok();
        }
    }

    /// Ends it at once (`SIGQUIT`) and waits until it is gone: then connecting is refused. What was committed stays.
    pub fn kill(&self) {
        if let Some(mut child) = self.child.lock().take() {
            // Both fail only when it ended by itself, which is what is wanted.
            kill(pid(child.id()), Signal::SIGCONT).ok();
            kill(pid(child.id()), Signal::SIGQUIT).ok();
            drop(child.wait());
        }
    }

    /// Starts it again on the same port, with its data.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        self.kill();
        self.launch().await.unwrap_or_else(|why| panic!("{why}"));
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.current_dir(self.dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
        command.process_group(self.group.id());
        // A template of the environment's may not be readable for another user.
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C");
        if Uid::effective().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    async fn init(&self) -> Result<(), Failure> {
        let mut command = self.command("initdb");
        command.args([
            "--auth=trust",
            "--username=obol",
            "--encoding=UTF8",
            "--no-sync",
            "--no-instructions",
        ]);
        command.arg("-D").arg(self.data());
        let output = tokio::task::spawn_blocking(move || command.stderr(Stdio::piped()).output()).await;
        let output =
            output.expect("the thread ends").map_err(|why| Failure::new(format!("initdb: {why}")))?;
        if output.status.success() {
            return Ok(());
        }
        Err(Failure::new(format!("initdb failed: {}", String::from_utf8_lossy(&output.stderr))))
    }

    async fn launch(&self) -> Result<(), Failure> {
        let log = self.dir.path().join("postgres.log");
        let failed = |why: io::Error| Failure::new(format!("cannot start Postgres: {why}"));
        let output = std::fs::OpenOptions::new().create(true).append(true).open(&log).map_err(failed)?;
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).stderr(output);
        for setting in [
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            &format!("port={}", self.port.addr().port()),
            // Only the machine itself may forget what was committed.
            "fsync=off",
            "full_page_writes=off",
            "shared_buffers=16MB",
            "max_connections=40",
            "autovacuum=off",
        ] {
            command.args(["-c", setting]);
        }
        let child = command.spawn().map_err(failed)?;
        *self.child.lock() = Some(child);

        let end = Instant::now() + START;
        while !self.answers() {
            let said = || std::fs::read_to_string(&log).unwrap_or_default();
            let exited = self.child.lock().as_mut().and_then(|child| child.try_wait().ok().flatten());
            if let Some(status) = exited {
                return Err(Failure::new(format!(
                    "Postgres ended at start ({status}); its log:\n{}",
                    said()
                )));
            }
            if Instant::now() > end {
                let said = said();
                return Err(Failure::new(format!(
                    "Postgres did not answer within {START:?}; its log:\n{said}"
                )));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn answers(&self) -> bool {
        let mut ready = Command::new(self.programs.join("pg_isready"));
        let ready = ready.args(["-q", "-t", "2", "-d", &self.url()]).stdout(Stdio::null()).status();
        ready.is_ok_and(|status| status.success())
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Where the programs are: the newest of Debian's versions, or wherever `PATH` leads.
fn programs() -> Result<PathBuf, Failure> {
    let versions = std::fs::read_dir(DEBIAN).into_iter().flatten().flatten();
    let newest = versions
        .filter_map(|entry| {
            Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path().join("bin")))
        })
        .filter(|(_, bin)| bin.join("initdb").exists())
        .max_by_key(|(version, _)| *version);
    let on_path = || {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).find(|dir| Path::new(&dir.join("initdb")).exists())
    };
    newest.map(|(_, bin)| bin).or_else(on_path).ok_or_else(|| {
        Failure::new("Postgres is not installed: `scripts/setup.sh core` installs it".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_answers_and_keeps_its_data_when_it_is_killed() {
        let postgres = Postgres::start().await;
        postgres.sql("CREATE TABLE a (n int); INSERT INTO a VALUES (1), (2)");
        assert_eq!(postgres.sql("SELECT n, n + 1 FROM a ORDER BY n"), "1|2\n2|3");
        postgres.kill();
        let refused = tokio::net::TcpStream::connect(postgres.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        postgres.restart().await;
        assert_eq!(postgres.sql("SELECT count(*) FROM a"), "2");
    }
}
