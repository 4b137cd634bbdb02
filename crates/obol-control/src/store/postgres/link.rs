use std::fmt;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use obol_model::Secret;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, NoTls};

use super::super::StoreError;
use super::tls::Tls;

/// The bound of one operation, connecting and waiting for others included.
const DEADLINE: Duration = Duration::from_secs(5);
/// The bound of one attempt to connect to one address.
const CONNECT: Duration = Duration::from_secs(2);
/// What the server is told: it must not go on with what nobody waits for any more.
const SETTINGS: &str = "SET statement_timeout = '4s'; SET lock_timeout = '4s'; \
                        SET idle_in_transaction_session_timeout = '5s'";

/// One connection to Postgres that is made when it is needed. Operations take it in turn: there are few of them.
pub(crate) struct Link {
    config: Config,
    tls: Option<Tls>,
    /// Host and port, for messages.
    server: String,
    open: Mutex<Option<Open>>,
}

struct Open {
    client: Client,
    /// Moves the bytes, and ends when the connection does. It is driven by whoever asks something; in between nothing
    /// happens that could not wait.
    traffic: Pin<Box<dyn Future<Output = Result<(), tokio_postgres::Error>> + Send>>,
}

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failed {
    Database(tokio_postgres::Error),
    Store(StoreError),
}

impl From<tokio_postgres::Error> for Failed {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(error)
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Open {
    /// Takes up what the server sent while nobody asked anything, for one that it closed the connection.
    async fn is_alive(&mut self) -> bool {
        let ended = std::future::poll_fn(|cx| Poll::Ready(self.traffic.as_mut().poll(cx).is_ready())).await;
        !ended && !self.client.is_closed()
    }
}

impl Link {
    /// Not connected yet. Whether TLS is used is decided by the URL: `sslmode=require` and `sslmode=disable` say it;
    /// without either it is required unless the server is on this machine.
    pub(crate) fn new(url: &Secret<String>) -> Result<Self, String> {
        let text = url.expose();
        let mut config: Config = text.parse().map_err(|_| {
            "is no URL of a Postgres database: `postgres://USER:PASSWORD@HOST[:PORT]/DATABASE`".to_owned()
        })?;
        let local = |host: &Host| match host {
            Host::Tcp(name) => {
                name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
            Host::Unix(_) => true,
        };
        if config.get_hosts().is_empty() {
            return Err("names no host".to_owned());
        }
        if config.get_ssl_mode() == SslMode::Prefer {
            let mode = if config.get_hosts().iter().all(local) { SslMode::Disable } else { SslMode::Require };
            config.ssl_mode(mode);
        }
        let tls = (config.get_ssl_mode() == SslMode::Require).then(Tls::new).transpose()?;
        config.connect_timeout(CONNECT).application_name("obol control");
        let server = match (config.get_hosts().first(), config.get_ports().first()) {
            (Some(Host::Tcp(name)), port) => format!("{name}:{}", port.unwrap_or(&5432)),
            (Some(Host::Unix(path)), _) => path.display().to_string(),
            (None, _) => String::new(),
        };
        Ok(Self { config, tls, server, open: Mutex::default() })
    }

    /// Does some work on the connection. A connection that breaks or that has to be abandoned is made anew by the next
    /// operation; what the work did is then rolled back, or its outcome is unknown when it was about to commit.
    pub(crate) async fn run<T>(
        &self,
        work: impl AsyncFnOnce(&mut Client) -> Result<T, Failed>,
    ) -> Result<T, StoreError> {
        self.run_within(DEADLINE, work).await
    }

    /// As [`Link::run`], with another bound. The server's own bound is for the work to set.
    pub(crate) async fn run_within<T>(
        &self,
        deadline: Duration,
        work: impl AsyncFnOnce(&mut Client) -> Result<T, Failed>,
    ) -> Result<T, StoreError> {
        let operation = async {
            let mut open = self.open.lock().await;
            // Taken out, so that one that is abandoned in the middle of something is not used again.
            let mut link = match open.take() {
                Some(mut link) => {
                    if link.is_alive().await {
                        link
                    } else {
                        self.connect().await?
                    }
                }
                None => self.connect().await?,
            };
            let outcome = tokio::select! {
                biased;
                outcome = work(&mut link.client) => outcome,
                ended = &mut link.traffic => return Err(self.broke(ended.err())),
            };
            if !link.client.is_closed() {
                *open = Some(link);
            }
            outcome.map_err(|failed| match failed {
                Failed::Store(error) => error,
                Failed::Database(error) => self.failed(&error),
            })
        };
        timeout(deadline, operation).await.unwrap_or_else(|_| {
            Err(StoreError::Unavailable(format!(
                "the database at `{}` did not answer within {deadline:?}",
                self.server
            )))
        })
    }

    async fn connect(&self) -> Result<Open, StoreError> {
        let refused = |error: tokio_postgres::Error| self.failed(&error);
        let mut open = if let Some(tls) = &self.tls {
            let (client, connection) = self.config.connect(tls.clone()).await.map_err(refused)?;
            Open { client, traffic: Box::pin(connection) }
        } else {
            let (client, connection) = self.config.connect(NoTls).await.map_err(refused)?;
            Open { client, traffic: Box::pin(connection) }
        };
        tokio::select! {
            biased;
            set = open.client.batch_execute(SETTINGS) => set.map_err(refused)?,
            ended = &mut open.traffic => return Err(self.broke(ended.err())),
        }
        Ok(open)
    }

    fn broke(&self, error: Option<tokio_postgres::Error>) -> StoreError {
        match error {
            Some(error) => self.failed(&error),
            None => {
                StoreError::Unavailable(format!("the database at `{}` closed the connection", self.server))
            }
        }
    }

    /// The error with its cause: the library's own text says only where it happened.
    fn failed(&self, error: &tokio_postgres::Error) -> StoreError {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        if error.code() == Some(&SqlState::UNDEFINED_TABLE) {
            text.push_str("; has `obol control` ever run with this database?");
        }
        StoreError::Unavailable(format!("the database at `{}` cannot be used: {text}", self.server))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_elsewhere_is_reached_by_tls_unless_the_url_says_otherwise() {
        let tls = |url: &str| Link::new(&Secret::new(url.to_owned())).map(|link| link.tls.is_some());
        for local in ["postgres://u@localhost/obol", "postgres://u:p@127.0.0.1:1/o", "postgres://u@[::1]/o"] {
            assert_eq!(tls(local), Ok(false), "{local}");
        }
        assert_eq!(tls("postgres://u@%2Frun%2Fpostgresql/obol"), Ok(false));
        assert_eq!(tls("postgres://u:p@db.example/obol?sslmode=disable"), Ok(false));
        assert_eq!(tls("postgres://u:p@localhost/obol?sslmode=require"), Ok(true));
        assert_eq!(tls("postgres://u:p@db.example/obol"), Ok(true));
        for bad in ["", "mysql://h/d", "postgres://u@/obol", "postgres://u:hunter2@h/o?nonsense=1"] {
            let why = tls(bad).unwrap_err();
            assert!(!why.contains("hunter2"), "{why}");
        }
    }
}
