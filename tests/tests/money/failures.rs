//! The ways in which a target fails, in both dialects, and what is to come of each.

use std::fmt::Write as _;
use std::time::Duration;

use obol_testkit::fake_llm::{Raw, Reply as Says};

/// What providers say of themselves when they fail, which is for nobody else.
pub(super) const WORDS: &str = "account acct-7f3 on 10.1.2.3 says no";

/// What is spoken by caller and providers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Chat,
    Messages,
}

impl Dialect {
    /// The first letter of the providers' names.
    pub(super) fn letter(self) -> &'static str {
        match self {
            Self::Chat => "o",
            Self::Messages => "a",
        }
    }

    pub(super) fn provider_kind(self) -> &'static str {
        match self {
            Self::Chat => "openai",
            Self::Messages => "anthropic",
        }
    }

    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Messages => "/v1/messages",
        }
    }

    pub(super) fn body(self, model: &str, stream: bool) -> String {
        let messages = r#""messages":[{"role":"user","content":"one two three"}]"#;
        match (self, stream) {
            (Self::Chat, false) => format!(r#"{{"model":"{model}",{messages}}}"#),
            (Self::Chat, true) => format!(
                r#"{{"model":"{model}","stream":true,"stream_options":{{"include_usage":true}},{messages}}}"#
            ),
            (Self::Messages, _) => {
                format!(r#"{{"model":"{model}","max_tokens":1000,"stream":{stream},{messages}}}"#)
            }
        }
    }

    /// How an event of an error begins.
    pub(super) fn error_head(self) -> &'static str {
        match self {
            Self::Chat => "data: ",
            Self::Messages => "event: error\ndata: ",
        }
    }

    /// What ends a stream that is complete.
    pub(super) fn last_event(self) -> &'static str {
        match self {
            Self::Chat => "data: [DONE]\n\n",
            Self::Messages => "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        }
    }

    /// The answer of a target, the first of which is 0: ten tokens of prompt and five of answer.
    pub(super) fn good_text(self, n: usize, stream: bool) -> String {
        let text = format!("answer of {n}");
        match (self, stream) {
            (Self::Chat, false) => format!(
                r#"{{"id":"c-{n}","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15}}}}"#
            ),
            (Self::Messages, false) => format!(
                r#"{{"id":"m-{n}","type":"message","role":"assistant","model":"m","content":[{{"type":"text","text":"{text}"}}],"stop_reason":"end_turn","stop_sequence":null,"usage":{{"input_tokens":10,"output_tokens":5}}}}"#
            ),
            (Self::Chat, true) => {
                let usage = r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15}}"#;
                let mut all = self.role() + &self.token(&text) + &self.finish();
                write!(all, "data: {usage}\n\ndata: [DONE]\n\n").unwrap();
                all
            }
            (Self::Messages, true) => self.role() + &self.token(&text) + &self.finish() + self.last_event(),
        }
    }

    fn event(self, data: &str) -> String {
        match self {
            Self::Chat => format!(
                "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",{data}}}\n\n"
            ),
            Self::Messages => {
                let name = data.split('"').nth(3).unwrap();
                format!("event: {name}\ndata: {{{data}}}\n\n")
            }
        }
    }

    fn delta(self, delta: &str) -> String {
        match self {
            Self::Chat => {
                self.event(&format!(r#""choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]"#))
            }
            Self::Messages => {
                self.event(&format!(r#""type":"content_block_delta","index":0,"delta":{delta}"#))
            }
        }
    }

    /// Who speaks; nothing is said yet.
    fn role(self) -> String {
        match self {
            Self::Chat => self.delta(r#"{"role":"assistant","content":""}"#),
            Self::Messages => self.event(
                r#""type":"message_start","message":{"id":"m","type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":10,"output_tokens":1}}"#,
            ),
        }
    }

    /// Still nothing.
    fn empty(self) -> String {
        match self {
            Self::Chat => self.delta(r#"{"content":""}"#),
            Self::Messages => {
                let ping = self.event(r#""type":"ping""#);
                let block =
                    r#""type":"content_block_start","index":0,"content_block":{"type":"text","text":""}"#;
                ping + &self.event(block)
            }
        }
    }

    fn token(self, text: &str) -> String {
        match self {
            Self::Chat => self.delta(&format!(r#"{{"content":"{text}"}}"#)),
            Self::Messages => {
                self.empty() + &self.delta(&format!(r#"{{"type":"text_delta","text":"{text}"}}"#))
            }
        }
    }

    /// The id and the name of a call without arguments.
    fn tool(self) -> String {
        match self {
            Self::Chat => self.delta(
                r#"{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}]}"#,
            ),
            Self::Messages => self.event(
                r#""type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"toolu_1","name":"f","input":{}}"#,
            ),
        }
    }

    fn reasoning(self) -> String {
        match self {
            Self::Chat => self.delta(r#"{"reasoning_content":"hm"}"#),
            Self::Messages => self.delta(r#"{"type":"thinking_delta","thinking":"hm"}"#),
        }
    }

    /// Why the answer ends.
    fn finish(self) -> String {
        match self {
            Self::Chat => self.event(r#""choices":[{"index":0,"delta":{},"finish_reason":"stop"}]"#),
            Self::Messages => {
                let block = self.event(r#""type":"content_block_stop","index":0"#);
                let reason = r#""type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":5}"#;
                block + &self.event(reason)
            }
        }
    }

    /// An error object; `code` is JSON.
    fn error(self, kind: &str, code: &str) -> String {
        let error = format!(r#"{{"message":"{WORDS}","type":"{kind}","param":null,"code":{code}}}"#);
        match self {
            Self::Chat => format!(r#"{{"error":{error}}}"#),
            Self::Messages => format!(r#"{{"type":"error","error":{error}}}"#),
        }
    }

    fn error_event(self, kind: &str, code: &str) -> String {
        format!("{}{}\n\n", self.error_head(), self.error(kind, code))
    }
}

/// What a target that is well says.
pub(super) fn good(dialect: Dialect, n: usize, stream: bool) -> Says {
    let text = dialect.good_text(n, stream);
    if stream { Says::events([text]) } else { Says::json(text) }
}

#[derive(Debug, Clone)]
pub(super) enum Does {
    Say(Says),
    /// Nobody listens.
    Refuse,
}

/// What a failure before the first content has to lead to.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) name: String,
    pub(super) does: Does,
    pub(super) then: Then,
    /// Status and code when no target does better.
    pub(super) last: (u16, &'static str),
    pub(super) retry_after: &'static str,
    pub(super) rest: Rest,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Then {
    /// The next target is asked. Whether this one may want to be paid.
    Next { worked: bool },
    /// The caller has to see it; the provider's own words are shown, or not.
    Answer { status: u16, shown: bool },
}

/// When a target is left alone that does nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    Never,
    AfterFive,
    AsAsked,
}

pub(super) fn failures(dialect: Dialect, stream: bool) -> Vec<Failure> {
    let next = |name: &str, does: Does, worked: bool, last: (u16, &'static str)| Failure {
        name: name.to_owned(),
        does,
        then: Then::Next { worked },
        last,
        retry_after: "",
        rest: Rest::AfterFive,
    };
    let error = |status: u16| Raw::json(dialect.error("scripted", "\"scripted\"")).status(status);
    let failed =
        |status: u16, last| next(&status.to_string(), Does::Say(Says::Raw(error(status))), false, last);
    let answer = |name: &str, raw: Raw, status: u16, shown: bool| Failure {
        name: name.to_owned(),
        does: Does::Say(Says::Raw(raw)),
        then: Then::Answer { status, shown },
        last: (status, ""),
        retry_after: "",
        rest: Rest::Never,
    };
    let limited = |wait: &str, retry_after| Failure {
        name: format!("429 with Retry-After: {wait}"),
        does: Does::Say(Says::Raw(error(429).header("retry-after", wait))),
        retry_after,
        rest: Rest::AsAsked,
        ..failed(429, (429, "upstream_rate_limited"))
    };
    let bad =
        |name: &str, raw: Raw| next(name, Does::Say(Says::Raw(raw)), true, (502, "upstream_bad_answer"));
    // An error inside of a 200, as a stream has it and as an answer.
    let inside = |kind: &str, code: &str| {
        if stream {
            Raw::events([dialect.error_event(kind, code)])
        } else {
            Raw::json(dialect.error(kind, code))
        }
    };
    let mut all = vec![
        answer("400", error(400), 400, true),
        answer(
            "400 context_length_exceeded",
            Raw::json(dialect.error("invalid_request_error", "\"context_length_exceeded\"")).status(400),
            400,
            true,
        ),
        failed(401, (502, "upstream_auth")),
        failed(402, (502, "upstream_auth")),
        failed(403, (502, "upstream_auth")),
        answer("404", error(404), 404, false),
        failed(408, (504, "upstream_timeout")),
        answer("409", error(409), 409, false),
        answer("413", error(413), 413, true),
        answer("422", error(422), 422, true),
        failed(429, (429, "upstream_rate_limited")),
        limited("7", "7"),
        limited("3600", ""),
        limited("Fri, 31 Dec 2100 23:59:59 GMT", ""),
        failed(500, (502, "upstream_error")),
        failed(503, (502, "upstream_error")),
        failed(529, (502, "upstream_error")),
        next("refused", Does::Refuse, false, (502, "upstream_unreachable")),
        next("closed after the request", Does::Say(Says::Cut), true, (502, "upstream_unreachable")),
        next("a web server's 404", page(404), false, (502, "upstream_bad_answer")),
        next("a web server's 200", page(200), true, (502, "upstream_bad_answer")),
        next("error 429 in a 200", say(inside("any", "429")), false, (429, "upstream_rate_limited")),
        next("error 503 in a 200", say(inside("any", "\"503\"")), false, (502, "upstream_error")),
        next("an overload in a 200", say(inside("overloaded_error", "null")), false, (502, "upstream_error")),
        next("an unknown error in a 200", say(inside("any", "null")), false, (502, "upstream_error")),
        answer("a refusal in a 200", inside("invalid_request_error", "null"), 400, true),
        bad("204", Raw::json("").status(204)),
    ];
    if !stream {
        all.extend([
            bad("an empty 200", Raw::json("")),
            bad("half an answer of its length", Raw::json(&b"{\"choices\":[{\"index\":0,\"mess"[..])),
            next(
                "cut in the answer",
                say(Raw::events(["{\"choices\":[{\"index\":0,"])
                    .header("content-type", "application/json")
                    .cut()),
                true,
                (502, "upstream_unreachable"),
            ),
        ]);
        return all;
    }
    all.extend([
        bad("an empty stream", Raw::events::<String>([])),
        bad("only comments", Raw::events([": hello\n\n", ": hello\n\n"])),
        bad("the end at once", Raw::events([dialect.last_event()])),
        bad("a whole answer", Raw::json(dialect.good_text(0, false))),
    ]);
    let preambles = [
        ("a comment", ": hello\n\n".to_owned()),
        ("a role", dialect.role()),
        ("an empty delta", dialect.role() + &dialect.empty()),
    ];
    for (name, sent) in preambles {
        // What goes before a cut has to be on its way when the cut comes.
        let events = || Raw::events([sent.clone()]).wait(Duration::from_millis(5));
        all.extend([
            bad(&format!("{name}, and an end"), events()),
            next(&format!("{name}, and a cut"), say(events().cut()), true, (502, "upstream_unreachable")),
            next(
                &format!("{name}, and an error"),
                say(events().then(dialect.error_event("any", "503"))),
                false,
                (502, "upstream_error"),
            ),
        ]);
    }
    all
}

fn say(raw: Raw) -> Does {
    Does::Say(Says::Raw(raw))
}

fn page(status: u16) -> Does {
    let page = format!("<html><body>{WORDS}</body></html>");
    say(Raw::json(page).status(status).header("content-type", "text/html"))
}

/// Targets that say nothing, or nothing of an answer, for as long as anybody waits.
pub(super) fn silences(dialect: Dialect, stream: bool) -> Vec<(&'static str, Does)> {
    let head = Raw::events::<String>([]).wait_for_release();
    let mut all = vec![("no head", Does::Say(Says::Stall))];
    if stream {
        all.push(("a head", say(head)));
        all.push(("a role", say(Raw::events([dialect.role()]).wait_for_release())));
    } else {
        all.push(("a head", say(head.header("content-type", "application/json"))));
    }
    all
}

/// A stream that falls silent in the middle.
pub(super) fn stalled(dialect: Dialect) -> Cut {
    let sent = dialect.role() + &dialect.token("word");
    // One release more than it gets.
    let raw = Raw::events([sent.clone()]).wait_for_release().wait_for_release();
    Cut { name: "a token, then silence".to_owned(), does: say(raw), sent, code: Some("upstream_timeout") }
}

/// A stream that does not end as it should, when it is released, once something of it is with the caller.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) name: String,
    pub(super) does: Does,
    /// What the caller has before our own last event.
    pub(super) sent: String,
    /// Of the error; none when the answer was complete.
    pub(super) code: Option<&'static str>,
}

pub(super) fn cuts(dialect: Dialect) -> Vec<Cut> {
    let contents = [
        ("a token", dialect.token("word")),
        ("a call's id", dialect.tool()),
        ("a thought", dialect.reasoning()),
        ("a token and a comment", dialect.token("word") + ": hello\n\n"),
    ];
    let mut all = Vec::new();
    for (name, content) in contents {
        let sent = dialect.role() + &content;
        let mut cut = |how: &str, raw: Raw, code| {
            all.push(Cut {
                name: format!("{name}, then {how}"),
                does: say(raw),
                sent: sent.clone(),
                code: Some(code),
            });
        };
        let events = || Raw::events([sent.clone()]).wait_for_release();
        cut("a cut", events().cut(), "upstream_cut");
        cut("an end", events(), "upstream_cut");
        cut("half an event", events().then("data: {\"choi").cut(), "upstream_cut");
        cut("an error", events().then(dialect.error_event("any", "null")), "upstream_error");
        cut("a limit", events().then(dialect.error_event("any", "429")), "upstream_rate_limited");
        cut("a refusal", events().then(dialect.error_event("any", "400")), "upstream_refused");
        let more = dialect.error_event("any", "503") + &dialect.token("more") + dialect.last_event();
        cut("an error and more", events().then(more), "upstream_error");
    }
    let sent = dialect.role() + &dialect.token("word") + &dialect.finish();
    let events = || Raw::events([sent.clone()]).wait_for_release();
    for (how, raw) in [("an end", events()), ("a cut", events().cut())] {
        all.push(Cut {
            name: format!("the reason of the end, then {how}"),
            does: say(raw),
            sent: sent.clone(),
            code: None,
        });
    }
    all
}
