//! Every variable that Obol reads, in one table: the reference page, the messages about bad values and the check for
//! unknown names all come from here (DESIGN §4).

use obol_auth::oauth::Algorithms;

use crate::config::Subcommand::{self, Check, Control, Dev, Key, Publish, Run, Usage, UsageAudit, Workspace};

/// One environment variable.
#[derive(Debug)]
pub struct Variable {
    /// Its name, with the prefix `OBOL_`.
    pub name: &'static str,
    /// What holds when it is not set.
    pub default: Unset,
    /// What a value looks like.
    pub shape: Shape,
    /// How much of a value may be shown.
    pub secrecy: Secrecy,
    /// The command line option that wins over it.
    pub option: Option<&'static str>,
    /// The commands that read it; the others ignore it.
    pub used_by: &'static [Subcommand],
    /// What it does, in Markdown.
    pub doc: &'static str,
}

/// What holds when a variable is not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unset {
    /// This value.
    Value(&'static str),
    /// What these words say.
    Means(&'static str),
    /// The command refuses to start.
    Refused,
}

/// How much of a value may be shown in messages and by `--print-config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Secrecy {
    /// All of it.
    Open,
    /// All but the user name and the password of a URL, once it is known to be a URL.
    UrlPassword,
    /// Nothing.
    Secret,
}

/// What a value looks like, with its range where it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// An IP address and a port.
    Address,
    /// Whole seconds.
    Seconds {
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// A whole number of things.
    Count {
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// A size in bytes; `KiB` and `MiB` may follow.
    Bytes {
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// Where Redis is.
    RedisUrl,
    /// Where Postgres is.
    DatabaseUrl,
    /// Certificates of authorities in a file.
    CertificatesFile,
    /// Where an HTTP service of ours is.
    BaseUrl,
    /// AEAD keys with their ids.
    KeyRing,
    /// Text that nobody can guess.
    SharedSecret {
        /// The least number of bytes.
        min: usize,
    },
    /// A secret, or its hash.
    HashedSecret {
        /// The least number of bytes of the secret.
        min: usize,
    },
    /// An Ed25519 private key in a file.
    Ed25519File,
    /// Ed25519 public keys in a file.
    Ed25519PublicFile,
    /// A directory.
    Directory,
    /// Origins as browsers send them.
    Origins,
    /// Host names, without ports.
    Hosts,
    /// The URL of this gateway.
    PublicUrl,
    /// OAuth issuers.
    Issuers,
    /// Names of signature algorithms.
    Algorithms,
    /// OAuth scopes.
    Scopes,
    /// The id of a workspace.
    Workspace,
    /// The name of a claim of a JWT.
    Claim,
    /// Log levels by target.
    LogFilter,
    /// One of these words.
    Word(&'static [&'static str]),
}

impl Shape {
    /// The form of a value, for people.
    pub fn form(&self) -> String {
        match self {
            Self::Address => "`IP:PORT`, an IPv6 address in brackets".into(),
            Self::Seconds { .. } => "whole seconds".into(),
            Self::Count { .. } => "a whole number".into(),
            Self::Bytes { .. } => "a whole number of bytes, or of `KiB` or `MiB` when that follows".into(),
            Self::RedisUrl => "`redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, \
                `redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST…/MASTER[/DB]` or \
                `redis+cluster://[USER:PASSWORD@]HOST[:PORT],HOST…`, each with `rediss` for TLS"
                .into(),
            Self::CertificatesFile => "the path of a file of PEM certificates".into(),
            Self::BaseUrl => "`http://HOST[:PORT][/PATH]` or `https://…`".into(),
            Self::DatabaseUrl => {
                "`postgres://USER:PASSWORD@HOST[:PORT]/DATABASE[?sslmode=require|disable]`".into()
            }
            Self::KeyRing => "`ID:BASE64` of 32 random bytes, more than one separated by commas".into(),
            Self::SharedSecret { .. } => "text that nobody can guess".into(),
            Self::HashedSecret { .. } => {
                "text that nobody can guess, or `sha256:` and its SHA-256 in hexadecimal".into()
            }
            Self::Ed25519File => "the path of a PEM file that holds Ed25519 private keys (PKCS #8)".into(),
            Self::Ed25519PublicFile => "the path of a PEM file that holds Ed25519 public keys".into(),
            Self::Directory => "the path of a directory".into(),
            Self::Origins => "`SCHEME://HOST[:PORT]`, more than one separated by commas".into(),
            Self::PublicUrl => "`https://HOST[:PORT][/PATH]`".into(),
            Self::Issuers => "`ISSUER` or `ISSUER=JWKS_URL`, more than one separated by commas".into(),
            Self::Algorithms => "names of algorithms, separated by commas".into(),
            Self::Scopes => "scopes, separated by spaces".into(),
            Self::Workspace => "the id of a workspace".into(),
            Self::Claim => "the name of a claim, or a path with dots to it".into(),
            Self::Hosts => "host names without ports, more than one separated by commas".into(),
            Self::LogFilter => "`LEVEL` or `TARGET=LEVEL`, more than one separated by commas".into(),
            Self::Word(_) => "one word".into(),
        }
    }

    /// The range of values, for people; `None` when the form says it all.
    pub fn range(&self) -> Option<String> {
        match self {
            Self::Seconds { min, max } | Self::Count { min, max } => Some(format!("{min} to {max}")),
            Self::Bytes { min, max } => Some(format!("{} to {}", bytes(*min), bytes(*max))),
            Self::KeyRing => Some("at least one key; ids of letters, digits, `_` and `-`".into()),
            Self::BaseUrl => Some("no user name, password, query or fragment".into()),
            Self::SharedSecret { min } | Self::HashedSecret { min } => Some(format!("at least {min} bytes")),
            Self::Origins => Some("no path and no `*`".into()),
            Self::PublicUrl => Some("plain `http` for loopback hosts only; no query and no fragment".into()),
            Self::Issuers => Some("`https`, plain `http` for loopback hosts only".into()),
            Self::Algorithms => {
                let names: Vec<String> = Algorithms::known().map(|name| format!("`{name}`")).collect();
                Some(names.join(", "))
            }
            Self::LogFilter => Some("levels `off`, `error`, `warn`, `info`, `debug` and `trace`".into()),
            Self::Word(words) => {
                Some(words.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(" or "))
            }
            Self::Address
            | Self::RedisUrl
            | Self::DatabaseUrl
            | Self::CertificatesFile
            | Self::Ed25519File
            | Self::Ed25519PublicFile
            | Self::Directory
            | Self::Hosts
            | Self::Scopes
            | Self::Workspace
            | Self::Claim => None,
        }
    }
}

/// A number of bytes in the largest unit that says it exactly.
fn bytes(n: u64) -> String {
    const KIB: u64 = 1024;
    const MIB: u64 = 1024 * KIB;
    match n {
        n if n >= MIB && n.is_multiple_of(MIB) => format!("{} MiB", n / MIB),
        n if n >= KIB && n.is_multiple_of(KIB) => format!("{} KiB", n / KIB),
        n => format!("{n} bytes"),
    }
}

/// Defines the constants and [`ALL`] together, so that no variable can be missing from the table. The doc comment of a
/// constant is its text in the reference.
macro_rules! variables {
    ($($(#[doc = $doc:literal])+ $id:ident {
        default: $default:expr, shape: $shape:expr, secrecy: $secrecy:expr, option: $option:expr, used_by: $used_by:expr $(,)?
    })+) => {
        $(
            $(#[doc = $doc])+
            pub static $id: Variable = Variable {
                name: concat!("OBOL_", stringify!($id)),
                default: $default,
                shape: $shape,
                secrecy: $secrecy,
                option: $option,
                used_by: $used_by,
                doc: concat!($($doc, "\n"),+),
            };
        )+

        /// Every variable, in the order of the reference.
        pub static ALL: &[&Variable] = &[$(&$id),+];
    };
}

const GATEWAY: &[Subcommand] = &[Run, Dev];
const SERVICES: &[Subcommand] = &[Run, Control, Dev];
/// What uses control's store.
const KEEPERS: &[Subcommand] = &[Control, Key, Publish, Workspace, Usage];
const EVERY: &[Subcommand] = &[Run, Control, Dev, Check, Key, Publish, Workspace, Usage, UsageAudit];

variables! {
    /// Where clients connect: `/mcp` and `/v1`. Port 0 takes a free port, which is printed at start.
    LISTEN {
        default: Unset::Value("127.0.0.1:8080"),
        shape: Shape::Address,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// Where operators and probes connect: `/healthz`, `/readyz`, `/metrics` and `/internal/reload`. With the address
    /// of `OBOL_LISTEN` one port serves everything.
    ADMIN_LISTEN {
        default: Unset::Value("127.0.0.1:8081"),
        shape: Shape::Address,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// Where the other replicas reach this one, and nobody else: never the port of clients or operators, and in a network
    /// that only replicas are in, since the channel is plain HTTP. Needs `OBOL_SERVICE_JWT_SECRET` or
    /// `OBOL_SERVICE_JWT_KEY_FILE`, the same on every replica. Port 0 takes a free port. Without it there is no channel:
    /// fine for one replica; with several, what one is told reaches the others late.
    PEER_LISTEN {
        default: Unset::Means("no channel between replicas"),
        shape: Shape::Address,
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Run],
    }

    /// The address of `OBOL_PEER_LISTEN` as other replicas dial it. Required when that is a wildcard address such as
    /// `0.0.0.0:8082` (Kubernetes: `http://$(POD_IP):8082`).
    PEER_URL {
        default: Unset::Means("the address of `OBOL_PEER_LISTEN`"),
        shape: Shape::BaseUrl,
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Run],
    }

    /// The Redis that the replicas and control share: one server, a master that Sentinel watches (the hosts are the
    /// sentinels, port 26379 unless given), or a Cluster (the hosts are some of its nodes). `rediss`, `rediss+sentinel`
    /// and `rediss+cluster` use TLS. User and password are those of the servers, with `%` escapes for special characters;
    /// sentinels that want a login get it from the query, `?sentinel_username=…&sentinel_password=…`. It must not evict:
    /// set its `maxmemory-policy` to `noeviction`.
    REDIS_URL {
        default: Unset::Refused,
        shape: Shape::RedisUrl,
        secrecy: Secrecy::UrlPassword,
        option: None,
        used_by: &[Run, Control, Key, Publish, Workspace, UsageAudit],
    }

    /// The authorities that the certificates of Redis (and of its sentinels) are checked with, for a `rediss` URL. Only
    /// they are trusted then.
    REDIS_CA_FILE {
        default: Unset::Means("the public certificate authorities"),
        shape: Shape::CertificatesFile,
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Run, Control, Key, Publish, Workspace, UsageAudit],
    }

    /// The keys that protect upstream credentials inside publications: control seals with the first one, replicas open
    /// with any. To rotate, put the new key in front on the replicas, then on control, and take the old one away once
    /// everything is published again. A new key: `echo "k1:$(openssl rand -base64 32)"`.
    CREDENTIAL_KEY {
        default: Unset::Refused,
        shape: Shape::KeyRing,
        secrecy: Secrecy::Secret,
        option: None,
        used_by: &[Run, Control, Publish, Workspace],
    }

    /// The directory of workspace files (`*.yaml`, and the policies that they name), watched for changes.
    WORKSPACES_DIR {
        default: Unset::Refused,
        shape: Shape::Directory,
        secrecy: Secrecy::Open,
        option: Some("--workspaces"),
        used_by: &[Control],
    }

    /// Where control keeps what has no file of its own, such as the hashes of virtual keys and usage events. It belongs to
    /// control alone: keep it on a disk that outlives the process.
    STATE_DIR {
        default: Unset::Refused,
        shape: Shape::Directory,
        secrecy: Secrecy::Open,
        option: Some("--state"),
        used_by: KEEPERS,
    }

    /// The Postgres database where control keeps keys, revisions, the audit of changes and usage events, in place of
    /// `OBOL_STATE_DIR`, which is not looked at then. `obol control` makes its tables. Without `sslmode` in the URL a
    /// server on another machine is reached by TLS, with a certificate that the system's authorities vouch for.
    DATABASE_URL {
        default: Unset::Means("files in `OBOL_STATE_DIR`"),
        shape: Shape::DatabaseUrl,
        secrecy: Secrecy::Secret,
        option: None,
        used_by: KEEPERS,
    }

    /// Where control answers replicas that ask for a publication or a key that Redis has lost (`OBOL_CONTROL_URL`). It
    /// needs a service JWT key. Port 0 takes a free port, which is printed at start. Keep it off the public network.
    CONTROL_LISTEN {
        default: Unset::Means("nobody is answered"),
        shape: Shape::Address,
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Control],
    }

    /// How long an MCP session lives without any activity. Open streams and running calls count as activity.
    SESSION_TTL_S {
        default: Unset::Value("1800"),
        shape: Shape::Seconds { min: 1, max: 604_800 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// How long an MCP session lives after whose `initialize` nothing followed, at most `OBOL_SESSION_TTL_S`. The first
    /// use gives it the whole life. Keeps what is opened and left, by probes or in a flood, from piling up.
    SESSION_UNUSED_TTL_S {
        default: Unset::Means("as long as any other session"),
        shape: Shape::Seconds { min: 1, max: 604_800 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The most live MCP sessions of one principal; one more is refused with `429`.
    SESSION_MAX_PER_PRINCIPAL {
        default: Unset::Value("1000"),
        shape: Shape::Count { min: 1, max: 1_000_000 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The longest life of a virtual key in a replica's memory. It is the last resort: a revocation reaches replicas
    /// at once through Redis, and within 30 seconds when the subscription to Redis is down, however long this is.
    KEY_TTL_S {
        default: Unset::Value("60"),
        shape: Shape::Seconds { min: 1, max: 3600 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The secret (HS256) that replicas and control share for the service JWTs that they show each other. Not together
    /// with `OBOL_SERVICE_JWT_KEY_FILE`. Without either of them nobody can be trusted: `/internal/reload`, control's
    /// internal API and the channel between replicas are off.
    SERVICE_JWT_SECRET {
        default: Unset::Means("no shared secret"),
        shape: Shape::SharedSecret { min: 32 },
        secrecy: Secrecy::Secret,
        option: None,
        used_by: SERVICES,
    }

    /// The private key (EdDSA) that signs service JWTs. When the file holds several, the first one signs, and tokens of
    /// all of them are accepted: to rotate, append the new key everywhere, then move it to the front everywhere, then
    /// take the old one out. Replicas publish the public halves at `/.well-known/jwks.json`. Not together with
    /// `OBOL_SERVICE_JWT_SECRET`. A new key: `openssl genpkey -algorithm ed25519 -out service.pem`.
    SERVICE_JWT_KEY_FILE {
        default: Unset::Means("no key pair"),
        shape: Shape::Ed25519File,
        secrecy: Secrecy::Open,
        option: None,
        used_by: SERVICES,
    }

    /// The public keys of the other side, when control and the replicas have different key pairs: control's for the
    /// replicas, the replicas' for control. The own key then speaks for the own side only. Needs
    /// `OBOL_SERVICE_JWT_KEY_FILE`. The public half of a key: `openssl pkey -in service.pem -pubout`.
    SERVICE_JWT_TRUSTED_KEYS_FILE {
        default: Unset::Means("both sides have the key of `OBOL_SERVICE_JWT_KEY_FILE`"),
        shape: Shape::Ed25519PublicFile,
        secrecy: Secrecy::Open,
        option: None,
        used_by: SERVICES,
    }

    /// Where control serves its internal API (`OBOL_CONTROL_LISTEN` there). A replica asks it for publications and keys
    /// that Redis has lost; needs the same service JWT key as control. Without it a replica waits until control has
    /// filled Redis again.
    CONTROL_URL {
        default: Unset::Means("control is never asked"),
        shape: Shape::BaseUrl,
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Run],
    }

    /// The credential of operators for `/admin` (`Authorization: Bearer …`), or `sha256:` and its hash
    /// (`printf %s "$TOKEN" | sha256sum`), so that the environment does not hold it. Without it `/admin` is off.
    ADMIN_TOKEN {
        default: Unset::Means("`/admin` is off"),
        shape: Shape::HashedSecret { min: 32 },
        secrecy: Secrecy::Secret,
        option: None,
        used_by: GATEWAY,
    }

    /// The URL at which clients reach the gateway, without `/mcp` and `/v1`: the canonical URI that access tokens must be
    /// issued for (`aud`). Required with `OBOL_OAUTH_ISSUERS`. One that ends in `/mcp` makes MCP alone the resource.
    PUBLIC_URL {
        default: Unset::Means("none; required with `OBOL_OAUTH_ISSUERS`"),
        shape: Shape::PublicUrl,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// Who issues the OAuth access tokens (JWTs) that are accepted beside virtual keys. Each must be spelled exactly as
    /// `iss` says it. The keys of an issuer are discovered (RFC 8414, OpenID Connect), or read at `JWKS_URL`.
    OAUTH_ISSUERS {
        default: Unset::Means("no OAuth"),
        shape: Shape::Issuers,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// What access tokens may be signed with. A key of an issuer narrows it down to what it is made for.
    OAUTH_ALGORITHMS {
        default: Unset::Value("RS256,PS256,ES256,EdDSA"),
        shape: Shape::Algorithms,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// What every access token must grant (`scope` or `scp`), all of it; one that lacks some is refused with `403`
    /// `insufficient_scope`.
    OAUTH_SCOPES {
        default: Unset::Means("no scope is required"),
        shape: Shape::Scopes,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The workspace of all users with access tokens. Not together with `OBOL_OAUTH_WORKSPACE_CLAIM`; one of them is
    /// required with `OBOL_OAUTH_ISSUERS`.
    OAUTH_WORKSPACE {
        default: Unset::Means("a claim says it"),
        shape: Shape::Workspace,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The claim whose value is the id of a user's workspace; exactly one value. Every issuer can then let users into
    /// every workspace.
    OAUTH_WORKSPACE_CLAIM {
        default: Unset::Means("`OBOL_OAUTH_WORKSPACE` says it"),
        shape: Shape::Claim,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The claim whose values policies see as `principal.tags`, such as `groups` or `realm_access.roles`: a list, or
    /// words in one string.
    OAUTH_TAGS_CLAIM {
        default: Unset::Means("no tags"),
        shape: Shape::Claim,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// How long the keys of an issuer are good before they are fetched again: a withdrawn key is refused after that at
    /// the latest. While an issuer does not answer, its known keys are good for an hour longer.
    OAUTH_JWKS_TTL_S {
        default: Unset::Value("300"),
        shape: Shape::Seconds { min: 1, max: 3600 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The longest time upstream of one request: all attempts together.
    UPSTREAM_TIMEOUT_S {
        default: Unset::Value("300"),
        shape: Shape::Seconds { min: 1, max: 3600 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// How long a client may take nothing of what waits for it. Then its connection is closed, what it asked for ends as
    /// if it had left, and what was used is settled. A client that reads slowly, or a stream that is silent, is not cut.
    CLIENT_STALL_TIMEOUT_S {
        default: Unset::Value("60"),
        shape: Shape::Seconds { min: 1, max: 3600 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// How long a request is known by its idempotency key, counted from its answer: one that is sent again under it is
    /// answered again, and not made again. Longer than `OBOL_UPSTREAM_TIMEOUT_S` and `OBOL_DRAIN_TIMEOUT_S` together, so
    /// that no call outlives its key.
    IDEMPOTENCY_TTL_S {
        default: Unset::Value("900"),
        shape: Shape::Seconds { min: 1, max: 86_400 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The time between `SIGTERM` and the end of the process: what is in flight may finish, what is left is aborted.
    /// Give the supervisor a little more (Kubernetes: `terminationGracePeriodSeconds`). The exit code is 0 when
    /// everything finished and 75 when something was aborted.
    DRAIN_TIMEOUT_S {
        default: Unset::Value("30"),
        shape: Shape::Seconds { min: 1, max: 3600 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// How long a drain goes on serving everything, after `/readyz` has turned `503`, before it stops accepting: as long as
    /// whatever sends requests here takes to notice. HTTP/1.1 answers carry `Connection: close` meanwhile. Part of
    /// `OBOL_DRAIN_TIMEOUT_S`, and less than it.
    DRAIN_DELAY_S {
        default: Unset::Value("0"),
        shape: Shape::Seconds { min: 0, max: 3600 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The `Origin` values that may call from a browser. A request with another one is refused with `403`; a request
    /// without `Origin` does not come from a browser and passes. Setting it replaces the default.
    ALLOWED_ORIGINS {
        default: Unset::Means("loopback origins when `OBOL_LISTEN` is a loopback address, else none"),
        shape: Shape::Origins,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The names that requests may carry in `Host`; names of this machine itself (`localhost`, `127.0.0.1`, `[::1]`)
    /// always pass on a loopback listener. It stops DNS rebinding; set it to the public name when a proxy on the same
    /// machine passes the name on.
    ALLOWED_HOSTS {
        default: Unset::Means("loopback names when `OBOL_LISTEN` is a loopback address, else any"),
        shape: Shape::Hosts,
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The largest body of a request; a larger one is refused with `413`.
    MAX_BODY_BYTES {
        default: Unset::Value("4 MiB"),
        shape: Shape::Bytes { min: 1024, max: 256 * 1024 * 1024 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// How many usage events may wait in memory for Redis. When it is full, calls that cost something are refused with
    /// `503` rather than forgotten.
    USAGE_QUEUE {
        default: Unset::Value("10000"),
        shape: Shape::Count { min: 1, max: 1_000_000 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// How many usage events of a workspace may wait in Redis for whoever collects them. When there are as many, its calls are
    /// refused with `503` rather than forgotten. A stream that nobody reads (it has no consumer group, since no control ever
    /// ran) refuses nothing and keeps about as many, the newest.
    USAGE_STREAM_MAX {
        default: Unset::Value("1000000"),
        shape: Shape::Count { min: 1, max: 100_000_000 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Run],
    }

    /// Where a replica leaves usage that Redis has not taken by the end of its drain, one file each; the next replica that
    /// starts with the directory settles it. The directory has to exist and outlive the process; several replicas may
    /// share it. Not set, such calls are booked by another replica, at the most that they could cost.
    SPOOL_DIR {
        default: Unset::Means("nothing is kept"),
        shape: Shape::Directory,
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Run],
    }

    /// Threads that serve requests.
    WORKER_THREADS {
        default: Unset::Means("one for each CPU that the process may use"),
        shape: Shape::Count { min: 1, max: 512 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: &[Run, Control, Dev],
    }

    /// What is logged, on stderr. `debug` and `trace` hold for Obol's own targets (`obol`, `obol_mcp`, …) only: other
    /// libraries print headers and frames there, credentials included, so they never log below `info`, whatever the
    /// filter says.
    LOG {
        default: Unset::Value("info"),
        shape: Shape::LogFilter,
        secrecy: Secrecy::Open,
        option: None,
        used_by: EVERY,
    }

    /// The form of log lines: `json` for machines, `pretty` for people.
    LOG_FORMAT {
        default: Unset::Means("`pretty` when stderr is a terminal, else `json`"),
        shape: Shape::Word(&["json", "pretty"]),
        secrecy: Secrecy::Open,
        option: None,
        used_by: EVERY,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_documented_and_say_their_unit() {
        let names: HashSet<_> = ALL.iter().map(|v| v.name).collect();
        assert_eq!(names.len(), ALL.len());
        for v in ALL {
            assert!(v.name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{}", v.name);
            assert!(!v.used_by.is_empty(), "{} has no effect", v.name);
            assert!(v.doc.trim().ends_with('.'), "{} is not documented", v.name);
            assert_eq!(matches!(v.shape, Shape::Seconds { .. }), v.name.ends_with("_S"), "{}", v.name);
            assert_eq!(matches!(v.shape, Shape::Bytes { .. }), v.name.ends_with("_BYTES"), "{}", v.name);
        }
    }
}
