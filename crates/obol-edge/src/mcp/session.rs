//! What a request knows of its session, and what its caller may see.

use std::sync::Arc;

use obol_authz::{Action, Context, Era, Request, Resource};
use obol_drain::Class;
use obol_mcp::catalogue::{Item, Source};
use obol_mcp::pool::ListKind;
use obol_mcp::wire::{Object, ProtocolVersion};
use obol_model::{ConnectionName, SessionId, WorkspaceId};
use obol_session::{SessionError, SessionRecord};
use serde_json::value::RawValue;

use super::Mcp;
use super::spelling::spellings;
use crate::compiled::{CompiledConnection, isolation_of};
use crate::failure::Refusal;
use crate::front::Admitted;

/// One request of one session under one publication. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Ctx {
    pub(super) admitted: Admitted,
    pub(super) session: Arc<SessionRecord>,
    pub(super) version: ProtocolVersion,
    /// `/mcp/{connection}` shows one connection alone.
    pub(super) view: Option<ConnectionName>,
    /// What the client called itself at `initialize`.
    pub(super) client: Option<Arc<str>>,
}

impl Ctx {
    pub(super) fn workspace(&self) -> &WorkspaceId {
        &self.admitted.key.workspace_id
    }

    /// The connections that the caller may connect to, in the order of their names.
    pub(super) fn connections(&self) -> impl Iterator<Item = (&ConnectionName, Source)> {
        let all = &self.admitted.publication.compiled.connections;
        all.iter().filter_map(|(name, c)| Some((name, self.source(name, c)?)))
    }

    fn source(&self, name: &ConnectionName, connection: &CompiledConnection) -> Option<Source> {
        let visible = self.view.as_ref().is_none_or(|v| v == name)
            && may_connect(&self.admitted, self.client.as_deref(), name);
        visible.then(|| connection.source(self.version, &self.session.session_id, &self.session.principal))
    }

    /// The connection `name`, when the caller may connect to it.
    pub(super) fn connection(&self, name: &str) -> Option<(&ConnectionName, Source)> {
        let (name, connection) = self.admitted.publication.compiled.connections.get_key_value(name)?;
        Some((name, self.source(name, connection)?))
    }

    /// The one decision that lists and uses share (DESIGN §8.4). `arguments` is the raw JSON of a call, `None` for a
    /// list.
    pub(super) fn may(&self, action: Action, resource: Resource<'_>, arguments: Option<&str>) -> bool {
        decide(&self.admitted, self.client.as_deref(), action, resource, arguments)
    }

    /// Whether the caller may use `item`; what may not be used is not shown.
    pub(super) fn may_use(
        &self,
        kind: ListKind,
        connection: &ConnectionName,
        item: &Item,
        arguments: Option<&str>,
    ) -> bool {
        match kind {
            ListKind::Tools => {
                let tool = Resource::Tool {
                    connection,
                    name: &item.name,
                    destructive: item.destructive,
                    read_only: item.read_only,
                };
                self.may(Action::CallTool, tool, arguments)
            }
            ListKind::Prompts => {
                let prompt = Resource::Prompt { connection, name: &item.name };
                self.may(Action::GetPrompt, prompt, arguments)
            }
            ListKind::Resources | ListKind::ResourceTemplates => self.may_read(connection, &item.name),
        }
    }

    /// Whether the caller may read `uri` of `connection`, in every spelling of it.
    pub(super) fn may_read(&self, connection: &ConnectionName, uri: &str) -> bool {
        spellings(uri).is_some_and(|all| {
            all.iter().all(|uri| self.may(Action::ReadResource, Resource::Resource { connection, uri }, None))
        })
    }
}

/// What a client calls itself in its `clientInfo`.
pub(super) fn client_name(info: Option<&RawValue>) -> Option<Arc<str>> {
    Object::parse(info?.get()).ok()?.str("name").map(Arc::from)
}

pub(super) fn may_connect(admitted: &Admitted, client: Option<&str>, name: &ConnectionName) -> bool {
    decide(admitted, client, Action::Connect, Resource::Connection(name), None)
}

fn decide(
    admitted: &Admitted,
    client: Option<&str>,
    action: Action,
    resource: Resource<'_>,
    arguments: Option<&str>,
) -> bool {
    let request = Request {
        caller: &admitted.caller,
        action,
        resource,
        context: Context {
            environment: &admitted.publication.workspace.environment,
            client,
            era: Era::Legacy,
            arguments,
        },
    };
    let decision = admitted.publication.compiled.policies.decide(&request);
    if !decision.allowed && arguments.is_some() {
        // The client is told that there is no such thing; whoever wrote the policies can see why. URIs may hold secrets
        // and are no part of a call's arguments, so only the names of tools and prompts show here.
        tracing::debug!(
            request_id = %admitted.request_id,
            key = %admitted.key.key_id,
            action = action.as_str(),
            ?resource,
            policies = ?decision.policies,
            "denied by policy"
        );
    }
    decision.allowed
}

/// The session's answers as HTTP (DESIGN §6.4). Foreign, unknown and malformed ids have one body.
pub(super) fn refusal(error: &SessionError) -> Refusal {
    let (code, message) = match error {
        SessionError::NoSuchSession => {
            ("session_not_found", "there is no such session; start again with `initialize`")
        }
        SessionError::TooMany { .. } => {
            ("too_many_sessions", "the caller has as many live sessions as it may; end some")
        }
        _ => ("session_store_unavailable", "sessions cannot be looked up right now"),
    };
    Refusal::new(error.kind(), code, message)
}

impl Mcp {
    /// Ends what this replica holds of a session that is gone. Nobody waits for its workers: one that ignores the request
    /// to stop is killed in its own time.
    pub(super) fn end_session(&self, workspace: &WorkspaceId, id: SessionId) {
        self.inflight.cancel_all(id);
        self.streams.end(id);
        let (pool, workspace) = (self.pool.clone(), workspace.clone());
        self.tasks().spawn(Class::Background, "end_session", async move {
            pool.close_isolated(&workspace, &isolation_of(&id)).await;
        });
    }
}
