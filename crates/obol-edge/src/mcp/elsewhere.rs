//! What other replicas are told, and what they tell (DESIGN §5): the end of sessions, and lists that changed.

use std::time::Duration;

use obol_drain::Class;
use obol_mcp::catalogue::Change;
use obol_mcp::pool::ListKind;
use obol_model::{ConnectionName, SessionId, WorkspaceId};
use obol_peer::Message;
use tokio::sync::oneshot;

use super::Mcp;
use crate::peer;

/// Streams and workers of a deleted session end everywhere within this time; a replica that cannot be told finds out at
/// its next keep-alive tick (DESIGN §6.3).
const END_WITHIN: Duration = Duration::from_secs(1);
/// Longest time to tell that a list changed; who cannot be told compares lists by itself.
const TELL_WITHIN: Duration = Duration::from_secs(2);

impl Mcp {
    /// Ends what other replicas hold of a session that is gone. Goes on when the caller leaves.
    pub(super) async fn end_session_elsewhere(&self, workspace: &WorkspaceId, id: SessionId) {
        let Ok(message) = peer::session_ended(workspace, id) else { return };
        let told = self.tell(message, END_WITHIN);
        // The task that tells drops its end when it is done, or when the drain cuts it.
        drop(told.await);
    }

    /// Tells the other replicas that a list is another one now. Nobody waits for it.
    pub(super) fn list_changed_here(&self, change: &Change) {
        if let Ok(message) = peer::list_changed(change) {
            drop(self.tell(message, TELL_WITHIN));
        }
    }

    /// Another replica put a newer list into the store. Returns whether it is one that is known here.
    pub(crate) fn list_changed_elsewhere(
        &self,
        workspace: &WorkspaceId,
        connection: &ConnectionName,
        kind: ListKind,
    ) -> bool {
        self.catalogue.doubt(workspace, connection, kind)
    }

    fn tell(&self, message: Message, within: Duration) -> oneshot::Receiver<()> {
        let (done, told) = oneshot::channel();
        let peers = self.peers.clone();
        self.tasks().spawn(Class::Request, "tell peers", async move {
            for (peer, outcome) in peers.broadcast(&message, within).await {
                if let Err(e) = outcome {
                    tracing::warn!(%peer, kind = message.kind(), error = %e, "a replica was not told");
                }
            }
            drop(done);
        });
        told
    }
}
