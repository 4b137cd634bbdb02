use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use obol_dial::{Dialer, Refused};

use super::{HttpTransport, TransportError};
use crate::pool::{Connect, Endpoint, EndpointKind, Transport};

/// The largest answer, event or batch, unless said otherwise.
const MAX_MESSAGE: usize = 16 << 20;

/// Transports for Streamable HTTP. TCP connections are shared by all sessions with one origin.
#[derive(Debug)]
pub struct HttpConnect {
    dialer: Dialer,
    max_message: usize,
}

impl HttpConnect {
    /// Connects with the clients of `dialer`.
    pub fn new(dialer: Dialer) -> Self {
        Self { dialer, max_message: MAX_MESSAGE }
    }

    /// The largest answer, event or batch, in bytes.
    #[must_use]
    pub fn with_max_message(mut self, bytes: usize) -> Self {
        self.max_message = bytes;
        self
    }
}

#[async_trait]
impl Connect for HttpConnect {
    /// Does not dial: the first request does.
    async fn connect(&self, endpoint: &Endpoint) -> Result<Arc<dyn Transport>, TransportError> {
        let EndpointKind::Http { url, credential, allow_private } = &endpoint.kind else {
            return Err(TransportError::Unsent("it is not reached over HTTP"));
        };
        obol_dial::check(url, *allow_private).map_err(|refused| {
            TransportError::Unsent(match refused {
                Refused::Scheme => "its URL is neither http nor https",
                Refused::Credential => "its URL holds a credential",
                Refused::NoHost => "its URL has no host",
                Refused::Address => "its address is not allowed",
            })
        })?;
        Ok(Arc::new(HttpTransport {
            client: self.dialer.client(*allow_private).clone(),
            url: url.clone(),
            credential: credential.clone().map(|(name, mut value)| {
                value.set_sensitive(true);
                (name, value)
            }),
            max_message: self.max_message,
            session: OnceLock::new(),
            version: OnceLock::new(),
            closed: AtomicBool::new(false),
        }))
    }
}
