use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use obol_drain::{Class, Tasks};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// Longest time for the head of a request, and between two requests of one connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(60);
/// Bound of a request's head.
const MAX_HEAD: usize = 64 << 10;

/// Listeners that are bound already, so that a taken port fails the start.
#[derive(Debug)]
pub struct Listeners {
    /// `OBOL_LISTEN`.
    pub public: TcpListener,
    /// `OBOL_ADMIN_LISTEN`; `None` serves everything on the public one.
    pub admin: Option<TcpListener>,
}

impl Listeners {
    /// Binds both; equal addresses are one listener.
    ///
    /// # Errors
    /// Names the address that cannot be bound.
    pub async fn bind(public: SocketAddr, admin: SocketAddr) -> io::Result<Self> {
        let bind = async |address: SocketAddr| {
            TcpListener::bind(address)
                .await
                .map_err(|e| io::Error::new(e.kind(), format!("cannot listen on {address}: {e}")))
        };
        // Port 0 is another port each time, never one shared port.
        let one = public == admin && public.port() != 0;
        Ok(Self { public: bind(public).await?, admin: if one { None } else { Some(bind(admin).await?) } })
    }
}

/// Accepts connections on `listener` and serves `router` until `stop`; each connection is a task of `class`.
///
/// Clients' connections are [`Class::Request`] and stop with the drain, which waits for them. Probes and metrics are
/// [`Class::Background`]: they answer until the process ends (DESIGN §13).
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tasks: Tasks,
    class: Class,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(class, "connection", connection(stream, router.clone(), stop.clone()));
            }
            Err(e) => {
                // Out of descriptors, or a peer that left in the queue: neither may end the listener or spin.
                tracing::warn!(error = %e, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken) {
    // Small answers must not wait for the peer's acknowledgement.
    if let Err(e) = stream.set_nodelay(true) {
        tracing::debug!(error = %e, "cannot set nodelay");
    }
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let router = router.clone();
        async move { Ok::<_, Infallible>(respond(router, request).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX));
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = stop.cancelled() => {
            // HTTP/1.1: `Connection: close` on the answer under way; HTTP/2: GOAWAY. Idle connections close at once.
            connection.as_mut().graceful_shutdown();
            connection.as_mut().await
        }
    };
    if let Err(e) = served {
        tracing::debug!(error = %e, "connection ended");
    }
}

async fn respond(router: Router, request: hyper::Request<Incoming>) -> http::Response<Body> {
    match router.oneshot(request.map(Body::new)).await {
        Ok(response) => response,
        Err(infallible) => match infallible {},
    }
}
