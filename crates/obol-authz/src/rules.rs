//! Rules of our own on single policies, beside those of Cedar's validator: each is a mistake that validates, and then
//! does not do what its author believes.

use cedar_policy::{ActionConstraint, Effect, Policy};
use obol_model::snapshot::PolicyFile;
use serde_json::Value;

use crate::fault::{fault_at, offset_of};
use crate::{Action, PolicyFault};

/// What only calls have.
const ARGUMENTS: &str = "arguments";

/// Whether a policy may look at `context.arguments`. Any use of `context` other than for a named attribute counts, so
/// that the answer errs only towards not caching.
pub(crate) fn may_read_arguments(policy: &Policy) -> bool {
    policy.to_json().map_or(true, |json| reads_arguments(&json, true))
}

/// The fault of a policy that reads arguments where there are none. `context has arguments` is then never true: a
/// `permit` grants nothing, and a `forbid … unless` forbids everything, or the reverse of what was meant.
pub(crate) fn arguments_out_of_place(policy: &Policy, file: &PolicyFile) -> Option<PolicyFault> {
    if !policy.to_json().is_ok_and(|json| reads_arguments(&json, false)) {
        return None;
    }
    let without: Vec<Action> = match policy.action_constraint() {
        ActionConstraint::Any => Action::ALL.into_iter().filter(|a| !a.has_arguments()).collect(),
        ActionConstraint::Eq(action) => Action::without_arguments(&[action]),
        ActionConstraint::In(actions) => Action::without_arguments(&actions),
    };
    let first = without.first()?;
    let begin = offset_of(policy);
    let rest = file.text.get(begin..).unwrap_or_default();
    let offset = begin + rest.find("context").unwrap_or(0);
    let message = format!(
        "this rule reads the arguments of a call and also holds for `{}`, which has none",
        first.as_str()
    );
    let help = "limit it in its head: `action == Action::\"mcp:callTool\"`, or `action in [Action::\"mcp:callTool\", \
                Action::\"mcp:getPrompt\"]`";
    Some(fault_at(file, offset, message, Some(help.to_owned())))
}

/// How a rule on arguments leaves lists alone.
const BAD_ONES: &str =
    "permit without arguments and forbid the bad ones: `forbid (…) when { context has arguments && !(…) }`";

/// What is valid and probably not meant.
pub(crate) fn warnings(policy: &Policy, file: &PolicyFile) -> Vec<PolicyFault> {
    let Ok(json) = policy.to_json() else { return Vec::new() };
    let begin = offset_of(policy);
    let mut warnings = Vec::new();
    if policy.effect() == Effect::Permit && reads_arguments(&json, false) {
        let message =
            "this permit reads arguments, which lists do not have: what it alone permits is in no list";
        warnings.push(fault_at(file, begin, message, Some(BAD_ONES.to_owned())));
    }
    let clauses = |kind: &str| {
        let all = json.get("conditions").and_then(Value::as_array);
        all.into_iter()
            .flatten()
            .filter(|c| c.get("kind").and_then(Value::as_str) == Some(kind))
            .cloned()
            .collect()
    };
    let (when, unless) = (Value::Array(clauses("when")), Value::Array(clauses("unless")));
    if policy.effect() == Effect::Forbid && reads_arguments(&unless, false) && !reads_arguments(&when, false)
    {
        let message =
            "lists have no arguments, so this forbid holds for them: what it is about is in no list";
        warnings.push(fault_at(file, begin, message, Some(BAD_ONES.to_owned())));
    }
    let mut named = Vec::new();
    attributes_of_named(&json, &mut named);
    for (kind, id) in named {
        let rest = file.text.get(begin..).unwrap_or_default();
        let offset = begin + rest.find(&format!("{kind}::")).unwrap_or(0);
        let message = format!(
            "attributes of `{kind}::\"{id}\"` are known only in its own requests: for all others this rule fails, \
             and a rule that fails denies"
        );
        let help = "compare instead (`principal == …`), or give the key a tag and ask for that";
        warnings.push(fault_at(file, offset, message, Some(help.to_owned())));
    }
    warnings
}

/// Looks through a policy as Cedar's JSON. `wary` counts any use of `context` as a whole.
fn reads_arguments(json: &Value, wary: bool) -> bool {
    match json {
        Value::Array(items) => items.iter().any(|item| reads_arguments(item, wary)),
        Value::Object(object) => object.iter().any(|(key, value)| {
            let of_context = value.pointer("/left/Var").and_then(Value::as_str) == Some("context");
            match (key.as_str(), value) {
                ("." | "has", _) if of_context => {
                    value.get("attr").and_then(Value::as_str) == Some(ARGUMENTS)
                }
                ("Var", Value::String(name)) => wary && name == "context",
                _ => reads_arguments(value, wary),
            }
        }),
        _ => false,
    }
}

/// Entities that are named by their id and whose attributes or tags are read.
fn attributes_of_named(json: &Value, found: &mut Vec<(String, String)>) {
    match json {
        Value::Array(items) => items.iter().for_each(|item| attributes_of_named(item, found)),
        Value::Object(object) => {
            for (key, value) in object {
                let entity =
                    value.pointer("/left/Value/__entity").filter(|_| matches!(key.as_str(), "." | "getTag"));
                let text = |name| entity.and_then(|e| e.get(name)?.as_str()).map(str::to_owned);
                let named = text("type").zip(text("id"));
                found.extend(named.filter(|named| !found.contains(named)));
                attributes_of_named(value, found);
            }
        }
        _ => {}
    }
}
