//! What a replica asks of control: publications and keys that Redis has lost (DESIGN §7.3, §8.1).
//!
//! Only control's own word that there is no such thing counts as "absent"; whatever else goes wrong, a 404 of somebody
//! else included, is "could not ask".

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::StatusCode;
use obol_auth::{ControlKeys, KeyStoreError, ServiceTokenError, ServiceTokens, party};
use obol_model::snapshot::Documents;
use obol_model::{Clock, KeyHash, WorkspaceId};
use obol_snapshot::SourceError;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use url::Url;

/// On whose behalf tokens are signed.
const SUBJECT: &str = "gateway";

/// For one whole question. A client waits for it when Redis has lost what its request needs.
const TIMEOUT: Duration = Duration::from_millis(1500);

/// The most bytes of an answer: three documents of the largest size, with room for the escapes of JSON.
const LARGEST: usize = 64 << 20;

/// Control's internal API.
#[derive(Debug)]
pub(crate) struct ControlClient {
    /// Ends in `/`.
    base: Url,
    http: reqwest::Client,
    tokens: Arc<ServiceTokens>,
    clock: Arc<dyn Clock>,
}

/// Why control could not be asked. Names neither its address nor what it answered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("control cannot be asked: {0}")]
    Unreachable(&'static str),
    #[error("control cannot be asked")]
    Unsigned(#[source] ServiceTokenError),
    #[error("control answered {0}")]
    Refused(StatusCode),
    #[error("the answer of control broke off")]
    BrokeOff,
    #[error("the answer of control has more than {LARGEST} bytes")]
    TooLarge,
    #[error("the answer of control cannot be read")]
    Unreadable,
}

impl ControlClient {
    /// Asks at `base`, which ends in `/`, with tokens of ours. `http` may dial private addresses: that is where control
    /// is.
    pub(crate) fn new(
        base: Url,
        http: reqwest::Client,
        tokens: Arc<ServiceTokens>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self { base, http, tokens, clock }
    }

    /// Asks for `path`, relative to the base. `None` when control itself says so with the error code `absent`.
    /// Cancel-safe.
    ///
    /// # Errors
    /// When control cannot be asked within the time of one question, or gives another answer.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        absent: &str,
    ) -> Result<Option<T>, ControlError> {
        let url = self.base.join(path).map_err(|_| ControlError::Unreachable("its URL cannot be used"))?;
        let token =
            self.tokens.sign(party::CONTROL, SUBJECT, self.clock.now()).map_err(ControlError::Unsigned)?;
        let question = async {
            let request = self.http.get(url).bearer_auth(token.expose());
            let response = request.send().await.map_err(|e| unreachable(&e))?;
            let status = response.status();
            let body = body(response).await?;
            match status {
                StatusCode::OK => {
                    serde_json::from_slice(&body).map(Some).map_err(|_| ControlError::Unreadable)
                }
                StatusCode::NOT_FOUND if code(&body).as_deref() == Some(absent) => Ok(None),
                status => Err(ControlError::Refused(status)),
            }
        };
        let silent = |_| ControlError::Unreachable("it does not answer in time");
        tokio::time::timeout(TIMEOUT, question).await.map_err(silent)?
    }
}

fn unreachable(error: &reqwest::Error) -> ControlError {
    ControlError::Unreachable(obol_dial::connect_reason(error))
}

async fn body(mut response: reqwest::Response) -> Result<Vec<u8>, ControlError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| ControlError::BrokeOff)? {
        if body.len() + chunk.len() > LARGEST {
            return Err(ControlError::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The code of an error of control's.
fn code(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Refused {
        code: String,
    }
    serde_json::from_slice::<Refused>(body).ok().map(|refused| refused.code)
}

#[async_trait]
impl obol_snapshot::Control for ControlClient {
    async fn publication(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, SourceError> {
        #[derive(Deserialize)]
        struct Publication {
            workspace: String,
            policy: String,
            fingerprint: String,
        }
        // An id of a workspace needs no encoding.
        let path = format!("internal/v1/workspaces/{workspace}/publication");
        let found = self.get::<Publication>(&path, "no_such_workspace").await.map_err(SourceError::new)?;
        Ok(found.map(|Publication { workspace, policy, fingerprint }| Documents {
            workspace: workspace.into_bytes(),
            policy: policy.into_bytes(),
            fingerprint: fingerprint.into_bytes(),
        }))
    }
}

#[async_trait]
impl ControlKeys for ControlClient {
    async fn key(&self, hash: &KeyHash) -> Result<Option<Vec<u8>>, KeyStoreError> {
        #[derive(Deserialize)]
        struct Found {
            key: String,
        }
        let path = format!("internal/v1/keys/{}", hash.hex());
        let found = self.get::<Found>(&path, "no_such_key").await.map_err(KeyStoreError::unreachable)?;
        Ok(found.map(|found| found.key.into_bytes()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods, reason = "the test owns its server")]

    use obol_dial::{DialOptions, Dialer};
    use obol_model::{Secret, SystemClock};
    use obol_snapshot::Control as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Asks a server that gives this answer and hands back what it was asked.
    async fn asked(answer: Vec<u8>) -> (Result<Option<Documents>, String>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}/control/", listener.local_addr().unwrap()).parse().unwrap();
        let served = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            let read = stream.read(&mut head).await.unwrap();
            // Fails when the client has seen enough.
            drop(stream.write_all(&answer).await);
            String::from_utf8_lossy(&head[..read]).into_owned()
        };
        let secret = Secret::new("a-secret-of-thirty-two-bytes-or-more".to_owned());
        let tokens = Arc::new(ServiceTokens::from_secret(party::GATEWAY, &secret).unwrap());
        let dialer = Dialer::new(DialOptions::default()).unwrap();
        let client = ControlClient::new(base, dialer.client(true).clone(), tokens, Arc::new(SystemClock));
        let workspace: WorkspaceId = "acme".parse().unwrap();
        let (answer, head) = tokio::join!(client.publication(&workspace), served);
        (answer.map_err(|e| e.to_string()), head)
    }

    fn answer(status: &str, body: &str) -> Vec<u8> {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }

    #[tokio::test]
    async fn a_publication_is_asked_for_with_a_token_and_taken_to_the_byte() {
        let body = r#"{"workspace":"{\"a\": 1.0}","policy":"p","fingerprint":"f","later":1}"#;
        let (found, head) = asked(answer("200 OK", body)).await;
        let documents = Documents {
            workspace: br#"{"a": 1.0}"#.to_vec(),
            policy: b"p".to_vec(),
            fingerprint: b"f".to_vec(),
        };
        assert_eq!(found, Ok(Some(documents)));
        assert!(
            head.starts_with("GET /control/internal/v1/workspaces/acme/publication HTTP/1.1\r\n"),
            "{head}"
        );
        assert!(head.to_ascii_lowercase().contains("authorization: bearer ey"), "{head}");
    }

    #[tokio::test]
    async fn only_the_word_of_control_is_absent() {
        let absent = r#"{"code":"no_such_workspace","message":"there is none"}"#;
        assert_eq!(asked(answer("404 Not Found", absent)).await.0, Ok(None));
        for (status, body, expected) in [
            ("404 Not Found", "", "control answered 404 Not Found"),
            ("404 Not Found", "<html>no such page</html>", "control answered 404 Not Found"),
            ("404 Not Found", r#"{"code":"no_such_path"}"#, "control answered 404 Not Found"),
            ("200 OK", absent, "the answer of control cannot be read"),
            ("200 OK", "", "the answer of control cannot be read"),
            ("401 Unauthorized", absent, "control answered 401 Unauthorized"),
            ("410 Gone", absent, "control answered 410 Gone"),
            ("307 Temporary Redirect", absent, "control answered 307 Temporary Redirect"),
            ("503 Service Unavailable", "", "control answered 503 Service Unavailable"),
        ] {
            assert_eq!(asked(answer(status, body)).await.0, Err(expected.to_owned()), "{status} {body}");
        }
        let broken = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{".to_vec();
        assert_eq!(asked(broken).await.0, Err("the answer of control broke off".to_owned()));
    }
}
