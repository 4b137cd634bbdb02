//! `GET /mcp`: the stream of what concerns a session but no request of it (transports, "Listening for Messages from
//! the Server").
//!
//! A stream outlives no permission: key, session and policy are checked again on each keep-alive tick (DESIGN §6.5).
//! The replica that holds the stream listens to upstreams itself and applies the session's subscriptions there, so it
//! does not matter which replica took a `resources/subscribe`.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use futures::future::join_all;
use http::{HeaderMap, StatusCode, header};
use obol_auth::oauth::Target;
use obol_drain::Class;
use obol_mcp::catalogue::Change;
use obol_mcp::names;
use obol_mcp::pool::{Call, Event, EventKind, ListKind, Listener as UpstreamListener, UpstreamEvent};
use obol_mcp::wire::{self, sse};
use obol_model::{ConnectionName, Invalidation, Kind, SessionId};
use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::answer::{self, KEEP_ALIVE};
use super::lists::{COLD_WAIT, Digests};
use super::negotiate::Accept;
use super::session::Ctx;
use super::{LAST_EVENT_ID, Mcp, calls, refuse};
use crate::compiled::isolation_of;
use crate::failure::Refusal;
use crate::front::Admitted;

/// Changes within this time are announced once (DESIGN §9.3).
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Between two looks for workers whose session has ended (DESIGN §6.3).
const SWEEP: Duration = KEEP_ALIVE;
/// Longest time to subscribe at an upstream.
const SUBSCRIBE_WITHIN: Duration = Duration::from_secs(5);

/// While a stream is open its lists are looked at this often whatever was announced: not every upstream announces.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// And this often while a connection is away, since its return is a change.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// The streams that this replica holds, at most one per session: the newest `GET` wins, so that no message is
/// delivered twice.
#[derive(Debug, Clone, Default)]
pub(super) struct Streams {
    inner: Arc<Mutex<HashMap<SessionId, Held>>>,
}

#[derive(Debug, Clone)]
struct Held {
    ended: CancellationToken,
    wake: Arc<Notify>,
}

impl Streams {
    fn hold(&self, session: SessionId) -> Hold {
        let held = Held { ended: CancellationToken::new(), wake: Arc::new(Notify::new()) };
        if let Some(older) = self.inner.lock().insert(session, held.clone()) {
            older.ended.cancel();
        }
        Hold { streams: self.clone(), session, held }
    }

    /// Ends the stream of a session that is gone.
    pub(super) fn end(&self, session: SessionId) {
        if let Some(held) = self.inner.lock().get(&session) {
            held.ended.cancel();
        }
    }

    /// Tells the stream that the record of its session has changed.
    pub(super) fn wake(&self, session: SessionId) {
        if let Some(held) = self.inner.lock().get(&session) {
            held.wake.notify_one();
        }
    }
}

/// The place of one stream; given back when dropped.
struct Hold {
    streams: Streams,
    session: SessionId,
    held: Held,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A newer stream of the session has taken the place.
        let mut all = self.streams.inner.lock();
        if all.get(&self.session).is_some_and(|h| Arc::ptr_eq(&h.wake, &self.held.wake)) {
            all.remove(&self.session);
        }
    }
}

impl Mcp {
    pub(super) async fn get(
        self: Arc<Self>,
        admitted: Admitted,
        view: Option<ConnectionName>,
        headers: &HeaderMap,
    ) -> Response {
        let accept = Accept::parse(headers);
        if !accept.sse {
            let refusal =
                Refusal::new(Kind::InvalidRequest, "not_acceptable", "send `Accept: text/event-stream`");
            return super::with_status(refuse::http(&refusal, None), StatusCode::NOT_ACCEPTABLE);
        }
        let ctx = match self.resume(admitted, view, headers).await {
            Ok(ctx) => ctx,
            Err(refusal) => return refuse::http(&refusal, None),
        };
        if ctx.session.principal != ctx.admitted.identity.principal() {
            // Keys of the workspace may share the session, its streams stay with whoever created it (DESIGN §6.5).
            let message = "the stream of a shared session belongs to the key that created it";
            return refuse::http(&Refusal::new(Kind::Forbidden, "foreign_stream", message), None);
        }
        if headers.contains_key(&LAST_EVENT_ID) {
            tracing::debug!(
                session_last4 = ctx.session.session_id.last4(),
                "stream starts afresh, nothing is replayed"
            );
        }
        let mut credential = HeaderMap::new();
        if let Some(value) = headers.get(header::AUTHORIZATION) {
            let mut value = value.clone();
            value.set_sensitive(true);
            credential.insert(header::AUTHORIZATION, value);
        }
        let stream = Stream {
            hold: self.streams.hold(ctx.session.session_id),
            upstream: self.pool.events(),
            changes: self.catalogue.changes(),
            publications: self.front.publications.subscribe(),
            mcp: self,
            ctx,
            credential,
            known: HashMap::new(),
            listeners: HashMap::new(),
            subscribed: BTreeSet::new(),
            queue: VecDeque::new(),
            tick: Instant::now() + KEEP_ALIVE,
            compare: None,
            looked: Instant::now(),
            started: false,
            silent: false,
            answering: None,
            over: false,
        };
        answer::event_stream(futures::stream::unfold(stream, |mut stream| async move {
            let bytes = stream.next().await?;
            Some((Ok::<_, Infallible>(bytes), stream))
        }))
    }

    /// What the endpoint does beside requests.
    pub(crate) async fn background(self: &Arc<Self>) {
        let held = self.sessions.keep(|workspace, id| self.end_session(workspace, id));
        tokio::join!(self.follow_upstreams(), self.follow_keys(), held);
    }

    /// Ends the sessions of keys that are revoked together with them.
    async fn follow_keys(self: &Arc<Self>) {
        let mut invalidations = self.front.publications.subscribe();
        loop {
            match invalidations.recv().await {
                Ok(Invalidation::Key {
                    delete_sessions: true,
                    workspace_id: Some(workspace),
                    principal: Some(principal),
                    ..
                }) => {
                    let mcp = self.clone();
                    self.tasks().spawn(Class::Background, "end_sessions_of_key", async move {
                        mcp.end_sessions_of(&workspace, &principal).await;
                    });
                }
                Ok(_) => {}
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    tracing::warn!(
                        missed,
                        "invalidations missed, sessions of revoked keys may have to expire"
                    );
                }
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    async fn follow_upstreams(&self) {
        let mut events = self.pool.events();
        let mut changes = self.catalogue.changes();
        let mut sweep = tokio::time::interval(SWEEP);
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(UpstreamEvent { workspace, connection, kind: EventKind::ListChanged(kind), .. }) => {
                        self.catalogue.changed(&workspace, &connection, kind);
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                },
                change = changes.recv() => match change {
                    Ok(change) if change.to_tell => self.list_changed_here(&change),
                    Err(broadcast::error::RecvError::Closed) => return,
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                },
                _ = sweep.tick() => self.sweep().await,
            }
        }
    }

    /// Ends the workers of sessions that ended or expired elsewhere.
    pub(super) async fn sweep(&self) {
        let held: Vec<_> = self
            .pool
            .isolations()
            .into_iter()
            .filter_map(|(workspace, isolation)| Some((workspace, isolation.parse::<SessionId>().ok()?)))
            .collect();
        if held.is_empty() {
            return;
        }
        let ids: Vec<SessionId> = held.iter().map(|(_, id)| *id).collect();
        match self.sessions.live(&ids).await {
            Ok(live) => {
                for ((workspace, id), _) in held.into_iter().zip(live).filter(|(_, live)| !live) {
                    self.end_session(&workspace, id);
                }
            }
            // Could not ask: nothing is ended on a guess.
            Err(e) => tracing::warn!(error = %e, "workers are not swept"),
        }
    }
}

/// One open stream.
struct Stream {
    hold: Hold,
    mcp: Arc<Mcp>,
    ctx: Ctx,
    /// The header that authenticated the request, to check it again.
    credential: HeaderMap,
    upstream: broadcast::Receiver<UpstreamEvent>,
    changes: broadcast::Receiver<Change>,
    publications: broadcast::Receiver<Invalidation>,
    /// What the client may have seen last of each list.
    known: HashMap<ListKind, Digests>,
    listeners: HashMap<ConnectionName, UpstreamListener>,
    /// Exposed URIs that are subscribed at their upstream by this replica.
    subscribed: BTreeSet<String>,
    queue: VecDeque<Bytes>,
    tick: Instant,
    /// When lists are to be compared.
    compare: Option<Instant>,
    /// When they were compared last.
    looked: Instant,
    started: bool,
    /// The store could not be asked whether the caller may still have this stream: it stays open and says nothing, apart
    /// from the comments that keep it open (DESIGN §9.5).
    silent: bool,
    /// Changes when a silent stream can ask again.
    answering: Option<watch::Receiver<u64>>,
    over: bool,
}

impl Stream {
    /// The next bytes; `None` ends the stream.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.queue.pop_front() {
                return Some(bytes);
            }
            if self.over {
                return None;
            }
            let ended = self.hold.held.ended.clone();
            if ended.run_until_cancelled(self.step()).await.is_none() {
                self.end();
            }
        }
    }

    /// May be abandoned when the stream ends.
    async fn step(&mut self) {
        if self.started {
            return self.wait().await;
        }
        self.started = true;
        // Again, now that the stream can be found: whoever ended its session a moment ago has not seen it.
        self.check().await;
        if !self.over {
            self.compare().await;
            self.queue.clear();
            // Not before what the client sees is known: whatever changes after this is announced.
            self.queue.push_back(Bytes::from_static(b": open\n\n"));
        }
    }

    /// What is not sent yet is not sent any more.
    fn end(&mut self) {
        self.queue.clear();
        self.over = true;
    }

    async fn wait(&mut self) {
        let stopping = self.mcp.drain.stopping().clone();
        let compare = self.compare.unwrap_or(self.tick + KEEP_ALIVE);
        tokio::select! {
            biased;
            () = stopping.cancelled() => {
                // The client comes back on another replica; not all of them in the same instant.
                let jitter = 100 + u64::from(self.hold.session.jitter()) % 1_900;
                self.queue.push_back(Bytes::from(format!("retry: {jitter}\n\n")));
                self.over = true;
            }
            event = self.upstream.recv() => self.upstream(event).await,
            change = self.changes.recv() => self.changed(change),
            message = self.publications.recv() => self.publication(message).await,
            () = self.hold.held.wake.notified() => self.check().await,
            () = changed(&mut self.answering), if self.answering.is_some() => {
                self.answering = None;
                // Not all streams in the same instant.
                tokio::time::sleep(Duration::from_millis(u64::from(self.hold.session.jitter()) % 500)).await;
                self.check().await;
            }
            () = tokio::time::sleep_until(compare), if self.compare.is_some() => {
                self.compare = None;
                // Again: when the invalidation came, the cached key may not have been purged yet.
                self.check().await;
                if !self.over && !self.silent {
                    self.compare().await;
                }
            }
            () = tokio::time::sleep_until(self.tick) => {
                self.tick = Instant::now() + KEEP_ALIVE;
                self.check().await;
                if self.silent {
                    self.answering = Some(self.mcp.sessions.answering());
                }
                if !self.over {
                    self.queue.push_back(Bytes::from_static(sse::KEEP_ALIVE));
                    self.look();
                }
            }
        }
    }

    /// Whether the caller may still have this stream, and under which publication. Only a proven no ends it.
    async fn check(&mut self) {
        match self.ask().await {
            Ok(()) => {
                if std::mem::take(&mut self.silent) {
                    self.missed();
                }
                self.listen().await;
            }
            Err(Kind::Unavailable) => self.hush(),
            Err(_) => self.end(),
        }
    }

    /// Asks again when the store answers again, and otherwise with each tick: when something else is in the way, such as a
    /// publication that cannot be read, answers of the store are no news.
    fn hush(&mut self) {
        if !std::mem::replace(&mut self.silent, true) {
            self.answering = Some(self.mcp.sessions.answering());
        }
    }

    async fn ask(&mut self) -> Result<(), Kind> {
        self.readmit().await?;
        let principal = self.ctx.admitted.identity.principal();
        let caller = obol_session::Caller {
            workspace_id: self.ctx.admitted.identity.workspace_id(),
            principal: &principal,
            binding: self.ctx.admitted.publication.workspace.session_binding,
        };
        let id = self.ctx.session.session_id.expose();
        let session = self.mcp.sessions.get_or_resume(&id, &caller).await.map_err(|e| e.kind())?;
        self.ctx.session = Arc::new(self.mcp.sessions.hold(session));
        Ok(())
    }

    async fn readmit(&mut self) -> Result<(), Kind> {
        let target = self.ctx.view.as_ref().map_or(Target::Mcp, Target::Connection);
        let readmitted = self.mcp.front.readmit(&self.ctx.admitted, &self.credential, target).await;
        self.ctx.admitted = readmitted.map_err(|refusal| refusal.kind)?;
        Ok(())
    }

    /// Whether an event may be delivered now, under the publication of now: what revoked the permission may have been
    /// published, or the credential may have expired, since the last tick. Costs no flight while all is warm.
    async fn may_deliver(&mut self) -> bool {
        match self.readmit().await {
            Ok(()) => true,
            Err(Kind::Unavailable) => {
                self.hush();
                false
            }
            Err(_) => {
                self.end();
                false
            }
        }
    }

    /// Events were missed: the client looks for itself.
    fn missed(&mut self) {
        self.compare.get_or_insert(Instant::now() + DEBOUNCE);
        for uri in self.subscribed.clone() {
            self.updated(&uri);
        }
    }

    /// Listens to the upstreams that the caller sees, and subscribes there to what the session subscribed to.
    async fn listen(&mut self) {
        let sources: Vec<_> = self.ctx.connections().map(|(name, source)| (name.clone(), source)).collect();
        self.listeners.retain(|name, _| sources.iter().any(|(n, _)| n == name));
        for (name, source) in sources {
            // Workers that are not shared say what they have to say without being asked.
            if source.endpoint.isolation.is_none()
                && !self.listeners.contains_key(&name)
                && let Ok(listener) = self.mcp.pool.listen(&source.endpoint)
            {
                self.listeners.insert(name, listener);
            }
        }
        let wanted = self.ctx.session.subscriptions.clone();
        self.subscribed.retain(|uri| wanted.contains(uri));
        let missing: Vec<String> = wanted.difference(&self.subscribed).cloned().collect();
        let (mcp, ctx) = (&self.mcp, &self.ctx);
        let done = join_all(
            missing.into_iter().map(|uri| async move { subscribe(mcp, ctx, &uri).await.then_some(uri) }),
        )
        .await;
        self.subscribed.extend(done.into_iter().flatten());
    }

    async fn upstream(&mut self, event: Result<UpstreamEvent, broadcast::error::RecvError>) {
        let event = match event {
            // Caught up with once the stream may speak again.
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) if self.silent => return,
            Ok(event) => event,
            Err(broadcast::error::RecvError::Closed) => {
                self.over = true;
                return;
            }
            Err(broadcast::error::RecvError::Lagged(_)) => return self.missed(),
        };
        let own = isolation_of(&self.ctx.session.session_id);
        let ours = event.isolation.as_ref() == Some(&own);
        if event.workspace != *self.ctx.workspace() || !(ours || event.isolation.is_none()) {
            return;
        }
        match event.kind {
            // The catalogue says so, once it knows that its list is old.
            EventKind::ListChanged(_) => {}
            EventKind::ResourceUpdated { uri } => {
                if !self.may_deliver().await {
                    return;
                }
                if let Some((_, source)) = self.ctx.connection(event.connection.as_str()) {
                    let exposed = names::exposed_uri(&event.connection, source.namespace, &uri);
                    if self.ctx.session.subscriptions.contains(&exposed)
                        && self.ctx.may_read(&event.connection, &uri)
                    {
                        self.updated(&exposed);
                    }
                }
            }
            // What a shared upstream logs belongs to nobody in particular: it may speak of another caller.
            EventKind::Log { level, message } => {
                if ours && calls::logs_level(&self.ctx.session, &level) && self.may_deliver().await {
                    self.queue.push_back(sse::encode(None, &message));
                }
            }
        }
    }

    /// A list changed, or may have; who said so does not matter.
    fn changed(&mut self, change: Result<Change, broadcast::error::RecvError>) {
        match change {
            Ok(change) if change.workspace != *self.ctx.workspace() => {}
            Err(broadcast::error::RecvError::Closed) => self.over = true,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {
                self.compare.get_or_insert(Instant::now() + DEBOUNCE);
            }
        }
    }

    /// Looks for changes that nobody told: those that another replica noticed, and those of upstreams that announce
    /// nothing.
    fn look(&mut self) {
        let (catalogue, workspace) = (self.mcp.catalogue.clone(), self.ctx.workspace().clone());
        self.mcp.tasks().spawn(Class::Background, "compare lists", async move {
            catalogue.compare(&workspace).await;
        });
        if self.looked.elapsed() >= LOOK_EVERY {
            self.compare.get_or_insert(Instant::now());
        }
    }

    fn updated(&mut self, exposed: &str) {
        let params = serde_json::json!({ "uri": exposed }).to_string();
        let message = wire::notification("notifications/resources/updated", Some(&params));
        self.queue.push_back(sse::encode(None, &message));
    }

    async fn publication(&mut self, message: Result<Invalidation, broadcast::error::RecvError>) {
        let ours = match &message {
            Ok(Invalidation::Workspace { workspace_id } | Invalidation::Policy { workspace_id }) => {
                workspace_id == self.ctx.workspace()
            }
            Ok(Invalidation::Key { .. } | Invalidation::All)
            | Err(broadcast::error::RecvError::Lagged(_)) => true,
            Err(broadcast::error::RecvError::Closed) => {
                self.over = true;
                return;
            }
        };
        if ours {
            self.check().await;
            self.compare.get_or_insert(Instant::now() + DEBOUNCE);
        }
    }

    /// Announces each list that looks different from what the client may have seen; exactly one announcement each.
    async fn compare(&mut self) {
        let deadline = Instant::now() + COLD_WAIT;
        let (mcp, ctx, known) = (&self.mcp, &self.ctx, &self.known);
        let now = join_all(ListKind::ALL.map(|kind| async move {
            let gathered = mcp.gather(ctx, kind, deadline).await;
            (kind, gathered.is_partial(), gathered.digests(ctx, kind, known.get(&kind)))
        }))
        .await;
        self.looked = Instant::now();
        if now.iter().any(|(_, partial, _)| *partial) {
            self.compare.get_or_insert(self.looked + LOOK_AGAIN);
        }
        let mut announced = BTreeSet::new();
        for (kind, _, content) in now {
            let is_new = self.known.get(&kind).is_some_and(|before| *before != content);
            self.known.insert(kind, content);
            if is_new {
                announced.insert(match kind {
                    ListKind::Tools => "notifications/tools/list_changed",
                    ListKind::Resources | ListKind::ResourceTemplates => {
                        "notifications/resources/list_changed"
                    }
                    ListKind::Prompts => "notifications/prompts/list_changed",
                });
            }
        }
        for method in announced {
            self.queue.push_back(sse::encode(None, &wire::notification(method, None)));
        }
    }
}

async fn subscribe(mcp: &Arc<Mcp>, ctx: &Ctx, exposed: &str) -> bool {
    let Some((connection, source, uri)) = ctx.resolve_uri(exposed) else { return false };
    if !ctx.may_read(&connection, uri) {
        return false;
    }
    let params = serde_json::json!({ "uri": uri }).to_string();
    let call = Call {
        method: "resources/subscribe",
        params: Some(&params),
        progress_token: None,
        log_level: None,
        deadline: Instant::now() + SUBSCRIBE_WITHIN,
    };
    match mcp.pool.call(&source.endpoint, call).await {
        Ok(mut exchange) => loop {
            match exchange.next().await {
                Some(Ok(Event::Notification(_))) => {}
                Some(Ok(Event::Result(_))) => return true,
                Some(Ok(Event::Error(_)) | Err(_)) | None => return false,
            }
        },
        Err(_) => false,
    }
}

/// Waits for a change; for ever when there is nobody any more who could tell.
async fn changed(answering: &mut Option<watch::Receiver<u64>>) {
    let told = match answering {
        Some(answering) => answering.changed().await.is_ok(),
        None => false,
    };
    if !told {
        std::future::pending::<()>().await;
    }
}

trait Jitter {
    fn jitter(&self) -> u16;
}

impl Jitter for SessionId {
    /// Differs between sessions; a random source would add nothing.
    fn jitter(&self) -> u16 {
        self.last4().bytes().fold(0_u16, |sum, b| sum.wrapping_mul(31).wrapping_add(u16::from(b)))
    }
}
