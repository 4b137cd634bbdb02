use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher as _, Hash, Hasher};
use std::str::FromStr as _;
use std::sync::{Arc, LazyLock};

use cedar_policy::{Entity, EntityId, EntityTypeName, EntityUid, RestrictedExpression};
use obol_model::TokenPrice;
use obol_model::{ConnectionName, KeyContext, ModelName, PerMillion, Principal, ProviderName, WorkspaceId};

/// One question to the policies.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Who asks.
    pub caller: &'a Caller,
    /// What is to be done.
    pub action: Action,
    /// With what.
    pub resource: Resource<'a>,
    /// Under which circumstances.
    pub context: Context<'a>,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// `mcp:connect` on a connection: whether it is used at all.
    Connect,
    /// `mcp:list` on a connection: whether its lists are shown.
    List,
    /// `mcp:callTool` on a tool; also decides whether lists show it.
    CallTool,
    /// `mcp:readResource` on a resource; also decides whether lists show it.
    ReadResource,
    /// `mcp:getPrompt` on a prompt; also decides whether lists show it.
    GetPrompt,
    /// `llm:invoke` on a model; also decides whether lists show it.
    InvokeModel,
}

impl Action {
    pub(crate) const ALL: [Self; 6] =
        [Self::Connect, Self::List, Self::CallTool, Self::ReadResource, Self::GetPrompt, Self::InvokeModel];

    /// The name that policies use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "mcp:connect",
            Self::List => "mcp:list",
            Self::CallTool => "mcp:callTool",
            Self::ReadResource => "mcp:readResource",
            Self::GetPrompt => "mcp:getPrompt",
            Self::InvokeModel => "llm:invoke",
        }
    }

    /// Whether the context of a request for it can hold arguments.
    pub(crate) fn has_arguments(self) -> bool {
        matches!(self, Self::CallTool | Self::GetPrompt)
    }

    /// Those of `actions` that have no arguments.
    pub(crate) fn without_arguments(actions: &[EntityUid]) -> Vec<Self> {
        let named = Self::ALL.into_iter().filter(|action| actions.contains(&action.uid()));
        named.filter(|action| !action.has_arguments()).collect()
    }

    pub(crate) fn uid(self) -> EntityUid {
        uid(&TYPES.action, self.as_str())
    }
}

/// What something is to be done with. Names are those of the upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Resource<'a> {
    /// An upstream MCP server.
    Connection(&'a ConnectionName),
    /// A tool.
    Tool {
        /// Whose.
        connection: &'a ConnectionName,
        /// Its name upstream.
        name: &'a str,
        /// The annotation, or the workspace's override.
        destructive: bool,
        /// The annotation, or the workspace's override.
        read_only: bool,
    },
    /// A resource or a resource template.
    Resource {
        /// Whose.
        connection: &'a ConnectionName,
        /// Its URI upstream.
        uri: &'a str,
    },
    /// A prompt.
    Prompt {
        /// Whose.
        connection: &'a ConnectionName,
        /// Its name upstream.
        name: &'a str,
    },
    /// One target of a model.
    Model {
        /// Its public name.
        name: &'a ModelName,
        /// Who serves this target.
        provider: &'a ProviderName,
        /// What this target costs.
        price_class: PriceClass,
    },
}

/// What a model costs, as coarse as policies should know it: a rule on exact prices would change its meaning with every
/// price list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PriceClass {
    /// Nothing.
    Free,
    /// Up to 1 USD per million tokens of output.
    Low,
    /// Up to 10 USD.
    Medium,
    /// More.
    High,
}

impl PriceClass {
    /// The class of a price.
    pub fn of(price: &TokenPrice) -> Self {
        const USD: u64 = 1_000_000_000;
        let million = |price: PerMillion| price.times(1_000_000).nanos();
        match million(price.base.output) {
            0 if price.is_free() => Self::Free,
            output if output <= USD => Self::Low,
            output if output <= 10 * USD => Self::Medium,
            _ => Self::High,
        }
    }

    /// The value of `resource.price_class`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// Under which circumstances something is to be done.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The environment of the workspace.
    pub environment: &'a str,
    /// What the client calls itself, when it says so.
    pub client: Option<&'a str>,
    /// Which era of MCP the client speaks.
    pub era: Era,
    /// The arguments as raw JSON, for calls only: a call without any has `{}`, a list has `None`.
    pub arguments: Option<&'a str>,
}

/// Which era of MCP a client speaks (DESIGN §2). Requests to `/v1` count as modern: they have no session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Era {
    /// `initialize` and a session.
    Legacy,
    /// Stateless.
    Modern,
}

impl Era {
    /// The value of `context.era`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Modern => "modern",
        }
    }
}

/// Who asks. Build it once per key record and keep it: its ids and entities are made here. Cheap to clone.
#[derive(Clone)]
pub struct Caller(Arc<CallerParts>);

struct CallerParts {
    workspace: WorkspaceId,
    principal: Principal,
    name: String,
    tags: Vec<String>,
    hash: u64,
    uid: EntityUid,
    workspace_uid: EntityUid,
    /// `None` if Cedar could not take the attributes; then every decision is a deny.
    entity: Option<Entity>,
}

impl Caller {
    /// A caller of `workspace`; the order of `tags` and repetitions have no meaning.
    pub fn new(workspace: WorkspaceId, principal: Principal, name: String, mut tags: Vec<String>) -> Self {
        tags.sort_unstable();
        tags.dedup();
        let uid = match &principal {
            Principal::Key(id) => uid(&TYPES.key, id.as_str()),
            // Issuers are URLs and hold no space, so the first one parts the two.
            Principal::User { issuer, subject } => uid(&TYPES.user, &format!("{issuer} {subject}")),
        };
        let workspace_uid = uid_of_workspace(&workspace);
        let set = RestrictedExpression::new_set(tags.iter().cloned().map(RestrictedExpression::new_string));
        let attributes =
            [("name".to_owned(), RestrictedExpression::new_string(name.clone())), ("tags".to_owned(), set)];
        let entity = Entity::new_with_tags(uid.clone(), attributes, [workspace_uid.clone()], []).ok();
        let hash = HASHES.hash_one((&workspace, &principal, &name, &tags));
        Self(Arc::new(CallerParts { workspace, principal, name, tags, hash, uid, workspace_uid, entity }))
    }

    pub(crate) fn uid(&self) -> &EntityUid {
        &self.0.uid
    }

    pub(crate) fn entity(&self) -> Option<&Entity> {
        self.0.entity.as_ref()
    }

    pub(crate) fn workspace_uid(&self) -> &EntityUid {
        &self.0.workspace_uid
    }
}

impl From<&KeyContext> for Caller {
    fn from(key: &KeyContext) -> Self {
        Self::new(key.workspace_id.clone(), key.principal(), key.name.clone(), key.tags.clone())
    }
}

impl PartialEq for Caller {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.0, &*other.0);
        Arc::ptr_eq(&self.0, &other.0)
            || a.hash == b.hash
                && (&a.workspace, &a.principal, &a.name, &a.tags)
                    == (&b.workspace, &b.principal, &b.name, &b.tags)
    }
}

impl Eq for Caller {}

impl Hash for Caller {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("workspace", &self.0.workspace)
            .field("principal", &self.0.principal)
            .field("tags", &self.0.tags)
            .finish_non_exhaustive()
    }
}

/// Keyed per process: upstreams and clients choose names, and must not be able to choose collisions.
pub(crate) static HASHES: LazyLock<RandomState> = LazyLock::new(RandomState::new);

pub(crate) struct Types {
    action: EntityTypeName,
    key: EntityTypeName,
    user: EntityTypeName,
    workspace: EntityTypeName,
    pub(crate) connection: EntityTypeName,
    pub(crate) tool: EntityTypeName,
    pub(crate) resource: EntityTypeName,
    pub(crate) prompt: EntityTypeName,
    pub(crate) model: EntityTypeName,
    pub(crate) arguments: EntityTypeName,
}

#[expect(clippy::expect_used, reason = "constants of this crate, parsed by every test of it")]
pub(crate) static TYPES: LazyLock<Types> = LazyLock::new(|| {
    let name = |text| EntityTypeName::from_str(text).expect("a constant type name parses");
    Types {
        action: name("Action"),
        key: name("Key"),
        user: name("User"),
        workspace: name("Workspace"),
        connection: name("Connection"),
        tool: name("Tool"),
        resource: name("Resource"),
        prompt: name("Prompt"),
        model: name("Model"),
        arguments: name("Arguments"),
    }
});

pub(crate) fn uid(of: &EntityTypeName, id: &str) -> EntityUid {
    EntityUid::from_type_name_and_id(of.clone(), EntityId::new(id))
}

pub(crate) fn uid_of_workspace(id: &WorkspaceId) -> EntityUid {
    uid(&TYPES.workspace, id.as_str())
}
