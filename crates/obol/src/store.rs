//! Control's store, and the operator who works on it.

use std::sync::Arc;

use nix::unistd::{Uid, User};
use obol_control::{ControlStore, Effect, FileStore, Operator, PostgresStore, Publisher, RedisPublisher};
use obol_model::SystemClock;

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

/// Whoever runs this command, working on `store`.
///
/// # Errors
/// When Redis was named and cannot be reached.
pub(crate) async fn operator(
    store: Arc<dyn ControlStore>,
    config: &config::Operator,
) -> Result<Operator, Failure> {
    let publisher: Option<Arc<dyn Publisher>> = match &config.redis_url {
        Some(url) => Some(Arc::new(RedisPublisher::new(run::connect(url, config.redis_ca.clone()).await?))),
        None => None,
    };
    Ok(Operator::new(store, publisher, Arc::new(SystemClock), actor()))
}

/// As the audit calls whoever runs this command. Not what `USER` says, which anybody can set.
fn actor() -> String {
    let uid = Uid::current();
    match User::from_uid(uid) {
        Ok(Some(user)) => format!("user:{}", user.name),
        _ => format!("uid:{uid}"),
    }
}

/// Says when a change takes effect, and gives the exit code.
pub(crate) fn effect(effect: &Effect) -> u8 {
    match effect {
        Effect::Replicas => 0,
        Effect::ByControl => {
            out::hint(
                "It takes effect within a second while `obol control` runs with this store, else when it next does. \
                 Set OBOL_REDIS_URL, and it takes effect at once.",
            );
            0
        }
        Effect::NotYet(why) => {
            out::complaint(format_args!(
                "it is recorded, and the replicas do not know yet: {why}; `obol control` tells them as soon as it can, \
                 or run the command again"
            ));
            1
        }
    }
}
