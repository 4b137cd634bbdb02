//! `obol control`: publishes a directory of workspace files and the keys, and keeps the store as it should be.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use obol_control::{ControlOptions, RedisPublisher, SyncReport};
use obol_model::{Clock, SystemClock};
use tokio_util::sync::CancellationToken;

use crate::config::{Control, Environment};
use crate::failure::Failure;
use crate::out;
use crate::run;
use crate::signals::Signals;

/// How long after a first pass that could not be finished the next one follows.
const RETRY: Duration = Duration::from_secs(1);

/// Publishes until a signal comes, or once, and gives the exit code.
///
/// # Errors
/// When a directory cannot be used or Redis cannot be reached at start; with `once` also when anything is left undone.
pub(crate) async fn control(config: Control, once: bool, env: Environment) -> Result<u8, Failure> {
    let mut signals = Signals::new()?;
    usable(&config.workspaces, &config.state)?;
    let redis = run::connect(config.redis_url.expose()).await?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let options = ControlOptions {
        source: config.workspaces,
        state_dir: Some(config.state),
        key_ring: Arc::new(config.credential_keys),
        env: Arc::new(move |name| env.secret(name).map(|secret| secret.expose().clone())),
    };
    let control = obol_control::Control::new(options, Arc::new(RedisPublisher::new(redis)), &clock);
    if once {
        return publish_once(&control).await;
    }
    tokio::select! {
        ready = first_pass(&control) => ready?,
        signal = signals.next() => {
            tracing::info!(signal, "stopped before everything was published");
            return Ok(0);
        }
    }
    let stop = CancellationToken::new();
    let running = control.run(stop.clone());
    tokio::pin!(running);
    tokio::select! {
        () = &mut running => {}
        signal = signals.next() => {
            tracing::info!(signal, "stopping");
            stop.cancel();
            // It ends at the next await; a change that is half sent is completed by the next process.
            running.await;
        }
    }
    Ok(0)
}

/// Refuses directories that can only be a mistake, before anything is published or removed.
fn usable(workspaces: &Path, state: &Path) -> Result<(), Failure> {
    let cannot = |what: &str, path: &Path, error: &io::Error| {
        Failure::runtime(format!("cannot use the {what} directory `{}`: {error}", path.display()))
    };
    // Reading it and not only looking at it: permissions count as well.
    std::fs::read_dir(workspaces).map_err(|e| cannot("workspaces", workspaces, &e))?;
    // For the owner alone: hashes of keys are in it.
    DirBuilder::new().recursive(true).mode(0o700).create(state).map_err(|e| cannot("state", state, &e))
}

/// Brings the store up to date and says so on stdout.
async fn first_pass(control: &obol_control::Control) -> Result<(), Failure> {
    let mut known = Vec::new();
    loop {
        let report = control.sync_once().await;
        report.log(&known);
        if report.failed.is_empty() {
            return Ok(out::line("control ready")?);
        }
        known = report.failed;
        tokio::time::sleep(RETRY).await;
    }
}

async fn publish_once(control: &obol_control::Control) -> Result<u8, Failure> {
    let SyncReport { published, healed, unpublished, refused, warnings, keys_changed, failed, .. } =
        control.sync_once().await;
    for (workspace, revision) in published {
        out::line(format_args!("published {workspace} {revision}"))?;
    }
    for (workspace, revision) in healed {
        out::line(format_args!("restored {workspace} {revision}"))?;
    }
    for workspace in unpublished {
        out::line(format_args!("unpublished {workspace}"))?;
    }
    if keys_changed > 0 {
        out::line(format_args!("changed {keys_changed} keys"))?;
    }
    for fault in warnings {
        out::warning(fault);
    }
    for fault in &refused {
        out::complaint(fault);
    }
    for failure in &failed {
        out::complaint(failure);
    }
    Ok(u8::from(!refused.is_empty() || !failed.is_empty()))
}
