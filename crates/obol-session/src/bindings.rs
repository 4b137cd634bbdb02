//! Whose an answer is that a provider keeps (DESIGN §11.1): providers keep them under the one account of the gateway,
//! where they do not tell one caller from another.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::{Clock, ProviderName, WorkspaceId};
use obol_redis::{Redis, RedisError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// How long a binding lasts: as long as the provider that keeps answers longest, OpenAI with its 30 days, and a day.
const LIFE: Duration = Duration::from_hours(31 * 24);
/// Ids of providers are much shorter.
const LONGEST_ID: usize = 256;
/// The version of a binding that this release writes, and the highest that it reads.
const SCHEMA: u32 = 1;

/// Whose a stored answer is, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    schema_version: u32,
    /// [`obol_model::Principal`] in its text form: nobody else may use it.
    pub principal: String,
    /// Who keeps it.
    pub provider: ProviderName,
    /// The provider's own name of the model that made it.
    pub upstream_model: String,
    /// The most tokens that going on from it adds to a prompt.
    pub tokens: u64,
}

impl Binding {
    /// An answer of `principal` that `provider` keeps.
    pub fn new(principal: String, provider: ProviderName, upstream_model: String, tokens: u64) -> Self {
        Self { schema_version: SCHEMA, principal, provider, upstream_model, tokens }
    }
}

/// Why a binding cannot be read or written. It says nothing about the answer that it is of.
#[derive(Debug, thiserror::Error)]
pub enum BindingError {
    /// The store could not be asked.
    #[error("the store of bindings cannot be asked")]
    Unavailable(#[source] RedisError),
    /// What is stored is not one that this release can read.
    #[error("a binding cannot be read: {0}")]
    Corrupt(String),
}

/// Keeps bindings, each for a month.
#[async_trait]
pub trait Bindings: fmt::Debug + Send + Sync {
    /// Binds the answer with that id.
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn bind(&self, workspace: &WorkspaceId, id: &str, binding: &Binding) -> Result<(), BindingError>;

    /// Whose it is; `None` when nobody is known.
    ///
    /// # Errors
    /// When the store could not be asked, or holds what cannot be read.
    async fn find(&self, workspace: &WorkspaceId, id: &str) -> Result<Option<Binding>, BindingError>;

    /// Forgets it.
    ///
    /// # Errors
    /// When the store could not be asked.
    async fn forget(&self, workspace: &WorkspaceId, id: &str) -> Result<(), BindingError>;
}

fn read(text: &[u8]) -> Result<Binding, BindingError> {
    let binding: Binding = serde_json::from_slice(text).map_err(|e| BindingError::Corrupt(e.to_string()))?;
    if binding.schema_version > SCHEMA {
        let reason = format!("schema version {}, this release reads up to {SCHEMA}", binding.schema_version);
        return Err(BindingError::Corrupt(reason));
    }
    Ok(binding)
}

fn write(binding: &Binding) -> Result<Vec<u8>, BindingError> {
    serde_json::to_vec(binding).map_err(|e| BindingError::Corrupt(e.to_string()))
}

/// Whether it may be an id of a stored answer at all; what is not has no binding.
fn is_id(id: &str) -> bool {
    (1..=LONGEST_ID).contains(&id.len())
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
}

/// Bindings that all replicas of one Redis share.
#[derive(Debug)]
pub struct RedisBindings(Redis);

impl RedisBindings {
    /// A store in this Redis.
    pub fn new(redis: Redis) -> Self {
        Self(redis)
    }
}

fn key(workspace: &WorkspaceId, id: &str) -> String {
    format!("bind:{{{workspace}}}:response:{id}")
}

#[async_trait]
impl Bindings for RedisBindings {
    async fn bind(&self, workspace: &WorkspaceId, id: &str, binding: &Binding) -> Result<(), BindingError> {
        if !is_id(id) {
            return Ok(());
        }
        let mut cmd = redis::cmd("SET");
        cmd.arg(key(workspace, id)).arg(write(binding)?).arg("EX").arg(LIFE.as_secs());
        self.0.query::<()>(&cmd).await.map_err(BindingError::Unavailable)
    }

    async fn find(&self, workspace: &WorkspaceId, id: &str) -> Result<Option<Binding>, BindingError> {
        if !is_id(id) {
            return Ok(None);
        }
        let mut cmd = redis::cmd("GET");
        cmd.arg(key(workspace, id));
        let text: Option<Vec<u8>> = self.0.query(&cmd).await.map_err(BindingError::Unavailable)?;
        text.map(|text| read(&text)).transpose()
    }

    async fn forget(&self, workspace: &WorkspaceId, id: &str) -> Result<(), BindingError> {
        if !is_id(id) {
            return Ok(());
        }
        let mut cmd = redis::cmd("DEL");
        cmd.arg(key(workspace, id));
        self.0.query::<()>(&cmd).await.map_err(BindingError::Unavailable)
    }
}

/// Bindings of a single process, which end with it.
pub struct EmbeddedBindings {
    clock: Arc<dyn Clock>,
    bindings: Mutex<HashMap<(WorkspaceId, String), Kept>>,
}

/// A binding as it is written, and the end of its life.
type Kept = (Timestamp, Vec<u8>);

/// One process keeps no more; the oldest go first.
const MOST_EMBEDDED: usize = 10_000;

impl EmbeddedBindings {
    /// An empty store.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, bindings: Mutex::default() }
    }
}

impl fmt::Debug for EmbeddedBindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedBindings").finish_non_exhaustive()
    }
}

#[async_trait]
impl Bindings for EmbeddedBindings {
    async fn bind(&self, workspace: &WorkspaceId, id: &str, binding: &Binding) -> Result<(), BindingError> {
        if !is_id(id) {
            return Ok(());
        }
        let now = self.clock.now();
        let text = write(binding)?;
        let mut all = self.bindings.lock();
        if all.len() >= MOST_EMBEDDED {
            let mut ends: Vec<Timestamp> = all.values().map(|(ends, _)| *ends).collect();
            ends.sort_unstable();
            let middle = ends.get(ends.len() / 2).copied().unwrap_or(now);
            all.retain(|_, (ends, _)| *ends > middle);
        }
        all.insert((workspace.clone(), id.to_owned()), (now.saturating_add(LIFE).unwrap_or(now), text));
        Ok(())
    }

    async fn find(&self, workspace: &WorkspaceId, id: &str) -> Result<Option<Binding>, BindingError> {
        let now = self.clock.now();
        let found = self.bindings.lock().get(&(workspace.clone(), id.to_owned())).cloned();
        found.filter(|(ends, _)| now < *ends).map(|(_, text)| read(&text)).transpose()
    }

    async fn forget(&self, workspace: &WorkspaceId, id: &str) -> Result<(), BindingError> {
        self.bindings.lock().remove(&(workspace.clone(), id.to_owned()));
        Ok(())
    }
}
