use futures::StreamExt as _;
use reqwest::{Client, RequestBuilder, Response};

use super::*;
use crate::eventually;

const SOON: Duration = Duration::from_secs(10);

struct Caller {
    http: Client,
    url: String,
    session: Option<String>,
}

impl Caller {
    /// Does the handshake.
    async fn connect(server: &FakeMcp) -> Self {
        let mut caller = Self { http: Client::new(), url: server.url(), session: None };
        let response = caller
            .post(
                r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}"#,
            )
            .send()
            .await
            .unwrap();
        caller.session = response.headers().get("mcp-session-id").map(|id| id.to_str().unwrap().to_owned());
        assert!(response.text().await.unwrap().contains(r#""protocolVersion":"2025-06-18""#));
        let note =
            caller.post(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#).send().await.unwrap();
        assert_eq!(note.status(), 202);
        caller
    }

    fn with(&self, request: RequestBuilder) -> RequestBuilder {
        let request = request.header("accept", "application/json, text/event-stream");
        match &self.session {
            Some(session) => request.header("mcp-session-id", session),
            None => request,
        }
    }

    fn post(&self, body: &str) -> RequestBuilder {
        self.with(self.http.post(&self.url)).header("content-type", "application/json").body(body.to_owned())
    }

    fn request(&self, method: &str, params: &str) -> RequestBuilder {
        self.post(&format!(r#"{{"jsonrpc":"2.0","id":7,"method":"{method}","params":{params}}}"#))
    }

    fn tool(&self, params: &str) -> RequestBuilder {
        self.request("tools/call", params)
    }

    async fn ask(&self, method: &str, params: &str) -> String {
        self.request(method, params).send().await.unwrap().text().await.unwrap()
    }

    async fn stream(&self) -> Response {
        self.with(self.http.get(&self.url)).send().await.unwrap()
    }
}

#[tokio::test]
async fn it_serves_tools_resources_prompts_and_completion() {
    let server = FakeMcp::start().await;
    let caller = Caller::connect(&server).await;
    for (method, params, expected) in [
        ("ping", "{}", r#"{"jsonrpc":"2.0","id":7,"result":{}}"#),
        ("tools/list", "{}", r#""destructiveHint":true"#),
        ("tools/call", r#"{"name":"echo","arguments":{"a":1.0}}"#, r#""text":"{\"a\":1.0}""#),
        ("tools/call", r#"{"name":"nope"}"#, r#""error":{"code":-32602"#),
        ("resources/list", "{}", "demo://text"),
        ("resources/templates/list", "{}", "demo://item/{id}"),
        ("resources/read", r#"{"uri":"demo://item/7"}"#, r#""text":"item 7""#),
        ("resources/read", r#"{"uri":"demo://none"}"#, r#""code":-32002"#),
        ("prompts/list", "{}", "greet"),
        ("prompts/get", r#"{"name":"greet","arguments":{"name":"Ada"}}"#, "Please greet Ada."),
        ("completion/complete", r#"{"ref":{},"argument":{"name":"name","value":"Ad"}}"#, r#""Ad-one""#),
        ("logging/setLevel", r#"{"level":"debug"}"#, r#""result":{}"#),
        ("server/discover", "{}", r#""code":-32601"#),
    ] {
        let answer = caller.ask(method, params).await;
        assert!(answer.contains(expected), "{method} {params}: {answer}");
        let _: serde_json::Value = serde_json::from_str(&answer).unwrap();
    }
    let counts = server.counts();
    assert_eq!((counts.calls("echo"), counts.all_calls(), counts.requests_of("tools/call")), (1, 1, 2));
    assert_eq!((counts.sessions_created, counts.notifications_of("notifications/initialized")), (1, 1));
}

#[tokio::test]
async fn bytes_go_in_and_out_unchanged() {
    let server = FakeMcp::builder().tools(&[r#"{ "name":"odd", "x":1.0e+2 }"#]).start().await;
    let caller = Caller::connect(&server).await;
    let params =
        r#"{ "name":"raw","arguments":{"n":12345678901234567890123,"u":"\u00e9","z":1.0 } ,"a":null}"#;
    server.set_raw_result(r#"{"content":[], "big":98765432109876543210 ,"e":1E5}"#);
    let answer = caller.ask("tools/call", params).await;
    assert_eq!(
        answer,
        r#"{"jsonrpc":"2.0","id":7,"result":{"content":[], "big":98765432109876543210 ,"e":1E5}}"#
    );
    assert_eq!(server.last_params("tools/call").as_deref(), Some(params));
    assert_eq!(server.received_of("tools/call")[0].id().as_deref(), Some("7"));
    assert!(caller.ask("tools/list", "{}").await.contains(r#"{"tools":[{ "name":"odd", "x":1.0e+2 }]}"#));

    server.set_error("tools/list", r#"{"code":1,"message":"no"}"#);
    assert_eq!(
        caller.ask("tools/list", "{}").await,
        r#"{"jsonrpc":"2.0","id":7,"error":{"code":1,"message":"no"}}"#
    );
    server.set_status("tools/list", 500, "oops");
    assert_eq!(caller.request("tools/list", "{}").send().await.unwrap().status(), 500);
    server.unset("tools/list");
    assert!(caller.ask("tools/list", "{}").await.contains("odd"));
}

#[tokio::test]
async fn sessions_are_counted_lost_and_isolated() {
    let server = FakeMcp::start().await;
    let (one, two) = (Caller::connect(&server).await, Caller::connect(&server).await);
    for expected in ["1", "2"] {
        assert!(
            one.ask("tools/call", r#"{"name":"counter"}"#).await.contains(&format!(r#""text":"{expected}""#))
        );
    }
    assert!(two.ask("tools/call", r#"{"name":"counter"}"#).await.contains(r#""text":"1""#));

    for status in [404, 400] {
        let one = Caller::connect(&server).await;
        server.reject_session_once(status);
        assert_eq!(one.tool(r#"{"name":"echo"}"#).send().await.unwrap().status(), status);
        assert_eq!(one.tool(r#"{"name":"echo"}"#).send().await.unwrap().status(), 404, "it stays forgotten");
    }
    let gone = two.with(two.http.delete(&two.url)).send().await.unwrap();
    assert_eq!(gone.status(), 200);
    assert_eq!(two.tool(r#"{"name":"echo"}"#).send().await.unwrap().status(), 404);
    let counts = server.counts();
    assert_eq!((counts.calls("echo"), counts.sessions_created, counts.sessions_deleted), (0, 4, 1));

    let anonymous = Caller { session: None, ..one };
    assert_eq!(anonymous.tool(r#"{"name":"echo"}"#).send().await.unwrap().status(), 400);

    let server = FakeMcp::builder().sessions(false).start().await;
    let caller = Caller::connect(&server).await;
    assert_eq!(caller.session, None);
    assert!(caller.ask("tools/call", r#"{"name":"counter"}"#).await.contains(r#""text":"1""#));
}

#[tokio::test]
async fn notifications_precede_the_result_and_the_stream_can_be_cut() {
    let server = FakeMcp::start().await;
    let caller = Caller::connect(&server).await;
    server.before_result(2, 1);
    let call = r#"{"name":"echo","_meta":{"progressToken":"t"}}"#;
    let text = caller.ask("tools/call", call).await;
    let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.len(), 4, "{text}");
    assert!(data[1].contains(r#""progressToken":"t","progress":2,"total":2"#));
    assert!(data[2].contains("notifications/message") && data[3].contains(r#""id":7,"result""#));

    server.cut_mid_stream(1);
    let response = caller.tool(call).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.text().await.is_err());
    server.cut_after_executing(1);
    assert!(caller.tool(call).send().await.is_err());
    assert_eq!(server.calls("echo"), 3, "both were executed");
    assert!(caller.tool(call).send().await.unwrap().text().await.is_ok());

    server.before_result(0, 0);
    server.answer_with(Answers::Sse);
    assert!(caller.ask("ping", "{}").await.starts_with("event: message\ndata: {"));
}

#[tokio::test]
async fn calls_stall_and_hang_until_released() {
    let server = FakeMcp::start().await;
    let caller = Caller::connect(&server).await;
    server.stall(Stall::UntilReleased);
    server.hang_on("tools/list");
    let asked = tokio::spawn(async move {
        let both =
            tokio::join!(caller.ask("tools/call", r#"{"name":"echo"}"#), caller.ask("tools/list", "{}"));
        (caller, both)
    });
    server.wait_until(|counts| counts.calls("echo") == 1 && counts.requests_of("tools/list") == 1).await;
    assert!(!asked.is_finished());
    server.release();
    let (caller, (call, list)) = asked.await.unwrap();
    assert!(call.contains("result") && list.contains("tools"));
    assert_eq!(server.counts().left_early, 0);

    server.stall(Stall::UntilReleased);
    for answers in [Answers::Json, Answers::Sse] {
        server.answer_with(answers);
        let before = server.counts();
        let left = tokio::spawn(caller.tool(r#"{"name":"echo"}"#).send());
        server.wait_until(|counts| counts.calls("echo") > before.calls("echo")).await;
        match answers {
            Answers::Json => left.abort(),
            Answers::Sse => drop(left.await.unwrap().unwrap()),
        }
        eventually(SOON, || async { server.counts().left_early > before.left_early }).await;
    }
}

#[tokio::test]
async fn the_get_stream_tells_what_changed() {
    let server = FakeMcp::start().await;
    let caller = Caller::connect(&server).await;
    let mut stream = caller.stream().await.bytes_stream();
    assert_eq!(server.open_streams(), 1);
    server.add_tool(r#"{"name":"new","inputSchema":{"type":"object"}}"#);
    let event = stream.next().await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&event).contains("notifications/tools/list_changed"));
    assert!(caller.ask("tools/list", "{}").await.contains(r#""name":"new""#));

    assert_eq!(server.resource_updated("demo://text"), 0);
    caller.ask("resources/subscribe", r#"{"uri":"demo://text"}"#).await;
    assert_eq!(server.resource_updated("demo://text"), 1);
    let event = stream.next().await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&event).contains(r#"updated","params":{"uri":"demo://text"}"#));

    server.close_streams();
    assert!(stream.next().await.is_none());
    drop(caller.stream().await);
    eventually(SOON, || async { server.open_streams() == 0 }).await;
    assert_eq!(server.counts().streams_opened, 2);
}

#[tokio::test]
async fn lists_are_paged_and_bad_requests_refused() {
    let server = FakeMcp::builder().page_size(2).require_bearer("secret").get_stream(false).start().await;
    let caller = Caller { http: Client::new(), url: server.url(), session: None };
    assert_eq!(caller.request("initialize", "{}").send().await.unwrap().status(), 401);
    let initialized = caller.request("initialize", "{}").bearer_auth("secret").send().await.unwrap();
    let session = initialized.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    let caller = Caller { session: Some(session), ..caller };
    let page = async |params: &str| {
        caller.request("tools/list", params).bearer_auth("secret").send().await.unwrap().text().await.unwrap()
    };
    assert!(page("{}").await.ends_with(r#""nextCursor":"1"}}"#));
    assert!(page(r#"{"cursor":"1"}"#).await.ends_with(r#""nextCursor":"2"}}"#));
    let last = page(r#"{"cursor":"2"}"#).await;
    assert!(last.contains("destroy") && !last.contains("nextCursor"));
    assert!(page(r#"{"cursor":"9"}"#).await.contains("Invalid cursor"));

    let status =
        async |request: RequestBuilder| request.bearer_auth("secret").send().await.unwrap().status().as_u16();
    assert_eq!(status(caller.post("{")).await, 400);
    assert_eq!(status(caller.with(caller.http.post(&caller.url)).body("{}")).await, 415);
    assert_eq!(status(caller.http.post(&caller.url).body(r#"{"id":1,"method":"ping"}"#)).await, 406);
    assert_eq!(status(caller.with(caller.http.get(&caller.url))).await, 405);
    assert_eq!(status(caller.request("ping", "{}").header("mcp-protocol-version", "1999-01-01")).await, 400);
    assert_eq!(status(caller.http.post(caller.url.replace("/mcp", "/other"))).await, 404);
}

#[tokio::test]
async fn it_refuses_connections_and_comes_back() {
    let server = FakeMcp::start().await;
    let caller = Caller::connect(&server).await;
    server.refuse().await;
    assert!(caller.request("ping", "{}").send().await.unwrap_err().is_connect());
    server.accept().await;
    assert!(caller.ask("ping", "{}").await.contains("result"), "the session survived");
}
