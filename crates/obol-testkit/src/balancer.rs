//! A load balancer without stickiness.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1 as client;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, RwLock};
use tokio::net::{TcpListener, TcpStream};

use crate::accept::Acceptor;
use crate::answer::origin;

/// Names the backend that answered, by its index.
pub const BACKEND: HeaderName = HeaderName::from_static("x-obol-backend");

/// What belongs to one hop and is not passed on.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// An HTTP/1.1 balancer that sends every *request*, not every connection, to the next backend. Only a connect that
/// fails makes it try the one after; whatever happens later is the client's to see, as with any balancer that does
/// not know which requests are safe to repeat. Bodies stream both ways, `Host` passes unchanged.
///
/// It opens a connection to the backend for each request. With a pool, a request could meet a connection whose
/// backend was just killed, and a test could not tell that failure from one of the product.
#[derive(Debug)]
pub struct Balancer {
    acceptor: Acceptor,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    backends: RwLock<Vec<Backend>>,
    next: AtomicUsize,
    bearer: RwLock<Option<HeaderValue>>,
    sessions: Mutex<BTreeMap<String, BTreeSet<usize>>>,
}

/// MCP sessions remembered: more than any test opens, and a benchmark is not slowed down.
const KEPT_SESSIONS: usize = 1024;

#[derive(Debug, Clone)]
struct Backend {
    addr: SocketAddr,
    hits: Arc<AtomicU64>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The bearer is a credential.
        f.debug_struct("Shared").field("backends", &self.backends).finish_non_exhaustive()
    }
}

type AnyBody = Either<Incoming, Full<Bytes>>;

impl Balancer {
    /// Starts one on a port of its own.
    pub async fn start(backends: Vec<SocketAddr>) -> Self {
        Self::assemble(backends, Acceptor::start)
    }

    /// Starts one on a listener that the caller opened.
    pub async fn start_on(listener: TcpListener, backends: Vec<SocketAddr>) -> Self {
        Self::assemble(backends, |serve| Acceptor::on(listener, serve))
    }

    fn assemble(
        backends: Vec<SocketAddr>,
        accept: impl FnOnce(Box<dyn Fn(TcpStream) -> futures::future::BoxFuture<'static, ()> + Send>) -> Acceptor,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let for_connections = shared.clone();
        let acceptor = accept(Box::new(move |stream| Box::pin(serve(stream, for_connections.clone()))));
        let balancer = Self { acceptor, shared };
        balancer.set_backends(backends);
        balancer
    }

    /// Adds `Authorization: Bearer KEY` to requests that bring no credential of their own.
    #[must_use]
    pub fn with_bearer(self, key: &str) -> Self {
        self.set_bearer(Some(key));
        self
    }

    /// Changes or ends what [`Balancer::with_bearer`] began.
    pub fn set_bearer(&self, key: Option<&str>) {
        let value = key.map(|key| {
            let mut value = HeaderValue::try_from(format!("Bearer {key}")).expect("a key is a header value");
            value.set_sensitive(true);
            value
        });
        *self.shared.bearer.write() = value;
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.acceptor.addr()
    }

    /// `http://127.0.0.1:PORT`
    pub fn base_url(&self) -> String {
        origin(self.addr())
    }

    /// Replaces the backends. An index keeps its hits.
    pub fn set_backends(&self, backends: Vec<SocketAddr>) {
        let mut current = self.shared.backends.write();
        let hits = |index: usize| current.get(index).map(|backend| backend.hits.clone()).unwrap_or_default();
        let replaced = backends
            .into_iter()
            .enumerate()
            .map(|(index, addr)| Backend { addr, hits: hits(index) })
            .collect();
        *current = replaced;
    }

    /// Requests sent to each backend, by index.
    pub fn hits(&self) -> Vec<u64> {
        self.shared.backends.read().iter().map(|backend| backend.hits.load(Ordering::SeqCst)).collect()
    }

    /// Which backends were sent requests of each MCP session, by its id; the first thousand sessions.
    pub fn sessions(&self) -> BTreeMap<String, BTreeSet<usize>> {
        self.shared.sessions.lock().clone()
    }

    /// Client connections that are open now.
    pub fn connections(&self) -> usize {
        self.acceptor.open()
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let service = service_fn(move |request| forward(request, shared.clone()));
    drop(server::Builder::new().serve_connection(TokioIo::new(stream), service).await);
}

async fn forward(
    mut request: Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<Response<AnyBody>, Infallible> {
    strip(request.headers_mut());
    if !request.headers().contains_key(header::AUTHORIZATION)
        && !request.headers().contains_key("x-api-key")
        && let Some(bearer) = &*shared.bearer.read()
    {
        request.headers_mut().insert(header::AUTHORIZATION, bearer.clone());
    }
    if let Some(path) = request.uri().path_and_query() {
        *request.uri_mut() = Uri::from(path.clone());
    }

    let backends = shared.backends.read().clone();
    let first = shared.next.fetch_add(1, Ordering::SeqCst);
    let mut refused = Vec::new();
    for step in 0..backends.len() {
        let index = (first + step) % backends.len();
        let backend = &backends[index];
        match TcpStream::connect(backend.addr).await {
            Ok(stream) => {
                drop(stream.set_nodelay(true));
                backend.hits.fetch_add(1, Ordering::SeqCst);
                shared.note_session(request.headers(), index);
                return Ok(pass(stream, request, index).await);
            }
            Err(why) => refused.push(format!("{}: {why}\n", backend.addr)),
        }
    }
    Ok(bad_gateway(format!("no backend accepts a connection\n{}", refused.concat())))
}

async fn pass(stream: TcpStream, request: Request<Incoming>, index: usize) -> Response<AnyBody> {
    let sent = async {
        let (mut sender, connection) = client::handshake(TokioIo::new(stream)).await?;
        // Ends by itself: with the answer's last byte, or when the client or the backend is gone.
        tokio::spawn(connection);
        sender.send_request(request).await
    };
    let mut response = match sent.await {
        Ok(response) => response.map(Either::Left),
        Err(why) => bad_gateway(format!("backend {index} did not answer: {why}\n")),
    };
    strip(response.headers_mut());
    response.headers_mut().insert(BACKEND, HeaderValue::from(index));
    response
}

impl Shared {
    fn note_session(&self, headers: &HeaderMap, backend: usize) {
        let Some(session) = headers.get("mcp-session-id").and_then(|value| value.to_str().ok()) else {
            return;
        };
        let mut sessions = self.sessions.lock();
        if sessions.len() < KEPT_SESSIONS || sessions.contains_key(session) {
            sessions.entry(session.to_owned()).or_default().insert(backend);
        }
    }
}

fn strip(headers: &mut HeaderMap) {
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

fn bad_gateway(text: String) -> Response<AnyBody> {
    let mut response = Response::new(Either::Right(Full::from(text)));
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::StreamExt as _;
    use http_body_util::BodyExt as _;
    use tokio::sync::mpsc;

    use super::*;
    use crate::answer::{self, AnswerBody};
    use crate::eventually;
    use crate::port::Port;

    const SOON: Duration = Duration::from_secs(10);

    /// Answers with its name, the headers of interest, and the request's body.
    async fn backend(name: &'static str) -> Acceptor {
        Acceptor::start(move |stream| {
            answer::serve(stream, move |request| async move {
                let header = |name| {
                    request.headers().get(name).map_or("-", |value| value.to_str().unwrap()).to_owned()
                };
                let head =
                    format!("{name} {} {} {} ", request.uri(), header("host"), header("authorization"));
                let body = request.into_body().collect().await.unwrap().to_bytes();
                Ok(answer::answer(
                    StatusCode::OK,
                    "text/plain",
                    AnswerBody::full([head.as_bytes(), &body].concat()),
                ))
            })
        })
    }

    async fn get(balancer: &Balancer) -> (String, String) {
        let request = reqwest::Client::new().post(format!("{}/a/b?c=d", balancer.base_url()));
        let response = request.header("host", "example.test").body("hello").send().await.unwrap();
        let index = response.headers().get(BACKEND).map_or("-", |value| value.to_str().unwrap()).to_owned();
        (index, response.text().await.unwrap())
    }

    #[tokio::test]
    async fn each_request_goes_to_the_next_backend_unchanged() {
        let backends = [backend("zero").await, backend("one").await, backend("two").await];
        let balancer = Balancer::start(backends.iter().map(Acceptor::addr).collect()).await;
        for expected in ["0 zero", "1 one", "2 two", "0 zero"] {
            let (index, text) = get(&balancer).await;
            assert_eq!(format!("{index} {text}"), format!("{expected} /a/b?c=d example.test - hello"));
        }
        assert_eq!(balancer.hits(), [2, 1, 1]);
    }

    #[tokio::test]
    async fn one_connection_is_spread_over_backends_too() {
        let backends = [backend("zero").await, backend("one").await];
        let balancer = Balancer::start(backends.iter().map(Acceptor::addr).collect()).await;
        let client = reqwest::Client::new();
        for _ in 0..4 {
            client.get(balancer.base_url()).send().await.unwrap().bytes().await.unwrap();
        }
        assert_eq!(balancer.hits(), [2, 2]);
        assert_eq!(balancer.acceptor.accepted(), 1);
    }

    #[tokio::test]
    async fn it_tells_which_backends_a_session_met() {
        let backends = [backend("zero").await, backend("one").await];
        let balancer = Balancer::start(backends.iter().map(Acceptor::addr).collect()).await;
        for session in ["a", "b", "a", "a"] {
            let request = reqwest::Client::new().get(balancer.base_url()).header("mcp-session-id", session);
            request.send().await.unwrap();
        }
        let expected = [("a", vec![0, 1]), ("b", vec![1])];
        let expected = expected.map(|(session, met)| (session.to_owned(), BTreeSet::from_iter(met)));
        assert_eq!(balancer.sessions(), BTreeMap::from(expected));
    }

    #[tokio::test]
    async fn only_a_failed_connect_moves_on() {
        let (dead, cutting) = (Port::reserve(), Acceptor::start(|stream| async { drop(stream) }));
        let alive = backend("alive").await;
        let balancer = Balancer::start(vec![dead.addr(), alive.addr()]).await;
        for _ in 0..2 {
            assert_eq!(get(&balancer).await.0, "1");
        }
        assert_eq!(balancer.hits(), [0, 2]);

        balancer.set_backends(vec![cutting.addr(), alive.addr()]);
        let (index, text) = get(&balancer).await;
        assert!(index == "0" && text.contains("did not answer"), "{index} {text}");
        balancer.set_backends(vec![dead.addr()]);
        let (index, text) = get(&balancer).await;
        assert!(index == "-" && text.contains("no backend accepts"), "{index} {text}");
    }

    #[tokio::test]
    async fn a_bearer_is_added_only_where_there_is_no_credential() {
        let backend = backend("b").await;
        let balancer = Balancer::start(vec![backend.addr()]).await.with_bearer("k");
        let send = async |name: Option<&'static str>| {
            let mut request = reqwest::Client::new().get(balancer.base_url());
            if let Some(name) = name {
                request = request.header(name, "mine");
            }
            request.send().await.unwrap().text().await.unwrap()
        };
        assert!(send(None).await.contains(" Bearer k "));
        assert!(send(Some("authorization")).await.contains(" mine "));
        assert!(send(Some("x-api-key")).await.contains(" - "));
        balancer.set_bearer(None);
        assert!(send(None).await.contains(" - "));
    }

    #[tokio::test]
    async fn events_arrive_as_they_are_sent_and_a_client_that_leaves_is_noticed() {
        let (feeds, mut fed) = mpsc::channel(1);
        let backend = Acceptor::start(move |stream| {
            let feeds = feeds.clone();
            answer::serve(stream, move |_| {
                let feeds = feeds.clone();
                async move {
                    let (feed, body) = AnswerBody::channel(1);
                    feeds.send(feed).await.unwrap();
                    Ok(answer::answer(StatusCode::OK, "text/event-stream", body))
                }
            })
        });
        let balancer = Balancer::start(vec![backend.addr()]).await;
        let response = reqwest::Client::new().get(balancer.base_url()).send().await.unwrap();
        let feed = fed.recv().await.unwrap();
        let mut body = response.bytes_stream();
        for event in ["data: 1\n\n", "data: 2\n\n"] {
            feed.send(Ok(Bytes::from_static(event.as_bytes()))).await.unwrap();
            assert_eq!(body.next().await.unwrap().unwrap(), event);
        }
        drop(body);
        eventually(SOON, || async { feed.is_closed() }).await;
    }

    #[tokio::test]
    async fn a_request_body_streams_through() {
        let (parts, mut arrived) = mpsc::channel(4);
        let backend = Acceptor::start(move |stream| {
            let parts = parts.clone();
            answer::serve(stream, move |request: Request<Incoming>| {
                let parts = parts.clone();
                async move {
                    let mut body = request.into_body().into_data_stream();
                    while let Some(part) = body.next().await {
                        parts.send(part.unwrap()).await.unwrap();
                    }
                    Ok(answer::bare(StatusCode::NO_CONTENT))
                }
            })
        });
        let balancer = Balancer::start(vec![backend.addr()]).await;
        let (send, receive) = mpsc::channel::<Result<Bytes, std::io::Error>>(1);
        let body = reqwest::Body::wrap_stream(futures::stream::unfold(receive, |mut receive| async {
            receive.recv().await.map(|part| (part, receive))
        }));
        let response = tokio::spawn(reqwest::Client::new().post(balancer.base_url()).body(body).send());
        for part in ["one", "two"] {
            send.send(Ok(Bytes::from_static(part.as_bytes()))).await.unwrap();
            assert_eq!(arrived.recv().await.unwrap(), part);
        }
        drop(send);
        assert_eq!(response.await.unwrap().unwrap().status(), StatusCode::NO_CONTENT);
    }
}
