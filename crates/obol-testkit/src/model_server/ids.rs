//! Ids that look like the real ones: no two alike, of this server or of another.

use std::sync::atomic::{AtomicU64, Ordering};

const ALPHANUMERIC: &[u8] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const HEX: &[u8] = b"0123456789abcdef";

#[derive(Debug)]
pub(super) struct Ids {
    state: AtomicU64,
}

impl Ids {
    pub(super) fn new() -> Self {
        Self { state: AtomicU64::new(getrandom::u64().expect("the system has randomness")) }
    }

    /// `chatcmpl-…`, `call_…`
    pub(super) fn chat(&self, prefix: &str) -> String {
        self.id(prefix, ALPHANUMERIC, if prefix == "call_" { 24 } else { 29 })
    }

    /// `resp_…`, `msg_…`, `fc_…`, `rs_…`
    pub(super) fn response(&self, prefix: &str) -> String {
        self.id(prefix, HEX, 48)
    }

    /// `msg_01…`, `toolu_01…`, `req_01…`
    pub(super) fn anthropic(&self, prefix: &str) -> String {
        self.id(&format!("{prefix}01"), ALPHANUMERIC, 22)
    }

    fn id(&self, prefix: &str, alphabet: &[u8], length: usize) -> String {
        let letters = (0..length).map(|_| char::from(alphabet[self.next() % alphabet.len()]));
        prefix.chars().chain(letters).collect()
    }

    /// Splitmix64: enough to look random.
    fn next(&self) -> usize {
        let step = 0x9e37_79b9_7f4a_7c15_u64;
        let mut z = self.state.fetch_add(step, Ordering::SeqCst).wrapping_add(step);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // The low bits are as good as the high ones, and the index needs few.
        usize::from(u16::try_from((z ^ (z >> 31)) & 0xffff).expect("sixteen bits"))
    }
}
