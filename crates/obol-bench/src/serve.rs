//! Serving HTTP/1.1 with hyper and nothing else, until a signal.

use std::convert::Infallible;
use std::error::Error;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use obol_testkit::Failure;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

/// What a role says before its address; whoever started it waits for that line.
pub(crate) const LISTENING: &str = "listening http://";

/// Serves until `SIGINT` or `SIGTERM`; connections that are open then are cut.
pub(crate) async fn serve<H, F, B>(listen: SocketAddr, handle: H) -> Result<ExitCode, Failure>
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let failed = |why: io::Error| Failure::new(format!("cannot listen on {listen}: {why}"));
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    // Before the line below: whoever reads it may send a signal at once.
    let mut signals = Signals::listen()?;
    writeln!(io::stdout(), "{LISTENING}{bound}").ok();
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(why) => return Err(Failure::new(format!("cannot accept: {why}"))),
            },
            Some(_) = connections.join_next() => continue,
            () = signals.next() => return Ok(ExitCode::SUCCESS),
        };
        // Small answers must not wait for the peer's acknowledgement.
        stream.set_nodelay(true).ok();
        let handle = handle.clone();
        let service = service_fn(move |request| {
            let answer = handle(request);
            async move { Ok::<_, Infallible>(answer.await) }
        });
        // It fails when a client leaves, which is how each of them ends.
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        connections.spawn(async move { drop(connection.await) });
    }
}

/// The signals that end a process of the benchmark.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn listen() -> Result<Self, Failure> {
        let failed = |why| Failure::new(format!("cannot listen to signals: {why}"));
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            terminate: signal(SignalKind::terminate()).map_err(failed)?,
        })
    }

    /// The next one. Cancel-safe.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
