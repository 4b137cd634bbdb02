use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, PushInfo, PushKind, RedisResult, ServerErrorKind, Value,
};
use tokio::time::{Instant, timeout_at};

use crate::RedisError;
use crate::batch::Batch;
use crate::renewed::{Lease, Renewed};
use crate::server::Server;

/// Commands that wait to be written; further ones wait for a place, within their deadline.
const QUEUE: usize = 1024;

/// How often the keeper asks an idle connection for a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Until when an answer is of use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    pub(crate) fn after(after: Duration) -> Self {
        Self { at: Instant::now() + after, after }
    }

    /// # Errors
    /// Those of `work`, and [`RedisError::Timeout`].
    pub(crate) async fn bound<T>(
        self,
        server: &Arc<str>,
        work: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RedisError> {
        timeout_at(self.at, work).await.unwrap_or_else(|_| Err(self.missed(server)))
    }

    fn missed(self, server: &Arc<str>) -> RedisError {
        RedisError::Timeout { server: server.clone(), after: self.after }
    }
}

/// What a server must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The master, and no node of a Cluster.
    Master,
    /// A node of a Cluster. Which ones are masters is for the map to say.
    Node,
    Sentinel,
}

/// A connection that is open, to a server that answered.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) server: Arc<Server>,
    redis: MultiplexedConnection,
    lease: Lease<Self>,
}

/// The connection to one server that everybody shares, and how it comes back.
///
/// `redis::aio::ConnectionManager` is not used because it keeps a connection that has gone silent and because the
/// command that finds a server gone must fail for the next one to succeed.
pub(crate) struct Link {
    pub(crate) name: Arc<str>,
    pub(crate) connection: Arc<Renewed<Connection>>,
}

/// What a server answered.
pub(crate) struct Answers {
    pub(crate) values: Vec<Value>,
    /// Who answered, for people.
    pub(crate) server: Arc<str>,
    /// Why some of the values are errors that no server said.
    pub(crate) failure: Option<RedisError>,
}

impl Answers {
    /// To be filled in.
    pub(crate) fn none(commands: usize, server: &Arc<str>) -> Self {
        Self { values: vec![Value::Nil; commands], server: server.clone(), failure: None }
    }

    /// Puts in what another server answered to the commands at these positions, or the failure to ask it.
    pub(crate) fn place(&mut self, positions: Vec<usize>, outcome: Result<Self, RedisError>) {
        let mut theirs = Vec::new();
        match outcome {
            Ok(answers) => {
                theirs = answers.values;
                self.failure = self.failure.take().or(answers.failure);
            }
            Err(why) => self.failure = self.failure.take().or(Some(why)),
        }
        let mut theirs = theirs.into_iter();
        for position in positions {
            if let Some(value) = self.values.get_mut(position) {
                *value = theirs.next().unwrap_or_else(unanswered);
            }
        }
    }

    /// The error of commands that the server refused, or that it could not be asked.
    pub(crate) fn error(self, why: redis::RedisError) -> RedisError {
        self.failure.unwrap_or_else(|| RedisError::command(&self.server, why))
    }
}

/// In the place of an answer that did not come.
fn unanswered() -> Value {
    let error = redis::make_extension_error("UNAVAILABLE".into(), Some("the node could not be asked".into()));
    match error.into_server_errors().as_deref() {
        Some([(_, error), ..]) => Value::ServerError(error.clone()),
        _ => Value::Nil,
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("server", &self.name).finish_non_exhaustive()
    }
}

impl Link {
    /// To this server.
    pub(crate) fn new(server: Arc<Server>, wanted: Wanted, connect_timeout: Duration) -> Arc<Self> {
        let name = server.name.clone();
        let make = move |lease| open(server.clone(), wanted, connect_timeout, lease).boxed();
        Arc::new(Self {
            name: name.clone(),
            connection: Renewed::new("redis connection", name, connect_timeout, make),
        })
    }

    /// One flight.
    ///
    /// # Errors
    /// When the server could not be asked. What it says, errors included, are values.
    pub(crate) async fn exchange(&self, batch: Batch<'_>, deadline: Deadline) -> Result<Answers, RedisError> {
        let mut connection = match self.connection.now() {
            Some(connection) => connection,
            None => deadline.bound(&self.name, self.connection.get()).await?,
        };
        let Connection { server, redis, lease } = &mut connection;
        match timeout_at(deadline.at, batch.send(redis)).await {
            Ok(Ok(values)) => {
                if let Some(reason) = values.iter().find_map(unfit) {
                    lease.retire(reason);
                }
                Ok(Answers { values, server: server.name.clone(), failure: None })
            }
            Ok(Err(why)) => {
                if why.is_unrecoverable_error() {
                    lease.retire("broken");
                }
                Err(RedisError::command(&server.name, why))
            }
            // Silence of a whole deadline: the link may be dead without a word, so the next command gets a new one.
            Err(_) => {
                lease.retire("silent");
                Err(deadline.missed(&server.name))
            }
        }
    }

    /// As [`Link::exchange`], for one command whose error is an error.
    pub(crate) async fn ask(&self, cmd: &Cmd, deadline: Deadline) -> Result<Value, RedisError> {
        let Answers { values, server, .. } = self.exchange(Batch::One(cmd), deadline).await?;
        let value = values.into_iter().next().unwrap_or(Value::Nil);
        value.extract_error().map_err(|why| RedisError::command(&server, why))
    }

    /// Keeps the connection open. Has no end.
    pub(crate) async fn keep(self: Arc<Self>, patience: Duration) {
        let link = self.clone();
        let look = move |_| link.clone().beat(patience).boxed();
        self.connection.clone().tend(HEARTBEAT, look).await;
    }

    /// A connection that does not answer is taken out of use, before a request finds out.
    pub(crate) async fn beat(self: Arc<Self>, patience: Duration) {
        // Whatever it says, a connection that cannot be used is retired by the exchange.
        drop(self.ask(&redis::cmd("PING"), Deadline::after(patience)).await);
    }
}

impl Connection {
    /// Takes it out of use.
    pub(crate) fn retire(&self, reason: &'static str) {
        self.lease.retire(reason);
    }
}

/// Why a server that says this is not to be asked again before it was looked at anew: it was demoted under us, it is
/// still reading its data, or it lost its master. Its name may stand for another server by now.
fn unfit(value: &Value) -> Option<&'static str> {
    let Value::ServerError(error) = value else { return None };
    match error.kind()? {
        ServerErrorKind::ReadOnly => Some("read-only"),
        ServerErrorKind::BusyLoading => Some("loading"),
        ServerErrorKind::MasterDown => Some("without its master"),
        _ => None,
    }
}

/// Connects, and finds out whether the server is what it should be and ready to answer.
pub(crate) async fn open(
    server: Arc<Server>,
    wanted: Wanted,
    connect_timeout: Duration,
    lease: Lease<Connection>,
) -> Result<Connection, RedisError> {
    let closed = lease.clone();
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(connect_timeout))
        // Deadlines are the caller's: they also cover the wait for a connection.
        .set_response_timeout(None)
        .set_pipeline_buffer_size(QUEUE)
        .set_push_sender(move |push: PushInfo| -> Result<(), ()> {
            if push.kind == PushKind::Disconnection {
                closed.retire("closed");
            }
            Ok(())
        });
    let connected = server.client.get_multiplexed_async_connection_with_config(&config).await;
    let mut redis = connected.map_err(|why| RedisError::connect(&server.name, why))?;

    // `HELLO` tells the role to every user, which `ROLE` does not; `PING` fails while the server reads its data.
    let mut pipe = Pipeline::with_capacity(2);
    pipe.ignore_errors().cmd("HELLO").cmd("PING");
    let answers: RedisResult<(RedisResult<About>, RedisResult<Value>)> = pipe.query_async(&mut redis).await;
    let (hello, ping) = match answers {
        Ok(answers) => answers,
        Err(why) => return Err(RedisError::connect(&server.name, why)),
    };
    let about = hello.map_err(|why| RedisError::connect(&server.name, why))?;
    let says = |field: &str| match about.get(field) {
        Some(Value::BulkString(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
        Some(Value::SimpleString(text)) => text.clone(),
        _ => String::new(),
    };
    if let Some(hint) = unwanted(wanted, &says("mode"), &says("role")) {
        let source = redis::RedisError::from((ErrorKind::Client, "it is not the server that is needed"));
        return Err(RedisError::Connect { server: server.name.clone(), hint, source });
    }
    ping.map_err(|why| RedisError::connect(&server.name, why))?;
    Ok(Connection { server, redis, lease })
}

/// What a server tells of itself.
type About = HashMap<String, Value>;

fn unwanted(wanted: Wanted, mode: &str, role: &str) -> Option<&'static str> {
    match (wanted, mode) {
        (Wanted::Master, "cluster") => {
            Some("it is a node of a Cluster; write the URL with `redis+cluster://`")
        }
        (Wanted::Master | Wanted::Node, "sentinel") => {
            Some("it is a Sentinel; write the URL with `redis+sentinel://` and the master's name")
        }
        (Wanted::Node, "standalone") => Some("it is no node of a Cluster; write the URL with `redis://`"),
        (Wanted::Sentinel, "cluster" | "standalone") => {
            Some("it is a Redis and no Sentinel; name the sentinels, or write the URL with `redis://`")
        }
        (Wanted::Master, _) if role != "master" => {
            Some("it is a read-only replica; name its master, or let Sentinel do so (`redis+sentinel://`)")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_must_be_what_the_url_says() {
        for (wanted, mode, role) in [
            (Wanted::Master, "standalone", "master"),
            (Wanted::Node, "cluster", "master"),
            (Wanted::Node, "cluster", "replica"),
            (Wanted::Sentinel, "sentinel", ""),
        ] {
            assert_eq!(unwanted(wanted, mode, role), None);
        }
        for (wanted, mode, role, expected) in [
            (Wanted::Master, "standalone", "replica", "read-only replica"),
            (Wanted::Master, "standalone", "slave", "read-only replica"),
            (Wanted::Master, "cluster", "master", "redis+cluster://"),
            (Wanted::Master, "sentinel", "", "redis+sentinel://"),
            (Wanted::Node, "sentinel", "", "redis+sentinel://"),
            (Wanted::Node, "standalone", "master", "no node of a Cluster"),
            (Wanted::Sentinel, "standalone", "master", "no Sentinel"),
        ] {
            assert!(unwanted(wanted, mode, role).unwrap().contains(expected));
        }
    }
}
