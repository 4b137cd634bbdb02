//! One kept-alive HTTP/1.1 connection of one client.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use obol_testkit::Failure;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longest time for one answer, last byte included. Far beyond what is measured: it keeps the run bounded.
const ANSWER: Duration = Duration::from_secs(10);

pub(crate) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    host: HeaderValue,
}

pub(crate) struct Answered {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// Connects. The second value moves the bytes: it has to be polled beside every use of the first, and never ends.
pub(crate) async fn open(
    addr: SocketAddr,
) -> Result<(Connection, impl Future<Output = Infallible> + Send + 'static), Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::new(format!("cannot connect to {addr}: {why}"));
    let stream =
        timeout(ANSWER, TcpStream::connect(addr)).await.map_err(|e| failed(&e))?.map_err(|e| failed(&e))?;
    stream.set_nodelay(true).ok();
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
    let host = HeaderValue::from_str(&addr.to_string()).map_err(|e| failed(&e))?;
    let moving = async move {
        // How it ended is told to whoever waits for an answer.
        drop(connection.await);
        std::future::pending().await
    };
    Ok((Connection { sender, host }, moving))
}

impl Connection {
    /// One request and all of its answer.
    pub(crate) async fn exchange(
        &mut self,
        method: Method,
        path: &'static str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Answered, String> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = http::Uri::from_static(path);
        *request.headers_mut() = headers.clone();
        request.headers_mut().insert(header::HOST, self.host.clone());
        let answer = async {
            self.sender.ready().await?;
            let (head, body) = self.sender.send_request(request).await?.into_parts();
            Ok::<_, hyper::Error>(Answered {
                status: head.status,
                headers: head.headers,
                body: body.collect().await?.to_bytes(),
            })
        };
        match timeout(ANSWER, answer).await {
            Ok(Ok(answered)) => Ok(answered),
            Ok(Err(why)) => Err(format!("the connection broke: {why}")),
            Err(_) => Err(format!("no answer within {ANSWER:?}")),
        }
    }
}
