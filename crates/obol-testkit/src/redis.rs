//! A real `redis-server`, one per test.

use std::io;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::Failure;
use crate::eventually;
use crate::port::Port;
use crate::process::{Group, pid};

/// How long a Redis may take to answer its first `PING`. It takes about 20 ms.
const START: Duration = Duration::from_secs(5);

/// A `redis-server` on a port and in a directory of its own: nothing is persisted, nothing is evicted. It ends when
/// this is dropped, and when the test process is killed.
#[derive(Debug)]
pub struct RedisServer {
    port: Port,
    /// What it is started with, apart from its port and its directory.
    args: Vec<String>,
    child: Mutex<Option<Child>>,
    dir: TempDir,
    group: Group,
}

impl RedisServer {
    /// Starts one and waits until it answers.
    ///
    /// # Panics
    /// When it is not installed or does not answer within five seconds.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts one with further arguments, such as `["--maxmemory-policy", "allkeys-lru"]`; they win over the kit's.
    ///
    /// # Panics
    /// As [`RedisServer::start`].
    pub async fn start_with(args: &[&str]) -> Self {
        Self::try_start(args).await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts one with further arguments.
    ///
    /// # Errors
    /// When it is not installed or does not answer within five seconds.
    pub async fn try_start(args: &[&str]) -> Result<Self, Failure> {
        let usual = ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"];
        let args = usual.iter().chain(args).map(|&arg| arg.to_owned()).collect();
        Self::try_start_on(Port::reserve(), args, None).await
    }

    /// Starts one on a port of the caller's, with these arguments; `config` is a file for it to read (and, if it is a
    /// sentinel, to write).
    pub(crate) async fn try_start_on(
        port: Port,
        mut args: Vec<String>,
        config: Option<&str>,
    ) -> Result<Self, Failure> {
        let failed = |why: io::Error| Failure::new(format!("cannot start `redis-server`: {why}"));
        let dir = tempfile::Builder::new().prefix("obol-redis-").tempdir().map_err(failed)?;
        if let Some(text) = config {
            let file = dir.path().join("redis.conf");
            std::fs::write(&file, text).map_err(failed)?;
            args.insert(0, file.to_string_lossy().into_owned());
        }
        let (child, group) = (Mutex::new(None), Group::new().map_err(failed)?);
        let server = Self { port, args, child, dir, group };
        server.launch().await?;
        Ok(server)
    }

    async fn launch(&self) -> Result<(), Failure> {
        // A configuration file has to come first, and what comes later wins.
        let (config, rest) = match self.args.first() {
            Some(first) if !first.starts_with('-') => self.args.split_at(1),
            _ => (&[][..], &self.args[..]),
        };
        let child = Command::new("redis-server")
            .args(config)
            .args(["--port", &self.port().to_string(), "--bind", "127.0.0.1"])
            .arg("--dir")
            .arg(self.dir.path())
            .arg("--logfile")
            .arg(self.log_file())
            .args(rest)
            .process_group(self.group.id())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|why| {
                Failure::new(if why.kind() == io::ErrorKind::NotFound {
                    "`redis-server` is not on PATH; `scripts/setup.sh core` installs it".to_owned()
                } else {
                    format!("cannot start `redis-server`: {why}")
                })
            })?;
        *self.child.lock() = Some(child);

        let end = Instant::now() + START;
        while !answers(self.addr()).await {
            let exited = self.child.lock().as_mut().and_then(|child| child.try_wait().ok().flatten());
            if let Some(status) = exited {
                return Err(self.failure(&format!("ended at start ({status})")));
            }
            if Instant::now() > end {
                return Err(self.failure(&format!("did not answer within {START:?}")));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    fn failure(&self, what: &str) -> Failure {
        let log = std::fs::read_to_string(self.log_file()).unwrap_or_default();
        Failure::new(format!("`redis-server` {what}; its log:\n{log}"))
    }

    fn log_file(&self) -> PathBuf {
        self.dir.path().join("redis.log")
    }

    /// Where it listens. The address stays the same over [`RedisServer::kill`] and [`RedisServer::restart`].
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The port of [`RedisServer::addr`].
    pub fn port(&self) -> u16 {
        self.addr().port()
    }

    /// `redis://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Whether it was started and not killed since.
    pub fn runs(&self) -> bool {
        self.child.lock().is_some()
    }

    /// Stops it in its tracks (`SIGSTOP`): connections stay open and are accepted, nothing is answered.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it run on after [`RedisServer::pause`].
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &*self.child.lock() {
            kill(pid(child.id()), signal).expect("redis-server can be signalled");
        }
    }

    /// Kills it (`SIGKILL`) and waits until it is gone: then connecting is refused, and its data is lost.
    pub fn kill(&self) {
        if let Some(mut child) = self.child.lock().take() {
            // Fails only when it ended by itself, which is what is wanted.
            drop(child.kill());
            drop(child.wait());
        }
    }

    /// Starts it again on the same port, killing it first if it runs. It comes back empty.
    ///
    /// # Panics
    /// As [`RedisServer::start`].
    pub async fn restart(&self) {
        self.kill();
        self.launch().await.unwrap_or_else(|why| panic!("{why}"));
    }

    /// A new connection.
    ///
    /// # Panics
    /// When it cannot be opened.
    pub async fn connection(&self) -> ::redis::aio::MultiplexedConnection {
        self.try_connection().await.expect("a connection to Redis")
    }

    /// With more patience than the library's defaults: on a busy machine they fail a test that is right.
    async fn try_connection(&self) -> ::redis::RedisResult<::redis::aio::MultiplexedConnection> {
        let client = ::redis::Client::open(self.url())?;
        let config = ::redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(START))
            .set_response_timeout(Some(START));
        client.get_multiplexed_async_connection_with_config(&config).await
    }

    /// Runs one command, as `redis-cli` would: `server.cli(&["HGETALL", "sess:x"]).await`.
    ///
    /// # Panics
    /// When Redis answers with an error.
    pub async fn cli(&self, args: &[&str]) -> ::redis::Value {
        let (name, rest) = args.split_first().expect("a command");
        let mut command = ::redis::cmd(name);
        command.arg(rest);
        command
            .query_async(&mut self.connection().await)
            .await
            .unwrap_or_else(|why| panic!("{args:?}: {why}"))
    }

    /// Runs one command and reads its answer as `T`.
    ///
    /// # Panics
    /// When Redis answers with an error or with something else.
    pub async fn query<T: ::redis::FromRedisValue>(&self, args: &[&str]) -> T {
        ::redis::from_redis_value(self.cli(args).await).unwrap_or_else(|why| panic!("{args:?}: {why}"))
    }

    /// Runs one command and reads its answer as `T`, on a server that may be going away.
    ///
    /// # Errors
    /// When it cannot be asked, or answers with an error or with something else.
    pub async fn try_query<T: ::redis::FromRedisValue>(&self, args: &[&str]) -> Result<T, Failure> {
        let failed = |why: ::redis::RedisError| Failure::new(format!("{args:?}: {why}"));
        let mut connection = self.try_connection().await.map_err(failed)?;
        let (name, rest) = args.split_first().expect("a command");
        ::redis::cmd(name).arg(rest).query_async(&mut connection).await.map_err(failed)
    }

    /// Waits until a replica has everything that was written so far.
    ///
    /// # Panics
    /// When there is none that catches up within ten seconds.
    pub async fn wait_until_replicated(&self) {
        // `WAIT` is about what the same connection wrote before it.
        eventually(Duration::from_secs(10), || async {
            let info: String = self.query(&["INFO", "replication"]).await;
            let number = |after: &str| {
                let (_, rest) = info.split_once(after)?;
                rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok()
            };
            number("master_repl_offset:").zip(number(",offset=")).is_some_and(|(ours, theirs)| theirs >= ours)
        })
        .await;
    }

    /// The names of the keys that match a pattern, sorted.
    pub async fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<String> = self.query(&["KEYS", pattern]).await;
        keys.sort();
        keys
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a server at this address answers `PING`, be it with a demand for a password.
async fn answers(addr: SocketAddr) -> bool {
    let ping = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(b"PING\r\n").await?;
        let mut answer = [0; 7];
        stream.read_exact(&mut answer).await?;
        io::Result::Ok(answer)
    };
    match tokio::time::timeout(Duration::from_secs(1), ping).await {
        Ok(Ok(answer)) => answer == *b"+PONG\r\n" || answer == *b"-NOAUTH",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_answers_and_neither_persists_nor_evicts() {
        let redis = RedisServer::start().await;
        redis.cli(&["SET", "a", "1"]).await;
        assert_eq!(redis.query::<u32>(&["GET", "a"]).await, 1);
        assert_eq!(redis.keys("*").await, ["a"]);
        let policy: Vec<String> = redis.query(&["CONFIG", "GET", "maxmemory-policy"]).await;
        assert_eq!(policy, ["maxmemory-policy", "noeviction"]);
        let save: Vec<String> = redis.query(&["CONFIG", "GET", "save"]).await;
        assert_eq!(save, ["save", ""]);
    }

    #[tokio::test]
    async fn a_paused_server_hangs_and_goes_on_when_resumed() {
        let redis = RedisServer::start().await;
        redis.cli(&["SET", "a", "1"]).await;
        redis.pause();
        let asked = redis.query::<u32>(&["GET", "a"]);
        tokio::pin!(asked);
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut asked).await.is_err());
        redis.resume();
        assert_eq!(asked.await, 1);
    }

    #[tokio::test]
    async fn a_killed_server_refuses_and_comes_back_empty_on_its_port() {
        let redis = RedisServer::start().await;
        redis.cli(&["SET", "a", "1"]).await;
        let before = redis.port();
        redis.kill();
        let refused = TcpStream::connect(redis.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        redis.restart().await;
        assert_eq!(redis.port(), before);
        assert_eq!(redis.keys("*").await, Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_server_that_cannot_start_says_why() {
        let why = RedisServer::try_start(&["--maxmemory-policy", "sometimes"]).await.unwrap_err().to_string();
        assert!(why.contains("ended at start"), "{why}");
    }
}
