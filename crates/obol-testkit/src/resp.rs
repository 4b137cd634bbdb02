//! As much of RESP as it takes to know where a command or a reply ends and what kind it is.

use bytes::{Buf as _, BytesMut};

/// Bytes of one direction, cut into top-level frames.
#[derive(Debug, Default)]
pub(crate) struct Frames(BytesMut);

impl Frames {
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next whole reply's type byte (`+`, `*`, `>`, …).
    pub(crate) fn next_reply(&mut self) -> Result<Option<u8>, String> {
        let Some(length) = frame_length(&self.0)? else { return Ok(None) };
        let kind = self.0[0];
        self.0.advance(length);
        Ok(Some(kind))
    }

    /// The next whole command: its first two words, the first in upper case.
    pub(crate) fn next_command(&mut self) -> Result<Option<(String, Option<String>)>, String> {
        let Some(first) = self.0.first() else { return Ok(None) };
        let words = if *first == b'*' {
            let Some(length) = frame_length(&self.0)? else { return Ok(None) };
            let words = first_words(&self.0[..length])?;
            self.0.advance(length);
            words
        } else {
            let Some((line, end)) = line(&self.0, 0) else { return Ok(None) };
            let words = String::from_utf8_lossy(line).split_whitespace().take(2).map(str::to_owned).collect();
            self.0.advance(end);
            words
        };
        let mut words = words.into_iter();
        let name = words.next().ok_or("an empty command")?.to_ascii_uppercase();
        Ok(Some((name, words.next())))
    }
}

/// The line that starts at `from`, without its end, and where the next one starts.
fn line(bytes: &[u8], from: usize) -> Option<(&[u8], usize)> {
    let rest = bytes.get(from..)?;
    let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
    Some((&rest[..end], from + end + 2))
}

fn number(text: &[u8]) -> Result<i64, String> {
    let text = String::from_utf8_lossy(text);
    text.parse().map_err(|_| format!("`{text}` is no length"))
}

/// The length of the whole frame at the start, once all of it is there.
fn frame_length(bytes: &[u8]) -> Result<Option<usize>, String> {
    let mut at = 0;
    let mut missing: u64 = 1;
    while missing > 0 {
        let Some((header, next)) = line(bytes, at) else { return Ok(None) };
        let Some((kind, rest)) = header.split_first() else { return Err("an empty frame".to_owned()) };
        at = next;
        missing -= 1;
        match kind {
            b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => {}
            b'$' | b'!' | b'=' => {
                // Negative is RESP2's nil, which has no body.
                if let Ok(length) = usize::try_from(number(rest)?) {
                    at += length + 2;
                }
            }
            b'*' | b'~' | b'>' => missing += u64::try_from(number(rest)?).unwrap_or(0),
            b'%' => missing += 2 * u64::try_from(number(rest)?).unwrap_or(0),
            other => return Err(format!("unknown frame type `{}`", char::from(*other))),
        }
    }
    Ok((at <= bytes.len()).then_some(at))
}

/// The first two bulk strings of an array.
fn first_words(frame: &[u8]) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let (header, mut at) = line(frame, 0).ok_or("no header")?;
    for _ in 0..number(&header[1..])?.min(2) {
        let (header, start) = line(frame, at).ok_or("no header")?;
        if header.first() != Some(&b'$') {
            return Err("a command is an array of bulk strings".to_owned());
        }
        let length = usize::try_from(number(&header[1..])?).map_err(|_| "a nil in a command")?;
        words.push(String::from_utf8_lossy(&frame[start..start + length]).into_owned());
        at = start + length + 2;
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `bytes` one by one, so that every frame is seen incomplete first.
    fn replies(bytes: &[u8]) -> Vec<u8> {
        let mut frames = Frames::default();
        let mut kinds = Vec::new();
        for byte in bytes {
            frames.feed(&[*byte]);
            while let Some(kind) = frames.next_reply().unwrap() {
                kinds.push(kind);
            }
        }
        assert!(frames.0.is_empty(), "left over: {:?}", frames.0);
        kinds
    }

    #[test]
    fn replies_of_both_versions_are_delimited() {
        for (bytes, kinds) in [
            (&b"+OK\r\n:1\r\n-ERR no\r\n"[..], &b"+:-"[..]),
            (b"$-1\r\n$0\r\n\r\n$4\r\na\r\nb\r\n*-1\r\n*0\r\n", b"$$$**"),
            (b"*2\r\n*1\r\n:1\r\n$1\r\nx\r\n+OK\r\n", b"*+"),
            (b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n_\r\n#t\r\n,1.5\r\n(9\r\n", b"%#,("),
            (b">3\r\n+message\r\n+c\r\n$2\r\nhi\r\n=5\r\ntxt:a\r\n!3\r\nERR\r\n~1\r\n:1\r\n", b">=!~"),
        ] {
            assert_eq!(replies(bytes), kinds, "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn commands_are_named_in_upper_case_with_their_first_argument() {
        let mut frames = Frames::default();
        frames.feed(b"*3\r\n$3\r\nset\r\n$1\r\nk\r\n$4\r\n\r\n\r\n\r\nping\r\n*1\r\n$4\r\nINFO\r\n*2\r\n$3\r\nGET\r\n");
        assert_eq!(frames.next_command(), Ok(Some(("SET".to_owned(), Some("k".to_owned())))));
        assert_eq!(frames.next_command(), Ok(Some(("PING".to_owned(), None))));
        assert_eq!(frames.next_command(), Ok(Some(("INFO".to_owned(), None))));
        assert_eq!(frames.next_command(), Ok(None));
    }

    #[test]
    fn what_is_not_resp_is_an_error() {
        let mut frames = Frames::default();
        frames.feed(b"HTTP/1.1 200 OK\r\n");
        assert!(frames.next_reply().is_err());
    }
}
