use bytes::{Bytes, BytesMut};
use memchr::memchr;

/// What stands on one line of a child's stdout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Line {
    /// May be a message.
    Message(Bytes),
    /// Something else: a banner, a stray print (DESIGN §10.9).
    Noise(Bytes),
    /// Longer than the bound, and not at its end yet; this is how it begins.
    TooLong(Bytes),
    /// How the line that was too long ended.
    LongEnd(Bytes),
}

/// How much is kept of the beginning of a line that is too long, and of its end.
const KEPT: usize = 1024;

/// Cuts stdout into lines within a bound and finds back after a line that is too long.
#[derive(Debug)]
pub(crate) struct Frames {
    pub(crate) buffer: BytesMut,
    searched: usize,
    max: usize,
    /// The end, so far, of a line that is too long.
    skipping: Option<Vec<u8>>,
}

impl Frames {
    pub(crate) fn new(max: usize) -> Self {
        Self { buffer: BytesMut::new(), searched: 0, max, skipping: None }
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
                let head = self.skipping.is_none().then(|| self.head(self.searched));
                keep_end(self.skipping.get_or_insert_default(), &self.buffer);
                self.buffer.clear();
                self.searched = 0;
                return head;
            };
            let length = self.searched + found;
            if length > self.max && self.skipping.is_none() {
                // The next call finds the same end again.
                self.skipping = Some(Vec::new());
                return Some(self.head(length));
            }
            let line = self.buffer.split_to(length).freeze();
            drop(self.buffer.split_to(1));
            self.searched = 0;
            if let Some(mut end) = self.skipping.take() {
                keep_end(&mut end, &line);
                return Some(Line::LongEnd(end.into()));
            }
            match line.iter().find(|b| !b.is_ascii_whitespace()) {
                None => {}
                Some(b'{' | b'[') => return Some(Line::Message(line)),
                Some(_) => return Some(Line::Noise(line)),
            }
        }
    }

    fn head(&self, length: usize) -> Line {
        let head = self.buffer.get(..length.min(KEPT)).unwrap_or_default();
        Line::TooLong(Bytes::copy_from_slice(head))
    }
}

/// Appends, and keeps the last bytes.
fn keep_end(end: &mut Vec<u8>, more: &[u8]) {
    end.extend_from_slice(more.get(more.len().saturating_sub(KEPT)..).unwrap_or_default());
    end.drain(..end.len().saturating_sub(KEPT));
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
        let text = |length: usize| Bytes::from("x".repeat(length));
        let rest = Line::Message(Bytes::from_static(b"{}"));
        for (pieces, head, end) in [
            (vec![&long[..], b"xx\n{}\n"], 25, 27),
            (vec![&long[..], &long[..], b"\n{}\n"], 25, 50),
            (vec![b"x", &long[..], b"\n{}\n"], 26, 26),
            (vec![b"xxxxxxxxxxx\n{}\n"], 11, 11),
        ] {
            let expected = [Line::TooLong(text(head)), Line::LongEnd(text(end)), rest.clone()];
            assert_eq!(lines(10, &pieces), expected);
        }
    }

    #[test]
    fn of_a_line_that_is_too_long_its_beginning_and_its_end_are_kept() {
        let line = format!("<{}{}>", "a".repeat(5000), "b".repeat(5000));
        let text = format!("{line}\n{{}}\n");
        for size in [1, 7, 999, 6000, 20_000] {
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
            let found = lines(2000, &pieces);
            let [Line::TooLong(head), Line::LongEnd(end), Line::Message(_)] = &found[..] else {
                panic!("{found:?}")
            };
            assert_eq!((head.as_ref(), end.as_ref()), (&line.as_bytes()[..1024], &line.as_bytes()[8978..]));
        }
    }
}
