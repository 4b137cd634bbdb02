use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::HeaderValue;
use obol_dial::root_cause;
use reqwest::Response;
use tokio::time::Instant;

use super::super::{Inbound, TransportError};
use super::{HttpTransport, failed};
use crate::wire::sse::{Decoder, SseEvent};

/// How long to wait before a stream is resumed when the server has not said.
const DEFAULT_RETRY: Duration = Duration::from_millis(500);
/// The longest that a server can make the gateway wait; a call's own deadline is usually shorter.
const MAX_RETRY: Duration = Duration::from_mins(5);
/// How often a stream is resumed in a row without a new event.
const MAX_BARREN_RESUMES: u32 = 5;
/// What may follow an answer before its connection is given up.
const MAX_DRAINED: usize = 64 << 10;

/// A server-sent event stream that survives the connections that carry it (transports, "Resumability and
/// Redelivery").
pub(super) struct SseStream {
    transport: Arc<HttpTransport>,
    connection: Option<Response>,
    decoder: Decoder,
    last_event: Option<HeaderValue>,
    retry: Duration,
    /// When to resume, once the connection is gone.
    resume_at: Instant,
    barren: u32,
}

impl SseStream {
    pub(super) fn new(transport: Arc<HttpTransport>, response: Response) -> Self {
        Self {
            decoder: Decoder::new(transport.max_message),
            transport,
            connection: Some(response),
            last_event: None,
            retry: DEFAULT_RETRY,
            resume_at: Instant::now(),
            barren: 0,
        }
    }

    /// The connection is gone. Without an event id the stream cannot be resumed.
    fn lost(&mut self) -> Result<(), TransportError> {
        self.connection = None;
        // Half an event of the old connection must not grow together with the new one's.
        self.decoder = Decoder::new(self.transport.max_message);
        self.barren += 1;
        if self.last_event.is_none() || self.barren > MAX_BARREN_RESUMES {
            return Err(TransportError::Broken("the stream ended too early and cannot be resumed"));
        }
        self.resume_at = Instant::now() + self.retry;
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), TransportError> {
        // Never earlier than the server said.
        tokio::time::sleep_until(self.resume_at).await;
        match self.transport.get(self.last_event.as_ref()).await {
            Ok(Some(response)) => {
                self.connection = Some(response);
                Ok(())
            }
            // The call may have been executed before the session or the stream went away.
            Ok(None) | Err(TransportError::SessionLost { .. }) => {
                Err(TransportError::Broken("the stream cannot be resumed"))
            }
            Err(TransportError::Status(status)) if status < 500 && status != 429 => {
                Err(TransportError::Broken("the stream cannot be resumed"))
            }
            Err(_) => self.lost(),
        }
    }

    fn note(&mut self, event: SseEvent) -> Option<Bytes> {
        self.barren = 0;
        if let Some(retry) = event.retry {
            self.retry = Duration::from_millis(retry).min(MAX_RETRY);
        }
        if let Some(id) = event.id.as_deref() {
            // An empty id resets it (WHATWG, "Interpreting an event stream"); one that is no header value is of no use.
            self.last_event = HeaderValue::from_str(id).ok().filter(|v| !v.is_empty());
        }
        let message = event.event.as_deref().is_none_or(|e| e == "message");
        // Without data it primes the stream and says nothing.
        (message && !event.data.is_empty()).then_some(event.data)
    }
}

#[async_trait]
impl Inbound for SseStream {
    /// An HTTP/1 connection is only kept when its answer was read to the end.
    async fn drain(&mut self) {
        let mut left = MAX_DRAINED;
        while let Some(connection) = &mut self.connection
            && let Ok(Some(bytes)) = connection.chunk().await
        {
            match left.checked_sub(bytes.len()) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    }

    async fn next(&mut self) -> Result<Option<Bytes>, TransportError> {
        loop {
            while let Some(event) = self.decoder.next_event().map_err(|_| TransportError::TooLarge)? {
                if let Some(message) = self.note(event) {
                    return Ok(Some(message));
                }
            }
            let Some(connection) = &mut self.connection else {
                self.resume().await?;
                continue;
            };
            match connection.chunk().await {
                Ok(Some(bytes)) => self.decoder.push(&bytes),
                Ok(None) => self.lost()?,
                Err(e) => {
                    tracing::debug!(error = root_cause(&e), kind = %failed(&e), "upstream stream broke");
                    self.lost()?;
                }
            }
        }
    }
}
