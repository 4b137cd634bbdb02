//! What the tokens of a target cost: its own `price`, or what the catalogue of the workspace says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use obol_model::snapshot::ProviderKind;
use obol_model::{NanoUsd, PerMillion, PriceTier, ProviderName, Rates, TokenPrice};

use super::models::KINDS;
use super::reader::{EXACT, Fields, Reader, nearest, short, suggestion};
use super::yaml::{self, Node, Place, names_in, place};
use crate::Fault;
use crate::sources::{Sources, reason};

/// Prices per million tokens, by bucket. The first two are required.
const RATES: [&str; 7] =
    ["input", "output", "cached_input", "cache_write", "audio_input", "reasoning", "audio_output"];

const PER_MILLION: &str = "in USD per million tokens; `0` if it costs nothing";

/// Whether a file has the name of a price catalogue: such a file may lie among workspaces and is none.
pub fn is_price_catalogue(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy());
    let stem = name.as_deref().and_then(|name| name.strip_suffix(".yaml").or(name.strip_suffix(".yml")));
    stem.is_some_and(|stem| stem == "prices" || stem.ends_with(".prices"))
}

/// Checks a price catalogue, and says how many prices it has.
///
/// # Errors
/// All faults, in the order of the file, as far as the YAML can be parsed.
pub fn check_prices(path: &Path) -> Result<usize, Vec<Fault>> {
    let file = path.display().to_string();
    let text = match Sources::default().read(path).map(String::from_utf8) {
        Ok(Ok(text)) => text,
        Ok(Err(_)) => return Err(vec![Fault::no_text(&file)]),
        Err(e) => return Err(vec![Fault::of_file(&file, format!("cannot be read: {}", reason(&e)), None)]),
    };
    let (catalogue, faults) = Catalogue::read(file, &text);
    if faults.is_empty() { Ok(catalogue.len()) } else { Err(faults) }
}

/// The prices of a section, by whom they are of and by the upstream's name of the model; `None` for one that is written
/// wrongly, so that nobody is told that there is none.
type Prices = BTreeMap<String, BTreeMap<String, Option<TokenPrice>>>;

/// A price catalogue.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    /// As the workspace file names it.
    name: String,
    providers: Prices,
    kinds: Prices,
    /// Something of it could not be read: what is not there may be in that.
    partial: bool,
}

/// What a catalogue says of a model.
enum Entry<'c> {
    Price(&'c TokenPrice),
    /// There is a fault already.
    Unknown,
    /// It has none; the name that comes nearest, if one does.
    Absent(Option<&'c str>),
}

impl Catalogue {
    fn read(file: String, text: &str) -> (Self, Vec<Fault>) {
        let root = match yaml::parse(text) {
            Ok(root) => root,
            Err(error) => return (Self::unreadable(), vec![Fault::no_yaml(&file, error)]),
        };
        let mut sources = Sources::default();
        let mut reader = Reader::new(file, Path::new(""), text, &mut sources);
        let mut catalogue = reader.catalogue(&root);
        reader.faults.sort();
        catalogue.partial = !reader.faults.is_empty();
        (catalogue, reader.faults)
    }

    fn unreadable() -> Self {
        Self { partial: true, ..Self::default() }
    }

    fn len(&self) -> usize {
        self.providers.values().chain(self.kinds.values()).map(BTreeMap::len).sum()
    }

    /// The price of a provider's own model; the provider's name says more than its kind.
    fn entry(&self, provider: &str, kind: &str, model: &str) -> Entry<'_> {
        let sections = [self.providers.get(provider), self.kinds.get(kind)];
        let there = || sections.into_iter().flatten();
        match there().find_map(|models| models.get(model)) {
            Some(Some(price)) => Entry::Price(price),
            Some(None) => Entry::Unknown,
            None if self.partial => Entry::Unknown,
            None => {
                let known: BTreeSet<&str> =
                    there().flat_map(|models| models.keys().map(String::as_str)).collect();
                Entry::Absent(nearest(model, known))
            }
        }
    }
}

impl Reader<'_> {
    /// The catalogue that the workspace file names. Its faults become ours.
    pub(super) fn price_catalogue(&mut self, node: &Node) -> Catalogue {
        let Some(name) = self.string(node, "`prices`") else {
            return Catalogue::unreadable();
        };
        let (path, at) = (self.folder.join(name), place(node));
        if !is_price_catalogue(&path) {
            let help = "call it `prices.yaml` or `NAME.prices.yaml`: every other YAML file of a folder is a workspace";
            self.fault(at, format!("`{}` is no name of a price catalogue", short(name)), help);
            return Catalogue::unreadable();
        }
        let message = match self.sources.read(&path).map(String::from_utf8) {
            Ok(Ok(text)) => {
                let (catalogue, faults) = Catalogue::read(path.display().to_string(), &text);
                self.faults.extend(faults);
                return Catalogue { name: name.to_owned(), ..catalogue };
            }
            Ok(Err(_)) => format!("the price catalogue `{}` is not UTF-8 text", short(name)),
            Err(e) => format!("the price catalogue `{}` cannot be read: {}", short(name), reason(&e)),
        };
        self.fault(at, message, "paths start at the folder of the workspace file");
        Catalogue::unreadable()
    }

    fn catalogue(&mut self, root: &Node) -> Catalogue {
        if names_in(root).contains(&"workspace") {
            let help = "give the workspace file another name: files of this name hold prices";
            self.fault(place(root), "this is a workspace, where a price catalogue is expected", help);
            return Catalogue::default();
        }
        let fields = self.fields(root, "a price catalogue", &["providers", "kinds"]);
        let providers = fields.get("providers").map(|node| {
            self.section(node, "`providers`", |reader, name, at| {
                reader.id::<ProviderName>(name, at);
            })
        });
        let kinds = fields.get("kinds").map(|node| {
            self.section(node, "`kinds`", |reader, name, at| {
                let known: Vec<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
                if !known.contains(&name) {
                    let help = suggestion(name, &known);
                    reader.fault(at, format!("there is no kind of provider `{}`", short(name)), help);
                }
            })
        });
        Catalogue {
            providers: providers.unwrap_or_default(),
            kinds: kinds.unwrap_or_default(),
            ..Catalogue::default()
        }
    }

    fn section(&mut self, node: &Node, what: &str, check: fn(&mut Self, &str, Place)) -> Prices {
        let mut section = Prices::new();
        for (name, at, models) in self.entries(node, what) {
            check(self, name, at);
            let mut prices = BTreeMap::new();
            for (model, at, node) in self.entries(models, &format!("`{}`", short(name))) {
                if model.trim() != model || model.is_empty() || model.len() > 256 {
                    self.fault(at, "the name of a model has 1 to 256 characters and no space around it", "");
                }
                let price = self.token_price(node, &format!("the price of `{}`", short(model)));
                prices.insert(model.to_owned(), price);
            }
            section.insert(name.to_owned(), prices);
        }
        section
    }

    /// What a target costs that says nothing itself. `whose` is `None` when that could not be read, which is a fault.
    pub(super) fn catalogue_price(
        &mut self,
        at: Place,
        what: &str,
        whose: Option<(&ProviderName, ProviderKind, &str)>,
    ) -> Option<TokenPrice> {
        const HELP: &str =
            "add `price: { input: 0.15, output: 0.60 }` in USD per million tokens, or `free: true`";
        let Some(catalogue) = &self.catalogue else {
            self.fault(at, format!("{what} has no price"), HELP);
            return None;
        };
        let (provider, kind, model) = whose?;
        let kind = KINDS.iter().find(|(_, known)| *known == kind).map_or("", |(word, _)| *word);
        match catalogue.entry(provider.as_str(), kind, model) {
            Entry::Price(price) => Some(price.clone()),
            Entry::Unknown => None,
            Entry::Absent(near) => {
                let help = near.map_or_else(
                    || format!("{HELP}; or add `{}` to the catalogue", short(model)),
                    |near| format!("did you mean `{}`?", short(near)),
                );
                let message = format!(
                    "{what} has no price, nor has `{}` one of `{}` for provider `{provider}`",
                    short(&catalogue.name),
                    short(model)
                );
                self.fault(at, message, help);
                None
            }
        }
    }

    /// `{ input: 0.15, output: 0.60, … }`; `what` is what faults call it.
    pub(super) fn token_price(&mut self, node: &Node, what: &str) -> Option<TokenPrice> {
        let known: Vec<&str> = RATES.iter().copied().chain(["per_call", "tiers"]).collect();
        let fields = self.fields(node, what, &known);
        let base = self.rates(&fields, what);
        let per_call = self.price(&fields, "per_call").unwrap_or(NanoUsd::ZERO);
        let tiers = fields.get("tiers").map(|node| self.tiers(node, &fields, what)).unwrap_or_default();
        Some(TokenPrice { base: base?, per_call, tiers })
    }

    fn rates(&mut self, fields: &Fields<'_>, what: &str) -> Option<Rates> {
        for name in ["input", "output"] {
            if fields.get(name).is_none() {
                self.fault(fields.place, format!("{what} has no `{name}`"), PER_MILLION);
            }
        }
        let [input, output, cached_input, cache_write, audio_input, reasoning, audio_output] =
            RATES.map(|name| self.price(fields, name).map(PerMillion::new));
        let (input, output) = (input?, output?);
        // Unless said otherwise the cache saves nothing: an unknown discount must not become a loss.
        let cached_input = cached_input.unwrap_or(input);
        Some(Rates { input, cached_input, cache_write, audio_input, output, reasoning, audio_output })
    }

    fn tiers(&mut self, node: &Node, price: &Fields<'_>, what: &str) -> Vec<PriceTier> {
        let known: Vec<&str> = std::iter::once("above").chain(RATES).collect();
        let what = format!("a tier of {what}");
        let mut tiers: Vec<PriceTier> = Vec::new();
        let mut before = None;
        for node in self.list(node, "`tiers`") {
            let fields = self.fields(node, &what, &known);
            let above = self.count(&fields, "above", EXACT);
            if fields.get("above").is_none() {
                let help = "add `above: 200000`: a tier counts for prompts of more tokens than that";
                self.fault(fields.place, format!("{what} has no `above`"), help);
            }
            if let (Some(above), Some(before)) = (above, before)
                && above <= before
            {
                let at = fields.get("above").map_or(fields.place, place);
                let message = format!("`above` must be more than {before}, which the tier before has");
                self.fault(at, message, "put the tiers in the order of their prompts, each once");
            }
            before = above.or(before);
            for name in RATES.iter().skip(2) {
                // A bucket that is dear and was forgotten in a tier would cost as little there as text.
                if price.get(name).is_some() && fields.get(name).is_none() {
                    let help = "a tier takes nothing from the price around it: say what it costs there too";
                    let message = format!("{what} has no `{name}`, which the price itself has");
                    self.fault(fields.place, message, help);
                }
            }
            let rates = self.rates(&fields, &what);
            tiers.extend(above.zip(rates).map(|(above, rates)| PriceTier { above, rates }));
        }
        tiers
    }
}

/// Whether an answer of this many tokens may cost more than can be counted, in whichever tier.
pub(super) fn is_beyond_count(price: &TokenPrice, output: u64) -> bool {
    let rates = std::iter::once(price.base).chain(price.tiers.iter().map(|tier| tier.rates));
    rates
        .map(|base| TokenPrice { base, per_call: price.per_call, tiers: Vec::new() })
        .any(|price| price.worst(0, output) == NanoUsd::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_catalogue_is_known_by_its_name() {
        for name in ["prices.yaml", "a/prices.yml", "eu.prices.yaml", "/x/y.prices.yml"] {
            assert!(is_price_catalogue(Path::new(name)), "{name}");
        }
        for name in
            ["acme.yaml", "myprices.yaml", "prices", "prices.json", "prices.yaml.bak", "prices/a.yaml"]
        {
            assert!(!is_price_catalogue(Path::new(name)), "{name}");
        }
    }
}
