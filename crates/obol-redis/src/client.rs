use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use obol_model::{Secret, metric};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, FromRedisValue, Pipeline, RedisResult, ServerErrorKind, Value};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::link::Link;
use crate::target::Target;
use crate::{RedisError, Script, SubscriberEvent, subscriber};

/// How many keys one step of a scan looks at.
const SCAN_STEP: usize = 1000;

/// The oldest Redis that the scripts are tested with.
const OLDEST: (u32, u32) = (7, 0);

/// How to reach Redis.
#[derive(Debug, Clone)]
pub struct RedisOptions {
    /// `redis://` or `rediss://`, with the credentials.
    pub url: Secret<String>,
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
        Self { url, command_timeout: Duration::from_millis(800), connect_timeout: Duration::from_millis(500) }
    }
}

/// A client of one Redis. Clones are cheap and share one connection.
///
/// All methods are cancel-safe in the sense that abandoning one harms no other command; whether Redis still executes
/// the abandoned command is unknown, as it is after [`RedisError::Timeout`] and [`RedisError::Io`].
#[derive(Debug, Clone)]
pub struct Redis {
    link: Arc<Link>,
    command_timeout: Duration,
}

impl Redis {
    /// Connects and asks for a sign of life.
    ///
    /// # Errors
    /// [`RedisError::BadUrl`] for a URL that this release cannot use; otherwise why the server cannot be reached, with
    /// its address and without the password.
    pub async fn connect(options: RedisOptions) -> Result<Self, RedisError> {
        let target = Target::parse(options.url.expose())?;
        let redis = Self {
            link: Link::new(target, options.connect_timeout),
            command_timeout: options.command_timeout,
        };
        // Outside of the commands' deadline: at start a slow handshake is worth waiting for.
        redis.link.connection().await?;
        redis.ping().await?;
        Ok(redis)
    }

    /// Sends a command. Not for commands that block: the deadline would take the connection from everybody.
    ///
    /// # Errors
    /// When Redis could not be asked, or answered with an error or not with a `T`.
    pub async fn query<T: FromRedisValue>(&self, cmd: &Cmd) -> Result<T, RedisError> {
        let send = |mut link: MultiplexedConnection| async move { cmd.query_async(&mut link).await };
        counted(self.flight(self.deadline(), send).await.and_then(|(answer, _)| self.read(answer)))
    }

    /// Sends several commands in one flight.
    ///
    /// # Errors
    /// As [`Redis::query`]; an error of one command is the error of all unless the pipeline ignores errors.
    pub async fn pipeline<T: FromRedisValue>(&self, pipe: &Pipeline) -> Result<T, RedisError> {
        let send = |mut link: MultiplexedConnection| async move { pipe.query_async(&mut link).await };
        counted(self.flight(self.deadline(), send).await.and_then(|(answer, _)| self.read(answer)))
    }

    /// Runs a script, which is uploaded when Redis does not know it (a second flight, within the same deadline).
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
    /// they run whatever the script answers.
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

    async fn scripted<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
        beside: Vec<Cmd>,
    ) -> Result<T, RedisError> {
        let deadline = self.deadline();
        let mut pipe = Pipeline::with_capacity(1 + beside.len());
        pipe.ignore_errors().add_command(script.call(keys, args));
        for cmd in beside {
            pipe.add_command(cmd).ignore();
        }
        let (mut answer, mut number) = self.first_answer(deadline, &pipe).await?;
        if answer.as_ref().is_err_and(|why| why.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            tracing::debug!(script = script.name(), "uploading script");
            let mut pipe = Pipeline::with_capacity(2);
            pipe.ignore_errors().add_command(script.load()).ignore();
            pipe.add_command(script.call(keys, args));
            (answer, number) = self.first_answer(deadline, &pipe).await?;
        }
        self.read(answer.map_err(|why| self.failed(number, why))?)
    }

    async fn first_answer(
        &self,
        deadline: Instant,
        pipe: &Pipeline,
    ) -> Result<(RedisResult<Value>, u64), RedisError> {
        let send = |mut link: MultiplexedConnection| async move { pipe.query_async(&mut link).await };
        let (answers, number) = self.flight(deadline, send).await?;
        let answers: Vec<RedisResult<Value>> = self.read(answers)?;
        Ok((answers.into_iter().next().unwrap_or(Ok(Value::Nil)), number))
    }

    /// Asks for a sign of life.
    ///
    /// # Errors
    /// As [`Redis::query`].
    pub async fn ping(&self) -> Result<(), RedisError> {
        self.query(&redis::cmd("PING")).await
    }

    /// Up to `limit` keys that match a glob pattern, in no order, each once. Each step has the deadline of a command;
    /// the number of steps grows with the number of keys in Redis, so this is for the start, not for requests.
    ///
    /// # Errors
    /// As [`Redis::query`].
    pub async fn scan(&self, pattern: &str, limit: usize) -> Result<Vec<String>, RedisError> {
        let mut found = HashSet::new();
        // Text, since cursors are unsigned 64-bit numbers.
        let mut cursor = String::from("0");
        while found.len() < limit {
            let mut cmd = redis::cmd("SCAN");
            cmd.arg(&cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_STEP);
            let (next, keys): (String, Vec<String>) = self.query(&cmd).await?;
            let room = limit - found.len();
            found.extend(keys.into_iter().take(room));
            if next == "0" {
                break;
            }
            cursor = next;
        }
        Ok(found.into_iter().collect())
    }

    /// What an operator should know of this server at start, in sentences; empty when all is well.
    ///
    /// # Errors
    /// As [`Redis::query`].
    pub async fn server_warnings(&self) -> Result<Vec<String>, RedisError> {
        let info: String = self.query(&redis::cmd("INFO")).await?;
        Ok(warnings(&info))
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
            () = subscriber::run(&self.link, channel, &events) => {}
            () = events.closed() => {}
            () = shutdown.cancelled() => {}
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.command_timeout
    }

    /// One exchange, and the number of the connection that it used.
    async fn flight<F, Sent>(&self, deadline: Instant, send: F) -> Result<(Value, u64), RedisError>
    where
        F: FnOnce(MultiplexedConnection) -> Sent,
        Sent: Future<Output = RedisResult<Value>>,
    {
        let mut used = None;
        let exchange = async {
            let (connection, number) = self.link.connection().await?;
            used = Some(number);
            let answer = send(connection).await.map_err(|why| self.failed(number, why))?;
            Ok((answer, number))
        };
        let outcome = tokio::time::timeout_at(deadline, exchange).await;
        outcome.unwrap_or_else(|_| {
            // Silence of a whole deadline: the link may be dead without a word, so the next command gets a new one.
            if let Some(number) = used {
                self.link.retire(number, "silent");
            }
            Err(RedisError::Timeout {
                server: self.link.target().server.clone(),
                after: self.command_timeout,
            })
        })
    }

    /// Apart from the exchange: an answer of another type is no reason to give up the connection.
    fn read<T: FromRedisValue>(&self, answer: Value) -> Result<T, RedisError> {
        redis::from_redis_value(answer).map_err(|_| RedisError::unexpected(&self.link.target().server))
    }

    fn failed(&self, number: u64, why: redis::RedisError) -> RedisError {
        if why.is_unrecoverable_error() {
            self.link.retire(number, "broken");
        } else if why.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) {
            // The server was demoted under us. Its name may stand for the new master by now.
            self.link.retire(number, "read-only");
        }
        RedisError::command(&self.link.target().server, why)
    }
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
            "`maxmemory-policy` is `{policy}`: Redis may drop sessions, keys and budgets when memory is short; \
             set it to `noeviction`"
        )),
        None => warnings.push(
            "Redis does not tell its `maxmemory-policy`; make sure that it is `noeviction`".to_owned(),
        ),
    }
    if value("role") == Some("slave") {
        warnings.push("this Redis is a read-only replica; connect to the master".to_owned());
    }
    if let Some(version) = value("redis_version") {
        let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
            warnings.push(format!("Redis {version} is older than 7.0, the oldest that is tested"));
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
    fn eviction_replica_and_age_are_warned_of() {
        let info = "redis_version:6.2.1\r\nrole:slave\r\nmaxmemory_policy:allkeys-lru\r\n";
        let found = warnings(info).join("\n");
        for expected in ["`allkeys-lru`", "read-only replica", "older than 7.0"] {
            assert!(found.contains(expected), "{found}");
        }
        assert!(warnings("").join("\n").contains("does not tell"));
    }
}
