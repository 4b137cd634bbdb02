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
        let hint = exposed.split_once("__").map(|(prefix, _)| prefix);
        let (hinted, others): (Vec<_>, Vec<_>) =
            ctx.connections().partition(|(name, _)| Some(name.as_str()) == hint);
        let mut failure = None;
        for group in [hinted, others] {
            let mut asked: FuturesUnordered<_> = group
                .into_iter()
                .map(|(name, source)| async move {
                    let listing = self.catalogue.get(&source, kind, deadline).await;
                    (name.clone(), source, listing)
                })
                .collect();
            while let Some((connection, source, listing)) = asked.next().await {
                match listing {
                    Ok(listing) if listing.exposed(exposed).is_some() => {
                        return Ok(Resolved { connection, source, listing, exposed: exposed.to_owned() });
                    }
                    // The hinted connection, or the one whose names have no prefix, may be the one that was meant.
                    Err(e) if Some(connection.as_str()) == hint || source.namespace == Namespace::None => {
                        failure.get_or_insert((connection, e));
                    }
                    Ok(_) | Err(_) => {}
                }
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
            && let Some(source) = self.connection(&name).filter(|s| s.namespace == Namespace::Prefix)
        {
            return Some((name, source, rest));
        }
        let (name, source) = self.connections().find(|(_, s)| s.namespace == Namespace::None)?;
        Some((name.clone(), source, uri))
    }
}
