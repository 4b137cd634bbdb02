//! `obol`: see the library of the same name.

use std::process::ExitCode;

use clap::Parser as _;
use obol::cli::Cli;
use obol::config::Environment;
use obol::out;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => {
            // Help and version go to stdout and are no error. There is nobody to tell when the stream is closed.
            drop(usage.print());
            return ExitCode::from(if usage.use_stderr() { 2 } else { 0 });
        }
    };
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    let environment = Environment::new(std::env::vars_os());
    match obol::execute(cli, environment) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            out::complaint(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}
