//! Listening to clients and to signals: a port that is taken is named, and a signal ends a server cleanly.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;

use obol_testkit::Failure;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Binds an address, or says what to do about it.
pub(crate) async fn bind(addr: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(addr).await.map_err(|why| {
        Failure::new(if why.kind() == io::ErrorKind::AddrInUse {
            let port = addr.port();
            format!(
                "{addr} is taken, perhaps by another demo that still runs; `ss -ltnp 'sport = :{port}'` shows by whom"
            )
        } else {
            format!("cannot listen on {addr}: {why}")
        })
    })
}

/// Serves until `SIGINT` or `SIGTERM`. Says on standard output where, once it listens: launchers wait for that line.
pub(crate) async fn serve(
    name: &str,
    addr: SocketAddr,
    path: &str,
    app: axum::Router,
) -> Result<ExitCode, Failure> {
    let listener = bind(addr).await?;
    let bound = listener.local_addr().map_err(|why| Failure::new(format!("no address: {why}")))?;
    // Before the line below: whoever reads it may send a signal at once.
    let mut signals = Signals::listen()?;
    writeln!(io::stdout(), "listening {name} http://{bound}{path}").ok();
    // Open streams do not hold it up: what ends here is a demo.
    tokio::select! {
        served = axum::serve(listener, app) => {
            served.map_err(|why| Failure::new(format!("cannot serve: {why}")))?;
        }
        _ = signals.next() => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// The signals that end a program of this crate.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

/// A signal that asks to end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    Interrupt,
    Terminate,
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
    pub(crate) async fn next(&mut self) -> Stop {
        tokio::select! {
            _ = self.interrupt.recv() => Stop::Interrupt,
            _ = self.terminate.recv() => Stop::Terminate,
        }
    }
}
