//! Outbound HTTP clients that dial only what they may (DESIGN §16): the one place that builds them.
//!
//! The check sits on the addresses that a name resolves to, at every dial: a check at registration would miss a name that
//! leads elsewhere later. Clients follow no redirect, use no proxy of the environment and decode nothing.

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use obol_model::net::is_forbidden;
use reqwest::Client;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use url::{Host, Url};

/// Idle connections that are kept for one origin.
const IDLE_PER_HOST: usize = 512;
const KEEPALIVE: Duration = Duration::from_secs(15);

/// The bounds of a [`Dialer`].
#[derive(Debug, Clone, Copy)]
pub struct DialOptions {
    /// For name, connection and TLS handshake.
    pub connect_timeout: Duration,
    /// How long an unused connection is kept: below what load balancers in front of upstreams allow (60 s and more), so
    /// that a connection is rarely used in the moment in which it is closed.
    pub idle_connection: Duration,
}

impl Default for DialOptions {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(5), idle_connection: Duration::from_secs(20) }
    }
}

/// Two clients: one for public addresses, one that may dial private and loopback ones as well. Cheap to clone; clones
/// share connections.
#[derive(Debug, Clone)]
pub struct Dialer {
    public: Client,
    private: Client,
}

/// Why a URL is not dialled. The texts name no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Another scheme.
    #[error("its URL is neither http nor https")]
    Scheme,
    /// User name or password in the URL.
    #[error("its URL holds a credential")]
    Credential,
    /// Nothing to dial.
    #[error("its URL has no host")]
    NoHost,
    /// An address that must not be dialled.
    #[error("its address is not allowed")]
    Address,
}

impl Dialer {
    /// Builds both clients.
    ///
    /// A machine without certificate authorities (a slim container) gets clients that reach plain HTTP only: that is all
    /// that upstreams on the same machine need.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(options: DialOptions) -> reqwest::Result<Self> {
        Ok(Self { public: client(false, options)?, private: client(true, options)? })
    }

    /// The client that dials private and loopback addresses only if `allow_private`.
    pub fn client(&self, allow_private: bool) -> &Client {
        if allow_private { &self.private } else { &self.public }
    }
}

fn client(allow_private: bool, options: DialOptions) -> reqwest::Result<Client> {
    let builder = || {
        Client::builder()
            .user_agent(concat!("obol/", env!("CARGO_PKG_VERSION")))
            .dns_resolver(Guarded { allow_private })
            .redirect(Policy::none())
            .referer(false)
            .no_proxy()
            .connect_timeout(options.connect_timeout)
            .pool_idle_timeout(options.idle_connection)
            .pool_max_idle_per_host(IDLE_PER_HOST)
            .tcp_nodelay(true)
            .tcp_keepalive(KEEPALIVE)
            .http2_adaptive_window(true)
    };
    builder().build().or_else(|why| {
        let client = builder().tls_certs_only([]).build()?;
        tracing::warn!(
            reason = root_cause(&why),
            "no certificate authorities, https upstreams fail; install `ca-certificates`"
        );
        Ok(client)
    })
}

/// Judges what no resolver sees: the scheme, credentials in the URL, and addresses that are spelled out. Connectors do
/// not ask a resolver for addresses; the URL parser has already read the decimal and octal forms of IPv4.
///
/// # Errors
/// What is wrong with the URL.
pub fn check(url: &Url, allow_private: bool) -> Result<(), Refused> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err(Refused::Scheme);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Refused::Credential);
    }
    let ip = match url.host() {
        Some(Host::Ipv4(ip)) => IpAddr::V4(ip),
        Some(Host::Ipv6(ip)) => IpAddr::V6(ip),
        Some(Host::Domain(_)) => return Ok(()),
        None => return Err(Refused::NoHost),
    };
    if is_forbidden(ip, allow_private) { Err(Refused::Address) } else { Ok(()) }
}

/// Whether `error` says that an address must not be dialled.
pub fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(<dyn Error>::is::<Refused>)
}

/// Why a connect failed, in words that name no address and may be shown to clients.
pub fn connect_reason(error: &reqwest::Error) -> &'static str {
    for cause in causes(error) {
        if cause.is::<Refused>() {
            return "its address is not allowed";
        }
        match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
            Some(io::ErrorKind::ConnectionRefused) => return "the connection was refused",
            Some(io::ErrorKind::TimedOut) => return "the connection timed out",
            _ => {}
        }
    }
    if error.is_timeout() { "the connection timed out" } else { "the connection failed" }
}

/// The innermost cause, for the log: the outer ones spell the URL, which may hold a secret.
pub fn root_cause(error: &reqwest::Error) -> String {
    match causes(error).skip(1).last() {
        Some(cause) => cause.to_string(),
        None => "request failed".to_owned(),
    }
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |e: &&'a (dyn Error + 'static)| (*e).source())
}

#[derive(Debug)]
struct Guarded {
    allow_private: bool,
}

impl Resolve for Guarded {
    fn resolve(&self, name: Name) -> Resolving {
        let allow_private = self.allow_private;
        Box::pin(async move {
            // The port is put in by the connector.
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let allowed: Vec<SocketAddr> = found.filter(|a| !is_forbidden(a.ip(), allow_private)).collect();
            if allowed.is_empty() {
                return Err(Refused::Address.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelled_out_addresses_credentials_and_schemes_are_judged() {
        for (url, allow_private, expected) in [
            ("https://example.com/mcp", false, Ok(())),
            ("http://93.184.216.34/", false, Ok(())),
            ("http://127.0.0.1/", false, Err(Refused::Address)),
            ("http://127.0.0.1/", true, Ok(())),
            ("http://2130706433/", false, Err(Refused::Address)),
            ("http://0x7f.1/", false, Err(Refused::Address)),
            ("http://[::1]/", false, Err(Refused::Address)),
            ("http://169.254.169.254/", true, Err(Refused::Address)),
            ("http://[::ffff:169.254.169.254]/", true, Err(Refused::Address)),
            ("http://0251.0376.0251.0376/", true, Err(Refused::Address)),
            ("http://user:pass@example.com/", true, Err(Refused::Credential)),
            ("ftp://example.com/", true, Err(Refused::Scheme)),
            ("file:///etc/passwd", true, Err(Refused::Scheme)),
        ] {
            assert_eq!(check(&url.parse().unwrap(), allow_private), expected, "{url} {allow_private}");
        }
    }

    #[tokio::test]
    async fn names_are_judged_by_what_they_resolve_to() {
        let resolve = |allow_private| Guarded { allow_private }.resolve("localhost".parse().unwrap());
        let refused = resolve(false).await.err().unwrap();
        assert!(is_refusal(refused.as_ref()));
        assert!(resolve(true).await.unwrap().next().is_some());
    }

    #[tokio::test]
    async fn a_refused_name_is_told_from_a_refused_connection() {
        let dialer = Dialer::new(DialOptions::default()).unwrap();
        let refused = dialer.client(false).get("http://localhost:1/").send().await.unwrap_err();
        assert_eq!(connect_reason(&refused), "its address is not allowed");
        let closed = dialer.client(true).get("http://127.0.0.1:1/").send().await.unwrap_err();
        assert_eq!(connect_reason(&closed), "the connection was refused");
        assert!(!root_cause(&closed).contains("127.0.0.1"));
    }
}
