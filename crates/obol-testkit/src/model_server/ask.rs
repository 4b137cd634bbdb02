//! What is asked and what is said, whatever the dialect.

use serde_json::Value;

use super::{CALL_TOKENS, Charged, IMAGE_TOKENS, TOOL_TOKENS, schema};

/// Tokens of a text.
pub(super) fn words(text: &str) -> u64 {
    text.split_whitespace().count() as u64
}

/// What a request asks for.
#[derive(Debug, Default)]
pub(super) struct Ask {
    /// What is answered: the last text of the conversation.
    text: String,
    /// It is the result of a tool.
    is_result: bool,
    input: u64,
    pub(super) tools: Vec<Tool>,
    pub(super) choice: Choice,
    /// The JSON schema of the answer.
    pub(super) format: Option<Value>,
    pub(super) max_output: Option<u64>,
    pub(super) stops: Vec<String>,
    /// Answers wanted: zero is one.
    pub(super) answers: u64,
    /// Whether a `#reasoning` mark is obeyed.
    pub(super) reasons: bool,
}

#[derive(Debug)]
pub(super) struct Tool {
    pub(super) name: String,
    pub(super) schema: Value,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Choice {
    #[default]
    Auto,
    No,
    Must,
    Named(String),
}

impl Ask {
    /// One whose `#reasoning` mark is obeyed.
    pub(super) fn that_reasons() -> Self {
        Self { reasons: true, ..Self::default() }
    }

    /// A user's text, or one part of it. Parts that follow one another are one text.
    pub(super) fn user(&mut self, text: &str, continues: bool) {
        self.input += words(text);
        self.last(text, continues && !self.is_result, false);
    }

    /// The result of a tool, or one part of it.
    pub(super) fn result(&mut self, text: &str) {
        self.input += words(text);
        let continues = self.is_result;
        self.last(text, continues, true);
    }

    fn last(&mut self, text: &str, continues: bool, is_result: bool) {
        if !continues {
            self.text.clear();
        }
        if !self.text.is_empty() && !text.is_empty() {
            self.text.push(' ');
        }
        self.text.push_str(text);
        self.is_result = is_result;
    }

    /// A text that is not answered: a system prompt, an assistant's.
    pub(super) fn context(&mut self, text: &str) {
        self.input += words(text);
    }

    /// An assistant's turn: what comes next is a new text.
    pub(super) fn turn(&mut self) {
        self.text.clear();
        self.is_result = false;
    }

    pub(super) fn past_call(&mut self) {
        self.input += CALL_TOKENS;
    }

    pub(super) fn image(&mut self) {
        self.input += IMAGE_TOKENS;
    }

    pub(super) fn tool(&mut self, name: &str, schema: &Value) {
        self.input += TOOL_TOKENS;
        self.tools.push(Tool { name: name.to_owned(), schema: schema.clone() });
    }

    /// A tool that only its provider runs: it costs, and is never called.
    pub(super) fn foreign_tool(&mut self) {
        self.input += TOOL_TOKENS;
    }

    /// All input tokens, with what the marks add.
    pub(super) fn input_tokens(&self) -> u64 {
        let marks = Marks::of(&self.text);
        self.input + marks.cached + marks.cache_written
    }

    fn called(&self) -> Option<&Tool> {
        match &self.choice {
            Choice::No => None,
            Choice::Named(name) => self.tools.iter().find(|tool| tool.name == *name),
            Choice::Must => self.tools.first(),
            Choice::Auto => self.tools.first().filter(|_| !self.is_result),
        }
    }

    /// The answer.
    pub(super) fn say(&self) -> Said {
        let marks = Marks::of(&self.text);
        let reasoning = if self.reasons { marks.reasoning } else { 0 };
        let calls: Vec<Call> = self.called().map_or_else(Vec::new, |tool| {
            let arguments = schema::instance(&tool.schema, &self.text).to_string();
            let call = Call { name: tool.name.clone(), arguments };
            vec![call; usize::try_from(marks.calls.unwrap_or(1)).expect("few calls")]
        });
        let (mut text, mut end) = (String::new(), End::Calls);
        if calls.is_empty() {
            (text, end) = self.text(&marks, reasoning);
        }
        let said = words(&text) + CALL_TOKENS * calls.len() as u64;
        let usage = Charged {
            requests: 1,
            input: self.input_tokens(),
            cached: marks.cached,
            cache_written: marks.cache_written,
            output: (said + reasoning) * self.answers.max(1),
            reasoning: reasoning * self.answers.max(1),
        };
        let thinking = vec!["hm"; to_usize(reasoning)].join(" ");
        Said { thinking, text, calls, end, usage, dies_after: marks.dies_after }
    }

    fn text(&self, marks: &Marks, reasoning: u64) -> (String, End) {
        let mut end = End::Done;
        let mut text = match (&self.format, marks.words) {
            (Some(schema), _) => schema::instance(schema, &self.text).to_string(),
            (None, Some(words)) => vec!["word"; to_usize(words)].join(" "),
            (None, None) if self.text.is_empty() => "ok".to_owned(),
            (None, None) => self.text.clone(),
        };
        let stops = self.stops.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = stops.min() {
            end = End::Stop(stop.clone());
            text.truncate(at);
        }
        let room = self.max_output.map(|max| max.saturating_sub(reasoning));
        if let Some(room) = room
            && words(&text) > room
        {
            let kept: Vec<&str> = text.split_whitespace().take(to_usize(room)).collect();
            text = kept.join(" ");
            end = End::Length;
        }
        (text, end)
    }
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("a number that fits into memory")
}

/// An answer.
#[derive(Debug)]
pub(super) struct Said {
    /// Empty when there is no reasoning.
    pub(super) thinking: String,
    /// Empty when there are calls.
    pub(super) text: String,
    pub(super) calls: Vec<Call>,
    pub(super) end: End,
    pub(super) usage: Charged,
    /// A stream of it ends in an error after this many words.
    dies_after: Option<u64>,
}

impl Said {
    /// Ends its events in this error, if it is to: `piece` is in every event that brings a word.
    pub(super) fn die(&self, events: &mut Vec<String>, piece: &str, error: impl FnOnce(usize) -> String) {
        let Some(words) = self.dies_after else { return };
        let words = to_usize(words);
        let next = events.iter().enumerate().filter(|(_, event)| event.contains(piece)).nth(words);
        let end = next.map_or(events.len(), |(index, _)| index);
        events.truncate(end);
        events.push(error(end));
    }
}

#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) name: String,
    /// As JSON.
    pub(super) arguments: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Stop(String),
    Length,
    Calls,
}

/// What marks in the text say.
#[derive(Debug, Default)]
struct Marks {
    cached: u64,
    cache_written: u64,
    reasoning: u64,
    words: Option<u64>,
    calls: Option<u64>,
    dies_after: Option<u64>,
}

impl Marks {
    fn of(text: &str) -> Self {
        let mut marks = Self::default();
        for (name, number) in
            text.split_whitespace().filter_map(|word| word.strip_prefix('#')?.split_once('='))
        {
            let Ok(number) = number.parse() else { continue };
            match name {
                "cached" => marks.cached = number,
                "cache_write" => marks.cache_written = number,
                "reasoning" => marks.reasoning = number,
                "words" => marks.words = Some(number),
                "calls" => marks.calls = Some(number),
                "dies_after" => marks.dies_after = Some(number),
                _ => {}
            }
        }
        marks
    }
}

/// A text in the pieces in which it is streamed: word by word.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(' ')
}

/// JSON in the pieces in which it is streamed: a few characters each, so that escapes and names break apart.
pub(super) fn fragments(json: &str) -> Vec<String> {
    let letters: Vec<char> = json.chars().collect();
    letters.chunks(7).map(|piece| piece.iter().collect()).collect()
}
