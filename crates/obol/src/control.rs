//! `obol control`: publishes a directory of workspace files and the keys, and keeps the store as it should be.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use obol_control::{ControlOptions, ControlStore, RedisPublisher, StoreError, SyncReport, UsageCollector};
use obol_drain::{Drain, DrainOptions};
use obol_model::{Clock, RequestId, SystemClock};
use tokio_util::sync::CancellationToken;

use crate::config::{Control, Environment, StoreAt};
use crate::failure::Failure;
use crate::signals::Signals;
use crate::{control_api, out, run, store};

/// How long after a first pass that could not be finished the next one follows.
const RETRY: Duration = Duration::from_secs(1);
/// Bound of what is still answered when a signal came.
const STOPPING: Duration = Duration::from_secs(5);

/// Publishes until a signal comes, or once, and gives the exit code.
///
/// # Errors
/// When a directory cannot be used or Redis cannot be reached at start; with `once` also when anything is left undone.
pub(crate) async fn control(config: Control, once: bool, env: Environment) -> Result<u8, Failure> {
    let mut signals = Signals::new()?;
    usable(&config.workspaces, &config.store)?;
    let redis = run::connect(&config.redis_url, config.redis_ca).await?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let (store, usage) = (store::open(&config.store)?, store::open_usage(&config.store)?);
    let api = match config.listen.filter(|_| !once) {
        Some(listen) => control_api::bind(listen, config.service_jwt.as_ref(), &redis).await?,
        None => None,
    };
    let options = ControlOptions {
        source: config.workspaces,
        key_ring: Arc::new(config.credential_keys),
        env: Arc::new(move |name| env.secret(name).map(|secret| secret.expose().clone())),
    };
    let publisher = Arc::new(RedisPublisher::new(redis.clone()));
    let control = obol_control::Control::new(options, Arc::clone(&store), publisher, Arc::clone(&clock))
        .with_usage(Arc::clone(&usage));
    if once {
        store.prepare().await.map_err(Failure::runtime)?;
        return publish_once(&control).await;
    }
    // A name that no other process has: what this one leaves behind is for others to claim.
    let consumer = format!("control-{}", RequestId::new().as_uuid());
    let collector = UsageCollector::new(redis.clone(), consumer, Arc::clone(&store), usage);
    let (drain, stop) = (Drain::new(), CancellationToken::new());
    let ready = async {
        prepare(&*store).await?;
        // Before everything is published: replicas that miss something have nobody else to ask.
        if let Some(api) = api {
            control_api::start(api, store, clock, &drain, stop.clone())?;
        }
        first_pass(&control).await
    };
    tokio::select! {
        ready = ready => ready?,
        signal = signals.next() => {
            tracing::info!(signal, "stopped before everything was published");
            return Ok(0);
        }
    }
    let running = async {
        // The connections are looked after for as long as anybody works with them.
        let done = CancellationToken::new();
        let working = async {
            tokio::join!(control.run(stop.clone()), collector.run(stop.clone()));
            done.cancel();
        };
        tokio::join!(working, redis.keep(done.clone()))
    };
    tokio::pin!(running);
    tokio::select! {
        _ = &mut running => {}
        signal = signals.next() => {
            tracing::info!(signal, "stopping");
            stop.cancel();
            // It ends at the next await; a change that is half sent is completed by the next process. A batch of usage events
            // is finished, within its deadlines.
            running.await;
        }
    }
    let options = DrainOptions { timeout: STOPPING, delay: Duration::ZERO };
    let second = async {
        signals.next().await;
    };
    Ok(drain.run(options, |_| async { true }, second).await.exit_code())
}

/// Waits for a database that is away, as for everything else that comes and goes. What only an operator can put right is
/// a refusal.
async fn prepare(store: &dyn ControlStore) -> Result<(), Failure> {
    let mut complained = false;
    loop {
        match store.prepare().await {
            Ok(()) => return Ok(()),
            Err(StoreError::Unavailable(reason)) => {
                if !complained {
                    tracing::warn!(reason, "control cannot read its state, it tries again");
                }
                complained = true;
            }
            Err(e) => return Err(Failure::runtime(e)),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Refuses directories that can only be a mistake, before anything is published or removed.
fn usable(workspaces: &Path, store: &StoreAt) -> Result<(), Failure> {
    let cannot = |what: &str, path: &Path, error: &io::Error| {
        Failure::runtime(format!("cannot use the {what} directory `{}`: {error}", path.display()))
    };
    // Reading it and not only looking at it: permissions count as well.
    std::fs::read_dir(workspaces).map_err(|e| cannot("workspaces", workspaces, &e))?;
    let StoreAt::Directory(state) = store else { return Ok(()) };
    // For the owner alone: hashes of keys are in it.
    DirBuilder::new().recursive(true).mode(0o700).create(state).map_err(|e| cannot("state", state, &e))
}

/// Brings Redis up to date and says so on stdout.
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
    let report = control.sync_once().await;
    let SyncReport { published, healed, unpublished, refused, warnings, keys_changed, .. } = report;
    let SyncReport { unseeded, failed, .. } = report;
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
    for workspace in &unseeded {
        out::complaint(format_args!(
            "the ledger of `{workspace}` was lost, and nobody with a budget is admitted until its usage is collected: let \
             `obol control` run"
        ));
    }
    Ok(u8::from(!refused.is_empty() || !unseeded.is_empty() || !failed.is_empty()))
}
