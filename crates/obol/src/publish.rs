//! `obol publish`: compiles workspace files and publishes them once.

use std::collections::BTreeMap;
use std::path::PathBuf;

use obol_control::{CompileOptions, Compiled, compile_file, is_price_catalogue, workspace_files};
use obol_model::KeyRing;

use crate::cli::PublishArgs;
use crate::config::{self, Environment};
use crate::failure::Failure;
use crate::store::Again;
use crate::{out, store};

/// Publishes all of the files, or none when one has a fault; gives the exit code.
///
/// # Errors
/// When a path, the store or Redis cannot be used.
pub(crate) async fn publish(
    config: config::Operator,
    args: PublishArgs,
    env: Environment,
) -> Result<u8, Failure> {
    // The configuration has seen to it that it is there.
    let Some(ring) = &config.credential_keys else { return Ok(2) };
    let Some(compiled) = compile(&args.files, ring, &env)? else { return Ok(1) };
    let revisions = store::open(&config.store)?;
    let operator = store::operator(revisions, &config).await?;
    operator.prepare().await.map_err(Failure::runtime)?;
    let mut code = 0;
    for compiled in compiled {
        let workspace = compiled.workspace.workspace_id.clone();
        match operator.publish(compiled, ring, args.raise_epoch).await {
            Ok((revision, new, effect)) => {
                let done = if new { "published" } else { "unchanged" };
                out::line(format_args!("{done} {workspace} {revision}"))?;
                code |= store::effect(&effect, Again::Harmless);
            }
            Err(e) => {
                out::complaint(format_args!("`{workspace}` is not published: {e}"));
                code = 1;
            }
        }
    }
    Ok(code)
}

/// All of the files, or `None` after every fault of each was reported.
fn compile(paths: &[PathBuf], ring: &KeyRing, env: &Environment) -> Result<Option<Vec<Compiled>>, Failure> {
    let env = |name: &str| env.secret(name).map(|secret| secret.expose().clone());
    let options = CompileOptions { key_ring: Some(ring), env: &env };
    let mut all = BTreeMap::new();
    let mut valid = true;
    // Among others a catalogue is what a shell's `*.yaml` brought along; alone it was taken for a workspace.
    let alone = paths.iter().all(|path| is_price_catalogue(path));
    for path in paths.iter().filter(|path| alone || !is_price_catalogue(path)) {
        for file in workspace_files(path).map_err(Failure::runtime)? {
            match compile_file(&file, &options) {
                Ok(compiled) => {
                    for warning in &compiled.warnings {
                        out::warning(warning);
                    }
                    let id = compiled.workspace.workspace_id.clone();
                    if let Some((other, _)) = all.insert(id.clone(), (file.clone(), compiled))
                        && other != file
                    {
                        let (file, other) = (file.display(), other.display());
                        out::complaint(format_args!(
                            "{file}: the workspace `{id}` is defined by `{other}` too\n  help: one file per workspace: \
                             remove one of the two"
                        ));
                        valid = false;
                    }
                }
                Err(faults) => {
                    for fault in faults {
                        out::complaint(fault);
                    }
                    valid = false;
                }
            }
        }
    }
    Ok(valid.then(|| all.into_values().map(|(_, compiled)| compiled).collect()))
}
