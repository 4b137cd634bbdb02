use obol_model::{ProviderName, Tokens};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tracing::warn;

use crate::json;

/// About this many bytes of text are one token. A rule of thumb, for answers whose usage nobody reports.
const BYTES_PER_TOKEN: u64 = 4;
/// What a picture, a sound or a file in a prompt is taken for: its bytes say nothing of its tokens.
const ATTACHMENT_TOKENS: u64 = 1_000;

/// Counts above this are not believed: a hundred times the largest context window that is offered, and at any price
/// more than a single answer can cost. A provider that reports one would otherwise empty the caller's budget.
pub(crate) const MOST_TOKENS: u64 = 100_000_000;

/// What an answer used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// In disjoint buckets.
    pub tokens: Tokens,
    /// They are our estimate: the upstream reported none, or the answer was cut.
    pub estimated: bool,
}

/// What an upstream reported so far. Streams may report several times, each time the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Reading {
    prompt: Option<u64>,
    completion: Option<u64>,
    total: Option<u64>,
    cached: Option<u64>,
    reasoning: Option<u64>,
    audio_input: Option<u64>,
    audio_output: Option<u64>,
    /// A count above [`MOST_TOKENS`] was reported.
    implausible: bool,
}

/// A count that may be of another type: a provider's odd number must not cost the rest of its usage.
pub(crate) fn count<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Count {
        Whole(u64),
        Other(IgnoredAny),
    }
    Ok(match Count::deserialize(value)? {
        Count::Whole(n) => Some(n),
        Count::Other(_) => None,
    })
}

impl Reading {
    /// Reads the value of a `usage` member; nothing when it is none.
    pub(crate) fn parse(usage: &RawValue) -> Self {
        #[derive(Deserialize)]
        struct Raw {
            #[serde(default, deserialize_with = "count")]
            prompt_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            completion_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            total_tokens: Option<u64>,
            prompt_tokens_details: Option<PromptDetails>,
            completion_tokens_details: Option<CompletionDetails>,
            /// Where DeepSeek says what others have in `prompt_tokens_details`.
            #[serde(default, deserialize_with = "count")]
            prompt_cache_hit_tokens: Option<u64>,
        }
        #[derive(Default, Deserialize)]
        struct PromptDetails {
            #[serde(default, deserialize_with = "count")]
            cached_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            audio_tokens: Option<u64>,
        }
        #[derive(Default, Deserialize)]
        struct CompletionDetails {
            #[serde(default, deserialize_with = "count")]
            reasoning_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            audio_tokens: Option<u64>,
        }
        let Ok(raw) = serde_json::from_str::<Raw>(usage.get()) else { return Self::default() };
        let mut implausible = false;
        let mut believe = |count: Option<u64>| {
            implausible |= count.is_some_and(|count| count > MOST_TOKENS);
            count.filter(|count| *count <= MOST_TOKENS)
        };
        let prompt_details = raw.prompt_tokens_details.unwrap_or_default();
        let completion_details = raw.completion_tokens_details.unwrap_or_default();
        let cached = prompt_details.cached_tokens.or(raw.prompt_cache_hit_tokens);
        Self {
            prompt: believe(raw.prompt_tokens),
            completion: believe(raw.completion_tokens),
            total: believe(raw.total_tokens),
            cached: believe(cached),
            reasoning: believe(completion_details.reasoning_tokens),
            audio_input: believe(prompt_details.audio_tokens),
            audio_output: believe(completion_details.audio_tokens),
            implausible,
        }
    }

    /// Whether a count was reported that cannot be.
    pub(crate) fn is_implausible(&self) -> bool {
        self.implausible
    }

    /// Takes in a later reading: the last one that says something wins, field by field. Readings are never added up.
    pub(crate) fn update(&mut self, later: Self) {
        self.prompt = later.prompt.or(self.prompt);
        self.completion = later.completion.or(self.completion);
        self.total = later.total.or(self.total);
        self.cached = later.cached.or(self.cached);
        self.reasoning = later.reasoning.or(self.reasoning);
        self.audio_input = later.audio_input.or(self.audio_input);
        self.audio_output = later.audio_output.or(self.audio_output);
        self.implausible |= later.implausible;
    }

    fn output(&self) -> Option<u64> {
        let completion = self.completion?;
        // The dialect counts reasoning inside of the completion. Some providers count it beside; their total tells.
        let beside = self.reasoning.filter(|reasoning| {
            *reasoning > 0
                && self.prompt.zip(self.total).is_some_and(|(prompt, total)| {
                    prompt.checked_add(completion).and_then(|sum| sum.checked_add(*reasoning)) == Some(total)
                })
        });
        Some(completion.saturating_add(beside.unwrap_or(0)))
    }

    /// What was used, where an estimate stands in for what was not reported or cannot be, and for a cut answer.
    pub(crate) fn usage(&self, complete: bool, estimate: impl FnOnce() -> Estimate) -> Usage {
        let complete = complete && !self.implausible;
        if let (true, Some(prompt), Some(output)) = (complete, self.prompt, self.output()) {
            return Usage { tokens: self.buckets(prompt, output), estimated: false };
        }
        let estimate = estimate();
        let prompt = self.prompt.unwrap_or(estimate.input);
        // A cut stream has cost at least what it relayed.
        let output = self.output().map_or(estimate.output, |reported| {
            if complete { reported } else { reported.max(estimate.output) }
        });
        Usage { tokens: self.buckets(prompt, output), estimated: true }
    }

    fn buckets(&self, prompt: u64, output: u64) -> Tokens {
        // What does not fit into the whole was counted beside it, or not at all: the whole is what is believed.
        let part = |count: Option<u64>, whole: u64| count.unwrap_or(0).min(whole);
        let cached_input = part(self.cached, prompt);
        let audio_input = part(self.audio_input, prompt - cached_input);
        let reasoning = part(self.reasoning, output);
        let audio_output = part(self.audio_output, output - reasoning);
        Tokens {
            input: prompt - cached_input - audio_input,
            cached_input,
            cache_write: 0,
            audio_input,
            output: output - reasoning - audio_output,
            reasoning,
            audio_output,
        }
    }
}

/// Says, once per answer, that its usage was not believed.
pub(crate) fn warn_implausible(provider: &ProviderName) {
    warn!(%provider, most = MOST_TOKENS, "implausible usage not believed");
}

/// Tokens by rule of thumb.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Estimate {
    pub(crate) input: u64,
    pub(crate) output: u64,
}

/// Tokens of `bytes` of text.
pub(crate) fn tokens_of(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX).div_ceil(BYTES_PER_TOKEN)
}

/// About how many tokens the value of `messages` is.
pub(crate) fn estimate_input(messages: &[u8]) -> u64 {
    let (mut text, mut attachments) = (0_usize, 0_u64);
    json::strings(messages, |name, value| match name {
        b"url" | b"data" | b"file_data" => attachments += 1,
        _ => text += value.len(),
    });
    tokens_of(text).saturating_add(attachments.saturating_mul(ATTACHMENT_TOKENS))
}

/// The most tokens that a body can reasonably be: three of its bytes to a token, where common texts have four, and a flat
/// amount for each picture of its messages. Names and numbers of schemas are tokens as well, so nothing else is left out.
pub(crate) fn worst_input(body: &[u8], messages: &[u8]) -> u64 {
    const BYTES: u64 = 3;
    const FRAME: u64 = 64;
    let (mut pictures, mut picture_bytes) = (0_u64, 0_usize);
    json::strings(messages, |name, value| {
        if name == b"url" {
            pictures += 1;
            if value.starts_with(b"data:image/") {
                picture_bytes += value.len();
            }
        }
    });
    let text = u64::try_from(body.len().saturating_sub(picture_bytes)).unwrap_or(u64::MAX);
    text.div_ceil(BYTES).saturating_add(pictures.saturating_mul(4 * ATTACHMENT_TOKENS)).saturating_add(FRAME)
}

/// Bytes of text in a message or a delta, as the model made them.
pub(crate) fn text_bytes(message: &[u8]) -> usize {
    let mut bytes = 0;
    json::strings(message, |name, value| {
        if !matches!(name, b"role" | b"id" | b"type" | b"finish_reason") {
            bytes += value.len();
        }
    });
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(json: &str) -> Reading {
        Reading::parse(serde_json::from_str(json).unwrap())
    }

    fn exact(reading: Reading) -> (u64, u64, u64) {
        let usage = reading.usage(true, || panic!("nothing to estimate"));
        assert!(!usage.estimated);
        let Tokens { input, cached_input, .. } = usage.tokens;
        (input, cached_input, usage.tokens.completion())
    }

    #[test]
    fn buckets_are_disjoint() {
        for (json, expected) in [
            (r#"{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}"#, (3, 0, 4)),
            (
                r#"{"prompt_tokens":1000,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":800}}"#,
                (200, 800, 5),
            ),
            (r#"{"prompt_tokens":10,"completion_tokens":1,"prompt_cache_hit_tokens":4}"#, (6, 4, 1)),
            (
                r#"{"prompt_tokens":9,"completion_tokens":50,"total_tokens":59,"completion_tokens_details":{"reasoning_tokens":40}}"#,
                (9, 0, 50),
            ),
            (
                r#"{"prompt_tokens":9,"completion_tokens":10,"total_tokens":59,"completion_tokens_details":{"reasoning_tokens":40}}"#,
                (9, 0, 50),
            ),
            // More cached than prompt cannot be; null details and odd types say nothing.
            (
                r#"{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":8}}"#,
                (0, 5, 1),
            ),
            (
                r#"{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6.5,"prompt_tokens_details":null,"x":[1]}"#,
                (5, 0, 1),
            ),
        ] {
            assert_eq!(exact(reading(json)), expected, "{json}");
        }
    }

    #[test]
    fn what_was_thought_and_what_is_sound_have_buckets_of_their_own() {
        let usage = reading(
            r#"{"prompt_tokens":100,"completion_tokens":50,"total_tokens":150,
                "prompt_tokens_details":{"cached_tokens":30,"audio_tokens":20},
                "completion_tokens_details":{"reasoning_tokens":40,"audio_tokens":4}}"#,
        );
        let tokens = usage.usage(true, || panic!("nothing to estimate")).tokens;
        let expected = Tokens {
            input: 50,
            cached_input: 30,
            cache_write: 0,
            audio_input: 20,
            output: 6,
            reasoning: 40,
            audio_output: 4,
        };
        assert_eq!((tokens, tokens.prompt(), tokens.completion()), (expected, 100, 50));
        // More parts than there is of the whole: the whole counts.
        let usage = reading(
            r#"{"prompt_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":8,"audio_tokens":8},
                "completion_tokens_details":{"reasoning_tokens":9,"audio_tokens":9}}"#,
        );
        let tokens = usage.usage(true, || panic!("nothing to estimate")).tokens;
        assert_eq!((tokens.prompt(), tokens.completion()), (10, 5), "{tokens:?}");
    }

    #[test]
    fn the_last_reading_wins_and_nothing_is_added_up() {
        let mut sum = Reading::default();
        sum.update(reading(r#"{"prompt_tokens":10,"completion_tokens":1}"#));
        sum.update(reading(r#"{"completion_tokens":null}"#));
        sum.update(reading(r#"{"completion_tokens":15}"#));
        sum.update(reading(r#"{"completion_tokens":15}"#));
        assert_eq!(exact(sum), (10, 0, 15));
        sum.update(reading(r#"{"completion_tokens":12}"#));
        assert_eq!(exact(sum), (10, 0, 12), "a decreasing reading is the later one");
    }

    #[test]
    fn what_is_missing_or_cut_is_estimated_and_flagged() {
        let estimate = || Estimate { input: 7, output: 30 };
        let usage = Reading::default().usage(true, estimate);
        assert_eq!(
            usage,
            Usage {
                tokens: Tokens { input: 7, cached_input: 0, output: 30, ..Tokens::default() },
                estimated: true
            }
        );
        let cut = reading(r#"{"prompt_tokens":10,"completion_tokens":20}"#).usage(false, estimate);
        assert_eq!(
            cut,
            Usage {
                tokens: Tokens { input: 10, cached_input: 0, output: 30, ..Tokens::default() },
                estimated: true
            }
        );
    }

    #[test]
    fn counts_that_cannot_be_are_not_believed() {
        let estimate = || Estimate { input: 7, output: 30 };
        for (json, expected, implausible) in [
            (
                r#"{"prompt_tokens":9007199254740993,"completion_tokens":18446744073709551615}"#,
                (7, 0, 30),
                true,
            ),
            (r#"{"prompt_tokens":100000001,"completion_tokens":50}"#, (7, 0, 50), true),
            (r#"{"prompt_tokens":-5,"completion_tokens":99999999999999999999}"#, (7, 0, 30), false),
            (r#"{"prompt_tokens":1e30}"#, (7, 0, 30), false),
        ] {
            let reading = reading(json);
            let usage = reading.usage(true, estimate);
            let tokens = (usage.tokens.input, usage.tokens.cached_input, usage.tokens.output);
            assert_eq!((tokens, usage.estimated), (expected, true), "{json}");
            assert_eq!(reading.is_implausible(), implausible, "{json}");
        }
        let most = reading(r#"{"prompt_tokens":100000000,"completion_tokens":100000000}"#);
        assert_eq!(exact(most), (MOST_TOKENS, 0, MOST_TOKENS));
        let cached =
            r#"{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":1e9}}"#;
        assert_eq!(exact(reading(cached)), (5, 0, 1));
        let mut later = reading(r#"{"prompt_tokens":5,"completion_tokens":1}"#);
        later.update(reading(r#"{"completion_tokens":100000001}"#));
        let usage = later.usage(true, estimate);
        assert_eq!((usage.tokens.input, usage.tokens.output, usage.estimated), (5, 30, true));
    }

    #[test]
    fn attachments_are_not_taken_for_text() {
        let messages = format!(
            r#"[{{"role":"user","content":[{{"type":"text","text":"{}"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]"#,
            "x".repeat(400),
            "A".repeat(100_000)
        );
        let tokens = estimate_input(messages.as_bytes());
        assert!((1_100..1_120).contains(&tokens), "{tokens}");
    }

    #[test]
    fn the_worst_case_counts_names_and_numbers_and_takes_pictures_alone_for_less() {
        let messages = format!(
            r#"[{{"content":[{{"image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]"#,
            "A".repeat(90_000)
        );
        let body = |tools: &str| format!(r#"{{"messages":{messages},"tools":{tools}}}"#);
        let worst = |tools: &str| worst_input(body(tools).as_bytes(), messages.as_bytes());
        assert!((4_064..4_200).contains(&worst("[]")), "{}", worst("[]"));
        for hiding in [
            format!(r#"[{{"{}":1}}]"#, "k".repeat(30_000)),
            format!("[{}1]", "1,".repeat(15_000)),
            format!(r#"[{{"data":"{}"}}]"#, "x".repeat(30_000)),
            format!(r#"[{{"url":"data:image/png,{}"}}]"#, "x".repeat(30_000)),
        ] {
            assert!(worst(&hiding) >= worst("[]") + 10_000, "{}", worst(&hiding));
        }
    }

    #[test]
    fn a_delta_counts_what_the_model_made() {
        let delta = br#"{"role":"assistant","content":"abcd","tool_calls":[{"id":"call_1","function":{"name":"f","arguments":"{\"a\"}"}}]}"#;
        assert_eq!(text_bytes(delta), 4 + 1 + 7);
    }
}
