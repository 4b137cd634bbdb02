use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use obol_model::snapshot::SessionBinding;
use obol_model::{Clock, KeyId, Principal, SessionId, WorkspaceId, metric};
use serde_json::value::RawValue;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout_at};

use crate::held::{Due, Held, HeldSession};
use crate::store::{Caller, Lookup, Owner, SessionStore, slack};
use crate::{SessionError, SessionRecord};

/// How often a change is tried against other writers of the same session before the caller is told.
const ATTEMPTS: usize = 16;

/// How long a request waits for a store that cannot be asked, in all its attempts: it is to be answered within a second
/// (DESIGN §9.6, §14).
const PATIENCE: Duration = Duration::from_millis(850);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest time between two looks at the sessions that are held. One that was renewed within half of it is passed
/// over, so a session that ended elsewhere is noticed within 15 s, a keep-alive tick (DESIGN §6.3).
const LOOK: Duration = Duration::from_secs(10);
/// Between two questions whether a store that did not answer does so again.
const PROBE: Duration = Duration::from_millis(200);
/// Sessions that are renewed, or deleted, at once.
const AT_ONCE: usize = 64;

/// Bounds of sessions.
#[derive(Debug, Clone, Copy)]
pub struct SessionOptions {
    /// How long an unused session lives.
    pub ttl: Duration,
    /// How long a session lives after whose creation nothing followed; `None` is as long as any other.
    pub unused_ttl: Option<Duration>,
    /// Live sessions that one principal may have in a workspace.
    pub max_per_principal: usize,
}

/// What `initialize` knows of a new session.
#[derive(Debug)]
pub struct NewSession {
    /// The tenant.
    pub workspace_id: WorkspaceId,
    /// The key that the client came with; `None` when it came with an access token.
    pub key_id: Option<KeyId>,
    /// Who called.
    pub principal: Principal,
    /// The protocol version that was negotiated.
    pub protocol_version: String,
    /// `clientInfo`, as it was sent.
    pub client_info: Option<Box<RawValue>>,
    /// `capabilities`, as they were sent.
    pub client_capabilities: Option<Box<RawValue>>,
}

/// The sessions of all replicas.
///
/// Every method may be abandoned at any point: the store's steps are atomic, so a session is as it was or as it was to
/// be. An abandoned [`Sessions::create`] may leave a session that nobody knows and a taken place; both expire.
#[derive(Debug, Clone)]
pub struct Sessions {
    store: Arc<dyn SessionStore>,
    clock: Arc<dyn Clock>,
    options: SessionOptions,
    held: Arc<Held>,
    doubt: Arc<Notify>,
    /// Grows each time that the store was doubted and answered.
    answers: Arc<watch::Sender<u64>>,
}

impl Sessions {
    /// Sessions in this store.
    pub fn new(store: Arc<dyn SessionStore>, clock: Arc<dyn Clock>, options: SessionOptions) -> Self {
        let held = Held::new(slack(options.ttl));
        Self { store, clock, options, held, doubt: Arc::default(), answers: Arc::new(watch::channel(0).0) }
    }

    /// Creates a session.
    ///
    /// # Errors
    /// [`SessionError::TooMany`] when the principal has no place left, [`SessionError::TooLarge`] when the client sent
    /// too much about itself, [`SessionError::Unavailable`].
    pub async fn create(&self, new: NewSession) -> Result<SessionRecord, SessionError> {
        let now = self.clock.now();
        let record = |session_id| SessionRecord {
            schema_version: SessionRecord::SCHEMA,
            session_id,
            workspace_id: new.workspace_id.clone(),
            key_id: new.key_id.clone(),
            principal: new.principal.clone(),
            protocol_version: new.protocol_version.clone(),
            client_info: new.client_info.clone(),
            client_capabilities: new.client_capabilities.clone(),
            log_level: None,
            subscriptions: BTreeSet::new(),
            upstreams: BTreeMap::new(),
            created_at: now,
            last_seen: now,
            rev: 1,
        };
        let SessionOptions { ttl, unused_ttl, max_per_principal } = self.options;
        let life = unused_ttl.map_or(ttl, |unused| unused.min(ttl));
        let created = patiently(|| async {
            // Another id for each attempt: whether the one before has created its session is unknown.
            let id = SessionId::generate(now)
                .map_err(|why| SessionError::NoRandomness { reason: why.to_string() })?;
            let record = record(id);
            self.store.create(&record, max_per_principal, life).await?;
            Ok(record)
        });
        let record = created.await?;
        count("created");
        Ok(record)
    }

    /// Finds a session for a request and renews its life, in one flight (two when its place has to be renewed, once in a
    /// tenth of its life).
    ///
    /// # Errors
    /// [`SessionError::NoSuchSession`] for whatever the caller may not use; [`SessionError::Unavailable`] when the
    /// store could not be asked, whether the session exists or not; [`SessionError::Newer`].
    pub async fn get_or_resume(
        &self,
        id_text: &str,
        caller: &Caller<'_>,
    ) -> Result<SessionRecord, SessionError> {
        let id = parse(id_text)?;
        let lookup = patiently(|| self.store.resume(id, caller, self.clock.now(), self.options.ttl)).await;
        let record = allowed(readable(lookup, id, caller)?, id, caller)?;
        count("resumed");
        Ok(record)
    }

    /// Replaces a session, if nobody else did since `record` was read, and renews its life.
    ///
    /// # Errors
    /// [`SessionError::Conflict`] when somebody did; [`SessionError::NoSuchSession`] when it ended meanwhile;
    /// [`SessionError::TooLarge`], [`SessionError::Unavailable`].
    pub async fn save(&self, record: &SessionRecord) -> Result<SessionRecord, SessionError> {
        let saved = SessionRecord {
            schema_version: SessionRecord::SCHEMA,
            rev: record.rev.saturating_add(1),
            last_seen: self.clock.now(),
            ..record.clone()
        };
        self.store.save(&saved, record.rev, self.options.ttl).await?;
        Ok(saved)
    }

    /// Changes a session on top of what others changed meanwhile: `change` is applied to the record as it is now,
    /// several times if need be.
    ///
    /// # Errors
    /// As [`Sessions::save`]; a conflict only when others were faster many times in a row.
    pub async fn update(
        &self,
        record: SessionRecord,
        caller: &Caller<'_>,
        change: impl Fn(&mut SessionRecord) + Send,
    ) -> Result<SessionRecord, SessionError> {
        let mut current = record;
        for _ in 1..ATTEMPTS {
            change(&mut current);
            match self.save(&current).await {
                Err(SessionError::Conflict) => {
                    let id = current.session_id;
                    let lookup = self.store.resume(id, caller, self.clock.now(), self.options.ttl).await;
                    current = allowed(readable(lookup, id, caller)?, id, caller)?;
                }
                outcome => return outcome,
            }
        }
        change(&mut current);
        self.save(&current).await
    }

    /// Ends a session. No request that begins after the answer finds it, on any replica.
    ///
    /// # Errors
    /// As [`Sessions::get_or_resume`]; a session that the caller may not use is not touched.
    pub async fn delete(&self, id_text: &str, caller: &Caller<'_>) -> Result<(), SessionError> {
        let id = parse(id_text)?;
        allowed(patiently(|| self.store.delete(id, caller)).await?, id, caller)?;
        count("deleted");
        Ok(())
    }

    /// Whether each of these sessions lives, in one flight. Renews nothing.
    ///
    /// # Errors
    /// [`SessionError::Unavailable`].
    pub async fn live(&self, ids: &[SessionId]) -> Result<Vec<bool>, SessionError> {
        self.store.live(ids).await
    }

    /// Ends all sessions of a principal in a workspace and tells how many there were, as when its key is revoked.
    ///
    /// # Errors
    /// [`SessionError::Unavailable`]; some sessions may have ended then.
    pub async fn delete_of_key(
        &self,
        workspace_id: &WorkspaceId,
        principal: &Principal,
    ) -> Result<usize, SessionError> {
        let owner = Owner { workspace_id, principal };
        let caller = Caller { workspace_id, principal, binding: SessionBinding::Principal };
        // A place without a session may be that of one that is just being created, so it is left to lapse.
        let ids = self.store.of(owner).await?;
        stream::iter(ids)
            .map(|id| async move { self.store.delete(id, &caller).await })
            .buffer_unordered(AT_ONCE)
            .try_fold(0, |ended, lookup| async move {
                let found = lookup == Lookup::Found(());
                if found {
                    count("deleted");
                }
                Ok(ended + usize::from(found))
            })
            .await
    }

    /// Keeps a session that has just been created, resumed or saved from expiring, as long as [`Sessions::keep`] runs.
    pub fn hold(&self, record: SessionRecord) -> HeldSession {
        self.held.hold(record)
    }

    /// The sessions of an owner that are held here.
    pub fn held(&self, owner: Owner<'_>) -> Vec<SessionId> {
        self.held.of(owner)
    }

    /// For whoever could not ask: changes once the store answers again. One asks for all, in [`Sessions::keep`], so that
    /// those who wait are no load on a store that is in trouble.
    pub fn answering(&self) -> watch::Receiver<u64> {
        let answers = self.answers.subscribe();
        self.doubt.notify_one();
        answers
    }

    /// Renews what is held, also when it is let go, for as long as it is polled. Calls `ended` for each session that
    /// turns out to be gone while it is held; one that cannot be asked about is not gone. Run it once.
    pub async fn keep(&self, ended: impl Fn(&WorkspaceId, SessionId) + Sync) {
        let period = (self.options.ttl / 4).min(LOOK);
        let (mut look, mut census) = (interval(period), interval(LOOK));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        census.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let due = tokio::select! {
                _ = look.tick() => self.held.older_than(period / 2),
                due = self.held.released() => due,
                () = self.doubt.notified() => {
                    // Nothing could be renewed meanwhile either.
                    while !self.census().await {
                        sleep(PROBE).await;
                    }
                    self.answers.send_modify(|answers| *answers += 1);
                    continue;
                }
                _ = census.tick() => {
                    self.census().await;
                    continue;
                }
            };
            // The first failure ends the round: the rest would only wait for the same store. They are still due.
            let round =
                stream::iter(due).map(Ok).try_for_each_concurrent(AT_ONCE, |due| self.renew(due, &ended));
            if let Err(why) = round.await {
                tracing::debug!(error = %why, "held sessions could not be renewed");
            }
        }
    }

    async fn renew(&self, due: Due, ended: &impl Fn(&WorkspaceId, SessionId)) -> Result<(), SessionError> {
        if self.store.renew(due.session, due.owner(), self.clock.now(), self.options.ttl).await? {
            self.held.renewed(due.session);
        } else {
            ended(&due.workspace_id, due.session);
        }
        Ok(())
    }

    /// Whether the store answered.
    async fn census(&self) -> bool {
        gauge(metric::SESSIONS_HELD, u64::try_from(self.held.len()).unwrap_or(u64::MAX));
        match self.store.count(self.clock.now()).await {
            Ok(live) => {
                gauge(metric::SESSIONS_LIVE, live);
                true
            }
            Err(why) => {
                tracing::debug!(error = %why, "live sessions could not be counted");
                false
            }
        }
    }
}

/// Tries until the store answers, within [`PATIENCE`].
async fn patiently<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, SessionError>
where
    F: Future<Output = Result<T, SessionError>>,
{
    let deadline = Instant::now() + PATIENCE;
    let mut failure = SessionError::Late { after: PATIENCE };
    loop {
        match timeout_at(deadline, attempt()).await {
            Err(_) => return Err(failure),
            Ok(Err(why)) if why.may_pass() => failure = why,
            Ok(outcome) => return outcome,
        }
        if Instant::now() + PAUSE >= deadline {
            return Err(failure);
        }
        sleep(PAUSE).await;
    }
}

/// A malformed id is answered like a missing one and never reaches the store.
fn parse(id_text: &str) -> Result<SessionId, SessionError> {
    id_text.parse().map_err(|_| SessionError::NoSuchSession)
}

/// What nobody can read is no session: its client shall begin a new one, and not be told to wait. What a later release has
/// written another replica can serve.
fn readable<T>(
    lookup: Result<Lookup<T>, SessionError>,
    id: SessionId,
    caller: &Caller<'_>,
) -> Result<Lookup<T>, SessionError> {
    match &lookup {
        Err(SessionError::Corrupt { reason }) => {
            tracing::warn!(
                workspace_id = %caller.workspace_id,
                session_last4 = id.last4(),
                reason,
                "the record of a session is damaged, it counts as none"
            );
            return Ok(Lookup::Absent);
        }
        Err(why @ SessionError::Newer { .. }) => tracing::warn!(
            workspace_id = %caller.workspace_id,
            session_last4 = id.last4(),
            error = %why,
            "a session can be served by later releases only"
        ),
        _ => {}
    }
    lookup
}

fn allowed<T>(lookup: Lookup<T>, id: SessionId, caller: &Caller<'_>) -> Result<T, SessionError> {
    match lookup {
        Lookup::Found(found) => return Ok(found),
        Lookup::Absent => {}
        Lookup::ForeignPrincipal => {
            tracing::debug!(session_last4 = id.last4(), "session of another principal refused");
        }
        Lookup::ForeignWorkspace => tracing::warn!(
            workspace_id = %caller.workspace_id,
            session_last4 = id.last4(),
            "session of another workspace refused"
        ),
    }
    Err(SessionError::NoSuchSession)
}

fn count(event: &'static str) {
    metrics::counter!(metric::SESSION_EVENTS, "event" => event).increment(1);
}

fn gauge(name: &'static str, number: u64) {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a gauge is a float; sessions are far fewer than it can tell apart"
    )]
    metrics::gauge!(name).set(number as f64);
}
