//! Everything that a demonstration of Obol needs besides Obol: upstreams that are worth calling, and launchers that
//! start them together with the gateway.
//!
//! The upstreams are servers as a stranger would write them, on the official SDK; they know nothing of the gateway.
//! The launchers decide nothing either: they start processes, wait until these are ready, and end all of them.

mod cluster;
mod demo;
mod launch;
mod listen;
mod mcp_http;
mod mcp_stdio;
mod model;

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use obol_testkit::Failure;

/// What the model server accepts as its bearer. Not a secret: it is here so that the gateway has one to keep.
const MODEL_SECRET: &str = "demo-provider-secret";

/// Demo upstreams for Obol, and launchers for a demo and for a local cluster.
#[derive(Parser)]
#[command(name = "obol-demo", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// An MCP server over Streamable HTTP: a small ticket desk.
    McpHttp {
        /// Where to listen.
        #[arg(long, default_value = "127.0.0.1:9101")]
        listen: SocketAddr,
    },
    /// An MCP server over stdio: dice, a clock, and notes.
    McpStdio,
    /// An OpenAI-compatible model server with the models `demo-small` and `demo-large`.
    Model {
        /// Where to listen.
        #[arg(long, default_value = "127.0.0.1:9102")]
        listen: SocketAddr,
        /// The bearer that requests must bring.
        #[arg(long, default_value = MODEL_SECRET)]
        secret: String,
    },
    /// Starts the demo upstreams and `obol dev` in front of them; Ctrl-C ends all of it.
    Demo(demo::Options),
    /// Starts Redis, control, replicas, a balancer without stickiness and the demo upstreams; Ctrl-C ends all of it.
    Cluster(cluster::Options),
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::McpHttp { listen } => mcp_http::run(listen).await,
        Command::McpStdio => mcp_stdio::run().await,
        Command::Model { listen, secret } => model::run(listen, secret).await,
        Command::Demo(options) => demo::run(options).await,
        Command::Cluster(options) => cluster::run(options).await,
    };
    outcome.unwrap_or_else(|why: Failure| {
        writeln!(std::io::stderr(), "obol-demo: {why}").ok();
        ExitCode::FAILURE
    })
}
