use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use obol_model::snapshot::{Model, Provider, ProviderKind, Target};
use obol_model::{ModelName, NanoUsd, ProviderName, TokenPrice};

use super::prices::is_beyond_count;
use super::reader::{Fields, Reader, short, suggestion};
use super::yaml::{Node, place};

/// More than any model can produce; keeps the worst case of a reservation within what money can express.
const MOST_OUTPUT: u64 = 10_000_000;
/// Shares are percentages as a rule.
const MOST_WEIGHT: u32 = 1_000_000;
/// `OBOL_UPSTREAM_TIMEOUT_S` ends a call before, as a rule.
const LONGEST_TIMEOUT_S: u32 = 3600;
/// In nano-USD.
const USD: u64 = 1_000_000_000;

/// Which API a provider speaks, by the word for it.
pub(super) const KINDS: [(&str, ProviderKind); 2] =
    [("openai", ProviderKind::Openai), ("anthropic", ProviderKind::Anthropic)];

/// The providers of a workspace.
#[derive(Debug, Default)]
pub(super) struct Providers {
    pub(super) valid: BTreeMap<ProviderName, Provider>,
    /// Those that are written wrongly as well: a reference to one of them is no second fault.
    names: BTreeSet<String>,
}

impl Reader<'_> {
    pub(super) fn providers(&mut self, node: &Node) -> Providers {
        let mut providers = Providers::default();
        for (name, at, node) in self.entries(node, "`providers`") {
            providers.names.insert(name.to_owned());
            let id = self.id::<ProviderName>(name, at);
            let provider = self.provider(node, &format!("provider `{}`", short(name)));
            providers.valid.extend(id.zip(provider));
        }
        providers
    }

    fn provider(&mut self, node: &Node, what: &str) -> Option<Provider> {
        let fields = self.fields(node, what, &["kind", "base_url", "auth", "allow_private"]);
        let allow_private = self.boolean(&fields, "allow_private").unwrap_or_default();
        let auth = fields.get("auth").map(|node| self.auth(node));
        let kind = if fields.get("kind").is_some() {
            self.word(&fields, "kind", &KINDS)
        } else {
            self.fault(
                fields.place,
                format!("{what} has no `kind`"),
                "add `kind: openai` or `kind: anthropic`",
            );
            None
        };
        let Some(node) = fields.get("base_url") else {
            let help = "add `base_url: https://host.example/v1`";
            self.fault(fields.place, format!("{what} has no `base_url`"), help);
            return None;
        };
        let base_url = self.url(node, "base_url", allow_private, false);
        Some(Provider { kind: kind?, base_url: base_url?, auth: auth.flatten(), allow_private })
    }

    /// With `budgeted`, every call needs a worst case that can be set aside.
    pub(super) fn models(
        &mut self,
        node: &Node,
        providers: &Providers,
        budgeted: bool,
    ) -> BTreeMap<ModelName, Model> {
        let mut models = BTreeMap::new();
        for (name, at, node) in self.entries(node, "`models`") {
            let id = self.id::<ModelName>(name, at);
            let what = format!("model `{}`", short(name));
            let fields = self.fields(
                node,
                &what,
                &["max_output", "first_byte_timeout_s", "idle_timeout_s", "targets"],
            );
            let max_output = self.count(&fields, "max_output", MOST_OUTPUT);
            let nodes = fields.get("targets").map(|node| self.list(node, "`targets`")).unwrap_or_default();
            let targets: Vec<Target> =
                nodes.iter().filter_map(|node| self.target(node, &what, providers)).collect();
            if let (Some(most), Some(node)) = (max_output, fields.get("max_output"))
                && targets.iter().any(|target| is_beyond_count(&target.price, most))
            {
                let message = format!(
                    "an answer of {most} tokens could cost more than {} USD",
                    NanoUsd::MAX.nanos() / USD
                );
                self.fault(
                    place(node),
                    message,
                    "lower `max_output`, or correct the price: it is per million tokens",
                );
            }
            if budgeted
                && fields.get("max_output").is_none()
                && targets.iter().any(|target| !target.price.is_free())
            {
                let message = format!("{what} has a price and no `max_output`, which budgets need");
                let help = "add `max_output: 4096`, the most tokens of an answer: without it nobody knows what to set aside";
                self.fault(fields.place, message, help);
            }
            if nodes.is_empty() {
                let help = "add `targets: [{ provider: …, model: …, price: { input: …, output: … } }]`";
                self.fault(fields.place, format!("{what} has no targets"), help);
            }
            let [first_byte_timeout_s, idle_timeout_s] = ["first_byte_timeout_s", "idle_timeout_s"]
                .map(|name| self.small(&fields, name, LONGEST_TIMEOUT_S));
            let model = Model { max_output, first_byte_timeout_s, idle_timeout_s, targets };
            models.extend(id.map(|id| (id, model)));
        }
        models
    }

    fn target(&mut self, node: &Node, what: &str, providers: &Providers) -> Option<Target> {
        let what = format!("a target of {what}");
        let fields =
            self.fields(node, &what, &["provider", "model", "price", "free", "stream_usage", "weight"]);
        let stream_usage = self.boolean(&fields, "stream_usage").unwrap_or(true);
        let weight = self.small(&fields, "weight", MOST_WEIGHT);
        let model = self.required_text(&fields, "model", &what);
        let provider = self.required_text(&fields, "provider", &what);
        let valid = provider.as_deref().and_then(|name| providers.valid.get_key_value(name));
        let whose = valid.zip(model.as_deref()).map(|((name, p), model)| (name, p.kind, model));
        let price = self.target_price(&fields, &what, whose);
        let provider = provider?;
        if !providers.names.contains(&provider) {
            let at = fields.get("provider").map_or(fields.place, place);
            let known: Vec<&str> = providers.names.iter().map(String::as_str).collect();
            let help = if known.is_empty() {
                "add it under `providers`".to_owned()
            } else {
                suggestion(&provider, &known)
            };
            self.fault(at, format!("there is no provider `{}`", short(&provider)), help);
            return None;
        }
        // A name that breaks the grammar was reported where the provider stands.
        let provider = provider.parse().ok()?;
        Some(Target { provider, model: model?, price: price?, stream_usage, weight })
    }

    /// A count that fits into 32 bits.
    fn small(&mut self, fields: &Fields<'_>, name: &str, most: u32) -> Option<NonZeroU32> {
        let count = self.count(fields, name, most.into())?;
        NonZeroU32::new(u32::try_from(count).ok()?)
    }

    fn required_text(&mut self, fields: &Fields<'_>, name: &str, what: &str) -> Option<String> {
        let Some(node) = fields.get(name) else {
            self.fault(fields.place, format!("{what} has no `{name}`"), "");
            return None;
        };
        let text = self.string(node, &format!("`{name}`"))?.trim();
        if text.is_empty() || text.len() > 256 {
            self.fault(place(node), format!("`{name}` must have 1 to 256 characters"), "");
            return None;
        }
        Some(text.to_owned())
    }

    /// `whose` model it is, unless that could not be read.
    fn target_price(
        &mut self,
        fields: &Fields<'_>,
        what: &str,
        whose: Option<(&ProviderName, ProviderKind, &str)>,
    ) -> Option<TokenPrice> {
        let free = self.boolean(fields, "free");
        match (fields.get("price"), free) {
            (Some(node), None | Some(false)) => self.token_price(node, "`price`"),
            (None, Some(true)) => Some(TokenPrice::default()),
            (Some(node), Some(true)) => {
                self.fault(place(node), format!("{what} has a price and is free"), "remove one of the two");
                None
            }
            (None, _) => self.catalogue_price(fields.place, what, whose),
        }
    }
}
