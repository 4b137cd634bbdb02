//! `obol workspace`: what is published, what was, and back to it.

use obol_control::{ControlStore, Head, Origin, RevisionInfo, StoreError};
use obol_model::WorkspaceId;
use serde_json::json;

use crate::cli::{WorkspaceCommand, WorkspaceRollbackArgs};
use crate::config;
use crate::failure::Failure;
use crate::out::{self, moment};
use crate::store::{self, Again};

/// Of a workspace that control unpublished, since nothing spoke for it any more.
const NO_FILE: &str = "a file that is gone";

/// Lists, shows, rolls back or unpublishes workspaces; gives the exit code.
///
/// # Errors
/// When there is no such workspace or revision, or the store cannot be used.
pub(crate) async fn workspace(config: config::Operator, command: WorkspaceCommand) -> Result<u8, Failure> {
    let revisions = store::existing(&config.store)?;
    match command {
        WorkspaceCommand::List(args) => list(&*revisions, args.json).await,
        WorkspaceCommand::Show(args) => show(&*revisions, &args.id, args.json).await,
        WorkspaceCommand::Rollback(WorkspaceRollbackArgs { id, to, .. }) => {
            let Some(ring) = &config.credential_keys else {
                return Err(Failure::runtime(
                    "a rollback seals secrets anew: set OBOL_CREDENTIAL_KEY to what control has",
                ));
            };
            known(&*revisions, &id).await?;
            let operator = store::operator(revisions, &config).await?;
            let (to, revision, effect) = operator.rollback(&id, to, ring).await.map_err(Failure::runtime)?;
            out::line(format_args!("published {id} {revision} with the content of {to}"))?;
            Ok(store::effect(&effect, Again::Another))
        }
        WorkspaceCommand::Unpublish(args) => {
            let id = args.id;
            known(&*revisions, &id).await?;
            let operator = store::operator(revisions, &config).await?;
            let effect = operator.unpublish(&id).await.map_err(Failure::runtime)?;
            out::line(format_args!("unpublished {id}"))?;
            Ok(store::effect(&effect, Again::Harmless))
        }
    }
}

/// The workspace, or who there is in its place.
async fn known(store: &dyn ControlStore, id: &WorkspaceId) -> Result<Head, Failure> {
    if let Some(head) = store.head(id).await.map_err(Failure::runtime)? {
        return Ok(head);
    }
    let heads = store.heads().await.map_err(Failure::runtime)?;
    let names: Vec<&str> = heads.iter().map(|head| head.workspace.as_str()).collect();
    let there = if names.is_empty() {
        "nor was any other".to_owned()
    } else {
        format!("there are: {}", names.join(", "))
    };
    Err(Failure::runtime(format!("{}; {there}", StoreError::NoSuchWorkspace(id.clone()))))
}

async fn list(store: &dyn ControlStore, as_json: bool) -> Result<u8, Failure> {
    let heads = store.heads().await.map_err(Failure::runtime)?;
    if as_json {
        out::json(&heads.iter().map(head_json).collect())?;
        return Ok(0);
    }
    let titles = ["WORKSPACE", "REVISION", "STATE", "FROM"].map(str::to_owned);
    let rows = heads.iter().map(|head| {
        let from = match &head.file {
            _ if head.held => "a command".to_owned(),
            Some(file) => file.display().to_string(),
            None => NO_FILE.to_owned(),
        };
        [head.workspace.to_string(), head.revision.to_string(), state(head).to_owned(), out::one_line(&from)]
    });
    out::text(out::table(&std::iter::once(titles).chain(rows).collect::<Vec<_>>()))?;
    Ok(0)
}

async fn show(store: &dyn ControlStore, id: &WorkspaceId, as_json: bool) -> Result<u8, Failure> {
    let head = known(store, id).await?;
    let history = store.history(id).await.map_err(Failure::runtime)?;
    if as_json {
        let mut shown = head_json(&head);
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("revisions".to_owned(), history.iter().map(revision_json).collect());
        }
        out::json(&shown)?;
        return Ok(0);
    }
    out::line(format_args!("{id}: {} {}", state(&head), head.revision))?;
    if let Some(file) = &head.file {
        out::line(format_args!("file: {}", out::one_line(&file.display().to_string())))?;
    } else if !head.held {
        out::line(format_args!("file: {NO_FILE}"))?;
    }
    if head.held {
        out::line("an operator decided this: the file counts again when it changes")?;
    }
    let titles = ["REVISION", "AT", "BY", "FROM"].map(str::to_owned);
    let rows = history.iter().map(|info| {
        [info.revision.to_string(), moment(Some(info.at)), out::one_line(&info.actor), origin(info.origin)]
    });
    out::text(out::table(&std::iter::once(titles).chain(rows).collect::<Vec<_>>()))?;
    Ok(0)
}

fn state(head: &Head) -> &'static str {
    if head.published { "published" } else { "unpublished" }
}

fn origin(origin: Origin) -> String {
    match origin {
        Origin::File => "file".to_owned(),
        Origin::Command => "command".to_owned(),
        Origin::Rollback { to } => format!("rollback:{to}"),
    }
}

fn head_json(head: &Head) -> serde_json::Value {
    json!({
        "workspace": head.workspace,
        "revision": head.revision.to_string(),
        "state": state(head),
        "held": head.held,
        "file": head.file,
    })
}

fn revision_json(info: &RevisionInfo) -> serde_json::Value {
    json!({
        "revision": info.revision.to_string(),
        "at": info.at,
        "by": info.actor,
        "from": origin(info.origin),
    })
}
