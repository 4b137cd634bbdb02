//! `obol key`: virtual keys in control's state directory.

use std::path::Path;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use obol_control::{KeyFiles, KeyRecord};
use obol_model::{Clock, SystemClock};

use crate::cli::{KeyCommand, KeyListArgs, KeyNewArgs, KeyRevokeArgs};
use crate::failure::Failure;
use crate::out;

/// Keys are files of control; nothing of them reaches a replica before control has published it.
const PUBLISHED: &str = "It takes effect within a second while `obol control` runs with this state directory, else when it next does.";

/// Makes, lists or revokes keys.
///
/// # Errors
/// When there is no such key, or the state directory cannot be used.
pub(crate) fn key(state: &Path, command: KeyCommand) -> Result<u8, Failure> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let files = KeyFiles::new(state, Arc::clone(&clock));
    match command {
        KeyCommand::New(args) => new(&files, args, clock.now())?,
        KeyCommand::List(args) => list(&files, &args, clock.now())?,
        KeyCommand::Revoke(KeyRevokeArgs { id, .. }) => {
            if id.as_str().starts_with("obol_") {
                // Pasted by mistake; it must not end up in a log of the terminal once more.
                return Err(Failure::runtime("this is a key, not the id of one; ids are in `obol key list`"));
            }
            files.revoke(&id).map_err(Failure::runtime)?;
            out::line(format_args!("revoked {id}"))?;
            out::hint(PUBLISHED);
        }
    }
    Ok(0)
}

fn new(files: &KeyFiles, args: KeyNewArgs, now: Timestamp) -> Result<(), Failure> {
    let KeyNewArgs { workspace, name, tags, expires_in, .. } = args;
    let expires = match expires_in {
        Some(lifetime) => {
            let lifetime = SignedDuration::try_from(lifetime.0).map_err(Failure::runtime)?;
            Some(now.checked_add(lifetime).map_err(Failure::runtime)?)
        }
        None => None,
    };
    let (key, context) = files.create(workspace, name, tags, expires).map_err(Failure::runtime)?;
    // stdout has the key and nothing else, so that a script can take it.
    out::line(key.expose())?;
    let (id, workspace) = (&context.key_id, &context.workspace_id);
    out::hint(format_args!(
        "key {id} of workspace {workspace}, expires: {}. It is not shown again.",
        moment(context.expires_at)
    ));
    out::hint(PUBLISHED);
    Ok(())
}

fn list(files: &KeyFiles, args: &KeyListArgs, now: Timestamp) -> Result<(), Failure> {
    let records = files.list().map_err(Failure::runtime)?;
    let mut rows =
        vec![["KEY", "WORKSPACE", "STATE", "CREATED", "EXPIRES", "NAME", "TAGS"].map(str::to_owned)];
    let chosen = records.iter().filter(|r| args.workspace.as_ref().is_none_or(|w| *w == r.key.workspace_id));
    rows.extend(chosen.map(|record| {
        let key = &record.key;
        [
            key.key_id.to_string(),
            key.workspace_id.to_string(),
            state(record, now).to_owned(),
            moment(Some(record.created_at)),
            moment(key.expires_at),
            out::one_line(&key.name),
            out::one_line(&key.tags.join(",")),
        ]
    }));
    Ok(out::text(table(&rows))?)
}

fn state(record: &KeyRecord, now: Timestamp) -> &'static str {
    if record.revoked_at.is_some() {
        "revoked"
    } else if record.key.expires_at.is_some_and(|end| end <= now) {
        "expired"
    } else if record.key.disabled {
        "disabled"
    } else {
        "active"
    }
}

fn moment(at: Option<Timestamp>) -> String {
    at.map_or_else(|| "never".to_owned(), |at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

/// Columns as wide as their widest cell; an empty cell is `-`, so that a row can be taken apart at its spaces.
fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let cell = |text: &String| if text.is_empty() { "-".to_owned() } else { text.clone() };
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(cell).collect()).collect();
    let mut widths = vec![0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let line: Vec<String> =
            widths.iter().zip(row).map(|(width, cell)| format!("{cell:width$}")).collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}
