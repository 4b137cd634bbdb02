//! `obol key`: virtual keys.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use obol_control::{ControlStore, KeyChange, KeyRecord, NewKey, Operator};
use obol_model::{Clock as _, KeyBudget, KeyId, Limits, NanoUsd, SystemClock, WorkspaceId};
use serde_json::json;

use crate::cli::{KeyCommand, KeyListArgs, KeyNewArgs, LimitArgs};
use crate::config;
use crate::failure::Failure;
use crate::out::{self, moment};
use crate::store::{self, Again};

/// Makes, lists, disables, enables or revokes keys.
///
/// # Errors
/// When there is no such key, or the store cannot be used.
pub(crate) async fn key(config: config::Operator, command: KeyCommand) -> Result<u8, Failure> {
    if let KeyCommand::New(args) = command {
        return new(&config, args).await;
    }
    let keys = store::existing(&config.store)?;
    let (id, change, done) = match command {
        KeyCommand::New(_) => return Ok(0),
        KeyCommand::List(args) => return list(&*keys, &args, SystemClock.now()).await,
        KeyCommand::Disable(args) => (args.id, KeyChange::Disable, "disabled"),
        KeyCommand::Enable(args) => (args.id, KeyChange::Enable, "enabled"),
        KeyCommand::Revoke(args) => {
            (args.id, KeyChange::Revoke { delete_sessions: args.delete_sessions }, "revoked")
        }
    };
    let operator = store::operator(keys, &config).await?;
    changed(&operator, &id, change, done).await
}

async fn changed(operator: &Operator, id: &KeyId, change: KeyChange, done: &str) -> Result<u8, Failure> {
    if id.as_str().starts_with("obol_") {
        // Pasted by mistake; it must not end up in a log of the terminal once more.
        return Err(Failure::runtime("this is a key, not the id of one; ids are in `obol key list`"));
    }
    let (_, effect) = operator.change_key(id, change).await.map_err(Failure::runtime)?;
    out::line(format_args!("{done} {id}"))?;
    Ok(store::effect(&effect, Again::Harmless))
}

async fn new(config: &config::Operator, args: KeyNewArgs) -> Result<u8, Failure> {
    let KeyNewArgs { workspace, name, tags, expires_in, budgets, limits, .. } = args;
    if let Some(twice) = twice(&budgets) {
        let window = twice.window.as_str();
        return Err(Failure::usage(format!(
            "`--budget {window}=…` is given twice: a key has one budget per window"
        )));
    }
    let LimitArgs { requests_per_minute, tokens_per_minute, concurrency } = limits;
    let limits = Limits { requests_per_minute, tokens_per_minute, concurrency };
    let expires_at = match expires_in {
        Some(lifetime) => {
            let lifetime = SignedDuration::try_from(lifetime.0).map_err(Failure::runtime)?;
            Some(SystemClock.now().checked_add(lifetime).map_err(Failure::runtime)?)
        }
        None => None,
    };
    // A key may be made before control has ever run.
    let keys = store::open(&config.store)?;
    let doubts = doubts(&keys, &workspace, &budgets).await?;
    let operator = store::operator(keys, config).await?;
    let new = NewKey { workspace, name, tags, expires_at, budgets, limits };
    let (key, record, effect) = operator.new_key(new).await.map_err(Failure::runtime)?;
    // stdout has the key and nothing else, so that a script can take it.
    out::line(key.expose())?;
    let (id, workspace) = (&record.key.key_id, &record.key.workspace_id);
    let expires = moment(record.key.expires_at);
    out::hint(format_args!("key {id} of workspace {workspace}, expires: {expires}. It is not shown again."));
    for doubt in doubts {
        out::warning(doubt);
    }
    Ok(store::effect(&effect, Again::Another))
}

/// The first budget of a window that has one already.
fn twice(budgets: &[KeyBudget]) -> Option<&KeyBudget> {
    let mut seen = BTreeSet::new();
    budgets.iter().find(|budget| !seen.insert(budget.window))
}

/// What to say of a workspace that is not published, or that does not go with what the key may spend.
async fn doubts(
    store: &Arc<dyn ControlStore>,
    workspace: &WorkspaceId,
    budgets: &[KeyBudget],
) -> Result<Vec<String>, Failure> {
    let heads = store.heads().await.map_err(Failure::runtime)?;
    let published: Vec<_> = heads.iter().filter(|head| head.published).collect();
    let Some(head) = published.iter().find(|head| head.workspace == *workspace) else {
        let names: Vec<&str> = published.iter().map(|head| head.workspace.as_str()).collect();
        let there = match names.as_slice() {
            [] => "none is, so far".to_owned(),
            some => format!("these are: {}", some.join(", ")),
        };
        return Ok(vec![format!(
            "the workspace `{workspace}` is not published, {there}. The key is refused until it is; revoke it if the \
             name or the store is a mistake"
        )]);
    };
    if budgets.is_empty() {
        return Ok(Vec::new());
    }
    let documents = store.documents(workspace, head.revision).await.map_err(Failure::runtime)?;
    // One that cannot be read is control's to complain of.
    let Some((snapshot, _)) = documents.and_then(|documents| documents.decode(workspace).ok()) else {
        return Ok(Vec::new());
    };
    let endless: Vec<&str> = snapshot
        .models
        .iter()
        .filter(|(_, model)| model.max_output.is_none() && model.targets.iter().any(|t| !t.price.is_free()))
        .map(|(name, _)| name.as_str())
        .collect();
    if endless.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![format!(
        "nobody knows what a call of these models may cost at most, so that no budget can be held to: {}. Give them \
         a `max_output` in the workspace file",
        endless.join(", ")
    )])
}

async fn list(store: &dyn ControlStore, args: &KeyListArgs, now: Timestamp) -> Result<u8, Failure> {
    let keys = store.keys().await.map_err(Failure::runtime)?;
    for fault in &keys.faults {
        out::complaint(fault);
    }
    let chosen: Vec<&KeyRecord> = keys
        .records
        .iter()
        .filter(|r| args.workspace.as_ref().is_none_or(|w| *w == r.key.workspace_id))
        .collect();
    if args.json {
        out::json(&chosen.iter().map(|record| as_json(record, now)).collect())?;
    } else {
        let titles = ["KEY", "WORKSPACE", "STATE", "CREATED", "EXPIRES", "BUDGETS", "LIMITS", "NAME", "TAGS"];
        let rows = chosen.iter().map(|record| {
            let key = &record.key;
            [
                key.key_id.to_string(),
                key.workspace_id.to_string(),
                state(record, now).to_owned(),
                moment(Some(record.created_at)),
                moment(key.expires_at),
                budgets(&key.budgets),
                limits(key.limits),
                out::one_line(&key.name),
                out::one_line(&key.tags.join(",")),
            ]
        });
        out::text(out::table(&std::iter::once(titles.map(str::to_owned)).chain(rows).collect::<Vec<_>>()))?;
    }
    Ok(u8::from(!keys.complete))
}

fn as_json(record: &KeyRecord, now: Timestamp) -> serde_json::Value {
    let key = &record.key;
    json!({
        "key_id": key.key_id,
        "workspace": key.workspace_id,
        "state": state(record, now),
        "name": key.name,
        "tags": key.tags,
        "disabled": key.disabled,
        "created_at": record.created_at,
        "expires_at": key.expires_at,
        "budgets": key.budgets.iter().map(budget_json).collect::<Vec<_>>(),
        "limits": key.limits,
        "revoked_at": record.revoked_at,
    })
}

/// As `--budget` takes them.
fn budgets(budgets: &[KeyBudget]) -> String {
    let texts: Vec<String> =
        budgets.iter().map(|budget| format!("{}={}", budget.window.as_str(), usd(budget.limit))).collect();
    texts.join(",")
}

fn limits(limits: Limits) -> String {
    let Limits { requests_per_minute, tokens_per_minute, concurrency } = limits;
    let texts = [
        requests_per_minute.map(|n| format!("requests={n}/min")),
        tokens_per_minute.map(|n| format!("tokens={n}/min")),
        concurrency.map(|n| format!("concurrency={n}")),
    ];
    texts.into_iter().flatten().collect::<Vec<_>>().join(",")
}

/// Money is text: a float would not be exact.
fn budget_json(budget: &KeyBudget) -> serde_json::Value {
    json!({ "window": budget.window, "limit_usd": usd(budget.limit) })
}

/// As `--budget` takes it: without zeros at the end.
fn usd(amount: NanoUsd) -> String {
    let text = amount.to_string();
    let number = text.trim_end_matches(" USD");
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn state(record: &KeyRecord, now: Timestamp) -> &'static str {
    if !record.is_live() {
        "revoked"
    } else if record.key.expires_at.is_some_and(|end| end <= now) {
        "expired"
    } else if record.key.disabled {
        "disabled"
    } else {
        "active"
    }
}
