mod address;
mod budgets;
mod clear_text;
mod connections;
mod models;
mod prices;
mod reader;
mod secrets;
mod yaml;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use obol_authz::{Named, Policies};
use obol_model::snapshot::{
    Connection, Documents, Model, PolicyFile, PolicySnapshot, SCHEMA, SessionBinding, WorkspaceSnapshot,
};
use obol_model::{ConnectionName, KeyId, KeyRing, ModelName, Revision, WorkspaceId};

pub use self::prices::{check_prices, is_price_catalogue};

use self::budgets::has_budgets;
use self::reader::{Fields, Reader, short, suggestion};
use self::yaml::{Place, names_in, place};
use crate::Fault;
use crate::sources::{Sources, reason};

const DENIED: &str = "everything is denied: the workspace has no policy";
const ALLOW: &str =
    "add `policies: [\"FILE.cedar\"]` with at least `permit(principal, action, resource);` in it";

const CATALOGUE: &str = "is a price catalogue by its name, and no workspace";
const NO_CATALOGUE: &str =
    "name the workspace file that has `prices: …`; if this is a workspace file, give it another name";

/// The most that all policies of a workspace may have together, in bytes.
const MOST_POLICIES: usize = 4 << 20;

/// How to compile.
pub struct CompileOptions<'a> {
    /// Seals the secrets; without it they are only checked to exist, and the result is not for publication.
    pub key_ring: Option<&'a KeyRing>,
    /// Where `env:NAME` is looked up.
    pub env: &'a dyn Fn(&str) -> Option<String>,
}

impl fmt::Debug for CompileOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompileOptions").field("key_ring", &self.key_ring.is_some()).finish_non_exhaustive()
    }
}

/// A workspace file, compiled.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// With the revision 0.0, which whoever publishes it replaces.
    pub workspace: WorkspaceSnapshot,
    /// With the same revision.
    pub policy: PolicySnapshot,
    /// What is valid but probably not meant.
    pub warnings: Vec<Fault>,
    /// Line and column of the workspace's id, for who compares files.
    pub place: (u64, u64),
    /// The keys that policies name, each with the warning for when there is none of that id: keys are no part of
    /// workspace files.
    pub keys: Vec<(KeyId, Fault)>,
}

impl Compiled {
    /// The documents of this content as a certain revision.
    pub(crate) fn encode(&mut self, revision: Revision) -> Result<Documents, String> {
        self.workspace.revision = revision;
        self.policy.revision = revision;
        Documents::encode(&self.workspace, &self.policy).map_err(|e| e.to_string())
    }
}

/// Compiles and validates a workspace file with everything that it refers to.
///
/// # Errors
/// All faults, in the order of the files, as far as the YAML can be parsed.
pub fn compile_file(path: &Path, options: &CompileOptions<'_>) -> Result<Compiled, Vec<Fault>> {
    compile_recorded(path, options, &mut Sources::default())
}

/// As [`compile_file`], where secrets do not matter: whether they exist is not checked, and the result is not for
/// publication.
///
/// # Errors
/// All faults but those of secrets that are not there.
pub fn compile_policies(path: &Path) -> Result<Compiled, Vec<Fault>> {
    compile_with(path, None, &mut Sources::default())
}

/// As [`compile_file`], noting every file that it reads.
pub(crate) fn compile_recorded(
    path: &Path,
    options: &CompileOptions<'_>,
    sources: &mut Sources,
) -> Result<Compiled, Vec<Fault>> {
    compile_with(path, Some(options), sources)
}

fn compile_with(
    path: &Path,
    secrets: Option<&CompileOptions<'_>>,
    sources: &mut Sources,
) -> Result<Compiled, Vec<Fault>> {
    let file = path.display().to_string();
    let bytes = sources
        .read(path)
        .map_err(|e| vec![Fault::of_file(&file, format!("cannot be read: {}", reason(&e)), None)])?;
    let text = String::from_utf8(bytes).map_err(|_| vec![Fault::no_text(&file)])?;
    let root = yaml::parse(&text).map_err(|error| vec![Fault::no_yaml(&file, error)])?;
    if is_price_catalogue(path) {
        // Control skips it in a folder, where a workspace of this name would be missed in silence.
        return Err(vec![Fault::of_file(&file, CATALOGUE.to_owned(), Some(NO_CATALOGUE))]);
    }
    let folder = path.parent().unwrap_or_else(|| Path::new(""));
    let mut reader = Reader { secrets, ..Reader::new(file, folder, &text, sources) };
    let compiled = reader.workspace(&root);
    reader.credentials_in(&root);
    let Reader { mut faults, mut warnings, keys, .. } = reader;
    match compiled {
        Some((workspace, policy, place)) if faults.is_empty() => {
            warnings.sort();
            Ok(Compiled { workspace, policy, warnings, place, keys })
        }
        _ => {
            faults.sort();
            Err(faults)
        }
    }
}

impl Reader<'_> {
    fn workspace(&mut self, root: &yaml::Node) -> Option<(WorkspaceSnapshot, PolicySnapshot, Place)> {
        let known = [
            "workspace",
            "environment",
            "frozen",
            "expose_revision",
            "session_binding",
            "connections",
            "providers",
            "models",
            "prices",
            "budgets",
            "limits",
            "policies",
        ];
        let fields = self.fields(root, "a workspace file", &known);
        // First of all: secrets are sealed for it.
        self.workspace = self.workspace_id(&fields);
        let environment = self.environment_name(&fields);
        let bindings = [("principal", SessionBinding::Principal), ("workspace", SessionBinding::Workspace)];
        let session_binding = self.word(&fields, "session_binding", &bindings).unwrap_or_default();
        let frozen = self.boolean(&fields, "frozen").unwrap_or_default();
        let expose_revision = self.boolean(&fields, "expose_revision").unwrap_or_default();
        let connections = fields.get("connections").map(|n| self.connections(n)).unwrap_or_default();
        let providers = fields.get("providers").map(|n| self.providers(n)).unwrap_or_default();
        self.catalogue = fields.get("prices").map(|n| self.price_catalogue(n));
        let budgeted = has_budgets(&fields);
        let models = fields.get("models").map(|n| self.models(n, &providers, budgeted)).unwrap_or_default();
        let model_names = fields.get("models").map(names_in).unwrap_or_default();
        let budgets = fields.get("budgets").map(|n| self.budgets(n, &model_names)).unwrap_or_default();
        let limits = fields.get("limits").map(|n| self.limits(n)).unwrap_or_default();
        let (files, named) = self.policies(&fields);
        self.things(&named, &connections, &models);

        let workspace_id = self.workspace.clone()?;
        let revision = Revision { epoch: 0, number: 0 };
        let policy =
            PolicySnapshot { schema_version: SCHEMA, workspace_id: workspace_id.clone(), revision, files };
        let workspace = WorkspaceSnapshot {
            schema_version: SCHEMA,
            workspace_id,
            revision,
            environment,
            frozen,
            expose_revision,
            session_binding,
            connections,
            providers: providers.valid,
            models,
            budgets,
            limits,
        };
        Some((workspace, policy, fields.get("workspace").map_or(fields.place, place)))
    }

    fn workspace_id(&mut self, fields: &Fields<'_>) -> Option<WorkspaceId> {
        let Some(node) = fields.get("workspace") else {
            self.fault(fields.place, "the file names no workspace", "add `workspace: NAME`");
            return None;
        };
        let text = self.string(node, "`workspace`")?;
        self.id(text, place(node))
    }

    fn environment_name(&mut self, fields: &Fields<'_>) -> String {
        let Some(node) = fields.get("environment") else {
            return "default".to_owned();
        };
        let name = self.string(node, "`environment`").unwrap_or("default");
        if name.trim().is_empty() || name.len() > 64 {
            let help = "write one such as `production`, or leave it out for `default`";
            self.fault(place(node), "`environment` must have 1 to 64 characters", help);
        }
        name.to_owned()
    }

    fn policies(&mut self, fields: &Fields<'_>) -> (Vec<PolicyFile>, Vec<Named>) {
        let Some(node) = fields.get("policies") else {
            self.warn(fields.place, DENIED, ALLOW);
            return (Vec::new(), Vec::new());
        };
        let mut files: Vec<PolicyFile> = Vec::new();
        // Faults of policies name the path that was read, snapshots the name that stands in the workspace file.
        let mut shown: Vec<PolicyFile> = Vec::new();
        for item in self.list(node, "`policies`") {
            let Some(name) = self.string(item, "a policy file") else { continue };
            if files.iter().any(|file| file.name == name) {
                self.fault(
                    place(item),
                    format!("`{}` stands there twice", short(name)),
                    "remove one of the two",
                );
                continue;
            }
            if let Some(text) = self.policy_text(name, place(item)) {
                let path = self.folder.join(name).display().to_string();
                shown.push(PolicyFile { name: path, text: text.clone() });
                files.push(PolicyFile { name: name.to_owned(), text });
            }
        }
        let bytes: usize = files.iter().map(|file| file.text.len()).sum();
        if bytes > MOST_POLICIES {
            let message = format!("the policy files have {bytes} bytes together, more than 4 MiB");
            self.fault(place(node), message, "every replica keeps them in memory: shorten them");
            return (files, Vec::new());
        }
        let mut named = Vec::new();
        match Policies::compile(&shown) {
            Ok(policies) => {
                named = policies.things().to_vec();
                self.warnings.extend(policies.warnings().iter().cloned().map(Fault::from));
                if policies.is_empty() && files.len() == shown.len() {
                    self.warn(place(node), DENIED, ALLOW);
                }
            }
            Err(faults) => self.faults.extend(faults.into_iter().map(Fault::from)),
        }
        for file in &shown {
            self.credentials_in_policy(file);
        }
        (files, named)
    }

    /// Warns of rules on what the workspace does not have: a policy file may be shared by workspaces, so they are no
    /// faults, but a mistyped `forbid` forbids nothing.
    fn things(
        &mut self,
        named: &[Named],
        connections: &BTreeMap<ConnectionName, Connection>,
        models: &BTreeMap<ModelName, Model>,
    ) {
        let names: Vec<&str> = connections.keys().map(ConnectionName::as_str).collect();
        let workspace = self.workspace.clone();
        let models: Vec<&str> = models.keys().map(ModelName::as_str).collect();
        for thing in named {
            let place = Fault::from(thing.place.clone());
            let (what, name, known) = match thing.connection() {
                Some(connection) => ("connection", connection, &names),
                None if thing.kind == "Model" => ("model", thing.id.as_str(), &models),
                None if thing.kind == "Workspace" => {
                    if let Some(own) = workspace.as_ref().filter(|own| own.as_str() != thing.id) {
                        let message = format!("this rule holds for nothing: this is workspace `{own}`");
                        let help =
                            Some("leave it out: policies hold for their own workspace only".to_owned());
                        self.warnings.push(Fault { message, help, ..place });
                    }
                    continue;
                }
                None if thing.kind == "Key" => {
                    if let Ok(id) = thing.id.parse() {
                        let message = format!("this rule holds for nothing: there is no key `{}`", thing.id);
                        let help = Some("`obol key list` shows the keys".to_owned());
                        self.keys.push((id, Fault { message, help, ..place }));
                    }
                    continue;
                }
                None => continue,
            };
            if !known.contains(&name) {
                let message = format!("this rule holds for nothing: there is no {what} `{}`", short(name));
                let help = Some(if known.is_empty() {
                    format!("this workspace has no {what}s")
                } else {
                    suggestion(name, known)
                });
                self.warnings.push(Fault { message, help, ..place });
            } else if let Some((rule, tool)) = alias_of(thing, connections) {
                let message = format!("this rule holds for nothing: `{rule}` is an alias");
                let help = Some(format!("policies use the upstream's own name: `Tool::\"{name}/{tool}\"`"));
                self.warnings.push(Fault { message, help, ..place });
            }
        }
    }

    /// Policies are published as they stand, comments included.
    fn credentials_in_policy(&mut self, file: &PolicyFile) {
        for (line, text) in (1..).zip(file.text.lines()) {
            let at = |fault: &Fault| fault.file == file.name && fault.line == line;
            if clear_text::holds_credential(text) && !self.faults.iter().any(at) {
                let message = "this looks like a credential in clear text".to_owned();
                let help = Some(
                    "take it out, and replace the credential: policies are published as they are".to_owned(),
                );
                self.faults.push(Fault { file: file.name.clone(), line, column: 1, message, help });
            }
        }
    }

    fn policy_text(&mut self, name: &str, at: Place) -> Option<String> {
        let path = self.folder.join(name);
        let message = match self.sources.read(&path).map(String::from_utf8) {
            Ok(Ok(text)) => return Some(text),
            Ok(Err(_)) => format!("the policy file `{}` is not UTF-8 text", short(name)),
            Err(e) => format!("the policy file `{}` cannot be read: {}", short(name), reason(&e)),
        };
        self.fault(at, message, "paths start at the folder of the workspace file");
        None
    }
}

/// The alias that a policy names in place of a tool, and the tool.
fn alias_of<'a>(
    thing: &'a Named,
    connections: &'a BTreeMap<ConnectionName, Connection>,
) -> Option<(&'a str, &'a str)> {
    let (connection, name) = thing.id.split_once('/').filter(|_| thing.kind == "Tool")?;
    let tools = &connections.get(connection)?.tools;
    let (tool, _) = tools.iter().find(|(_, rule)| rule.alias.as_deref() == Some(name))?;
    (!tools.contains_key(name)).then_some((name, tool))
}

#[cfg(test)]
#[path = "compile_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "money_tests.rs"]
mod money_tests;
