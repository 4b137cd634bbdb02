//! Answers that a provider keeps under our account: each is its caller's alone (DESIGN §11.1).

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::response::Response;
use http::{HeaderMap, Method};
use obol_llm::{Api, Route};
use obol_model::{Causes, Kind};
use obol_session::Binding;

use super::refused::Refused;
use super::{LlmSurface, Surface, decide};
use crate::failure;
use crate::front::Admitted;

type Id = Result<Path<String>, PathRejection>;

/// `GET /v1/responses/{id}`.
pub(super) async fn get(
    State(surface): Surface,
    id: Id,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    surface.stored(Method::GET, id, None, query, headers).await
}

/// `DELETE /v1/responses/{id}`.
pub(super) async fn delete(State(surface): Surface, id: Id, headers: HeaderMap) -> Response {
    surface.stored(Method::DELETE, id, None, None, headers).await
}

/// `GET /v1/responses/{id}/input_items`.
pub(super) async fn input_items(
    State(surface): Surface,
    id: Id,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    surface.stored(Method::GET, id, Some("input_items"), query, headers).await
}

/// One that is not there, one of another caller and one whose target is gone have one answer.
fn not_found(id: &str) -> Refused {
    Refused::new(Kind::NotFound, "response_not_found", format!("Response with id '{}' not found.", short(id)))
}

/// The same of an answer that a request goes on from.
pub(super) fn no_previous(id: &str) -> Refused {
    let message = format!("Previous response with id '{}' not found.", short(id));
    Refused::new(Kind::NotFound, "previous_response_not_found", message).about("previous_response_id")
}

fn short(id: &str) -> String {
    id.chars().take(128).collect()
}

/// Whether the answer lies with this target.
pub(super) fn is_of(binding: &Binding, route: &Route) -> bool {
    *route.provider() == binding.provider && route.target.model == binding.upstream_model
}

/// The target that keeps it, if the caller may still use it.
fn holder(admitted: &Admitted, binding: &Binding) -> Option<Arc<Route>> {
    let models = &admitted.publication.compiled.routes;
    models.iter().find_map(|(name, routes)| {
        let is_it =
            |route: &&Arc<Route>| is_of(binding, route) && decide(admitted, name, &route.target).1.allowed;
        routes.iter().find(is_it).cloned()
    })
}

impl LlmSurface {
    /// The binding of an answer, if it is the caller's own.
    pub(super) async fn binding(&self, admitted: &Admitted, id: &str) -> Result<Option<Binding>, Refused> {
        let found = self.bindings.find(admitted.identity.workspace_id(), id).await.map_err(|e| {
            tracing::warn!(error = %Causes(&e), "cannot tell whose a stored answer is");
            Refused::new(
                Kind::Unavailable,
                "store_unavailable",
                "stored answers cannot be looked up right now",
            )
        })?;
        let principal = admitted.identity.principal().to_string();
        Ok(found.filter(|binding| binding.principal == principal))
    }

    async fn stored(
        &self,
        method: Method,
        id: Id,
        below: Option<&'static str>,
        query: Option<String>,
        headers: HeaderMap,
    ) -> Response {
        self.serve(Api::OpenAi, &headers, async |admitted| {
            let id = id.as_deref().map_or("", String::as_str);
            if query.as_deref().is_some_and(|query| query.split('&').any(|pair| pair == "stream=true")) {
                let message = "a stored answer is given as a whole; leave `stream` out";
                return Err(
                    Refused::new(Kind::InvalidRequest, "unsupported_parameter", message).about("stream")
                );
            }
            let binding = self.binding(admitted, id).await?.ok_or_else(|| not_found(id))?;
            let route = holder(admitted, &binding).ok_or_else(|| not_found(id))?;
            let path = ["responses", id].into_iter().chain(below);
            let is_deleted = method == Method::DELETE;
            let Some(body) = self.llm.fetch(&route, method, path, query.as_deref()).await? else {
                return Err(not_found(id));
            };
            if is_deleted && let Err(e) = self.bindings.forget(admitted.identity.workspace_id(), id).await {
                // It expires, and what it names is gone.
                tracing::debug!(error = %Causes(&e), "the binding of a deleted answer stays");
            }
            Ok(failure::bytes_response(Response::builder(), body))
        })
        .await
    }
}
