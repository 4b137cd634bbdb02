//! Options of `obol usage`.

use clap::{Args, Subcommand, ValueEnum};
use jiff::civil::Date;
use obol_control::UsageBy;
use obol_model::WorkspaceId;

use super::StateArg;

pub(super) const HELP: &str = "\
Sums what `obol control` collected: calls, tokens and what they cost, by the day of UTC on which a call began. What ended
within the last seconds may not be there yet. `--by` takes words with commas between them, or may be given more than once.

`obol usage audit` asks Redis in place of that: what the counters of budgets say, and whether what is set aside is what the
open reservations say. The exit code is 1 when it is not.

Examples:
  obol usage --by day --from 2026-12-01 --state /var/lib/obol
  obol usage --workspace acme --by key,model --format csv --state /var/lib/obol
  OBOL_REDIS_URL=redis://localhost:6379 obol usage audit acme";

/// Options of `obol usage`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct UsageArgs {
    /// In place of sums.
    #[command(subcommand)]
    pub command: Option<UsageCommand>,
    /// What is summed, and how it is shown.
    #[command(flatten)]
    pub sums: SumArgs,
}

/// What else can be asked about usage.
#[derive(Debug, Subcommand)]
pub enum UsageCommand {
    /// Compare the counters of a workspace's budgets with its open reservations, in Redis.
    Audit(AuditArgs),
}

/// What is summed, and how it is shown.
#[derive(Debug, Args)]
pub struct SumArgs {
    /// Only this workspace.
    #[arg(long, value_name = "ID")]
    pub workspace: Option<WorkspaceId>,
    /// The first day, such as `2026-12-01`; without it, from the beginning.
    #[arg(long, value_name = "DATE", value_parser = date)]
    pub from: Option<Date>,
    /// The last day, itself included; without it, until now.
    #[arg(long, value_name = "DATE", value_parser = date)]
    pub to: Option<Date>,
    /// One row for each `key`, `model`, `tool`, `connection`, `provider`, `outcome`, `workspace`, `day` or `month`.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_parser = by)]
    pub by: Vec<UsageBy>,
    /// How the sums are shown.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// Where usage is kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// Options of `obol usage audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Which.
    #[arg(value_name = "WORKSPACE")]
    pub id: WorkspaceId,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
}

/// How sums are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
    /// For spreadsheets.
    Csv,
}

fn by(text: &str) -> Result<UsageBy, String> {
    let known = UsageBy::ALL.into_iter().find(|by| by.as_str() == text);
    known.ok_or_else(|| format!("expected one of {}", UsageBy::ALL.map(UsageBy::as_str).join(", ")))
}

fn date(text: &str) -> Result<Date, String> {
    let date: Option<Date> = text.parse().ok();
    date.filter(|date| (2000..2200).contains(&date.year()))
        .ok_or_else(|| "expected a day, such as `2026-12-01`".to_owned())
}
