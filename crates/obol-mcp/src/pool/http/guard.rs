use std::error::Error;
use std::net::SocketAddr;

use obol_model::net::is_forbidden;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::{Host, Url};

/// An address that must not be dialled.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the address is not allowed")]
pub(super) struct ForbiddenAddress;

/// Resolves names and keeps only addresses that may be dialled (DESIGN §16). The check is on what is dialled, at every
/// dial: a name that was harmless when it was registered may lead elsewhere now.
#[derive(Debug, Clone, Copy)]
pub(super) struct GuardedResolver {
    pub(super) allow_private: bool,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let allow_private = self.allow_private;
        Box::pin(async move {
            // The port is put in by the connector.
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let allowed: Vec<SocketAddr> = found.filter(|a| !is_forbidden(a.ip(), allow_private)).collect();
            if allowed.is_empty() {
                return Err(Box::new(ForbiddenAddress) as Box<dyn Error + Send + Sync>);
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

/// Judges what no resolver sees: the scheme, credentials in the URL, and addresses that are spelled out.
pub(super) fn check(url: &Url, allow_private: bool) -> Result<(), &'static str> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err("its URL is neither http nor https");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("its URL holds a credential");
    }
    let forbidden = match url.host() {
        Some(Host::Ipv4(ip)) => is_forbidden(ip.into(), allow_private),
        Some(Host::Ipv6(ip)) => is_forbidden(ip.into(), allow_private),
        Some(Host::Domain(_)) => false,
        None => return Err("its URL has no host"),
    };
    if forbidden { Err(NOT_ALLOWED) } else { Ok(()) }
}

const NOT_ALLOWED: &str = "its address is not allowed";

/// Why a connect failed, in words that name no address.
pub(super) fn reason(e: &reqwest::Error) -> &'static str {
    let mut cause: Option<&(dyn Error + 'static)> = Some(e);
    while let Some(error) = cause {
        if error.is::<ForbiddenAddress>() {
            return NOT_ALLOWED;
        }
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            match io.kind() {
                std::io::ErrorKind::ConnectionRefused => return "the connection was refused",
                std::io::ErrorKind::TimedOut => return "the connection timed out",
                _ => {}
            }
        }
        cause = error.source();
    }
    if e.is_timeout() { "the connection timed out" } else { "the connection failed" }
}

/// The innermost cause for the log: the outer ones spell the URL.
pub(super) fn root(e: &reqwest::Error) -> String {
    let mut cause: &(dyn Error + 'static) = e;
    while let Some(source) = cause.source() {
        cause = source;
    }
    if std::ptr::addr_eq(cause, e) { "request failed".to_owned() } else { cause.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelled_out_addresses_credentials_and_schemes_are_judged() {
        for (url, allow_private, ok) in [
            ("https://example.com/mcp", false, true),
            ("http://93.184.216.34/", false, true),
            ("http://127.0.0.1/", false, false),
            ("http://127.0.0.1/", true, true),
            ("http://2130706433/", false, false),
            ("http://0x7f.1/", false, false),
            ("http://[::1]/", false, false),
            ("http://169.254.169.254/", true, false),
            ("http://[::ffff:169.254.169.254]/", true, false),
            ("http://user:pass@example.com/", true, false),
            ("ftp://example.com/", true, false),
            ("file:///etc/passwd", true, false),
        ] {
            assert_eq!(check(&url.parse().unwrap(), allow_private).is_ok(), ok, "{url} {allow_private}");
        }
    }

    #[tokio::test]
    async fn names_that_lead_to_forbidden_addresses_do_not_resolve() {
        let resolve = |allow_private| GuardedResolver { allow_private }.resolve("localhost".parse().unwrap());
        let refused = resolve(false).await.err().unwrap();
        assert!(refused.is::<ForbiddenAddress>());
        assert!(resolve(true).await.unwrap().next().is_some());
    }
}
