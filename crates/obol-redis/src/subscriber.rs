use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use redis::aio::PubSubSink;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::renewed::jittered;
use crate::servers::Servers;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// After this long without a message the server is asked for a sign of life, and has as long to give it: a link that
/// died without a word is noticed after 10 s, within the 15 s of DESIGN §7.5.
const QUIET: Duration = Duration::from_secs(5);

/// How long the receiver may leave its queue full. The client library queues without bound behind it.
const FULL: Duration = Duration::from_secs(5);

/// What a subscription tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubscriberEvent {
    /// From now on messages arrive. Those of the time before, at the start or since the connection broke, were missed.
    Subscribed,
    /// The server gave a sign of life after a while without messages: none was missed until now.
    Alive,
    /// The body of a message.
    Message(Bytes),
}

/// Why a subscription ended.
enum Ended {
    /// Nobody receives events any more.
    Unwanted,
    /// The connection broke; the text is for the log.
    Broken(String),
}

pub(crate) async fn run(
    servers: &Servers,
    connect_timeout: Duration,
    channel: &'static str,
    events: &mpsc::Sender<SubscriberEvent>,
) {
    let mut pause = FIRST_PAUSE;
    loop {
        let mut subscribed = false;
        match listen(servers, connect_timeout, channel, events, &mut subscribed).await {
            Ended::Unwanted => return,
            Ended::Broken(reason) => {
                tracing::warn!(server = &**servers.name(), channel, reason, "subscription lost");
            }
        }
        if subscribed {
            pause = FIRST_PAUSE;
        }
        // Jitter, so that replicas that lost one server do not come back as one.
        tokio::time::sleep(jittered(pause)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn listen(
    servers: &Servers,
    connect_timeout: Duration,
    channel: &'static str,
    events: &mpsc::Sender<SubscriberEvent>,
    subscribed: &mut bool,
) -> Ended {
    let server = match servers.listen_to().await {
        Ok(server) => server,
        Err(why) => return Ended::Broken(why.to_string()),
    };
    let setup = async {
        let (mut sink, messages) = server.client.get_async_pubsub().await?.split();
        sink.subscribe(channel).await?;
        redis::RedisResult::Ok((sink, messages))
    };
    let (mut sink, mut messages) = match timeout(connect_timeout, setup).await {
        Ok(Ok(parts)) => parts,
        Ok(Err(why)) => return Ended::Broken(why.to_string()),
        Err(_) => return Ended::Broken("no answer".to_owned()),
    };
    *subscribed = true;
    tracing::debug!(channel, "subscribed");
    if let Err(ended) = hand_over(SubscriberEvent::Subscribed, events).await {
        return ended;
    }
    let left = servers.left(&server.address);
    tokio::pin!(left);
    loop {
        let next = tokio::select! {
            message = timeout(QUIET, messages.next()) => message,
            () = &mut left => return Ended::Broken("another server is to be listened to".to_owned()),
        };
        let Ok(message) = next else {
            let alive = match sign_of_life(&mut sink).await {
                Ok(()) => hand_over(SubscriberEvent::Alive, events).await,
                broken => broken,
            };
            match alive {
                Ok(()) => continue,
                Err(ended) => return ended,
            }
        };
        let Some(message) = message else {
            return Ended::Broken("closed by the server".to_owned());
        };
        let body = Bytes::copy_from_slice(message.get_payload_bytes());
        if let Err(ended) = hand_over(SubscriberEvent::Message(body), events).await {
            return ended;
        }
    }
}

/// Messages that arrive meanwhile wait in the library's queue.
async fn sign_of_life(sink: &mut PubSubSink) -> Result<(), Ended> {
    let asked = Instant::now();
    match timeout(QUIET, sink.ping::<redis::Value>()).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(why)) => Err(Ended::Broken(why.to_string())),
        Err(_) => Err(Ended::Broken(format!("silent for {:?}", QUIET + asked.elapsed()))),
    }
}

async fn hand_over(event: SubscriberEvent, events: &mpsc::Sender<SubscriberEvent>) -> Result<(), Ended> {
    match events.send_timeout(event, FULL).await {
        Ok(()) => Ok(()),
        Err(mpsc::error::SendTimeoutError::Closed(_)) => Err(Ended::Unwanted),
        Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
            Err(Ended::Broken("the receiver does not keep up".to_owned()))
        }
    }
}
