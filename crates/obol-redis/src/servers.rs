use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use redis::{Cmd, Pipeline};
use tokio::time::sleep;

use crate::RedisError;
use crate::batch::Batch;
use crate::cluster::Cluster;
use crate::link::{Answers, Deadline, Link, Wanted};
use crate::renewed::jittered;
use crate::sentinel::Sentinels;
use crate::server::{Access, Address, Server};
use crate::url::{Layout, RedisUrl};

/// How often a subscription looks for the master while there is none.
const LOOK: Duration = Duration::from_millis(500);

/// All servers of one Redis, and which of them to ask.
pub(crate) enum Servers {
    Single { server: Arc<Server>, link: Arc<Link> },
    Sentinel { sentinels: Arc<Sentinels>, link: Arc<Link> },
    Cluster(Cluster),
}

impl Servers {
    /// # Errors
    /// [`RedisError::BadCa`].
    pub(crate) fn new(
        url: RedisUrl,
        ca: Option<&Arc<[u8]>>,
        connect_timeout: Duration,
    ) -> Result<Self, RedisError> {
        let RedisUrl { tls, credentials, hosts, layout, .. } = url;
        let access = |credentials, db| Access { credentials, db, tls, ca: ca.cloned() };
        let names = hosts.iter().map(Address::to_string).collect::<Vec<_>>().join(",");
        Ok(match layout {
            Layout::Single { db } => {
                let first = hosts.first().cloned().unwrap_or_else(|| Address::new("", 0));
                let server = access(credentials, db).server(&first)?;
                let link = Link::new(server.clone(), Wanted::Master, connect_timeout);
                Self::Single { server, link }
            }
            Layout::Sentinel { master, db, login } => {
                let to_sentinels = access(login, 0);
                let mut links = Vec::with_capacity(hosts.len());
                for address in hosts {
                    let server = to_sentinels.server(&address)?;
                    links.push((address, Link::new(server, Wanted::Sentinel, connect_timeout)));
                }
                let sentinels = Sentinels::new(master, links, access(credentials, db), connect_timeout);
                let link = sentinels.link();
                Self::Sentinel { sentinels, link }
            }
            Layout::Cluster => {
                let access = access(credentials, 0);
                // What is wrong with the certificates is to be said at once.
                hosts.iter().try_for_each(|host| access.server(host).map(drop))?;
                Self::Cluster(Cluster::new(names.into(), hosts, access, connect_timeout))
            }
        })
    }

    /// For people.
    pub(crate) fn name(&self) -> &Arc<str> {
        match self {
            Self::Single { link, .. } | Self::Sentinel { link, .. } => &link.name,
            Self::Cluster(cluster) => cluster.name(),
        }
    }

    /// Connects to all masters.
    pub(crate) async fn open(&self, deadline: Deadline) -> Result<(), RedisError> {
        let masters = self.masters(deadline).await?;
        try_join_all(masters.iter().map(|link| link.connection.get())).await.map(drop)
    }

    /// The servers that together hold everything.
    pub(crate) async fn masters(&self, deadline: Deadline) -> Result<Vec<Arc<Link>>, RedisError> {
        match self {
            Self::Single { link, .. } | Self::Sentinel { link, .. } => Ok(vec![link.clone()]),
            Self::Cluster(cluster) => cluster.masters(deadline).await,
        }
    }

    /// One flight to each server that the commands belong to.
    pub(crate) async fn send(&self, batch: Batch<'_>, deadline: Deadline) -> Result<Answers, RedisError> {
        match self {
            Self::Single { link, .. } | Self::Sentinel { link, .. } => link.exchange(batch, deadline).await,
            Self::Cluster(cluster) => cluster.send(batch, deadline).await,
        }
    }

    /// Sends `first` and commands whose answers nobody needs; only its answer is one that counts.
    pub(crate) async fn send_beside(
        &self,
        first: Cmd,
        beside: Vec<Cmd>,
        deadline: Deadline,
    ) -> Result<Answers, RedisError> {
        match self {
            Self::Single { link, .. } | Self::Sentinel { link, .. } => {
                let mut pipe = Pipeline::with_capacity(1 + beside.len());
                for cmd in std::iter::once(first).chain(beside) {
                    pipe.add_command(cmd);
                }
                link.exchange(Batch::Many(&pipe), deadline).await
            }
            Self::Cluster(cluster) => cluster.send_beside(first, beside, deadline).await,
        }
    }

    /// Where to listen to messages.
    pub(crate) async fn listen_to(&self) -> Result<Arc<Server>, RedisError> {
        match self {
            Self::Single { server, .. } => Ok(server.clone()),
            Self::Sentinel { link, .. } => Ok(link.connection.get().await?.server),
            Self::Cluster(cluster) => cluster.listen_to().await,
        }
    }

    /// Until messages do not reach this server any more although it lives: another one is the master, or it left the
    /// Cluster.
    pub(crate) async fn left(&self, server: &Address) {
        match self {
            Self::Single { .. } => pending().await,
            Self::Sentinel { link, .. } => {
                let mut lost = link.connection.losses();
                loop {
                    lost.mark_unchanged();
                    match link.connection.get().await {
                        Ok(connection) if connection.server.address != *server => return,
                        // The sender lives in the link, so this cannot fail.
                        Ok(_) => drop(lost.changed().await),
                        Err(_) => sleep(jittered(LOOK)).await,
                    }
                }
            }
            Self::Cluster(cluster) => cluster.left(server).await,
        }
    }

    /// Looks after all connections. Has no end.
    pub(crate) async fn keep(&self, patience: Duration) {
        match self {
            Self::Single { link, .. } => link.clone().keep(patience).await,
            Self::Sentinel { sentinels, link } => sentinels.clone().keep(link.clone(), patience).await,
            Self::Cluster(cluster) => cluster.keep(patience).await,
        }
    }

    /// Asks every master the same.
    pub(crate) async fn ask_all(
        &self,
        cmd: &Cmd,
        deadline: Deadline,
    ) -> Result<Vec<(Arc<str>, redis::Value)>, RedisError> {
        let masters = self.masters(deadline).await?;
        let asked = join_all(
            masters.iter().map(async |link| Ok((link.name.clone(), link.ask(cmd, deadline).await?))),
        );
        asked.await.into_iter().collect()
    }
}
