//! The command line.

mod usage;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};
use obol_model::{KeyBudget, KeyId, ModelName, NanoUsd, Revision, Window, WorkspaceId};

pub use self::usage::{AuditArgs, Format, SumArgs, UsageArgs, UsageCommand};

/// One door between agents and everything that they call: an MCP and LLM gateway.
#[derive(Debug, Parser)]
#[command(name = "obol", version, max_term_width = 100, arg_required_else_help = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  obol dev                              try it: gateway and control in one process, nothing else needed
  obol check workspaces/                validate workspace files, in CI for instance
  obol control --workspaces ./workspaces --state ./state
                                        the control plane: publish workspaces and keys to Redis
  obol key new --workspace acme --state ./state
                                        a key for a client
  obol run                              a gateway replica; start as many as you like

Environment variables configure everything else; `docs/configuration.md` lists them.
Results go to stdout, the log goes to stderr.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 75 a drain that had to abort requests.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a gateway replica.
    #[command(after_help = RUN_HELP)]
    Run(RunArgs),
    /// Run the control plane: compile a directory of workspace files and publish it.
    #[command(after_help = CONTROL_HELP)]
    Control(ControlArgs),
    /// Run gateway and control in one process, with all state in memory.
    #[command(after_help = DEV_HELP)]
    Dev(DevArgs),
    /// Validate workspace files.
    #[command(after_help = CHECK_HELP)]
    Check(CheckArgs),
    /// Say what the policies decide about one key and one tool, and why.
    #[command(after_help = EXPLAIN_HELP)]
    Explain(ExplainArgs),
    /// Compile workspace files and publish them, once.
    #[command(after_help = PUBLISH_HELP)]
    Publish(PublishArgs),
    /// List workspaces, show their revisions, and go back to one.
    #[command(after_help = WORKSPACE_HELP)]
    Workspace {
        /// What to do with workspaces.
        #[command(subcommand)]
        command: WorkspaceCommand,
    },
    /// Make, list and revoke virtual keys.
    #[command(after_help = KEY_HELP)]
    Key {
        /// What to do with keys.
        #[command(subcommand)]
        command: KeyCommand,
    },
    /// Sum what was called and what it cost, or audit the ledger.
    #[command(after_help = usage::HELP)]
    Usage(UsageArgs),
    /// For those who build Obol.
    #[command(hide = true)]
    Config {
        /// What to print.
        #[command(subcommand)]
        command: ConfigCommand,
    },
}

const RUN_HELP: &str = "\
A replica keeps its state in Redis: start two or more behind any load balancer, without sticky sessions.
SIGTERM drains it: what is in flight finishes within OBOL_DRAIN_TIMEOUT_S, a second signal ends it at once.

Examples:
  export OBOL_REDIS_URL=redis://localhost:6379 OBOL_CREDENTIAL_KEY=\"$(cat credential.key)\"
  obol run --print-config     show what it would run with
  obol run

Prints `listening public http://…` and `listening admin http://…` to stdout once it accepts connections.";

const CONTROL_HELP: &str = "\
Watches the directory: an edit is published within a second, an invalid one is refused with file, line and
reason, and what was published before stays. Replicas go on without it. Several controls may run on one
database (OBOL_DATABASE_URL) or one state directory; never on one Redis with different ones.

Examples:
  obol control --workspaces ./workspaces --state /var/lib/obol
  obol control --workspaces ./workspaces --state /var/lib/obol --once     publish and end, from CI for instance

Prints `control ready` to stdout once everything that is valid is published.";

const DEV_HELP: &str = "\
For trying things out: needs no Redis, and sessions, keys and usage end with the process.
It prints the address, a fresh key and commands that work as pasted.

Examples:
  obol dev --config my-workspace.yaml
  OBOL_LISTEN=127.0.0.1:9000 OBOL_LOG=debug obol dev";

const CHECK_HELP: &str = "\
Reads each file and the policies that it names, and reports every fault with file, line and reason.
Secrets are never shown, but what `env:NAME` and `file:PATH` name must be there.
The exit code is 0 when all files are valid and 1 when one is not.

Examples:
  obol check workspaces/acme.yaml
  obol check workspaces/ --state /var/lib/obol";

const EXPLAIN_HELP: &str = "\
Reads workspace files and control's state directory, and asks nobody: it tells what the files say now, which
may not be published yet. Prints `allowed` or `denied` with the reason, then each question that the gateway
would ask and the policies that decided, with file and line.
The exit code is 0 when it is allowed, 1 when it is denied, and 2 when nothing could be decided.

Examples:
  obol explain --workspace workspaces/ --state /var/lib/obol --key-id k-1a2b3c4d5e6f --tool github/delete_repo
  obol explain --workspace acme.yaml --key-id k-1 --tag team:web --tool files/write --args '{\"path\":\"/etc/x\"}'
  obol explain --workspace acme.yaml --key-id k-1 --model fast
  echo \"$KEY\" | obol explain --workspace workspaces/ --state /var/lib/obol --key - --resource files/file:///a.txt";

const PUBLISH_HELP: &str = "\
Publishes what the files say as the next revision of their workspaces and prints `published WORKSPACE REVISION`, or
`unchanged` when they say nothing new. When one of them has a fault, all faults are reported and nothing is
published. What is published stands until it is published again, or until a file that `obol control` watches
for the same workspace changes.

Examples:
  obol publish workspaces/ --state /var/lib/obol     from CI for instance, with or without a control that runs
  obol publish acme.yaml --raise-epoch --state /var/lib/obol
                                                     when replicas hold a newer revision than the store knows";

const WORKSPACE_HELP: &str = "\
A rollback publishes the content of an older revision as a new one, so that every replica takes it; it stands until
the workspace's file changes. The last 50 revisions of a workspace are kept. With OBOL_REDIS_URL a change takes
effect at once, without it when a running control sees it, within a second; a rollback needs it, and
OBOL_CREDENTIAL_KEY.

Examples:
  obol workspace list --state /var/lib/obol
  obol workspace show acme --json --state /var/lib/obol
  obol workspace rollback acme --to 1.7 --state /var/lib/obol
  obol workspace unpublish acme --state /var/lib/obol";

const KEY_HELP: &str = "\
Keys are kept where control keeps what it knows, as hashes: a key is shown once, when it is made. With
OBOL_REDIS_URL a change takes effect at once, without it when a running control sees it, within a second.

Examples:
  obol key new --workspace acme --name ci --tag team:web --expires-in 30d --state /var/lib/obol
  obol key new --workspace acme --budget day=5 --budget total=100 --concurrency 4 --state /var/lib/obol
  obol key list --json --state /var/lib/obol
  obol key disable k-1a2b3c4d5e6f --state /var/lib/obol
  obol key revoke k-1a2b3c4d5e6f --delete-sessions --state /var/lib/obol";

/// Options of `obol run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Show the effective configuration, secrets redacted, and end.
    #[arg(long)]
    pub print_config: bool,
}

/// Options of `obol control`.
#[derive(Debug, Args)]
pub struct ControlArgs {
    /// The directory of workspace files [env: OBOL_WORKSPACES_DIR].
    #[arg(long, value_name = "DIR")]
    pub workspaces: Option<PathBuf>,
    /// Where control keeps keys and revisions [env: OBOL_STATE_DIR].
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Publish once and end. Fails when a file is invalid.
    #[arg(long)]
    pub once: bool,
    /// Show the effective configuration, secrets redacted, and end.
    #[arg(long)]
    pub print_config: bool,
}

/// Options of `obol dev`.
#[derive(Debug, Args)]
pub struct DevArgs {
    /// The workspace file; edits take effect while it runs.
    #[arg(long, value_name = "FILE", default_value = "config/demo.yaml")]
    pub config: PathBuf,
    /// Show the effective configuration, secrets redacted, and end.
    #[arg(long)]
    pub print_config: bool,
}

/// Arguments of `obol check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Workspace files, or directories of them.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Control's state directory: then keys that policies name and that do not exist are reported too.
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// Options of `obol explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The workspace file, or the directory that control watches.
    #[arg(long, value_name = "FILE|DIR")]
    pub workspace: PathBuf,
    /// Control's state directory, to look the key up.
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Who asks.
    #[command(flatten)]
    pub subject: Subject,
    /// A tag of the key, in place of those in the state directory; may be given more than once.
    #[arg(long = "tag", value_name = "TAG", value_parser = label, conflicts_with = "key")]
    pub tags: Vec<String>,
    /// The name of the key, in place of the one in the state directory.
    #[arg(long, value_name = "NAME", value_parser = name, conflicts_with = "key")]
    pub name: Option<String>,
    /// What is asked for.
    #[command(flatten)]
    pub thing: Thing,
    /// The arguments of the call, a JSON object. Without it: what lists show.
    #[arg(long, value_name = "JSON", value_parser = json_object, conflicts_with_all = ["resource", "model"])]
    pub args: Option<String>,
    /// Whether the server says that the tool may destroy something.
    #[arg(long, value_name = "BOOL", requires = "tool")]
    pub destructive: Option<bool>,
    /// Whether the server says that the tool only reads.
    #[arg(long, value_name = "BOOL", requires = "tool")]
    pub read_only: Option<bool>,
    /// What the client calls itself, for `context.client`.
    #[arg(long, value_name = "NAME")]
    pub client: Option<String>,
    /// As a client of the modern era, for `context.era`; models are always asked for in it.
    #[arg(long)]
    pub modern: bool,
}

/// Who asks.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Subject {
    /// The key itself, or `-` for the first line of stdin; needs `--state`.
    #[arg(long, value_name = "KEY", hide_env_values = true)]
    pub key: Option<String>,
    /// The id of the key, as `obol key list` shows it.
    #[arg(long, value_name = "ID")]
    pub key_id: Option<KeyId>,
    /// A person that an OAuth issuer knows.
    #[arg(long, value_name = "ISSUER SUBJECT")]
    pub user: Option<String>,
}

/// What is asked for.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Thing {
    /// A tool, by the name that its server gives it.
    #[arg(long, value_name = "CONNECTION/TOOL")]
    pub tool: Option<String>,
    /// A prompt, by the name that its server gives it.
    #[arg(long, value_name = "CONNECTION/PROMPT")]
    pub prompt: Option<String>,
    /// A resource, by the URI that its server gives it.
    #[arg(long, value_name = "CONNECTION/URI")]
    pub resource: Option<String>,
    /// A model.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<ModelName>,
}

/// What can be done with keys.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key and print it, once.
    New(KeyNewArgs),
    /// List keys, without their secrets.
    List(KeyListArgs),
    /// Refuse a key until it is enabled again.
    Disable(KeyArgs),
    /// Let a key that was disabled be used again.
    Enable(KeyArgs),
    /// Revoke a key for ever. What uses it is refused from then on.
    Revoke(KeyRevokeArgs),
}

/// Options of `obol key new`.
#[derive(Debug, Args)]
pub struct KeyNewArgs {
    /// The workspace that the key opens.
    #[arg(long, value_name = "ID")]
    pub workspace: WorkspaceId,
    /// What its owner calls it.
    #[arg(long, default_value = "", hide_default_value = true, value_parser = name)]
    pub name: String,
    /// A tag that policies can name; may be given more than once.
    #[arg(long = "tag", value_name = "TAG", value_parser = label)]
    pub tags: Vec<String>,
    /// When it expires: a number and one of `s`, `m`, `h`, `d` and `w`. Without it, never.
    #[arg(long, value_name = "TIME")]
    pub expires_in: Option<Lifetime>,
    /// How much may be spent with it in USD per `day`, `month` or in `total`, such as `day=5`; once for each of them.
    /// Takes the place of the workspace's budget for each key of the same time.
    #[arg(long = "budget", value_name = "WINDOW=USD", value_parser = budget)]
    pub budgets: Vec<KeyBudget>,
    /// How fast it may call.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Where the key is kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// How fast a key may call. What is not given the workspace says.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Calls that begin within a minute; without it, as the workspace says.
    #[arg(long, value_name = "N", value_parser = limit())]
    pub requests_per_minute: Option<u64>,
    /// Tokens of calls that begin within a minute; without it, as the workspace says.
    #[arg(long, value_name = "N", value_parser = limit())]
    pub tokens_per_minute: Option<u64>,
    /// Calls under way at once; without it, as the workspace says.
    #[arg(long, value_name = "N", value_parser = limit())]
    pub concurrency: Option<u64>,
}

/// Options of `obol key list`.
#[derive(Debug, Args)]
pub struct KeyListArgs {
    /// Only the keys of this workspace.
    #[arg(long, value_name = "ID")]
    pub workspace: Option<WorkspaceId>,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
    /// Where the keys are kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// Options of `obol key disable` and `obol key enable`.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// The id of the key, as `obol key list` shows it.
    #[arg(value_name = "KEY_ID")]
    pub id: KeyId,
    /// Where the key is kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// Options of `obol key revoke`.
#[derive(Debug, Args)]
pub struct KeyRevokeArgs {
    /// The id of the key, as `obol key list` shows it.
    #[arg(value_name = "KEY_ID")]
    pub id: KeyId,
    /// End its MCP sessions, too, in place of letting them expire.
    #[arg(long)]
    pub delete_sessions: bool,
    /// Where the key is kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// Options of `obol publish`.
#[derive(Debug, Args)]
pub struct PublishArgs {
    /// Workspace files, or directories of them.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Begin a new epoch, above every revision that any replica may hold.
    #[arg(long)]
    pub raise_epoch: bool,
    /// Where the revisions are kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// What can be done with workspaces.
#[derive(Debug, Subcommand)]
pub enum WorkspaceCommand {
    /// List workspaces.
    List(WorkspaceListArgs),
    /// Show a workspace and its revisions.
    Show(WorkspaceShowArgs),
    /// Publish an older revision's content as a new revision.
    Rollback(WorkspaceRollbackArgs),
    /// Take a workspace away from the replicas. Its revisions are kept.
    Unpublish(WorkspaceArgs),
}

/// Options of `obol workspace list`.
#[derive(Debug, Args)]
pub struct WorkspaceListArgs {
    /// As JSON.
    #[arg(long)]
    pub json: bool,
    /// Where the revisions are kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// Options of `obol workspace show`.
#[derive(Debug, Args)]
pub struct WorkspaceShowArgs {
    /// Which.
    #[arg(value_name = "WORKSPACE")]
    pub id: WorkspaceId,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
    /// Where the revisions are kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// Options of `obol workspace rollback`.
#[derive(Debug, Args)]
pub struct WorkspaceRollbackArgs {
    /// Which.
    #[arg(value_name = "WORKSPACE")]
    pub id: WorkspaceId,
    /// The revision, as `obol workspace show` lists it; without it the one before the newest.
    #[arg(long, value_name = "REVISION", value_parser = revision)]
    pub to: Option<Revision>,
    /// Where the revisions are kept.
    #[command(flatten)]
    pub state: StateArg,
}

/// Options of `obol workspace unpublish`.
#[derive(Debug, Args)]
pub struct WorkspaceArgs {
    /// Which.
    #[arg(value_name = "WORKSPACE")]
    pub id: WorkspaceId,
    /// Where the revisions are kept.
    #[command(flatten)]
    pub state: StateArg,
}

impl KeyCommand {
    /// Where the keys are kept.
    pub fn state(&self) -> &StateArg {
        match self {
            Self::New(args) => &args.state,
            Self::List(args) => &args.state,
            Self::Disable(args) | Self::Enable(args) => &args.state,
            Self::Revoke(args) => &args.state,
        }
    }
}

impl WorkspaceCommand {
    /// Where the revisions are kept.
    pub fn state(&self) -> &StateArg {
        match self {
            Self::List(args) => &args.state,
            Self::Show(args) => &args.state,
            Self::Rollback(args) => &args.state,
            Self::Unpublish(args) => &args.state,
        }
    }
}

/// Where control keeps things.
#[derive(Debug, Args)]
pub struct StateArg {
    /// Control's state directory [env: OBOL_STATE_DIR].
    #[arg(long = "state", value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

fn revision(text: &str) -> Result<Revision, String> {
    let parts = text.split_once('.').and_then(|(e, n)| Some((e.parse().ok()?, n.parse().ok()?)));
    let (epoch, number) = parts.ok_or("expected `EPOCH.NUMBER`, such as `1.7`")?;
    Ok(Revision { epoch, number })
}

/// What the build needs.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print docs/configuration.md.
    Docs,
}

fn name(text: &str) -> Result<String, String> {
    if text.chars().count() <= 64 && !text.contains(char::is_control) {
        Ok(text.to_owned())
    } else {
        Err("expected at most 64 characters, none of them a control character".into())
    }
}

fn json_object(text: &str) -> Result<String, String> {
    match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(e) => Err(format!("expected a JSON object, such as `{{\"path\":\"/data\"}}`: {e}")),
    }
}

fn label(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(char::is_whitespace) {
        return Err("expected a word".into());
    }
    name(text)
}

fn limit() -> RangedU64ValueParser {
    /// The highest number that Lua and JSON count exactly.
    const EXACT: u64 = (1 << 53) - 1;
    RangedU64ValueParser::new().range(1..=EXACT)
}

fn budget(text: &str) -> Result<KeyBudget, String> {
    const FORM: &str = "expected `day`, `month` or `total`, `=`, and USD, such as `day=5` or `total=99.5`";
    let (window, usd) = text.split_once('=').ok_or(FORM)?;
    let window = Window::ALL.into_iter().find(|known| known.as_str() == window).ok_or(FORM)?;
    let limit = NanoUsd::parse_limit(usd).map_err(|e| e.to_string())?;
    Ok(KeyBudget { window, limit })
}

/// How long a key lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetime(pub Duration);

impl FromStr for Lifetime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str = "expected a number and one of `s`, `m`, `h`, `d` and `w`, such as `30d`";
        const TEN_YEARS_S: u64 = 10 * 365 * 86_400;
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit = match text.strip_prefix(digits).unwrap_or_default() {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            "w" => 7 * 86_400,
            _ => return Err(FORM.into()),
        };
        let seconds = digits.parse::<u64>().map_err(|_| FORM.to_owned())?.saturating_mul(unit);
        if seconds == 0 || seconds > TEN_YEARS_S {
            return Err("expected more than nothing and at most ten years; leave it out for never".into());
        }
        Ok(Self(Duration::from_secs(seconds)))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::config::table;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_and_the_table_of_variables_name_each_other() {
        for variable in table::ALL {
            let Some(option) = variable.option else { continue };
            for reader in variable.used_by {
                let mut command = Cli::command();
                let command = command.find_subcommand_mut(reader.to_string()).unwrap();
                let has = |command: &clap::Command| {
                    command.get_arguments().any(|a| a.get_long() == option.strip_prefix("--"))
                };
                // `key` has its options one level below.
                let command = match command.get_subcommands().next() {
                    Some(below) if !has(command) => below.clone(),
                    _ => command.clone(),
                };
                let help = command.clone().render_long_help().to_string();
                assert!(help.contains(&format!("[env: {}]", variable.name)), "{option} of {reader}: {help}");
                assert!(has(&command), "{option}");
            }
        }
    }

    #[test]
    fn lifetimes_have_a_unit() {
        assert_eq!("30d".parse(), Ok(Lifetime(Duration::from_secs(30 * 86_400))));
        assert_eq!("90m".parse(), Ok(Lifetime(Duration::from_secs(5400))));
        for bad in ["", "30", "d", "-1d", "1.5h", "0s", "1y", "30 d", "99999w", "18446744073709551615w"] {
            assert!(bad.parse::<Lifetime>().is_err(), "{bad}");
        }
    }
}
