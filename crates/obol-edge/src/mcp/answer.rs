//! How answers leave: as JSON, or as a stream of events (transports, "Sending Messages to the Server").

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures::Stream;
use futures::future::BoxFuture;
use http::{HeaderValue, header};
use http_body::Frame as BodyFrame;
use obol_drain::DetachOnDrop;
use obol_mcp::wire::sse;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::Mcp;
use super::negotiate::Accept;
use crate::failure;

/// A call that takes longer is answered as a stream, so that keep-alives can flow (DESIGN §9.6).
const JSON_WITHIN: Duration = Duration::from_secs(5);
/// Between two comments on a quiet stream (DESIGN §9.6).
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Messages of one call that wait for a slow reader; then the upstream waits.
pub(super) const FRAMES: usize = 32;

/// One thing that a call has to say.
#[derive(Debug)]
pub(super) enum Frame {
    /// A message before the answer.
    Message(Bytes),
    /// The answer.
    Final(Bytes),
}

/// What a request is answered with.
pub(super) enum Answer {
    /// A message that is there.
    Now(Bytes),
    /// A call under way, which says what it has to say to the receiver.
    Call(BoxFuture<'static, ()>, mpsc::Receiver<Frame>),
}

impl Answer {
    /// The HTTP answer: JSON unless a message precedes the result or 5 s pass.
    ///
    /// A client that goes away does not stop the call (transports: "Disconnection SHOULD NOT be interpreted as the
    /// client cancelling its request").
    pub(super) async fn respond(self, accept: Accept, mcp: &Arc<Mcp>) -> Response {
        let (call, mut frames) = match self {
            Self::Now(bytes) => return message(accept, bytes),
            Self::Call(call, frames) => (call, frames),
        };
        let mut call = Some(DetachOnDrop::new(mcp.tasks(), "mcp_call", call));
        if !accept.sse {
            let answer = final_frame(&mut call, &mut frames).await;
            return answer.map_or_else(cancelled, |bytes| message(accept, bytes));
        }
        // A client that takes only streams gets one at once.
        let mut first = None;
        if accept.json {
            match tokio::time::timeout(JSON_WITHIN, next_frame(&mut call, &mut frames)).await {
                Ok(Some(Frame::Final(bytes))) => return message(accept, bytes),
                Ok(Some(Frame::Message(bytes))) => first = Some(bytes),
                Ok(None) => return cancelled(),
                Err(_) => {}
            }
        }
        let mut keep_alive = tokio::time::interval_at(Instant::now() + KEEP_ALIVE, KEEP_ALIVE);
        keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
        event_stream(CallStream { first, call, frames, keep_alive, over: false })
    }

    /// Only the answer, for batches. `None` when the call was cancelled.
    pub(super) async fn whole(self, mcp: &Arc<Mcp>) -> Option<Bytes> {
        match self {
            Self::Now(bytes) => Some(bytes),
            Self::Call(call, mut frames) => {
                let mut call = Some(DetachOnDrop::new(mcp.tasks(), "mcp_call", call));
                final_frame(&mut call, &mut frames).await
            }
        }
    }
}

type Running = DetachOnDrop<BoxFuture<'static, ()>>;

/// Drives the call until it says something. `None` when it ended without an answer, as a cancelled one does.
async fn next_frame(call: &mut Option<Running>, frames: &mut mpsc::Receiver<Frame>) -> Option<Frame> {
    if let Some(running) = call {
        tokio::select! {
            biased;
            () = running => *call = None,
            frame = frames.recv() => return frame,
        }
    }
    frames.recv().await
}

async fn final_frame(call: &mut Option<Running>, frames: &mut mpsc::Receiver<Frame>) -> Option<Bytes> {
    loop {
        if let Frame::Final(bytes) = next_frame(call, frames).await? {
            return Some(bytes);
        }
    }
}

/// One message in the form that the client takes.
pub(super) fn message(accept: Accept, bytes: Bytes) -> Response {
    if accept.json {
        failure::bytes_response(Response::builder(), bytes)
    } else {
        event_stream(futures::stream::iter([Ok::<_, Infallible>(sse::encode(None, &bytes))]))
    }
}

/// A cancelled request has no answer: a stream that ends without one.
fn cancelled() -> Response {
    event_stream(futures::stream::empty::<Result<Bytes, Infallible>>())
}

/// The head of a stream: nothing on the way may buffer, cache or compress it.
pub(super) fn event_stream<S>(events: S) -> Response
where
    S: Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
{
    use futures::StreamExt as _;
    let body = http_body_util::StreamBody::new(events.map(|bytes| bytes.map(BodyFrame::data)));
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The stream of one call. Polling it drives the call; dropping it leaves the call to the task tracker.
struct CallStream {
    first: Option<Bytes>,
    call: Option<Running>,
    frames: mpsc::Receiver<Frame>,
    keep_alive: Interval,
    over: bool,
}

impl Stream for CallStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(sse::encode(None, &first))));
        }
        if this.over {
            return Poll::Ready(None);
        }
        if let Some(call) = &mut this.call
            && Pin::new(call).poll(cx).is_ready()
        {
            this.call = None;
        }
        match this.frames.poll_recv(cx) {
            Poll::Ready(Some(Frame::Message(bytes))) => {
                this.keep_alive.reset();
                return Poll::Ready(Some(Ok(sse::encode(None, &bytes))));
            }
            Poll::Ready(Some(Frame::Final(bytes))) => {
                this.over = true;
                return Poll::Ready(Some(Ok(sse::encode(None, &bytes))));
            }
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Pending => {}
        }
        this.keep_alive.poll_tick(cx).map(|_| Some(Ok(Bytes::from_static(sse::KEEP_ALIVE))))
    }
}
