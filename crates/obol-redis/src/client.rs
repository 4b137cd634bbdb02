use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use obol_model::{Secret, metric};
use redis::{Cmd, FromRedisValue, Pipeline, ServerErrorKind, Value};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::batch::Batch;
use crate::link::Deadline;
use crate::servers::Servers;
use crate::url::FORMS;
use crate::{RedisError, RedisUrl, Script, ScriptCall, SubscriberEvent, subscriber};

/// How many keys one step of a scan looks at.
const SCAN_STEP: usize = 1000;

/// The oldest Redis that the scripts are tested with.
const OLDEST: (u32, u32) = (7, 0);

/// At start a server that says nothing gets so many attempts' time: a slow handshake is worth waiting for.
const PATIENCE: u32 = 4;

/// Between two of those attempts.
const BREATH: Duration = Duration::from_millis(50);

/// How to reach Redis.
#[derive(Debug, Clone)]
pub struct RedisOptions {
    /// As [`RedisUrl`] describes, with the credentials.
    pub url: Secret<String>,
    /// PEM certificates of the authorities that the servers' own are checked with, instead of the public ones.
    pub ca: Option<Vec<u8>>,
    /// The deadline of each command, connecting included. 800 ms by default: a request that finds Redis silent is
    /// to be answered within a second (DESIGN §14).
    pub command_timeout: Duration,
    /// The deadline of one attempt to connect. 500 ms by default: shorter than a command's, so that the first attempt
    /// after an outage is not one that began in it.
    pub connect_timeout: Duration,
}

impl RedisOptions {
    /// The defaults for a URL.
    pub fn new(url: Secret<String>) -> Self {
        Self {
            url,
            ca: None,
            command_timeout: Duration::from_millis(800),
            connect_timeout: Duration::from_millis(500),
        }
    }
}

/// A client of one Redis: a server, a master that Sentinel watches, or a Cluster. Clones are cheap and share the
/// connections.
///
/// All methods are cancel-safe in the sense that abandoning one harms no other command; whether Redis still executes
/// the abandoned command is unknown, as it is after [`RedisError::Timeout`] and [`RedisError::Io`].
#[derive(Clone)]
pub struct Redis {
    servers: Arc<Servers>,
    command_timeout: Duration,
    connect_timeout: Duration,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("servers", self.servers.name()).finish_non_exhaustive()
    }
}

impl Redis {
    /// A client that has not connected: whatever needs a connection makes one.
    ///
    /// # Errors
    /// [`RedisError::BadUrl`] and [`RedisError::BadCa`].
    pub fn new(options: RedisOptions) -> Result<Self, RedisError> {
        let RedisOptions { url, ca, command_timeout, connect_timeout } = options;
        let url = RedisUrl::parse(url.expose())
            .map_err(|why| RedisError::BadUrl { reason: format!("it {why}; use {FORMS}") })?;
        let servers = Arc::new(Servers::new(url, ca.map(Arc::from).as_ref(), connect_timeout)?);
        Ok(Self { servers, command_timeout, connect_timeout })
    }

    /// Connects and asks for a sign of life.
    ///
    /// # Errors
    /// As [`Redis::new`] for what can never work; otherwise why the server cannot be reached, with its address and
    /// without the password.
    pub async fn connect(options: RedisOptions) -> Result<Self, RedisError> {
        let redis = Self::new(options)?;
        redis.open().await?;
        Ok(redis)
    }

    /// Connects and asks for a sign of life, with more patience than a command has.
    ///
    /// # Errors
    /// Why the server cannot be reached, with its address and without the password.
    pub async fn open(&self) -> Result<(), RedisError> {
        let patience = self.connect_timeout * PATIENCE;
        let end = Instant::now() + patience;
        loop {
            match self.servers.open(Deadline::after(patience)).await {
                Err(why) if why.is_silence() && Instant::now() < end => sleep(BREATH).await,
                opened => break opened?,
            }
        }
        self.ping().await
    }

    /// Looks after the connections until `shutdown`: makes them again when they are lost, with backoff, notices silent
    /// ones, and follows a master or slots that move.
    ///
    /// While it runs no command waits for a server that is known to be away. Without it commands do all of this
    /// themselves, when they find out; that is enough for a short life.
    pub async fn keep(&self, shutdown: CancellationToken) {
        tokio::select! {
            () = self.servers.keep(self.command_timeout) => {}
            () = shutdown.cancelled() => {}
        }
    }

    /// Sends a command. Not for commands that block: the deadline would take the connection from everybody.
    ///
    /// # Errors
    /// When Redis could not be asked, or answered with an error or not with a `T`.
    pub async fn query<T: FromRedisValue>(&self, cmd: &Cmd) -> Result<T, RedisError> {
        counted(self.send(Batch::One(cmd)).await)
    }

    /// Sends several commands in one flight. On a Cluster it is one flight to each node that they belong to, at the same
    /// time; the order of answers is that of the commands.
    ///
    /// # Errors
    /// As [`Redis::query`]; an error of one command is the error of all unless the pipeline ignores errors. When it
    /// does and some nodes of a Cluster could not be asked, `UNAVAILABLE` stands in place of their answers.
    pub async fn pipeline<T: FromRedisValue>(&self, pipe: &Pipeline) -> Result<T, RedisError> {
        counted(self.send(Batch::Many(pipe)).await)
    }

    async fn send<T: FromRedisValue>(&self, batch: Batch<'_>) -> Result<T, RedisError> {
        if batch.len() == 0 {
            return self.read(Value::Array(Vec::new()));
        }
        let mut answers = self.servers.send(batch, self.deadline()).await?;
        let values = std::mem::take(&mut answers.values);
        let answer = batch.read(values).await.map_err(|why| answers.error(why))?;
        self.read(answer)
    }

    /// Runs a script, whose text is sent when Redis does not know it (a second flight, within the same deadline). On a
    /// Cluster all keys must lie in one slot.
    ///
    /// # Errors
    /// As [`Redis::query`].
    pub async fn run<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
    ) -> Result<T, RedisError> {
        self.run_beside(script, keys, args, Vec::new()).await
    }

    /// Runs a script and, in the same flight and after it, commands whose answers nobody needs: they may fail, and
    /// they run whatever the script answers. On a Cluster those of other nodes go there at the same time, and nobody
    /// waits for them.
    ///
    /// # Errors
    /// As [`Redis::query`], for the script alone.
    pub async fn run_beside<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
        beside: Vec<Cmd>,
    ) -> Result<T, RedisError> {
        counted(self.scripted(script, keys, args, beside).await)
    }

    /// Runs a script several times in one flight, each time with keys and arguments of its own, and answers for each.
    /// Those that a server does not know the script for are sent again with its text, within the same deadline.
    ///
    /// # Errors
    /// When no server could be asked. What single ones answered stands in the list.
    pub async fn run_many<T: FromRedisValue>(
        &self,
        script: &Script,
        calls: &[ScriptCall],
    ) -> Result<Vec<Result<T, RedisError>>, RedisError> {
        counted(self.scripted_many(script, calls).await)
    }

    async fn scripted_many<T: FromRedisValue>(
        &self,
        script: &Script,
        calls: &[ScriptCall],
    ) -> Result<Vec<Result<T, RedisError>>, RedisError> {
        if calls.is_empty() {
            return Ok(Vec::new());
        }
        let deadline = self.deadline();
        let mut pipe = Pipeline::with_capacity(calls.len());
        for call in calls {
            pipe.add_command(call.of(script));
        }
        let answers = self.servers.send(Batch::Many(&pipe), deadline).await?;
        let (mut values, server) = (answers.values, answers.server);
        let again: Vec<usize> = values
            .iter()
            .enumerate()
            .filter(|(_, value)| is_unknown_script(value))
            .map(|(at, _)| at)
            .collect();
        if !again.is_empty() {
            tracing::debug!(script = script.name(), "sending the text of a script");
            let mut pipe = Pipeline::with_capacity(again.len());
            for call in again.iter().filter_map(|at| calls.get(*at)) {
                pipe.add_command(call.in_full(script));
            }
            let answers = self.servers.send(Batch::Many(&pipe), deadline).await?;
            for (at, value) in again.into_iter().zip(answers.values) {
                if let Some(place) = values.get_mut(at) {
                    *place = value;
                }
            }
        }
        let each = values
            .into_iter()
            .map(|value| self.read(value.extract_error().map_err(|why| RedisError::command(&server, why))?));
        Ok(each.collect())
    }

    async fn scripted<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
        beside: Vec<Cmd>,
    ) -> Result<T, RedisError> {
        let deadline = self.deadline();
        let answers = self.servers.send_beside(script.call(keys, args), beside, deadline).await?;
        let (mut answer, mut server) = (answers.values.into_iter().next(), answers.server);
        if answer.as_ref().is_some_and(is_unknown_script) {
            tracing::debug!(script = script.name(), "sending the text of a script");
            // `EVAL` keeps it, and cannot meet another `SCRIPT FLUSH` between an upload and the call.
            let answers = self.servers.send(Batch::One(&script.call_in_full(keys, args)), deadline).await?;
            (answer, server) = (answers.values.into_iter().next(), answers.server);
        }
        let answer = answer.unwrap_or(Value::Nil).extract_error();
        self.read(answer.map_err(|why| RedisError::command(&server, why))?)
    }

    /// Asks for a sign of life: of every master, since together they hold what requests need.
    ///
    /// # Errors
    /// As [`Redis::query`].
    pub async fn ping(&self) -> Result<(), RedisError> {
        counted(self.servers.ask_all(&redis::cmd("PING"), self.deadline()).await.map(drop))
    }

    /// Up to `limit` keys that match a glob pattern, in no order, each once. Each step has the deadline of a command;
    /// the number of steps grows with the number of keys in Redis, so this is for the start, not for requests.
    ///
    /// # Errors
    /// As [`Redis::query`].
    pub async fn scan(&self, pattern: &str, limit: usize) -> Result<Vec<String>, RedisError> {
        let mut found = HashSet::new();
        for master in counted(self.servers.masters(self.deadline()).await)? {
            // Text, since cursors are unsigned 64-bit numbers.
            let mut cursor = String::from("0");
            while found.len() < limit {
                let mut cmd = redis::cmd("SCAN");
                cmd.arg(&cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_STEP);
                let step = counted(master.ask(&cmd, self.deadline()).await)?;
                let (next, keys): (String, Vec<String>) = counted(self.read(step))?;
                let room = limit - found.len();
                found.extend(keys.into_iter().take(room));
                if next == "0" {
                    break;
                }
                cursor = next;
            }
        }
        Ok(found.into_iter().collect())
    }

    /// What an operator should know of the servers at start, in sentences; empty when all is well.
    ///
    /// # Errors
    /// As [`Redis::query`].
    pub async fn server_warnings(&self) -> Result<Vec<String>, RedisError> {
        let mut found = Vec::new();
        for (server, info) in counted(self.servers.ask_all(&redis::cmd("INFO"), self.deadline()).await)? {
            let info: String = counted(self.read(info))?;
            found
                .extend(warnings(&info).into_iter().map(|warning| format!("Redis at `{server}`: {warning}")));
        }
        Ok(found)
    }

    /// Listens to a channel on a connection of its own until `shutdown` or until nobody receives `events`.
    ///
    /// Messages are lost while the connection is away: [`SubscriberEvent::Subscribed`] says that from now on none is,
    /// so whoever missed some has to look for itself. The connection is made again with backoff from 100 ms to 5 s;
    /// one that went silent is noticed within 15 s. When `events` stays full for 5 s the connection is given up and
    /// made again, which tells the receiver that it missed messages.
    pub async fn subscribe(
        &self,
        channel: &'static str,
        events: mpsc::Sender<SubscriberEvent>,
        shutdown: CancellationToken,
    ) {
        tokio::select! {
            () = subscriber::run(&self.servers, self.connect_timeout, channel, &events) => {}
            () = events.closed() => {}
            () = shutdown.cancelled() => {}
        }
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        self.servers.name()
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.command_timeout)
    }

    /// Apart from the exchange: an answer of another type is no reason to give up the connection.
    fn read<T: FromRedisValue>(&self, answer: Value) -> Result<T, RedisError> {
        redis::from_redis_value(answer).map_err(|_| RedisError::unexpected(self.servers.name()))
    }
}

fn is_unknown_script(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

fn counted<T>(outcome: Result<T, RedisError>) -> Result<T, RedisError> {
    outcome.inspect_err(|why| {
        metrics::counter!(metric::REDIS_ERRORS, "reason" => why.reason()).increment(1);
    })
}

fn warnings(info: &str) -> Vec<String> {
    let value =
        |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let mut warnings = Vec::new();
    match value("maxmemory_policy") {
        Some("noeviction") => {}
        Some(policy) => warnings.push(format!(
            "`maxmemory-policy` is `{policy}`: it may drop sessions, keys and budgets when memory is short; \
             set it to `noeviction`"
        )),
        None => warnings
            .push("it does not tell its `maxmemory-policy`; make sure that it is `noeviction`".to_owned()),
    }
    if let Some(version) = value("redis_version") {
        let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
            warnings.push(format!("version {version} is older than 7.0, the oldest that is tested"));
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_as_it_should_be_gives_no_warning() {
        let info = "# Server\r\nredis_version:7.0.15\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n";
        assert_eq!(warnings(info), Vec::<String>::new());
    }

    #[test]
    fn eviction_and_age_are_warned_of() {
        let info = "redis_version:6.2.1\r\nmaxmemory_policy:allkeys-lru\r\n";
        let found = warnings(info).join("\n");
        for expected in ["`allkeys-lru`", "older than 7.0"] {
            assert!(found.contains(expected), "{found}");
        }
        assert!(warnings("").join("\n").contains("does not tell"));
    }
}
