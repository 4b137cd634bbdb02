use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use http::StatusCode;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use obol_auth::{ServiceTokens, party};
use obol_dial::{Dialer, connect_reason};
use obol_model::{Causes, Clock, ReplicaId, metric};
use obol_redis::RedisError;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use url::Url;
use uuid::Uuid;

use crate::envelope::{NotTaken, Outgoing, PATH, Taken, VERSION};
use crate::inbox::WRONG_REPLICA;
use crate::lease::Lease;
use crate::registry::{Peer, RENEW, Registry};
use crate::{Ack, Message, PeerError};

/// The largest answer that is read.
const MAX_ANSWER: usize = 64 << 10;

/// What it takes to send to peers.
#[derive(Debug, Clone)]
pub struct Channel {
    /// Where the others reach this replica.
    pub advertised: Url,
    /// Signs as `obol-gateway`.
    pub tokens: Arc<ServiceTokens>,
    /// Makes the connections.
    pub dialer: Dialer,
    /// Wall time for the tokens.
    pub clock: Arc<dyn Clock>,
}

/// The other replicas.
pub struct Peers {
    me: Peer,
    /// `None` for a process that shares nothing.
    registry: Option<Registry>,
    channel: Option<Channel>,
    known: Mutex<Known>,
    lease: Mutex<Lease>,
}

/// What was last read of the registry.
#[derive(Debug, Default)]
struct Known {
    live: Vec<Peer>,
    /// It was said that there are others that cannot be reached.
    warned: bool,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers").field("me", &self.me.id).finish_non_exhaustive()
    }
}

impl Peers {
    /// The peers of the replica `me`. Without a channel it still holds its lease, sends nothing and is sent nothing.
    pub fn new(me: ReplicaId, registry: Registry, channel: Option<Channel>) -> Arc<Self> {
        let url = channel.as_ref().map(|c| c.advertised.clone());
        Arc::new(Self {
            me: Peer::this(me, url),
            registry: Some(registry),
            channel,
            known: Mutex::default(),
            lease: Mutex::default(),
        })
    }

    /// A replica that has none: its state is in its own memory.
    pub fn alone(me: ReplicaId) -> Arc<Self> {
        Arc::new(Self {
            me: Peer::this(me, None),
            registry: None,
            channel: None,
            known: Mutex::default(),
            lease: Mutex::default(),
        })
    }

    /// The replica that this is.
    pub fn me(&self) -> &ReplicaId {
        &self.me.id
    }

    /// The other replicas, as of the last renewal.
    pub fn live(&self) -> Vec<Peer> {
        self.known.lock().live.clone()
    }

    /// Takes or renews the lease and looks who the others are.
    ///
    /// # Errors
    /// When the registry could not be asked.
    pub async fn renew(&self) -> Result<(), PeerError> {
        let Some(registry) = &self.registry else { return Ok(()) };
        let ids = self.take_lease(registry).await.map_err(PeerError::Registry)?;
        self.learn(registry, ids).await.map(drop)
    }

    /// Whether this replica has its lease, which also says whether the registry takes what is written. When it seems not
    /// to, that is tried at once, so that a replica is ready again in the moment in which it can be.
    pub async fn holds_lease(&self) -> bool {
        let Some(registry) = &self.registry else { return true };
        let holds = self.lease.lock().holds(Instant::now());
        holds || self.take_lease(registry).await.is_ok()
    }

    async fn take_lease(&self, registry: &Registry) -> Result<Vec<ReplicaId>, RedisError> {
        let outcome = registry.renew(&self.me).await;
        self.lease.lock().note(&outcome, Instant::now());
        outcome
    }

    /// Renews the lease every 5 s until `shutdown`, then gives it up. To be ended last of all: what a replica holds is
    /// taken to be lost when its lease is gone.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let Some(registry) = &self.registry else { return };
        let mut tick = tokio::time::interval(RENEW);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        tick.reset();
        while shutdown.run_until_cancelled(tick.tick()).await.is_some() {
            if let Err(e) = self.renew().await {
                // The lease itself has spoken.
                tracing::debug!(error = %Causes(&e), "the replicas could not be looked up");
            }
        }
        if let Err(e) = registry.leave(&self.me.id).await {
            tracing::debug!(error = %e, "the lease of this replica ends by itself");
        }
    }

    /// Delivers a message to one replica within this time.
    ///
    /// # Errors
    /// See [`PeerError`]: who is gone is told from who cannot be reached.
    pub async fn send(&self, to: &ReplicaId, message: &Message, within: Duration) -> Result<Ack, PeerError> {
        let deadline = Instant::now() + within;
        let sent = tokio::time::timeout_at(deadline, async {
            let peer = self.find(to).await?;
            self.post(&peer, message, deadline).await
        });
        let sent = sent.await.unwrap_or_else(|_| Err(PeerError::Deadline { replica: to.clone() }));
        counted(sent)
    }

    /// Delivers a message to every other replica that has a channel, to all at once within this time. Looks into the
    /// registry first, so that no replica that was ready before is left out; when that cannot be asked, those who were
    /// known last are told.
    pub async fn broadcast(
        &self,
        message: &Message,
        within: Duration,
    ) -> Vec<(ReplicaId, Result<Ack, PeerError>)> {
        let (Some(registry), Some(_)) = (&self.registry, &self.channel) else { return Vec::new() };
        let deadline = Instant::now() + within;
        let look = async {
            let ids = registry.live().await.map_err(PeerError::Registry)?;
            self.learn(registry, ids).await
        };
        // A registry that is silent must not use up the time of those who can be told.
        let peers = match tokio::time::timeout(within / 2, look).await {
            Ok(Ok(peers)) => peers,
            Ok(Err(e)) => {
                tracing::debug!(error = %Causes(&e), "those replicas are told that were known last");
                self.live()
            }
            Err(_) => self.live(),
        };
        join_all(peers.into_iter().filter(|peer| peer.url.is_some()).map(|peer| async move {
            let posted = tokio::time::timeout_at(deadline, self.post(&peer, message, deadline)).await;
            let posted = posted.unwrap_or_else(|_| Err(PeerError::Deadline { replica: peer.id.clone() }));
            (peer.id, counted(posted))
        }))
        .await
    }

    /// Reads the leases that are new, and forgets those that are gone.
    async fn learn(&self, registry: &Registry, ids: Vec<ReplicaId>) -> Result<Vec<Peer>, PeerError> {
        let ids: Vec<ReplicaId> = ids.into_iter().filter(|id| *id != self.me.id).collect();
        let new: Vec<ReplicaId> = {
            let known = self.known.lock();
            ids.iter().filter(|id| known.live.iter().all(|peer| peer.id != **id)).cloned().collect()
        };
        let found = registry.find(&new).await.map_err(PeerError::Registry)?;
        let mut known = self.known.lock();
        known.live.retain(|peer| ids.contains(&peer.id));
        for peer in found {
            // Two callers may have read the same one.
            if known.live.iter().all(|other| other.id != peer.id) {
                tracing::info!(peer = %peer.id, release = peer.release, channel = peer.url.is_some(), "replica found");
                known.live.push(peer);
            }
        }
        let unreachable = self.channel.is_none() || known.live.iter().any(|peer| peer.url.is_none());
        if unreachable && !known.live.is_empty() && !known.warned {
            known.warned = true;
            tracing::warn!(
                "other replicas share this Redis and not all have a peer channel: set OBOL_PEER_LISTEN on every \
                 replica, or what one is told reaches the others late"
            );
        }
        metrics::gauge!(metric::PEERS).set(u32::try_from(known.live.len()).unwrap_or(u32::MAX));
        Ok(known.live.clone())
    }

    async fn find(&self, id: &ReplicaId) -> Result<Peer, PeerError> {
        if let Some(peer) = self.known.lock().live.iter().find(|peer| peer.id == *id) {
            return Ok(peer.clone());
        }
        let unknown = || PeerError::Unknown { replica: id.clone() };
        let registry = self.registry.as_ref().ok_or_else(unknown)?;
        let found = registry.find(std::slice::from_ref(id)).await.map_err(PeerError::Registry)?;
        found.into_iter().next().ok_or_else(unknown)
    }

    async fn post(&self, peer: &Peer, message: &Message, deadline: Instant) -> Result<Ack, PeerError> {
        let replica = || peer.id.clone();
        let (Some(channel), Some(url)) = (&self.channel, &peer.url) else {
            return Err(PeerError::NoChannel { replica: replica() });
        };
        // The address was written by whoever can write to Redis.
        obol_dial::check(url, true).map_err(|_| PeerError::Unreachable {
            replica: replica(),
            reason: "its address is not allowed",
        })?;
        let id = Uuid::new_v4();
        match self.attempt(channel, peer, url, id, message, deadline).await {
            // A connection that was kept and that the other side closed: once more, on a new one and under the same id.
            Err(PeerError::Unreachable { reason: BROKE, .. }) => {
                self.attempt(channel, peer, url, id, message, deadline).await
            }
            outcome => outcome,
        }
    }

    async fn attempt(
        &self,
        channel: &Channel,
        peer: &Peer,
        url: &Url,
        id: Uuid,
        message: &Message,
        deadline: Instant,
    ) -> Result<Ack, PeerError> {
        let replica = || peer.id.clone();
        let unsendable = |reason| move |_| PeerError::Unsendable { reason };
        let token = channel
            .tokens
            .sign(party::PEER, peer.id.as_str(), channel.clock.now())
            .map_err(|_| PeerError::Unsendable { reason: "the token could not be signed" })?;
        let left = deadline.saturating_duration_since(Instant::now());
        let envelope = Outgoing {
            v: VERSION,
            id,
            from: &self.me.id,
            within_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
            kind: message.kind(),
            body: message.body(),
        };
        let body = serde_json::to_vec(&envelope).map_err(unsendable("it cannot be written"))?;
        let url = url
            .join(PATH.trim_start_matches('/'))
            .map_err(|_| PeerError::Unreachable { replica: replica(), reason: "its address is no URL" })?;
        let mut authorization = http::HeaderValue::from_str(&format!("Bearer {}", token.expose()))
            .map_err(|_| PeerError::Unsendable { reason: "the token could not be signed" })?;
        authorization.set_sensitive(true);
        let request = channel
            .dialer
            .client(true)
            .post(url)
            .header(AUTHORIZATION, authorization)
            .header(CONTENT_TYPE, "application/json")
            .body(body);
        let broke = |e: reqwest::Error| PeerError::Unreachable {
            replica: replica(),
            reason: if e.is_connect() { connect_reason(&e) } else { BROKE },
        };
        let mut response = request.send().await.map_err(broke)?;
        let status = response.status();
        let mut answer = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(broke)? {
            answer.extend_from_slice(&chunk);
            if answer.len() > MAX_ANSWER {
                break;
            }
        }
        if status == StatusCode::OK
            && let Ok(Taken { ack }) = serde_json::from_slice(&answer)
        {
            return Ok(ack);
        }
        let code = serde_json::from_slice::<NotTaken>(&answer).map(|refused| refused.error.code);
        match (status, code) {
            (StatusCode::MISDIRECTED_REQUEST, Ok(code)) if code == WRONG_REPLICA => {
                Err(PeerError::Unknown { replica: replica() })
            }
            (StatusCode::GATEWAY_TIMEOUT, Ok(_)) => Err(PeerError::Deadline { replica: replica() }),
            (_, Ok(code)) => Err(PeerError::Refused { replica: replica(), code }),
            // Something else lives there.
            (status, Err(_)) => {
                Err(PeerError::Refused { replica: replica(), code: format!("http_{}", status.as_u16()) })
            }
        }
    }
}

/// The connection broke after something was sent.
const BROKE: &str = "the connection broke";

fn counted(sent: Result<Ack, PeerError>) -> Result<Ack, PeerError> {
    let outcome = match &sent {
        Ok(_) => "acknowledged",
        Err(e) => e.as_str(),
    };
    metrics::counter!(metric::PEER_SENT, "outcome" => outcome).increment(1);
    sent
}
