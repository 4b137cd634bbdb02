//! A source whose answers and delays a test decides, and a compiler that counts.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    missing_debug_implementations,
    reason = "shared by test binaries"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use obol_model::snapshot::{
    Documents, PolicyFile, PolicySnapshot, SCHEMA, SessionBinding, WorkspaceSnapshot,
};
use obol_model::{Limits, Revision, WorkspaceId};
use obol_snapshot::{Compile, PublicationSource, Publications, SourceError, Stored};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

pub fn ws(id: &str) -> WorkspaceId {
    id.parse().unwrap()
}

pub fn revision(number: u64) -> Revision {
    Revision { epoch: 1, number }
}

/// Documents of a workspace; the environment is what tells one content from another.
pub fn documents(id: &str, number: u64, environment: &str) -> Documents {
    let workspace = WorkspaceSnapshot {
        schema_version: SCHEMA,
        workspace_id: ws(id),
        revision: revision(number),
        environment: environment.into(),
        frozen: false,
        expose_revision: false,
        session_binding: SessionBinding::default(),
        connections: BTreeMap::new(),
        providers: BTreeMap::new(),
        models: BTreeMap::new(),
        budgets: Vec::new(),
        limits: Limits::default(),
    };
    let policy = PolicySnapshot {
        schema_version: SCHEMA,
        workspace_id: ws(id),
        revision: revision(number),
        files: vec![PolicyFile { name: "all.cedar".into(), text: format!("// {environment}") }],
    };
    Documents::encode(&workspace, &policy).unwrap()
}

/// Gives back the text of the policies; refuses the environment `broken`.
#[derive(Debug, Clone, Default)]
pub struct Counting(pub Arc<AtomicUsize>);

impl Compile for Counting {
    type Output = String;

    fn compile(&self, workspace: &WorkspaceSnapshot, policy: &PolicySnapshot) -> Result<String, String> {
        self.0.fetch_add(1, Ordering::SeqCst);
        if workspace.environment == "broken" {
            Err("no such tool".into())
        } else {
            Ok(policy.files[0].text.clone())
        }
    }
}

/// Answers with what it was told to, for every workspace, when it is let.
#[derive(Debug)]
pub struct Scripted {
    pub answer: Mutex<Option<Stored>>,
    pub reads: AtomicUsize,
    pub gate: Semaphore,
}

impl Scripted {
    /// With every read let through.
    pub fn answering(stored: Stored) -> Arc<Self> {
        Arc::new(Self {
            answer: Mutex::new(Some(stored)),
            reads: AtomicUsize::new(0),
            gate: Semaphore::new(1_000_000),
        })
    }

    /// With every read held until a permit is added.
    pub fn held(stored: Stored) -> Arc<Self> {
        let source = Self::answering(stored);
        source.gate.forget_permits(1_000_000);
        source
    }

    /// `None`: it cannot be asked.
    pub fn now(&self, stored: impl Into<Option<Stored>>) {
        *self.answer.lock() = stored.into();
    }

    pub fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl PublicationSource for Scripted {
    async fn read(&self, _: &WorkspaceId) -> Result<Stored, SourceError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let answer = self.answer.lock().clone();
        self.gate.acquire().await.unwrap().forget();
        answer.ok_or_else(|| SourceError::new(std::io::Error::other("the lights are out")))
    }

    async fn list(&self, _: usize) -> Result<Vec<WorkspaceId>, SourceError> {
        Ok(vec![])
    }
}

pub fn serving(source: &Arc<Scripted>) -> (Arc<Publications<Counting>>, Counting) {
    let compile = Counting::default();
    (Publications::new(Arc::clone(source) as Arc<dyn PublicationSource>, compile.clone()), compile)
}
