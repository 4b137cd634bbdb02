//! What is written: the parts that requests, answers and streams of a dialect share.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use serde::ser::{SerializeMap as _, SerializeSeq as _};
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

/// Structs of strings, numbers and JSON that was read cannot fail to be written; an empty body is the harmless answer
/// if they do.
pub(super) fn to_bytes(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value).unwrap_or_default().into()
}

/// Writes an event whose data is what `write` writes.
pub(super) fn frame(out: &mut Vec<u8>, name: Option<&str>, write: impl FnOnce(&mut Vec<u8>)) {
    if let Some(name) = name {
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(name.as_bytes());
        out.push(b'\n');
    }
    out.extend_from_slice(b"data: ");
    let start = out.len();
    write(out);
    // JSON that is carried as it came may have line ends between its tokens (never inside of them), where they would
    // end the field.
    for byte in out.get_mut(start..).unwrap_or_default() {
        if matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
    out.extend_from_slice(b"\n\n");
}

/// Writes an event with a JSON document.
pub(super) fn json_frame(out: &mut Vec<u8>, name: Option<&str>, value: &impl Serialize) {
    frame(out, name, |out| {
        let start = out.len();
        if serde_json::to_writer(&mut *out, value).is_err() {
            // As for `to_bytes`.
            out.truncate(start);
        }
    });
}

/// JSON that is carried as it came, or that was found inside of a string.
#[derive(Debug)]
pub(super) enum Json<'a> {
    Borrowed(&'a RawValue),
    Owned(Box<RawValue>),
}

impl Json<'_> {
    pub(super) fn get(&self) -> &RawValue {
        match self {
            Self::Borrowed(raw) => raw,
            Self::Owned(raw) => raw,
        }
    }
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        self.get().serialize(s)
    }
}

/// The object without members.
pub(super) const EMPTY_OBJECT: &str = "{}";

/// A JSON document inside of a string.
pub(super) struct Quoted<'a>(pub(super) &'a RawValue);

impl Serialize for Quoted<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.0.get())
    }
}

/// A content block of the messages dialect, in requests and answers.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block<'a> {
    Text {
        text: &'a RawValue,
    },
    Image {
        source: Source<'a>,
    },
    ToolUse {
        id: &'a RawValue,
        name: &'a RawValue,
        input: Json<'a>,
    },
    ToolResult {
        tool_use_id: &'a RawValue,
        #[serde(skip_serializing_if = "Texts::is_empty")]
        content: Texts<'a>,
    },
}

/// Where an image of the messages dialect is.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Source<'a> {
    Base64 { media_type: Cow<'a, str>, data: Cow<'a, str> },
    Url { url: &'a RawValue },
}

/// Texts, as the string that one is or as text blocks.
#[derive(Default)]
pub(super) struct Texts<'a>(pub(super) Vec<&'a RawValue>);

impl Texts<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Texts<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if let [one] = self.0.as_slice() {
            return one.serialize(s);
        }
        s.collect_seq(self.0.iter().map(|text| Block::Text { text }))
    }
}

/// Who speaks in a turn of the messages dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    User,
    Assistant,
    System,
}

/// A turn of the messages dialect.
pub(super) struct Turn<'a> {
    pub(super) role: Role,
    /// Tool results, which have to stand first.
    pub(super) results: Vec<Block<'a>>,
    pub(super) blocks: Vec<Block<'a>>,
}

impl Serialize for Turn<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        struct Content<'t, 'a>(&'t Turn<'a>);
        impl Serialize for Content<'_, '_> {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                let Turn { results, blocks, .. } = self.0;
                if let ([], [Block::Text { text }]) = (results.as_slice(), blocks.as_slice()) {
                    return text.serialize(s);
                }
                let mut list = s.serialize_seq(Some(results.len() + blocks.len()))?;
                for block in results.iter().chain(blocks) {
                    list.serialize_element(block)?;
                }
                list.end()
            }
        }
        let mut turn = s.serialize_map(Some(2))?;
        turn.serialize_entry("role", &self.role)?;
        turn.serialize_entry("content", &Content(self))?;
        turn.end()
    }
}

/// A message of a chat request.
#[derive(Serialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub(super) enum ChatMessage<'a> {
    System {
        content: ChatContent<'a>,
    },
    User {
        content: ChatContent<'a>,
    },
    Assistant {
        content: Option<ChatContent<'a>>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ChatCall<'a>>,
    },
    Tool {
        tool_call_id: &'a RawValue,
        content: ChatContent<'a>,
    },
}

/// The content of a chat message.
pub(super) enum ChatContent<'a> {
    Parts(Vec<Part<'a>>),
    /// A text that is not carried as it came.
    Said(String),
}

impl Serialize for ChatContent<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Said(text) => s.serialize_str(text),
            Self::Parts(parts) => match parts.as_slice() {
                [Part::Text { text }] => text.serialize(s),
                parts => parts.serialize(s),
            },
        }
    }
}

/// A part of a chat message.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Part<'a> {
    Text {
        text: &'a RawValue,
    },
    /// A text of ours.
    #[serde(rename = "text")]
    Said {
        text: &'static str,
    },
    ImageUrl {
        image_url: ImageUrl<'a>,
    },
}

#[derive(Serialize)]
pub(super) struct ImageUrl<'a> {
    pub(super) url: ImageAt<'a>,
}

/// Where an image of the chat dialect is.
pub(super) enum ImageAt<'a> {
    Url(&'a RawValue),
    Data { media_type: Cow<'a, str>, data: Cow<'a, str> },
}

impl Serialize for ImageAt<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Url(url) => url.serialize(s),
            Self::Data { media_type, data } => s.collect_str(&DataUrl { media_type, data }),
        }
    }
}

/// Written without being put together in memory first: images are the large part of a request.
struct DataUrl<'a> {
    media_type: &'a str,
    data: &'a str,
}

impl fmt::Display for DataUrl<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data:{};base64,{}", self.media_type, self.data)
    }
}

/// A tool call of the chat dialect, in requests and answers.
#[derive(Serialize)]
pub(super) struct ChatCall<'a> {
    pub(super) id: &'a RawValue,
    pub(super) r#type: &'static str,
    pub(super) function: ChatFunction<'a>,
}

#[derive(Serialize)]
pub(super) struct ChatFunction<'a> {
    pub(super) name: &'a RawValue,
    pub(super) arguments: Quoted<'a>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
pub(super) fn is_false(value: &bool) -> bool {
    !value
}
