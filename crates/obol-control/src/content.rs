use obol_model::snapshot::{Documents, Sealed};
use obol_model::{KeyRing, WorkspaceId};
use serde_json::Value;

/// Whether two publications have the same content, whatever their revisions and nonces (see the crate's text).
pub(crate) fn same_content(a: &Documents, b: &Documents, workspace: &WorkspaceId, ring: &KeyRing) -> bool {
    let equal = |a: &[u8], b: &[u8]| match (parse(a), parse(b)) {
        (Some(a), Some(b)) => same(&a, &b, workspace, ring),
        _ => false,
    };
    equal(&a.workspace, &b.workspace) && equal(&a.policy, &b.policy)
}

/// A document without its revision.
fn parse(document: &[u8]) -> Option<Value> {
    let mut value: Value = serde_json::from_slice(document).ok()?;
    value.as_object_mut()?.remove("revision");
    Some(value)
}

fn same(a: &Value, b: &Value, workspace: &WorkspaceId, ring: &KeyRing) -> bool {
    match (a, b) {
        (Value::String(a), Value::String(b)) => a == b || same_secret(a, b, workspace, ring),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b, workspace, ring))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b, workspace, ring)))
        }
        _ => a == b,
    }
}

/// Any two texts may come here: only what the ring sealed for this workspace opens.
fn same_secret(a: &str, b: &str, workspace: &WorkspaceId, ring: &KeyRing) -> bool {
    let key = |text: &str| text.strip_prefix("v1.")?.split('.').next().map(str::to_owned);
    let open = |text: &str| ring.open(workspace, &Sealed(text.to_owned()));
    key(a).is_some()
        && key(a) == key(b)
        && matches!((open(a), open(b)), (Ok(a), Ok(b)) if a.matches(b.expose().as_bytes()))
}
