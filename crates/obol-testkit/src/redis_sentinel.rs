//! A real Redis master with a replica, watched by real sentinels.

use std::time::Duration;

use futures::future::join_all;

use crate::Failure;
use crate::eventually;
use crate::port::Port;
use crate::redis::RedisServer;

/// What the sentinels call the master.
pub const MASTER: &str = "main";

/// How long a failover may take. With the kit's timeouts it takes two to three seconds.
const FAILOVER: Duration = Duration::from_secs(20);

/// A master, its replica, and sentinels that replace a master which is silent for half a second. All of it ends with this
/// value.
#[derive(Debug)]
pub struct RedisSentinel {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
}

impl RedisSentinel {
    /// Starts them with one sentinel and waits until the replica has caught up.
    ///
    /// # Panics
    /// When a part does not start.
    pub async fn start() -> Self {
        Self::start_with(1).await
    }

    /// Starts them with so many sentinels.
    ///
    /// # Panics
    /// As [`RedisSentinel::start`].
    pub async fn start_with(sentinels: usize) -> Self {
        let usual = ["--repl-diskless-sync-delay", "0", "--repl-backlog-size", "10mb"];
        let master = RedisServer::start_with(&usual).await;
        let port = master.port().to_string();
        let of = ["--replicaof", &format!("127.0.0.1 {port}")];
        let replica = RedisServer::start_with(&[&usual[..], &of].concat()).await;
        wait_until_linked(&replica).await;

        let ports: Vec<Port> = (0..sentinels).map(|_| Port::reserve()).collect();
        let ids: Vec<String> = (0..sentinels).map(|index| format!("{index:040x}")).collect();
        let peers: Vec<(u16, &String)> = ports.iter().map(|port| port.addr().port()).zip(&ids).collect();
        let config = |own: usize| {
            // What they would find out by themselves within some seconds.
            let others = peers.iter().enumerate().filter(|(index, _)| *index != own);
            let others = others
                .map(|(_, (port, id))| format!("sentinel known-sentinel {MASTER} 127.0.0.1 {port} {id}\n"));
            format!(
                "sentinel myid {}\n\
                 sentinel monitor {MASTER} 127.0.0.1 {port} {}\n\
                 sentinel down-after-milliseconds {MASTER} 500\n\
                 sentinel failover-timeout {MASTER} 4000\n\
                 sentinel known-replica {MASTER} 127.0.0.1 {}\n{}",
                ids[own],
                sentinels / 2 + 1,
                replica.port(),
                others.collect::<String>()
            )
        };
        let configs: Vec<String> = (0..sentinels).map(config).collect();
        let started = join_all(ports.into_iter().zip(&configs).map(async |(port, config)| {
            let started = RedisServer::try_start_on(port, vec!["--sentinel".to_owned()], Some(config)).await;
            started.unwrap_or_else(|why| panic!("{why}"))
        }))
        .await;
        let all = Self { servers: vec![master, replica], sentinels: started };
        // A failover before that would find no replica to promote.
        for sentinel in &all.sentinels {
            eventually(FAILOVER, || async {
                let replicas: Vec<::redis::Value> = sentinel.query(&["SENTINEL", "REPLICAS", MASTER]).await;
                let text = format!("{replicas:?}");
                text.contains("ok") && text.contains("bulk-string('\"slave\"')")
            })
            .await;
        }
        all
    }

    /// `redis+sentinel://127.0.0.1:PORT,…/main`
    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.sentinels.iter().map(|sentinel| sentinel.addr().to_string()).collect();
        format!("redis+sentinel://{}/{MASTER}", hosts.join(","))
    }

    /// The two servers, the first master first.
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// The master, as the first sentinel that runs says.
    ///
    /// # Panics
    /// When no sentinel knows.
    pub async fn master(&self) -> &RedisServer {
        let sentinel = self.sentinels.iter().find(|sentinel| sentinel.runs()).expect("a sentinel that runs");
        let (_, port): (String, u16) = sentinel.query(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]).await;
        self.servers.iter().find(|server| server.port() == port).expect("one of the servers")
    }

    /// Waits until another server than this one is the master and says so itself.
    ///
    /// # Panics
    /// When that takes more than twenty seconds.
    pub async fn wait_until_promoted(&self, old: &RedisServer) -> &RedisServer {
        let new = self.servers.iter().find(|server| server.port() != old.port()).expect("two servers");
        // A server closes all connections when its role changes.
        eventually(FAILOVER, || async {
            let role: Vec<::redis::Value> = new.try_query(&["ROLE"]).await?;
            let known = self.master().await.port();
            if format!("{role:?}").contains("master") && known == new.port() {
                Ok(())
            } else {
                Err(Failure::new(format!("the sentinels know {known}, and the other server is {role:?}")))
            }
        })
        .await;
        new
    }

    /// Orders a failover while the master lives, and waits for it.
    ///
    /// # Panics
    /// When the sentinels refuse or it takes more than twenty seconds.
    pub async fn failover(&self) -> &RedisServer {
        let old = self.master().await;
        self.sentinels[0].cli(&["SENTINEL", "FAILOVER", MASTER]).await;
        self.wait_until_promoted(old).await
    }
}

async fn wait_until_linked(replica: &RedisServer) {
    eventually(FAILOVER, || async {
        let info: String = replica.query(&["INFO", "replication"]).await;
        info.contains("master_link_status:up")
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_master_that_dies_is_replaced_with_what_was_replicated() {
        let redis = RedisSentinel::start_with(3).await;
        let old = redis.master().await;
        old.cli(&["SET", "a", "1"]).await;
        old.wait_until_replicated().await;
        old.kill();
        let new = redis.wait_until_promoted(old).await;
        assert_eq!(new.query::<u32>(&["GET", "a"]).await, 1);
    }

    #[tokio::test]
    async fn a_failover_can_be_ordered() {
        let redis = RedisSentinel::start().await;
        let old = redis.master().await.port();
        assert_ne!(redis.failover().await.port(), old);
    }
}
