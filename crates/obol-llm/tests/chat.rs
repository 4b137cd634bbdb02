//! Targets, fallback and plain answers, against providers on real sockets.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use obol_llm::{Credential, Llm, LlmError, LlmOptions};
use obol_model::{Kind, Tokens};
use obol_testkit::eventually;
use obol_testkit::fake_llm::{FakeLlm, Raw, Reply};
use support::{Told, Upstream, by, call, chat, dialer, fails, full, llm, options, plain, request, streaming};

const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_plain_answer_is_relayed_byte_for_byte_with_its_usage() {
    let fake = FakeLlm::start().await;
    let body = "{ \"big\":123456789012345678901234567890, \"x\":1.0,\"choices\":[{}],\"e\":\"\\u00e9\",\
                \"usage\":{\"prompt_tokens\":10,\"completion_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":8}} }\n";
    fake.reply(Reply::json(body));
    let sent = r#"{"temperature":1.0,"model":"pub","seed":12345678901234567890123,"messages":[]}"#;
    let answer = chat(&llm(), &request(sent), &[&Upstream::of(&fake, "a")]).await.unwrap();
    assert_eq!(by(&answer), "a");
    let (status, bytes, usage) = full(answer);
    assert_eq!((status, bytes.as_str()), (200, body));
    let usage = usage.unwrap();
    assert_eq!(usage.tokens, Tokens { input: 2, cached_input: 8, output: 4, ..Tokens::default() });
    assert!(!usage.estimated);

    assert_eq!(fake.last_body().unwrap(), sent.replace("\"pub\"", "\"a-model\""));
    let [received] = fake.received().try_into().unwrap();
    assert_eq!(received.path, "/v1/chat/completions");
    let mut names: Vec<_> = received.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "accept",
            "accept-encoding",
            "authorization",
            "content-length",
            "content-type",
            "host",
            "user-agent"
        ]
    );
    assert_eq!(received.header("authorization"), Some("Bearer sk-a"));
    assert_eq!(received.header("accept-encoding"), Some("identity"));
}

#[tokio::test]
async fn missing_usage_is_estimated_and_flagged() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::json(
        r#"{"choices":[{"message":{"role":"assistant","content":"12345678"},"finish_reason":"stop"}]}"#,
    ));
    let (_, _, usage) = full(chat(&llm(), &plain(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    let usage = usage.unwrap();
    assert!(usage.estimated);
    // "user" + "one two three" of the prompt, four bytes to a token.
    assert_eq!(usage.tokens, Tokens { input: 8, cached_input: 0, output: 3, ..Tokens::default() });
}

#[tokio::test]
async fn the_base_url_keeps_its_path_and_query_and_the_credential_its_header() {
    let fake = FakeLlm::start().await;
    let mut upstream = Upstream::at(&format!("{}/deployments/x/?api-version=7", fake.base_url()), "a");
    upstream.credential = Some(Credential::header("api-key", &"k3y".to_owned().into()).unwrap());
    chat(&llm(), &plain(), &[&upstream]).await.unwrap();
    let [received] = fake.received().try_into().unwrap();
    assert_eq!(received.path, "/v1/deployments/x/chat/completions?api-version=7");
    assert_eq!((received.header("api-key"), received.header("authorization")), (Some("k3y"), None));
}

/// What a first target answers, whether the second is tried, and what the caller gets when there is no second.
async fn matrix(reply: Reply, expected: Result<u16, (&str, Kind)>) {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    first.reply(reply.clone());
    let llm = llm();
    let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    for asked in [plain(), streaming()] {
        let alone = chat(&llm, &asked, &[&a]).await;
        let both = chat(&llm, &asked, &[&a, &b]).await;
        match (&expected, alone) {
            (Ok(status), Ok(answer)) => {
                assert_eq!(answer.status.as_u16(), *status, "{reply:?}");
                assert_eq!(by(&both.unwrap()), "a", "{reply:?} is no reason to fall back");
            }
            (Err((code, kind)), Err(failure)) => {
                assert_eq!((failure.code(), failure.kind()), (*code, *kind), "{reply:?}: {failure}");
                let text = failure.to_string();
                assert!(!text.contains("127.0.0.1") && !text.contains("scripted"), "{text}");
                assert_eq!(by(&both.unwrap()), "b", "{reply:?} is a reason to fall back");
            }
            (_, got) => panic!("{reply:?}: {got:?}"),
        }
    }
    assert_eq!(first.calls(), 4);
    assert_eq!(second.calls(), if expected.is_ok() { 0 } else { 2 });
}

#[tokio::test]
async fn deterministic_refusals_are_the_callers_answer() {
    for status in [400, 404, 409, 413, 422, 451] {
        matrix(Reply::status(status), Ok(status)).await;
    }
}

#[tokio::test]
async fn failures_and_limits_and_our_own_credential_are_reasons_to_fall_back() {
    for (status, code, kind) in [
        (401, "upstream_auth", Kind::Upstream),
        (402, "upstream_auth", Kind::Upstream),
        (403, "upstream_auth", Kind::Upstream),
        (408, "upstream_timeout", Kind::Timeout),
        (429, "upstream_rate_limited", Kind::RateLimited),
        (500, "upstream_error", Kind::Upstream),
        (503, "upstream_error", Kind::Upstream),
        (529, "upstream_error", Kind::Upstream),
        (302, "upstream_bad_answer", Kind::Upstream),
        (307, "upstream_bad_answer", Kind::Upstream),
    ] {
        matrix(Reply::status(status), Err((code, kind))).await;
    }
}

#[tokio::test]
async fn a_success_without_an_answer_is_a_failed_attempt() {
    let bad = Err(("upstream_bad_answer", Kind::Upstream));
    matrix(Reply::Raw(Raw::json("<html>hello</html>").header("content-type", "text/html")), bad).await;
    matrix(Reply::json(""), bad).await;
    for other in [
        "{}",
        r#"{"choices":[]}"#,
        r#"{"choices":{}}"#,
        r#"{"object":"error","message":"scripted"}"#,
        r#"{"detail":"scripted"}"#,
        r#"{"choices":[{"error":{"message":"scripted"}}],"usage":{"prompt_tokens":5}}"#,
    ] {
        matrix(Reply::json(other), bad).await;
    }
    matrix(Reply::Raw(Raw::json("").status(204)), bad).await;
    matrix(Reply::Raw(Raw::json("{}").header("content-encoding", "gzip")), bad).await;
    matrix(Reply::Raw(Raw::json("<h1>404</h1>").status(404)), bad).await;
    matrix(Reply::Cut, Err(("upstream_unreachable", Kind::Upstream))).await;
    matrix(Reply::Raw(Raw::json("[").then("x".repeat(200_000)).header("content-type", "text/plain")), bad)
        .await;
}

#[tokio::test]
async fn an_error_object_inside_a_plain_success_is_judged_by_the_status_it_names() {
    let (first, second) = (FakeLlm::start().await, FakeLlm::start().await);
    let (a, b) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"));
    for (error, code) in [
        (r#"{"error":{"message":"slow down","code":429}}"#, "upstream_rate_limited"),
        (r#"{"error":{"message":"no","type":"authentication_error"}}"#, "upstream_auth"),
        (r#"{"error":{"message":"?"}}"#, "upstream_error"),
        (r#"{"error":"?"}"#, "upstream_error"),
        (r#"{"error":{"message":"?"},"choices":[]}"#, "upstream_error"),
        (r#"{"error":{"message":"?"},"choices":[{"message":{"content":"half"}}]}"#, "upstream_error"),
    ] {
        first.reply(Reply::json(error));
        assert_eq!(chat(&llm(), &plain(), &[&a]).await.unwrap_err().code(), code, "{error}");
        assert_eq!(by(&chat(&llm(), &plain(), &[&a, &b]).await.unwrap()), "b", "{error}");
    }
    let refusal = r#"{"error":{"message":"too long","code":"400"}}"#;
    first.reply(Reply::json(refusal));
    let (status, body, usage) = full(chat(&llm(), &plain(), &[&a, &b]).await.unwrap());
    assert_eq!((status, body.as_str(), usage), (400, refusal, None));
}

#[tokio::test]
async fn a_refusal_that_is_no_json_becomes_an_error_object() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::Raw(Raw::json("<h1>too big, says nginx/1.2 at 10.0.0.1</h1>").status(413)));
    let (status, body, _) = full(chat(&llm(), &plain(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    assert_eq!(status, 413);
    assert!(
        body.starts_with(r#"{"error":{"message":"the provider refused the request with status 413""#),
        "{body}"
    );
    assert!(!body.contains("nginx"));
}

#[tokio::test]
async fn only_words_about_the_callers_own_request_are_passed_on() {
    let fake = FakeLlm::start().await;
    let upstream = Upstream::of(&fake, "a");
    let said = r#"{"error":{"message":"`top_p` is too large"}}"#;
    let leak = r#"{"error":{"message":"sk-a may not do that"}}"#;
    for (status, body, shown) in [
        (400, said, true),
        (413, said, true),
        (422, said, true),
        (404, said, false),
        (409, said, false),
        (451, said, false),
        (400, leak, false),
        (400, r#"{"error":{"message":"sk\u002da may not do that"}}"#, false),
        (400, r#"{"error":{"\u0073k-a":"may not do that"}}"#, false),
        (400, r#"{"error":{"message":"`top_p` is too \u006carge"}}"#, true),
    ] {
        fake.reply(Reply::Raw(Raw::json(body).status(status)));
        for asked in [plain(), streaming()] {
            let (got, relayed, usage) = full(chat(&llm(), &asked, &[&upstream]).await.unwrap());
            assert_eq!((got, relayed == body, usage), (status, shown, None), "{relayed}");
            assert!(shown || relayed.contains("upstream_refused"), "{relayed}");
        }
    }
}

#[tokio::test]
async fn usage_that_cannot_be_is_estimated() {
    let fake = FakeLlm::start().await;
    fake.reply(Reply::json(
        r#"{"choices":[{"message":{"content":"12345678"}}],"usage":{"prompt_tokens":9007199254740993,"completion_tokens":18446744073709551615}}"#,
    ));
    let (_, _, usage) = full(chat(&llm(), &plain(), &[&Upstream::of(&fake, "a")]).await.unwrap());
    let usage = usage.unwrap();
    assert!(usage.estimated);
    assert_eq!(usage.tokens, Tokens { input: 8, cached_input: 0, output: 3, ..Tokens::default() });
}

#[tokio::test]
async fn a_failure_tells_whether_a_provider_may_have_worked() {
    let (first, second, dead) = (FakeLlm::start().await, FakeLlm::start().await, FakeLlm::start().await);
    dead.refuse().await;
    let hasty =
        || Llm::new(dialer(), LlmOptions { first_byte_timeout: Duration::from_millis(100), ..options() });
    let (a, b, dead) = (Upstream::of(&first, "a"), Upstream::of(&second, "b"), Upstream::of(&dead, "d"));
    let forbidden = Upstream::at("http://169.254.169.254/v1", "f");
    for (asked, reply, may_have_worked) in [
        (streaming(), Reply::Stall, true),
        (streaming(), Reply::Cut, true),
        (streaming(), Reply::events([": a\n\n"]), true),
        (plain(), Reply::json("<h1>hi</h1>"), true),
        (plain(), Reply::json(r#"{"error":"x","usage":{"prompt_tokens":5}}"#), true),
        (plain(), Reply::json(r#"{"error":"x"}"#), false),
        (streaming(), Reply::status(500), false),
        (streaming(), Reply::status(429), false),
        (streaming(), Reply::status(401), false),
        (streaming(), Reply::status(307), false),
        (streaming(), Reply::events(["data: {\"error\":{\"message\":\"x\"}}\n\n"]), false),
    ] {
        first.reply(reply.clone());
        for targets in [vec![&a], vec![&a, &dead], vec![&dead, &a], vec![&a, &forbidden]] {
            // A new one each time: what fails too often is left alone.
            let llm = if matches!(reply, Reply::Stall) { hasty() } else { llm() };
            let (failure, got) = fails(&llm, &asked, &targets).await;
            assert_eq!(got.as_deref(), may_have_worked.then_some("a"), "{reply:?}: {failure:?}");
        }
    }
    first.reply(Reply::Cut);
    second.reply(Reply::status(503));
    assert_eq!(
        fails(&llm(), &plain(), &[&a, &b]).await.1.as_deref(),
        Some("a"),
        "one that refuses changes nothing"
    );
    first.reply(Reply::Stall);
    second.reply(Reply::Stall);
    assert_eq!(fails(&hasty(), &streaming(), &[&a, &b]).await.1.as_deref(), Some("b"), "the last one counts");
    assert_eq!(fails(&llm(), &plain(), &[&dead, &forbidden]).await.1, None);
}

#[tokio::test]
async fn a_short_wait_is_passed_on_and_a_long_one_is_not() {
    let fake = FakeLlm::start().await;
    for (header, expected) in
        [("7", Some(7)), ("60", Some(60)), ("61", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)]
    {
        fake.reply(Reply::Raw(Raw::json("{}").status(429).header("retry-after", header)));
        let failure = chat(&llm(), &plain(), &[&Upstream::of(&fake, "a")]).await.unwrap_err();
        assert_eq!(failure.retry_after(), expected.map(Duration::from_secs), "{header}");
    }
}

#[tokio::test]
async fn a_dead_provider_is_passed_over() {
    let (dead, alive) = (FakeLlm::start().await, FakeLlm::start().await);
    dead.refuse().await;
    let llm = llm();
    let (a, b) = (Upstream::of(&dead, "a"), Upstream::of(&alive, "b"));
    assert_eq!(chat(&llm, &plain(), &[&a]).await.unwrap_err().code(), "upstream_unreachable");
    assert_eq!(by(&chat(&llm, &plain(), &[&a, &b]).await.unwrap()), "b");
    assert_eq!(alive.last_body().unwrap(), plain().body_for("b-model", false, None));
    let none = chat(&llm, &plain(), &[]).await.unwrap_err();
    assert_eq!((none.code(), none.kind()), ("no_target", Kind::NotFound));
}

#[tokio::test]
async fn a_provider_that_does_not_begin_is_passed_over_in_time() {
    let (mute, alive) = (FakeLlm::start().await, FakeLlm::start().await);
    mute.reply(Reply::Stall);
    let (a, b) = (Upstream::of(&mute, "a"), Upstream::of(&alive, "b"));
    let llm = Llm::new(dialer(), LlmOptions { first_byte_timeout: Duration::from_millis(50), ..options() });
    for asked in [plain(), streaming()] {
        assert_eq!(by(&chat(&llm, &asked, &[&a, &b]).await.unwrap()), "b");
    }
    eventually(SOON, || async { mute.left_early() == 2 }).await;
    let alone = chat(&llm, &streaming(), &[&a]).await.unwrap_err();
    assert!(matches!(alone, LlmError::Timeout { .. }), "{alone:?}");

    let llm = Llm::new(dialer(), LlmOptions { total: Duration::from_millis(80), ..options() });
    let alone = chat(&llm, &plain(), &[&a, &b]).await.unwrap_err();
    assert!(matches!(alone, LlmError::Timeout { .. }), "{alone:?}");
    assert_eq!(alive.calls(), 2, "the limit of the whole call leaves no second attempt");
}

#[tokio::test]
async fn an_abandoned_call_closes_the_providers_connection_and_says_where_it_went() {
    let (dead, fake) = (FakeLlm::start().await, FakeLlm::start().await);
    dead.refuse().await;
    fake.reply(Reply::Stall);
    let (llm, upstreams) = (llm(), [Upstream::of(&dead, "d"), Upstream::of(&fake, "a")]);
    for (calls, asked) in [(1, plain()), (2, streaming())] {
        let told = Told::default();
        {
            let routes = upstreams.iter().map(Upstream::route).collect();
            let call = llm.call(Arc::new(asked), routes, told.clone());
            tokio::pin!(call);
            tokio::select! {
                answer = &mut call => panic!("{answer:?}"),
                () = fake.wait_for_calls(calls) => {}
            }
        }
        assert_eq!(told.heard().due.as_deref(), Some("a"));
        eventually(SOON, || async { fake.left_early() == calls }).await;
    }
}

#[tokio::test]
async fn an_answer_leaves_nothing_to_estimate() {
    let fake = FakeLlm::start().await;
    let upstream = Upstream::of(&fake, "a");
    for reply in [Reply::Echo, Reply::status(400)] {
        fake.reply(reply);
        let (answer, told) = call(&llm(), &plain(), &[&upstream]).await;
        answer.unwrap();
        assert_eq!(told.heard().due, None);
    }
}

#[tokio::test]
async fn connections_are_used_again_also_after_a_failure_and_a_stream() {
    let fake = FakeLlm::start().await;
    let (llm, upstream) = (llm(), Upstream::of(&fake, "a"));
    for reply in [Reply::Echo, Reply::status(500), Reply::status(429), Reply::status(400), Reply::Echo] {
        fake.reply(reply);
        drop(chat(&llm, &plain(), &[&upstream]).await);
    }
    let mut stream = support::stream(chat(&llm, &streaming(), &[&upstream]).await.unwrap());
    support::rest(&mut stream).await;
    chat(&llm, &plain(), &[&upstream]).await.unwrap();
    assert_eq!((fake.calls(), fake.connections()), (7, 1));
}

#[tokio::test]
async fn forbidden_addresses_are_not_dialled() {
    let llm = llm();
    let fake = FakeLlm::start().await;
    let port = fake.addr().port();
    for (url, allow_private) in [
        (format!("http://127.0.0.1:{port}/v1"), false),
        (format!("http://localhost:{port}/v1"), false),
        (format!("http://[::ffff:7f00:1]:{port}/v1"), false),
        ("http://169.254.169.254/v1".to_owned(), true),
        ("http://[::ffff:169.254.169.254]/v1".to_owned(), true),
    ] {
        let upstream = Upstream { allow_private, ..Upstream::at(&url, "a") };
        let failure = chat(&llm, &plain(), &[&upstream]).await.unwrap_err();
        assert_eq!(failure.code(), "upstream_address_refused", "{url}: {failure:?}");
        assert!(!failure.to_string().contains("169.254"), "{failure}");
    }
    assert_eq!(fake.connections(), 0);
    let named = Upstream::at(&format!("http://localhost:{port}/v1"), "a");
    chat(&llm, &plain(), &[&named]).await.unwrap();
}

#[test]
fn credentials_do_not_print() {
    let secret = "hunter2".to_owned().into();
    let printed = format!("{:?} {:?}", Credential::bearer(&secret), Credential::header("x-api-key", &secret));
    assert!(!printed.contains("hunter2"), "{printed}");
    let bad = format!("{:?}", Credential::bearer(&"hun\nter2".to_owned().into()).unwrap_err());
    assert!(!bad.contains("ter2"), "{bad}");
}
