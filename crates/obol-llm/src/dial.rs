//! Clients that dial only what they may. The check sits on the addresses that a name resolves to at connect time: a
//! check at registration would miss a name that resolves to something else later.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use obol_model::net::is_forbidden;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect;
use tracing::warn;
use url::{Host, Url};

use crate::error::chain;

/// Below what load balancers in front of providers allow (60 s and more). A server that closes earlier is noticed while
/// the connection idles.
const POOL_IDLE: Duration = Duration::from_secs(20);
const POOL_IDLE_PER_HOST: usize = 512;
const TCP_KEEPALIVE: Duration = Duration::from_secs(15);

/// A name resolved to nothing but addresses that may not be dialled.
#[derive(Debug, thiserror::Error)]
#[error("the address may not be dialled")]
pub(crate) struct ForbiddenAddress;

/// Builds a client. It follows no redirect, uses no proxy of the environment and decodes nothing.
///
/// A machine without certificate authorities (a slim container) gets a client that reaches plain HTTP only: that is
/// all that a local model server needs.
pub(crate) fn client(allow_private: bool, connect_timeout: Duration) -> reqwest::Result<reqwest::Client> {
    let builder = || {
        reqwest::Client::builder()
            .dns_resolver(Checked { allow_private })
            .redirect(redirect::Policy::none())
            .no_proxy()
            .connect_timeout(connect_timeout)
            .pool_idle_timeout(POOL_IDLE)
            .pool_max_idle_per_host(POOL_IDLE_PER_HOST)
            .tcp_keepalive(TCP_KEEPALIVE)
            .http2_adaptive_window(true)
    };
    builder().build().or_else(|why| {
        let client = builder().tls_certs_only([]).build()?;
        warn!(
            reason = chain(&why),
            "no certificate authorities, https providers fail; install `ca-certificates`"
        );
        Ok(client)
    })
}

/// Whether the host of `url` is an address that may not be dialled. Connectors do not ask a resolver for addresses,
/// so they are checked here; the URL parser has already read the decimal and octal forms of IPv4.
pub(crate) fn is_forbidden_literal(url: &Url, allow_private: bool) -> bool {
    let ip = match url.host() {
        Some(Host::Ipv4(ip)) => IpAddr::V4(ip),
        Some(Host::Ipv6(ip)) => IpAddr::V6(ip),
        Some(Host::Domain(_)) => return false,
        None => return true,
    };
    is_forbidden(ip, allow_private)
}

/// Whether the reason of `error` is that an address may not be dialled.
pub(crate) fn is_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<ForbiddenAddress>() {
            return true;
        }
        next = error.source();
    }
    false
}

#[derive(Debug)]
struct Checked {
    allow_private: bool,
}

impl Resolve for Checked {
    fn resolve(&self, name: Name) -> Resolving {
        let allow_private = self.allow_private;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let allowed: Vec<SocketAddr> =
                found.filter(|addr| !is_forbidden(addr.ip(), allow_private)).collect();
            if allowed.is_empty() {
                return Err(ForbiddenAddress.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_judged_in_every_spelling() {
        for url in [
            "http://169.254.169.254/",
            "http://[::ffff:169.254.169.254]/",
            "http://2852039166/",
            "http://0xa9fea9fe/",
            "http://0251.0376.0251.0376/",
        ] {
            assert!(is_forbidden_literal(&url.parse().unwrap(), true), "{url}");
        }
        assert!(is_forbidden_literal(&"http://127.0.0.1:1/".parse().unwrap(), false));
        assert!(!is_forbidden_literal(&"http://127.0.0.1:1/".parse().unwrap(), true));
        assert!(!is_forbidden_literal(&"https://api.example.com/".parse().unwrap(), false));
    }

    #[tokio::test]
    async fn names_are_judged_by_what_they_resolve_to() {
        let resolve = |allow_private| Checked { allow_private }.resolve("localhost".parse().unwrap());
        let refused = resolve(false).await.err().unwrap();
        assert!(is_refusal(refused.as_ref()));
        assert!(resolve(true).await.unwrap().next().is_some());
    }
}
