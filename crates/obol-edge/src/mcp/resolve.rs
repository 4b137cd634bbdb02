//! From the name that a client uses to the connection that it belongs to: by lookup, never by splitting (DESIGN §9.3).

use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use obol_mcp::catalogue::{Item, Listing, Source};
use obol_mcp::names;
use obol_mcp::pool::{CallError, ListKind};
use obol_model::ConnectionName;
use obol_model::snapshot::Namespace;
use tokio::time::Instant;

use super::Mcp;
use super::lists::COLD_WAIT;
use super::session::Ctx;

/// A name that was found.
pub(super) struct Resolved {
    pub(super) connection: ConnectionName,
    pub(super) source: Source,
    listing: Arc<Listing>,
    exposed: String,
}

impl Resolved {
    fn new(connection: &ConnectionName, source: &Source, listing: Arc<Listing>, exposed: &str) -> Self {
        Self { connection: connection.clone(), source: source.clone(), listing, exposed: exposed.to_owned() }
    }

    /// The item; it is there, since resolving found it.
    pub(super) fn item(&self) -> Option<&Item> {
        self.listing.exposed(&self.exposed)
    }
}

/// Why a name was not found.
pub(super) enum Unresolved {
    /// Nobody offers it.
    Unknown,
    /// The connection that seems to offer it cannot be asked.
    Unavailable(ConnectionName, CallError),
}

impl Mcp {
    /// Finds the tool or prompt that clients call `exposed`.
    ///
    /// The connection whose prefix the name has is asked first, which spares a wait for others that are cold or dead;
    /// only its listing decides.
    pub(super) async fn resolve(
        &self,
        ctx: &Ctx,
        kind: ListKind,
        exposed: &str,
    ) -> Result<Resolved, Unresolved> {
        let deadline = Instant::now() + COLD_WAIT;
        let hinted = exposed.split_once("__").and_then(|(prefix, _)| ctx.connection(prefix));
        let mut failure = None;
        if let Some((connection, source)) = &hinted {
            match self.catalogue.get(source, kind, deadline).await {
                Ok(listing) if listing.exposed(exposed).is_some() => {
                    return Ok(Resolved::new(connection, source, listing, exposed));
                }
                Ok(_) => {}
                Err(e) => failure = Some(((*connection).clone(), e)),
            }
        }
        let asked = hinted.map(|(name, _)| name);
        let mut others: FuturesUnordered<_> = ctx
            .connections()
            .filter(|(name, _)| Some(*name) != asked)
            .map(|(name, source)| async move {
                let listing = self.catalogue.get(&source, kind, deadline).await;
                (name, source, listing)
            })
            .collect();
        while let Some((connection, source, listing)) = others.next().await {
            match listing {
                Ok(listing) if listing.exposed(exposed).is_some() => {
                    return Ok(Resolved::new(connection, &source, listing, exposed));
                }
                // Its names have no prefix, so it may be the one that was meant.
                Err(e) if source.namespace == Namespace::None => {
                    failure.get_or_insert((connection.clone(), e));
                }
                Ok(_) | Err(_) => {}
            }
        }
        match failure {
            Some((connection, e)) => Err(Unresolved::Unavailable(connection, e)),
            None => Err(Unresolved::Unknown),
        }
    }
}

impl Ctx {
    /// The connection that an exposed URI belongs to, and the URI as the upstream knows it: by prefix, else the one
    /// connection whose URIs have none.
    pub(super) fn resolve_uri<'a>(&self, uri: &'a str) -> Option<(ConnectionName, Source, &'a str)> {
        if let Some((name, rest)) = names::split_uri(uri)
            && let Some((_, source)) =
                self.connection(name.as_str()).filter(|(_, s)| s.namespace == Namespace::Prefix)
        {
            return Some((name, source, rest));
        }
        let (name, source) = self.connections().find(|(_, s)| s.namespace == Namespace::None)?;
        Some((name.clone(), source, uri))
    }
}
