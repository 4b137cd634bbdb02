//! `obol usage`: what was called and what it cost, and whether the ledger agrees with itself.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::civil::{Date, Time};
use jiff::tz::Offset;
use jiff::{Timestamp, ToSpan as _};
use obol_control::{UsageBy, UsageQuery, UsageTotal};
use obol_meter::{Audited, Ledger as _, RedisLedger};
use obol_model::SignedNanoUsd;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::cli::{AuditArgs, Format, SumArgs};
use crate::config;
use crate::failure::Failure;
use crate::{out, run, store};

/// An audit is no snapshot: what was in the middle of a change agrees when it is looked at again.
const LOOKS: usize = 5;
const BETWEEN: Duration = Duration::from_millis(200);

/// The columns behind the groups.
const COLUMNS: [&str; 10] = [
    "requests",
    "errors",
    "input",
    "cached_input",
    "cache_write",
    "audio_input",
    "output",
    "reasoning",
    "audio_output",
    "usd",
];

/// Prints sums of usage and gives the exit code.
///
/// # Errors
/// When the store cannot be used.
pub(crate) async fn sums(config: config::Usage, args: SumArgs) -> Result<u8, Failure> {
    let SumArgs { workspace, from, to, by, format, .. } = args;
    if let (Some(from), Some(to)) = (from, to)
        && from > to
    {
        return Err(Failure::usage(format!("`--from {from}` is after `--to {to}`")));
    }
    let query = UsageQuery {
        workspace,
        from: from.map(midnight).transpose()?,
        to: to.map(|to| midnight(to.saturating_add(1.days()))).transpose()?,
        by,
    };
    let totals = store::usage(&config.store)?.totals(&query).await.map_err(Failure::runtime)?;
    let titles = || query.by.iter().map(|by| by.as_str()).chain(COLUMNS);
    match format {
        Format::Text => {
            let titles = titles().map(str::to_uppercase).collect();
            let rows = totals.iter().map(|total| row(total, out::one_line));
            out::text(out::table(&std::iter::once(titles).chain(rows).collect::<Vec<Vec<String>>>()))?;
        }
        Format::Csv => {
            out::line(titles().collect::<Vec<_>>().join(","))?;
            for total in &totals {
                out::line(row(total, quoted).join(","))?;
            }
        }
        Format::Json => out::json(&json!({
            "workspace": query.workspace,
            "from": from.map(|from| from.to_string()),
            "to": to.map(|to| to.to_string()),
            "totals": totals.iter().map(|total| total_json(&query.by, total)).collect::<Vec<_>>(),
        }))?,
    }
    Ok(0)
}

fn midnight(date: Date) -> Result<Timestamp, Failure> {
    Offset::UTC.to_timestamp(date.to_datetime(Time::midnight())).map_err(Failure::runtime)
}

/// The cells of a row; `name` makes names fit the format.
fn row(total: &UsageTotal, name: impl Fn(&str) -> String) -> Vec<String> {
    let UsageTotal { group, requests, errors, tokens, cost } = total;
    let numbers = [
        *requests,
        *errors,
        tokens.input,
        tokens.cached_input,
        tokens.cache_write,
        tokens.audio_input,
        tokens.output,
        tokens.reasoning,
        tokens.audio_output,
    ];
    let names = group.iter().map(|text| name(text));
    names.chain(numbers.map(|number| number.to_string())).chain([usd(*cost)]).collect()
}

fn total_json(by: &[UsageBy], total: &UsageTotal) -> Value {
    let groups = by.iter().zip(&total.group).map(|(by, group)| (by.as_str().to_owned(), json!(group)));
    let mut shown: serde_json::Map<String, Value> = groups.collect();
    shown.insert("requests".to_owned(), json!(total.requests));
    shown.insert("errors".to_owned(), json!(total.errors));
    shown.insert("tokens".to_owned(), json!(total.tokens));
    shown.insert("cost_nanos".to_owned(), json!(total.cost));
    // Text, since programs read numbers as floats.
    shown.insert("cost_usd".to_owned(), json!(usd(total.cost)));
    Value::Object(shown)
}

/// As a field of CSV.
fn quoted(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// USD, exactly.
fn usd(amount: SignedNanoUsd) -> String {
    let (sign, nanos) = (if amount.nanos() < 0 { "-" } else { "" }, amount.nanos().unsigned_abs());
    format!("{sign}{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
}

/// Prints what the counters of a workspace say; the exit code says whether they agree with its open reservations.
///
/// # Errors
/// When Redis cannot be asked.
pub(crate) async fn audit(config: config::UsageAudit, args: AuditArgs) -> Result<u8, Failure> {
    let ledger = RedisLedger::new(run::connect(&config.redis_url, config.redis_ca).await?);
    let mut counters: BTreeMap<String, Audited> = BTreeMap::new();
    for look in 1..=LOOKS {
        for audited in ledger.audit(&args.id).await.map_err(Failure::runtime)? {
            // What agreed once is all right: a call came or went in the middle of the look that says something else.
            if counters.get(&audited.counter).is_none_or(|known| !agrees(known)) {
                counters.insert(audited.counter.clone(), audited);
            }
        }
        if look == LOOKS || counters.values().all(agrees) {
            break;
        }
        sleep(BETWEEN).await;
    }
    let agree = counters.values().all(agrees);
    if args.json {
        let shown: Vec<Value> = counters.values().map(audited_json).collect();
        out::json(&json!({ "workspace": args.id, "agree": agree, "counters": shown }))?;
    } else if counters.is_empty() {
        out::hint(format_args!("`{}` has no counters: nothing that a budget counts was called", args.id));
    } else {
        let titles = ["COUNTER", "SETTLED", "RESERVED", "ENFORCED", "OPEN", "AGREE"].map(str::to_owned);
        let rows = counters.values().map(|audited| {
            let Audited { counter, settled, reserved, open } = audited;
            let [settled, reserved, enforced, open] =
                [*settled, *reserved, enforced(audited), *open].map(|nanos| usd(SignedNanoUsd::new(nanos)));
            let agree = if agrees(audited) { "yes" } else { "NO" };
            [out::one_line(counter), settled, reserved, enforced, open, agree.to_owned()]
        });
        out::text(out::table(&std::iter::once(titles).chain(rows).collect::<Vec<_>>()))?;
    }
    if !agree {
        out::complaint("what is set aside is not what the open reservations say");
    }
    Ok(u8::from(!agree))
}

fn agrees(audited: &Audited) -> bool {
    audited.reserved == audited.open
}

/// What budgets are compared with.
fn enforced(audited: &Audited) -> i64 {
    audited.settled.saturating_add(audited.reserved)
}

fn audited_json(audited: &Audited) -> Value {
    json!({
        "counter": audited.counter,
        "settled_nanos": audited.settled,
        "reserved_nanos": audited.reserved,
        "enforced_nanos": enforced(audited),
        "open_nanos": audited.open,
        "agree": agrees(audited),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_is_exact_and_fields_are_quoted_where_they_have_to_be() {
        for (nanos, text) in [
            (0, "0.000000000"),
            (1, "0.000000001"),
            (-1_500_000_000, "-1.500000000"),
            (i64::MIN, "-9223372036.854775808"),
        ] {
            assert_eq!(usd(SignedNanoUsd::new(nanos)), text);
        }
        for (text, field) in [("a b", "a b"), ("a,b", "\"a,b\""), ("a\"\n", "\"a\"\"\n\"")] {
            assert_eq!(quoted(text), field);
        }
    }
}
