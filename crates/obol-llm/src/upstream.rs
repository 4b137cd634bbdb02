use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT_ENCODING, DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method};
use jiff::fmt::rfc2822;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use crate::error::LlmError;
use crate::judge::{Judgement, judge};
use crate::llm::{Credential, LlmOptions};
use crate::route::Route;

const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

/// How much of a refused answer is read, and for how long, so that its connection can be used again.
const DISCARD_BYTES: usize = 64 * 1024;
const DISCARD_TIME: Duration = Duration::from_millis(100);

/// One provider: what is sent to it, and what is made of what it does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Upstream<'a> {
    pub(crate) client: &'a reqwest::Client,
    pub(crate) options: &'a LlmOptions,
    pub(crate) route: &'a Arc<Route>,
}

impl Upstream<'_> {
    /// Built from nothing: no header of a client can slip through (DESIGN §16).
    pub(crate) fn request<'p>(
        &self,
        method: Method,
        path: impl Iterator<Item = &'p str>,
    ) -> Result<reqwest::Request, LlmError> {
        let url = self.route.url(path).map_err(|_| self.address_refused())?;
        let mut http = reqwest::Request::new(method, url);
        let headers = http.headers_mut();
        if let Some(Credential { name, value }) = self.route.credential() {
            headers.insert(name, value.clone());
        }
        headers.insert(ACCEPT_ENCODING, IDENTITY);
        Ok(http)
    }

    /// Something that the provider keeps; `None` when it is not there.
    pub(crate) async fn fetch<'p>(
        &self,
        method: Method,
        path: impl Iterator<Item = &'p str>,
        query: Option<&str>,
    ) -> Result<Option<Bytes>, LlmError> {
        let mut http = self.request(method, path)?;
        http.url_mut().set_query(query);
        let deadline = Instant::now() + self.options.total;
        let executed = timeout_at(deadline, self.client.execute(http)).await;
        let response = executed.map_err(|_| self.timeout())?.map_err(|e| self.unreachable(e))?;
        let status = response.status();
        match judge(status, self.route.provider(), retry_after(response.headers())) {
            Judgement::Failure(failure) => Err(failure),
            Judgement::Refusal if matches!(status.as_u16(), 404 | 410) => Ok(None),
            Judgement::Refusal => {
                let message = format!("the provider refused the request with status {}", status.as_u16());
                Err(LlmError::invalid("upstream_refused", None, message))
            }
            Judgement::Answer => {
                timeout_at(deadline, self.read(response)).await.map_err(|_| self.timeout())?.map(Some)
            }
        }
    }

    pub(crate) fn idle_timeout(&self) -> Duration {
        self.route.idle_timeout(self.options.idle_timeout)
    }

    /// All of a body, within its bound. A body that came in one piece is not copied.
    pub(crate) async fn read(&self, mut response: reqwest::Response) -> Result<Bytes, LlmError> {
        let max = self.options.max_answer_bytes;
        let mut whole = Bytes::new();
        let mut pieces = BytesMut::new();
        loop {
            let chunk = timeout(self.idle_timeout(), response.chunk())
                .await
                .map_err(|_| self.timeout())?
                .map_err(|e| self.unreachable(e))?;
            let Some(chunk) = chunk else { break };
            if whole.len() + pieces.len() + chunk.len() > max {
                return Err(self.bad("an answer that is too large"));
            }
            if whole.is_empty() && pieces.is_empty() {
                whole = chunk;
            } else {
                pieces.extend_from_slice(&std::mem::take(&mut whole));
                pieces.extend_from_slice(&chunk);
            }
        }
        Ok(if pieces.is_empty() { whole } else { pieces.freeze() })
    }

    pub(crate) fn address_refused(&self) -> LlmError {
        LlmError::AddressRefused { provider: self.route.provider().clone() }
    }

    pub(crate) fn timeout(&self) -> LlmError {
        LlmError::Timeout { provider: self.route.provider().clone() }
    }

    pub(crate) fn bad(&self, what: &'static str) -> LlmError {
        LlmError::BadAnswer { provider: self.route.provider().clone(), what }
    }

    pub(crate) fn unreachable(&self, source: reqwest::Error) -> LlmError {
        let provider = self.route.provider().clone();
        if obol_dial::is_refusal(&source) {
            LlmError::AddressRefused { provider }
        } else if source.is_timeout() {
            LlmError::Timeout { provider }
        } else {
            // The URL may hold credentials.
            LlmError::Unreachable { provider, source: source.without_url() }
        }
    }
}

/// How long a provider asks to be left alone: in seconds, or until a date, which is measured from the date of the answer, so
/// that no two clocks have to agree.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let wait = text(RETRY_AFTER)?;
    if let Ok(seconds) = wait.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = |date| rfc2822::parse(date).ok().map(|date| date.timestamp());
    let wait = at(wait)?.duration_since(at(text(DATE)?)?);
    // A date that has passed asks for nothing.
    wait.try_into().ok()
}

/// Reads a small body to its end, so that the connection can be used again.
pub(crate) async fn discard(mut response: reqwest::Response) {
    let read = async {
        let mut total = 0;
        while let Ok(Some(chunk)) = response.chunk().await {
            total += chunk.len();
            if total > DISCARD_BYTES {
                return;
            }
        }
    };
    if timeout(DISCARD_TIME, read).await.is_err() {
        debug!("rest of a refused answer left unread");
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;

    #[test]
    fn a_wait_is_told_in_seconds_or_by_the_date_of_its_end() {
        let now = "Sun, 06 Nov 1994 08:49:37 GMT";
        let all = [
            ("7", Some(now), Some(7)),
            (" 3600 ", None, Some(3600)),
            ("Sun, 06 Nov 1994 08:50:07 GMT", Some(now), Some(30)),
            ("Sun, 06 Nov 1994 09:49:37 GMT", Some(now), Some(3600)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(now), Some(0)),
            ("Sun, 06 Nov 1994 08:49:36 GMT", Some(now), None),
            ("Sun, 06 Nov 1994 08:50:07 GMT", None, None),
            ("soon", Some(now), None),
            ("-1", Some(now), None),
        ];
        for (wait, date, seconds) in all {
            let headers: [(HeaderName, Option<&str>); 2] = [(RETRY_AFTER, Some(wait)), (DATE, date)];
            let headers: HeaderMap = headers
                .into_iter()
                .filter_map(|(name, value)| Some((name, HeaderValue::from_str(value?).unwrap())))
                .collect();
            assert_eq!(retry_after(&headers), seconds.map(Duration::from_secs), "{wait}");
        }
    }
}
