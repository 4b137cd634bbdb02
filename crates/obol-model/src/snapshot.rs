//! The documents of a publication, as control writes and replicas read them (DESIGN §7.1).
//!
//! Three strings in Redis form one publication: the [`WorkspaceSnapshot`], the [`PolicySnapshot`] and the
//! [`Fingerprint`] that names the revision and the SHA-256 of the other two, so that coherence is checked on the very
//! bytes that were read.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use url::Url;

use crate::{Budget, ConnectionName, Limits, ModelName, NanoUsd, ProviderName, TokenPrice, WorkspaceId};

/// The version of the documents that this release writes, and the highest that it reads.
pub const SCHEMA: u32 = 2;

/// The most bytes that one of the documents may have: what is parsed while requests wait has to have a bound.
pub const LARGEST_DOCUMENT: usize = 16 << 20;

/// Which publication: only an operator raises the epoch, the number grows with each publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Revision {
    /// Raised by an operator to force an older number.
    pub epoch: u32,
    /// Grows with each publication of an epoch; the first is 1.
    pub number: u64,
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.number)
    }
}

/// Everything of a workspace but its policies.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkspaceSnapshot {
    /// See [`SCHEMA`].
    pub schema_version: u32,
    /// Whose.
    pub workspace_id: WorkspaceId,
    /// Which.
    pub revision: Revision,
    /// Free text for policies, such as `production`.
    pub environment: String,
    /// A frozen workspace answers `403` to everything.
    #[serde(default)]
    pub frozen: bool,
    /// Whether answers name the revision that they were given under (`x-obol-revision`).
    #[serde(default)]
    pub expose_revision: bool,
    /// Who may use a session beside its creator.
    #[serde(default)]
    pub session_binding: SessionBinding,
    /// Upstream MCP servers.
    #[serde(default)]
    pub connections: BTreeMap<ConnectionName, Connection>,
    /// Model providers.
    #[serde(default)]
    pub providers: BTreeMap<ProviderName, Provider>,
    /// Public model names.
    #[serde(default)]
    pub models: BTreeMap<ModelName, Model>,
    /// How much may be spent. No two have the same scope and window.
    #[serde(default)]
    pub budgets: Vec<Budget>,
    /// How fast each principal may call, unless its key says otherwise.
    #[serde(default)]
    pub limits: Limits,
}

/// Who may use a session (DESIGN §6.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionBinding {
    /// Only the principal that created it.
    #[default]
    Principal,
    /// Every principal of the workspace.
    Workspace,
}

/// An upstream MCP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// How it is reached.
    #[serde(flatten)]
    pub transport: Transport,
    /// How its names appear to clients.
    #[serde(default)]
    pub namespace: Namespace,
    /// Whether the server keeps state in its session that must not be lost in silence (DESIGN §9.4).
    #[serde(default)]
    pub stateful: bool,
    /// Which of its tools appear.
    #[serde(default)]
    pub catalog: CatalogMode,
    /// Rules for single tools, by the name that the upstream gives them.
    #[serde(default)]
    pub tools: BTreeMap<String, ToolRule>,
    /// What a tool call costs when its rule names no price.
    #[serde(default)]
    pub price_per_call: NanoUsd,
    /// Longest time for one call in seconds; the gateway's own bound holds as well.
    #[serde(default)]
    pub timeout_s: Option<u64>,
}

/// How a connection is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "transport", rename_all = "snake_case")]
pub enum Transport {
    /// MCP Streamable HTTP.
    StreamableHttp {
        /// The MCP endpoint.
        url: Url,
        /// The credential that the gateway presents.
        #[serde(default)]
        auth: Option<Auth>,
        /// Whether private and loopback addresses may be dialled.
        #[serde(default)]
        allow_private: bool,
    },
    /// A child process that speaks MCP on stdio.
    Stdio {
        /// Program and arguments; no shell is involved. Never empty.
        command: Vec<String>,
        /// Environment of the child beside the allow list, values sealed.
        #[serde(default)]
        env: BTreeMap<String, Sealed>,
        /// Who shares a child.
        #[serde(default)]
        mode: WorkerMode,
    },
}

/// Who shares one worker of a stdio connection (DESIGN §10.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerMode {
    /// One worker per client session.
    #[default]
    PerSession,
    /// One worker per principal.
    PerPrincipal,
    /// One worker per replica; only for servers that keep no state.
    Shared,
}

/// How the names of a connection appear to clients (DESIGN §9.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Namespace {
    /// `{connection}__{name}` and `{connection}+{uri}`.
    #[default]
    Prefix,
    /// As the upstream gives them. At most one connection of a workspace.
    None,
}

/// Which tools of a connection appear (DESIGN §9.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CatalogMode {
    /// Those that the server lists.
    #[default]
    Live,
    /// Those whose definition has the digest that their rule names; what changed or was added since is hidden.
    Pinned,
}

/// What a workspace decides about one tool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ToolRule {
    /// The exposed name, in place of the derived one.
    #[serde(default)]
    pub alias: Option<String>,
    /// Hidden from everybody, and not callable.
    #[serde(default)]
    pub hidden: bool,
    /// What a call costs.
    #[serde(default)]
    pub price_per_call: Option<NanoUsd>,
    /// Overrides the upstream's `destructiveHint` for policies.
    #[serde(default)]
    pub destructive: Option<bool>,
    /// Overrides the upstream's `readOnlyHint` for policies.
    #[serde(default)]
    pub read_only: Option<bool>,
    /// What its definition is pinned to with [`CatalogMode::Pinned`]: `sha256:` and 64 hexadecimal digits.
    #[serde(default)]
    pub digest: Option<String>,
}

/// A credential as it stands in a snapshot: `v1.{key id}.{base64url(nonce ‖ ciphertext ‖ tag)}`, AES-256-GCM with the
/// workspace id as associated data (DESIGN §7.6).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sealed(pub String);

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[sealed]")
    }
}

/// How the gateway authenticates itself to an upstream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Auth {
    /// `Authorization: Bearer …`.
    Bearer(Sealed),
    /// A header of another name, such as `x-api-key`.
    Header {
        /// The name of the header, in lower case.
        name: String,
        /// Its value.
        value: Sealed,
    },
}

/// A model provider.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provider {
    /// Which API it speaks.
    pub kind: ProviderKind,
    /// Where; paths such as `/chat/completions` are appended.
    pub base_url: Url,
    /// The credential that the gateway presents.
    #[serde(default)]
    pub auth: Option<Auth>,
    /// Whether private and loopback addresses may be dialled.
    #[serde(default)]
    pub allow_private: bool,
}

/// Which API a provider speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProviderKind {
    /// The OpenAI API, or one that is compatible with it.
    Openai,
    /// The Anthropic API, or one that is compatible with it.
    Anthropic,
}

/// A public model name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Model {
    /// The most tokens that an answer can have.
    #[serde(default)]
    pub max_output: Option<u64>,
    /// Seconds until an answer has to begin, where the gateway's own limit does not fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_byte_timeout_s: Option<NonZeroU32>,
    /// Seconds that may pass between two reads of an answer, where the gateway's own limit does not fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<NonZeroU32>,
    /// In the order in which they are tried. Never empty.
    pub targets: Vec<Target>,
}

/// One way to serve a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// A provider of the same workspace.
    pub provider: ProviderName,
    /// What the provider calls the model.
    pub model: String,
    /// What it costs; all zero when the target is marked free.
    pub price: TokenPrice,
    /// Whether `stream_options.include_usage` may be added to streams (some providers refuse it).
    #[serde(default = "yes")]
    pub stream_usage: bool,
    /// Its share of the requests among the targets that have one; without any, targets are tried in their order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<NonZeroU32>,
}

fn yes() -> bool {
    true
}

/// The Cedar policies of a workspace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySnapshot {
    /// See [`SCHEMA`].
    pub schema_version: u32,
    /// Whose.
    pub workspace_id: WorkspaceId,
    /// Which; equal to the workspace snapshot's.
    pub revision: Revision,
    /// Policy files in the order of the workspace file.
    pub files: Vec<PolicyFile>,
}

/// One file of Cedar policies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyFile {
    /// Its name, for error messages and policy ids.
    pub name: String,
    /// Cedar source.
    pub text: String,
}

/// What makes two documents one publication.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// See [`SCHEMA`].
    pub schema_version: u32,
    /// The revision of both documents.
    pub revision: Revision,
    /// Lower-case hexadecimal SHA-256 of the workspace snapshot's bytes.
    pub workspace_sha256: String,
    /// Lower-case hexadecimal SHA-256 of the policy snapshot's bytes.
    pub policy_sha256: String,
}

/// The three documents of one publication, as the bytes that are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    /// `snap:workspace:{WS}`.
    pub workspace: Vec<u8>,
    /// `policy:{WS}`.
    pub policy: Vec<u8>,
    /// `snap:fingerprint:{WS}`.
    pub fingerprint: Vec<u8>,
}

/// Where a publication stands in Redis (DESIGN §5). All three carry the workspace as their hash tag, so that they lie in
/// one slot and can be read and written as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicationKeys {
    /// Holds the [`WorkspaceSnapshot`].
    pub workspace: String,
    /// Holds the [`PolicySnapshot`].
    pub policy: String,
    /// Holds the [`Fingerprint`].
    pub fingerprint: String,
}

impl PublicationKeys {
    /// Matches the policy key of every workspace; the braces are literal in a Redis pattern.
    pub const EVERY_POLICY: &'static str = "policy:{*}";

    /// The script that reads all three. Replicas and control share it, as they share the keys.
    pub const READ: &'static str = include_str!("scripts/read_publication_v1.lua");

    /// What the documents are called, in the order in which [`PublicationKeys::READ`] counts them.
    pub const DOCUMENTS: [&'static str; 3] = ["workspace snapshot", "policy snapshot", "fingerprint"];

    /// The keys of a workspace.
    pub fn of(workspace_id: &WorkspaceId) -> Self {
        Self {
            workspace: format!("snap:workspace:{{{workspace_id}}}"),
            policy: format!("policy:{{{workspace_id}}}"),
            fingerprint: format!("snap:fingerprint:{{{workspace_id}}}"),
        }
    }

    /// Whose policy key this is, when it is one.
    pub fn workspace_of_policy(key: &str) -> Option<WorkspaceId> {
        key.strip_prefix("policy:{")?.strip_suffix('}')?.parse().ok()
    }
}

/// Why three strings are no publication. Each is an error, never a reason to fall back (DESIGN §7.3).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPublication {
    /// A document is no JSON of its type.
    #[error("the {document} of the publication cannot be read: {reason}")]
    Malformed {
        /// Which document.
        document: &'static str,
        /// What the parser said.
        reason: String,
    },
    /// A document is of a version that this release cannot read.
    #[error("the {document} has schema version {found}, this release reads 1 to {SCHEMA}")]
    UnknownSchema {
        /// Which document.
        document: &'static str,
        /// Its version.
        found: u32,
    },
    /// A document is larger than a replica reads.
    #[error("the {document} has more than {LARGEST_DOCUMENT} bytes")]
    TooLarge {
        /// Which document.
        document: &'static str,
    },
    /// The bytes are not those that the fingerprint names.
    #[error("the {document} is not the one that the fingerprint names")]
    HashMismatch {
        /// Which document.
        document: &'static str,
    },
    /// The documents name different revisions.
    #[error("the documents are of different revisions")]
    MixedRevisions,
    /// The documents belong to another workspace.
    #[error("the {document} belongs to another workspace")]
    ForeignWorkspace {
        /// Which document.
        document: &'static str,
    },
}

fn sha256_hex(bytes: &[u8]) -> String {
    aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref().iter().fold(
        String::with_capacity(64),
        |mut s, b| {
            s.push_str(&format!("{b:02x}"));
            s
        },
    )
}

fn read<'a, T: Deserialize<'a>>(document: &'static str, bytes: &'a [u8]) -> Result<T, InvalidPublication> {
    #[derive(Deserialize)]
    struct Version {
        schema_version: u32,
    }
    let malformed = |e: serde_json::Error| InvalidPublication::Malformed { document, reason: e.to_string() };
    // The version first: a document of a later release may have another shape altogether.
    let version: Version = serde_json::from_slice(bytes).map_err(malformed)?;
    if !(1..=SCHEMA).contains(&version.schema_version) {
        return Err(InvalidPublication::UnknownSchema { document, found: version.schema_version });
    }
    serde_json::from_slice(bytes).map_err(malformed)
}

impl Documents {
    /// Writes a coherent publication.
    ///
    /// # Errors
    /// When a document cannot be written as JSON or is too large, or the two are not of one workspace and revision.
    pub fn encode(
        workspace: &WorkspaceSnapshot,
        policy: &PolicySnapshot,
    ) -> Result<Self, InvalidPublication> {
        if workspace.revision != policy.revision {
            return Err(InvalidPublication::MixedRevisions);
        }
        if workspace.workspace_id != policy.workspace_id {
            return Err(InvalidPublication::ForeignWorkspace { document: "policy snapshot" });
        }
        let malformed = |document| {
            move |e: serde_json::Error| InvalidPublication::Malformed { document, reason: e.to_string() }
        };
        let workspace_bytes = serde_json::to_vec(workspace).map_err(malformed("workspace snapshot"))?;
        let policy_bytes = serde_json::to_vec(policy).map_err(malformed("policy snapshot"))?;
        let fingerprint = serde_json::to_vec(&Fingerprint {
            schema_version: SCHEMA,
            revision: workspace.revision,
            workspace_sha256: sha256_hex(&workspace_bytes),
            policy_sha256: sha256_hex(&policy_bytes),
        })
        .map_err(malformed("fingerprint"))?;
        let documents = Self { workspace: workspace_bytes, policy: policy_bytes, fingerprint };
        documents.check_sizes()?;
        Ok(documents)
    }

    /// What the fingerprint says, true or not; for telling which publication it is that cannot be used.
    pub fn claimed(&self) -> Option<Fingerprint> {
        serde_json::from_slice(&self.fingerprint).ok()
    }

    fn check_sizes(&self) -> Result<(), InvalidPublication> {
        let documents = [&self.workspace, &self.policy, &self.fingerprint];
        let mut documents = PublicationKeys::DOCUMENTS.into_iter().zip(documents);
        match documents.find(|(_, bytes)| bytes.len() > LARGEST_DOCUMENT) {
            Some((document, _)) => Err(InvalidPublication::TooLarge { document }),
            None => Ok(()),
        }
    }

    /// Reads the fingerprint and checks that it names these very bytes. Enough to see that a publication is the one
    /// already read; everything else takes [`Documents::decode`].
    ///
    /// # Errors
    /// When the fingerprint cannot be read, or a document is not the one that it names.
    pub fn verify(&self) -> Result<Fingerprint, InvalidPublication> {
        self.check_sizes()?;
        let fingerprint: Fingerprint = read("fingerprint", &self.fingerprint)?;
        if sha256_hex(&self.workspace) != fingerprint.workspace_sha256 {
            return Err(InvalidPublication::HashMismatch { document: "workspace snapshot" });
        }
        if sha256_hex(&self.policy) != fingerprint.policy_sha256 {
            return Err(InvalidPublication::HashMismatch { document: "policy snapshot" });
        }
        Ok(fingerprint)
    }

    /// Reads and checks all three documents: versions, hashes, revisions and the workspace.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn decode(
        &self,
        workspace_id: &WorkspaceId,
    ) -> Result<(WorkspaceSnapshot, PolicySnapshot), InvalidPublication> {
        let fingerprint = self.verify()?;
        let workspace: WorkspaceSnapshot = read("workspace snapshot", &self.workspace)?;
        let policy: PolicySnapshot = read("policy snapshot", &self.policy)?;
        if workspace.workspace_id != *workspace_id {
            return Err(InvalidPublication::ForeignWorkspace { document: "workspace snapshot" });
        }
        if policy.workspace_id != *workspace_id {
            return Err(InvalidPublication::ForeignWorkspace { document: "policy snapshot" });
        }
        if workspace.revision != fingerprint.revision || policy.revision != fingerprint.revision {
            return Err(InvalidPublication::MixedRevisions);
        }
        Ok((workspace, policy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(number: u64) -> (WorkspaceSnapshot, PolicySnapshot) {
        let revision = Revision { epoch: 1, number };
        let workspace_id: WorkspaceId = "acme".parse().unwrap();
        (
            WorkspaceSnapshot {
                schema_version: SCHEMA,
                workspace_id: workspace_id.clone(),
                revision,
                environment: "test".into(),
                frozen: false,
                expose_revision: false,
                session_binding: SessionBinding::default(),
                connections: BTreeMap::new(),
                providers: BTreeMap::new(),
                models: BTreeMap::new(),
                budgets: Vec::new(),
                limits: Limits::default(),
            },
            PolicySnapshot { schema_version: SCHEMA, workspace_id, revision, files: vec![] },
        )
    }

    #[test]
    fn a_coherent_publication_is_read_back() {
        let (w, p) = pair(7);
        let docs = Documents::encode(&w, &p).unwrap();
        let (w2, p2) = docs.decode(&w.workspace_id).unwrap();
        assert_eq!((w2.revision, p2), (w.revision, p));
    }

    #[test]
    fn the_keys_of_a_workspace_share_its_hash_tag() {
        let acme: WorkspaceId = "acme".parse().unwrap();
        let keys = PublicationKeys::of(&acme);
        assert_eq!(keys.workspace, "snap:workspace:{acme}");
        assert_eq!(keys.fingerprint, "snap:fingerprint:{acme}");
        assert_eq!(PublicationKeys::workspace_of_policy(&keys.policy), Some(acme));
        for other in ["policy:acme", "policy:{}", "policy:{A}", "policy:{acme}x", "snap:workspace:{acme}"] {
            assert_eq!(PublicationKeys::workspace_of_policy(other), None, "{other}");
        }
    }

    #[test]
    fn every_incoherence_is_refused() {
        let (w, p) = pair(7);
        let (w8, p8) = pair(8);
        let ours = w.workspace_id.clone();
        let docs = Documents::encode(&w, &p).unwrap();
        let newer = Documents::encode(&w8, &p8).unwrap();

        let torn = Documents { policy: newer.policy.clone(), ..docs.clone() };
        assert_eq!(torn.decode(&ours), Err(InvalidPublication::HashMismatch { document: "policy snapshot" }));
        let torn = Documents { workspace: newer.workspace, ..docs.clone() };
        assert_eq!(
            torn.decode(&ours),
            Err(InvalidPublication::HashMismatch { document: "workspace snapshot" })
        );
        assert_eq!(Documents::encode(&w, &p8), Err(InvalidPublication::MixedRevisions));
        assert!(matches!(
            docs.decode(&"other".parse().unwrap()),
            Err(InvalidPublication::ForeignWorkspace { .. })
        ));
        let future = Documents { fingerprint: br#"{"schema_version":99}"#.to_vec(), ..docs.clone() };
        assert!(matches!(future.decode(&ours), Err(InvalidPublication::UnknownSchema { found: 99, .. })));
        let ancient = Documents { fingerprint: br#"{"schema_version":0}"#.to_vec(), ..docs.clone() };
        assert!(matches!(ancient.decode(&ours), Err(InvalidPublication::UnknownSchema { found: 0, .. })));
        let broken = Documents { fingerprint: b"{".to_vec(), ..docs.clone() };
        assert!(matches!(broken.decode(&ours), Err(InvalidPublication::Malformed { .. })));
        let huge = Documents { policy: vec![b' '; LARGEST_DOCUMENT + 1], ..docs };
        assert_eq!(huge.decode(&ours), Err(InvalidPublication::TooLarge { document: "policy snapshot" }));
    }

    impl PartialEq for WorkspaceSnapshot {
        fn eq(&self, other: &Self) -> bool {
            serde_json::to_string(self).unwrap() == serde_json::to_string(other).unwrap()
        }
    }
}
