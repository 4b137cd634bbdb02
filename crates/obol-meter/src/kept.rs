//! A closing as a line of a file: what other releases read has a version and names of its own.

use std::time::Duration;

use jiff::Timestamp;
use obol_model::{Limits, NanoUsd, Principal, ReplicaId, RequestId, UsageEvent, Window, WorkspaceId};
use serde::{Deserialize, Serialize};

use crate::idempotency::{Fate, Idempotency, Keyed};
use crate::ledger::{Admission, Closing, Counter, Line, Reservation, Settled, Standing};

/// The version that this release writes.
const VERSION: u32 = 1;

/// A closing, and how far it had come.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Kept {
    version: u32,
    /// When it was kept.
    pub(crate) at: Timestamp,
    /// Whether it was sent before, so that it may have taken effect.
    pub(crate) sent: bool,
    workspace_id: WorkspaceId,
    request_id: RequestId,
    owner: ReplicaId,
    principal: Principal,
    lines: Vec<KeptLine>,
    limits: Limits,
    amount: NanoUsd,
    tokens: u64,
    asked_at: Timestamp,
    life_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    idempotency: Option<KeptKey>,
    /// `None` for a call that was never made.
    settled: Option<KeptSettled>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeptLine {
    name: String,
    counter: String,
    window: Window,
    limit: NanoUsd,
}

/// Its answer is not kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeptKey {
    key: [u8; 32],
    fingerprint: [u8; 32],
    life_ms: u64,
    fate: KeptFate,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KeptFate {
    Forgotten,
    Unknown,
    Unrecorded,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeptSettled {
    windows: Vec<u8>,
    event: UsageEvent,
    #[serde(default)]
    attempts: Vec<UsageEvent>,
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Why a line is no closing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// A later release has written it.
    Newer,
    /// For this reason.
    Damaged(String),
}

impl Kept {
    pub(crate) fn new(closing: Closing, at: Timestamp, sent: bool) -> Self {
        let Closing { reservation, settled } = closing;
        let Reservation { workspace_id, request_id, owner, principal, lines, limits, .. } = reservation;
        let Reservation { amount, tokens, asked_at, life, idempotency, .. } = reservation;
        let fate = settled.as_ref().and_then(|settled| settled.fate.as_ref());
        let idempotency = idempotency.map(|Keyed { idempotency, life }| KeptKey {
            key: idempotency.key,
            fingerprint: idempotency.fingerprint,
            life_ms: ms(life),
            fate: match fate {
                None | Some(Fate::Forgotten) => KeptFate::Forgotten,
                Some(Fate::Unknown) => KeptFate::Unknown,
                Some(Fate::Answered(_) | Fate::Unrecorded) => KeptFate::Unrecorded,
            },
        });
        let line = |Line { name, counter, window, limit }: Line| {
            let counter = counter.as_str().to_owned();
            KeptLine { name, counter, window, limit }
        };
        Self {
            version: VERSION,
            at,
            sent,
            workspace_id,
            request_id,
            owner,
            principal,
            lines: lines.into_iter().map(line).collect(),
            limits,
            amount,
            tokens,
            asked_at,
            life_ms: ms(life),
            idempotency,
            settled: settled.map(|Settled { admission, event, attempts, .. }| KeptSettled {
                windows: admission.windows,
                event,
                attempts,
            }),
        }
    }

    /// Whether closing it books something.
    pub(crate) fn books(&self) -> bool {
        self.settled.is_some()
    }

    pub(crate) fn closing(&self) -> Closing {
        let kept = self.clone();
        let line = |KeptLine { name, counter, window, limit }| {
            let counter = Counter::from_text(counter);
            Line { name, counter, window, limit }
        };
        let reservation = Reservation {
            workspace_id: kept.workspace_id,
            request_id: kept.request_id,
            owner: kept.owner,
            principal: kept.principal,
            lines: kept.lines.into_iter().map(line).collect(),
            limits: kept.limits,
            amount: kept.amount,
            tokens: kept.tokens,
            asked_at: kept.asked_at,
            life: Duration::from_millis(kept.life_ms),
            idempotency: kept.idempotency.as_ref().map(|kept| Keyed {
                idempotency: Idempotency { key: kept.key, fingerprint: kept.fingerprint },
                life: Duration::from_millis(kept.life_ms),
            }),
        };
        let fate = kept.idempotency.map(|kept| match kept.fate {
            KeptFate::Forgotten => Fate::Forgotten,
            KeptFate::Unknown => Fate::Unknown,
            KeptFate::Unrecorded => Fate::Unrecorded,
        });
        let settled = kept.settled.map(|KeptSettled { windows, event, attempts }| Settled {
            admission: Admission { windows, standing: Standing::default() },
            event,
            attempts,
            fate,
        });
        Closing { reservation, settled }
    }

    pub(crate) fn read(line: &[u8]) -> Result<Self, Unread> {
        let damaged = |e: serde_json::Error| Unread::Damaged(format!("it is no closing: {e}"));
        let Versioned { version } = serde_json::from_slice(line).map_err(damaged)?;
        if version > VERSION {
            return Err(Unread::Newer);
        }
        let kept: Self = serde_json::from_slice(line).map_err(damaged)?;
        // One digit for the minute and one for each budget, or it would be booked elsewhere.
        let chosen = |settled: &KeptSettled| {
            settled.windows.len() == kept.lines.len() + 1 && settled.windows.iter().all(|digit| *digit < 3)
        };
        if kept.settled.as_ref().is_none_or(chosen) {
            Ok(kept)
        } else {
            Err(Unread::Damaged("its windows are not those of its budgets".to_owned()))
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As this release writes it, in one line.
    const GOLDEN: &str = r#"{"version":1,"at":"2026-01-02T03:04:06Z","sent":true,"workspace_id":"acme","request_id":"019b7e2f-4f0a-7000-8000-000000000001","owner":"r-0123456789ab","principal":{"key":"k1"},"lines":[{"name":"all","counter":"workspace","window":"day","limit":100}],"limits":{"concurrency":2},"amount":9,"tokens":7,"asked_at":"2026-01-02T03:04:05Z","life_ms":600000,"settled":{"windows":[1,0],"event":{"schema_version":2,"event_id":"019b7e2f-4f0a-7000-8000-000000000001","workspace_id":"acme","key_id":"k1","replica":"r-0123456789ab","revision":{"epoch":1,"number":7},"kind":"tool_call","connection":"git","tool":"search","outcome":"ok","started_at":"2026-01-02T03:04:05Z","duration_ms":12,"tokens":{"input":0,"cached_input":0,"cache_write":0,"audio_input":0,"output":0,"reasoning":0,"audio_output":0},"estimated":false,"overrun":false,"reserved":9,"cost":4},"attempts":[]}}"#;

    #[test]
    fn a_line_is_read_back_as_it_was_written() {
        let kept = Kept::read(GOLDEN.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string(&kept).unwrap(), GOLDEN);
        let again = Kept::new(kept.closing(), kept.at, kept.sent);
        assert_eq!(serde_json::to_string(&again).unwrap(), GOLDEN);
        let never = GOLDEN.split_once(r#","settled""#).unwrap().0.to_owned() + r#","settled":null}"#;
        assert!(!Kept::read(never.as_bytes()).unwrap().books());
    }

    #[test]
    fn of_an_answer_that_was_to_be_given_again_it_is_known_that_it_is_gone() {
        let mut closing = Kept::read(GOLDEN.as_bytes()).unwrap().closing();
        let idempotency = Idempotency { key: [1; 32], fingerprint: [2; 32] };
        closing.reservation.idempotency = Some(Keyed { idempotency, life: Duration::from_mins(15) });
        for (fate, kept) in [
            (Fate::Forgotten, "forgotten"),
            (Fate::Unknown, "unknown"),
            (Fate::Unrecorded, "unrecorded"),
            (Fate::answered(b"{}"), "unrecorded"),
        ] {
            closing.settled.as_mut().unwrap().fate = Some(fate);
            let line = serde_json::to_vec(&Kept::new(closing.clone(), Timestamp::UNIX_EPOCH, false)).unwrap();
            let again = Kept::read(&line).unwrap().closing();
            assert_eq!(again.reservation.idempotency, closing.reservation.idempotency);
            assert_eq!(again.settled.unwrap().fate.unwrap().as_str(), kept);
        }
        closing.settled = None;
        let never = Kept::new(closing, Timestamp::UNIX_EPOCH, false).closing();
        assert!(never.reservation.idempotency.is_some(), "its key is given back");
    }

    #[test]
    fn lines_that_are_none_say_why() {
        assert_eq!(
            Kept::read(GOLDEN.replace(r#""version":1"#, r#""version":2"#).as_bytes()).unwrap_err(),
            Unread::Newer
        );
        for bad in [
            &GOLDEN[..GOLDEN.len() - 9],
            "",
            "{}",
            &GOLDEN.replace("[1,0]", "[1]"),
            &GOLDEN.replace("[1,0]", "[1,3]"),
        ] {
            assert!(matches!(Kept::read(bad.as_bytes()), Err(Unread::Damaged(_))), "{bad}");
        }
    }
}
