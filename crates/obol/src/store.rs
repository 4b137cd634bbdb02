//! Control's store, and the operator who works on it.

use std::sync::Arc;

use nix::unistd::{Uid, User};
use obol_control::{
    ControlStore, Effect, FileStore, FileUsage, Operator, PostgresStore, PostgresUsage, PublishError,
    Publisher, RedisPublisher, UsageStore,
};
use obol_model::SystemClock;
use obol_redis::Redis;

use crate::config::{self, StoreAt};
use crate::failure::Failure;
use crate::{out, run};

/// The store, not asked yet.
///
/// # Errors
/// When the URL cannot be used.
pub(crate) fn open(at: &StoreAt) -> Result<Arc<dyn ControlStore>, Failure> {
    Ok(match at {
        StoreAt::Database(url) => Arc::new(PostgresStore::new(url).map_err(Failure::runtime)?),
        StoreAt::Directory(dir) => Arc::new(FileStore::new(dir)),
    })
}

/// The store for somebody who expects it to be there: a mistyped directory must not look like an empty one.
///
/// # Errors
/// When it is not there.
pub(crate) fn existing(at: &StoreAt) -> Result<Arc<dyn ControlStore>, Failure> {
    if let StoreAt::Directory(dir) = at
        && !FileStore::new(dir).exists()
    {
        let dir = dir.display();
        return Err(Failure::runtime(format!(
            "`{dir}` is no state directory: pass the one of `obol control` by `--state` or OBOL_STATE_DIR, or set \
             OBOL_DATABASE_URL when control has a database"
        )));
    }
    open(at)
}

/// The usage events beside a store, not asked yet.
///
/// # Errors
/// When the URL cannot be used.
pub(crate) fn open_usage(at: &StoreAt) -> Result<Arc<dyn UsageStore>, Failure> {
    Ok(match at {
        StoreAt::Database(url) => Arc::new(PostgresUsage::new(url).map_err(Failure::runtime)?),
        StoreAt::Directory(dir) => Arc::new(FileUsage::new(dir)),
    })
}

/// As [`existing`], for the usage events beside it.
///
/// # Errors
/// When it is not there.
pub(crate) fn usage(at: &StoreAt) -> Result<Arc<dyn UsageStore>, Failure> {
    existing(at)?;
    open_usage(at)
}

/// Whoever runs this command, working on `store`.
///
/// A Redis that is away is no reason not to change the store: whoever tells the replicas finds out again.
///
/// # Errors
/// When the URL of Redis cannot be used.
pub(crate) async fn operator(
    store: Arc<dyn ControlStore>,
    config: &config::Operator,
) -> Result<Operator, Failure> {
    let publisher: Option<Arc<dyn Publisher>> = match &config.redis_url {
        Some(url) => {
            let redis =
                Redis::new(run::redis_options(url, config.redis_ca.clone())).map_err(Failure::runtime)?;
            if redis.open().await.is_ok() {
                run::warn(&redis).await;
            }
            Some(Arc::new(RedisPublisher::new(redis)))
        }
        None => None,
    };
    let usage = open_usage(&config.store)?;
    Ok(Operator::new(store, publisher, Arc::new(SystemClock), actor()).with_usage(usage))
}

/// As the audit calls whoever runs this command. Not what `USER` says, which anybody can set.
fn actor() -> String {
    let uid = Uid::current();
    match User::from_uid(uid) {
        Ok(Some(user)) => format!("user:{}", user.name),
        _ => format!("uid:{uid}"),
    }
}

/// What the same command would do once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// Nothing but tell the replicas.
    Harmless,
    /// Something else: make another key, go back another revision.
    Another,
}

/// Says when a change takes effect, and gives the exit code.
pub(crate) fn effect(effect: &Effect, again: Again) -> u8 {
    match effect {
        Effect::Replicas => 0,
        Effect::ByControl => {
            out::hint(
                "It takes effect within a second while `obol control` runs with this store, else when it next does. \
                 Set OBOL_REDIS_URL, and it takes effect at once.",
            );
            0
        }
        // No control overwrites that, and no repetition does.
        Effect::NotYet(why @ PublishError::NotNewer { .. }) => {
            out::complaint(format_args!(
                "it is recorded, and the replicas do not follow: {why} than what this store knows, as after it was \
                 restored from a backup; `obol publish --raise-epoch FILE` puts this store above it"
            ));
            1
        }
        Effect::NotYet(why) => {
            let control = "an `obol control` that runs with this store tells them as soon as it can";
            let or = match again {
                Again::Harmless => ", or run the command again",
                Again::Another => "; do not run the command again for that",
            };
            out::complaint(format_args!(
                "it is recorded, and the replicas do not know yet: {why}; {control}{or}"
            ));
            1
        }
    }
}
