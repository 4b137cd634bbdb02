//! What `obol dev` prints once it serves: how to reach it, with commands that work as pasted.
//!
//! The examples are taken from what the gateway itself answers, so that they fit any workspace file.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use obol_model::VirtualKey;
use reqwest::Client;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::out;

/// Longest wait for upstreams that are to be shown in the examples.
const PATIENCE: Duration = Duration::from_secs(8);

/// Prints the address, the key, examples and client configurations.
///
/// # Errors
/// When stdout is closed.
pub(super) async fn print(address: SocketAddr, key: &VirtualKey, file: &Path) -> Result<(), Failure> {
    let url = format!("http://{address}");
    let seen = look(&url, key.expose()).await.unwrap_or_default();
    out::text(text(&url, key.expose(), file, &seen))?;
    Ok(())
}

/// What the gateway offers, as far as it could be seen.
#[derive(Debug, Default)]
struct Seen {
    tools: usize,
    /// The name and arguments of a tool that can be called without knowing it.
    tool: Option<(String, Value)>,
    model: Option<String>,
}

async fn look(url: &str, key: &str) -> Result<Seen, reqwest::Error> {
    let client = Client::builder().timeout(PATIENCE).no_proxy().build()?;
    let post = |session: Option<&str>, body: Value| {
        let mut request = client
            .post(format!("{url}/mcp"))
            .bearer_auth(key)
            .header("accept", "application/json, text/event-stream")
            .json(&body);
        if let Some(session) = session {
            request = request.header("mcp-session-id", session);
        }
        request.send()
    };
    let mut seen = Seen::default();
    let hello = post(None, initialize()).await?;
    if let Some(session) = hello.headers().get("mcp-session-id").and_then(|v| v.to_str().ok()) {
        let answer = post(Some(session), json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})).await?;
        let list: Value = answer.json().await?;
        let tools = list.pointer("/result/tools").and_then(Value::as_array).cloned().unwrap_or_default();
        seen.tools = tools.len();
        seen.tool = tools.iter().find_map(example_call);
        client.delete(format!("{url}/mcp")).bearer_auth(key).header("mcp-session-id", session).send().await?;
    }
    let models: Value = client.get(format!("{url}/v1/models")).bearer_auth(key).send().await?.json().await?;
    seen.model = models.pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned);
    Ok(seen)
}

fn initialize() -> Value {
    json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "curl", "version": "0"}}})
}

/// A call of `tool` with no arguments, or with one word for its only required string.
fn example_call(tool: &Value) -> Option<(String, Value)> {
    let name = tool.get("name")?.as_str()?.to_owned();
    let required =
        tool.pointer("/inputSchema/required").and_then(Value::as_array).cloned().unwrap_or_default();
    match required.as_slice() {
        [] => Some((name, json!({}))),
        [only] => {
            let property = tool.pointer("/inputSchema/properties")?.get(only.as_str()?)?;
            (property.get("type")?.as_str()? == "string")
                .then(|| (name, json!({ only.as_str().unwrap_or_default(): "hello" })))
        }
        _ => None,
    }
}

fn text(url: &str, key: &str, file: &Path, seen: &Seen) -> String {
    let mut out = format!(
        "\nObol is ready.\n\n  MCP        {url}/mcp  ({} tools)\n  LLM        {url}/v1\n  key        {key}\n  workspace  {} \
         (edit it: changes take effect within a second)\n",
        seen.tools,
        file.display()
    );
    let mut add = |part: String| out.push_str(&part);
    let (method, params) = match &seen.tool {
        Some((name, arguments)) => ("tools/call", json!({ "name": name, "arguments": arguments })),
        None => ("tools/list", json!({})),
    };
    let call = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    add(format!(
        "\nCall a tool:\n\n\
         SESSION=$(curl -s -o /dev/null -D - {url}/mcp -H 'Authorization: Bearer {key}' \\\n  \
         -H 'Content-Type: application/json' -H 'Accept: application/json, text/event-stream' \\\n  \
         -d '{}' \\\n  | tr -d '\\r' | sed -n 's/^mcp-session-id: //Ip')\n\
         curl -s {url}/mcp -H 'Authorization: Bearer {key}' -H \"Mcp-Session-Id: $SESSION\" \\\n  \
         -H 'Content-Type: application/json' -H 'Accept: application/json, text/event-stream' \\\n  \
         -d '{call}'\n",
        initialize()
    ));
    if let Some(model) = &seen.model {
        let chat = json!({"model": model, "messages": [{"role": "user", "content": "Say hello"}]});
        add(format!(
            "\nAsk a model:\n\n\
             curl -s {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\\n  \
             -H 'Content-Type: application/json' -d '{chat}'\n"
        ));
    }
    let vscode = json!({"servers": {"obol": {"type": "http", "url": format!("{url}/mcp"),
        "headers": {"Authorization": format!("Bearer {key}")}}}});
    add(format!("\nVS Code (.vscode/mcp.json):\n\n{vscode:#}\n"));
    add(format!(
        "\nClaude Code:\n\nclaude mcp add --transport http obol {url}/mcp --header 'Authorization: Bearer {key}'\n"
    ));
    add(format!(
        "\nPython (pip install mcp):\n\n\
         import asyncio\n\
         from mcp import ClientSession\n\
         from mcp.client.streamable_http import streamablehttp_client\n\n\
         async def main():\n    \
         headers = {{\"Authorization\": \"Bearer {key}\"}}\n    \
         async with streamablehttp_client(\"{url}/mcp\", headers=headers) as (read, write, _):\n        \
         async with ClientSession(read, write) as session:\n            \
         await session.initialize()\n            \
         print([tool.name for tool in (await session.list_tools()).tools])\n\n\
         asyncio.run(main())\n\n\
         Ctrl-C ends it.\n"
    ));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_is_a_call_that_can_be_made_blindly() {
        let tool = |required: Value| {
            json!({"name": "t", "inputSchema": {"type": "object", "properties": {"q": {"type": "string"},
                "n": {"type": "integer"}}, "required": required}})
        };
        assert_eq!(example_call(&tool(json!([]))), Some(("t".into(), json!({}))));
        assert_eq!(example_call(&tool(json!(["q"]))), Some(("t".into(), json!({"q": "hello"}))));
        assert_eq!(example_call(&tool(json!(["n"]))), None);
        assert_eq!(example_call(&tool(json!(["q", "n"]))), None);
    }

    #[test]
    fn what_cannot_be_seen_is_left_out() {
        let text = text("http://127.0.0.1:1", "obol_k", Path::new("a.yaml"), &Seen::default());
        assert!(text.contains("tools/list") && !text.contains("chat/completions"));
    }
}
