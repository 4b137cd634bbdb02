//! Both stores behind one face, so that one suite of tests states the contract of both.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "test support: what is broken should fail where it broke")]

use std::sync::Arc;
use std::time::Duration;

use obol_model::snapshot::SessionBinding;
use obol_model::{Clock, ManualClock, Principal, SystemClock, WorkspaceId};
use obol_redis::{Redis, RedisOptions};
use obol_session::{
    Caller, EmbeddedSessions, NewSession, Owner, RedisSessions, SessionOptions, SessionStore, Sessions,
};
use obol_testkit::redis::RedisServer;

pub(crate) const TTL: Duration = Duration::from_mins(10);
/// Most of a life, and more than half of it.
pub(crate) const MOST: Duration = Duration::from_secs(500);
pub(crate) const LIMIT: usize = 5;

pub(crate) struct Fixture {
    pub(crate) sessions: Sessions,
    pub(crate) store: Arc<dyn SessionStore>,
    pub(crate) clock: Arc<dyn Clock>,
    time: Time,
}

enum Time {
    /// Redis keeps its own time; what has expired there is gone.
    Redis(RedisServer),
    Embedded(Arc<ManualClock>),
}

impl Fixture {
    pub(crate) async fn redis() -> Self {
        let server = RedisServer::start().await;
        let store = Arc::new(RedisSessions::new(connect(&server).await));
        Self::new(store, Arc::new(SystemClock), Time::Redis(server))
    }

    pub(crate) fn embedded() -> Self {
        let clock = Arc::new(ManualClock::new(SystemClock.now()));
        let store = Arc::new(EmbeddedSessions::new(clock.clone()));
        Self::new(store, clock.clone(), Time::Embedded(clock))
    }

    fn new(store: Arc<dyn SessionStore>, clock: Arc<dyn Clock>, time: Time) -> Self {
        let options = SessionOptions { ttl: TTL, unused_ttl: None, max_per_principal: LIMIT };
        Self { sessions: Sessions::new(store.clone(), clock.clone(), options), store, clock, time }
    }

    /// The same store with other bounds.
    pub(crate) fn with(&self, options: SessionOptions) -> Sessions {
        Sessions::new(self.store.clone(), self.clock.clone(), options)
    }

    pub(crate) fn server(&self) -> Option<&RedisServer> {
        match &self.time {
            Time::Redis(server) => Some(server),
            Time::Embedded(_) => None,
        }
    }

    /// Lets time pass. On Redis by moving everything that it stores of time into the past, which leaves a test as
    /// long as it really runs; so tests keep away from the exact end of a life.
    pub(crate) async fn pass(&self, by: Duration) {
        let server = match &self.time {
            Time::Embedded(clock) => return clock.advance(by),
            Time::Redis(server) => server,
        };
        let by = i64::try_from(by.as_millis()).unwrap();
        for key in server.keys("*").await {
            if key.starts_with("sess:") {
                server.cli(&["HINCRBY", &key, "place", &(-by).to_string()]).await;
            } else {
                for id in server.query::<Vec<String>>(&["ZRANGE", &key, "0", "-1"]).await {
                    server.cli(&["ZINCRBY", &key, &(-by).to_string(), &id]).await;
                }
            }
            let left: i64 = server.query(&["PTTL", &key]).await;
            assert!(left > 0, "everything expires");
            server.cli(&["PEXPIRE", &key, &(left - by).to_string()]).await;
        }
    }
}

pub(crate) async fn connect(server: &RedisServer) -> Redis {
    Redis::connect(RedisOptions::new(server.url().into())).await.unwrap()
}

/// Somebody who calls.
pub(crate) struct Who {
    pub(crate) workspace_id: WorkspaceId,
    pub(crate) principal: Principal,
    pub(crate) binding: SessionBinding,
}

impl Who {
    pub(crate) fn key(workspace: &str, key: &str) -> Self {
        let principal = Principal::Key(key.parse().unwrap());
        Self { workspace_id: workspace.parse().unwrap(), principal, binding: SessionBinding::Principal }
    }

    pub(crate) fn user(workspace: &str, issuer: &str, subject: &str) -> Self {
        let principal = Principal::User { issuer: issuer.into(), subject: subject.into() };
        Self { workspace_id: workspace.parse().unwrap(), principal, binding: SessionBinding::Principal }
    }

    pub(crate) fn sharing(self) -> Self {
        Self { binding: SessionBinding::Workspace, ..self }
    }

    pub(crate) fn caller(&self) -> Caller<'_> {
        Caller { workspace_id: &self.workspace_id, principal: &self.principal, binding: self.binding }
    }

    pub(crate) fn owner(&self) -> Owner<'_> {
        Owner { workspace_id: &self.workspace_id, principal: &self.principal }
    }

    pub(crate) fn new_session(&self) -> NewSession {
        NewSession {
            workspace_id: self.workspace_id.clone(),
            key_id: Some("k1".parse().unwrap()),
            principal: self.principal.clone(),
            protocol_version: "2025-11-25".into(),
            client_info: None,
            client_capabilities: None,
        }
    }
}
