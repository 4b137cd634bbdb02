use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use redis::aio::PubSubSink;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::link::Link;

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

pub(crate) async fn run(link: &Link, channel: &'static str, events: &mpsc::Sender<SubscriberEvent>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let mut subscribed = false;
        match listen(link, channel, events, &mut subscribed).await {
            Ended::Unwanted => return,
            Ended::Broken(reason) => {
                tracing::warn!(server = &*link.target().server, channel, reason, "subscription lost");
            }
        }
        if subscribed {
            pause = FIRST_PAUSE;
        }
        // Jitter, so that replicas that lost one server do not come back as one.
        tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..=1.0))).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn listen(
    link: &Link,
    channel: &'static str,
    events: &mpsc::Sender<SubscriberEvent>,
    subscribed: &mut bool,
) -> Ended {
    let setup = async {
        let (mut sink, messages) = link.target().client.get_async_pubsub().await?.split();
        sink.subscribe(channel).await?;
        redis::RedisResult::Ok((sink, messages))
    };
    let (mut sink, mut messages) = match timeout(link.connect_timeout(), setup).await {
        Ok(Ok(parts)) => parts,
        Ok(Err(why)) => return Ended::Broken(why.to_string()),
        Err(_) => return Ended::Broken("no answer".to_owned()),
    };
    *subscribed = true;
    tracing::debug!(channel, "subscribed");
    if let Err(ended) = hand_over(SubscriberEvent::Subscribed, events).await {
        return ended;
    }
    loop {
        let Ok(message) = timeout(QUIET, messages.next()).await else {
            match sign_of_life(&mut sink).await {
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
