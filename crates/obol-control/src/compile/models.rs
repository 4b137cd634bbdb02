use std::collections::{BTreeMap, BTreeSet};

use obol_model::snapshot::{Model, Provider, ProviderKind, Target};
use obol_model::{ModelName, NanoUsd, PerMillion, ProviderName, Rates, TokenPrice};

use super::reader::{Fields, Reader, short, suggestion};
use super::yaml::{Node, place};

/// More than any model can produce; keeps the worst case of a reservation within what money can express.
const MOST_OUTPUT: u64 = 10_000_000;
/// In nano-USD.
const USD: u64 = 1_000_000_000;

impl Reader<'_> {
    /// The providers, and the names of those that are written wrongly as well: a reference to one of them is no
    /// second fault.
    pub(super) fn providers(&mut self, node: &Node) -> (BTreeMap<ProviderName, Provider>, BTreeSet<String>) {
        let (mut providers, mut names) = (BTreeMap::new(), BTreeSet::new());
        for (name, at, node) in self.entries(node, "`providers`") {
            names.insert(name.to_owned());
            let id = self.id::<ProviderName>(name, at);
            let provider = self.provider(node, &format!("provider `{}`", short(name)));
            providers.extend(id.zip(provider));
        }
        (providers, names)
    }

    fn provider(&mut self, node: &Node, what: &str) -> Option<Provider> {
        let fields = self.fields(node, what, &["kind", "base_url", "auth", "allow_private"]);
        let allow_private = self.boolean(&fields, "allow_private").unwrap_or_default();
        let auth = fields.get("auth").map(|node| self.auth(node));
        let kind = if fields.get("kind").is_some() {
            self.word(&fields, "kind", &[("openai", ProviderKind::Openai)])
        } else {
            self.fault(fields.place, format!("{what} has no `kind`"), "add `kind: openai`");
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

    pub(super) fn models(&mut self, node: &Node, providers: &BTreeSet<String>) -> BTreeMap<ModelName, Model> {
        let mut models = BTreeMap::new();
        for (name, at, node) in self.entries(node, "`models`") {
            let id = self.id::<ModelName>(name, at);
            let what = format!("model `{}`", short(name));
            let fields = self.fields(node, &what, &["max_output", "targets"]);
            let max_output = self.count(&fields, "max_output", MOST_OUTPUT);
            let nodes = fields.get("targets").map(|node| self.list(node, "`targets`")).unwrap_or_default();
            let targets: Vec<Target> =
                nodes.iter().filter_map(|node| self.target(node, &what, providers)).collect();
            if let (Some(most), Some(node)) = (max_output, fields.get("max_output"))
                && targets.iter().any(|target| target.price.worst(0, most) == NanoUsd::MAX)
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
            if nodes.is_empty() {
                let help = "add `targets: [{ provider: …, model: …, price: { input: …, output: … } }]`";
                self.fault(fields.place, format!("{what} has no targets"), help);
            }
            models.extend(id.map(|id| (id, Model { max_output, targets })));
        }
        models
    }

    fn target(&mut self, node: &Node, what: &str, providers: &BTreeSet<String>) -> Option<Target> {
        let what = format!("a target of {what}");
        let fields = self.fields(node, &what, &["provider", "model", "price", "free", "stream_usage"]);
        let price = self.target_price(&fields, &what);
        let stream_usage = self.boolean(&fields, "stream_usage").unwrap_or(true);
        let model = self.required_text(&fields, "model", &what);
        let provider = self.required_text(&fields, "provider", &what)?;
        if !providers.contains(&provider) {
            let at = fields.get("provider").map_or(fields.place, place);
            let known: Vec<&str> = providers.iter().map(String::as_str).collect();
            let help = if known.is_empty() {
                "add it under `providers`".to_owned()
            } else {
                suggestion(&provider, &known)
            };
            self.fault(at, format!("there is no provider `{}`", short(&provider)), help);
            return None;
        }
        // A name that breaks the grammar was reported where the provider stands.
        Some(Target { provider: provider.parse().ok()?, model: model?, price: price?, stream_usage })
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

    fn target_price(&mut self, fields: &Fields<'_>, what: &str) -> Option<TokenPrice> {
        let free = self.boolean(fields, "free");
        match (fields.get("price"), free) {
            (Some(node), None | Some(false)) => self.token_price(node),
            (None, Some(true)) => Some(TokenPrice::default()),
            (Some(node), Some(true)) => {
                self.fault(place(node), format!("{what} has a price and is free"), "remove one of the two");
                None
            }
            (None, _) => {
                let help =
                    "add `price: { input: 0.15, output: 0.60 }` in USD per million tokens, or `free: true`";
                self.fault(fields.place, format!("{what} has no price"), help);
                None
            }
        }
    }

    fn token_price(&mut self, node: &Node) -> Option<TokenPrice> {
        let prices = self.fields(node, "`price`", &["input", "output", "cached_input"]);
        for name in ["input", "output"] {
            if prices.get(name).is_none() {
                let help = "in USD per million tokens; `0` if it costs nothing";
                self.fault(prices.place, format!("`price` has no `{name}`"), help);
            }
        }
        let input = self.price(&prices, "input");
        let output = self.price(&prices, "output");
        // Unless said otherwise the cache saves nothing: an unknown discount must not become a loss.
        let cached =
            if prices.get("cached_input").is_some() { self.price(&prices, "cached_input") } else { input };
        let price = |nanos| PerMillion::new(nanos);
        let base =
            Rates { cached_input: price(cached?), ..TokenPrice::flat(price(input?), price(output?)).base };
        Some(TokenPrice { base, ..TokenPrice::default() })
    }
}
