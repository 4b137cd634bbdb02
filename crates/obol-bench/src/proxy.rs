//! The floor: a reverse proxy that looks at nothing. What a gateway costs above this is what it does.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{Either, Empty};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use obol_testkit::Failure;

use crate::serve::serve;

type Body = Either<Incoming, Empty<bytes::Bytes>>;

/// Longest time to connect upstream.
const CONNECT: Duration = Duration::from_secs(5);

pub(crate) async fn run(listen: SocketAddr, to: SocketAddr) -> Result<ExitCode, Failure> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT));
    let client = Client::builder(TokioExecutor::new()).build(connector);
    let authority: Authority =
        to.to_string().parse().map_err(|_| Failure::new(format!("`{to}` is no authority")))?;
    serve(listen, move |request| pass(client.clone(), authority.clone(), request)).await
}

async fn pass(
    client: Client<HttpConnector, Incoming>,
    authority: Authority,
    mut request: Request<Incoming>,
) -> Response<Body> {
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = Some(authority);
    parts.path_and_query =
        Some(request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")));
    // Cannot fail: all three parts are there.
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    let Ok(response) = client.request(request).await else {
        let mut response = Response::new(Either::Right(Empty::new()));
        *response.status_mut() = StatusCode::BAD_GATEWAY;
        return response;
    };
    response.map(Either::Left)
}
