use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use jsonwebtoken::Algorithm;
use obol_dial::Dialer;
use obol_model::metric;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::fetch::{self, FetchError};
use super::jwks::{Found, Key, KeySet};
use super::resource::is_protected;
use super::{TokenError, TokenFault};

/// Longest time for a whole fetch, discovery included.
const FETCH: Duration = Duration::from_secs(10);
/// Between tries while an issuer does not answer.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// Who issues access tokens, as the operator configured it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issuer {
    /// As it is spelled: `iss` must be the same text.
    id: String,
    url: Url,
    keys: Option<Url>,
}

impl Issuer {
    /// The text that `iss` must be.
    pub fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn url(&self) -> &Url {
        &self.url
    }
}

/// `ISSUER`, or `ISSUER=JWKS_URL` where its keys are not to be discovered. The error is the second half of a sentence.
impl FromStr for Issuer {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let cut = ["=https://", "=http://"].iter().find_map(|mark| text.find(mark));
        let (id, keys) = match cut.and_then(|at| text.split_at_checked(at)) {
            Some((id, keys)) => (id, keys.strip_prefix('=')),
            None => (text, None),
        };
        let read = |text: &str| {
            let url = Url::parse(text).map_err(|_| "is no URL")?;
            if !is_protected(&url) {
                return Err("is not `https` (plain `http` is for loopback hosts only)");
            }
            obol_dial::check(&url, true).map_err(|_| "cannot be dialled")?;
            Ok(url)
        };
        let url = read(id)?;
        // RFC 8414 section 2.
        if url.query().is_some() || url.fragment().is_some() {
            return Err("has a query or a fragment");
        }
        Ok(Self { id: id.to_owned(), url, keys: keys.map(read).transpose()? })
    }
}

/// How long keys of an issuer are trusted.
#[derive(Debug, Clone, Copy)]
pub struct JwksOptions {
    /// Between two fetches: a key that the issuer withdrew is refused after at most this, and the time of a fetch.
    pub ttl: Duration,
    /// How much longer known keys are trusted while the issuer does not answer.
    pub stale: Duration,
    /// Between two fetches because of unknown key ids, which anybody can make up.
    pub cool_down: Duration,
    /// Longest time that a request waits for such a fetch.
    pub wait: Duration,
}

impl Default for JwksOptions {
    fn default() -> Self {
        Self {
            ttl: Duration::from_mins(5),
            stale: Duration::from_hours(1),
            cool_down: Duration::from_secs(5),
            wait: Duration::from_secs(2),
        }
    }
}

/// The keys of one issuer. One task fetches them ([`IssuerKeys::run`]); requests look at what it has found, and only
/// one with an unknown key id waits for it.
#[derive(Debug)]
pub(super) struct IssuerKeys {
    issuer: Issuer,
    options: JwksOptions,
    known: watch::Sender<Known>,
    /// The last fetch that an unknown key id caused.
    demand: Mutex<Option<Demand>>,
    wanted: Notify,
}

#[derive(Debug, Default)]
struct Known {
    keys: Option<Arc<KeySet>>,
    /// When the newest answer was asked for.
    asked_at: Option<Instant>,
    /// Fetches so far, and whether the last one worked.
    started: u64,
    finished: u64,
    failed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Demand {
    at: Instant,
    /// The fetch that answers it.
    wants: u64,
}

impl IssuerKeys {
    pub(super) fn new(issuer: Issuer, options: JwksOptions) -> Self {
        let (known, demand) = (watch::Sender::default(), Mutex::default());
        Self { issuer, options, known, demand, wanted: Notify::new() }
    }

    pub(super) fn id(&self) -> &str {
        self.issuer.id()
    }

    /// The keys that are trusted now; `None` before the first fetch, and when the issuer has been away for too long.
    pub(super) fn current(&self) -> Option<Arc<KeySet>> {
        let known = self.known.borrow();
        let fresh = known.asked_at? + self.options.ttl + self.options.stale > Instant::now();
        known.keys.clone().filter(|_| fresh)
    }

    /// The key that a token names. A known one costs a look into memory, whatever the issuer does meanwhile; an unknown
    /// one costs at most one fetch per cool-down, for all requests together.
    pub(super) async fn with_key<T>(
        &self,
        id: &str,
        algorithm: Algorithm,
        verify: impl Fn(&Key) -> Result<T, TokenFault>,
    ) -> Result<(T, u64), TokenError> {
        let look = |keys: Option<Arc<KeySet>>| {
            let keys = keys?;
            match keys.find(id, algorithm) {
                Found::Key(key) => Some(verify(key).map(|verified| (verified, keys.version))),
                Found::OtherAlgorithm => Some(Err(TokenFault::Algorithm)),
                Found::Nothing => None,
            }
        };
        if let Some(found) = look(self.current()) {
            return Ok(found?);
        }
        let answered = self.ask().await;
        match look(self.current()) {
            Some(found) => Ok(found?),
            // Absent and could-not-ask are different answers.
            None if answered => Err(TokenFault::UnknownKey.into()),
            None => Err(TokenError::Unavailable),
        }
    }

    /// Has the keys fetched again, unless that was just done. Returns whether the issuer answered, now or just before.
    async fn ask(&self) -> bool {
        let mut known = self.known.subscribe();
        let wants = {
            let now = Instant::now();
            let mut demand = self.demand.lock();
            let (started, finished, failed, none) = {
                let known = known.borrow();
                (known.started, known.finished, known.failed, known.keys.is_none())
            };
            match *demand {
                Some(last) if finished < last.wants => last.wants,
                // The first keys of all are on their way, or about to be.
                _ if none && (started == 0 || started > finished) => started.max(1),
                Some(last) if now < last.at + self.options.cool_down => return !failed,
                _ => {
                    // One that is under way may have been answered before the key was published.
                    let wants = started + 1;
                    *demand = Some(Demand { at: now, wants });
                    self.wanted.notify_one();
                    wants
                }
            }
        };
        let fetched = known.wait_for(|known| known.finished >= wants);
        match tokio::time::timeout(self.options.wait, fetched).await {
            Ok(Ok(known)) => !known.failed,
            _ => false,
        }
    }

    /// Keeps the keys fresh until `shutdown`.
    pub(super) async fn run(&self, dialer: &Dialer, shutdown: &CancellationToken) {
        let keep = async {
            let mut keys_at = self.issuer.keys.clone();
            let mut retry = FIRST_RETRY;
            loop {
                self.known.send_modify(|known| known.started += 1);
                let asked_at = Instant::now();
                let fetched = self.fetch(dialer, &mut keys_at).await;
                let pause = if fetched.is_ok() { self.options.ttl } else { retry.min(self.options.ttl) };
                retry = if fetched.is_ok() { FIRST_RETRY } else { (retry * 2).min(LONGEST_RETRY) };
                self.finish(fetched, asked_at);
                tokio::select! {
                    () = tokio::time::sleep_until(asked_at + pause) => {}
                    () = self.wanted.notified() => {}
                }
            }
        };
        shutdown.run_until_cancelled(keep).await;
    }

    async fn fetch(&self, dialer: &Dialer, keys_at: &mut Option<Url>) -> Result<KeySet, FetchError> {
        let fetch = async {
            let url = match keys_at.clone() {
                Some(url) => url,
                None => fetch::find(dialer, &self.issuer).await?,
            };
            let keys = fetch::keys(dialer, &url).await;
            // What was discovered may have moved.
            *keys_at = if keys.is_ok() { Some(url) } else { self.issuer.keys.clone() };
            keys
        };
        tokio::time::timeout(FETCH, fetch).await.unwrap_or(Err(FetchError::BrokeOff))
    }

    fn finish(&self, fetched: Result<KeySet, FetchError>, asked_at: Instant) {
        let issuer = self.id();
        let outcome = if fetched.is_ok() { "ok" } else { "error" };
        metrics::counter!(metric::OAUTH_KEY_FETCHES, "outcome" => outcome).increment(1);
        match &fetched {
            Ok(keys) if keys.len() == 0 => {
                tracing::warn!(issuer, "the issuer publishes no usable key, its tokens are refused");
            }
            Ok(_) => {}
            Err(e) => tracing::warn!(issuer, error = %e, "keys of the issuer not fetched"),
        }
        self.known.send_modify(|known| {
            known.finished = known.started;
            known.failed = fetched.is_err();
            let Ok(keys) = fetched else { return };
            known.asked_at = Some(asked_at);
            match &known.keys {
                Some(old) if old.is_same(&keys) => {}
                old => {
                    let version = old.as_ref().map_or(1, |old| old.version + 1);
                    tracing::info!(issuer, keys = keys.len(), version, "keys of the issuer read");
                    known.keys = Some(Arc::new(keys.with_version(version)));
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issuers_are_read_to_the_letter() {
        let issuer: Issuer = "https://Auth.example.com/a/".parse().unwrap();
        assert_eq!((issuer.id(), &issuer.keys), ("https://Auth.example.com/a/", &None));
        let issuer: Issuer = "https://a.example=https://keys.example/jwks?v=1".parse().unwrap();
        assert_eq!(issuer.id(), "https://a.example");
        assert_eq!(issuer.keys.unwrap().as_str(), "https://keys.example/jwks?v=1");
        let issuer: Issuer = "http://127.0.0.1:1=http://127.0.0.1:2/k".parse().unwrap();
        assert_eq!(issuer.id(), "http://127.0.0.1:1");
        for bad in [
            "",
            "auth.example.com",
            "http://auth.example.com",
            "https://a.example?x",
            "https://a.example#x",
            "https://u:p@a.example",
            "https://a.example=http://keys.example",
            "https://169.254.169.254",
            "https://a.example=https://169.254.169.254/",
        ] {
            assert!(bad.parse::<Issuer>().is_err(), "{bad}");
        }
    }
}
