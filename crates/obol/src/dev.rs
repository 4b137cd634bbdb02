//! `obol dev`: gateway and control in one process, all state in memory.

mod welcome;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use obol_auth::{EmbeddedKeys, party};
use obol_control::{
    Control, ControlOptions, KeyRecord, MemoryStore, NewKey, Operator, PublishError, PublishedKeys, Publisher,
};
use obol_drain::Class;
use obol_edge::RedisProbe;
use obol_mcp::catalogue::EmbeddedCatalogue;
use obol_meter::{EmbeddedLedger, LostLedger, Owners, Seeded, Spent};
use obol_model::snapshot::Documents;
use obol_model::{
    Clock, Invalidation, KeyContext, KeyHash, KeyRing, ReplicaId, Revision, SystemClock, WorkspaceId,
};
use obol_session::{EmbeddedBindings, EmbeddedSessions};
use obol_snapshot::{EmbeddedSource, PublicationSource as _, Stored};
use parking_lot::Mutex;

use crate::compose::{Replica, Stores};
use crate::config::{Dev, Environment};
use crate::failure::Failure;
use crate::service;

/// Usage events that are kept for looking at; older ones are forgotten.
const USAGE_EVENTS: usize = 10_000;

/// Serves one workspace file until a signal comes, drains, and gives the exit code.
///
/// # Errors
/// When the file is not valid or the replica cannot start.
pub(crate) async fn dev(config: Dev, file: PathBuf, env: Environment) -> Result<u8, Failure> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let ring = Arc::new(KeyRing::ephemeral().map_err(Failure::runtime)?);
    let embedded = Arc::new(Embedded {
        source: Arc::new(EmbeddedSource::new()),
        keys: Arc::new(EmbeddedKeys::new()),
        written: Mutex::default(),
    });
    let secrets = env.clone();
    let options = ControlOptions {
        source: file.clone(),
        key_ring: ring.clone(),
        env: Arc::new(move |name| secrets.secret(name).map(|s| s.expose().clone())),
    };
    let store = Arc::new(MemoryStore::default());
    let control = Control::new(options, store.clone(), embedded.clone(), clock.clone());
    let report = control.sync_once().await;
    let Some((workspace, _)) = report.published.first() else {
        let faults: Vec<String> =
            report.refused.iter().map(ToString::to_string).chain(report.failed).collect();
        return Err(Failure::runtime(format!("{} is not valid\n{}", file.display(), faults.join("\n"))));
    };
    let operator = Operator::new(store, Some(embedded.clone()), clock.clone(), "dev".to_owned());
    let new = NewKey::named(workspace.clone(), "dev");
    let (key, ..) = operator.new_key(new).await.map_err(Failure::runtime)?;
    let probe: RedisProbe = Arc::new(|| Box::pin(async { true }));
    let stores = Stores {
        bindings: Arc::new(EmbeddedBindings::new(clock.clone())),
        sessions: Arc::new(EmbeddedSessions::new(clock.clone())),
        keys: embedded.keys.clone(),
        control: None,
        service: service::tokens(config.gateway.service_jwt.as_ref(), party::GATEWAY, None)?,
        publications: embedded.source.clone(),
        feed: embedded.source.clone(),
        ledger: Arc::new(EmbeddedLedger::new(clock.clone(), USAGE_EVENTS)),
        owners: Arc::new(Nobody),
        catalogue: Arc::new(EmbeddedCatalogue::new()),
        registry: None,
        probe,
    };
    tracing::warn!("all state is in memory and ends with this process");
    let replica = Replica::start(config.gateway, ring, stores, env.into_vars()).await?;
    let (tasks, background) = replica.background();
    tasks.spawn(Class::Background, "control", control.run(background.clone()));
    welcome::print(replica.public, &key, &file).await?;
    Ok(replica.run().await)
}

/// There are no other processes.
#[derive(Debug)]
struct Nobody;

#[async_trait]
impl Owners for Nobody {
    async fn gone(&self, _: &HashSet<ReplicaId>) -> Result<HashSet<ReplicaId>, String> {
        Ok(HashSet::new())
    }
}

/// The stores of the gateway as control sees them.
struct Embedded {
    source: Arc<EmbeddedSource>,
    keys: Arc<EmbeddedKeys>,
    /// What is in `keys`.
    written: Mutex<PublishedKeys>,
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Embedded")
    }
}

#[async_trait]
impl Publisher for Embedded {
    async fn read(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, PublishError> {
        match self.source.read(workspace).await {
            Ok(Stored::Complete(documents)) => Ok(Some(documents)),
            // Memory is never torn, and can always be asked.
            Ok(Stored::Absent | Stored::Partial | Stored::TooLarge { .. }) | Err(_) => Ok(None),
        }
    }

    async fn publish(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
    ) -> Result<(), PublishError> {
        match self.source.publish(workspace, docs.clone()) {
            Ok(_) => Ok(()),
            Err(e) => {
                tracing::debug!(error = %e, "embedded store refused a publication");
                Err(PublishError::NotNewer { workspace: workspace.clone(), there: revision })
            }
        }
    }

    async fn repair(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
        _damaged: Option<&Documents>,
    ) -> Result<(), PublishError> {
        self.publish(workspace, docs, revision).await
    }

    async fn unpublish(
        &self,
        workspace: &WorkspaceId,
        _up_to: Revision,
        _damaged: Option<&Documents>,
    ) -> Result<(), PublishError> {
        self.source.unpublish(workspace);
        Ok(())
    }

    async fn loaded_by(&self) -> Result<Option<String>, PublishError> {
        Ok(self.written.lock().loaded.clone())
    }

    /// It ends with the process, and is never lost before.
    async fn lost_ledger(&self, _: &WorkspaceId) -> Result<Option<LostLedger>, PublishError> {
        Ok(None)
    }

    async fn is_collected(&self, _: &WorkspaceId, _: &LostLedger) -> Result<bool, PublishError> {
        Ok(true)
    }

    async fn seed_ledger(
        &self,
        _: &WorkspaceId,
        _: &LostLedger,
        _: &[Spent],
    ) -> Result<Seeded, PublishError> {
        Ok(Seeded::Before)
    }

    async fn keys(&self) -> Result<PublishedKeys, PublishError> {
        Ok(self.written.lock().clone())
    }

    async fn put_key(
        &self,
        hash: &KeyHash,
        key: &KeyContext,
        _damaged: Option<&[u8]>,
    ) -> Result<bool, PublishError> {
        let record = serde_json::to_vec(key).map_err(|e| PublishError::Encode(e.to_string()))?;
        let before = self.written.lock().records.insert(*hash, record.clone());
        if before.as_ref() == Some(&record) {
            return Ok(false);
        }
        self.keys.insert(*hash, key.clone());
        self.source.announce(&Invalidation::key(*hash));
        Ok(true)
    }

    async fn revoke_key(&self, record: &KeyRecord) -> Result<bool, PublishError> {
        self.remove_key(&record.hash, &[]).await
    }

    async fn remove_key(&self, hash: &KeyHash, _found: &[u8]) -> Result<bool, PublishError> {
        let had = self.written.lock().records.remove(hash).is_some();
        if had {
            self.keys.remove(hash);
            self.source.announce(&Invalidation::key(*hash));
        }
        Ok(had)
    }

    async fn keys_loaded(&self, store: Option<&str>) -> Result<(), PublishError> {
        self.written.lock().loaded = store.map(str::to_owned);
        self.keys.mark_loaded();
        Ok(())
    }
}
