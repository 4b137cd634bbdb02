use std::sync::Arc;
use std::sync::atomic::Ordering;

use cedar_policy::{AuthorizationError, RestrictedExpression};
use cedar_policy::{
    Context as CedarContext, Decision as Verdict, Entities, Entity, EntityUid, Request as CedarRequest,
};
use obol_model::{ConnectionName, metric};

use crate::compile::PARSED_SCHEMA;
use crate::request::{TYPES, uid, uid_of_workspace};
use crate::{Policies, Request, Resource, arguments};

/// The answer to one [`Request`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether it may be done.
    pub allowed: bool,
    /// The policies that made the decision, as `@id` or `file#number`; none when nothing permits. Safe to log.
    pub policies: Vec<String>,
    /// What could not be evaluated; then the answer is no. For the audit trail: may quote names and URIs.
    pub errors: Vec<String>,
}

type Pairs = Vec<(String, RestrictedExpression)>;

impl Policies {
    /// Decides. Never fails: what cannot be evaluated is denied and counted.
    pub fn decide(&self, request: &Request<'_>) -> Arc<Decision> {
        let decision = if request.context.arguments.is_none() || !self.uses_arguments {
            self.cache.get_or(request, || self.evaluate(request, None))
        } else {
            Arc::new(self.evaluate(request, request.context.arguments))
        };
        if let Some((_, allow, deny)) = self.counters.iter().find(|(action, ..)| *action == request.action) {
            if decision.allowed { allow } else { deny }.increment(1);
        }
        if !decision.errors.is_empty() {
            metrics::counter!(metric::AUTHZ_EVALUATION_ERRORS).increment(1);
        }
        decision
    }

    fn evaluate(&self, request: &Request<'_>, arguments: Option<&str>) -> Decision {
        self.evaluations.fetch_add(1, Ordering::Relaxed);
        let decision = self.ask_cedar(request, arguments).unwrap_or_else(|error| Decision {
            allowed: false,
            policies: Vec::new(),
            errors: vec![error],
        });
        if !decision.errors.is_empty() {
            tracing::warn!(
                action = request.action.as_str(),
                policies = ?decision.policies,
                "policy evaluation failed, denied"
            );
        }
        decision
    }

    fn ask_cedar(&self, request: &Request<'_>, arguments: Option<&str>) -> Result<Decision, String> {
        let caller = request.caller;
        let (resource, mut entities) = entities_of_resource(request)?;
        entities.push(caller.entity().ok_or("the caller's attributes cannot be expressed")?.clone());
        entities.push(Entity::with_uid(caller.workspace_uid().clone()));

        let context = &request.context;
        let mut pairs: Pairs =
            vec![text("environment", context.environment), text("era", context.era.as_str())];
        pairs.extend(context.client.map(|client| text("client", client)));
        if let Some(json) = arguments {
            let tags =
                arguments::as_text(json)?.into_iter().map(|(k, v)| (k, RestrictedExpression::new_string(v)));
            let id = uid(&TYPES.arguments, "call");
            entities.push(Entity::new_with_tags(id.clone(), [], [], tags).map_err(|e| e.to_string())?);
            pairs.push(("arguments".to_owned(), RestrictedExpression::new_entity_uid(id)));
        }
        let context = CedarContext::from_pairs(pairs).map_err(|e| e.to_string())?;
        // Against the schema: a resource that does not go with the action is a fault of ours, and denied.
        let asked = CedarRequest::new(
            caller.uid().clone(),
            request.action.uid(),
            resource,
            context,
            Some(&PARSED_SCHEMA),
        )
        .map_err(|e| e.to_string())?;
        let entities = Entities::from_entities(entities, None).map_err(|e| e.to_string())?;

        let response = self.authorizer.is_authorized(&asked, &self.set, &entities);
        let diagnostics = response.diagnostics();
        let errors: Vec<String> = diagnostics.errors().map(|e| self.describe(e)).collect();
        let label = |id| self.labels.get(id).cloned();
        let failed = diagnostics
            .errors()
            .filter_map(|AuthorizationError::PolicyEvaluationError(e)| label(e.policy_id()));
        let mut policies: Vec<String> = if errors.is_empty() {
            diagnostics.reason().filter_map(label).collect()
        } else {
            // A policy that could not be evaluated decides: it may have been a `forbid`.
            failed.collect()
        };
        policies.sort_unstable();
        Ok(Decision { allowed: response.decision() == Verdict::Allow && errors.is_empty(), policies, errors })
    }

    fn describe(&self, error: &AuthorizationError) -> String {
        let AuthorizationError::PolicyEvaluationError(error) = error;
        let label = self.labels.get(error.policy_id()).map_or("unknown policy", String::as_str);
        format!("{label}: {}", error.inner())
    }
}

fn text(name: &str, value: &str) -> (String, RestrictedExpression) {
    (name.to_owned(), RestrictedExpression::new_string(value.to_owned()))
}

/// The resource's id, and the entities between it and the workspace.
fn entities_of_resource(request: &Request<'_>) -> Result<(EntityUid, Vec<Entity>), String> {
    let workspace = request.caller.workspace_uid();
    let mut entities = Vec::with_capacity(5);
    let mut add = |id: &EntityUid, attributes: Pairs, parent: &EntityUid| {
        let entity =
            Entity::new_with_tags(id.clone(), attributes, [parent.clone()], []).map_err(|e| e.to_string())?;
        entities.push(entity);
        Ok::<_, String>(())
    };
    let in_connection = |of, connection: &ConnectionName, name: &str| {
        (uid(of, &format!("{connection}/{name}")), uid(&TYPES.connection, connection.as_str()))
    };
    let (id, connection) = match request.resource {
        // Another workspace than the caller's is no resource of any policy.
        Resource::Workspace(id) if uid_of_workspace(id) != *workspace => {
            return Err("the workspace is not the caller's".to_owned());
        }
        Resource::Workspace(_) => (workspace.clone(), None),
        Resource::Connection(name) => (uid(&TYPES.connection, name.as_str()), Some((name, None))),
        Resource::Model { name } => {
            let id = uid(&TYPES.model, name.as_str());
            add(&id, vec![text("name", name.as_str())], workspace)?;
            (id, None)
        }
        Resource::Tool { connection, name, destructive, read_only } => {
            let (id, parent) = in_connection(&TYPES.tool, connection, name);
            let flag = |name: &str, value| (name.to_owned(), RestrictedExpression::new_bool(value));
            let attributes = vec![
                text("connection", connection.as_str()),
                text("name", name),
                flag("destructive", destructive),
                flag("read_only", read_only),
            ];
            add(&id, attributes, &parent)?;
            (id, Some((connection, Some(parent))))
        }
        Resource::Resource { connection, uri } => {
            let (id, parent) = in_connection(&TYPES.resource, connection, uri);
            add(&id, vec![text("connection", connection.as_str()), text("uri", uri)], &parent)?;
            (id, Some((connection, Some(parent))))
        }
        Resource::Prompt { connection, name } => {
            let (id, parent) = in_connection(&TYPES.prompt, connection, name);
            add(&id, vec![text("connection", connection.as_str()), text("name", name)], &parent)?;
            (id, Some((connection, Some(parent))))
        }
    };
    if let Some((name, parent)) = connection {
        add(parent.as_ref().unwrap_or(&id), vec![text("name", name.as_str())], workspace)?;
    }
    Ok((id, entities))
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
