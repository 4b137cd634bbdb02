use std::time::Duration;

use ::redis::Cmd;
use async_trait::async_trait;
use jiff::Timestamp;
use obol_model::snapshot::SessionBinding;
use obol_model::{SessionId, WorkspaceId};
use obol_redis::{Redis, Script};

use crate::store::{Caller, Lookup, Place, SessionStore};
use crate::{SessionError, SessionRecord};

/// Sessions that all replicas of one Redis share.
///
/// `sess:{ID}` and `sess-of:WORKSPACE:PRINCIPAL` lie in different slots, so a session and its place cannot change in one step:
/// the place is taken first, and renewed and given back after the session, where a failure costs the principal one
/// place until it expires.
#[derive(Debug)]
pub struct RedisSessions {
    redis: Redis,
    create: Script,
    resume: Script,
    save: Script,
    delete: Script,
    place: Script,
}

/// First number of the scripts' answers.
const ABSENT: i64 = 0;
const DONE: i64 = 1;
const CONFLICT: i64 = 2;
const FOREIGN_WORKSPACE: i64 = 2;
const FOREIGN_PRINCIPAL: i64 = 3;

impl RedisSessions {
    /// A store in this Redis.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            create: Script::new("session_create_v1", include_str!("scripts/session_create_v1.lua")),
            resume: Script::new("session_resume_v1", include_str!("scripts/session_resume_v1.lua")),
            save: Script::new("session_save_v1", include_str!("scripts/session_save_v1.lua")),
            delete: Script::new("session_delete_v1", include_str!("scripts/session_delete_v1.lua")),
            place: Script::new("session_place_v1", include_str!("scripts/session_place_v1.lua")),
        }
    }

    /// Best effort: the request that it belongs to is served either way.
    async fn renew_place(&self, key: &str, id: &str, now: Timestamp, life: Duration) {
        let mut pipe = ::redis::pipe();
        for cmd in renewal(key, id, now, life) {
            pipe.add_command(cmd).ignore();
        }
        if let Err(why) = self.redis.pipeline::<()>(&pipe).await {
            tracing::debug!(error = %why, "cannot renew the place of a session");
        }
    }
}

fn session_key(id: &str) -> String {
    // The braces are literal: a hash tag.
    format!("sess:{{{id}}}")
}

fn place_key(workspace: &WorkspaceId, principal: &str) -> String {
    format!("sess-of:{workspace}:{principal}")
}

fn millis(life: Duration) -> String {
    life.as_millis().to_string()
}

fn shares(caller: &Caller<'_>) -> &'static [u8] {
    match caller.binding {
        SessionBinding::Principal => b"0",
        SessionBinding::Workspace => b"1",
    }
}

/// Prolongs a place that is still taken: never takes one (`XX`), never shortens one (`GT`: replicas' clocks differ).
fn renewal(key: &str, id: &str, now: Timestamp, life: Duration) -> [Cmd; 2] {
    let until = now.as_millisecond().saturating_add(i64::try_from(life.as_millis()).unwrap_or(i64::MAX));
    let mut place = ::redis::cmd("ZADD");
    place.arg(key).arg("XX").arg("GT").arg(until).arg(id);
    let mut all = ::redis::cmd("PEXPIRE");
    all.arg(key).arg(millis(life));
    [place, all]
}

fn of_status<T>(status: i64, found: T) -> Result<Lookup<T>, SessionError> {
    match status {
        DONE => Ok(Lookup::Found(found)),
        ABSENT => Ok(Lookup::Absent),
        FOREIGN_WORKSPACE => Ok(Lookup::ForeignWorkspace),
        FOREIGN_PRINCIPAL => Ok(Lookup::ForeignPrincipal),
        other => Err(unknown_answer(other)),
    }
}

fn unknown_answer(status: i64) -> SessionError {
    SessionError::Corrupt { reason: format!("a script answered {status}") }
}

#[async_trait]
impl SessionStore for RedisSessions {
    async fn take_place(
        &self,
        place: Place<'_>,
        id: SessionId,
        limit: usize,
        life: Duration,
    ) -> Result<bool, SessionError> {
        let key = place_key(place.workspace_id, &place.principal.to_string());
        let (id, life, limit) = (id.expose(), millis(life), limit.to_string());
        let args = [id.as_bytes(), life.as_bytes(), limit.as_bytes()];
        self.redis.run(&self.place, &[&key], &args).await.map_err(SessionError::Unavailable)
    }

    async fn give_back(&self, place: Place<'_>, id: SessionId) -> Result<(), SessionError> {
        let key = place_key(place.workspace_id, &place.principal.to_string());
        let mut cmd = ::redis::cmd("ZREM");
        cmd.arg(key).arg(id.expose());
        self.redis.query(&cmd).await.map_err(SessionError::Unavailable)
    }

    async fn placed(&self, place: Place<'_>) -> Result<Vec<SessionId>, SessionError> {
        let key = place_key(place.workspace_id, &place.principal.to_string());
        let mut cmd = ::redis::cmd("ZRANGE");
        cmd.arg(key).arg(0).arg(-1);
        let ids: Vec<String> = self.redis.query(&cmd).await.map_err(SessionError::Unavailable)?;
        Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
    }

    async fn create(&self, record: &SessionRecord, life: Duration) -> Result<(), SessionError> {
        let key = session_key(&record.session_id.expose());
        let (bytes, rev, principal) =
            (record.encode()?, record.rev.to_string(), record.principal.to_string());
        let (seen, life) = (record.last_seen.as_millisecond().to_string(), millis(life));
        let args = [
            bytes.as_slice(),
            rev.as_bytes(),
            record.workspace_id.as_str().as_bytes(),
            principal.as_bytes(),
            seen.as_bytes(),
            life.as_bytes(),
        ];
        let created: bool =
            self.redis.run(&self.create, &[&key], &args).await.map_err(SessionError::Unavailable)?;
        if created { Ok(()) } else { Err(SessionError::AlreadyExists) }
    }

    async fn resume(
        &self,
        id: SessionId,
        caller: &Caller<'_>,
        now: Timestamp,
        life: Duration,
    ) -> Result<Lookup<SessionRecord>, SessionError> {
        let (id, principal) = (id.expose(), caller.principal.to_string());
        let (seen, lasts) = (now.as_millisecond().to_string(), millis(life));
        let args = [
            caller.workspace_id.as_str().as_bytes(),
            principal.as_bytes(),
            shares(caller),
            seen.as_bytes(),
            lasts.as_bytes(),
        ];
        // A caller that is not the owner has no such place, so that nothing is renewed.
        let beside = renewal(&place_key(caller.workspace_id, &principal), &id, now, life).into();
        let (status, bytes, rev): (i64, Vec<u8>, u64) = self
            .redis
            .run_beside(&self.resume, &[&session_key(&id)], &args, beside)
            .await
            .map_err(SessionError::Unavailable)?;
        let lookup = of_status(status, bytes)?.try_map(|bytes| SessionRecord::decode(&bytes, rev, now))?;
        if let Lookup::Found(record) = &lookup
            && record.principal != *caller.principal
        {
            // Shared in the workspace, and whose it is was not known before: the one case of a second flight.
            let owner = place_key(caller.workspace_id, &record.principal.to_string());
            self.renew_place(&owner, &id, now, life).await;
        }
        Ok(lookup)
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
        let place = place_key(&record.workspace_id, &principal);
        let beside = renewal(&place, &id, record.last_seen, life).into();
        let status: i64 = self
            .redis
            .run_beside(&self.save, &[&session_key(&id)], &args, beside)
            .await
            .map_err(SessionError::Unavailable)?;
        match status {
            DONE => Ok(()),
            ABSENT => Err(SessionError::NoSuchSession),
            CONFLICT => Err(SessionError::Conflict),
            other => Err(unknown_answer(other)),
        }
    }

    async fn delete(&self, id: SessionId, caller: &Caller<'_>) -> Result<Lookup<()>, SessionError> {
        let (text, principal) = (id.expose(), caller.principal.to_string());
        let args = [caller.workspace_id.as_str().as_bytes(), principal.as_bytes(), shares(caller)];
        let (status, owner): (i64, String) = self
            .redis
            .run(&self.delete, &[&session_key(&text)], &args)
            .await
            .map_err(SessionError::Unavailable)?;
        let lookup = of_status(status, ())?;
        if lookup == Lookup::Found(()) {
            let mut cmd = ::redis::cmd("ZREM");
            cmd.arg(place_key(caller.workspace_id, &owner)).arg(text);
            // The session is gone, which is what was asked for; a place that stays expires.
            if let Err(why) = self.redis.query::<()>(&cmd).await {
                tracing::debug!(error = %why, "cannot give back the place of a session");
            }
        }
        Ok(lookup)
    }

    async fn live(&self, ids: &[SessionId]) -> Result<Vec<bool>, SessionError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = ::redis::Pipeline::with_capacity(ids.len());
        for id in ids {
            pipe.cmd("EXISTS").arg(session_key(&id.expose()));
        }
        self.redis.pipeline(&pipe).await.map_err(SessionError::Unavailable)
    }
}
