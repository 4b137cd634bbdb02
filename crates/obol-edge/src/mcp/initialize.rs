//! `initialize`: always a fresh session (DESIGN §9.6), and never a wait for an upstream (§9.4).

use axum::response::Response;
use obol_mcp::wire::{self, Object, ProtocolVersion, RpcError};
use obol_model::{ConnectionName, Kind};
use obol_session::NewSession;
use serde_json::json;
use serde_json::value::RawValue;

use super::negotiate::Accept;
use super::{Mcp, SESSION_ID, answer, refuse, session, session_header};
use crate::failure::Refusal;
use crate::front::Admitted;

/// Bound of what one connection adds to the instructions, in characters.
const MAX_INSTRUCTIONS: usize = 2_000;

impl Mcp {
    pub(super) async fn initialize(
        &self,
        admitted: &Admitted,
        view: Option<&ConnectionName>,
        accept: Accept,
        id: &RawValue,
        params: Option<&RawValue>,
    ) -> Response {
        let Some(params) = params.and_then(|p| Object::parse(p.get()).ok()) else {
            return refuse::malformed(&refuse::params("`initialize` needs params"), Some(id));
        };
        let Some(requested) = params.str("protocolVersion") else {
            let error = RpcError::new(RpcError::INVALID_PARAMS, "`protocolVersion` must be a string");
            return refuse::malformed(&error, Some(id));
        };
        let client = session::client_name(params.get("clientInfo"));
        let visible = visible(admitted, client.as_deref(), view);
        if visible.is_empty() && !admitted.publication.compiled.connections.is_empty() {
            let message = "the policies let this key connect to no connection of the workspace";
            return refuse::http(&Refusal::new(Kind::Forbidden, "connect_denied", message), Some(id));
        }
        let (version, text) = ProtocolVersion::negotiate(&requested);
        let new = NewSession {
            workspace_id: admitted.identity.workspace_id().clone(),
            key_id: admitted.identity.key_id().cloned(),
            principal: admitted.identity.principal(),
            protocol_version: text.to_owned(),
            client_info: params.get("clientInfo").map(ToOwned::to_owned),
            client_capabilities: params.get("capabilities").map(ToOwned::to_owned),
        };
        let record = match self.sessions.create(new).await {
            Ok(record) => record,
            Err(e) => return refuse::http(&session::refusal(&e), Some(id)),
        };
        tracing::info!(
            workspace = %record.workspace_id,
            principal = %record.principal,
            session_last4 = record.session_id.last4(),
            protocol = text,
            "session created"
        );
        let result = self.initialize_result(admitted, &visible, version, text);
        let mut response = answer::message(accept, wire::response(id, &result));
        if let Some(value) = session_header(record.session_id) {
            response.headers_mut().insert(SESSION_ID, value);
        }
        response
    }

    /// Capabilities are the union of what the visible connections said last; one that was never reached may have
    /// everything (DESIGN §9.4).
    fn initialize_result(
        &self,
        admitted: &Admitted,
        visible: &[&ConnectionName],
        version: ProtocolVersion,
        text: &str,
    ) -> String {
        let (mut tools, mut resources, mut prompts) = (false, false, false);
        let (mut completions, mut logging) = (false, false);
        let mut instructions = String::new();
        for name in visible {
            let Some(connection) = admitted.publication.compiled.connections.get(*name) else { continue };
            let endpoint = &connection.shared(version).endpoint;
            let known = self.pool.capabilities(endpoint);
            tools |= known.as_ref().is_none_or(|k| k.tools.is_some());
            resources |= known.as_ref().is_none_or(|k| k.resources.is_some());
            prompts |= known.as_ref().is_none_or(|k| k.prompts.is_some());
            completions |= known.as_ref().is_none_or(|k| k.completions.is_some());
            logging |= known.as_ref().is_none_or(|k| k.logging.is_some());
            if let Some(text) = self.pool.instructions(endpoint) {
                let section: String = text.chars().take(MAX_INSTRUCTIONS).collect();
                instructions.push_str(&format!("# {name}\n\n{section}\n\n"));
            }
        }
        let mut capabilities = serde_json::Map::new();
        if tools {
            capabilities.insert("tools".into(), json!({ "listChanged": true }));
        }
        if resources {
            capabilities.insert("resources".into(), json!({ "listChanged": true, "subscribe": true }));
        }
        if prompts {
            capabilities.insert("prompts".into(), json!({ "listChanged": true }));
        }
        if completions {
            capabilities.insert("completions".into(), json!({}));
        }
        if logging {
            capabilities.insert("logging".into(), json!({}));
        }
        let mut result = json!({
            "protocolVersion": text,
            "capabilities": capabilities,
            "serverInfo": { "name": "obol", "title": "Obol gateway", "version": env!("CARGO_PKG_VERSION") },
        });
        if let (Some(result), false) = (result.as_object_mut(), instructions.is_empty()) {
            result.insert("instructions".into(), instructions.trim_end().into());
        }
        result.to_string()
    }
}

fn visible<'a>(
    admitted: &'a Admitted,
    client: Option<&str>,
    view: Option<&ConnectionName>,
) -> Vec<&'a ConnectionName> {
    let all = admitted.publication.compiled.connections.keys();
    all.filter(|name| view.is_none_or(|v| v == *name))
        .filter(|name| session::authorize_connect(admitted, client, "initialize", name))
        .collect()
}
