//! About how many tokens a prompt is.

use bytes::Bytes;

use super::{ATTACHMENT_TOKENS, Heard, bytes_of, is_label, tokens_of};
use crate::json;

/// What a prompt adds around each of its messages, and once.
const TOKENS_OF_A_MESSAGE: u64 = 4;
/// Of prompts with larger bodies so much text is kept, for the rest to be as dense as it: who streams an answer for minutes
/// must not hold megabytes for it.
const LARGEST_KEPT: usize = 64 << 10;

/// What is needed to tell about how many tokens a prompt is, should nobody report it: for as long as a call lasts.
#[derive(Clone)]
pub struct Prompt(Kept);

#[derive(Clone)]
enum Kept {
    /// The body that it is in; shared, not copied.
    Body(Bytes),
    /// `input` of embeddings.
    Input(Bytes),
    /// Of a body that is too large to be held: the beginning of its texts, and how many bytes they all are.
    Sample { text: Bytes, bytes: u64, rest: Rest },
}

impl Prompt {
    pub(crate) fn of(body: &Bytes) -> Self {
        if body.len() <= LARGEST_KEPT {
            return Self(Kept::Body(body.clone()));
        }
        Self(Kept::sample(|text| scan(body, text)))
    }

    /// Of embeddings: settings beside the input are no prompt, and a number is the id of a token.
    pub(crate) fn of_input(input: &Bytes) -> Self {
        if input.len() <= LARGEST_KEPT {
            // A slice would hold all of the body for as long.
            return Self(Kept::Input(Bytes::copy_from_slice(input)));
        }
        Self(Kept::sample(|text| scan_input(input, text)))
    }

    /// About how many tokens it is: its texts, its tools, and something for each attachment. Not cheap.
    pub fn tokens(&self) -> u64 {
        let mut heard = Heard::default();
        let text = |text: &[u8]| {
            heard.add(text);
            // Two texts do not become one word.
            heard.add(BETWEEN);
        };
        match &self.0 {
            Kept::Body(body) => scan(body, text).with(heard.tokens()),
            Kept::Input(input) => scan_input(input, text).with(heard.tokens()),
            Kept::Sample { text, bytes, rest } => {
                let all = u128::from(tokens_of(text)) * u128::from(*bytes);
                let all = all / u128::from(bytes_of(text).max(1));
                rest.with(u64::try_from(all).unwrap_or(u64::MAX))
            }
        }
    }
}

impl Kept {
    fn sample(scan: impl FnOnce(&mut dyn FnMut(&[u8])) -> Rest) -> Self {
        let (mut sample, mut bytes) = (Vec::new(), 0_u64);
        let rest = scan(&mut |text| {
            for text in [text, BETWEEN] {
                bytes = bytes.saturating_add(bytes_of(text));
                let room = LARGEST_KEPT.saturating_sub(sample.len());
                sample.extend_from_slice(json::beginning(text, room));
            }
        });
        Self::Sample { text: sample.into(), bytes, rest }
    }
}

/// Stands between two texts, as it does in a JSON string.
const BETWEEN: &[u8] = b"\\n";

impl std::fmt::Debug for Prompt {
    /// Without the text: prompts are nobody's business.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prompt").finish_non_exhaustive()
    }
}

/// What a prompt has beside its texts.
#[derive(Clone, Default)]
struct Rest {
    attachments: u64,
    messages: u64,
    /// Ids of tokens.
    ids: u64,
}

fn scan(body: &[u8], mut text: impl FnMut(&[u8])) -> Rest {
    let mut rest = Rest::default();
    json::strings(body, |name, raw| match name {
        b"url" | b"data" | b"file_data" | b"image_url" => rest.attachments += 1,
        b"role" => rest.messages += 1,
        _ if is_label(name) => {}
        _ => text(raw),
    });
    rest
}

fn scan_input(input: &[u8], mut text: impl FnMut(&[u8])) -> Rest {
    json::strings(input, |_, raw| text(raw));
    Rest { ids: json::numbers(input), ..Rest::default() }
}

impl Rest {
    fn with(&self, texts: u64) -> u64 {
        let tokens = texts.saturating_add(self.messages.saturating_mul(TOKENS_OF_A_MESSAGE));
        let attachments = self.attachments.saturating_mul(ATTACHMENT_TOKENS);
        tokens.saturating_add(self.ids).saturating_add(attachments).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attachments_are_not_taken_for_text() {
        let messages = format!(
            r#"[{{"role":"user","content":[{{"type":"text","text":"{}"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}}]}}]"#,
            "word ".repeat(100),
            "A".repeat(100_000)
        );
        let body = Bytes::from(messages);
        let (tokens, large) = (Prompt(Kept::Body(body.clone())).tokens(), Prompt::of(&body));
        assert!(matches!(large.0, Kept::Sample { .. }));
        assert_eq!(large.tokens(), tokens);
        assert!((1_100..1_120).contains(&tokens), "{tokens}");
    }

    #[test]
    fn a_prompt_that_is_too_large_to_be_held_is_as_dense_as_its_beginning() {
        for word in ["a bc ", "\\u4f60\\u597d", "\\ud83d\\ude00", "é", "\\n", "zqx"] {
            let prompt = |bytes: usize| {
                let content = word.repeat(bytes / word.len());
                Bytes::from(format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}]}}"#))
            };
            let (below, above) = (prompt(LARGEST_KEPT - 64), prompt(LARGEST_KEPT + 64));
            let (below, above) = (Prompt::of(&below), Prompt::of(&above));
            assert!(matches!((&below.0, &above.0), (Kept::Body(_), Kept::Sample { .. })));
            let (below, above) = (below.tokens(), above.tokens());
            assert!(above.abs_diff(below) <= below / 100 + 2, "{word}: {below} to {above}");
            let ten = Prompt::of(&prompt(10 * LARGEST_KEPT)).tokens();
            assert!(ten.abs_diff(10 * below) <= below / 10 + 20, "{word}: {below} to {ten}");
        }
    }

    #[test]
    fn ids_of_tokens_are_counted_and_settings_of_embeddings_are_not() {
        let tokens = |input: &str| Prompt::of_input(&Bytes::copy_from_slice(input.as_bytes())).tokens();
        assert_eq!(tokens("[1, 22,333333]"), 3);
        assert_eq!(tokens("[[1,2],[3]]"), 3);
        assert_eq!(tokens("[]"), 1);
        assert_eq!(tokens(r#""one 2 three""#), tokens(r#"["one 2 three"]"#));
        assert!((4..=6).contains(&tokens(r#""one 2 three""#)));
        assert_eq!(tokens(&format!("[{}7]", "123456,".repeat(50_000))), 50_001);
    }
}
