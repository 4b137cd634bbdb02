//! Lists of many connections as one (DESIGN §9.3): merged, sorted, filtered by policy, partial when an upstream is away.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::future::join_all;
use obol_mcp::catalogue::{Item, Listing};
use obol_mcp::pool::ListKind;
use obol_mcp::wire::{Object, RpcError};
use obol_model::{ConnectionName, metric};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::session::Ctx;
use super::{Mcp, refuse};
use crate::audit;

/// Longest wait for connections of which nothing is known yet (DESIGN §9.3).
pub(super) const COLD_WAIT: Duration = Duration::from_secs(5);
/// Lists up to this length have no cursor.
const PAGE: usize = 500;

/// What the connections of a caller offer, as far as they could be asked.
pub(super) struct Gathered {
    listings: Vec<(ConnectionName, Arc<Listing>)>,
    unavailable: Vec<ConnectionName>,
}

impl Mcp {
    pub(super) async fn list(
        &self,
        ctx: &Ctx,
        method: &str,
        params: Option<&RawValue>,
    ) -> Result<String, RpcError> {
        let kind = match method {
            "tools/list" => ListKind::Tools,
            "resources/list" => ListKind::Resources,
            "resources/templates/list" => ListKind::ResourceTemplates,
            _ => ListKind::Prompts,
        };
        let cursor = match params.and_then(|p| Object::parse(p.get()).ok()?.get("cursor")) {
            Some(raw) => {
                Some(Cursor::parse(raw).ok_or_else(|| refuse::params("the cursor is not one of ours"))?)
            }
            None => None,
        };
        let gathered = self.gather(ctx, kind, Instant::now() + COLD_WAIT).await;
        let items = gathered.visible(ctx, kind);
        let (session, hidden) = (ctx.session.session_id, gathered.offered() - items.len());
        audit::listed(&ctx.admitted, Some(session), method, items.len(), hidden);
        let version = version(ctx, &items);
        let start = match cursor {
            Some(cursor) if cursor.version != version => {
                return Err(refuse::params("the list has changed since the cursor was made; start it again"));
            }
            Some(cursor) => cursor.offset,
            None => 0,
        };
        let page = items.get(start..).unwrap_or_default();
        let next = (page.len() > PAGE).then(|| Cursor { version, offset: start + PAGE });
        Ok(write(kind, page.get(..PAGE).unwrap_or(page), next, &gathered.unavailable))
    }

    /// Asks all connections that may be listed at once; what is not there by `deadline` is left out.
    pub(super) async fn gather(&self, ctx: &Ctx, kind: ListKind, deadline: Instant) -> Gathered {
        let listable = ctx.connections().filter(|(name, _)| ctx.may_list(name));
        let asked = listable.map(|(name, source)| async move {
            (name.clone(), self.catalogue.get_soon(&source, kind, deadline).await)
        });
        let (mut listings, mut unavailable) = (Vec::new(), Vec::new());
        for (name, listing) in join_all(asked).await {
            match listing {
                Ok(listing) => listings.push((name, listing)),
                Err(e) => {
                    metrics::counter!(metric::MCP_PARTIAL_LISTS).increment(1);
                    tracing::warn!(workspace = %ctx.workspace(), connection = %name, error = %e, "list is partial");
                    unavailable.push(name);
                }
            }
        }
        Gathered { listings, unavailable }
    }
}

impl Gathered {
    /// How much there is, seen or not.
    fn offered(&self) -> usize {
        self.listings.iter().map(|(_, listing)| listing.items().len()).sum()
    }

    /// Whether a connection is missing from it.
    pub(super) fn is_partial(&self) -> bool {
        !self.unavailable.is_empty()
    }

    /// Digests of what the caller sees. A connection that is away has not changed its list: it counts as `before`.
    pub(super) fn digests(&self, ctx: &Ctx, kind: ListKind, before: Option<&Digests>) -> Digests {
        let mut hashers: BTreeMap<ConnectionName, DefaultHasher> = BTreeMap::new();
        for (connection, item) in self.visible_of_each(ctx, kind) {
            item.text.hash(hashers.entry(connection.clone()).or_default());
        }
        let mut digests =
            Digests(hashers.into_iter().map(|(name, hasher)| (name, hasher.finish())).collect());
        for away in &self.unavailable {
            if let Some(digest) = before.and_then(|before| before.0.get(away)) {
                digests.0.insert(away.clone(), *digest);
            }
        }
        digests
    }

    /// What the caller may use, sorted by exposed name. A name that two connections give is hidden, and reported.
    fn visible(&self, ctx: &Ctx, kind: ListKind) -> Vec<&Item> {
        let mut items: Vec<&Item> =
            self.visible_of_each(ctx, kind).into_iter().map(|(_, item)| item).collect();
        items.sort_unstable_by(|a, b| a.exposed.cmp(&b.exposed));
        items
    }

    /// The same in the order of the connections.
    fn visible_of_each(&self, ctx: &Ctx, kind: ListKind) -> Vec<(&ConnectionName, &Item)> {
        let mut seen: HashMap<&str, bool> = HashMap::new();
        for item in self.listings.iter().flat_map(|(_, l)| l.items()) {
            seen.entry(&item.exposed).and_modify(|twice| *twice = true).or_insert(false);
        }
        let mut items = Vec::new();
        for (connection, listing) in &self.listings {
            for item in listing.items() {
                if seen.get(item.exposed.as_str()) == Some(&true) {
                    tracing::warn!(%connection, name = item.exposed, "name of two connections, both are hidden");
                } else if ctx.may_see(kind, connection, item) {
                    items.push((connection, item));
                }
            }
        }
        items
    }
}

/// What a caller sees of each connection, names and definitions; those of which it sees nothing are not there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Digests(BTreeMap<ConnectionName, u64>);

/// Equal on every replica that sees the same list under the same publication.
fn version(ctx: &Ctx, items: &[&Item]) -> u64 {
    let mut hasher = DefaultHasher::new();
    ctx.admitted.publication.revision().hash(&mut hasher);
    digest(items).hash(&mut hasher);
    hasher.finish()
}

fn digest(items: &[&Item]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for item in items {
        item.text.hash(&mut hasher);
    }
    hasher.finish()
}

fn write(kind: ListKind, items: &[&Item], next: Option<Cursor>, unavailable: &[ConnectionName]) -> String {
    let mut out = String::with_capacity(items.iter().map(|i| i.text.len() + 1).sum::<usize>() + 64);
    out.push_str("{\"");
    out.push_str(kind.member());
    out.push_str("\":[");
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        out.push_str(&item.text);
    }
    out.push(']');
    if let Some(next) = next {
        out.push_str(",\"nextCursor\":\"");
        out.push_str(&next.text());
        out.push('"');
    }
    if !unavailable.is_empty() {
        let meta = serde_json::json!({ "io.obol/unavailable": unavailable });
        out.push_str(",\"_meta\":");
        out.push_str(&meta.to_string());
    }
    out.push('}');
    out
}

/// Where a page ends: opaque to clients, and useless once the list has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cursor {
    version: u64,
    offset: usize,
}

impl Cursor {
    fn text(self) -> String {
        URL_SAFE_NO_PAD.encode(format!("1/{:x}/{}", self.version, self.offset))
    }

    fn parse(raw: &RawValue) -> Option<Self> {
        let text: String = serde_json::from_str(raw.get()).ok()?;
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
        let mut parts = text.split('/');
        let (Some("1"), Some(version), Some(offset), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return None;
        };
        Some(Self { version: u64::from_str_radix(version, 16).ok()?, offset: offset.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn cursors_are_read_back_and_nothing_else_is() {
        let cursor = Cursor { version: 0xfeed, offset: 500 };
        assert_eq!(Cursor::parse(&raw(&format!("\"{}\"", cursor.text()))), Some(cursor));
        for bad in ["5", "\"\"", "\"abc\"", "\"MS8x\"", "null"] {
            assert_eq!(Cursor::parse(&raw(bad)), None, "{bad}");
        }
    }

    #[test]
    fn a_list_names_what_is_away() {
        let away: ConnectionName = "slow".parse().unwrap();
        assert_eq!(write(ListKind::Tools, &[], None, &[]), r#"{"tools":[]}"#);
        assert_eq!(
            write(ListKind::Prompts, &[], None, &[away]),
            r#"{"prompts":[],"_meta":{"io.obol/unavailable":["slow"]}}"#
        );
    }
}
