//! The clients: each has one connection, and for tool calls one session, and asks again as soon as it was answered.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use obol_testkit::Failure;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::exchange::{self, Connection};
use crate::work::{Mark, SESSION, Work};

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"obol-bench","version":"1"}}}"#;
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

/// Longest time until all clients are connected and initialized.
const PREPARED: Duration = Duration::from_secs(60);

/// A client whose answers keep being wrong stops: there is nothing to measure any more.
const PATIENCE: u64 = 10;

/// Where clients go and how they show themselves there.
#[derive(Debug, Clone)]
pub(crate) struct Door {
    pub(crate) addr: SocketAddr,
    /// The bearer, where one is asked for.
    pub(crate) key: Option<String>,
    /// What the upstream's `echo` is called there.
    pub(crate) tool: &'static str,
}

/// What one cell of the table takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) work: Work,
    pub(crate) clients: usize,
    pub(crate) warm_up: Duration,
    pub(crate) seconds: Duration,
}

/// What the clients of one cell saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// How long each right answer took, in microseconds, sorted.
    pub(crate) latencies: Vec<u32>,
    pub(crate) wrong: u64,
    /// The first wrong answer, in words.
    pub(crate) example: Option<String>,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.latencies.extend(other.latencies);
        self.wrong += other.wrong;
        self.example = self.example.take().or(other.example);
    }

    fn complain(&mut self, why: String) {
        self.wrong += 1;
        self.example.get_or_insert(why);
    }
}

/// The time in which answers count.
#[derive(Debug, Clone, Copy)]
struct Window {
    from: Instant,
    until: Instant,
}

/// Clients that are ready to go.
pub(crate) struct Crowd {
    clients: JoinSet<Result<Seen, Failure>>,
    go: watch::Sender<Option<Window>>,
    load: Load,
}

impl Crowd {
    /// Connects all clients and waits until they can start.
    pub(crate) async fn gather(door: &Door, load: Load) -> Result<Self, Failure> {
        let (go, wait) = watch::channel(None);
        let (ready, mut readiness) = mpsc::channel(load.clients);
        let door = Arc::new(door.clone());
        let mut clients = JoinSet::new();
        for number in 0..load.clients {
            clients.spawn(client(door.clone(), load.work, number, ready.clone(), wait.clone()));
        }
        drop(ready);
        let all = async {
            for _ in 0..load.clients {
                if readiness.recv().await.is_none() {
                    return;
                }
            }
        };
        tokio::time::timeout(PREPARED, async {
            tokio::select! {
                biased;
                () = all => Ok(()),
                Some(ended) = clients.join_next() => Err(why(ended)),
            }
        })
        .await
        .unwrap_or_else(|_| Err(Failure::new(format!("the clients were not ready within {PREPARED:?}"))))?;
        Ok(Self { clients, go, load })
    }

    /// Lets them go. `at` is called when the window opens and when it closes.
    pub(crate) async fn run(mut self, mut at: impl FnMut() -> Result<(), Failure>) -> Result<Seen, Failure> {
        let from = Instant::now() + self.load.warm_up;
        let window = Window { from, until: from + self.load.seconds };
        self.go.send_replace(Some(window));
        tokio::time::sleep_until(window.from).await;
        at()?;
        tokio::time::sleep_until(window.until).await;
        at()?;
        let mut seen = Seen::default();
        while let Some(ended) = self.clients.join_next().await {
            match ended {
                Ok(Ok(one)) => seen.add(one),
                ended => return Err(why(ended)),
            }
        }
        seen.latencies.sort_unstable();
        Ok(seen)
    }
}

fn why(ended: Result<Result<Seen, Failure>, tokio::task::JoinError>) -> Failure {
    match ended {
        Ok(Err(why)) => why,
        Ok(Ok(_)) => Failure::new("a client ended before it was told to start"),
        Err(why) => Failure::new(format!("a client broke: {why}")),
    }
}

async fn client(
    door: Arc<Door>,
    work: Work,
    number: usize,
    ready: mpsc::Sender<()>,
    mut go: watch::Receiver<Option<Window>>,
) -> Result<Seen, Failure> {
    let (mut connection, moving) = exchange::open(door.addr).await?;
    let asking = async {
        let headers = prepare(&mut connection, &door, work).await?;
        ready.send(()).await.map_err(|_| Failure::new("the run was given up"))?;
        drop(ready);
        let window = go.wait_for(Option::is_some).await.ok().and_then(|window| *window);
        let window = window.ok_or_else(|| Failure::new("the run was given up"))?;
        let seen = ask(&mut connection, &headers, door.tool, work, number, window).await;
        if work == Work::ToolCalls {
            // Leaves the place as it was found. Whether that works is not what is measured.
            drop(connection.exchange(Method::DELETE, work.path(), &headers, Bytes::new()).await);
        }
        Ok(seen)
    };
    tokio::select! {
        biased;
        never = moving => match never {},
        seen = asking => seen,
    }
}

/// The headers of every further request; for tool calls with a session that was initialized.
async fn prepare(connection: &mut Connection, door: &Door, work: Work) -> Result<HeaderMap, Failure> {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(key) = &door.key {
        let bearer = HeaderValue::try_from(format!("Bearer {key}"));
        headers.insert(header::AUTHORIZATION, bearer.map_err(|_| Failure::new("the key fits no header"))?);
    }
    if work != Work::ToolCalls {
        return Ok(headers);
    }
    headers.insert(header::ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
    let post = async |connection: &mut Connection, headers: &HeaderMap, body: &'static str, expected| {
        let answered =
            connection.exchange(Method::POST, work.path(), headers, Bytes::from_static(body.as_bytes()));
        let answered = answered.await.map_err(|why| Failure::new(format!("no session: {why}")))?;
        if answered.status == expected {
            return Ok(answered);
        }
        let said = String::from_utf8_lossy(&answered.body).into_owned();
        Err(Failure::new(format!("no session at {}: {} {said}", door.addr, answered.status)))
    };
    let opened = post(connection, &headers, INITIALIZE, StatusCode::OK).await?;
    let session = opened.headers.get(SESSION).ok_or_else(|| Failure::new("`initialize` gave no session"))?;
    headers.insert(HeaderName::from_static(SESSION), session.clone());
    headers.insert(HeaderName::from_static("mcp-protocol-version"), HeaderValue::from_static("2025-11-25"));
    post(connection, &headers, INITIALIZED, StatusCode::ACCEPTED).await?;
    Ok(headers)
}

async fn ask(
    connection: &mut Connection,
    headers: &HeaderMap,
    tool: &str,
    work: Work,
    client: usize,
    window: Window,
) -> Seen {
    let mut seen = Seen::default();
    for number in 1.. {
        let mark = Mark::new(client, number);
        let body = work.body(number, &mark, tool);
        let asked = Instant::now();
        let answered = connection.exchange(Method::POST, work.path(), headers, body).await;
        let now = Instant::now();
        match answered {
            Err(why) => {
                seen.complain(why);
                // The connection is in an unknown state.
                break;
            }
            Ok(answered) => {
                let checked = match answered.status {
                    StatusCode::OK => work.check(number, &mark, &answered.body).map_err(str::to_owned),
                    status => Err(format!("status {status}")),
                };
                if let Err(why) = checked {
                    let body = String::from_utf8_lossy(&answered.body);
                    seen.complain(format!("{why}: {}", body.chars().take(600).collect::<String>()));
                } else if now >= window.from && now < window.until {
                    let took = (now - asked).as_micros();
                    seen.latencies.push(u32::try_from(took).unwrap_or(u32::MAX));
                }
            }
        }
        if now >= window.until || seen.wrong >= PATIENCE {
            break;
        }
    }
    seen
}
