use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::str::FromStr as _;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;

use cedar_policy::ffi::DetailedError;
use cedar_policy::{Authorizer, Effect, Policy, PolicyId, PolicySet, Schema, ValidationMode, Validator};
use metrics::Counter;
use obol_model::metric;
use obol_model::snapshot::PolicyFile;

use crate::cache::Cache;
use crate::fault::{fault_at, fault_in, fault_of_policy, file_of, line_and_column, offset_of, sorted};
use crate::{Action, Named, PolicyFault, SCHEMA, rules};

/// The policies of one publication, ready to decide.
pub struct Policies {
    pub(crate) set: PolicySet,
    pub(crate) about: HashMap<PolicyId, PolicyInfo>,
    pub(crate) uses_arguments: bool,
    pub(crate) cache: Cache,
    pub(crate) authorizer: Authorizer,
    pub(crate) evaluations: AtomicU64,
    pub(crate) counters: [(Action, Counter, Counter); 6],
    warnings: Vec<PolicyFault>,
    named: Vec<Named>,
}

/// What people call a policy, and where it stands.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PolicyInfo {
    /// Name of the file, as [`PolicyFile::name`] gives it.
    pub file: String,
    /// Where it begins, its annotations included; from 1.
    pub line: u64,
    /// In characters, from 1.
    pub column: u64,
    /// Its `@id`, else `file#number`.
    pub label: String,
    /// Whether it is a `permit`; the others are `forbid`s.
    pub permits: bool,
}

impl fmt::Debug for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policies")
            .field("policies", &self.about.len())
            .field("uses_arguments", &self.uses_arguments)
            .finish_non_exhaustive()
    }
}

/// What Cedar warns of when a rule can hold for no request. Its author believes in it, so it is refused.
const INAPPLICABLE: &str = "unable to find an applicable action";

#[expect(clippy::expect_used, reason = "a constant of this crate, parsed by every test of it")]
pub(crate) static PARSED_SCHEMA: LazyLock<Schema> =
    LazyLock::new(|| Schema::from_cedarschema_str(SCHEMA).expect("the schema of this crate parses").0);

impl Policies {
    /// Parses and strictly validates `files`. No file, or none with a policy in it, denies everything.
    ///
    /// # Errors
    /// All faults of all files: what one file cannot be read for does not hide what is wrong with another.
    pub fn compile(files: &[PolicyFile]) -> Result<Self, Vec<PolicyFault>> {
        let mut faults = Vec::new();
        let mut policies = Self::assemble(files, &mut faults);
        let result = Validator::new(PARSED_SCHEMA.clone()).validate(&policies.set, ValidationMode::Strict);
        let misplaced = policies.misplaced_arguments(files);
        let said = result.validation_errors().map(|e| (e.policy_id(), DetailedError::from(e)));
        // Cedar says of such a rule only that there is no attribute of that name.
        let news = said.filter(|(id, e)| !(misplaced.contains_key(id) && e.message.contains("`arguments`")));
        faults.extend(news.map(|(id, e)| fault_of_policy(files, id, &e)));
        let warned = result.validation_warnings().map(|w| (w.policy_id(), DetailedError::from(w)));
        let (apart, doubts): (Vec<_>, Vec<_>) = warned.partition(|(_, w)| w.message.contains(INAPPLICABLE));
        // A mistyped name is said already, and is why.
        let unsaid =
            apart.into_iter().filter(|(id, _)| !result.validation_errors().any(|e| e.policy_id() == *id));
        faults.extend(unsaid.map(|(id, w)| PolicyFault {
            message: "no action of this rule goes with its principal and its resource".to_owned(),
            help: Some("docs/obol.cedarschema says which actions are asked for what".to_owned()),
            ..fault_of_policy(files, id, &w)
        }));
        let named = Named::all(&policies.set, files);
        faults.extend(named.iter().filter_map(Named::fault));
        faults.extend(misplaced.into_values());
        if !faults.is_empty() {
            return Err(sorted(faults));
        }
        let doubts = doubts.into_iter().map(|(id, w)| fault_of_policy(files, id, &w));
        let ours = policies.set.policies().filter_map(|p| Some(rules::warnings(p, file_of(files, p.id())?)));
        policies.warnings = sorted(doubts.chain(ours.flatten()).collect());
        policies.named = named;
        Ok(policies)
    }

    fn misplaced_arguments(&self, files: &[PolicyFile]) -> BTreeMap<PolicyId, PolicyFault> {
        let faulty = self.set.policies().filter_map(|policy| {
            let fault = rules::arguments_out_of_place(policy, file_of(files, policy.id())?)?;
            Some((policy.id().clone(), fault))
        });
        faulty.collect()
    }

    /// What is valid but probably not meant, such as a policy that can never apply.
    pub fn warnings(&self) -> &[PolicyFault] {
        &self.warnings
    }

    /// What the policies name by id, for whoever knows what the workspace has.
    pub fn things(&self) -> &[Named] {
        &self.named
    }

    /// Whether any policy may look at the arguments of a call.
    pub fn reads_arguments(&self) -> bool {
        self.uses_arguments
    }

    /// Whether there is no policy at all, so that everything is denied.
    pub fn is_empty(&self) -> bool {
        self.about.is_empty()
    }

    /// Everything but the validation against the schema.
    pub(crate) fn assemble(files: &[PolicyFile], faults: &mut Vec<PolicyFault>) -> Self {
        let mut set = PolicySet::new();
        let mut about: HashMap<PolicyId, PolicyInfo> = HashMap::new();
        let mut labels = HashSet::new();
        let mut uses_arguments = false;
        for (index, file) in files.iter().enumerate() {
            for (number, policy) in parse(file, faults) {
                let id = PolicyId::new(format!("{index}#{number}"));
                let label =
                    policy.annotation("id").map_or_else(|| format!("{}#{number}", file.name), str::to_owned);
                let begin = offset_of(&policy);
                if !labels.insert(label.clone()) {
                    let rest = file.text.get(begin..).unwrap_or_default();
                    let offset = begin + rest.find(&label).unwrap_or(0);
                    let message = format!("two policies have the id `{label}`");
                    let help = "give each policy an `@id` of its own".to_owned();
                    faults.push(fault_at(file, offset, message, Some(help)));
                }
                uses_arguments |= rules::may_read_arguments(&policy);
                let (line, column) = line_and_column(&file.text, begin);
                let permits = policy.effect() == Effect::Permit;
                about
                    .insert(id.clone(), PolicyInfo { label, permits, file: file.name.clone(), line, column });
                if let Err(e) = set.add(policy.new_id(id)) {
                    faults.push(fault_at(file, begin, e.to_string(), None));
                }
            }
        }
        Self {
            set,
            about,
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
            (
                "permit(principal, action, resource);\nforbid(principal, action == Action::\"mcp:list\", resource == Tool::\"git/a\");",
                "a.cedar:2:1: ",
                "no action of this rule goes with",
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
    fn what_cannot_be_read_of_one_file_does_not_hide_the_faults_of_another() {
        let invalid = "permit(principal, action, resource) when { principal.age > 3 };";
        let files = [file("a.cedar", "permit("), file("b.cedar", "x"), file("c.cedar", invalid)];
        let found = Policies::compile(&files).unwrap_err();
        let places: Vec<_> = found.iter().map(|f| f.file.as_str()).collect();
        assert_eq!(places, ["a.cedar", "b.cedar", "c.cedar"], "keys and users are one fault: {found:?}");
    }

    #[test]
    fn arguments_are_read_only_where_calls_have_them() {
        let rule = |action: &str| {
            format!(
                "permit(principal, action, resource);\nforbid(principal, {action}, resource)\nwhen {{ context has arguments && context.arguments.hasTag(\"a\") }};"
            )
        };
        for (action, without) in [
            ("action", "mcp:connect"),
            ("action == Action::\"mcp:list\"", "mcp:list"),
            ("action in [Action::\"mcp:callTool\", Action::\"mcp:readResource\"]", "mcp:readResource"),
        ] {
            let [fault] = faults(&rule(action)).try_into().unwrap();
            let says = format!("reads the arguments of a call and also holds for `{without}`");
            assert!(fault.starts_with("a.cedar:3:8: ") && fault.contains(&says), "{fault}");
            assert!(fault.contains("help: limit it in its head"), "{fault}");
        }
        for action in [
            "action == Action::\"mcp:callTool\"",
            "action in [Action::\"mcp:callTool\", Action::\"mcp:getPrompt\"]",
        ] {
            assert_eq!(faults(&rule(action)), Vec::<String>::new());
        }
        // One word on it, not a second one of Cedar's.
        let bare = "forbid(principal, action == Action::\"mcp:list\", resource) when { context.arguments.hasTag(\"a\") };";
        assert_eq!(faults(bare).len(), 1, "{:?}", faults(bare));
    }

    #[test]
    fn what_validates_and_is_not_meant_is_a_warning() {
        for (text, word) in [
            (
                "permit(principal, action == Action::\"mcp:callTool\", resource) when { context has arguments };",
                "is in no list",
            ),
            (
                "forbid(principal, action == Action::\"mcp:callTool\", resource) unless { context has arguments && context.arguments.hasTag(\"a\") };",
                "this forbid holds for them",
            ),
            (
                "forbid(principal, action, resource) when { Key::\"ghost\".tags.contains(\"a\") };",
                "attributes of `Key::\"ghost\"` are known only in its own requests",
            ),
        ] {
            let policies = Policies::compile(&[file("a.cedar", text)]).unwrap();
            let [warning] = policies.warnings() else { panic!("{:?}", policies.warnings()) };
            assert!(warning.message.contains(word), "{warning}");
        }
        let fine = "forbid(principal == Key::\"ghost\", action, resource in Connection::\"git\") when { principal.tags.contains(\"a\") };";
        assert_eq!(Policies::compile(&[file("a.cedar", fine)]).unwrap().warnings(), []);
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
        let of = |head: &str| faults(&format!("forbid ({head});")).join("\n");
        for (head, said) in [
            ("principal, action, resource == Tool::\"git__log\"", "`Tool::\"git/log\"`"),
            ("principal, action, resource == Prompt::\"log\"", "`Prompt::\"CONNECTION/NAME\"`"),
            ("principal == Key::\"k 1\", action, resource", "it is no id of a key"),
            ("principal == Key::\"obol_hunter2\", action, resource", "it is a key itself"),
            ("principal == User::\"bob\", action, resource", "`User::\"ISSUER SUBJECT\"`"),
            ("principal in Workspace::\"Acme\", action, resource", "it is no id of a workspace"),
        ] {
            let fault = of(head);
            assert!(fault.contains("can name nothing") && fault.contains(said), "{fault}");
            assert!(!fault.contains("hunter2"), "{fault}");
        }
        let fine = "forbid (principal == Key::\"k-1\", action, resource == Tool::\"git/log\");";
        let policies = Policies::compile(&[file("a.cedar", fine)]).unwrap();
        let named: Vec<_> = policies.things().iter().filter_map(Named::connection).collect();
        assert_eq!(named, ["git"]);
    }

    #[test]
    fn the_published_schema_is_the_one_that_policies_are_checked_against() {
        assert_eq!(include_str!("../../../docs/obol.cedarschema"), SCHEMA, "run `make docs`");
    }
}
