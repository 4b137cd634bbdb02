//! What a provider says of itself does not reach the caller, and no end is invented.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use jiff::Timestamp;
use obol_llm::translate::{ChatToMessagesStream, Labels, MessagesToChatStream};
use obol_llm::{Endpoint, LlmRequest};
use obol_model::snapshot::ProviderKind;
use obol_testkit::fake_llm::{FakeLlm, Reply};
use support::{End, Upstream, call, llm, request_of, rest, stream};

const CHAT: [&str; 2] = [
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":\"\"}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"12345678\"},\"finish_reason\":\"\"}]}\n\n",
];
const STOP: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":4}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const MESSAGES: [&str; 3] = [
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"model\":\"c\",\"usage\":{\"input_tokens\":3,\"output_tokens\":1}}}\n\n",
    "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"x\"}}\n\n",
];
const RESPONSES: [&str; 2] = [
    "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"error\":null}}\n\n",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n",
];

fn asked(endpoint: Endpoint) -> LlmRequest {
    let body = match endpoint {
        Endpoint::Responses => r#"{"model":"pub","stream":true,"input":"hi","store":false}"#,
        _ => r#"{"model":"pub","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hi"}]}"#,
    };
    request_of(endpoint, body)
}

/// What a caller of `endpoint` gets of those events, of a provider of that kind.
async fn relay(endpoint: Endpoint, kind: ProviderKind, events: &[&str]) -> (String, End) {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::events(events.iter().map(|event| (*event).to_owned())));
    let mut upstream = Upstream::of(&fake, "a");
    upstream.kind = kind;
    let (answer, told) = call(&llm(), &asked(endpoint), &[&upstream]).await;
    let mut stream = stream(answer.unwrap());
    (rest(&mut stream).await, told.end())
}

#[tokio::test]
async fn errors_of_any_shape_in_mid_stream_are_told_in_our_words() {
    use Endpoint::{ChatCompletions, Messages, Responses};
    use ProviderKind::{Anthropic, Openai};
    let ways: [(Endpoint, ProviderKind, &[&str]); 5] = [
        (ChatCompletions, Openai, &CHAT),
        (Messages, Openai, &CHAT),
        (Messages, Anthropic, &MESSAGES),
        (ChatCompletions, Anthropic, &MESSAGES),
        (Responses, Openai, &RESPONSES),
    ];
    for (endpoint, kind, begin) in ways {
        for error in [
            "data: {\"object\":\"error\",\"message\":\"sk-leak\"}\n\n",
            "data: {\"detail\":\"sk-leak\"}\n\n",
            "data: {\"error\":{\"message\":\"sk-leak\n\n",
            "data: {\"error\":null,\"error\":{\"message\":\"sk-leak\"}}\n\n",
            "data: [{\"error\":{\"message\":\"sk-leak\"}}]\n\n",
        ] {
            let events = [begin, &[error, DONE]].concat();
            let (relayed, end) = relay(endpoint, kind, &events).await;
            assert!(!relayed.contains("sk-leak"), "{endpoint:?} of {kind:?}, {error}: {relayed}");
            assert!(relayed.contains("\"upstream_error\""), "{endpoint:?} of {kind:?}, {error}: {relayed}");
            assert!(!end.complete && !relayed.contains("[DONE]"), "{endpoint:?} of {kind:?}, {error}");
        }
    }
}

#[tokio::test]
async fn an_empty_reason_in_every_chunk_is_none() {
    let events = [&CHAT[..], &[STOP, USAGE, DONE]].concat();
    for endpoint in [Endpoint::ChatCompletions, Endpoint::Messages] {
        let (relayed, end) = relay(endpoint, ProviderKind::Openai, &events).await;
        assert!(end.complete && !end.estimated && relayed.contains("12345678"), "{relayed}");
        assert!(
            endpoint != Endpoint::Messages || relayed.contains(r#""stop_reason":"end_turn""#),
            "{relayed}"
        );
        let (relayed, end) = relay(endpoint, ProviderKind::Openai, &CHAT).await;
        assert!(!end.complete && relayed.contains("\"upstream_cut\""), "{relayed}");
        assert!(!relayed.contains("[DONE]") && !relayed.contains("message_stop"), "{relayed}");
    }
}

#[tokio::test]
async fn a_cut_of_one_choice_of_several_is_a_cut() {
    let other =
        "data: {\"choices\":[{\"index\":1,\"delta\":{\"content\":\"12345678\"},\"finish_reason\":null}]}\n\n";
    let other_stop = "data: {\"choices\":[{\"index\":1,\"delta\":{},\"finish_reason\":\"length\"}]}\n\n";
    let events = [&CHAT[..], &[other, STOP]].concat();
    let (relayed, end) = relay(Endpoint::ChatCompletions, ProviderKind::Openai, &events).await;
    assert!(
        !end.complete && relayed.contains("\"upstream_cut\"") && !relayed.contains("[DONE]"),
        "{relayed}"
    );
    let events = [&events[..], &[other_stop]].concat();
    let (relayed, end) = relay(Endpoint::ChatCompletions, ProviderKind::Openai, &events).await;
    assert!(end.complete);
    assert_eq!(relayed, [&events[..], &[DONE]].concat().concat());
}

#[test]
fn comments_are_translated_to_ours() {
    let labels = Labels { id: "id", model: "model", created: Timestamp::UNIX_EPOCH };
    for comment in [": sk-leak\n\n", ":sk-leak\r\n\r", ": sk-leak\n: http://10.1.2.3\n\n"] {
        let mut stream = ChatToMessagesStream::new(&labels);
        assert_eq!(stream.event(comment.as_bytes()).unwrap(), ": alive\n\n");
        let mut stream = MessagesToChatStream::new(&labels, false);
        assert_eq!(stream.event(comment.as_bytes()).unwrap(), ": alive\n\n");
    }
}

#[test]
fn a_stop_reason_without_a_word_ends_no_message() {
    let labels = Labels { id: "id", model: "model", created: Timestamp::UNIX_EPOCH };
    for none in ["\"\"", "false", "null"] {
        let mut stream = MessagesToChatStream::new(&labels, false);
        stream.event(MESSAGES[0].as_bytes()).unwrap();
        let event = format!("data: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":{none}}}}}\n\n");
        stream.event(event.as_bytes()).unwrap();
        assert!(!stream.is_complete() && stream.end().is_empty(), "{none}");
        let mut stream = ChatToMessagesStream::new(&labels);
        let event = CHAT[1].replace("\"finish_reason\":\"\"", &format!("\"finish_reason\":{none}"));
        stream.event(event.as_bytes()).unwrap();
        assert!(!stream.is_complete() && stream.end().is_empty(), "{none}");
    }
}
