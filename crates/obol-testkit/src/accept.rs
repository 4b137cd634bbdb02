//! The accept loop under every server of the kit: it owns its connections, and it can stop and start listening on the
//! same port.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::port::Port;

/// A listener and the connections that it accepted. Dropping it closes all of them.
#[derive(Debug)]
pub(crate) struct Acceptor {
    addr: SocketAddr,
    orders: mpsc::Sender<(Order, oneshot::Sender<()>)>,
    counters: Arc<Counters>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug)]
enum Order {
    Refuse,
    Listen,
    CloseAll,
}

#[derive(Debug, Default)]
struct Counters {
    open: AtomicUsize,
    accepted: AtomicU64,
}

/// Counts a connection as open for as long as its task lives, however that ends.
struct Open(Arc<Counters>);

impl Open {
    fn count(counters: &Arc<Counters>) -> Self {
        counters.open.fetch_add(1, Ordering::SeqCst);
        counters.accepted.fetch_add(1, Ordering::SeqCst);
        Self(counters.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Acceptor {
    /// Accepts on a port of its own and runs `serve` for each connection.
    pub(crate) fn start<F, Fut>(serve: F) -> Self
    where
        F: Fn(TcpStream) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let port = Port::reserve();
        let listener = port.listen();
        Self::run(port.addr(), listener, Some(port), serve)
    }

    /// Accepts on a listener that the caller opened. Such a port is not reserved: it cannot be refused and reopened.
    pub(crate) fn on<F, Fut>(listener: TcpListener, serve: F) -> Self
    where
        F: Fn(TcpStream) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        Self::run(listener.local_addr().expect("the bound address"), listener, None, serve)
    }

    fn run<F, Fut>(addr: SocketAddr, listener: TcpListener, port: Option<Port>, serve: F) -> Self
    where
        F: Fn(TcpStream) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let (orders, inbox) = mpsc::channel(8);
        let counters = Arc::new(Counters::default());
        let task = tokio::spawn(accept(listener, port, inbox, counters.clone(), serve));
        Self { addr, orders, counters, _task: AbortOnDropHandle::new(task) }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Connections that are open now.
    pub(crate) fn open(&self) -> usize {
        self.counters.open.load(Ordering::SeqCst)
    }

    /// Connections accepted since the start.
    pub(crate) fn accepted(&self) -> u64 {
        self.counters.accepted.load(Ordering::SeqCst)
    }

    /// Closes every connection and the listener: once this returns, connecting is refused.
    pub(crate) async fn refuse(&self) {
        self.order(Order::Refuse).await;
    }

    /// Listens again, on the same port.
    pub(crate) async fn listen(&self) {
        self.order(Order::Listen).await;
    }

    /// Closes every connection and goes on listening.
    pub(crate) async fn close_all(&self) {
        self.order(Order::CloseAll).await;
    }

    async fn order(&self, order: Order) {
        let (done, obeyed) = oneshot::channel();
        self.orders.send((order, done)).await.expect("the accept loop runs as long as its handle");
        obeyed.await.expect("the accept loop runs as long as its handle");
    }
}

async fn accept<F, Fut>(
    listener: TcpListener,
    port: Option<Port>,
    mut inbox: mpsc::Receiver<(Order, oneshot::Sender<()>)>,
    counters: Arc<Counters>,
    serve: F,
) where
    F: Fn(TcpStream) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let mut listener = Some(listener);
    // Dropping the set aborts what is in it, so an aborted accept loop leaves no connection behind.
    let mut connections = JoinSet::new();
    loop {
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            order = inbox.recv() => {
                let Some((order, done)) = order else { return };
                match order {
                    Order::Refuse => {
                        listener = None;
                        connections.shutdown().await;
                    }
                    Order::Listen => {
                        if listener.is_none() {
                            listener = Some(port.as_ref().expect("only a port of our own reopens").listen());
                        }
                    }
                    Order::CloseAll => connections.shutdown().await,
                }
                done.send(()).ok();
            }
            accepted = accepted => {
                // Out of descriptors or a client that left before it was accepted: neither ends the server.
                let Ok((stream, _)) = accepted else { continue };
                drop(stream.set_nodelay(true));
                let open = Open::count(&counters);
                let connection = serve(stream);
                connections.spawn(async move {
                    connection.await;
                    drop(open);
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}
