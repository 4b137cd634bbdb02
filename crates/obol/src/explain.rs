//! `obol explain`: what the policies of a workspace say to one question, and why. It asks nobody: workspace files and
//! control's state directory are all that it reads.

use std::io::BufRead as _;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use obol_authz::{
    Action, Caller, Considered, Context, Decision, Era, Explanation, Policies, PriceClass, Request, Resource,
    Verdict,
};
use obol_control::{Compiled, KeyRecord, compile_policies, workspace_files};
use obol_model::snapshot::PolicyFile;
use obol_model::{Clock as _, ConnectionName, ModelName, Principal, SystemClock, VirtualKey, WorkspaceId};

use crate::check::records;
use crate::cli::{ExplainArgs, Subject, Thing};
use crate::failure::Failure;
use crate::out;

/// Prints the decision and what led to it, and gives the exit code: 0 when it is allowed, 1 when it is denied.
///
/// # Errors
/// When the question makes no sense: then nothing is decided (exit code 2).
pub(crate) async fn explain(args: ExplainArgs) -> Result<u8, Failure> {
    let who = Who::find(&args).await?;
    let compiled = workspace(&args.workspace, who.workspace())?;
    let id = compiled.1.workspace.workspace_id.clone();
    if let Some(other) = who.workspace().filter(|other| **other != id) {
        return Err(usage(format!("the key is one of workspace `{other}`, and the file is of `{id}`")));
    }
    let (path, compiled) = compiled;
    let policies = policies(&path, &compiled)?;
    let question =
        Question { args: &args, who: &who, caller: who.caller(&id), compiled: &compiled, policies };
    let (allowed, report) = question.report()?;
    out::text(report)?;
    Ok(u8::from(!allowed))
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::usage(message.into())
}

/// Who is asked about: a key as control keeps it, or one that the options describe.
enum Who {
    Known(Box<KeyRecord>),
    Described { principal: Principal, name: String, tags: Vec<String> },
}

impl Who {
    async fn find(args: &ExplainArgs) -> Result<Self, Failure> {
        let Subject { key, key_id, user } = &args.subject;
        let described = |principal| Self::Described {
            principal,
            name: args.name.clone().unwrap_or_default(),
            tags: args.tags.clone(),
        };
        let from_options = args.name.is_some() || !args.tags.is_empty();
        match (key, key_id, user) {
            (_, _, Some(user)) => {
                let (issuer, subject) = user.split_once(' ').ok_or_else(|| {
                    usage("`--user` needs an issuer and a subject: `--user \"ISSUER SUBJECT\"`")
                })?;
                Ok(described(Principal::User { issuer: issuer.to_owned(), subject: subject.to_owned() }))
            }
            (Some(text), _, _) => {
                let Some(state) = args.state.as_deref() else {
                    let help = "what a key may do depends on its tags: add `--state DIR`, control's state directory, or \
                                describe the key with `--key-id ID --tag TAG`";
                    return Err(usage(help));
                };
                let key = parse_key(text)?;
                let record = records(state).await?.into_iter().find(|record| record.hash == key.hash());
                let record =
                    record.ok_or_else(|| usage(format!("`{}` knows no such key", state.display())))?;
                Ok(Self::Known(Box::new(record)))
            }
            (None, Some(id), None) => match args.state.as_deref() {
                Some(state) if !from_options => {
                    let record = records(state).await?.into_iter().find(|record| record.key.key_id == *id);
                    let none = || {
                        usage(format!("there is no key `{id}` in `{}`; see `obol key list`", state.display()))
                    };
                    Ok(Self::Known(Box::new(record.ok_or_else(none)?)))
                }
                _ => Ok(described(Principal::Key(id.clone()))),
            },
            (None, None, None) => Err(usage("say who asks: `--key`, `--key-id` or `--user`")),
        }
    }

    fn workspace(&self) -> Option<&WorkspaceId> {
        match self {
            Self::Known(record) => Some(&record.key.workspace_id),
            Self::Described { .. } => None,
        }
    }

    fn caller(&self, workspace: &WorkspaceId) -> Caller {
        match self {
            Self::Known(record) => Caller::from(&record.key),
            Self::Described { principal, name, tags } => {
                Caller::new(workspace.clone(), principal.clone(), name.clone(), tags.clone())
            }
        }
    }

    /// Why the gateway refuses the key before any policy is asked.
    fn refused(&self, now: Timestamp) -> Option<&'static str> {
        let Self::Known(record) = self else { return None };
        if record.revoked_at.is_some() {
            Some("the key is revoked")
        } else if record.key.expires_at.is_some_and(|end| end <= now) {
            Some("the key has expired")
        } else if record.key.disabled {
            Some("the key is disabled")
        } else {
            None
        }
    }

    fn describe(&self) -> String {
        let (who, name, tags) = match self {
            Self::Known(record) => (format!("key {}", record.key.key_id), &record.key.name, &record.key.tags),
            Self::Described { principal: Principal::Key(id), name, tags } => {
                (format!("key {id}"), name, tags)
            }
            Self::Described { principal: Principal::User { issuer, subject }, name, tags } => {
                (format!("user {subject} of {issuer}"), name, tags)
            }
        };
        let name = if name.is_empty() { String::new() } else { format!(" \"{}\"", out::one_line(name)) };
        let tags =
            if tags.is_empty() { "without tags".to_owned() } else { format!("tags {}", tags.join(", ")) };
        format!("{}{name}, {}", out::one_line(&who), out::one_line(&tags))
    }
}

/// A key as it was given, or the first line of stdin for `-`: the command line is visible to others.
fn parse_key(text: &str) -> Result<VirtualKey, Failure> {
    let mut line = String::new();
    let text = if text == "-" {
        std::io::stdin().lock().read_line(&mut line)?;
        line.trim()
    } else {
        text
    };
    text.parse().map_err(|_| {
        usage("`--key` is no key: it begins with `obol_` and has 48 characters; ids go to `--key-id`")
    })
}

/// The workspace file of a path: the file itself, or the one of its folder that the key belongs to.
fn workspace(path: &Path, wanted: Option<&WorkspaceId>) -> Result<(PathBuf, Compiled), Failure> {
    let files = workspace_files(path).map_err(usage)?;
    let alone = files.len() == 1;
    let (mut found, mut faulty) = (Vec::new(), Vec::new());
    for file in files {
        match compile_policies(&file) {
            Ok(compiled) if alone || wanted.is_none_or(|id| *id == compiled.workspace.workspace_id) => {
                found.push((file, compiled));
            }
            Ok(_) => {}
            Err(faults) => faulty.extend(faults),
        }
    }
    match (found.pop(), found.is_empty()) {
        (Some(one), true) => Ok(one),
        (Some(_), false) => {
            Err(usage(format!("`{}` has several workspaces: name the file of one", path.display())))
        }
        (None, _) if !faulty.is_empty() => {
            let faults: Vec<String> = faulty.iter().map(ToString::to_string).collect();
            Err(usage(format!("the workspace is not valid, and nothing is decided:\n{}", faults.join("\n"))))
        }
        (None, _) => {
            let which = wanted.map_or_else(String::new, |id| format!(" of `{id}`"));
            Err(usage(format!("`{}` holds no workspace file{which}", path.display())))
        }
    }
}

/// The policies under the paths of their files, which is where they are edited.
fn policies(file: &Path, compiled: &Compiled) -> Result<Policies, Failure> {
    let folder = file.parent().unwrap_or_else(|| Path::new(""));
    let shown = |policy: &PolicyFile| PolicyFile {
        name: folder.join(&policy.name).display().to_string(),
        text: policy.text.clone(),
    };
    let files: Vec<PolicyFile> = compiled.policy.files.iter().map(shown).collect();
    Policies::compile(&files).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        usage(faults.join("\n"))
    })
}

struct Question<'a> {
    args: &'a ExplainArgs,
    who: &'a Who,
    caller: Caller,
    compiled: &'a Compiled,
    policies: Policies,
}

/// What is found out on the way to a decision.
#[derive(Default)]
struct Report {
    lines: String,
    /// Why it is denied, the first reason of all.
    denied: Option<String>,
    /// What was assumed.
    notes: Vec<String>,
}

impl Report {
    fn deny(&mut self, why: impl Into<String>) {
        let why = why.into();
        self.denied.get_or_insert(why);
    }

    fn line(&mut self, text: &str) {
        self.lines.push_str(text);
        self.lines.push('\n');
    }
}

impl Question<'_> {
    fn report(&self) -> Result<(bool, String), Failure> {
        let mut report = Report::default();
        if let Some(why) = self.who.refused(SystemClock.now()) {
            report.deny(why);
        }
        if self.compiled.workspace.frozen {
            report.deny("the workspace is frozen");
        }
        let Thing { tool, prompt, resource, model } = &self.args.thing;
        let what = match (tool, prompt, resource, model) {
            (Some(text), ..) => {
                let (connection, name) = self.split(text, "--tool", "TOOL")?;
                self.tool(&mut report, &connection, name);
                format!("call the tool `{name}` of `{connection}`")
            }
            (_, Some(text), ..) => {
                let (connection, name) = self.split(text, "--prompt", "PROMPT")?;
                let prompt = Resource::Prompt { connection: &connection, name };
                self.connect(&mut report, &connection);
                self.use_or_list(&mut report, Action::GetPrompt, prompt);
                format!("get the prompt `{name}` of `{connection}`")
            }
            (_, _, Some(text), _) => {
                let (connection, uri) = self.split(text, "--resource", "URI")?;
                self.connect(&mut report, &connection);
                self.read(&mut report, &connection, uri);
                format!("read `{uri}` of `{connection}`")
            }
            (_, _, _, Some(name)) => {
                self.model(&mut report, name)?;
                format!("invoke the model `{name}`")
            }
            _ => return Err(usage("say what is asked for: `--tool`, `--prompt`, `--resource` or `--model`")),
        };
        let verdict = match &report.denied {
            None => "allowed".to_owned(),
            Some(why) => format!("denied, {why}"),
        };
        let id = &self.compiled.workspace.workspace_id;
        let mut text = format!("{verdict}\n\n{}\nwants to {what} in workspace {id}\n\n", self.who.describe());
        text.push_str(&report.lines);
        for note in &report.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        Ok((report.denied.is_none(), text))
    }

    /// The connection and the rest of `CONNECTION/NAME`.
    fn split<'t>(
        &self,
        text: &'t str,
        option: &str,
        what: &str,
    ) -> Result<(ConnectionName, &'t str), Failure> {
        let connections = &self.compiled.workspace.connections;
        let Some((name, rest)) = text.split_once('/').filter(|(_, rest)| !rest.is_empty()) else {
            let help = match text.split_once("__") {
                Some((connection, name)) if connections.contains_key(connection) => {
                    format!("; policies use the upstream's own name: `{option} {connection}/{name}`")
                }
                _ => String::new(),
            };
            return Err(usage(format!("`{option} {text}` is not of the form `CONNECTION/{what}`{help}")));
        };
        if let Some((name, _)) = connections.get_key_value(name) {
            return Ok((name.clone(), rest));
        }
        let known: Vec<String> = connections.keys().map(|name| format!("`{name}`")).collect();
        Err(usage(format!("there is no connection `{name}`; there are: {}", known.join(", "))))
    }

    fn ask<'q>(&'q self, action: Action, resource: Resource<'q>, arguments: Option<&'q str>) -> Explanation {
        let context = Context {
            environment: &self.compiled.workspace.environment,
            client: self.args.client.as_deref(),
            era: if self.args.modern { Era::Modern } else { Era::Legacy },
            arguments,
        };
        self.policies.explain(&Request { caller: &self.caller, action, resource, context })
    }

    fn connect(&self, report: &mut Report, connection: &ConnectionName) {
        let resource = Resource::Connection(connection);
        let connect = self.ask(Action::Connect, resource, None);
        report.step(
            "mcp:connect",
            &format!("Connection::\"{connection}\""),
            "may it be used at all",
            &connect,
        );
        if !connect.decision.allowed {
            report.deny(format!("the connection `{connection}` may not be used: {}", why(&connect.decision)));
        }
        let list = self.ask(Action::List, resource, None);
        if !list.decision.allowed {
            report.step("mcp:list", &format!("Connection::\"{connection}\""), "are its lists shown", &list);
            report.notes.push(format!("no list shows anything of `{connection}`: {}", why(&list.decision)));
        }
    }

    fn tool(&self, report: &mut Report, connection: &ConnectionName, name: &str) {
        let rule = self.compiled.workspace.connections.get(connection).and_then(|c| c.tools.get(name));
        if rule.is_some_and(|rule| rule.hidden) {
            report.deny(format!("the workspace file hides the tool `{name}`"));
        }
        // What the server says of the tool is not known here; without a word the gateway takes both as false.
        let mut hint = |attribute: &str, option: &str, ruled: Option<bool>, said: Option<bool>| {
            ruled.or(said).unwrap_or_else(|| {
                report.notes.push(format!(
                    "`{attribute}` is taken to be false, as of a server that does not say: else add `{option} true`"
                ));
                false
            })
        };
        let read_only = hint("read_only", "--read-only", rule.and_then(|r| r.read_only), self.args.read_only);
        let destructive =
            hint("destructive", "--destructive", rule.and_then(|r| r.destructive), self.args.destructive);
        self.connect(report, connection);
        let tool = Resource::Tool { connection, name, destructive, read_only };
        self.use_or_list(report, Action::CallTool, tool);
    }

    /// What a list says and, with arguments, what the call does: the one that was asked for decides.
    fn use_or_list(&self, report: &mut Report, action: Action, resource: Resource<'_>) {
        let shown = self.ask(action, resource, None);
        let id = id_of(resource);
        report.step(action.as_str(), &id, "is it shown in lists", &shown);
        let Some(arguments) = self.args.args.as_deref() else {
            if !shown.decision.allowed {
                report.deny(why(&shown.decision));
            }
            if self.policies.reads_arguments() {
                report.notes.push(
                    "this is what lists show; policies look at arguments, so a call may differ: add `--args JSON`"
                        .to_owned(),
                );
            }
            return;
        };
        let used = self.ask(action, resource, Some(arguments));
        report.step(action.as_str(), &id, &format!("with the arguments {arguments}"), &used);
        if !used.decision.allowed {
            report.deny(why(&used.decision));
        }
    }

    fn read(&self, report: &mut Report, connection: &ConnectionName, uri: &str) {
        let Some(spellings) = obol_edge::spellings(uri) else {
            return report.deny("the URI is encoded too often to be read in one way");
        };
        for (i, uri) in spellings.iter().enumerate() {
            let resource = Resource::Resource { connection, uri };
            let read = self.ask(Action::ReadResource, resource, None);
            if i == 0 || !read.decision.allowed {
                let about = if i == 0 { "may it be read" } else { "another spelling of the same URI" };
                report.step("mcp:readResource", &id_of(resource), about, &read);
            }
            if !read.decision.allowed {
                report.deny(why(&read.decision));
            }
        }
    }

    fn model(&self, report: &mut Report, name: &ModelName) -> Result<(), Failure> {
        let models = &self.compiled.workspace.models;
        let Some(model) = models.get(name) else {
            let known: Vec<String> = models.keys().map(|name| format!("`{name}`")).collect();
            return Err(usage(format!("there is no model `{name}`; there are: {}", known.join(", "))));
        };
        for (i, target) in model.targets.iter().enumerate() {
            let price_class = PriceClass::of(&target.price);
            let resource = Resource::Model { name, provider: &target.provider, price_class };
            let invoke = self.ask(Action::InvokeModel, resource, None);
            let about = format!("target {}: {}, {}", i + 1, target.provider, price_class.as_str());
            report.step("llm:invoke", &id_of(resource), &about, &invoke);
            if i == 0 && !invoke.decision.allowed {
                report.deny(why(&invoke.decision));
            } else if !invoke.decision.allowed {
                report.notes.push(format!(
                    "the fallback to `{}` is skipped: {}",
                    target.provider,
                    why(&invoke.decision)
                ));
            }
        }
        Ok(())
    }
}

fn id_of(resource: Resource<'_>) -> String {
    match resource {
        Resource::Connection(name) => format!("Connection::\"{name}\""),
        Resource::Tool { connection, name, .. } => format!("Tool::\"{connection}/{name}\""),
        Resource::Resource { connection, uri } => format!("Resource::\"{connection}/{uri}\""),
        Resource::Prompt { connection, name } => format!("Prompt::\"{connection}/{name}\""),
        Resource::Model { name, .. } => format!("Model::\"{name}\""),
    }
}

/// A denial in a few words.
fn why(decision: &Decision) -> String {
    let policies = decision.policies.join(", ");
    if let Some(error) = decision.errors.first() {
        return match &error.policy {
            Some(policy) => format!("a policy cannot be evaluated: {policy}"),
            None => error.detail.clone(),
        };
    }
    if policies.is_empty() { "no policy permits it".to_owned() } else { format!("forbidden by {policies}") }
}

impl Report {
    /// One question to the policies, and what each of them said that matters to the answer.
    fn step(&mut self, action: &str, id: &str, about: &str, explanation: &Explanation) {
        let decision = &explanation.decision;
        let word = if decision.allowed { "allow" } else { "deny" };
        self.line(&format!("{action} {id} ({about}): {word}"));
        let failed = !decision.errors.is_empty();
        let forbidden =
            explanation.considered.iter().any(|c| !c.policy.permits && c.verdict == Verdict::Holds);
        for Considered { policy, verdict } in &explanation.considered {
            let matters = match verdict {
                Verdict::Failed(_) => true,
                Verdict::Holds => !failed && (!policy.permits || !forbidden),
                // Only when the question is why nothing permits it.
                Verdict::Unmet | Verdict::Elsewhere(_) => {
                    !decision.allowed && !failed && !forbidden && policy.permits
                }
            };
            if !matters {
                continue;
            }
            let effect = if policy.permits { "permit" } else { "forbid" };
            let says = match verdict {
                Verdict::Holds => "decides".to_owned(),
                Verdict::Unmet => "does not count: its conditions do not hold".to_owned(),
                Verdict::Elsewhere(parts) => {
                    format!("does not count: it is for another {}", parts.join(" and "))
                }
                Verdict::Failed(detail) => format!("cannot be evaluated, which denies: {detail}"),
            };
            let (file, line) = (&policy.file, policy.line);
            self.line(&format!("  {file}:{line} {effect} \"{}\" {says}", out::one_line(&policy.label)));
        }
        for error in decision.errors.iter().filter(|error| error.policy.is_none()) {
            self.line(&format!("  {}: {}", error.reason, error.detail));
        }
        if explanation.considered.is_empty() && !failed {
            self.line("  the workspace has no policy, so everything is denied");
        }
    }
}
