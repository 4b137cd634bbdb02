use obol_model::snapshot::Documents;
use obol_model::{KeyRing, Revision, WorkspaceId};

use crate::compile::Compiled;
use crate::content::same_content;
use crate::{PublishError, Publisher};

/// How often a revision that somebody else took in the meantime is raised before the next round tries again.
const ATTEMPTS: usize = 3;

/// What a workspace should be, and what of it was published.
#[derive(Debug)]
pub(crate) struct Desired {
    compiled: Compiled,
    published: Option<(Documents, Revision)>,
    /// Every number up to this one was used.
    floor: Option<Revision>,
}

/// What bringing the store up to date meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Unchanged,
    Published(Revision),
    /// The store had lost or damaged it.
    Healed(Revision),
    /// Somebody else published something newer, which is left alone.
    Foreign(Revision),
}

impl Desired {
    pub(crate) fn new(compiled: Compiled, floor: Option<Revision>) -> Self {
        Self { compiled, published: None, floor }
    }

    /// The revision that is published, or the highest that was.
    pub(crate) fn revision(&self) -> Option<Revision> {
        self.published.as_ref().map(|(_, revision)| *revision).max(self.floor)
    }

    pub(crate) fn is_published(&self) -> bool {
        self.published.is_some()
    }

    /// Makes the store say what it should: publishes what is new, repairs what is missing, older or damaged
    /// (DESIGN §7.6), leaves alone what is right. Doing it again does no harm, so it may be abandoned at any point.
    pub(crate) async fn settle(
        &mut self,
        publisher: &dyn Publisher,
        workspace: &WorkspaceId,
        ring: &KeyRing,
    ) -> Result<Outcome, PublishError> {
        let stored = publisher.read(workspace).await?;
        let decoded = stored.as_ref().map(|docs| docs.decode(workspace));
        let there = match &decoded {
            None => None,
            Some(Ok((snapshot, _))) => Some(snapshot.revision),
            Some(Err(why)) => {
                tracing::warn!(workspace = %workspace, reason = %why, "publication in the store is damaged");
                publisher.current(workspace).await?
            }
        };
        let coherent = stored.filter(|_| matches!(decoded, Some(Ok(_))));
        if let Some((docs, revision)) = &self.published {
            let lost =
                there.is_none_or(|there| there < *revision) || coherent.is_none() && there == Some(*revision);
            if lost {
                publisher.repair(workspace, docs, *revision).await?;
                return Ok(Outcome::Healed(*revision));
            }
            if coherent.as_ref() == Some(docs) {
                return Ok(Outcome::Unchanged);
            }
        }
        if let (Some(coherent), Some(there)) = (coherent, there) {
            let known = self.published.as_ref().map(|(_, revision)| *revision);
            let candidate = match &self.published {
                Some((docs, _)) => docs.clone(),
                None => self.compiled.encode(there).map_err(PublishError::Encode)?,
            };
            if there >= self.floor.unwrap_or(there) && same_content(&coherent, &candidate, workspace, ring) {
                self.published = Some((coherent, there));
                return Ok(Outcome::Unchanged);
            }
            if known.is_some_and(|known| there > known) {
                return Ok(Outcome::Foreign(there));
            }
        }
        self.publish_next(publisher, workspace, there).await
    }

    async fn publish_next(
        &mut self,
        publisher: &dyn Publisher,
        workspace: &WorkspaceId,
        there: Option<Revision>,
    ) -> Result<Outcome, PublishError> {
        self.floor = self.revision().max(there);
        let mut attempt = 1;
        loop {
            let highest = self.floor.unwrap_or(Revision { epoch: 1, number: 0 });
            let revision = Revision { epoch: highest.epoch.max(1), number: highest.number.saturating_add(1) };
            let docs = self.compiled.encode(revision).map_err(PublishError::Encode)?;
            match publisher.publish(workspace, &docs, revision).await {
                Ok(()) => {
                    self.published = Some((docs, revision));
                    self.floor = Some(revision);
                    return Ok(Outcome::Published(revision));
                }
                Err(PublishError::NotNewer { there, .. }) if attempt < ATTEMPTS => {
                    attempt += 1;
                    self.floor = self.floor.max(Some(there));
                }
                Err(e) => return Err(e),
            }
        }
    }
}
