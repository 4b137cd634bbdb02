//! Who is calling, and under which publication: the first two checks of every request on both surfaces.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use obol_auth::oauth::{AccessTokens, Target, TokenError, TokenFault};
use obol_auth::{AuthError, Identity, Keys, Refusal as Conflict};
use obol_authz::Caller;
use obol_model::{Clock, Kind, RequestId, VirtualKey};
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
    /// `None` without OAuth.
    pub(crate) tokens: Option<Arc<AccessTokens>>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) publications: Arc<Publications<CompileWorkspace>>,
    pub(crate) max_body: usize,
    pub(crate) callers: Callers,
}

/// Callers as policies see them, made once per key record or token: their entities cost more than a decision.
#[derive(Debug, Clone, Default)]
pub(crate) struct Callers(Arc<RwLock<KnownCallers>>);

/// By the address of the record.
type KnownCallers = HashMap<usize, (Identity, Caller)>;

/// Beyond this many the map starts afresh, which only costs making them again.
const MAX_CALLERS: usize = 10_000;

impl Callers {
    /// A record that is cached keeps its address, and an address in the map keeps its record, so that it cannot be
    /// another record's.
    fn of(&self, identity: &Identity) -> Caller {
        let address = match identity {
            Identity::Key(key) => Arc::as_ptr(key).addr(),
            Identity::User(user) => Arc::as_ptr(user).addr(),
        };
        if let Some((_, caller)) = self.0.read().get(&address) {
            return caller.clone();
        }
        let caller = Caller::new(
            identity.workspace_id().clone(),
            identity.principal(),
            identity.name().to_owned(),
            identity.tags().to_vec(),
        );
        let mut all = self.0.write();
        if all.len() >= MAX_CALLERS {
            all.clear();
        }
        all.insert(address, (identity.clone(), caller.clone()));
        caller
    }
}

/// A request that may go on: everything about it is judged under this one publication (DESIGN §7.2).
#[derive(Debug, Clone)]
pub(crate) struct Admitted {
    pub(crate) identity: Identity,
    pub(crate) caller: Caller,
    pub(crate) publication: Arc<Publication<Compiled>>,
    pub(crate) request_id: RequestId,
}

impl Front {
    /// Authenticates by the headers alone and reads the publication, before a byte of the body is read.
    pub(crate) async fn admit(&self, headers: &HeaderMap, target: Target<'_>) -> Result<Admitted, Refusal> {
        let identity = self.authenticate(headers, target).await.map_err(|e| self.refuse(&e, target))?;
        let publication =
            self.publications.pair(identity.workspace_id()).await.map_err(|e| no_publication(&e))?;
        if publication.workspace.frozen {
            return Err(Refusal::new(Kind::Forbidden, "workspace_frozen", "the workspace is frozen"));
        }
        let caller = self.callers.of(&identity);
        Ok(Admitted { identity, caller, publication, request_id: RequestId::new() })
    }

    /// Whether who was admitted before may go on (DESIGN §6.5). What is open ends with its credential, without the leeway
    /// that clocks have otherwise: a client that has a newer token comes back with it.
    pub(crate) async fn readmit(
        &self,
        before: &Admitted,
        headers: &HeaderMap,
        target: Target<'_>,
    ) -> Result<Admitted, Refusal> {
        // First of all: that a token is over is known without asking anybody.
        if before.identity.expires_at().is_some_and(|end| end <= self.clock.now()) {
            return Err(self.refuse(&TokenError::from(TokenFault::Expired).into(), target));
        }
        self.admit(headers, target).await
    }

    async fn authenticate(&self, headers: &HeaderMap, target: Target<'_>) -> Result<Identity, Unknown> {
        let mut authorizations = headers.get_all(header::AUTHORIZATION).iter();
        let authorization = authorizations.next().map(http::HeaderValue::as_bytes);
        if authorizations.next().is_some() {
            return Err(AuthError::Invalid { reason: Conflict::Conflicting }.into());
        }
        let api_key = match target {
            Target::Llm => {
                let mut keys = headers.get_all("x-api-key").iter();
                let key = keys.next().map(http::HeaderValue::as_bytes);
                if keys.next().is_some() {
                    return Err(AuthError::Invalid { reason: Conflict::Conflicting }.into());
                }
                key
            }
            Target::Mcp | Target::Connection(_) => None,
        };
        let credential = obol_auth::credential(authorization, api_key)?;
        match &self.tokens {
            Some(tokens) if !VirtualKey::has_prefix(credential) => {
                Ok(Identity::User(tokens.authenticate(credential, target).await?))
            }
            _ => Ok(Identity::Key(self.keys.authenticate(credential).await?)),
        }
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

/// Why it is not known who calls.
#[derive(Debug, thiserror::Error)]
enum Unknown {
    #[error(transparent)]
    Credential(#[from] AuthError),
    #[error(transparent)]
    Token(#[from] TokenError),
}

impl Front {
    fn refuse(&self, error: &Unknown, target: Target<'_>) -> Refusal {
        let (kind, code, message) = match error {
            Unknown::Credential(e) => (e.kind(), credential_code(e), credential_message(e)),
            Unknown::Token(e) => (e.kind(), token_code(*e), token_message(*e)),
        };
        tracing::debug!(error = %error, "request not authenticated");
        Refusal { challenge: self.challenge(error, target), ..Refusal::new(kind, code, message) }
    }

    /// The challenge of RFC 6750 section 3, with where to find an issuer (RFC 9728 section 5.1) and what to ask it for
    /// (MCP authorization, "Scope Selection Strategy"). Without OAuth there is nothing to find.
    fn challenge(&self, error: &Unknown, target: Target<'_>) -> Option<String> {
        let mut challenge = match error {
            // No error code when nothing was presented.
            Unknown::Credential(AuthError::Missing) => "Bearer realm=\"obol\"".to_owned(),
            Unknown::Token(TokenError::InsufficientScope) => {
                "Bearer realm=\"obol\", error=\"insufficient_scope\"".to_owned()
            }
            Unknown::Credential(AuthError::Invalid { .. }) | Unknown::Token(TokenError::Invalid(_)) => {
                "Bearer realm=\"obol\", error=\"invalid_token\"".to_owned()
            }
            // Another token would not help.
            _ => return None,
        };
        if let Some(tokens) = &self.tokens {
            let resource = tokens.resource();
            challenge.push_str(&format!(", resource_metadata=\"{}\"", resource.metadata_url(target)));
            if !resource.scopes().is_empty() {
                challenge.push_str(&format!(", scope=\"{}\"", resource.scopes().join(" ")));
            }
        }
        Some(challenge)
    }
}

fn credential_code(error: &AuthError) -> &'static str {
    match error {
        AuthError::Missing => "missing_credential",
        AuthError::Invalid { .. } => "invalid_credential",
        AuthError::Disabled => "key_disabled",
        AuthError::Unavailable(_) => "credential_store_unavailable",
    }
}

fn credential_message(error: &AuthError) -> &'static str {
    match error {
        AuthError::Missing => "send a virtual key as `Authorization: Bearer obol_…`",
        AuthError::Invalid { .. } => "the credential is not valid",
        AuthError::Disabled => "the key is disabled",
        AuthError::Unavailable(_) => "the credential cannot be checked right now",
    }
}

fn token_code(error: TokenError) -> &'static str {
    match error {
        TokenError::Invalid(_) => "invalid_credential",
        TokenError::InsufficientScope => "insufficient_scope",
        TokenError::NoWorkspace => "no_workspace",
        TokenError::Tags => "unusable_claims",
        TokenError::Unavailable => "issuer_unavailable",
    }
}

fn token_message(error: TokenError) -> &'static str {
    match error {
        TokenError::Invalid(_) => "the access token is not valid here",
        TokenError::InsufficientScope => "the access token lacks a required scope",
        TokenError::NoWorkspace => "the claims of the access token name no workspace",
        TokenError::Tags => "the groups or roles of the access token cannot be used",
        TokenError::Unavailable => "the issuer of the access token cannot be asked right now",
    }
}

fn no_publication(error: &PairError) -> Refusal {
    // Fail closed: whatever is wrong with the publication, nothing is decided without one.
    tracing::warn!(error = %error, "no publication to serve from");
    if matches!(error, PairError::NotPublished) {
        let message = "the workspace of the caller is not published";
        return Refusal::new(Kind::Unavailable, "workspace_not_published", message);
    }
    Refusal::new(
        Kind::Unavailable,
        "publication_unavailable",
        "the configuration of the workspace cannot be read right now",
    )
}
