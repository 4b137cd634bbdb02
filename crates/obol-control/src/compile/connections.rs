use std::collections::BTreeMap;

use obol_model::ConnectionName;
use obol_model::names::exposed_name;
use obol_model::snapshot::{CatalogMode, Connection, Namespace, ToolRule, Transport, WorkerMode};

use super::reader::{Fields, Reader, short};
use super::yaml::{Node, Place, place};

const COMMON: [&str; 7] =
    ["transport", "namespace", "stateful", "catalog", "tools", "price_per_call", "timeout_s"];
const OVER_HTTP: [&str; 3] = ["url", "auth", "allow_private"];
const OVER_STDIO: [&str; 3] = ["command", "env", "mode"];
/// A day: longer than any bound of the gateway.
const LONGEST_CALL_S: u64 = 86_400;

#[derive(Clone, Copy)]
enum Kind {
    StreamableHttp,
    Stdio,
    Sse,
}

/// What must be unique over all connections of a workspace.
#[derive(Default)]
struct Names {
    unprefixed: Option<ConnectionName>,
    /// What clients see → where it was first used. Of tools that have rules: others are known to their servers alone.
    exposed: BTreeMap<String, Place>,
    /// The connections of the file, the misspelt ones included.
    all: Vec<String>,
}

impl Reader<'_> {
    pub(super) fn connections(&mut self, node: &Node) -> BTreeMap<ConnectionName, Connection> {
        let entries = self.entries(node, "`connections`");
        let all = entries.iter().map(|(name, ..)| (*name).to_owned()).collect();
        let mut names = Names { all, ..Names::default() };
        let mut connections = BTreeMap::new();
        for (name, at, node) in entries {
            let id = self.id::<ConnectionName>(name, at);
            let what = format!("connection `{}`", short(name));
            let connection = self.connection(node, &what, id.as_ref(), &mut names);
            connections.extend(id.zip(connection));
        }
        connections
    }

    fn connection(
        &mut self,
        node: &Node,
        what: &str,
        id: Option<&ConnectionName>,
        names: &mut Names,
    ) -> Option<Connection> {
        let known: Vec<&str> = COMMON.iter().chain(&OVER_HTTP).chain(&OVER_STDIO).copied().collect();
        let fields = self.fields(node, what, &known);
        let namespace = self.namespace(&fields, id, names);
        let stateful = self.boolean(&fields, "stateful").unwrap_or_default();
        if let (true, Some(node)) = (stateful, fields.get("stateful")) {
            // Accepting it without keeping one upstream session per client session would lose state in silence.
            let help = "remove it if the server keeps nothing in its session: it is renewed every 45 seconds";
            self.fault(place(node), "`stateful: true` is not supported by this release yet", help);
        }
        let price_per_call = self.price(&fields, "price_per_call").unwrap_or_default();
        let timeout_s = self.count(&fields, "timeout_s", LONGEST_CALL_S);
        let modes = [("live", CatalogMode::Live), ("pinned", CatalogMode::Pinned)];
        let catalog = self.word(&fields, "catalog", &modes).unwrap_or_default();
        let tools = fields
            .get("tools")
            .map(|node| self.tools(node, id, namespace, catalog, names))
            .unwrap_or_default();
        let transport = self.transport(&fields, what)?;
        Some(Connection { transport, namespace, stateful, catalog, tools, price_per_call, timeout_s })
    }

    fn namespace(
        &mut self,
        fields: &Fields<'_>,
        id: Option<&ConnectionName>,
        names: &mut Names,
    ) -> Namespace {
        let words = [("prefix", Namespace::Prefix), ("none", Namespace::None)];
        let namespace = self.word(fields, "namespace", &words).unwrap_or_default();
        if namespace == Namespace::None {
            if let (Some(first), Some(node)) = (&names.unprefixed, fields.get("namespace")) {
                let message = format!("only one connection can have `namespace: none`, and `{first}` has it");
                self.fault(place(node), message, "remove it from one of the two");
            }
            names.unprefixed = names.unprefixed.take().or_else(|| id.cloned());
        }
        namespace
    }

    fn transport(&mut self, fields: &Fields<'_>, what: &str) -> Option<Transport> {
        let Some(node) = fields.get("transport") else {
            let help =
                "add `transport: streamable_http` with a `url`, or `transport: stdio` with a `command`";
            self.fault(fields.place, format!("{what} has no `transport`"), help);
            return None;
        };
        let words = [("streamable_http", Kind::StreamableHttp), ("stdio", Kind::Stdio), ("sse", Kind::Sse)];
        let kind = self.word(fields, "transport", &words)?;
        let (foreign, word, other) = match kind {
            Kind::StreamableHttp => (OVER_STDIO, "streamable_http", "stdio"),
            Kind::Stdio => (OVER_HTTP, "stdio", "streamable_http"),
            Kind::Sse => {
                let help = "use `streamable_http`; most servers offer it by now";
                self.fault(place(node), "`transport: sse` is not supported by this release yet", help);
                return None;
            }
        };
        for name in foreign {
            if let Some(at) = fields.place_of(name) {
                let help = format!("remove it, or use `transport: {other}`");
                self.fault(at, format!("`{name}` does not go with `transport: {word}`"), help);
            }
        }
        match kind {
            Kind::Stdio => self.stdio(fields, what),
            _ => self.streamable_http(fields, what),
        }
    }

    fn streamable_http(&mut self, fields: &Fields<'_>, what: &str) -> Option<Transport> {
        let allow_private = self.boolean(fields, "allow_private").unwrap_or_default();
        let auth = fields.get("auth").map(|node| self.auth(node));
        let Some(node) = fields.get("url") else {
            let help = "add `url: https://host.example/mcp`";
            self.fault(fields.place, format!("{what} has no `url`"), help);
            return None;
        };
        let url = self.url(node, "url", allow_private, true)?;
        Some(Transport::StreamableHttp { url, auth: auth.flatten(), allow_private })
    }

    fn stdio(&mut self, fields: &Fields<'_>, what: &str) -> Option<Transport> {
        let words = [
            ("per_session", WorkerMode::PerSession),
            ("per_principal", WorkerMode::PerPrincipal),
            ("shared", WorkerMode::Shared),
        ];
        let mode = self.word(fields, "mode", &words).unwrap_or_default();
        let env = fields.get("env").map(|node| self.environment(node)).unwrap_or_default();
        let help = "add `command: [\"program\", \"argument\"]`";
        let Some(node) = fields.get("command") else {
            self.fault(fields.place, format!("{what} has no `command`"), help);
            return None;
        };
        let faults = self.faults.len();
        let words = self.list(node, "`command`");
        self.credential_in_command(words);
        let command: Vec<String> =
            words.iter().filter_map(|arg| self.scalar(arg, "an argument of `command`")).collect();
        if self.faults.len() > faults {
            return None;
        }
        if command.first().is_none_or(|program| program.trim().is_empty()) {
            self.fault(place(node), "`command` is empty", help);
            return None;
        }
        Some(Transport::Stdio { command, env, mode })
    }

    fn tools(
        &mut self,
        node: &Node,
        connection: Option<&ConnectionName>,
        namespace: Namespace,
        catalog: CatalogMode,
        names: &mut Names,
    ) -> BTreeMap<String, ToolRule> {
        let known = ["alias", "hidden", "price_per_call", "destructive", "read_only", "digest"];
        let mut tools = BTreeMap::new();
        for (name, at, node) in self.entries(node, "`tools`") {
            if name.is_empty() || name.len() > 256 {
                self.fault(at, "a tool's name has 1 to 256 characters", "");
                continue;
            }
            let fields = self.fields(node, &format!("tool `{}`", short(name)), &known);
            let rule = ToolRule {
                alias: fields.get("alias").and_then(|node| self.alias(node)),
                hidden: self.boolean(&fields, "hidden").unwrap_or_default(),
                price_per_call: self.price(&fields, "price_per_call"),
                destructive: self.boolean(&fields, "destructive"),
                read_only: self.boolean(&fields, "read_only"),
                digest: fields.get("digest").and_then(|node| self.pin(node, catalog)),
            };
            // Nobody sees a hidden tool, so it takes no name.
            if !rule.hidden {
                let alias = fields.get("alias").zip(rule.alias.as_deref());
                self.exposed(name, at, alias, connection.map(|c| (c, namespace)), names);
            }
            tools.insert(name.to_owned(), rule);
        }
        tools
    }

    /// Takes the name that clients see of a tool, which no other may have.
    fn exposed(
        &mut self,
        name: &str,
        at: Place,
        alias: Option<(&Node, &str)>,
        connection: Option<(&ConnectionName, Namespace)>,
        names: &mut Names,
    ) {
        let (exposed, at, message) = match (alias, connection) {
            (Some((node, alias)), _) => (alias.to_owned(), place(node), format!("the alias `{alias}`")),
            (None, Some((connection, namespace))) => {
                let exposed = exposed_name(connection, namespace, name);
                let message = format!("clients would see tool `{}` as `{exposed}`, which", short(name));
                (exposed, at, message)
            }
            (None, None) => return,
        };
        if let Some((line, _)) = names.exposed.get(&exposed) {
            let help =
                if alias.is_some() { "choose another one" } else { "give one of the two another `alias`" };
            self.fault(at, format!("{message} is taken, in line {line}"), help);
            return;
        }
        let other = exposed.split_once("__").map(|(before, _)| before).filter(|before| {
            let unprefixed = connection.is_some_and(|(_, namespace)| namespace == Namespace::None);
            alias.is_none() && unprefixed && names.all.iter().any(|name| name == before)
        });
        if let Some(other) = other {
            let message = format!("tool `{}` looks like a tool of connection `{other}`", short(name));
            self.fault(at, message, "give it an `alias`: this connection has `namespace: none`");
        }
        names.exposed.insert(exposed, at);
    }

    fn pin(&mut self, node: &Node, catalog: CatalogMode) -> Option<String> {
        let digest = self.string(node, "`digest`")?;
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if !digest.strip_prefix("sha256:").is_some_and(|rest| rest.len() == 64 && rest.bytes().all(hex)) {
            let help =
                "`sha256:` and 64 hexadecimal digits, as the gateway's warning about the hidden tool has it";
            self.fault(place(node), format!("`{}` is no digest of a tool", short(digest)), help);
            return None;
        }
        if catalog != CatalogMode::Pinned {
            let help = "add `catalog: pinned` to the connection, or remove it";
            self.fault(place(node), "`digest` pins nothing without `catalog: pinned`", help);
        }
        Some(digest.to_owned())
    }

    fn alias(&mut self, node: &Node) -> Option<String> {
        let alias = self.string(node, "`alias`")?;
        let valid = (1..=50).contains(&alias.len())
            && alias.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        if !valid {
            let help = "1 to 50 of letters, digits, `_` and `-`: clients accept no more";
            self.fault(place(node), format!("`{}` is no alias", short(alias)), help);
            return None;
        }
        if alias.split_once("__").is_some_and(|(before, _)| before.parse::<ConnectionName>().is_ok()) {
            let help = "`__` stands between a connection and its tool; use another separator";
            self.fault(place(node), format!("`{alias}` looks like a tool of another connection"), help);
            return None;
        }
        Some(alias.to_owned())
    }
}
