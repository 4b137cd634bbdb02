mod seed;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use obol_model::{EventId, EventPart, NanoUsd, RequestId, UsageEvent, WorkspaceId, metric};
use obol_redis::{Redis, RedisError, Script, ScriptCall};
use parking_lot::Mutex;

use crate::idempotency::{Fate, Keyed, Remembered, Repeated, StoredAnswer};
use crate::ledger::{
    Admission, Audited, CloseError, Closing, Denied, Ledger, LedgerError, Line, Open, Rate, Reservation,
    Settled, Standing,
};
use crate::windows::{MINUTE, Windows, minute};

pub use self::seed::{LedgerSeeds, LostLedger, Seeded, Spent, Whose};

/// As many events may wait in the stream of a workspace: some 400 MB of Redis memory in the worst case, and more than a day
/// without a consumer at ten calls a second.
const MAX_LEN: usize = 1_000_000;
/// For how long it is known that a call was closed, so that a flight that is repeated closes nothing twice.
pub(crate) const CLOSED: Duration = Duration::from_mins(15);
/// The same for one that was booked as orphaned and may still be corrected.
pub(crate) const ORPHANED: Duration = Duration::from_hours(24);
/// The workspaces that have a ledger, for those who sweep. It lies in a slot of its own, so it is only ever a hint.
const INDEX: &str = "ledger:workspaces";
/// About the most bytes of one flight of closings: they may bring answers that are to be given again.
const FLIGHT: usize = 4 * 1024 * 1024;
/// The most counters of one workspace that an audit reads.
const MOST_COUNTERS: usize = 100_000;

/// Counters, reservations and usage events in the Redis that all replicas share (DESIGN §5): all of a workspace's in one
/// slot, changed by one script at a time.
///
/// The streams `usage:{WS}` hold one entry per event, with the event as JSON in the field `event`. They are bounded. One that
/// has a consumer group is trimmed by its consumers alone, and when it is full no call is admitted, so that nothing is
/// forgotten that somebody is to read. Of one that has none the oldest entries are trimmed.
#[derive(Debug)]
pub struct RedisLedger {
    redis: Redis,
    reserve: Script,
    top_up: Script,
    close: Script,
    max_len: usize,
    /// Those whose stream was full when it was looked at last; empty as a rule.
    full: Mutex<HashSet<WorkspaceId>>,
    /// Those of which the index knows.
    indexed: Mutex<HashSet<WorkspaceId>>,
    /// Instead of Redis's clock.
    now: Option<fn() -> Timestamp>,
}

impl RedisLedger {
    /// The ledger in this Redis.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            reserve: Script::new("ledger_reserve_v1", include_str!("scripts/ledger_reserve_v1.lua")),
            top_up: Script::new("ledger_top_up_v1", include_str!("scripts/ledger_top_up_v1.lua")),
            close: Script::new("ledger_close_v1", include_str!("scripts/ledger_close_v1.lua")),
            max_len: MAX_LEN,
            full: Mutex::default(),
            indexed: Mutex::default(),
            now: None,
        }
    }

    /// Admits nothing when so many events of a workspace wait to be read; keeps at least as many when nobody reads them, and
    /// not many more.
    #[must_use]
    pub fn with_max_len(self, max_len: usize) -> Self {
        Self { max_len, ..self }
    }

    /// Takes this for the clock of Redis, for tests of what happens between two windows.
    #[doc(hidden)]
    #[must_use]
    pub fn with_clock(self, now: fn() -> Timestamp) -> Self {
        Self { now: Some(now), ..self }
    }

    /// Says once that a stream is full, and once that it is not any more.
    fn tell(&self, workspace_id: &WorkspaceId, is_full: bool) {
        let mut full = self.full.lock();
        if is_full {
            metrics::counter!(metric::USAGE_STREAM_FULL).increment(1);
            if full.insert(workspace_id.clone()) {
                tracing::error!(
                    workspace = %workspace_id,
                    most = self.max_len,
                    help = "let `obol control` collect usage, look at its store, and for groups that do not acknowledge",
                    "the usage stream is full, calls are refused"
                );
            }
        } else if !full.is_empty() && full.remove(workspace_id) {
            tracing::info!(workspace = %workspace_id, "the usage stream has room again");
        }
    }

    /// A cold extra flight, once for each workspace and process.
    async fn index(&self, workspace_id: &WorkspaceId) -> Result<(), LedgerError> {
        if self.indexed.lock().contains(workspace_id) {
            return Ok(());
        }
        let add = redis::cmd("SADD").arg(INDEX).arg(workspace_id.as_str()).to_owned();
        self.redis.query::<()>(&add).await.map_err(unavailable)?;
        self.indexed.lock().insert(workspace_id.clone());
        Ok(())
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is what maps errors")]
fn unavailable(e: RedisError) -> LedgerError {
    LedgerError::Unavailable(e.to_string())
}

/// Where a workspace's ledger stands. The braces are literal: a hash tag.
struct Keys<'a>(&'a WorkspaceId);

impl Keys<'_> {
    fn meta(&self) -> String {
        format!("ledger:{{{}}}:meta", self.0)
    }

    /// Who seeds a ledger that was lost.
    fn seeding(&self) -> String {
        format!("ledger:{{{}}}:seeding", self.0)
    }

    fn reservation(&self, id: RequestId) -> String {
        format!("ledger:{{{}}}:r:{}", self.0, id.as_uuid())
    }

    fn open(&self) -> String {
        format!("ledger:{{{}}}:open", self.0)
    }

    fn under_way(&self) -> String {
        format!("ledger:{{{}}}:under-way", self.0)
    }

    fn usage(&self) -> String {
        format!("usage:{{{}}}", self.0)
    }

    /// What is known of an idempotency key.
    fn record(&self, reservation: &Reservation) -> Option<String> {
        let Keyed { idempotency, .. } = reservation.idempotency.as_ref()?;
        Some(format!("idem:{{{}}}:{}:{}", self.0, reservation.principal, hex(&idempotency.key)))
    }

    /// In the previous, this and the next minute.
    fn rates(&self, reservation: &Reservation) -> [String; 3] {
        let this = minute(reservation.asked_at);
        [this - MINUTE, this, this + MINUTE]
            .map(|at| format!("ledger:{{{}}}:rate:{}:{}", self.0, reservation.principal, at / MINUTE))
    }

    /// In the previous, current and next window.
    fn counters(&self, line: &Line, windows: &Windows) -> [String; 3] {
        windows.names.each_ref().map(|name| format!("{}{}:{name}", self.counter(), line.counter.as_str()))
    }

    /// In the windows that were chosen at admission.
    fn chosen(&self, reservation: &Reservation, admission: &Admission) -> Chosen {
        let mut positions = admission.windows.iter().map(|digit| usize::from(*digit));
        let at = positions.next().unwrap_or(1);
        let rate = self.rates(reservation).into_iter().nth(at).unwrap_or_default();
        let minutes = i64::try_from(at).unwrap_or(1);
        let minute_ends = minute(reservation.asked_at).saturating_add(minutes * MINUTE);
        let lines = reservation.lines.iter().zip(positions).map(|(line, at)| {
            let windows = Windows::around(line.window, reservation.asked_at);
            let key = self.counters(line, &windows).into_iter().nth(at).unwrap_or_default();
            let ends = windows.bounds.and_then(|bounds| bounds.get(at + 1).copied());
            let last = windows.bounds.map(|[.., end]| end);
            ChosenCounter { key, ends, last, keep: windows.keep }
        });
        Chosen { rate, minute_ends, counters: lines.collect() }
    }

    /// What all counters begin with.
    fn counter(&self) -> String {
        format!("ledger:{{{}}}:c:", self.0)
    }
}

/// The counters of one call. Times are in ms since the epoch.
struct Chosen {
    rate: String,
    minute_ends: i64,
    counters: Vec<ChosenCounter>,
}

struct ChosenCounter {
    key: String,
    /// When its window ends, if it does.
    ends: Option<i64>,
    /// When the last of the windows ends that could have been chosen.
    last: Option<i64>,
    /// For how long in ms it is kept then.
    keep: i64,
}

fn member(reservation: &Reservation) -> String {
    format!("{} {}", reservation.owner, reservation.request_id.as_uuid())
}

/// All but its cost, which a script writes: the last member.
fn head(event: &UsageEvent) -> Result<Vec<u8>, LedgerError> {
    let free = UsageEvent { cost: NanoUsd::ZERO.into(), ..event.clone() };
    let mut json = serde_json::to_vec(&free).map_err(|e| LedgerError::Unavailable(e.to_string()))?;
    let end = b"0}";
    if !json.ends_with(end) {
        return Err(LedgerError::Unavailable("an event does not end with its cost".to_owned()));
    }
    json.truncate(json.len() - end.len());
    Ok(json)
}

#[expect(clippy::needless_pass_by_value, reason = "numbers are values")]
fn number(n: impl ToString) -> Vec<u8> {
    n.to_string().into_bytes()
}

/// What the closing script is told of an idempotency key.
fn becomes(keyed: Option<&Keyed>, fate: &Fate) -> [Vec<u8>; 6] {
    let Some(Keyed { idempotency, life }) = keyed else { return [const { Vec::new() }; 6] };
    let answer = match fate {
        Fate::Answered(Remembered { answer, .. }) => Some(answer),
        Fate::Forgotten | Fate::Unknown | Fate::Unrecorded => None,
    };
    let [status, content_type, body] = answer.map_or_else(Default::default, |answer| {
        [number(answer.status), answer.content_type.clone().into_bytes(), answer.body.to_vec()]
    });
    let fingerprint = hex(&idempotency.fingerprint).into_bytes();
    [fate.as_str().into(), number(life.as_millis()), fingerprint, status, content_type, body]
}

fn hex(bytes: &[u8; 32]) -> String {
    bytes.iter().fold(String::with_capacity(64), |mut text, byte| {
        text.push_str(&format!("{byte:02x}"));
        text
    })
}

fn maybe(n: Option<u64>) -> Vec<u8> {
    n.map(number).unwrap_or_default()
}

fn millis(text: &str) -> Option<Duration> {
    text.parse().ok().map(Duration::from_millis)
}

/// The answers of `ledger_reserve_v1`.
fn admission(reservation: &Reservation, answer: &[Vec<u8>]) -> Result<Admission, Denied> {
    if let [word, status, content_type, body] = answer
        && word == b"answered"
    {
        return Err(Denied::Repeated(Repeated::Answered(StoredAnswer {
            status: str::from_utf8(status).ok().and_then(|text| text.parse().ok()).unwrap_or(200),
            content_type: String::from_utf8_lossy(content_type).into_owned(),
            body: Bytes::copy_from_slice(body),
        })));
    }
    let answer: Vec<String> = answer.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
    let text: Vec<&str> = answer.iter().map(String::as_str).collect();
    match *text.as_slice() {
        ["ok", windows, requests, tokens, reset] => Ok(Admission {
            windows: windows.bytes().map(|digit| digit.saturating_sub(b'0')).collect(),
            standing: Standing {
                requests_left: requests.parse().ok(),
                tokens_left: tokens.parse().ok(),
                reset: millis(reset).unwrap_or_default(),
            },
        }),
        _ => Err(denied(reservation, reservation.amount, &answer)),
    }
}

/// What is not an "ok", of all scripts that set something aside.
fn denied(reservation: &Reservation, amount: NanoUsd, answer: &[String]) -> Denied {
    let text: Vec<&str> = answer.iter().map(String::as_str).collect();
    let told = match *text.as_slice() {
        ["budget", position, left, reset, held] => {
            let line = position.parse::<usize>().ok().and_then(|at| reservation.lines.get(at));
            line.zip(left.parse().ok()).map(|(line, left)| Denied::Budget {
                name: line.name.clone(),
                left: NanoUsd::new(left),
                held: NanoUsd::new(held.parse().unwrap_or_default()),
                amount,
                reset: millis(reset),
            })
        }
        ["rate", what, left, reset] => left.parse().ok().zip(millis(reset)).map(|(left, reset)| {
            Denied::Rate { what: if what == "requests" { Rate::Requests } else { Rate::Tokens }, left, reset }
        }),
        ["repeated", "open"] => Some(Repeated::InFlight.into()),
        ["repeated", "other"] => Some(Repeated::OtherRequest.into()),
        ["repeated", "unknown"] => Some(Repeated::OutcomeUnknown.into()),
        ["repeated", "unrecorded"] => Some(Repeated::NotReplayable.into()),
        ["busy"] => Some(Denied::Concurrency),
        ["full"] => Some(Denied::StreamFull),
        ["lost"] => Some(LedgerError::Lost.into()),
        ["clock"] => Some(LedgerError::Clock.into()),
        ["closed"] => Some(LedgerError::Closed.into()),
        _ => None,
    };
    told.unwrap_or_else(|| LedgerError::Unavailable(format!("it answered {answer:?}")).into())
}

impl RedisLedger {
    /// A call of `ledger_close_v1`.
    fn closing(&self, closing: &Closing) -> Result<ScriptCall, LedgerError> {
        let Closing { reservation, settled } = closing;
        let keys = Keys(&reservation.workspace_id);
        let mut call = ScriptCall {
            keys: vec![keys.reservation(reservation.request_id), keys.open(), keys.under_way(), keys.usage()],
            args: vec![member(reservation).into_bytes()],
        };
        let Some(Settled { admission, event, attempts, fate }) = settled else {
            call.args.extend([b"void".to_vec(), b"0".to_vec(), b"0".to_vec(), vec![], vec![]]);
            self.life(&mut call);
            call.args.extend(becomes(reservation.idempotency.as_ref(), &Fate::Forgotten));
            call.keys.extend(keys.rates(reservation));
            call.keys.extend(
                reservation.lines.iter().flat_map(|line| {
                    keys.counters(line, &Windows::around(line.window, reservation.asked_at))
                }),
            );
            call.keys.extend(keys.record(reservation));
            return Ok(call);
        };
        let correction = EventId { part: EventPart::Correction, ..event.event_id };
        let correction = UsageEvent { event_id: correction, ..event.clone() };
        let tokens = event.tokens.prompt().saturating_add(event.tokens.completion());
        call.args.extend([b"settle".to_vec(), number(event.cost.nanos()), number(tokens)]);
        call.args.extend([head(event)?, head(&correction)?]);
        self.life(&mut call);
        let keyed = reservation.idempotency.as_ref().filter(|_| fate.is_some());
        call.args.extend(becomes(keyed, fate.as_ref().unwrap_or(&Fate::Unknown)));
        let Chosen { rate, counters, .. } = keys.chosen(reservation, admission);
        call.keys.push(rate);
        for ChosenCounter { key, last, keep, .. } in counters {
            call.keys.push(key);
            let keep = last.map(|last| last - reservation.asked_at.as_millisecond() + keep);
            call.args.push(keep.map(number).unwrap_or_default());
        }
        call.keys.extend(keyed.and_then(|_| keys.record(reservation)));
        for attempt in attempts {
            call.args.push(serde_json::to_vec(attempt).map_err(|e| LedgerError::Unavailable(e.to_string()))?);
        }
        Ok(call)
    }

    fn life(&self, call: &mut ScriptCall) {
        call.args.extend([number(CLOSED.as_millis()), number(ORPHANED.as_millis()), number(self.max_len)]);
    }
}

#[async_trait]
impl Ledger for RedisLedger {
    async fn reserve(&self, reservation: &Reservation, event: &UsageEvent) -> Result<Admission, Denied> {
        self.index(&reservation.workspace_id).await?;
        let keys = Keys(&reservation.workspace_id);
        let mut names =
            vec![keys.meta(), keys.reservation(reservation.request_id), keys.open(), keys.under_way()];
        names.push(keys.usage());
        names.extend(keys.rates(reservation));
        let Reservation { lines, limits, amount, tokens, asked_at, life, .. } = reservation;
        let keyed = reservation.idempotency.as_ref();
        let mut args = vec![
            member(reservation).into_bytes(),
            self.now.map(|now| number(now().as_millisecond())).unwrap_or_default(),
            number(life.as_millis()),
            number(&reservation.principal),
            maybe(limits.concurrency),
            maybe(limits.requests_per_minute),
            maybe(limits.tokens_per_minute),
            number(tokens),
            number(minute(*asked_at)),
            number(amount.nanos()),
            head(event)?,
            keyed.map(|keyed| hex(&keyed.idempotency.fingerprint).into_bytes()).unwrap_or_default(),
            keyed.map(|keyed| number(keyed.life.as_millis())).unwrap_or_default(),
            number(self.max_len),
        ];
        for line in lines {
            let windows = Windows::around(line.window, *asked_at);
            names.extend(keys.counters(line, &windows));
            args.push(number(line.limit.nanos()));
            match windows.bounds {
                Some(bounds) => args.extend(bounds.map(number)),
                None => args.extend([const { Vec::new() }; 4]),
            }
            args.push(number(windows.keep));
        }
        names.extend(keys.record(reservation));
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
        let answer: Vec<Vec<u8>> = self.redis.run(&self.reserve, &names, &args).await.map_err(unavailable)?;
        let admitted = admission(reservation, &answer);
        self.tell(&reservation.workspace_id, matches!(admitted, Err(Denied::StreamFull)));
        admitted
    }

    async fn top_up(
        &self,
        reservation: &Reservation,
        admission: &Admission,
        amount: NanoUsd,
        tokens: u64,
    ) -> Result<(), Denied> {
        let keys = Keys(&reservation.workspace_id);
        let Chosen { rate, minute_ends, counters } = keys.chosen(reservation, admission);
        let mut names = vec![keys.meta(), keys.reservation(reservation.request_id), rate];
        let mut args = vec![
            self.now.map(|now| number(now().as_millisecond())).unwrap_or_default(),
            number(amount.nanos()),
            number(tokens),
            maybe(reservation.limits.tokens_per_minute),
            number(minute_ends),
        ];
        for (line, ChosenCounter { key, ends, keep, .. }) in reservation.lines.iter().zip(counters) {
            names.push(key);
            args.extend([number(line.limit.nanos()), ends.map(number).unwrap_or_default(), number(keep)]);
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
        let answer: Vec<String> = self.redis.run(&self.top_up, &names, &args).await.map_err(unavailable)?;
        match answer.as_slice() {
            [ok] if ok == "ok" => Ok(()),
            _ => Err(denied(reservation, amount, &answer)),
        }
    }

    async fn close(&self, closings: &[Closing]) -> Result<(), CloseError> {
        let unavailable = |reason: String| CloseError::Unavailable { reason };
        let calls: Result<Vec<ScriptCall>, LedgerError> =
            closings.iter().map(|closing| self.closing(closing)).collect();
        let calls = calls.map_err(|e| unavailable(e.to_string()))?;
        let mut answers = Vec::with_capacity(calls.len());
        let mut bytes = 0_usize;
        let same_flight = |_: &ScriptCall, next: &ScriptCall| {
            let more = next.args.iter().map(Vec::len).sum::<usize>();
            let fits = bytes.saturating_add(more) <= FLIGHT;
            bytes = if fits { bytes + more } else { more };
            fits
        };
        for calls in calls.chunk_by(same_flight) {
            let flight = self.redis.run_many::<String>(&self.close, calls).await;
            answers.extend(flight.map_err(|e| unavailable(e.to_string()))?);
        }
        let (mut refused, mut first) = (Vec::new(), None);
        for (position, (answer, closing)) in answers.into_iter().zip(closings).enumerate() {
            match answer.as_deref() {
                Ok("lost") => {
                    let id = closing.reservation.request_id;
                    tracing::warn!(request_id = %id, "reservation was lost, its call was settled without it");
                }
                Ok(_) => {}
                Err(why) => {
                    first.get_or_insert_with(|| why.to_string());
                    refused.push(position);
                }
            }
        }
        match first {
            None => Ok(()),
            Some(reason) => Err(CloseError::Refused { refused, reason }),
        }
    }

    async fn known(&self, closings: &[Closing]) -> Result<Vec<bool>, LedgerError> {
        let mut pipe = redis::Pipeline::with_capacity(closings.len());
        for Closing { reservation, .. } in closings {
            pipe.cmd("EXISTS").arg(Keys(&reservation.workspace_id).reservation(reservation.request_id));
        }
        self.redis.pipeline(&pipe).await.map_err(unavailable)
    }

    async fn workspaces(&self) -> Result<Vec<WorkspaceId>, LedgerError> {
        let mut pipe = redis::Pipeline::with_capacity(2);
        let mine: Vec<WorkspaceId> = self.indexed.lock().iter().cloned().collect();
        if !mine.is_empty() {
            // Redis may have lost it.
            let mine: Vec<&str> = mine.iter().map(WorkspaceId::as_str).collect();
            pipe.cmd("SADD").arg(INDEX).arg(mine).ignore();
        }
        pipe.cmd("SMEMBERS").arg(INDEX);
        let (found,): (Vec<String>,) = self.redis.pipeline(&pipe).await.map_err(unavailable)?;
        Ok(found.iter().filter_map(|id| id.parse().ok()).collect())
    }

    async fn open(
        &self,
        workspace_id: &WorkspaceId,
        young: Duration,
        limit: usize,
    ) -> Result<Vec<Open>, LedgerError> {
        let keys = Keys(workspace_id);
        let mut pipe = redis::Pipeline::with_capacity(2);
        let end = limit.saturating_sub(1);
        pipe.cmd("TIME").cmd("ZRANGE").arg(keys.open()).arg(0).arg(end).arg("WITHSCORES");
        let ((seconds, micros), found): ((u64, u64), Vec<(String, f64)>) =
            self.redis.pipeline(&pipe).await.map_err(unavailable)?;
        let now = seconds.saturating_mul(1000).saturating_add(micros / 1000);
        let parsed: Vec<(Open, String)> = found
            .into_iter()
            .filter_map(|(member, due)| {
                let (owner, id) = member.split_once(' ')?;
                let request_id = RequestId::from_uuid(id)?;
                #[expect(clippy::cast_precision_loss, reason = "ms since the epoch are far below 2^52")]
                let overdue = due <= now as f64;
                Some((Open { owner: owner.parse().ok()?, request_id, overdue }, member))
            })
            .collect();
        if parsed.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = redis::Pipeline::with_capacity(parsed.len());
        for (open, _) in &parsed {
            pipe.cmd("HGET").arg(keys.reservation(open.request_id)).arg("at");
        }
        let ages: Vec<Option<u64>> = self.redis.pipeline(&pipe).await.map_err(unavailable)?;
        let young = u64::try_from(young.as_millis()).unwrap_or(u64::MAX);
        let old = |at: Option<u64>| at.is_none_or(|at| at.saturating_add(young) <= now);
        let found = parsed.into_iter().zip(ages);
        Ok(found.filter(|((open, _), at)| open.overdue || old(*at)).map(|((open, _), _)| open).collect())
    }

    async fn orphan(&self, workspace_id: &WorkspaceId, orphans: &[Open]) -> Result<usize, LedgerError> {
        let keys = Keys(workspace_id);
        let mut pipe = redis::Pipeline::with_capacity(orphans.len());
        for orphan in orphans {
            let fields = ["rate", "counters", "record"];
            pipe.cmd("HMGET").arg(keys.reservation(orphan.request_id)).arg(&fields);
        }
        if orphans.is_empty() {
            return Ok(0);
        }
        let found: Vec<(Option<String>, Option<String>, Option<String>)> =
            self.redis.pipeline(&pipe).await.map_err(unavailable)?;
        let calls = orphans.iter().zip(found).map(|(orphan, (rate, counters, record))| {
            // Without a reservation there is only its place among the open ones to be taken away.
            let counters: Vec<String> =
                counters.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
            let mut call = ScriptCall {
                keys: vec![
                    keys.reservation(orphan.request_id),
                    keys.open(),
                    keys.under_way(),
                    keys.usage(),
                    rate.unwrap_or_else(|| keys.meta()),
                ],
                args: vec![
                    format!("{} {}", orphan.owner, orphan.request_id.as_uuid()).into_bytes(),
                    b"orphan".to_vec(),
                    b"0".to_vec(),
                    b"0".to_vec(),
                    vec![],
                    vec![],
                ],
            };
            self.life(&mut call);
            let fate = record.as_ref().map(|_| Fate::Unknown.as_str().as_bytes().to_vec());
            call.args.push(fate.unwrap_or_default());
            call.args.extend([const { Vec::new() }; 5]);
            call.args.extend(counters.iter().map(|_| Vec::new()));
            call.keys.extend(counters);
            call.keys.extend(record);
            call
        });
        let calls: Vec<ScriptCall> = calls.collect();
        let answers = self.redis.run_many::<String>(&self.close, &calls).await.map_err(unavailable)?;
        let mut booked = 0;
        for answer in answers {
            match answer {
                Ok(done) => booked += usize::from(done == "orphaned"),
                Err(e) => return Err(unavailable(e)),
            }
        }
        Ok(booked)
    }

    async fn audit(&self, workspace_id: &WorkspaceId) -> Result<Vec<Audited>, LedgerError> {
        let keys = Keys(workspace_id);
        let prefix = keys.counter();
        // What of a key is special in a pattern stands behind the prefix only.
        let mut names = self.redis.scan(&format!("{prefix}*"), MOST_COUNTERS).await.map_err(unavailable)?;
        names.sort();
        let mut pipe = redis::Pipeline::with_capacity(names.len() + 1);
        pipe.cmd("ZRANGE").arg(keys.open()).arg(0).arg(-1);
        for name in &names {
            pipe.cmd("HMGET").arg(name).arg("settled").arg("reserved");
        }
        let mut answers: Vec<Vec<Option<String>>> = self.redis.pipeline(&pipe).await.map_err(unavailable)?;
        let members = if answers.is_empty() { Vec::new() } else { answers.remove(0) };
        let mut pipe = redis::Pipeline::with_capacity(members.len());
        for member in members.iter().flatten() {
            let id = member.split_once(' ').and_then(|(_, id)| RequestId::from_uuid(id));
            let Some(id) = id else { continue };
            pipe.cmd("HMGET").arg(keys.reservation(id)).arg("amount").arg("counters");
        }
        let mut open: HashMap<String, i64> = HashMap::new();
        if !pipe.is_empty() {
            let found: Vec<(Option<i64>, Option<String>)> =
                self.redis.pipeline(&pipe).await.map_err(unavailable)?;
            for (amount, counters) in found {
                let counters: Vec<String> =
                    counters.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
                for counter in counters {
                    *open.entry(counter).or_default() += amount.unwrap_or_default();
                }
            }
        }
        let number = |text: Option<&Option<String>>| {
            text.and_then(|text| text.as_ref()?.parse().ok()).unwrap_or_default()
        };
        let audited = names.into_iter().zip(answers).map(|(name, values)| Audited {
            settled: number(values.first()),
            reserved: number(values.get(1)),
            open: open.get(&name).copied().unwrap_or_default(),
            counter: name.strip_prefix(&prefix).unwrap_or(&name).to_owned(),
        });
        Ok(audited.collect())
    }
}
