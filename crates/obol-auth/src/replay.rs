use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use obol_redis::Redis;

use crate::ServiceTokenError;

/// What is remembered of a token: enough of a SHA-256 that two of ours never look alike, and of one size whatever the
/// token's own id is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TokenId([u8; 16]);

impl TokenId {
    /// Two issuers may choose the same `jti`.
    pub(crate) fn new(issuer: &str, jti: &str) -> Self {
        let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
        context.update(issuer.as_bytes());
        context.update(b"\n");
        context.update(jti.as_bytes());
        let mut id = [0; 16];
        for (to, from) in id.iter_mut().zip(context.finish().as_ref()) {
            *to = *from;
        }
        Self(id)
    }
}

/// Ids of tokens that were accepted, each until its token has expired. When it is full a token is refused: forgetting
/// one early would allow its replay. Only tokens with a good signature get here.
#[derive(Debug)]
pub(crate) struct Replays {
    capacity: usize,
    /// INVARIANT: holds the ids of `by_expiry`.
    seen: HashSet<TokenId>,
    by_expiry: BTreeSet<(i64, TokenId)>,
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
    pub(crate) fn see(&mut self, id: TokenId, until: i64, now: i64) -> Seen {
        while self.by_expiry.first().is_some_and(|(end, _)| *end < now) {
            if let Some((_, id)) = self.by_expiry.pop_first() {
                self.seen.remove(&id);
            }
        }
        if self.seen.contains(&id) {
            return Seen::Before;
        }
        if self.seen.len() >= self.capacity {
            return Seen::Full;
        }
        self.seen.insert(id);
        self.by_expiry.insert((until, id));
        Seen::FirstTime
    }
}

/// Which tokens were used, told between processes that accept the same ones: `jwt-used:ID` in Redis, for as long as the
/// token could still be accepted.
#[derive(Debug, Clone)]
pub struct UsedTokens(Redis);

impl UsedTokens {
    /// Tells and asks through `redis`.
    pub fn new(redis: Redis) -> Self {
        Self(redis)
    }

    /// Whether nobody has used the token yet; from now on it is used.
    pub(crate) async fn first_use(&self, id: TokenId, life: Duration) -> Result<bool, ServiceTokenError> {
        let name = format!("jwt-used:{:032x}", u128::from_be_bytes(id.0));
        let mut set = redis::cmd("SET");
        set.arg(name).arg(1).arg("NX").arg("EX").arg(life.as_secs().max(1));
        let answer: Option<String> = self
            .0
            .query(&set)
            .await
            .map_err(|why| ServiceTokenError::CannotTellReplay { reason: why.to_string() })?;
        Ok(answer.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_remembered_until_its_token_has_expired() {
        let [a, b, c] = ["a", "b", "c"].map(|jti| TokenId::new("control", jti));
        let mut replays = Replays::new(2);
        assert_eq!(replays.see(a, 10, 0), Seen::FirstTime);
        assert_eq!(replays.see(a, 10, 10), Seen::Before);
        assert_eq!(replays.see(b, 20, 10), Seen::FirstTime);
        assert_eq!(replays.see(c, 20, 10), Seen::Full);
        assert_eq!(replays.see(c, 20, 11), Seen::FirstTime, "the first one made room");
        assert_eq!((replays.seen.len(), replays.by_expiry.len()), (2, 2));
    }

    #[test]
    fn the_same_id_of_two_issuers_is_two() {
        assert_ne!(TokenId::new("control", "1"), TokenId::new("gateway", "1"));
    }
}
