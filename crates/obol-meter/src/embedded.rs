use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use obol_model::{
    Clock, EventId, EventPart, NanoUsd, Outcome, RequestId, SignedNanoUsd, UsageEvent, WorkspaceId,
};
use parking_lot::Mutex;

use crate::idempotency::{Fate, Keyed, Remembered, Repeated};
use crate::ledger::{
    Admission, Audited, CloseError, Closing, Denied, Ledger, LedgerError, Line, Open, Rate, Reservation,
    Standing,
};
use crate::windows::{MINUTE, Windows, minute};

/// A ledger in memory, for a single process: state and events end with it, and only the newest events are kept.
#[derive(Debug)]
pub struct EmbeddedLedger {
    clock: Arc<dyn Clock>,
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    accounts: BTreeMap<WorkspaceId, Account>,
    events: VecDeque<UsageEvent>,
}

#[derive(Debug, Default)]
struct Account {
    counters: BTreeMap<String, Spent>,
    under_way: HashMap<String, u64>,
    /// By whom and in which minute.
    rates: HashMap<(String, i64), (u64, u64)>,
    calls: HashMap<RequestId, Call>,
    records: HashMap<RecordKey, Record>,
}

/// Whose key, and which.
type RecordKey = (String, [u8; 32]);

/// What is known of an idempotency key.
#[derive(Debug)]
struct Record {
    fingerprint: [u8; 32],
    call: RequestId,
    until: i64,
    /// `None` while its call is under way.
    fate: Option<Fate>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Spent {
    settled: i64,
    reserved: i64,
}

#[derive(Debug)]
enum Call {
    Open {
        reservation: Box<Reservation>,
        counters: Vec<String>,
        minute: i64,
        due: i64,
        at: i64,
        event: Box<UsageEvent>,
    },
    Orphaned {
        amount: NanoUsd,
    },
    Closed,
}

impl EmbeddedLedger {
    /// Keeps the newest `capacity` events of all workspaces together; older ones are forgotten.
    pub fn new(clock: Arc<dyn Clock>, capacity: usize) -> Self {
        Self { clock, capacity, state: Mutex::default() }
    }

    /// The events that are kept, oldest first.
    pub fn events(&self) -> Vec<UsageEvent> {
        self.state.lock().events.iter().cloned().collect()
    }

    fn write(&self, state: &mut State, event: UsageEvent) {
        state.events.push_back(event);
        let excess = state.events.len().saturating_sub(self.capacity);
        state.events.drain(..excess);
    }

    fn now(&self) -> i64 {
        self.clock.now().as_millisecond()
    }
}

impl Spent {
    fn left(self, line: &Line) -> i64 {
        nanos(line.limit) - self.settled - self.reserved
    }

    fn no_room(self, line: &Line, amount: NanoUsd, reset: Option<Duration>) -> Denied {
        Denied::Budget {
            name: line.name.clone(),
            left: NanoUsd::new(u64::try_from(self.left(line)).unwrap_or_default()),
            held: NanoUsd::new(u64::try_from(self.reserved).unwrap_or_default()),
            amount,
            reset,
        }
    }
}

impl Account {
    /// What stands in the way of a call with an idempotency key.
    fn before(&mut self, reservation: &Reservation, now: i64) -> Option<Repeated> {
        let (key, keyed) = record_key(reservation)?;
        self.records.retain(|_, record| record.until > now);
        let record = self.records.get(&key)?;
        if record.fingerprint != keyed.idempotency.fingerprint {
            return Some(Repeated::OtherRequest);
        }
        Some(match &record.fate {
            None => Repeated::InFlight,
            Some(Fate::Answered(Remembered { answer, .. })) => Repeated::Answered(answer.clone()),
            Some(Fate::Unrecorded) => Repeated::NotReplayable,
            Some(Fate::Unknown | Fate::Forgotten) => Repeated::OutcomeUnknown,
        })
    }

    /// The key is another call's once its own time is over.
    fn remember(&mut self, reservation: &Reservation, fate: Option<Fate>, now: i64) {
        let Some((key, keyed)) = record_key(reservation) else { return };
        let call = reservation.request_id;
        if self.records.get(&key).is_some_and(|record| record.call != call) {
            return;
        }
        if let Some(Fate::Forgotten) = fate {
            self.records.remove(&key);
            return;
        }
        let life = i64::try_from(keyed.life.as_millis()).unwrap_or(i64::MAX);
        let until = now.saturating_add(life);
        let record = Record { fingerprint: keyed.idempotency.fingerprint, call, until, fate };
        self.records.insert(key, record);
    }

    fn book(&mut self, counters: &[String], by: i64) {
        for counter in counters {
            self.counters.entry(counter.clone()).or_default().settled += by;
        }
    }

    /// What was set aside, and the place among those under way; without tokens the call was never made, though asked for.
    fn release(&mut self, reservation: &Reservation, counters: &[String], minute: i64, tokens: Option<u64>) {
        for counter in counters {
            self.counters.entry(counter.clone()).or_default().reserved -= nanos(reservation.amount);
        }
        let who = reservation.principal.to_string();
        if let Some(count) = self.under_way.get_mut(&who) {
            *count = count.saturating_sub(1);
        }
        if let Some((_, used)) = self.rates.get_mut(&(who, minute)) {
            *used = used.saturating_add(tokens.unwrap_or(0)).saturating_sub(reservation.tokens);
        }
    }
}

fn record_key(reservation: &Reservation) -> Option<(RecordKey, &Keyed)> {
    let keyed = reservation.idempotency.as_ref()?;
    Some(((reservation.principal.to_string(), keyed.idempotency.key), keyed))
}

/// A top-up may have raised what was set aside since the event was written.
fn with_reserved(event: &UsageEvent, reserved: NanoUsd) -> UsageEvent {
    UsageEvent { reserved, overrun: event.cost.nanos() > nanos(reserved), ..event.clone() }
}

fn nanos(amount: NanoUsd) -> i64 {
    SignedNanoUsd::from(amount).nanos()
}

fn ms(n: i64) -> Duration {
    Duration::from_millis(u64::try_from(n).unwrap_or_default())
}

#[async_trait]
impl Ledger for EmbeddedLedger {
    async fn reserve(&self, reservation: &Reservation, event: &UsageEvent) -> Result<Admission, Denied> {
        let now = self.now();
        let mut state = self.state.lock();
        let account = state.accounts.entry(reservation.workspace_id.clone()).or_default();
        let this = minute(self.clock.now());
        let reset = ms(this + MINUTE - now);
        let Reservation { limits, tokens, amount, principal, .. } = reservation;
        let windows = vec![1; reservation.lines.len() + 1];
        match account.calls.get(&reservation.request_id) {
            Some(Call::Open { .. }) => {
                return Ok(Admission { windows, standing: Standing { reset, ..Standing::default() } });
            }
            Some(Call::Orphaned { .. } | Call::Closed) => return Err(LedgerError::Closed.into()),
            None => {}
        }
        if let Some(repeated) = account.before(reservation, now) {
            return Err(repeated.into());
        }
        let who = principal.to_string();
        let under_way = account.under_way.get(&who).copied().unwrap_or_default();
        if limits.concurrency.is_some_and(|most| under_way >= most) {
            return Err(Denied::Concurrency);
        }
        account.rates.retain(|(_, at), _| *at >= this - MINUTE);
        let (requests, used) = account.rates.get(&(who.clone(), this)).copied().unwrap_or_default();
        let requests_left = limits.requests_per_minute.map(|most| most.saturating_sub(requests));
        if requests_left == Some(0) {
            return Err(Denied::Rate { what: Rate::Requests, left: 0, reset });
        }
        let tokens_left = limits.tokens_per_minute.map(|most| most.saturating_sub(used));
        if let Some(left) = tokens_left.filter(|left| left < tokens && *tokens > 0) {
            return Err(Denied::Rate { what: Rate::Tokens, left, reset });
        }
        let mut counters = Vec::with_capacity(reservation.lines.len());
        for line in &reservation.lines {
            let windows = Windows::around(line.window, self.clock.now());
            let [_, current, _] = &windows.names;
            let counter = format!("{}:{current}", line.counter.as_str());
            let spent = account.counters.get(&counter).copied().unwrap_or_default();
            if nanos(*amount) > spent.left(line).max(0) {
                return Err(spent.no_room(
                    line,
                    *amount,
                    windows.bounds.map(|[_, _, next, _]| ms(next - now)),
                ));
            }
            counters.push(counter);
        }
        for counter in &counters {
            account.counters.entry(counter.clone()).or_default().reserved += nanos(*amount);
        }
        *account.under_way.entry(who.clone()).or_default() += 1;
        let rate = account.rates.entry((who, this)).or_default();
        *rate = (rate.0.saturating_add(1), rate.1.saturating_add(*tokens));
        let due = now.saturating_add(i64::try_from(reservation.life.as_millis()).unwrap_or(i64::MAX));
        let call = Call::Open {
            reservation: Box::new(reservation.clone()),
            counters,
            minute: this,
            due,
            at: now,
            event: Box::new(event.clone()),
        };
        account.calls.insert(reservation.request_id, call);
        account.remember(reservation, None, now);
        let standing = Standing {
            requests_left: requests_left.map(|left| left - 1),
            tokens_left: tokens_left.map(|left| left.saturating_sub(*tokens)),
            reset,
        };
        Ok(Admission { windows, standing })
    }

    async fn top_up(
        &self,
        asked: &Reservation,
        _: &Admission,
        amount: NanoUsd,
        tokens: u64,
    ) -> Result<(), Denied> {
        let now = self.now();
        let mut state = self.state.lock();
        let account = state.accounts.entry(asked.workspace_id.clone()).or_default();
        let Account { calls, counters: spent, rates, .. } = account;
        let Some(Call::Open { reservation, counters, minute, .. }) = calls.get_mut(&asked.request_id) else {
            return Err(LedgerError::Closed.into());
        };
        let more = nanos(amount).saturating_sub(nanos(reservation.amount)).max(0);
        let more_tokens = tokens.saturating_sub(reservation.tokens);
        let rate = rates.get_mut(&(reservation.principal.to_string(), *minute));
        let used = rate.as_ref().map_or(0, |(_, used)| *used);
        let left = reservation.limits.tokens_per_minute.map(|most| most.saturating_sub(used));
        if let Some(left) = left.filter(|left| more_tokens > 0 && *left < more_tokens) {
            return Err(Denied::Rate { what: Rate::Tokens, left, reset: ms(*minute + MINUTE - now) });
        }
        for (line, counter) in reservation.lines.iter().zip(counters.iter()) {
            let spent = spent.get(counter).copied().unwrap_or_default();
            if more > spent.left(line).max(0) {
                let windows = Windows::around(line.window, reservation.asked_at);
                return Err(spent.no_room(
                    line,
                    amount,
                    windows.bounds.map(|[_, _, next, _]| ms(next - now)),
                ));
            }
        }
        for counter in counters.iter() {
            spent.entry(counter.clone()).or_default().reserved += more;
        }
        if let Some((_, used)) = rate {
            *used = used.saturating_add(more_tokens);
        }
        reservation.amount = reservation.amount.max(amount);
        reservation.tokens = reservation.tokens.max(tokens);
        Ok(())
    }

    async fn close(&self, closings: &[Closing]) -> Result<(), CloseError> {
        let now = self.now();
        let mut state = self.state.lock();
        for Closing { reservation, settled } in closings {
            let id = reservation.request_id;
            let account = state.accounts.entry(reservation.workspace_id.clone()).or_default();
            let before = account.calls.insert(id, Call::Closed);
            match (&before, settled) {
                (Some(Call::Closed), _) | (Some(Call::Orphaned { .. }), None) => {}
                (_, None) => account.remember(reservation, Some(Fate::Forgotten), now),
                (_, Some(settled)) => account.remember(reservation, settled.fate.clone(), now),
            }
            let event = match (before, settled) {
                (Some(Call::Open { reservation, counters, minute, .. }), settled) => {
                    let tokens = settled
                        .as_ref()
                        .map(|s| s.event.tokens.prompt().saturating_add(s.event.tokens.completion()));
                    account.release(&reservation, &counters, minute, tokens);
                    settled.as_ref().map(|settled| {
                        account.book(&counters, settled.event.cost.nanos());
                        with_reserved(&settled.event, reservation.amount)
                    })
                }
                (Some(Call::Orphaned { amount }), Some(settled)) => {
                    let by = SignedNanoUsd::new(settled.event.cost.nanos() - nanos(amount));
                    let lines = reservation.lines.iter().map(|line| {
                        let [_, current, _] = Windows::around(line.window, reservation.asked_at).names;
                        format!("{}:{current}", line.counter.as_str())
                    });
                    account.book(&lines.collect::<Vec<_>>(), by.nanos());
                    let event_id = EventId { part: EventPart::Correction, ..settled.event.event_id };
                    Some(UsageEvent { event_id, cost: by, ..with_reserved(&settled.event, amount) })
                }
                (None, Some(settled)) => Some(settled.event.clone()),
                (Some(Call::Closed), _) | (Some(Call::Orphaned { .. }) | None, None) => None,
            };
            if let (Some(event), Some(settled)) = (event, settled) {
                self.write(&mut state, event);
                for attempt in &settled.attempts {
                    self.write(&mut state, attempt.clone());
                }
            }
        }
        // Nobody else can repeat a flight here, so what is closed need not be known for long.
        for account in state.accounts.values_mut() {
            if account.calls.len() > self.capacity {
                account.calls.retain(|_, call| matches!(call, Call::Open { .. }));
            }
        }
        Ok(())
    }

    async fn known(&self, closings: &[Closing]) -> Result<Vec<bool>, LedgerError> {
        let state = self.state.lock();
        let known = closings.iter().map(|Closing { reservation, .. }| {
            let account = state.accounts.get(&reservation.workspace_id);
            account.is_some_and(|account| account.calls.contains_key(&reservation.request_id))
        });
        Ok(known.collect())
    }

    async fn workspaces(&self) -> Result<Vec<WorkspaceId>, LedgerError> {
        Ok(self.state.lock().accounts.keys().cloned().collect())
    }

    async fn open(
        &self,
        workspace_id: &WorkspaceId,
        young: Duration,
        limit: usize,
    ) -> Result<Vec<Open>, LedgerError> {
        let now = self.now();
        let state = self.state.lock();
        let calls = state.accounts.get(workspace_id).map(|account| &account.calls);
        let young = i64::try_from(young.as_millis()).unwrap_or(i64::MAX);
        let mut found: Vec<(i64, Open)> = calls
            .into_iter()
            .flatten()
            .filter_map(|(id, call)| match call {
                Call::Open { reservation, due, at, .. } if *due <= now || at.saturating_add(young) <= now => {
                    let owner = reservation.owner.clone();
                    Some((*due, Open { owner, request_id: *id, overdue: *due <= now }))
                }
                Call::Open { .. } | Call::Orphaned { .. } | Call::Closed => None,
            })
            .collect();
        found.sort_by_key(|(due, _)| *due);
        Ok(found.into_iter().take(limit).map(|(_, open)| open).collect())
    }

    async fn orphan(&self, workspace_id: &WorkspaceId, orphans: &[Open]) -> Result<usize, LedgerError> {
        let now = self.now();
        let mut state = self.state.lock();
        let mut events = Vec::new();
        if let Some(account) = state.accounts.get_mut(workspace_id) {
            for orphan in orphans {
                let Some(call) = account.calls.remove(&orphan.request_id) else { continue };
                let Call::Open { reservation, counters, minute, event, .. } = call else {
                    account.calls.insert(orphan.request_id, call);
                    continue;
                };
                let amount = reservation.amount;
                account.remember(&reservation, Some(Fate::Unknown), now);
                account.release(&reservation, &counters, minute, Some(reservation.tokens));
                account.book(&counters, nanos(amount));
                account.calls.insert(orphan.request_id, Call::Orphaned { amount });
                let event = UsageEvent { outcome: Outcome::Orphaned, cost: amount.into(), ..*event };
                events.push(with_reserved(&event, amount));
            }
        }
        let booked = events.len();
        for event in events {
            self.write(&mut state, event);
        }
        Ok(booked)
    }

    async fn audit(&self, workspace_id: &WorkspaceId) -> Result<Vec<Audited>, LedgerError> {
        let state = self.state.lock();
        let Some(account) = state.accounts.get(workspace_id) else { return Ok(Vec::new()) };
        let open = |name: &String| {
            let calls = account.calls.values().filter_map(|call| match call {
                Call::Open { reservation, counters, .. } if counters.contains(name) => {
                    Some(nanos(reservation.amount))
                }
                Call::Open { .. } | Call::Orphaned { .. } | Call::Closed => None,
            });
            calls.sum()
        };
        let audited = account.counters.iter().map(|(name, spent)| Audited {
            counter: name.clone(),
            settled: spent.settled,
            reserved: spent.reserved,
            open: open(name),
        });
        Ok(audited.collect())
    }
}
