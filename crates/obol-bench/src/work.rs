//! What a client asks for, and whether what came back answers exactly that.

use bytes::Bytes;
use clap::ValueEnum;
use memchr::memmem;
use serde::Serialize;

/// The header that names an MCP session.
pub(crate) const SESSION: &str = "mcp-session-id";

/// Pieces of text in a streamed completion.
pub(crate) const CHUNKS: usize = 20;

/// Events of a streamed completion: role, pieces, end, usage, `[DONE]`.
const EVENTS: usize = CHUNKS + 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Work {
    /// `tools/call`, each client in a session of its own.
    ToolCalls,
    /// Chat completions in one piece.
    Chat,
    /// Chat completions as a stream of 24 events.
    ChatStream,
}

impl Work {
    pub(crate) const ALL: [Self; 3] = [Self::ToolCalls, Self::Chat, Self::ChatStream];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::ToolCalls => "Tool calls",
            Self::Chat => "Chat completions",
            Self::ChatStream => "Streamed chat completions",
        }
    }

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::ToolCalls => "/mcp",
            Self::Chat | Self::ChatStream => "/v1/chat/completions",
        }
    }

    /// A request that carries `mark`; `tool` is what `echo` is called on this way.
    pub(crate) fn body(self, number: u64, mark: &Mark, tool: &str) -> Bytes {
        let mark = mark.as_str();
        Bytes::from(match self {
            Self::ToolCalls => format!(
                r#"{{"jsonrpc":"2.0","id":{number},"method":"tools/call","params":{{"name":"{tool}","arguments":{{"text":"{mark}"}}}}}}"#
            ),
            Self::Chat => format!(
                r#"{{"model":"bench","messages":[{{"role":"system","content":"You repeat what you are told."}},{{"role":"user","content":"{mark}"}}]}}"#
            ),
            Self::ChatStream => format!(
                r#"{{"model":"bench","stream":true,"stream_options":{{"include_usage":true}},"messages":[{{"role":"system","content":"You repeat what you are told."}},{{"role":"user","content":"{mark}"}}]}}"#
            ),
        })
    }

    /// Whether `answer` answers the request with `mark` and no other. Searched for and not parsed: the driver shares
    /// the machine with what it measures.
    pub(crate) fn check(self, number: u64, mark: &Mark, answer: &[u8]) -> Result<(), &'static str> {
        let has = |part: &[u8]| memmem::find(answer, part).is_some();
        if !has(mark.quoted()) {
            let foreign = memmem::find(answer, Mark::PREFIX.as_bytes()).is_some();
            return Err(if foreign { "it answers another request" } else { "it does not echo" });
        }
        match self {
            Self::ToolCalls => {
                let id = format!(r#""id":{number},"#);
                let id_last = format!(r#""id":{number}}}"#);
                if has(id.as_bytes()) || has(id_last.as_bytes()) { Ok(()) } else { Err("it has another id") }
            }
            Self::Chat => {
                if has(br#""total_tokens":29"#) {
                    Ok(())
                } else {
                    Err("its usage is missing")
                }
            }
            Self::ChatStream => {
                if !answer.ends_with(b"data: [DONE]\n\n") {
                    Err("the stream has no end")
                } else if memmem::find_iter(answer, b"data: ").count() != EVENTS {
                    Err("it has another number of events")
                } else if !has(br#""total_tokens":29"#) {
                    Err("its usage is missing")
                } else {
                    Ok(())
                }
            }
        }
    }
}

/// What is unique to one request of one run. All are equally long, so that none is the beginning of another.
pub(crate) struct Mark(String);

impl Mark {
    const PREFIX: &'static str = "\"mark ";

    pub(crate) fn new(client: usize, number: u64) -> Self {
        Self(format!("{}{client:05}.{number:012}\"", Self::PREFIX))
    }

    fn quoted(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn as_str(&self) -> &str {
        self.0.trim_matches('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_to_another_request_is_noticed() {
        let (mine, other) = (Mark::new(1, 2), Mark::new(12, 2));
        let answer = |mark: &Mark, id: u64| {
            format!(
                r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[{{"text":"{}"}}]}}}}"#,
                mark.as_str()
            )
        };
        let check = |answer: &str| Work::ToolCalls.check(7, &mine, answer.as_bytes());
        assert_eq!(check(&answer(&mine, 7)), Ok(()));
        assert_eq!(check(&answer(&other, 7)), Err("it answers another request"));
        assert_eq!(check(&answer(&mine, 70)), Err("it has another id"));
        assert_eq!(check(r#"{"jsonrpc":"2.0","id":7,"error":{}}"#), Err("it does not echo"));
    }

    #[test]
    fn a_stream_that_lacks_events_is_noticed() {
        let mark = Mark::new(0, 0);
        let stream = |events: usize| {
            let first = format!("data: {{\"content\":\"{}\",\"total_tokens\":29}}\n\n", mark.as_str());
            first + &"data: {}\n\n".repeat(events - 2) + "data: [DONE]\n\n"
        };
        let check = |answer: &str| Work::ChatStream.check(0, &mark, answer.as_bytes());
        assert_eq!(check(&stream(EVENTS)), Ok(()));
        assert_eq!(check(&stream(EVENTS - 1)), Err("it has another number of events"));
        assert_eq!(check(stream(EVENTS).trim_end_matches("data: [DONE]\n\n")), Err("the stream has no end"));
    }
}
