//! Which slot a command belongs to.

use redis::{Arg, Cmd};

/// How many slots a Cluster has.
pub(super) const SLOTS: u16 = 16384;

/// The slot of the first key of a command, `None` for a command without keys. Keys of several slots in one command are
/// refused by the server (`CROSSSLOT`).
pub(super) fn of_command(cmd: &Cmd) -> Option<u16> {
    first_key(cmd).map(of_key)
}

/// The slot of a key: of its hash tag, when it has one that is not empty.
fn of_key(key: &[u8]) -> u16 {
    let tag = || {
        let after = key.get(key.iter().position(|b| *b == b'{')? + 1..)?;
        let tag = after.get(..after.iter().position(|b| *b == b'}')?)?;
        (!tag.is_empty()).then_some(tag)
    };
    crc16(tag().unwrap_or(key)) % SLOTS
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

fn first_key(cmd: &Cmd) -> Option<&[u8]> {
    let mut words = cmd.args_iter().map(|arg| match arg {
        Arg::Simple(bytes) => bytes,
        // The cursor of a scan, or whatever a later release of the library has; no key.
        _ => &[],
    });
    let name = words.next()?.to_ascii_uppercase();
    match name.as_slice() {
        b"ASKING" | b"AUTH" | b"CLIENT" | b"CLUSTER" | b"COMMAND" | b"CONFIG" | b"DBSIZE" | b"ECHO"
        | b"FLUSHALL" | b"FLUSHDB" | b"HELLO" | b"INFO" | b"KEYS" | b"PING" | b"PUBLISH" | b"PUBSUB"
        | b"ROLE" | b"SCAN" | b"SCRIPT" | b"SELECT" | b"TIME" | b"WAIT" => None,
        // The keys follow their number.
        b"EVAL" | b"EVALSHA" | b"EVAL_RO" | b"EVALSHA_RO" | b"FCALL" | b"FCALL_RO" => {
            let keys = words.nth(1)?;
            (keys != b"0").then(|| words.next()).flatten()
        }
        b"OBJECT" | b"MEMORY" | b"XGROUP" | b"XINFO" => words.nth(1),
        b"XREAD" | b"XREADGROUP" => {
            words.find(|word| word.eq_ignore_ascii_case(b"STREAMS"))?;
            words.next()
        }
        _ => words.next(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cmd(text: &str) -> Cmd {
        let mut cmd = Cmd::new();
        for word in text.split(' ') {
            cmd.arg(word);
        }
        cmd
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        // The first is the check value of CRC-16/XMODEM, the others are what `CLUSTER KEYSLOT` says.
        assert_eq!(crc16(b"123456789"), 0x31C3);
        for (key, slot) in [
            ("foo", 12182),
            ("{foo}", 12182),
            ("bar{foo}baz{x}", 12182),
            ("foo{}{bar}", 8363),
            ("foo{{bar}}zap", 4015),
            ("foo{bar", of_key(b"foo{bar")),
            ("", 0),
        ] {
            assert_eq!(of_key(key.as_bytes()), slot, "{key}");
        }
    }

    #[test]
    fn keys_are_where_each_command_has_them() {
        for (text, key) in [
            ("GET k", Some("k")),
            ("mget k l", Some("k")),
            ("EVALSHA abc 2 k l x", Some("k")),
            ("EVALSHA abc 0 x", None),
            ("XADD k MAXLEN ~ 5 * a b", Some("k")),
            ("XREADGROUP GROUP g c COUNT 1 STREAMS k >", Some("k")),
            ("XGROUP CREATE k g $", Some("k")),
            ("PING", None),
            ("PUBLISH k x", None),
            ("SCRIPT LOAD k", None),
            ("SCAN 0", None),
        ] {
            assert_eq!(first_key(&cmd(text)), key.map(str::as_bytes), "{text}");
        }
    }
}
