use obol_model::{BudgetScope, Limits, ModelName, NanoUsd, PerMillion, PriceTier, Rates, TokenPrice, Tokens};

use super::tests::{compile, env, faults};
use super::*;

#[test]
fn budgets_and_limits_compile_to_what_they_say() {
    let yaml = r#"
workspace: acme
policies: [a.cedar]
providers: { p: { kind: openai, base_url: 'https://x.example/v1' } }
models:
  fast: { max_output: 10, targets: [ { provider: p, model: x, price: { input: 1, output: 2 } } ] }
  gratis: { targets: [ { provider: p, model: y, free: true } ] }
budgets:
  - { scope: workspace, window: month, limit_usd: 9007199.254740991 }
  - { scope: key, window: day, limit_usd: 0 }
  - { scope: model, model: fast, window: day, limit_usd: "50", name: fast-daily }
  - { scope: model, model: gratis, window: total, limit_usd: 0.000000001 }
limits: { requests_per_minute: 600, tokens_per_minute: 200000, concurrency: 16 }
"#;
    let files = [("acme.yaml", yaml), ("a.cedar", "permit(principal, action, resource);")];
    let workspace = compile(&files, None).unwrap().workspace;
    let budgets: Vec<_> =
        workspace.budgets.iter().map(|b| (b.name.as_str(), b.window.as_str(), b.limit.nanos())).collect();
    assert_eq!(
        budgets,
        [
            ("workspace month", "month", (1 << 53) - 1),
            ("key day", "day", 0),
            ("fast-daily", "day", 50_000_000_000),
            ("model gratis total", "total", 1)
        ]
    );
    assert_eq!(workspace.budgets[2].scope, BudgetScope::Model("fast".parse().unwrap()));
    let limits =
        Limits { requests_per_minute: Some(600), tokens_per_minute: Some(200_000), concurrency: Some(16) };
    assert_eq!(workspace.limits, limits);
    let none = compile(&[("acme.yaml", "workspace: acme\nbudgets:\nlimits: {}\n")], None).unwrap().workspace;
    assert!(none.budgets.is_empty() && none.limits.is_open());
}

#[test]
fn each_fault_of_money_has_a_place_and_a_way_out() {
    const MODELS: &str = "providers: { p: { kind: openai, base_url: 'https://x.example/v1' } }\nmodels:\n  fast: { max_output: 9, targets: [{ provider: p, model: x, free: true }] }\n";
    let budget = |rest: &str| format!("{MODELS}budgets:\n  - {rest}\n");
    let price = |price: &str| {
        let models = MODELS.replace("free: true", &format!("price: {{ input: 1, output: 2, {price} }}"));
        format!("{models}{}", "")
    };
    let long = "n".repeat(100);
    let table: Vec<(String, &str)> = vec![
        (
            budget("{}"),
            "acme.yaml:7:5: a budget has no `limit_usd`\n  help: add `limit_usd: 500`, the most that may be spent; `0` for nothing at all\nacme.yaml:7:5: a budget has no `scope`\n  help: add `scope: workspace`, `scope: key` or `scope: model`\nacme.yaml:7:5: a budget has no `window`\n  help: add `window: day`, `window: month` or `window: total`",
        ),
        (
            budget("{ scope: keys, window: daily, limit_usd: 1 }"),
            "acme.yaml:7:14: `scope` cannot be `keys`\n  help: did you mean `key`?\nacme.yaml:7:28: `window` cannot be `daily`\n  help: known here: `day`, `month`, `total`",
        ),
        (
            budget("{ scope: key, window: day, limit: 1 }"),
            "acme.yaml:7:5: a budget has no `limit_usd`\n  help: add `limit_usd: 500`, the most that may be spent; `0` for nothing at all\nacme.yaml:7:32: a budget has no field `limit`\n  help: known here: `scope`, `model`, `window`, `limit_usd`, `name`",
        ),
        (
            budget("{ scope: key, window: day, limit_usd: 9007199.254740992 }"),
            "acme.yaml:7:43: `9007199.254740992` is no amount: a decimal number from 0 to 9007199.254740991 with at most 9 digits after the point\n  help: write USD, such as `500`; more cannot be counted exactly",
        ),
        (
            budget("{ scope: model, model: fsat, window: day, limit_usd: 1 }"),
            "acme.yaml:7:28: there is no model `fsat`\n  help: known here: `fast`",
        ),
        (
            budget("{ scope: model, model: fats, window: day, limit_usd: 1 }").replace("fast:", "quick:"),
            "acme.yaml:7:28: there is no model `fats`\n  help: known here: `quick`",
        ),
        (
            "budgets: [ { scope: model, model: fast, window: day, limit_usd: 1 } ]".into(),
            "acme.yaml:3:35: there is no model `fast`\n  help: add it under `models`",
        ),
        (
            budget("{ scope: model, window: day, limit_usd: 1 }"),
            "acme.yaml:7:5: a budget with `scope: model` has no `model`\n  help: add `model: NAME`, one of this workspace",
        ),
        (
            budget("{ scope: key, model: fast, window: day, limit_usd: 1 }"),
            "acme.yaml:7:19: `model` goes with `scope: model` only\n  help: remove it, or write `scope: model`",
        ),
        (
            budget(
                "{ scope: key, window: day, limit_usd: 1 }\n  - { scope: key, window: day, limit_usd: 2, name: b }",
            ),
            "acme.yaml:8:5: there is a budget of this scope and window already, in line 7\n  help: remove one of the two: only the lower one would ever count",
        ),
        (
            budget(
                "{ scope: key, window: day, limit_usd: 1 }\n  - { scope: key, window: month, limit_usd: 2, name: key day }",
            ),
            "acme.yaml:8:54: the budget in line 7 is called `key day` too\n  help: give one of the two another `name`: refusals have nothing else to tell them",
        ),
        (
            budget("{ scope: key, window: day, limit_usd: 1, name: '' }"),
            "acme.yaml:7:52: the name of a budget has 1 to 64 printable characters and no space around it\n  help: it stands in what clients are told, such as `fast-daily`",
        ),
        (
            budget("{ scope: key, window: day, limit_usd: 1, name: \"a\\u202Eb\" }"),
            "acme.yaml:7:52: the name of a budget has 1 to 64 printable characters and no space around it\n  help: it stands in what clients are told, such as `fast-daily`",
        ),
        (
            budget(&format!("{{ scope: model, model: {long}, window: day, limit_usd: 1 }}"))
                .replace("fast:", &format!("{long}:")),
            "acme.yaml:7:5: the name of this budget would be too long\n  help: add a `name` of 1 to 64 characters",
        ),
        (
            price("").replace("max_output: 9, ", "")
                + "budgets: [ { scope: key, window: day, limit_usd: 1 } ]",
            "acme.yaml:5:9: model `fast` has a price and no `max_output`, which budgets need\n  help: add `max_output: 4096`, the most tokens of an answer: without it nobody knows what to set aside",
        ),
        (
            price("").replace("max_output: 9", "max_output: x")
                + "budgets: [ { scope: key, window: day, limit_usd: 1 } ]",
            "acme.yaml:5:23: `max_output` must be a whole number from 1 to 10000000",
        ),
        (
            "limits: { requests_per_minute: 0, concurrency: 9007199254740992, tokens: 1 }".into(),
            "acme.yaml:3:32: `requests_per_minute` must be a whole number from 1 to 9007199254740991\nacme.yaml:3:48: `concurrency` must be a whole number from 1 to 9007199254740991\nacme.yaml:3:66: `limits` has no field `tokens`\n  help: known here: `requests_per_minute`, `tokens_per_minute`, `concurrency`",
        ),
        // prices
        (
            price("cashed_input: 1"),
            "acme.yaml:5:91: `price` has no field `cashed_input`\n  help: did you mean `cached_input`?",
        ),
        (
            price("cached_input: x"),
            "acme.yaml:5:105: `x` is no price: a decimal number from 0 to 1000000 with at most 9 digits after the point\n  help: write USD, such as `0.15`",
        ),
        (
            price("tiers: [{ input: 1 }]"),
            "acme.yaml:5:99: a tier of `price` has no `above`\n  help: add `above: 200000`: a tier counts for prompts of more tokens than that\nacme.yaml:5:99: a tier of `price` has no `output`\n  help: in USD per million tokens; `0` if it costs nothing",
        ),
        (
            price("tiers: [{ above: 5, input: 1, output: 1 }, { above: 5, input: 2, output: 2 }]"),
            "acme.yaml:5:143: `above` must be more than 5, which the tier before has\n  help: put the tiers in the order of their prompts, each once",
        ),
        (
            price("audio_input: 9, tiers: [{ above: 5, input: 1, output: 1 }]"),
            "acme.yaml:5:115: a tier of `price` has no `audio_input`, which the price itself has\n  help: a tier takes nothing from the price around it: say what it costs there too",
        ),
        (
            price("tiers: [{ above: 5, input: 1, output: 1, per_call: 1 }]"),
            "acme.yaml:5:132: a tier of `price` has no field `per_call`\n  help: known here: `above`, `input`, `output`, `cached_input`, `cache_write`, `audio_input`, `reasoning`, `audio_output`",
        ),
        (
            price("tiers: [{ above: 5, input: 1, output: 1000000 }]")
                .replace("max_output: 9", "max_output: 10000000"),
            "acme.yaml:5:23: an answer of 10000000 tokens could cost more than 9007199 USD\n  help: lower `max_output`, or correct the price: it is per million tokens",
        ),
        // the catalogue
        (
            "prices: 5".into(),
            "acme.yaml:3:9: `prices` must be text, this is a number\n  help: write it in quotes: `\"5\"`",
        ),
        (
            "prices: catalogue.yaml".into(),
            "acme.yaml:3:9: `catalogue.yaml` is no name of a price catalogue\n  help: call it `prices.yaml` or `NAME.prices.yaml`: every other YAML file of a folder is a workspace",
        ),
        (
            MODELS.replace(", free: true", "") + "prices: eu/prices.yaml",
            "acme.yaml:6:9: the price catalogue `eu/prices.yaml` cannot be read: no such file\n  help: paths start at the folder of the workspace file",
        ),
    ];
    let mut wrong = Vec::new();
    for (yaml, expected) in table {
        let found = faults(&yaml);
        if found != expected {
            wrong.push(format!("{yaml}\n- {expected}\n+ {found}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn a_price_has_a_bucket_for_everything_and_tiers() {
    let yaml = r"
workspace: acme
policies: [a.cedar]
providers: { p: { kind: openai, base_url: 'https://x.example/v1' } }
models:
  fast:
    targets:
      - provider: p
        model: x
        price:
          { input: 1, output: 2, cached_input: 3, cache_write: 4, audio_input: 5, reasoning: 6, audio_output: 7, per_call: 0.5, tiers: [
            { above: 10, input: 11, output: 12, cached_input: 13, cache_write: 14, audio_input: 15, reasoning: 16, audio_output: 17 },
            { above: 20, input: 21, output: 22, cached_input: 23, cache_write: 24, audio_input: 25, reasoning: 26, audio_output: 27 } ] }
";
    let files = [("acme.yaml", yaml), ("a.cedar", "permit(principal, action, resource);")];
    let workspace = compile(&files, None).unwrap().workspace;
    let price = &workspace.models[&"fast".parse::<ModelName>().unwrap()].targets[0].price;
    let rates = |add: u64| {
        let [input, output, cached_input, cache_write, audio_input, reasoning, audio_output] =
            [1, 2, 3, 4, 5, 6, 7].map(|n| PerMillion::new(NanoUsd::new((n + add) * 1_000_000_000)));
        let [cache_write, audio_input, reasoning, audio_output] =
            [cache_write, audio_input, reasoning, audio_output].map(Some);
        Rates { input, cached_input, cache_write, audio_input, output, reasoning, audio_output }
    };
    let tiers = vec![PriceTier { above: 10, rates: rates(10) }, PriceTier { above: 20, rates: rates(20) }];
    assert_eq!(*price, TokenPrice { base: rates(0), per_call: NanoUsd::new(500_000_000), tiers });
}

const PRICED: &str = r"
workspace: acme
policies: [a.cedar]
prices: prices.yaml
providers:
  eu: { kind: openai, base_url: 'https://eu.example/v1' }
  us: { kind: openai, base_url: 'https://us.example/v1' }
models:
  fast:
    max_output: 10
    targets:
      - { provider: eu, model: mini }
      - { provider: us, model: mini }
      - { provider: us, model: mini, price: { input: 7, output: 7 } }
      - { provider: us, model: mini, free: true }
";

fn priced(yaml: &str, catalogue: &str) -> Result<Compiled, String> {
    let policy = ("a.cedar", "permit(principal, action, resource);");
    compile(&[("acme.yaml", yaml), policy, ("prices.yaml", catalogue)], None)
}

#[test]
fn a_target_without_a_price_has_that_of_its_provider_or_else_of_its_kind() {
    let catalogue = "providers:\n  eu: { mini: { input: 2, output: 3, per_call: 1 } }\n  other: {}\nkinds:\n  openai: { mini: { input: 1, output: 1 } }\n";
    let workspace = priced(PRICED, catalogue).unwrap().workspace;
    let targets = &workspace.models[&"fast".parse::<ModelName>().unwrap()].targets;
    let cost = |n: usize| {
        let tokens = Tokens { input: 1_000_000, ..Tokens::default() };
        targets[n].price.cost(&tokens).nanos() / 1_000_000_000
    };
    assert_eq!([cost(0), cost(1), cost(2), cost(3)], [3, 1, 7, 0]);
}

#[test]
fn each_fault_of_a_catalogue_has_a_place_and_a_way_out() {
    let table = [
        (
            "kinds: { openai: { mni: { input: 1, output: 1 } } }",
            "acme.yaml:12:9: a target of model `fast` has no price, nor has `prices.yaml` one of `mini` for provider `eu`\n  help: did you mean `mni`?\nacme.yaml:13:9: a target of model `fast` has no price, nor has `prices.yaml` one of `mini` for provider `us`\n  help: did you mean `mni`?",
        ),
        (
            "providers: { eu: { mini: { input: 1, output: 1 } } }",
            "acme.yaml:13:9: a target of model `fast` has no price, nor has `prices.yaml` one of `mini` for provider `us`\n  help: add `price: { input: 0.15, output: 0.60 }` in USD per million tokens, or `free: true`; or add `mini` to the catalogue",
        ),
        (
            "",
            "acme.yaml:12:9: a target of model `fast` has no price, nor has `prices.yaml` one of `mini` for provider `eu`\n  help: add `price: { input: 0.15, output: 0.60 }` in USD per million tokens, or `free: true`; or add `mini` to the catalogue\nacme.yaml:13:9: a target of model `fast` has no price, nor has `prices.yaml` one of `mini` for provider `us`\n  help: add `price: { input: 0.15, output: 0.60 }` in USD per million tokens, or `free: true`; or add `mini` to the catalogue",
        ),
        (
            "kinds: { openai: { mini: { input: 1 } } }",
            "prices.yaml:1:26: the price of `mini` has no `output`\n  help: in USD per million tokens; `0` if it costs nothing",
        ),
        (
            "kinds: { opanai: { mini: { input: 1, output: 1 } } }",
            "prices.yaml:1:10: there is no kind of provider `opanai`\n  help: did you mean `openai`?",
        ),
        (
            "kinds:\n  openai:\n    mini: { input: 1, output: 1, free: true }",
            "prices.yaml:3:34: the price of `mini` has no field `free`\n  help: known here: `input`, `output`, `cached_input`, `cache_write`, `audio_input`, `reasoning`, `audio_output`, `per_call`, `tiers`",
        ),
        (
            "providers: { Eu: {} }",
            "prices.yaml:1:14: `Eu` is no provider name: a lower-case letter, then up to 62 of `a-z`, `0-9` and `-`",
        ),
        ("kind: {}", "prices.yaml:1:1: a price catalogue has no field `kind`\n  help: did you mean `kinds`?"),
        (
            "workspace: acme",
            "prices.yaml:1:1: this is a workspace, where a price catalogue is expected\n  help: give the workspace file another name: files of this name hold prices",
        ),
        (
            "kinds: { openai: { mini: { input: 1, output: 1 }, mini: { input: 1, output: 1 } } }",
            "prices.yaml:1:51: `mini` stands there twice\n  help: remove one of the two",
        ),
        (
            "kinds: { openai: { ' mini': { input: 1, output: 1 } } }",
            "prices.yaml:1:20: the name of a model has 1 to 256 characters and no space around it",
        ),
        (
            "kinds: [",
            "prices.yaml:1:8: unclosed bracket '['\n  help: this is no YAML any more: look at this line and the one before",
        ),
        ("[]", "prices.yaml:1:1: a price catalogue must be a mapping, this is a list"),
    ];
    let mut wrong = Vec::new();
    for (catalogue, expected) in table {
        let found = priced(PRICED, catalogue).err().unwrap_or_default();
        if found != expected {
            wrong.push(format!("{catalogue}\n- {expected}\n+ {found}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn a_catalogue_is_checked_on_its_own_and_is_no_workspace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("eu.prices.yaml");
    let write = |text: &str| std::fs::write(&path, text).unwrap();
    write(
        "providers: { eu: { a: { input: 1, output: 1 } } }\nkinds: { openai: { a: { input: 1, output: 1 } } }\n",
    );
    assert_eq!(check_prices(&path), Ok(2));
    let options = CompileOptions { key_ring: None, env: &env };
    let message = compile_file(&path, &options).unwrap_err()[0].message.clone();
    assert_eq!(message, "is a price catalogue by its name, and no workspace");
    write("workspace: acme\n");
    assert_eq!(check_prices(&path).unwrap_err().len(), 1);
    let absent = folder.path().join("prices.yaml");
    assert_eq!(check_prices(&absent).unwrap_err()[0].message, "cannot be read: no such file");
}
