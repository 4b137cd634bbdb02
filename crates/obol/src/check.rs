//! `obol check`: validates workspace files as control would.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use obol_control::{
    CompileOptions, Compiled, ControlStore as _, Fault, FileStore, KeyRecord, check_prices, compile_file,
    is_price_catalogue, workspace_files,
};
use obol_model::KeyId;

use crate::cli::CheckArgs;
use crate::config::Environment;
use crate::failure::Failure;
use crate::out;

/// Reports every fault of every file on stdout, and gives the exit code: 1 when there is one.
///
/// # Errors
/// When stdout is closed, or the state directory cannot be read.
pub(crate) async fn check(args: &CheckArgs, env: &Environment) -> Result<u8, Failure> {
    let keys = match &args.state {
        Some(state) => Some(keys(state).await?),
        None => None,
    };
    let env = |name: &str| env.secret(name).map(|secret| secret.expose().clone());
    let options = CompileOptions { key_ring: None, env: &env };
    let mut seen: BTreeMap<_, (PathBuf, u64)> = BTreeMap::new();
    let mut told = BTreeSet::new();
    let mut valid = true;
    for file in files(&args.files)? {
        if is_price_catalogue(&file) {
            valid &= prices(&file, &mut told)?;
            continue;
        }
        match compile_file(&file, &options) {
            Ok(compiled) => {
                let unknown =
                    compiled.keys.iter().filter(|(id, _)| keys.as_ref().is_some_and(|k| !k.contains(id)));
                for warning in compiled.warnings.iter().chain(unknown.map(|(_, warning)| warning)) {
                    out::line(format_args!("warning: {warning}"))?;
                }
                let (id, (line, column)) = (&compiled.workspace.workspace_id, compiled.place);
                // Control would refuse the second one.
                if let Some((other, there)) = seen.get(id) {
                    let (file, other) = (file.display(), other.display());
                    out::line(format_args!(
                        "error: {file}:{line}:{column}: the workspace `{id}` is defined by `{other}` too, in line \
                         {there}\n  help: one file per workspace: remove one of the two"
                    ))?;
                    valid = false;
                } else {
                    out::line(format_args!("{}: valid, {}", file.display(), summary(&compiled)))?;
                    seen.insert(id.clone(), (file, line));
                }
            }
            Err(faults) => {
                for fault in faults {
                    out::line(format_args!("error: {fault}"))?;
                    told.insert(fault);
                }
                valid = false;
            }
        }
    }
    Ok(u8::from(!valid))
}

/// Whether a price catalogue is valid. What was said of it when the workspace that names it was checked is not repeated.
fn prices(file: &Path, told: &mut BTreeSet<Fault>) -> Result<bool, Failure> {
    match check_prices(file) {
        Ok(prices) => {
            out::line(format_args!("{}: valid, {}", file.display(), count(prices, "price")))?;
            Ok(true)
        }
        Err(faults) => {
            for fault in faults {
                if !told.contains(&fault) {
                    out::line(format_args!("error: {fault}"))?;
                    told.insert(fault);
                }
            }
            Ok(false)
        }
    }
}

/// Every file once, directories opened. What does not exist is left to the compiler, which says so.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut all = Vec::new();
    for path in paths {
        if !path.is_dir() {
            all.push(path.clone());
            continue;
        }
        let files = workspace_files(path).map_err(Failure::usage)?;
        if files.is_empty() {
            return Err(Failure::usage(format!("`{}` holds no workspace file", path.display())));
        }
        all.extend(files);
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|file| seen.insert(file.clone()));
    Ok(all)
}

async fn keys(state: &Path) -> Result<Vec<KeyId>, Failure> {
    let records = records(state).await?;
    Ok(records.into_iter().filter(|record| record.revoked_at.is_none()).map(|r| r.key.key_id).collect())
}

/// The keys of a state directory of control.
pub(crate) async fn records(state: &Path) -> Result<Vec<KeyRecord>, Failure> {
    let store = FileStore::new(state);
    if !store.exists() {
        return Err(Failure::usage(format!("`{}` is no state directory of control", state.display())));
    }
    let keys = store.keys().await;
    let keys = keys.map_err(|e| Failure::usage(format!("`{}` cannot be read: {e}", state.display())))?;
    Ok(keys.records)
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn summary(compiled: &Compiled) -> String {
    let workspace = &compiled.workspace;
    [
        format!("workspace `{}`", workspace.workspace_id),
        count(workspace.connections.len(), "connection"),
        count(workspace.models.len(), "model"),
        count(compiled.policy.files.len(), "policy file"),
    ]
    .join(", ")
}
