mod prompt;

use obol_model::{ProviderName, Tokens};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tracing::warn;

pub use self::prompt::Prompt;
use crate::json;

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

/// Details that may be of another type, likewise.
fn details<'de, T: Deserialize<'de>, D: Deserializer<'de>>(value: D) -> Result<Option<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Details<T> {
        Object(T),
        Other(IgnoredAny),
    }
    Ok(match Details::deserialize(value)? {
        Details::Object(details) => Some(details),
        Details::Other(_) => None,
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
            #[serde(default, deserialize_with = "details")]
            prompt_tokens_details: Option<PromptDetails>,
            #[serde(default, deserialize_with = "details")]
            completion_tokens_details: Option<CompletionDetails>,
            /// What the responses dialect calls them.
            #[serde(default, deserialize_with = "count")]
            input_tokens: Option<u64>,
            #[serde(default, deserialize_with = "count")]
            output_tokens: Option<u64>,
            #[serde(default, deserialize_with = "details")]
            input_tokens_details: Option<PromptDetails>,
            #[serde(default, deserialize_with = "details")]
            output_tokens_details: Option<CompletionDetails>,
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
        let prompt_details = raw.prompt_tokens_details.or(raw.input_tokens_details).unwrap_or_default();
        let completion_details =
            raw.completion_tokens_details.or(raw.output_tokens_details).unwrap_or_default();
        let cached = prompt_details.cached_tokens.or(raw.prompt_cache_hit_tokens);
        Self {
            prompt: believe(raw.prompt_tokens.or(raw.input_tokens)),
            completion: believe(raw.completion_tokens.or(raw.output_tokens)),
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

    /// Embeddings have no completion, and their usage does not speak of one.
    pub(crate) fn without_completion(self) -> Self {
        Self { completion: Some(0), ..self }
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

/// Tokens by our own count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Estimate {
    pub(crate) input: u64,
    pub(crate) output: u64,
}

/// Text is counted in pieces of this size, so that a long answer takes no memory.
const PIECE: usize = 64 << 10;
/// What is longer than this is as dense as its beginning: counting takes a thread, which others wait for.
const SAMPLE: u64 = 256 << 10;

/// The text that a model made, and how many tokens it is.
#[derive(Default)]
pub(crate) struct Heard {
    /// Contents of JSON strings that are not counted yet, as they stand between their quotes.
    text: Vec<u8>,
    counted: u64,
    counted_bytes: u64,
    /// Those beyond the sample.
    further_bytes: u64,
}

impl Heard {
    /// Adds the content of a JSON string.
    pub(crate) fn add(&mut self, raw: &[u8]) {
        if self.counted_bytes >= SAMPLE {
            self.further_bytes = self.further_bytes.saturating_add(bytes_of(raw));
            return;
        }
        self.text.extend_from_slice(raw);
        if self.text.len() > PIECE {
            self.counted = self.counted.saturating_add(tokens_of(&self.text));
            self.counted_bytes += bytes_of(&self.text);
            self.text.clear();
        }
    }

    /// Adds what the model made of a message or a delta.
    pub(crate) fn add_message(&mut self, message: &[u8]) {
        json::strings(message, |name, raw| {
            if !is_label(name) {
                self.add(raw);
            }
        });
    }

    /// Not cheap.
    pub(crate) fn tokens(&self) -> u64 {
        let further =
            u128::from(self.further_bytes) * u128::from(self.counted) / u128::from(self.counted_bytes.max(1));
        let further = u64::try_from(further).unwrap_or(u64::MAX);
        self.counted.saturating_add(tokens_of(&self.text)).saturating_add(further)
    }
}

impl std::fmt::Debug for Heard {
    /// Without the text: answers are nobody's business.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heard").field("counted", &self.counted).finish_non_exhaustive()
    }
}

/// Members whose strings are no text of anybody.
fn is_label(name: &[u8]) -> bool {
    matches!(
        name,
        b"role"
            | b"id"
            | b"type"
            | b"finish_reason"
            | b"stop_reason"
            | b"model"
            | b"object"
            | b"status"
            | b"signature"
    )
}

/// Loads what tokens are counted by, which takes a while and a thread: whoever counts first would wait for it, and with it
/// everybody whose turn it is on that thread.
pub fn load_vocabulary() {
    bpe_openai::o200k_base();
}

/// Tokens of the content of a JSON string, by the vocabulary that most models of today resemble.
fn tokens_of(raw: &[u8]) -> u64 {
    if raw.is_empty() {
        return 0;
    }
    let quoted = [b"\"", raw, b"\""].concat();
    let text = serde_json::from_slice(&quoted).unwrap_or_else(|_| String::from_utf8_lossy(raw).into_owned());
    u64::try_from(bpe_openai::o200k_base().count(text.as_str())).unwrap_or(u64::MAX)
}

fn bytes_of(text: &[u8]) -> u64 {
    u64::try_from(text.len()).unwrap_or(u64::MAX)
}

/// The most tokens that a body can reasonably be: so few of its bytes to a token, where common texts have four, and a flat
/// amount for each picture. Names and numbers of schemas are tokens as well, so nothing else is left out.
pub(crate) fn worst_input(body: &[u8], pictures: Pictures, bytes_of_a_token: u64) -> u64 {
    const FRAME: u64 = 64;
    let text = bytes_of(body).saturating_sub(pictures.bytes);
    let pictures = pictures.count.saturating_mul(4 * ATTACHMENT_TOKENS);
    text.div_ceil(bytes_of_a_token.max(1)).saturating_add(pictures).saturating_add(FRAME)
}

/// The pictures of a prompt, and how many bytes of its body they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Pictures {
    count: u64,
    bytes: u64,
}

impl Pictures {
    /// In `messages` of the chat dialect and `input` of the responses dialect.
    pub(crate) fn of_chat(prompt: &[u8]) -> Self {
        let mut found = Self::default();
        json::strings(prompt, |name, value| {
            if matches!(name, b"url" | b"image_url") {
                found.count += 1;
                if value.starts_with(b"data:image/") {
                    found.bytes += bytes_of(value);
                }
            }
        });
        found
    }

    /// In `messages` of the messages dialect. Only where a picture may stand: arguments of tools are JSON there, and
    /// what looks like a picture in them is text.
    pub(crate) fn of_messages(prompt: &[u8]) -> Self {
        let mut found = Self::default();
        let turns: Vec<Turn<'_>> = serde_json::from_slice(prompt).unwrap_or_default();
        for content in turns.into_iter().filter_map(|turn| turn.content) {
            found.add_blocks(content, 2);
        }
        found
    }

    /// Results of tools have blocks in blocks, no deeper.
    fn add_blocks(&mut self, content: &RawValue, depth: u8) {
        let blocks: Vec<PictureBlock<'_>> = serde_json::from_str(content.get()).unwrap_or_default();
        for block in blocks {
            match block.r#type.map(RawValue::get) {
                Some(r#""image""#) => {
                    self.count += 1;
                    let data = block.source.and_then(|source| source.data);
                    self.bytes += data.map_or(0, |data| bytes_of(data.get().as_bytes()));
                }
                Some(r#""tool_result""#) if depth > 1 => {
                    if let Some(content) = block.content {
                        self.add_blocks(content, depth - 1);
                    }
                }
                _ => {}
            }
        }
    }
}

#[derive(Deserialize)]
struct Turn<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct PictureBlock<'a> {
    #[serde(borrow, default)]
    r#type: Option<&'a RawValue>,
    #[serde(borrow, default)]
    source: Option<PictureSource<'a>>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct PictureSource<'a> {
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
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
            (
                r#"{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":7,"completion_tokens_details":"x"}"#,
                (5, 0, 1),
            ),
            (
                r#"{"input_tokens":5,"output_tokens":1,"input_tokens_details":[],"output_tokens_details":true}"#,
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
    fn the_worst_case_counts_names_and_numbers_and_takes_pictures_alone_for_less() {
        let messages = format!(
            r#"[{{"content":[{{"image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]"#,
            "A".repeat(90_000)
        );
        let body = |tools: &str| format!(r#"{{"messages":{messages},"tools":{tools}}}"#);
        let worst =
            |tools: &str| worst_input(body(tools).as_bytes(), Pictures::of_chat(messages.as_bytes()), 3);
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
        let delta = br#"{"role":"assistant","content":"one two","tool_calls":[{"id":"call_1","function":{"name":"f","arguments":"{\"a\"}"}}]}"#;
        let mut heard = Heard::default();
        heard.add_message(delta);
        assert_eq!(heard.tokens(), tokens_of(br#"one twof{\"a\"}"#));
        assert!((5..9).contains(&heard.tokens()), "{}", heard.tokens());
    }

    #[test]
    fn an_endless_answer_is_counted_in_pieces() {
        let mut heard = Heard::default();
        for _ in 0..1_000_000 {
            heard.add(b" word");
            assert!(heard.text.len() <= PIECE + 5);
        }
        assert!(heard.further_bytes > 4_000_000, "most of it is not looked at");
        assert!((999_900..=1_000_100).contains(&heard.tokens()), "{}", heard.tokens());
    }
}
