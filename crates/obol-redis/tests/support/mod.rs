//! What the tests of outages share.
#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    reason = "test support: what is broken should fail where it broke, and each binary uses some of it"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use obol_model::Kind;
use obol_redis::{Redis, RedisOptions};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub const SECOND: Duration = Duration::from_secs(1);

/// How long it may take until a Redis that is back is in use: the promise is one second, the rest is for a busy machine.
pub const BACK: Duration = Duration::from_secs(4);

/// The deadline of a patient client.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A command's deadline and what it takes to notice that it passed.
pub const LATEST: Duration = Duration::from_millis(800 + 300);

pub async fn client(url: String) -> Redis {
    Redis::connect(RedisOptions::new(url.into())).await.unwrap()
}

/// For tests in which nothing is ever silent, so that a deadline that is missed is the machine's fault.
pub fn patient(url: String) -> RedisOptions {
    RedisOptions { command_timeout: PATIENCE, ..RedisOptions::new(url.into()) }
}

/// A client whose connections are kept by a task, as those of a replica are.
pub struct Kept {
    pub redis: Redis,
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl Kept {
    pub async fn connect(url: String) -> Self {
        Self::with(RedisOptions::new(url.into())).await
    }

    pub async fn with(options: RedisOptions) -> Self {
        let (redis, stop) = (Redis::connect(options).await.unwrap(), CancellationToken::new());
        let (kept, token) = (redis.clone(), stop.clone());
        #[expect(clippy::disallowed_methods, reason = "the test is the composer that owns the task")]
        let task = tokio::spawn(async move { kept.keep(token).await });
        // It is at work before anything is tested.
        tokio::task::yield_now().await;
        Self { redis, stop, task: Some(task) }
    }

    /// Ends the keeper and waits for it.
    pub async fn end(mut self) {
        self.stop.cancel();
        self.task.take().unwrap().await.unwrap();
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Requests that never stop coming, and how each one went.
pub struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Vec<Outcome>>>,
    /// The longest that a short sleep was late: what the machine, not the client, adds to a deadline.
    lag: JoinHandle<Duration>,
}

/// How one request went.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub began: Instant,
    pub took: Duration,
    pub failed: Option<String>,
}

impl Load {
    /// So many tasks that ask one after the other, with a short pause.
    pub fn start<F, Asked>(clients: usize, ask: F) -> Self
    where
        F: Fn() -> Asked + Clone + Send + 'static,
        Asked: Future<Output = Result<(), obol_redis::RedisError>> + Send,
    {
        let stop = Arc::new(AtomicBool::new(false));
        let client = |_| {
            let (ask, stop) = (ask.clone(), stop.clone());
            let asking = async move {
                let mut outcomes = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    let failed = ask().await.err();
                    if let Some(why) = &failed {
                        assert_eq!(why.kind(), Kind::Unavailable, "{why}");
                    }
                    outcomes.push(Outcome {
                        began,
                        took: began.elapsed(),
                        failed: failed.map(|why| why.to_string()),
                    });
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                outcomes
            };
            #[expect(clippy::disallowed_methods, reason = "the test is the composer that owns the task")]
            tokio::spawn(asking)
        };
        let watched = stop.clone();
        let lag = async move {
            let mut longest = Duration::ZERO;
            while !watched.load(Ordering::Relaxed) {
                let began = Instant::now();
                tokio::time::sleep(Duration::from_millis(5)).await;
                longest = longest.max(began.elapsed());
            }
            longest
        };
        #[expect(clippy::disallowed_methods, reason = "the test is the composer that owns the task")]
        let lag = tokio::spawn(lag);
        Self { clients: (0..clients).map(client).collect(), stop, lag }
    }

    /// Ends it. No request took longer than its deadline, which is this one.
    pub async fn end(self, deadline: Duration) -> Vec<Outcome> {
        self.stop.store(true, Ordering::Relaxed);
        let mut outcomes = Vec::new();
        for client in self.clients {
            outcomes.extend(client.await.unwrap());
        }
        let slowest = outcomes.iter().max_by_key(|outcome| outcome.took).unwrap();
        let lag = self.lag.await.unwrap();
        assert!(slowest.took < deadline + 2 * lag, "{slowest:?} with a machine that was late by {lag:?}");
        outcomes
    }
}

/// How many requests that began in this time failed.
pub fn failures(outcomes: &[Outcome], from: Instant, to: Instant) -> Vec<&Outcome> {
    outcomes
        .iter()
        .filter(|outcome| outcome.failed.is_some() && outcome.began >= from && outcome.began < to)
        .collect()
}
