//! Tool calls are admitted by the ledger in the flight that resumes their session (DESIGN §5), which is where it is found
//! that one is sent again under its idempotency key (DESIGN §12.7).

use bytes::Bytes;
use http::HeaderMap;
use obol_mcp::wire::{self, Message, Object, RpcError, Splice};
use obol_meter::{Denied, Idempotency, Price, Start, StoredAnswer, UsageGuard};
use obol_model::snapshot::Namespace;
use obol_model::{ConnectionName, Kind, NanoUsd, UsageKind};
use serde_json::value::RawValue;

use super::{Mcp, refuse};
use crate::front::Admitted;
use crate::idempotency::{BadKey, Key};
use crate::toll;

/// Longer names are no tool's, and not worth a place in the ledger.
const LONGEST_NAME: usize = 256;

/// A tool call as the ledger sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Toll {
    pub(super) connection: ConnectionName,
    /// As the upstream calls it.
    pub(super) tool: String,
    pub(super) price: NanoUsd,
}

impl Toll {
    pub(super) fn of(admitted: &Admitted, connection: &ConnectionName, tool: &str) -> Self {
        let connections = &admitted.publication.workspace.connections;
        let price = connections.get(connection).map_or(NanoUsd::ZERO, |c| {
            c.tools.get(tool).and_then(|rule| rule.price_per_call).unwrap_or(c.price_per_call)
        });
        Self { connection: connection.clone(), tool: tool.to_owned(), price }
    }

    /// What a call by this name probably is, by the publication alone. Only the listing of the connection decides.
    fn guess(admitted: &Admitted, exposed: &str) -> Option<Self> {
        let connections = &admitted.publication.workspace.connections;
        let prefixed = exposed.split_once("__").and_then(|(prefix, tool)| {
            let (name, connection) = connections.get_key_value(prefix)?;
            (connection.namespace == Namespace::Prefix).then_some((name, tool))
        });
        let (name, tool) = prefixed
            .or_else(|| {
                connections.iter().find_map(|(name, connection)| {
                    connection
                        .tools
                        .iter()
                        .find(|(_, rule)| rule.alias.as_deref() == Some(exposed))
                        .map(|(tool, _)| (name, tool.as_str()))
                })
            })
            .or_else(|| {
                let bare = connections.iter().find(|(_, connection)| connection.namespace == Namespace::None);
                bare.map(|(name, _)| (name, exposed))
            })?;
        Some(Self::of(admitted, name, tool))
    }
}

/// A call that was admitted before it is known whether it is made: what was set aside is given back unless somebody
/// takes it.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    idempotency: Option<Idempotency>,
    guess: Option<(Toll, Result<UsageGuard, Denied>)>,
}

impl Ahead {
    /// Of a call that is not admitted ahead.
    pub(super) fn none(idempotency: Option<Idempotency>) -> Self {
        Self { idempotency, guess: None }
    }

    /// As dropping it; and whoever sends the call again under its idempotency key finds the key free.
    pub(super) async fn give_back(mut self) {
        if let Some((_, Ok(guard))) = self.guess.take_if(|_| self.idempotency.is_some()) {
            guard.give_back().await;
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if let Some((_, Ok(guard))) = self.guess.take() {
            guard.cancel();
        }
    }
}

/// In the `_meta` of a call: what the client calls it, for those that cannot set a header.
const KEY: &str = "io.obol/idempotency-key";
/// In the `_meta` of a result that was given before.
const REPLAYED: &str = "io.obol/idempotent-replayed";

/// The idempotency key of a tool call, with what stands for the call: everything that it asks for, but not its `_meta`,
/// where each request has a progress token of its own.
///
/// # Errors
/// When it is none, or there are two.
pub(super) fn key(
    headers: Option<&HeaderMap>,
    view: Option<&ConnectionName>,
    message: &Message<'_>,
) -> Result<Option<Idempotency>, RpcError> {
    let Message::Request { method, params: Some(params), .. } = message else { return Ok(None) };
    if method != "tools/call" {
        return Ok(None);
    }
    let bad = |e: BadKey| refuse::params(e.to_string());
    let of_headers = headers.map(Key::of_headers).transpose().map_err(bad)?.flatten();
    // Looking for the key costs nothing; only who mentions it is read, with whatever escapes before it.
    if of_headers.is_none() && !params.get().contains("idempotency-key") {
        return Ok(None);
    }
    // What is no object is refused by the call itself.
    let Ok(params) = Object::parse(params.get()) else { return Ok(None) };
    let in_meta = params.object("_meta").and_then(|meta| meta.get(KEY));
    let text = in_meta.map(|key| wire::string(key).ok_or(BadKey::Shape)).transpose().map_err(bad)?;
    let of_meta = text.as_deref().map(|text| Key::new(text.as_bytes())).transpose().map_err(bad)?;
    if of_headers.is_some() && of_meta.is_some() && of_headers != of_meta {
        return Err(bad(BadKey::Different));
    }
    let Some(key) = of_headers.or(of_meta) else { return Ok(None) };
    let view = view.map_or("", ConnectionName::as_str);
    let asked = params.iter().filter(|(name, _)| *name != "_meta");
    let asked = asked.flat_map(|(name, value)| [name.as_bytes(), value.get().as_bytes()]);
    Ok(Some(key.with(["tools/call".as_bytes(), view.as_bytes()].into_iter().chain(asked))))
}

/// Keeps the answer of a call for whoever sends it again: all of it but its id, which is another one then.
pub(super) fn remember(guard: &mut UsageGuard, response: &Bytes) {
    if !guard.is_keyed() {
        return;
    }
    let member = |text, name| Some((name, Object::parse(text).ok()?.get(name)?));
    let text = str::from_utf8(response).unwrap_or_default();
    match member(text, "result").or_else(|| member(text, "error")) {
        Some((name, value)) => guard.remember(StoredAnswer {
            status: 200,
            content_type: "application/json".to_owned(),
            body: format!("{{\"{name}\":{value}}}").into(),
        }),
        None => guard.remember_unknown(),
    }
}

/// The answer of before to the request that is sent again; a result says in its `_meta` that it is not new.
pub(super) fn replay(id: &RawValue, answer: &StoredAnswer) -> Result<Bytes, RpcError> {
    let strange =
        || refuse::rpc(Kind::Internal, "idempotency_unreadable", "the stored answer cannot be read", None);
    let text = str::from_utf8(&answer.body).map_err(|_| strange())?;
    let members = Object::parse(text).map_err(|_| strange())?;
    if let Some(error) = members.get("error") {
        return Ok(wire::raw_error_response(id, error.get()));
    }
    let result = members.get("result").ok_or_else(strange)?.get();
    let object = Object::parse(result).map_err(|_| strange())?;
    let mut splice = Splice::new(result);
    match object.get("_meta").and_then(|meta| Some((meta.get(), Object::parse(meta.get()).ok()?))) {
        Some((meta_text, meta)) => splice.set_member(&meta, meta_text, REPLAYED, "true"),
        None => splice.set_member(&object, result, "_meta", &format!("{{\"{REPLAYED}\":true}}")),
    }
    Ok(wire::response(id, &splice.finish()))
}

impl Mcp {
    /// Admits a tool call by what its name probably means, so that this takes no flight of its own.
    pub(super) async fn admit_ahead(
        &self,
        admitted: &Admitted,
        message: &Message<'_>,
        idempotency: Option<Idempotency>,
    ) -> Ahead {
        let toll = || {
            let Message::Request { method, params, .. } = message else { return None };
            let params = Object::parse(params.filter(|_| method == "tools/call")?.get()).ok()?;
            let name = params.str("name").filter(|name| name.len() <= LONGEST_NAME)?;
            Toll::guess(admitted, &name)
        };
        let Some(toll) = toll() else { return Ahead::none(idempotency) };
        let answer = self.ask(admitted, &toll, idempotency).await;
        Ahead { idempotency, guess: Some((toll, answer)) }
    }

    /// The guard of a call that is going to be made: the one that was admitted ahead when it is that call's, else a new
    /// one.
    pub(super) async fn admit(
        &self,
        admitted: &Admitted,
        toll: &Toll,
        mut ahead: Ahead,
    ) -> Result<UsageGuard, Denied> {
        let idempotency = ahead.idempotency;
        match ahead.guess.take() {
            Some((guessed, answer)) if guessed == *toll => answer,
            Some((_, Ok(guard))) => {
                guard.give_back().await;
                // Another id: the one of the guess is closed for good.
                let again = Admitted { request_id: obol_model::RequestId::new(), ..admitted.clone() };
                self.ask(&again, toll, idempotency).await
            }
            Some((_, Err(_))) | None => self.ask(admitted, toll, idempotency).await,
        }
    }

    async fn ask(
        &self,
        admitted: &Admitted,
        toll: &Toll,
        idempotency: Option<Idempotency>,
    ) -> Result<UsageGuard, Denied> {
        let Toll { connection, tool, price } = toll.clone();
        let start = toll::start(admitted, UsageKind::ToolCall { connection, tool }, Price::PerCall(price));
        let terms = toll::terms(admitted, None, price, 0);
        self.meter.admit(Start { idempotency, ..start }, terms).await.map(|(guard, _)| guard)
    }
}
