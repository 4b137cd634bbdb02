use cedar_policy::{Policy, PolicySet};
use serde_json::{Value, json};

use crate::decide::{Asked, asked};
use crate::{Decision, Policies, PolicyInfo, Request};

/// A decision, and what each policy had to say. Costs several evaluations per policy: for people, not for requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// What [`Policies::decide`] answers.
    pub decision: Decision,
    /// Every policy, in the order of the files.
    pub considered: Vec<Considered>,
}

/// One policy and one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Considered {
    /// Which.
    pub policy: PolicyInfo,
    /// What it says.
    pub verdict: Verdict,
}

/// What one policy says to one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It holds: it permits or forbids.
    Holds,
    /// Its head is about something else; names the parts that do not fit: `principal`, `action`, `resource`.
    Elsewhere(Vec<&'static str>),
    /// Its head fits, its `when` and `unless` do not hold.
    Unmet,
    /// It could not be evaluated, which denies. May quote the question.
    Failed(String),
}

const HEAD: [&str; 3] = ["principal", "action", "resource"];

impl Policies {
    /// Decides as [`Policies::decide`] does, and says why.
    pub fn explain(&self, request: &Request<'_>) -> Explanation {
        let arguments = request.context.arguments.filter(|_| self.uses_arguments);
        let asked = match asked(request, arguments) {
            Ok(asked) => asked,
            Err(error) => {
                let decision = Decision { allowed: false, policies: Vec::new(), errors: vec![error] };
                return Explanation { decision, considered: Vec::new() };
            }
        };
        let decision =
            self.decision(&self.authorizer.is_authorized(&asked.request, &self.set, &asked.entities));
        let mut considered: Vec<Considered> = self
            .set
            .policies()
            .filter_map(|policy| {
                let info = self.about.get(policy.id())?.clone();
                Some(Considered { policy: info, verdict: self.verdict(policy, &asked) })
            })
            .collect();
        considered.sort_by(|a, b| a.policy.cmp(&b.policy));
        Explanation { decision, considered }
    }

    fn verdict(&self, policy: &Policy, asked: &Asked) -> Verdict {
        match self.alone(policy.clone(), asked) {
            Err(detail) => return Verdict::Failed(detail),
            Ok(true) => return Verdict::Holds,
            Ok(false) => {}
        }
        let apart = HEAD.into_iter().filter(|part| self.head_differs(policy, part, asked));
        match apart.collect::<Vec<_>>() {
            parts if parts.is_empty() => Verdict::Unmet,
            parts => Verdict::Elsewhere(parts),
        }
    }

    /// Whether a policy that has nothing but this part of the head would not hold.
    fn head_differs(&self, policy: &Policy, part: &str, asked: &Asked) -> bool {
        let reduced = policy.to_json().ok().and_then(|mut json| {
            for other in HEAD.into_iter().filter(|other| *other != part) {
                *json.get_mut(other)? = json!({ "op": "All" });
            }
            *json.get_mut("conditions")? = Value::Array(Vec::new());
            Policy::from_json(Some(policy.id().clone()), json).ok()
        });
        reduced.is_some_and(|reduced| self.alone(reduced, asked) == Ok(false))
    }

    /// Whether a policy holds, as if there were no others.
    fn alone(&self, policy: Policy, asked: &Asked) -> Result<bool, String> {
        let mut set = PolicySet::new();
        set.add(policy).map_err(|e| e.to_string())?;
        let response = self.authorizer.is_authorized(&asked.request, &set, &asked.entities);
        match self.decision(&response).errors.first() {
            Some(error) => Err(error.detail.clone()),
            None => Ok(response.diagnostics().reason().next().is_some()),
        }
    }
}

#[cfg(test)]
mod tests {
    use obol_model::snapshot::PolicyFile;
    use obol_model::{ConnectionName, Principal};

    use super::*;
    use crate::{Action, Caller, Context, Era, Resource};

    #[test]
    fn every_policy_says_why_it_counts_or_not() {
        let text = r#"@id("everyone")
permit (principal, action, resource);

@id("other-key")
permit (principal == Key::"k2", action == Action::"mcp:readResource", resource);
@id("writes")
forbid (principal, action == Action::"mcp:callTool", resource == Tool::"git/push") when { !resource.read_only };
@id("night") forbid (principal, action, resource) when { context.environment == "night" };
@id("broken") forbid (principal, action, resource) when { 9223372036854775807 + principal.name.size() > 0 };
"#
        .replace("principal.name.size()", "1");
        let policies = Policies::compile(&[PolicyFile { name: "a.cedar".into(), text }]).unwrap();
        let git: ConnectionName = "git".parse().unwrap();
        let caller = Caller::new(
            "acme".parse().unwrap(),
            Principal::Key("k1".parse().unwrap()),
            String::new(),
            vec![],
        );
        let explanation = policies.explain(&Request {
            caller: &caller,
            action: Action::CallTool,
            resource: Resource::Tool { connection: &git, name: "push", destructive: true, read_only: false },
            context: Context { environment: "day", client: None, era: Era::Legacy, arguments: Some("{}") },
        });
        let said: Vec<_> = explanation
            .considered
            .iter()
            .map(|c| (c.policy.label.as_str(), c.policy.line, c.policy.permits, c.verdict.clone()))
            .collect();
        let overflow = said.last().unwrap().3.clone();
        assert!(matches!(&overflow, Verdict::Failed(why) if why.contains("overflow")), "{overflow:?}");
        assert_eq!(
            said,
            [
                ("everyone", 1, true, Verdict::Holds),
                ("other-key", 4, true, Verdict::Elsewhere(vec!["principal", "action"])),
                ("writes", 6, false, Verdict::Holds),
                ("night", 8, false, Verdict::Unmet),
                ("broken", 9, false, overflow.clone()),
            ]
        );
        assert!(!explanation.decision.allowed);
        assert_eq!(explanation.decision.policies, ["broken"]);
    }
}
