use std::sync::atomic::AtomicU64;
use std::time::Instant;

use metrics::{KeyName, SharedString};
use obol_model::TokenPrice;
use obol_model::snapshot::PolicyFile;
use obol_model::{ModelName, PerMillion, Principal, ProviderName};

use super::*;
use crate::cache::Cache;
use crate::{Action, Caller, Context, Era, PriceClass};

fn caller(tags: &[&str]) -> Caller {
    Caller::new(
        "acme".parse().unwrap(),
        Principal::Key("k1".parse().unwrap()),
        "ci".into(),
        tags.iter().map(ToString::to_string).collect(),
    )
}

fn policies(text: &str) -> Policies {
    let file = PolicyFile { name: "acme.cedar".into(), text: text.into() };
    Policies::compile(&[file]).unwrap_or_else(|faults| panic!("{}", faults[0]))
}

/// As if validation had not stood between the author and the gateway.
fn unvalidated(text: &str) -> Policies {
    let mut faults = Vec::new();
    let file = PolicyFile { name: "acme.cedar".into(), text: text.into() };
    let policies = Policies::assemble(&[file], &mut faults);
    assert_eq!(faults, []);
    policies
}

const CONTEXT: Context<'_> = Context { environment: "test", client: None, era: Era::Legacy, arguments: None };

fn ask(
    policies: &Policies,
    caller: &Caller,
    action: Action,
    resource: Resource<'_>,
    context: Context<'_>,
) -> Decision {
    policies.decide(&Request { caller, action, resource, context }).as_ref().clone()
}

fn tool<'a>(connection: &'a ConnectionName, name: &'a str, destructive: bool) -> Resource<'a> {
    Resource::Tool { connection, name, destructive, read_only: !destructive }
}

const ALL: &str = "permit(principal, action, resource);";

type Row<'a> = (String, &'a [&'a str], Action, Resource<'a>, bool, &'a [&'a str]);

#[test]
fn decisions_follow_the_policies() {
    let git: ConnectionName = "git".parse().unwrap();
    let model: ModelName = "fast".parse().unwrap();
    let provider: ProviderName = "openai".parse().unwrap();
    let read = tool(&git, "read", false);
    let delete = tool(&git, "delete", true);
    let issues = Resource::Resource { connection: &git, uri: "repo://issues" };
    let prompt = Resource::Prompt { connection: &git, name: "review" };
    let fast = Resource::Model { name: &model, provider: &provider, price_class: PriceClass::Medium };
    let only = |what: &str| format!("permit(principal, action, resource == {what});");
    let when = |what: &str| format!("{ALL}forbid(principal, action, resource) when {{ {what} }};");
    // (policies, tags of the caller, action, resource, allowed, determining policies)
    let table: Vec<Row<'_>> = vec![
        (String::new(), &[], Action::CallTool, read, false, &[]),
        ("// nothing\n".into(), &[], Action::Connect, Resource::Connection(&git), false, &[]),
        (ALL.into(), &[], Action::CallTool, read, true, &["acme.cedar#1"]),
        (ALL.into(), &[], Action::Connect, Resource::Connection(&git), true, &["acme.cedar#1"]),
        (ALL.into(), &[], Action::List, Resource::Connection(&git), true, &["acme.cedar#1"]),
        (ALL.into(), &[], Action::ReadResource, issues, true, &["acme.cedar#1"]),
        (ALL.into(), &[], Action::GetPrompt, prompt, true, &["acme.cedar#1"]),
        (ALL.into(), &[], Action::InvokeModel, fast, true, &["acme.cedar#1"]),
        // forbid wins, whatever the order
        (
            format!("{ALL}@id(\"never\") forbid(principal, action, resource);"),
            &[],
            Action::CallTool,
            read,
            false,
            &["never"],
        ),
        (
            format!("forbid(principal, action, resource);{ALL}"),
            &[],
            Action::CallTool,
            read,
            false,
            &["acme.cedar#1"],
        ),
        // names and the tree
        (only("Tool::\"git/read\""), &[], Action::CallTool, read, true, &["acme.cedar#1"]),
        (only("Tool::\"git/read\""), &[], Action::CallTool, delete, false, &[]),
        (
            "permit(principal, action, resource in Connection::\"git\");".into(),
            &[],
            Action::CallTool,
            delete,
            true,
            &["acme.cedar#1"],
        ),
        (
            "permit(principal, action, resource in Connection::\"other\");".into(),
            &[],
            Action::CallTool,
            delete,
            false,
            &[],
        ),
        (
            "permit(principal in Workspace::\"acme\", action, resource in Workspace::\"acme\");".into(),
            &[],
            Action::CallTool,
            read,
            true,
            &["acme.cedar#1"],
        ),
        (
            "permit(principal in Workspace::\"acme\", action, resource in Workspace::\"acme\");".into(),
            &[],
            Action::InvokeModel,
            fast,
            true,
            &["acme.cedar#1"],
        ),
        (
            "permit(principal == Key::\"k1\", action, resource);".into(),
            &[],
            Action::CallTool,
            read,
            true,
            &["acme.cedar#1"],
        ),
        (
            "permit(principal == Key::\"k2\", action, resource);".into(),
            &[],
            Action::CallTool,
            read,
            false,
            &[],
        ),
        (
            "permit(principal, action == Action::\"mcp:callTool\", resource);".into(),
            &[],
            Action::ReadResource,
            issues,
            false,
            &[],
        ),
        (only("Resource::\"git/repo://issues\""), &[], Action::ReadResource, issues, true, &["acme.cedar#1"]),
        (only("Prompt::\"git/review\""), &[], Action::GetPrompt, prompt, true, &["acme.cedar#1"]),
        (only("Model::\"fast\""), &[], Action::InvokeModel, fast, true, &["acme.cedar#1"]),
        // tags and annotations
        (when("!principal.tags.contains(\"ops\")"), &[], Action::CallTool, read, false, &["acme.cedar#2"]),
        (
            when("!principal.tags.contains(\"ops\")"),
            &["ops", "eu"],
            Action::CallTool,
            read,
            true,
            &["acme.cedar#1"],
        ),
        (
            when("resource is Tool && resource.destructive"),
            &[],
            Action::CallTool,
            delete,
            false,
            &["acme.cedar#2"],
        ),
        (
            when("resource is Tool && resource.destructive"),
            &[],
            Action::CallTool,
            read,
            true,
            &["acme.cedar#1"],
        ),
        (
            when("resource is Tool && !resource.read_only"),
            &[],
            Action::CallTool,
            delete,
            false,
            &["acme.cedar#2"],
        ),
        (when("context.environment == \"test\""), &[], Action::CallTool, read, false, &["acme.cedar#2"]),
        (when("context.era == \"modern\""), &[], Action::CallTool, read, true, &["acme.cedar#1"]),
        (
            when("context has client && context.client == \"evil\""),
            &[],
            Action::CallTool,
            read,
            true,
            &["acme.cedar#1"],
        ),
    ];
    for (text, tags, action, resource, allowed, determining) in table {
        let decision = ask(&policies(&text), &caller(tags), action, resource, CONTEXT);
        assert_eq!(decision.allowed, allowed, "{text} {decision:?}");
        assert_eq!(decision.policies, determining, "{text}");
        assert_eq!(decision.errors, [], "{text}");
    }
}

#[test]
fn a_policy_that_cannot_be_evaluated_denies_is_counted_and_named() {
    let git: ConnectionName = "git".parse().unwrap();
    for (condition, reason) in [
        ("principal.clearance == \"low\"", "it reads an attribute or tag that the entity does not have"),
        ("9223372036854775807 + 1 > 0", "an integer overflows"),
        ("Key::\"ghost\".tags.contains(\"x\")", "it reads an entity that is not there"),
        ("context.clearance == \"low\"", "it reads an attribute that the record does not have"),
        ("ip(principal.name).isIpv4()", "a value is not of the form that a function needs"),
        ("principal.name > 3", "a value has the wrong type"),
    ] {
        for effect in ["forbid", "permit"] {
            let set = unvalidated(&format!(
                "{ALL}\n@id(\"broken\") {effect}(principal, action, resource) when {{ {condition} }};"
            ));
            // The second answer is from the cache, and counts as much as the first.
            let metrics = counted(|| {
                for _ in 0..2 {
                    let read = tool(&git, "read", false);
                    let decision = ask(&set, &caller(&[]), Action::CallTool, read, CONTEXT);
                    assert!(!decision.allowed, "{effect} {condition}");
                    assert_eq!(decision.policies, ["broken"]);
                    assert_eq!(decision.errors.len(), 1);
                    let error = &decision.errors[0];
                    assert_eq!(
                        (error.policy.as_deref(), error.reason),
                        (Some("broken"), reason),
                        "{error:?}"
                    );
                }
            });
            assert_eq!(metrics, 2, "{effect} {condition}");
        }
    }
}

/// How often evaluation errors were counted meanwhile.
fn counted(run: impl FnOnce()) -> u64 {
    let recorder = Recorder::default();
    metrics::with_local_recorder(&recorder, run);
    recorder.0.load(Ordering::Relaxed)
}

#[derive(Default)]
struct Recorder(Arc<AtomicU64>);

impl metrics::Recorder for Recorder {
    fn describe_counter(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        if key.name() == metric::AUTHZ_EVALUATION_ERRORS {
            metrics::Counter::from_arc(Arc::clone(&self.0))
        } else {
            metrics::Counter::noop()
        }
    }

    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::noop()
    }

    fn register_histogram(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

#[test]
fn what_a_log_may_say_of_an_error_quotes_no_argument() {
    let git: ConnectionName = "git".parse().unwrap();
    let set = unvalidated(&format!(
        "{ALL}@id(\"cheap\") forbid(principal, action == Action::\"mcp:callTool\", resource) when {{
            context has arguments && context.arguments.hasTag(\"amount\") &&
            decimal(context.arguments.getTag(\"amount\")).greaterThan(decimal(\"100.0\")) }};"
    ));
    let context = Context { arguments: Some(r#"{"amount":"hunter2"}"#), ..CONTEXT };
    let decision = ask(&set, &caller(&[]), Action::CallTool, tool(&git, "pay", false), context);
    let [error] = decision.errors.as_slice() else { panic!("{decision:?}") };
    assert!(!decision.allowed && error.detail.contains("hunter2"), "{error:?}");
    assert_eq!(error.policy.as_deref(), Some("cheap"));
    assert!(!error.reason.contains("hunter2") && !decision.policies.join("").contains("hunter2"));
}

#[test]
fn a_model_is_known_by_its_provider_and_price_class() {
    let (name, provider): (ModelName, ProviderName) = ("fast".parse().unwrap(), "openai".parse().unwrap());
    let set = policies(
        "permit(principal, action == Action::\"llm:invoke\", resource) when { [\"free\", \"low\"].contains(resource.price_class) };
         forbid(principal, action == Action::\"llm:invoke\", resource) when { resource.provider == \"other\" };",
    );
    let other: ProviderName = "other".parse().unwrap();
    for (provider, input, output, class, allowed) in [
        (&provider, "0", "0", PriceClass::Free, true),
        (&provider, "0.1", "0", PriceClass::Low, true),
        (&provider, "5", "1", PriceClass::Low, true),
        (&provider, "0", "1.000000001", PriceClass::Medium, false),
        (&provider, "0", "10", PriceClass::Medium, false),
        (&provider, "0", "10.5", PriceClass::High, false),
        (&other, "0", "0", PriceClass::Free, false),
    ] {
        let price = |text: &str| PerMillion::new(text.parse().unwrap());
        let price = TokenPrice::flat(price(input), price(output));
        assert_eq!(PriceClass::of(&price), class, "{input} {output}");
        let model = Resource::Model { name: &name, provider, price_class: class };
        let decision = ask(&set, &caller(&[]), Action::InvokeModel, model, CONTEXT);
        assert_eq!(decision.allowed, allowed, "{provider} {class:?}");
    }
}

#[test]
fn a_question_that_the_schema_does_not_know_is_denied() {
    let git: ConnectionName = "git".parse().unwrap();
    let set = policies(ALL);
    let wrong = ask(&set, &caller(&[]), Action::InvokeModel, tool(&git, "read", false), CONTEXT);
    assert!(!wrong.allowed && wrong.errors.len() == 1);
    assert_eq!(wrong.errors[0].policy, None);
}

#[test]
fn arguments_are_seen_at_call_time_and_never_at_list_time() {
    let git: ConnectionName = "git".parse().unwrap();
    let set = policies(&format!(
        "{ALL}@id(\"paths\") forbid(principal, action == Action::\"mcp:callTool\", resource) when {{
            context has arguments && context.arguments.hasTag(\"path\") &&
            context.arguments.getTag(\"path\") like \"*/etc/*\" }};"
    ));
    let call = |json| {
        let context = Context { arguments: Some(json), ..CONTEXT };
        ask(&set, &caller(&[]), Action::CallTool, tool(&git, "read", false), context).allowed
    };
    assert!(
        ask(&set, &caller(&[]), Action::CallTool, tool(&git, "read", false), CONTEXT).allowed,
        "the list shows it"
    );
    assert!(call("{}"));
    assert!(call(r#"{"path":"/home/x"}"#));
    assert!(!call(r#"{"path":"/etc/passwd"}"#));
    assert!(!call(r#"{"path":"\u002fetc\u002fpasswd"}"#), "escapes hide nothing");
    assert!(!call(r#"{"path":["\/etc\/passwd"]}"#), "wrapping hides nothing");
    assert!(!call(r#"{"path":"/home","path":"/etc/passwd"}"#), "a key that stands there twice");
    assert!(!call("[]"), "no object");
}

#[test]
fn lists_and_calls_share_one_decision_when_no_policy_looks_at_arguments() {
    let git: ConnectionName = "git".parse().unwrap();
    let set =
        policies("permit(principal, action, resource) when { resource is Tool && !resource.destructive };");
    for (name, destructive) in [("read", false), ("delete", true)] {
        let listed = ask(&set, &caller(&[]), Action::CallTool, tool(&git, name, destructive), CONTEXT);
        let context = Context { arguments: Some(r#"{"a":1}"#), ..CONTEXT };
        let called = ask(&set, &caller(&[]), Action::CallTool, tool(&git, name, destructive), context);
        assert_eq!(listed, called);
    }
    assert_eq!(set.evaluations.load(Ordering::Relaxed), 2, "calls used the answers of the list");
}

#[test]
fn nothing_that_a_decision_depends_on_is_missing_from_the_cache() {
    let git: ConnectionName = "git".parse().unwrap();
    let set = policies(&format!(
        "{ALL}forbid(principal, action, resource) when {{ principal.tags.contains(\"bad\") || context.era == \"modern\"
            || context.environment == \"prod\" || (context has client && context.client == \"evil\")
            || (resource is Tool && resource.destructive) }};"
    ));
    let (good, bad) = (caller(&["a"]), caller(&["bad"]));
    let read = tool(&git, "t", false);
    let asks = [
        (&good, read, CONTEXT, true),
        (&bad, read, CONTEXT, false),
        (&good, read, Context { era: Era::Modern, ..CONTEXT }, false),
        (&good, read, Context { environment: "prod", ..CONTEXT }, false),
        (&good, read, Context { client: Some("evil"), ..CONTEXT }, false),
        (&good, tool(&git, "t", true), CONTEXT, false),
    ];
    for round in 0..2 {
        for (caller, resource, context, allowed) in asks {
            assert_eq!(
                ask(&set, caller, Action::CallTool, resource, context).allowed,
                allowed,
                "round {round}"
            );
        }
    }
    assert_eq!(set.evaluations.load(Ordering::Relaxed), 6);
    // The same person with a caller built anew, as after a purge of the key cache.
    ask(&set, &caller(&["a"]), Action::CallTool, read, CONTEXT);
    assert_eq!(set.evaluations.load(Ordering::Relaxed), 6);
}

#[test]
fn the_cache_is_bounded_in_number_and_in_text() {
    let git: ConnectionName = "git".parse().unwrap();
    let set = policies("");
    let me = caller(&[]);
    for i in 0..Cache::CAPACITY + 4000 {
        let name = i.to_string();
        let request = Request {
            caller: &me,
            action: Action::CallTool,
            resource: tool(&git, &name, false),
            context: CONTEXT,
        };
        set.cache.get_or(&request, || Decision { allowed: false, policies: vec![], errors: vec![] });
    }
    assert!(set.cache.len() <= Cache::CAPACITY);
    let before = set.cache.len();
    let long = "x".repeat(2000);
    ask(&set, &me, Action::CallTool, tool(&git, &long, false), CONTEXT);
    assert_eq!(set.cache.len(), before);
}

#[test]
fn a_warm_list_of_a_thousand_tools_evaluates_nothing() {
    let git: ConnectionName = "git".parse().unwrap();
    let set = policies(&format!(
        "{ALL}forbid(principal, action, resource) when {{ resource is Tool && resource.destructive }};"
    ));
    let names: Vec<String> = (0..1000).map(|i| format!("tool_{i}")).collect();
    let me = caller(&["a", "b"]);
    let list = || {
        let started = Instant::now();
        let shown = names
            .iter()
            .enumerate()
            .filter(|(i, name)| {
                let resource = tool(&git, name, i % 2 == 0);
                set.decide(&Request { caller: &me, action: Action::CallTool, resource, context: CONTEXT })
                    .allowed
            })
            .count();
        (shown, started.elapsed())
    };
    let (shown, cold) = list();
    let (again, warm) = list();
    println!("1,000 tools: cold {cold:?}, warm {warm:?} (budget when optimised: 1 ms)");
    assert_eq!((shown, again), (500, 500));
    assert_eq!(set.evaluations.load(Ordering::Relaxed), 1000, "the second list came from the cache");
}
