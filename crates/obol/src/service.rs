//! The service JWTs of a process (DESIGN §8.2).

use std::sync::Arc;

use obol_auth::{ServiceKeyError, ServiceTokens, UsedTokens};

use crate::config::ServiceJwt;
use crate::failure::Failure;

/// What signs as `issuer` and verifies by the configured keys, `None` without any. Made once in a process: it remembers
/// which tokens were used here. `used` tells the other replicas.
///
/// # Errors
/// When a key cannot be used, which the configuration has already ruled out.
pub(crate) fn tokens(
    key: Option<&ServiceJwt>,
    issuer: &str,
    used: Option<UsedTokens>,
) -> Result<Option<Arc<ServiceTokens>>, Failure> {
    let Some(key) = key else { return Ok(None) };
    let tokens = build(key, issuer).map_err(Failure::runtime)?;
    Ok(Some(Arc::new(match used {
        Some(used) => tokens.sharing(used),
        None => tokens,
    })))
}

fn build(key: &ServiceJwt, issuer: &str) -> Result<ServiceTokens, ServiceKeyError> {
    match key {
        ServiceJwt::Secret(secret) => ServiceTokens::from_secret(issuer, secret),
        ServiceJwt::Ed25519 { private, trusted } => {
            let tokens = ServiceTokens::from_ed25519_pem(issuer, private)?;
            match trusted {
                Some(keys) => tokens.trusting(keys),
                None => Ok(tokens),
            }
        }
    }
}
