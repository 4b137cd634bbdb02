//! What a request names that is not in it: what a provider keeps, and what makes its cost unknowable.
//!
//! One pass over the bytes of a body that is known to be JSON, without a tree of it. Names are compared after unescaping
//! and without regard to case, as the most lenient provider would.
//!
//! Three places are data of the caller's and not looked at: `metadata`, schemas of a tool's arguments (`parameters` and
//! `input_schema` below `tools` and `functions`), and `input` of a `tool_use` block of Anthropic's messages. Arguments of
//! the other dialects are strings, whose content is never looked at.

use std::borrow::Cow;

use crate::endpoint::{Api, Endpoint};
use crate::json;

/// The members that say it, the first of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Outside {
    /// Names something that lies with a provider under our one account, where nothing here tells whose it is.
    pub(super) kept: Option<&'static str>,
    /// Adds what no count of the body's bytes bounds.
    pub(super) unbounded: Option<&'static str>,
}

impl Outside {
    pub(super) fn of(endpoint: Endpoint, body: &[u8]) -> Self {
        let mut walk = Walk { endpoint, section: Member::Other, stack: Vec::new(), found: Self::default() };
        walk.run(body);
        walk.found
    }

    fn or(self, other: Self) -> Self {
        Self { kept: self.kept.or(other.kept), unbounded: self.unbounded.or(other.unbounded) }
    }
}

macro_rules! words {
    ($(#[$about:meta])* $type:ident { $($word:ident = $text:literal),* $(,)? }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        enum $type { $($word,)* #[default] Other }

        impl $type {
            fn find(is: impl Fn(&str) -> bool) -> Self {
                [$(Self::$word),*].into_iter().find(|word| is(word.text())).unwrap_or_default()
            }

            fn text(self) -> &'static str {
                match self { $(Self::$word => $text,)* Self::Other => "" }
            }
        }
    };
}

words! {
    /// A member that matters here.
    Member {
        Type = "type", Id = "id", Status = "status", EncryptedContent = "encrypted_content",
        Summary = "summary", Content = "content", Result = "result", FileId = "file_id", FileIds = "file_ids",
        VectorStoreIds = "vector_store_ids", Container = "container", ContainerId = "container_id",
        CachedContent = "cached_content", SkillId = "skill_id", Audio = "audio", Voice = "voice",
        Source = "source", Input = "input", Parameters = "parameters", InputSchema = "input_schema",
        Url = "url", File = "file", FileUrl = "file_url", FileData = "file_data", VideoUrl = "video_url",
        AudioUrl = "audio_url", CacheControl = "cache_control", Ttl = "ttl", Messages = "messages",
        Tools = "tools", Functions = "functions", Metadata = "metadata", ServiceTier = "service_tier",
        Speed = "speed", InferenceGeo = "inference_geo", WebSearchOptions = "web_search_options",
        McpServers = "mcp_servers",
    }
}

words! {
    /// A `type` that matters here.
    Kind {
        Function = "function", Custom = "custom", Image = "image", File = "file", Url = "url",
        ToolUse = "tool_use", ItemReference = "item_reference", Reasoning = "reasoning",
        ImageCall = "image_generation_call", Anthropic = "anthropic",
    }
}

/// What is said by `type`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Says {
    #[default]
    Nothing,
    One(Kind),
    /// Two different ones: each provider believes another.
    Two,
}

impl Says {
    fn may_be(self, kind: Kind) -> bool {
        self == Self::Two || self == Self::One(kind)
    }
}

/// An object or array that is open.
#[derive(Default)]
struct Frame {
    /// What it is the value of; an element of an array has the name of the array.
    name: Member,
    is_array: bool,
    /// The member that is being read.
    member: Member,
    says: Says,
    seen: Seen,
    /// Its source is an address.
    of_url: bool,
    found: Outside,
    /// In `input`.
    in_input: Outside,
}

/// Which members an object has; `null` is as good as nothing, and so is an id that is empty or no text.
#[derive(Clone, Copy, Default)]
struct Seen(u64);

impl Seen {
    fn bit(member: Member) -> u64 {
        1 << member as u32
    }

    fn add(&mut self, member: Member) {
        self.0 |= Self::bit(member);
    }

    fn any(self, of: &[Member]) -> bool {
        of.iter().any(|member| self.0 & Self::bit(*member) != 0)
    }

    fn beside(self, of: &[Member]) -> bool {
        of.iter().fold(self.0, |left, member| left & !Self::bit(*member)) != 0
    }
}

enum Value<'a> {
    Text(&'a [u8]),
    Array,
    /// An object, a number or a flag.
    Other,
}

struct Walk {
    endpoint: Endpoint,
    /// The member of the body that is being read.
    section: Member,
    stack: Vec<Frame>,
    found: Outside,
}

impl Walk {
    fn run(&mut self, body: &[u8]) {
        let mut rest = body;
        while let Some((&byte, after)) = rest.split_first() {
            rest = after;
            match byte {
                b'"' => {
                    let (text, after) = json::split_string(rest);
                    rest = after;
                    if after.trim_ascii_start().starts_with(b":") {
                        self.name(text);
                    } else {
                        self.value(&Value::Text(text));
                    }
                }
                b'{' | b'[' => {
                    let is_array = byte == b'[';
                    self.value(&if is_array { Value::Array } else { Value::Other });
                    let name = self.stack.last().map_or(Member::Other, |top| top.member);
                    // Elements of an array are called as it is.
                    let member = if is_array { name } else { Member::Other };
                    self.stack.push(Frame { name, is_array, member, ..Frame::default() });
                }
                b'}' | b']' => self.close(),
                b':' | b',' | b' ' | b'\t' | b'\n' | b'\r' => {}
                _ => {
                    let end = |b: &u8| matches!(b, b',' | b'}' | b']') || b.is_ascii_whitespace();
                    rest = rest.get(rest.iter().position(end).unwrap_or(rest.len())..).unwrap_or_default();
                    if byte != b'n' {
                        self.value(&Value::Other);
                    }
                }
            }
        }
    }

    fn name(&mut self, raw: &[u8]) {
        let member = member(raw);
        if self.stack.len() == 1 {
            self.section = member;
        }
        if let Some(top) = self.stack.last_mut() {
            top.member = member;
        }
    }

    /// A value that is not `null`.
    fn value(&mut self, value: &Value<'_>) {
        let depth = self.stack.len();
        let Some(top) = self.stack.last_mut() else { return };
        let member = top.member;
        let is_empty = match member {
            Member::Id | Member::SkillId => !matches!(value, Value::Text(text) if !text.is_empty()),
            _ => false,
        };
        if !top.is_array && !is_empty {
            top.seen.add(member);
        }
        let mut unbounded = match (depth, member, value) {
            (1, Member::WebSearchOptions, _) | (1, Member::McpServers, Value::Text(_) | Value::Other) => true,
            (2, Member::McpServers, _) => top.is_array,
            _ => false,
        };
        if let Value::Text(raw) = *value {
            match member {
                Member::FileId
                | Member::FileIds
                | Member::VectorStoreIds
                | Member::Container
                | Member::ContainerId
                | Member::CachedContent
                    if !raw.is_empty() =>
                {
                    top.found.kept = top.found.kept.or(Some(member.text()));
                }
                Member::Type if !top.is_array => {
                    let text = unescaped(raw);
                    let kind = Kind::find(|known| text == known);
                    top.says = match top.says {
                        Says::Nothing => Says::One(kind),
                        Says::One(same) if same == kind => top.says,
                        _ => Says::Two,
                    };
                }
                Member::FileUrl => unbounded = true,
                Member::VideoUrl | Member::AudioUrl | Member::FileData => unbounded = is_address(raw),
                Member::Url if is_address(raw) => {
                    if let Member::File | Member::FileUrl | Member::VideoUrl | Member::AudioUrl = top.name {
                        top.found.unbounded = top.found.unbounded.or(Some(top.name.text()));
                    }
                }
                Member::Ttl if top.name == Member::CacheControl && unescaped(raw) != "5m" => {
                    top.found.unbounded = top.found.unbounded.or(Some(top.name.text()));
                }
                Member::ServiceTier if depth == 1 => {
                    unbounded = !["auto", "default", "standard", "standard_only"].contains(&&*unescaped(raw));
                }
                Member::Speed if depth == 1 => unbounded = unescaped(raw) != "standard",
                Member::InferenceGeo if depth == 1 => unbounded = unescaped(raw) != "global",
                _ => {}
            }
        }
        if unbounded {
            top.found.unbounded = top.found.unbounded.or(Some(member.text()));
        }
    }

    fn close(&mut self) {
        let depth = self.stack.len();
        let Some(closed) = self.stack.pop() else { return };
        let mut found = closed.found;
        let is_call = closed.says == Says::One(Kind::ToolUse)
            && self.endpoint.api() == Api::Anthropic
            // `messages`, a message, its `content`, a block.
            && (self.section, depth) == (Member::Messages, 5);
        if !is_call {
            found = found.or(closed.in_input);
        }
        if !closed.is_array {
            found = found.or(Outside { kept: self.kept(&closed, depth), unbounded: None });
            if (self.section, closed.name, depth) == (Member::Tools, Member::Tools, 3)
                && !matches!(closed.says, Says::Nothing | Says::One(Kind::Function | Kind::Custom))
            {
                found.unbounded = found.unbounded.or(Some(Member::Tools.text()));
            }
            if closed.of_url && closed.says != Says::One(Kind::Image) {
                found.unbounded = found.unbounded.or(Some(Member::Source.text()));
            }
        }
        let Some(parent) = self.stack.last_mut() else {
            self.found = found;
            return;
        };
        let is_source = closed.name == Member::Source && !closed.is_array;
        parent.of_url |= is_source && closed.says.may_be(Kind::Url);
        match (self.section, parent.member) {
            (Member::Metadata, _)
            | (Member::Tools | Member::Functions, Member::Parameters | Member::InputSchema)
                if !parent.is_array => {}
            (_, Member::Input) if !parent.is_array => parent.in_input = parent.in_input.or(found),
            _ => parent.found = parent.found.or(found),
        }
    }

    /// What an object names as a whole.
    fn kept(&self, object: &Frame, depth: usize) -> Option<&'static str> {
        let seen = object.seen;
        let has_id = seen.any(&[Member::Id]);
        match object.name {
            Member::Audio | Member::Voice | Member::Container if has_id => {
                return Some(object.name.text());
            }
            Member::Source if object.says.may_be(Kind::File) => return Some(Member::Source.text()),
            _ => {}
        }
        if seen.any(&[Member::SkillId]) && object.says != Says::One(Kind::Anthropic) {
            return Some(Member::SkillId.text());
        }
        if self.endpoint != Endpoint::Responses || self.section != Member::Input {
            return None;
        }
        let is_item = object.name == Member::Input && depth <= 3;
        let is_reference = match object.says {
            Says::One(Kind::ItemReference) => true,
            _ if !is_item || !has_id => false,
            Says::Two => true,
            Says::Nothing => !seen.any(&[Member::Content]),
            // A summary is taken for content even when it is empty: that is how SDKs send a turn again that thought.
            Says::One(Kind::Reasoning) => {
                !seen.any(&[Member::Summary, Member::EncryptedContent, Member::Content])
            }
            Says::One(Kind::ImageCall) => !seen.any(&[Member::Result]),
            Says::One(_) => !seen.beside(&[Member::Type, Member::Id, Member::Status]),
        };
        is_reference.then_some(Member::Id.text())
    }
}

fn member(raw: &[u8]) -> Member {
    /// None that matters is longer, each of its characters escaped.
    const LONGEST: usize = 6 * 24;
    if raw.len() > LONGEST {
        return Member::Other;
    }
    if raw.is_ascii() && !raw.contains(&b'\\') {
        return Member::find(|known| known.as_bytes().eq_ignore_ascii_case(raw));
    }
    let name = folded(&unescaped(raw));
    Member::find(|known| known == name)
}

/// As a reader takes a name that has no regard to case. There are two letters beyond ASCII that are in it.
pub(super) fn folded(name: &str) -> String {
    name.to_lowercase().replace('ſ', "s")
}

/// The content of a JSON string. What is none, such as half of a pair of surrogates, is not what anybody looks for.
fn unescaped(raw: &[u8]) -> Cow<'_, str> {
    let text = String::from_utf8_lossy(raw);
    if !raw.contains(&b'\\') {
        return text;
    }
    serde_json::from_str::<String>(&format!("\"{text}\"")).map_or(text, Cow::Owned)
}

/// Whether it is an address, or may be taken for one, and not the data itself.
fn is_address(raw: &[u8]) -> bool {
    /// The data may be megabytes; what it is stands at its beginning.
    const BEGINNING: usize = 1024;
    let text = unescaped(json::beginning(raw, BEGINNING));
    let is_base64 = |c: char| c.is_ascii_alphanumeric() || "+/-_=\r\n".contains(c);
    !text.chars().all(is_base64) && !text.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("data:"))
}
