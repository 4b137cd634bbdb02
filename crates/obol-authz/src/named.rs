use cedar_policy::{EntityUid, PolicySet};
use obol_model::snapshot::PolicyFile;
use obol_model::{KeyId, WorkspaceId};

use crate::PolicyFault;
use crate::fault::{fault_at, file_of, offset_of};

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
    /// What `policies` name, in the order of the files.
    pub(crate) fn all(policies: &PolicySet, files: &[PolicyFile]) -> Vec<Self> {
        let mut all = Vec::new();
        for policy in policies.policies() {
            let Some(file) = file_of(files, policy.id()) else { continue };
            let begin = offset_of(policy);
            for literal in policy.entity_literals() {
                let named = Self::new(&literal, file, begin);
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

    fn new(literal: &EntityUid, file: &PolicyFile, begin: usize) -> Self {
        let (kind, id) = (literal.type_name().to_string(), literal.id().unescaped().to_owned());
        let text = file.text.get(begin..).unwrap_or_default();
        let offset = begin + text.find(&literal.to_string()).unwrap_or(0);
        // A key that was pasted where its id belongs must not go on into a log.
        let message =
            if id.starts_with("obol_") { format!("`{kind}::\"obol_…\"`") } else { format!("`{literal}`") };
        Self { kind, id, place: fault_at(file, offset, message, None) }
    }

    /// The connection that the id of a tool, resource or prompt begins with.
    pub fn connection(&self) -> Option<&str> {
        match self.kind.as_str() {
            "Tool" | "Resource" | "Prompt" => self.id.split_once('/').map(|(connection, _)| connection),
            "Connection" => Some(&self.id),
            _ => None,
        }
    }

    /// The fault of an id that can name nothing in any workspace.
    pub(crate) fn fault(&self) -> Option<PolicyFault> {
        let (why, help) = match self.kind.as_str() {
            "Tool" | "Resource" | "Prompt" if self.connection().is_none() => {
                ("its id has no connection", self.with_connection())
            }
            "Key" if self.id.starts_with("obol_") => (
                "it is a key itself, not the id of one",
                "write the id, such as `Key::\"k-1a2b3c4d5e6f\"` (see `obol key list`), and revoke the key: it stood \
                 in clear text"
                    .to_owned(),
            ),
            "Key" if self.id.parse::<KeyId>().is_err() => {
                ("it is no id of a key", "ids are in `obol key list`, such as `k-1a2b3c4d5e6f`".to_owned())
            }
            "User" if !self.id.contains(' ') => {
                ("a user is an issuer and a subject", "write `User::\"ISSUER SUBJECT\"`".to_owned())
            }
            "Workspace" if self.id.parse::<WorkspaceId>().is_err() => {
                ("it is no id of a workspace", "write it as the workspace file does".to_owned())
            }
            _ => return None,
        };
        let message = format!("{} can name nothing: {why}", self.place.message);
        Some(PolicyFault { message, help: Some(help), ..self.place.clone() })
    }

    fn with_connection(&self) -> String {
        match self.id.split_once("__") {
            Some((connection, name)) => {
                format!("policies use the upstream's own name: `{}::\"{connection}/{name}\"`", self.kind)
            }
            None => format!("write `{}::\"CONNECTION/NAME\"`, with the upstream's own name", self.kind),
        }
    }
}
