//! What the gateway has no business to change arrives byte for byte (DESIGN §9.1, §11.3).

use obol_testkit::fake_llm::{Raw, Reply as Says};
use obol_testkit::fake_mcp::Answers;
use obol_tests::client::message;
use obol_tests::world::World;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use tokio::runtime::Runtime;

const CASES: u32 = 200;

/// Numbers that a parser of doubles, integers or decimals would spell differently.
const NUMBERS: [&str; 12] = [
    "0",
    "-0",
    "1.0",
    "1.10",
    "1e400",
    "1E+2",
    "-0.0e-0",
    "123456789012345678901234567890",
    "18446744073709551616",
    "9007199254740993",
    "0.1000000000000000055511151231257827",
    "-1e-999",
];
/// Strings with more than one spelling.
const STRINGS: [&str; 10] = [
    r#""""#,
    r#""plain""#,
    r#""gr\u00fc\u00DFe""#,
    r#""grüße""#,
    r#""\/slash/""#,
    r#""\ud83d\ude00 😀""#,
    r#""\ud800""#,
    r#""\"\\\b\f\n\r\t""#,
    r#""\u0000\u001f\u007f""#,
    r#""data: x\n\nevent: y""#,
];
const KEYS: [&str; 8] =
    [r#""z""#, r#""a""#, r#""\u0062""#, r#""""#, r#""ключ""#, r#""_meta ""#, r#""a.b""#, r#""__proto__""#];

/// JSON text with `space` between its tokens. No object has a key twice: such a request is refused (its own test).
fn json(space: &'static [&'static str]) -> BoxedStrategy<String> {
    let leaf = prop_oneof![
        select(&NUMBERS[..]).prop_map(str::to_owned),
        select(&STRINGS[..]).prop_map(str::to_owned),
        select(&["null", "true", "false"][..]).prop_map(str::to_owned),
    ];
    leaf.prop_recursive(4, 24, 5, move |inner| {
        prop_oneof![
            (vec(inner.clone(), 0..4), select(space))
                .prop_map(|(items, s)| { format!("[{s}{}{s}]", items.join(&format!("{s},"))) }),
            object(inner, space),
        ]
    })
    .boxed()
}

fn object(
    inner: impl Strategy<Value = String> + Clone + 'static,
    space: &'static [&'static str],
) -> BoxedStrategy<String> {
    let keys = Just(KEYS.to_vec()).prop_shuffle();
    (keys, vec(inner, 0..5), select(space))
        .prop_map(|(keys, values, s)| {
            let members = keys.iter().zip(values).map(|(key, value)| format!("{key}{s}:{s}{value}"));
            format!("{{{s}{}{s}}}", members.collect::<Vec<_>>().join(&format!("{s},{s}")))
        })
        .boxed()
}

/// In a body.
const SPACE: &[&str] = &["", " ", "\n", "\r\n\t", "  "];
/// In an event, whose lines mean something.
const LINE_SPACE: &[&str] = &["", " ", "\t", "  "];

fn check<S: Strategy>(strategy: &S, test: impl AsyncFn(S::Value) -> Result<(), TestCaseError>, rt: &Runtime)
where
    S::Value: std::fmt::Debug,
{
    // The same cases each time: a failure has to be there again when it is looked for.
    let config = Config {
        cases: CASES,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(20_251_125),
        ..Config::default()
    };
    let run = |value| rt.block_on(test(value));
    TestRunner::new(config).run(strategy, run).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_tool_call_and_its_result_are_passed_byte_for_byte() {
    let rt = Runtime::new().unwrap();
    let world = rt.block_on(World::start(1));
    let client = rt.block_on(world.connect());
    let arguments = object(json(SPACE), SPACE);
    let case = (arguments, json(SPACE), json(LINE_SPACE), json(LINE_SPACE), select(SPACE), any::<bool>());
    check(
        &case,
        async |(arguments, unknown, structured, extra, s, events)| {
            let params = |name: &str| {
                format!(
                    r#"{{{s}"x-unknown"{s}:{unknown},"arguments":{s}{arguments}{s},"name":{s}"{name}","n":1.0}}"#
                )
            };
            let result = format!(
                r#"{{"unknown":{extra},"content":[{{"type":"text","text":"\u0074","n":1.0}}],"structuredContent":{structured}}}"#
            );
            world.mcp.set_raw_result(&result);
            world.mcp.answer_with(if events { Answers::Sse } else { Answers::Json });
            let reply = client.send(message("1.0", "tools/call", &params("fake__raw"))).await;
            prop_assert_eq!(reply.status, 200, "{:?}", reply);
            prop_assert_eq!(world.mcp.last_params("tools/call").unwrap(), params("raw"));
            prop_assert_eq!(reply.raw("id"), "1.0");
            prop_assert_eq!(reply.raw("result"), result);
            Ok(())
        },
        &rt,
    );
    let error =
        r#"{"code":-32602.0,"message":"\u006eo","data":{"big":123456789012345678901234567890,"x":[1e400]}}"#;
    world.mcp.set_error("tools/call", error);
    assert_eq!(rt.block_on(client.call("fake__raw", "{}")).raw("error"), error);
}

#[test]
fn a_completion_and_its_answer_are_passed_byte_for_byte() {
    let rt = Runtime::new().unwrap();
    let world = rt.block_on(World::start(1));
    let case = (json(SPACE), json(SPACE), json(SPACE), select(SPACE), any::<bool>());
    check(
        &case,
        async |(messages, unknown, extra, s, first)| {
            let body = |model: &str| {
                let model = format!(r#""model"{s}:{s}"{model}""#);
                let rest = format!(r#""messages":{s}{messages},"x-unknown":{unknown}{s},"temperature":1.0"#);
                if first { format!("{{{s}{model},{rest}}}{s}") } else { format!("{{{rest},{s}{model}{s}}}") }
            };
            let answer = format!(
                r#"{{"id":"c","object":"chat.completion","model":"fake-small","choices":[{{"index":0,"message":{{"role":"assistant","content":"\u0068i"}},"finish_reason":"stop"}}],{s}"usage":{{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}},"x-unknown":{extra}}}"#
            );
            world.llm.reply(Says::json(answer.clone()));
            let reply = world.chat(body("small")).await;
            prop_assert_eq!(reply.status, 200, "{:?}", reply);
            let sent = world.llm.last_body().unwrap();
            // The limit of the model is all that is added (DESIGN §12.1).
            let limited = r#""fake-small","max_completion_tokens":1000"#;
            let expected = body("fake-small").replacen(r#""fake-small""#, limited, 1);
            prop_assert_eq!(std::str::from_utf8(&sent).unwrap(), expected);
            prop_assert_eq!(reply.text(), answer);
            Ok(())
        },
        &rt,
    );
}

#[test]
fn the_events_of_a_stream_are_passed_byte_for_byte() {
    let rt = Runtime::new().unwrap();
    let world = rt.block_on(World::start(1));
    let case = (vec((json(LINE_SPACE), select(&STRINGS[..])), 1..5), any::<bool>(), 1..40_usize);
    check(
        &case,
        async |(events, asked, cut)| {
            let mut text = String::from(": a comment\n\n");
            for (extra, content) in &events {
                text.push_str(&format!(
                        "id: 7\ndata: {{\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":{content}}},\"finish_reason\":null}}],\"x\":{extra}}}\n\n"
                    ));
            }
            text.push_str(
                "data:{\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\r\n\r\n",
            );
            let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2,\"total_tokens\":3}}\n\n";
            let done = "data: [DONE]\n\n";
            let whole = format!("{text}{usage}{done}");
            // Cut anywhere, in the middle of characters too: events are not packets.
            let chunks: Vec<Vec<u8>> = whole.as_bytes().chunks(cut * 7).map(<[u8]>::to_vec).collect();
            world.llm.reply(Says::Raw(Raw::events(chunks)));
            let option = r#","stream_options":{"include_usage":true}"#;
            let body = |model: &str, option: &str| {
                format!(r#"{{"stream":true,"model":"{model}"{option},"messages":[],"k":1.0}}"#)
            };
            let reply = world.chat(body("small", if asked { option } else { "" })).await;
            prop_assert_eq!(reply.status, 200, "{:?}", reply);
            let sent = world.llm.last_body().unwrap();
            let limit = r#","max_completion_tokens":1000"#;
            // Both are put right behind the model.
            let limited = if asked { format!("{limit}{option}") } else { format!("{option}{limit}") };
            prop_assert_eq!(std::str::from_utf8(&sent).unwrap(), body("fake-small", &limited));
            let expected = if asked { whole } else { format!("{text}{done}") };
            prop_assert_eq!(reply.text(), expected);
            Ok(())
        },
        &rt,
    );
}
