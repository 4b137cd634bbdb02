//! The operator's API, below `/admin` on the operations listener (DESIGN §8.1): no virtual key opens it, and without
//! `OBOL_ADMIN_TOKEN` it does not exist.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use http::{HeaderMap, header};
use jiff::{SignedDuration, Timestamp};
use obol_model::{Clock, Kind, WorkspaceId};
use obol_snapshot::{Publications, Status};
use serde::Serialize;
use tokio::time::Instant;

use crate::compiled::CompileWorkspace;
use crate::failure::{Refusal, json};
use crate::gateway::GatewayParts;

/// The shortest operator credential: long enough that nobody guesses it.
const SHORTEST: usize = 32;

/// The credential of operators. Only its SHA-256 is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminToken([u8; 32]);

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken")
    }
}

impl AdminToken {
    /// Reads the credential itself, or `sha256:` and its hash in hexadecimal.
    ///
    /// # Errors
    /// What is wrong with it, as the second half of a sentence that shows nothing of it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(hex) = text.strip_prefix("sha256:") {
            return hash_of_hex(hex)
                .map(Self)
                .ok_or_else(|| "has no 64 hexadecimal digits after `sha256:`".into());
        }
        if text.len() < SHORTEST {
            return Err(format!("is shorter than {SHORTEST} bytes"));
        }
        // Nothing else can be sent in a header as it is.
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("has characters other than visible ASCII ones".into());
        }
        Ok(Self(sha256(text.as_bytes())))
    }

    /// Whether this is the credential. Takes the same time for every wrong one.
    fn is(&self, presented: &[u8]) -> bool {
        verify_slices_are_equal(&self.0, &sha256(presented)).is_ok()
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hash
}

fn hash_of_hex(hex: &str) -> Option<[u8; 32]> {
    let mut hash = [0; 32];
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    if pairs.len() != hash.len() || !rest.is_empty() {
        return None;
    }
    for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
        let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(hash)
}

/// What operators look at.
pub(crate) struct Admin {
    token: Option<AdminToken>,
    publications: Arc<Publications<CompileWorkspace>>,
    clock: Arc<dyn Clock>,
}

impl Admin {
    pub(crate) fn new(parts: &GatewayParts) -> Arc<Self> {
        Arc::new(Self {
            token: parts.admin_token.clone(),
            publications: parts.publications.clone(),
            clock: parts.clock.clone(),
        })
    }

    /// Every route below `/admin`, behind the operator's credential. That there is no such route is told to operators
    /// alone.
    pub(crate) fn routes(self: Arc<Self>) -> Router {
        Router::new()
            .route("/admin/publications", get(publications))
            .route("/admin", any(no_such_path))
            .route("/admin/{*rest}", any(no_such_path))
            .route_layer(middleware::from_fn_with_state(self.clone(), authorize))
            .with_state(self)
    }

    fn check(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let token = self.token.as_ref().ok_or_else(|| {
            Refusal::new(Kind::NotFound, "admin_off", "the operator API is off: set OBOL_ADMIN_TOKEN")
        })?;
        let mut sent = headers.get_all(header::AUTHORIZATION).iter();
        let (credential, second) = (sent.next(), sent.next());
        let Some(credential) = credential else {
            let message = "send the operator credential as `Authorization: Bearer …`";
            return Err(unauthenticated("missing_credential", message, "Bearer realm=\"obol-admin\""));
        };
        let bytes = credential.as_bytes();
        let known = match bytes.split_at_checked("Bearer ".len()) {
            Some((scheme, presented)) => scheme.eq_ignore_ascii_case(b"Bearer ") && token.is(presented),
            None => false,
        };
        if known && second.is_none() {
            return Ok(());
        }
        tracing::warn!("operator credential refused");
        let challenge = "Bearer realm=\"obol-admin\", error=\"invalid_token\"";
        Err(unauthenticated("invalid_credential", "the operator credential is not valid", challenge))
    }
}

fn unauthenticated(code: &'static str, message: &str, challenge: &'static str) -> Refusal {
    Refusal { challenge: Some(challenge.to_owned()), ..Refusal::new(Kind::Unauthenticated, code, message) }
}

async fn authorize(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Response {
    match admin.check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

async fn no_such_path() -> Response {
    let message = "there is nothing here: publications are at /admin/publications";
    Refusal::new(Kind::NotFound, "no_such_path", message).into_response()
}

#[derive(Serialize)]
struct Listing {
    /// How long ago the subscription to invalidations was last known to stand; `null` before the first one.
    reconciled_age_ms: Option<u64>,
    publications: Vec<Shown>,
}

#[derive(Serialize)]
struct Shown {
    workspace_id: WorkspaceId,
    /// What requests get; `null` when nothing is fit to be served.
    revision: Option<String>,
    loaded_at: Option<Timestamp>,
    /// How long ago it was compared with the store. From 30 s on it is not served.
    validated_age_ms: Option<u64>,
    /// What the store holds instead, and why it was not taken.
    rejected: Option<ShownRejected>,
}

#[derive(Serialize)]
struct ShownRejected {
    /// `null` when it cannot be told.
    revision: Option<String>,
    reason: String,
    at: Timestamp,
}

/// `GET /admin/publications`: which revision this replica serves of each workspace, and what it refused.
async fn publications(State(admin): State<Arc<Admin>>) -> Response {
    let now = admin.clock.now();
    let listing = Listing {
        reconciled_age_ms: admin.publications.reconciled_at().map(|at| millis(at.elapsed())),
        publications: admin.publications.statuses().into_iter().map(|status| shown(status, now)).collect(),
    };
    json(Response::builder(), &listing)
}

fn shown(status: Status, now: Timestamp) -> Shown {
    let wall = |at: Instant| {
        let ago = SignedDuration::try_from(at.elapsed()).unwrap_or_default();
        now.checked_sub(ago).unwrap_or(now)
    };
    let active = status.active;
    Shown {
        workspace_id: status.workspace,
        revision: active.map(|active| active.revision.to_string()),
        loaded_at: active.map(|active| wall(active.installed_at)),
        validated_age_ms: active.map(|active| millis(active.validated_at.elapsed())),
        rejected: status.rejected.map(|rejected| ShownRejected {
            revision: rejected.revision.map(|revision| revision.to_string()),
            reason: reason(&rejected.why),
            at: wall(rejected.at),
        }),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The error and everything behind it, on one line.
fn reason(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |e| e.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_credential_or_its_hash_is_read() {
        let plain = "an-operator-credential-of-40-bytes-......";
        let hash = "sha256:fa6b5d2bd4a2a7ec4c7dd4e9f9f3ddd6f8c8b7d2f3d1d0b9c8a7e6f5d4c3b2a1";
        let token = AdminToken::parse(plain).unwrap();
        assert!(token.is(plain.as_bytes()));
        for wrong in ["", "x", &plain[1..], &format!("{plain}x")] {
            assert!(!token.is(wrong.as_bytes()), "{wrong}");
        }
        let hex: String = sha256(plain.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(AdminToken::parse(&format!("sha256:{hex}")).unwrap(), token);
        assert_eq!(AdminToken::parse(&format!("sha256:{}", hex.to_uppercase())).unwrap(), token);
        assert_ne!(AdminToken::parse(hash).unwrap(), token);
        // The hash is no credential.
        assert!(!token.is(hex.as_bytes()) && !token.is(format!("sha256:{hex}").as_bytes()));
        assert_eq!(format!("{token:?}"), "AdminToken");
    }

    #[test]
    fn weak_and_broken_ones_are_refused_without_being_shown() {
        for bad in [
            "",
            "hunter2",
            "sha256:",
            "sha256:hunter2",
            &format!("sha256:{}", "g".repeat(64)),
            &"ü".repeat(40),
        ] {
            let why = AdminToken::parse(bad).unwrap_err();
            assert!(!why.contains("hunter2"), "{why}");
        }
    }
}
