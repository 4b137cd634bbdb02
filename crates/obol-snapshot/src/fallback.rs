use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use obol_model::snapshot::{Documents, InvalidPublication};
use obol_model::{Causes, WorkspaceId, metric};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::{PublicationSource, RedisSource, SourceError, Stored};

/// The longest wait for control's answer, the wait for a turn included.
const ASK_WITHIN: Duration = Duration::from_secs(2);

/// Questions that are put to control at a time.
const QUESTIONS: usize = 8;

/// How long it is known that control has no such workspace, so that asking for it again does not load control.
const ABSENT_FOR: Duration = Duration::from_secs(5);

/// How long control is left alone about a workspace after a question that it did not answer.
const FAILED_FOR: Duration = Duration::from_secs(1);

/// The most answers that are remembered. Beyond it they are forgotten, which only costs asking again.
const REMEMBERED: usize = 10_000;

/// What control would publish (DESIGN §7.3, step 3).
#[async_trait]
pub trait Control: Send + Sync + 'static {
    /// The publication of a workspace; `None` only when control says that it has no such workspace. Cancel-safe: it
    /// only asks.
    ///
    /// # Errors
    /// When control could not be asked, or did not give an answer of this kind.
    async fn publication(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, SourceError>;
}

/// Publications in Redis, and control's where Redis has nothing at all of a workspace.
///
/// What control says is written only where there is still nothing, and then read back: a publication that came in
/// between wins, however late the answer is.
pub struct ControlFallback {
    store: RedisSource,
    control: Arc<dyn Control>,
    questions: Semaphore,
    answers: Mutex<HashMap<WorkspaceId, Remembered>>,
}

/// An answer without a publication.
struct Remembered {
    until: Instant,
    outcome: Result<(), SourceError>,
}

/// Why control's answer did not become a publication.
#[derive(Debug, thiserror::Error)]
enum FallbackError {
    #[error("control did not answer within {} s", ASK_WITHIN.as_secs())]
    Silent,
    #[error("what control answered is no publication of the workspace")]
    Invalid(#[source] InvalidPublication),
    #[error("the publication is gone again")]
    Vanished,
}

impl fmt::Debug for ControlFallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlFallback").field("store", &self.store).finish_non_exhaustive()
    }
}

impl ControlFallback {
    /// Reads `store`, and asks `control` about what is absent there.
    pub fn new(store: RedisSource, control: Arc<dyn Control>) -> Self {
        Self { store, control, questions: Semaphore::new(QUESTIONS), answers: Mutex::default() }
    }

    async fn fall_back(&self, workspace: &WorkspaceId) -> Result<Stored, SourceError> {
        if let Some(outcome) = self.remembered(workspace) {
            return outcome.map(|()| Stored::Absent);
        }
        let documents = match self.ask(workspace).await {
            Ok(Some(documents)) => documents,
            Ok(None) => {
                count("absent");
                self.remember(workspace, Ok(()), ABSENT_FOR);
                return Ok(Stored::Absent);
            }
            Err(why) => {
                count("failed");
                tracing::warn!(%workspace, error = %Causes(&why), "control could not be asked for a publication");
                self.remember(workspace, Err(why.clone()), FAILED_FOR);
                return Err(why);
            }
        };
        let created = self.store.create(workspace, &documents).await?;
        count(if created { "created" } else { "lost" });
        tracing::info!(%workspace, created, "publication asked of control");
        match self.store.read(workspace).await? {
            // Withdrawn within this moment. Only control says that a workspace does not exist, and it did not.
            Stored::Absent => Err(SourceError::new(FallbackError::Vanished)),
            winner => Ok(winner),
        }
    }

    async fn ask(&self, workspace: &WorkspaceId) -> Result<Option<Documents>, SourceError> {
        let asking = async {
            let _turn = self.questions.acquire().await.map_err(SourceError::new)?;
            self.control.publication(workspace).await
        };
        let answer =
            timeout(ASK_WITHIN, asking).await.map_err(|_| SourceError::new(FallbackError::Silent))??;
        if let Some(documents) = &answer {
            // Before it is written: what is in Redis is taken from it by every replica.
            documents.decode(workspace).map_err(|e| SourceError::new(FallbackError::Invalid(e)))?;
        }
        Ok(answer)
    }

    fn remembered(&self, workspace: &WorkspaceId) -> Option<Result<(), SourceError>> {
        let answers = self.answers.lock();
        answers.get(workspace).filter(|known| Instant::now() < known.until).map(|known| known.outcome.clone())
    }

    fn remember(&self, workspace: &WorkspaceId, outcome: Result<(), SourceError>, how_long: Duration) {
        let now = Instant::now();
        let mut answers = self.answers.lock();
        if answers.len() >= REMEMBERED {
            answers.retain(|_, known| now < known.until);
            if answers.len() >= REMEMBERED {
                answers.clear();
            }
        }
        answers.insert(workspace.clone(), Remembered { until: now + how_long, outcome });
    }

    fn forget(&self, workspace: &WorkspaceId) {
        self.answers.lock().remove(workspace);
    }
}

#[async_trait]
impl PublicationSource for ControlFallback {
    async fn read(&self, workspace: &WorkspaceId) -> Result<Stored, SourceError> {
        match self.store.read(workspace).await? {
            Stored::Absent => self.fall_back(workspace).await,
            found => {
                self.forget(workspace);
                Ok(found)
            }
        }
    }

    async fn list(&self, limit: usize) -> Result<Vec<WorkspaceId>, SourceError> {
        self.store.list(limit).await
    }
}

fn count(outcome: &'static str) {
    metrics::counter!(metric::SNAPSHOT_FALLBACKS, "outcome" => outcome).increment(1);
}
