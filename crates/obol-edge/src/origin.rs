//! Which web pages may talk to the gateway (DESIGN §9.6; transports, "Security Warning").

use std::net::IpAddr;
use std::str::FromStr as _;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use obol_model::Kind;
use url::Url;

use crate::failure::Refusal;

const ALLOWED_METHODS: &str = "GET, POST, DELETE, OPTIONS";
const EXPOSED: &str = "Mcp-Session-Id, WWW-Authenticate, Retry-After, X-Request-Id, X-Obol-Target, \
                       Idempotent-Replayed";
/// A browser must be told each header by name; `*` does not cover `Authorization`.
const ALLOWED: &str = "Authorization, Content-Type, Accept, Last-Event-ID, Mcp-Session-Id, Mcp-Protocol-Version, \
                       Mcp-Method, Mcp-Name, X-Api-Key, Idempotency-Key";

/// Which origins and which hosts are ours.
#[derive(Debug, Clone)]
pub struct OriginPolicy {
    /// Exact origins, such as `https://app.example.com`. `None`: loopback ones on a loopback listener, else none.
    pub origins: Option<Vec<String>>,
    /// Names that `Host` may have beside loopback ones on a loopback listener, without ports. `None`: no others there
    /// (a page that rebinds its name to 127.0.0.1 is a stranger, whatever it sends), any elsewhere.
    pub hosts: Option<Vec<String>>,
    /// Whether the listener is reachable from this machine only.
    pub loopback_listener: bool,
}

impl OriginPolicy {
    fn check(&self, headers: &HeaderMap, target: Option<&Authority>) -> Result<Option<HeaderValue>, Refusal> {
        let refuse = |what| Refusal::new(Kind::Forbidden, "origin_refused", what);
        let host = match only(headers, &header::HOST)? {
            None => None,
            Some(value) => {
                let text = value.to_str().map_err(|_| refuse("the `Host` header cannot be read"))?;
                Some(Authority::from_str(text).map_err(|_| refuse("the `Host` header names no host"))?)
            }
        };
        if self.loopback_listener || self.hosts.is_some() {
            // An absolute request target and `Host` can differ; both must be ours.
            let strange = host.as_ref().into_iter().chain(target).any(|h| !self.is_our_host(h));
            if strange {
                return Err(refuse(
                    "the `Host` header names another host than this one (see OBOL_ALLOWED_HOSTS)",
                ));
            }
        }
        let Some(origin) = only(headers, &header::ORIGIN)? else { return Ok(None) };
        let text = origin.to_str().map_err(|_| refuse("the `Origin` header cannot be read"))?;
        let ours = if let Some(allowed) = &self.origins {
            allowed.iter().any(|a| a == text)
        } else {
            self.loopback_listener && is_loopback_origin(text)
        };
        if ours {
            Ok(Some(origin.clone()))
        } else {
            Err(refuse("the `Origin` is not in OBOL_ALLOWED_ORIGINS"))
        }
    }

    fn is_our_host(&self, host: &Authority) -> bool {
        // `user@host` is nothing that a client of ours sends.
        let plain = !host.as_str().contains('@');
        let name = host.host();
        plain
            && (self.loopback_listener && is_loopback(name)
                || self.hosts.iter().flatten().any(|known| known.eq_ignore_ascii_case(name)))
    }
}

/// The value of a header that may stand there once: with two, whoever reads the other one sees another request.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a HeaderValue>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let value = values.next();
    if values.next().is_some() {
        let message = format!("two `{name}` headers: send one");
        return Err(Refusal::new(Kind::InvalidRequest, "repeated_header", message));
    }
    Ok(value)
}

/// Whether `text` is a loopback origin in the form in which browsers send it.
fn is_loopback_origin(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.origin().ascii_serialization() == text
            && url.host_str().is_some_and(is_loopback)
    })
}

/// Whether `name` is this machine.
fn is_loopback(name: &str) -> bool {
    let address = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Refuses strangers, answers preflights, and tells browsers what they may read, on errors too.
pub(crate) async fn layer(State(policy): State<OriginPolicy>, request: Request, next: Next) -> Response {
    let origin = match policy.check(request.headers(), request.uri().authority()) {
        Ok(origin) => origin,
        Err(refusal) => return refusal.into_response(),
    };
    let preflight = request.method() == Method::OPTIONS;
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response =
        if preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    }
    if preflight {
        headers.insert(header::ALLOW, HeaderValue::from_static(ALLOWED_METHODS));
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(ALLOWED_METHODS));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed_headers(asked.as_ref()));
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
    response
}

/// The headers that pages may send: those that are known, and whichever `Mcp-Param-*` the page asks for.
fn allowed_headers(asked: Option<&HeaderValue>) -> HeaderValue {
    let asked = asked.and_then(|v| v.to_str().ok()).unwrap_or_default();
    let params: Vec<&str> = asked
        .split(',')
        .map(str::trim)
        .filter(|name| name.get(..10).is_some_and(|prefix| prefix.eq_ignore_ascii_case("mcp-param-")))
        .collect();
    let all = std::iter::once(ALLOWED).chain(params).collect::<Vec<_>>().join(", ");
    HeaderValue::from_str(&all).unwrap_or_else(|_| HeaderValue::from_static(ALLOWED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absolute_target_and_doubled_headers_do_not_help() {
        let local = policy(true, None, None);
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, "localhost".parse().unwrap());
        assert!(local.check(&headers, Some(&"localhost:1".parse().unwrap())).is_ok());
        assert!(local.check(&headers, Some(&"evil.example.com".parse().unwrap())).is_err());
        headers.append(header::HOST, "evil.example.com".parse().unwrap());
        assert_eq!(local.check(&headers, None).unwrap_err().kind, Kind::InvalidRequest);
    }

    #[test]
    fn pages_may_send_the_params_that_they_ask_for() {
        let asked = HeaderValue::from_static("mcp-param-region, x-evil, Mcp-Param-2");
        let allowed = allowed_headers(Some(&asked));
        assert!(allowed.to_str().unwrap().ends_with(", mcp-param-region, Mcp-Param-2"));
        assert_eq!(allowed_headers(None), ALLOWED);
    }

    fn check(policy: &OriginPolicy, host: &str, origin: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        policy.check(&headers, None).is_ok()
    }

    fn policy(loopback_listener: bool, origins: Option<&str>, hosts: Option<&str>) -> OriginPolicy {
        let list = |text: &str| text.split(',').map(str::to_owned).collect();
        OriginPolicy { origins: origins.map(list), hosts: hosts.map(list), loopback_listener }
    }

    #[test]
    fn hosts_and_origins_are_judged_by_listener_and_lists() {
        let local = policy(true, None, None);
        let listed = policy(true, Some("https://app.example.com"), Some("gw.example.com"));
        let open = policy(false, Some("https://app.example.com"), None);
        let closed = policy(false, None, Some("gw.example.com"));
        let cases = [
            (&local, "127.0.0.1:8080", None, true),
            (&local, "localhost", Some("http://localhost:3000"), true),
            (&local, "[::1]:8080", Some("http://[::1]:1"), true),
            (&local, "evil.example.com", None, false),
            (&local, "127.0.0.1.evil.example.com", None, false),
            (&local, "localhost", Some("https://app.example.com"), false),
            (&local, "localhost", Some("null"), false),
            (&local, "localhost", Some("http://localhost.evil.example.com"), false),
            (&local, "localhost", Some("http://localhost:1@evil.example.com"), false),
            (&local, "localhost", Some("http://localhost:1/path"), false),
            (&local, "localhost", Some("http://127.0.0.1:1, http://evil.example.com"), false),
            (&local, "127.0.0.1:8080:evil", None, false),
            (&local, "localhost@evil.example.com", None, false),
            (&listed, "GW.example.com:443", Some("https://app.example.com"), true),
            (&listed, "localhost", Some("http://localhost:3000"), false),
            (&open, "any.example.com", None, true),
            (&open, "any.example.com", Some("https://app.example.com"), true),
            (&open, "any.example.com", Some("http://localhost:3000"), false),
            (&closed, "gw.example.com", None, true),
            (&closed, "localhost", None, false),
            (&closed, "gw.example.com", Some("https://gw.example.com"), false),
        ];
        for (policy, host, origin, allowed) in cases {
            assert_eq!(check(policy, host, origin), allowed, "{policy:?} {host} {origin:?}");
        }
    }
}
