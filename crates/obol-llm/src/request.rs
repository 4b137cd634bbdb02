mod members;
mod outside;

use std::fmt;
use std::ops::Range;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

use jiff::Timestamp;
use uuid::Uuid;

use self::members::{
    Members, NOT_TOLD_APART, duplicate, odd_case, output_limit, place, read_count, read_flag, read_model,
    read_stream_options, read_text, unusable,
};
use self::outside::Outside;
use crate::endpoint::{Api, Endpoint};
use crate::error::LlmError;
use crate::json;
use crate::translate::Labels;
use crate::usage::{Pictures, Prompt, worst_input};

/// How deep a body may nest (DESIGN §16): less than makes the parsers of providers give up.
pub(crate) const MAX_DEPTH: usize = 128;

/// As many answers as the dialect knows.
const MOST_CHOICES: u64 = 128;
const MAX_TOKENS: &str = "max_tokens";
const MAX_COMPLETION_TOKENS: &str = "max_completion_tokens";
const MAX_OUTPUT_TOKENS: &str = "max_output_tokens";

/// A request: the body as it came, and where the few members stand that the gateway reads.
///
/// Everything else is the provider's business: unknown members, big numbers, escapes and whitespace reach it as they
/// are.
#[derive(Clone)]
pub struct LlmRequest {
    endpoint: Endpoint,
    body: Bytes,
    model: String,
    model_at: Range<usize>,
    stream: bool,
    stream_options: StreamOptions,
    /// What the prompt is made of, tools and settings aside: `messages` or `input`.
    prompt_at: Range<usize>,
    output: OutputLimit,
    /// How many answers are asked for.
    choices: u64,
    /// `previous_response_id`.
    previous: Option<String>,
    /// The provider keeps the answer.
    stores: bool,
    /// What makes its cost unknowable.
    unbounded: Option<&'static str>,
    headers: HeaderMap,
    received_at: Timestamp,
    /// What a translated answer is called, as its dialect calls answers.
    id: String,
}

/// Headers of a dialect that reach providers of the same API (DESIGN §11.1); no other header of a client does.
const DIALECT_HEADERS: [(&str, Api); 3] =
    [(ANTHROPIC_VERSION, Api::Anthropic), (ANTHROPIC_BETA, Api::Anthropic), ("openai-beta", Api::OpenAi)];
const ANTHROPIC_VERSION: &str = "anthropic-version";
const ANTHROPIC_BETA: &str = "anthropic-beta";
/// What is sent where the client names none: the one that every provider of this kind knows, whose meaning never changes.
const FIRST_VERSION: HeaderValue = HeaderValue::from_static("2023-06-01");

/// How long the client lets an answer become.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct OutputLimit {
    /// The highest that it says, and where.
    says: Option<(u64, &'static str)>,
    /// Where the member that we would write is `null`.
    null_at: Option<Range<usize>>,
}

/// What the client says in `stream_options`, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
enum StreamOptions {
    Absent,
    Null(Range<usize>),
    /// An object without `include_usage`: where its first member would go, and whether it has others.
    Without {
        at: usize,
        has_members: bool,
    },
    With {
        at: Range<usize>,
        value: bool,
    },
}

impl LlmRequest {
    /// Reads the members of a body that matter to the gateway.
    ///
    /// # Errors
    /// When the body is no JSON object, `model` is missing, one of those members is of the wrong type or stands there
    /// twice (a provider might read the other one), or it asks for something that cannot be kept apart from other
    /// callers or metered.
    pub fn parse(endpoint: Endpoint, body: Bytes) -> Result<Self, LlmError> {
        let text = str::from_utf8(&body)
            .map_err(|_| LlmError::invalid("invalid_json", None, "the body is not UTF-8"))?;
        if !json::depth_within(&body, MAX_DEPTH) {
            let message = format!("the body is nested deeper than {MAX_DEPTH} levels");
            return Err(LlmError::invalid("invalid_json", None, message));
        }
        let members: Members<'_> = serde_json::from_str(text).map_err(|e| {
            LlmError::invalid("invalid_json", None, format!("the body must be a JSON object: {e}"))
        })?;
        if let Some(twice) = members.twice {
            return Err(duplicate(twice.name()));
        }
        if let Some(name) = members.odd_case {
            return Err(odd_case(name));
        }
        let (model, model_at) = read_model(text, members.model)?;
        let is_chat = endpoint == Endpoint::ChatCompletions;
        let can_stream = !matches!(endpoint, Endpoint::Embeddings | Endpoint::CountTokens);
        let stream = can_stream && read_flag("stream", members.stream)?.unwrap_or(false);
        let stream_options =
            if is_chat { read_stream_options(text, members.stream_options)? } else { StreamOptions::Absent };
        let prompt = match endpoint {
            Endpoint::Responses | Endpoint::Embeddings => members.input,
            Endpoint::ChatCompletions | Endpoint::Messages | Endpoint::CountTokens => members.messages,
        };
        let output = members.output(endpoint, text)?;
        let choices = if is_chat { read_count("n", members.n)?.unwrap_or(1) } else { 1 };
        if choices > MOST_CHOICES {
            let message = format!("`n` must be at most {MOST_CHOICES}");
            return Err(LlmError::invalid("invalid_value", Some("n"), message));
        }
        let (mut previous, mut stores) = (None, false);
        if endpoint == Endpoint::Responses {
            previous = read_text("previous_response_id", members.previous_response_id)?;
            stores = read_flag("store", members.store)?.unwrap_or(true);
            members.refuse_what_is_kept_elsewhere()?;
        }
        let outside = Outside::of(endpoint, &body);
        if let Some(name) = outside.kept {
            return Err(unusable(name, NOT_TOLD_APART));
        }
        let prompt_at = prompt.map_or(0..0, |raw| place(text, raw));
        Ok(Self {
            endpoint,
            model,
            model_at,
            stream,
            stream_options,
            prompt_at,
            output,
            choices,
            previous,
            stores,
            unbounded: outside.unbounded,
            headers: HeaderMap::new(),
            received_at: Timestamp::UNIX_EPOCH,
            id: format!("{}{}", if is_chat { "chatcmpl-" } else { "msg_" }, Uuid::new_v4().simple()),
            body,
        })
    }

    /// Adds how it came: those of its headers that belong to its dialect (all others are left), and when.
    #[must_use]
    pub fn received(mut self, headers: &HeaderMap, at: Timestamp) -> Self {
        self.received_at = at;
        for (name, _) in DIALECT_HEADERS {
            for value in headers.get_all(name) {
                self.headers.append(HeaderName::from_static(name), value.clone());
            }
        }
        self
    }

    /// What a translated answer says of itself where the provider's does not.
    pub(crate) fn labels(&self) -> Labels<'_> {
        Labels { id: &self.id, model: &self.model, created: self.received_at }
    }

    /// What is asked for.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The whole body.
    pub(crate) fn body(&self) -> &Bytes {
        &self.body
    }

    /// The stored answer that this request goes on from.
    pub fn previous_response(&self) -> Option<&str> {
        self.previous.as_deref()
    }

    /// Whether the provider keeps the answer for later requests.
    pub fn stores_response(&self) -> bool {
        self.stores
    }

    /// The member that makes its cost unknowable before it is made, if one does: tools that the provider runs, what it
    /// fetches from elsewhere, dearer ways to be served. Nothing that is set aside bounds them.
    pub fn unbounded(&self) -> Option<&'static str> {
        self.unbounded
    }

    /// The headers for a provider of the same API.
    pub(crate) fn headers_for(&self, api: Api) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        let version = (api == Api::Anthropic && !self.headers.contains_key(ANTHROPIC_VERSION))
            .then(|| (HeaderName::from_static(ANTHROPIC_VERSION), FIRST_VERSION));
        let own = self.headers.iter().filter(move |(name, _)| {
            DIALECT_HEADERS.iter().any(|(known, of)| name.as_str() == *known && *of == api)
        });
        own.map(|(name, value)| (name.clone(), value.clone())).chain(version)
    }

    /// A header that only a provider of the caller's own dialect understands.
    pub(crate) fn untranslatable_header(&self) -> Option<&'static str> {
        let (name, _) = DIALECT_HEADERS
            .iter()
            .find(|(name, _)| *name != ANTHROPIC_VERSION && self.headers.contains_key(*name))?;
        Some(name)
    }

    /// The public name of the model that is asked for.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Whether the answer is to be a stream of events.
    pub fn is_stream(&self) -> bool {
        self.stream
    }

    /// Whether the client itself asks for the usage at the end of a stream.
    pub(crate) fn asks_for_usage(&self) -> bool {
        matches!(self.stream_options, StreamOptions::With { value: true, .. })
    }

    /// The most tokens that the answers can have together, by what the client says and what the model is allowed; `None`
    /// when nothing bounds them.
    ///
    /// # Errors
    /// When the client asks for more than the model is allowed.
    pub fn most_output(&self, allowed: Option<u64>) -> Result<Option<u64>, LlmError> {
        if output_limit(self.endpoint).is_none() {
            return Ok(Some(0));
        }
        let each = match (self.output.says, allowed) {
            (Some((says, param)), Some(allowed)) if says > allowed => {
                let message = format!("`{param}` is {says}, the model gives at most {allowed}");
                return Err(LlmError::invalid("max_tokens_too_large", Some(param), message));
            }
            (Some((says, _)), _) => Some(says),
            (None, allowed) => allowed,
        };
        Ok(each.map(|each| each.saturating_mul(self.choices)))
    }

    /// The most tokens that the prompt can reasonably have: every byte of the body counts but those of pictures, with fewer
    /// bytes to a token than common texts have. What a stored answer adds is not in it.
    pub fn most_input(&self) -> u64 {
        // Prompts of embeddings may be token ids: `1,` is one.
        let bytes_of_a_token = if self.endpoint == Endpoint::Embeddings { 2 } else { 3 };
        let prompt = self.body.get(self.prompt_at.clone()).unwrap_or_default();
        let pictures = match self.endpoint.api() {
            Api::OpenAi => Pictures::of_chat(prompt),
            Api::Anthropic => Pictures::of_messages(prompt),
        };
        worst_input(&self.body, pictures, bytes_of_a_token)
    }

    /// The body for one target: the value of `model` replaced, when `include_usage` is set that option set to true, and
    /// where the client sets no limit of its own `most_output` by the endpoint's name for it. Every other byte stays.
    pub fn body_for(&self, upstream_model: &str, include_usage: bool, most_output: Option<u64>) -> Bytes {
        let mut edits: Vec<(Range<usize>, String)> = Vec::with_capacity(3);
        if upstream_model != self.model {
            // Writing a string as JSON cannot fail.
            let quoted = serde_json::to_string(upstream_model).unwrap_or_default();
            edits.push((self.model_at.clone(), quoted));
        }
        if include_usage {
            edits.extend(self.include_usage());
        }
        if let (Some(most), None, Some(name)) = (most_output, self.output.says, output_limit(self.endpoint)) {
            let at = self.model_at.end;
            let new = || (at..at, format!(",\"{name}\":{most}"));
            let null = self.output.null_at.clone().map(|at| (at, most.to_string()));
            edits.push(null.unwrap_or_else(new));
        }
        if edits.is_empty() {
            return self.body.clone();
        }
        edits.sort_by_key(|(at, _)| at.start);
        let added: usize = edits.iter().map(|(_, text)| text.len()).sum();
        let mut out = BytesMut::with_capacity(self.body.len() + added);
        let mut done = 0;
        for (at, text) in edits {
            out.put_slice(self.body.get(done..at.start).unwrap_or_default());
            out.put_slice(text.as_bytes());
            done = at.end;
        }
        out.put_slice(self.body.get(done..).unwrap_or_default());
        out.freeze()
    }

    fn include_usage(&self) -> Option<(Range<usize>, String)> {
        const OPTION: &str = r#""include_usage":true"#;
        match &self.stream_options {
            // Right after the model, which is always there.
            StreamOptions::Absent => {
                let at = self.model_at.end;
                Some((at..at, format!(r#","stream_options":{{{OPTION}}}"#)))
            }
            StreamOptions::Null(at) => Some((at.clone(), format!("{{{OPTION}}}"))),
            StreamOptions::Without { at, has_members } => {
                Some((*at..*at, format!("{OPTION}{}", if *has_members { "," } else { "" })))
            }
            StreamOptions::With { at, value: false } => Some((at.clone(), "true".to_owned())),
            StreamOptions::With { value: true, .. } => None,
        }
    }

    /// What its prompt is estimated from.
    pub fn prompt(&self) -> Prompt {
        match self.endpoint {
            Endpoint::Embeddings => Prompt::of_input(&self.body.slice(self.prompt_at.clone())),
            _ => Prompt::of(&self.body),
        }
    }
}

impl fmt::Debug for LlmRequest {
    /// Without the body: prompts are nobody's business.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LlmRequest")
            .field("endpoint", &self.endpoint)
            .field("model", &self.model)
            .field("stream", &self.stream)
            .field("bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(body: &str) -> Result<LlmRequest, LlmError> {
        LlmRequest::parse(Endpoint::ChatCompletions, Bytes::copy_from_slice(body.as_bytes()))
    }

    #[test]
    fn only_the_model_changes() {
        let body = "{ \"k\":1.0, \"big\":123456789012345678901234567890,\t\"mod\\u0065l\" : \"pub\",\"x\":\"\\u00e9\\/\"}\n";
        let request = parse(body).unwrap();
        assert_eq!((request.model(), request.is_stream()), ("pub", false));
        assert_eq!(request.body_for("up\"1", false, None), body.replace("\"pub\"", r#""up\"1""#));
        assert_eq!(request.body_for("pub", false, None), body);
    }

    #[test]
    fn nesting_is_bounded_and_brackets_in_strings_do_not_count() {
        let nested =
            |levels: usize| format!(r#"{{"model":"m","x":{}{}}}"#, "[".repeat(levels), "]".repeat(levels));
        assert!(parse(&nested(MAX_DEPTH - 1)).is_ok());
        for levels in [MAX_DEPTH, 200_000] {
            assert_eq!(parse(&nested(levels)).unwrap_err().code(), "invalid_json");
        }
        assert!(parse(&format!(r#"{{"model":"m","x":"{}\"["}}"#, "[".repeat(500))).is_ok());
    }

    #[test]
    fn include_usage_is_merged_into_what_the_client_says() {
        for (options, expected) in [
            ("", r#"{"model":"m","stream_options":{"include_usage":true},"stream":true}"#),
            (
                r#","stream_options":null"#,
                r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#,
            ),
            (
                r#","stream_options": { }"#,
                r#"{"model":"m","stream":true,"stream_options": {"include_usage":true }}"#,
            ),
            (
                r#","stream_options":{"x":1}"#,
                r#"{"model":"m","stream":true,"stream_options":{"include_usage":true,"x":1}}"#,
            ),
            (
                r#","stream_options":{"x":1, "include_usage": false }"#,
                r#"{"model":"m","stream":true,"stream_options":{"x":1, "include_usage": true }}"#,
            ),
            (
                r#","stream_options":{"include_usage":null}"#,
                r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#,
            ),
        ] {
            let request = parse(&format!(r#"{{"model":"m","stream":true{options}}}"#)).unwrap();
            assert!(!request.asks_for_usage(), "{options}");
            assert_eq!(request.body_for("m", true, None), expected);
        }
        let body = r#"{"stream_options":{"include_usage":true},"model":"m","stream":true}"#;
        let request = parse(body).unwrap();
        assert!(request.asks_for_usage());
        assert_eq!(request.body_for("m", true, None), body);
        assert_eq!(request.body_for("up", true, None), body.replace(r#""m""#, r#""up""#));
    }

    #[test]
    fn an_answer_is_as_long_as_the_client_and_the_model_allow() {
        for (members, allowed, most, sent) in [
            ("", None, Ok(None), ""),
            ("", Some(100), Ok(Some(100)), r#","max_completion_tokens":100"#),
            (r#","n":3"#, Some(100), Ok(Some(300)), r#","max_completion_tokens":100"#),
            (r#","max_tokens":50"#, Some(100), Ok(Some(50)), ""),
            (r#","max_completion_tokens":70,"max_tokens":100"#, Some(100), Ok(Some(100)), ""),
            (r#","max_completion_tokens":1,"max_tokens":101"#, Some(100), Err(Some("max_tokens")), ""),
            (r#","max_tokens":null,"n":null"#, Some(9), Ok(Some(9)), r#","max_completion_tokens":9"#),
            (r#","max_tokens":50,"n":2"#, None, Ok(Some(100)), ""),
            (r#","max_tokens":101"#, Some(100), Err(Some("max_tokens")), ""),
        ] {
            let body = format!(r#"{{"model":"m"{members}}}"#);
            let request = parse(&body).unwrap();
            assert_eq!(
                request.most_output(allowed).map_err(|e| e.param().map(str::to_owned)),
                most.map_err(|p: Option<&str>| p.map(str::to_owned)),
                "{members}"
            );
            let expected = body.replacen(r#""m""#, &format!(r#""m"{sent}"#), 1);
            assert_eq!(request.body_for("m", false, allowed), expected, "{members}");
        }
        let request = parse(r#"{"model":"m","max_completion_tokens": null }"#).unwrap();
        assert_eq!(request.body_for("m", false, Some(5)), r#"{"model":"m","max_completion_tokens": 5 }"#);
    }

    #[test]
    fn faults_name_the_member_and_the_remedy() {
        for (body, code, param) in [
            ("", "invalid_json", None),
            ("[]", "invalid_json", None),
            (r#""model""#, "invalid_json", None),
            (r#"{"model":"m""#, "invalid_json", None),
            (r#"{"model":"m"} {}"#, "invalid_json", None),
            ("{}", "missing_required_parameter", Some("model")),
            (r#"{"model":7}"#, "invalid_type", Some("model")),
            (r#"{"model":null}"#, "invalid_type", Some("model")),
            (r#"{"model":"m","stream":"yes"}"#, "invalid_type", Some("stream")),
            (r#"{"model":"m","stream":1}"#, "invalid_type", Some("stream")),
            (r#"{"model":"m","max_tokens":0}"#, "invalid_type", Some("max_tokens")),
            (r#"{"model":"m","max_completion_tokens":"9"}"#, "invalid_type", Some("max_completion_tokens")),
            (r#"{"model":"m","n":1.5}"#, "invalid_type", Some("n")),
            (r#"{"model":"m","n":129}"#, "invalid_value", Some("n")),
            (r#"{"model":"m","max_tokens":1,"max_tokens":2}"#, "duplicate_parameter", Some("max_tokens")),
            (r#"{"model":"m","stream_options":[]}"#, "invalid_type", Some("stream_options")),
            (
                r#"{"model":"m","stream_options":{"include_usage":1}}"#,
                "invalid_type",
                Some("stream_options.include_usage"),
            ),
            (r#"{"model":"m","model":"m"}"#, "duplicate_parameter", Some("model")),
            (r#"{"model":"m","m\u006fdel":"n"}"#, "duplicate_parameter", Some("model")),
            (r#"{"model":"m","Model":"n"}"#, "invalid_value", Some("model")),
            (r#"{"model":"m","STREAM":true}"#, "invalid_value", Some("stream")),
            (r#"{"model":"m","\u017ftream":true}"#, "invalid_value", Some("stream")),
            (r#"{"model":"m","max_To\u212aens":1}"#, "invalid_value", Some("max_tokens")),
            (r#"{"model":"m","N":9}"#, "invalid_value", Some("n")),
            (r#"{"model":"m","Service_Tier":"priority"}"#, "invalid_value", Some("service_tier")),
            (
                r#"{"model":"m","stream_options":{"Include_usage":false}}"#,
                "invalid_value",
                Some("stream_options.include_usage"),
            ),
            (r#"{"model":"m","stream":true,"stream":true}"#, "duplicate_parameter", Some("stream")),
            (r#"{"model":"m","messages":[],"messages":[]}"#, "duplicate_parameter", Some("messages")),
        ] {
            let e = parse(body).unwrap_err();
            assert_eq!((e.code(), e.param()), (code, param), "{body}: {e}");
        }
        let e = LlmRequest::parse(
            Endpoint::ChatCompletions,
            Bytes::from_static(b"{\"model\":\"m\",\"x\":\"\xff\"}"),
        )
        .unwrap_err();
        assert_eq!(e.code(), "invalid_json");
    }

    /// JSON text as people may write it: odd spacing, escapes, numbers that no float holds.
    fn json_text() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            Just("null".to_owned()),
            Just("true".to_owned()),
            "-?[1-9][0-9]{0,30}(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?",
            Just("1.0".to_owned()),
            string_text(),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                (prop::collection::vec(inner.clone(), 0..4), space())
                    .prop_map(|(v, s)| format!("[{}{s}]", v.join(","))),
                (prop::collection::vec((string_text(), inner), 0..4), space())
                    .prop_map(|(v, s)| format!("{{{s}{}}}", join(v, &s))),
            ]
        })
    }

    fn join(members: Vec<(String, String)>, space: &str) -> String {
        let members: Vec<String> = members.into_iter().map(|(k, v)| format!("{k}{space}:{v}")).collect();
        members.join(&format!(",{space}"))
    }

    fn string_text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            "[a-z{}\\[\\]:, ]{0,6}",
            Just("\\\"".to_owned()),
            Just("\\\\".to_owned()),
            Just("\\/".to_owned()),
            Just("\\u00e9".to_owned()),
            Just("\\ud83d\\ude00".to_owned()),
            Just("é😀".to_owned())
        ];
        prop::collection::vec(piece, 0..4).prop_map(|pieces| format!("\"{}\"", pieces.concat()))
    }

    fn space() -> impl Strategy<Value = String> {
        "[ \t\r\n]{0,3}"
    }

    proptest! {
        #[test]
        fn every_byte_that_is_not_ours_stays(
            before in prop::collection::vec((string_text(), json_text()), 0..4),
            after in prop::collection::vec((string_text(), json_text()), 0..4),
            pad in space(),
            options in prop_oneof![Just(None), Just(Some("{}")), Just(Some("null")), Just(Some("{\"a\":1}"))],
        ) {
            let known = |(name, _): &(String, String)| !["\"model\"", "\"stream\"", "\"messages\"", "\"n\""].contains(&name.as_str());
            let mut members: Vec<_> = before.into_iter().filter(known).collect();
            members.push(("\"model\"".into(), "\"MODEL\"".into()));
            if let Some(options) = options {
                members.push(("\"stream_options\"".into(), options.into()));
            }
            members.extend(after.into_iter().filter(known));
            let body = format!("{pad}{{{pad}{}{pad}}}{pad}", join(members, &pad));
            let request = parse(&body).unwrap();


            let at = request.model_at.clone();
            prop_assert_eq!(&body[at.clone()], "\"MODEL\"");
            let expected = format!("{}\"up\"{}", &body[..at.start], &body[at.end..]);
            prop_assert_eq!(request.body_for("up", false, None), expected.as_bytes());

            // With usage asked for: still JSON, the option is set, and without what was added it is the old body.
            let asked = request.body_for("MODEL", true, None);
            let again = LlmRequest::parse(Endpoint::ChatCompletions, asked.clone()).unwrap();
            prop_assert!(again.asks_for_usage());
            let asked = String::from_utf8(asked.to_vec()).unwrap();
            let undone = match options {
                None => asked.replacen(",\"stream_options\":{\"include_usage\":true}", "", 1),
                Some("null") => asked.replacen("{\"include_usage\":true}", "null", 1),
                Some("{}") => asked.replacen("\"include_usage\":true", "", 1),
                _ => asked.replacen("\"include_usage\":true,", "", 1),
            };
            prop_assert_eq!(undone, body);
        }
    }
}
