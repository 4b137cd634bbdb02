//! Putting back what a lost ledger knew (DESIGN §12.6).

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use obol_model::{ModelName, RequestId, SignedNanoUsd, Window, WorkspaceId};
use obol_redis::{Redis, Script};

use super::{Keys, MOST_COUNTERS, number, unavailable};
use crate::ledger::LedgerError;
use crate::windows::Windows;

/// For how long a look is good: longer than whoever collects usage is away.
const LOOK: Duration = Duration::from_hours(24);

/// Opens ledgers: new ones, and lost ones with what was spent before.
#[derive(Debug)]
pub struct LedgerSeeds {
    redis: Redis,
    look: Script,
    seed: Script,
}

/// A ledger without its marker, new or lost, as it was at one moment.
#[derive(Debug, Clone)]
pub struct LostLedger {
    token: String,
    up_to: String,
    at: Timestamp,
    /// What late closings had booked, by counter.
    booked: HashMap<String, i64>,
}

impl LostLedger {
    /// The id of the last event that was written: the sums that it is seeded from have to know of it.
    pub fn up_to(&self) -> &str {
        &self.up_to
    }

    /// When the current window began; `None` for one that always was.
    pub fn since(&self, window: Window) -> Option<Timestamp> {
        let [_, current, ..] = Windows::around(window, self.at).bounds?;
        Timestamp::from_millisecond(current).ok()
    }
}

/// Whose spending it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whose {
    /// Everybody's.
    Workspace,
    /// A principal's, as its `Display` says it.
    Principal(String),
    /// Everybody's on this model.
    Model(ModelName),
}

/// What was spent in a current window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spent {
    /// By whom.
    pub whose: Whose,
    /// In which.
    pub window: Window,
    /// How much.
    pub amount: SignedNanoUsd,
}

impl Spent {
    fn counter(&self) -> String {
        match &self.whose {
            Whose::Workspace => "workspace".to_owned(),
            Whose::Principal(who) => who.clone(),
            Whose::Model(model) => format!("model:{model}"),
        }
    }
}

/// What became of an attempt to seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seeded {
    /// The ledger is open.
    Now,
    /// Somebody was faster.
    Before,
    /// Something was booked in between, or the ledger was lost again: look again.
    Moved,
}

impl LedgerSeeds {
    /// Of the ledgers in this Redis.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            look: Script::new("ledger_look_v1", include_str!("../scripts/ledger_look_v1.lua")),
            seed: Script::new("ledger_seed_v1", include_str!("../scripts/ledger_seed_v1.lua")),
        }
    }

    /// Looks at a ledger; `None` when it has its marker.
    ///
    /// # Errors
    /// When the ledger could not be asked.
    pub async fn look(&self, workspace_id: &WorkspaceId) -> Result<Option<LostLedger>, LedgerError> {
        let found = self.look_once(workspace_id, HashMap::new()).await?;
        if found.as_ref().is_none_or(|lost| lost.up_to == "0-0") {
            // Who books something writes an event with it.
            return Ok(found);
        }
        // Before the look that counts: what is booked in between is noticed, and not overlooked.
        let booked = self.booked(workspace_id).await?;
        self.look_once(workspace_id, booked).await
    }

    async fn look_once(
        &self,
        workspace_id: &WorkspaceId,
        booked: HashMap<String, i64>,
    ) -> Result<Option<LostLedger>, LedgerError> {
        let keys = Keys(workspace_id);
        let names = [keys.meta(), keys.seeding(), keys.usage()];
        let names = names.each_ref().map(String::as_str);
        let (token, life) = (RequestId::new().as_uuid().to_string(), number(LOOK.as_millis()));
        let found: Vec<String> =
            self.redis.run(&self.look, &names, &[token.as_bytes(), &life]).await.map_err(unavailable)?;
        match found.as_slice() {
            [] => Ok(None),
            [token, up_to, at] => {
                let at = at.parse().ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
                let at = at.ok_or_else(|| LedgerError::Unavailable(format!("it answered {found:?}")))?;
                Ok(Some(LostLedger { token: token.clone(), up_to: up_to.clone(), at, booked }))
            }
            other => Err(LedgerError::Unavailable(format!("it answered {other:?}"))),
        }
    }

    async fn booked(&self, workspace_id: &WorkspaceId) -> Result<HashMap<String, i64>, LedgerError> {
        let pattern = format!("{}*", Keys(workspace_id).counter());
        let names = self.redis.scan(&pattern, MOST_COUNTERS).await.map_err(unavailable)?;
        let mut pipe = redis::Pipeline::with_capacity(names.len());
        for name in &names {
            pipe.cmd("HGET").arg(name).arg("settled");
        }
        let booked: Vec<Option<i64>> = self.redis.pipeline(&pipe).await.map_err(unavailable)?;
        Ok(names.into_iter().zip(booked).map(|(name, booked)| (name, booked.unwrap_or_default())).collect())
    }

    /// Opens a ledger that was looked at, with what was spent before. `spent` has to count every event up to
    /// [`LostLedger::up_to`]; it may count later ones.
    ///
    /// # Errors
    /// When the ledger could not be asked; it may have been seeded.
    pub async fn seed(
        &self,
        workspace_id: &WorkspaceId,
        lost: &LostLedger,
        spent: &[Spent],
    ) -> Result<Seeded, LedgerError> {
        let keys = Keys(workspace_id);
        let mut names = vec![keys.meta(), keys.seeding()];
        let mut args = vec![lost.token.clone().into_bytes()];
        for spent in spent {
            let windows = Windows::around(spent.window, lost.at);
            let [_, current, _] = &windows.names;
            let name = format!("{}{}:{current}", keys.counter(), spent.counter());
            let booked = lost.booked.get(&name).copied().unwrap_or_default();
            names.push(name);
            args.push(number(booked));
            args.push(number(spent.amount.nanos().saturating_sub(booked)));
            let ends = windows.bounds.map(|[_, _, next, _]| number(next.saturating_add(windows.keep)));
            args.push(ends.unwrap_or_default());
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
        let answer: String = self.redis.run(&self.seed, &names, &args).await.map_err(unavailable)?;
        match answer.as_str() {
            "seeded" => Ok(Seeded::Now),
            "open" => Ok(Seeded::Before),
            "moved" => Ok(Seeded::Moved),
            other => Err(LedgerError::Unavailable(format!("it answered `{other}`"))),
        }
    }
}
