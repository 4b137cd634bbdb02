use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use obol_authz::Policies;
use obol_llm::{Credential, Route};
use obol_mcp::catalogue::Source;
use obol_mcp::pool::{Endpoint, EndpointKind};
use obol_mcp::wire::ProtocolVersion;
use obol_model::snapshot::{
    Auth, CatalogMode, Connection, PolicySnapshot, Sealed, Target, Transport, WorkerMode, WorkspaceSnapshot,
};
use obol_model::{ConnectionName, KeyRing, ModelName, Principal, Secret, SessionId, WorkspaceId};
use obol_snapshot::Compile;

/// What a publication is turned into once, so that requests only look things up: parsed policies, opened credentials,
/// addresses of upstreams (DESIGN §8.4).
#[derive(Debug)]
pub struct Compiled {
    pub(crate) policies: Policies,
    pub(crate) connections: BTreeMap<ConnectionName, CompiledConnection>,
    /// The targets of each model, in the order of the workspace.
    pub(crate) routes: BTreeMap<ModelName, Vec<Arc<Route>>>,
}

/// A connection with one endpoint for each revision that clients speak.
#[derive(Debug)]
pub(crate) struct CompiledConnection {
    sources: [Source; ProtocolVersion::ALL.len()],
    mode: WorkerMode,
}

impl CompiledConnection {
    /// The connection for a client of `version`, as if nobody had an upstream session of its own: names its
    /// credential and generation.
    pub(crate) fn shared(&self, version: ProtocolVersion) -> &Source {
        let [oldest, middle, latest] = &self.sources;
        match version {
            ProtocolVersion::V2025_03_26 => oldest,
            ProtocolVersion::V2025_06_18 => middle,
            ProtocolVersion::V2025_11_25 => latest,
        }
    }

    /// The connection for a client of `version`, shared with nobody where the connection wants that.
    pub(crate) fn source(
        &self,
        version: ProtocolVersion,
        session: &SessionId,
        principal: &Principal,
    ) -> Source {
        let shared = self.shared(version);
        let isolation = match self.mode {
            WorkerMode::Shared => return shared.clone(),
            WorkerMode::PerSession => isolation_of(session),
            WorkerMode::PerPrincipal => principal.to_string(),
        };
        let endpoint = Endpoint { isolation: Some(isolation), ..(*shared.endpoint).clone() };
        Source { endpoint: Arc::new(endpoint), ..shared.clone() }
    }
}

/// The name under which workers of a session are kept. The pool's maps hold it; nothing prints it.
pub(crate) fn isolation_of(session: &SessionId) -> String {
    session.expose()
}

/// Compiles publications with the key ring that opens their credentials.
#[derive(Debug)]
pub struct CompileWorkspace {
    ring: Arc<KeyRing>,
}

impl CompileWorkspace {
    /// Opens credentials with `ring`.
    pub fn new(ring: Arc<KeyRing>) -> Self {
        Self { ring }
    }

    fn open(&self, workspace: &WorkspaceId, sealed: &Sealed) -> Result<Secret<String>, String> {
        self.ring.open(workspace, sealed).map_err(|e| format!("a credential cannot be used: {e}"))
    }

    fn provider_credential(&self, workspace: &WorkspaceId, auth: &Auth) -> Result<Credential, String> {
        match auth {
            Auth::Bearer(sealed) => Credential::bearer(&self.open(workspace, sealed)?),
            Auth::Header { name, value } => Credential::header(name, &self.open(workspace, value)?),
        }
        .map_err(|e| e.to_string())
    }

    fn credential(&self, workspace: &WorkspaceId, auth: &Auth) -> Result<(HeaderName, HeaderValue), String> {
        let (name, text) = match auth {
            Auth::Bearer(sealed) => {
                let token = self.open(workspace, sealed)?;
                (http::header::AUTHORIZATION, Secret::new(format!("Bearer {}", token.expose())))
            }
            Auth::Header { name, value } => (
                name.parse().map_err(|_| format!("`{name}` is no header name"))?,
                self.open(workspace, value)?,
            ),
        };
        let mut value = HeaderValue::from_str(text.expose()).map_err(|_| {
            format!("the credential for the header `{name}` has characters that no header can carry")
        })?;
        value.set_sensitive(true);
        Ok((name, value))
    }

    fn connection(
        &self,
        workspace: &WorkspaceId,
        name: &ConnectionName,
        connection: &Connection,
    ) -> Result<CompiledConnection, String> {
        let (kind, mode) = match &connection.transport {
            Transport::StreamableHttp { url, auth, allow_private } => {
                let credential = auth.as_ref().map(|a| self.credential(workspace, a)).transpose()?;
                let kind = EndpointKind::Http { url: url.clone(), credential, allow_private: *allow_private };
                (kind, WorkerMode::Shared)
            }
            Transport::Stdio { command, env, mode } => {
                let env = env
                    .iter()
                    .map(|(k, v)| self.ring.open(workspace, v).map(|secret| (k.clone(), secret)))
                    .collect::<Result<_, _>>()
                    .map_err(|e| format!("the environment cannot be used: {e}"))?;
                (EndpointKind::Stdio { command: command.clone(), env }, *mode)
            }
        };
        let generation = generation(connection)?;
        let rules = Arc::new(connection.tools.clone());
        let source = |version| Source {
            endpoint: Arc::new(Endpoint {
                workspace: workspace.clone(),
                connection: name.clone(),
                version,
                kind: kind.clone(),
                isolation: None,
                generation,
            }),
            namespace: connection.namespace,
            rules: rules.clone(),
            pinned: connection.catalog == CatalogMode::Pinned,
        };
        Ok(CompiledConnection { sources: ProtocolVersion::ALL.map(source), mode })
    }
}

/// A digest of everything that a workspace says of a connection. Sealed values are new with each sealing, so a rotated
/// credential is another generation even where the plain text is the same; that only costs new upstream sessions.
fn generation(connection: &Connection) -> Result<u64, String> {
    let text = serde_json::to_string(connection).map_err(|e| e.to_string())?;
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    Ok(hasher.finish())
}

impl Compile for CompileWorkspace {
    type Output = Compiled;

    fn compile(&self, workspace: &WorkspaceSnapshot, policy: &PolicySnapshot) -> Result<Compiled, String> {
        let policies = Policies::compile(&policy.files).map_err(|faults| {
            let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
            texts.join("; ")
        })?;
        let mut connections = BTreeMap::new();
        for (name, connection) in &workspace.connections {
            let compiled = self
                .connection(&workspace.workspace_id, name, connection)
                .map_err(|e| format!("connection `{name}`: {e}"))?;
            connections.insert(name.clone(), compiled);
        }
        let mut credentials = BTreeMap::new();
        for (name, provider) in &workspace.providers {
            if let Some(auth) = &provider.auth {
                let credential = self
                    .provider_credential(&workspace.workspace_id, auth)
                    .map_err(|e| format!("provider `{name}`: {e}"))?;
                credentials.insert(name, credential);
            }
        }
        let mut routes = BTreeMap::new();
        for (name, model) in &workspace.models {
            let route = |target: &Target| {
                let provider = workspace
                    .providers
                    .get(&target.provider)
                    .ok_or_else(|| format!("model `{name}`: there is no provider `{}`", target.provider))?;
                let credential = credentials.get(&target.provider).cloned();
                let scope = workspace.workspace_id.as_str();
                Ok(Arc::new(Route::new(scope, model, target.clone(), provider, credential)))
            };
            let of_model: Vec<_> = model.targets.iter().map(route).collect::<Result<_, String>>()?;
            routes.insert(name.clone(), of_model);
        }
        Ok(Compiled { policies, connections, routes })
    }
}
