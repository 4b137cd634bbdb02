//! The event grammar of WHATWG server-sent events, on bytes: lines end in LF, CRLF or CR, an empty line ends an
//! event. Nothing is decoded or rewritten; events leave with the bytes that they came with.

use std::borrow::Cow;

use bytes::{Buf as _, Bytes, BytesMut};
use memchr::memchr2;

/// An event is larger than the bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventTooLarge;

/// Cuts a stream of chunks into runs of whole events. Events that lie within one chunk are not copied.
#[derive(Debug)]
pub(crate) struct Splitter {
    /// The beginning of an event whose end has not come yet. Already scanned.
    begun: BytesMut,
    /// Not scanned yet.
    fresh: Bytes,
    /// Nothing stands in the current line so far.
    line_is_empty: bool,
    /// The last byte was a CR: a LF that follows belongs to it.
    after_cr: bool,
    /// The event before was kept.
    kept: bool,
    max_event: usize,
}

impl Splitter {
    pub(crate) fn new(max_event: usize) -> Self {
        Self {
            begun: BytesMut::new(),
            fresh: Bytes::new(),
            line_is_empty: true,
            after_cr: false,
            kept: true,
            max_event,
        }
    }

    /// Adds what came next. Call [`Splitter::take`] until it returns nothing before the next one.
    pub(crate) fn push(&mut self, chunk: Bytes) {
        if self.fresh.is_empty() {
            self.fresh = chunk;
        } else {
            self.begun.extend_from_slice(&self.fresh);
            self.fresh = chunk;
        }
    }

    /// The next run of whole events that `keep` keeps; others are left out. `keep` sees each event once, in order.
    pub(crate) fn take(
        &mut self,
        mut keep: impl FnMut(&[u8]) -> bool,
    ) -> Result<Option<Bytes>, EventTooLarge> {
        if self.begun.is_empty() && self.after_cr && self.fresh.starts_with(b"\n") {
            // The chunk was cut inside the CRLF that ended an event: the LF shares that event's fate.
            self.after_cr = false;
            let line_feed = self.fresh.split_to(1);
            if self.kept {
                return Ok(Some(line_feed));
            }
        }
        while !self.begun.is_empty() {
            let Some(end) = self.scan(0) else {
                self.begun.extend_from_slice(&self.fresh);
                self.fresh.clear();
                return if self.begun.len() > self.max_event { Err(EventTooLarge) } else { Ok(None) };
            };
            self.begun.extend_from_slice(&self.fresh.split_to(end));
            if self.begun.len() > self.max_event {
                return Err(EventTooLarge);
            }
            let event = self.begun.split().freeze();
            self.kept = keep(&event);
            if self.kept {
                return Ok(Some(event));
            }
        }
        let mut run = 0;
        while let Some(end) = self.scan(run) {
            if end - run > self.max_event {
                return Err(EventTooLarge);
            }
            self.kept = keep(self.fresh.get(run..end).unwrap_or_default());
            if self.kept {
                run = end;
                continue;
            }
            let kept = self.fresh.split_to(run);
            self.fresh.advance(end - run);
            run = 0;
            if !kept.is_empty() {
                return Ok(Some(kept));
            }
        }
        let kept = self.fresh.split_to(run);
        self.begun.extend_from_slice(&self.fresh);
        self.fresh.clear();
        Ok((!kept.is_empty()).then_some(kept))
    }

    /// What is left of an event that never ended.
    pub(crate) fn rest(&mut self) -> Bytes {
        self.begun.split().freeze()
    }

    /// Looks for the end of an event in `fresh`, from `from` on, and remembers where in a line it stopped.
    fn scan(&mut self, from: usize) -> Option<usize> {
        let bytes: &[u8] = &self.fresh;
        let mut at = from;
        if self.after_cr && at < bytes.len() {
            self.after_cr = false;
            if bytes.get(at) == Some(&b'\n') {
                at += 1;
            }
        }
        while let Some(found) = bytes.get(at..).and_then(|rest| memchr2(b'\n', b'\r', rest)) {
            let was_empty = self.line_is_empty && found == 0;
            let end_of_line = at + found;
            at = end_of_line + 1;
            if bytes.get(end_of_line) == Some(&b'\r') {
                match bytes.get(at) {
                    Some(b'\n') => at += 1,
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            self.line_is_empty = true;
            if was_empty {
                return Some(at);
            }
        }
        if at < bytes.len() {
            self.line_is_empty = false;
        }
        None
    }
}

/// The data of an event; nothing when it has no `data` field (a comment, say).
pub(crate) fn data(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut found: Option<Cow<'_, [u8]>> = None;
    let event = event.strip_prefix(b"\xef\xbb\xbf").unwrap_or(event);
    for line in event.split(|byte| matches!(byte, b'\n' | b'\r')) {
        let Some(value) = line.strip_prefix(b"data") else { continue };
        let value = match value.split_first() {
            None => value,
            Some((b':', value)) => value.strip_prefix(b" ").unwrap_or(value),
            Some(_) => continue,
        };
        match &mut found {
            None => found = Some(Cow::Borrowed(value)),
            Some(lines) => {
                let lines = lines.to_mut();
                lines.push(b'\n');
                lines.extend_from_slice(value);
            }
        }
    }
    found
}

/// Whether the event is named `name` by an `event` field.
pub(crate) fn is_named(event: &[u8], name: &[u8]) -> bool {
    let event = event.strip_prefix(b"\xef\xbb\xbf").unwrap_or(event);
    let mut names = event.split(|byte| matches!(byte, b'\n' | b'\r')).filter_map(|line| {
        let value = line.strip_prefix(b"event:")?;
        Some(value.strip_prefix(b" ").unwrap_or(value))
    });
    // The last one counts.
    names.next_back() == Some(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Runs, events and what is left.
    type Pieces = (Vec<Vec<u8>>, Vec<Vec<u8>>, Vec<u8>);

    fn split(text: &[u8], cuts: &[usize], max: usize) -> Result<Pieces, EventTooLarge> {
        let mut splitter = Splitter::new(max);
        let (mut runs, mut events) = (Vec::new(), Vec::new());
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            splitter.push(Bytes::copy_from_slice(&text[pair[0]..pair[1]]));
            while let Some(run) = splitter.take(|event| {
                events.push(event.to_vec());
                true
            })? {
                runs.push(run.to_vec());
            }
        }
        Ok((runs, events, splitter.rest().to_vec()))
    }

    #[test]
    fn events_end_at_an_empty_line_of_any_kind() {
        for text in ["data: a\n\n", "data: a\r\n\r\n", "data: a\r\r", "data: a\n\r\n", ": c\ndata: a\r\n\n"] {
            let (_, events, rest) = split(format!("{text}data: b\n\nda").as_bytes(), &[], 1000).unwrap();
            assert_eq!(events, [text.as_bytes().to_vec(), b"data: b\n\n".to_vec()], "{text:?}");
            assert_eq!(rest, b"da");
        }
    }

    #[test]
    fn a_run_stops_where_something_is_left_out() {
        let mut splitter = Splitter::new(1000);
        splitter.push(Bytes::from_static(b"data: a\n\ndata: b\n\ndata: -\n\ndata: c\n\ndata"));
        let keep = |event: &[u8]| event != b"data: -\n\n";
        assert_eq!(splitter.take(keep).unwrap().unwrap(), "data: a\n\ndata: b\n\n");
        assert_eq!(splitter.take(keep).unwrap().unwrap(), "data: c\n\n");
        assert_eq!(splitter.take(keep).unwrap(), None);
        splitter.push(Bytes::from_static(b": -\n\ndata: d\n\n"));
        assert_eq!(splitter.take(keep).unwrap().unwrap(), "data: d\n\n");
    }

    #[test]
    fn a_line_feed_that_comes_late_belongs_to_the_event_before() {
        let keep = |event: &[u8]| !event.starts_with(b"data: -");
        for (chunks, expected) in [
            (["data: a\r\n\r", "\ndata: -\n\ndata: b\n\n"], "data: a\r\n\r\ndata: b\n\n"),
            (["data: a\n\ndata: -\r\n\r", "\ndata: b\n\n"], "data: a\n\ndata: b\n\n"),
        ] {
            let mut splitter = Splitter::new(1000);
            let mut relayed = Vec::new();
            for chunk in chunks {
                splitter.push(Bytes::from_static(chunk.as_bytes()));
                while let Some(run) = splitter.take(keep).unwrap() {
                    relayed.extend_from_slice(&run);
                }
            }
            assert_eq!(String::from_utf8(relayed).unwrap(), expected);
        }
    }

    #[test]
    fn an_event_without_end_is_bounded() {
        let endless = [b'x'; 100];
        assert_eq!(split(&endless, &[30, 60], 50), Err(EventTooLarge));
        assert!(split(&endless, &[30, 60], 100).is_ok());
        assert_eq!(split(&[&endless[..], b"\n\n"].concat(), &[], 100), Err(EventTooLarge));
    }

    #[test]
    fn data_is_read_as_the_grammar_says() {
        let text = |event: &str| data(event.as_bytes()).map(|d| String::from_utf8(d.into_owned()).unwrap());
        assert_eq!(text("data: a\n\n").as_deref(), Some("a"));
        assert_eq!(text("data:a\r\n\r\n").as_deref(), Some("a"));
        assert_eq!(text("event: x\ndata:  a\ndata\ndata: b\n\n").as_deref(), Some(" a\n\nb"));
        assert_eq!(text("\u{feff}data: a\n\n").as_deref(), Some("a"));
        assert_eq!(text(": comment\n\n"), None);
        assert_eq!(text("database: a\n\n"), None);
        assert_eq!(text("\n"), None);
    }

    #[test]
    fn the_name_of_an_event_is_its_last_event_field() {
        for (event, expected) in [
            ("event: error\ndata: x\n\n", true),
            ("data: x\r\nevent:error\r\n\r\n", true),
            ("event: x\nevent: error\n\n", true),
            ("event: error\nevent: x\n\n", false),
            ("event: errors\n\n", false),
            ("data: event: error\n\n", false),
        ] {
            assert_eq!(is_named(event.as_bytes(), b"error"), expected, "{event:?}");
        }
    }

    fn stream_text() -> impl Strategy<Value = Vec<u8>> {
        let line =
            prop_oneof!["data: [a-zé]{0,9}", ": [a-z]{0,5}", Just("data".to_owned()), Just(String::new())];
        let end = prop_oneof![Just("\n"), Just("\r\n"), Just("\r")];
        prop::collection::vec((line, end), 0..20).prop_map(|lines| {
            lines.into_iter().map(|(line, end)| line + end).collect::<String>().into_bytes()
        })
    }

    proptest! {
        #[test]
        fn any_cut_relays_equal_bytes_and_equal_events(text in stream_text(), cuts in prop::collection::vec(0_usize..400, 0..12)) {
            let (runs, events, rest) = split(&text, &cuts, 1000).unwrap();
            prop_assert_eq!([runs.concat(), rest].concat(), text.clone());
            let (_, whole, _) = split(&text, &[], 1000).unwrap();
            let datas = |events: &[Vec<u8>]| -> Vec<Vec<u8>> {
                events.iter().filter_map(|e| data(e).map(Cow::into_owned)).collect()
            };
            prop_assert_eq!(datas(&events), datas(&whole));
        }
    }
}
