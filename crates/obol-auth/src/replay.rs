use std::collections::{BTreeSet, HashSet};

/// Ids of tokens that were accepted, each until its token has expired. When it is full a token is refused: forgetting
/// one early would allow its replay. Only tokens with a good signature get here.
#[derive(Debug)]
pub(crate) struct Replays {
    capacity: usize,
    /// INVARIANT: holds the ids of `by_expiry`.
    seen: HashSet<String>,
    by_expiry: BTreeSet<(i64, String)>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    FirstTime,
    Before,
    Full,
}

impl Replays {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, seen: HashSet::new(), by_expiry: BTreeSet::new() }
    }

    /// `until` is when the token stops being accepted anyway; both in seconds.
    pub(crate) fn see(&mut self, id: &str, until: i64, now: i64) -> Seen {
        while self.by_expiry.first().is_some_and(|(end, _)| *end < now) {
            if let Some((_, id)) = self.by_expiry.pop_first() {
                self.seen.remove(&id);
            }
        }
        if self.seen.contains(id) {
            return Seen::Before;
        }
        if self.seen.len() >= self.capacity {
            return Seen::Full;
        }
        self.seen.insert(id.to_owned());
        self.by_expiry.insert((until, id.to_owned()));
        Seen::FirstTime
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_remembered_until_its_token_has_expired() {
        let mut replays = Replays::new(2);
        assert_eq!(replays.see("a", 10, 0), Seen::FirstTime);
        assert_eq!(replays.see("a", 10, 10), Seen::Before);
        assert_eq!(replays.see("b", 20, 10), Seen::FirstTime);
        assert_eq!(replays.see("c", 20, 10), Seen::Full);
        assert_eq!(replays.see("c", 20, 11), Seen::FirstTime, "the first one made room");
        assert_eq!((replays.seen.len(), replays.by_expiry.len()), (2, 2));
    }
}
