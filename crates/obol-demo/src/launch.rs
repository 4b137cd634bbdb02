//! What both launchers do: find binaries and start the upstreams.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use obol_testkit::Failure;
use obol_testkit::process::Proc;

use crate::MODEL_SECRET;
use crate::listen;

/// The variable from which the workspace file takes the model server's secret.
pub(crate) const SECRET_VARIABLE: &str = "DEMO_MODEL_SECRET";

/// How long an upstream may take to listen.
const LISTENING: Duration = Duration::from_secs(10);

/// Options of both launchers.
#[derive(Args)]
pub(crate) struct Common {
    /// The workspace file; its policy files are looked for beside it.
    #[arg(long, default_value = "config/demo.yaml")]
    pub(crate) config: PathBuf,
    /// The `obol` binary; by default the one beside this program.
    #[arg(long)]
    obol: Option<PathBuf>,
    /// Where the MCP server listens. The workspace file must say the same.
    #[arg(long, default_value = "127.0.0.1:9101")]
    mcp_listen: SocketAddr,
    /// Where the model server listens. The workspace file must say the same.
    #[arg(long, default_value = "127.0.0.1:9102")]
    model_listen: SocketAddr,
}

impl Common {
    /// The `obol` to run, once it is known to be there.
    pub(crate) fn obol(&self) -> Result<PathBuf, Failure> {
        let obol = match &self.obol {
            Some(obol) => obol.clone(),
            None => own_dir()?.join("obol"),
        };
        if obol.is_file() {
            return Ok(obol);
        }
        Err(Failure::new(format!(
            "there is no `{}`; build it with `cargo build -p obol` (in the same profile as this program), or name \
             another with `--obol`",
            obol.display()
        )))
    }

    /// Checks that the workspace file is there, so that nothing is started in vain.
    pub(crate) fn check_config(&self) -> Result<(), Failure> {
        if self.config.is_file() {
            return Ok(());
        }
        let config = self.config.display();
        Err(Failure::new(format!(
            "there is no `{config}`; run this in the project's directory or name a `--config`"
        )))
    }

    /// Starts both upstreams and waits until they listen.
    pub(crate) async fn start_upstreams(&self) -> Result<Upstreams, Failure> {
        let me = this_program()?;
        let start = async |name: &str, command: &str, addr: SocketAddr| {
            // Tried first, for an error that is about the port and not about a child.
            drop(listen::bind(addr).await?);
            let upstream =
                Proc::command(&me).named(name).args([command, "--listen", &addr.to_string()]).try_spawn()?;
            upstream.try_wait_for_line(LISTENING, |line| line.starts_with("listening ")).await?;
            Ok::<_, Failure>(upstream)
        };
        Ok(Upstreams {
            mcp: start("the demo MCP server", "mcp-http", self.mcp_listen).await?,
            model: start("the demo model server", "model", self.model_listen).await?,
        })
    }
}

/// The running upstreams; they end with this value.
pub(crate) struct Upstreams {
    mcp: Proc,
    model: Proc,
}

impl Upstreams {
    /// Returns when one of them ends, with what there is to say about it.
    pub(crate) async fn ended(&self) -> String {
        let (name, status) = tokio::select! {
            status = self.mcp.ended() => ("MCP", status),
            status = self.model.ended() => ("model", status),
        };
        let how = status.map_or_else(|why| why.to_string(), |status| status.to_string());
        format!("the demo {name} server ended ({how})")
    }
}

/// What the gateway has to know besides the workspace file.
pub(crate) fn secret() -> (&'static str, &'static str) {
    (SECRET_VARIABLE, MODEL_SECRET)
}

fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|why| Failure::new(format!("cannot find this program's own file: {why}")))
}

/// Where this program lies, and `obol` with it.
pub(crate) fn own_dir() -> Result<PathBuf, Failure> {
    Ok(this_program()?.parent().map(Path::to_path_buf).unwrap_or_default())
}
