//! Processes on a ledger of each kind.

use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use obol_meter::{
    Denied, EmbeddedLedger, Flusher, Ledger, Line, Meter, MeterOptions, Owners, RedisLedger, Start, Sweeper,
    Terms, UsageGuard, in_scope, meter,
};
use obol_model::{
    Budget, BudgetScope, Clock, KeyBudget, NanoUsd, Principal, ReplicaId, Secret, SystemClock, UsageEvent,
    Window, WorkspaceId,
};
use obol_redis::{Redis, RedisOptions};
use obol_testkit::redis::RedisServer;
use tokio_util::sync::CancellationToken;

use super::tool;

pub(crate) fn ws() -> WorkspaceId {
    "acme".parse().unwrap()
}

pub(crate) fn budget(scope: BudgetScope, window: Window, limit: u64) -> Budget {
    Budget { name: format!("{scope:?} {window:?}"), scope, window, limit: NanoUsd::new(limit) }
}

pub(crate) fn lines(budgets: &[Budget], own: &[KeyBudget], who: &str) -> Vec<Line> {
    in_scope(budgets, own, &Principal::Key(who.parse().unwrap()), Some(&"fast".parse().unwrap()))
}

/// For all of the workspace, for ever.
pub(crate) fn total(limit: u64) -> Vec<Line> {
    lines(&[budget(BudgetScope::Workspace, Window::Total, limit)], &[], "k1")
}

pub(crate) fn terms(lines: Vec<Line>, worst: u64) -> Terms {
    Terms { lines, worst: NanoUsd::new(worst), ..Terms::default() }
}

/// Nobody is ever dead, or everybody is.
#[derive(Debug)]
pub(crate) struct Everybody {
    pub(crate) is_gone: bool,
}

#[async_trait]
impl Owners for Everybody {
    async fn gone(&self, owners: &HashSet<ReplicaId>) -> Result<HashSet<ReplicaId>, String> {
        Ok(if self.is_gone { owners.clone() } else { HashSet::new() })
    }
}

/// One process: what it closes is closed when the test says so.
pub(crate) struct Process {
    pub(crate) meter: Meter,
    pub(crate) flusher: Option<Flusher>,
    pub(crate) ledger: Arc<dyn Ledger>,
}

impl Process {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self::living(ledger, MeterOptions::default())
    }

    pub(crate) fn living(ledger: Arc<dyn Ledger>, options: MeterOptions) -> Self {
        Self::at(ledger, options, Arc::new(SystemClock))
    }

    pub(crate) fn at(ledger: Arc<dyn Ledger>, options: MeterOptions, clock: Arc<dyn Clock>) -> Self {
        let (meter, flusher) = meter(ledger.clone(), clock, ReplicaId::generate(), options);
        Self { meter, flusher: Some(flusher), ledger }
    }

    pub(crate) async fn admit(&self, terms: Terms) -> Result<UsageGuard, Denied> {
        self.admit_as(tool(0), terms).await
    }

    pub(crate) async fn admit_as(&self, start: Start, terms: Terms) -> Result<UsageGuard, Denied> {
        self.meter.admit(start, terms).await.map(|(guard, _)| guard)
    }

    /// An orderly end: everything is closed.
    pub(crate) async fn end(&mut self) {
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        let flusher = self.flusher.take().unwrap();
        assert_eq!(flusher.run(shutdown, CancellationToken::new()).await.lost, 0);
    }

    pub(crate) async fn sweep(&self, is_gone: bool) -> usize {
        Sweeper::new(self.ledger.clone(), Arc::new(Everybody { is_gone })).sweep().await.unwrap()
    }

    /// Settled and reserved of each counter, which must be what the open reservations say.
    pub(crate) async fn audit(&self) -> Vec<(String, i64, i64)> {
        let audited = self.ledger.audit(&ws()).await.unwrap();
        for counter in &audited {
            assert_eq!(counter.reserved, counter.open, "{audited:?}");
        }
        audited.into_iter().map(|a| (a.counter, a.settled, a.reserved)).collect()
    }
}

/// A ledger of each kind.
pub(crate) struct Fixture {
    pub(crate) server: Option<RedisServer>,
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) events: Option<Arc<EmbeddedLedger>>,
}

impl Fixture {
    pub(crate) async fn redis() -> Self {
        Self::redis_with(|ledger| ledger).await
    }

    pub(crate) async fn redis_with(more: impl FnOnce(RedisLedger) -> RedisLedger) -> Self {
        let server = RedisServer::start().await;
        server.cli(&["HSET", "ledger:{acme}:meta", "epoch", "1"]).await;
        let redis = Redis::connect(RedisOptions::new(Secret::new(server.url()))).await.unwrap();
        Self { server: Some(server), ledger: Arc::new(more(RedisLedger::new(redis))), events: None }
    }

    pub(crate) fn embedded() -> Self {
        let ledger = Arc::new(EmbeddedLedger::new(Arc::new(SystemClock), 100_000));
        Self { server: None, ledger: ledger.clone(), events: Some(ledger) }
    }

    pub(crate) async fn both() -> [Self; 2] {
        [Self::redis().await, Self::embedded()]
    }

    pub(crate) fn process(&self) -> Process {
        Process::new(self.ledger.clone())
    }

    pub(crate) fn server(&self) -> &RedisServer {
        self.server.as_ref().unwrap()
    }

    pub(crate) async fn events(&self) -> Vec<UsageEvent> {
        if let Some(ledger) = &self.events {
            return ledger.events();
        }
        let entries: Vec<(String, Vec<(String, String)>)> =
            self.server().query(&["XRANGE", "usage:{acme}", "-", "+"]).await;
        let fields = entries.into_iter().flat_map(|(_, fields)| fields);
        fields.map(|(_, event)| serde_json::from_str(&event).unwrap()).collect()
    }
}
