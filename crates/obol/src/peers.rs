//! The replica among the others: its lease, its channel and the listener of that (DESIGN §5).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use obol_auth::ServiceTokens;
use obol_dial::Dialer;
use obol_model::{Clock, ReplicaId};
use obol_peer::{Channel, Peers, Registry};
use tokio::net::TcpListener;
use url::Url;

use crate::config;
use crate::failure::Failure;

/// What a replica needs to be one of many.
pub(crate) struct Joining {
    /// `None` when its state is in its own memory.
    pub(crate) registry: Option<Registry>,
    /// `None` without a channel.
    pub(crate) peer: Option<config::Peer>,
    pub(crate) service: Option<Arc<ServiceTokens>>,
    pub(crate) dialer: Dialer,
    pub(crate) clock: Arc<dyn Clock>,
}

/// The peers of the replica `me`, and the listener where they reach it. Not registered yet: that is for when somebody
/// answers there.
///
/// # Errors
/// When the listener cannot be bound.
pub(crate) async fn join(
    me: ReplicaId,
    joining: Joining,
) -> Result<(Arc<Peers>, Option<TcpListener>), Failure> {
    let Joining { registry, peer, service, dialer, clock } = joining;
    let Some(registry) = registry else { return Ok((Peers::alone(me), None)) };
    // The configuration has seen to it that there is a key.
    let (Some(peer), Some(tokens)) = (peer, service) else {
        return Ok((Peers::new(me, registry, None), None));
    };
    let listener = bind(peer.listen).await?;
    let advertised = match peer.url {
        Some(url) => url,
        None => derived(listener.local_addr()?)?,
    };
    tracing::info!(advertised = %advertised, "peer channel");
    let channel = Channel { advertised, tokens, dialer, clock };
    Ok((Peers::new(me, registry, Some(channel)), Some(listener)))
}

async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let cannot = |e: io::Error| {
        io::Error::new(e.kind(), format!("cannot listen on {address} (OBOL_PEER_LISTEN): {e}"))
    };
    TcpListener::bind(address).await.map_err(cannot)
}

fn derived(address: SocketAddr) -> Result<Url, Failure> {
    format!("http://{address}/").parse().map_err(Failure::runtime)
}
