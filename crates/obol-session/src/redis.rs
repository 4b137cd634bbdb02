use std::time::Duration;

use ::redis::{Cmd, Pipeline};
use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::SessionId;
use obol_model::snapshot::SessionBinding;
use obol_redis::{Redis, RedisError, Script};

use crate::store::{Caller, Lookup, Owner, SessionStore, slack};
use crate::{SessionError, SessionRecord};

/// Sessions that all replicas of one Redis share.
///
/// A session and its place lie in different slots, so they cannot change in one step: the place is taken first, and
/// renewed and given back after the session. The session's hash says until when the place lasts, so that the script that
/// renews the session knows whether the place has to be renewed as well; all times that decide are Redis's own.
#[derive(Debug)]
pub struct RedisSessions {
    redis: Redis,
    create: Script,
    resume: Script,
    save: Script,
    delete: Script,
    place: Script,
}

/// The places of all owners, to count the sessions of the whole installation.
const ALL: &str = "sess-live";

/// How long a place is kept for a session that is being created: longer than its creator waits for Redis, and short
/// enough that creations that an outage cut off do not use up the owner's places.
const PENDING: Duration = Duration::from_secs(10);

/// First number of the scripts' answers.
const ABSENT: i64 = 0;
const DONE: i64 = 1;
const CONFLICT: i64 = 2;
const FOREIGN_WORKSPACE: i64 = 2;
const FOREIGN_PRINCIPAL: i64 = 3;
const DAMAGED: i64 = 4;

/// The most bytes of a record that are read. A later release may write more than this one does, within reason.
const MOST: &[u8] = b"1048576";

impl RedisSessions {
    /// A store in this Redis.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            create: Script::new("session_create_v1", include_str!("scripts/session_create_v1.lua")),
            resume: Script::new("session_resume_v2", include_str!("scripts/session_resume_v2.lua")),
            save: Script::new("session_save_v2", include_str!("scripts/session_save_v2.lua")),
            delete: Script::new("session_delete_v2", include_str!("scripts/session_delete_v2.lua")),
            place: Script::new("session_place_v2", include_str!("scripts/session_place_v2.lua")),
        }
    }

    /// `field` of the session, its revision, and until when its place has to last now, if it has to be renewed.
    async fn resumed(
        &self,
        id: &str,
        caller: &Caller<'_>,
        now: Timestamp,
        life: Duration,
        field: &str,
    ) -> Result<Lookup<(Vec<u8>, u64, i64)>, SessionError> {
        let principal = caller.principal.to_string();
        let (seen, lasts) = (now.as_millisecond().to_string(), millis(life));
        let shares = match caller.binding {
            SessionBinding::Principal => b"0",
            SessionBinding::Workspace => b"1",
        };
        let args = [
            caller.workspace_id.as_str().as_bytes(),
            principal.as_bytes(),
            shares,
            seen.as_bytes(),
            lasts.as_bytes(),
            field.as_bytes(),
            MOST,
        ];
        let (status, bytes, rev, place): (i64, Vec<u8>, u64, i64) = self
            .redis
            .run(&self.resume, &[&session_key(id)], &args)
            .await
            .map_err(SessionError::Unavailable)?;
        of_status(status, (bytes, rev, place))
    }

    /// Makes the place of a session last until then; `0` when it need not. Best effort: the request that it belongs to is
    /// served either way, and the next one that finds it due tries again.
    async fn keep_place(&self, owner: Owner<'_>, id: &str, until: i64) {
        if until == 0 {
            return;
        }
        let mut pipe = Pipeline::with_capacity(4);
        pipe.add_command(prolong(&place_key(owner), id, until)).ignore();
        pipe.add_command(outlast(&place_key(owner), until)).ignore();
        pipe.add_command(prolong(ALL, id, until)).ignore();
        pipe.add_command(outlast(ALL, until)).ignore();
        if let Err(why) = self.redis.pipeline::<()>(&pipe).await {
            tracing::debug!(error = %why, "cannot renew the place of a session");
        }
    }

    /// Best effort: a place that stays expires.
    async fn give_back(&self, key: &str, id: &str) {
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("ZREM").arg(key).arg(id).ignore();
        pipe.cmd("ZREM").arg(ALL).arg(id).ignore();
        if let Err(why) = self.redis.pipeline::<()>(&pipe).await {
            tracing::debug!(error = %why, "cannot give back the place of a session");
        }
    }
}

fn session_key(id: &str) -> String {
    // The braces are literal: a hash tag.
    format!("sess:{{{id}}}")
}

fn place_key(owner: Owner<'_>) -> String {
    format!("sess-of:{}:{}", owner.workspace_id, owner.principal)
}

fn millis(life: Duration) -> String {
    life.as_millis().to_string()
}

/// Prolongs a place that is there: never takes one (`XX`), since the session may have been deleted meanwhile, and never
/// shortens one (`GT`).
fn prolong(key: &str, id: &str, until: i64) -> Cmd {
    let mut cmd = ::redis::cmd("ZADD");
    cmd.arg(key).arg("XX").arg("GT").arg(until).arg(id);
    cmd
}

/// A set lasts as long as its last place.
fn outlast(key: &str, until: i64) -> Cmd {
    let mut cmd = ::redis::cmd("PEXPIREAT");
    cmd.arg(key).arg(until).arg("GT");
    cmd
}

/// The place among the sessions of the whole installation, for a session that is created.
fn announce(id: &str, until: i64) -> [Cmd; 3] {
    let (mut place, mut first) = (::redis::cmd("ZADD"), ::redis::cmd("PEXPIREAT"));
    place.arg(ALL).arg("GT").arg(until).arg(id);
    // A set that has no end yet counts as endless, which nothing outlasts.
    first.arg(ALL).arg(until).arg("NX");
    [place, first, outlast(ALL, until)]
}

fn of_status<T>(status: i64, found: T) -> Result<Lookup<T>, SessionError> {
    match status {
        DONE => Ok(Lookup::Found(found)),
        ABSENT => Ok(Lookup::Absent),
        FOREIGN_WORKSPACE => Ok(Lookup::ForeignWorkspace),
        FOREIGN_PRINCIPAL => Ok(Lookup::ForeignPrincipal),
        DAMAGED => Err(SessionError::Corrupt { reason: "it is no record".to_owned() }),
        other => Err(unknown_answer(other)),
    }
}

fn is_of_wrong_type(why: &RedisError) -> bool {
    matches!(why, RedisError::Server { code, .. } if code == "WRONGTYPE")
}

fn unknown_answer(status: i64) -> SessionError {
    SessionError::Corrupt { reason: format!("a script answered {status}") }
}

#[async_trait]
impl SessionStore for RedisSessions {
    async fn create(&self, record: &SessionRecord, limit: usize, life: Duration) -> Result<(), SessionError> {
        // First of all: what cannot be stored takes no place.
        let bytes = record.encode()?;
        let (id, owner) = (record.session_id.expose(), record.owner());
        let lasts = life + slack(life);
        let (place, pending, most) = (place_key(owner), millis(PENDING.min(lasts)), limit.to_string());
        let args = [id.as_bytes(), pending.as_bytes(), most.as_bytes()];
        let taken: i64 =
            self.redis.run(&self.place, &[&place], &args).await.map_err(SessionError::Unavailable)?;
        if taken == 0 {
            return Err(SessionError::TooMany { limit });
        }

        let until = taken.saturating_add(i64::try_from(lasts.as_millis()).unwrap_or(i64::MAX));
        let (rev, principal) = (record.rev.to_string(), record.principal.to_string());
        let (seen, life, place_until) =
            (record.last_seen.as_millisecond().to_string(), millis(life), until.to_string());
        let args = [
            bytes.as_slice(),
            rev.as_bytes(),
            record.workspace_id.as_str().as_bytes(),
            principal.as_bytes(),
            seen.as_bytes(),
            life.as_bytes(),
            place_until.as_bytes(),
        ];
        let mut beside = vec![prolong(&place, &id, until), outlast(&place, until)];
        beside.extend(announce(&id, until));
        match self.redis.run_beside(&self.create, &[&session_key(&id)], &args, beside).await {
            Ok(DONE) => Ok(()),
            // The place is the other session's, or lapses.
            Ok(ABSENT) => Err(SessionError::AlreadyExists),
            Ok(other) => Err(unknown_answer(other)),
            Err(why) => {
                // After any other failure Redis may have created it, and then it needs its place.
                if matches!(why, RedisError::Server { .. }) {
                    self.give_back(&place, &id).await;
                }
                Err(SessionError::Unavailable(why))
            }
        }
    }

    async fn resume(
        &self,
        id: SessionId,
        caller: &Caller<'_>,
        now: Timestamp,
        life: Duration,
    ) -> Result<Lookup<SessionRecord>, SessionError> {
        let id = id.expose();
        let lookup = self.resumed(&id, caller, now, life, "record").await?;
        let lookup = lookup.try_map(|(bytes, rev, place)| {
            SessionRecord::decode(&bytes, rev, now).map(|record| (record, place))
        })?;
        if let Lookup::Found((record, place)) = &lookup {
            self.keep_place(record.owner(), &id, *place).await;
        }
        lookup.try_map(|(record, _)| Ok(record))
    }

    async fn renew(
        &self,
        id: SessionId,
        owner: Owner<'_>,
        now: Timestamp,
        life: Duration,
    ) -> Result<bool, SessionError> {
        let id = id.expose();
        let Owner { workspace_id, principal } = owner;
        let caller = Caller { workspace_id, principal, binding: SessionBinding::Principal };
        match self.resumed(&id, &caller, now, life, "").await {
            Ok(Lookup::Found((_, _, place))) => {
                self.keep_place(owner, &id, place).await;
                Ok(true)
            }
            // Nobody can use it any more.
            Ok(_) | Err(SessionError::Corrupt { .. }) => Ok(false),
            Err(why) => Err(why),
        }
    }

    async fn save(&self, record: &SessionRecord, read: u64, life: Duration) -> Result<(), SessionError> {
        let (id, bytes, principal) =
            (record.session_id.expose(), record.encode()?, record.principal.to_string());
        let (read, rev, lasts) = (read.to_string(), record.rev.to_string(), millis(life));
        let seen = record.last_seen.as_millisecond().to_string();
        let args = [
            read.as_bytes(),
            bytes.as_slice(),
            rev.as_bytes(),
            record.workspace_id.as_str().as_bytes(),
            principal.as_bytes(),
            seen.as_bytes(),
            lasts.as_bytes(),
        ];
        let (status, place): (i64, i64) = self
            .redis
            .run(&self.save, &[&session_key(&id)], &args)
            .await
            .map_err(SessionError::Unavailable)?;
        match status {
            DONE => {
                self.keep_place(record.owner(), &id, place).await;
                Ok(())
            }
            ABSENT => Err(SessionError::NoSuchSession),
            CONFLICT => Err(SessionError::Conflict),
            other => Err(unknown_answer(other)),
        }
    }

    async fn delete(&self, id: SessionId, caller: &Caller<'_>) -> Result<Lookup<()>, SessionError> {
        let (text, principal) = (id.expose(), caller.principal.to_string());
        let shares = match caller.binding {
            SessionBinding::Principal => b"0",
            SessionBinding::Workspace => b"1",
        };
        let args = [caller.workspace_id.as_str().as_bytes(), principal.as_bytes(), shares];
        let (status, owner): (i64, String) = self
            .redis
            .run(&self.delete, &[&session_key(&text)], &args)
            .await
            .map_err(SessionError::Unavailable)?;
        let lookup = of_status(status, ())?;
        if lookup == Lookup::Found(()) {
            let place = format!("sess-of:{}:{owner}", caller.workspace_id);
            self.give_back(&place, &text).await;
        }
        Ok(lookup)
    }

    async fn of(&self, owner: Owner<'_>) -> Result<Vec<SessionId>, SessionError> {
        let mut cmd = ::redis::cmd("ZRANGE");
        cmd.arg(place_key(owner)).arg(0).arg(-1);
        let ids = match self.redis.query::<Vec<String>>(&cmd).await {
            Err(why) if is_of_wrong_type(&why) => Vec::new(),
            ids => ids.map_err(SessionError::Unavailable)?,
        };
        Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
    }

    async fn live(&self, ids: &[SessionId]) -> Result<Vec<bool>, SessionError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = Pipeline::with_capacity(ids.len());
        for id in ids {
            pipe.cmd("EXISTS").arg(session_key(&id.expose()));
        }
        self.redis.pipeline(&pipe).await.map_err(SessionError::Unavailable)
    }

    async fn count(&self, now: Timestamp) -> Result<u64, SessionError> {
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("ZREMRANGEBYSCORE").arg(ALL).arg("-inf").arg(now.as_millisecond()).ignore();
        pipe.cmd("ZCARD").arg(ALL);
        match self.redis.pipeline::<(u64,)>(&pipe).await {
            Ok((count,)) => Ok(count),
            // In the place of the places by mistake; each session that is begun or renewed takes its own again.
            Err(why) if is_of_wrong_type(&why) => {
                tracing::warn!(key = ALL, "what counts the sessions was of another type, it is begun anew");
                let forget = self.redis.query::<()>(::redis::cmd("DEL").arg(ALL)).await;
                forget.map(|()| 0).map_err(SessionError::Unavailable)
            }
            Err(why) => Err(SessionError::Unavailable(why)),
        }
    }
}
