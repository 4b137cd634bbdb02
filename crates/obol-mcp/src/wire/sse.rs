//! Server-sent events: the WHATWG grammar on bytes (HTML, "Server-sent events").

use bytes::{Bytes, BytesMut};
use memchr::memchr2;

use super::WireError;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SseEvent {
    /// The `id` field, when this event has one.
    pub id: Option<String>,
    /// The `event` field, when this event has one.
    pub event: Option<String>,
    /// The `data` lines, joined by line feeds. Empty for an event that only carries an id (2025-11-25 primes so).
    pub data: Bytes,
    /// The `retry` field in milliseconds.
    pub retry: Option<u64>,
}

/// Cuts bytes into events. Feed it with [`Decoder::push`], then take events until there is none.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    /// Everything before this index of `buffer` was searched for a line end.
    searched: usize,
    max_event: usize,
    started: bool,
    skip_lf: bool,
    id: Option<String>,
    event: Option<String>,
    data: Option<BytesMut>,
    retry: Option<u64>,
}

impl Decoder {
    /// A decoder that refuses events larger than `max_event` bytes.
    pub fn new(max_event: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            searched: 0,
            max_event,
            started: false,
            skip_lf: false,
            id: None,
            event: None,
            data: None,
            retry: None,
        }
    }

    /// Adds bytes as they came; they may end anywhere.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete event. An event that the end of the stream cuts is never returned (WHATWG: it is discarded).
    ///
    /// # Errors
    /// When an event is larger than the bound; the stream cannot be read on.
    pub fn next_event(&mut self) -> Result<Option<SseEvent>, WireError> {
        if !self.started {
            if self.buffer.len() < 3 && b"\xef\xbb\xbf".starts_with(&self.buffer) {
                return Ok(None);
            }
            if self.buffer.starts_with(b"\xef\xbb\xbf") {
                drop(self.buffer.split_to(3));
            }
            self.started = true;
        }
        while let Some(line) = self.next_line() {
            if !line.is_empty() {
                self.field(&line);
            } else if self.id.is_some() || self.data.is_some() || self.retry.is_some() {
                let event = SseEvent {
                    id: self.id.take(),
                    event: self.event.take(),
                    data: self.data.take().map(BytesMut::freeze).unwrap_or_default(),
                    retry: self.retry.take(),
                };
                return Ok(Some(event));
            } else {
                self.event = None;
            }
            if self.data.as_ref().is_some_and(|d| d.len() > self.max_event) {
                return Err(WireError::EventTooLarge(self.max_event));
            }
        }
        if self.buffer.len() > self.max_event {
            return Err(WireError::EventTooLarge(self.max_event));
        }
        Ok(None)
    }

    fn next_line(&mut self) -> Option<BytesMut> {
        if self.skip_lf && !self.buffer.is_empty() {
            if self.buffer.first() == Some(&b'\n') {
                drop(self.buffer.split_to(1));
            }
            self.skip_lf = false;
        }
        let rest = self.buffer.get(self.searched..)?;
        let Some(found) = memchr2(b'\n', b'\r', rest) else {
            self.searched = self.buffer.len();
            return None;
        };
        let end = self.searched + found;
        self.searched = 0;
        let line = self.buffer.split_to(end);
        // A CR ends the line at once; an LF right behind it, now or in the next read, belongs to it.
        self.skip_lf = self.buffer.first() == Some(&b'\r');
        drop(self.buffer.split_to(1));
        Some(line)
    }

    fn field(&mut self, line: &[u8]) {
        let colon = memchr::memchr(b':', line);
        let (name, value) = match colon {
            Some(0) => return, // a comment
            Some(i) => (line.get(..i).unwrap_or_default(), line.get(i + 1..).unwrap_or_default()),
            None => (line, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"data" => match &mut self.data {
                Some(data) => {
                    data.extend_from_slice(b"\n");
                    data.extend_from_slice(value);
                }
                None => self.data = Some(BytesMut::from(value)),
            },
            b"event" => self.event = Some(String::from_utf8_lossy(value).into_owned()),
            b"id" if !value.contains(&0) => self.id = Some(String::from_utf8_lossy(value).into_owned()),
            b"retry" => {
                if let Ok(text) = std::str::from_utf8(value)
                    && text.bytes().all(|b| b.is_ascii_digit())
                {
                    self.retry = text.parse().ok();
                }
            }
            _ => {}
        }
    }
}

/// One event with `data` and perhaps an id. Line ends inside the data become lines of their own.
pub fn encode(id: Option<&str>, data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(data.len() + 32);
    if let Some(id) = id {
        out.extend_from_slice(b"id: ");
        out.extend_from_slice(id.as_bytes());
        out.extend_from_slice(b"\n");
    }
    // The SDKs' own servers name the event; some clients look at nothing else.
    out.extend_from_slice(b"event: message\n");
    let mut rest = data;
    loop {
        let end = memchr2(b'\n', b'\r', rest);
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(end.map_or(rest, |e| rest.get(..e).unwrap_or_default()));
        out.extend_from_slice(b"\n");
        let Some(end) = end else { break };
        let crlf = rest.get(end..end + 2) == Some(b"\r\n");
        rest = rest.get(end + 1 + usize::from(crlf)..).unwrap_or_default();
    }
    out.extend_from_slice(b"\n");
    out.freeze()
}

/// A comment that keeps a quiet stream alive.
pub const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_in(pieces: &[&[u8]]) -> Vec<SseEvent> {
        let mut decoder = Decoder::new(1 << 20);
        let mut events = Vec::new();
        for piece in pieces {
            decoder.push(piece);
            while let Some(event) = decoder.next_event().unwrap() {
                events.push(event);
            }
        }
        events
    }

    const STREAM: &[u8] =
        b"\xef\xbb\xbf: hello\r\nid: 1\rdata: a\r\ndata:b\n\nretry: 500\n\nevent: x\ndata\n\n\
        unknown: 1\n\nid: 2\ndata: {\"k\":1}\r\n\r\ndata: cut";

    #[test]
    fn all_line_ends_comments_and_fields_are_read() {
        let events = decode_in(&[STREAM]);
        let expected = [
            (Some("1"), None, "a\nb", None),
            (None, None, "", Some(500)),
            (None, Some("x"), "", None),
            (Some("2"), None, "{\"k\":1}", None),
        ];
        let found: Vec<_> = events
            .iter()
            .map(|e| (e.id.as_deref(), e.event.as_deref(), std::str::from_utf8(&e.data).unwrap(), e.retry))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_stream_cut_anywhere_reads_the_same() {
        let whole = decode_in(&[STREAM]);
        for i in 0..STREAM.len() {
            for j in [i, (i + 1).min(STREAM.len()), (i + 2).min(STREAM.len())] {
                assert_eq!(
                    decode_in(&[&STREAM[..i], &STREAM[i..j], &STREAM[j..]]),
                    whole,
                    "cut at {i} and {j}"
                );
            }
        }
    }

    #[test]
    fn an_event_without_end_is_bounded() {
        let mut decoder = Decoder::new(100);
        decoder.push(&[b'x'; 101]);
        assert_eq!(decoder.next_event(), Err(WireError::EventTooLarge(100)));
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_read_back(data in "[a-z\n{}\": ]{0,60}") {
            let events = decode_in(&[&encode(Some("7"), data.as_bytes())]);
            prop_assert_eq!(events.len(), 1);
            prop_assert_eq!(&events[0].data[..], data.as_bytes());
        }
    }
}
