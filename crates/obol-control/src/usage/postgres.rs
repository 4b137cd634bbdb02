use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use jiff::Timestamp;
use jiff::ToSpan as _;
use jiff::civil::Date;
use obol_model::{NanoUsd, Principal, Secret, SignedNanoUsd, Tokens, WorkspaceId};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Transaction};

use super::sums::{called, column, day};
use super::{
    BEGAN, MOST_GROUPS, RejectedEntry, TakenEvent, UsageBatch, UsageBy, UsageQuery, UsageStore, UsageTotal,
    part, too_many_groups,
};
use crate::StoreError;
use crate::store::postgres::link::{Failed, Link};

/// Whoever makes a partition holds this advisory lock.
const PARTITIONING: i64 = 0x6f62_6f6c_7573_6167;
/// The bound of sums, of which the server gets a little less.
const SUMS: Duration = Duration::from_mins(1);
const SUMS_SERVER: &str = "SET LOCAL statement_timeout = '58s'";

const INSERT: &str = "
INSERT INTO obol_usage (workspace, event_id, started_at, part, kind, principal, key_id, user_issuer, user_subject,
    model, provider, upstream_model, connection, tool, outcome, estimated, overrun, input_tokens,
    cached_input_tokens, cache_write_tokens, audio_input_tokens, output_tokens, reasoning_tokens,
    audio_output_tokens, cost_nanos, reserved_nanos, replica, revision, duration_ms, event)
SELECT $1::text, event_id, started_at, part, kind, principal, key_id, user_issuer, user_subject,
    model, provider, upstream_model, connection, tool, outcome, estimated, overrun, input_tokens,
    cached_input_tokens, cache_write_tokens, audio_input_tokens, output_tokens, reasoning_tokens,
    audio_output_tokens, cost_nanos, reserved_nanos, replica, revision, duration_ms, event::json
FROM unnest($2::text[], $3::timestamptz[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
    $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::bool[], $17::bool[],
    $18::int8[], $19::int8[], $20::int8[], $21::int8[], $22::int8[], $23::int8[], $24::int8[], $25::int8[],
    $26::int8[], $27::text[], $28::text[], $29::int8[], $30::text[])
AS taken (event_id, started_at, part, kind, principal, key_id, user_issuer, user_subject, model, provider,
    upstream_model, connection, tool, outcome, estimated, overrun, input_tokens, cached_input_tokens,
    cache_write_tokens, audio_input_tokens, output_tokens, reasoning_tokens, audio_output_tokens, cost_nanos,
    reserved_nanos, replica, revision, duration_ms, event)
ON CONFLICT DO NOTHING";

/// Usage events in the Postgres of control, in tables that [`crate::PostgresStore`] makes: `obol_usage`, with a partition
/// for each month, and `obol_usage_reject`.
///
/// It has a connection of its own, so that sums and batches hold up nothing else.
#[derive(Debug)]
pub struct PostgresUsage {
    link: Link,
}

impl PostgresUsage {
    /// A store at this URL. Nothing is asked of the database yet.
    ///
    /// # Errors
    /// What is wrong with the URL, in words that show nothing of it.
    pub fn new(url: &Secret<String>) -> Result<Self, String> {
        Ok(Self { link: Link::new(url)? })
    }
}

/// Events by column, since one statement takes them all.
#[derive(Default)]
struct Columns {
    event_id: Vec<String>,
    started_at: Vec<SystemTime>,
    part: Vec<&'static str>,
    kind: Vec<&'static str>,
    principal: Vec<String>,
    key_id: Vec<Option<String>>,
    user: [Vec<Option<String>>; 2],
    called: [Vec<Option<String>>; 5],
    outcome: Vec<&'static str>,
    estimated: Vec<bool>,
    overrun: Vec<bool>,
    tokens: [Vec<i64>; 7],
    cost: Vec<i64>,
    reserved: Vec<i64>,
    replica: Vec<String>,
    revision: Vec<String>,
    duration_ms: Vec<i64>,
    event: Vec<String>,
}

fn whole(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// JSON whose strings the database can take out, wherever it is asked to.
fn without_nul(json: &str) -> String {
    const NUL: &str = "u0000";
    let mut rest = json;
    let mut text = String::with_capacity(json.len());
    while let Some((before, escaped)) = rest.split_once('\\') {
        text.push_str(before);
        text.push('\\');
        if let Some(behind) = escaped.strip_prefix(NUL) {
            text.push_str("ufffd");
            rest = behind;
        } else {
            // What is escaped may be a backslash itself.
            let mut chars = escaped.chars();
            text.extend(chars.next());
            rest = chars.as_str();
        }
    }
    text.push_str(rest);
    text
}

fn buckets(tokens: &Tokens) -> [u64; 7] {
    let Tokens { input, cached_input, cache_write, audio_input, output, reasoning, audio_output } = *tokens;
    [input, cached_input, cache_write, audio_input, output, reasoning, audio_output]
}

impl Columns {
    fn of(events: &[&TakenEvent]) -> Result<Self, StoreError> {
        let mut columns = Self::default();
        for event in events {
            columns.add(event)?;
        }
        Ok(columns)
    }

    fn add(&mut self, TakenEvent { event, json, .. }: &TakenEvent) -> Result<(), StoreError> {
        self.event_id.push(event.event_id.into());
        let at = SystemTime::try_from(event.started_at).map_err(|e| StoreError::Damaged(e.to_string()))?;
        self.started_at.push(at);
        self.part.push(part(event.event_id.part));
        self.kind.push(event.kind.as_str());
        self.principal.push(column(&event.principal.to_string()));
        let (key, user) = match &event.principal {
            Principal::Key(id) => (Some(id.to_string()), [None, None]),
            Principal::User { issuer, subject } => (None, [Some(column(issuer)), Some(column(subject))]),
        };
        self.key_id.push(key);
        self.user.iter_mut().zip(user).for_each(|(column, value)| column.push(value));
        let values = called(&event.kind);
        self.called.iter_mut().zip(values).for_each(|(to, value)| to.push(value.map(column)));
        self.outcome.push(event.outcome.as_str());
        self.estimated.push(event.estimated);
        self.overrun.push(event.overrun);
        self.tokens.iter_mut().zip(buckets(&event.tokens)).for_each(|(to, n)| to.push(whole(n)));
        self.cost.push(event.cost.nanos());
        self.reserved.push(whole(NanoUsd::nanos(event.reserved)));
        self.replica.push(event.replica.to_string());
        self.revision.push(event.revision.to_string());
        self.duration_ms.push(whole(event.duration_ms));
        self.event.push(without_nul(json));
        Ok(())
    }

    async fn insert(
        &self,
        tx: &Transaction<'_>,
        workspace: &WorkspaceId,
    ) -> Result<(), tokio_postgres::Error> {
        let workspace = workspace.as_str();
        let [issuer, subject] = &self.user;
        let [model, provider, upstream_model, connection, tool] = &self.called;
        let mut params: Vec<&(dyn ToSql + Sync)> = vec![&workspace, &self.event_id, &self.started_at];
        params.extend([&self.part as &(dyn ToSql + Sync), &self.kind, &self.principal, &self.key_id]);
        params.extend([
            issuer as &(dyn ToSql + Sync),
            subject,
            model,
            provider,
            upstream_model,
            connection,
            tool,
        ]);
        params.extend([&self.outcome as &(dyn ToSql + Sync), &self.estimated, &self.overrun]);
        params.extend(self.tokens.iter().map(|bucket| bucket as &(dyn ToSql + Sync)));
        params.extend([&self.cost as &(dyn ToSql + Sync), &self.reserved, &self.replica, &self.revision]);
        params.extend([&self.duration_ms as &(dyn ToSql + Sync), &self.event]);
        tx.execute(INSERT, &params).await.map(drop)
    }
}

#[async_trait]
impl UsageStore for PostgresUsage {
    async fn record(&self, workspace: &WorkspaceId, batch: &UsageBatch) -> Result<(), StoreError> {
        let mut events: Vec<&TakenEvent> = batch.events.iter().collect();
        // Two writers of the same events wait for each other in one order only.
        events.sort_by_key(|event| event.event.event_id);
        let columns = Columns::of(&events)?;
        let months: BTreeSet<Date> =
            events.iter().map(|event| day(event.event.started_at).first_of_month()).collect();
        self.link
            .run(async |client| {
                let tx = client.transaction().await?;
                for month in &months {
                    partition(&tx, *month).await?;
                }
                if !events.is_empty() {
                    columns.insert(&tx, workspace).await.map_err(refused)?;
                }
                for RejectedEntry { entry, reason, content } in &batch.rejected {
                    tx.execute(
                        "INSERT INTO obol_usage_reject (workspace, entry, reason, content)
                         VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
                        &[&workspace.as_str(), &entry.to_string(), &column(reason), content],
                    )
                    .await?;
                }
                Ok(tx.commit().await?)
            })
            .await
    }

    async fn totals(&self, query: &UsageQuery) -> Result<Vec<UsageTotal>, StoreError> {
        let statement = statement(query);
        let (first, last) = BEGAN;
        let at = |at: Option<Timestamp>, without: i64| {
            let at = at.or_else(|| Timestamp::from_second(without).ok()).unwrap_or_default();
            SystemTime::try_from(at).map_err(|e| StoreError::Damaged(e.to_string()))
        };
        let (from, to) = (at(query.from, first)?, at(query.to, last)?);
        let workspace = query.workspace.as_ref().map(WorkspaceId::as_str);
        let mut params: Vec<&(dyn ToSql + Sync)> = vec![&from, &to];
        params.extend(workspace.as_ref().map(|workspace| workspace as &(dyn ToSql + Sync)));
        let rows = self
            .link
            .run_within(SUMS, async |client| {
                let tx = client.transaction().await?;
                tx.batch_execute(SUMS_SERVER).await?;
                let rows = tx.query(&statement, &params).await?;
                tx.commit().await?;
                Ok(rows)
            })
            .await?;
        if rows.len() > MOST_GROUPS {
            return Err(too_many_groups());
        }
        let totals: Result<Vec<UsageTotal>, tokio_postgres::Error> =
            rows.iter().map(|row| total(row, query.by.len())).collect();
        let mut totals = totals.map_err(|e| StoreError::Damaged(format!("a sum cannot be read: {e}")))?;
        // The database's order of texts depends on where it was made.
        totals.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(totals)
    }
}

/// Makes the partition of a month unless it is there.
async fn partition(tx: &Transaction<'_>, month: Date) -> Result<(), Failed> {
    let name = month.strftime("obol_usage_%Y_%m").to_string();
    let absent = async || {
        // Not `to_regclass`, which may go by what it knew before another transaction made it.
        let query = "SELECT count(*) FROM pg_catalog.pg_class WHERE relname = $1::text AND relnamespace =
                     (SELECT relnamespace FROM pg_catalog.pg_class WHERE oid = 'obol_usage'::regclass)";
        let found: i64 = tx.query_one(query, &[&name]).await?.try_get(0)?;
        Ok::<_, tokio_postgres::Error>(found == 0)
    };
    if !absent().await? {
        return Ok(());
    }
    tx.execute("SELECT pg_advisory_xact_lock($1)", &[&PARTITIONING]).await?;
    if !absent().await? {
        return Ok(());
    }
    let bound = |date: Date| date.strftime("%Y-%m-%d 00:00:00+00").to_string();
    let (from, to) = (bound(month), bound(month.saturating_add(1.months())));
    // Attached and not created as a partition: that would wait for everybody who reads, and hold up who comes then.
    tx.batch_execute(&format!(
        "CREATE TABLE {name} (LIKE obol_usage INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
         ALTER TABLE obol_usage ATTACH PARTITION {name} FOR VALUES FROM ('{from}') TO ('{to}')"
    ))
    .await?;
    tracing::info!(table = name, "partition of usage events made");
    Ok(())
}

/// What the database says of the data themselves will be the same tomorrow.
fn refused(error: tokio_postgres::Error) -> Failed {
    let class = error.code().map(|code| code.code().chars().take(2).collect::<String>());
    match class.as_deref() {
        // Data exception, integrity constraint, program limit.
        Some("22" | "23" | "54") => {
            let why = error.as_db_error().map_or_else(|| error.to_string(), |e| e.message().to_owned());
            StoreError::Damaged(format!("the database refuses it: {why}")).into()
        }
        _ => error.into(),
    }
}

fn statement(query: &UsageQuery) -> String {
    let mut groups = String::new();
    for by in &query.by {
        groups.push_str(match by {
            UsageBy::Workspace => "workspace, ",
            UsageBy::Key => "principal, ",
            UsageBy::Kind => "kind, ",
            UsageBy::Model => "coalesce(model, ''), ",
            UsageBy::Tool => "coalesce(tool, ''), ",
            UsageBy::Connection => "coalesce(connection, ''), ",
            UsageBy::Provider => "coalesce(provider, ''), ",
            UsageBy::Outcome => "outcome, ",
            UsageBy::Day => "to_char(started_at AT TIME ZONE 'UTC', 'YYYY-MM-DD'), ",
            UsageBy::Month => "to_char(started_at AT TIME ZONE 'UTC', 'YYYY-MM'), ",
        });
    }
    let of_workspace = if query.workspace.is_some() { "AND workspace = $3" } else { "" };
    let positions: Vec<String> = (1..=query.by.len()).map(|n| n.to_string()).collect();
    let grouped =
        if positions.is_empty() { String::new() } else { format!("GROUP BY {}", positions.join(", ")) };
    // Sums of int8 are numeric: they do not overflow, and are read as text.
    format!(
        "SELECT {groups} count(*) FILTER (WHERE part = 'request'),
             count(*) FILTER (WHERE part = 'request' AND outcome = 'error'),
             coalesce(sum(input_tokens), 0)::text, coalesce(sum(cached_input_tokens), 0)::text,
             coalesce(sum(cache_write_tokens), 0)::text, coalesce(sum(audio_input_tokens), 0)::text,
             coalesce(sum(output_tokens), 0)::text, coalesce(sum(reasoning_tokens), 0)::text,
             coalesce(sum(audio_output_tokens), 0)::text, coalesce(sum(cost_nanos), 0)::text
         FROM obol_usage WHERE started_at >= $1 AND started_at < $2 {of_workspace} AND part <> 'attempt'
         {grouped} LIMIT {}",
        MOST_GROUPS + 1
    )
}

fn total(row: &Row, groups: usize) -> Result<UsageTotal, tokio_postgres::Error> {
    let count = |column| row.try_get::<_, i64>(groups + column).map(i64::unsigned_abs);
    let number =
        |column| row.try_get::<_, &str>(groups + column).map(|text| text.parse().unwrap_or(u64::MAX));
    let cost = row.try_get::<_, &str>(groups + 9)?;
    let most = if cost.starts_with('-') { i64::MIN } else { i64::MAX };
    Ok(UsageTotal {
        group: (0..groups).map(|column| row.try_get(column)).collect::<Result<_, _>>()?,
        requests: count(0)?,
        errors: count(1)?,
        tokens: Tokens {
            input: number(2)?,
            cached_input: number(3)?,
            cache_write: number(4)?,
            audio_input: number(5)?,
            output: number(6)?,
            reasoning: number(7)?,
            audio_output: number(8)?,
        },
        cost: SignedNanoUsd::new(cost.parse().unwrap_or(most)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nul_is_replaced_and_nothing_that_only_looks_like_it() {
        for (json, kept) in [
            (r#"{"a":"x\u0000y\u0000"}"#, r#"{"a":"x\ufffdy\ufffd"}"#),
            (r#"{"a":"\\u0000"}"#, r#"{"a":"\\u0000"}"#),
            (r#"{"a":"\\\u0000é"}"#, r#"{"a":"\\\ufffdé"}"#),
            ("\\", "\\"),
            ("", ""),
        ] {
            assert_eq!(without_nul(json), kept);
        }
    }
}
