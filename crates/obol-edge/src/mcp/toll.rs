//! Tool calls are admitted by the ledger in the flight that resumes their session (DESIGN §5), which is where it is found
//! that one is sent again under its idempotency key (DESIGN §12.7).

use obol_mcp::wire::{Message, Object};
use obol_meter::{Denied, Idempotency, Price, Start, UsageGuard};
use obol_model::snapshot::Namespace;
use obol_model::{ConnectionName, NanoUsd, UsageKind};

use super::Mcp;
use crate::front::Admitted;
use crate::toll;

/// Longer names are no tool's, and not worth a place in the ledger.
const LONGEST_NAME: usize = 256;

/// A tool call as the ledger sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Toll {
    pub(super) connection: ConnectionName,
    /// As the upstream calls it.
    pub(super) tool: String,
    pub(super) price: NanoUsd,
}

impl Toll {
    pub(super) fn of(admitted: &Admitted, connection: &ConnectionName, tool: &str) -> Self {
        let connections = &admitted.publication.workspace.connections;
        let price = connections.get(connection).map_or(NanoUsd::ZERO, |c| {
            c.tools.get(tool).and_then(|rule| rule.price_per_call).unwrap_or(c.price_per_call)
        });
        Self { connection: connection.clone(), tool: tool.to_owned(), price }
    }

    /// What a call by this name probably is, by the publication alone. Only the listing of the connection decides.
    fn guess(admitted: &Admitted, exposed: &str) -> Option<Self> {
        let connections = &admitted.publication.workspace.connections;
        let prefixed = exposed.split_once("__").and_then(|(prefix, tool)| {
            let (name, connection) = connections.get_key_value(prefix)?;
            (connection.namespace == Namespace::Prefix).then_some((name, tool))
        });
        let (name, tool) = prefixed
            .or_else(|| {
                connections.iter().find_map(|(name, connection)| {
                    connection
                        .tools
                        .iter()
                        .find(|(_, rule)| rule.alias.as_deref() == Some(exposed))
                        .map(|(tool, _)| (name, tool.as_str()))
                })
            })
            .or_else(|| {
                let bare = connections.iter().find(|(_, connection)| connection.namespace == Namespace::None);
                bare.map(|(name, _)| (name, exposed))
            })?;
        Some(Self::of(admitted, name, tool))
    }
}

/// A call that was admitted before it is known whether it is made: what was set aside is given back unless somebody
/// takes it.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    idempotency: Option<Idempotency>,
    guess: Option<(Toll, Result<UsageGuard, Denied>)>,
}

impl Ahead {
    /// Of a call that is not admitted ahead.
    pub(super) fn none(idempotency: Option<Idempotency>) -> Self {
        Self { idempotency, guess: None }
    }

    /// As dropping it; and whoever sends the call again under its idempotency key finds the key free.
    pub(super) async fn give_back(mut self) {
        if let Some((_, Ok(guard))) = self.guess.take_if(|_| self.idempotency.is_some()) {
            guard.give_back().await;
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if let Some((_, Ok(guard))) = self.guess.take() {
            guard.cancel();
        }
    }
}

impl Mcp {
    /// Admits a tool call by what its name probably means, so that this takes no flight of its own.
    pub(super) async fn admit_ahead(
        &self,
        admitted: &Admitted,
        message: &Message<'_>,
        idempotency: Option<Idempotency>,
    ) -> Ahead {
        let toll = || {
            let Message::Request { method, params, .. } = message else { return None };
            let params = Object::parse(params.filter(|_| method == "tools/call")?.get()).ok()?;
            let name = params.str("name").filter(|name| name.len() <= LONGEST_NAME)?;
            Toll::guess(admitted, &name)
        };
        let Some(toll) = toll() else { return Ahead::none(idempotency) };
        let answer = self.ask(admitted, &toll, idempotency).await;
        Ahead { idempotency, guess: Some((toll, answer)) }
    }

    /// The guard of a call that is going to be made: the one that was admitted ahead when it is that call's, else a new
    /// one.
    pub(super) async fn admit(
        &self,
        admitted: &Admitted,
        toll: &Toll,
        mut ahead: Ahead,
    ) -> Result<UsageGuard, Denied> {
        let idempotency = ahead.idempotency;
        match ahead.guess.take() {
            Some((guessed, answer)) if guessed == *toll => answer,
            Some((_, Ok(guard))) => {
                guard.give_back().await;
                // Another id: the one of the guess is closed for good.
                let again = Admitted { request_id: obol_model::RequestId::new(), ..admitted.clone() };
                self.ask(&again, toll, idempotency).await
            }
            Some((_, Err(_))) | None => self.ask(admitted, toll, idempotency).await,
        }
    }

    async fn ask(
        &self,
        admitted: &Admitted,
        toll: &Toll,
        idempotency: Option<Idempotency>,
    ) -> Result<UsageGuard, Denied> {
        let Toll { connection, tool, price } = toll.clone();
        let start = toll::start(admitted, UsageKind::ToolCall { connection, tool }, Price::PerCall(price));
        let terms = toll::terms(admitted, None, price, 0);
        self.meter.admit(Start { idempotency, ..start }, terms).await.map(|(guard, _)| guard)
    }
}
