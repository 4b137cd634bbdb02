use std::fmt;
use std::sync::Arc;

use obol_model::Secret;
use redis::io::tcp::TcpSettings;
use redis::{ConnectionAddr, IntoConnectionInfo as _, ProtocolVersion, RedisConnectionInfo, TlsCertificates};

use crate::RedisError;

/// What every certificate in PEM begins with.
const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";

/// Host and port, as a URL or a server of the same installation names them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
}

impl Address {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// As servers announce it: without a host it is that of the server that was asked.
    pub(crate) fn announced(host: &str, port: u16, by: &Self) -> Self {
        if host.is_empty() { Self { host: by.host.clone(), port } } else { Self::new(host, port) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// A user name and a password, or neither.
#[derive(Debug, Clone, Default)]
pub(crate) struct Credentials {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret<String>>,
}

/// How to get in: the same at all servers of one kind.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) credentials: Credentials,
    pub(crate) db: u16,
    pub(crate) tls: bool,
    /// PEM certificates that are trusted instead of the public ones.
    pub(crate) ca: Option<Arc<[u8]>>,
}

/// A server to connect to.
pub(crate) struct Server {
    pub(crate) client: redis::Client,
    pub(crate) address: Address,
    /// For people; has no password.
    pub(crate) name: Arc<str>,
}

impl Access {
    /// # Errors
    /// [`RedisError::BadCa`], the one thing that can be wrong here.
    pub(crate) fn server(&self, address: &Address) -> Result<Arc<Server>, RedisError> {
        let (host, port) = (address.host.to_string(), address.port);
        let addr = if self.tls {
            ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        // RESP3, because it reports the end of a connection as it happens: without it the first command after a
        // quiet restart of Redis would be the one to find out.
        let mut settings =
            RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(self.db.into());
        if let Some(user) = &self.credentials.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.credentials.password {
            settings = settings.set_password(password.expose());
        }
        let bad = |why: redis::RedisError| RedisError::BadCa { reason: why.to_string() };
        let info = addr
            .into_connection_info()
            .map_err(bad)?
            .set_redis_settings(settings)
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = match self.ca.as_ref().filter(|_| self.tls) {
            // The library takes this for an authority that trusts nobody.
            Some(ca) if !ca.windows(BEGIN.len()).any(|window| window == BEGIN) => {
                return Err(RedisError::BadCa {
                    reason: "there is no PEM certificate among them".to_owned(),
                });
            }
            Some(ca) => {
                let root_cert = Some(ca.to_vec());
                redis::Client::build_with_tls(info, TlsCertificates { client_tls: None, root_cert })
            }
            #[expect(clippy::disallowed_methods, reason = "this crate is the one that opens Redis")]
            None => redis::Client::open(info),
        };
        let name = if self.db == 0 { address.to_string() } else { format!("{address}/{}", self.db) };
        Ok(Arc::new(Server { client: client.map_err(bad)?, address: address.clone(), name: name.into() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_without_a_host_means_who_was_asked() {
        let asked = Address::new("10.0.0.1", 7000);
        assert_eq!(Address::announced("", 7001, &asked), Address::new("10.0.0.1", 7001));
        assert_eq!(Address::announced("b", 7001, &asked), Address::new("b", 7001));
        assert_eq!(Address::new("::1", 1).to_string(), "[::1]:1");
    }

    #[test]
    fn certificates_that_are_none_are_refused() {
        let access = |ca: &str| Access {
            credentials: Credentials::default(),
            db: 0,
            tls: true,
            ca: Some(ca.as_bytes().into()),
        };
        let garbage = "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n";
        for bad in [garbage, "", "x"] {
            let error = access(bad).server(&Address::new("h", 1)).err().unwrap();
            assert!(matches!(error, RedisError::BadCa { .. }), "{error}");
        }
    }
}
