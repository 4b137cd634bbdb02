//! A pool and what tests say to it.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use obol_mcp::pool::{
    Call, CallError, Endpoint, EndpointKind, Event, Exchange, HttpConnect, Pool, PoolOptions, Spawn,
};
use obol_mcp::wire::ProtocolVersion;
use serde_json::value::RawValue;
use tokio::time::Instant;

pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) struct Tokio;

impl Spawn for Tokio {
    #[expect(clippy::disallowed_methods, reason = "a test has no task tracker")]
    fn spawn(&self, _name: &'static str, future: BoxFuture<'static, ()>) {
        tokio::spawn(future);
    }
}

pub(crate) fn options() -> PoolOptions {
    PoolOptions {
        close_timeout: Duration::from_secs(2),
        breaker_open: Duration::from_millis(300),
        ..PoolOptions::default()
    }
}

pub(crate) fn pool_with(options: PoolOptions) -> Arc<Pool> {
    let dialer = obol_dial::Dialer::new(obol_dial::DialOptions::default()).unwrap();
    let http = HttpConnect::new(dialer).with_max_message(1 << 20);
    Pool::new(Arc::new(http), Arc::new(Tokio), options)
}

pub(crate) fn pool() -> Arc<Pool> {
    pool_with(options())
}

pub(crate) fn endpoint(url: &str) -> Endpoint {
    Endpoint {
        workspace: "acme".parse().unwrap(),
        connection: "upstream".parse().unwrap(),
        version: ProtocolVersion::LATEST,
        kind: EndpointKind::Http { url: url.parse().unwrap(), credential: None, allow_private: true },
        isolation: None,
        generation: 1,
    }
}

pub(crate) fn at(url: &str) -> Arc<Endpoint> {
    Arc::new(endpoint(url))
}

pub(crate) fn call<'a>(method: &'a str, params: &'a str) -> Call<'a> {
    Call {
        method,
        params: Some(params),
        progress_token: None,
        log_level: None,
        deadline: Instant::now() + SOON,
    }
}

pub(crate) fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

/// The notifications and the end of an exchange.
pub(crate) async fn finish(exchange: &mut Exchange) -> (Vec<Bytes>, Result<Event, CallError>) {
    let mut notifications = Vec::new();
    loop {
        match exchange.next().await.expect("an exchange ends with an answer or an error") {
            Ok(Event::Notification(n)) => notifications.push(n),
            end => {
                assert!(exchange.next().await.is_none(), "nothing comes after the end");
                return (notifications, end);
            }
        }
    }
}

/// Calls a tool and returns its result as text.
pub(crate) async fn tool(pool: &Arc<Pool>, at: &Arc<Endpoint>, params: &str) -> Result<String, CallError> {
    let mut exchange = pool.call(at, call("tools/call", params)).await?;
    match finish(&mut exchange).await.1? {
        Event::Result(result) => Ok(String::from_utf8(result.to_vec()).unwrap()),
        other => panic!("{other:?}"),
    }
}

pub(crate) const ECHO: &str = r#"{"name":"echo","arguments":{"n":1.0}}"#;

#[expect(clippy::disallowed_methods, reason = "a test has no task tracker")]
pub(crate) fn background(future: impl Future<Output = ()> + Send + 'static) -> tokio::task::JoinHandle<()> {
    tokio::spawn(future)
}
