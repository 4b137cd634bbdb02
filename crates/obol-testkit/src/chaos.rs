//! A TCP link that can be cut, stalled and slowed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::accept::Acceptor;

/// Chunks read ahead of a slow or stalled side, per connection and direction.
const READ_AHEAD: usize = 64;

/// A proxy in front of one address. Everything passes until it is told otherwise.
#[derive(Debug)]
pub struct ChaosProxy {
    acceptor: Acceptor,
    link: Arc<Link>,
}

#[derive(Debug)]
struct Link {
    target: SocketAddr,
    stalled: watch::Sender<bool>,
    delay_us: AtomicU64,
}

impl Link {
    /// Returns at once while bytes may flow.
    async fn flowing(&self) {
        // The sender lives in `self`, so this cannot fail.
        drop(self.stalled.subscribe().wait_for(|stalled| !stalled).await);
    }

    fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_us.load(Ordering::SeqCst))
    }
}

impl ChaosProxy {
    /// Starts a proxy to `target` on a port of its own.
    pub async fn start(target: SocketAddr) -> Self {
        let link =
            Arc::new(Link { target, stalled: watch::channel(false).0, delay_us: AtomicU64::default() });
        let shared = link.clone();
        let acceptor = Acceptor::start(move |client| relay(client, shared.clone()));
        Self { acceptor, link }
    }

    /// Where to connect instead of the target. Stays the same over [`ChaosProxy::cut`] and [`ChaosProxy::restore`].
    pub fn addr(&self) -> SocketAddr {
        self.acceptor.addr()
    }

    /// Client connections that are open now.
    pub fn connections(&self) -> usize {
        self.acceptor.open()
    }

    /// Client connections accepted since the start.
    pub fn accepted(&self) -> u64 {
        self.acceptor.accepted()
    }

    /// Closes every connection and refuses new ones, as when the process behind the address is gone.
    pub async fn cut(&self) {
        self.acceptor.refuse().await;
    }

    /// Closes every connection and goes on accepting, as when a middlebox forgot them.
    pub async fn drop_connections(&self) {
        self.acceptor.close_all().await;
    }

    /// Accepts and holds: nothing is forwarded in either direction, not even the end of a connection, as when a link
    /// died without a `FIN`. Bytes sent after this returns stay in the proxy until [`ChaosProxy::restore`].
    pub fn stall(&self) {
        self.link.stalled.send_replace(true);
    }

    /// Forwards everything this much later, in each direction. Like distance, not like a narrow pipe: bytes that
    /// arrive together leave together.
    pub fn delay(&self, by: Duration) {
        self.link.delay_us.store(u64::try_from(by.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Back to normal: accepts, forwards what was held, adds no delay.
    pub async fn restore(&self) {
        self.link.delay_us.store(0, Ordering::SeqCst);
        self.link.stalled.send_replace(false);
        self.acceptor.listen().await;
    }
}

async fn relay(client: TcpStream, link: Arc<Link>) {
    link.flowing().await;
    let Ok(server) = TcpStream::connect(link.target).await else { return };
    drop(server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // The first error ends both directions; a mere end of one side is passed on and the other goes on.
    drop(tokio::try_join!(pump(from_client, to_server, &link), pump(from_server, to_client, &link)));
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    link: &Link,
) -> io::Result<()> {
    let (ahead, mut behind) = mpsc::channel(READ_AHEAD);
    let read = async move {
        let mut buffer = BytesMut::new();
        while from.read_buf(&mut buffer).await? > 0 {
            if ahead.send((Instant::now() + link.delay(), buffer.split())).await.is_err() {
                break;
            }
            buffer.reserve(16 * 1024);
        }
        io::Result::Ok(())
    };
    let write = async move {
        while let Some((due, bytes)) = behind.recv().await {
            sleep_until(due).await;
            link.flowing().await;
            to.write_all(&bytes).await?;
        }
        link.flowing().await;
        to.shutdown().await
    };
    tokio::try_join!(read, write).map(drop)
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::eventually;

    const SOON: Duration = Duration::from_secs(10);

    /// Sends back what it gets.
    async fn echo_server() -> Acceptor {
        Acceptor::start(|mut stream| async move {
            let (mut from, mut to) = stream.split();
            drop(tokio::io::copy(&mut from, &mut to).await);
        })
    }

    async fn ask(stream: &mut TcpStream, question: &[u8]) -> io::Result<Vec<u8>> {
        stream.write_all(question).await?;
        let mut answer = vec![0; question.len()];
        stream.read_exact(&mut answer).await?;
        Ok(answer)
    }

    #[tokio::test]
    async fn a_cut_closes_and_refuses_until_restored() {
        let server = echo_server().await;
        let proxy = ChaosProxy::start(server.addr()).await;
        let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
        assert_eq!(ask(&mut stream, b"one").await.unwrap(), b"one");
        assert_eq!(proxy.connections(), 1);

        proxy.cut().await;
        assert_eq!(proxy.connections(), 0);
        assert!(ask(&mut stream, b"two").await.is_err());
        let refused = TcpStream::connect(proxy.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        eventually(SOON, || async { server.open() == 0 }).await;

        proxy.restore().await;
        let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
        assert_eq!(ask(&mut stream, b"three").await.unwrap(), b"three");
        assert_eq!(proxy.accepted(), 2);
    }

    #[tokio::test]
    async fn a_stall_holds_bytes_and_ends_of_connections() {
        let server = echo_server().await;
        let proxy = ChaosProxy::start(server.addr()).await;
        let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
        ask(&mut stream, b"warm").await.unwrap();

        proxy.stall();
        let mut late = TcpStream::connect(proxy.addr()).await.unwrap();
        {
            let asked = ask(&mut stream, b"held");
            tokio::pin!(asked);
            assert!(timeout(Duration::from_millis(50), &mut asked).await.is_err());
            proxy.restore().await;
            assert_eq!(asked.await.unwrap(), b"held");
        }
        assert_eq!(ask(&mut late, b"late").await.unwrap(), b"late");

        proxy.stall();
        drop(stream);
        drop(late);
        assert!(
            timeout(Duration::from_millis(50), eventually(SOON, || async { server.open() == 0 }))
                .await
                .is_err()
        );
        proxy.restore().await;
        eventually(SOON, || async { server.open() == 0 }).await;
    }

    #[tokio::test]
    async fn a_delay_is_added_in_each_direction() {
        let server = echo_server().await;
        let proxy = ChaosProxy::start(server.addr()).await;
        proxy.delay(Duration::from_millis(20));
        let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
        let began = Instant::now();
        assert_eq!(ask(&mut stream, b"far").await.unwrap(), b"far");
        assert!(began.elapsed() >= Duration::from_millis(40), "{:?}", began.elapsed());
    }
}
