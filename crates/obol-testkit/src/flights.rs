//! Counting round trips to Redis.
//!
//! A *flight* is a group of commands sent without having received a reply in between: what a client has to wait for
//! once. A pipeline is one flight, and so are commands that two tasks write to one connection before either is
//! answered; a command that is sent after a reply came starts the next one, also when other replies are outstanding,
//! since it may have waited for that reply. Flights are counted per connection and summed.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::accept::Acceptor;
use crate::resp::Frames;

/// What sets up and keeps up a connection, rather than doing a request's work.
const HOUSEKEEPING: [&str; 5] = ["AUTH", "CLIENT", "HELLO", "PING", "SELECT"];

/// A proxy in front of a Redis that counts flights. Pub/sub traffic and, unless told otherwise, `PING`, `HELLO`,
/// `AUTH`, `SELECT` and `CLIENT` are not counted. It speaks plain RESP2 and RESP3, not TLS, and does not know
/// `CLIENT REPLY`.
#[derive(Debug)]
pub struct CountingProxy {
    acceptor: Acceptor,
    tally: Arc<Tally>,
}

struct Tally {
    counted: Box<dyn Fn(&str) -> bool + Send + Sync>,
    state: Mutex<State>,
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.lock().fmt(f)
    }
}

#[derive(Debug, Default)]
struct State {
    /// The number of the first flight in `flights`: moves on with each reset, so that a connection cannot append to
    /// a flight that was forgotten.
    base: usize,
    flights: Vec<Vec<String>>,
    lost: Option<String>,
}

impl CountingProxy {
    /// Starts a proxy to the Redis at `target` on a port of its own.
    pub async fn start(target: SocketAddr) -> Self {
        Self::counting(target, |name| !HOUSEKEEPING.contains(&name)).await
    }

    /// The same, counting only the commands (upper-case names) for which `counted` holds.
    pub async fn counting(
        target: SocketAddr,
        counted: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        let tally = Arc::new(Tally { counted: Box::new(counted), state: Mutex::default() });
        let shared = tally.clone();
        let acceptor = Acceptor::start(move |client| relay(client, target, shared.clone()));
        Self { acceptor, tally }
    }

    /// Where to connect instead of the Redis.
    pub fn addr(&self) -> SocketAddr {
        self.acceptor.addr()
    }

    /// `redis://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Flights since the start or the last reset.
    ///
    /// # Panics
    /// When a connection carried something that could not be followed: the count would be wrong.
    pub fn flights(&self) -> usize {
        self.commands().len()
    }

    /// The commands of each flight, in the order in which the flights began.
    ///
    /// # Panics
    /// As [`CountingProxy::flights`].
    pub fn commands(&self) -> Vec<Vec<String>> {
        let state = self.tally.state.lock();
        if let Some(why) = &state.lost {
            panic!("the counting proxy could not follow a connection: {why}");
        }
        state.flights.clone()
    }

    /// Forgets what was counted. What is in flight right now is not counted afterwards either, but what is sent
    /// next starts a new flight.
    pub fn reset(&self) {
        let mut state = self.tally.state.lock();
        state.base += state.flights.len();
        state.flights.clear();
    }
}

/// One connection's place in the conversation.
#[derive(Debug, Default)]
struct Link {
    commands: Frames,
    replies: Frames,
    /// The commands whose replies are outstanding: whether each is counted.
    waiting: VecDeque<bool>,
    /// The flight that a further command joins, while no reply came.
    current: Option<usize>,
    resp3: bool,
    /// Switched to pub/sub (or lost): bytes are passed on unread.
    opaque: bool,
}

impl Link {
    fn sent(&mut self, bytes: &[u8], tally: &Tally) -> Result<(), String> {
        if self.opaque {
            return Ok(());
        }
        self.commands.feed(bytes);
        while let Some((name, argument)) = self.commands.next_command()? {
            if name.ends_with("SUBSCRIBE") || name == "MONITOR" {
                if !self.resp3 || name == "MONITOR" {
                    self.opaque = true;
                    return Ok(());
                }
                // In RESP3 its confirmations are pushes, not replies.
                continue;
            }
            self.resp3 |= name == "HELLO" && argument.as_deref() == Some("3");
            let counted = (tally.counted)(&name);
            self.waiting.push_back(counted);
            if counted {
                self.fly(name, &mut tally.state.lock());
            }
        }
        Ok(())
    }

    fn fly(&mut self, name: String, state: &mut State) {
        if let Some(index) = self.current.and_then(|number| number.checked_sub(state.base)) {
            state.flights[index].push(name);
        } else {
            self.current = Some(state.base + state.flights.len());
            state.flights.push(vec![name]);
        }
    }

    fn received(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.opaque {
            return Ok(());
        }
        self.replies.feed(bytes);
        while let Some(kind) = self.replies.next_reply()? {
            if kind == b'>' {
                continue;
            }
            if self.waiting.pop_front().ok_or("a reply to no command")? {
                self.current = None;
            }
        }
        Ok(())
    }
}

async fn relay(client: TcpStream, target: SocketAddr, tally: Arc<Tally>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    drop(server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let link = Mutex::new(Link::default());
    let watch = |outcome: Result<(), String>| {
        if let Err(why) = outcome {
            link.lock().opaque = true;
            tally.state.lock().lost.get_or_insert(why);
        }
    };
    // Seen before it is passed on: a reply is never met before its command.
    let up = pump(from_client, to_server, |bytes| {
        let outcome = link.lock().sent(bytes, &tally);
        watch(outcome);
    });
    let down = pump(from_server, to_client, |bytes| {
        let outcome = link.lock().received(bytes);
        watch(outcome);
    });
    drop(tokio::try_join!(up, down));
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, see: impl Fn(&[u8])) -> std::io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        see(&buffer[..read]);
        to.write_all(&buffer[..read]).await?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redis::AsyncCommands as _;

    use super::*;
    use crate::eventually;
    use crate::redis::RedisServer;

    async fn connect(proxy: &CountingProxy, parameters: &str) -> redis::aio::MultiplexedConnection {
        let client = redis::Client::open(format!("{}{parameters}", proxy.url())).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }

    #[tokio::test]
    async fn a_pipeline_is_one_flight_and_a_sequence_is_several() {
        let server = RedisServer::start().await;
        for parameters in ["", "/?protocol=resp3"] {
            let proxy = CountingProxy::start(server.addr()).await;
            let mut connection = connect(&proxy, parameters).await;
            assert_eq!(proxy.flights(), 0, "connecting counts nothing: {:?}", proxy.commands());

            let () =
                redis::pipe().set("a", 1).incr("a", 1).get("a").query_async(&mut connection).await.unwrap();
            assert_eq!(proxy.commands(), [["SET", "INCRBY", "GET"]]);

            let _: Option<u32> = connection.get("a").await.unwrap();
            let _: Option<u32> = connection.get("b").await.unwrap();
            assert_eq!(proxy.commands().len(), 3);

            proxy.reset();
            let () = redis::cmd("PING").query_async(&mut connection).await.unwrap();
            assert_eq!(proxy.flights(), 0);
            let big = "x".repeat(100_000);
            let () = connection.set("big", &big).await.unwrap();
            assert_eq!(connection.get::<_, String>("big").await.unwrap(), big);
            assert_eq!(proxy.commands(), [["SET"], ["GET"]]);
        }
    }

    #[tokio::test]
    async fn publishing_counts_and_being_told_does_not() {
        let server = RedisServer::start().await;
        let proxy = CountingProxy::start(server.addr()).await;
        let client = redis::Client::open(proxy.url()).unwrap();
        let mut pubsub = client.get_async_pubsub().await.unwrap();
        pubsub.subscribe("news").await.unwrap();
        let mut connection = connect(&proxy, "").await;
        assert_eq!(proxy.flights(), 0);
        eventually(Duration::from_secs(5), async || {
            connection.clone().publish::<_, _, u32>("news", "hello").await.unwrap() == 1
        })
        .await;
        let message: String = {
            use futures::StreamExt as _;
            pubsub.on_message().next().await.unwrap().get_payload().unwrap()
        };
        assert_eq!(message, "hello");
        let _: Option<u32> = connection.get("a").await.unwrap();
        assert_eq!(proxy.commands(), [["PUBLISH"], ["GET"]]);
    }

    #[test]
    fn a_command_after_a_reply_starts_a_new_flight_even_with_replies_outstanding() {
        let tally = Tally { counted: Box::new(|name| name != "PING"), state: Mutex::default() };
        let mut link = Link::default();
        link.sent(b"GET a\r\nGET b\r\n", &tally).unwrap();
        link.received(b"$-1\r\n").unwrap();
        link.sent(b"PING\r\nGET c\r\n", &tally).unwrap();
        link.received(b"$-1\r\n+PONG\r\n").unwrap();
        link.sent(b"GET d\r\n", &tally).unwrap();
        let names: Vec<usize> = tally.state.lock().flights.iter().map(Vec::len).collect();
        assert_eq!(names, [2, 1, 1]);
        assert!(link.received(b"$-1\r\n$-1\r\n$-1\r\n").is_err(), "a reply too many is noticed");
    }

    #[test]
    fn a_reset_in_mid_flight_forgets_it() {
        let tally = Tally { counted: Box::new(|_| true), state: Mutex::default() };
        let mut link = Link::default();
        link.sent(b"GET a\r\n", &tally).unwrap();
        {
            let mut state = tally.state.lock();
            state.base += state.flights.len();
            state.flights.clear();
        }
        link.sent(b"GET b\r\n", &tally).unwrap();
        assert_eq!(tally.state.lock().flights, [["GET"]]);
    }
}
