//! `obol run`: a gateway replica.

use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use obol_auth::{ControlKeys, RedisKeys, ServiceTokens, UsedTokens, party};
use obol_dial::{DialOptions, Dialer};
use obol_drain::Class;
use obol_edge::RedisProbe;
use obol_mcp::catalogue::RedisCatalogue;
use obol_meter::{Owners, RedisLedger};
use obol_model::{ReplicaId, Secret, SystemClock};
use obol_peer::Registry;
use obol_redis::{Redis, RedisOptions};
use obol_session::{RedisBindings, RedisSessions};
use obol_snapshot::{ControlFallback, PublicationSource, RedisSource};
use url::Url;

use crate::compose::{Replica, Stores};
use crate::config::{Environment, RedisUrl, Run};
use crate::control_client::ControlClient;
use crate::failure::Failure;
use crate::service;

/// Serves until a signal comes, drains, and gives the exit code.
///
/// # Errors
/// When it cannot start.
pub(crate) async fn run(config: Run, env: Environment) -> Result<u8, Failure> {
    let redis = connect(&config.redis_url, config.redis_ca).await?;
    let source = Arc::new(RedisSource::new(redis.clone()));
    let used = UsedTokens::new(redis.clone());
    let service = service::tokens(config.gateway.service_jwt.as_ref(), party::GATEWAY, Some(used))?;
    let control = control(config.control_url.as_ref(), service.as_ref())?;
    let publications: Arc<dyn PublicationSource> = match &control {
        Some(control) => Arc::new(ControlFallback::new((*source).clone(), control.clone())),
        None => source.clone(),
    };
    let probe: RedisProbe = {
        let redis = redis.clone();
        Arc::new(move || {
            let redis = redis.clone();
            Box::pin(async move { redis.ping().await.is_ok() })
        })
    };
    let stores = Stores {
        bindings: Arc::new(RedisBindings::new(redis.clone())),
        sessions: Arc::new(RedisSessions::new(redis.clone())),
        keys: Arc::new(RedisKeys::new(redis.clone())),
        control: control.map(|control| control as Arc<dyn ControlKeys>),
        service,
        publications,
        feed: source,
        ledger: Arc::new(RedisLedger::new(redis.clone()).with_max_len(config.usage_stream_max.get())),
        owners: Arc::new(Leases(Registry::new(redis.clone()))),
        catalogue: Arc::new(RedisCatalogue::new(redis.clone())),
        registry: Some(Registry::new(redis.clone())),
        probe,
    };
    let replica =
        Replica::start(config.gateway, Arc::new(config.credential_keys), stores, env.into_vars()).await?;
    let (tasks, background) = replica.background();
    let stop = background.clone();
    tasks.spawn(Class::Background, "redis", async move { redis.keep(stop).await });
    Ok(replica.run().await)
}

/// The client of control's internal API, when there is one to ask.
fn control(
    base: Option<&Url>,
    tokens: Option<&Arc<ServiceTokens>>,
) -> Result<Option<Arc<ControlClient>>, Failure> {
    let (Some(base), Some(tokens)) = (base, tokens) else { return Ok(None) };
    let dialer = Dialer::new(DialOptions::default()).map_err(Failure::runtime)?;
    let http = dialer.client(true).clone();
    let control = ControlClient::new(base.clone(), http, tokens.clone(), Arc::new(SystemClock));
    Ok(Some(Arc::new(control)))
}

/// Opens Redis, and says loudly what is wrong with it.
///
/// # Errors
/// When it cannot be reached.
pub(crate) async fn connect(url: &RedisUrl, ca: Option<Vec<u8>>) -> Result<Redis, Failure> {
    let redis = Redis::connect(redis_options(url, ca)).await.map_err(Failure::runtime)?;
    warn(&redis).await;
    Ok(redis)
}

pub(crate) fn redis_options(url: &RedisUrl, ca: Option<Vec<u8>>) -> RedisOptions {
    RedisOptions { ca, ..RedisOptions::new(Secret::new(url.expose().to_owned())) }
}

/// Says loudly what is wrong with the servers.
pub(crate) async fn warn(redis: &Redis) {
    match redis.server_warnings().await {
        Ok(warnings) => {
            for warning in warnings {
                tracing::warn!(warning, "redis is configured badly");
            }
        }
        Err(e) => tracing::warn!(error = %e, "the configuration of redis cannot be checked"),
    }
}

/// The leases of replicas, as the sweep asks for them.
#[derive(Debug)]
struct Leases(Registry);

#[async_trait]
impl Owners for Leases {
    async fn gone(&self, owners: &HashSet<ReplicaId>) -> Result<HashSet<ReplicaId>, String> {
        let ids: Vec<ReplicaId> = owners.iter().cloned().collect();
        let live = self.0.find(&ids).await.map_err(|e| e.to_string())?;
        let live: HashSet<ReplicaId> = live.into_iter().map(|peer| peer.id).collect();
        Ok(owners.difference(&live).cloned().collect())
    }
}
