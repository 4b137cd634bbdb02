//! A real Redis Cluster on this machine.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;

use crate::Failure;
use crate::eventually;
use crate::port::Port;
use crate::redis::RedisServer;

/// How long the nodes may take to agree. It takes about a second.
const AGREED: Duration = Duration::from_secs(20);

const MASTERS: usize = 3;
const SLOTS: usize = 16384;

/// Three masters, each with a third of the slots, and a replica of each when asked for. All of it ends with this value.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    /// Where the nodes talk to each other.
    buses: Vec<Port>,
}

impl RedisCluster {
    /// Starts three masters and waits until all of them say that the Cluster is up.
    ///
    /// # Panics
    /// When that does not happen.
    pub async fn start() -> Self {
        Self::of(MASTERS, &[]).await
    }

    /// Starts three masters with a replica each, the replica of node 0 being node 3.
    ///
    /// # Panics
    /// As [`RedisCluster::start`].
    pub async fn start_with_replicas() -> Self {
        Self::of(2 * MASTERS, &[]).await
    }

    /// Starts three masters with further arguments for each.
    ///
    /// # Panics
    /// As [`RedisCluster::start`].
    pub async fn start_with(args: &[&str]) -> Self {
        Self::of(MASTERS, args).await
    }

    async fn of(size: usize, args: &[&str]) -> Self {
        let buses: Vec<Port> = (0..size).map(|_| Port::reserve()).collect();
        let nodes = join_all(buses.iter().map(async |bus| {
            let bus = bus.addr().port().to_string();
            let cluster = [
                ["--cluster-enabled", "yes"],
                ["--cluster-port", &bus],
                ["--cluster-config-file", "nodes.conf"],
                ["--cluster-node-timeout", "1000"],
                ["--repl-diskless-sync-delay", "0"],
            ];
            RedisServer::start_with(&[cluster.as_flattened(), args].concat()).await
        }))
        .await;
        let cluster = Self { nodes, buses };
        cluster.join_up().await;
        cluster
    }

    async fn join_up(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            // Different from the start, so that no two nodes have to quarrel about it.
            node.cli(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]).await;
            if index < MASTERS {
                let (first, last) = (index * SLOTS / MASTERS, (index + 1) * SLOTS / MASTERS - 1);
                node.cli(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]).await;
            }
        }
        for bus in 1..self.nodes.len() {
            let (port, bus) = (self.nodes[bus].port().to_string(), self.buses[bus].addr().port().to_string());
            self.nodes[0].cli(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await;
        }
        self.wait_until_ok().await;
        for (index, replica) in self.nodes.iter().enumerate().skip(MASTERS) {
            let id: String = self.nodes[index - MASTERS].query(&["CLUSTER", "MYID"]).await;
            // Refused until the replica has heard of the master.
            let replicate = ["CLUSTER", "REPLICATE", &id];
            eventually(AGREED, || replica.try_query::<()>(&replicate)).await;
            eventually(AGREED, || async {
                let info: String = replica.query(&["INFO", "replication"]).await;
                info.contains("master_link_status:up")
            })
            .await;
        }
        if self.nodes.len() > MASTERS {
            // A master that is gone is replaced only when the others know of its replica.
            let sees_replicas = async |node: &RedisServer| {
                let nodes: String = node.query(&["CLUSTER", "NODES"]).await;
                nodes.matches(" slave ").count() + nodes.matches("myself,slave ").count()
                    == self.nodes.len() - MASTERS
            };
            eventually(AGREED, || async {
                join_all(self.nodes.iter().map(sees_replicas)).await.iter().all(|sees| *sees)
            })
            .await;
        }
    }

    /// Waits until all nodes that run say that every slot is served.
    ///
    /// # Panics
    /// When that takes more than twenty seconds.
    pub async fn wait_until_ok(&self) {
        let known = format!("cluster_known_nodes:{}", self.nodes.len());
        eventually(AGREED, || async {
            for node in self.nodes.iter().filter(|node| node.runs()) {
                let info: String = node.try_query(&["CLUSTER", "INFO"]).await?;
                let lines = ["cluster_state:ok", "cluster_slots_ok:16384", known.as_str()];
                if let Some(missing) = lines.iter().find(|line| !info.contains(**line)) {
                    return Err(Failure::new(format!("no `{missing}` at {}: {info}", node.addr())));
                }
            }
            Ok(())
        })
        .await;
    }

    /// `redis+cluster://127.0.0.1:PORT,…` with all masters.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.nodes.iter().take(MASTERS).map(|node| node.addr().to_string()).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// All nodes; the first three began as masters.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The node that serves the slot of a key.
    ///
    /// # Panics
    /// When no node that runs knows.
    pub async fn owner(&self, key: &str) -> &RedisServer {
        let any = self.nodes.iter().find(|node| node.runs()).expect("a node that runs");
        let slot: i64 = any.query(&["CLUSTER", "KEYSLOT", key]).await;
        let ranges: Vec<::redis::Value> = any.query(&["CLUSTER", "SLOTS"]).await;
        let port = ranges.into_iter().find_map(|range| {
            let ::redis::Value::Array(fields) = range else { return None };
            let [first, last, master, ..] = fields.as_slice() else { return None };
            let bound = |value: &::redis::Value| ::redis::from_redis_value_ref::<i64>(value).ok();
            let ::redis::Value::Array(node) = master else { return None };
            let node = ::redis::Value::Array(node.iter().take(2).cloned().collect());
            let (_, port): (String, u16) = ::redis::from_redis_value(node).ok()?;
            (bound(first)? <= slot && slot <= bound(last)?).then_some(port)
        });
        let port = port.unwrap_or_else(|| panic!("nobody serves the slot of `{key}`"));
        self.nodes.iter().find(|node| node.port() == port).expect("a node of this cluster")
    }

    /// Moves the slot of a key, with all keys in it, to another node.
    ///
    /// # Panics
    /// When a node refuses.
    pub async fn move_slot(&self, key: &str, to: &RedisServer) {
        let from = self.owner(key).await;
        let slot = self.begin_move(key, to).await;
        loop {
            let keys: Vec<String> = from.query(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]).await;
            if keys.is_empty() {
                break;
            }
            let port = to.port().to_string();
            let command = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            from.cli(&[&command[..], &keys].concat()).await;
        }
        let id: String = to.query(&["CLUSTER", "MYID"]).await;
        let rest = self.nodes.iter().filter(|node| ![to.port(), from.port()].contains(&node.port()));
        for node in [to, from].into_iter().chain(rest) {
            node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]).await;
        }
        // The new owner has a new epoch. Somebody who does not know it could give the slot back later, and the keys that
        // are in it by then would be deleted.
        eventually(AGREED, || async {
            let mut seen = BTreeSet::new();
            for node in &self.nodes {
                let nodes: String = node.query(&["CLUSTER", "NODES"]).await;
                let mut epochs: Vec<(&str, &str)> = nodes.lines().filter_map(id_and_epoch).collect();
                epochs.sort_unstable();
                let distinct: BTreeSet<&str> = epochs.iter().map(|(_, epoch)| *epoch).collect();
                if distinct.len() < epochs.len() {
                    return Err(format!("two nodes have one epoch: {nodes}"));
                }
                seen.insert(format!("{epochs:?}"));
            }
            if seen.len() == 1 { Ok(()) } else { Err(format!("{seen:?}")) }
        })
        .await;
    }

    /// Begins to move the slot of a key and stops there: keys that are not at the old owner are asked for at the new one.
    /// Gives the slot.
    ///
    /// # Panics
    /// When a node refuses.
    pub async fn begin_move(&self, key: &str, to: &RedisServer) -> String {
        let from = self.owner(key).await;
        let slot: i64 = from.query(&["CLUSTER", "KEYSLOT", key]).await;
        let slot = slot.to_string();
        let (from_id, to_id): (String, String) =
            (from.query(&["CLUSTER", "MYID"]).await, to.query(&["CLUSTER", "MYID"]).await);
        to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await;
        from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await;
        slot
    }
}

/// Of a line of `CLUSTER NODES`.
fn id_and_epoch(line: &str) -> Option<(&str, &str)> {
    let mut fields = line.split(' ');
    fields.next().zip(fields.nth(5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn slots_are_served_by_three_and_can_be_moved() {
        let cluster = RedisCluster::start().await;
        let from = cluster.owner("a").await;
        from.cli(&["SET", "a", "1"]).await;
        let to = cluster.nodes().iter().find(|node| node.port() != from.port()).unwrap();
        cluster.move_slot("a", to).await;
        assert_eq!(to.query::<u32>(&["GET", "a"]).await, 1);
        assert_eq!(cluster.owner("a").await.port(), to.port());
    }
}
