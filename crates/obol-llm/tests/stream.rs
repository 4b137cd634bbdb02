//! Streams: what comes out is what went in, and every way to end.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::sync::LazyLock;
use std::time::Duration;

use obol_llm::{Llm, LlmOptions};
use obol_model::Tokens;
use obol_testkit::eventually;
use obol_testkit::fake_llm::{FakeLlm, Raw, Reply};
use proptest::prelude::*;
use support::{End, Upstream, by, call, chat, dialer, full, llm, options, request, rest, stream, streaming};
use tokio::runtime::Runtime;

const SOON: Duration = Duration::from_secs(10);
const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
const WORD: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"12345678\"},\"finish_reason\":null}]}\n\n";
const STOP: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

async fn relay(reply: Reply) -> (String, End) {
    relay_by(&llm(), reply).await
}

async fn relay_by(llm: &Llm, reply: Reply) -> (String, End) {
    let fake = FakeLlm::start().await;
    fake.reply(reply);
    let (answer, told) = call(llm, &streaming(), &[&Upstream::of(&fake, "a")]).await;
    let mut stream = stream(answer.unwrap());
    (rest(&mut stream).await, told.end())
}

/// Sends the events, then breaks the connection. Any wait has the server write what it has so far.
fn breaking<const N: usize>(events: [&'static str; N]) -> Raw {
    Raw::events(events).wait(Duration::from_millis(1)).cut()
}

fn error_frame(relayed: &str, code: &str) -> bool {
    let Some(last) = relayed.strip_suffix("\n\n").and_then(|r| r.rsplit("\n\n").next()) else { return false };
    let Some(data) = last.strip_prefix("data: ") else { return false };
    let Ok(error) = serde_json::from_str::<serde_json::Value>(data) else { return false };
    error["error"]["code"] == code && !relayed.contains("[DONE]") && !relayed.contains("\"stop\"")
}

#[tokio::test]
async fn the_usage_that_only_we_asked_for_is_read_and_hidden() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::events([ROLE, WORD, STOP, USAGE, DONE]));
    let upstream = Upstream::of(&fake, "a");
    let expected = End {
        tokens: Tokens { input: 2, cached_input: 8, output: 4, ..Tokens::default() },
        estimated: false,
        complete: true,
    };

    let (answer, told) = call(&llm(), &streaming(), &[&upstream]).await;
    let mut hidden = stream(answer.unwrap());
    assert_eq!(rest(&mut hidden).await, [ROLE, WORD, STOP, DONE].concat());
    assert_eq!(told.end(), expected);
    let sent = fake.last_body().unwrap();
    assert!(sent.windows(24).any(|w| w == br#"{"include_usage":true},""#), "{sent:?}");

    let asked = request(r#"{"model":"pub","stream":true,"stream_options":{"include_usage":true}}"#);
    let (answer, told) = call(&llm(), &asked, &[&upstream]).await;
    let mut shown = stream(answer.unwrap());
    assert_eq!(rest(&mut shown).await, [ROLE, WORD, STOP, USAGE, DONE].concat());
    assert_eq!(told.end(), expected);

    let mut refuses = Upstream::of(&fake, "b");
    refuses.target.stream_usage = false;
    let mut stream = stream(chat(&llm(), &streaming(), &[&refuses]).await.unwrap());
    rest(&mut stream).await;
    assert!(!fake.last_body().unwrap().windows(14).any(|w| w == b"stream_options"));
}

#[tokio::test]
async fn a_stream_without_usage_is_estimated_from_what_was_relayed() {
    let (relayed, end) = relay(Reply::events([ROLE, WORD, WORD, STOP, DONE])).await;
    assert_eq!(relayed, [ROLE, WORD, WORD, STOP, DONE].concat());
    // Four tokens of "one two three" and its end, four around it; sixteen digits are three each.
    let tokens = Tokens { input: 8, cached_input: 0, output: 6, ..Tokens::default() };
    assert_eq!(end, End { tokens, estimated: true, complete: true });
}

#[tokio::test]
async fn an_end_after_the_finish_reason_gets_its_done() {
    let (relayed, end) = relay(Reply::events([ROLE, WORD, STOP])).await;
    assert_eq!(relayed, [ROLE, WORD, STOP, DONE].concat());
    assert!(end.complete);
    let (relayed, end) = relay(Reply::Raw(breaking([ROLE, WORD, STOP]))).await;
    assert_eq!(relayed, [ROLE, WORD, STOP, DONE].concat());
    assert!(end.complete);
}

#[tokio::test]
async fn an_upstream_that_dies_in_the_middle_ends_as_one_error_frame() {
    let half = "data: {\"choices\":[{\"ind";
    for reply in [
        Reply::events([ROLE, WORD]),
        Reply::Raw(breaking([ROLE, WORD])),
        Reply::events([ROLE, WORD, half]),
        Reply::Raw(breaking([ROLE, WORD, half])),
    ] {
        let (relayed, end) = relay(reply.clone()).await;
        assert!(relayed.starts_with(&[ROLE, WORD].concat()), "{reply:?}: {relayed}");
        assert!(error_frame(&relayed, "upstream_cut"), "{reply:?}: {relayed}");
        assert_eq!(relayed.matches("\n\n").count(), 3, "{relayed}");
        assert!(!end.complete && end.estimated);
        assert_eq!(end.tokens.output, 3);
    }
}

#[tokio::test]
async fn a_last_event_without_its_empty_line_counts_when_it_is_whole() {
    let (relayed, end) = relay(Reply::events([ROLE, WORD, STOP, "data: [DONE]"])).await;
    assert_eq!(relayed, [ROLE, WORD, STOP, DONE].concat());
    assert!(end.complete);
    let (relayed, end) = relay(Reply::events([ROLE, WORD, STOP.trim_end()])).await;
    assert_eq!(relayed, [ROLE, WORD, STOP, DONE].concat());
    assert!(end.complete);
}

#[tokio::test]
async fn an_error_frame_in_the_middle_ends_the_stream_in_our_words() {
    let error = |more: &str| {
        format!("data: {{\"error\":{{\"message\":\"secret http://10.1.2.3 sk-leak\"{more}}}}}\n\n")
    };
    let named = "event: error\ndata: {\"message\":\"secret sk-leak\"}\n\n".to_owned();
    let unended = error("").trim_end().to_owned();
    for (frame, code) in [
        (error(""), "upstream_error"),
        (error(r#","code":529"#), "upstream_error"),
        (error(r#","code":429"#), "upstream_rate_limited"),
        (error(r#","type":"authentication_error""#), "upstream_auth"),
        (error(r#","code":"context_length_exceeded""#), "upstream_refused"),
        (named, "upstream_error"),
        (unended, "upstream_error"),
    ] {
        let apart = Reply::events([ROLE, WORD, &frame, WORD, DONE].map(str::to_owned));
        let together = Reply::events([[ROLE, WORD, &frame, WORD, DONE].concat()]);
        let last = Reply::events([ROLE, WORD, &frame].map(str::to_owned));
        let tail_only = !frame.ends_with('\n');
        for reply in if tail_only { vec![last] } else { vec![apart, together, last] } {
            let (relayed, end) = relay(reply.clone()).await;
            assert!(relayed.starts_with(&[ROLE, WORD].concat()), "{reply:?}: {relayed}");
            assert!(error_frame(&relayed, code), "{reply:?}: {relayed}");
            assert_eq!(relayed.matches("\n\n").count(), 3, "{relayed}");
            for leak in ["secret", "10.1.2.3", "sk-leak"] {
                assert!(!relayed.contains(leak), "{relayed}");
            }
            assert_eq!((end.complete, end.estimated, end.tokens.output), (false, true, 3));
        }
    }
}

#[tokio::test]
async fn an_error_frame_ends_the_upstreams_work_and_an_error_after_the_end_is_left_out() {
    let error = "data: {\"error\":\"sk-leak\"}\n\n";
    let fake = FakeLlm::start().await;
    fake.reply(Reply::Raw(Raw::events([WORD, error]).wait_for_release()));
    let mut open = stream(chat(&llm(), &streaming(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    assert!(error_frame(&rest(&mut open).await, "upstream_error"));
    eventually(SOON, || async { fake.left_early() == 1 }).await;

    let (relayed, end) = relay(Reply::events([WORD, STOP, DONE, error])).await;
    assert_eq!(relayed, [WORD, STOP, DONE].concat());
    assert!(end.complete);
}

#[tokio::test]
async fn usage_that_cannot_be_is_estimated() {
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":18446744073709551615}}\n\n";
    let (relayed, end) = relay(Reply::events([ROLE, WORD, STOP, usage, DONE])).await;
    assert_eq!(relayed, [ROLE, WORD, STOP, DONE].concat());
    let tokens = Tokens { input: 3, cached_input: 0, output: 3, ..Tokens::default() };
    assert_eq!(end, End { tokens, estimated: true, complete: true });
}

#[tokio::test]
async fn a_stream_that_falls_silent_ends_with_an_error() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::Raw(Raw::events([ROLE, WORD]).wait_for_release()));
    let llm = Llm::new(dialer(), LlmOptions { idle_timeout: Duration::from_millis(80), ..options() });
    let mut stream = stream(chat(&llm, &streaming(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    let relayed = rest(&mut stream).await;
    assert!(error_frame(&relayed, "upstream_timeout"), "{relayed}");
    eventually(SOON, || async { fake.left_early() == 1 }).await;
}

#[tokio::test]
async fn comments_are_life_but_the_whole_call_is_limited() {
    let fake = FakeLlm::start().await;
    let mut drip = Raw::events([ROLE, WORD]);
    for _ in 0..100 {
        drip = drip.wait(Duration::from_millis(20)).then(": still here\n\n");
    }
    fake.reply(Reply::Raw(drip));
    let options = LlmOptions {
        idle_timeout: Duration::from_millis(500),
        total: Duration::from_millis(700),
        ..options()
    };
    let llm = Llm::new(dialer(), options);
    let began = tokio::time::Instant::now();
    let mut stream = stream(chat(&llm, &streaming(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    let relayed = rest(&mut stream).await;
    assert!(began.elapsed() >= Duration::from_millis(700), "{:?}", began.elapsed());
    assert!(relayed.contains(": still here\n\n") && error_frame(&relayed, "upstream_timeout"), "{relayed}");
}

#[tokio::test]
async fn an_event_without_bound_ends_the_stream() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::events([WORD.to_owned(), format!("data: {}", "x".repeat(20_000))]));
    let mut stream = stream(chat(&llm(), &streaming(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    let relayed = rest(&mut stream).await;
    assert!(error_frame(&relayed, "upstream_bad_answer"), "{relayed}");
}

#[tokio::test]
async fn a_stream_that_ends_before_its_first_content_is_a_failed_attempt() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    let events = |events: &[&'static str]| Reply::events(events.iter().copied());
    for (reply, code) in [
        (events(&["data: {\"error\":{\"message\":\"x\",\"code\":429}}\n\n", DONE]), "upstream_rate_limited"),
        (events(&["data: {\"error\":{\"message\":\"x\",\"type\":\"server_error\"}}\n\n"]), "upstream_error"),
        (events(&[]), "upstream_bad_answer"),
        (events(&[": a\n\n", ": b\n\n"]), "upstream_bad_answer"),
        (events(&[DONE]), "upstream_bad_answer"),
        (events(&[ROLE]), "upstream_bad_answer"),
        (events(&[ROLE, USAGE, DONE]), "upstream_bad_answer"),
        (
            events(&[ROLE, ": b\n\n", "data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"]),
            "upstream_error",
        ),
        (Reply::events([[ROLE, "data: {\"error\":\"x\"}\n\n", WORD].concat()]), "upstream_error"),
        (Reply::Raw(breaking([ROLE, ROLE])), "upstream_unreachable"),
        (Reply::events([ROLE.to_owned(), format!("data: {}", "x".repeat(20_000))]), "upstream_bad_answer"),
        (Reply::events(vec![ROLE; 200]), "upstream_bad_answer"),
        (Reply::Raw(Raw::events([WORD]).header("content-type", "application/json")), "upstream_bad_answer"),
        (Reply::Raw(Raw::events([WORD]).header("content-type", "text/html")), "upstream_bad_answer"),
        (Reply::Raw(Raw::events([": a\n\n"]).cut()), "upstream_unreachable"),
        (Reply::CutAfter(0), "upstream_unreachable"),
    ] {
        // A new one each time: what fails too often is left alone.
        let llm = llm();
        first.reply(reply.clone());
        let alone = chat(&llm, &streaming(), &[&a]).await.map(|_| ()).unwrap_err();
        assert_eq!(alone.code(), code, "{reply:?}");
        let both = chat(&llm, &streaming(), &[&a, &b]).await.unwrap();
        assert_eq!(by(&both), "b", "{reply:?}");
        let relayed = rest(&mut stream(both)).await;
        assert!(
            !relayed.contains("error") && relayed.ends_with(DONE),
            "nothing of the first is left: {relayed}"
        );
    }

    let refusal = r#"{"error":{"message":"too long","code":"context_length_exceeded"}}"#;
    first.reply(Reply::events([format!("data: {refusal}\n\n")]));
    let (status, body, usage) = full(chat(&llm(), &streaming(), &[&a, &b]).await.unwrap());
    assert_eq!((status, body.as_str(), usage), (400, refusal, None));
}

#[tokio::test]
async fn a_preamble_is_held_back_in_time_and_relayed_with_the_content() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let preamble = [": a\n\n", "data: {\"choices\":[],\"x\":1.0}\r\n\r\n", "id: 7\n\n", ROLE, ": b\n\n"];
    first.reply(Reply::Raw(Raw::events(preamble).wait_for_release().then([WORD, STOP, DONE].concat())));
    let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    let hasty =
        Llm::new(dialer(), LlmOptions { first_byte_timeout: Duration::from_millis(300), ..options() });
    assert_eq!(by(&chat(&hasty, &streaming(), &[&a, &b]).await.unwrap()), "b");

    let (llm, asked, targets) = (llm(), streaming(), [&a, &b]);
    let call = chat(&llm, &asked, &targets);
    tokio::pin!(call);
    tokio::select! {
        answer = &mut call => panic!("{answer:?}"),
        () = first.wait_for_calls(2) => first.release(),
    }
    let answer = call.await.unwrap();
    assert_eq!(by(&answer), "a");
    assert_eq!(rest(&mut stream(answer)).await, [&preamble.concat(), WORD, STOP, DONE].concat());
}

#[tokio::test]
async fn events_are_relayed_as_they_come() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::Raw(
        Raw::events([WORD]).wait_for_release().then([WORD, STOP].concat()).wait_for_release().then(DONE),
    ));
    let mut stream = stream(chat(&llm(), &streaming(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    assert_eq!(stream.next().await.unwrap(), WORD);
    fake.release();
    assert_eq!(stream.next().await.unwrap(), [WORD, STOP].concat(), "what came together leaves together");
    // An abandoned wait loses nothing.
    assert!(tokio::time::timeout(Duration::from_millis(10), stream.next()).await.is_err());
    fake.release();
    assert_eq!(rest(&mut stream).await, DONE);
}

#[tokio::test]
async fn a_client_that_leaves_stops_the_upstream() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::Raw(Raw::events([ROLE, WORD, WORD]).wait_for_release()));
    let (answer, told) = call(&llm(), &streaming(), &[&Upstream::of(&fake, "a")]).await;
    let mut stream = stream(answer.unwrap());
    let mut relayed = Vec::new();
    while relayed.len() < ROLE.len() + 2 * WORD.len() {
        relayed.extend_from_slice(&stream.next().await.unwrap());
    }
    drop(stream);
    let end = told.end();
    eventually(SOON, || async { fake.left_early() == 1 }).await;
    assert_eq!((end.tokens.output, end.estimated, end.complete), (6, true, false));
}

#[tokio::test]
async fn readings_are_not_added_up() {
    let reading = |completion: u64| {
        format!(
            "data: {{\"choices\":[{{\"delta\":{{\"content\":\"x\"}}}}],\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":{completion}}}}}\n\n"
        )
    };
    let events = [reading(1), reading(7), reading(15), STOP.to_owned(), DONE.to_owned()];
    let (relayed, end) = relay(Reply::events(events.clone())).await;
    assert_eq!(relayed, events.concat());
    assert_eq!((end.tokens.input, end.tokens.output, end.estimated), (3, 15, false));
}

fn events() -> impl Strategy<Value = String> {
    let data = "[ -~é😀]{0,30}".prop_filter("no event of the dialect", |text| {
        !text.contains("[DONE]") && !text.contains("\"error\"")
    });
    let line = prop_oneof![
        data.prop_map(|text| format!("data: {text}")),
        "[a-z]{1,9}: [a-z ]{0,9}".prop_filter("no data", |line| !line.starts_with("data")),
        ":[a-z ]{0,9}"
    ];
    let end = prop_oneof![Just("\n"), Just("\r\n"), Just("\r")];
    let event = (prop::collection::vec((line, end.clone()), 1..4), end)
        .prop_map(|(lines, end)| lines.into_iter().map(|(line, end)| line + end).collect::<String>() + end);
    prop::collection::vec(event, 0..8).prop_map(|events| events.concat())
}

/// Clients read the machine's certificates when they are made, which takes longer than a case.
static SHARED: LazyLock<(Runtime, Llm)> =
    LazyLock::new(|| (tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(), llm()));

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_stream_in_any_pieces_is_relayed_byte_for_byte(
        middle in events(),
        cuts in prop::collection::vec(0_usize..600, 0..8),
    ) {
        let all = [ROLE, &middle, STOP, DONE].concat();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (all.len() + 1)).collect();
        cuts.extend([0, all.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        let chunks: Vec<Vec<u8>> = cuts.windows(2).map(|pair| all.as_bytes()[pair[0]..pair[1]].to_vec()).collect();
        let (runtime, llm) = &*SHARED;
        let (relayed, end) = runtime.block_on(relay_by(llm, Reply::events(chunks)));
        prop_assert_eq!(relayed, all);
        prop_assert!(end.complete);
    }
}
