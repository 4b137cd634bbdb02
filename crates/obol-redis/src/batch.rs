use futures::FutureExt as _;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, FromRedisValue, Pipeline, RedisFuture, RedisResult, Value};

/// What goes to a server in one flight.
#[derive(Clone, Copy)]
pub(crate) enum Batch<'a> {
    One(&'a Cmd),
    Many(&'a Pipeline),
}

impl<'a> Batch<'a> {
    pub(crate) fn commands(self) -> impl Iterator<Item = &'a Cmd> {
        let (one, many) = match self {
            Self::One(cmd) => (Some(cmd), None),
            Self::Many(pipe) => (None, Some(pipe.cmd_iter())),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    /// The commands at these positions, which ascend.
    pub(crate) fn at(self, positions: &[usize]) -> impl Iterator<Item = &'a Cmd> {
        let commands = self.commands().enumerate();
        commands.filter(|(position, _)| positions.binary_search(position).is_ok()).map(|(_, cmd)| cmd)
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(pipe) => pipe.len(),
        }
    }

    pub(crate) fn is_transaction(self) -> bool {
        matches!(self, Self::Many(pipe) if pipe.is_transaction())
    }

    /// The answers as they come, one per command; errors of the server are values here.
    pub(crate) async fn send(self, connection: &mut MultiplexedConnection) -> RedisResult<Vec<Value>> {
        match self {
            Self::One(cmd) => connection.send_packed_command(cmd).await.map(|value| vec![value]),
            Self::Many(pipe) => {
                let (skipped, answers) =
                    if pipe.is_transaction() { (pipe.len() + 1, 1) } else { (0, pipe.len()) };
                connection.send_packed_commands(pipe, skipped, answers).await
            }
        }
    }

    /// Reads the answers as the client library does: with what the pipeline ignores left out.
    pub(crate) async fn read<T: FromRedisValue>(self, answers: Vec<Value>) -> RedisResult<T> {
        let mut answers = Answered(answers);
        match self {
            Self::One(cmd) => cmd.query_async(&mut answers).await,
            Self::Many(pipe) => pipe.query_async(&mut answers).await,
        }
    }
}

/// Answers that are there already, in the place of a connection.
struct Answered(Vec<Value>);

impl ConnectionLike for Answered {
    fn req_packed_command<'a>(&'a mut self, _: &'a Cmd) -> RedisFuture<'a, Value> {
        let first = std::mem::take(&mut self.0).into_iter().next().unwrap_or(Value::Nil);
        std::future::ready(Ok(first)).boxed()
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        _: &'a Pipeline,
        _: usize,
        _: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        std::future::ready(Ok(std::mem::take(&mut self.0))).boxed()
    }

    fn get_db(&self) -> i64 {
        0
    }
}
