//! `obol run`: a gateway replica.

use std::sync::Arc;
use std::time::Duration;

use obol_auth::RedisKeys;
use obol_edge::RedisProbe;
use obol_meter::RedisSink;
use obol_model::Secret;
use obol_redis::{Redis, RedisOptions};
use obol_session::RedisSessions;
use obol_snapshot::RedisSource;

use crate::compose::{Replica, Stores};
use crate::config::{Environment, Run};
use crate::failure::Failure;

/// Serves until a signal comes, drains, and gives the exit code.
///
/// # Errors
/// When it cannot start.
pub(crate) async fn run(config: Run, env: Environment) -> Result<u8, Failure> {
    let redis = connect(config.redis_url.expose()).await?;
    let source = Arc::new(RedisSource::new(redis.clone()));
    let probe: RedisProbe = {
        let redis = redis.clone();
        Arc::new(move || {
            let redis = redis.clone();
            Box::pin(async move { redis.ping().await.is_ok() })
        })
    };
    let stores = Stores {
        sessions: Arc::new(RedisSessions::new(redis.clone())),
        keys: Arc::new(RedisKeys::new(redis.clone())),
        publications: source.clone(),
        feed: source,
        usage: Arc::new(RedisSink::new(redis)),
        probe,
    };
    let replica =
        Replica::start(config.gateway, Arc::new(config.credential_keys), stores, env.into_vars()).await?;
    Ok(replica.run().await)
}

/// Opens Redis, and says loudly what is wrong with it.
///
/// # Errors
/// When it cannot be reached.
pub(crate) async fn connect(url: &str) -> Result<Redis, Failure> {
    let options = RedisOptions {
        url: Secret::new(url.to_owned()),
        command_timeout: Duration::from_millis(800),
        connect_timeout: Duration::from_secs(2),
    };
    let redis = Redis::connect(options).await.map_err(Failure::runtime)?;
    match redis.server_warnings().await {
        Ok(warnings) => {
            for warning in warnings {
                tracing::warn!(warning, "redis is configured badly");
            }
        }
        Err(e) => tracing::warn!(error = %e, "the configuration of redis cannot be checked"),
    }
    Ok(redis)
}
