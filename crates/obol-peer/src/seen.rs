use std::collections::{BTreeSet, HashMap};

use obol_model::ReplicaId;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

/// Who sent it, and its id.
pub(crate) type Key = (ReplicaId, Uuid);

/// What became of a message, for those who brought it; `None` while it is being handled.
pub(crate) type Outcome<T> = watch::Receiver<Option<T>>;

/// The messages that came, each until its sender has stopped trying: one that comes again is not delivered again.
#[derive(Debug)]
pub(crate) struct Seen<T> {
    capacity: usize,
    inner: Mutex<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    messages: HashMap<Key, Outcome<T>>,
    /// INVARIANT: holds the keys of `messages`.
    ends: BTreeSet<(Instant, Key)>,
}

pub(crate) enum Sight<T> {
    /// To be handled now; the outcome goes into the sender.
    First(watch::Sender<Option<T>>, Outcome<T>),
    /// It was here before.
    Again(Outcome<T>),
    /// Too many to be sure, and forgetting one early would deliver it twice.
    Full,
}

impl<T> Seen<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, inner: Mutex::new(Inner { messages: HashMap::new(), ends: BTreeSet::new() }) }
    }

    /// `until` is when no sender tries any more.
    pub(crate) fn see(&self, key: Key, until: Instant, now: Instant) -> Sight<T> {
        let mut inner = self.inner.lock();
        while inner.ends.first().is_some_and(|(end, _)| *end < now) {
            if let Some((_, key)) = inner.ends.pop_first() {
                inner.messages.remove(&key);
            }
        }
        if let Some(outcome) = inner.messages.get(&key) {
            return Sight::Again(outcome.clone());
        }
        if inner.messages.len() >= self.capacity {
            return Sight::Full;
        }
        let (sender, outcome) = watch::channel(None);
        inner.messages.insert(key.clone(), outcome.clone());
        inner.ends.insert((until, key));
        Sight::First(sender, outcome)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_message_is_known_until_its_sender_has_stopped() {
        let seen = Seen::<u8>::new(2);
        let (now, from) = (Instant::now(), ReplicaId::generate());
        let at = |s| now + Duration::from_secs(s);
        let ids: Vec<Key> = (0..3).map(|_| (from.clone(), Uuid::new_v4())).collect();
        let Sight::First(sender, _) = seen.see(ids[0].clone(), at(10), now) else { panic!("not the first") };
        sender.send_replace(Some(7));
        assert!(matches!(seen.see(ids[0].clone(), at(10), at(9)), Sight::Again(o) if *o.borrow() == Some(7)));
        assert!(matches!(seen.see(ids[1].clone(), at(20), at(9)), Sight::First(..)));
        assert!(matches!(seen.see(ids[2].clone(), at(20), at(10)), Sight::Full));
        assert!(
            matches!(seen.see(ids[2].clone(), at(20), at(11)), Sight::First(..)),
            "the first one made room"
        );
        let another = (ReplicaId::generate(), ids[1].1);
        assert!(matches!(seen.see(another, at(40), at(21)), Sight::First(..)), "ids are the sender's own");
    }
}
