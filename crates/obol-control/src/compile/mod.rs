mod address;
mod connections;
mod models;
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
use obol_model::{ConnectionName, KeyRing, ModelName, Revision, WorkspaceId};

use self::reader::{Fields, Reader, short, suggestion};
use self::yaml::{Place, place};
use crate::Fault;
use crate::sources::{Sources, reason};

const DENIED: &str = "everything is denied: the workspace has no policy";
const ALLOW: &str =
    "add `policies: [\"FILE.cedar\"]` with at least `permit(principal, action, resource);` in it";

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

/// As [`compile_file`], noting every file that it reads.
pub(crate) fn compile_recorded(
    path: &Path,
    options: &CompileOptions<'_>,
    sources: &mut Sources,
) -> Result<Compiled, Vec<Fault>> {
    let file = path.display().to_string();
    let bytes = sources
        .read(path)
        .map_err(|e| vec![Fault::of_file(&file, format!("cannot be read: {}", reason(&e)), None)])?;
    let text = String::from_utf8(bytes)
        .map_err(|_| vec![Fault::of_file(&file, "is not UTF-8 text".to_owned(), Some("save it as UTF-8"))])?;
    let root = yaml::parse(&text).map_err(|((line, column), message)| {
        vec![Fault { file: file.clone(), line, column, message, help: None }]
    })?;
    let mut reader = Reader {
        file,
        folder: path.parent().unwrap_or_else(|| Path::new("")),
        text: &text,
        key_ring: options.key_ring,
        env: options.env,
        sources,
        workspace: None,
        faults: Vec::new(),
        warnings: Vec::new(),
    };
    let compiled = reader.workspace(&root);
    let (mut faults, warnings) = (reader.faults, reader.warnings);
    match compiled {
        Some((workspace, policy)) if faults.is_empty() => Ok(Compiled { workspace, policy, warnings }),
        _ => {
            faults.sort();
            Err(faults)
        }
    }
}

impl Reader<'_> {
    fn workspace(&mut self, root: &yaml::Node) -> Option<(WorkspaceSnapshot, PolicySnapshot)> {
        let known = [
            "workspace",
            "environment",
            "frozen",
            "session_binding",
            "connections",
            "providers",
            "models",
            "budgets",
            "policies",
        ];
        let fields = self.fields(root, "a workspace file", &known);
        // First of all: secrets are sealed for it.
        self.workspace = self.workspace_id(&fields);
        let environment = self.environment_name(&fields);
        if let Some(at) = fields.place_of("budgets") {
            let help = "remove them: nothing would hold anybody to them";
            self.fault(at, "`budgets` are not supported by this release yet", help);
        }
        let bindings = [("principal", SessionBinding::Principal), ("workspace", SessionBinding::Workspace)];
        let session_binding = self.word(&fields, "session_binding", &bindings).unwrap_or_default();
        let frozen = self.boolean(&fields, "frozen").unwrap_or_default();
        let connections = fields.get("connections").map(|n| self.connections(n)).unwrap_or_default();
        let (providers, names) = fields.get("providers").map(|n| self.providers(n)).unwrap_or_default();
        let models = fields.get("models").map(|n| self.models(n, &names)).unwrap_or_default();
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
            session_binding,
            connections,
            providers,
            models,
        };
        Some((workspace, policy))
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
        let connections: Vec<&str> = connections.keys().map(ConnectionName::as_str).collect();
        let models: Vec<&str> = models.keys().map(ModelName::as_str).collect();
        for thing in named {
            let (what, name, known) = match thing.connection() {
                Some(connection) => ("connection", connection, &connections),
                None if thing.kind == "Model" => ("model", thing.id.as_str(), &models),
                None => continue,
            };
            if !known.contains(&name) {
                let mut fault = Fault::from(thing.place.clone());
                fault.message = format!("this rule holds for nothing: there is no {what} `{}`", short(name));
                fault.help = (!known.is_empty()).then(|| suggestion(name, known));
                self.warnings.push(fault);
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

#[cfg(test)]
#[path = "compile_tests.rs"]
mod tests;
