use std::collections::HashMap;
use std::fmt;
use std::str::FromStr as _;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;

use cedar_policy::ffi::DetailedError;
use cedar_policy::{Authorizer, Policy, PolicyId, PolicySet, Schema, ValidationMode, Validator};
use metrics::Counter;
use obol_model::metric;
use obol_model::snapshot::PolicyFile;
use serde_json::Value;

use crate::cache::Cache;
use crate::{Action, SCHEMA};

/// The policies of one publication, ready to decide.
pub struct Policies {
    pub(crate) set: PolicySet,
    /// What people call a policy: its `@id`, else `file#number`.
    pub(crate) labels: HashMap<PolicyId, String>,
    pub(crate) uses_arguments: bool,
    pub(crate) cache: Cache,
    pub(crate) authorizer: Authorizer,
    pub(crate) evaluations: AtomicU64,
    pub(crate) counters: [(Action, Counter, Counter); 6],
    warnings: Vec<PolicyFault>,
    named: Vec<Named>,
}

/// A thing of the workspace that a policy names by its id. Cedar checks types and attributes, not whether there is such
/// a thing: a rule on a mistyped one holds for nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The entity type, such as `Tool`.
    pub kind: String,
    /// The id, such as `git/log`.
    pub id: String,
    /// Where it stands; the message says what is named.
    pub place: PolicyFault,
}

impl Named {
    /// The connection that the id of a tool, resource or prompt begins with.
    pub fn connection(&self) -> Option<&str> {
        match self.kind.as_str() {
            "Tool" | "Resource" | "Prompt" => self.id.split_once('/').map(|(connection, _)| connection),
            "Connection" => Some(&self.id),
            _ => None,
        }
    }

    /// The fault of an id that can name nothing in any workspace.
    fn without_connection(&self) -> Option<PolicyFault> {
        let part = matches!(self.kind.as_str(), "Tool" | "Resource" | "Prompt");
        let help = match self.id.split_once("__") {
            Some((connection, name)) => {
                format!("policies use the upstream's own name: `{}::\"{connection}/{name}\"`", self.kind)
            }
            None => format!("write `{}::\"CONNECTION/NAME\"`, with the upstream's own name", self.kind),
        };
        (part && self.connection().is_none()).then(|| PolicyFault {
            message: format!("`{}::\"{}\"` can name nothing: its id has no connection", self.kind, self.id),
            help: Some(help),
            ..self.place.clone()
        })
    }
}

/// What is wrong with a policy file, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyFault {
    /// Name of the file, as [`PolicyFile::name`] gives it.
    pub file: String,
    /// From 1.
    pub line: u64,
    /// In characters, from 1.
    pub column: u64,
    /// What is wrong.
    pub message: String,
    /// The way out, when Cedar knows one.
    pub help: Option<String>,
}

impl fmt::Display for PolicyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, "\n  help: {help}"))
    }
}

impl fmt::Debug for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policies")
            .field("policies", &self.labels.len())
            .field("uses_arguments", &self.uses_arguments)
            .finish_non_exhaustive()
    }
}

#[expect(clippy::expect_used, reason = "a constant of this crate, parsed by every test of it")]
pub(crate) static PARSED_SCHEMA: LazyLock<Schema> =
    LazyLock::new(|| Schema::from_cedarschema_str(SCHEMA).expect("the schema of this crate parses").0);

impl Policies {
    /// Parses and strictly validates `files`. No file, or none with a policy in it, denies everything.
    ///
    /// # Errors
    /// All faults of all files.
    pub fn compile(files: &[PolicyFile]) -> Result<Self, Vec<PolicyFault>> {
        let mut faults = Vec::new();
        let mut policies = Self::assemble(files, &mut faults);
        if !faults.is_empty() {
            return Err(faults);
        }
        let result = Validator::new(PARSED_SCHEMA.clone()).validate(&policies.set, ValidationMode::Strict);
        let faults: Vec<_> = result
            .validation_errors()
            .map(|e| fault_of_policy(files, e.policy_id(), &DetailedError::from(e)))
            .collect();
        if !faults.is_empty() {
            return Err(sorted(faults));
        }
        let named = policies.named(files);
        let faults: Vec<_> = named.iter().filter_map(Named::without_connection).collect();
        if !faults.is_empty() {
            return Err(sorted(faults));
        }
        policies.named = named;
        policies.warnings = sorted(
            result
                .validation_warnings()
                .map(|w| fault_of_policy(files, w.policy_id(), &DetailedError::from(w)))
                .collect(),
        );
        Ok(policies)
    }

    /// What is valid but probably not meant, such as a policy that can never apply.
    pub fn warnings(&self) -> &[PolicyFault] {
        &self.warnings
    }

    /// What the policies name by id, for whoever knows what the workspace has.
    pub fn things(&self) -> &[Named] {
        &self.named
    }

    fn named(&self, files: &[PolicyFile]) -> Vec<Named> {
        let mut all = Vec::new();
        for policy in self.set.policies() {
            let index: &str = policy.id().as_ref();
            let Some(file) = index.split('#').next().and_then(|i| files.get(i.parse::<usize>().ok()?)) else {
                continue;
            };
            for literal in policy.entity_literals() {
                let (kind, id) = (literal.type_name().to_string(), literal.id().unescaped().to_owned());
                let offset = file.text.find(&literal.to_string()).unwrap_or(0);
                let place = fault_at(file, offset, format!("`{literal}`"), None);
                let named = Named { kind, id, place };
                if !all.contains(&named) {
                    all.push(named);
                }
            }
        }
        // Cedar hands policies out in any order.
        all.sort_by(|a, b| {
            (&a.place.file, a.place.line, a.place.column).cmp(&(&b.place.file, b.place.line, b.place.column))
        });
        all
    }

    /// Whether there is no policy at all, so that everything is denied.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Everything but the validation against the schema.
    pub(crate) fn assemble(files: &[PolicyFile], faults: &mut Vec<PolicyFault>) -> Self {
        let mut set = PolicySet::new();
        let mut labels: HashMap<PolicyId, String> = HashMap::new();
        let mut uses_arguments = false;
        for (index, file) in files.iter().enumerate() {
            for (number, policy) in parse(file, faults) {
                let id = PolicyId::new(format!("{index}#{number}"));
                let label =
                    policy.annotation("id").map_or_else(|| format!("{}#{number}", file.name), str::to_owned);
                if labels.values().any(|known| *known == label) {
                    let message = format!("two policies have the id `{label}`");
                    let help = "give each policy an `@id` of its own";
                    faults.push(fault_at(
                        file,
                        file.text.rfind(&label).unwrap_or(0),
                        message,
                        Some(help.to_owned()),
                    ));
                }
                uses_arguments |= policy.to_json().map_or(true, |json| mentions_arguments(&json));
                if let Err(e) = set.add(policy.new_id(id.clone())) {
                    faults.push(fault_at(file, 0, e.to_string(), None));
                }
                labels.insert(id, label);
            }
        }
        Self {
            set,
            labels,
            uses_arguments,
            cache: Cache::new(),
            authorizer: Authorizer::new(),
            evaluations: AtomicU64::new(0),
            counters: Action::ALL.map(|action| (action, counter(action, "allow"), counter(action, "deny"))),
            warnings: Vec::new(),
            named: Vec::new(),
        }
    }
}

fn counter(action: Action, decision: &'static str) -> Counter {
    metrics::counter!(metric::AUTHZ_DECISIONS, "action" => action.as_str(), "decision" => decision)
}

/// The policies of a file with their numbers from 1, in the order of the file.
fn parse(file: &PolicyFile, faults: &mut Vec<PolicyFault>) -> Vec<(usize, Policy)> {
    let set = match PolicySet::from_str(&file.text) {
        Ok(set) => set,
        Err(errors) => {
            faults.extend(errors.iter().map(|e| fault_in(file, &DetailedError::from(e))));
            return Vec::new();
        }
    };
    if set.templates().next().is_some() {
        // A template does nothing until it is linked, and nothing here links: an author would believe in a rule that
        // does not hold.
        let at =
            file.text.find("?principal").into_iter().chain(file.text.find("?resource")).min().unwrap_or(0);
        let help = "name the principal or the resource, or use `when { … }`".to_owned();
        faults.push(fault_at(file, at, "policy templates are not supported".to_owned(), Some(help)));
    }
    // Cedar names them `policy0`, `policy1`… in the order of the text and hands them out in any order.
    let mut policies: Vec<_> = set
        .policies()
        .map(|p| (p.id().to_string().trim_start_matches("policy").parse().unwrap_or(0_usize) + 1, p.clone()))
        .collect();
    policies.sort_by_key(|(number, _)| *number);
    policies
}

/// Whether a policy, as Cedar's JSON, can read `context.arguments`. Any use of `context` other than for a named
/// attribute counts, so that the answer errs only towards not caching.
fn mentions_arguments(json: &Value) -> bool {
    match json {
        Value::Array(items) => items.iter().any(mentions_arguments),
        Value::Object(object) => object.iter().any(|(key, value)| {
            let of_context = value.pointer("/left/Var").and_then(Value::as_str) == Some("context");
            match (key.as_str(), value) {
                ("." | "has", _) if of_context => {
                    value.get("attr").and_then(Value::as_str) == Some("arguments")
                }
                ("Var", Value::String(name)) => name == "context",
                _ => mentions_arguments(value),
            }
        }),
        _ => false,
    }
}

fn fault_of_policy(files: &[PolicyFile], id: &PolicyId, error: &DetailedError) -> PolicyFault {
    let id: &str = id.as_ref();
    let index = id.split('#').next().and_then(|i| i.parse::<usize>().ok());
    match index.and_then(|i| files.get(i)) {
        Some(file) => fault_in(file, error),
        None => PolicyFault {
            file: id.to_string(),
            line: 1,
            column: 1,
            message: error.message.clone(),
            help: None,
        },
    }
}

fn fault_in(file: &PolicyFile, error: &DetailedError) -> PolicyFault {
    let offset = error.source_locations.first().map_or(0, |label| label.loc.start);
    let label = error.source_locations.first().and_then(|label| label.label.as_deref());
    let message = error.message.strip_prefix("for policy `").and_then(|m| m.split_once("`, ")).map_or_else(
        // Cedar repeats its internal id of the policy; the position says more.
        || error.message.clone(),
        |(_, rest)| rest.to_owned(),
    );
    fault_at(file, offset, message, error.help.clone().or_else(|| label.map(str::to_owned)))
}

fn fault_at(file: &PolicyFile, offset: usize, message: String, help: Option<String>) -> PolicyFault {
    let before = file.text.get(..offset).unwrap_or(&file.text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    PolicyFault {
        file: file.name.clone(),
        line: before.matches('\n').count() as u64 + 1,
        column: before.get(line_start..).unwrap_or_default().chars().count() as u64 + 1,
        message,
        help,
    }
}

fn sorted(mut faults: Vec<PolicyFault>) -> Vec<PolicyFault> {
    faults.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, text: &str) -> PolicyFile {
        PolicyFile { name: name.into(), text: text.into() }
    }

    fn faults(text: &str) -> Vec<String> {
        Policies::compile(&[
            file("good.cedar", "permit(principal, action, resource);"),
            file("a.cedar", text),
        ])
        .err()
        .unwrap_or_default()
        .iter()
        .map(ToString::to_string)
        .collect()
    }

    #[test]
    fn faults_name_file_line_and_column() {
        let table = [
            ("\npermit(principal, action, resource) when { principal.age > 3 };", "a.cedar:2:", "age"),
            ("permit(principal, action == Action::\"mcp:cal\", resource);", "a.cedar:1:", "mcp:cal"),
            ("permit(principal, action, resource)", "a.cedar:1:36: ", "unexpected end of input"),
            ("\n\n  permit(principal in ?principal, action, resource);", "a.cedar:3:23: ", "templates"),
            (
                "@id(\"x\") permit(principal, action, resource);\n@id(\"x\") forbid(principal, action, resource);",
                "a.cedar:2:6: ",
                "two policies have the id `x`",
            ),
            // Strict: reading an optional attribute without asking for it.
            (
                "forbid(principal, action == Action::\"mcp:callTool\", resource) when { context.client == \"x\" };",
                "a.cedar:1:",
                "client",
            ),
        ];
        for (text, place, word) in table {
            let faults = faults(text);
            println!("{faults:#?}");
            assert!(!faults.is_empty(), "{text}");
            assert!(faults[0].starts_with(place), "{faults:?}");
            assert!(faults[0].contains(word), "{faults:?}");
        }
    }

    #[test]
    fn all_files_are_reported_together() {
        let found = Policies::compile(&[file("a.cedar", "permit("), file("b.cedar", "x")]).unwrap_err();
        assert_eq!(found.iter().map(|f| f.file.as_str()).collect::<Vec<_>>(), ["a.cedar", "b.cedar"]);
    }

    #[test]
    fn a_policy_that_can_never_apply_is_a_warning() {
        let text = "permit(principal, action == Action::\"llm:invoke\", resource) when { resource.name == \"a\" && false };";
        let policies = Policies::compile(&[file("a.cedar", text)]).unwrap();
        let warnings: Vec<_> = policies.warnings().iter().map(ToString::to_string).collect();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].starts_with("a.cedar:1:1: policy is impossible"), "{warnings:?}");
    }

    #[test]
    fn a_look_at_arguments_is_noticed() {
        let table = [
            ("true", false),
            ("context.environment == \"test\"", false),
            ("context has client && context.client == \"arguments\"", false),
            ("context has arguments", true),
            ("context has arguments && context.arguments.hasTag(\"a\")", true),
            ("principal.name == \"x\" || (context has arguments && context.arguments.hasTag(\"a\"))", true),
        ];
        for (condition, expected) in table {
            let text = format!(
                "permit(principal, action == Action::\"mcp:callTool\", resource) when {{ {condition} }};"
            );
            assert_eq!(
                Policies::compile(&[file("a.cedar", &text)]).unwrap().uses_arguments,
                expected,
                "{condition}"
            );
        }
    }

    #[test]
    fn an_id_that_can_name_nothing_is_a_fault_and_others_are_told() {
        let rule = |id: &str| format!("forbid (principal, action, resource == Tool::\"{id}\");");
        let fault = &faults(&rule("git__log"))[0];
        assert!(
            fault.contains("`Tool::\"git__log\"` can name nothing") && fault.contains("git/log"),
            "{fault}"
        );
        let policies = Policies::compile(&[file("a.cedar", &rule("git/log"))]).unwrap();
        let named: Vec<_> = policies.things().iter().filter_map(Named::connection).collect();
        assert_eq!(named, ["git"]);
    }
}
