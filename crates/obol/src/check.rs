//! `obol check`: validates workspace files as control would.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use obol_control::{CompileOptions, Compiled, compile_file};

use crate::config::Environment;
use crate::failure::Failure;
use crate::out;

/// Reports every fault of every file on stdout, and gives the exit code: 1 when there is one.
///
/// # Errors
/// When stdout is closed.
pub(crate) fn check(files: &[PathBuf], env: &Environment) -> Result<u8, Failure> {
    let env = |name: &str| env.secret(name).map(|secret| secret.expose().clone());
    let options = CompileOptions { key_ring: None, env: &env };
    let mut seen: BTreeMap<_, &Path> = BTreeMap::new();
    let mut valid = true;
    for file in files {
        match compile_file(file, &options) {
            Ok(compiled) => {
                for warning in &compiled.warnings {
                    out::line(format_args!("warning: {warning}"))?;
                }
                // Control would refuse the second one.
                match seen.insert(compiled.workspace.workspace_id.clone(), file) {
                    Some(other) if other != file => {
                        let id = &compiled.workspace.workspace_id;
                        let text = format!(
                            "{}: the workspace `{id}` is defined by `{}` too",
                            file.display(),
                            other.display()
                        );
                        out::line(format_args!(
                            "error: {text}\n  help: one file per workspace: remove one of the two"
                        ))?;
                        valid = false;
                    }
                    _ => out::line(format_args!("{}: valid, {}", file.display(), summary(&compiled)))?,
                }
            }
            Err(faults) => {
                for fault in faults {
                    out::line(format_args!("error: {fault}"))?;
                }
                valid = false;
            }
        }
    }
    Ok(u8::from(!valid))
}

fn summary(compiled: &Compiled) -> String {
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let workspace = &compiled.workspace;
    [
        format!("workspace `{}`", workspace.workspace_id),
        count(workspace.connections.len(), "connection"),
        count(workspace.models.len(), "model"),
        count(compiled.policy.files.len(), "policy file"),
    ]
    .join(", ")
}
