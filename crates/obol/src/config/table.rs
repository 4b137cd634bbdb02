//! Every variable that Obol reads, in one table: the reference page, the messages about bad values and the check for
//! unknown names all come from here (DESIGN §4).

use crate::config::Subcommand::{self, Check, Control, Dev, Key, Run};

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
    /// AEAD keys with their ids.
    KeyRing,
    /// Text that nobody can guess.
    SharedSecret {
        /// The least number of bytes.
        min: usize,
    },
    /// An Ed25519 private key in a file.
    Ed25519File,
    /// A directory.
    Directory,
    /// Origins as browsers send them.
    Origins,
    /// Host names, without ports.
    Hosts,
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
            Self::RedisUrl => "`redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, or `rediss://…` for TLS".into(),
            Self::KeyRing => "`ID:BASE64` of 32 random bytes, more than one separated by commas".into(),
            Self::SharedSecret { .. } => "text that nobody can guess".into(),
            Self::Ed25519File => "the path of a PEM file that holds an Ed25519 private key (PKCS #8)".into(),
            Self::Directory => "the path of a directory".into(),
            Self::Origins => "`SCHEME://HOST[:PORT]`, more than one separated by commas".into(),
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
            Self::SharedSecret { min } => Some(format!("at least {min} bytes")),
            Self::Origins => Some("no path and no `*`".into()),
            Self::LogFilter => Some("levels `off`, `error`, `warn`, `info`, `debug` and `trace`".into()),
            Self::Word(words) => {
                Some(words.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(" or "))
            }
            Self::Address | Self::RedisUrl | Self::Ed25519File | Self::Directory | Self::Hosts => None,
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
const EVERY: &[Subcommand] = &[Run, Control, Dev, Check, Key];

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

    /// The Redis that the replicas and control share. It must not evict: set its `maxmemory-policy` to `noeviction`.
    REDIS_URL {
        default: Unset::Refused,
        shape: Shape::RedisUrl,
        secrecy: Secrecy::UrlPassword,
        option: None,
        used_by: &[Run, Control],
    }

    /// The keys that protect upstream credentials inside publications: control seals with the first one, replicas open
    /// with any. To rotate, put the new key in front on the replicas, then on control, and take the old one away once
    /// everything is published again. A new key: `echo "k1:$(openssl rand -base64 32)"`.
    CREDENTIAL_KEY {
        default: Unset::Refused,
        shape: Shape::KeyRing,
        secrecy: Secrecy::Secret,
        option: None,
        used_by: &[Run, Control],
    }

    /// The directory of workspace files (`*.yaml`, and the policies that they name), watched for changes.
    WORKSPACES_DIR {
        default: Unset::Refused,
        shape: Shape::Directory,
        secrecy: Secrecy::Open,
        option: Some("--workspaces"),
        used_by: &[Control],
    }

    /// Where control keeps what has no file of its own, such as the hashes of virtual keys. It belongs to control
    /// alone: keep it on a disk that outlives the process.
    STATE_DIR {
        default: Unset::Refused,
        shape: Shape::Directory,
        secrecy: Secrecy::Open,
        option: Some("--state"),
        used_by: &[Control, Key],
    }

    /// How long an MCP session lives without any activity. Open streams and running calls count as activity.
    SESSION_TTL_S {
        default: Unset::Value("1800"),
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
    /// at once through Redis.
    KEY_TTL_S {
        default: Unset::Value("60"),
        shape: Shape::Seconds { min: 1, max: 3600 },
        secrecy: Secrecy::Open,
        option: None,
        used_by: GATEWAY,
    }

    /// The shared secret (HS256) of the service JWTs that `/internal/reload` accepts. Not together with
    /// `OBOL_SERVICE_JWT_KEY_FILE`. Without either of them `/internal/reload` is off.
    SERVICE_JWT_SECRET {
        default: Unset::Means("no shared secret"),
        shape: Shape::SharedSecret { min: 32 },
        secrecy: Secrecy::Secret,
        option: None,
        used_by: GATEWAY,
    }

    /// The key pair (EdDSA) of the service JWTs that `/internal/reload` accepts. Not together with
    /// `OBOL_SERVICE_JWT_SECRET`. A new one: `openssl genpkey -algorithm ed25519 -out service.pem`.
    SERVICE_JWT_KEY_FILE {
        default: Unset::Means("no key pair"),
        shape: Shape::Ed25519File,
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
