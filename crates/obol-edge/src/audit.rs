//! The audit log: who did what with which tool, model, resource or prompt, and which policies decided (DESIGN §15).
//!
//! One record per decision about something that is to be done now: a call, a read, a prompt, a completion, a model, the
//! connections of a new session; allowed ones at `info`, denied ones too. What a list shows is one record per list at
//! `debug`: its decisions are those of the calls, and there are thousands of them.
//!
//! INVARIANT: no argument, no credential, no whole session id and no path or query of a URI is ever part of a record, and
//! of an evaluation error only its kind: Cedar's own words quote the values that it stumbled over.

use obol_authz::{Action, Decision, Resource};
use obol_model::SessionId;
use url::Url;

use crate::front::Admitted;

/// Where the records go; `OBOL_LOG` can name it.
const TARGET: &str = "obol::audit";

/// Records a decision about something that a caller wants to do now. `method` is what the client asked for.
pub(crate) fn decided(
    admitted: &Admitted,
    session: Option<SessionId>,
    method: &str,
    action: Action,
    resource: Resource<'_>,
    decision: &Decision,
) {
    if !tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        return;
    }
    let What { connection, tool, prompt, uri, model, provider } = What::of(resource);
    // Only where something failed: an empty list in every record says nothing.
    let errors = decision.errors.iter().map(|e| e.reason).collect::<Vec<_>>();
    let errors = (!errors.is_empty()).then(|| errors.join("; "));
    tracing::info!(
        target: TARGET,
        request_id = %admitted.request_id,
        workspace = %admitted.identity.workspace_id(),
        revision = %admitted.publication.revision(),
        principal = %admitted.identity.principal(),
        session_last4 = session.map(|id| id.last4()),
        method,
        action = action.as_str(),
        connection,
        tool,
        prompt,
        uri,
        model,
        provider,
        decision = if decision.allowed { "allow" } else { "deny" },
        policies = %decision.policies.join(", "),
        errors,
        "decision"
    );
}

/// Records what a list showed.
pub(crate) fn listed(
    admitted: &Admitted,
    session: Option<SessionId>,
    method: &str,
    shown: usize,
    hidden: usize,
) {
    if !tracing::enabled!(target: TARGET, tracing::Level::DEBUG) {
        return;
    }
    tracing::debug!(
        target: TARGET,
        request_id = %admitted.request_id,
        workspace = %admitted.identity.workspace_id(),
        revision = %admitted.publication.revision(),
        principal = %admitted.identity.principal(),
        session_last4 = session.map(|id| id.last4()),
        method,
        shown,
        hidden,
        "list"
    );
}

/// What a decision is about, one field each.
#[derive(Debug, Default, PartialEq, Eq)]
struct What<'a> {
    connection: Option<&'a str>,
    tool: Option<&'a str>,
    prompt: Option<&'a str>,
    uri: Option<String>,
    model: Option<&'a str>,
    provider: Option<&'a str>,
}

impl<'a> What<'a> {
    fn of(resource: Resource<'a>) -> Self {
        match resource {
            Resource::Connection(name) => Self { connection: Some(name.as_str()), ..Self::default() },
            Resource::Tool { connection, name, .. } => {
                Self { connection: Some(connection.as_str()), tool: Some(name), ..Self::default() }
            }
            Resource::Prompt { connection, name } => {
                Self { connection: Some(connection.as_str()), prompt: Some(name), ..Self::default() }
            }
            Resource::Resource { connection, uri } => {
                Self { connection: Some(connection.as_str()), uri: Some(origin_of(uri)), ..Self::default() }
            }
            Resource::Model { name, provider, .. } => {
                Self { model: Some(name.as_str()), provider: Some(provider.as_str()), ..Self::default() }
            }
        }
    }
}

/// The scheme of a URI, and the host where it is one of the web: paths, queries and the made-up hosts of private schemes
/// may hold what nobody should read in a log.
fn origin_of(uri: &str) -> String {
    match Url::parse(uri) {
        Ok(url) => match url.host_str().filter(|_| matches!(url.scheme(), "http" | "https")) {
            Some(host) => format!("{}://{host}", url.scheme()),
            None => format!("{}:", url.scheme()),
        },
        Err(_) => "unreadable".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_uri_only_what_is_public_is_told() {
        for (uri, told) in [
            ("https://me:pw@docs.example.com:8443/secret?token=a#b", "https://docs.example.com"),
            ("file:///srv/secret.txt", "file:"),
            ("vault://s3cret/path", "vault:"),
            ("template://{id}/x", "template:"),
            ("no uri at all", "unreadable"),
        ] {
            assert_eq!(origin_of(uri), told);
        }
    }
}
