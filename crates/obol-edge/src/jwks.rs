//! `/.well-known/jwks.json`: the public keys of this gateway's service JWTs, for those who verify them (DESIGN §8.2).

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use http::header;
use obol_auth::ServiceTokens;
use obol_model::Kind;

use crate::failure::Refusal;

/// How long others may keep the set: below the time between two steps of a key rotation.
const CACHEABLE: &str = "public, max-age=300";

/// The set of our keys. Without a key pair there is none.
pub(crate) fn routes(tokens: Option<&ServiceTokens>) -> Router {
    let set = tokens.and_then(ServiceTokens::jwks).map(Bytes::from);
    Router::new().route("/.well-known/jwks.json", get(document)).with_state(set)
}

async fn document(State(set): State<Option<Bytes>>) -> Response {
    let Some(set) = set else {
        let message = "there are no public keys here: service JWTs are off or signed with a shared secret";
        return Refusal::new(Kind::NotFound, "no_public_keys", message).into_response();
    };
    let headers = [(header::CONTENT_TYPE, "application/jwk-set+json"), (header::CACHE_CONTROL, CACHEABLE)];
    (headers, set).into_response()
}
