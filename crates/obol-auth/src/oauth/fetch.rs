//! How the keys of an issuer are found: from its configured URL alone, by RFC 8414 or OpenID Connect Discovery.

use std::time::Duration;

use obol_dial::Dialer;
use serde::Deserialize;
use url::Url;

use super::issuer::Issuer;
use super::jwks::{JwksError, KeySet};
use super::resource::is_protected;

/// For one document.
const REQUEST: Duration = Duration::from_secs(5);
/// Metadata and key sets have a few kB.
const LARGEST: usize = 512 << 10;

/// Why the keys of an issuer could not be fetched. The texts hold nothing of what the issuer sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("its URL cannot be dialled: {0}")]
    Address(#[from] obol_dial::Refused),
    #[error("no connection: {0}")]
    Connect(&'static str),
    #[error("it broke off, or did not answer in time")]
    BrokeOff,
    #[error("it answered {0}")]
    Status(u16),
    #[error("its answer has more than {LARGEST} bytes")]
    TooLarge,
    #[error("its metadata is no JSON with `issuer` and `jwks_uri`")]
    NotMetadata,
    #[error(
        "its metadata is that of another issuer: `issuer` must be what OBOL_OAUTH_ISSUERS says, to the letter"
    )]
    OtherIssuer,
    #[error("its `jwks_uri` is no `https` URL")]
    KeysUrl,
    #[error("its keys cannot be read: {0}")]
    Keys(#[from] JwksError),
}

#[derive(Deserialize)]
struct Metadata {
    issuer: String,
    jwks_uri: String,
}

/// Where the keys of an issuer are.
pub(super) async fn find(dialer: &Dialer, issuer: &Issuer) -> Result<Url, FetchError> {
    let mut last = FetchError::NotMetadata;
    for url in well_known(issuer.url()) {
        match metadata(dialer, issuer, &url).await {
            Ok(found) => return Ok(found),
            // The next place may have it; what an earlier one said counts only if none has.
            Err(why @ (FetchError::Status(_) | FetchError::NotMetadata)) => last = why,
            Err(why) => return Err(why),
        }
    }
    Err(last)
}

/// The keys at a URL.
pub(super) async fn keys(dialer: &Dialer, url: &Url) -> Result<KeySet, FetchError> {
    Ok(KeySet::parse(&get(dialer, url).await?)?)
}

/// The places of the MCP authorization page, "Authorization Server Metadata Discovery", in its order.
fn well_known(issuer: &Url) -> Vec<Url> {
    let path = issuer.path().trim_end_matches('/');
    let at = |path: String| {
        let mut url = issuer.clone();
        url.set_path(&path);
        url
    };
    let mut all = vec![
        at(format!("/.well-known/oauth-authorization-server{path}")),
        at(format!("/.well-known/openid-configuration{path}")),
    ];
    if !path.is_empty() {
        all.push(at(format!("{path}/.well-known/openid-configuration")));
    }
    all
}

async fn metadata(dialer: &Dialer, issuer: &Issuer, url: &Url) -> Result<Url, FetchError> {
    let document = get(dialer, url).await?;
    let found: Metadata = serde_json::from_slice(&document).map_err(|_| FetchError::NotMetadata)?;
    // RFC 8414 section 3.3: identical, or the document is not to be used.
    if found.issuer != issuer.id() {
        return Err(FetchError::OtherIssuer);
    }
    Url::parse(&found.jwks_uri).ok().filter(is_protected).ok_or(FetchError::KeysUrl)
}

async fn get(dialer: &Dialer, url: &Url) -> Result<Vec<u8>, FetchError> {
    // Issuers are the operator's choice, and often stand in the same private network.
    let allow_private = true;
    obol_dial::check(url, allow_private)?;
    let request = dialer.client(allow_private).get(url.clone()).header("accept", "application/json");
    let mut response = request.timeout(REQUEST).send().await.map_err(|e| {
        if e.is_connect() { FetchError::Connect(obol_dial::connect_reason(&e)) } else { FetchError::BrokeOff }
    })?;
    // Redirects are not followed: whoever controls one would choose the keys.
    if response.status().as_u16() != 200 {
        return Err(FetchError::Status(response.status().as_u16()));
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| FetchError::BrokeOff)? {
        if body.len() + chunk.len() > LARGEST {
            return Err(FetchError::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_looked_for_in_the_order_of_the_specification() {
        let places = |issuer: &str| -> Vec<String> {
            well_known(&issuer.parse().unwrap()).into_iter().map(String::from).collect()
        };
        assert_eq!(
            places("https://auth.example.com/tenant1"),
            [
                "https://auth.example.com/.well-known/oauth-authorization-server/tenant1",
                "https://auth.example.com/.well-known/openid-configuration/tenant1",
                "https://auth.example.com/tenant1/.well-known/openid-configuration",
            ]
        );
        for issuer in ["https://auth.example.com", "https://auth.example.com/"] {
            assert_eq!(
                places(issuer),
                [
                    "https://auth.example.com/.well-known/oauth-authorization-server",
                    "https://auth.example.com/.well-known/openid-configuration",
                ]
            );
        }
    }
}
