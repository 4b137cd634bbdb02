//! What other parts of Obol show themselves by.

use http::{HeaderMap, header};
use obol_auth::{AuthError, Claims, Expected, ServiceTokens};
use obol_model::{Clock, Kind};

use crate::failure::Refusal;

/// Accepts the service JWT of a request, once among all replicas: whoever calls does not choose the replica, so that a
/// captured token must not be good for one request to each of them.
pub(crate) async fn caller(
    tokens: &ServiceTokens,
    expected: &Expected<'_>,
    headers: &HeaderMap,
    clock: &dyn Clock,
) -> Result<Claims, Refusal> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().map(http::HeaderValue::as_bytes);
    let token = match obol_auth::credential(value, None) {
        Ok(token) if values.next().is_none() => token,
        Err(AuthError::Missing) => {
            let message = "send a service JWT as `Authorization: Bearer …`";
            return Err(refused("missing_credential", message, "Bearer realm=\"obol\""));
        }
        _ => return Err(invalid()),
    };
    tokens.verify_shared(token, expected, clock.now()).await.map_err(|why| {
        tracing::warn!(error = %why, "service token refused");
        if why.kind() == Kind::Unauthenticated {
            return invalid();
        }
        let message = "the service JWT cannot be checked right now";
        Refusal::new(why.kind(), "credential_store_unavailable", message)
    })
}

fn invalid() -> Refusal {
    let challenge = "Bearer realm=\"obol\", error=\"invalid_token\"";
    refused("invalid_service_token", "the service JWT is not valid", challenge)
}

fn refused(code: &'static str, message: &str, challenge: &str) -> Refusal {
    Refusal { challenge: Some(challenge.to_owned()), ..Refusal::new(Kind::Unauthenticated, code, message) }
}
