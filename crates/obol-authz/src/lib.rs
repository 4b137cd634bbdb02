//! Who may do what: compiles the Cedar policies of a workspace and decides (DESIGN §8.4). Synchronous, no I/O.
//!
//! The default is deny, `forbid` wins, and a policy that cannot be evaluated denies: Cedar itself skips such a policy,
//! so that a failing `forbid` would allow; [`Policies::decide`] looks at the errors. Lists and calls ask the same
//! question, so what a list shows is what can be called.
//!
//! # Arguments of a call
//!
//! Strict Cedar has no open records, and the arguments of a tool have no type that is known when a policy is written.
//! So `context.arguments` is an entity whose *tags* are the top-level arguments, as text: a string stands as it is,
//! every other value as its JSON. A policy asks `context has arguments && context.arguments.hasTag("path") &&
//! context.arguments.getTag("path") like "/data/*"`, fully type-checked. Alternatives that were turned down:
//! the JSON as one string (matching it with `like` is a bypass waiting to happen: spaces, escapes, key order), and a
//! second map for numbers (a rule `amount > 100` would be silently passed by `100.5` and by `"1000"`). Objects and
//! arrays are present as canonical JSON, so that wrapping a value cannot hide it; arguments that name a key twice are
//! denied, since policy and upstream could read different values.
//!
//! Lists know no arguments. A rule on arguments is therefore best a `forbid … when { context has arguments && … }`: the
//! tool stays visible, and only the call with the bad argument is refused. It must be limited to the actions that have arguments: where there are none,
//! `context has arguments` is never true, and the rule would mean something else than it says.
//!
//! # Cost
//!
//! Everything is parsed once per publication, ids of a caller once per caller. Answers to questions without arguments
//! are kept in a bounded cache; if no policy looks at `context.arguments`, calls use it as well.
//!
//! This crate does not know HTTP, sessions or Redis, and does not decide which question an endpoint asks.

mod arguments;
mod cache;
mod compile;
mod decide;
mod explain;
mod fault;
mod named;
mod request;
mod rules;

pub use compile::{Policies, PolicyInfo};
pub use decide::{Decision, EvaluationError};
pub use explain::{Considered, Explanation, Verdict};
pub use fault::PolicyFault;
pub use named::Named;
pub use request::{Action, Caller, Context, Era, PriceClass, Request, Resource};

/// The Cedar schema that every policy is checked against.
pub const SCHEMA: &str = include_str!("obol.cedarschema");
