//! The gateway's command line: read and validate configuration, build the real clients, run, drain.
//!
//! This crate composes and decides nothing. Everything that it does is reached through [`execute`].

mod check;
pub mod cli;
mod compose;
pub mod config;
mod control;
mod control_api;
mod control_client;
mod dev;
mod explain;
mod failure;
mod key;
mod logging;
pub mod out;
mod peers;
mod publish;
mod run;
mod service;
mod signals;
mod store;
mod usage;
mod workspace;

use std::future::Future;
use std::num::NonZeroUsize;
use std::time::Duration;

use crate::cli::{Cli, Command, ConfigCommand, UsageArgs, UsageCommand};
use crate::config::{Environment, Loaded, Logging, Problems, table};
pub use crate::failure::Failure;

/// How long threads that are stuck in the kernel may hold up the end of the process.
const LEFTOVERS: Duration = Duration::from_secs(1);

/// Runs one command to its end and gives the exit code.
///
/// # Errors
/// When the environment is bad or the command fails. Nothing of it has been shown to anybody yet.
pub fn execute(cli: Cli, env: Environment) -> Result<u8, Failure> {
    if matches!(cli.command, Command::Run(_) | Command::Dev(_) | Command::Control(_)) {
        shut_out()?;
    }
    match cli.command {
        Command::Run(args) => {
            let Some(config) = load(&env, Loaded::run(&env), args.print_config, |c| &c.gateway.logging)?
            else {
                return Ok(0);
            };
            block_on(config.gateway.worker_threads, run::run(config, env))
        }
        Command::Dev(args) => {
            let Some(config) = load(&env, Loaded::dev(&env), args.print_config, |c| &c.gateway.logging)?
            else {
                return Ok(0);
            };
            block_on(config.gateway.worker_threads, dev::dev(config, args.config, env))
        }
        Command::Control(args) => {
            let env = env
                .with_option(&table::WORKSPACES_DIR, args.workspaces)
                .with_option(&table::STATE_DIR, args.state);
            let Some(config) = load(&env, Loaded::control(&env), args.print_config, |c| &c.logging)? else {
                return Ok(0);
            };
            block_on(config.worker_threads, control::control(config, args.once, env))
        }
        Command::Check(args) => {
            load(&env, Loaded::check(&env), false, |logging| logging)?;
            block_on(NonZeroUsize::new(1), check::check(&args, &env))
        }
        Command::Explain(args) => {
            load(&env, Loaded::check(&env), false, |logging| logging)?;
            block_on(NonZeroUsize::new(1), explain::explain(args))
        }
        Command::Key { command } => {
            let env = env.with_option(&table::STATE_DIR, command.state().dir.clone());
            match load(&env, Loaded::operator(&env, config::Subcommand::Key), false, |c| &c.logging)? {
                Some(config) => block_on(NonZeroUsize::new(1), key::key(config, command)),
                None => Ok(0),
            }
        }
        Command::Workspace { command } => {
            let env = env.with_option(&table::STATE_DIR, command.state().dir.clone());
            match load(&env, Loaded::operator(&env, config::Subcommand::Workspace), false, |c| &c.logging)? {
                Some(config) => block_on(NonZeroUsize::new(1), workspace::workspace(config, command)),
                None => Ok(0),
            }
        }
        Command::Publish(args) => {
            let env = env.with_option(&table::STATE_DIR, args.state.dir.clone());
            match load(&env, Loaded::operator(&env, config::Subcommand::Publish), false, |c| &c.logging)? {
                Some(config) => block_on(NonZeroUsize::new(1), publish::publish(config, args, env)),
                None => Ok(0),
            }
        }
        Command::Usage(UsageArgs { command: Some(UsageCommand::Audit(args)), .. }) => {
            match load(&env, Loaded::usage_audit(&env), false, |c| &c.logging)? {
                Some(config) => block_on(NonZeroUsize::new(1), usage::audit(config, args)),
                None => Ok(0),
            }
        }
        Command::Usage(UsageArgs { command: None, sums }) => {
            let env = env.with_option(&table::STATE_DIR, sums.state.dir.clone());
            match load(&env, Loaded::usage(&env), false, |c| &c.logging)? {
                Some(config) => block_on(NonZeroUsize::new(1), usage::sums(config, sums)),
                None => Ok(0),
            }
        }
        Command::Config { command: ConfigCommand::Docs } => {
            out::text(config::reference())?;
            Ok(0)
        }
    }
}

/// Forbids other processes of the same user, such as the children that the gateway starts for stdio servers, to look
/// into this one: its environment and its memory hold the credentials of all workspaces. Nothing forbids that to root.
fn shut_out() -> Result<(), Failure> {
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_dumpable(false)
        .map_err(|e| Failure::runtime(format!("the process cannot be closed to others: {e}")))?;
    Ok(())
}

/// Starts the log and gives the configuration, or shows it when that is all that was asked for (`None`).
fn load<T>(
    env: &Environment,
    loaded: Result<Loaded<T>, Problems>,
    print: bool,
    logging: impl FnOnce(&T) -> &Logging,
) -> Result<Option<T>, Failure> {
    let unknown = env.unknown();
    let loaded = match loaded {
        Ok(loaded) if !print => loaded,
        shown => {
            // There is no log. A mistyped name is often the reason why another variable is missing.
            for config::Unknown { name, nearest } in &unknown {
                out::warning(format_args!("unknown variable `{name}`: is `{nearest}` meant?"));
            }
            out::text(shown?.effective)?;
            return Ok(None);
        }
    };
    logging::init(logging(&loaded.config)).map_err(Failure::runtime)?;
    for config::Unknown { name, nearest } in &unknown {
        tracing::warn!(variable = %name, nearest, "unknown variable in the environment");
    }
    Ok(Some(loaded.config))
}

fn block_on<T>(
    threads: Option<NonZeroUsize>,
    future: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads.get());
    }
    let runtime = builder.thread_name("obol").enable_all().build()?;
    let result = runtime.block_on(future);
    runtime.shutdown_timeout(LEFTOVERS);
    result
}
