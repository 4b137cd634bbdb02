//! Who serves which slots.

use std::collections::HashSet;
use std::sync::Arc;

use redis::Value;

use crate::link::Link;
use crate::server::Address;

use super::slot::SLOTS;

/// The masters of a Cluster and their slots, as one node saw them.
#[derive(Debug)]
pub(super) struct SlotMap {
    /// In ascending order, without overlap.
    ranges: Vec<Range>,
    /// Each once.
    masters: Vec<(Address, Arc<Link>)>,
    /// Replicas too.
    known: HashSet<Address>,
}

#[derive(Debug)]
struct Range {
    first: u16,
    last: u16,
    /// An index of `masters`.
    master: usize,
}

/// One entry of the answer to `CLUSTER SLOTS`.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    first: u16,
    last: u16,
    master: Address,
    replicas: Vec<Address>,
}

impl SlotMap {
    /// From the answer to `CLUSTER SLOTS` by the node at `asked`. `None` when it is no such answer or names no master,
    /// as that of a node which left its Cluster does.
    pub(super) fn read(
        answer: &Value,
        asked: &Address,
        link: impl Fn(&Address) -> Option<Arc<Link>>,
    ) -> Option<Self> {
        let mut map = Self { ranges: Vec::new(), masters: Vec::new(), known: HashSet::new() };
        for Entry { first, last, master, replicas } in entries(answer, asked)? {
            let known = map.masters.iter().position(|(address, _)| *address == master);
            let index = known.unwrap_or(map.masters.len());
            if known.is_none() {
                map.masters.push((master.clone(), link(&master)?));
            }
            map.ranges.push(Range { first, last, master: index });
            map.known.insert(master);
            map.known.extend(replicas);
        }
        map.ranges.sort_by_key(|range| range.first);
        (!map.masters.is_empty()).then_some(map)
    }

    /// Who serves a slot, if anybody does.
    pub(super) fn owner(&self, slot: u16) -> Option<&Arc<Link>> {
        let at = self.ranges.partition_point(|range| range.last < slot);
        let range = self.ranges.get(at).filter(|range| range.first <= slot)?;
        self.masters.get(range.master).map(|(_, link)| link)
    }

    pub(super) fn masters(&self) -> &[(Address, Arc<Link>)] {
        &self.masters
    }

    /// For what any of them can do; preferably one that answers.
    pub(super) fn any(&self) -> Option<&Arc<Link>> {
        let up = self.masters.iter().find(|(_, link)| link.connection.now().is_some());
        up.or(self.masters.first()).map(|(_, link)| link)
    }

    /// Whether the node belongs to the Cluster, as a master or as a replica.
    pub(super) fn knows(&self, address: &Address) -> bool {
        self.known.contains(address)
    }
}

fn entries(answer: &Value, asked: &Address) -> Option<Vec<Entry>> {
    let Value::Array(items) = answer else { return None };
    let slot = |value: &Value| match value {
        Value::Int(slot) => u16::try_from(*slot).ok().filter(|slot| *slot < SLOTS),
        _ => None,
    };
    let mut entries = Vec::with_capacity(items.len());
    for item in items {
        let Value::Array(fields) = item else { return None };
        let [first, last, master, replicas @ ..] = fields.as_slice() else { return None };
        // A master that nobody knows the address of serves nobody; its slots have no owner until the next look.
        let Some(master) = node(master, asked) else { continue };
        let replicas = replicas.iter().filter_map(|replica| node(replica, asked)).collect();
        entries.push(Entry { first: slot(first)?, last: slot(last)?, master, replicas });
    }
    Some(entries)
}

/// A node as `[host, port, id, …]`. The host is empty or nil when it is that of the node that was asked, and `?` when it
/// is unknown.
fn node(value: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(fields) = value else { return None };
    let [host, Value::Int(port), ..] = fields.as_slice() else { return None };
    let host = match host {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
        Value::SimpleString(text) => text,
        Value::Nil => "",
        _ => return None,
    };
    let port = u16::try_from(*port).ok()?;
    (host != "?").then(|| Address::announced(host, port, asked))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::link::Wanted;
    use crate::server::{Access, Credentials};

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn entry(first: i64, last: i64, nodes: &[(Value, i64)]) -> Value {
        let nodes = nodes.iter().map(|(host, port)| {
            Value::Array(vec![host.clone(), Value::Int(*port), text("id"), Value::Array(Vec::new())])
        });
        Value::Array([Value::Int(first), Value::Int(last)].into_iter().chain(nodes).collect())
    }

    fn read(answer: &Value) -> Option<SlotMap> {
        let access = Access { credentials: Credentials::default(), db: 0, tls: false, ca: None };
        let link = |address: &Address| {
            Some(Link::new(access.server(address).ok()?, Wanted::Node, Duration::from_secs(1)))
        };
        SlotMap::read(answer, &Address::new("asked", 1), link)
    }

    #[test]
    fn each_slot_has_the_owner_that_was_announced() {
        let answer = Value::Array(vec![
            entry(8000, 16383, &[(Value::Nil, 2)]),
            entry(0, 99, &[(text("a"), 1), (text("r"), 9)]),
            entry(200, 300, &[(text(""), 2)]),
            entry(400, 500, &[(text("?"), 3)]),
        ]);
        let map = read(&answer).unwrap();
        let owner = |slot| map.owner(slot).map(|link| &*link.name);
        for (slot, name) in [
            (0, Some("a:1")),
            (99, Some("a:1")),
            (100, None),
            (200, Some("asked:2")),
            (301, None),
            (450, None),
            (7999, None),
            (8000, Some("asked:2")),
            (16383, Some("asked:2")),
        ] {
            assert_eq!(owner(slot), name, "{slot}");
        }
        assert_eq!(map.masters().len(), 2, "each master once");
        assert!(map.knows(&Address::new("r", 9)) && !map.knows(&Address::new("?", 3)));
    }

    #[test]
    fn what_is_no_map_is_none() {
        let answers = [
            Value::Nil,
            Value::Array(Vec::new()),
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![entry(0, 99, &[])]),
            Value::Array(vec![entry(0, 16384, &[(text("a"), 1)])]),
            Value::Array(vec![entry(0, 99, &[(text("?"), 1)])]),
        ];
        for answer in answers {
            assert!(read(&answer).is_none(), "{answer:?}");
        }
    }
}
