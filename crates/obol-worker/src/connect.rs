use std::ffi::OsString;
use std::fmt;
use std::process::Stdio;
use std::sync::Arc;

use async_trait::async_trait;
use obol_mcp::pool::{Connect, Endpoint, EndpointKind, Spawn, Transport, TransportError};
use obol_model::Secret;
use tokio::process::Command;

use crate::WorkerOptions;
use crate::transport::StdioTransport;

/// What of the gateway's environment a child gets to see (DESIGN §10.9). Everything else may be a secret.
const INHERITED: [&str; 12] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "TERM",
    "SYSTEMROOT",
];

/// Starts children for stdio endpoints.
pub struct StdioConnect {
    spawner: Arc<dyn Spawn>,
    environment: Vec<(OsString, OsString)>,
    options: WorkerOptions,
}

impl fmt::Debug for StdioConnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StdioConnect").field("options", &self.options).finish_non_exhaustive()
    }
}

impl StdioConnect {
    /// `environment` is the gateway's own; children see the allow-listed part of it.
    pub fn new(
        spawner: Arc<dyn Spawn>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        options: WorkerOptions,
    ) -> Self {
        let allowed = |name: &OsString| INHERITED.iter().any(|i| name == i);
        let environment = environment.into_iter().filter(|(name, _)| allowed(name)).collect();
        Self { spawner, environment, options }
    }

    fn command(&self, program: &str, arguments: &[String], env: &[(String, Secret<String>)]) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .envs(env.iter().map(|(name, value)| (name, value.expose())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: wrappers such as `npx` and `uvx` are signalled together with the real server.
            .process_group(0)
            .kill_on_drop(true);
        if let Some(directory) = &self.options.directory {
            command.current_dir(directory);
        }
        command
    }
}

#[async_trait]
impl Connect for StdioConnect {
    async fn connect(&self, endpoint: &Endpoint) -> Result<Arc<dyn Transport>, TransportError> {
        let EndpointKind::Stdio { command, env } = &endpoint.kind else {
            return Err(TransportError::Unsent("it is not reached over stdio"));
        };
        let Some((program, arguments)) = command.split_first() else {
            return Err(TransportError::Unsent("it has no command"));
        };
        let child = self.command(program, arguments, env).spawn().map_err(|e| {
            tracing::warn!(workspace = %endpoint.workspace, connection = %endpoint.connection, error = %e,
                "worker could not be started");
            TransportError::Unsent(match e.kind() {
                std::io::ErrorKind::NotFound => "its program was not found",
                std::io::ErrorKind::PermissionDenied => "its program may not be executed",
                _ => "its process could not be started",
            })
        })?;
        // Servers like to print their configuration when they fail.
        let secrets = env.iter().map(|(_, value)| value.clone()).collect();
        let name = format!("{}/{}", endpoint.workspace, endpoint.connection);
        let transport = StdioTransport::start(child, name, secrets, self.options.clone(), &self.spawner)
            .ok_or(TransportError::Unsent("its process could not be started"))?;
        Ok(transport)
    }
}
