//! What may be spent, and how fast.

use std::collections::BTreeMap;

use obol_model::{Budget, BudgetScope, Limits, ModelName, Window};

use super::reader::{EXACT, Fields, Reader, short, suggestion};
use super::yaml::{Node, Value, place};

/// In characters.
const LONGEST_NAME: usize = 64;

#[derive(Clone, Copy)]
enum Scope {
    Workspace,
    Key,
    Model,
}

/// What must be unique over all budgets of a workspace → the line where it was first used.
#[derive(Default)]
struct Taken {
    counted: BTreeMap<(BudgetScope, Window), u64>,
    names: BTreeMap<String, u64>,
}

/// Whether there is at least one budget, whatever is wrong with it.
pub(super) fn has_budgets(fields: &Fields<'_>) -> bool {
    fields.get("budgets").is_some_and(|node| matches!(&node.value, Value::List(items) if !items.is_empty()))
}

impl Reader<'_> {
    /// `models` are those of the file, the misspelt ones included: a reference to one of them is no second fault.
    pub(super) fn budgets(&mut self, node: &Node, models: &[&str]) -> Vec<Budget> {
        let mut taken = Taken::default();
        let mut budgets = Vec::new();
        for node in self.list(node, "`budgets`") {
            budgets.extend(self.budget(node, models, &mut taken));
        }
        budgets
    }

    fn budget(&mut self, node: &Node, models: &[&str], taken: &mut Taken) -> Option<Budget> {
        let fields = self.fields(node, "a budget", &["scope", "model", "window", "limit_usd", "name"]);
        for (name, help) in [
            ("scope", "add `scope: workspace`, `scope: key` or `scope: model`"),
            ("window", "add `window: day`, `window: month` or `window: total`"),
            ("limit_usd", "add `limit_usd: 500`, the most that may be spent; `0` for nothing at all"),
        ] {
            if fields.get(name).is_none() {
                self.fault(fields.place, format!("a budget has no `{name}`"), help);
            }
        }
        let scope = self.scope(&fields, models);
        let window = self.word(&fields, "window", &Window::ALL.map(|window| (window.as_str(), window)));
        let limit = self.limit(&fields, "limit_usd");
        let given = fields.get("name").map(|node| self.budget_name(node));
        let (scope, window) = (scope?, window?);
        let line = fields.place.0;
        if let Some(first) = taken.counted.get(&(scope.clone(), window)) {
            let message = format!("there is a budget of this scope and window already, in line {first}");
            self.fault(fields.place, message, "remove one of the two: only the lower one would ever count");
            return None;
        }
        taken.counted.insert((scope.clone(), window), line);
        let name = match given {
            Some(name) => name?,
            None => default_name(&scope, window),
        };
        let at = fields.get("name").map_or(fields.place, place);
        if name.chars().count() > LONGEST_NAME {
            // Only of a model whose own name is longer.
            self.fault(at, "the name of this budget would be too long", "add a `name` of 1 to 64 characters");
            return None;
        }
        if let Some(first) = taken.names.get(&name) {
            let message = format!("the budget in line {first} is called `{name}` too");
            self.fault(
                at,
                message,
                "give one of the two another `name`: refusals have nothing else to tell them",
            );
            return None;
        }
        taken.names.insert(name.clone(), line);
        Some(Budget { name, scope, window, limit: limit? })
    }

    fn scope(&mut self, fields: &Fields<'_>, models: &[&str]) -> Option<BudgetScope> {
        let words = [("workspace", Scope::Workspace), ("key", Scope::Key), ("model", Scope::Model)];
        let scope = self.word(fields, "scope", &words)?;
        match (scope, fields.get("model")) {
            (Scope::Model, Some(node)) => {
                let name = self.string(node, "`model`")?;
                if !models.contains(&name) {
                    let help = if models.is_empty() {
                        "add it under `models`".to_owned()
                    } else {
                        suggestion(name, models)
                    };
                    self.fault(place(node), format!("there is no model `{}`", short(name)), help);
                    return None;
                }
                // A name that breaks the grammar was reported where the model stands.
                name.parse::<ModelName>().ok().map(BudgetScope::Model)
            }
            (Scope::Model, None) => {
                let help = "add `model: NAME`, one of this workspace";
                self.fault(fields.place, "a budget with `scope: model` has no `model`", help);
                None
            }
            (Scope::Workspace | Scope::Key, Some(_)) => {
                let at = fields.place_of("model").unwrap_or(fields.place);
                self.fault(at, "`model` goes with `scope: model` only", "remove it, or write `scope: model`");
                None
            }
            (Scope::Workspace, None) => Some(BudgetScope::Workspace),
            (Scope::Key, None) => Some(BudgetScope::Key),
        }
    }

    fn budget_name(&mut self, node: &Node) -> Option<String> {
        let name = self.string(node, "`name`")?;
        if name.trim() != name || !(1..=LONGEST_NAME).contains(&name.chars().count()) || !is_printable(name) {
            let help = "it stands in what clients are told, such as `fast-daily`";
            let message = "the name of a budget has 1 to 64 printable characters and no space around it";
            self.fault(place(node), message, help);
            return None;
        }
        Some(name.to_owned())
    }

    pub(super) fn limits(&mut self, node: &Node) -> Limits {
        let known = ["requests_per_minute", "tokens_per_minute", "concurrency"];
        let fields = self.fields(node, "`limits`", &known);
        let [requests_per_minute, tokens_per_minute, concurrency] =
            known.map(|name| self.count(&fields, name, EXACT));
        Limits { requests_per_minute, tokens_per_minute, concurrency }
    }
}

fn default_name(scope: &BudgetScope, window: Window) -> String {
    let window = window.as_str();
    match scope {
        BudgetScope::Workspace => format!("workspace {window}"),
        BudgetScope::Key => format!("key {window}"),
        BudgetScope::Model(model) => format!("model {model} {window}"),
    }
}

/// Neither control characters nor those that have no form or turn the text around them.
fn is_printable(text: &str) -> bool {
    text.chars().all(|c| matches!(c, '"' | '\'' | '\\') || c.escape_debug().len() == 1)
}
