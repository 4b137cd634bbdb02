//! What a decision costs: `cargo bench -p obol-authz`. Prints the median of many rounds; nothing is asserted, since a
//! busy machine proves nothing.

#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a benchmark prints, and ends when it cannot go on"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use obol_authz::{Action, Caller, Context, Era, Policies, Request, Resource};
use obol_model::snapshot::PolicyFile;
use obol_model::{ConnectionName, Principal};

const TOOLS: usize = 1000;

const POLICIES: &str = r#"
@id("everyone") permit (principal, action, resource);
@id("no-destruction") forbid (principal, action == Action::"mcp:callTool", resource)
when { resource.destructive } unless { principal.tags.contains("operator") };
@id("production") forbid (principal, action, resource in Connection::"payments")
when { context.environment == "production" } unless { principal.tags.contains("payments") };
"#;

/// One more policy, that looks at arguments: calls can then not use the answers of lists.
const ON_ARGUMENTS: &str = r#"
@id("paths") forbid (principal, action == Action::"mcp:callTool", resource)
when { context has arguments && context.arguments.hasTag("path") && context.arguments.getTag("path") like "/etc/*" };
"#;

fn main() {
    let git: ConnectionName = "git".parse().expect("a name");
    let caller = Caller::new(
        "acme".parse().expect("an id"),
        Principal::Key("k-1a2b3c4d5e6f".parse().expect("an id")),
        "ci".to_owned(),
        vec!["team:web".to_owned(), "eu".to_owned()],
    );
    let names: Vec<String> = (0..TOOLS).map(|i| format!("tool_{i:04}")).collect();
    let ask = |policies: &Policies, name: &str, arguments| {
        let resource =
            Resource::Tool { connection: &git, name, destructive: name.ends_with('7'), read_only: false };
        let context =
            Context { environment: "production", client: Some("bench"), era: Era::Legacy, arguments };
        policies.decide(&Request { caller: &caller, action: Action::CallTool, resource, context }).allowed
    };
    let list = |policies: &Policies| names.iter().filter(|name| ask(policies, name, None)).count();

    let cold = median(10, 1, || {
        let policies = compile(POLICIES);
        let started = Instant::now();
        black_box(list(&policies));
        started.elapsed()
    });
    let policies = compile(POLICIES);
    assert_eq!(list(&policies), TOOLS - TOOLS / 10, "what the policies hide");
    let warm = median(1000, 1, || timed(|| list(&policies)));
    let hit = median(100, 1000, || timed(|| (0..1000).filter(|_| ask(&policies, "tool_0001", None)).count()));
    let with_arguments = compile(&format!("{POLICIES}{ON_ARGUMENTS}"));
    let call = median(1000, 1, || timed(|| ask(&with_arguments, "tool_0001", Some(r#"{"path":"/home/a"}"#))));
    let compiling = median(20, 1, || timed(|| compile(POLICIES)));

    println!("list of {TOOLS} tools, cold     {cold:>12.1?}");
    println!("list of {TOOLS} tools, warm     {warm:>12.1?}");
    println!("one decision, warm           {hit:>12.1?}");
    println!("one call with arguments      {call:>12.1?}");
    println!("compiling the policies       {compiling:>12.1?}");
}

fn compile(text: &str) -> Policies {
    let file = PolicyFile { name: "bench.cedar".to_owned(), text: text.to_owned() };
    Policies::compile(&[file]).expect("valid policies")
}

fn timed<T>(run: impl FnOnce() -> T) -> Duration {
    let started = Instant::now();
    black_box(run());
    started.elapsed()
}

/// The median of many rounds, each of which does the same thing `per_round` times.
fn median(rounds: usize, per_round: u32, mut round: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<Duration> = (0..rounds).map(|_| round()).collect();
    times.sort_unstable();
    times.get(rounds / 2).copied().unwrap_or_default() / per_round
}
