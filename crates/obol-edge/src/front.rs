//! Who is calling, and under which publication: the first two checks of every request on both surfaces.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use obol_auth::{AuthError, Keys, Refusal as Conflict};
use obol_authz::Caller;
use obol_model::{KeyContext, Kind, RequestId};
use obol_snapshot::{PairError, Publication, Publications};
use parking_lot::RwLock;

use crate::compiled::{CompileWorkspace, Compiled};
use crate::failure::Refusal;

/// Longest time until a request body must be complete.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Authenticates requests and pins their publication.
#[derive(Debug, Clone)]
pub(crate) struct Front {
    pub(crate) keys: Arc<Keys>,
    pub(crate) publications: Arc<Publications<CompileWorkspace>>,
    pub(crate) max_body: usize,
    pub(crate) callers: Callers,
}

/// Callers as policies see them, made once per key record: their entities cost more than a decision.
#[derive(Debug, Clone, Default)]
pub(crate) struct Callers(Arc<RwLock<KnownCallers>>);

/// By the address of the record.
type KnownCallers = HashMap<usize, (Arc<KeyContext>, Caller)>;

/// Beyond this many the map starts afresh, which only costs making them again.
const MAX_CALLERS: usize = 10_000;

impl Callers {
    /// A record that is cached keeps its address, and an address in the map keeps its record, so that it cannot be
    /// another record's.
    fn of(&self, key: &Arc<KeyContext>) -> Caller {
        let address = Arc::as_ptr(key).addr();
        if let Some((_, caller)) = self.0.read().get(&address) {
            return caller.clone();
        }
        let caller = Caller::from(key.as_ref());
        let mut all = self.0.write();
        if all.len() >= MAX_CALLERS {
            all.clear();
        }
        all.insert(address, (key.clone(), caller.clone()));
        caller
    }
}

/// A request that may go on: everything about it is judged under this one publication (DESIGN §7.2).
#[derive(Debug, Clone)]
pub(crate) struct Admitted {
    pub(crate) key: Arc<KeyContext>,
    pub(crate) caller: Caller,
    pub(crate) publication: Arc<Publication<Compiled>>,
    pub(crate) request_id: RequestId,
}

impl Front {
    /// Authenticates by the headers alone and reads the publication, before a byte of the body is read.
    pub(crate) async fn admit(&self, headers: &HeaderMap, x_api_key: bool) -> Result<Admitted, Refusal> {
        let mut authorizations = headers.get_all(header::AUTHORIZATION).iter();
        let authorization = authorizations.next().map(http::HeaderValue::as_bytes);
        if authorizations.next().is_some() {
            return Err(unauthenticated(&AuthError::Invalid { reason: Conflict::Conflicting }));
        }
        let api_key =
            if x_api_key { headers.get("x-api-key").map(http::HeaderValue::as_bytes) } else { None };
        let credential = obol_auth::credential(authorization, api_key).map_err(|e| unauthenticated(&e))?;
        let key = self.keys.authenticate(credential).await.map_err(|e| unauthenticated(&e))?;
        let publication = self.publications.pair(&key.workspace_id).await.map_err(|e| no_publication(&e))?;
        if publication.workspace.frozen {
            return Err(Refusal::new(Kind::Forbidden, "workspace_frozen", "the workspace is frozen"));
        }
        let caller = self.callers.of(&key);
        Ok(Admitted { key, caller, publication, request_id: RequestId::new() })
    }

    /// Reads a body within its bounds of size and time.
    pub(crate) async fn body(&self, body: Body) -> Result<Bytes, Refusal> {
        let collected = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, self.max_body).collect()).await;
        match collected {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(e)) if e.is::<LengthLimitError>() => Err(Refusal::new(
                Kind::TooLarge,
                "body_too_large",
                format!("the body is larger than {} bytes", self.max_body),
            )),
            Ok(Err(_)) => Err(Refusal::new(Kind::InvalidRequest, "body_unreadable", "the body broke off")),
            Err(_) => Err(Refusal::new(
                Kind::InvalidRequest,
                "body_timeout",
                format!("the body was not complete within {} seconds", BODY_TIMEOUT.as_secs()),
            )),
        }
    }
}

fn unauthenticated(error: &AuthError) -> Refusal {
    let (code, message, challenge) = match error {
        // RFC 6750, "The WWW-Authenticate Response Header Field": no error code when nothing was presented.
        AuthError::Missing => (
            "missing_credential",
            "send a virtual key as `Authorization: Bearer obol_…`".to_owned(),
            Some("Bearer realm=\"obol\""),
        ),
        AuthError::Invalid { .. } => (
            "invalid_credential",
            "the credential is not valid".to_owned(),
            Some("Bearer realm=\"obol\", error=\"invalid_token\""),
        ),
        AuthError::Disabled => ("key_disabled", "the key is disabled".to_owned(), None),
        AuthError::Unavailable(_) => {
            ("credential_store_unavailable", "the credential cannot be checked right now".to_owned(), None)
        }
    };
    tracing::debug!(error = %error, "request not authenticated");
    Refusal { challenge, ..Refusal::new(error.kind(), code, message) }
}

fn no_publication(error: &PairError) -> Refusal {
    // Fail closed: whatever is wrong with the publication, nothing is decided without one.
    tracing::warn!(error = %error, "no publication to serve from");
    if matches!(error, PairError::NotPublished) {
        let message = "the workspace of this key is not published";
        return Refusal::new(Kind::Unavailable, "workspace_not_published", message);
    }
    Refusal::new(
        Kind::Unavailable,
        "publication_unavailable",
        "the configuration of the workspace cannot be read right now",
    )
}
