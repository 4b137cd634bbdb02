//! The demo upstreams, as a client that is not ours would see them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test helper should fail where it is")]
#![allow(clippy::disallowed_methods, reason = "a client that is not ours has no composer")]

use std::process::Stdio;
use std::time::Duration;

use obol_testkit::process::Proc;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

const DEMO: &str = env!("CARGO_BIN_EXE_obol-demo");
const SOON: Duration = Duration::from_secs(10);

/// Starts an upstream on a port of its own and returns its URL.
async fn start(command: &str) -> (Proc, String) {
    let upstream = Proc::command(DEMO).args([command, "--listen", "127.0.0.1:0"]).spawn();
    let line = upstream.wait_for_line(SOON, |line| line.starts_with("listening ")).await;
    let url = line.rsplit(' ').next().unwrap().to_owned();
    (upstream, url)
}

struct Client {
    http: reqwest::Client,
    url: String,
    session: String,
}

impl Client {
    async fn connect(url: &str) -> Self {
        let mut client = Self { http: reqwest::Client::new(), url: url.to_owned(), session: String::new() };
        let params = json!({
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        });
        let (session, messages) =
            client.post(&json!({"id": 0, "method": "initialize", "params": params})).await;
        client.session = session.unwrap();
        assert_eq!(messages[0]["result"]["serverInfo"]["name"], "tickets");
        client.post(&json!({"method": "notifications/initialized"})).await;
        client
    }

    /// Posts one message; returns the session that the answer names and all messages in it.
    async fn post(&self, message: &Value) -> (Option<String>, Vec<Value>) {
        let mut message = message.clone();
        message["jsonrpc"] = json!("2.0");
        let mut request = self
            .http
            .post(&self.url)
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", "2025-11-25");
        if !self.session.is_empty() {
            request = request.header("mcp-session-id", &self.session);
        }
        let response = request.body(message.to_string()).send().await.unwrap().error_for_status().unwrap();
        let session = response.headers().get("mcp-session-id").map(|id| id.to_str().unwrap().to_owned());
        let text = response.text().await.unwrap();
        let data = text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim);
        (
            session,
            data.filter(|data| !data.is_empty()).map(|data| serde_json::from_str(data).unwrap()).collect(),
        )
    }

    async fn ask(&self, method: &str, params: Value) -> Value {
        let (_, messages) = self.post(&json!({"id": 1, "method": method, "params": params})).await;
        messages.last().unwrap().clone()
    }

    async fn tool(&self, name: &str, arguments: Value) -> Value {
        self.ask("tools/call", json!({"name": name, "arguments": arguments})).await["result"].clone()
    }
}

#[tokio::test]
async fn the_ticket_desk_serves_tools_resources_and_a_prompt() {
    let (_upstream, url) = start("mcp-http").await;
    let client = Client::connect(&url).await;

    let tools = client.ask("tools/list", json!({})).await["result"]["tools"].clone();
    let tool =
        |name: &str| tools.as_array().unwrap().iter().find(|tool| tool["name"] == name).unwrap().clone();
    assert_eq!(tools.as_array().unwrap().len(), 4);
    assert_eq!(tool("close_ticket")["annotations"]["destructiveHint"], true);
    assert_eq!(tool("search_tickets")["annotations"]["readOnlyHint"], true);
    assert!(tool("search_tickets")["outputSchema"].is_object());

    let found = client.tool("search_tickets", json!({"query": "harbour", "status": "open"})).await;
    assert_eq!(found["structuredContent"]["count"], 1);
    assert_eq!(found["structuredContent"]["tickets"][0]["id"], 101);
    assert_eq!(client.tool("get_ticket", json!({"id": 9})).await["isError"], true);

    let closed = client.tool("close_ticket", json!({"id": 101, "resolution": "sent once now"})).await;
    assert_eq!(closed["content"][1]["uri"], "ticket://101");
    let ticket = client.tool("get_ticket", json!({"id": 101})).await;
    assert_eq!(ticket["structuredContent"]["status"], "closed");

    let resources = client.ask("resources/list", json!({})).await["result"]["resources"].clone();
    assert_eq!(resources.as_array().unwrap().len(), 4, "only open tickets are listed");
    let templates = client.ask("resources/templates/list", json!({})).await;
    assert_eq!(templates["result"]["resourceTemplates"][0]["uriTemplate"], "ticket://{id}");
    let read = client.ask("resources/read", json!({"uri": "ticket://104"})).await;
    assert!(read["result"]["contents"][0]["text"].as_str().unwrap().contains("Typo"));
    assert_eq!(client.ask("resources/read", json!({"uri": "ticket://9"})).await["error"]["code"], -32002);

    let prompt = client.ask("prompts/get", json!({"name": "triage", "arguments": {"ticket": "105"}})).await;
    assert!(prompt["result"]["messages"][0]["content"]["text"].as_str().unwrap().contains("Sign-in is slow"));
}

#[tokio::test]
async fn a_report_tells_how_far_it_is() {
    let (_upstream, url) = start("mcp-http").await;
    let client = Client::connect(&url).await;
    let params = json!({"name": "export_report", "arguments": {"steps": 2}, "_meta": {"progressToken": "p"}});
    let (_, messages) = client.post(&json!({"id": 1, "method": "tools/call", "params": params})).await;
    let steps: Vec<&Value> = messages[..2].iter().map(|message| &message["params"]["progress"]).collect();
    assert_eq!(steps, [&json!(1.0), &json!(2.0)]);
    assert_eq!(messages[0]["params"]["progressToken"], "p");
    assert!(messages[2]["result"]["content"][0]["text"].as_str().unwrap().starts_with("6 tickets"));
}

#[tokio::test]
async fn the_drawer_keeps_notes_over_stdio() {
    let mut child = tokio::process::Command::new(DEMO)
        .arg("mcp-stdio")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut ask = async |method: &str, params: Value| -> Value {
        let message = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        stdin.write_all(format!("{message}\n").as_bytes()).await.unwrap();
        let line = tokio::time::timeout(SOON, stdout.next_line()).await.unwrap().unwrap().unwrap();
        serde_json::from_str::<Value>(&line).unwrap()["result"].clone()
    };
    let hello = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
    assert_eq!(ask("initialize", hello).await["serverInfo"]["name"], "desk");
    let mut tool = async |name: &str, arguments: Value| {
        ask("tools/call", json!({"name": name, "arguments": arguments})).await
    };
    tool("notes_add", json!({"text": "buy stamps"})).await;
    let notes = tool("notes_list", json!({})).await;
    assert_eq!(notes["structuredContent"]["notes"], json!(["buy stamps"]));
    let rolled = tool("roll_dice", json!({"sides": 4, "count": 9})).await;
    let dice = rolled["structuredContent"]["dice"].as_array().unwrap();
    assert!(dice.len() == 9 && dice.iter().all(|die| (1..=4).contains(&die.as_u64().unwrap())));
    assert_eq!(tool("roll_dice", json!({"sides": 1})).await["isError"], true);
    assert!(tool("now", json!({})).await["content"][0]["text"].as_str().unwrap().ends_with('Z'));

    drop(stdin);
    let status = tokio::time::timeout(SOON, child.wait()).await.unwrap().unwrap();
    assert!(status.success(), "the end of its input ends it");
}

#[tokio::test]
async fn the_model_server_answers_whole_and_in_pieces() {
    let (_upstream, url) = start("model").await;
    let http = reqwest::Client::new();
    let chat = async |body: Value| {
        let request = http.post(format!("{url}/chat/completions")).bearer_auth("demo-provider-secret");
        request.body(body.to_string()).send().await.unwrap()
    };
    let messages = json!([{"role": "user", "content": "hello there"}]);
    let answer: Value =
        chat(json!({"model": "demo-small", "messages": messages})).await.json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "You said: “hello there”");
    assert_eq!(answer["usage"], json!({"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}));
    let short: Value = chat(json!({"model": "demo-large", "messages": messages, "max_tokens": 3}))
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    assert!(short["usage"]["completion_tokens"].as_u64().unwrap() <= 3);

    let options = json!({"include_usage": true});
    let body =
        json!({"model": "demo-small", "messages": messages, "stream": true, "stream_options": options});
    let text = chat(body).await.text().await.unwrap();
    let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    let chunks: Vec<Value> = chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect();
    let words: Vec<&str> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(words.concat(), "You said: “hello there”");
    let last = chunks.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &json!(13)));
    let plain = chat(json!({"model": "demo-small", "messages": messages, "stream": true}))
        .await
        .text()
        .await
        .unwrap();
    assert!(!plain.contains("usage"));

    assert_eq!(chat(json!({"model": "gpt", "messages": []})).await.status(), 404);
    assert_eq!(chat(json!({"model": 1})).await.status(), 400);
    assert_eq!(http.get(format!("{url}/models")).send().await.unwrap().status(), 401);
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let holder = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = holder.local_addr().unwrap().to_string();
    let upstream = Proc::command(DEMO).args(["model", "--listen", &addr]).spawn();
    assert_eq!(upstream.wait(SOON).await.code(), Some(1));
    let said = upstream.lines().join("\n");
    assert!(said.contains(&format!("{addr} is taken")) && said.contains("ss -ltnp"), "{said}");
}

#[tokio::test]
async fn a_signal_ends_an_upstream_cleanly() {
    let (upstream, _) = start("model").await;
    upstream.terminate();
    assert!(upstream.wait(SOON).await.success());
}
