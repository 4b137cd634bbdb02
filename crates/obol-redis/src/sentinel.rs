use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use redis::{ErrorKind, Pipeline, RedisResult};
use tokio::time::{Instant, timeout_at};

use crate::RedisError;
use crate::batch::Batch;
use crate::link::{Connection, Deadline, Link, Wanted, open};
use crate::renewed::{Lease, Renewed};
use crate::server::{Access, Address};

/// How long the other sentinels may take once one has answered: together they know better.
const GRACE: Duration = Duration::from_millis(50);

/// How often the keeper compares the master that is used with what the sentinels say. A master that was replaced while
/// it lives takes writes for seconds before it is told, and all of them are lost.
const LOOK: Duration = Duration::from_millis(500);

/// The sentinels of one master, and where they say it is.
pub(crate) struct Sentinels {
    name: Arc<str>,
    master: String,
    links: Vec<(Address, Arc<Link>)>,
    access: Access,
    connect_timeout: Duration,
    /// The epoch of the master that was found last. A sentinel that knows only an older one was away meanwhile.
    epoch: AtomicU64,
}

struct Found {
    address: Address,
    epoch: u64,
}

/// A master's address, and what else a sentinel knows of it.
type Says = (RedisResult<Option<(String, u16)>>, RedisResult<HashMap<String, String>>);

impl Sentinels {
    /// `access` is for the master.
    pub(crate) fn new(
        master: String,
        links: Vec<(Address, Arc<Link>)>,
        access: Access,
        connect_timeout: Duration,
    ) -> Arc<Self> {
        let names: Vec<&str> = links.iter().map(|(_, link)| &*link.name).collect();
        let name = format!("{master} of {}", names.join(",")).into();
        Arc::new(Self { name, master, links, access, connect_timeout, epoch: AtomicU64::new(0) })
    }

    /// The link to whoever is the master.
    pub(crate) fn link(self: &Arc<Self>) -> Arc<Link> {
        let sentinels = self.clone();
        let make = move |lease| sentinels.clone().connect(lease).boxed();
        // Two steps, of which the second has a limit of its own.
        let limit = self.connect_timeout * 2;
        let connection = Renewed::new("redis connection", self.name.clone(), limit, make);
        Arc::new(Link { name: self.name.clone(), connection })
    }

    async fn connect(self: Arc<Self>, lease: Lease<Connection>) -> Result<Connection, RedisError> {
        let found = self.find().await?;
        let server = self.access.server(&found.address)?;
        let connection = open(server, Wanted::Master, self.connect_timeout, lease).await?;
        // Once more: a master that was silent while another took its place still calls itself one when it wakes up.
        let found = self.find().await?;
        if found.address != connection.server.address {
            return Err(self.error("the sentinels have just named another master; it is asked next"));
        }
        self.epoch.store(found.epoch, Ordering::Relaxed);
        Ok(connection)
    }

    /// Where the master is, of those answers that come in time the latest.
    async fn find(&self) -> Result<Found, RedisError> {
        let deadline = Deadline::after(self.connect_timeout);
        let mut asked: FuturesUnordered<_> =
            self.links.iter().map(|(address, link)| self.ask(address, link, deadline)).collect();
        let (mut best, mut failure): (Option<Found>, _) = (None, None);
        let mut until = Instant::now() + self.connect_timeout;
        while let Ok(Some(answer)) = timeout_at(until, asked.next()).await {
            match answer {
                Ok(found) => {
                    until = until.min(Instant::now() + GRACE);
                    if best.as_ref().is_none_or(|best| found.epoch > best.epoch) {
                        best = Some(found);
                    }
                }
                Err(why) => failure = Some(why),
            }
        }
        best.ok_or_else(|| failure.unwrap_or_else(|| RedisError::silent(&self.name)))
    }

    async fn ask(&self, by: &Address, link: &Link, deadline: Deadline) -> Result<Found, RedisError> {
        let mut pipe = Pipeline::with_capacity(2);
        // The first names the new master as soon as it was promoted; the second has the epoch.
        pipe.ignore_errors();
        pipe.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&self.master);
        pipe.cmd("SENTINEL").arg("MASTER").arg(&self.master);
        let batch = Batch::Many(&pipe);
        let answers = link.exchange(batch, deadline).await?;
        let failed = |why| RedisError::command(&answers.server, why);
        let (address, about): Says = batch.read(answers.values).await.map_err(failed)?;
        let Some((host, port)) = address.map_err(failed)? else {
            return Err(
                self.error("the sentinels watch no master of this name; correct it, or tell them of it")
            );
        };
        let epoch = about.ok().and_then(|about| about.get("config-epoch")?.parse().ok()).unwrap_or(0);
        Ok(Found { address: Address::announced(&host, port, by), epoch })
    }

    fn error(&self, hint: &'static str) -> RedisError {
        let source = redis::RedisError::from((ErrorKind::Client, "the master cannot be found"));
        RedisError::Connect { server: self.name.clone(), hint, source }
    }

    /// Keeps the connections to the sentinels and to the master open, and follows the master. Has no end.
    pub(crate) async fn keep(self: Arc<Self>, link: Arc<Link>, patience: Duration) {
        let sentinels = self.links.iter().map(|(_, link)| link.clone().keep(patience));
        let (those, master) = (self.clone(), link.clone());
        let look = move |connection| those.clone().look(master.clone(), connection, patience).boxed();
        tokio::join!(link.connection.clone().tend(LOOK, look), futures::future::join_all(sentinels));
    }

    async fn look(self: Arc<Self>, link: Arc<Link>, connection: Connection, patience: Duration) {
        let (found, ()) = tokio::join!(self.find(), link.beat(patience));
        // Sentinels that cannot be asked are no reason to leave a master that answers.
        if let Ok(found) = found
            && found.address != connection.server.address
            && found.epoch >= self.epoch.load(Ordering::Relaxed)
        {
            connection.retire("no longer the master");
        }
    }
}
