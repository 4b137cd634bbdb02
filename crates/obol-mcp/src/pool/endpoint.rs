use std::fmt;

use http::{HeaderName, HeaderValue};
use obol_model::{ConnectionName, Secret, WorkspaceId};
use url::Url;

use crate::wire::ProtocolVersion;

/// An upstream MCP server as one caller may use it. Built once per publication (per session or principal where
/// workers are not shared) and handed around in an `Arc`.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Whose.
    pub workspace: WorkspaceId,
    /// Which connection of the workspace.
    pub connection: ConnectionName,
    /// The revision that the client speaks; offered to the upstream, which may answer with another legacy one.
    pub version: ProtocolVersion,
    /// How it is reached.
    pub kind: EndpointKind,
    /// The session or principal that shares its upstream session with nobody else; `None` is shared by all.
    pub isolation: Option<String>,
    /// A digest of everything that must not be mixed in one upstream session: connection, credential, environment.
    /// Another value is another upstream session, and the one of the old value is left soon.
    pub generation: u64,
}

/// How an upstream is reached.
#[derive(Clone)]
pub enum EndpointKind {
    /// MCP Streamable HTTP.
    Http {
        /// The MCP endpoint.
        url: Url,
        /// The header that authenticates the gateway, its value marked sensitive.
        credential: Option<(HeaderName, HeaderValue)>,
        /// Whether private and loopback addresses may be dialled.
        allow_private: bool,
    },
    /// A child process that speaks MCP on stdio.
    Stdio {
        /// Program and arguments.
        command: Vec<String>,
        /// Environment beside the allow list.
        env: Vec<(String, Secret<String>)>,
    },
}

impl fmt::Debug for EndpointKind {
    /// Neither credentials nor the query of the URL, which may hold one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { url, .. } => write!(f, "Http({}{})", url.host_str().unwrap_or_default(), url.path()),
            Self::Stdio { command, .. } => {
                write!(f, "Stdio({})", command.first().map_or("", String::as_str))
            }
        }
    }
}

/// What makes two endpoints share one upstream session (DESIGN §9.4).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) workspace: WorkspaceId,
    pub(super) connection: ConnectionName,
    pub(super) version: ProtocolVersion,
    pub(super) isolation: Option<String>,
    pub(super) generation: u64,
}

impl Key {
    pub(super) fn of(endpoint: &Endpoint) -> Self {
        Self {
            workspace: endpoint.workspace.clone(),
            connection: endpoint.connection.clone(),
            version: endpoint.version,
            isolation: endpoint.isolation.clone(),
            generation: endpoint.generation,
        }
    }

    /// Whether `other` is the same upstream for the same callers, as another publication describes it.
    pub(super) fn supersedes(&self, other: &Self) -> bool {
        self.generation != other.generation
            && self.workspace == other.workspace
            && self.connection == other.connection
            && self.version == other.version
            && self.isolation == other.isolation
    }
}

/// The lists of an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ListKind {
    /// `tools/list`.
    Tools,
    /// `resources/list`.
    Resources,
    /// `resources/templates/list`; changes are announced as [`ListKind::Resources`].
    ResourceTemplates,
    /// `prompts/list`.
    Prompts,
}

impl ListKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Tools, Self::Resources, Self::ResourceTemplates, Self::Prompts];

    /// The method that lists it.
    pub fn method(self) -> &'static str {
        match self {
            Self::Tools => "tools/list",
            Self::Resources => "resources/list",
            Self::ResourceTemplates => "resources/templates/list",
            Self::Prompts => "prompts/list",
        }
    }

    /// The member of the result that holds the items.
    pub fn member(self) -> &'static str {
        match self {
            Self::Tools => "tools",
            Self::Resources => "resources",
            Self::ResourceTemplates => "resourceTemplates",
            Self::Prompts => "prompts",
        }
    }

    /// The list whose change the notification `method` announces.
    pub(super) fn changed_by(method: &str) -> Option<Self> {
        match method {
            "notifications/tools/list_changed" => Some(Self::Tools),
            "notifications/resources/list_changed" => Some(Self::Resources),
            "notifications/prompts/list_changed" => Some(Self::Prompts),
            _ => None,
        }
    }
}
