//! Opening ledgers: new ones, and lost ones from the usage that was collected (DESIGN §12.6).

use std::collections::BTreeSet;

use obol_meter::{LostLedger, Seeded, Spent, Whose};
use obol_model::snapshot::Documents;
use obol_model::{Budget, BudgetScope, Principal, SignedNanoUsd, Window, WorkspaceId};

use crate::keys::KeyRecord;
use crate::{PublishError, Publisher, UsageBy, UsageQuery, UsageStore};

/// What became of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opening {
    /// It was open.
    Open,
    /// It is open now.
    Seeded {
        /// How many counters began with something.
        counters: usize,
    },
    /// Not all events that it has to be seeded from were collected, or something was booked meanwhile.
    Waits,
}

/// The budgets whose counters are put back: those that hold now.
#[derive(Debug, Default)]
pub(crate) struct Budgeted {
    shared: BTreeSet<(BudgetScope, Window)>,
    own: BTreeSet<(String, Window)>,
}

impl Budgeted {
    /// Those of a publication and of the keys of its workspace. What cannot be read has none that anybody enforces.
    pub(crate) fn of<'a>(
        workspace: &WorkspaceId,
        documents: Option<&Documents>,
        keys: impl Iterator<Item = &'a KeyRecord>,
    ) -> Self {
        let published = documents.and_then(|documents| documents.decode(workspace).ok());
        let shared = published.map(|(snapshot, _)| snapshot.budgets).unwrap_or_default();
        let shared = shared.into_iter().map(|Budget { scope, window, .. }| (scope, window)).collect();
        let keys = keys.filter(|record| record.key.workspace_id == *workspace);
        let own = keys.flat_map(|record| {
            let who = Principal::Key(record.key.key_id.clone()).to_string();
            record.key.budgets.iter().map(move |budget| (who.clone(), budget.window))
        });
        Self { shared, own: own.collect() }
    }

    /// What was spent in their current windows, by the usage that is stored.
    async fn spent(
        &self,
        usage: &dyn UsageStore,
        workspace: &WorkspaceId,
        lost: &LostLedger,
    ) -> Result<Vec<Spent>, PublishError> {
        let mut all = Vec::new();
        for window in Window::ALL {
            let sums = async |by: &[UsageBy]| {
                let query = UsageQuery {
                    workspace: Some(workspace.clone()),
                    from: lost.since(window),
                    to: None,
                    by: by.to_vec(),
                };
                let totals = usage.totals(&query).await.map_err(PublishError::Unreadable)?;
                let sum = |mut total: crate::UsageTotal| (total.group.pop().unwrap_or_default(), total.cost);
                Ok::<_, PublishError>(totals.into_iter().map(sum).collect::<Vec<(String, SignedNanoUsd)>>())
            };
            if self.shared.contains(&(BudgetScope::Workspace, window)) {
                let whose = |(_, amount)| Spent { whose: Whose::Workspace, window, amount };
                all.extend(sums(&[]).await?.into_iter().map(whose));
            }
            let each = self.shared.contains(&(BudgetScope::Key, window));
            if each || self.own.iter().any(|(_, own)| *own == window) {
                let budgeted = |(who, _): &(String, _)| each || self.own.contains(&(who.clone(), window));
                let whose = |(who, amount)| Spent { whose: Whose::Principal(who), window, amount };
                all.extend(sums(&[UsageBy::Key]).await?.into_iter().filter(budgeted).map(whose));
            }
            if self.shared.iter().any(|(scope, of)| matches!(scope, BudgetScope::Model(_)) && *of == window) {
                all.extend(sums(&[UsageBy::Model]).await?.into_iter().filter_map(|(name, amount)| {
                    let model = name.parse().ok()?;
                    let scope = BudgetScope::Model(model);
                    let budgeted = self.shared.contains(&(scope.clone(), window));
                    let BudgetScope::Model(model) = scope else { return None };
                    budgeted.then_some(Spent { whose: Whose::Model(model), window, amount })
                }));
            }
        }
        all.retain(|spent| spent.amount != SignedNanoUsd::default());
        Ok(all)
    }
}

/// Seeds a ledger that `lost` says was lost, when all of its usage was collected, and forgets what `lost` says when it has to
/// be looked at again. Without a store of usage there is none.
///
/// # Errors
/// When Redis or the store could not be asked.
pub(crate) async fn seed(
    publisher: &dyn Publisher,
    usage: Option<&dyn UsageStore>,
    workspace: &WorkspaceId,
    budgeted: &Budgeted,
    lost: &mut Option<LostLedger>,
) -> Result<Opening, PublishError> {
    let Some(found) = lost else { return Ok(Opening::Open) };
    let spent = match usage {
        // INVARIANT: before the sums: what is collected by then is in them.
        Some(_) if !publisher.is_collected(workspace, found).await? => return Ok(Opening::Waits),
        Some(usage) => budgeted.spent(usage, workspace, found).await?,
        None => Vec::new(),
    };
    let seeded = publisher.seed_ledger(workspace, found, &spent).await?;
    *lost = None;
    Ok(match seeded {
        Seeded::Now => Opening::Seeded { counters: spent.len() },
        Seeded::Before => Opening::Open,
        Seeded::Moved => Opening::Waits,
    })
}
