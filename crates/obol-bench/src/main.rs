//! `make bench`: what it costs to go through Obol, beside a bare reverse proxy and no proxy at all, in one run.
//!
//! Each role is a process of its own, so that processor time and memory can be told apart: the upstream (an MCP server
//! and a model server that do as little as they can), the floor (a hyper server and a pooled hyper client that look at
//! nothing), a real Redis, `obol control`, one `obol run` with everything on, and this program, which drives them.
//! The figures of one run are comparable with each other and with nothing else: they are reported as ratios.
//!
//! It is no test: what is right belongs to `tests/`. But every answer is checked, and one wrong answer fails the run.

mod driver;
mod exchange;
mod installation;
mod measure;
mod procfs;
mod proxy;
mod report;
mod serve;
mod upstream;
mod work;

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use obol_testkit::Failure;

use crate::serve::Signals;

/// What a shell reports for a program that `SIGINT` ended.
const INTERRUPTED: u8 = 130;

/// Measures Obol beside a bare reverse proxy and no proxy at all. Ends by itself; Ctrl-C ends it at once.
#[derive(Parser)]
#[command(name = "obol-bench", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    #[command(flatten)]
    options: measure::Options,
}

/// What the driver starts as processes of their own.
#[derive(Subcommand)]
enum Role {
    /// An MCP server and an OpenAI-compatible model server on one port, as cheap as they can be.
    Upstream {
        /// Where to listen.
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: SocketAddr,
    },
    /// A reverse proxy that looks at nothing: the least that any gateway costs.
    Proxy {
        /// Where to listen.
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: SocketAddr,
        /// Whom to pass everything on to.
        #[arg(long)]
        to: SocketAddr,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.role {
        Some(Role::Upstream { listen }) => upstream::run(listen).await,
        Some(Role::Proxy { listen, to }) => proxy::run(listen, to).await,
        None => bench(cli.options).await,
    };
    outcome.unwrap_or_else(|why: Failure| {
        writeln!(std::io::stderr(), "obol-bench: {why}").ok();
        ExitCode::FAILURE
    })
}

async fn bench(options: measure::Options) -> Result<ExitCode, Failure> {
    let mut signals = Signals::listen()?;
    // Whatever was started belongs to the future that a signal drops, and ends with it.
    tokio::select! {
        outcome = measure::run(options) => outcome,
        () = signals.next() => Ok(ExitCode::from(INTERRUPTED)),
    }
}
