//! What a request knows of its session, and what its caller may see.

use std::sync::Arc;
use std::time::Duration;

use obol_authz::{Action, Context, Decision, Era, Request, Resource};
use obol_drain::Class;
use obol_mcp::catalogue::{Item, Source};
use obol_mcp::pool::ListKind;
use obol_mcp::wire::{Object, ProtocolVersion, RpcError};
use obol_model::{ConnectionName, Kind, Principal, RequestId, SessionId, WorkspaceId};
use obol_session::{HeldSession, Owner, SessionError};
use serde_json::value::RawValue;

use super::spelling::spellings;
use super::{Mcp, refuse};
use crate::audit;
use crate::compiled::{CompiledConnection, isolation_of};
use crate::failure::Refusal;
use crate::front::Admitted;

/// How often the sessions of a revoked key are tried to be deleted, and the first pause between two tries, which doubles:
/// the key itself is refused either way.
const END_ATTEMPTS: u32 = 6;
const END_PAUSE: Duration = Duration::from_millis(500);

/// One request of one session under one publication. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Ctx {
    pub(super) admitted: Admitted,
    /// Held for as long as somebody works for it.
    pub(super) session: Arc<HeldSession>,
    pub(super) version: ProtocolVersion,
    /// `/mcp/{connection}` shows one connection alone.
    pub(super) view: Option<ConnectionName>,
    /// What the client called itself at `initialize`.
    pub(super) client: Option<Arc<str>>,
}

impl Ctx {
    pub(super) fn workspace(&self) -> &WorkspaceId {
        self.admitted.identity.workspace_id()
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
    fn decide(&self, action: Action, resource: Resource<'_>, arguments: Option<&str>) -> Arc<Decision> {
        decide(&self.admitted, self.client.as_deref(), action, resource, arguments)
    }

    /// Whether the lists of `connection` are shown at all.
    pub(super) fn may_list(&self, connection: &ConnectionName) -> bool {
        self.decide(Action::List, Resource::Connection(connection), None).allowed
    }

    /// Whether a list shows `item`: what may not be used is not shown.
    pub(super) fn may_see(&self, kind: ListKind, connection: &ConnectionName, item: &Item) -> bool {
        match usage(kind, connection, item) {
            Some((action, resource)) => self.decide(action, resource, None).allowed,
            None => self.may_read(connection, &item.name),
        }
    }

    /// Whether the caller may use the tool or prompt `item` now, with these arguments; on the record.
    pub(super) fn authorize(
        &self,
        method: &str,
        kind: ListKind,
        connection: &ConnectionName,
        item: &Item,
        arguments: &str,
    ) -> bool {
        let Some((action, resource)) = usage(kind, connection, item) else {
            return self.authorize_read(method, connection, &item.name);
        };
        let decision = self.decide(action, resource, Some(arguments));
        self.record(method, action, resource, &decision);
        decision.allowed
    }

    /// Whether the caller may read `uri` of `connection` now; on the record.
    pub(super) fn authorize_read(&self, method: &str, connection: &ConnectionName, uri: &str) -> bool {
        let decision = self.reading(connection, uri);
        self.record(method, Action::ReadResource, Resource::Resource { connection, uri }, &decision);
        decision.allowed
    }

    /// Whether the caller may read `uri` of `connection`.
    pub(super) fn may_read(&self, connection: &ConnectionName, uri: &str) -> bool {
        self.reading(connection, uri).allowed
    }

    /// Reading takes every spelling of the URI; the first that is denied decides.
    fn reading(&self, connection: &ConnectionName, uri: &str) -> Arc<Decision> {
        let read = |uri| self.decide(Action::ReadResource, Resource::Resource { connection, uri }, None);
        let Some((first, others)) = spellings(uri).as_deref().and_then(|all| {
            let (first, others) = all.split_first()?;
            Some((read(first), others.iter().map(|uri| read(uri)).find(|other| !other.allowed)))
        }) else {
            return Arc::new(Decision { allowed: false, policies: Vec::new(), errors: Vec::new() });
        };
        if first.allowed { others.unwrap_or(first) } else { first }
    }

    /// Leaves a record when `name` is a connection that policies refuse: the client is told that what it asked for does
    /// not exist, whoever wrote the policies can see why.
    pub(super) fn record_refused_connection(&self, method: &str, name: Option<&str>) {
        let all = &self.admitted.publication.compiled.connections;
        let Some((name, _)) = name.and_then(|name| all.get_key_value(name)) else { return };
        let resource = Resource::Connection(name);
        let decision = self.decide(Action::Connect, resource, None);
        if !decision.allowed {
            self.record(method, Action::Connect, resource, &decision);
        }
    }

    fn record(&self, method: &str, action: Action, resource: Resource<'_>, decision: &Decision) {
        let session = Some(self.session.session_id);
        audit::decided(&self.admitted, session, method, action, resource, decision);
    }
}

/// What using `item` means to policies; `None` for what is read, which has many spellings.
fn usage<'a>(
    kind: ListKind,
    connection: &'a ConnectionName,
    item: &'a Item,
) -> Option<(Action, Resource<'a>)> {
    let Item { name, destructive, read_only, .. } = item;
    match kind {
        ListKind::Tools => {
            let (destructive, read_only) = (*destructive, *read_only);
            Some((Action::CallTool, Resource::Tool { connection, name, destructive, read_only }))
        }
        ListKind::Prompts => Some((Action::GetPrompt, Resource::Prompt { connection, name })),
        ListKind::Resources | ListKind::ResourceTemplates => None,
    }
}

/// What a client calls itself in its `clientInfo`.
pub(super) fn client_name(info: Option<&RawValue>) -> Option<Arc<str>> {
    Object::parse(info?.get()).ok()?.str("name").map(Arc::from)
}

pub(super) fn may_connect(admitted: &Admitted, client: Option<&str>, name: &ConnectionName) -> bool {
    decide(admitted, client, Action::Connect, Resource::Connection(name), None).allowed
}

/// Whether the view of a connection exists for the caller; on the record when not: each request of a view asks.
pub(super) fn authorize_view(admitted: &Admitted, name: &ConnectionName) -> bool {
    may_connect(admitted, None, name) || authorize_connect(admitted, None, "view", name)
}

/// As [`may_connect`], on the record.
pub(super) fn authorize_connect(
    admitted: &Admitted,
    client: Option<&str>,
    method: &str,
    name: &ConnectionName,
) -> bool {
    let resource = Resource::Connection(name);
    let decision = decide(admitted, client, Action::Connect, resource, None);
    audit::decided(admitted, None, method, Action::Connect, resource, &decision);
    decision.allowed
}

fn decide(
    admitted: &Admitted,
    client: Option<&str>,
    action: Action,
    resource: Resource<'_>,
    arguments: Option<&str>,
) -> Arc<Decision> {
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
    admitted.publication.compiled.policies.decide(&request)
}

/// The session's answers as HTTP (DESIGN §6.4). Foreign, unknown and malformed ids have one body.
pub(super) fn refusal(error: &SessionError) -> Refusal {
    let (code, message) = match error {
        SessionError::NoSuchSession => {
            ("session_not_found", "there is no such session; start again with `initialize`".to_owned())
        }
        SessionError::TooMany { limit } => {
            let message = format!(
                "the caller has {limit} live sessions, the most that it may have; end some with `DELETE`, or wait \
                 until unused ones expire"
            );
            ("too_many_sessions", message)
        }
        SessionError::TooLarge { .. } => {
            ("client_info_too_large", "the client says more about itself than a session can hold".to_owned())
        }
        _ => ("session_store_unavailable", "sessions cannot be looked up right now".to_owned()),
    };
    Refusal::new(error.kind(), code, message)
}

/// What a call under way is answered when its session ends.
pub(super) fn ended(id: RequestId) -> RpcError {
    let message = "the session has ended; whether the call took effect is unknown";
    refuse::rpc(Kind::NotFound, "session_ended", message, Some(id))
}

impl Mcp {
    /// Ends what this replica holds of a session that is gone: its stream, its calls, its workers. Nobody waits for its
    /// workers: one that ignores the request to stop is killed in its own time.
    pub(crate) fn end_session(&self, workspace: &WorkspaceId, id: SessionId) {
        self.inflight.cancel_all(id);
        self.streams.end(id);
        let (pool, workspace) = (self.pool.clone(), workspace.clone());
        self.tasks().spawn(Class::Background, "end_session", async move {
            pool.close_isolated(&workspace, &isolation_of(&id)).await;
        });
    }
    /// Ends all sessions of a principal whose key was revoked, wherever they are. Every replica does, since each has heard
    /// of it and holds what is its own; deleting twice is no harm.
    pub(super) async fn end_sessions_of(&self, workspace: &WorkspaceId, principal: &Principal) {
        let owner = Owner { workspace_id: workspace, principal };
        let mut pause = END_PAUSE;
        for _ in 0..END_ATTEMPTS {
            for id in self.sessions.held(owner) {
                self.end_session(workspace, id);
            }
            match self.sessions.delete_of_key(workspace, principal).await {
                Ok(ended) => {
                    tracing::info!(%workspace, %principal, ended, "sessions of a revoked key ended");
                    // What has no request under way is not held, but may have workers.
                    return self.sweep().await;
                }
                Err(e) => {
                    tracing::warn!(%workspace, %principal, error = %e, "sessions of a revoked key stay");
                }
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }
}
