use bytes::{Bytes, BytesMut};
use memchr::memchr;

/// What stands on one line of a child's stdout.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// May be a message.
    Message(Bytes),
    /// Something else: a banner, a stray print (DESIGN §10.9).
    Noise(Bytes),
    /// Longer than the bound; its bytes are gone.
    TooLong,
}

/// Cuts stdout into lines within a bound and finds back after a line that is too long.
#[derive(Debug)]
pub(crate) struct Frames {
    pub(crate) buffer: BytesMut,
    searched: usize,
    max: usize,
    skipping: bool,
}

impl Frames {
    pub(crate) fn new(max: usize) -> Self {
        Self { buffer: BytesMut::new(), searched: 0, max, skipping: false }
    }

    pub(crate) fn next(&mut self) -> Option<Line> {
        loop {
            let rest = self.buffer.get(self.searched..)?;
            let Some(found) = memchr(b'\n', rest) else {
                self.searched = self.buffer.len();
                if self.searched <= self.max {
                    return None;
                }
                // Given up early: the rest of the line is dropped as it comes.
                self.buffer.clear();
                self.searched = 0;
                let first = !std::mem::replace(&mut self.skipping, true);
                return first.then_some(Line::TooLong);
            };
            let line = self.buffer.split_to(self.searched + found).freeze();
            drop(self.buffer.split_to(1));
            self.searched = 0;
            if std::mem::take(&mut self.skipping) {
                continue;
            }
            if line.len() > self.max {
                return Some(Line::TooLong);
            }
            match line.iter().find(|b| !b.is_ascii_whitespace()) {
                None => {}
                Some(b'{' | b'[') => return Some(Line::Message(line)),
                Some(_) => return Some(Line::Noise(line)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(max: usize, pieces: &[&[u8]]) -> Vec<Line> {
        let mut frames = Frames::new(max);
        let mut out = Vec::new();
        for piece in pieces {
            frames.buffer.extend_from_slice(piece);
            while let Some(line) = frames.next() {
                out.push(line);
            }
        }
        out
    }

    #[test]
    fn messages_noise_and_blank_lines_are_told_apart_wherever_the_bytes_are_cut() {
        let text = b"hello\n\r\n{\"a\":1}\r\n  [1]\n\n";
        let expected = [
            Line::Noise(Bytes::from_static(b"hello")),
            Line::Message(Bytes::from_static(b"{\"a\":1}\r")),
            Line::Message(Bytes::from_static(b"  [1]")),
        ];
        for cut in 0..text.len() {
            assert_eq!(lines(100, &[&text[..cut], &text[cut..]]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_to_its_end() {
        let long = [b'x'; 25];
        for pieces in [
            vec![&long[..], b"yy\n{}\n"],
            vec![&long[..], &long[..], b"\n{}\n"],
            vec![b"{", &long[..], b"\n{}\n"],
        ] {
            assert_eq!(lines(10, &pieces), [Line::TooLong, Line::Message(Bytes::from_static(b"{}"))]);
        }
    }
}
