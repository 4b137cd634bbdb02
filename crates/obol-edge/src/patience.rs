//! Connections whose peers have to take what they are sent.

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// A stream that breaks when its peer takes nothing for a while.
///
/// A stalled reader holds a connection, a provider's stream and the money that is set aside for it, and no other limit
/// reaches it: nothing is read from a provider for whom nobody takes. The timer runs only while bytes wait, so that quiet
/// streams and idle connections are not its business.
///
/// It sees connections: one stream of HTTP/2 whose window stays closed while others go on is not cut.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    stream: S,
    bound: Duration,
    write_now: WriteNow<S>,
    /// Runs while bytes wait.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// Writes what fits, if anything does, without asking the runtime.
type WriteNow<S> = fn(&S, &[u8]) -> io::Result<usize>;

impl Patient<TcpStream> {
    pub(crate) fn new(stream: TcpStream, bound: Duration) -> Self {
        Self { stream, bound, write_now, stalled: None }
    }
}

/// The kernel calls a socket writable when a third of its buffer is free, which is a megabyte and more: a slow reader takes
/// minutes for that. Whether it took anything at all is known only by trying.
fn write_now(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    // The same socket, which does not block.
    std::net::TcpStream::from(stream.as_fd().try_clone_to_owned()?).write(bytes)
}

impl<S> Patient<S> {
    /// What a write came to, unless the peer has had its time.
    fn judge(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        if let Some(stalled) = &mut self.stalled {
            ready!(stalled.as_mut().poll(cx));
            self.stalled = None;
            return Poll::Ready((self.write_now)(&self.stream, bytes).map_err(|e| match e.kind() {
                io::ErrorKind::WouldBlock => {
                    io::Error::new(io::ErrorKind::TimedOut, "the peer takes nothing")
                }
                _ => e,
            }));
        }
        // The time begins with a buffer that is full, so that room in it tells of a peer that took something.
        match (self.write_now)(&self.stream, bytes) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            written => return Poll::Ready(written),
        }
        let mut stalled = Box::pin(sleep(self.bound));
        // From here on it wakes this task.
        if stalled.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        self.stalled = Some(stalled);
        Poll::Pending
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.judge(cx, written, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.judge(cx, written, bufs.iter().find(|buf| !buf.is_empty()).map_or(&[], |buf| buf))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::time::{Instant, timeout};

    use super::*;

    const BOUND: Duration = Duration::from_secs(60);

    fn patient(stream: DuplexStream) -> Patient<DuplexStream> {
        let write_now = |_: &DuplexStream, _: &[u8]| Err(io::ErrorKind::WouldBlock.into());
        Patient { stream, bound: BOUND, write_now, stalled: None }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_nothing_for_the_bound_is_given_up() {
        let (near, far) = duplex(8);
        let mut near = patient(near);
        let began = Instant::now();
        assert_eq!(near.write_all(&[0; 9]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed().as_secs(), BOUND.as_secs());
        drop(far);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_a_little_now_and_then_is_served() {
        let (near, mut far) = duplex(8);
        let mut near = patient(near);
        let began = Instant::now();
        let slowly = async {
            let mut got = 0;
            while got < 64 {
                sleep(BOUND * 9 / 10).await;
                got += far.read(&mut [0; 8]).await.unwrap();
            }
        };
        let (written, ()) = tokio::join!(near.write_all(&[0; 64]), slowly);
        written.unwrap();
        assert!(began.elapsed() > 5 * BOUND);
        // Nothing waits, so nothing is timed.
        let answer = timeout(10 * BOUND, near.read_u8());
        assert!(answer.await.is_err());
        near.write_all(&[0; 8]).await.unwrap();
    }
}
