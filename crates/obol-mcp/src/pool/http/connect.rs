use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use reqwest::Client;

use super::guard::{self, GuardedResolver};
use super::{HttpTransport, TransportError};
use crate::pool::{Connect, Endpoint, EndpointKind, Transport};

/// The bounds of [`HttpConnect`].
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Longest time for TCP and TLS.
    pub connect_timeout: Duration,
    /// The largest answer, event or batch.
    pub max_message: usize,
    /// How long an unused connection is kept.
    pub idle_connection: Duration,
    /// `User-Agent`.
    pub user_agent: String,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            max_message: 16 << 20,
            idle_connection: Duration::from_secs(20),
            user_agent: concat!("obol/", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }
}

/// Transports for Streamable HTTP. TCP connections are shared by all sessions with one origin.
#[derive(Debug)]
pub struct HttpConnect {
    public: Client,
    private: Client,
    max_message: usize,
}

impl HttpConnect {
    /// Builds the clients: no redirects, no proxy from the environment, no decompression, and no address that must not
    /// be dialled (DESIGN §16).
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(options: &HttpOptions) -> Result<Self, reqwest::Error> {
        let client = |allow_private| {
            Client::builder()
                .user_agent(&options.user_agent)
                .redirect(reqwest::redirect::Policy::none())
                .referer(false)
                .no_proxy()
                .dns_resolver(GuardedResolver { allow_private })
                .connect_timeout(options.connect_timeout)
                .pool_idle_timeout(options.idle_connection)
                .pool_max_idle_per_host(256)
                .tcp_nodelay(true)
                .build()
        };
        Ok(Self { public: client(false)?, private: client(true)?, max_message: options.max_message })
    }
}

#[async_trait]
impl Connect for HttpConnect {
    /// Does not dial: the first request does.
    async fn connect(&self, endpoint: &Endpoint) -> Result<Arc<dyn Transport>, TransportError> {
        let EndpointKind::Http { url, credential, allow_private } = &endpoint.kind else {
            return Err(TransportError::Unsent("it is not reached over HTTP"));
        };
        guard::check(url, *allow_private).map_err(TransportError::Unsent)?;
        let client = if *allow_private { &self.private } else { &self.public };
        Ok(Arc::new(HttpTransport {
            client: client.clone(),
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
