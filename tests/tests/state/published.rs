//! Publications from a test's hand: past control, through the script by which control publishes.

use std::sync::LazyLock;

use obol_control::{Publisher as _, RedisPublisher};
use obol_model::snapshot::{Documents, PolicySnapshot, PublicationKeys, WorkspaceSnapshot};
use obol_model::{Revision, Secret, WorkspaceId};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::eventually;
use obol_testkit::redis::RedisServer;
use obol_tests::SOON;
use obol_tests::world::World;
use serde_json::json;
use tokio::time::Instant;

/// A client of Redis for which the load of a test is no outage.
pub(crate) async fn redis(server: &RedisServer) -> Redis {
    let options = RedisOptions { command_timeout: SOON, ..RedisOptions::new(Secret::new(server.url())) };
    Redis::connect(options).await.unwrap()
}

/// A publication without anything in it.
static NOTHING: LazyLock<(WorkspaceSnapshot, PolicySnapshot)> = LazyLock::new(|| {
    let head = json!({
        "schema_version": 1, "workspace_id": "acme", "revision": { "epoch": 1, "number": 1 },
        "environment": "", "files": [{ "name": "all.cedar", "text": "" }],
    });
    (serde_json::from_value(head.clone()).unwrap(), serde_json::from_value(head).unwrap())
});

/// A small publication. Both documents carry the text, so that two publications that were mixed can be told.
pub(crate) fn documents(id: &WorkspaceId, number: u64, text: &str) -> Documents {
    let (mut workspace, mut policy) = NOTHING.clone();
    let revision = Revision { epoch: 1, number };
    (workspace.workspace_id, policy.workspace_id) = (id.clone(), id.clone());
    (workspace.revision, policy.revision) = (revision, revision);
    (workspace.environment, policy.files[0].text) = (text.to_owned(), text.to_owned());
    Documents::encode(&workspace, &policy).unwrap()
}

/// Publishes variations of what control published of `acme`, in place of control.
pub(crate) struct Publishing {
    publisher: RedisPublisher,
    workspace: WorkspaceSnapshot,
    policy: PolicySnapshot,
}

impl Publishing {
    /// Stops control, which would otherwise put its own publication back.
    pub(crate) async fn take_over(world: &World, server: &RedisServer) -> Self {
        world.cluster.stop_control().await;
        let publisher = RedisPublisher::new(redis(server).await);
        let there = publisher.read(&"acme".parse().unwrap()).await.unwrap().unwrap();
        let (workspace, policy) = there.decode(&"acme".parse().unwrap()).unwrap();
        Self { publisher, workspace, policy }
    }

    /// The number of the last revision.
    pub(crate) fn number(&self) -> u64 {
        self.workspace.revision.number
    }

    /// The last publication, changed as the test wants and with the next revision; not published yet.
    pub(crate) fn next(
        &mut self,
        change: impl FnOnce(&mut WorkspaceSnapshot, &mut PolicySnapshot),
    ) -> Documents {
        let revision = Revision { epoch: 1, number: self.number() + 1 };
        (self.workspace.revision, self.policy.revision) = (revision, revision);
        change(&mut self.workspace, &mut self.policy);
        Documents::encode(&self.workspace, &self.policy).unwrap()
    }

    /// Publishes what [`Publishing::next`] gave last, and says when: Redis may just have come back.
    pub(crate) async fn publish(&self, documents: &Documents) -> Instant {
        let revision = self.workspace.revision;
        eventually(SOON, || async {
            let now = Instant::now();
            self.publisher.publish(&self.workspace.workspace_id, documents, revision).await.map(|()| now)
        })
        .await
    }
}

/// Puts documents where a publication stands, whatever is there, and says nothing.
pub(crate) async fn plant(server: &RedisServer, workspace: &WorkspaceId, documents: &Documents) {
    let keys = PublicationKeys::of(workspace);
    ::redis::cmd("MSET")
        .arg(&[(&keys.workspace, &documents.workspace)])
        .arg(&[(&keys.policy, &documents.policy)])
        .arg(&[(&keys.fingerprint, &documents.fingerprint)])
        .exec_async(&mut server.connection().await)
        .await
        .unwrap();
}
