use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cedar_policy::{
    AuthorizationError, Context as CedarContext, Decision as Verdict, Entities, Entity, EntityUid,
    EvaluationError as CedarError, PolicyId, Request as CedarRequest, Response, RestrictedExpression,
};
use obol_model::{ConnectionName, metric};

use crate::compile::PARSED_SCHEMA;
use crate::request::{TYPES, uid};
use crate::{Policies, Request, Resource, arguments};

/// The answer to one [`Request`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether it may be done.
    pub allowed: bool,
    /// The policies that made the decision, as `@id` or `file#number`; none when nothing permits. Safe to log.
    pub policies: Vec<String>,
    /// What could not be evaluated; then the answer is no.
    pub errors: Vec<EvaluationError>,
}

/// Why something could not be evaluated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvaluationError {
    /// The policy, as `@id` or `file#number`; `None` when the question itself cannot be asked. Safe to log.
    pub policy: Option<String>,
    /// What kind of error it is. Safe to log.
    pub reason: &'static str,
    /// Everything about it. May quote names, URIs and arguments: for the one who asked, never for a log.
    pub detail: String,
}

impl EvaluationError {
    fn of_question(reason: &'static str, detail: impl fmt::Display) -> Self {
        Self { policy: None, reason, detail: detail.to_string() }
    }
}

/// A question in Cedar's terms.
pub(crate) struct Asked {
    pub(crate) request: CedarRequest,
    pub(crate) entities: Entities,
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
        let decision = match asked(request, arguments) {
            Ok(asked) => {
                self.decision(&self.authorizer.is_authorized(&asked.request, &self.set, &asked.entities))
            }
            Err(error) => Decision { allowed: false, policies: Vec::new(), errors: vec![error] },
        };
        if !decision.errors.is_empty() {
            let reasons: Vec<_> = decision.errors.iter().map(|e| e.reason).collect();
            tracing::warn!(
                action = request.action.as_str(),
                policies = ?decision.policies,
                ?reasons,
                "policy evaluation failed, denied"
            );
        }
        decision
    }

    pub(crate) fn decision(&self, response: &Response) -> Decision {
        let diagnostics = response.diagnostics();
        let errors: Vec<EvaluationError> = diagnostics.errors().map(|e| self.describe(e)).collect();
        let mut policies: Vec<String> = if errors.is_empty() {
            diagnostics.reason().filter_map(|id| self.label(id)).collect()
        } else {
            // A policy that could not be evaluated decides: it may have been a `forbid`.
            errors.iter().filter_map(|e| e.policy.clone()).collect()
        };
        policies.sort_unstable();
        Decision { allowed: response.decision() == Verdict::Allow && errors.is_empty(), policies, errors }
    }

    fn label(&self, id: &PolicyId) -> Option<String> {
        self.about.get(id).map(|info| info.label.clone())
    }

    fn describe(&self, error: &AuthorizationError) -> EvaluationError {
        let AuthorizationError::PolicyEvaluationError(error) = error;
        EvaluationError {
            policy: self.label(error.policy_id()),
            reason: reason(error.inner()),
            detail: error.inner().to_string(),
        }
    }
}

/// The kind of an error, without what it quotes.
fn reason(error: &CedarError) -> &'static str {
    match error {
        CedarError::EntityDoesNotExist(_) => "it reads an entity that is not there",
        CedarError::EntityAttrDoesNotExist(_) => "it reads an attribute or tag that the entity does not have",
        CedarError::RecordAttrDoesNotExist(_) => "it reads an attribute that the record does not have",
        CedarError::TypeError(_) => "a value has the wrong type",
        CedarError::IntegerOverflow(_) => "an integer overflows",
        CedarError::FailedExtensionFunctionExecution(_) => "a value is not of the form that a function needs",
        CedarError::RecursionLimit(_) => "it is too deeply nested",
        _ => "it cannot be evaluated",
    }
}

/// Puts a question in Cedar's terms.
pub(crate) fn asked(request: &Request<'_>, arguments: Option<&str>) -> Result<Asked, EvaluationError> {
    let impossible = |e: &dyn fmt::Display| EvaluationError::of_question("the question cannot be asked", e);
    let caller = request.caller;
    let (resource, mut entities) = entities_of_resource(request).map_err(|e| impossible(&e))?;
    let this = caller.entity().ok_or_else(|| impossible(&"the caller's attributes cannot be expressed"))?;
    entities.push(this.clone());
    entities.push(Entity::with_uid(caller.workspace_uid().clone()));

    let context = &request.context;
    let mut pairs: Pairs = vec![text("environment", context.environment), text("era", context.era.as_str())];
    pairs.extend(context.client.map(|client| text("client", client)));
    if let Some(json) = arguments {
        let pairs_of_call = arguments::as_text(json)
            .map_err(|e| EvaluationError::of_question("the arguments have no single reading", e))?;
        let tags = pairs_of_call.into_iter().map(|(k, v)| (k, RestrictedExpression::new_string(v)));
        let id = uid(&TYPES.arguments, "call");
        entities.push(Entity::new_with_tags(id.clone(), [], [], tags).map_err(|e| impossible(&e))?);
        pairs.push(("arguments".to_owned(), RestrictedExpression::new_entity_uid(id)));
    }
    let context = CedarContext::from_pairs(pairs).map_err(|e| impossible(&e))?;
    // Against the schema: a resource that does not go with the action is a fault of ours, and denied.
    let (principal, action) = (caller.uid().clone(), request.action.uid());
    let request = CedarRequest::new(principal, action, resource, context, Some(&PARSED_SCHEMA))
        .map_err(|e| impossible(&e))?;
    let entities = Entities::from_entities(entities, None).map_err(|e| impossible(&e))?;
    Ok(Asked { request, entities })
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
        Resource::Connection(name) => (uid(&TYPES.connection, name.as_str()), Some((name, None))),
        Resource::Model { name, provider, price_class } => {
            let id = uid(&TYPES.model, name.as_str());
            let attributes = vec![
                text("name", name.as_str()),
                text("provider", provider.as_str()),
                text("price_class", price_class.as_str()),
            ];
            add(&id, attributes, workspace)?;
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
