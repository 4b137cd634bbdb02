//! RFC 9728: what this gateway is to OAuth, for clients that look for an issuer. Public to everybody, web pages included.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, StatusCode, Uri, header};
use obol_auth::oauth::AccessTokens;
use obol_model::Kind;
use serde::Serialize;

use crate::failure::{Refusal, json};

const ROOT: &str = "/.well-known/oauth-protected-resource";

/// A protected resource metadata document (RFC 9728 section 2).
#[derive(Serialize)]
struct Metadata<'a> {
    resource: String,
    authorization_servers: &'a [String],
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    scopes_supported: &'a [String],
    bearer_methods_supported: [&'static str; 1],
    resource_name: &'static str,
}

/// The document at the root, and at the paths of resources. Without OAuth there is none.
pub(crate) fn routes(tokens: Option<Arc<AccessTokens>>) -> Router {
    Router::new()
        .route(ROOT, get(document).options(preflight))
        .route(&format!("{ROOT}/"), get(document).options(preflight))
        .route(&format!("{ROOT}/{{*path}}"), get(document).options(preflight))
        .layer(middleware::map_response(for_all_origins))
        .with_state(tokens)
}

async fn document(State(tokens): State<Option<Arc<AccessTokens>>>, uri: Uri) -> Response {
    let path = uri.path().strip_prefix(ROOT).unwrap_or_default();
    let resource = tokens.as_ref().map(|tokens| tokens.resource());
    let Some((resource, id)) = resource.and_then(|resource| Some((resource, resource.at(path)?))) else {
        let message = "there is no OAuth protected resource here";
        return Refusal::new(Kind::NotFound, "no_such_resource", message).into_response();
    };
    json(
        Response::builder(),
        &Metadata {
            resource: id,
            authorization_servers: resource.issuers(),
            scopes_supported: resource.scopes(),
            bearer_methods_supported: ["header"],
            resource_name: "Obol gateway",
        },
    )
}

/// Clients in browsers send the protocol version with every request, which makes this one ask first.
async fn preflight() -> Response {
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, OPTIONS"),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, "*"),
        (header::ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

async fn for_all_origins(mut response: Response) -> Response {
    response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    response
}
