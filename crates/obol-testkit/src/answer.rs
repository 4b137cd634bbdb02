//! What the scripted servers answer with: a body that is either there or comes bit by bit, may break off, and knows
//! whether the client stayed to the end.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// Stands for "close the connection without an answer".
#[derive(Debug)]
pub(crate) struct Cut;

/// What a scripted server's handler returns.
pub(crate) type Answer = Result<Response<AnswerBody>, Cut>;

/// A response body.
#[derive(Debug)]
pub(crate) enum AnswerBody {
    Full(Option<Bytes>),
    Stream(Streamed),
}

/// A body that a task feeds. When the client leaves, hyper drops it, and that ends the task.
#[derive(Debug)]
pub(crate) struct Streamed {
    chunks: mpsc::Receiver<Result<Bytes, Cut>>,
    _feeder: Option<AbortOnDropHandle<()>>,
    watch: Option<Unfinished>,
}

impl AnswerBody {
    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        Self::Full(Some(bytes.into()))
    }

    pub(crate) fn empty() -> Self {
        Self::Full(None)
    }

    /// A body that lives as long as the sender.
    pub(crate) fn channel(bound: usize) -> (mpsc::Sender<Result<Bytes, Cut>>, Self) {
        let (sender, chunks) = mpsc::channel(bound);
        (sender, Self::Stream(Streamed { chunks, _feeder: None, watch: None }))
    }

    /// A body that `feed` writes. `watch` is told when the client leaves before the end.
    pub(crate) fn fed<F, Fut>(watch: Option<Unfinished>, feed: F) -> Self
    where
        F: FnOnce(mpsc::Sender<Result<Bytes, Cut>>) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let (sender, chunks) = mpsc::channel(16);
        let feeder = AbortOnDropHandle::new(tokio::spawn(feed(sender)));
        Self::Stream(Streamed { chunks, _feeder: Some(feeder), watch })
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut *self {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(streamed) => streamed.chunks.poll_recv(cx).map(|chunk| match chunk {
                Some(Ok(bytes)) => Some(Ok(Frame::data(bytes))),
                other => {
                    // However it ends, it was not the client that left.
                    if let Some(watch) = streamed.watch.take() {
                        watch.finished();
                    }
                    other.map(|_| Err(io::Error::other("cut on request")))
                }
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Full(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Stream(_) => SizeHint::default(),
        }
    }
}

/// Counts an answer that the client did not wait for: dropped without [`Unfinished::finished`].
#[derive(Debug)]
pub(crate) struct Unfinished(Option<Arc<AtomicU64>>);

impl Unfinished {
    pub(crate) fn watch(counter: &Arc<AtomicU64>) -> Self {
        Self(Some(counter.clone()))
    }

    pub(crate) fn finished(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(counter) = &self.0 {
            counter.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// An answer with a status, a content type and a body.
pub(crate) fn answer(
    status: StatusCode,
    content_type: &'static str,
    body: AnswerBody,
) -> Response<AnswerBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// A JSON answer.
pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<AnswerBody> {
    answer(status, "application/json", AnswerBody::full(body))
}

/// An answer without a body.
pub(crate) fn bare(status: StatusCode) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::empty());
    *response.status_mut() = status;
    response
}

/// `text` as a JSON string, quotes included.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a string is JSON")
}

/// Serves HTTP/1.1 on one connection until it ends or the handler cuts it.
pub(crate) async fn serve<H, Fut>(stream: TcpStream, handler: H)
where
    H: Fn(Request<Incoming>) -> Fut,
    Fut: Future<Output = Answer>,
{
    let service = service_fn(|request| {
        let answer = handler(request);
        async { answer.await.map_err(|Cut| io::Error::other("cut on request")) }
    });
    // An error is a client that left or a cut that a test asked for.
    drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
}

/// The base of a server's URLs.
pub(crate) fn origin(addr: SocketAddr) -> String {
    format!("http://{addr}")
}
