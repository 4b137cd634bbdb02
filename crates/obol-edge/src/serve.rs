use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use obol_drain::{Class, Tasks};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use crate::activity::{Activity, BusyBody, UnderWay};
use crate::patience::Patient;

/// Longest time for the head of a request, and longest time without any request.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// A connection that is to close gets this long for a request that was on its way.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Between two pings on HTTP/2: a peer that is gone without a word is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Bound of a request's head. Wide enough for an absurd access token, so that it gets the answer that says so.
const MAX_HEAD: usize = 128 << 10;

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

/// How connections are served.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Clients' connections are [`Class::Request`]: a drain waits for them. Probes and metrics are
    /// [`Class::Background`]: they answer until the process ends (DESIGN §13).
    pub class: Class,
    /// The most connections at once; more wait in the kernel's queue. Leaves descriptors for upstreams and probes.
    pub max_connections: usize,
    /// How long a peer may take nothing of what waits for it: then its connection is closed, and what was under way on it
    /// ends as if it had left.
    pub stall_timeout: Duration,
}

/// Accepts connections on `listener` and serves `router` until `stop`; each connection is a task.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tasks: Tasks,
    options: ServeOptions,
    stop: CancellationToken,
) {
    let places = Arc::new(Semaphore::new(options.max_connections.clamp(1, Semaphore::MAX_PERMITS)));
    loop {
        let accept = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = stop.cancelled() => return,
            accepted = accept => accepted,
        };
        match (place, accepted) {
            (Ok(place), Ok((stream, _))) => {
                let connection = connection(stream, router.clone(), options.stall_timeout, stop.clone());
                tasks.spawn(options.class, "connection", async move {
                    connection.await;
                    drop(place);
                });
            }
            (_, Err(e)) => {
                // Out of descriptors, or a peer that left in the queue: neither may end the listener or spin.
                tracing::warn!(error = %e, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            // The semaphore is never closed.
            (Err(_), _) => return,
        }
    }
}

async fn connection(stream: TcpStream, router: Router, stall_timeout: Duration, stop: CancellationToken) {
    // Small answers must not wait for the peer's acknowledgement.
    if let Err(e) = stream.set_nodelay(true) {
        tracing::debug!(error = %e, "cannot set nodelay");
    }
    let activity = Activity::new();
    let service = {
        let activity = activity.clone();
        service_fn(move |request: hyper::Request<Incoming>| {
            let (router, under_way) = (router.clone(), activity.begin());
            async move { Ok::<_, Infallible>(respond(router, request, under_way).await) }
        })
    };
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT).max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX));
    let stream = TokioIo::new(Patient::new(stream, stall_timeout));
    let connection = builder.serve_connection(stream, service);
    tokio::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = useless(&activity, &stop) => {
            // HTTP/1.1: `Connection: close` on the answer under way; HTTP/2: GOAWAY.
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                served = connection.as_mut() => served,
                // A request that was on its way when we decided to close is still answered; what is silent is dropped.
                () = activity.idle_for(CLOSE_GRACE) => return,
            }
        }
    };
    if let Err(e) = served {
        tracing::debug!(error = %e, "connection ended");
    }
}

/// Returns when the connection is to be closed: the drain says so, or it brings no request, whatever it is waiting for (a
/// preface, half a head).
async fn useless(activity: &Activity, stop: &CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = activity.idle_for(IDLE_TIMEOUT) => {}
    }
}

async fn respond(
    router: Router,
    request: hyper::Request<Incoming>,
    under_way: UnderWay,
) -> http::Response<BusyBody> {
    match router.oneshot(request.map(Body::new)).await {
        Ok(response) => response.map(|body| BusyBody::new(body, under_way)),
        Err(infallible) => match infallible {},
    }
}
