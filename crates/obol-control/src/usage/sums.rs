//! What an event is counted under, and sums of events that are not in a database.

use std::collections::BTreeMap;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::Offset;
use obol_model::{EventPart, Outcome, ProviderName, SignedNanoUsd, Tokens, UsageEvent, UsageKind};

use super::{MOST_GROUPS, UsageBy, UsageQuery, UsageTotal, too_many_groups};
use crate::StoreError;

/// The most characters of a name that count. A database has no place for long ones in an index.
const LONGEST: usize = 300;

/// Text from outside as a column can hold it.
pub(super) fn column(text: &str) -> String {
    text.chars().take(LONGEST).map(|c| if c == '\0' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// The day of UTC.
pub(super) fn day(at: Timestamp) -> Date {
    Offset::UTC.to_datetime(at).date()
}

/// What was called, in the columns that it has: model, provider, model of the provider, connection, tool.
pub(super) fn called(kind: &UsageKind) -> [Option<&str>; 5] {
    let (connection, tool) = match kind {
        UsageKind::ToolCall { connection, tool } => (Some(connection.as_str()), Some(tool.as_str())),
        _ => (None, None),
    };
    let call = kind.model_call();
    [
        call.map(|call| call.model.as_str()),
        call.and_then(|call| call.provider.as_ref()).map(ProviderName::as_str),
        call.and_then(|call| call.upstream_model.as_deref()),
        connection,
        tool,
    ]
}

fn value(by: UsageBy, event: &UsageEvent) -> String {
    let [model, provider, _, connection, tool] = called(&event.kind);
    let day = day(event.started_at);
    let named = |name: Option<&str>| column(name.unwrap_or_default());
    match by {
        UsageBy::Workspace => event.workspace_id.to_string(),
        UsageBy::Key => column(&event.principal.to_string()),
        UsageBy::Kind => event.kind.as_str().to_owned(),
        UsageBy::Model => named(model),
        UsageBy::Tool => named(tool),
        UsageBy::Connection => named(connection),
        UsageBy::Provider => named(provider),
        UsageBy::Outcome => event.outcome.as_str().to_owned(),
        UsageBy::Day => day.to_string(),
        UsageBy::Month => day.strftime("%Y-%m").to_string(),
    }
}

/// Sums of one query, as events come.
pub(super) struct Sums<'a> {
    query: &'a UsageQuery,
    totals: BTreeMap<Vec<String>, UsageTotal>,
}

impl<'a> Sums<'a> {
    pub(super) fn new(query: &'a UsageQuery) -> Self {
        let mut totals = BTreeMap::new();
        if query.by.is_empty() {
            totals.insert(Vec::new(), UsageTotal::default());
        }
        Self { query, totals }
    }

    pub(super) fn add(&mut self, event: &UsageEvent) -> Result<(), StoreError> {
        let at = event.started_at;
        if self.query.from.is_some_and(|from| at < from)
            || self.query.to.is_some_and(|to| at >= to)
            || matches!(event.event_id.part, EventPart::Attempt(_))
        {
            return Ok(());
        }
        let group: Vec<String> = self.query.by.iter().map(|by| value(*by, event)).collect();
        let total = self.totals.entry(group).or_default();
        if event.event_id.part == EventPart::Request {
            total.requests += 1;
            total.errors += u64::from(event.outcome == Outcome::Error);
        }
        total.tokens = sum(&total.tokens, &event.tokens);
        total.cost = SignedNanoUsd::new(total.cost.nanos().saturating_add(event.cost.nanos()));
        if self.totals.len() > MOST_GROUPS { Err(too_many_groups()) } else { Ok(()) }
    }

    pub(super) fn done(self) -> Vec<UsageTotal> {
        self.totals.into_iter().map(|(group, total)| UsageTotal { group, ..total }).collect()
    }
}

fn sum(a: &Tokens, b: &Tokens) -> Tokens {
    Tokens {
        input: a.input.saturating_add(b.input),
        cached_input: a.cached_input.saturating_add(b.cached_input),
        cache_write: a.cache_write.saturating_add(b.cache_write),
        audio_input: a.audio_input.saturating_add(b.audio_input),
        output: a.output.saturating_add(b.output),
        reasoning: a.reasoning.saturating_add(b.reasoning),
        audio_output: a.audio_output.saturating_add(b.audio_output),
    }
}
