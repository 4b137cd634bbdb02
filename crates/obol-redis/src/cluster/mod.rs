//! A Redis Cluster: every command goes to the node that serves its slot.

mod map;
mod slot;

use std::collections::{BTreeMap, HashMap};
use std::future::{pending, ready};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use parking_lot::Mutex;
use redis::{Cmd, Pipeline, ServerErrorKind, Value};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::RedisError;
use crate::batch::Batch;
use crate::link::{Answers, Deadline, Link, Wanted};
use crate::renewed::{Lease, Renewed, jittered};
use crate::server::{Access, Address, Server};

use self::map::SlotMap;

/// A node that is asked for the map may take this long before another one is asked as well.
const HEDGE: Duration = Duration::from_millis(100);

/// How often the map is looked at anew while one of its masters is away: another node may have taken its slots.
const LOOK: Duration = Duration::from_millis(250);

/// How often a command is sent on. A slot that moves twice within a moment takes three.
const HOPS: usize = 4;

/// A map that is right needs no looking after; nodes tell when it is not.
const REST: Duration = Duration::from_secs(60);

/// The longest look for the map, whatever number of nodes it takes.
const LONGEST_LOOK: Duration = Duration::from_secs(1);

/// The nodes of a Cluster and who of them serves what.
pub(crate) struct Cluster {
    nodes: Arc<Nodes>,
    map: Arc<Renewed<Mapped>>,
}

struct Nodes {
    name: Arc<str>,
    access: Access,
    seeds: Vec<Address>,
    connect_timeout: Duration,
    /// Of the masters of the last map, and of nodes that commands were sent on to since.
    links: Mutex<HashMap<Address, Arc<Link>>>,
    /// The last map that was seen. It is used while a new one is looked for: most of it will still be right, and the
    /// nodes tell what is not.
    last: watch::Sender<Option<Mapped>>,
}

/// Where commands belong: the node, whether it is about to take the slot over (`ASK`), and their positions.
type Elsewhere = BTreeMap<(String, bool), Vec<usize>>;

#[derive(Clone)]
struct Mapped {
    slots: Arc<SlotMap>,
    lease: Lease<Self>,
}

impl Mapped {
    fn owner(&self, cmd: &Cmd) -> Option<Arc<Link>> {
        match slot::of_command(cmd) {
            Some(slot) => self.slots.owner(slot).cloned(),
            None => self.slots.any().cloned(),
        }
    }

    /// Which commands belong to other nodes, as these answers say.
    fn elsewhere(&self, answers: &Answers) -> Elsewhere {
        let mut elsewhere = Elsewhere::new();
        for (position, value) in answers.values.iter().enumerate() {
            let Value::ServerError(error) = value else { continue };
            let ask = match error.kind() {
                Some(ServerErrorKind::Moved) => {
                    self.lease.retire("out of date: a slot moved");
                    false
                }
                Some(ServerErrorKind::Ask) => true,
                Some(ServerErrorKind::ClusterDown) => {
                    self.lease.retire("out of date: the cluster is down");
                    continue;
                }
                _ => continue,
            };
            // `SLOT HOST:PORT`
            if let Some((_, to)) = error.details().and_then(|details| details.split_once(' ')) {
                elsewhere.entry((to.to_owned(), ask)).or_default().push(position);
            }
        }
        elsewhere
    }

    /// The commands by who serves them, as positions in their order. Those without keys go along with others.
    fn parts<'a>(&self, commands: impl Iterator<Item = &'a Cmd>) -> Vec<(Option<Arc<Link>>, Vec<usize>)> {
        let mut parts: Vec<(Option<Arc<Link>>, Vec<usize>)> = Vec::new();
        let mut anywhere = Vec::new();
        for (position, cmd) in commands.enumerate() {
            let Some(slot) = slot::of_command(cmd) else {
                anywhere.push(position);
                continue;
            };
            let owner = self.slots.owner(slot);
            match parts.iter_mut().find(|(link, _)| link.as_ref().map(Arc::as_ptr) == owner.map(Arc::as_ptr))
            {
                Some((_, positions)) => positions.push(position),
                None => parts.push((owner.cloned(), vec![position])),
            }
        }
        if !anywhere.is_empty() {
            match parts.first_mut() {
                Some((_, positions)) => {
                    positions.extend(anywhere);
                    positions.sort_unstable();
                }
                None => parts.push((self.slots.any().cloned(), anywhere)),
            }
        }
        parts
    }
}

impl Cluster {
    pub(crate) fn new(
        name: Arc<str>,
        seeds: Vec<Address>,
        access: Access,
        connect_timeout: Duration,
    ) -> Self {
        let last = watch::Sender::new(None);
        let nodes = Arc::new(Nodes { name, access, seeds, connect_timeout, links: Mutex::default(), last });
        let looking = nodes.clone();
        let make = move |lease| looking.clone().look(lease).boxed();
        let map = Renewed::new("map of the redis cluster", nodes.name.clone(), LONGEST_LOOK, make);
        Self { nodes, map }
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.nodes.name
    }

    async fn map(&self) -> Result<Mapped, RedisError> {
        if let Some(mapped) = self.map.now() {
            return Ok(mapped);
        }
        let last = self.nodes.last.borrow().clone();
        match last {
            Some(last) if self.map.kept() => Ok(last),
            last => self.map.get().await.or_else(|why| last.ok_or(why)),
        }
    }

    /// All masters.
    pub(crate) async fn masters(&self, deadline: Deadline) -> Result<Vec<Arc<Link>>, RedisError> {
        let mapped = deadline.bound(self.name(), self.map()).await?;
        Ok(mapped.slots.masters().iter().map(|(_, link)| link.clone()).collect())
    }

    /// A master to listen to, preferably one that answers. A message that is published anywhere reaches all nodes.
    pub(crate) async fn listen_to(&self) -> Result<Arc<Server>, RedisError> {
        let mapped = self.map().await?;
        let (up, down): (Vec<_>, Vec<_>) =
            mapped.slots.masters().iter().partition(|(_, link)| link.connection.now().is_some());
        let from = if up.is_empty() { down } else { up };
        let any = from.get(rand::random_range(0..from.len().max(1)));
        let (address, _) = any.ok_or_else(|| RedisError::unserved(self.name()))?;
        self.nodes.access.server(address)
    }

    /// Until the node does not belong to the Cluster any more.
    pub(crate) async fn left(&self, node: &Address) {
        let mut maps = self.nodes.last.subscribe();
        // The sender lives in `self`, so this cannot fail.
        drop(maps.wait_for(|last| last.as_ref().is_some_and(|mapped| !mapped.slots.knows(node))).await);
    }

    /// One flight to each node that the commands belong to.
    pub(crate) async fn send(&self, batch: Batch<'_>, deadline: Deadline) -> Result<Answers, RedisError> {
        let mapped = deadline.bound(self.name(), self.map()).await?;
        let mut parts = mapped.parts(batch.commands());
        if parts.len() == 1
            && let Some((link, _)) = parts.pop()
        {
            return self.exchange(&mapped, link.as_deref(), batch, deadline).await;
        }
        let outcomes = join_all(parts.into_iter().map(async |(link, positions)| {
            let mut pipe = Pipeline::with_capacity(positions.len());
            for cmd in batch.at(&positions) {
                pipe.add_command(cmd.clone());
            }
            let outcome = self.exchange(&mapped, link.as_deref(), Batch::Many(&pipe), deadline).await;
            (positions, outcome)
        }))
        .await;
        let mut all = Answers::none(batch.len(), self.name());
        let mut answered = false;
        for (positions, outcome) in outcomes {
            answered |= outcome.is_ok();
            all.place(positions, outcome);
        }
        match all.failure.take_if(|_| !answered) {
            Some(why) => Err(why),
            None => Ok(all),
        }
    }

    /// Sends `first` and, beside it, commands whose answers nobody waits for. Those of the same node follow it in the same
    /// flight.
    pub(crate) async fn send_beside(
        &self,
        first: Cmd,
        beside: Vec<Cmd>,
        deadline: Deadline,
    ) -> Result<Answers, RedisError> {
        let mapped = deadline.bound(self.name(), self.map()).await?;
        let owner = mapped.owner(&first);
        let mut same = Pipeline::with_capacity(1 + beside.len());
        same.add_command(first);
        let mut other = Pipeline::with_capacity(beside.len());
        for cmd in beside {
            let theirs = mapped.owner(&cmd);
            let is_same = theirs.zip(owner.as_ref()).is_some_and(|(theirs, ours)| Arc::ptr_eq(&theirs, ours));
            if is_same { &mut same } else { &mut other }.add_command(cmd);
        }
        let answer = self.exchange(&mapped, owner.as_deref(), Batch::Many(&same), deadline);
        let others = async {
            if !other.is_empty() {
                drop(self.send(Batch::Many(&other), deadline).await);
            }
            pending().await
        };
        // Both are written before either is waited for; a node that is slow beside does not delay the answer.
        tokio::select! {
            biased;
            answer = answer => answer,
            never = others => never,
        }
    }

    /// One flight to one node, and one more for what it sends on to others.
    async fn exchange(
        &self,
        mapped: &Mapped,
        link: Option<&Link>,
        batch: Batch<'_>,
        deadline: Deadline,
    ) -> Result<Answers, RedisError> {
        let Some(link) = link else {
            mapped.lease.retire("out of date: a slot has no owner");
            return Err(RedisError::unserved(self.name()));
        };
        let outcome = link.exchange(batch, deadline).await;
        let mut answers = outcome.inspect_err(|_| mapped.lease.retire("out of date: a node is away"))?;
        for _ in 0..HOPS {
            let elsewhere = mapped.elsewhere(&answers);
            if elsewhere.is_empty() || batch.is_transaction() {
                break;
            }
            self.send_on(link, batch, elsewhere, &mut answers, deadline).await;
        }
        Ok(answers)
    }

    /// Sends commands to the nodes that others named: those have not executed them, so they run at most once.
    async fn send_on(
        &self,
        link: &Link,
        batch: Batch<'_>,
        elsewhere: Elsewhere,
        answers: &mut Answers,
        deadline: Deadline,
    ) {
        let outcomes = join_all(elsewhere.into_iter().map(async |((to, ask), positions)| {
            let outcome = async {
                let node = self.nodes.named(&to, link)?;
                let mut pipe = Pipeline::with_capacity(positions.len() * 2);
                for cmd in batch.at(&positions) {
                    if ask {
                        pipe.cmd("ASKING");
                    }
                    pipe.add_command(cmd.clone());
                }
                let mut answers = node.exchange(Batch::Many(&pipe), deadline).await?;
                if ask {
                    answers.values = answers.values.into_iter().skip(1).step_by(2).collect();
                }
                Ok(answers)
            };
            let outcome = outcome.await;
            (positions, outcome)
        }))
        .await;
        for (positions, outcome) in outcomes {
            answers.place(positions, outcome);
        }
    }

    /// Keeps the connections to all masters open and the map up to date. Has no end.
    pub(crate) async fn keep(&self, patience: Duration) {
        let map = self.map.clone().tend(REST, |_| ready(()).boxed());
        tokio::join!(map, self.keep_nodes(patience));
    }

    async fn keep_nodes(&self, patience: Duration) {
        let mut maps = self.nodes.last.subscribe();
        let mut kept: HashMap<Address, (Arc<Link>, CancellationToken)> = HashMap::new();
        let mut keeping: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
        loop {
            let mapped = maps.borrow_and_update().clone();
            let masters = mapped.as_ref().map_or(&[][..], |mapped| mapped.slots.masters());
            kept.retain(|address, (link, stop)| {
                let stays =
                    masters.iter().any(|(other, theirs)| other == address && Arc::ptr_eq(theirs, link));
                if !stays {
                    stop.cancel();
                }
                stays
            });
            for (address, link) in masters {
                if !kept.contains_key(address) {
                    let stop = CancellationToken::new();
                    kept.insert(address.clone(), (link.clone(), stop.clone()));
                    keeping.push(keep_node(link.clone(), self.map.clone(), patience, stop).boxed());
                }
            }
            tokio::select! {
                // The sender lives in `self`, so this cannot fail.
                _ = maps.changed() => {}
                Some(()) = keeping.next() => {}
            }
        }
    }
}

/// Keeps the connection to a master open until `stop`, and has the map looked at while it cannot be.
async fn keep_node(link: Arc<Link>, map: Arc<Renewed<Mapped>>, patience: Duration, stop: CancellationToken) {
    let watch = async {
        let mut lost = link.connection.losses();
        loop {
            lost.mark_unchanged();
            if link.connection.now().is_some() && lost.changed().await.is_err() {
                return;
            }
            sleep(jittered(LOOK)).await;
            if link.connection.now().is_none()
                && let Some(mapped) = map.now()
            {
                mapped.lease.retire("out of date: a node is away");
            }
        }
    };
    tokio::select! {
        ((), ()) = async { tokio::join!(link.clone().keep(patience), watch) } => {}
        () = stop.cancelled() => {}
    }
}

impl Nodes {
    fn link(&self, address: &Address) -> Result<Arc<Link>, RedisError> {
        let mut links = self.links.lock();
        if let Some(link) = links.get(address) {
            return Ok(link.clone());
        }
        let link = Link::new(self.access.server(address)?, Wanted::Node, self.connect_timeout);
        links.insert(address.clone(), link.clone());
        Ok(link)
    }

    /// The node that another one names, as `HOST:PORT`.
    fn named(&self, to: &str, by: &Link) -> Result<Arc<Link>, RedisError> {
        let by = by.connection.now().map(|connection| connection.server.address.clone());
        let by = by.unwrap_or_else(|| Address::new("", 0));
        let address = to.rsplit_once(':').and_then(|(host, port)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            Some(Address::announced(host, port.parse().ok()?, &by))
        });
        let address = address.filter(|address| !address.host.is_empty());
        self.link(&address.ok_or_else(|| RedisError::unexpected(&self.name))?)
    }

    /// Asks for the map: nodes that are connected first, one after the other, the ones of the URL last.
    async fn look(self: Arc<Self>, lease: Lease<Mapped>) -> Result<Mapped, RedisError> {
        let mut asked = FuturesUnordered::new();
        let mut failure = None;
        let mut candidates = self.candidates().into_iter();
        let slots = loop {
            if let Some(address) = candidates.next() {
                asked.push(self.ask(address));
            } else if asked.is_empty() {
                return Err(failure.unwrap_or_else(|| RedisError::silent(&self.name)));
            }
            match timeout(HEDGE, asked.next()).await {
                Ok(Some(Ok(slots))) => break slots,
                Ok(Some(Err(why))) => failure = Some(why),
                Ok(None) | Err(_) => {}
            }
        };
        drop(asked);
        let mapped = Mapped { slots: Arc::new(slots), lease };
        let masters = mapped.slots.masters();
        self.links.lock().retain(|address, _| masters.iter().any(|(master, _)| master == address));
        self.last.send_replace(Some(mapped.clone()));
        Ok(mapped)
    }

    fn candidates(&self) -> Vec<Address> {
        let last = self.last.borrow().clone();
        let mut known: Vec<(bool, u32, Address)> = last
            .iter()
            .flat_map(|mapped| mapped.slots.masters())
            .map(|(address, link)| (link.connection.now().is_none(), rand::random(), address.clone()))
            .collect();
        known.sort_by_key(|(down, order, _)| (*down, *order));
        let known = known.into_iter().map(|(.., address)| address);
        known.chain(self.seeds.iter().cloned()).collect()
    }

    async fn ask(&self, address: Address) -> Result<SlotMap, RedisError> {
        let link = self.link(&address)?;
        let cmd = redis::cmd("CLUSTER").arg("SLOTS").to_owned();
        let answer = link.ask(&cmd, Deadline::after(self.connect_timeout)).await?;
        SlotMap::read(&answer, &address, |address| self.link(address).ok()).ok_or_else(|| {
            RedisError::Server {
                server: link.name.clone(),
                code: "CLUSTERDOWN".into(),
                detail: "it knows no node that serves any slot".into(),
            }
        })
    }
}
