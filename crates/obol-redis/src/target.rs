use std::sync::Arc;

use redis::io::tcp::TcpSettings;
use redis::{ConnectionInfo, IntoConnectionInfo as _, ProtocolVersion};

use crate::RedisError;

const FORM: &str = "`redis://[user:password@]host[:port][/database]`, or `rediss://…` for TLS";

/// A server to connect to: the client and its name for people, which has no password.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) client: redis::Client,
    pub(crate) server: Arc<str>,
}

impl Target {
    /// # Errors
    /// [`RedisError::BadUrl`], which repeats nothing of the URL but its scheme: the rest may be a password.
    pub(crate) fn parse(url: &str) -> Result<Self, RedisError> {
        let bad = |reason: String| RedisError::BadUrl { reason };
        let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        match scheme.as_deref() {
            Some("redis" | "rediss") => {}
            Some(scheme @ ("redis+sentinel" | "redis+cluster")) => {
                return Err(bad(format!("`{scheme}://` is not supported by this release; use {FORM}")));
            }
            Some(scheme)
                if scheme.len() <= 20 && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'+') =>
            {
                return Err(bad(format!("`{scheme}://` is unknown; use {FORM}")));
            }
            _ => return Err(bad(format!("no scheme; use {FORM}"))),
        }
        let info: ConnectionInfo =
            url.into_connection_info().map_err(|_| bad(format!("it is not {FORM}")))?;
        let server = info.addr().to_string().into();
        // RESP3, because it reports the end of a connection as it happens: without it the first command after a
        // quiet restart of Redis would be the one to find out.
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let info =
            info.set_redis_settings(settings).set_tcp_settings(TcpSettings::default().set_nodelay(true));
        #[expect(clippy::disallowed_methods, reason = "this crate is the one that opens Redis")]
        let client = redis::Client::open(info).map_err(|_| bad(format!("it is not {FORM}")))?;
        Ok(Self { client, server })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_supported_is_taken() {
        for (url, server) in [
            ("redis://127.0.0.1", "127.0.0.1:6379"),
            ("redis://user:secret@cache.example:6380/3", "cache.example:6380"),
            ("rediss://:secret@cache.example", "cache.example:6379"),
        ] {
            assert_eq!(&*Target::parse(url).map(|t| t.server).unwrap(), server);
        }
    }

    #[test]
    fn what_is_not_is_refused_without_repeating_the_password() {
        for (url, expected) in [
            (
                "redis+sentinel://:hunter2@a,b/mymaster",
                "`redis+sentinel://` is not supported by this release",
            ),
            ("redis+cluster://:hunter2@a,b", "`redis+cluster://` is not supported by this release"),
            ("http://:hunter2@a", "`http://` is unknown"),
            (":hunter2@a", "no scheme"),
            ("", "no scheme"),
            ("redis://:hunter2@a:port", "it is not `redis://"),
            ("redis://:hunter2@a/zero", "it is not `redis://"),
        ] {
            let error = Target::parse(url).err().unwrap();
            assert!(matches!(error, RedisError::BadUrl { .. }));
            let text = format!("{error} {error:?}");
            assert!(text.contains(expected), "{url}: {text}");
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}
