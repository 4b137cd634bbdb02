//! From the bytes that an upstream lists to the items that callers may see.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use obol_model::metric;
use obol_model::snapshot::{Namespace, ToolRule};
use serde_json::value::RawValue;

use super::pin;
use crate::names;
use crate::pool::{Endpoint, ListKind};
use crate::shape;
use crate::wire::{Object, Splice};

/// One connection as a caller may list it.
#[derive(Debug, Clone)]
pub struct Source {
    /// Where it is.
    pub endpoint: Arc<Endpoint>,
    /// How its names appear.
    pub namespace: Namespace,
    /// What the workspace decides about single tools.
    pub rules: Arc<BTreeMap<String, ToolRule>>,
    /// Only tools whose definition is the one that the workspace pins are there (`catalog: pinned`).
    pub pinned: bool,
}

/// One tool, resource, resource template or prompt.
#[derive(Debug, Clone)]
pub struct Item {
    /// What the upstream calls it: a name, a URI or a URI template.
    pub name: String,
    /// What clients call it.
    pub exposed: String,
    /// Its definition as clients see it: the upstream's text with the name or URI rewritten.
    pub text: String,
    /// For policies: whether a tool may destroy something (the workspace's word, else the upstream's hint).
    pub destructive: bool,
    /// For policies: whether a tool only reads.
    pub read_only: bool,
}

/// All items of one kind that one connection offers, sorted by what clients call them.
#[derive(Debug, Default)]
pub struct Listing {
    items: Vec<Item>,
    by_exposed: HashMap<String, usize>,
    by_name: HashMap<String, usize>,
}

impl Listing {
    /// The items in order.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The item that clients call `exposed`.
    pub fn exposed(&self, exposed: &str) -> Option<&Item> {
        self.by_exposed.get(exposed).and_then(|i| self.items.get(*i))
    }

    /// The item that the upstream calls `name`.
    pub fn named(&self, name: &str) -> Option<&Item> {
        self.by_name.get(name).and_then(|i| self.items.get(*i))
    }
}

pub(super) fn build(source: &Source, kind: ListKind, raw: &[Box<RawValue>]) -> Listing {
    let connection = &source.endpoint.connection;
    let mut items: Vec<Item> = Vec::with_capacity(raw.len());
    for definition in raw {
        match shape::check(kind, definition) {
            Ok(()) => items.extend(item(source, kind, definition.get())),
            Err(member) => {
                metrics::counter!(metric::MCP_QUARANTINED).increment(1);
                tracing::warn!(%connection, list = kind.member(), member, "item left out of the list");
            }
        }
    }
    items.sort_by(|a, b| a.exposed.cmp(&b.exposed));
    // A collision hides both: whichever won, somebody would call the wrong one.
    let mut seen: HashMap<String, usize> = HashMap::new();
    for item in &items {
        *seen.entry(item.exposed.clone()).or_default() += 1;
    }
    items.retain(|item| {
        let unique = seen.get(&item.exposed) == Some(&1);
        if !unique {
            metrics::counter!(metric::MCP_QUARANTINED).increment(1);
            tracing::warn!(%connection, list = kind.member(), name = item.exposed, "name stands twice, both are hidden");
        }
        unique
    });
    let index =
        |of: fn(&Item) -> &String| items.iter().enumerate().map(|(i, item)| (of(item).clone(), i)).collect();
    let (by_exposed, by_name) = (index(|i| &i.exposed), index(|i| &i.name));
    Listing { items, by_exposed, by_name }
}

/// The item that `text` defines, whose shape was checked; `None` when the workspace hides it.
fn item(source: &Source, kind: ListKind, text: &str) -> Option<Item> {
    let object = Object::parse(text).ok()?;
    let (connection, namespace) = (&source.endpoint.connection, source.namespace);
    let member = match kind {
        ListKind::Tools | ListKind::Prompts => "name",
        ListKind::Resources => "uri",
        ListKind::ResourceTemplates => "uriTemplate",
    };
    let raw = object.get(member)?;
    let name = object.str(member)?.into_owned();
    let mut exposed = match kind {
        ListKind::Tools | ListKind::Prompts => names::exposed(connection, namespace, &name),
        ListKind::Resources | ListKind::ResourceTemplates => names::exposed_uri(connection, namespace, &name),
    };
    let (mut destructive, mut read_only) = (false, false);
    if kind == ListKind::Tools {
        let hint = |key| object.object("annotations").and_then(|a| a.bool(key));
        read_only = hint("readOnlyHint").unwrap_or(false);
        // server/tools: `destructiveHint` is true unless said otherwise, and means something only without `readOnlyHint`.
        // For policies a tool is destructive only when somebody says so: the default would make every tool of a server
        // without annotations destructive.
        destructive = hint("destructiveHint").unwrap_or(false) && !read_only;
        let rule = source.rules.get(&name);
        if rule.is_some_and(|rule| rule.hidden) || (source.pinned && !is_pinned(source, &name, rule, text)) {
            return None;
        }
        if let Some(rule) = rule {
            if let Some(alias) = &rule.alias {
                exposed.clone_from(alias);
            }
            destructive = rule.destructive.unwrap_or(destructive);
            read_only = rule.read_only.unwrap_or(read_only);
        }
    }
    let text = if exposed == name {
        text.to_owned()
    } else {
        let mut splice = Splice::new(text);
        splice.replace(raw, serde_json::Value::from(exposed.as_str()).to_string());
        splice.finish()
    };
    Some(Item { name, exposed, text, destructive, read_only })
}

/// Whether the definition is the one that the workspace pins. One that is not is reported with its digest, so that it can
/// be looked at and pinned.
fn is_pinned(source: &Source, name: &str, rule: Option<&ToolRule>, text: &str) -> bool {
    let digest = pin::digest(text);
    let (reason, pinned) = match rule.and_then(|rule| rule.digest.as_deref()) {
        Some(pinned) => ("changed", pinned == digest),
        None => ("added", false),
    };
    if !pinned {
        metrics::counter!(metric::MCP_UNPINNED_TOOLS, "reason" => reason).increment(1);
        let Endpoint { workspace, connection, .. } = source.endpoint.as_ref();
        tracing::warn!(%workspace, %connection, tool = name, reason, digest, "tool is hidden: it is not the pinned one");
    }
    pinned
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::EndpointKind;
    use crate::wire::ProtocolVersion;

    fn source(rules: &[(&str, ToolRule)]) -> Source {
        Source {
            endpoint: Arc::new(Endpoint {
                workspace: "acme".parse().unwrap(),
                connection: "git".parse().unwrap(),
                version: ProtocolVersion::LATEST,
                kind: EndpointKind::Stdio { command: vec![], env: vec![] },
                isolation: None,
                generation: 1,
            }),
            namespace: Namespace::Prefix,
            rules: Arc::new(rules.iter().map(|(n, r)| ((*n).to_owned(), r.clone())).collect()),
            pinned: false,
        }
    }

    fn listing(source: &Source, kind: ListKind, items: &[&str]) -> Listing {
        let raw: Vec<Box<RawValue>> =
            items.iter().map(|t| RawValue::from_string((*t).to_owned()).unwrap()).collect();
        build(source, kind, &raw)
    }

    #[test]
    fn tools_are_renamed_sorted_and_otherwise_untouched() {
        let listing = listing(
            &source(&[]),
            ListKind::Tools,
            &[
                r#"{"x":1.0,"name":"log","inputSchema":{"type":"object"}}"#,
                r#"{"name":"add","inputSchema":{"type":"object"},"annotations":{"destructiveHint":true}}"#,
            ],
        );
        let names: Vec<&str> = listing.items().iter().map(|i| i.exposed.as_str()).collect();
        assert_eq!(names, ["git__add", "git__log"]);
        assert!(listing.named("add").unwrap().destructive);
        assert_eq!(
            listing.exposed("git__log").unwrap().text,
            r#"{"x":1.0,"name":"git__log","inputSchema":{"type":"object"}}"#
        );
    }

    #[test]
    fn rules_of_the_workspace_win_over_hints() {
        let rules = [
            ("drop", ToolRule { hidden: true, ..ToolRule::default() }),
            ("add", ToolRule { alias: Some("plus".into()), destructive: Some(false), ..ToolRule::default() }),
        ];
        let listing = listing(
            &source(&rules),
            ListKind::Tools,
            &[
                r#"{"name":"drop","inputSchema":{"type":"object"}}"#,
                r#"{"name":"add","inputSchema":{"type":"object"},"annotations":{"destructiveHint":true}}"#,
            ],
        );
        assert_eq!(listing.items().len(), 1);
        let add = listing.exposed("plus").unwrap();
        assert_eq!((add.name.as_str(), add.destructive), ("add", false));
    }

    #[test]
    fn what_would_break_a_clients_whole_list_is_left_out() {
        let listing = listing(
            &source(&[]),
            ListKind::Tools,
            &[
                r#"{"name":"ok","inputSchema":{"type":"object"}}"#,
                r#"{"name":"no schema"}"#,
                r#"{"name":5,"inputSchema":{"type":"object"}}"#,
                r#"{"name":"bad schema","inputSchema":{"type":"string"}}"#,
                r#"{"name":"bad output","inputSchema":{"type":"object"},"outputSchema":{"type":"array"}}"#,
                r#"{"name":"twice","inputSchema":{"type":"object"}}"#,
                r#"{"name":"twice","inputSchema":{"type":"object"}}"#,
                "5",
            ],
        );
        assert_eq!(listing.items().iter().map(|i| i.exposed.as_str()).collect::<Vec<_>>(), ["git__ok"]);
    }

    #[test]
    fn uris_and_templates_are_prefixed() {
        let resources = listing(
            &source(&[]),
            ListKind::Resources,
            &[r#"{"uri":"file:///a","name":"a"}"#, r#"{"uri":"x:1"}"#],
        );
        assert_eq!(resources.items().len(), 1);
        assert_eq!(resources.items()[0].text, r#"{"uri":"git+file:///a","name":"a"}"#);
        let templates =
            listing(&source(&[]), ListKind::ResourceTemplates, &[r#"{"uriTemplate":"f:{p}","name":"f"}"#]);
        assert_eq!(templates.items()[0].exposed, "git+f:{p}");
    }

    #[test]
    fn a_pinned_connection_shows_the_pinned_definitions_and_hides_what_changed_or_is_new() {
        let seen = r#"{"name":"log","inputSchema":{"type":"object"}}"#;
        let pin = |digest: String| ToolRule { digest: Some(digest), ..ToolRule::default() };
        let rules = [
            ("log", pin(pin::digest(seen))),
            ("add", pin(pin::digest(r#"{"name":"add","inputSchema":{"type":"object"}}"#))),
        ];
        let pinned = Source { pinned: true, ..source(&rules) };
        let listing = listing(
            &pinned,
            ListKind::Tools,
            &[
                // Spelled otherwise, and the same.
                r#"{ "inputSchema": {"type": "\u006fbject"}, "name": "log" }"#,
                r#"{"name":"add","description":"Sends your files away","inputSchema":{"type":"object"}}"#,
                r#"{"name":"new","inputSchema":{"type":"object"}}"#,
            ],
        );
        assert_eq!(listing.items().iter().map(|i| i.name.as_str()).collect::<Vec<_>>(), ["log"]);
    }
}
