//! Usage in the messages dialect: how it is read, and how both dialects write it.

use obol_model::Tokens;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::sse;
use crate::usage::{Estimate, MOST_TOKENS, Reading, Usage, count};

/// What an upstream of the messages dialect reported so far.
///
/// A stream tells the prompt at its beginning and counts the output up to its end; later numbers replace earlier ones,
/// and nothing is added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MessagesReading {
    input: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    output: Option<u64>,
    thinking: Option<u64>,
    /// A count was reported that cannot be.
    implausible: bool,
}

impl MessagesReading {
    /// Takes in the usage of an answer that is no stream.
    pub fn read_answer(&mut self, body: &[u8]) {
        #[derive(Deserialize)]
        struct Answer<'a> {
            #[serde(borrow, default)]
            usage: Option<&'a RawValue>,
        }
        if let Ok(Answer { usage: Some(usage) }) = serde_json::from_slice(body) {
            self.read(usage);
        }
    }

    /// Takes in what an event of a stream says of the usage; most say nothing.
    pub fn read_event(&mut self, event: &[u8]) {
        #[derive(Deserialize)]
        struct Event<'a> {
            #[serde(borrow, default)]
            message: Option<Message<'a>>,
            #[serde(borrow, default)]
            usage: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct Message<'a> {
            #[serde(borrow, default)]
            usage: Option<&'a RawValue>,
        }
        let Some(data) = sse::data(event) else { return };
        let Ok(event) = serde_json::from_slice::<Event<'_>>(&data) else { return };
        for usage in event.message.and_then(|message| message.usage).into_iter().chain(event.usage) {
            self.read(usage);
        }
    }

    /// Takes in the value of a `usage` member.
    pub(crate) fn read(&mut self, usage: &RawValue) {
        #[derive(Deserialize)]
        struct Raw {
            #[serde(default, deserialize_with = "count")]
            input_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            cache_read_input_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            cache_creation_input_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            output_tokens: Option<u64>,
            output_tokens_details: Option<Details>,
        }
        #[derive(Default, Deserialize)]
        struct Details {
            #[serde(default, deserialize_with = "count")]
            thinking_tokens: Option<u64>,
        }
        let Ok(raw) = serde_json::from_str::<Raw>(usage.get()) else { return };
        let mut update = |known: &mut Option<u64>, later: Option<u64>| {
            self.implausible |= later.is_some_and(|count| count > MOST_TOKENS);
            *known = later.filter(|count| *count <= MOST_TOKENS).or(*known);
        };
        update(&mut self.input, raw.input_tokens);
        update(&mut self.cache_read, raw.cache_read_input_tokens);
        update(&mut self.cache_write, raw.cache_creation_input_tokens);
        update(&mut self.output, raw.output_tokens);
        update(&mut self.thinking, raw.output_tokens_details.unwrap_or_default().thinking_tokens);
    }

    /// Whether a count was reported that cannot be.
    pub fn is_implausible(&self) -> bool {
        self.implausible
    }

    /// What was used, where an estimate stands in for what was not reported or cannot be. A cut answer has cost at
    /// least what it relayed.
    pub(crate) fn usage(&self, complete: bool, estimate: impl FnOnce() -> Estimate) -> Usage {
        let complete = complete && !self.implausible;
        if let (true, Some(tokens)) = (complete, self.tokens()) {
            return Usage { tokens, estimated: false };
        }
        let estimate = estimate();
        let output = self.output.map_or(estimate.output, |reported| {
            if complete { reported } else { reported.max(estimate.output) }
        });
        Usage { tokens: self.buckets(self.input.unwrap_or(estimate.input), output), estimated: true }
    }

    /// What was reported, when it is all that there has to be.
    pub(super) fn tokens(&self) -> Option<Tokens> {
        Some(self.buckets(self.input?, self.output?))
    }

    /// The prompt's counts are disjoint in this dialect already.
    fn buckets(&self, input: u64, output: u64) -> Tokens {
        let reasoning = self.thinking.unwrap_or(0).min(output);
        Tokens {
            input,
            cached_input: self.cache_read.unwrap_or(0),
            cache_write: self.cache_write.unwrap_or(0),
            output: output - reasoning,
            reasoning,
            ..Tokens::default()
        }
    }
}

/// What the usage of a chat answer says; zeros for what it does not.
pub(super) fn tokens_of_chat(reading: &Reading) -> Tokens {
    reading.usage(true, Estimate::default).tokens
}

/// `usage` of the chat dialect: parts are counted in the whole.
#[derive(Serialize)]
pub(super) struct ChatUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

#[derive(Serialize)]
struct CompletionDetails {
    reasoning_tokens: u64,
}

impl From<Tokens> for ChatUsage {
    fn from(tokens: Tokens) -> Self {
        let (prompt, completion) = (tokens.prompt(), tokens.completion());
        Self {
            prompt_tokens: prompt,
            completion_tokens: completion,
            total_tokens: prompt.saturating_add(completion),
            prompt_tokens_details: PromptDetails { cached_tokens: tokens.cached_input },
            completion_tokens_details: CompletionDetails { reasoning_tokens: tokens.reasoning },
        }
    }
}

/// `usage` of the messages dialect: what was read from or written to a cache is not in `input_tokens`.
#[derive(Serialize, Default)]
pub(super) struct MessagesUsage {
    #[serde(rename = "input_tokens")]
    input: u64,
    #[serde(rename = "cache_creation_input_tokens")]
    cache_write: u64,
    #[serde(rename = "cache_read_input_tokens")]
    cache_read: u64,
    #[serde(rename = "output_tokens")]
    output: u64,
}

impl From<Tokens> for MessagesUsage {
    fn from(tokens: Tokens) -> Self {
        Self {
            input: tokens.input.saturating_add(tokens.audio_input),
            cache_write: tokens.cache_write,
            cache_read: tokens.cached_input,
            output: tokens.completion(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(events: &[&str]) -> MessagesReading {
        let mut reading = MessagesReading::default();
        for event in events {
            reading.read_event(format!("data: {event}\n\n").as_bytes());
        }
        reading
    }

    #[test]
    fn a_stream_tells_the_prompt_first_and_the_output_last() {
        let start = r#"{"type":"message_start","message":{"usage":{"input_tokens":25,"cache_creation_input_tokens":7,"cache_read_input_tokens":100,"output_tokens":1}}}"#;
        let deltas = [
            r#"{"type":"ping"}"#,
            "no json",
            r#"{"type":"message_delta","usage":{"output_tokens":10}}"#,
            r#"{"type":"message_delta","usage":{"input_tokens":null,"output_tokens":15,"output_tokens_details":{"thinking_tokens":5}}}"#,
        ];
        let usage =
            reading(&[&[start][..], &deltas].concat()).usage(true, || Estimate { input: 99, output: 99 });
        let expected = Tokens {
            input: 25,
            cached_input: 100,
            cache_write: 7,
            output: 10,
            reasoning: 5,
            ..Tokens::default()
        };
        assert_eq!(usage, Usage { tokens: expected, estimated: false });
        let cut = reading(&[start]).usage(false, || Estimate { input: 99, output: 50 });
        assert_eq!((cut.tokens.input, cut.tokens.output, cut.estimated), (25, 50, true));
    }

    #[test]
    fn an_answer_has_all_of_it_and_odd_counts_are_not_believed() {
        let mut all = MessagesReading::default();
        all.read_answer(
            br#"{"content":[],"usage":{"input_tokens":3,"output_tokens":4,"service_tier":"standard"}}"#,
        );
        assert_eq!(
            all.usage(true, || Estimate { input: 0, output: 0 }).tokens,
            Tokens { input: 3, output: 4, ..Tokens::default() }
        );
        all.read_answer(b"[]");
        all.read_answer(br#"{"usage":{"output_tokens":100000001}}"#);
        assert!(all.is_implausible());
        let used = all.usage(true, || Estimate { input: 0, output: 9 });
        assert_eq!((used.tokens.output, used.estimated), (9, true));
        let nothing = MessagesReading::default().usage(true, || Estimate { input: 1, output: 2 });
        assert_eq!((nothing.tokens.input, nothing.tokens.output, nothing.estimated), (1, 2, true));
    }
}
