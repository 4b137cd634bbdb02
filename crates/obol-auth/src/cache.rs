use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// A map whose entries live for one and the same time, and that never holds more than `capacity`: one more takes the
/// place of the oldest.
///
/// As all live equally long, the order of insertion is the order of expiry, and a queue finds both the expired and the
/// oldest without a search.
#[derive(Debug)]
pub(crate) struct Expiring<K, V> {
    ttl: Duration,
    capacity: usize,
    entries: HashMap<K, (V, Instant)>,
    /// Also names entries that were removed or replaced since; told from live ones by their time.
    order: VecDeque<(K, Instant)>,
}

impl<K: Eq + Hash + Clone, V> Expiring<K, V> {
    pub(crate) fn new(ttl: Duration, capacity: usize) -> Self {
        Self { ttl, capacity: capacity.max(1), entries: HashMap::new(), order: VecDeque::new() }
    }

    pub(crate) fn get(&self, key: &K, now: Instant) -> Option<&V> {
        self.entries.get(key).filter(|(_, until)| now < *until).map(|(value, _)| value)
    }

    pub(crate) fn insert(&mut self, key: K, value: V, now: Instant) {
        let until = now + self.ttl;
        self.entries.insert(key.clone(), (value, until));
        self.order.push_back((key, until));
        while let Some((oldest, its_until)) = self.order.front() {
            // Twice the capacity bounds what replaced and removed entries leave in the queue.
            let full =
                self.entries.len() > self.capacity || self.order.len() > self.capacity.saturating_mul(2);
            if *its_until > now && !full {
                break;
            }
            if self.entries.get(oldest).is_some_and(|(_, current)| current == its_until) {
                self.entries.remove(oldest);
            }
            self.order.pop_front();
        }
    }

    /// Those that live, in no order.
    pub(crate) fn iter(&self, now: Instant) -> impl Iterator<Item = (&K, &V)> {
        let live = self.entries.iter().filter(move |(_, (_, until))| now < *until);
        live.map(|(key, (value, _))| (key, value))
    }

    pub(crate) fn remove(&mut self, key: &K) {
        self.entries.remove(key);
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_mins(1);

    #[tokio::test(start_paused = true)]
    async fn entries_end_with_their_time() {
        let mut cache = Expiring::new(TTL, 10);
        let start = Instant::now();
        cache.insert(1, 'a', start);
        assert_eq!(cache.get(&1, start + TTL - Duration::from_millis(1)), Some(&'a'));
        assert_eq!(cache.get(&1, start + TTL), None);
        assert_eq!((cache.iter(start).count(), cache.iter(start + TTL).count()), (1, 0));
        cache.insert(2, 'b', start + TTL);
        assert_eq!((cache.entries.len(), cache.order.len()), (1, 1), "the expired one is gone");
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_makes_room() {
        let mut cache = Expiring::new(TTL, 3);
        let start = Instant::now();
        for n in 0..100_u64 {
            cache.insert(n, n, start + Duration::from_millis(n));
        }
        let now = start + Duration::from_millis(100);
        assert_eq!(cache.entries.len(), 3);
        assert_eq!(
            (cache.get(&96, now), cache.get(&97, now), cache.get(&99, now)),
            (None, Some(&97), Some(&99))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn replacing_and_removing_for_ever_takes_no_more_room() {
        let mut cache = Expiring::new(TTL, 3);
        let start = Instant::now();
        for n in 0..1000_u64 {
            cache.insert(n % 2, n, start + Duration::from_micros(n));
            if n % 3 == 0 {
                cache.remove(&(n % 2));
            }
        }
        assert!(cache.order.len() <= 6 && cache.entries.len() <= 2);
        let now = start + Duration::from_millis(1);
        assert_eq!(
            cache.get(&0, now),
            Some(&998),
            "what was replaced in the queue did not take the entry along"
        );
        cache.clear();
        assert_eq!(cache.get(&0, now), None);
    }
}
