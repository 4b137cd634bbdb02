use serde::{Deserialize, Serialize};

use crate::{NanoUsd, PerMillion, Tokens};

/// What the tokens of a target cost (DESIGN §12.2).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TokenPrice {
    /// For prompts that reach no tier.
    #[serde(flatten)]
    pub base: Rates,
    /// For every call, beside its tokens.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub per_call: NanoUsd,
    /// For long prompts, ascending. The highest one that a prompt reaches prices all of the call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<PriceTier>,
}

/// Prices per million tokens, by bucket. What has no price of its own costs what it is a kind of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Prompt tokens.
    pub input: PerMillion,
    /// Prompt tokens that the provider read from its cache.
    pub cached_input: PerMillion,
    /// Prompt tokens that the provider wrote to its cache; as `input` when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_write: Option<PerMillion>,
    /// Sound in a prompt; as `input` when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio_input: Option<PerMillion>,
    /// Completion tokens.
    pub output: PerMillion,
    /// What the model thought; as `output` when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<PerMillion>,
    /// Sound in an answer; as `output` when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio_output: Option<PerMillion>,
}

/// The price of long prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriceTier {
    /// It counts for prompts of more tokens than this, cached ones included.
    pub above: u64,
    /// What it costs then.
    #[serde(flatten)]
    pub rates: Rates,
}

/// Buckets of [`Tokens`]: each is rounded up on its own.
const BUCKETS: u64 = 7;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_nothing(price: &NanoUsd) -> bool {
    *price == NanoUsd::ZERO
}

impl TokenPrice {
    /// One price for prompts and one for answers.
    pub fn flat(input: PerMillion, output: PerMillion) -> Self {
        let base = Rates { input, cached_input: input, output, ..Rates::default() };
        Self { base, ..Self::default() }
    }

    /// Whether nothing costs anything.
    pub fn is_free(&self) -> bool {
        let free = |rates: &Rates| rates.worst(1_000_000, 1_000_000) == NanoUsd::ZERO;
        self.per_call == NanoUsd::ZERO && free(&self.base) && self.tiers.iter().all(|tier| free(&tier.rates))
    }

    /// What a call costs. Each bucket is rounded up to the next nano-USD on its own.
    pub fn cost(&self, tokens: &Tokens) -> NanoUsd {
        let prompt = tokens.prompt();
        let reached = self.tiers.iter().rev().find(|tier| prompt > tier.above);
        self.per_call + reached.map_or(&self.base, |tier| &tier.rates).cost(tokens)
    }

    /// The most that a call can cost with a prompt and an answer of at most so many tokens: at the dearest tier that it
    /// may reach, in the dearest buckets. No division of the tokens into buckets costs more.
    pub fn worst(&self, prompt: u64, output: u64) -> NanoUsd {
        let reachable = self.tiers.iter().filter(|tier| prompt > tier.above).map(|tier| &tier.rates);
        let dearest = std::iter::once(&self.base).chain(reachable).map(|rates| rates.worst(prompt, output));
        // Several buckets may round up where one would not; nothing of what is free does.
        match dearest.max().unwrap_or_default() {
            NanoUsd::ZERO => self.per_call,
            dearest => self.per_call + dearest + NanoUsd::new(BUCKETS - 1),
        }
    }
}

impl Rates {
    fn cost(&self, tokens: &Tokens) -> NanoUsd {
        let Tokens { input, cached_input, cache_write, audio_input, output, reasoning, audio_output } =
            *tokens;
        self.input.times(input)
            + self.cached_input.times(cached_input)
            + self.cache_write.unwrap_or(self.input).times(cache_write)
            + self.audio_input.unwrap_or(self.input).times(audio_input)
            + self.output.times(output)
            + self.reasoning.unwrap_or(self.output).times(reasoning)
            + self.audio_output.unwrap_or(self.output).times(audio_output)
    }

    fn worst(&self, prompt: u64, output: u64) -> NanoUsd {
        let Self { input, cached_input, cache_write, audio_input, .. } = *self;
        let others = [Some(cached_input), cache_write, audio_input].into_iter().flatten();
        let dearest_input = others.fold(input, PerMillion::max);
        let others = [self.reasoning, self.audio_output].into_iter().flatten();
        let dearest_output = others.fold(self.output, PerMillion::max);
        dearest_input.times(prompt) + dearest_output.times(output)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usd(text: &str) -> PerMillion {
        PerMillion::new(text.parse().unwrap())
    }

    fn tiered() -> TokenPrice {
        let base = Rates { cached_input: usd("0.1"), ..TokenPrice::flat(usd("1"), usd("4")).base };
        let dearer = Rates { cached_input: usd("0.2"), ..TokenPrice::flat(usd("2"), usd("6")).base };
        TokenPrice { base, tiers: vec![PriceTier { above: 1000, rates: dearer }], ..TokenPrice::default() }
    }

    #[test]
    fn a_tier_counts_from_the_first_token_above_it_for_all_of_the_call() {
        let price = tiered();
        let cost = |input, cached_input| {
            price.cost(&Tokens { input, cached_input, output: 10, ..Tokens::default() }).nanos()
        };
        assert_eq!(cost(200, 800), 200 * 1000 + 800 * 100 + 10 * 4000);
        assert_eq!(cost(201, 800), 201 * 2000 + 800 * 200 + 10 * 6000);
        assert_eq!(price.worst(1000, 10).nanos(), 1000 * 1000 + 10 * 4000 + 6);
        assert_eq!(price.worst(1001, 10).nanos(), 1001 * 2000 + 10 * 6000 + 6);
    }

    #[test]
    fn buckets_without_a_price_cost_what_they_are_a_kind_of() {
        let mut price = TokenPrice::flat(usd("1"), usd("4"));
        let tokens =
            Tokens { audio_input: 5, cache_write: 7, reasoning: 3, audio_output: 2, ..Tokens::default() };
        assert_eq!(price.cost(&tokens).nanos(), 12 * 1000 + 5 * 4000);
        price.base.reasoning = Some(usd("8"));
        price.base.cache_write = Some(usd("1.25"));
        price.per_call = NanoUsd::new(9);
        assert_eq!(price.cost(&tokens).nanos(), 9 + 5 * 1000 + 7 * 1250 + 3 * 8000 + 2 * 4000);
        assert!(!price.is_free() && TokenPrice::default().is_free());
        let rates = TokenPrice::flat(usd("0"), usd("0.01")).base;
        let dear_when_long = vec![PriceTier { above: 2_000_000, rates }];
        assert!(!TokenPrice { tiers: dear_when_long, ..TokenPrice::default() }.is_free());
    }

    #[test]
    fn prices_of_the_first_release_can_be_read_and_are_written_alike() {
        let text = r#"{"input":150000000,"cached_input":75000000,"output":600000000}"#;
        let price: TokenPrice = serde_json::from_str(text).unwrap();
        assert_eq!(price.base.output, usd("0.60"));
        assert_eq!(serde_json::to_string(&price).unwrap(), text);
        let text = serde_json::to_string(&tiered()).unwrap();
        assert_eq!(serde_json::from_str::<TokenPrice>(&text).unwrap(), tiered(), "{text}");
    }

    proptest! {
        #[test]
        fn nothing_costs_more_than_the_worst_case(
            rates in prop::array::uniform7(0_u64..20_000_000_000),
            dearer in prop::array::uniform7(0_u64..20_000_000_000),
            above in 0_u64..2000,
            tokens in prop::array::uniform7(0_u64..1000),
            per_call in 0_u64..1000,
        ) {
            let price = TokenPrice {
                base: rates_of(rates),
                per_call: NanoUsd::new(per_call),
                tiers: vec![PriceTier { above, rates: rates_of(dearer) }],
            };
            let [input, cached_input, cache_write, audio_input, output, reasoning, audio_output] = tokens;
            let tokens =
                Tokens { input, cached_input, cache_write, audio_input, output, reasoning, audio_output };
            prop_assert!(price.cost(&tokens) <= price.worst(tokens.prompt(), tokens.completion()));
        }
    }

    fn rates_of(nanos: [u64; 7]) -> Rates {
        let [input, cached_input, cache_write, audio_input, output, reasoning, audio_output] =
            nanos.map(|nanos| PerMillion::new(NanoUsd::new(nanos)));
        Rates {
            input,
            cached_input,
            cache_write: Some(cache_write),
            audio_input: Some(audio_input),
            output,
            reasoning: Some(reasoning),
            audio_output: Some(audio_output),
        }
    }
}
