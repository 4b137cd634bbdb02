use serde::{Deserialize, Serialize};

use crate::{ModelName, NanoUsd};

/// How much may be spent (DESIGN §12.1). Tool calls and tokens draw on the same budgets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// What refusals call it.
    pub name: String,
    /// Whose spending counts.
    pub scope: BudgetScope,
    /// In which time.
    pub window: Window,
    /// The most that may be spent.
    pub limit: NanoUsd,
}

/// Whose spending counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetScope {
    /// Everybody's in the workspace together.
    Workspace,
    /// Each principal's: each key's, each user's.
    Key,
    /// Everybody's on this model together.
    Model(ModelName),
}

/// A span of time, in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Window {
    /// From midnight to midnight.
    Day,
    /// A calendar month.
    Month,
    /// For ever.
    Total,
}

impl Window {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Day, Self::Month, Self::Total];

    /// The stable word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Month => "month",
            Self::Total => "total",
        }
    }
}

/// A budget of one key. It takes the place of the workspace's budget for each key with the same window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyBudget {
    /// In which time.
    pub window: Window,
    /// The most that may be spent.
    pub limit: NanoUsd,
}

/// How fast one principal may call (DESIGN §12.1). What is `None` is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Limits {
    /// Calls that begin within a calendar minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u64>,
    /// Tokens, set aside and used, of calls that begin within a calendar minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<u64>,
    /// Calls under way at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u64>,
}

impl Limits {
    /// Whether nothing is limited.
    pub fn is_open(&self) -> bool {
        *self == Self::default()
    }

    /// These, and where they say nothing what `others` say.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(others.tokens_per_minute),
            concurrency: self.concurrency.or(others.concurrency),
        }
    }
}
