//! `make demo`: the upstreams and `obol dev`, in the foreground.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};

use clap::Args;
use obol_testkit::Failure;
use obol_testkit::process::Proc;

use crate::launch::{self, Common};
use crate::listen::{Signals, Stop};

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// Further arguments for `obol dev`.
    #[arg(last = true)]
    args: Vec<String>,
}

pub(crate) async fn run(options: Options) -> Result<ExitCode, Failure> {
    let mut signals = Signals::listen()?;
    options.common.check_config()?;
    let obol = options.common.obol()?;
    let upstreams = options.common.start_upstreams().await?;
    let (variable, secret) = launch::secret();
    // Its environment is ours, so that `OBOL_…` variables work as they would without a launcher.
    #[expect(clippy::disallowed_methods, reason = "handed on, not read")]
    let environment = std::env::vars_os();
    let dev = Proc::command(obol)
        .named("obol dev")
        .envs(environment)
        .env(variable, secret)
        // Where the workspace file's `obol-demo mcp-stdio` is found.
        .path_first(launch::own_dir()?)
        .args(["dev", "--config"])
        .arg(&options.common.config)
        .args(&options.args)
        .inherit_output()
        .try_spawn()?;
    loop {
        tokio::select! {
            status = dev.ended() => return Ok(exit_code(status?)),
            stop = signals.next() => match stop {
                // Passed on each time: a second one makes `obol` end at once. Being in a process group of its own it
                // does not get them from the terminal too, so that it is told exactly once.
                Stop::Interrupt => dev.interrupt(),
                Stop::Terminate => dev.terminate(),
            },
            why = upstreams.ended() => {
                writeln!(std::io::stderr(), "obol-demo: {why}; stopping").ok();
                dev.terminate();
                return Ok(exit_code(dev.ended().await?));
            }
        }
    }
}

/// The child's exit code, or what a shell reports for a signal.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}
