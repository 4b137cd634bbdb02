//! `obol dev`: gateway and control in one process, all state in memory.

mod welcome;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use obol_auth::EmbeddedKeys;
use obol_control::{Control, ControlOptions, PublishError, Publisher};
use obol_drain::Class;
use obol_edge::RedisProbe;
use obol_meter::EmbeddedSink;
use obol_model::snapshot::Documents;
use obol_model::{
    Clock, Invalidation, KeyContext, KeyHash, KeyRing, Revision, SystemClock, VirtualKey, WorkspaceId,
};
use obol_session::EmbeddedSessions;
use obol_snapshot::{EmbeddedSource, PublicationSource as _, Stored};

use crate::compose::{Replica, Stores};
use crate::config::{Dev, Environment};
use crate::failure::Failure;

/// Usage events that are kept for looking at; older ones are forgotten.
const USAGE_EVENTS: usize = 10_000;

/// Serves one workspace file until a signal comes, drains, and gives the exit code.
///
/// # Errors
/// When the file is not valid or the replica cannot start.
pub(crate) async fn dev(config: Dev, file: PathBuf, env: Environment) -> Result<u8, Failure> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let ring = Arc::new(KeyRing::ephemeral().map_err(Failure::runtime)?);
    let embedded = Embedded { source: Arc::new(EmbeddedSource::new()), keys: Arc::new(EmbeddedKeys::new()) };
    let secrets = env.clone();
    let options = ControlOptions {
        source: file.clone(),
        state_dir: None,
        key_ring: ring.clone(),
        env: Arc::new(move |name| secrets.secret(name).map(|s| s.expose().clone())),
    };
    let control = Control::new(options, Arc::new(embedded.clone()), &clock);
    let report = control.sync_once().await;
    let Some((workspace, _)) = report.published.first() else {
        let faults: Vec<String> =
            report.refused.iter().map(ToString::to_string).chain(report.failed).collect();
        return Err(Failure::runtime(format!("{} is not valid\n{}", file.display(), faults.join("\n"))));
    };
    let key = embedded.new_key(workspace)?;
    let probe: RedisProbe = Arc::new(|| Box::pin(async { true }));
    let stores = Stores {
        sessions: Arc::new(EmbeddedSessions::new(clock.clone())),
        keys: embedded.keys.clone(),
        publications: embedded.source.clone(),
        feed: embedded.source.clone(),
        usage: Arc::new(EmbeddedSink::new(USAGE_EVENTS)),
        probe,
    };
    tracing::warn!("all state is in memory and ends with this process");
    let replica = Replica::start(config.gateway, ring, stores, env.into_vars()).await?;
    let (tasks, background) = replica.background();
    tasks.spawn(Class::Background, "control", control.run(background.clone()));
    welcome::print(replica.public, &key, &file).await?;
    Ok(replica.run().await)
}

/// The stores of the gateway as control sees them.
#[derive(Clone)]
struct Embedded {
    source: Arc<EmbeddedSource>,
    keys: Arc<EmbeddedKeys>,
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Embedded")
    }
}

impl Embedded {
    fn new_key(&self, workspace: &WorkspaceId) -> Result<VirtualKey, Failure> {
        let key = VirtualKey::generate().map_err(Failure::runtime)?;
        let context = KeyContext {
            schema_version: KeyContext::SCHEMA,
            key_id: "dev".parse().map_err(Failure::runtime)?,
            workspace_id: workspace.clone(),
            name: "dev".to_owned(),
            tags: Vec::new(),
            disabled: false,
            expires_at: None,
            revision: 1,
        };
        self.keys.insert(key.hash(), context);
        self.keys.mark_loaded();
        Ok(key)
    }
}

#[async_trait]
impl Publisher for Embedded {
    async fn current(&self, workspace: &WorkspaceId) -> Result<Option<Revision>, PublishError> {
        let documents = self.read(workspace).await?;
        Ok(documents.and_then(|d| d.decode(workspace).ok()).map(|(snapshot, _)| snapshot.revision))
    }

    async fn read(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, PublishError> {
        match self.source.read(workspace).await {
            Ok(Stored::Complete(documents)) => Ok(Some(documents)),
            // Memory is never torn, and can always be asked.
            Ok(Stored::Absent | Stored::Partial) | Err(_) => Ok(None),
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
                let there = self.current(workspace).await?.unwrap_or(revision);
                Err(PublishError::NotNewer { workspace: workspace.clone(), there })
            }
        }
    }

    async fn repair(
        &self,
        workspace: &WorkspaceId,
        docs: &Documents,
        revision: Revision,
    ) -> Result<(), PublishError> {
        self.publish(workspace, docs, revision).await
    }

    async fn unpublish(&self, workspace: &WorkspaceId) -> Result<(), PublishError> {
        self.source.unpublish(workspace);
        Ok(())
    }

    async fn put_key(&self, hash: &KeyHash, key: &KeyContext) -> Result<bool, PublishError> {
        self.keys.insert(*hash, key.clone());
        self.source.announce(&Invalidation::Key { hash: *hash, delete_sessions: false });
        Ok(true)
    }

    async fn delete_key(&self, hash: &KeyHash, delete_sessions: bool) -> Result<bool, PublishError> {
        let had = self.keys.remove(hash).is_some();
        self.source.announce(&Invalidation::Key { hash: *hash, delete_sessions });
        Ok(had)
    }

    async fn keys_loaded(&self) -> Result<(), PublishError> {
        self.keys.mark_loaded();
        Ok(())
    }
}
